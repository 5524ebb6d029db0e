"""A dispatcher with made-up workers, and requests for it: what the router's unit tests are written with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from disagg.config import AdmissionSettings, SloClass
from disagg.policy.decision import Grant, Refusal
from disagg.policy.dispatch import Dispatcher
from disagg.policy.step_cost import StepCost
from disagg.types import EngineState, Mode, ModelInfo, Request, Role, Sampling, StepRecord

MODEL = ModelInfo("m", max_model_len=100_000, vocab_size=1000, kv_bytes_per_token=100)
STATE = EngineState(
    "e", free_kv_tokens=100_000, total_kv_tokens=100_000, outbox_free_bytes=10**7, outbox_total_bytes=10**7, inbox_free_bytes=10**7,
    inbox_total_bytes=10**7, max_step_tokens=512, max_running_requests=64,
)  # fmt: skip
# 1 ms per prompt token above 32; a decode step is 20 ms, and 0.5 ms more for each request.
COST = StepCost(base_s=20e-3, over_s=0.5e-3, token_s=0.5e-3, pair_s=0.0, decode_s=0.5e-3, context_s=1e-8, ridge_tokens=32)
CHAT = SloClass(name="chat", ttft_ms=1000, tpot_ms=100, if_missed="reject")
BATCH = SloClass(name="batch", priority=-1)
FREE = SloClass(name="free")


class Rig:
    """Drives a dispatcher by hand. `now_s` is moved by the test."""

    def __init__(
        self,
        mode: Mode = Mode.DISAGG,
        prefill: int = 1,
        decode: int = 1,
        classes: Sequence[SloClass] = (FREE, CHAT, BATCH),
        cost: StepCost = COST,
        state: EngineState = STATE,
        pass_tokens: int = 0,
        **admission: Any,
    ) -> None:
        self.now_s = 1000.0
        settings, priors = AdmissionSettings(**admission), dict.fromkeys(Role, cost)
        self.dispatcher = Dispatcher(mode, MODEL, classes, settings, priors, dict.fromkeys(Role, pass_tokens))
        self._numbers = itertools.count()
        for index in range(prefill):
            self.join(f"p{index}", Role.COLOCATED if mode is Mode.COLOCATED else Role.PREFILL, state)
        for index in range(decode):
            self.join(f"d{index}", Role.COLOCATED if mode is Mode.COLOCATED else Role.DECODE, state)

    def join(self, name: str, role: Role, state: EngineState = STATE, host: str = "h") -> None:
        self.dispatcher.join(name, role, host, state, self.now_s)

    def request(self, prompt: int = 100, max_tokens: int = 50, slo_class: str = "free", **fields: Any) -> Request:
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=fields.pop("ignore_eos", True))
        number = next(self._numbers)
        return Request(f"r{number}", tuple(range(prompt)), sampling, slo_class, **{"arrival_s": self.now_s, **fields})

    def submit(self, prompt: int = 100, max_tokens: int = 50, slo_class: str = "free", **fields: Any) -> int:
        """Queue a request; its key."""
        avoid, attempt = fields.pop("avoid", ()), fields.pop("attempt", 0)
        return self.dispatcher.submit(self.request(prompt, max_tokens, slo_class, **fields), self.now_s, avoid, attempt)

    def decide(self) -> tuple[dict[int, Grant], dict[int, Refusal]]:
        """Grants and refusals by key."""
        decisions = self.dispatcher.decide(self.now_s)
        return {g.key: g for g in decisions.grants}, {r.key: r for r in decisions.refusals}

    def grant(self, prompt: int = 100, max_tokens: int = 50, slo_class: str = "free", **fields: Any) -> Grant:
        """Submit a request that is granted at once."""
        key = self.submit(prompt, max_tokens, slo_class, **fields)
        grants, refusals = self.decide()
        assert key in grants, refusals.get(key, "it waits")
        return grants[key]

    def pair(self, prompt: int = 100, max_tokens: int = 50, slo_class: str = "free", **fields: Any) -> tuple[str, str]:
        """The route of such a request."""
        route = self.grant(prompt, max_tokens, slo_class, **fields).route
        return route.prefill, route.decode

    def decoding(self, grant: Grant) -> Grant:
        """The granted request's first and second tokens have come."""
        d = self.dispatcher
        d.first_token(grant.key, self.now_s)
        d.arrived(grant.key, self.now_s)
        d.decoding(grant.key, self.now_s)
        return grant

    def end(self, key: int, *, is_whole: bool = True) -> None:
        self.dispatcher.end(key, self.now_s, is_whole=is_whole)

    def steps(self, name: str, count: int, factor: float = 1.0, batch: int = 8, state: EngineState = STATE, prompt: int = 0) -> None:
        """The worker reports `count` steps of a decoding batch (beside `prompt` prompt tokens), `factor` times as long as right."""
        first = int(self.now_s * 1e6)
        pairs = prompt * (prompt + 1) / 2
        seconds = COST.step_s(prompt, pairs, batch, batch * 100) * factor
        steps = tuple(StepRecord(first + i, seconds, prompt, pairs, batch, batch * 100) for i in range(count))
        fields = {name: getattr(state, name) for name in EngineState.__dataclass_fields__}
        self.dispatcher.report(name, EngineState(**{**fields, "steps": steps}), self.now_s)
