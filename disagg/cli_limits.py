"""`disagg limits`: what a model can do on a GPU, from first principles, with the numbers put in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from disagg.perf.hardware import Device, Dtype
    from disagg.perf.limits import Bytes, Limits
    from disagg.perf.shapes import ModelShape

THIS_CPU = "this-cpu"


def register(app: typer.Typer) -> None:
    app.command("limits")(limits)


def limits(
    model: str | None = typer.Argument(
        None, help="A bundled model (llama-3.1-70b, qwen3-30b-a3b, deepseek-v3, ...), a config.json, or a folder with one."
    ),
    gpu: str = typer.Option(
        ..., "--gpu", help="a100, h100, h200, b200, l40s, rtx-4090, rtx-pro-6000, cpu; this-cpu measures this machine."
    ),
    tp: int = typer.Option(1, "--tp", min=1, help="Tensor-parallel degree: devices of one worker."),
    dtype: str | None = typer.Option(None, "--dtype", help="bf16, fp8, int8 or int4 weights; default: what config.json says, else bf16."),
    kv_dtype: str = typer.Option("bf16", "--kv-dtype", help="bf16, fp8 or int8."),
    context: int = typer.Option(2048, "--context", help="Tokens of context of each decoding sequence."),
    prompt: int | None = typer.Option(None, "--prompt", min=1, help="Tokens of the prompt to prefill and move; default: the context."),
    tpot_ms: float | None = typer.Option(None, "--tpot-ms", help="A target: the largest batch that keeps it."),
    batch: list[int] = typer.Option([], "--batch", min=1, help="Batch sizes of the table; repeatable; default: 1, 2, 4, ... 256."),
    link: list[str] = typer.Option([], "--link", help="nvlink4, pcie5, ib-ndr, eth-100, ..., or GB/s one way; repeatable."),
    utilization: float = typer.Option(0.9, "--utilization", min=0.05, max=1.0, help="vLLM's gpu_memory_utilization."),
    weights_gb: float | None = typer.Option(None, "--weights-gb", help="Instead of MODEL: weights in 10^9 bytes, all devices together."),
    kv_mib_per_token: float | None = typer.Option(
        None,
        "--kv-mib-per-token",
        help="With --weights-gb: KV of one token, in 1/1,024 of 10^9 bytes, as back-of-the-envelope pages count.",
    ),
    as_json: bool = typer.Option(False, "--json", help="The same figures as JSON: seconds, bytes, tokens."),
    plot: Path | None = typer.Option(None, "--plot", help="Also draw time per token and tokens/s over the batch size into this file."),
) -> None:
    """Show what fits, how quick a token can be, which batch keeps a TPOT, what prefill and KV transfer cost. Runs nothing."""
    from disagg.errors import ConfigError
    from disagg.perf.limits import BATCHES, find_limits
    from disagg.perf.limits_text import limits_json, limits_text
    from disagg.perf.links import USUAL_LINKS, find_link
    from disagg.perf.model_config import find_kv_dtype

    device = _device(gpu)
    shape, weights_dtype = _shape(model, dtype, weights_gb)
    cache_dtype = find_kv_dtype(kv_dtype)
    if tpot_ms is not None and not 0 < tpot_ms < math.inf:
        raise ConfigError(key="--tpot-ms", value=tpot_ms, expected="a number above 0")
    sizes = _sizes(shape, weights_dtype, cache_dtype, tp, weights_gb, kv_mib_per_token)
    page = find_limits(
        device,
        sizes,
        model=shape.name if shape else f"{weights_gb:g} GB of weights",
        shape=shape,
        tp=tp,
        dtype=weights_dtype,
        kv_dtype=cache_dtype,
        context_tokens=context,
        prompt_tokens=prompt or context,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
        batches=sorted(set(batch)) or BATCHES,
        links=[find_link(name) for name in link or USUAL_LINKS],
        utilization=utilization,
    )
    typer.echo(json.dumps(limits_json(page), indent=1) if as_json else limits_text(page))
    if plot is not None:
        _plot(page, plot)


def _device(name: str) -> Device:
    from disagg.perf.hardware import find_device

    if name != THIS_CPU:
        return find_device(name)
    from disagg.engine.vllm_cpu_probe import measured_device

    return measured_device()


def _shape(model: str | None, dtype: str | None, weights_gb: float | None) -> tuple[ModelShape | None, Dtype]:
    from disagg.errors import ConfigError
    from disagg.perf.model_config import find_dtype

    given = find_dtype(dtype, "--dtype") if dtype else None
    if model is None or weights_gb is not None:
        if weights_gb is None or model is not None:
            raise ConfigError(key="MODEL", value=model, expected="a model, or --weights-gb in its place: one of the two")
        return None, given or "bf16"
    return find_model(model, given)


def find_model(model: str, dtype: Dtype | None = None) -> tuple[ModelShape, Dtype]:
    """Shape and weights' type of a bundled name, a config.json, or a folder with one; `dtype`: the type, where it is given.

    Raises ConfigError.
    """
    from disagg.errors import ConfigError
    from disagg.perf.model_config import dtype_in_name, find_dtype, read_config
    from disagg.perf.shapes import find_shape

    path = Path(model).expanduser()
    if not model:
        raise ConfigError(key="MODEL", value=model, expected="a bundled model, a config.json or a folder with one")
    if not path.exists() and (path.suffix == ".json" or path.is_absolute() or model.startswith((".", "~"))):
        raise ConfigError(key="MODEL", value=model, expected="a bundled model, a config.json or a folder with one: nothing is there")
    if path.exists():
        return read_config(path, dtype)
    return find_shape(model), dtype or find_dtype(dtype_in_name(model), "MODEL")


def _sizes(
    shape: ModelShape | None, dtype: Dtype, kv_dtype: Dtype, tp: int, weights_gb: float | None, kv_mib_per_token: float | None
) -> Bytes:
    from disagg.errors import ConfigError
    from disagg.perf.limits import Bytes, sizes_of
    from disagg.perf.shapes import DTYPE_BYTES

    if shape is not None:
        if kv_mib_per_token is not None:
            raise ConfigError(key="--kv-mib-per-token", value=kv_mib_per_token, expected="nothing beside MODEL, whose KV is known")
        return sizes_of(shape, dtype, kv_dtype, tp)
    assert weights_gb is not None
    if not 0 < weights_gb < math.inf:
        raise ConfigError(key="--weights-gb", value=weights_gb, expected="a number above 0")
    kv_gb = kv_mib_per_token or 0.0
    if not 0 <= kv_gb < math.inf:
        raise ConfigError(key="--kv-mib-per-token", value=kv_gb, expected="0 or more")
    return Bytes(weights=weights_gb * 1e9, kv_per_token=kv_gb / 1024 * 1e9, params=weights_gb * 1e9 / DTYPE_BYTES[dtype])


def _plot(page: Limits, path: Path) -> None:
    from disagg.errors import ConfigError

    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(key="--plot", value=str(path), expected="matplotlib: pip install 'disagg[bench]'") from None
    figure = Figure(figsize=(9, 4), layout="constrained")
    batches = [row.batch for row in page.rows]
    curves = (
        ("ms per token", [(r.limit_tpot_s * 1e3, _or_nan(r.expected_tpot_s) * 1e3) for r in page.rows]),
        ("tokens/s", [(r.limit_tokens_per_s, _or_nan(r.expected_tokens_per_s)) for r in page.rows]),
    )
    for number, (what, values) in enumerate(curves, start=1):
        axis = figure.add_subplot(1, 2, number)
        axis.plot(batches, [limit for limit, _ in values], "k--", label="limit")
        axis.plot(batches, [expected for _, expected in values], "o-", label="expected")
        axis.set(xscale="log", yscale="log", xlabel=f"batch, {page.context_tokens:,} tokens each", ylabel=what)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"{page.model} in {page.dtype} on {page.tp} x {page.device.name}")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(key="--plot", value=str(path), expected=f"a file that can be written, .png, .svg or .pdf ({error})") from error
    typer.echo(f"{path}", err=True)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
