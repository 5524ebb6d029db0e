"""Engine `vllm` when processes are killed: whoever waits hears of it at once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from disagg.engine.vllm_engine import start_vllm_engine
from disagg.errors import ConfigError, EngineError
from disagg.kv.box import Box
from disagg.types import Request, Sampling, new_id
from tests.fake_entries import FakeOutboxEntry
from tests.flow.test_tracing import PARENT, collector
from tests.machine import QUICK_ARGS

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

ARGS: dict[str, Any] = {
    "max_num_batched_tokens": 256,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 128 << 20,
    **QUICK_ARGS,
}
WAIT_S = 120.0

WORKER = """
    import asyncio, os, sys
    from disagg.engine.vllm_engine import start_vllm_engine
    from disagg.kv.box import Box

    async def main():
        box = Box(1 << 20, "unused")
        engine = await start_vllm_engine(sys.argv[1], eval(sys.argv[2]), box, box, "orphan", [0])
        print("up", flush=True)
        await asyncio.sleep(600)

    if __name__ == "__main__":
        asyncio.run(main())
"""


async def test_a_killed_engine_process_fails_all_calls_at_once(quick_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, the engine tells a collector of a request; vLLM's output task would die of it without its statistics."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
    outbox, inbox = Box(64 << 20, "outbox"), Box(1 << 20, "inbox")
    async with collector() as (found, endpoint):
        args = {**ARGS, "otlp_traces_endpoint": endpoint}
        engine = await start_vllm_engine(str(quick_model), args, outbox, inbox, "victim", [0])
        traced = Request(new_id(), (5, 6, 7), Sampling(max_tokens=3, ignore_eos=True), traceparent=PARENT)
        await asyncio.wait_for(anext_until_error(engine.generate(traced)), WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while PARENT.split("-")[1] not in {span.trace_id.hex() for _, span in found.spans.values()}:  # noqa: ASYNC110 (it comes when it comes)
                await asyncio.sleep(0.05)
    try:
        assert engine.is_alive
        requests = [Request(new_id(), tuple(range(100, 100 + n)), Sampling(max_tokens=1000, ignore_eos=True)) for n in (50, 60)]
        streams = [engine.generate(request) for request in requests]
        for stream in streams:
            await anext(stream)
        entry = FakeOutboxEntry(engine.layout, 1900)
        prefilling = asyncio.create_task(engine.prefill(Request(new_id(), tuple(range(1, 1901)), Sampling(max_tokens=9)), entry))
        await asyncio.sleep(0.1)
        (process_id,) = engine.process_ids
        os.kill(process_id, signal.SIGKILL)
        began = time.monotonic()
        for pending in (*(anext_until_error(stream) for stream in streams), prefilling):
            with pytest.raises(EngineError):
                await asyncio.wait_for(pending, 5)
        await asyncio.wait_for(engine.wait_dead(), 5)
        assert time.monotonic() - began < 5
        assert entry.is_ended
        assert not engine.is_alive
        with pytest.raises(EngineError):
            await engine.prefill(requests[0], FakeOutboxEntry(engine.layout, 50))
    finally:
        await engine.close()
    await engine.close()


async def anext_until_error(stream: Any) -> None:
    async for _ in stream:
        pass


def num_lifelines(worker_pid: int) -> int:
    """Engine processes that are tied to this worker. (Before that, one that is just starting gives up by vLLM's own five-minute limit.)"""
    sockets = Path("/proc/net/unix").read_text().count(f"@disagg-engine-{worker_pid}-")
    return max(0, sockets - 1)  # one of them listens


@pytest.mark.parametrize("when", ["loading", "serving"])
def test_a_killed_worker_leaves_no_engine(quick_model: Path, when: str, tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    worker = subprocess.Popen(
        [sys.executable, str(script), str(quick_model), repr(ARGS)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        if when == "serving":
            assert worker.stdout is not None
            assert b"up" in worker.stdout.read1()
        deadline = time.monotonic() + WAIT_S
        while num_lifelines(worker.pid) < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        children = psutil.Process(worker.pid).children(recursive=True)
        assert children
    finally:
        worker.kill()
        worker.communicate()
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert not alive, alive


async def test_a_model_that_cannot_be_handed_over_is_refused(quick_model: Path) -> None:
    box = Box(1 << 20, "unused")
    with pytest.raises(ConfigError, match="does not start"):
        await start_vllm_engine(str(quick_model), {**ARGS, "kv_cache_memory_bytes": 1 << 20}, box, box, "small", [0])
