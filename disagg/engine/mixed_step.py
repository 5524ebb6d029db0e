"""How a step in which somebody decodes is shared between a long prompt and short ones. Pure; for vLLM's engine and the simulated one."""

from __future__ import annotations

LEAST_SHARE = 4  # a long prompt gets one token of so many in any case, so that it comes to its end


def long_prompt_tokens(limit: int, decodes: int) -> int:
    """Tokens that one prompt may take of a step of `limit` tokens, of which decoding requests take `decodes`; at least 1.

    Half of what the decodes leave: the other half is there for prompts that come meanwhile, and while none comes the step is the shorter
    for those who decode.
    """
    return max((limit - decodes) // 2, limit // LEAST_SHARE, 1)


def room_for_short(limit: int, decodes: int) -> int:
    """The most that a long prompt leaves to short ones in such a step; 0 or less: nothing."""
    return limit - decodes - long_prompt_tokens(limit, decodes)
