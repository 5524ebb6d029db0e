"""The kernels for GPUs, compiled for one without having it: they compile, and move wide words where addresses permit."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402 (needs triton)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from disagg.kv.tensors import kernels  # noqa: E402

pytestmark = [
    pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="Triton interprets"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

HOPPER = GPUTarget("cuda", 90, 32)
ADDRESSES = {"bases": "*i64", "blocks": "*i64", "slots": "*i64", "block_ids": "*i64", "entry": "*i64", "out": "*u8", "source": "*u8"}
FIXED = {"limit": "fp32"}


def ptx(kernel: Any, align: int, **constants: Any) -> str:
    """The kernel for sm_90, for arguments that are multiples of 16, as those of Llama's shapes are."""
    constants["ALIGN"] = align
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else ADDRESSES.get(name) or FIXED.get(name, "i32") for name in names}
    multiples = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name] not in ("constexpr", "fp32")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, multiples)
    return str(triton.compile(source, target=HOPPER).asm["ptx"])


def words(code: str, what: str) -> set[str]:
    """Kinds of loads ("ld") or stores ("st") of device memory, such as v4.b32."""
    return set(re.findall(rf"\b{what}\.global\.([\w.]+)", code))


SHAPE = {"HEADS": 8, "DIM": 128, "GROUPS": 16, "WIDTH": 128, "NUMBER": tl.bfloat16}


@pytest.mark.parametrize("code", [0, 1, 2], ids=["bfloat16", "int8", "fp8"])
def test_the_gather_reads_wide_words(code: int) -> None:
    aligned = words(ptx(kernels._gather_tokens, 16, CODE=code, **SHAPE), "ld")
    assert "v4.b32" in aligned
    assert "b16" not in aligned, "a cache is read number by number"
    assert "b16" in words(ptx(kernels._gather_tokens, 1, CODE=code, **SHAPE), "ld"), "an address that may be odd is read in wide words"


@pytest.mark.parametrize("code", [0, 1, 2], ids=["bfloat16", "int8", "fp8"])
def test_the_scatter_writes_wide_words(code: int) -> None:
    stored = tl.bfloat16 if code == 0 else tl.uint8
    assert words(ptx(kernels._scatter_tokens, 16, CODE=code, OF=8, STORED=stored, **SHAPE), "st") == {"v4.b32"}


@pytest.mark.parametrize("is_gather", [True, False])
def test_blocks_are_copied_in_wide_words(is_gather: bool) -> None:
    code = ptx(kernels._copy_blocks, 16, GATHER=is_gather, SIZE=kernels._WORDS)
    assert words(code, "st") == {"v2.b64"}
    assert "v2.b64" in words(code, "ld")
