"""`vllm bench serve` and our client measure the same answers at once; a server that answers by the clock stands in for a model."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from bench.same_as_vllm import Load, measure
from disagg.models import get_model

pytestmark = pytest.mark.timeout(300)
GAPS_S = (0.4, 0.05, 0.2, 0.05, 0.3)  # to the first token, and between the five


async def completions(request: web.Request) -> web.StreamResponse:
    """Five tokens, of which the third has no text, as one of several bytes of a character has none."""
    body = await request.json()
    assert body["max_tokens"] == len(GAPS_S)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number, gap_s in enumerate(GAPS_S):
        await asyncio.sleep(gap_s)
        choice = {"text": "" if number == 2 else "x", "token_ids": [7], "finish_reason": "length" if number == 4 else None}
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    await response.write(b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 8}}).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def test_both_give_the_same_figures():
    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    load = Load("a-model", str(get_model("smollm2-135m")), requests=24, rate_rps=8, input_tokens=8, output_tokens=5, goodput_ms=(5e3, 5e3))
    try:
        pairs = {pair.name: pair for pair in await measure(f"http://127.0.0.1:{runner.addresses[0][1]}", load)}
    finally:
        await runner.cleanup()
    # A mean over four gaps and one over five differ by a fifth, a gap that counts as a first token by a quarter.
    for name in ("TTFT mean, ms", "TPOT mean, ms", "TPOT p50, ms", "ITL mean, ms", "E2E mean, ms"):
        assert abs(pairs[name].difference) < 0.08, pairs[name]
    assert pairs["output tokens"].vllm == pairs["output tokens"].ours == 24 * 5
    assert pairs["share inside the targets"].difference == 0
    assert pairs["TPOT mean, ms"].ours == pytest.approx(150, rel=0.2)
