"""The page of limits as text and as plain values for JSON. Pure."""

from __future__ import annotations

from typing import Any

from disagg.perf.limits import Limits, StepRow


def limits_text(page: Limits) -> str:
    """Formulas with the numbers put in, one paragraph each."""
    parts = [_head(page), _memory(page), _steps(page), _prefill(page), _colocation(page), _links(page)]
    parts += [f"note: {note}" if not note.startswith("DOES NOT") else note for note in page.notes]
    return "\n\n".join(part for part in parts if part)


def limits_json(page: Limits) -> dict[str, Any]:
    """Seconds, bytes and tokens; the same figures as the text."""
    memory = page.memory
    return {
        "model": page.model,
        "gpu": page.device.name,
        "tp": page.tp,
        "dtype": page.dtype,
        "kv_dtype": page.kv_dtype,
        "context_tokens": page.context_tokens,
        "prompt_tokens": page.prompt_tokens,
        "weights_bytes": page.sizes.weights,
        "kv_bytes_per_token": page.sizes.kv_once_per_token,
        "kv_copies": page.sizes.kv_copies,
        "active_params": page.sizes.params,
        "bandwidth": page.bandwidth,
        "flops": page.flops,
        "fits": None if memory is None else memory.fits,
        "needed_tp": None if memory is None else memory.needed_tp,
        "kv_cache_tokens": None if memory is None else memory.kv_tokens,
        "min_token_s": page.min_token_s,
        "steps": [
            {
                "batch": row.batch,
                "limit_tpot_s": row.limit_tpot_s,
                "limit_tokens_per_s": row.limit_tokens_per_s,
                "limit_by": row.limit_by,
                "expected_tpot_s": row.expected_tpot_s,
                "expected_tokens_per_s": row.expected_tokens_per_s,
                "fits": row.fits,
            }
            for row in page.rows
        ],
        "tpot_target_s": page.tpot_target_s,
        "largest_batch_limit": page.largest_batch_limit,
        "largest_batch_expected": page.largest_batch_expected,
        "limit_prefill_s": page.limit_prefill_s,
        "expected_prefill_s": page.expected_prefill_s,
        "ridge_flops_per_byte": page.ridge_flops_per_byte,
        "ridge_tokens": page.ridge_tokens,
        "free_ride": [{"batch": b, "limit_tokens": limit, "expected_tokens": expected} for b, limit, expected in page.free_ride],
        "links": [
            {"link": row.link, "bandwidth": row.bandwidth, "transfer_s": row.transfer_s, "share_of_prefill": row.share_of_prefill}
            for row in page.links
        ],
        "break_even_bandwidth": page.break_even_bandwidth,
        "notes": list(page.notes),
    }


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


def _rate(value: float, unit: str) -> str:
    return f"{value / 1e12:,.4g} T{unit}" if value >= 1e12 else f"{value / 1e9:,.4g} G{unit}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f}"


def _head(page: Limits) -> str:
    d, many = page.device, f"{page.tp} x " if page.tp > 1 else ""
    return (
        f"{page.model} in {page.dtype}, KV in {page.kv_dtype}, on {many}{d.name}: {_rate(page.bandwidth, 'B/s')}, "
        f"{_rate(page.flops, 'FLOP/s')}, {page.tp * d.memory_bytes / 1e9:,.0f} GB\n"
        "limit: from the peaks alone. expected: with measured kernels and vLLM's own overheads."
    )


def _memory(page: Limits) -> str:
    sizes = page.sizes
    text = (
        f"weights      {_gb(sizes.weights)}, {sizes.params / 1e9:,.1f}e9 parameters multiplied for each token\n"
        f"KV           {sizes.kv_once_per_token / 1024:,.1f} KiB per token; {page.context_tokens:,} tokens: "
        f"{page.context_tokens * sizes.kv_once_per_token / 1e9:,.2f} GB{_copies(page)}"
    )
    if page.memory is None:
        return text
    memory = page.memory
    sequences = memory.kv_tokens // page.context_tokens
    return (
        f"{text}\nmemory       per device {_gb(memory.budget_bytes)} usable - {_gb(memory.weights_bytes)} weights - "
        f"{_gb(page.device.reserve_bytes)} for the runtime: {memory.kv_tokens:,} tokens of KV, {sequences:,} sequences of "
        f"{page.context_tokens:,}"
    )


def _copies(page: Limits) -> str:
    if page.sizes.kv_copies == 1:
        return ""
    return f", which {page.tp} devices keep {page.sizes.kv_copies:g} times (KV below counts all copies)"


def _steps(page: Limits) -> str:
    lines = [
        f"T_token,min  = weights / bandwidth = {_gb(page.read_bytes)} / {_rate(page.bandwidth, 'B/s')} = {_ms(page.min_token_s)} ms, "
        f"{1 / page.min_token_s:,.1f} tokens/s",
        f"T_step(B)    = max((weights + B x {page.context_tokens:,} x KV) / bandwidth, (2 x parameters x B + attention) / FLOP/s)",
        "",
        f"{'batch':>7}{'limit ms':>11}{'tokens/s':>11}  {'bound by':<9}{'expected ms':>12}{'tokens/s':>11}  memory",
        *[_step_line(row) for row in page.rows],
    ]
    if page.tpot_target_s is not None:
        expected = "" if page.largest_batch_expected is None else f", expected {page.largest_batch_expected:,}"
        lines += ["", f"largest batch with TPOT <= {page.tpot_target_s * 1e3:g} ms: limit {page.largest_batch_limit:,}{expected}"]
        if page.memory is not None:
            lines[-1] += f"; the KV cache holds {page.memory.kv_tokens // page.context_tokens:,}"
    return "\n".join(lines)


def _step_line(row: StepRow) -> str:
    rate = row.expected_tokens_per_s
    fits = {None: "", True: "fits", False: "too much"}[row.fits]
    line = f"{row.batch:>7}{_ms(row.limit_tpot_s):>11}{row.limit_tokens_per_s:>11,.1f}  {row.limit_by:<9}{_ms(row.expected_tpot_s):>12}"
    return f"{line}{'' if rate is None else f'{rate:,.1f}':>11}  {fits}".rstrip()


def _prefill(page: Limits) -> str:
    expected = "" if page.expected_prefill_s is None else f"; expected {_ms(page.expected_prefill_s)} ms"
    return (
        f"T_prefill    = (2 x parameters x tokens + attention) / FLOP/s: {page.prompt_tokens:,} tokens, limit "
        f"{_ms(page.limit_prefill_s)} ms{expected}\n"
        f"ridge        = FLOP/s / bandwidth = {page.ridge_flops_per_byte:,.0f} FLOPs per byte: a step of {page.ridge_tokens:,.0f} tokens "
        "computes as long as it reads weights"
    )


def _colocation(page: Limits) -> str:
    lines = [
        "free ride    prompt tokens that a decode step takes along for nothing (limit), and for less than 5 % (expected):",
        *[f"{batch:>7}{limit:>11,.0f}{'' if expected is None else f'{expected:,}':>11}" for batch, limit, expected in page.free_ride],
    ]
    return "\n".join(lines)


def _links(page: Limits) -> str:
    kv_gb = page.prompt_tokens * page.sizes.kv_once_per_token / 1e9
    copies = "" if page.sizes.kv_copies == 1 else f" x {page.sizes.kv_copies:g} copies"
    lines = [f"KV transfer  {page.prompt_tokens:,} tokens = {kv_gb:,.3f} GB{copies}, over one link for each of {page.tp} devices:"]
    lines += [
        f"  {row.link:<12}{row.bandwidth / 1e9:>8,.1f} GB/s {_ms(row.transfer_s):>9} ms  {row.share_of_prefill:>7.1%} of the prefill"
        for row in page.links
    ]
    lines.append(f"  it equals the prefill at {page.break_even_bandwidth / 1e9:,.2f} GB/s")
    return "\n".join(lines)
