"""One colocated engine and its clients, with no router between them. Pure.

    open_loop     requests come at given instants, whatever the engine does
    closed_loop   so many clients, each of which sends its next request when its last one has ended: what `--max-concurrency` of
                  `vllm bench serve` and `--concurrency` of aiperf do. All start at once, so the first prompts queue behind each other.

The engine is the simulator's, with the live engine's scheduler and step times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from disagg.config import SimulatedSettings
from disagg.sim.agenda import Agenda
from disagg.sim.engine import Leg, SimEngine


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request. Seconds; `tpot_s` is None for one output token."""

    sent_s: float
    ttft_s: float
    tpot_s: float | None
    end_s: float


@dataclass(slots=True, eq=False)
class _Client:
    """Waits for one answer; then tells."""

    load: _Load
    sent_s: float
    output_tokens: int
    then: Callable[[], None]
    first_s: float = 0.0

    def loaded(self, leg: Leg) -> None:
        """Nothing is loaded from outside here."""

    def computed(self, leg: Leg) -> None:
        """A chunk of the prompt."""

    def first_token(self, leg: Leg) -> None:
        self.first_s = self.load.heard_s

    def ended(self, leg: Leg) -> None:
        end_s, gaps = self.load.heard_s, self.output_tokens - 1
        tpot_s = (end_s - self.first_s) / gaps if gaps else None
        self.load.served.append(Served(self.sent_s, self.first_s - self.sent_s, tpot_s, end_s))
        self.load.agenda.at(end_s, self.then)


class _Load:
    def __init__(self, settings: SimulatedSettings, overhead_s: float) -> None:
        self.agenda = Agenda()
        self.engine = SimEngine(self.agenda, "engine", settings, keep_tokens=False)
        self.served: list[Served] = []
        self._way_s = overhead_s / 2

    @property
    def heard_s(self) -> float:
        """When a client hears what the engine says now."""
        return self.agenda.now_s + self._way_s

    def send(self, input_tokens: int, output_tokens: int, then: Callable[[], None]) -> None:
        client = _Client(self, self.agenda.now_s, output_tokens, then)
        leg = Leg(num_tokens=input_tokens, owner=client, remaining=output_tokens)
        self.agenda.after(self._way_s, lambda: self.engine.submit(leg))

    def finish(self) -> list[Served]:
        self.agenda.run()
        self.engine.assert_empty()
        return self.served


def open_loop(settings: SimulatedSettings, arrivals: Iterable[tuple[float, int, int]], overhead_s: float = 0.0) -> list[Served]:
    """Answers in the order in which they ended.

    arrivals: (sent at second, input tokens, output tokens). overhead_s: what a request spends between client and engine, both ways.
    """
    load = _Load(settings, overhead_s)
    for at_s, inputs, outputs in arrivals:
        load.agenda.at(at_s, lambda i=inputs, o=outputs: load.send(i, o, lambda: None))  # type: ignore[misc]
    return load.finish()


def closed_loop(
    settings: SimulatedSettings,
    input_tokens: int,
    output_tokens: int,
    concurrency: int,
    num_requests: int,
    *,
    spread: float = 0.0,
    overhead_s: float = 0.0,
    seed: int = 0,
) -> list[Served]:
    """Answers in the order in which they ended; `num_requests` in all.

    `spread`: lengths vary evenly by up to this share of themselves. With none, requests that were prefilled together end together for
    ever, and each prompt waits for all others of its group: no real client is so regular.
    """
    load = _Load(settings, overhead_s)
    rng = random.Random(seed)
    unsent = num_requests

    def send_next() -> None:
        nonlocal unsent
        if unsent == 0:
            return
        unsent -= 1
        inputs, outputs = (max(1, round(n * (1 + rng.uniform(-spread, spread)))) for n in (input_tokens, output_tokens))
        load.send(inputs, outputs, send_next)

    for _ in range(min(concurrency, num_requests)):
        send_next()
    return load.finish()
