"""Each HTTP example runs to its end, against vLLM's API server over simulated workers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.builders import ROOT
from tests.openai_rig import door

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
