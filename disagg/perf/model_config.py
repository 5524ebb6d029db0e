"""The shape and the weights' type in a Hugging Face `config.json` (Llama, Mistral, Qwen, Mixtral, DeepSeek, OPT and alike). Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from disagg.perf.hardware import Dtype
from disagg.perf.shapes import Mla, ModelShape, find_shape

# Keys of models whose layers are not all attention over the whole context: their speed and memory follow other formulas.
_HYBRID_KEYS = ("linear_num_key_heads", "mamba_d_state", "ssm_cfg", "layers_block_type", "rwkv_version", "state_size")
_DTYPES: dict[str, Dtype] = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "bf16", "float16": "bf16", "half": "bf16", "auto": "bf16",
    "fp8": "fp8", "float8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "e4m3": "fp8", "fp8_block": "fp8", "w8a8_fp8": "fp8",
    "int8": "int8", "w8a8": "int8", "w8a8_int8": "int8", "w8a16": "int8",
    "int4": "int4", "w4a16": "int4", "awq": "int4", "gptq": "int4", "int4_wo": "int4", "mxfp4": "int4",
}  # fmt: skip


def find_dtype(name: str, key: str = "dtype") -> Dtype:
    """The type that `name` means (float16 counts as bf16: equal size and speed). Raises ConfigError."""
    if name.lower() not in _DTYPES:
        raise ConfigError(key=key, value=name, expected=f"one of {', '.join(sorted(set(_DTYPES.values())))}")
    return _DTYPES[name.lower()]


def load_shape(ref: str) -> ModelShape:
    """The bundled shape called `ref`, or that of a config.json (or a folder with one) at the path `ref`. Raises ConfigError."""
    path = Path(ref).expanduser()
    return read_config(path)[0] if path.suffix == ".json" or path.is_dir() else find_shape(ref)


def read_config(path: Path) -> tuple[ModelShape, Dtype]:
    """Shape and weights' type of a config.json or of the folder that holds one. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}", key=str(file), expected="a Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(key=str(file), value=config, expected="a Hugging Face config.json: a mapping")
    config = {**config, **(config.get("text_config") or {})}
    return shape_from_config(config, file.resolve().parent.name if file.name == "config.json" else file.stem), dtype_from_config(config)


def dtype_from_config(config: Mapping[str, Any]) -> Dtype:
    """The type of the layers' weights: what `quantization_config` says, else bf16. Raises ConfigError for an unknown method."""
    quantization = config.get("quantization_config")
    if not quantization:
        return "bf16"
    method = str(quantization.get("quant_method", "")).lower()
    bits = quantization.get("bits") or quantization.get("weight_bits")
    kind = None
    if method == "compressed-tensors":
        groups = quantization.get("config_groups") or {}
        first: Mapping[str, Any] = next(iter(groups.values()), {})
        weights = first.get("weights") or {}
        bits, kind = weights.get("num_bits"), weights.get("type")
    if method == "fp8" or kind == "float":
        return "fp8"
    if bits in (4, 8):
        return "int4" if bits == 4 else "int8"
    if method in ("awq", "gptq"):
        return "int4"
    expected = "fp8, awq, gptq or compressed-tensors with 4 or 8 bits; or name the type with --dtype"
    raise ConfigError(key="config.json: quantization_config", value=quantization, expected=expected)


def shape_from_config(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """The shape in a `config.json`.

    Raises ConfigError naming the key that is missing, not a positive integer, or of another architecture.
    """
    hybrid = next((key for key in _HYBRID_KEYS if config.get(key)), None)
    if hybrid is not None:
        expected = "a transformer whose layers all attend to the whole context"
        raise ConfigError(key=f"{name}: config.json: {hybrid}", value=config[hybrid], expected=expected)
    hidden, heads = _count(config, name, "hidden_size"), _count(config, name, "num_attention_heads")
    experts = _optional(config, name, "num_experts", "num_local_experts", "n_routed_experts") or 0
    width = _optional(config, name, "moe_intermediate_size") if experts else None
    family = str(config.get("model_type", ""))
    is_plain = family in ("opt", "gpt_neox", "falcon", "bloom")
    is_tied = is_plain or family.startswith(("gemma", "cohere"))  # where the config does not say
    mlp = _optional(config, name, "intermediate_size", "ffn_dim")
    if mlp is None and width is None:
        mlp = _count(config, name, "intermediate_size")
    shared = _optional(config, name, "shared_expert_intermediate_size") or 0
    if config.get("n_shared_experts"):
        shared = _count(config, name, "n_shared_experts") * (width or mlp or 0)
    mla = _mla(config, name)
    positions = _optional(config, name, "max_position_embeddings") or 0
    return ModelShape(
        name=name,
        num_layers=_count(config, name, "num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=_optional(config, name, "num_key_value_heads") or heads,
        head_dim=_head_dim(config, name, hidden, heads, mla),
        intermediate=width or mlp or 0,
        vocab=_count(config, name, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", is_tied)),
        num_experts=experts,
        experts_per_token=_count(config, name, "num_experts_per_tok") if experts else 0,
        shared_intermediate=shared if experts else 0,
        dense_layers=int(config.get("first_k_dense_replace") or 0) if experts else 0,
        dense_intermediate=(mlp or 0) if experts and config.get("first_k_dense_replace") else 0,
        mlp_matrices=2 if is_plain else 3,
        mla=mla,
        learned_positions=positions + 2 if config.get("model_type") == "opt" else 0,
        max_context_tokens=positions,
    )


def _mla(config: Mapping[str, Any], name: str) -> Mla | None:
    if not config.get("kv_lora_rank"):
        return None
    return Mla(
        kv_rank=_count(config, name, "kv_lora_rank"),
        rope_dim=_count(config, name, "qk_rope_head_dim"),
        value_dim=_count(config, name, "v_head_dim"),
        q_rank=_optional(config, name, "q_lora_rank") or 0,
    )


def _head_dim(config: Mapping[str, Any], name: str, hidden: int, heads: int, mla: Mla | None) -> int:
    if mla is not None:
        return _count(config, name, "qk_nope_head_dim") + mla.rope_dim
    return _optional(config, name, "head_dim") or hidden // heads


def _count(config: Mapping[str, Any], name: str, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(key=f"{name}: config.json: {key}", value=value, expected="a positive integer")
    return value


def _optional(config: Mapping[str, Any], name: str, *keys: str) -> int | None:
    """The first of `keys` that is there and not null."""
    for key in keys:
        if config.get(key) is not None:
            return _count(config, name, key)
    return None
