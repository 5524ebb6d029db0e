"""From a topology's engine arguments to vLLM's: what disagg sets, what it refuses, and the environment of the engine's processes."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from disagg.engine.vllm_channel import ADDRESS_ENV
from disagg.engine.vllm_events import events_config
from disagg.engine.vllm_fingerprint import model_fingerprint
from disagg.errors import ConfigError, nearest

OURS = {
    "model": "the topology's `model`",
    "kv_transfer_config": "disagg's own KV connector",
    "disable_log_stats": "disagg's own statistics",
    "skip_tokenizer_init": "disagg: a worker needs a tokenizer for structured outputs only, and takes one where it finds it",
}
UNSUPPORTED = {  # each splits one engine in a way that a transfer does not know
    "data_parallel_size": "more workers in the pool",
    "pipeline_parallel_size": "tensor_parallel_size",
    "decode_context_parallel_size": "tensor_parallel_size",
    "prefill_context_parallel_size": "tensor_parallel_size",
}
MIXED_STEP_TOKENS, MIXED_STEP_MS = "mixed_step_tokens", "mixed_step_ms"  # arguments that vLLM has not: see vllm_steps.py
CPU_BLOCK_TOKENS = 32  # vLLM's CPU attention wants a multiple of 32; the smallest wastes least in a last block
CPU_MEMORY_SHARE = 0.2  # vLLM's own 0.9 of the host's memory would let one engine start, not several
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def check_names(args: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that vLLM has not (naming the nearest one that it has), or that disagg sets itself."""
    known = {f.name for f in dataclasses.fields(AsyncEngineArgs)} | {MIXED_STEP_TOKENS, MIXED_STEP_MS}
    for name, value in args.items():
        key = f"engine.args.{name}"
        if name == MIXED_STEP_TOKENS and value is not None and not (type(value) is int and value > 0):
            raise ConfigError(key=key, value=value, expected="a positive number of tokens")
        if name == MIXED_STEP_MS and value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            raise ConfigError(key=key, value=value, expected="a positive number of milliseconds")
        if name in OURS:
            raise ConfigError(f"{key} is set by {OURS[name]}", key=key, value=value, expected="no value")
        if name not in known:
            hint = nearest(name, known) if len(nearest(name, known)) < 80 else "a field of vllm.AsyncEngineArgs"
            raise ConfigError(f"{key}: vLLM has no such argument; {hint}", key=key, value=value, expected=hint)
        if name in UNSUPPORTED and value not in (None, 1):
            raise ConfigError(f"{key}: KV hand-over does not support {value}; use {UNSUPPORTED[name]}", key=key, value=value, expected="1")


def engine_args(model: str, args: Mapping[str, Any]) -> AsyncEngineArgs:
    """vLLM's arguments for `model`, from any AsyncEngineArgs fields in `args`. Raises ConfigError naming a wrong one.

    `mixed_step_tokens` and `mixed_step_ms` are ours: the connector is told of them.
    """
    check_names(args)
    chosen: dict[str, Any] = {**_defaults(args), **args}
    mixed = {name: chosen.pop(name, None) for name in (MIXED_STEP_TOKENS, MIXED_STEP_MS)}
    if chosen.get("kv_events_config") is None and chosen.get("enable_prefix_caching") is not False:
        chosen["kv_events_config"] = events_config()
    chosen["logits_processors"] = [*(args.get("logits_processors") or ()), *_own_logits_processors()]
    try:
        return AsyncEngineArgs(
            model=model,
            skip_tokenizer_init=not _has_tokenizer(model, args),
            disable_log_stats=chosen.get("otlp_traces_endpoint") is None,  # vLLM's spans are made of its statistics
            kv_transfer_config=KVTransferConfig(
                kv_connector="DisaggConnector",
                kv_connector_module_path="disagg.engine.vllm_connector",
                kv_role="kv_both",
                kv_load_failure_policy="fail",
                kv_connector_extra_config={"model_fingerprint": model_fingerprint(model, args), **mixed},
            ),
            **chosen,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses the engine's arguments: {error}", key="engine.args", value=dict(args)) from error


def _defaults(args: Mapping[str, Any]) -> dict[str, Any]:
    is_one_rank = args.get("tensor_parallel_size", 1) == 1
    # "mp" said aloud: inside a Ray actor vLLM would place its ranks as Ray workers of its own.
    executor: dict[str, Any] = {} if is_one_rank else {"distributed_executor_backend": "mp"}
    if not current_platform.is_cpu():
        return executor
    if is_one_rank:
        # vLLM's choice on CPUs, a second process, waits for each step by spinning on the core that computes it.
        executor = {"distributed_executor_backend": IN_PROCESS}
    return {"block_size": CPU_BLOCK_TOKENS, "gpu_memory_utilization": CPU_MEMORY_SHARE, **executor}


def _own_logits_processors() -> list[str]:
    """Ours is made for the V1 runner; the V2 runner, GPUs' default, takes another kind of class."""
    if current_platform.is_cpu() or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return ["disagg.engine.vllm_bad_words:ContinuedBadWords", "disagg.engine.vllm_penalties:ContinuedPenalties"]
    return []


def _has_tokenizer(model: str, args: Mapping[str, Any]) -> bool:
    """True when grammars can be built: a model folder may come without a tokenizer, what is on a hub has one."""
    path = Path(str(args.get("tokenizer") or model))
    names = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
    return not path.is_dir() or any((path / name).is_file() for name in names)


def engine_environment(address: str, cores: Sequence[int] | None, args: Mapping[str, Any]) -> dict[str, str]:
    """Environment of the engine's processes. `address`: the worker's channel. `cores`: where a CPU engine computes (None: anywhere)."""
    env = {ADDRESS_ENV: address, "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}
    if not current_platform.is_cpu():
        return env
    env["VLLM_USE_V2_MODEL_RUNNER"] = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")
    if args.get("enforce_eager"):
        # What vLLM still compiles then, a helper of logprobs, costs a start more seconds than it ever saves.
        env["TORCHDYNAMO_DISABLE"] = os.environ.get("TORCHDYNAMO_DISABLE", "1")
    if cores:
        ranks = int(args.get("tensor_parallel_size", 1))
        shares = [cores[i::ranks] for i in range(ranks)] if len(cores) >= ranks else [cores] * ranks
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
        # The in-process executor does not bind by itself.
        env["OMP_NUM_THREADS"] = str(len(shares[0]))
        if ranks == 1:
            env["OMP_PLACES"] = "{" + ",".join(map(str, cores)) + "}"
            env["OMP_PROC_BIND"] = "true"
    return env
