"""What follows from SimulatedSettings before any engine runs: layout, cache size, model facts, and which requests it can take. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from disagg.config import Pools, PoolSettings, SimulatedSettings, Topology
from disagg.errors import ConfigError, InvalidRequestError
from disagg.kv.form import NUMBER_BYTES
from disagg.kv.layout import KvLayout, Packing
from disagg.perf.hardware import find_device
from disagg.perf.memory import placement_memory
from disagg.perf.model_config import load_shape
from disagg.perf.profile import Profile, load_profile
from disagg.types import ModelInfo, Request


def simulated_layout(settings: SimulatedSettings) -> KvLayout:
    """The layout of an engine with these settings: `tp` ranks, each with an equal part of each token's bytes. Raises ConfigError.

    Where a token's bytes divide into the shape's kv heads it is token-addressable (simulated_kv.py), else opaque.
    """
    if settings.kv_bytes_per_token % settings.tp:
        raise ConfigError(
            key="simulated.kv_bytes_per_token", value=settings.kv_bytes_per_token, expected=f"a multiple of tp ({settings.tp})"
        )
    if settings.eos_token_id >= settings.vocab_size:
        expected = f"an id below vocab_size ({settings.vocab_size})"
        raise ConfigError(key="simulated.eos_token_id", value=settings.eos_token_id, expected=expected)
    opaque = KvLayout(
        model=f"simulated:{load_shape(settings.shape).name}:{settings.vocab_size}",
        backend="simulated",
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        num_layers=1,
        block_bytes=settings.block_tokens * settings.kv_bytes_per_token // settings.tp,
        num_ranks=settings.tp,
    )
    heads = load_shape(settings.shape).num_kv_heads
    dtype = f"simulated-{settings.dtype}"
    head_dim, rest = divmod(settings.kv_bytes_per_token, 2 * heads * NUMBER_BYTES[dtype])
    if rest or (heads % settings.tp and settings.tp % heads):
        return opaque
    layout = replace(opaque, dtype=dtype, kv_heads=heads, head_dim=head_dim, packing=Packing.TOKENS)
    return replace(layout, block_bytes=settings.block_tokens * settings.kv_bytes_per_token // layout.num_shards)


def kv_cache_tokens(settings: SimulatedSettings) -> int:
    """Tokens of KV of one engine: as set, as profiled, or what the devices hold beside the weights.

    Raises ConfigError when they hold too few.
    """
    if settings.kv_cache_tokens is not None:
        if settings.kv_cache_tokens < settings.block_tokens:
            expected = f"at least one block ({settings.block_tokens} tokens)"
            raise ConfigError(key="simulated.kv_cache_tokens", value=settings.kv_cache_tokens, expected=expected)
        return settings.kv_cache_tokens
    if settings.profile is not None:
        return load_profile(settings.profile).kv_cache_tokens
    shape, device = load_shape(settings.shape), find_device(settings.gpu)
    report = placement_memory(shape, device, settings.tp, settings.dtype, min_kv_tokens=settings.block_tokens, kv_dtype=settings.kv_dtype)
    if not report.fits:
        wanted = f"tp {report.needed_tp}" if report.needed_tp else "a larger device"
        message = (
            f"simulated.tp: {shape.name} in {settings.dtype} needs {report.weights_bytes / 1e9:.0f} GB of weights on each of "
            f"{settings.tp} {device.name}, which have {report.budget_bytes / 1e9:.0f} GB; {wanted} would fit"
        )
        raise ConfigError(message, key="simulated.tp", value=settings.tp, expected=wanted)
    return report.kv_tokens


# What only a model that computes logits can honour.
_LOGIT_FIELDS = ("logit_bias", "bad_words", "allowed_token_ids", "structure", "prompt_logprobs", "logprob_token_ids")


def simulated_model_info(settings: SimulatedSettings, name: str) -> ModelInfo:
    """What a gateway must know of a simulated model to check requests."""
    return ModelInfo(
        name=name,
        max_model_len=min(settings.max_model_len, kv_cache_tokens(settings) // settings.block_tokens * settings.block_tokens),
        vocab_size=settings.vocab_size,
        kv_bytes_per_token=settings.kv_bytes_per_token,
        eos_token_ids=(settings.eos_token_id,),
    )


def check_request(settings: SimulatedSettings, request: Request, max_context_tokens: int, *, is_prefill: bool = False) -> None:
    """Raises InvalidRequestError for what an engine with room for `max_context_tokens` cannot run. `is_prefill`: it ends with one token."""
    context = (*request.prompt_token_ids, *request.prior_output)
    if not request.prompt_token_ids:
        raise InvalidRequestError(field="prompt", value=(), expected="at least one token")
    if request.remaining_tokens < 1:
        expected = f"more than the {len(request.prior_output)} tokens that the client has"
        raise InvalidRequestError(field="max_tokens", value=request.sampling.max_tokens, expected=expected)
    if min(context) < 0 or max(context) >= settings.vocab_size:
        bad = next(t for t in context if not 0 <= t < settings.vocab_size)
        raise InvalidRequestError(field="prompt_token_ids", value=bad, expected=f"ids from 0 to {settings.vocab_size - 1}")
    for field in _LOGIT_FIELDS:
        value = getattr(request.sampling, field)
        if value not in (None, ()):
            raise InvalidRequestError(
                f"{field}: a simulated engine has no logits to shape; expected no value", field=field, value=value, expected="no value"
            )
    if is_prefill and len(context) > max_context_tokens:
        expected = f"at most {max_context_tokens} tokens, the KV cache of the engine"
        raise InvalidRequestError(field="prompt", value=f"{len(context)} tokens", expected=expected)
    total, most = request.num_prompt_tokens + request.sampling.max_tokens, settings.max_model_len if is_prefill else max_context_tokens
    if total > most:
        expected = f"at most {most} tokens of prompt and answer together"
        raise InvalidRequestError(
            field="max_tokens", value=f"{request.num_prompt_tokens} + {request.sampling.max_tokens}", expected=expected
        )


def profiled_topology(topology: Topology, path: str | Path) -> Topology:
    """`topology` for a simulation with the step times of a profile: each pool's engine arguments as the simulated engine's settings.

    Of a real engine's arguments those count that shape a step: max_num_batched_tokens, mixed_step_tokens, mixed_step_ms, max_num_seqs,
    long_prefill_token_threshold and max_model_len. Raises ConfigError for a profile of another model.
    """
    profile, absolute = load_profile(path), str(Path(path).expanduser().resolve())
    is_real = topology.engine.kind == "vllm"
    if is_real:
        profile.check_model(topology.model)
    pools = {}
    for name in ("prefill", "decode", "colocated"):
        pool: PoolSettings | None = getattr(topology.pools, name)
        if pool is not None and is_real:
            pool = pool.model_copy(update={"simulated": _settings_of({**topology.engine.args, **pool.args}, profile) | pool.simulated})
        pools[name] = pool
    engine = topology.engine.model_copy(update={"profile": absolute})
    return topology.model_copy(update={"engine": engine, "pools": Pools(**pools)})


_ARGUMENTS = {
    "max_num_batched_tokens": "max_num_batched_tokens",
    "mixed_step_tokens": "mixed_step_tokens",
    "mixed_step_ms": "mixed_step_ms",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
    "long_prefill_token_threshold": "long_prefill_tokens",
}


def _settings_of(args: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    given = {ours: args.get(theirs, profile.args.get(theirs)) for theirs, ours in _ARGUMENTS.items()}
    return {
        "shape": profile.model_name,
        "block_tokens": profile.block_tokens,
        "kv_bytes_per_token": profile.kv_bytes_per_token,
        **{key: value for key, value in given.items() if isinstance(value, int | float)},
    }
