"""The fields that shape an answer: carried whole, or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from disagg.config import SloClass
from disagg.errors import InvalidRequestError
from disagg.front.validate import Limits, check_head, check_messages, to_request
from disagg.pb import inference_pb2 as pb
from disagg.types import ModelInfo, Request, Structure, StructureKind

MODEL = ModelInfo(name="m", max_model_len=100, vocab_size=1000, kv_bytes_per_token=64)


def encode(word: str) -> list[int]:
    """Letters as their codes; a space before a word makes one other token of its first letter."""
    return [300 + ord(word[1]), *map(ord, word[2:])] if word.startswith(" ") and len(word) > 1 else list(map(ord, word))


LIMITS = Limits(MODEL, (SloClass(name="chat"),), max_token_bytes=8, encode=encode)
NO_TEXT = Limits(MODEL, LIMITS.slo_classes, max_token_bytes=None)
SIMULATED = Limits(MODEL, LIMITS.slo_classes, max_token_bytes=8, encode=encode, has_logits=False)


def check(limits: Limits = LIMITS, *, truncate: int | None = None, **sampling: Any) -> Request:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=pb.SamplingParams(**sampling))
    if truncate is not None:
        message.truncate_prompt_tokens = truncate
    return to_request("r", check_head(message, limits), message.token_ids.ids, limits, arrival_s=1.0, deadline_s=None)


def test_carried_whole() -> None:
    text = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    sampling = check(logit_bias={7: -100.0, 5: 2.5}, allowed_token_ids=[9, 8], prompt_logprobs=0, **text).sampling
    assert sampling.logit_bias == ((5, 2.5), (7, -100.0))
    assert sampling.allowed_token_ids == (9, 8)
    assert sampling.prompt_logprobs == 0
    assert (sampling.include_stop_str_in_output, sampling.skip_special_tokens) == (True, False)


def test_bad_words_stand_at_a_beginning_and_inside() -> None:
    assert check(bad_words=["ab", "ab", " c"]).sampling.bad_words == ((97, 98), (397, 98), (99,), (399,))


@pytest.mark.parametrize(
    ("field", "value", "structure"),
    [
        ("json_schema", '{"type": "object"}', Structure(StructureKind.JSON, '{"type": "object"}')),
        ("json_object", True, Structure(StructureKind.JSON_OBJECT)),
        ("regex", "a+", Structure(StructureKind.REGEX, "a+")),
        ("choice", pb.Choices(texts=["a", "b"]), Structure(StructureKind.CHOICE, '["a", "b"]')),
        ("grammar", "root ::= 'a'", Structure(StructureKind.GRAMMAR, "root ::= 'a'")),
    ],
)
def test_forms(field: str, value: Any, structure: Structure) -> None:
    assert check(**{field: value}).sampling.structure == structure
    with pytest.raises(InvalidRequestError, match=field):
        check(NO_TEXT, **{field: value})
    with pytest.raises(InvalidRequestError, match=field):
        check(SIMULATED, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {1000: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {2**40: 1.0}),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", dict.fromkeys(range(1000), 1.0) | dict.fromkeys(range(2000, 2100), 1.0)),
        ("allowed_token_ids", [1000]),
        ("allowed_token_ids", [1] * 1001),
        ("bad_words", [""]),
        ("bad_words", ["a"] + [str(i) for i in range(300)]),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", ""),
        ("json_schema", json.dumps({"a": "x" * 70_000})),
        ("json_schema", '{"a":' * 100 + "1" + "}" * 100),
        ("json_object", False),
        ("regex", ""),
        ("regex", "a\0"),
        ("choice", pb.Choices()),
        ("choice", pb.Choices(texts=["a", ""])),
        ("n", 0),
        ("n", 129),
        ("n", -(2**40)),
    ],
)
def test_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(**{field: value})
    assert caught.value.field.split("[")[0] == field
    assert caught.value.expected


def test_several_greedy_answers_would_be_the_same() -> None:
    with pytest.raises(InvalidRequestError, match="temperature 0"):
        check(n=2, temperature=0.0)


@pytest.mark.parametrize(
    "sampling", [{"logit_bias": {1: 1.0}}, {"bad_words": ["a"]}, {"allowed_token_ids": [1]}, {"prompt_logprobs": 0}], ids=str
)
def test_a_simulated_engine_refuses_what_it_cannot_do(sampling: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="simulated"):
        check(SIMULATED, **sampling)


def test_truncation_keeps_the_end() -> None:
    assert check(truncate=2).prompt_token_ids == (2, 3)
    assert check(truncate=99).prompt_token_ids == (1, 2, 3)
    for wrong in (0, -1, 100):
        with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
            check(truncate=wrong)


@pytest.mark.parametrize(
    ("messages", "arguments", "named"),
    [
        ([], "", "chat.messages"),
        ([{"role": "user", "content": "x" * 1000}], "", "chat.messages"),
        ([{"role": "user", "content": ""}] * 2000, "", "chat.messages"),
        ([{"role": "user", "content": "x"}], "{", "template_arguments_json"),
        ([{"role": "user", "content": "x"}], "[1]", "template_arguments_json"),
        ([{"role": "user", "content": "x"}], "[" * 100_000, "template_arguments_json"),
    ],
)
def test_conversations_that_are_no_prompt(messages: list[dict[str, str]], arguments: str, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        check_messages(pb.Chat(messages=[pb.ChatMessage(**m) for m in messages], template_arguments_json=arguments), LIMITS)
