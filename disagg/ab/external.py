"""An external arm: any server that speaks OpenAI's completions API with streaming, as the sender sees a gateway.

Prompts go as token ids, so that all arms get the same ones. A message of the stream may hold several tokens: where the server names their
ids (vLLM: `return_token_ids`) they are counted; elsewhere a message is one token, and what the final usage counts beyond the messages
comes with the last one, so that TPOT = (last - first) / (tokens - 1) holds and only single gaps are coarser.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import aiohttp

from disagg.client import Part
from disagg.errors import (
    AccessError,
    ConfigError,
    DeadlineError,
    DisaggError,
    EngineError,
    GatewayUnreachableError,
    InvalidRequestError,
    RejectedError,
    UnavailableError,
)
from disagg.types import FinishReason, Token

KEY_VARIABLE = "OPENAI_API_KEY"  # whose value is sent as a bearer token, where it is set
CONNECT_TIMEOUT_S = 5.0
INFO_TIMEOUT_S = 10.0
_MOST_SAID_BYTES = 2_000  # of an error's body
_MOST_EVENT_BYTES = 16_000_000
_MOST_MISSING = 1_000_000  # tokens that only the final usage counts
_UNNAMED = Token(token_id=-1)
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class ExternalClient:
    """A client of one server; `url` with or without the trailing /v1. Use it in `async with`."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        self.model = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def max_model_len(self) -> int | None:
        """The context of the first model that the server names, which is the one that is asked. None where it does not say.

        Raises ConfigError when the URL is no such server.
        """
        expected = "the URL of a server with OpenAI's API that is up (GET /v1/models)"
        try:
            async with self._session.get(f"{self.url}/v1/models", timeout=aiohttp.ClientTimeout(total=INFO_TIMEOUT_S)) as response:
                if response.status != 200:
                    raise ConfigError(key="external", value=f"{self.url}: HTTP {response.status}", expected=expected)
                models = (await response.json(content_type=None))["data"]
                self.model = str(models[0]["id"])
                length = models[0].get("max_model_len")
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
            message = f"external: {self.url}/v1/models: {type(error).__name__}: {error}; expected {expected}"
            raise ConfigError(message, key="external", value=self.url, expected=expected) from error
        return length if isinstance(length, int) else None

    async def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        ignore_eos: bool,
        slo_class: str | None,
        timeout_s: float,
    ) -> AsyncGenerator[Part, None]:
        """The answer as it comes. Raises the errors of a gateway's client. `slo_class` stays here: OpenAI's API has no such thing."""
        body = {
            "model": self.model,
            "prompt": list(prompt) if not isinstance(prompt, str) else prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.post(f"{self.url}/v1/completions", json=body, timeout=timeout) as response:
                if response.status != 200:
                    said = await response.content.read(_MOST_SAID_BYTES)
                    raise _refusal(response.status, said.decode(errors="replace"), response.headers.get("Retry-After"))
                async with aclosing(_events(response)) as events, aclosing(_parts(events)) as parts:
                    async for part in parts:
                        yield part
        except aiohttp.ConnectionTimeoutError as error:
            raise GatewayUnreachableError(f"nothing answers at {self.url} within {CONNECT_TIMEOUT_S:g} s", address=self.url) from error
        except TimeoutError as error:
            raise DeadlineError(f"no whole answer within {timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise GatewayUnreachableError(f"nothing answers at {self.url}: {error}", address=self.url) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise UnavailableError(f"the connection to {self.url} broke: {type(error).__name__}: {error}") from error


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of a server-sent event stream, up to [DONE]. Raises EngineError for what is none, or without that end."""
    buffer = b""
    async for data in response.content.iter_any():
        *lines, buffer = (buffer + data).split(b"\n")
        if len(buffer) > _MOST_EVENT_BYTES:
            raise EngineError(f"the stream holds a line of over {_MOST_EVENT_BYTES:,} bytes")
        for line in lines:
            text = line.strip()
            if not text.startswith(b"data:"):
                continue
            text = text.removeprefix(b"data:").strip()
            if text == b"[DONE]":
                return
            try:
                event = json.loads(text)
            except ValueError as error:
                raise EngineError(f"the stream holds what is not JSON: {text[:80]!r}") from error
            if not isinstance(event, dict):
                raise EngineError(f"the stream holds what is no object: {text[:80]!r}")
            yield event
    raise EngineError(f"the stream ended without [DONE] (HTTP {response.status}, {response.content_type})")


async def _parts(events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[Part, None]:
    """Parts of an answer; the one with the finish reason comes last, when usage has told how many tokens there were.

    Raises EngineError for events that are no completion's.
    """
    seen, named = 0, False
    finish: FinishReason | None = None
    total = 0
    async for event in events:
        if error := event.get("error"):
            raise EngineError(f"the server broke off: {json.dumps(error)[:300]}")
        try:
            if usage := event.get("usage"):
                total = int(usage.get("completion_tokens") or total)
            choices = [_choice(choice) for choice in event.get("choices") or ()]
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"the stream holds what is no completion: {json.dumps(event)[:300]}") from error
        for count, text, ended in choices:
            finish = ended or finish
            named = named or count is not None
            tokens = count if count is not None else int(bool(text) and not named)
            seen += tokens
            if tokens:
                yield Part("", (_UNNAMED,) * tokens, text)
    if finish is None:
        raise EngineError("the answer ended without a finish reason")
    if total - seen > _MOST_MISSING:
        raise EngineError(f"the server counted {total:,} tokens and sent {seen:,}")
    yield Part("", (_UNNAMED,) * max(0, total - seen), "", finish)


def _choice(raw: dict[str, Any]) -> tuple[int | None, str, FinishReason | None]:
    """How many token ids it names (None: none are named), its text, its finish reason."""
    ids = raw.get("token_ids")
    return None if ids is None else len(ids), str(raw.get("text") or ""), _FINISH.get(raw.get("finish_reason") or "")


def _refusal(status: int, text: str, retry_after: str | None) -> DisaggError:
    """An HTTP error as one of ours."""
    said = f"HTTP {status}: {' '.join(text.split())[:300]}"
    if status in (429, 503):
        return RejectedError(said, retry_after_s=float(retry_after) if retry_after and retry_after.isdecimal() else 1.0)
    if status in (401, 403):
        return AccessError(said)
    if 400 <= status < 500:
        return InvalidRequestError(
            f"the server refused the request: {said}", field="request", value=status, expected="a request that it takes"
        )
    return EngineError(said)
