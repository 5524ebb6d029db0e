"""The disaggregated answer is the colocated one: one table of requests, sent to both doors of our gateway and to vLLM's own server.

Every row's answer over HTTP must equal the other's whole body, to the last digit of a logprob; or be refused by a sentence, where the row
says so. Over gRPC, where text, stop strings and forms are made by other code, it must say the same. Each row has a prompt of its own: no
prefix cache knows it beforehand, on either side.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

from disagg.errors import InvalidRequestError
from tests.parity_grpc import as_grpc, said_by_grpc, said_by_openai, same_table
from tests.real_rig import CONTEXT_TOKENS, MODEL, Servers

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
]

EOS = 2  # <|im_end|>
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "yes, " word " it is" | "no, " word " it is not"\nword ::= "surely" | "maybe"'
SEEDED = {"temperature": 0.8, "seed": 1234}
_draw = random.Random(5)
_numbers = itertools.count(1)


def text(num_words: int = 12) -> str:
    """A prompt that nobody has sent before."""
    words = ["river", "stone", "sold", "green", "seven", "under", "walks", "quiet", "engine", "paper", "bright", "asks", "north", "cold"]
    return f"Story {next(_numbers)}: " + " ".join(_draw.choice(words) for _ in range(num_words)) + "."


def ids(length: int) -> list[int]:
    return [_draw.randrange(100, 49000) for _ in range(length)]


def ask(prompt: Any = None, **fields: Any) -> dict[str, Any]:
    """A completion, greedy and 12 tokens long unless stated."""
    return {"model": MODEL, "prompt": text() if prompt is None else prompt, "max_tokens": 12, "temperature": 0, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Answer in short."}, {"role": "user", "content": f"Tell me of {text(5)}"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **fields}


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, ask(max_tokens=40)),
    "greedy, several chunks": (COMPLETIONS, ask(ids(1100), logprobs=3)),
    "one token in": (COMPLETIONS, ask(ids(1), logprobs=1)),
    "one token out": (COMPLETIONS, ask(max_tokens=1, logprobs=1)),
    "ids": (COMPLETIONS, ask(ids(33))),
    "several prompts": (COMPLETIONS, ask([text(), text(3)], max_tokens=1, logprobs=0)),
    "seeded": (COMPLETIONS, ask(**SEEDED, max_tokens=32)),
    # Not longer than a chunk: stock vLLM on CPUs dies of a seeded request in several chunks (ours does not: test_vllm_engine.py).
    "seeded chat": (CHAT, chat(**SEEDED)),
    "top_p": (COMPLETIONS, ask(**SEEDED, top_p=0.7)),
    "top_k": (COMPLETIONS, ask(**SEEDED, top_k=5)),
    "min_p": (COMPLETIONS, ask(**SEEDED, min_p=0.1)),
    "presence": (COMPLETIONS, ask(presence_penalty=1.5, max_tokens=40)),
    "frequency": (COMPLETIONS, ask(frequency_penalty=1.5, max_tokens=40)),
    "repetition": (COMPLETIONS, ask(repetition_penalty=1.4, max_tokens=40)),
    "all penalties, seeded": (
        COMPLETIONS,
        ask(presence_penalty=0.7, frequency_penalty=0.7, repetition_penalty=1.2, logprobs=2, **SEEDED, max_tokens=24),
    ),
    "logit_bias": (COMPLETIONS, ask(logit_bias={"260": 5.0, "30": -100.0}, logprobs=2)),
    "logit_bias and penalties": (COMPLETIONS, ask(logit_bias={"260": 4.0}, repetition_penalty=1.3, presence_penalty=0.5, logprobs=2)),
    "allowed_token_ids": (COMPLETIONS, ask(allowed_token_ids=[260, 338, 253, 28, 30], logprobs=2)),
    "min_tokens": (COMPLETIONS, ask(min_tokens=8, logit_bias={str(EOS): 50.0})),
    "min_tokens 1": (COMPLETIONS, ask(min_tokens=1, logit_bias={str(EOS): 50.0})),
    "first token ends": (COMPLETIONS, ask(logit_bias={str(EOS): 100.0}, logprobs=1)),
    "ignore_eos": (COMPLETIONS, ask(logit_bias={str(EOS): 100.0}, ignore_eos=True, max_tokens=5)),
    "special tokens shown": (COMPLETIONS, ask(logit_bias={str(EOS): 100.0}, ignore_eos=True, max_tokens=3, skip_special_tokens=False)),
    "logprobs 0": (COMPLETIONS, ask(logprobs=0)),
    "logprobs 5": (COMPLETIONS, ask(logprobs=5)),
    "chat logprobs": (CHAT, chat(logprobs=True, top_logprobs=4)),
    "tokens as ids": (COMPLETIONS, ask(logprobs=2, return_tokens_as_token_ids=True, return_token_ids=True)),
    "echo": (COMPLETIONS, ask(echo=True)),
    "echo, logprobs": (COMPLETIONS, ask(echo=True, logprobs=2)),
    "echo, no tokens": (COMPLETIONS, ask(echo=True, logprobs=1, max_tokens=0)),
    "prompt_logprobs": (COMPLETIONS, ask(prompt_logprobs=3)),
    "prompt_logprobs, several chunks": (COMPLETIONS, ask(ids(600), prompt_logprobs=1, logprobs=1)),
    "prompt_logprobs 0, one token in and out": (COMPLETIONS, ask(ids(1), prompt_logprobs=0, max_tokens=1)),
    "chat prompt_logprobs": (CHAT, chat(prompt_logprobs=1)),
    "n 2": (COMPLETIONS, ask(n=2, **SEEDED)),
    "n 4": (COMPLETIONS, ask(n=4, **SEEDED, max_tokens=8)),
    "n 3, chat": (CHAT, chat(n=3, **SEEDED)),
    "json schema": (COMPLETIONS, ask(structured_outputs={"json": SCHEMA}, max_tokens=48)),
    "json schema, seeded": (COMPLETIONS, ask(structured_outputs={"json": SCHEMA}, max_tokens=48, **SEEDED)),
    "response_format": (
        CHAT,
        chat(max_tokens=48, response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}),
    ),
    "json object": (CHAT, chat(response_format={"type": "json_object"}, max_tokens=24)),
    "regex": (COMPLETIONS, ask(structured_outputs={"regex": "[A-Z][a-z]{2,5}-[0-9]{3}"}, max_tokens=24)),
    "choice": (COMPLETIONS, ask(structured_outputs={"choice": ["green apple", "green pear", "red plum"]}, max_tokens=16)),
    "grammar": (COMPLETIONS, ask(structured_outputs={"grammar": GRAMMAR}, max_tokens=24)),
    "structure, n, penalties": (COMPLETIONS, ask(structured_outputs={"regex": "[a-z ]{30}"}, n=2, presence_penalty=1.0, **SEEDED)),
    "repetition_detection": (
        COMPLETIONS,
        ask(logit_bias={"260": 100.0}, max_tokens=30, repetition_detection={"max_pattern_size": 2, "min_count": 5}),
    ),
    "truncated": (COMPLETIONS, ask(ids(90), truncate_prompt_tokens=40, logprobs=1)),
    "beam search": (COMPLETIONS, ask(use_beam_search=True, n=2, max_tokens=4)),
    "cache salt": (COMPLETIONS, ask(ids(70), cache_salt="mine")),
    "no max_tokens, chat": (CHAT, {k: v for k, v in chat(stop=[" ", "a", "e", "i"]).items() if k != "max_tokens"}),
}

# What two workers cannot do as one engine does: refused, with a sentence that names the field.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "thinking budget": (CHAT, chat(thinking_token_budget=5), "thinking_token_budget"),
    "unknown extra argument": (COMPLETIONS, ask(vllm_xargs={"my_processor": 1}), "my_processor"),
    "adapter": (COMPLETIONS, ask() | {"model": "my-adapter"}, "my-adapter"),
}

# Wrong on any server: the same status, and the same sentence.
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "empty prompt": (COMPLETIONS, ask("")),
    "no messages": (CHAT, chat() | {"messages": []}),
    "unknown role": (CHAT, chat() | {"messages": [{"role": "wizard", "content": 3}]}),
    "too long": (COMPLETIONS, ask([5] * (CONTEXT_TOKENS + 10))),
    "max_tokens beyond the context": (COMPLETIONS, ask(max_tokens=2 * CONTEXT_TOKENS)),
    "max_tokens negative": (COMPLETIONS, ask(max_tokens=-1)),
    "temperature": (COMPLETIONS, ask(temperature=-1)),
    "top_p": (COMPLETIONS, ask(top_p=2)),
    "n 0": (COMPLETIONS, ask(n=0)),
    "greedy n": (COMPLETIONS, ask(n=2)),
    "huge id": (COMPLETIONS, ask([2**40])),
    "logprobs": (COMPLETIONS, ask(logprobs=100)),
    "logit_bias": (COMPLETIONS, ask(logit_bias={"99999999": 1.0})),
    "allowed ids": (COMPLETIONS, ask(allowed_token_ids=[])),
    "schema that cannot compile": (COMPLETIONS, ask(structured_outputs={"json": {"type": "nonsense"}})),
    "regex that cannot compile": (COMPLETIONS, ask(structured_outputs={"regex": "(["})),
    "two structures": (COMPLETIONS, ask(structured_outputs={"regex": "a", "choice": ["a"]})),
    "stop of nothing": (COMPLETIONS, ask(stop=[""])),
    "wrong type": (COMPLETIONS, ask(max_tokens="many")),
    "streamed beam search": (COMPLETIONS, ask(use_beam_search=True, stream=True)),
}
RIGHT_BY_GRPC = {"allowed ids"}  # there an empty list is an absent one


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _nothing_left(servers: Servers) -> AsyncIterator[None]:
    yield
    await servers.assert_empty()


def essence(body: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs by its nature."""
    return {name: value for name, value in body.items() if name not in ("id", "created", "system_fingerprint", "request_id")}


async def both(servers: Servers, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bodies of both servers' successful answers. What can be asked by gRPC is, and must say the same."""
    bodies = []
    for client in (servers.vllm, servers.ours):
        response = await client.post(path, json=body | {"return_token_ids": True})
        assert response.status_code == 200, (client is servers.ours, response.text)
        bodies.append(essence(response.json()))
    await by_grpc(servers, body, bodies[0])
    return bodies[1], bodies[0]


async def by_grpc(servers: Servers, body: dict[str, Any], want: dict[str, Any]) -> None:
    asked = as_grpc(body)
    if asked is None:
        return
    prompt, options = asked
    # Unknown to the prefix cache, as it was when the others asked.
    answers = await servers.client.generate_n(prompt, **options | {"cache_salt": f"gRPC {next(_numbers)}"})
    assert said_by_grpc(answers) == said_by_openai(want)
    for answer, choice in zip(answers, want["choices"], strict=True):
        table = choice.get("prompt_logprobs") or want.get("prompt_logprobs")
        assert same_table(table, answer.prompt_logprobs) if table else not answer.prompt_logprobs
    assert answers[0].usage.prompt_tokens == want["usage"]["prompt_tokens"]
    assert sum(answer.usage.output_tokens for answer in answers) == want["usage"]["completion_tokens"]


@pytest.mark.parametrize("row", ROWS)
async def test_equal(servers: Servers, row: str) -> None:
    got, want = await both(servers, *ROWS[row])
    assert got == want


@pytest.mark.parametrize("row", REFUSED)
async def test_refused_with_a_sentence(servers: Servers, row: str) -> None:
    path, body, named = REFUSED[row]
    response = await servers.ours.post(path, json=body)
    assert response.status_code in (400, 404)
    assert named in response.json()["error"]["message"]


@pytest.mark.parametrize("row", WRONG)
async def test_wrong_alike(servers: Servers, row: str) -> None:
    path, body = WRONG[row]
    want = await servers.vllm.post(path, json=body)
    got = await servers.ours.post(path, json=body)
    assert 400 <= want.status_code < 500, want.text
    assert got.status_code == want.status_code, got.text
    assert got.json()["error"]["message"] == want.json()["error"]["message"]
    if row not in RIGHT_BY_GRPC and (asked := as_grpc(body)) is not None:
        with pytest.raises(InvalidRequestError) as caught:
            await servers.client.generate_n(asked[0], **asked[1])
        assert caught.value.field
        assert caught.value.expected


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("grammar", ["root ::= unknown", "(", "root ::= root", 'root ::= "yes" more\nmore ::= more'])
async def test_a_grammar_of_no_use_is_the_clients_error(servers: Servers, grammar: str, sampling: dict[str, Any]) -> None:
    """One that does not compile, or that nothing fulfils. vLLM alone answers some of these with 500: it finds out in the engine."""
    response = await servers.ours.post(COMPLETIONS, json=ask(structured_outputs={"grammar": grammar}, **sampling))
    assert response.status_code == 400, response.text
    assert "grammar" in response.json()["error"]["message"]


async def test_forms_that_only_another_backend_takes(servers: Servers) -> None:
    """Whatever an engine was asked before: xgrammar, to which most forms go, heeds no multiples and takes no empty rule."""
    number = {"type": "integer", "minimum": 1000, "maximum": 9999, "multipleOf": 7}
    said = []
    for form in ({"json": number}, {"grammar": "root ::= "}):
        response = await servers.ours.post(COMPLETIONS, json=ask(structured_outputs=form))
        assert response.status_code == 200, response.text
        said.append(response.json()["choices"][0]["text"])
    assert int(said[0]) % 7 == 0
    assert said[1] == ""


async def test_stop_strings(servers: Servers) -> None:
    """Found in the answer itself: within the first token, across the first two (which come from two engines), later; kept or not."""
    body = ask(max_tokens=20, return_tokens_as_token_ids=False, logprobs=0)
    _, want = await both(servers, COMPLETIONS, body)
    tokens = want["choices"][0]["logprobs"]["tokens"]
    stops = [tokens[0][-1:], tokens[0][-1:] + tokens[1][:1], (tokens[0] + tokens[1])[1:], tokens[5] + tokens[6][:1], "never to be said"]
    for stop, kept in itertools.product(stops, (False, True)):
        got, want = await both(servers, COMPLETIONS, body | {"stop": [stop], "include_stop_str_in_output": kept})
        assert got == want, (stop, kept)


async def test_stop_tokens(servers: Servers) -> None:
    body = ask(max_tokens=20, return_token_ids=True)
    _, want = await both(servers, COMPLETIONS, body)
    tokens = want["choices"][0]["token_ids"]
    for stop, more in itertools.product((tokens[0], tokens[1], tokens[7]), ({}, {"min_tokens": 4}, {"include_stop_str_in_output": True})):
        got, want = await both(servers, COMPLETIONS, body | {"stop_token_ids": [stop], **more})
        assert got == want, (stop, more)


async def test_bad_words(servers: Servers) -> None:
    """One token, several tokens, and several of which the first comes from the prefill worker."""
    # Without line breaks, which are no words.
    body = ask("One, two, three, four, five, six,", max_tokens=12, logprobs=0, logit_bias={"198": -100.0})
    _, want = await both(servers, COMPLETIONS, body)
    tokens = want["choices"][0]["logprobs"]["tokens"]
    assert all(token.strip() for token in tokens[:7]), tokens  # words of white space alone are refused
    for words in ([tokens[0]], [tokens[0] + tokens[1]], [tokens[3] + tokens[4]], [tokens[0] + tokens[1] + tokens[2], tokens[6]]):
        got, want = await both(servers, COMPLETIONS, body | {"bad_words": words})
        assert got == want, words


async def test_cached_tokens_are_counted_alike(servers: Servers) -> None:
    """Over both doors; the second time each server has the prompt's whole blocks."""
    body = ask(ids(100), max_tokens=3)
    for cached in (0, 96):
        got, want = await both(servers, COMPLETIONS, body)
        assert got == want
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        answer = await servers.client.generate(body["prompt"], max_tokens=3, temperature=0.0, cache_salt="counted")
        assert answer.usage.cached_tokens == cached


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, ask(logprobs=2)),
        (COMPLETIONS, ask(n=1, stop=[" the"], echo=True)),
        (COMPLETIONS, ask(structured_outputs={"json": SCHEMA}, max_tokens=40)),
        (CHAT, chat(logprobs=True, top_logprobs=2)),
        (CHAT, chat(max_tokens=1)),
    ],
)
async def test_streams_join_to_the_same_answer(servers: Servers, path: str, body: dict[str, Any]) -> None:
    """Events may be cut differently (one engine's step may join what two workers send apart); what they say together may not."""
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    want = joined(await lines(servers.vllm, path, streamed))
    got = joined(await lines(servers.ours, path, streamed))
    assert got == want
    assert got["usage"]["completion_tokens"] > 0


async def lines(client: Any, path: str, body: dict[str, Any]) -> list[str]:
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        return [line.removeprefix("data: ") async for line in response.aiter_lines() if line]


def joined(events: list[str]) -> dict[str, Any]:
    assert events[-1] == "[DONE]"
    whole: dict[str, Any] = {"text": "", "logprobs": [], "finish": None, "usage": None}
    for event in map(json.loads, events[:-1]):
        whole["usage"] = event.get("usage") or whole["usage"]
        for choice in event["choices"]:
            whole["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            whole["finish"] = choice["finish_reason"] or whole["finish"]
            if choice.get("logprobs"):
                logprobs = choice["logprobs"]
                whole["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs")
    return whole


async def test_the_table_can_fail(servers: Servers) -> None:
    """Another seed, or a penalty, does change these answers: equality above is no accident of a model that always says the same."""
    body = ask(**SEEDED, max_tokens=32)
    plain, _ = await both(servers, COMPLETIONS, body)
    other, _ = await both(servers, COMPLETIONS, body | {"seed": 4321})
    assert plain["choices"][0]["text"] != other["choices"][0]["text"]
    greedy, _ = await both(servers, COMPLETIONS, ask("The cat sat. The cat sat.", max_tokens=24))
    fined, _ = await both(servers, COMPLETIONS, ask("The cat sat. The cat sat.", max_tokens=24, frequency_penalty=2.0))
    assert greedy["choices"][0]["text"] != fined["choices"][0]["text"]
