"""The worker wire loses nothing of what a request asks and of what a step answers."""

from __future__ import annotations

import dataclasses

from disagg.pb import worker_pb2 as pb
from disagg.serving.worker_rpc_messages import (
    add_chunk,
    chunk_from_wire,
    prefilled_from_wire,
    prefilled_to_wire,
    request_from_wire,
    request_to_wire,
    state_from_wire,
    state_to_wire,
)
from disagg.types import (
    Chunk,
    EngineState,
    FinishReason,
    KvCounters,
    Prefilled,
    PromptLogprobs,
    Request,
    Sampling,
    Structure,
    StructureKind,
    Token,
    TopLogprob,
)

FRONT_ONLY = {"stop", "include_stop_str_in_output", "skip_special_tokens"}
FULL = Sampling(
    max_tokens=7,
    min_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    seed=-5,
    presence_penalty=-1.5,
    frequency_penalty=0.25,
    repetition_penalty=1.1,
    stop_token_ids=(3, 1),
    ignore_eos=True,
    logprobs=-1,
    logprob_token_ids=(9, 4),
    prompt_logprobs=0,
    logit_bias=((5, -100.0), (7, 0.5)),
    bad_words=((1, 2, 3), (4,)),
    allowed_token_ids=(8, 6),
    structure=Structure(StructureKind.REGEX, "a+", False, False, "", False, '{"a": 1}'),
)
TABLE = PromptLogprobs(2, (1, 2, 3, 4), (-0.5, -1.0, float("-inf"), -2.0), (1, 30000))
TOKENS = (Token(1, -0.5, (TopLogprob(1, -0.5),), 3), Token(2))


def test_every_sampling_field_that_engines_see_crosses() -> None:
    default = Sampling()
    for field in dataclasses.fields(Sampling):
        if field.name not in FRONT_ONLY:
            assert getattr(FULL, field.name) != getattr(default, field.name), f"{field.name} needs an unusual value in this test"
    for sampling in (FULL, default):
        request = Request("r", (1, 2), sampling, prior_output=(3,), cache_salt="s", traceparent="t", tracestate="u")
        there = request_from_wire(wire_of(request))
        assert dataclasses.replace(there, arrival_s=0.0) == request


def test_text_fields_stay_at_the_gateway() -> None:
    there = request_from_wire(wire_of(Request("r", (1,), Sampling(stop=("x",), include_stop_str_in_output=True)))).sampling
    assert there == Sampling()


def test_steps_cross_whole() -> None:
    for chunk in (Chunk(TOKENS, FinishReason.STOP, TABLE, 5, 3), Chunk((), None), Chunk((Token(3), Token(4)), FinishReason.LENGTH)):
        assert chunk_from_wire(step_of(chunk)) == chunk
    for prefilled in (Prefilled(TOKENS[0], FinishReason.LENGTH, 4, TABLE, 3), Prefilled(TOKENS[1])):
        reply = pb.PrefillReply()
        prefilled_to_wire(prefilled, reply)
        assert prefilled_from_wire(reply) == prefilled


def test_every_count_of_a_state_crosses() -> None:
    kv = KvCounters(*range(1, 1 + len(dataclasses.fields(KvCounters))))
    assert state_from_wire(state_to_wire(EngineState("e", kv=kv)), "e").kv == kv


def test_steps_of_one_request_join_in_their_order() -> None:
    rich, plain = TOKENS
    joined = chunk_from_wire(step_of(Chunk((plain,), None, TABLE, 5), Chunk((rich, plain)), Chunk((rich,), FinishReason.STOP)))
    assert joined == Chunk((plain, rich, plain, rich), FinishReason.STOP, TABLE, 5)


def step_of(*chunks: Chunk) -> pb.RequestStep:
    step = pb.RequestStep(key=1)
    for chunk in chunks:
        add_chunk(step, chunk)
    return pb.RequestStep.FromString(step.SerializeToString())


def wire_of(request: Request) -> pb.RequestMessage:
    message = pb.RequestMessage()
    request_to_wire(request, message)
    return message
