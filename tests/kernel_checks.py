"""The kernels for GPUs in Triton's interpreter; run by tests/unit/test_vllm_forms.py with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench import gpu_check
from disagg.kv.form import entry_layout
from disagg.kv.tensors import kernels
from disagg.kv.tensors.token_copy import HeadRange, Slots, gather_tokens, scatter_tokens
from tests.unit.test_vllm_forms import DIM, HEADS, LAYERS, Side


@pytest.mark.parametrize(("wire", "order"), [("bfloat16", "NHD"), ("int8", "HND"), ("fp8", "NHD")])
def test_the_token_kernels_equal_their_reference(wire: str, order: str) -> None:
    """Except where the interpreter rounds otherwise than a GPU: its casts to fp8 lose carries, those to bfloat16 cut."""
    side = Side(8, 1, order, "bfloat16")
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn((6, LAYERS, 2, HEADS, DIM), generator=generator)
    ids = side.blocks_of(6, 4)
    side.write(numbers, ids)
    caches = list(side.caches[0].values())
    slots = Slots.of(ids, 8, 6, torch.device("cpu"))
    row_bytes = entry_layout(side.layout, "tokens" if wire == "bfloat16" else f"tokens/{wire}").block_bytes
    want, got = (torch.zeros((6, LAYERS, row_bytes), dtype=torch.uint8) for _ in range(2))
    gather_tokens(caches, slots, want, wire)
    kernels.gather_on_device(caches, slots, got, wire)
    if wire != "fp8":
        assert torch.equal(want, got)
    heads = HeadRange(at=1, start=2, count=2, of=HEADS)
    into, reference = Side(8, 1, order, "bfloat16"), Side(8, 1, order, "bfloat16")
    scatter_tokens(want, list(reference.caches[0].values()), slots, heads, wire)
    kernels.scatter_on_device(want, list(into.caches[0].values()), slots, heads, wire)
    for mine, right in zip(into.caches[0].values(), reference.caches[0].values(), strict=True):
        assert torch.allclose(mine.float(), right.float(), rtol=0 if wire == "bfloat16" else 2**-7, atol=0)
        assert right[:, 1:3].abs().sum() > 0
        assert mine[:, 0].abs().sum() == mine[:, 3].abs().sum() == 0


def test_the_block_kernels_equal_indexing() -> None:
    layers = [torch.randint(-(1 << 62), 1 << 62, (6, 3000), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    ids = torch.tensor([4, 0, 5])
    out = torch.zeros((3, 3, 3000), dtype=torch.int64)
    kernels.gather_blocks(layers, ids, out)
    assert torch.equal(out, torch.stack([layer[ids] for layer in layers], 1))
    targets = [torch.zeros_like(layer) for layer in layers]
    kernels.scatter_blocks(targets, ids, out)
    for target, layer in zip(targets, layers, strict=True):
        assert torch.equal(target[ids], layer[ids])
        assert target[[1, 2, 3]].abs().sum() == 0


@pytest.fixture
def small_gpu_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/gpu_check.py on a CPU: small shapes, and each case run once."""
    for name, value in {"LAYERS": 2, "HEADS": 2, "DIM": 8, "BLOCKS": 8, "LENGTHS": (32, 64)}.items():
        monkeypatch.setattr(gpu_check, name, value)
    monkeypatch.setattr(gpu_check, "page_locked", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))

    def seconds(run: Callable[[], object]) -> float:
        run()
        return 1.0

    monkeypatch.setattr(gpu_check, "seconds", seconds)


@pytest.mark.usefixtures("small_gpu_check")
def test_the_gpu_check_passes_what_is_right() -> None:
    rows = gpu_check.copies(torch.device("cpu"))
    assert [row.what for row in rows if not row.holds] == []
    assert len(rows) == 2 * 6


@pytest.mark.usefixtures("small_gpu_check")
@pytest.mark.parametrize("what", ["gather_blocks", "scatter_blocks"])
def test_the_gpu_check_fails_what_is_wrong(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, what, lambda *_: None)
    rows = gpu_check.copies(torch.device("cpu"))
    assert what.replace("_", " ") in {row.what for row in rows if not row.holds}
