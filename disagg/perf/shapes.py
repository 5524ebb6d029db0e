"""The numbers of a transformer that decide its speed and memory. Pure.

Counts follow the published Llama architecture: grouped-query attention, a gated MLP (three matrices), RMSNorm, no biases; with what
others differ in: multi-head latent attention and shared experts (DeepSeek-V3 technical report, 2024), and a plain MLP of two matrices
with learned positions (OPT). Checked against the published sizes: Llama-3.1-70B has 70.6e9 parameters, 141 GB in bf16 and 320 KiB of KV
per token; DeepSeek-V3 has 671e9, 37e9 of them active, and 68.6 KiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from disagg.errors import ConfigError, nearest
from disagg.perf.hardware import Dtype

# 4-bit weights carry a 16-bit scale for each group of 64 to 128: 4.25 bits.
DTYPE_BYTES: dict[Dtype, float] = {"bf16": 2, "fp8": 1, "int8": 1, "int4": 4.25 / 8}


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: what is cached is one latent of `kv_rank` and one rope key of `rope_dim`, for all heads together.

    `q_rank`: of the compressed query (0: none). `value_dim`: of one head's value. A head's key has ModelShape's `head_dim`, rope included.
    """

    kv_rank: int
    rope_dim: int
    value_dim: int
    q_rank: int = 0

    @property
    def cached_dim(self) -> int:
        """Numbers that one layer caches for one token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder-only transformer. `num_experts` 0 means dense; `intermediate` is then the MLP's width, else one expert's.

    `shared_intermediate`: width of the experts that every token uses. The first `dense_layers` of a MoE have a plain MLP of
    `dense_intermediate`. `mlp_matrices`: 3 for a gated MLP, 2 for a plain one. `learned_positions`: rows of a position embedding.
    `max_context_tokens`: what the model was made for (0: unknown). `window_layers` of the layers look back over `window_tokens` only; their
    KV and attention are counted as if they looked back over all (an engine without a hybrid KV cache keeps all of it).
    """

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
    shared_intermediate: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    mlp_matrices: int = 3
    mla: Mla | None = None
    learned_positions: int = 0
    max_context_tokens: int = 0
    window_tokens: int = 0
    window_layers: int = 0

    def is_windowed(self, tokens: int) -> bool:
        """Whether some layers look back over less than so many tokens."""
        return self.window_layers > 0 and tokens > self.window_tokens

    @property
    def window_note(self) -> str:
        """For people: what is counted too much beyond the window."""
        return (
            f"{self.window_layers} of the {self.num_layers} layers look back {self.window_tokens:,} tokens only; KV and attention of "
            "longer contexts are counted as if all looked back over all of it, which is too much"
        )

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's projections."""
        return sum(n * k for n, k in self.attention_matmuls(1))

    def attention_matmuls(self, tp: int) -> list[tuple[int, int]]:
        """(outputs n, inputs k) of one layer's projections on one of `tp` devices."""
        heads = -(-self.num_heads // tp)
        if self.mla is None:
            kv_heads = max(1, self.num_kv_heads // tp)
            return [((heads + 2 * kv_heads) * self.head_dim, self.hidden), (self.hidden, heads * self.head_dim)]
        m = self.mla
        plain_dim = self.head_dim - m.rope_dim
        if m.q_rank:
            down = [(m.q_rank + m.cached_dim, self.hidden), (heads * self.head_dim, m.q_rank)]
        else:
            down = [(m.cached_dim, self.hidden), (heads * self.head_dim, self.hidden)]
        return [*down, (heads * (plain_dim + m.value_dim), m.kv_rank), (self.hidden, heads * m.value_dim)]

    def mlp_matmuls(self, width: int, tp: int) -> list[tuple[int, int]]:
        """(outputs n, inputs k) of one MLP of `width` on one of `tp` devices."""
        part = -(-width // tp)
        return [((self.mlp_matrices - 1) * part, self.hidden), (self.hidden, part)] if width else []

    @property
    def moe_layers(self) -> int:
        return self.num_layers - self.dense_layers if self.num_experts else 0

    @property
    def expert_params(self) -> int:
        """Parameters of one MLP (of one routed expert)."""
        return self.mlp_matrices * self.hidden * self.intermediate

    @property
    def dense_params(self) -> int:
        """Parameters of all layers that every token uses: attention, MLPs, and a MoE's routers and shared experts."""
        per_width = self.mlp_matrices * self.hidden
        if not self.num_experts:
            return self.num_layers * (self.attention_params + self.expert_params)
        moe = self.moe_layers * (self.num_experts * self.hidden + per_width * self.shared_intermediate)
        return self.num_layers * self.attention_params + moe + self.dense_layers * per_width * self.dense_intermediate

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts of all layers (0 for a dense model)."""
        return self.moe_layers * self.num_experts * self.expert_params

    @property
    def head_params(self) -> int:
        """Parameters of the output projection; the input embedding has as many, and shares them when tied."""
        return self.vocab * self.hidden

    @property
    def total_params(self) -> int:
        """All parameters, with embeddings and norms."""
        norms = (2 * self.num_layers + 1) * self.hidden
        embeddings = self.head_params * (1 if self.tied_embeddings else 2) + self.learned_positions * self.hidden
        return self.dense_params + self.routed_params + norms + embeddings

    @property
    def active_params(self) -> int:
        """Parameters that one token multiplies in the layers (embeddings and output projection not counted)."""
        return self.dense_params + self.moe_layers * self.experts_per_token * self.expert_params

    @property
    def pair_dims(self) -> int:
        """Multiply-adds of one (query, key) pair in one layer, over all heads: the score, and the weighted sum of values."""
        value_dim = self.mla.value_dim if self.mla else self.head_dim
        return self.num_heads * (self.head_dim + value_dim)

    @property
    def decode_pair_dims(self) -> int:
        """As `pair_dims`, for one decoded token: with MLA the projections are absorbed, and scores and sums run over the latent."""
        return self.num_heads * (self.mla.cached_dim + self.mla.kv_rank) if self.mla else self.pair_dims

    def kv_bytes_per_token(self, kv_dtype: Dtype = "bf16") -> int:
        """KV-cache bytes of one token, all layers and heads."""
        dims = self.mla.cached_dim if self.mla else 2 * self.num_kv_heads * self.head_dim
        return int(self.num_layers * dims * DTYPE_BYTES[kv_dtype])

    def weight_bytes(self, dtype: Dtype = "bf16") -> int:
        """Bytes of all weights. Quantised, only the layers' matrices shrink: embeddings, output projection and norms stay bf16."""
        matrices = self.dense_params + self.routed_params
        return int(matrices * DTYPE_BYTES[dtype] + (self.total_params - matrices) * DTYPE_BYTES["bf16"])

    def touched_weight_bytes(self, num_tokens: float, dtype: Dtype = "bf16") -> float:
        """Bytes of weights that a step over `num_tokens` tokens reads, without embeddings and output projection."""
        return (self.dense_params + self.touched_share(num_tokens) * self.routed_params) * DTYPE_BYTES[dtype]

    def touched_share(self, num_tokens: float) -> float:
        """Expected share of a layer's experts that `num_tokens` tokens pick, picks independent and even: 1 - (1 - k/E)^tokens."""
        return 1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens if self.num_experts else 0.0


_DEEPSEEK_V3 = Mla(kv_rank=512, rope_dim=64, value_dim=128, q_rank=1536)
_128K = 131072

SHAPES: dict[str, ModelShape] = {
    s.name: s
    for s in (
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, max_context_tokens=_128K),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256, max_context_tokens=_128K),
        ModelShape("llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256, max_context_tokens=_128K),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied_embeddings=True, max_context_tokens=_128K),
        ModelShape("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, tied_embeddings=True, max_context_tokens=_128K),
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, max_context_tokens=4096),
        ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, max_context_tokens=4096),
        ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000, max_context_tokens=4096),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32768, max_context_tokens=32768),
        ModelShape("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, tied_embeddings=True, max_context_tokens=32768),
        ModelShape("mistral-nemo-12b", 40, 5120, 32, 8, 128, 14336, 131072, max_context_tokens=_128K),
        ModelShape("mistral-small-24b", 40, 5120, 32, 8, 128, 32768, 131072, max_context_tokens=32768),
        ModelShape("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, tied_embeddings=True, max_context_tokens=32768),
        ModelShape("qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151936, tied_embeddings=True, max_context_tokens=32768),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, max_context_tokens=32768),
        ModelShape("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064, max_context_tokens=32768),
        ModelShape("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064, max_context_tokens=32768),
        ModelShape("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, max_context_tokens=32768),
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, tied_embeddings=True, max_context_tokens=40960),
        ModelShape("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151936, tied_embeddings=True, max_context_tokens=40960),
        ModelShape("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, tied_embeddings=True, max_context_tokens=40960),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, max_context_tokens=40960),
        ModelShape("qwen3-14b", 40, 5120, 40, 8, 128, 17408, 151936, max_context_tokens=40960),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, max_context_tokens=40960),
        ModelShape(
            "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, num_experts=128, experts_per_token=8, max_context_tokens=40960
        ),
        ModelShape(
            "qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 151936, num_experts=128, experts_per_token=8, max_context_tokens=40960
        ),
        ModelShape(
            "qwen3-coder-480b-a35b", 62, 6144, 96, 8, 128, 2560, 151936, num_experts=160, experts_per_token=8, max_context_tokens=262144
        ),
        ModelShape("phi-4", 40, 5120, 40, 10, 128, 17920, 100352, max_context_tokens=16384),
        ModelShape("gemma-7b", 28, 3072, 16, 16, 256, 24576, 256000, tied_embeddings=True, max_context_tokens=8192),
        ModelShape(
            "gemma-2-9b", 42, 3584, 16, 8, 256, 14336, 256000, tied_embeddings=True, max_context_tokens=8192,
            window_tokens=4096, window_layers=21,
        ),
        ModelShape(
            "gemma-2-27b", 46, 4608, 32, 16, 128, 36864, 256000, tied_embeddings=True, max_context_tokens=8192,
            window_tokens=4096, window_layers=23,
        ),
        ModelShape(
            "gemma-3-12b", 48, 3840, 16, 8, 256, 15360, 262208, tied_embeddings=True, max_context_tokens=_128K,
            window_tokens=1024, window_layers=40,
        ),
        ModelShape(
            "gemma-3-27b", 62, 5376, 32, 16, 128, 21504, 262208, tied_embeddings=True, max_context_tokens=_128K,
            window_tokens=1024, window_layers=52,
        ),
        ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, num_experts=8, experts_per_token=2, max_context_tokens=32768),
        ModelShape("mixtral-8x22b", 56, 6144, 48, 8, 128, 16384, 32768, num_experts=8, experts_per_token=2, max_context_tokens=65536),
        ModelShape(
            "deepseek-v3", 61, 7168, 128, 128, 192, 2048, 129280, num_experts=256, experts_per_token=8, shared_intermediate=2048,
            dense_layers=3, dense_intermediate=18432, mla=_DEEPSEEK_V3, max_context_tokens=163840,
        ),
        ModelShape(
            "deepseek-v2-lite", 27, 2048, 16, 16, 192, 1408, 102400, num_experts=64, experts_per_token=6, shared_intermediate=2816,
            dense_layers=1, dense_intermediate=10944, mla=Mla(512, 64, 128), max_context_tokens=163840,
        ),
        ModelShape(
            "kimi-k2", 61, 7168, 64, 64, 192, 2048, 163840, num_experts=384, experts_per_token=8, shared_intermediate=2048,
            dense_layers=1, dense_intermediate=18432, mla=_DEEPSEEK_V3, max_context_tokens=_128K,
        ),
        ModelShape(
            "glm-4.5-air", 46, 4096, 96, 8, 128, 1408, 151552, num_experts=128, experts_per_token=8, shared_intermediate=1408,
            dense_layers=1, dense_intermediate=10944, max_context_tokens=_128K,
        ),
        ModelShape(
            "opt-13b", 40, 5120, 40, 40, 128, 20480, 50272, tied_embeddings=True, mlp_matrices=2, learned_positions=2050,
            max_context_tokens=2048,
        ),
        ModelShape(
            "opt-66b", 64, 9216, 72, 72, 128, 36864, 50272, tied_embeddings=True, mlp_matrices=2, learned_positions=2050,
            max_context_tokens=2048,
        ),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, tied_embeddings=True, max_context_tokens=8192),
        ModelShape("smollm2-360m", 32, 960, 15, 5, 64, 2560, 49152, tied_embeddings=True, max_context_tokens=8192),
        ModelShape("smollm2-1.7b", 24, 2048, 32, 32, 64, 8192, 49152, tied_embeddings=True, max_context_tokens=8192),
    )
}  # fmt: skip

# Same dimensions, other training.
_ALIASES = {
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3-8b": "llama-3.1-8b",
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-0528": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "qwen2-0.5b": "qwen2.5-0.5b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2-72b": "qwen2.5-72b",
    "qwq-32b": "qwen2.5-32b",
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b": "qwen3-235b-a22b",
    "qwen3-480b": "qwen3-coder-480b-a35b",
    "mistral-nemo": "mistral-nemo-12b",
}
_SUFFIXES = re.compile(
    r"-(instruct|chat|it|base|hf|fp8|awq|gptq(-int[48])?|w8a8|int[48]|bf16|fp16|float16|bfloat16|dynamic|kv|quantized\.w\d+a\d+"
    r"|v0\.[123]|\d{4})$"
)


def find_shape(name: str) -> ModelShape:
    """The bundled shape called `name` (an owner's prefix, case and suffixes such as `-Instruct` or `-FP8` do not matter).

    Raises ConfigError naming the nearest known one.
    """
    plain = name.lower().rsplit("/", 1)[-1].replace("_", "-").removeprefix("meta-")
    plain = re.sub(r"^(moe-)?(llama|mixtral|opt|gemma)-?(?=\d)", r"\2-", plain)
    while (shorter := _SUFFIXES.sub("", plain)) != plain:
        plain = shorter
    plain = _ALIASES.get(plain, plain)
    if plain not in SHAPES:
        hint = nearest(plain, SHAPES)
        raise ConfigError(f"unknown model shape {name!r}; {hint}", key="shape", value=name, expected=hint)
    return SHAPES[plain]
