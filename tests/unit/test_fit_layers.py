"""bench.fit_layers finds the constants again from timings that were made with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import fit_layers
from disagg.perf.hardware import DEVICES
from disagg.perf.shapes import find_shape


def test_it_finds_what_the_timings_were_made_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, shape = DEVICES["rtx-4090"], find_shape("llama-3.1-8b")
    folder = tmp_path / "RTX4090" / "meta-llama" / "Llama-3.1-8B" / "bf16" / "tp1"
    folder.mkdir(parents=True)
    rate, attention = device.bf16, device.attention
    dense = ["layer,tokens,time_us", "act_fn,1,2.5"]
    for layer, n, k in (("gate_up_proj", 28672, 4096), ("down_proj", 4096, 14336)):
        for m in fit_layers.TOKENS:
            work = (2 * m * n * k / (rate.flops * 0.9)) ** 3 + (2 * n * k / (device.bandwidth * 0.7)) ** 3
            dense.append(f"{layer},{m},{(rate.floor_s + work ** (1 / 3) + 2 * m * n * 0.5 / device.bandwidth) * 1e6}")
    (folder / "dense.csv").write_text("\n".join(dense))
    timed = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", "16,0,0,0,10"]
    for count, context in ((8, 1024), (64, 2048), (128, 512)):
        kv_s = count * context * shape.num_kv_heads * shape.head_dim * 4 / (device.bandwidth * 0.6)
        alone_s = attention.floor_s + kv_s + count * shape.num_heads * attention.row_s
        timed += [f"0,0,{count},{context},{alone_s * 1e6}", f"16,0,{count},{context},{10 + 1.6 * alone_s * 1e6}"]
    (folder / "attention.csv").write_text("\n".join(timed))
    monkeypatch.setattr("sys.argv", ["fit_layers", "--tables", str(tmp_path)])
    fit_layers.main()
    said = capsys.readouterr().out
    assert "compute=0.9, weights=0.7, sharpness=3, passes_out=0.5 " in said
    assert "kv=0.6 " in said
    assert "mixed_group=0.20" in said
    assert "rtx-pro-6000: no tables" in said
