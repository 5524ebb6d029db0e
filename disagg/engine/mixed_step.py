"""How large a step is in which somebody decodes, and how long prompts and short ones share it. Pure.

For vLLM's engine, the simulated one, and the router, which reckons with what they do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disagg.policy.step_cost import StepCost

LEAST_SHARE = 4  # long prompts get one token of so many in any case, so that they come to their end
STRETCH = 0.25  # prompts may make a step of decodes so much longer in any case, for the same reason
UNBOUNDED_TOKENS = 1 << 30


def tokens_in_time(cost: StepCost, step_s: float, decodes: int, context_tokens: float, cached: float = 0.0) -> int:
    """Tokens of a step of at most `step_s` seconds, those of its `decodes` included, which read `context_tokens`.

    `cached`: tokens of the prompt that were computed before; attention to them is what makes a long prompt's later tokens dearer.
    """
    alone_s = cost.step_s(0, 0, decodes, context_tokens)
    left_s = max(step_s - alone_s, STRETCH * alone_s)
    price_s = cost.token_s + cost.pair_s * cached
    free = max(0.0, cost.ridge_tokens - decodes)  # tokens that cost no `over_s`
    tokens = _affordable(left_s, price_s, cost.pair_s)
    if tokens > free and cost.over_s:
        tokens = max(free, _affordable(left_s + cost.over_s * free, price_s + cost.over_s, cost.pair_s))
    return decodes + (int(tokens) if tokens < UNBOUNDED_TOKENS else UNBOUNDED_TOKENS)


def _affordable(left_s: float, price_s: float, pair_s: float) -> float:
    """n with price n + pair n^2 / 2 = left."""
    if not pair_s:
        return left_s / price_s if price_s > 0 else math.inf
    return (math.sqrt(price_s * price_s + 2 * pair_s * left_s) - price_s) / pair_s


def half_for_long(limit: int, decodes: int) -> int:
    """Tokens that long prompts have at least of a step of `limit` tokens, of which decoding requests take `decodes`; 1 or more.

    Half of what the decodes leave: the other half is there for short prompts. The router reckons with this, as if short ones always came.
    """
    return max((limit - decodes) // 2, limit // LEAST_SHARE, 1)


def long_prompt_tokens(limit: int, decodes: int, prompts: Iterable[int]) -> int:
    """Tokens that one prompt may take of such a step; at least 1. `prompts`: tokens that each of them still wants, under way or waiting.

    Long prompts, which take several steps in any case, have what the short ones leave; several share it, or the first would have it all.
    While there is none, first come, first served: prompts that share a step all end with the last of them.
    """
    left, long, short_tokens = limit - decodes, 0, 0
    for tokens in prompts:
        if tokens > left:
            long += 1
        else:
            short_tokens += tokens
    if not long:
        return max(left, 1)
    return max(max(left - short_tokens, half_for_long(limit, decodes)) // long, 1)


def room_for_short(limit: int, decodes: int) -> int:
    """The most that long prompts leave to short ones in such a step; 0 or less: nothing."""
    return limit - decodes - half_for_long(limit, decodes)
