"""The gRPC schema, filled at random: every call ends with an answer or an error of ours, and the next request is served."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from disagg.client_types import to_error
from disagg.errors import EngineError, InvalidRequestError
from disagg.front.server import INFERENCE_NAME
from disagg.pb import inference_pb2 as pb
from tests.builders import sim_topology
from tests.flow.test_gateway import served

EXAMPLES = 300
CALL_TIMEOUT_S = 20.0

int64 = st.one_of(st.integers(-3, 40), st.sampled_from([2**31, 2**32, 2**63 - 1, -(2**63)]))
number = st.one_of(st.floats(-3, 3), st.floats())
text = st.text(max_size=12)
SAMPLING: dict[str, Any] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"), int64),
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), number),
    **dict.fromkeys(("stop", "bad_words"), st.lists(text, max_size=3)),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), st.lists(int64, max_size=3)),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "json_object"), st.booleans()),
    **dict.fromkeys(("json_schema", "regex", "grammar", "structural_tag"), text),
    "logit_bias": st.dictionaries(int64, number, max_size=2),
    "choice": st.builds(pb.Choices, texts=st.lists(text, max_size=2)),
    "n": st.one_of(st.integers(-1, 4), int64),
}


@st.composite
def requests(draw: Any) -> pb.GenerateRequest:
    names = draw(st.lists(st.sampled_from(sorted(SAMPLING)), max_size=3, unique=True))
    message = pb.GenerateRequest(sampling=pb.SamplingParams(**{name: draw(SAMPLING[name]) for name in names}))
    if not message.sampling.HasField("max_tokens"):
        message.sampling.max_tokens = 4
    kind = draw(st.sampled_from(["usual", "usual", "text", "ids", "chat", "none"]))
    if kind == "usual":
        message.token_ids.ids.extend([5, 6, 7])
    elif kind == "text":
        message.text = draw(st.text(max_size=40))
    elif kind == "ids":
        message.token_ids.ids.extend(draw(st.lists(int64, max_size=5)))
        message.token_ids.SetInParent()
    elif kind == "chat":
        message.chat.messages.add(role=draw(text), content=draw(text))
        message.chat.template_arguments_json = draw(text)
    if draw(st.integers(0, 3)) == 0:
        message.slo_class, message.priority, message.cache_salt = draw(text), draw(int64), draw(text)
    if draw(st.integers(0, 5)) == 0:
        message.truncate_prompt_tokens = draw(int64)
    return message


def test_anything() -> None:
    ends: Counter[str] = Counter()

    async def main() -> None:
        async with served(sim_topology(max_model_len=512)) as s:
            loop = asyncio.get_running_loop()

            async def send(message: pb.GenerateRequest) -> None:
                call: Any = s.client._stub.Generate(message, timeout=CALL_TIMEOUT_S)
                try:
                    parts = [part async for part in call]
                except grpc.RpcError as error:
                    ours = to_error(error, "here", answered=False)
                    ends[type(ours).__name__] += 1
                    assert isinstance(ours, InvalidRequestError), (message, ours)
                    assert ours.field, message
                    assert ours.expected, message
                else:
                    ends["answered"] += 1
                    assert parts[-1].finish_reason, message

            @given(requests())
            @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
            def one(message: pb.GenerateRequest) -> None:
                asyncio.run_coroutine_threadsafe(send(message), loop).result(CALL_TIMEOUT_S * 2)

            await asyncio.to_thread(one)
            assert (await s.client.generate([5, 6], max_tokens=2, temperature=0.0)).token_ids == s.expected([5, 6], 2)

    asyncio.run(main())
    assert ends["answered"] > 10, ends
    assert ends["InvalidRequestError"] > 50, ends


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x0a\x05abc", b"\x12\xff\xff\xff\xff\x0f", bytes(range(256)) * 40])
async def test_bytes_that_are_no_message(content: bytes) -> None:
    async with served(sim_topology()) as s:
        call: Any = s.client._channel.unary_stream(f"/{INFERENCE_NAME}/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in call(content, timeout=CALL_TIMEOUT_S):
                pass
        ours = to_error(caught.value, "here", answered=False)
        assert isinstance(ours, (InvalidRequestError, EngineError)), ours
        assert (await s.client.generate([5, 6], max_tokens=2, temperature=0.0)).token_ids == s.expected([5, 6], 2)
