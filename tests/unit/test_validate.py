"""Bad requests are refused by name: field, value, and what would be right."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from disagg.config import SloClass
from disagg.errors import InvalidRequestError
from disagg.front.validate import MAX_REMEMBERED, Limits, check_head, check_text_size, to_request
from disagg.pb import inference_pb2 as pb
from disagg.types import ModelInfo, Request, Sampling

CONTEXT = 100
VOCAB = 1000
MODEL = ModelInfo(name="m", max_model_len=CONTEXT, vocab_size=VOCAB, kv_bytes_per_token=64)
LIMITS = Limits(MODEL, (SloClass(name="chat", priority=3), SloClass(name="batch", priority=-1)), max_token_bytes=8)
NO_TEXT = Limits(MODEL, LIMITS.slo_classes, max_token_bytes=None)


def message(ids: list[int] | None = None, **sampling: object) -> pb.GenerateRequest:
    ids = [1, 2, 3] if ids is None else ids
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(**sampling))


def check(given: pb.GenerateRequest, limits: Limits = LIMITS) -> Request:
    head = check_head(given, limits)
    return to_request("r", head, given.token_ids.ids, limits, arrival_s=5.0, deadline_s=9.0)


def refusal(given: pb.GenerateRequest, limits: Limits = LIMITS) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        check(given, limits)
    return caught.value


def test_absent_fields_take_neutral_values() -> None:
    request = check(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])))
    # The default answer is longer than the context has room for, and is cut to it: the client named no length.
    assert request.sampling == Sampling(max_tokens=CONTEXT - 3)
    assert (request.request_id, request.prompt_token_ids, request.slo_class, request.priority) == ("r", (1, 2, 3), "chat", 3)
    assert (request.arrival_s, request.deadline_s) == (5.0, 9.0)


def test_present_fields_are_kept() -> None:
    given = message(
        max_tokens=7, min_tokens=2, temperature=0.0, top_p=0.5, top_k=4, min_p=0.1, seed=0, presence_penalty=-2.0, frequency_penalty=2.0,
        repetition_penalty=1.5, stop=["a", "b"], stop_token_ids=[5], ignore_eos=True, logprobs=0,
    )  # fmt: skip
    given.slo_class, given.priority = "batch", 0
    request = check(given)
    assert request.sampling == Sampling(
        max_tokens=7, min_tokens=2, temperature=0.0, top_p=0.5, top_k=4, min_p=0.1, seed=0, presence_penalty=-2.0, frequency_penalty=2.0,
        repetition_penalty=1.5, stop=("a", "b"), stop_token_ids=(5,), ignore_eos=True, logprobs=0,
    )  # fmt: skip
    assert (request.slo_class, request.priority) == ("batch", 0)


def test_what_was_right_is_remembered_in_bounds_and_what_was_wrong_is_not() -> None:
    limits = Limits(MODEL, LIMITS.slo_classes, max_token_bytes=8)
    for seed in (*range(2 * MAX_REMEMBERED), 3, 3):
        assert check(message(seed=seed), limits).sampling == Sampling(max_tokens=CONTEXT - 3, seed=seed)
    assert 0 < len(limits.remembered) <= MAX_REMEMBERED
    known = set(limits.remembered)
    assert check(message(stop=["a" * 200, "b" * 200]), limits).sampling.stop == ("a" * 200, "b" * 200)
    for _ in range(2):
        assert refusal(message(top_p=2.0), limits).field == "top_p"
    assert set(limits.remembered) == known


def test_top_k_minus_one_is_all() -> None:
    assert check(message(top_k=-1)).sampling.top_k == 0


@pytest.mark.parametrize("num_prompt_tokens", [1, CONTEXT - 2, CONTEXT - 1])
def test_prompt_and_answer_may_fill_the_context(num_prompt_tokens: int) -> None:
    request = check(message([1] * num_prompt_tokens, max_tokens=CONTEXT - num_prompt_tokens))
    assert request.num_prompt_tokens + request.sampling.max_tokens == CONTEXT


@pytest.mark.parametrize("low_and_high", [("temperature", 0.0, 100.0), ("min_p", 0.0, 1.0), ("repetition_penalty", 0.01, 100.0)])
def test_bounds_are_inclusive(low_and_high: tuple[str, float, float]) -> None:
    name, *values = low_and_high
    for value in values:
        assert getattr(check(message(**{name: value})).sampling, name) == value


# Field in the error, what is sent, and a part of what would be right.
BAD = [
    ("max_tokens", {"max_tokens": 0}, "from 1 to 99"),
    ("max_tokens", {"max_tokens": -1}, "from 1 to 99"),
    ("max_tokens", {"max_tokens": 98}, "at most 97"),
    ("max_tokens", {"max_tokens": 2**40}, "from 1 to 99"),
    ("min_tokens", {"min_tokens": -1}, "from 0"),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}, "which is 8"),
    ("min_tokens", {"min_tokens": 98}, "at most 97"),
    ("temperature", {"temperature": -0.1}, "from 0 to 100"),
    ("temperature", {"temperature": math.nan}, "from 0 to 100"),
    ("temperature", {"temperature": math.inf}, "from 0 to 100"),
    ("top_p", {"top_p": 0.0}, "above 0 and at most 1"),
    ("top_p", {"top_p": 1.01}, "above 0 and at most 1"),
    ("top_p", {"top_p": math.nan}, "above 0 and at most 1"),
    ("top_k", {"top_k": -2}, "from -1 to 1000"),
    ("top_k", {"top_k": 1001}, "from -1 to 1000"),
    ("min_p", {"min_p": -0.1}, "from 0 to 1"),
    ("min_p", {"min_p": 1.1}, "from 0 to 1"),
    ("seed", {"seed": -1}, "from 0 to"),
    ("presence_penalty", {"presence_penalty": 2.1}, "from -2 to 2"),
    ("frequency_penalty", {"frequency_penalty": -math.inf}, "from -2 to 2"),
    ("repetition_penalty", {"repetition_penalty": 0.0}, "from 0.01"),
    ("repetition_penalty", {"repetition_penalty": 1e-300}, "from 0.01"),
    ("stop[1]", {"stop": ["a", ""]}, "from 1 to 256 characters"),
    ("stop[0]", {"stop": ["a" * 257]}, "from 1 to 256 characters"),
    ("stop", {"stop": ["a"] * 17}, "at most 16"),
    ("stop_token_ids[1]", {"stop_token_ids": [1, VOCAB]}, "from 0 to 999"),
    ("stop_token_ids", {"stop_token_ids": [1] * 65}, "at most 64"),
    ("logprobs", {"logprobs": -1}, "from 0 to 20"),
    ("logprobs", {"logprobs": 21}, "from 0 to 20"),
]


@pytest.mark.parametrize(("field", "sampling", "expected"), BAD)
def test_bad_sampling_is_refused_by_name(field: str, sampling: dict[str, object], expected: str) -> None:
    error = refusal(message(**sampling))
    assert error.field == field
    assert expected in error.expected
    assert error.value in error.message
    assert field in error.message


def with_(change: Callable[[pb.GenerateRequest], object], ids: list[int] | None = None) -> pb.GenerateRequest:
    given = message(ids)
    change(given)
    return given


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        ("prompt", message([]), "at least one"),
        ("prompt", pb.GenerateRequest(), "at least one"),
        ("prompt", message([1] * CONTEXT), "at most 99 tokens"),
        ("prompt[2]", message([1, 2, VOCAB, -1]), "from 0 to 999"),
        ("prompt[0]", message([-(2**62)]), "from 0 to 999"),
        ("slo_class", with_(lambda m: setattr(m, "slo_class", "chatt")), "did you mean 'chat'?"),
        ("slo_class", with_(lambda m: setattr(m, "slo_class", "zzz")), "batch, chat"),
        ("priority", with_(lambda m: setattr(m, "priority", 1001)), "from -1000 to 1000"),
        ("request_id", with_(lambda m: setattr(m, "request_id", "a\nb")), "printable"),
        ("request_id", with_(lambda m: setattr(m, "request_id", "a" * 129)), "at most 128"),
    ],
)
def test_bad_request_is_refused_by_name(field: str, given: pb.GenerateRequest, expected: str) -> None:
    error = refusal(given)
    assert error.field == field
    assert expected in error.expected


def test_text_prompts_are_bounded_before_tokens_are_made() -> None:
    check_text_size("x" * 99 * 8, LIMITS)
    for text in ("x" * (99 * 8 + 1), "é" * (99 * 4 + 1)):
        with pytest.raises(InvalidRequestError) as caught:
            check_text_size(text, LIMITS)
        assert caught.value.field == "prompt"
        assert "at most 99 tokens" in caught.value.expected
        assert len(caught.value.message) < 500
    with pytest.raises(InvalidRequestError, match="at least one character"):
        check_text_size("", LIMITS)


class Uncopied(str):
    """Text that must not be looked at beyond its length."""

    def encode(self, *_: object) -> bytes:  # type: ignore[override]
        raise AssertionError("the whole text was copied")


def test_a_huge_text_is_refused_by_its_length_alone() -> None:
    with pytest.raises(InvalidRequestError, match="20000000 characters"):
        check_text_size(Uncopied("word " * 4_000_000), LIMITS)
    with pytest.raises(AssertionError, match="copied"):
        check_text_size(Uncopied("short"), LIMITS)


def test_without_tokenizer_text_and_stop_strings_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="token ids"):
        check_text_size("hello", NO_TEXT)
    assert refusal(message(stop=["a"]), NO_TEXT).field == "stop"
    assert check(message(), NO_TEXT).prompt_token_ids == (1, 2, 3)
