"""Each HTTP example, and vLLM's own benchmark, runs to its end, against vLLM's API server over simulated workers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from bench.load_clients import INPUT_TOKENS, OUTPUT_TOKENS, vllm_bench
from tests.builders import ROOT
from tests.openai_rig import CHAT, COMPLETIONS, door

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


async def run(*command: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    async with asyncio.timeout(120):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.parametrize(
    ("command", "needs", "says"),
    [
        ((sys.executable, "examples/openai_client.py"), "openai", ["8 tokens", "no form:"]),
        ((sys.executable, "examples/langchain_client.py"), "langchain_openai", ["["]),
        (("bash", "examples/curl.sh"), "", ["ready", "smollm2-135m", '"finish_reason":"length"', "data: [DONE]", "disagg_requests_total{"]),
    ],
    ids=["openai", "langchain", "curl"],
)
async def test_examples_run(smollm2: Path, command: tuple[str, ...], needs: str, says: list[str]) -> None:
    if needs:
        pytest.importorskip(needs)
    async with door(smollm2) as d:
        status, out = await run(*command, f"http://127.0.0.1:{d.port}")
        assert status == 0, out
        for text in says:
            assert text in out, out


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_vllms_own_benchmark_runs_to_its_end(smollm2: Path, path: str) -> None:
    """`python -m bench.doors_real` does it on real engines, and compares what it measures with what we do."""
    async with door(smollm2) as d:
        found = await vllm_bench(f"http://127.0.0.1:{d.port}", path, 5, 20.0, str(smollm2))
    assert (found.completed, found.failed) == (5, 0)
    assert found.ttft_ms > 0
    benched = d.asked[-5:]
    assert {request.sampling.max_tokens for request in benched} == {OUTPUT_TOKENS}
    assert all(request.num_prompt_tokens >= INPUT_TOKENS for request in benched)
