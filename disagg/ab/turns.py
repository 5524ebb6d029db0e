"""One turn: one arm's part of one round at one rate. Sent, watched, written down, and sent again when a worker died meanwhile."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, replace
from typing import Any

from disagg.ab.arms import Arm, ArmSource, Serving, most_workers
from disagg.ab.external import KEY_VARIABLE, ExternalClient
from disagg.ab.journal import Journal, Turn, TurnKey, restore
from disagg.ab.load import DEFAULT_VOCAB, LoadReport, OpenLoop, StreamingClient
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.rows import Row, RowFile, move_rows
from disagg.ab.trace_plan import AnyWorkload, check_workload, plan_warm_up
from disagg.ab.workload import PlannedRequest
from disagg.client import AsyncClient
from disagg.config import SloClass
from disagg.errors import ConfigError, DisaggError

MOST_TRIES = 3  # of a turn in which workers died
_MOST_WARM_UP_COPIES = 8
_EXTERNAL_COPIES = 2  # of each warm-up request; how many workers an external arm has is not known


class Turns:
    """Measures turns and keeps their rows, here and in the folder. Turns that a run before has measured are not measured again.

    `repeated`: turns that did not count. `cold`: by arm, which warm-up request brought no answer and why. Use it in a `with`.
    """

    def __init__(
        self,
        source: ArmSource,
        out: OutFolder,
        progress: RunProgress,
        classes: Sequence[SloClass],
        *,
        vocab_size: int | None,
        resume: bool = False,
    ) -> None:
        self._source = source
        self._out = out
        self._progress = progress
        self._classes = classes
        self._vocab_size = vocab_size
        self.warm_up_requests: dict[str, int] = {}
        self.cold: dict[str, str] = {}
        self._models: dict[str, str] = {}  # that external servers named
        self._warm: set[tuple[str, int, tuple[tuple[str, str], ...]]] = set()
        self.journal = Journal(out.rounds)
        self.rows: dict[TurnKey, list[Row]] = {}
        for row in restore(self.journal, out.requests, out.void) if resume else []:
            self.rows.setdefault((row.arm, row.rate_rps or 0.0, row.round), []).append(row)
        self._file = RowFile(out.requests, resume=resume)

    @property
    def repeated(self) -> list[Turn]:
        """Turns that do not count, and why."""
        return [turn for turn in self.journal.turns if not turn.counts]

    def is_measured(self, key: TurnKey) -> bool:
        """Whether the turn is behind us."""
        return key in self.rows

    def report(self, key: TurnKey) -> dict[str, float]:
        """How well the sender kept its schedule in that turn (LoadReport's fields)."""
        return self.journal.counted[key].sender

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    async def measure(
        self, arm: Arm, workload: AnyWorkload, rate_rps: float, planned: Sequence[PlannedRequest], place: int, title: str
    ) -> None:
        """One turn, up to MOST_TRIES times when workers die in it; the last try counts whatever happened.

        Raises what bringing an arm up raises, ConfigError when the workload does not fit the model, DisaggError when a warm-up request
        fails and no worker died of it, DiskError.
        """
        key = (arm.name, rate_rps, planned[0].round + 1)
        for attempt in range(1, MOST_TRIES + 1):
            serving = await self._source.use(arm.name)
            before = dict(await self._source.lives(arm.name))
            preempted_before = await self._source.preemptions(arm.name)
            async with AsyncExitStack() as stack:
                try:
                    client = await self._warm_client(arm, workload, serving, before, stack)
                except DisaggError:
                    reason = _died(before, await self._source.lives(arm.name))
                    if reason is None or attempt == MOST_TRIES:
                        raise
                    self._progress.say(f"{title}: {reason} before it was warm; once more")
                    continue
                rows, report = await self._send(client, arm, workload, rate_rps, planned, title)
            reason = _died(before, await self._source.lives(arm.name))
            preempted = await self._source.preemptions(arm.name)
            known = None if preempted is None or preempted_before is None else max(0, preempted - preempted_before)
            counts = reason is None or attempt == MOST_TRIES
            turn = Turn(*key, place=place, requests=len(rows), sender=asdict(report), trouble=reason, counts=counts, preemptions=known)
            self.journal.append(turn)
            if counts:
                self.rows[key] = rows
                return
            self._set_aside(key)
            self._progress.say(f"{title}: {reason}; measured again")

    async def _warm_client(
        self, arm: Arm, workload: AnyWorkload, serving: Serving, lives: Mapping[str, str], stack: AsyncExitStack
    ) -> StreamingClient:
        """A client of the arm, whose workers have seen every length since they were started."""
        client = await self._client(arm, serving, workload, stack)
        life = (arm.name, serving.life, tuple(sorted(lives.items())))
        if life not in self._warm:
            await self._warm_up(client, arm, workload)
            self._warm.add(life)
        return client

    async def _send(
        self, client: StreamingClient, arm: Arm, workload: AnyWorkload, rate_rps: float, planned: Sequence[PlannedRequest], title: str
    ) -> tuple[list[Row], LoadReport]:
        self._progress.begin_turn(title, len(planned))
        load = OpenLoop(client, planned, arm=arm.name, vocab_size=self.vocabulary, timeout_s=workload.timeout_s, rate_rps=rate_rps)
        rows = []
        async with aclosing(load.rows()) as ended:
            async for row in ended:
                self._file.append(row)
                rows.append(row)
                self._progress.request_ended()
        self._progress.end_turn()
        return rows, load.report

    async def _client(self, arm: Arm, serving: Serving, workload: AnyWorkload, stack: AsyncExitStack) -> StreamingClient:
        """A client of the arm, which was asked what it serves. Raises ConfigError when the workload does not fit that."""
        if arm.url is not None:
            external = await stack.enter_async_context(_external_client(serving.endpoint))
            try:
                check_workload(workload, self._classes, await external.max_model_len())
            except ConfigError:
                if arm.name not in self._models:  # else it answered before, and what it fails to answer now is counted
                    raise
            external.model = self._models.setdefault(arm.name, external.model)
            return external
        client = await stack.enter_async_context(AsyncClient(serving.endpoint))
        info = await client.model_info()
        check_workload(workload, self._classes, info.max_model_len)
        self._vocab_size = self._vocab_size or info.vocab_size
        return client

    @property
    def vocabulary(self) -> int:
        """One for all arms, so that they get the same prompts."""
        return self._vocab_size or DEFAULT_VOCAB

    async def _warm_up(self, client: StreamingClient, arm: Arm, workload: AnyWorkload) -> None:
        """Every length once on every worker (at most 8 at a time), unmeasured.

        Raises DisaggError when a request of ours fails. What is refused, or fails in an external server, is noted: the measured requests
        will be counted as they end.
        """
        copies = _EXTERNAL_COPIES if arm.topology is None else min(_MOST_WARM_UP_COPIES, most_workers(arm.topology))
        planned = plan_warm_up(workload, self._classes, workload.seed, copies)
        self.warm_up_requests[arm.name] = self.warm_up_requests.get(arm.name, 0) + len(planned)
        self._progress.say(f"warming up {arm.name}: {len(planned)} requests")
        for _, alike in itertools.groupby(planned, key=lambda r: r.due_s):
            kind = [request.at_once() for request in alike]
            load = OpenLoop(client, kind, arm=arm.name, vocab_size=self.vocabulary, timeout_s=workload.timeout_s)
            async with aclosing(load.rows()) as rows:
                lost = [row async for row in rows if not row.is_whole]
            for row in sorted(lost, key=lambda row: row.outcome == "rejected")[:1]:
                what = f"a warm-up request of {row.input_tokens} tokens in, {row.max_output_tokens} out"
                said = f"{what} {'was refused' if row.outcome == 'rejected' else 'failed'}: {row.error}: {row.message}"
                if arm.url is None and row.outcome != "rejected":
                    raise DisaggError(f"arm {arm.name}: {said}")
                self._progress.say(f"{arm.name}: {said}")
                self.cold.setdefault(arm.name, said)
            if lost and arm.url is not None:  # a server that answers nothing would be waited for once a length
                return

    def leave_out(self, key: TurnKey, reason: str) -> None:
        """A turn that was measured counts no more: the other arms have none of that round. Raises DiskError."""
        self.journal.append(replace(self.journal.counted[key], trouble=reason, counts=False))
        self._set_aside(key)
        del self.rows[key]

    def _set_aside(self, key: TurnKey) -> None:
        """The rows of a turn that does not count leave requests.jsonl."""
        self._file.close()
        move_rows(self._out.requests, self._out.void, lambda row: (row.arm, row.rate_rps, row.round) == key)
        self._file = RowFile(self._out.requests, resume=True)


async def check_external(arms: Sequence[Arm], workload: AnyWorkload, classes: Sequence[SloClass]) -> None:
    """That every external arm is a server with OpenAI's API whose context takes the workload. Raises ConfigError."""
    for arm in arms:
        if arm.url is not None:
            async with _external_client(arm.url) as client:
                check_workload(workload, classes, await client.max_model_len())


def _external_client(url: str) -> ExternalClient:
    return ExternalClient(url, token=os.environ.get(KEY_VARIABLE))


def _died(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """Who was lost or started anew between two looks at an arm."""
    lost = sorted(name for name, life in before.items() if after.get(name) != life)
    return f"{', '.join(lost)} died" if lost else None


def sender_faults(turns: Mapping[TurnKey, Turn]) -> list[str]:
    """One sentence per counted turn in which the sender itself fell behind."""
    return [
        f"round {turn.round}, {turn.arm}, {turn.rate_rps:g}/s: {fault}"
        for turn in turns.values()
        if (fault := load_report(turn.sender).fault) is not None
    ]


def load_report(sender: Mapping[str, Any]) -> LoadReport:
    """A turn's sender figures as they were reported."""
    return LoadReport(**{**sender, "sent": int(sender["sent"])})
