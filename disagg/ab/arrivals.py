"""When requests are due: the kinds of arrivals that a workload file can name. Pure."""

from __future__ import annotations

import math
import random
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Ramp(_Strict):
    """A Poisson process whose rate goes in a straight line from `from_per_s` to `to_per_s` over the stream's duration."""

    from_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    to_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _sends_something(self) -> Ramp:
        if self.from_per_s == self.to_per_s == 0:
            raise ValueError("from_per_s or to_per_s must be above 0")
        return self


class Arrivals(_Strict):
    """When requests are due, from `first_s` to the stream's `duration_s`. Exactly one of

    poisson_per_s: RATE                      gaps are exponential
    gamma_per_s: RATE, cv: CV                gaps are gamma-distributed; CV above 1 is burstier than Poisson, below 1 more even
    ramp: {from_per_s: A, to_per_s: B}       Poisson, the rate a straight line
    every_s: GAP, requests: N                N at once (a burst for N above 1), at a steady beat
    """

    poisson_per_s: PositiveFloat | None = None
    gamma_per_s: PositiveFloat | None = None
    cv: Annotated[float, Field(gt=0, le=20)] | None = None
    ramp: Ramp | None = None
    every_s: PositiveFloat | None = None
    requests: PositiveInt = 1
    first_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _exactly_one(self) -> Arrivals:
        if sum(kind is not None for kind in (self.poisson_per_s, self.gamma_per_s, self.ramp, self.every_s)) != 1:
            raise ValueError("exactly one of poisson_per_s, gamma_per_s, ramp and every_s is needed")
        if self.every_s is None and self.requests != 1:
            raise ValueError("requests (how many at once) goes with every_s only")
        if (self.gamma_per_s is None) != (self.cv is None):
            raise ValueError("gamma_per_s and cv (the gaps' standard deviation by their mean) go together")
        return self

    def mean_per_s(self) -> float:
        """Requests per second while the stream sends."""
        if self.ramp is not None:
            return (self.ramp.from_per_s + self.ramp.to_per_s) / 2
        return self.poisson_per_s or self.gamma_per_s or self.requests / (self.every_s or math.inf)

    def faster(self, factor: float) -> Arrivals:
        """The same kind of arrivals, `factor` times as many per second; bursts come more often and stay as large."""
        scaled: dict[str, Any] = {name: getattr(self, name) * factor for name in ("poisson_per_s", "gamma_per_s") if getattr(self, name)}
        if self.ramp is not None:
            scaled["ramp"] = Ramp(from_per_s=self.ramp.from_per_s * factor, to_per_s=self.ramp.to_per_s * factor)
        if self.every_s is not None:
            scaled |= {"every_s": self.every_s / factor, "first_s": self.first_s / factor}
        return self.model_copy(update=scaled)

    def instants_s(self, duration_s: float, rng: random.Random) -> list[float]:
        """Ascending due times in [first_s, duration_s)."""
        if self.ramp is not None:
            return self._ramp_instants_s(self.ramp, duration_s, rng)
        due: list[float] = []
        now = self.first_s + (0.0 if self.every_s is not None else self._gap_s(rng))
        while now < duration_s:
            due.extend([now] * self.requests)
            now += self._gap_s(rng)
        return due

    def _gap_s(self, rng: random.Random) -> float:
        if self.poisson_per_s is not None:
            return rng.expovariate(self.poisson_per_s)
        if self.gamma_per_s is not None and self.cv is not None:
            return rng.gammavariate(1 / self.cv**2, self.cv**2 / self.gamma_per_s)  # mean 1 / rate, standard deviation cv / rate
        return self.every_s or math.inf

    def _ramp_instants_s(self, ramp: Ramp, duration_s: float, rng: random.Random) -> list[float]:
        """By thinning: candidates at the highest rate, each kept with the share that the rate has of it."""
        highest, span_s = max(ramp.from_per_s, ramp.to_per_s), duration_s - self.first_s
        due: list[float] = []
        now = rng.expovariate(highest)
        while now < span_s:
            rate = ramp.from_per_s + (ramp.to_per_s - ramp.from_per_s) * now / span_s
            if rng.random() * highest < rate:
                due.append(self.first_s + now)
            now += rng.expovariate(highest)
        return due
