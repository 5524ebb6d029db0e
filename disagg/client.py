"""The client of a disagg gateway, sync and async. Thin: translation lives in client_types.py.

    with Client("127.0.0.1:8500") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        for part in client.stream("Once upon a time", temperature=0.0):
            print(part.text, end="")

Keyword arguments of a client are the fields of `Access` (a token, certificates), those of `generate` and `stream` the fields of `Options`;
`timeout_s` bounds the whole call, None does not. Errors are those of disagg/errors.py, as the gateway raised them; GatewayUnreachableError
comes within seconds when nothing listens. Closing the iterator of `stream`, or cancelling the task that awaits, cancels the request on
every worker.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import grpc
import grpc.aio

from disagg.client_types import (
    CHANNEL_OPTIONS,
    Access,
    Answer,
    AnswerBuilder,
    AnswersBuilder,
    Options,
    Part,
    PoolInfo,
    Prompt,
    ServedModel,
    SloClassInfo,
    Usage,
    to_error,
    to_message,
    to_metadata,
    to_part,
    to_served_model,
)
from disagg.errors import InvalidRequestError, nearest
from disagg.pb import inference_pb2 as pb
from disagg.pb.inference_pb2_grpc import InferenceStub

__all__ = [
    "Access",
    "Answer",
    "AnswerBuilder",
    "AnswersBuilder",
    "AsyncClient",
    "Client",
    "OptionArguments",
    "Options",
    "Part",
    "PoolInfo",
    "ServedModel",
    "SloClassInfo",
    "Usage",
]

INFO_TIMEOUT_S = 10.0


class OptionArguments(TypedDict, total=False):
    """The fields of `Options` as keyword arguments."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    json_schema: str | Mapping[str, Any] | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    n: int | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    cache_salt: str | None
    slo_class: str | None
    priority: int | None
    request_id: str | None
    traceparent: str | None
    tracestate: str | None


class AccessArguments(TypedDict, total=False):
    """The fields of `Access` as keyword arguments."""

    token: str | None
    ca: str | None
    cert: str | None
    key: str | None


class Client:
    """A blocking client. One may be shared by threads. Close it, or use it in `with`."""

    def __init__(self, address: str = "127.0.0.1:8500", **access: Unpack[AccessArguments]) -> None:
        self.address = address
        self._access = Access(**access)
        credentials = self._access.credentials()
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub: Any = InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[OptionArguments]) -> Answer:
        """The whole answer to a prompt of text, token ids or messages ([{"role": "user", "content": ...}])."""
        return self.generate_n(prompt, timeout_s=timeout_s, **_one(options))[0]

    def generate_n(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[OptionArguments]) -> list[Answer]:
        """All `n` answers to one prompt, by their index."""
        builder = AnswersBuilder(time.monotonic())
        with closing(self.stream(prompt, timeout_s=timeout_s, **options)) as parts:
            for part in parts:
                builder.add(part, time.monotonic())
        return builder.answers(options.get("n") or 1)

    def stream(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[OptionArguments]) -> Generator[Part, None, None]:
        """The answer as it comes. The request is sent when iteration starts; closing the generator cancels it."""
        chosen = _options(options)
        call = self._stub.Generate(to_message(prompt, chosen), timeout=timeout_s, metadata=to_metadata(self._access, chosen))
        answered = False
        try:
            for message in call:
                answered = True
                yield to_part(message)
        except grpc.RpcError as error:
            raise to_error(error, self.address, answered=answered) from None
        finally:
            call.cancel()

    def model_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ServedModel:
        """What is served, and its limits."""
        try:
            info = self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s, metadata=self._access.metadata)
            return to_served_model(info)
        except grpc.RpcError as error:
            raise to_error(error, self.address, answered=False) from None

    def close(self) -> None:
        """End the connection; running calls are cancelled. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """The client for asyncio. Make and use it inside one event loop; close it, or use it in `async with`."""

    def __init__(self, address: str = "127.0.0.1:8500", **access: Unpack[AccessArguments]) -> None:
        self.address = address
        self._access = Access(**access)
        credentials = self._access.credentials()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub: Any = InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    async def generate(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[OptionArguments]) -> Answer:
        """The whole answer to a prompt of text, token ids or messages ([{"role": "user", "content": ...}])."""
        return (await self.generate_n(prompt, timeout_s=timeout_s, **_one(options)))[0]

    async def generate_n(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[OptionArguments]) -> list[Answer]:
        """All `n` answers to one prompt, by their index."""
        builder = AnswersBuilder(time.monotonic())
        async with aclosing(self.stream(prompt, timeout_s=timeout_s, **options)) as parts:
            async for part in parts:
                builder.add(part, time.monotonic())
        return builder.answers(options.get("n") or 1)

    async def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[OptionArguments]
    ) -> AsyncGenerator[Part, None]:
        """The answer as it comes. The request is sent when iteration starts; closing the generator (`aclosing`) cancels it."""
        chosen = _options(options)
        call = self._stub.Generate(to_message(prompt, chosen), timeout=timeout_s, metadata=to_metadata(self._access, chosen))
        answered = False
        try:
            async for message in call:
                answered = True
                yield to_part(message)
        except grpc.RpcError as error:
            raise to_error(error, self.address, answered=answered) from None
        finally:
            call.cancel()

    async def model_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ServedModel:
        """What is served, and its limits."""
        try:
            info = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s, metadata=self._access.metadata)
            return to_served_model(info)
        except grpc.RpcError as error:
            raise to_error(error, self.address, answered=False) from None

    async def close(self) -> None:
        """End the connection; running calls are cancelled. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


def _one(arguments: OptionArguments) -> OptionArguments:
    if (n := arguments.get("n")) not in (None, 1):
        raise InvalidRequestError(field="n", value=n, expected="1, or generate_n() for several answers")
    return arguments


def _options(arguments: OptionArguments) -> Options:
    known = OptionArguments.__annotations__
    for name in arguments:
        if name not in known:
            raise InvalidRequestError(field=name, value=arguments[name], expected=f"a known option; {nearest(name, known)}")  # type: ignore[literal-required]
    return Options(**arguments)
