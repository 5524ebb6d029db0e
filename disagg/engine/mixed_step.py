"""How a step in which somebody decodes is shared between long prompts and short ones. Pure; for vLLM's engine and the simulated one."""

from __future__ import annotations

from collections.abc import Iterable

LEAST_SHARE = 4  # long prompts get one token of so many in any case, so that they come to their end


def long_prompt_tokens(limit: int, decodes: int, prompts: Iterable[int] = ()) -> int:
    """Tokens that one prompt may take of a step of `limit` tokens, of which decoding requests take `decodes`; at least 1.

    Half of what the decodes leave: the other half is there for prompts that come meanwhile, and while none comes the step is the shorter
    for those who decode. Long ones share their half, or two of them would have it all. `prompts`: tokens that each of them still wants
    computed, under way or waiting.
    """
    half = max((limit - decodes) // 2, limit // LEAST_SHARE, 1)
    return max(half // max(1, sum([tokens > half for tokens in prompts])), 1)


def room_for_short(limit: int, decodes: int) -> int:
    """The most that long prompts leave to short ones in such a step; 0 or less: nothing."""
    return limit - decodes - long_prompt_tokens(limit, decodes)
