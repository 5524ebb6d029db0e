"""The shape and the weights' type in a Hugging Face `config.json`. Pure.

Read are decoder-only transformers: Llama, Mistral, Qwen, Gemma, Phi, DeepSeek, GLM and alike, mixtures of experts, GPT-2's and its kin's
spellings, and the language model inside a multimodal wrapper. What a family's own code takes where its config says nothing
(tied embeddings, head_dim, a plain MLP) is taken here as well. A config that says nothing of a needed field, or speaks of experts under
a name that is not known here, is refused rather than guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from disagg.perf.hardware import Dtype, KvDtype
from disagg.perf.shapes import Mla, ModelShape, find_shape

# Keys of models whose layers are not all attention over the whole context: their speed and memory follow other formulas.
_HYBRID_KEYS = (
    "linear_num_key_heads", "linear_attn_config", "mamba_d_state", "mamba_num_heads", "ssm_cfg", "ssm_state_size", "layers_block_type",
    "hybrid_override_pattern", "block_types", "full_attn_idxs", "lru_width", "rwkv_version", "state_size", "index_topk",
)  # fmt: skip
_ATTENTION_LAYERS = ("attention", "full_attention", "sliding_attention", "chunked_attention")
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")  # of a multimodal wrapper: where its language model stands
# What a field is called: first as in most configs, then as others have it.
_SPELLINGS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "num_selected_experts", "moe_topk", "moe_k"),
    "shared_expert_intermediate_size": ("shared_intermediate_size",),
    "n_shared_experts": ("num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "first_k_dense_replace": ("moe_layer_start_index",),
}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Families by `model_type`.
_PLAIN_MLP = frozenset((
    "apertus", "arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron", "opt",
    "persimmon", "phi", "refinedweb", "refinedwebmodel", "starcoder2",
))  # fmt: skip
_TIED = frozenset((
    "bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "opt",
    "refinedweb", "refinedwebmodel", "starcoder2",
))  # fmt: skip
_FOUR_TIMES_HIDDEN = frozenset(
    ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "refinedweb", "refinedwebmodel")
)
_LEARNED_POSITIONS = {"opt": 2, "gpt2": 0, "gpt_bigcode": 0, "gpt_neo": 0}  # rows beyond the positions
_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
    },
}  # fmt: skip
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}  # layers of which one looks back over the whole context
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


def find_kv_dtype(name: str, key: str = "--kv-dtype") -> KvDtype:
    """The same for a KV cache, of which there is none in int4. Raises ConfigError."""
    found = _DTYPES.get(name.lower())
    if found is None or found == "int4":
        raise ConfigError(key=key, value=name, expected="bf16, fp8 or int8")
    return found


def dtype_in_name(model: str) -> str:
    """What the name of a model says of the type of its weights, such as ...-FP8, for `find_dtype`; else bf16."""
    found = re.findall(r"fp8|w8a8|w4a16|awq|gptq|int[48]|nvfp4|mxfp4", model.lower())
    return next((name for name in found if name.startswith("int")), found[0]) if found else "bf16"  # of GPTQ-Int8 the second says more


def load_shape(ref: str) -> ModelShape:
    """The bundled shape called `ref`, or that of a config.json (or a folder with one) at the path `ref`. Raises ConfigError."""
    path = Path(ref).expanduser()
    return _read_shape(path)[0] if path.suffix == ".json" or path.is_dir() else find_shape(ref)


def read_config(path: Path, dtype: Dtype | None = None) -> tuple[ModelShape, Dtype]:
    """Shape and weights' type of a config.json or of the folder that holds one; `dtype`: in place of the type that it states.

    Raises ConfigError.
    """
    shape, config = _read_shape(path)
    return shape, dtype or dtype_from_config(config)


def _read_shape(path: Path) -> tuple[ModelShape, Mapping[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}", key=str(file), expected="a Hugging Face config.json") from error
    return shape_from_config(config, file.resolve().parent.name if file.name == "config.json" else file.stem), config


def dtype_from_config(config: Mapping[str, Any]) -> Dtype:
    """The type of the layers' weights: what `quantization_config` says, else bf16. Raises ConfigError for an unknown method.

    4-bit floats (MXFP4, NVFP4) count as int4: equal bytes, and weights are widened in the kernel.
    """
    quantization = _text_config(config).get("quantization_config")
    if not quantization:
        return "bf16"
    found = _quantized(quantization) if isinstance(quantization, Mapping) else None
    if found is None:
        expected = "fp8, awq, gptq, mxfp4, bitsandbytes, modelopt or compressed-tensors with 4 or 8 bits; or name the weights' type"
        raise ConfigError(key="config.json: quantization_config", value=quantization, expected=f"{expected} (--dtype, --quantization)")
    return found


def _quantized(quantization: Mapping[str, Any]) -> Dtype | None:
    method = str(quantization.get("quant_method", "")).lower()
    bits, is_float = quantization.get("bits") or quantization.get("weight_bits"), False
    if method == "compressed-tensors":
        groups = quantization.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if not isinstance(weights, Mapping):
            return None
        bits, is_float = weights.get("num_bits"), weights.get("type") == "float"
    elif method == "bitsandbytes":
        bits = 4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else None
    elif not bits:
        algorithm = f"{method} {quantization.get('quant_algo', '')}".lower()
        if any(name in algorithm for name in ("fp4", "awq", "gptq", "w4a16")):
            return "int4"
        return "fp8" if "fp8" in algorithm else None
    of_bits: dict[Any, Dtype] = {4: "int4", 8: "fp8" if is_float else "int8"}
    return of_bits.get(bits)


def shape_from_config(config: Any, name: str = "model") -> ModelShape:
    """The shape in a `config.json`; of a multimodal wrapper, that of its language model.

    Raises ConfigError naming the keys that are missing, not a positive integer, or of another architecture.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(key=f"{name}: config.json", value=config, expected="a mapping")
    return _Reader(_text_config(config), name).shape()


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the language model, over those of what wraps it."""
    merged, inner = dict(config), next((config[key] for key in _TEXT if isinstance(config.get(key), Mapping)), None)
    if inner is not None:
        merged |= _text_config(inner)
    return merged


class _Reader:
    """One config: the fields under any of their spellings. What is wrong is named by the key that stands there."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config = config
        self._name = name
        self._family = str(config.get("model_type", "")).lower()
        self._defaults = _DEFAULTS.get(self._family, {})

    def shape(self) -> ModelShape:
        self._check_kind()
        missing = [key for key in _NEEDED if self._value(key) is None]
        if missing:
            raise self._wrong(", ".join(missing), None, "a positive integer" if len(missing) == 1 else "positive integers")
        hidden, heads, layers = (self._count(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        experts = self._optional("num_experts")
        if not experts:
            self._check_dense()
        width = self._optional("moe_intermediate_size") if experts else 0
        mlp = self._mlp_width(hidden, is_needed=not width)
        mla = self._mla()
        positions = self._optional("max_position_embeddings")
        dense_layers = self._dense_layers(layers) if experts else 0
        window, window_layers = self._window(layers)
        is_llama4 = self._family.startswith("llama4")  # intermediate_size is an expert's there
        return ModelShape(
            name=self._name,
            num_layers=layers,
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=self._kv_heads(heads),
            head_dim=self._head_dim(hidden, heads, mla),
            intermediate=width or mlp,
            vocab=self._count("vocab_size"),
            tied_embeddings=bool(self._config.get("tie_word_embeddings", self._family in _TIED)),
            num_experts=experts,
            experts_per_token=self._experts_per_token(experts) if experts else 0,
            shared_intermediate=self._shared_width(width or mlp) if experts else 0,
            dense_layers=dense_layers,
            dense_intermediate=(self._count("intermediate_size_mlp") if is_llama4 else mlp) if dense_layers else 0,
            mlp_matrices=2 if self._family in _PLAIN_MLP else 3,
            mla=mla,
            learned_positions=positions + _LEARNED_POSITIONS[self._family] if self._family in _LEARNED_POSITIONS else 0,
            max_context_tokens=positions,
            window_tokens=window,
            window_layers=window_layers,
        )

    def _check_kind(self) -> None:
        """Refuse what is no decoder-only transformer whose layers all attend."""
        expected = "a transformer whose layers all attend to the whole context, or to a window of it"
        for key in _HYBRID_KEYS:
            if self._config.get(key):
                raise self._wrong(key, self._config[key], expected)
        for key, known in (("layer_types", _ATTENTION_LAYERS), ("attn_type_list", (1,))):
            kinds = self._config.get(key)
            other = [kind for kind in kinds if kind not in known] if isinstance(kinds, list) else []
            if other:
                raise self._wrong(key, other[0], expected)
        if self._config.get("is_encoder_decoder"):
            raise self._wrong("is_encoder_decoder", value=True, expected="a decoder-only transformer")

    def _check_dense(self) -> None:
        """Refuse a mixture of experts under names that are not known here: it would pass as a dense model."""
        if any(key in self._config for key in ("num_experts", *_SPELLINGS["num_experts"])):
            return
        known = ", ".join(("num_experts", *_SPELLINGS["num_experts"]))
        for key, value in self._config.items():
            is_many = bool(value) if isinstance(value, list) else isinstance(value, int) and value > 1
            inner = [k for k in value if "expert" in k or k.startswith("moe_")] if isinstance(value, Mapping) else []
            if inner or (is_many and ("expert" in key or key.startswith("moe_"))):
                raise self._wrong(key, value, f"the number of experts beside it as one of {known}")

    def _mlp_width(self, hidden: int, *, is_needed: bool) -> int:
        width = self._optional("intermediate_size")
        if not width and self._family in _FOUR_TIMES_HIDDEN:
            return 4 * hidden
        if is_needed:
            width = self._count("intermediate_size")
        return width // 2 if self._family == "qwen" else width  # the first Qwen: gate and up together

    def _kv_heads(self, heads: int) -> int:
        if self._config.get("multi_query") and not self._config.get("new_decoder_architecture"):  # Falcon 7B, StarCoder
            return 1
        nested = self._config.get("attn_config")
        if self._family == "mpt" and isinstance(nested, Mapping) and nested.get("kv_n_heads"):
            return int(nested["kv_n_heads"])
        found = self._optional("num_key_value_heads") or heads
        if found > heads or heads % found:
            raise self._wrong("num_key_value_heads", found, f"a divisor of the {heads} heads")
        return found

    def _head_dim(self, hidden: int, heads: int, mla: Mla | None) -> int:
        if mla is not None:
            return self._count("qk_nope_head_dim") + mla.rope_dim
        found = self._optional("head_dim")
        if not found and hidden % heads:
            raise self._wrong("head_dim", None, f"a positive integer: {heads} heads do not divide {hidden} evenly")
        return found or hidden // heads

    def _mla(self) -> Mla | None:
        if not self._config.get("kv_lora_rank"):
            return None
        return Mla(
            kv_rank=self._count("kv_lora_rank"),
            rope_dim=self._count("qk_rope_head_dim"),
            value_dim=self._count("v_head_dim"),
            q_rank=self._optional("q_lora_rank"),
        )

    def _experts_per_token(self, experts: int) -> int:
        found = self._count("num_experts_per_tok")
        if found > experts:
            raise self._wrong("num_experts_per_tok", found, f"at most {experts}, the experts that there are")
        return found

    def _shared_width(self, expert_width: int) -> int:
        if self._family.startswith("llama4"):
            return expert_width
        return self._optional("shared_expert_intermediate_size") or self._optional("n_shared_experts") * expert_width

    def _dense_layers(self, layers: int) -> int:
        """Layers of a mixture with a plain MLP: the first ones, those between, or those that are named."""
        first = self._optional("first_k_dense_replace")
        if first > layers:
            raise self._wrong("first_k_dense_replace", first, f"at most {layers}, the layers that there are")
        frequency = self._config.get("moe_layer_freq")
        if isinstance(frequency, list):
            return sum(not each for each in frequency[:layers])
        if isinstance(frequency, int) and frequency > 1:
            return layers - sum(layer >= first and layer % frequency == 0 for layer in range(layers))
        every = self._optional("interleave_moe_layer_step") or self._optional("decoder_sparse_step") or 1
        named = self._config.get("mlp_only_layers")
        plain = set(named) if isinstance(named, list) else set()
        return sum(layer < first or layer in plain or (layer + 1) % every != 0 for layer in range(layers))

    def _window(self, layers: int) -> tuple[int, int]:
        """(tokens that some layers look back, how many such layers); (0, 0): all look back over the whole context."""
        tokens = self._optional("sliding_window") or self._optional("attention_chunk_size")
        if not tokens or self._config.get("use_sliding_window") is False:
            return 0, 0
        kinds = self._config.get("layer_types")
        if isinstance(kinds, list):
            number = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
        elif self._family.startswith("llama4"):
            number = layers - layers // 4
        else:
            every = self._optional("sliding_window_pattern") or _FULL_EVERY.get(self._family, 0)
            number = layers - layers // every if every else layers - self._first_full(layers)
        return (tokens, number) if number > 0 else (0, 0)

    def _first_full(self, layers: int) -> int:
        return min(layers, self._optional("max_window_layers")) if self._config.get("use_sliding_window") else 0

    def _value(self, key: str) -> Any:
        """Under the first of the spellings that is there and not null."""
        found = (self._config[name] for name in (key, *_SPELLINGS.get(key, ())) if self._config.get(name) is not None)
        return next(found, self._defaults.get(key))

    def _count(self, key: str) -> int:
        value = self._value(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._wrong(key, value, "a positive integer")
        return value

    def _optional(self, key: str) -> int:
        """0 where it is missing, null or 0."""
        return self._count(key) if self._value(key) else 0

    def _wrong(self, key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(key=f"{self._name}: config.json: {key}", value=value, expected=expected)
