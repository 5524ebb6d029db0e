"""What of the KV path only a GPU can show, in under 8 minutes on one of them.

    python -m bench.gpu_check [--json]

Shapes of Llama-3.1-8B (32 layers, 8 KV heads, head dim 128, bfloat16, blocks of 16 tokens), prompts of 2,048 and 8,192 tokens in scattered
blocks. Needs torch, triton, msgpack, numpy and xxhash, 16 GiB of free GPU memory, and nothing else on the GPU. Checks, each with its limit:

    gather, scatter      one launch for all layers, in the forms blocks and tokens: every byte right, and at least 0.6 x the device's own
                         copy, measured here. Launches follow each other, as they follow an engine's other work on its stream
    quantised            int8 and fp8 rows equal their reference in torch byte for byte, and come back as the reference's numbers
    to the host          a gather into page-locked memory (what the network carriers send), against a plain copy to the host; no limit
    cuda_ipc             a second process opens a device buffer of this one as the carrier does and reads it: every byte, and its
                         bandwidth; no limit

Exit status: 0 all limits hold; 1 one does not; 2 no CUDA device, or none with room, and nothing was measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 32, 8, 128, 16, 4096
LENGTHS = (2048, 8192)  # shorter ones take no longer than their launch
LEAST_SHARE = 0.6
MODULES = ("torch", "triton", "msgpack", "numpy", "xxhash")
SAMPLES, RUNS = 11, 8  # of each, and runs in a sample: what the host does for one is hidden behind the ones before
GIB = 1 << 30
NEEDED_BYTES = 16 * GIB
IPC_BYTES = 256 << 20
CHILD_S = 120.0
NO_DEVICE = 2


@dataclass(frozen=True)
class Row:
    """One line: what, for how many tokens, GB/s of KV, its share of the device's copy bandwidth (0: has no limit), and whether it holds."""

    what: str
    tokens: int
    gb_s: float
    share: float
    holds: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    why = obstacle()
    if why is not None:
        print(f"{why}: nothing was measured", file=sys.stderr)
        return NO_DEVICE
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    rows = [*copies(device), *quantised(device), ipc()]
    if given.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        for row in rows:
            gb_s = f"{row.gb_s:8.1f} GB/s" if row.gb_s else " " * 13
            share = f"{row.share:6.2f} x copy" if row.share else " " * 13
            print(f"{row.what:24} {row.tokens:6} tokens  {gb_s}  {share}  {'ok' if row.holds else 'FAILS'}")
    return 0 if all(row.holds for row in rows) else 1


def obstacle() -> str | None:
    """Why nothing can be measured here, or None."""
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < NEEDED_BYTES:
        return f"{free_bytes / GIB:.1f} GiB of GPU memory are free, {NEEDED_BYTES / GIB:.0f} needed"
    return None


def caches(device: Any, blocks: int, layers: int) -> list[Any]:
    """Per layer [blocks, heads, block, 2 x dim], each block's tokens outermost, as FlashAttention keeps them."""
    import torch

    generator = torch.Generator(device).manual_seed(1)
    shape = (blocks, BLOCK, HEADS, 2 * DIM)
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(layers)]


def scattered(tokens: int, blocks: int) -> list[int]:
    """Block ids for so many tokens, no two neighbours."""
    return [(7 * i + 3) % blocks for i in range(-(-tokens // BLOCK))]


def copies(device: Any) -> list[Row]:
    import torch

    from disagg.kv.tensors.kernels import gather_blocks, scatter_blocks
    from disagg.kv.tensors.token_copy import HeadRange, Slots, gather_by_layer, gather_tokens, scatter_tokens

    layers = caches(device, BLOCKS, LAYERS)
    words = [layer.transpose(1, 2).view(BLOCKS, -1).view(torch.int64) for layer in layers]
    rows = []
    for tokens in LENGTHS:
        ids = scattered(tokens, BLOCKS)
        index, slots = torch.tensor(ids, device=device), Slots.of(ids, BLOCK, tokens, device)
        entry = torch.empty((len(ids), LAYERS, words[0].shape[1]), dtype=torch.int64, device=device)
        by_token = torch.empty((tokens, LAYERS, 2 * HEADS * DIM * 2), dtype=torch.uint8, device=device)
        twin, num_bytes, whole = torch.empty_like(by_token), by_token.numel(), HeadRange(0, 0, HEADS, HEADS)
        limit = num_bytes / seconds(lambda a=twin, b=by_token: a.copy_(b)) / 1e9
        gather_by_layer(layers, slots, twin, "bfloat16")

        def are_tokens(right: Any = twin, got: Any = by_token) -> bool:
            return torch.equal(right, got)

        def are_blocks(right: Any = index, got: Any = entry) -> bool:
            return all(torch.equal(got[:, i], layer[right]) for i, layer in enumerate(words))

        def forget(of: Any = index) -> None:
            """Then only what a scatter brings back is there."""
            for layer in words:
                layer[of] = 0

        cases: list[tuple[str, Callable[[], Any], Callable[[], Any], Callable[[], bool]]] = [
            ("gather blocks", entry.zero_, lambda i=index, e=entry: gather_blocks(words, i, e), are_blocks),
            ("scatter blocks", forget, lambda i=index, e=entry: scatter_blocks(words, i, e), are_blocks),
            ("gather tokens", by_token.zero_, lambda s=slots, e=by_token: gather_tokens(layers, s, e, "bfloat16"), are_tokens),
            ("scatter tokens", forget, lambda s=slots, e=by_token, h=whole: scatter_tokens(e, layers, s, h, "bfloat16"), are_blocks),
        ]
        for what, prepare, run, is_right in cases:
            prepare()
            gb_s = num_bytes / seconds(run) / 1e9
            rows.append(Row(what, tokens, gb_s, gb_s / limit, gb_s >= LEAST_SHARE * limit and is_right()))
        pinned = page_locked(num_bytes).view(by_token.shape)
        plain = num_bytes / seconds(lambda p=pinned, e=by_token: p.copy_(e, non_blocking=True)) / 1e9
        pinned.zero_()
        gb_s = num_bytes / seconds(lambda p=pinned, s=slots: gather_tokens(layers, s, p, "bfloat16")) / 1e9
        is_right = torch.equal(pinned, twin.cpu())
        rows += [Row("copy to the host", tokens, plain, 0.0, True), Row("gather to the host", tokens, gb_s, 0.0, is_right)]
    return rows


def page_locked(num_bytes: int) -> Any:
    """Host memory, uint8 [num_bytes], from and to which the device copies by itself."""
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def quantised(device: Any) -> list[Row]:
    """Rows of one-byte numbers: equal to the reference on the CPU, and their speed."""
    import torch

    from disagg.kv.tensors.token_copy import HeadRange, Slots, gather_tokens, scatter_tokens

    tokens, layers = 2048, caches(device, 256, LAYERS)
    slots = Slots.of(scattered(tokens, 256), BLOCK, tokens, device)
    rows = []
    for dtype in ("int8", "fp8"):
        entry = torch.empty((tokens, LAYERS, 2 * HEADS * (DIM + 2)), dtype=torch.uint8, device=device)
        taken_s = seconds(lambda e=entry, d=dtype: gather_tokens(layers, slots, e, d))
        is_equal = torch.equal(entry, reference(layers, slots, dtype))
        rows.append(Row(f"quantise {dtype}", tokens, 2 * entry.numel() / taken_s / 1e9, 0.0, is_equal))
        into, right = caches(device, 256, LAYERS), [layer.cpu() for layer in layers]
        whole = HeadRange(0, 0, HEADS, HEADS)
        scatter_tokens(entry, into, slots, whole, dtype)
        host = Slots(slots.blocks.cpu(), slots.slots.cpu())
        scatter_tokens(entry.cpu(), right, host, whole, dtype)
        is_equal = all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(into, right, strict=True))
        rows.append(Row(f"dequantise {dtype}", tokens, 0.0, 0.0, is_equal))
    return rows


def reference(layers: list[Any], slots: Any, dtype: str) -> Any:
    """What torch makes of the same tokens on the CPU, on the device of `layers`."""
    import torch

    from disagg.kv.tensors.quantise import LIMIT
    from disagg.kv.tensors.token_copy import Slots, gather_tokens

    row_bytes = 2 * HEADS * (DIM + 2 if dtype in LIMIT else 2 * DIM)
    out = torch.empty((len(slots), len(layers), row_bytes), dtype=torch.uint8)
    gather_tokens([layer.cpu() for layer in layers], Slots(slots.blocks.cpu(), slots.slots.cpu()), out, dtype)
    return out.to(layers[0].device)


def ipc() -> Row:
    """A second process opens a buffer of this one as carrier cuda_ipc does, copies it, and says what it read."""
    import torch
    import torch.multiprocessing as mp

    from disagg.kv.carriers.cuda_ipc import CudaCopies

    what = "cuda_ipc, 256 MiB"
    ours = Buffer(torch.arange(IPC_BYTES // 8, dtype=torch.int64, device="cuda").view(torch.uint8))
    torch.cuda.synchronize()
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    try:
        shown = CudaCopies().show(ours)
    except RuntimeError as error:
        print(f"{what}: {error}", file=sys.stderr)
        return Row(what, 0, 0.0, 0.0, False)
    child = context.Process(target=_read_peer, args=(shown, results))
    child.start()
    child.join(CHILD_S)
    if child.exitcode is None:
        child.kill()
        child.join()
    if child.exitcode != 0:  # it has said why
        return Row(what, 0, 0.0, 0.0, False)
    is_right, gb_s = results.get()
    return Row(what, 0, gb_s, 0.0, is_right)


@dataclass(frozen=True)
class Buffer:
    """What `CudaCopies.show` needs of a box in GPU memory: uint8 [bytes]."""

    buffer: Any


def _read_peer(shown: bytes, results: Any) -> None:
    import torch

    from disagg.kv.carriers.cuda_ipc import CudaCopies

    device = CudaCopies()
    theirs = device.open(shown)
    mine = torch.zeros_like(theirs)
    torch.cuda.synchronize()  # the copies run on a stream of their own
    times = []
    for _ in range(SAMPLES):
        began_s = time.perf_counter()
        device.copy(mine, theirs, 0, IPC_BYTES)
        times.append(time.perf_counter() - began_s)
    right = torch.arange(IPC_BYTES // 8, dtype=torch.int64, device="cuda")
    results.put((torch.equal(mine.view(torch.int64), right), IPC_BYTES / statistics.median(times) / 1e9))


def seconds(run: Callable[[], Any]) -> float:
    """The time of one run on the device, the median of samples of RUNS, after a few to warm up."""
    import torch

    for _ in range(3):
        run()
    times = []
    for _ in range(SAMPLES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(RUNS):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / RUNS)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
