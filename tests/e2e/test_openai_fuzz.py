"""Requests that nobody planned: each gets an answer or a client error; nothing hangs, and the next request is served."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from tests.openai_rig import CHAT, COMPLETIONS, ask, door

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

EXAMPLES = 120
ANSWER_TIMEOUT_S = 30.0

huge = st.sampled_from([0, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30])
odd_numbers = st.one_of(st.integers(-3, 40), huge, st.floats(allow_nan=False, allow_infinity=False))
odd_lists = st.lists(odd_numbers, max_size=3)
odd_objects = st.dictionaries(st.text(max_size=5), odd_numbers, max_size=2)
odd = st.one_of(st.none(), st.booleans(), odd_numbers, st.text(max_size=20), odd_lists, odd_objects)
prompts = st.one_of(st.text(max_size=40), st.lists(st.integers(-2, 60_000), max_size=8), st.lists(st.text(max_size=5), max_size=3), odd)
roles = st.one_of(st.sampled_from(["system", "user", "assistant", "tool", "wizard"]), odd)
contents = st.one_of(st.text(max_size=20), odd, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)})))
messages = st.one_of(st.lists(st.fixed_dictionaries({"role": roles}, optional={"content": contents, "name": odd}), max_size=4), odd)
FIELDS = """
    max_tokens temperature top_p top_k min_p n seed stop stop_token_ids logprobs prompt_logprobs echo stream stream_options presence_penalty
    frequency_penalty repetition_penalty logit_bias bad_words allowed_token_ids min_tokens ignore_eos include_stop_str_in_output
    skip_special_tokens truncate_prompt_tokens response_format structured_outputs slo_class priority suffix user best_of use_beam_search
    vllm_xargs tools tool_choice kv_transfer_params cache_salt request_id return_token_ids max_completion_tokens top_logprobs chat_template
    add_generation_prompt continue_final_message repetition_detection thinking_token_budget logprob_token_ids stream_interval
"""
# Long answers say nothing new here.
extras = st.dictionaries(st.sampled_from(FIELDS.split()), odd, max_size=3)


@st.composite
def requests(draw: Any) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from([COMPLETIONS, CHAT]))
    usual = {"prompt": [5, 6, 7]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = usual if draw(st.booleans()) else {"prompt": draw(prompts)} if path == COMPLETIONS else {"messages": draw(messages)}
    return path, {"model": "smollm2-135m", "max_tokens": 3, **prompt, **draw(extras)}


def bounded(body: dict[str, Any]) -> dict[str, Any]:
    """Keep what is valid small: thousands of answers of thousands of tokens are right, and slow."""
    for name in ("n", "best_of", "max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 8 < value <= 8192:
            body[name] = 4
    return body


def test_anything(smollm2: Path) -> None:
    statuses: dict[int, int] = {}

    async def main() -> None:
        async with door(smollm2, check_empty=True) as d:
            loop = asyncio.get_running_loop()

            async def send(path: str, body: dict[str, Any]) -> None:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    try:
                        content = json.dumps(body)
                    except ValueError:
                        return
                    response = await d.http.post(path, content=content, headers={"content-type": "application/json"})
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                assert response.status_code < 500, (path, body, response.text)
                assert '{"error"' not in response.text or response.status_code >= 400, (path, body, response.text)

            @given(requests())
            @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
            def one(request: tuple[str, dict[str, Any]]) -> None:
                path, body = request
                asyncio.run_coroutine_threadsafe(send(path, bounded(body)), loop).result(ANSWER_TIMEOUT_S * 2)

            await asyncio.to_thread(one)
            assert (await d.http.post(COMPLETIONS, json=ask([5, 6]))).status_code == 200

    asyncio.run(main())
    assert statuses.get(200, 0) > 5, statuses
    assert statuses.get(400, 0) > 20, statuses


async def test_paths_and_methods(smollm2: Path) -> None:
    """Every route that vLLM's server has, asked with nothing, with nonsense, and by the wrong method."""
    async with door(smollm2) as d:
        routes = (await d.http.get("/openapi.json")).json()["paths"]
        assert len(routes) > 10
        for path in routes:
            concrete = path.replace("{", "").replace("}", "")
            for method in ("GET", "POST", "PUT", "DELETE"):
                for content in (b"", b"{}", b'{"model": "smollm2-135m", "prompt": 5, "messages": 7, "input": {}}'):
                    async with asyncio.timeout(ANSWER_TIMEOUT_S):
                        try:
                            response = await d.http.request(method, concrete, content=content, headers={"content-type": "application/json"})
                        except httpx.HTTPError as error:
                            pytest.fail(f"{method} {path}: {error!r}")
                    assert response.status_code < 500, (method, path, content, response.text)
                    if response.status_code >= 400:
                        assert response.json()["error"]["code"] == response.status_code, (method, path, response.text)
        assert (await d.http.post(COMPLETIONS, json=ask([5, 6]))).status_code == 200
