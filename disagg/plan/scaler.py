"""How many workers each pool should have now: a forecast of the last minutes, with hysteresis. Pure; somebody else moves the workers.

    work       worker-seconds per second that arrive: prompt tokens x prompt_token_s, output tokens x output_token_s
    forecast   level + trend x horizon (Holt's double exponential smoothing), and `spread` standard deviations of the last minutes on top;
               prompts that wait are added as work to be done within `catch_up_s`
    wanted     workers of a pool = forecast / `target_busy`; both pools share what there is in proportion to it

A worker moves to a pool that has too few of its share by more than half a worker and the dead band (`hysteresis`), once that has held for
`hold_s`, and not within `cooldown_s` of the last move. Prompts that wait pile up within a second, decodes slow down gradually: a move to
prefill for waiting prompts needs no holding. Fleets grow at once and shrink only after `shrink_hold_s`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.errors import ConfigError
from disagg.policy.fleet import FleetObservation, Move
from disagg.types import Role


@dataclass(frozen=True, slots=True)
class ScalerSettings:
    """Seconds, except `target_busy` and `hysteresis` (shares of a worker), `spread` (standard deviations) and `least` (workers of a pool).

    `level_s`, `trend_s`: time constants of the smoothing; `memory_s`: of the spread. `is_elastic`: workers may come and go, too, not only
    change roles.
    """

    prompt_token_s: float
    output_token_s: float
    target_busy: float = 0.7
    horizon_s: float = 10.0
    level_s: float = 20.0
    trend_s: float = 60.0
    memory_s: float = 180.0
    spread: float = 1.0
    catch_up_s: float = 1.0
    hysteresis: float = 0.25
    hold_s: float = 5.0
    cooldown_s: float = 5.0
    shrink_hold_s: float = 120.0
    least: int = 1
    is_elastic: bool = False

    def __post_init__(self) -> None:
        for name in ("prompt_token_s", "output_token_s", "level_s", "trend_s", "memory_s", "catch_up_s"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(key=f"scaler.{name}", value=getattr(self, name), expected="a number above 0")
        for name in ("horizon_s", "spread", "hysteresis", "hold_s", "cooldown_s", "shrink_hold_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(key=f"scaler.{name}", value=getattr(self, name), expected="0 or more")
        if not 0 < self.target_busy <= 1:
            raise ConfigError(key="scaler.target_busy", value=self.target_busy, expected="a share above 0, at most 1")
        if self.least < 1:
            raise ConfigError(key="scaler.least", value=self.least, expected="at least 1: a pool without workers serves nobody")


@dataclass(slots=True)
class Forecast:
    """Holt's smoothing of a rate, seen at intervals; `spread` over the last `memory_s`."""

    level_s: float
    trend_s: float
    memory_s: float
    level: float = 0.0
    trend: float = 0.0
    _seen: deque[tuple[float, float]] = field(default_factory=deque)  # (span, rate)

    def see(self, rate: float, span_s: float) -> None:
        """The rate over the last `span_s` seconds."""
        if not self._seen:
            self.level = rate
        else:
            before = self.level
            keep = math.exp(-span_s / self.level_s)
            self.level = keep * (self.level + self.trend * span_s) + (1 - keep) * rate
            keep = math.exp(-span_s / self.trend_s)
            self.trend = keep * self.trend + (1 - keep) * (self.level - before) / span_s
        self._seen.append((span_s, rate))
        while sum(span for span, _ in self._seen) > self.memory_s and len(self._seen) > 1:
            self._seen.popleft()

    @property
    def deviation(self) -> float:
        """Standard deviation of what was seen."""
        total = sum(span for span, _ in self._seen)
        mean = sum(span * rate for span, rate in self._seen) / total if total else 0.0
        return math.sqrt(sum(span * (rate - mean) ** 2 for span, rate in self._seen) / total) if total else 0.0

    def at(self, horizon_s: float, spread: float) -> float:
        """What to be ready for, `horizon_s` from now; never below 0."""
        return max(0.0, self.level + self.trend * horizon_s) + spread * self.deviation


class Scaler:
    """Owner of the forecasts and of when it moved last. One object per deployment."""

    def __init__(self, settings: ScalerSettings) -> None:
        self.settings = settings
        s = settings
        self._prompts = Forecast(s.level_s, s.trend_s, s.memory_s)
        self._outputs = Forecast(s.level_s, s.trend_s, s.memory_s)
        self._moved_s = -math.inf
        self._since_s: dict[str, float] = {}  # since when a move has been wanted, by what it is

    def wanted(self, observation: FleetObservation) -> tuple[float, float]:
        """Workers that each pool should have, as numbers with a fraction: not bounded by what there is, nor by the least of a pool."""
        s = self.settings
        backlog = observation.waiting_tokens * s.prompt_token_s / s.catch_up_s
        prefill = (self._prompts.at(s.horizon_s, s.spread) + backlog) / s.target_busy
        decode = self._outputs.at(s.horizon_s, s.spread) / s.target_busy
        return prefill, decode

    def on_tick(self, observation: FleetObservation, now_s: float) -> Sequence[Move]:
        """At most one move: workers change one by one, and the next tick sees what it did."""
        if observation.span_s <= 0:
            return ()
        s = self.settings
        self._prompts.see(observation.prompt_tokens * s.prompt_token_s / observation.span_s, observation.span_s)
        self._outputs.see(observation.output_tokens * s.output_token_s / observation.span_s, observation.span_s)
        want_p, want_d = self.wanted(observation)
        asked = self._asked(observation, want_p, want_d)
        self._since_s = {what: self._since_s.get(what, now_s) for what in asked}
        if now_s - self._moved_s < s.cooldown_s or observation.moving:
            return ()
        for what, (move, hold_s) in asked.items():
            if now_s - self._since_s[what] >= hold_s:
                self._moved_s = now_s
                self._since_s = {}
                return (move,)
        return ()

    def _asked(self, seen: FleetObservation, want_p: float, want_d: float) -> dict[str, tuple[Move, float]]:
        """Moves that the numbers ask for now, with how long they must have been asked for; the most urgent first."""
        s, p, d = self.settings, seen.prefill, seen.decode
        said = f"wanted {want_p:.1f} prefill and {want_d:.1f} decode workers of {p} + {d}"
        asked: dict[str, tuple[Move, float]] = {}
        if seen.spare and s.is_elastic:
            for role, want, have in ((Role.PREFILL, want_p, p), (Role.DECODE, want_d, d)):
                if want > have + s.hysteresis:
                    asked[f"grow {role}"] = (Move(None, role, f"{said}: one more {role} worker"), 0.0)
        total = p + d
        share = want_p + want_d
        # Of what there is, in proportion, so that both have as much to spare; and never all of it to one side.
        fair_p = min(total - s.least, max(s.least, total * want_p / share)) if total > 2 * s.least and share > 0 else p
        band = 0.5 + s.hysteresis
        if fair_p - p > band and d > s.least:
            hold_s = 0.0 if seen.waiting_tokens * s.prompt_token_s > s.catch_up_s * p else s.hold_s
            asked["to prefill"] = (Move(Role.DECODE, Role.PREFILL, f"{said}: decode gives one to prefill"), hold_s)
        if p - fair_p > band and p > s.least:
            asked["to decode"] = (Move(Role.PREFILL, Role.DECODE, f"{said}: prefill gives one to decode"), s.hold_s)
        for role, want, have in ((Role.PREFILL, want_p, p), (Role.DECODE, want_d, d)):
            if s.is_elastic and have - 1 >= max(want, s.least) + s.hysteresis and want_p + want_d < total - 1:
                asked[f"shrink {role}"] = (Move(role, None, f"{said}: one {role} worker less"), s.shrink_hold_s)
        return asked
