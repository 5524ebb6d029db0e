"""The numbers of a transformer that decide its speed and memory. Pure.

Counts follow the published Llama architecture: grouped-query attention, a gated MLP (three matrices), RMSNorm, no biases.
Checked against the published sizes: Llama-3.1-70B has 70.6e9 parameters, 141 GB in bf16 and 320 KiB of KV per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disagg.errors import ConfigError, nearest
from disagg.perf.hardware import Dtype

DTYPE_BYTES: dict[Dtype, int] = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder-only transformer. `num_experts` 0 means dense; `intermediate` is then the MLP's width, else one expert's."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's query, key, value and output projections."""
        return self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def expert_params(self) -> int:
        """Parameters of one gated MLP (of one expert)."""
        return 3 * self.hidden * self.intermediate

    @property
    def dense_params(self) -> int:
        """Parameters of all layers that every token uses: attention, and the MLP of a dense model or the router of a MoE."""
        mlp = self.num_experts * self.hidden if self.num_experts else self.expert_params
        return self.num_layers * (self.attention_params + mlp)

    @property
    def routed_params(self) -> int:
        """Parameters of all experts of all layers (0 for a dense model)."""
        return self.num_layers * self.num_experts * self.expert_params

    @property
    def head_params(self) -> int:
        """Parameters of the output projection; the input embedding has as many, and shares them when tied."""
        return self.vocab * self.hidden

    @property
    def total_params(self) -> int:
        """All parameters, with embeddings and norms."""
        norms = (2 * self.num_layers + 1) * self.hidden
        return self.dense_params + self.routed_params + norms + self.head_params * (1 if self.tied_embeddings else 2)

    @property
    def active_params(self) -> int:
        """Parameters that one token multiplies in the layers (embeddings and output projection not counted)."""
        return self.dense_params + self.num_layers * self.experts_per_token * self.expert_params

    def kv_bytes_per_token(self, kv_dtype: Dtype = "bf16") -> int:
        """KV-cache bytes of one token, all layers and heads."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[kv_dtype]

    def weight_bytes(self, dtype: Dtype = "bf16") -> int:
        """Bytes of all weights. With fp8 only the layers' matrices shrink: embeddings, output projection and norms stay bf16."""
        matrices = self.dense_params + self.routed_params
        return matrices * DTYPE_BYTES[dtype] + (self.total_params - matrices) * DTYPE_BYTES["bf16"]

    def touched_weight_bytes(self, num_tokens: float, dtype: Dtype = "bf16") -> float:
        """Bytes of weights that a step over `num_tokens` tokens reads, without embeddings and output projection.

        A MoE step reads the experts that any of its tokens picked: the expected share, with picks taken as independent and even,
        is 1 - (1 - k/E)^tokens.
        """
        share = 1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens if self.num_experts else 0.0
        return (self.dense_params + share * self.routed_params) * DTYPE_BYTES[dtype]


SHAPES: dict[str, ModelShape] = {
    s.name: s
    for s in (
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
        ModelShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, num_experts=128, experts_per_token=8),
        ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, num_experts=8, experts_per_token=2),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, tied_embeddings=True),
    )
}


def find_shape(name: str) -> ModelShape:
    """The bundled shape called `name` (a hub owner's prefix, case and an `-instruct` suffix do not matter). Raises ConfigError."""
    plain = name.lower().rsplit("/", 1)[-1].removeprefix("meta-").removesuffix("-instruct")
    if plain not in SHAPES:
        hint = nearest(plain, SHAPES)
        raise ConfigError(f"unknown model shape {name!r}; {hint}", key="shape", value=name, expected=hint)
    return SHAPES[plain]


def shape_from_config(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """The shape in a Hugging Face `config.json` (Llama, Mistral, Qwen, Mixtral and alike).

    Raises ConfigError naming the key that is missing or not a positive integer.
    """
    hidden, heads = _count(config, name, "hidden_size"), _count(config, name, "num_attention_heads")
    experts = _optional(config, name, "num_experts", "num_local_experts", "n_routed_experts") or 0
    width = _optional(config, name, "moe_intermediate_size") if experts else None
    return ModelShape(
        name=name,
        num_layers=_count(config, name, "num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=_optional(config, name, "num_key_value_heads") or heads,
        head_dim=_optional(config, name, "head_dim") or hidden // heads,
        intermediate=width or _count(config, name, "intermediate_size"),
        vocab=_count(config, name, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        num_experts=experts,
        experts_per_token=_count(config, name, "num_experts_per_tok") if experts else 0,
    )


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
