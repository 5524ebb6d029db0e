"""A closed loop on one colocated engine: so many clients, each of which sends its next request when its last one has ended. Pure.

What `vllm bench serve --max-concurrency` and aiperf's `--concurrency` do. All clients start at once, so the first prompts queue behind each
other; later ones come as answers end. The engine is the simulator's, and nothing stands between it and the clients.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from disagg.config import SimulatedSettings
from disagg.sim.agenda import Agenda
from disagg.sim.engine import Leg, SimEngine


@dataclass(frozen=True, slots=True)
class Served:
    """One request of the loop, in the order in which they ended. Seconds."""

    sent_s: float
    ttft_s: float
    tpot_s: float
    end_s: float


class ClosedLoop:
    """`concurrency` clients send `num_requests` requests in all.

    Lengths are `input_tokens` and `output_tokens`, each varied evenly by up to `spread` of itself (0: all equal). `overhead_s`: what a
    request spends between client and engine before its first token, both ways together.
    """

    def __init__(
        self,
        settings: SimulatedSettings,
        input_tokens: int,
        output_tokens: int,
        concurrency: int,
        num_requests: int,
        *,
        spread: float = 0.0,
        overhead_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._lengths = (input_tokens, output_tokens)
        self._spread = spread
        self._overhead_s = overhead_s
        self._unsent = num_requests
        self._concurrency = min(concurrency, num_requests)
        self._random = random.Random(seed)
        self._agenda = Agenda()
        self._engine = SimEngine(self._agenda, "closed-loop", settings, keep_tokens=False)
        self._sent_s: dict[int, tuple[float, float]] = {}  # by leg: sent, first token
        self._output: dict[int, int] = {}
        self.served: list[Served] = []

    def run(self) -> list[Served]:
        """Until every request has been answered."""
        for _ in range(self._concurrency):
            self._send()
        self._agenda.run()
        self._engine.assert_empty()
        return self.served

    @property
    def preemptions(self) -> int:
        return self._engine.scheduler.preemptions

    def _send(self) -> None:
        if self._unsent == 0:
            return
        self._unsent -= 1
        inputs, outputs = (max(1, round(n * (1 + self._random.uniform(-self._spread, self._spread)))) for n in self._lengths)
        sent_s = self._agenda.now_s
        leg = Leg(num_tokens=inputs, owner=self, remaining=outputs)
        self._sent_s[id(leg)] = (sent_s, 0.0)
        self._output[id(leg)] = outputs
        self._agenda.after(self._overhead_s / 2, lambda: self._engine.submit(leg))

    # ---- what the engine tells (engine.LegOwner)

    def loaded(self, leg: Leg) -> None:
        """Nothing is loaded from outside here."""

    def computed(self, leg: Leg) -> None:
        """A chunk of the prompt."""

    def first_token(self, leg: Leg) -> None:
        sent_s, _ = self._sent_s[id(leg)]
        self._sent_s[id(leg)] = (sent_s, self._agenda.now_s + self._overhead_s / 2)

    def ended(self, leg: Leg) -> None:
        sent_s, first_s = self._sent_s.pop(id(leg))
        outputs = self._output.pop(id(leg))
        end_s = self._agenda.now_s + self._overhead_s / 2
        tpot_s = (end_s - first_s) / (outputs - 1) if outputs > 1 else 0.0
        self.served.append(Served(sent_s, first_s - sent_s, tpot_s, end_s))
        self._send()
