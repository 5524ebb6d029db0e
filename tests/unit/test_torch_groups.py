"""Payloads as tensors: what lies together is one without a copy, and keeps its memory."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

pytest.importorskip("torch")

from disagg.kv.carriers.torch_groups import are_together, tensor


def test_parts_that_lie_together_are_one_tensor_over_the_same_memory() -> None:
    memory = np.arange(100, dtype=np.uint8)
    view = memoryview(memory)
    parts = [view[10:20], view[20:21], view[21:60]]
    whole = tensor(parts)
    assert bytes(whole.numpy()) == bytes(view[10:60])
    whole[11] = 255
    assert memory[21] == 255


def test_parts_apart_are_copied_in_order() -> None:
    view = memoryview(np.arange(100, dtype=np.uint8))
    for parts in ([view[50:60], view[10:20]], [view[0:10], view[11:12]], [view[0:10], view[9:12]]):
        assert not are_together(*parts)
        assert bytes(tensor(parts).numpy()) == b"".join(parts)


def test_a_tensor_keeps_the_memory_of_its_parts() -> None:
    memory = np.zeros(64, dtype=np.uint8)
    gone = weakref.ref(memory)
    view = memoryview(memory)
    whole = tensor([view[:32], view[32:]])
    del memory, view
    gc.collect()
    assert gone() is not None
    del whole
    gc.collect()
    assert gone() is None
