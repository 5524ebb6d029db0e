"""What a model can do on a device at all, and what to expect of it. Pure.

Every figure comes twice. The *limit* takes the device's peaks: no engine can be quicker, but for parameters that a formula counts and a
clever engine leaves alone (the input embedding's other rows, logits of a prompt's inner tokens), which the page names where they weigh.

    T_token,min       = weight bytes that one token reads / bandwidth
    T_step(B)         = max((weights touched by B tokens + B x context x KV bytes) / bandwidth,
                            (2 x active parameters x B + attention) / FLOP/s)
    T_prefill(n)      = max((2 x active parameters x n + attention) / FLOP/s, weights / bandwidth)
    ridge             = FLOP/s / bandwidth                               in FLOPs per byte
    free-ride bound   = tokens whose arithmetic hides behind the reads of a decode step, less the batch itself:
                        (weights touched by B tokens + KV of the batch) / bandwidth x FLOP/s / (2 x active parameters) - B;
                        of a mixture of experts at most those that add less than 1 % to the reads, for they touch experts, too
    T_transfer(n)     = n x KV bytes / (link bandwidth x devices); it equals the prefill at n x KV bytes / T_prefill(n)

The *expected* time is the step model's (roofline.py), with measured kernels. Peaks and bytes are those of all `tp` devices together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.errors import ConfigError
from disagg.perf.hardware import Device, Dtype
from disagg.perf.links import Link
from disagg.perf.memory import MemoryReport, placement_memory, rank_kv_bytes_per_token
from disagg.perf.roofline import PrefillChunk, StepModel
from disagg.perf.shapes import DTYPE_BYTES, ModelShape

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MOST_BATCH = 1 << 16
_WORTH_A_NOTE = 0.02
_SAME_EXPERTS = 0.01  # of a step's reads: by so much more at most is nothing


@dataclass(frozen=True, slots=True)
class Bytes:
    """The sizes that the limits need, of all devices together: where they are given as figures, no shape is needed.

    `kv_per_token` with all copies that the devices keep, `kv_copies` of each number. `params`: active parameters;
    `attention_flops_per_pair`: 0 where the shape is unknown.
    """

    weights: float
    kv_per_token: float
    params: float
    attention_flops_per_pair: float = 0.0
    kv_copies: float = 1.0

    @property
    def kv_once_per_token(self) -> float:
        """Bytes of one token's KV without copies."""
        return self.kv_per_token / self.kv_copies


@dataclass(frozen=True, slots=True)
class StepRow:
    """One batch size. Seconds for each token; `limit_by` says which roof the limit touches. `fits`: None without a shape."""

    batch: int
    limit_tpot_s: float
    limit_by: str
    expected_tpot_s: float | None
    fits: bool | None

    @property
    def limit_tokens_per_s(self) -> float:
        return self.batch / self.limit_tpot_s

    @property
    def expected_tokens_per_s(self) -> float | None:
        return None if self.expected_tpot_s is None else self.batch / self.expected_tpot_s


@dataclass(frozen=True, slots=True)
class LinkRow:
    """Moving one prompt's KV over `link` (one for each device): seconds, and as a share of the expected (else the limit's) prefill."""

    link: str
    bandwidth: float
    transfer_s: float
    share_of_prefill: float


@dataclass(frozen=True, slots=True)
class Limits:
    """The page. Bandwidths in bytes/s; `largest_batch` None where no target was given, 0 where even one sequence misses it."""

    model: str
    device: Device
    tp: int
    dtype: Dtype
    kv_dtype: Dtype
    context_tokens: int
    prompt_tokens: int
    sizes: Bytes
    bandwidth: float
    flops: float
    memory: MemoryReport | None
    min_token_s: float
    read_bytes: float  # of weights, by one token
    rows: tuple[StepRow, ...]
    tpot_target_s: float | None
    largest_batch_limit: int | None
    largest_batch_expected: int | None
    limit_prefill_s: float
    expected_prefill_s: float | None
    ridge_flops_per_byte: float
    ridge_tokens: float
    free_ride: tuple[tuple[int, float, int | None], ...]  # batch, tokens at the limit, tokens expected to cost < 5 %
    links: tuple[LinkRow, ...]
    break_even_bandwidth: float
    notes: tuple[str, ...] = field(default=())


def sizes_of(shape: ModelShape, dtype: Dtype, kv_dtype: Dtype, tp: int = 1) -> Bytes:
    """Of a known shape. With more devices than KV heads (or with MLA) each keeps copies, which are read as well."""
    kept = rank_kv_bytes_per_token(shape, tp, kv_dtype) * tp
    return Bytes(
        weights=shape.weight_bytes(dtype),
        kv_per_token=kept,
        params=shape.active_params + shape.head_params,
        attention_flops_per_pair=2 * shape.num_layers * shape.pair_dims,
        kv_copies=kept / shape.kv_bytes_per_token(kv_dtype),
    )


def find_limits(
    device: Device,
    sizes: Bytes,
    *,
    model: str,
    shape: ModelShape | None,
    tp: int = 1,
    dtype: Dtype = "bf16",
    kv_dtype: Dtype = "bf16",
    context_tokens: int = 2048,
    prompt_tokens: int = 2048,
    tpot_s: float | None = None,
    batches: Sequence[int] = BATCHES,
    links: Sequence[Link] = (),
    utilization: float = 0.9,
) -> Limits:
    """Raises ConfigError for a TPOT below the physical limit (naming it), and for a context that the model was not made for."""
    _check(shape, "context", context_tokens)
    _check(shape, "prompt", prompt_tokens)
    step = StepModel(shape, device, tp, dtype, kv_dtype) if shape else None
    peaks = _Peaks(sizes, shape, dtype, device.bandwidth * tp, device.rate(dtype).flops * tp)
    memory = placement_memory(shape, device, tp, dtype, utilization, context_tokens, kv_dtype) if shape else None
    rows = tuple(_row(peaks, step, memory, batch, context_tokens) for batch in batches)
    if tpot_s is not None and tpot_s < (floor_s := peaks.step_s(1, context_tokens)[0]):
        message = (
            f"tpot: {tpot_s * 1e3:g} ms is below the physical limit of {floor_s * 1e3:.1f} ms for {model} on {tp} x {device.name}: "
            f"one step reads {(sizes.weights + context_tokens * sizes.kv_per_token) / 1e9:,.1f} GB at {peaks.bandwidth / 1e12:.2f} TB/s"
        )
        raise ConfigError(message, key="tpot_ms", value=tpot_s * 1e3, expected=f"at least {floor_s * 1e3:.1f} ms")
    prefill_s = peaks.prefill_s(prompt_tokens)
    expected_prefill_s = step.prefill_s(prompt_tokens) if step else None
    kv_bytes = prompt_tokens * sizes.kv_per_token
    return Limits(
        model=model,
        device=device,
        tp=tp,
        dtype=dtype,
        kv_dtype=kv_dtype,
        context_tokens=context_tokens,
        prompt_tokens=prompt_tokens,
        sizes=sizes,
        bandwidth=peaks.bandwidth,
        flops=peaks.flops,
        memory=memory,
        min_token_s=peaks.touched_bytes(1) / peaks.bandwidth,
        read_bytes=peaks.touched_bytes(1),
        rows=rows,
        tpot_target_s=tpot_s,
        largest_batch_limit=None if tpot_s is None else _largest(lambda b: peaks.step_s(b, context_tokens)[0] <= tpot_s),
        largest_batch_expected=None
        if tpot_s is None or step is None
        else _largest(lambda b: step.decode_step_s(b, b * context_tokens) <= tpot_s),
        limit_prefill_s=prefill_s,
        expected_prefill_s=expected_prefill_s,
        ridge_flops_per_byte=peaks.flops / peaks.bandwidth,
        ridge_tokens=peaks.tokens_behind(sizes.weights),
        free_ride=tuple((batch, peaks.free_ride(batch, context_tokens), _free_ride(step, batch, context_tokens)) for batch in batches),
        links=tuple(
            LinkRow(
                link.name, link.usable, kv_bytes / (link.usable * tp), kv_bytes / (link.usable * tp) / (expected_prefill_s or prefill_s)
            )
            for link in links
        ),
        break_even_bandwidth=kv_bytes / tp / (expected_prefill_s or prefill_s),
        notes=tuple(_notes(peaks, device, memory, tp, context_tokens, max(context_tokens, prompt_tokens))),
    )


def _check(shape: ModelShape | None, key: str, tokens: int) -> None:
    if tokens < 1:
        raise ConfigError(key=key, value=tokens, expected="at least 1 token")
    if shape is not None and shape.max_context_tokens and tokens > shape.max_context_tokens:
        raise ConfigError(key=key, value=tokens, expected=f"at most {shape.max_context_tokens:,} tokens, which {shape.name} was made for")


@dataclass(frozen=True, slots=True)
class _Peaks:
    """The limits' arithmetic: peaks of all devices together."""

    sizes: Bytes
    shape: ModelShape | None
    dtype: Dtype
    bandwidth: float
    flops: float

    def touched_bytes(self, tokens: float) -> float:
        """Weights read by a step of `tokens` tokens: all but a MoE's untouched experts."""
        if self.shape is None or not self.shape.num_experts:
            return self.sizes.weights
        unread = (1 - self.shape.touched_share(tokens)) * self.shape.routed_params
        return self.sizes.weights - unread * DTYPE_BYTES[self.dtype]

    def step_s(self, batch: int, context_tokens: int) -> tuple[float, str]:
        memory_s = (self.touched_bytes(batch) + batch * context_tokens * self.sizes.kv_per_token) / self.bandwidth
        pairs = batch * context_tokens
        compute_s = (2 * self.sizes.params * batch + self.sizes.attention_flops_per_pair * pairs) / self.flops
        return (memory_s, "memory") if memory_s >= compute_s else (compute_s, "compute")

    def prefill_s(self, tokens: int) -> float:
        pairs = PrefillChunk(tokens).attention_pairs
        compute_s = (2 * self.sizes.params * tokens + self.sizes.attention_flops_per_pair * pairs) / self.flops
        return max(compute_s, self.touched_bytes(tokens) / self.bandwidth)

    def tokens_behind(self, num_bytes: float) -> float:
        """Tokens whose products take as long as reading so many bytes."""
        return num_bytes / self.bandwidth * self.flops / (2 * self.sizes.params)

    def free_ride(self, batch: int, context_tokens: int) -> float:
        """Prompt tokens whose arithmetic hides behind the reads of a decode step; a MoE's only as far as they touch no more experts."""
        read = self.touched_bytes(batch) + batch * context_tokens * self.sizes.kv_per_token
        hidden = max(0.0, self.tokens_behind(read) - batch)
        if self.shape is None or not self.shape.num_experts:
            return hidden
        most = self.touched_bytes(batch) + _SAME_EXPERTS * read
        return min(hidden, float(_largest(lambda tokens: self.touched_bytes(batch + tokens) <= most)))


def _row(peaks: _Peaks, step: StepModel | None, memory: MemoryReport | None, batch: int, context_tokens: int) -> StepRow:
    limit_s, limit_by = peaks.step_s(batch, context_tokens)
    expected_s = step.decode_step_s(batch, batch * context_tokens) if step else None
    return StepRow(batch, limit_s, limit_by, expected_s, None if memory is None else memory.kv_tokens >= batch * context_tokens)


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest batch for which `holds` is true; it holds for all smaller ones."""
    if not holds(1):
        return 0
    low, high = 1, 2
    while high <= _MOST_BATCH and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _free_ride(step: StepModel | None, batch: int, context_tokens: int) -> int | None:
    """Prompt tokens that lengthen a decode step of `batch` by less than 5 %, by the step model."""
    if step is None:
        return None
    alone_s = step.decode_step_s(batch, batch * context_tokens)
    return _largest(lambda n: step.step_s([PrefillChunk(n)], batch, batch * context_tokens) <= 1.05 * alone_s)


def _notes(peaks: _Peaks, device: Device, memory: MemoryReport | None, tp: int, context_tokens: int, longest: int) -> list[str]:
    notes, shape = [], peaks.shape
    if memory is not None and not memory.fits:
        smallest = f"the smallest tensor-parallel degree that does is {memory.needed_tp}" if memory.needed_tp else "no degree up to 32 does"
        notes.append(
            f"DOES NOT FIT: {memory.weights_bytes / 1e9:.1f} GB of weights and {context_tokens:,} tokens of KV "
            f"({context_tokens * memory.kv_bytes_per_token / 1e9:.2f} GB) on each of {tp} x {device.name}, of "
            f"{memory.budget_bytes / 1e9:.1f} GB usable; {smallest}"
        )
    if peaks.dtype == "fp8" and device.fp8_flops <= device.bf16_flops:
        notes.append(f"the {device.name} has no fp8 units: fp8 saves memory and reads, not arithmetic")
    if shape is None:
        return notes
    if shape.num_experts:
        notes.append("experts are taken as picked evenly and independently; skew reads fewer and loads some more")
    if shape.is_windowed(longest):
        notes.append(shape.window_note)
    # Both formulas are the usual ones, with all parameters; where these weigh something, that is said.
    looked_up = 0.0 if shape.tied_embeddings else shape.head_params * DTYPE_BYTES["bf16"] / peaks.touched_bytes(1)
    if looked_up >= _WORTH_A_NOTE:
        notes.append(f"T_token,min reads all weights; {looked_up:.1%} of them are the input embedding, of which a token needs one row")
    once = shape.head_params / peaks.sizes.params
    if once >= _WORTH_A_NOTE:
        notes.append(
            f"T_prefill multiplies all parameters with each token; only the last one needs the output projection, {once:.1%} of them"
        )
    return notes
