"""Workload files: streams of requests, strict, and the exact requests of each round that follow from one and a seed.

A workload is open-loop: requests are due at fixed instants whatever the system does. Everything about a request (due time, lengths, prompt)
is a function of (workload, seed, round, stream, index), so both arms of a comparison get the same requests, and no round or
warm-up repeats a prompt of another. Commented example: bench/workloads/cpu-interference.yaml.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from disagg.ab.arrivals import Arrivals, PositiveFloat, PositiveInt
from disagg.config import SloClass, validated
from disagg.errors import ConfigError, nearest

SHIPPED = Path(__file__).parent / "workloads"  # in a clone a link to bench/workloads, in an installed package a copy
MAX_REQUESTS = 1_000_000
WARM_UP = -1  # the "round" of warm-up requests


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LogNormal(_Strict):
    """exp(normal(ln median, sigma)), clipped to [1, max]."""

    median: PositiveFloat
    sigma: Annotated[float, Field(ge=0, le=5)]
    max: PositiveInt


class Lengths(_Strict):
    """A number of tokens: a plain integer in the file, or one of `fixed`, `uniform: [low, high]` (both included), `lognormal`."""

    fixed: PositiveInt | None = None
    uniform: tuple[PositiveInt, PositiveInt] | None = None
    lognormal: LogNormal | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_integer(cls, value: Any) -> Any:
        return {"fixed": value} if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _exactly_one(self) -> Lengths:
        if sum(kind is not None for kind in (self.fixed, self.uniform, self.lognormal)) != 1:
            raise ValueError("an integer, or exactly one of fixed, uniform and lognormal is needed")
        if self.uniform is not None and self.uniform[0] > self.uniform[1]:
            raise ValueError(f"uniform: low {self.uniform[0]} is above high {self.uniform[1]}")
        return self

    @property
    def largest(self) -> int:
        """The longest that can be drawn."""
        if self.lognormal is not None:
            return self.lognormal.max
        return self.uniform[1] if self.uniform is not None else self.fixed or 0

    @property
    def mean(self) -> float:
        """The mean, of a lognormal one without its limit."""
        if self.lognormal is not None:
            return self.lognormal.median * math.exp(self.lognormal.sigma**2 / 2)
        return sum(self.uniform) / 2 if self.uniform is not None else float(self.fixed or 0)

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.lognormal is not None:
            drawn = round(rng.lognormvariate(math.log(self.lognormal.median), self.lognormal.sigma))
            return min(max(1, drawn), self.lognormal.max)
        return rng.randint(*self.uniform) if self.uniform is not None else self.fixed or 0


class Sessions(_Strict):
    """Conversations of several turns: each arrival of the stream starts one, and its turns follow `gap_s` apart, open-loop as well.

    A turn's prompt is the one before, as many made-up tokens as its answer had, and `input_tokens` new ones: a prefix cache can find all of
    the prompt before. Turns that would be due after the stream's duration are sent all the same.
    """

    turns: Lengths
    gap_s: PositiveFloat


class Cancellations(_Strict):
    """Clients that go away: `share` of the requests is cancelled once `after_tokens` output tokens have come."""

    share: Annotated[float, Field(gt=0, le=1)]
    after_tokens: Lengths


class Stream(_Strict):
    """Requests of one kind. `slo_class` is a class of the topology (absent: its first); several streams are a mix of classes.

    Prompts are random token ids, unique per request, so that a prefix cache helps nobody; `shared_prefix_tokens` of each prompt
    are the same within a round. `ignore_eos` makes every answer exactly `output_tokens` long.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,40}$")]
    slo_class: str | None = None
    arrivals: Arrivals
    duration_s: PositiveFloat | None = None  # absent: the workload's
    input_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_tokens: Annotated[int, Field(ge=0)] = 0
    sessions: Sessions | None = None
    cancel: Cancellations | None = None
    ignore_eos: bool = True
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0

    @property
    def longest_input_tokens(self) -> int:
        """The longest prompt that can be drawn: a session's last one holds all turns before it."""
        turns = self.sessions.turns.largest if self.sessions is not None else 1
        return turns * self.input_tokens.largest + (turns - 1) * self.output_tokens.largest

    @property
    def mean_turns(self) -> float:
        """Requests per arrival."""
        return self.sessions.turns.mean if self.sessions is not None else 1.0


class Workload(_Strict):
    """A workload. One round sends every stream once; `timeout_s` bounds each request, so that every one ends."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    description: str = ""
    duration_s: PositiveFloat
    rounds: Annotated[int, Field(ge=1, le=100)] = 2
    timeout_s: PositiveFloat = 120.0
    seed: int = 0
    streams: Annotated[tuple[Stream, ...], Field(min_length=1)]

    @field_validator("streams")
    @classmethod
    def _streams_are_distinct(cls, value: tuple[Stream, ...]) -> tuple[Stream, ...]:
        names = [s.name for s in value]
        if len(set(names)) < len(names):
            raise ValueError(f"two streams of one name in {names}")
        return value

    def duration_of_s(self, stream: Stream) -> float:
        """How long `stream` sends."""
        return stream.duration_s or self.duration_s


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a round, before it is sent. `due_s`: seconds after the round's start. `index`: its place in the round, from 0.

    `session`: requests of one session have prompts that begin alike. `cancel_after_tokens`: where its client goes away; None: never.
    """

    round: int
    index: int
    stream: str
    slo_class: str
    due_s: float
    input_tokens: int
    output_tokens: int
    shared_prefix_tokens: int
    ignore_eos: bool
    temperature: float
    seed: str
    session: int | None = None
    cancel_after_tokens: int | None = None

    def at_once(self) -> PlannedRequest:
        """The same request, due at the start."""
        return replace(self, due_s=0.0)

    def prompt_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Its token ids, uniform over the vocabulary's upper part: the first ids are control tokens in most vocabularies."""
        ids = range(min(256, vocab_size // 2), vocab_size)
        shared = min(self.shared_prefix_tokens, self.input_tokens)
        prefix = random.Random(f"{self.seed}/{self.round}/{self.stream}/prefix")
        whose = self.index if self.session is None else f"session/{self.session}"
        own = random.Random(f"{self.seed}/{self.round}/{self.stream}/{whose}")  # fewer draws of one seed are the beginning of more
        return (*prefix.choices(ids, k=shared), *own.choices(ids, k=self.input_tokens - shared))


def plan_round(workload: Workload, classes: Sequence[SloClass], seed: int, round_: int) -> tuple[PlannedRequest, ...]:
    """The requests of one round in the order of their due times. Raises ConfigError when a round has none."""
    drawn = [r for s in workload.streams for r in _stream_requests(workload, s, classes, seed, round_)]
    if not drawn:
        raise ConfigError(
            f"duration_s: {workload.name} sends no request in round {round_ + 1} (seed {seed}); make it longer or the rate higher",
            key="duration_s",
            value=workload.duration_s,
        )
    return _numbered(drawn)


def plan_warm_up(workload: Workload, classes: Sequence[SloClass], seed: int, copies: int) -> tuple[PlannedRequest, ...]:
    """Short rehearsal: the shortest, the median and the longest request of each stream's first round, `copies` of each.

    Requests of one kind share a due time; kinds go one after another. `copies` should be the number of workers of a pool, so that each
    sees each length. Prompts differ from those of every round.
    """
    chosen: list[PlannedRequest] = []
    for stream in workload.streams:
        lengths = sorted((r.input_tokens, r.output_tokens) for r in _stream_requests(workload, stream, classes, seed, 0))
        if not lengths:
            lengths = [(stream.longest_input_tokens, stream.output_tokens.largest)]
        for given, wanted in dict.fromkeys((lengths[0], lengths[len(lengths) // 2], lengths[-1])):
            first = len(chosen)
            chosen.extend(_planned(stream, classes, seed, WARM_UP, float(first), given, wanted) for _ in range(copies))
    return _numbered(chosen)


def _stream_requests(workload: Workload, stream: Stream, classes: Sequence[SloClass], seed: int, round_: int) -> list[PlannedRequest]:
    rng = random.Random(f"{seed}/{round_}/{stream.name}")
    due = stream.arrivals.instants_s(workload.duration_of_s(stream), rng)
    if stream.sessions is None:
        drawn = [_planned(stream, classes, seed, round_, d, stream.input_tokens.draw(rng), stream.output_tokens.draw(rng)) for d in due]
    else:
        drawn = [r for i, d in enumerate(due) for r in _session(stream, stream.sessions, classes, seed, round_, i, d, rng)]
    if stream.cancel is None:
        return drawn
    leaving = random.Random(f"{seed}/{round_}/{stream.name}/cancel")
    return [replace(r, cancel_after_tokens=_leaves_after(stream.cancel, r, leaving)) for r in drawn]


def _session(
    stream: Stream,
    sessions: Sessions,
    classes: Sequence[SloClass],
    seed: int,
    round_: int,
    number: int,
    begin_s: float,
    rng: random.Random,
) -> Iterable[PlannedRequest]:
    """The turns of one session."""
    history = 0
    for turn in range(sessions.turns.draw(rng)):
        given, wanted = stream.input_tokens.draw(rng), stream.output_tokens.draw(rng)
        planned = _planned(stream, classes, seed, round_, begin_s + turn * sessions.gap_s, history + given, wanted)
        yield replace(planned, session=number)
        history += given + wanted


def _leaves_after(cancel: Cancellations, request: PlannedRequest, rng: random.Random) -> int | None:
    leaves, after = rng.random() < cancel.share, cancel.after_tokens.draw(rng)  # both drawn always: one share does not shift the lengths
    return after if leaves and after < request.output_tokens else None


def _planned(stream: Stream, classes: Sequence[SloClass], seed: int, round_: int, due_s: float, given: int, wanted: int) -> PlannedRequest:
    return PlannedRequest(
        round=round_,
        index=0,
        stream=stream.name,
        slo_class=stream.slo_class or classes[0].name,
        due_s=round(due_s, 6),
        input_tokens=given,
        output_tokens=wanted,
        shared_prefix_tokens=stream.shared_prefix_tokens,
        ignore_eos=stream.ignore_eos,
        temperature=stream.temperature,
        seed=str(seed),
    )


def _numbered(requests: Iterable[PlannedRequest]) -> tuple[PlannedRequest, ...]:
    ordered = sorted(requests, key=lambda r: (r.due_s, r.stream))
    return tuple(replace(r, index=i) for i, r in enumerate(ordered))


def check_workload(workload: Workload, classes: Sequence[SloClass], max_model_len: int | None) -> None:
    """That every stream can be served: its class is known, its longest request fits the context. Raises ConfigError.

    `max_model_len`: context in tokens, None when it is not known yet.
    """
    for i, stream in enumerate(workload.streams):
        names = [c.name for c in classes]
        if stream.slo_class is not None and stream.slo_class not in names:
            expected = f"a class of the topology: {nearest(stream.slo_class, names)}"
            raise ConfigError(key=f"streams.{i}.slo_class", value=stream.slo_class, expected=expected)
        longest, answer = stream.longest_input_tokens, stream.output_tokens.largest
        if max_model_len is not None and longest + answer > max_model_len:
            over_prompt = longest >= max_model_len
            field, value = ("input_tokens", longest) if over_prompt or longest >= answer else ("output_tokens", answer)
            room = max_model_len - (longest + answer - value)
            expected = f"at most {room} tokens: {longest} in and {answer} out do not fit the model's context of {max_model_len}"
            raise ConfigError(key=f"streams.{i}.{field}", value=value, expected=expected)
    for i, stream in enumerate(workload.streams):
        rate = stream.arrivals.mean_per_s() * stream.mean_turns
        if rate * workload.duration_of_s(stream) > MAX_REQUESTS:
            expected = f"a rate and duration that give at most {MAX_REQUESTS:,} requests a round"
            raise ConfigError(key=f"streams.{i}.arrivals", value=f"{rate:g} requests/s", expected=expected)


def mean_rate_rps(workload: Workload) -> float:
    """Mean requests per second over the workload's duration, all streams together."""
    sent = sum(s.arrivals.mean_per_s() * s.mean_turns * max(0.0, workload.duration_of_s(s) - s.arrivals.first_s) for s in workload.streams)
    return sent / workload.duration_s


def faster(workload: Workload, factor: float) -> Workload:
    """The same streams, each with `factor` times its rate, over the same time."""
    streams = tuple(s.model_copy(update={"arrivals": s.arrivals.faster(factor)}) for s in workload.streams)
    return workload.model_copy(update={"streams": streams})


def load_workload(name_or_path: str | Path) -> Workload:
    """A shipped workload by name (`demo`), or a file. Raises ConfigError that names the key and what would be right."""
    file = _find(str(name_or_path))
    try:
        raw = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}", key=str(file), expected="a YAML mapping") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", key=str(file), expected="a readable workload file") from error
    if not isinstance(raw, dict):
        raise ConfigError(key=str(file), value=raw, expected="a mapping with at least `name`, `duration_s` and `streams`")
    return validated(Workload, raw, str(file))


def shipped_workloads() -> list[str]:
    """Names of the workloads that come with disagg."""
    return sorted(p.stem for p in SHIPPED.glob("*.yaml"))


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.exists():
        if not path.exists():
            raise ConfigError(f"workload file {path} does not exist", key="workload", value=name_or_path, expected="a YAML file")
        return path
    shipped = SHIPPED / f"{name_or_path}.yaml"
    if not shipped.is_file():
        expected = f"a YAML file or a shipped workload: {nearest(name_or_path, shipped_workloads())}"
        raise ConfigError(key="workload", value=name_or_path, expected=expected)
    return shipped
