"""A plan as a topology file: vLLM's arguments for `disagg up`, simulated engines' settings for `disagg sim` and for trying it out. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import yaml

from disagg.plan.candidate import Candidate, PoolPlan
from disagg.plan.planner import Plan
from disagg.plan.question import BLOCK_TOKENS, Question

HUB_NAMES = {
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "opt-13b": "facebook/opt-13b",
    "opt-66b": "facebook/opt-66b",
}
_QUANTIZATION = {"bf16": None, "fp8": "fp8", "int8": "compressed-tensors", "int4": "awq"}
_KV = {"bf16": "auto", "fp8": "fp8", "int8": "int8_per_token_head"}
_CORES = 4  # of one worker
_OF_A_POOL = ("max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size")


def topology_text(plan: Plan, model: str | None = None) -> str:
    """YAML of the chosen plan, with the best plan of the other kind beside it, so that `disagg ab` can compare both.

    model: what the topology loads; None: the hub's usual name of the shape. Without either the engine is `simulated`.
    """
    question = plan.question
    tree = _tree(plan, model or HUB_NAMES.get(question.shape.name))
    said = [
        f"{question.shape.name} on {question.gpus} GPUs, planned for {question.load.trace.name}: {plan.verdict}.",
        "",
        "  disagg check FILE                                 what goes where, and whether it fits",
        "  disagg sim   FILE --set engine.kind=simulated --workload NAME --mode disagg --mode colocated",
        "  disagg up    FILE --address auto --detach         on the cluster",
        "  disagg up    FILE --set engine.kind=simulated --set pools.prefill.gpus=0 ...      without GPUs, each pool with gpus=0",
    ]
    if question.dtype in ("int8", "int4"):
        said += [
            "",
            f"The model must be a checkpoint quantised to {question.dtype}; name it under `model`, and its method under `quantization`.",
        ]
    if question.speculation is not None:
        s = question.speculation
        said += [
            "",
            f"Speculative decoding was assumed ({s.tokens} tokens, {s.acceptance:.0%} accepted): add your engine.args.speculative_config.",
        ]
    if len(question.devices) > 1:
        said += ["", "Unlike GPUs: each pool names its own, and gets hosts of which Ray says that they have such (its accelerator types)."]
    head = "\n".join(f"# {line}".rstrip() for line in said)
    return f"{head}\n{yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=140)}"


def _tree(plan: Plan, model: str | None) -> dict[str, Any]:
    question, chosen = plan.question, plan.chosen.candidate
    sides = [c for c in (plan.disagg.candidate if plan.disagg else None, plan.colocated.candidate) if c is not None]
    is_unlike = len(question.devices) > 1
    pools = {name: _pool(pool, is_real=model is not None, is_unlike=is_unlike) for side in sides for name, pool in side.pools.items()}
    longest = _longest(question, sides)
    on_cpus = any(device.name.endswith("cpu") for device in question.devices)
    tree = {
        "name": _name(question),
        "model": model or question.shape.name,
        "mode": chosen.mode.value,
        "engine": {
            "kind": "vllm" if model else "simulated",
            "args": _args(question, longest) if model else {},
            "simulated": _shared(question, longest),
            **({"profile": question.profile_ref} if question.profile else {}),
        },
        "pools": pools,
        "slo_classes": [c.model_dump(exclude_none=True, exclude_defaults=True) for c in question.load.classes],
    }
    return tree | {"ray": _hosts(question, sides)} if model and not on_cpus else tree


def _name(question: Question) -> str:
    plain = "".join(ch if ch.isalnum() else "-" for ch in f"{question.shape.name}-{question.gpus}gpu".lower()).strip("-")
    return plain[:40]


def _args(question: Question, longest: int) -> dict[str, Any]:
    if question.profile is not None:  # its times hold for the arguments that it was measured with
        return {key: value for key, value in question.profile.args.items() if key not in _OF_A_POOL}
    args: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": longest,
        "block_size": 16,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
    }
    if _QUANTIZATION[question.dtype]:
        args["quantization"] = _QUANTIZATION[question.dtype]
    if question.kv_dtype != "bf16":
        args["kv_cache_dtype"] = _KV[question.kv_dtype]
    return args


def _longest(question: Question, sides: list[Candidate]) -> int:
    """Tokens of the longest request that every worker takes: the model's context, or less where a worker's KV cache holds less."""
    context = question.settings(question.device, 1).max_model_len
    least = min(question.kv_tokens(pool.device, pool.tp) for side in sides for pool in side.pools.values())
    return min(context, max(question.load.longest_tokens, least // BLOCK_TOKENS * BLOCK_TOKENS))


def _shared(question: Question, longest: int) -> dict[str, Any]:
    """Settings that all pools' simulated engines share."""
    settings = question.settings(question.device, 1).model_dump() | {"max_model_len": longest}
    kept = ("shape", "dtype", "kv_dtype", "max_model_len", "speculative_tokens", "speculative_acceptance")
    return {key: settings[key] for key in kept}


def _pool(pool: PoolPlan, *, is_real: bool, is_unlike: bool) -> dict[str, Any]:
    """`is_unlike`: pools run on unlike GPUs, so that each names its own."""
    limits: dict[str, Any] = {"max_num_batched_tokens": pool.chunk, "max_num_seqs": pool.max_seqs}
    if pool.mixed_step_ms is not None:
        limits["mixed_step_ms"] = pool.mixed_step_ms
    simulated = {"gpu": pool.device.name, "tp": pool.tp, **limits}
    if not is_real:
        return {"count": pool.count, "simulated": simulated}
    args = {"tensor_parallel_size": pool.tp, **limits}
    if pool.device.name.endswith("cpu"):
        return {"count": pool.count, "cores": pool.tp, "args": args, "simulated": simulated}
    kind = {"gpu": pool.device.name} if is_unlike else {}
    return {"count": pool.count, "gpus": pool.tp, **kind, "cores": _CORES, "args": args, "simulated": simulated}


def _hosts(question: Question, sides: list[Candidate]) -> dict[str, Any]:
    """Hosts for `disagg check`: as many as the plan fills, with cores for all their workers."""
    per_host = question.gpus_per_host
    hosts = max(_num_hosts(side, per_host) for side in sides)
    return {"hosts": hosts, "gpus_per_host": per_host, "cores_per_host": max(64, _CORES * per_host + 8), "gpu": question.device.name}


def _num_hosts(side: Candidate, per_host: int) -> int:
    """Hosts that a plan fills; one has GPUs of one kind."""
    gpus = Counter[str]()
    for pool in side.pools.values():
        gpus[pool.device.name] += pool.gpus
    return sum(math.ceil(count / per_host) for count in gpus.values())
