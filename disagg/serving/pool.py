"""The workers that one gateway knows: who is there, how loaded each is, and what this gateway has promised to its requests."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields

from disagg.config import Topology
from disagg.errors import NoWorkerError
from disagg.policy.router import EVIDENCE_HALF_LIFE_S
from disagg.policy.view import Need, PoolView, WorkerView, need_of
from disagg.serving.signal import Signal
from disagg.serving.worker_rpc_client import RemoteWorker
from disagg.types import EngineState, Mode, ModelInfo, Request, Role, Route, new_id

LEARNING_RATE = 0.1  # weight of the latest prefill in the learned speed, by tokens


@dataclass(slots=True)
class Tally:
    """What one gateway has in flight on one worker; the same names as in WorkerView."""

    prefills: int = 0
    prefill_tokens: int = 0
    outbox_bytes: int = 0
    inbox_bytes: int = 0
    running_requests: int = 0
    reserved_kv_tokens: int = 0
    unseen_kv_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, f.name) == 0 for f in fields(self))


class Member:
    """One life of one worker in the pool: its connection, its tally, its learned speed."""

    def __init__(self, role: Role, worker: RemoteWorker) -> None:
        self.role = role
        self.worker = worker
        self.tally = Tally()
        self.last_used_s = 0.0
        self._seconds = 0.0  # decayed sums of prefills seen; their ratio is the learned speed
        self._tokens = 0.0
        self._learned_s = time.monotonic()
        self._view: WorkerView | None = None

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def is_live(self) -> bool:
        return not self.worker.is_lost

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """A prefill behind `tokens` prompt tokens (its own included) took `seconds`."""
        now_s = time.monotonic()
        kept = (1 - LEARNING_RATE) * math.exp2((self._learned_s - now_s) / EVIDENCE_HALF_LIFE_S)
        self._seconds = kept * self._seconds + seconds
        self._tokens = kept * self._tokens + tokens
        self._learned_s = now_s
        self.touch()

    def touch(self) -> None:
        """The tally changed."""
        self._view = None

    def view(self) -> WorkerView:
        """This member now; made anew only when something changed."""
        state: EngineState = self.worker.state()
        if self._view is None or self._view.state is not state:
            t = self.tally
            self._view = WorkerView(
                name=self.name,
                role=self.role,
                host_id=self.worker.address.host_id,
                state=state,
                prefills=t.prefills,
                prefill_tokens=t.prefill_tokens,
                outbox_bytes=t.outbox_bytes,
                inbox_bytes=t.inbox_bytes,
                running_requests=t.running_requests,
                reserved_kv_tokens=t.reserved_kv_tokens,
                unseen_kv_tokens=t.unseen_kv_tokens,
                prefill_s_per_token=self._seconds / self._tokens if self._tokens else 0.0,
                prefill_tokens_seen=self._tokens,
                prefill_seen_s=self._learned_s,
                last_used_s=self.last_used_s,
            )
        return self._view


class Reservation:
    """What one attempt of one request holds of its two workers. Each share is given back once; `close` gives back the rest.

    reserve -> first_token()  the prefill's place      (p)
            -> arrived()      room in both boxes       (p, d)
            -> decoding()     KV now shows in d's state (stays reserved)
            -> close()        everything, idempotent
    """

    def __init__(self, route: Route, need: Need, source: Member, sink: Member, moves_kv: bool, changes: Signal) -> None:
        now_s = time.monotonic()
        self.route = route
        self.source = source
        self.sink = sink
        self._need = need
        self._changes = changes
        self._tokens_ahead = source.tally.prefill_tokens
        self._started_s = now_s
        self._prefilling = True
        self._in_boxes = moves_kv and source is not sink
        self._unseen = moves_kv
        self._open = True
        self._holds_kv = moves_kv
        source.last_used_s = sink.last_used_s = now_s
        self._book(+1, prefill=True, boxes=self._in_boxes, decode=self._holds_kv, unseen=self._unseen)

    def first_token(self) -> None:
        """The prefill is over: its place is free, and its time teaches the worker's speed. Idempotent."""
        if self._prefilling:
            self._prefilling = False
            self.source.learn_prefill(self._tokens_ahead + self._need.context_tokens, time.monotonic() - self._started_s)
            self._book(-1, prefill=True)

    def arrived(self) -> None:
        """The KV has left the outbox, and the inbox as good as: the engine loads it at its next step. Idempotent."""
        if self._in_boxes:
            self._in_boxes = False
            self._book(-1, boxes=True)

    def decoding(self) -> None:
        """The decode engine holds the KV, so its state shows it. Idempotent."""
        if self._unseen:
            self._unseen = False
            self._book(-1, unseen=True)

    def close(self) -> None:
        """Give back what is still held. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._book(-1, prefill=self._prefilling, boxes=self._in_boxes, decode=self._holds_kv, unseen=self._unseen)
        self._prefilling = self._in_boxes = self._unseen = False

    def _book(self, sign: int, *, prefill: bool = False, boxes: bool = False, decode: bool = False, unseen: bool = False) -> None:
        p, d, need = self.source.tally, self.sink.tally, self._need
        if prefill:
            p.prefills += sign
            p.prefill_tokens += sign * need.context_tokens
        if boxes:
            p.outbox_bytes += sign * need.box_bytes
            d.inbox_bytes += sign * need.box_bytes
        if decode:
            d.running_requests += sign
            d.reserved_kv_tokens += sign * need.kv_tokens
        if unseen:
            d.unseen_kv_tokens += sign * need.kv_tokens
        self.source.touch()
        self.sink.touch()
        if sign < 0:
            self._changes.fire()


class Pool:
    """The members by name. `changes` fires when a member joins, is lost or reports, and when a reservation is given back."""

    def __init__(self, topology: Topology, model: ModelInfo) -> None:
        self.gateway_id = new_id()
        self.changes = Signal()
        self.members: dict[str, Member] = {}
        self._model = model
        self._mode = Mode(topology.mode)
        self._timeout_s = topology.admission.worker_timeout_s
        self._gone: set[Member] = set()  # lost or replaced, with reservations still to come back

    async def join(self, name: str, role: Role, target: str) -> None:
        """Connect to the worker at `target` ("host:port"); it takes requests when this returns.

        A worker of that name that is here already is replaced, and counts as lost. Raises WorkerLostError when the worker does not
        say hello within the topology's `worker_timeout_s`.
        """
        worker = await RemoteWorker.connect(name, target, self.gateway_id, self._timeout_s, self.changes)
        await self.leave(name)
        self.members[name] = Member(Role(role), worker)
        self.changes.fire()

    async def leave(self, name: str) -> None:
        """Let go of a worker; its requests are served again elsewhere. Unknown is fine."""
        member = self.members.pop(name, None)
        if member is not None:
            self._gone = {m for m in self._gone if not m.tally.is_empty} | {member}
            await member.worker.close()

    async def wait_lost(self, name: str) -> None:
        """Returns when the member of that name is lost or has left; at once when there is none."""
        member = self.members.get(name)
        if member is not None:
            await member.worker.wait_lost()

    def view(self, now_s: float) -> PoolView:
        """The live members at the instant `now_s`, which is now."""
        return PoolView(now_s, self._mode, self._model, tuple([m.view() for m in self.members.values() if m.is_live]))

    def reserve(self, route: Route, request: Request) -> Reservation:
        """Book the room that `request` takes on `route`. Raises NoWorkerError when a worker of it has gone meanwhile."""
        source, sink = self.members.get(route.prefill), self.members.get(route.decode)
        if source is None or sink is None:
            raise NoWorkerError(f"{route.prefill} or {route.decode} has left")
        moves_kv = route.is_colocated or request.remaining_tokens > 1
        return Reservation(route, need_of(request, self._model), source, sink, moves_kv, self.changes)

    async def close(self) -> None:
        """Let go of all workers."""
        for name in list(self.members):
            await self.leave(name)

    def assert_empty(self) -> None:
        """No reservation is held, and no call or stream is open. For tests, and for an idle gateway."""
        for member in [*self.members.values(), *self._gone]:
            assert member.tally.is_empty, f"{member.name}: {member.tally}"
            member.worker.assert_empty()
