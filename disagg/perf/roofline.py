"""How long an engine's step takes, from first principles and measured kernels. Pure.

The roofline of Williams, Waterman and Patterson (2009), for each kernel of a step; a step runs some prompt tokens and some decode tokens
together, as vLLM's chunked prefill does:

    step      = layers x (products + attention + small kernels + 2 all-reduces) + head + host
    products  = those of the layer's weight matrices at the step's number of tokens         (hardware.MatmulRate)
    attention = prompt attention + KV reads of the decoding contexts                        (hardware.AttentionRate)
    small     = 5 kernels (two norms, rope, KV write, activation), their floors and traffic
    head      = the output projection of the sampled rows, and four passes of sampling over fp32 logits
    host      = step_s + request_s x sequences

FLOPs of a prompt are 2 x parameters x tokens (Kaplan et al. 2020, section 2.1), plus attention: 4 x layers x heads x head_dim for each
(query, key) pair under the causal mask. (A formula in circulation, 2 x tokens x hidden x layers, drops the factor of parameters per
layer and hidden dimension, about 12 x hidden.) Tensor parallelism gives each device its part of every matrix and of the heads; norms are
computed on all. A mixture of experts reads the experts that any token picked, and pads each one's rows to a tile. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from disagg.perf.hardware import Device, Dtype, MatmulRate
from disagg.perf.memory import check_tp, rank_kv_bytes_per_token
from disagg.perf.shapes import DTYPE_BYTES, ModelShape

_SMALL_KERNELS = 5
_TILE_ROWS = 16  # of a grouped product: an expert's rows are padded to it
_REMEMBERED = 1 << 16  # step sizes whose products are kept


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`num_tokens` prompt tokens of one request, after `num_cached_tokens` that are in the cache already."""

    num_tokens: int
    num_cached_tokens: int = 0

    @property
    def attention_pairs(self) -> float:
        """(query, key) pairs under the causal mask."""
        return self.num_tokens * (self.num_cached_tokens + (self.num_tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class _Matmul:
    """`count` products [tokens, k] x [k, n], as affine parts in the number of tokens (hardware.MatmulRate says how they add up)."""

    count: int
    token_s: float  # arithmetic of one token
    weights_s: float  # reading the weights
    activations_s: float  # moving one token's activations
    floor_s: float
    sharpness: float

    def seconds(self, tokens: float) -> float:
        p = self.sharpness
        work: float = ((tokens * self.token_s) ** p + self.weights_s**p) ** (1 / p)
        return self.count * (self.floor_s + work + tokens * self.activations_s)


def _matmul(rate: MatmulRate, bandwidth: float, width_bytes: float, n: int, k: int, count: int = 1) -> _Matmul:
    return _Matmul(
        count=count,
        token_s=2 * n * k / (rate.flops * rate.compute),
        weights_s=n * k * width_bytes / (bandwidth * rate.weights),
        activations_s=2 * (k * rate.passes_in + n * rate.passes_out) / bandwidth,
        floor_s=rate.floor_s,
        sharpness=rate.sharpness,
    )


@dataclass(frozen=True)
class StepModel:
    """Step times of one model on `tp` equal devices. `dtype`: weights and matrix products; `kv_dtype`: the KV cache."""

    shape: ModelShape
    device: Device
    tp: int = 1
    dtype: Dtype = "bf16"
    kv_dtype: Dtype = "bf16"
    _layers_s: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _heads_s: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_tp(self.shape, self.tp)

    def step_s(self, chunks: Sequence[PrefillChunk], num_decodes: int = 0, decode_context_tokens: int = 0) -> float:
        """Seconds of one engine step.

        chunks: prefill chunks in it. num_decodes: requests that decode one token each. decode_context_tokens: sum of their contexts.
        Affine in the latter. An empty step takes no time.
        """
        num_prompt = sum([c.num_tokens for c in chunks])
        num_tokens = num_decodes + num_prompt
        if num_tokens == 0:
            return 0.0
        attention = decode_context_tokens * self._context_s + num_decodes * self._row_s
        if chunks:
            pairs = sum([c.attention_pairs for c in chunks])
            attention = attention * self._mixed_factor + pairs * self._pair_s + num_prompt * self._prompt_token_s
        sequences = num_decodes + len(chunks)
        return self.layers_s(num_tokens) + attention + self.head_s(sequences) + self.host_s(sequences)

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0, max_num_batched_tokens: int | None = None) -> float:
        """Seconds to prefill one prompt alone: `num_tokens` in all, of which the first `num_cached_tokens` are cached, in chunks."""
        limit = max_num_batched_tokens or max(1, num_tokens)
        starts = range(num_cached_tokens, num_tokens, limit)
        return sum(self.step_s([PrefillChunk(min(limit, num_tokens - start), start)]) for start in starts)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of one decode step of `batch` requests whose contexts sum to `context_tokens`."""
        return self.step_s((), batch, context_tokens)

    def layers_s(self, num_tokens: int) -> float:
        """All layers' products, small kernels, attention floors and all-reduces for `num_tokens` tokens."""
        known = self._layers_s.get(num_tokens)
        if known is not None:
            return known
        seconds = sum(m.seconds(num_tokens) for m in self._dense_matmuls) + self._experts_s(num_tokens)
        seconds += self.shape.num_layers * (self.device.attention.floor_s + self._small_s(num_tokens))
        allreduce_s = self.device.fabric.allreduce_s(num_tokens * self.shape.hidden * 2, self.tp)
        seconds += 2 * self.shape.num_layers * allreduce_s
        if len(self._layers_s) < _REMEMBERED:
            self._layers_s[num_tokens] = seconds
        return seconds

    def head_s(self, rows: int) -> float:
        """The output projection of `rows` sampled positions, gathering their logits, and sampling."""
        known = self._heads_s.get(rows)
        if known is not None:
            return known
        logits = rows * self.shape.vocab
        gather = self.device.fabric.allreduce_s(logits * 2, self.tp) / 2
        seconds = self._head.seconds(rows) + gather + 4 * 4 * logits / self.device.bandwidth
        if len(self._heads_s) < _REMEMBERED:
            self._heads_s[rows] = seconds
        return seconds

    def host_s(self, sequences: int) -> float:
        """The engine's own work for a step of so many sequences."""
        return self.device.step_s + self.device.request_s * sequences

    @cached_property
    def _dense_matmuls(self) -> list[_Matmul]:
        """Products of all layers that every token takes part in."""
        shape, tp = self.shape, self.tp
        plain_layers = shape.dense_layers if shape.num_experts else shape.num_layers
        plain_width = shape.dense_intermediate if shape.num_experts else shape.intermediate
        kinds = [(n, k, shape.num_layers) for n, k in shape.attention_matmuls(tp)]
        kinds += [(n, k, plain_layers) for n, k in shape.mlp_matmuls(plain_width, tp) if plain_layers]
        made = [self._product(n, k, count) for n, k, count in kinds]
        if shape.num_experts:
            bf16 = self.device.bf16  # routers are not quantised
            made.append(_matmul(bf16, self.device.bandwidth, 2, shape.num_experts, shape.hidden, shape.moe_layers))
            made += [self._product(n, k, shape.moe_layers) for n, k in shape.mlp_matmuls(shape.shared_intermediate, tp)]
        return made

    def _product(self, n: int, k: int, count: int) -> _Matmul:
        return _matmul(self.device.rate(self.dtype), self.device.bandwidth, DTYPE_BYTES[self.dtype], n, k, count)

    @cached_property
    def _expert_matmuls(self) -> list[_Matmul]:
        """The products of one expert."""
        return [self._product(n, k, self.shape.moe_layers) for n, k in self.shape.mlp_matmuls(self.shape.intermediate, self.tp)]

    def _experts_s(self, num_tokens: int) -> float:
        shape = self.shape
        if not shape.num_experts:
            return 0.0
        touched = shape.num_experts * shape.touched_share(num_tokens)
        rows = num_tokens * shape.experts_per_token
        padded = max(rows + touched * (_TILE_ROWS - 1) / 2, touched)
        seconds = 0.0
        for m in self._expert_matmuls:
            p = m.sharpness
            work = ((padded * m.token_s) ** p + (touched * m.weights_s) ** p) ** (1 / p)
            seconds += m.count * (m.floor_s + work + rows * m.activations_s)
        # Choosing, sorting and summing: four small kernels, and each row is moved there and back.
        moved = 4 * rows * shape.hidden / self.device.bandwidth
        return seconds + shape.moe_layers * (4 * self.device.kernel_s + moved)

    def _small_s(self, num_tokens: int) -> float:
        """Norms, rope, KV write and activation of one layer: floors, and 2 B for each number read or written."""
        shape = self.shape
        width = shape.intermediate * shape.experts_per_token if shape.num_experts else shape.intermediate
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        moved = 2 * (8 * shape.hidden + (3 * (width + shape.shared_intermediate) + 3 * heads) / self.tp)
        return _SMALL_KERNELS * self.device.kernel_s + num_tokens * moved / self.device.bandwidth

    @cached_property
    def _head(self) -> _Matmul:
        return _matmul(self.device.bf16, self.device.bandwidth, 2, -(-self.shape.vocab // self.tp), self.shape.hidden)

    @cached_property
    def _pair_s(self) -> float:
        flops = 2 * self.shape.num_layers * self.shape.pair_dims
        return flops / (self.device.bf16_flops * self.device.attention.compute * self.tp)

    @cached_property
    def _prompt_token_s(self) -> float:
        heads_dim = self.shape.num_heads * self.shape.head_dim
        return self.shape.num_layers * 4 * heads_dim * self.device.attention.passes / (self.device.bandwidth * self.tp)

    @cached_property
    def _context_s(self) -> float:
        """One token of context that a decoding request reads. With MLA the arithmetic may be more than the read."""
        rate = self.device.attention
        read = rank_kv_bytes_per_token(self.shape, self.tp, self.kv_dtype) / (self.device.bandwidth * rate.kv)
        if self.shape.mla is None:
            return read
        flops = 2 * self.shape.num_layers * self.shape.decode_pair_dims / self.tp
        return max(read, flops / (self.device.bf16_flops * rate.compute))

    @cached_property
    def _row_s(self) -> float:
        return self.device.attention.row_s * self.shape.num_layers * self.shape.num_heads / self.tp

    @cached_property
    def _mixed_factor(self) -> float:
        group = 1 if self.shape.mla else self.shape.num_heads // self.shape.num_kv_heads
        return 1 + self.device.attention.mixed_group * (group - 1)
