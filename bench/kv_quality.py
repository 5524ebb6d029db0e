"""What quantised frames (`kv.wire_dtype`) do to answers, on real engines: SmolLM2-135M, 200 prompts of English text.

    python -m bench.kv_quality [--prompts 200] [--tokens 192] [--json]

Each prompt is prefilled once for each form and decoded on another engine from that form's KV; neither engine caches prefixes. Against the
same prompt with bfloat16 frames:

top1            share of prompts whose likeliest token after the first one is the same
kl              mean and largest KL divergence (nats) of the distribution there, over the 100 likeliest tokens and all others as one
same4           share of prompts whose first four decoded tokens are the same (greedy)
bytes           payload of a transfer, as a share of bfloat16's

`repeat` is bfloat16 once more: what the engines themselves vary by. The text is that of Python's own manual (pydoc_data.topics).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from disagg.types import Sampling, Token

FORMS = {"bfloat16": "blocks", "repeat": "blocks", "int8": "blocks/int8", "fp8": "blocks/fp8"}
TOP = 100
DECODED = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = asyncio.run(measure(given.prompts, given.tokens))
    if given.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("{form:8} top1 {top1:6.1%}  kl {kl:.2e} (max {kl_max:.2e})  same4 {same4:6.1%}  bytes {bytes:.3f}".format(**row))


async def measure(num_prompts: int, num_tokens: int) -> list[dict[str, Any]]:
    from bench.engine_pair import engine_pair

    sampling = Sampling(max_tokens=1 + DECODED, temperature=0.0, ignore_eos=True, logprobs=TOP)
    found: dict[str, list[list[Token]]] = {name: [] for name in FORMS}
    moved = dict.fromkeys(FORMS, 0)
    async with engine_pair({"enable_prefix_caching": False, "max_logprobs": TOP}) as pair:
        for prompt in prompts(num_prompts, num_tokens):
            for name, form in FORMS.items():
                before = pair.d.inbox.counters.bytes
                found[name].append((await pair.ask(prompt, sampling, form)).tokens)
                moved[name] += pair.d.inbox.counters.bytes - before
    return [compare(name, found[name], found["bfloat16"], moved[name] / moved["bfloat16"]) for name in FORMS if name != "bfloat16"]


def prompts(count: int, num_tokens: int) -> list[tuple[int, ...]]:
    """Consecutive pieces of the text, a gap apart."""
    import pydoc_data.topics

    from disagg.front.text import load_tokenizer
    from disagg.models import get_model

    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = load_tokenizer(get_model("smollm2-135m")).encode(text[: 40 * count * num_tokens])
    step = len(ids) // count
    assert step >= num_tokens, f"{len(ids)} tokens of text for {count} prompts of {num_tokens}"
    return [tuple(ids[i * step : i * step + num_tokens]) for i in range(count)]


def compare(name: str, got: Sequence[list[Token]], want: Sequence[list[Token]], share: float) -> dict[str, Any]:
    """One row of the result."""
    pairs = list(zip(got, want, strict=True))
    kls = [divergence(b[0], a[0]) for a, b in pairs]
    return {
        "form": name,
        "prompts": len(pairs),
        "top1": statistics.mean(a[0].token_id == b[0].token_id for a, b in pairs),
        "kl": statistics.mean(kls),
        "kl_max": max(kls),
        "same4": statistics.mean([t.token_id for t in a] == [t.token_id for t in b] for a, b in pairs),
        "bytes": share,
    }


def divergence(right: Token, other: Token) -> float:
    """KL(right || other) over the tokens that both list among their likeliest, and the rest as one outcome: a lower bound."""
    theirs = {t.token_id: t.logprob for t in other.top}
    shared = [(math.exp(t.logprob), math.exp(theirs[t.token_id])) for t in right.top if t.token_id in theirs]
    rest = tuple(max(1e-12, 1.0 - sum(side)) for side in zip(*shared, strict=True))
    return sum(p * math.log(p / q) for p, q in [*shared, (rest[0], rest[1])])


if __name__ == "__main__":
    main()
