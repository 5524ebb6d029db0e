"""What quantised frames (`kv.wire_dtype`) do to answers, on real engines: SmolLM2-135M, 200 prompts of English text.

    python -m bench.kv_quality [--prompts 200] [--tokens 192] [--without-engine] [--json]

Each prompt is staged once in each form and decoded on another engine from that form's KV, of which that engine's prefix cache never has
anything; the prefill engine has the prompt in its own. Against the same prompt with unquantised frames (bfloat16; float32 on CPUs that are
slow in bfloat16):

top1            share of prompts whose likeliest token after the first one is the same
kl              mean and largest KL divergence (nats) of the distribution there, over the 100 likeliest tokens and all others as one
same4           share of prompts whose first four decoded tokens are the same (greedy)
bytes           payload of a transfer, as a share of what unquantised frames move

`--without-engine`: the same model, prompts and quantisers in transformers, weights in float32 and KV rounded to bfloat16 first: whole
distributions instead of the likeliest, one decoded token, and both ways of grouping scales, by token and head (form tokens) and by block of
32 tokens and head (form blocks). It needs no vLLM and no quiet machine.

`repeat` is the unquantised form once more: what the engines themselves vary by. The text is Python's own manual (pydoc_data.topics).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from disagg.types import Sampling, Token, new_id

FORMS = {"stored": "blocks", "repeat": "blocks", "int8": "blocks/int8", "fp8": "blocks/fp8"}
TOP = 100
DECODED = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--without-engine", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = in_transformers(given.prompts, given.tokens) if given.without_engine else asyncio.run(measure(given.prompts, given.tokens))
    if given.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()))


async def measure(num_prompts: int, num_tokens: int) -> list[dict[str, Any]]:
    from bench.engine_pair import engine_pair

    sampling = Sampling(max_tokens=1 + DECODED, temperature=0.0, ignore_eos=True, logprobs=TOP)
    found: dict[str, list[list[Token]]] = {name: [] for name in FORMS}
    moved = dict.fromkeys(FORMS, 0)
    async with engine_pair({"max_logprobs": TOP}) as pair:
        for number, prompt in enumerate(prompts(num_prompts, num_tokens), 1):
            await pair.ask(prompt, replace(sampling, max_tokens=2), decode_salt=new_id())  # from here on the prefill engine has it cached
            for name, form in FORMS.items():
                before = pair.d.inbox.counters.bytes
                found[name].append((await pair.ask(prompt, sampling, form, decode_salt=new_id())).tokens)
                moved[name] += pair.d.inbox.counters.bytes - before
            if number % 10 == 0:
                print(f"{number} of {num_prompts} prompts", file=sys.stderr, flush=True)
    return [compare(name, found[name], found["stored"], moved[name] / moved["stored"]) for name in FORMS if name != "stored"]


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


def in_transformers(num_prompts: int, num_tokens: int) -> list[dict[str, Any]]:
    """One row for each dtype and grouping of scales."""
    import torch
    from transformers import AutoModelForCausalLM

    from disagg.models import get_model

    model = AutoModelForCausalLM.from_pretrained(get_model("smollm2-135m"), torch_dtype=torch.float32)
    found: dict[str, list[tuple[bool, float]]] = {f"{dtype} by {unit}": [] for dtype in ("int8", "fp8") for unit in ("token", "block")}
    with torch.inference_mode():
        for prompt in prompts(num_prompts, num_tokens):
            first = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            token = first.logits[:, -1:].argmax(-1)
            cached = [(layer.keys.bfloat16(), layer.values.bfloat16()) for layer in first.past_key_values.layers]
            right = _next_logits(model, cached, token)
            for name, row in found.items():
                dtype, _, unit = name.partition(" by ")
                other = _next_logits(model, [tuple(_round_trip(part, dtype, unit) for part in layer) for layer in cached], token)
                kl = torch.nn.functional.kl_div(other, right, log_target=True, reduction="sum")
                row.append((bool(other.argmax() == right.argmax()), float(kl)))
    return [
        {"form": name, "prompts": len(row), "top1": statistics.mean(same for same, _ in row), "kl": statistics.mean(kl for _, kl in row)}
        | {"kl_median": statistics.median(kl for _, kl in row), "kl_max": max(kl for _, kl in row)}
        for name, row in found.items()
    ]


def _next_logits(model: Any, cached: Sequence[Any], token: Any) -> Any:
    """Log-probabilities [vocabulary] of the token after `token`, on top of KV [1, heads, tokens, head_dim] of each layer."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, (keys, values) in enumerate(cached):
        cache.update(keys.float(), values.float(), index)
    return model(token, past_key_values=cache, use_cache=True).logits[0, -1].log_softmax(-1)


def _round_trip(numbers: Any, dtype: str, unit: str) -> Any:
    """bfloat16 [1, heads, tokens, head_dim] after quantising and back."""
    import torch

    from disagg.kv.tensors.quantise import dequantise, quantise

    if unit == "token":
        return dequantise(*quantise(numbers, dtype), dtype, numbers.dtype)
    whole = [part.flatten(2) for part in numbers.split(32, dim=2)]
    back = [dequantise(*quantise(part, dtype), dtype, numbers.dtype) for part in whole]
    return torch.cat([part.unflatten(2, (-1, numbers.shape[3])) for part in back], 2)


def divergence(right: Token, other: Token) -> float:
    """KL(right || other) over the tokens that both list among their likeliest, and the rest as one outcome: a lower bound."""
    theirs = {t.token_id: t.logprob for t in other.top}
    shared = [(math.exp(t.logprob), math.exp(theirs[t.token_id])) for t in right.top if t.token_id in theirs]
    rest = tuple(max(1e-12, 1.0 - sum(side)) for side in zip(*shared, strict=True))
    return sum(p * math.log(p / q) for p, q in [*shared, (rest[0], rest[1])])


if __name__ == "__main__":
    main()
