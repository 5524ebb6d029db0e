"""What a class asks for, as numbers that can be compared, and how bad a latency is against its target. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.config import SloClass

# A class without a target still wants to be quick. Against these, and never as a reason to refuse.
SOFT_TTFT_S = 2.0
SOFT_TPOT_S = 0.1
NO_TTFT_DEADLINE_S = 60.0  # in the order of the queue
Spread = tuple[tuple[float, float], ...]  # likely lengths of an answer: tokens after the first, and the share of answers that have so many
KNEE = 0.88  # of a TPOT's target: from here on it is at risk of missing that
FIRST_KNEE = 0.8  # of a TTFT's: it hangs on one wait and one prompt, where a TPOT is a mean of many steps
STEEP = 125.0
EASE = 0.5
MISSED = 1.25  # beyond it the target is lost, and a little more delay hardly matters


@dataclass(frozen=True, slots=True)
class Targets:
    """One class. `ttft_s`/`tpot_s`: None where it has none; `ttft_scale_s`/`tpot_scale_s`: what a latency is held against in any case.

    `may_reject`: refuse rather than miss.
    """

    name: str
    ttft_s: float | None
    tpot_s: float | None
    priority: int
    may_reject: bool
    ttft_scale_s: float = field(init=False)
    tpot_scale_s: float = field(init=False)

    @classmethod
    def of(cls, slo: SloClass) -> Targets:
        """Targets of a topology's class."""
        return cls(slo.name, slo.ttft_s, slo.tpot_s, slo.priority, slo.if_missed == "reject")

    @classmethod
    def none(cls, name: str) -> Targets:
        """A class that asks nothing."""
        return cls(name, None, None, 0, may_reject=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ttft_scale_s", self.ttft_s if self.ttft_s is not None else SOFT_TTFT_S)
        object.__setattr__(self, "tpot_scale_s", self.tpot_s if self.tpot_s is not None else SOFT_TPOT_S)


def slope(share: float) -> float:
    """Growth of a TTFT's regret around `share`, smoothed: for many requests whose shares lie about it."""
    return EASE + STEEP * (MISSED - FIRST_KNEE) * min(1.0, max(0.0, (share - 0.5) / 0.5))


def late_regret(tpot_s: float, delay_s: float, spread: Spread, target_s: float) -> float:
    """Expected regret of a TPOT of `tpot_s` against `target_s` that a delay before the second token adds, over the answer's likely lengths.

    The mean length would hide it: among answers of some hundred tokens, a second is lost on those that have ten.
    """
    delayed = 0.0
    if (tpot_s + delay_s / spread[0][0]) / target_s <= KNEE:  # the shortest answer's, so all are on the gentle part
        for tokens, likely in spread:
            delayed += likely * (EASE * ((tpot_s + delay_s / tokens) / target_s))
        return delayed - regret(tpot_s / target_s)
    for tokens, likely in spread:  # regret() written out: this is where a decision spends its time
        share = (tpot_s + delay_s / tokens) / target_s
        bad = EASE * share
        if share > KNEE:
            bad += STEEP * ((share if share < MISSED else MISSED) - KNEE) ** 2
        delayed += likely * bad
    return delayed - regret(tpot_s / target_s)


def regret(share: float, ease: float = EASE, knee: float = KNEE) -> float:
    """How bad a latency of `share` times its target is: gentle below, steep around the target, flat again once it is lost.

    Gentle (`ease` per target), so that among pairs that all meet the target the quicker one wins; steep, so that a pair which might miss
    loses to any that does not; flat, so that a request that cannot be saved costs no other one its target.
    """
    if share <= knee:
        return ease * share
    if share >= MISSED:
        return ease * share + STEEP * (MISSED - knee) ** 2
    return ease * share + STEEP * (share - knee) ** 2
