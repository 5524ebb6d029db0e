"""What an engine step costs, in a form that can be fitted: linear in what the step does. Pure.

    seconds = base + over x max(0, tokens - ridge) + token x prompt tokens + pair x pairs + decode x decodes + context x context tokens

`tokens` are all tokens computed in the step, of prompts and decodes. Up to `ridge` tokens the step is bound by reading the weights, and a
token is nearly free; above it each costs arithmetic (`over_s`). `pairs`: (query, key) pairs of prompt attention. A decoding request costs
more than a prompt's token: it is a sequence of its own, whose next token is projected and sampled. Coefficients are >= 0. It is the form of
a measured worker, too (perf/profile.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.perf.profile import Profile, StepTimes
from disagg.perf.roofline import PrefillChunk


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients in seconds; `ridge_tokens` in tokens."""

    base_s: float
    over_s: float
    token_s: float
    pair_s: float
    decode_s: float
    context_s: float
    ridge_tokens: float = 0.0

    def step_s(self, prefill_tokens: float, pairs: float, decodes: float, context_tokens: float) -> float:
        """Seconds of one step."""
        over = prefill_tokens + decodes - self.ridge_tokens
        return (
            self.base_s
            + (self.over_s * over if over > 0 else 0.0)  # max() would be a third of this function's time
            + self.token_s * prefill_tokens
            + self.pair_s * pairs
            + self.decode_s * decodes
            + self.context_s * context_tokens
        )

    def alone_s(self, context_tokens: float) -> float:
        """A step of one decoding request with nobody beside it: no TPOT is shorter."""
        return self.step_s(0, 0, 1, context_tokens)

    def prefill_s(self, tokens: float, cached: float, chunk: float, decodes: float = 0.0, context_tokens: float = 0.0) -> float:
        """Seconds to compute `tokens` prompt tokens after `cached` ones, in steps of `chunk` prompt tokens beside a decoding batch."""
        if tokens <= 0:
            return 0.0
        beside = decodes - self.ridge_tokens
        if tokens <= chunk:
            steps, over = 1.0, max(0.0, tokens + beside)
        else:
            whole, rest = divmod(tokens, chunk)
            steps = whole + (rest > 0)
            over = whole * (chunk + beside) if chunk + beside > 0 else 0.0
            if rest and rest + beside > 0:
                over += rest + beside
        return (
            steps * (self.base_s + self.decode_s * decodes + self.context_s * context_tokens)
            + self.over_s * over
            + self.token_s * tokens
            + self.pair_s * tokens * (cached + (tokens + 1) / 2)
        )

    def blended(self, other: StepCost, share: float) -> StepCost:
        """`share` of `other` and the rest of this one. The ridge stays."""
        keep = 1.0 - share
        return StepCost(
            keep * self.base_s + share * other.base_s,
            keep * self.over_s + share * other.over_s,
            keep * self.token_s + share * other.token_s,
            keep * self.pair_s + share * other.pair_s,
            keep * self.decode_s + share * other.decode_s,
            keep * self.context_s + share * other.context_s,
            self.ridge_tokens,
        )

    def scaled(self, factor: float) -> StepCost:
        """All times multiplied."""
        return StepCost(
            self.base_s * factor,
            self.over_s * factor,
            self.token_s * factor,
            self.pair_s * factor,
            self.decode_s * factor,
            self.context_s * factor,
            self.ridge_tokens,
        )


# Nobody said what the device is: 20 ms steps and 1,000 prompt tokens/s, near one CPU core with a small model. Corrected within a few steps.
GENERIC = StepCost(base_s=18e-3, over_s=0.0, token_s=0.8e-3, pair_s=0.1e-6, decode_s=0.8e-3, context_s=1e-6)


def from_profile(profile: Profile, speed: float = 1.0) -> StepCost:
    """A measured worker's step. `speed`: as in from_roofline."""
    s = profile.steps
    cost = StepCost(s.base_s, s.over_s, s.prompt_token_s, s.pair_s, s.decode_s, s.context_s, s.ridge_tokens)
    return cost.scaled(1.0 / speed if speed else 0.0)


_TYPICAL_BATCH = 64
_MANY = 1 << 20


def from_roofline(model: StepTimes, speed: float = 1.0) -> StepCost:
    """The roofline's step, read off at a few points. `speed`: simulated seconds per real second (0: no time at all).

    Of a dense model within 2 % where reading the weights or arithmetic alone bounds the step; around the ridge up to 13 % below. With
    speculative decoding a decode step's time counts for the base, which is less than a prompt's.
    """
    if speed == 0:
        return StepCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    pair = (_chunk_s(model, 1, _MANY) - _chunk_s(model, 1, 0)) / _MANY
    per_token = (_chunk_s(model, 2 * _MANY, 0, pair) - _chunk_s(model, _MANY, 0, pair)) / _MANY  # above the ridge
    one, nine = _chunk_s(model, 1, 0, pair), _chunk_s(model, 9, 0, pair)
    free = max(0.0, nine - one) / 8  # below it
    flat = one - free
    if per_token <= free:  # experts that few tokens leave unread: no ridge, the step just starts higher
        flat, free = max(0.0, _chunk_s(model, _TYPICAL_BATCH, 0, pair) - _TYPICAL_BATCH * per_token), per_token
    alone = model.step_s((), 1, 0)
    if alone < 0.9 * one:
        flat = max(0.0, alone - free)
    over = per_token - free
    # Where the two lines meet: flat + free n = above + per_token n.
    above = _chunk_s(model, _MANY, 0, pair) - per_token * _MANY
    ridge = max(0.0, (flat - above) / over) if over > 0 else 0.0
    row = max(0.0, model.step_s((), 9, 0) - model.step_s((), 1, 0) - (nine - one)) / 8  # of a sequence, beyond its token
    context = (model.step_s((), 1, _MANY) - model.step_s((), 1, 0)) / _MANY
    return StepCost(flat, over, free, pair, free + row, context, ridge).scaled(1.0 / speed)


def _chunk_s(model: StepTimes, tokens: int, cached: int, pair_s: float = 0.0) -> float:
    """Seconds of a step with one prompt chunk, less its attention at `pair_s`."""
    chunk = PrefillChunk(tokens, cached)
    return model.step_s([chunk]) - pair_s * chunk.attention_pairs
