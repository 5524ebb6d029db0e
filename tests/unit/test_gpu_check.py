"""bench/gpu_check.py where there is no GPU: it says so, measures nothing, and its parts that need none are right."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from bench import gpu_check  # noqa: E402 (needs torch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_stops(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    assert gpu_check.main() == gpu_check.NO_DEVICE
    said = capsys.readouterr()
    assert "no CUDA device" in said.err
    assert said.out == ""


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    monkeypatch.setattr(gpu_check, "MODULES", ("torch", "no_such_module"))
    assert gpu_check.main() == gpu_check.NO_DEVICE
    assert "no_such_module not installed: nothing was measured" in capsys.readouterr().err


def test_a_full_gpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 80 << 30))
    assert gpu_check.obstacle() == "1.0 GiB of GPU memory are free, 16 needed"


def test_blocks_are_scattered_and_distinct() -> None:
    ids = gpu_check.scattered(8192, gpu_check.BLOCKS)
    assert len(set(ids)) == len(ids) == 512
    assert all(abs(a - b) > 1 for a, b in itertools.pairwise(ids))


def test_the_reference_reads_the_tokens_in_their_order() -> None:
    from disagg.kv.tensors.token_copy import Slots

    layers = gpu_check.caches(torch.device("cpu"), blocks=8, layers=2)
    slots = Slots.of(gpu_check.scattered(20, 8), gpu_check.BLOCK, 20, torch.device("cpu"))
    rows = gpu_check.reference(layers, slots, "bfloat16").view(torch.bfloat16).view(20, 2, 2, gpu_check.HEADS, gpu_check.DIM)
    block, slot = slots.blocks[17], slots.slots[17]
    assert torch.equal(rows[17, 1, 1, 5], layers[1][block, 5, slot, gpu_check.DIM :])
    assert gpu_check.reference(layers, slots, "fp8").shape == (20, 2, 2 * gpu_check.HEADS * (gpu_check.DIM + 2))
