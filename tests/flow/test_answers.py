"""What the gRPC door offers beside one plain answer: several answers, forms of the prompt, times in the trailing metadata."""

from __future__ import annotations

import re
from contextlib import aclosing
from typing import Any

import pytest

from disagg.errors import DisaggError, InvalidRequestError
from disagg.pb import inference_pb2 as pb
from disagg.types import Phase
from tests.builders import sim_topology
from tests.flow.test_gateway import served


async def test_n_answers_each_whole_with_the_seeds_that_vllm_gives_them() -> None:
    async with served(sim_topology(prefill=2, decode=2)) as s:
        answers = await s.client.generate_n([3, 4, 5], n=5, max_tokens=20, temperature=1.0, seed=40)
        for index, answer in enumerate(answers):
            alone = await s.client.generate([3, 4, 5], max_tokens=20, temperature=1.0, seed=40 + index)
            assert answer.index == index
            assert answer.token_ids == alone.token_ids
            assert answer.text == alone.text
            assert answer.usage.output_tokens == 20
        assert len({answer.token_ids for answer in answers}) == 5


async def test_a_client_that_leaves_ends_all_n() -> None:
    async with served(sim_topology(speed=1.0)) as s:
        async with aclosing(s.client.stream([3, 4, 5], n=4, max_tokens=4000, temperature=1.0)) as parts:
            await anext(parts)
        await s.cluster.settle()
        assert s.gateway.coordinator.ended == {Phase.CANCELLED: 4}


async def test_one_of_n_that_fails_ends_the_call_with_its_error() -> None:
    async with served(sim_topology(admission={"max_attempts": 1})) as s:

        async def ask() -> None:
            seen = 0
            async with aclosing(s.client.stream([3, 4, 5], n=3, max_tokens=4000, temperature=1.0)) as parts:
                async for _ in parts:
                    seen += 1
                    if seen == 10:
                        await s.cluster.kill("decode-0")

        with pytest.raises(DisaggError):
            await ask()
        await s.cluster.settle()


async def test_generate_takes_one_answer() -> None:
    async with served(sim_topology()) as s:
        with pytest.raises(InvalidRequestError, match="generate_n"):
            await s.client.generate([1], n=2)


async def test_times_come_in_the_trailing_metadata() -> None:
    async with served(sim_topology(speed=2.0)) as s:
        call: Any = s.client._stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), sampling=pb.SamplingParams(max_tokens=5)))
        last = [message async for message in call][-1]
        metadata = dict(await call.trailing_metadata())
    spans = dict(re.findall(r"(\w+);dur=([\d.]+)", metadata["server-timing"]))
    assert set(spans) == {"queue", "prefill", "transfer", "decode"}
    assert float(spans["decode"]) == pytest.approx(last.usage.timing.decode_s * 1e3, abs=0.001)
    assert float(spans["decode"]) > 0


async def test_a_conversation_needs_a_template() -> None:
    async with served(sim_topology()) as s:
        with pytest.raises(InvalidRequestError, match="chat template"):
            await s.client.generate([{"role": "user", "content": "Hi"}])
        with pytest.raises(InvalidRequestError, match="role"):
            await s.client.generate([{"text": "Hi"}])


async def test_the_end_of_a_prompt() -> None:
    async with served(sim_topology()) as s:
        answer = await s.client.generate([9, 9, 9, 5, 6], truncate_prompt_tokens=2, max_tokens=4, temperature=0.0)
        assert answer.usage.prompt_tokens == 2
        assert answer.token_ids == s.expected([5, 6], 4)


async def test_a_stop_string_may_stay_in_the_text() -> None:
    async with served(sim_topology()) as s:
        whole = (await s.client.generate([5, 6], max_tokens=30, temperature=0.0)).text
        stop = whole[20:25]
        end = whole.index(stop)
        cut = await s.client.generate([5, 6], max_tokens=30, temperature=0.0, stop=[stop])
        kept = await s.client.generate([5, 6], max_tokens=30, temperature=0.0, stop=[stop], include_stop_str_in_output=True)
        assert (cut.text, kept.text) == (whole[:end], whole[: end + len(stop)])


async def test_two_forms_are_refused_before_they_are_sent() -> None:
    async with served(sim_topology()) as s:
        with pytest.raises(InvalidRequestError, match="at most one of"):
            await s.client.generate([1], regex="a", choice=["b"])
