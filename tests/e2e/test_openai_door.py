"""The OpenAI HTTP door: vLLM's API server over our coordinator. Real model files and real HTTP; the engines are simulated."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from vllm.engine.protocol import EngineClient
from vllm.sampling_params import SamplingParams

from disagg.errors import ConfigError
from disagg.front.openai_client import GatewayClient
from disagg.types import ModelInfo, Phase
from tests.builders import sim_topology
from tests.openai_rig import CHAT, COMPLETIONS, MAX_BODY_BYTES, VOCABULARY, ask, door

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


CONTEXT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "rojo=1,tenant@congo=2"}


async def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]


# ---- the interface that we implement, and what it may bring


def test_every_method_that_vllm_asks_of_an_engine_is_there() -> None:
    """When this fails, vLLM's EngineClient has moved: see vllm/engine/protocol.py and pyproject's range of versions."""
    assert not GatewayClient.__abstractmethods__
    theirs = inspect.signature(EngineClient.generate).parameters
    ours = inspect.signature(GatewayClient.generate).parameters
    assert set(theirs) == set(ours)
    assert (
        inspect.signature(EngineClient.check_admission).parameters.keys()
        == inspect.signature(GatewayClient.check_admission).parameters.keys()
    )


CARRIED = {
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "stop_token_ids"),
    *(
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "_bad_words_token_ids",
    ),
    *("logprobs", "logprob_token_ids", "prompt_logprobs", "structured_outputs"),
}
AT_THE_GATEWAY = {
    *("n", "stop", "include_stop_str_in_output", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
    *("stream_interval", "skip_clone", "flat_logprobs", "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids"),
    "repetition_detection",
}
REFUSED = {
    *("watermarking", "_watermarking_skipped", "prompt_logprob_token_ids", "prompt_logprob_start", "thinking_token_budget"),
    *("trace_decode_token_ids", "extra_args"),
}
WITHOUT_EFFECT = {
    "skip_reading_prefix_cache",  # follows from prompt_logprobs, and does so again on the worker
    "routed_experts_prompt_start",  # only with an engine argument that returns routing
}


def test_every_sampling_parameter_is_carried_or_refused() -> None:
    """A parameter that a new vLLM brings must not be dropped in silence: put it into one of the sets, and make that true."""
    known = CARRIED | AT_THE_GATEWAY | REFUSED | WITHOUT_EFFECT
    assert set(SamplingParams.__struct_fields__) - known == set()


# ---- answers


@pytest.mark.parametrize("mode", ["disagg", "colocated"])
async def test_answers_are_right(smollm2: Path, mode: str) -> None:
    prompt = [5, 6, 7, 8]
    async with door(smollm2, mode=mode) as d:
        answer = (await d.http.post(COMPLETIONS, json=ask(prompt, logprobs=1))).json()
        choice = answer["choices"][0]
        assert choice["token_ids"] == d.expected(prompt, 8)
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["token_logprobs"]) == 8
        assert answer["usage"].items() >= {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}.items()
        async with d.http.stream("POST", COMPLETIONS, json=ask(prompt, stream=True)) as response:
            streamed = await events(response)
        assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]
        assert [i for event in streamed for i in event["choices"][0]["token_ids"]] == choice["token_ids"]


async def test_n_answers_have_the_seeds_that_vllm_gives_them(smollm2: Path) -> None:
    prompt = [9, 10, 11]
    async with door(smollm2) as d:
        answer = (await d.http.post(COMPLETIONS, json=ask(prompt, n=3, seed=70, temperature=1.0))).json()
        assert len(answer["choices"]) == 3
        for index, choice in enumerate(answer["choices"]):
            assert choice["index"] == index
            assert choice["token_ids"] == d.expected(prompt, 8, seed=70 + index, temperature=1.0)
        assert answer["usage"]["completion_tokens"] == 24


async def test_a_stop_string_ends_the_request_on_its_workers(smollm2: Path) -> None:
    async with door(smollm2) as d:
        body = ask([5, 6, 7], max_tokens=2000)
        whole = (await d.http.post(COMPLETIONS, json=body)).json()["choices"][0]["text"]
        stop = whole[20:26]
        choice = (await d.http.post(COMPLETIONS, json=body | {"stop": stop})).json()["choices"][0]
        assert choice["text"] == whole[: whole.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert d.cluster.coordinator.ended == {Phase.FINISHED: 2}


async def test_a_tool_call_that_is_named_is_a_structure_for_the_workers(smollm2: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "1+1"}],
        "max_tokens": 4,
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    }
    async with door(smollm2, http_args={"tool_call_parser": "hermes", "enable_auto_tool_choice": True}) as d:
        response = await d.http.post(CHAT, json=body)
        assert d.asked, response.text
        assert d.asked[0].sampling.structure is not None
        assert "add" in d.asked[0].sampling.structure.spec


async def test_warnings_are_heard_beside_vllms_server(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that it imports shuts up the whole process below ERROR: gateways' warnings and lines of requests went with that."""
    from model_hosting_container_standards import logging_config

    from disagg.front import openai_server

    build = openai_server.build_app

    def build_first(*arguments: Any) -> Any:
        """As in a process that imports it now."""
        importlib.reload(logging_config)
        assert root.level == logging.ERROR
        return build(*arguments)

    monkeypatch.setattr(openai_server, "build_app", build_first)
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    try:
        async with door(smollm2):
            assert root.level == logging.INFO
    finally:
        root.setLevel(before)


# ---- terms


GIVEN: list[tuple[dict[str, str], dict[str, Any], str, int]] = [
    ({}, {}, "chat", 1),
    ({"x-slo-class": "batch"}, {}, "batch", -1),
    ({}, {"slo_class": "batch"}, "batch", -1),
    ({"x-slo-class": "chat"}, {"slo_class": "batch"}, "batch", -1),
    ({}, {"vllm_xargs": {"slo_class": "batch"}}, "batch", -1),
    ({"x-priority": "7"}, {}, "chat", 7),
    ({"x-slo-class": "batch", "x-priority": "0"}, {}, "batch", 0),
    ({}, {"priority": 3}, "chat", -3),  # vLLM's field: lower goes first
]
WRONG: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"x-slo-class": "gold"}, {}, "x-slo-class"),
    ({}, {"slo_class": "bach"}, "batch"),
    ({}, {"slo_class": 5}, "slo_class"),
    ({"x-priority": "first"}, {}, "x-priority"),
    ({"x-priority": "5000"}, {}, "x-priority"),
    ({}, {"priority": 1 << 40}, "priority"),
    ({"x-request-timeout-s": "-1"}, {}, "x-request-timeout-s"),
    ({"x-request-timeout-s": "nan"}, {}, "x-request-timeout-s"),
]


async def test_class_priority_and_trace_reach_the_coordinator_and_wrong_terms_are_named(smollm2: Path) -> None:
    async with door(smollm2) as d:
        for headers, fields, slo_class, priority in GIVEN:
            response = await d.http.post(COMPLETIONS, json=ask([5], **fields), headers=headers | CONTEXT)
            assert response.status_code == 200, response.text
            asked = d.asked.pop()
            assert (asked.slo_class, asked.priority) == (slo_class, priority), (headers, fields)
            assert {"traceparent": asked.traceparent, "tracestate": asked.tracestate} == CONTEXT
        for headers, fields, named in WRONG:
            response = await d.http.post(COMPLETIONS, json=ask([5], **fields), headers=headers)
            assert response.status_code == 400, (headers, fields)
            assert named in response.json()["error"]["message"]
        assert d.asked == []


# ---- refusals


@pytest.mark.parametrize("stream", [False, True])
async def test_without_workers_it_is_503_with_a_retry_after_before_any_stream(smollm2: Path, stream: bool) -> None:
    async with door(smollm2, admission={"worker_timeout_s": 0.5}) as d:
        for name in list(d.cluster.workers):
            await d.cluster.pool.leave(name)
        response = await d.http.post(COMPLETIONS, json=ask([5], stream=stream))
        assert response.status_code == 503
        assert response.headers["content-type"] == "application/json"
        assert int(response.headers["retry-after"]) >= 1
        assert "no live" in response.json()["error"]["message"]
        assert (await d.http.get("/ready")).status_code == 503
        assert (await d.http.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_with_a_retry_after(smollm2: Path, stream: bool) -> None:
    slow = {"speed": 0.02, "admission": {"max_queued_requests": 1, "max_prefills_per_worker": 1}}
    async with door(smollm2, check_empty=False, **slow) as d:
        waiting = [asyncio.create_task(d.http.post(COMPLETIONS, json=ask([5] * 4000, max_tokens=1))) for _ in range(6)]
        response = httpx.Response(200)
        while response.status_code == 200:
            await asyncio.wait(waiting, timeout=0.05)
            response = await d.http.post(COMPLETIONS, json=ask([5] * 4000, max_tokens=1, stream=stream))
        assert response.status_code == 429, response.text
        assert int(response.headers["retry-after"]) >= 1
        assert "wait" in response.json()["error"]["message"]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_deadline_ends_the_request_everywhere(smollm2: Path) -> None:
    async with door(smollm2, speed=0.05) as d:
        response = await d.http.post(COMPLETIONS, json=ask([5] * 100, max_tokens=2000), headers={"x-request-timeout-s": "1"})
        assert response.status_code == 504, response.text
        await d.cluster.settle()


BAD_BODIES: list[tuple[bytes, dict[str, str], int]] = [
    (b"{", {}, 400),
    (b'{"model": "smollm2-135m", "prompt": "\xff\xfe"}', {}, 400),
    (b'{"model": "smollm2-135m", "prompt": "\\ud800"}', {}, 400),
    (b"[" * 100_000, {}, 400),
    (b'{"n": ' + b"9" * 5000 + b"}", {}, 400),
    (b'{"model": "smollm2-135m", "prompt": "x", "slo_class": "chat"', {}, 400),
    (b"null", {}, 400),
    (b"x" * (MAX_BODY_BYTES + 1), {}, 413),
    (b" " * (50 << 20), {}, 413),
    (b'{"messages": [' + b'{"role": "user"},' * 5000 + b"]}", {}, 400),
    (b'{"model": "nobody", "prompt": "x"}', {}, 404),
    (b'{"model": "smollm2-135m", "prompt": "x", "structured_outputs": 39}', {}, 400),  # vLLM's own server: 500
    (b'{"model": "smollm2-135m", "prompt": "x"}', {"content-type": "text/plain"}, 400),
]


async def test_bad_bodies(smollm2: Path) -> None:
    async with door(smollm2) as d:
        for content, headers, status in BAD_BODIES:
            response = await d.http.post(COMPLETIONS, content=content, headers={"content-type": "application/json", **headers})
            assert response.status_code == status, (content[:60], response.text)
            error = response.json()["error"]
            assert error["code"] == status
            assert len(error["message"]) > 20
        assert (await d.http.post(COMPLETIONS, json=ask([5]))).status_code == 200


async def test_a_body_without_a_stated_length_is_bounded_too(smollm2: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    async with door(smollm2) as d:
        try:
            response = await d.http.post(COMPLETIONS, content=endless(), headers={"content-type": "application/json"})
            assert response.status_code == 413
        except httpx.TransportError:
            pass  # refused and closed while we were still sending
        assert (await d.http.post(COMPLETIONS, json=ask([5]))).status_code == 200


def test_a_wrong_server_argument_names_the_nearest(smollm2: Path) -> None:
    from disagg.front.openai_config import server_args, vllm_config

    topology = sim_topology()
    config = vllm_config(topology, str(smollm2), ModelInfo("m", 8192, VOCABULARY, 64))
    for name, hint in (("chat_templat", "chat_template"), ("port", "gateway.http_port")):
        gateway = topology.gateway.model_copy(update={"http_args": {name: 1}})
        with pytest.raises(ConfigError, match=hint):
            server_args(topology.model_copy(update={"gateway": gateway}), str(smollm2), config)


# ---- clients that leave, and clients that do not read


async def test_a_client_that_leaves_in_the_middle_cancels_everywhere(smollm2: Path) -> None:
    async with door(smollm2, speed=1.0) as d:
        async with d.http.stream("POST", COMPLETIONS, json=ask([5] * 50, max_tokens=4000, n=2, temperature=1.0, stream=True)) as response:
            async for line in response.aiter_lines():
                if line:
                    break
        await d.cluster.settle()
        d.cluster.assert_empty()
        assert d.cluster.coordinator.ended == {Phase.CANCELLED: 2}


async def test_a_client_that_does_not_read_slows_nobody(smollm2: Path) -> None:
    body = json.dumps(ask([5] * 10, max_tokens=6000, stream=True, logprobs=2)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with door(smollm2) as d:
        reader, writer = await asyncio.open_connection("127.0.0.1", d.port, limit=1024)
        writer.write(head + body)
        await writer.drain()
        async with asyncio.timeout(10):
            await d.submitted.wait()
        for _ in range(5):
            response = await d.http.post(COMPLETIONS, json=ask([6, 7]))
            assert response.json()["choices"][0]["token_ids"] == d.expected([6, 7], 8)
        states = d.server.client._output_processor.request_states
        assert len(states) <= 1
        writer.close()
        del reader
        await d.cluster.settle()


async def test_the_openai_package(smollm2: Path) -> None:
    openai = pytest.importorskip("openai")
    async with door(smollm2) as d, openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{d.port}/v1", api_key="none") as client:
        plain = await client.completions.create(model="smollm2-135m", prompt="Hello", max_tokens=5)
        assert plain.usage.completion_tokens == 5
        chat = await client.chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, extra_body={"slo_class": "batch"}
        )
        assert chat.choices[0].finish_reason == "length"
        stream = await client.chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == chat.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="x-slo-class"):
            await client.completions.create(model="smollm2-135m", prompt="Hello", extra_headers={"x-slo-class": "gold"})
        assert [request.slo_class for request in d.asked] == ["chat", "batch", "chat"]
        assert replace(d.asked[1], request_id="", arrival_s=0).prompt_token_ids == d.asked[2].prompt_token_ids
