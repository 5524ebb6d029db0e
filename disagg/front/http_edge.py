"""The outermost layer of the HTTP door: who may come in, how large a request may be, on what terms, and with what status it is refused.

An ASGI application around another one. Beside checking it does three things that the application inside cannot:

- A stream's status is held back until its first event. When that is an error, the client gets a plain response with the error's status
  (429 with Retry-After, 503, ...) and not a 200 with an error inside.
- A body's `slo_class` field is read (and taken out) here: OpenAI's requests have no such field.
- What vLLM answers with 501 (an API for other kinds of models, a call for one engine's owner) is 404 here: a status from 500 on tells load
  balancers and retrying clients that the server is at fault.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from disagg.config import SloClass
from disagg.errors import InvalidRequestError
from disagg.front.ops import OPEN_PATHS, Ops
from disagg.front.terms import CLASS_FIELD, CURRENT, Terms, terms_of, with_class

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_ERROR_EVENT = b'data: {"error"'
_TRY_LATER = (429, 503)


# More than any conversation has; vLLM takes 30 us of everybody's time for each, even where there is nothing in them.
MAX_MESSAGES = 4096
# A body beyond the bound is still taken off the wire, and forgotten, up to this: who is cut off while he sends seldom sees why.
MOST_DISCARDED_BYTES = 64 << 20


class BodyTooLargeError(Exception):
    """The client sent more than allowed; raised into whoever reads the body."""


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """`ops`: pages that are served before all else. `is_allowed` compares the Authorization header (None: everybody may come in)."""

    slo_classes: tuple[SloClass, ...]
    max_body_bytes: int
    is_allowed: Callable[[str], bool] | None = None
    ops: Ops | None = None


class HttpEdge:
    """The ASGI application. Only plain HTTP: there is nothing behind it that speaks WebSocket."""

    def __init__(self, app: App, settings: EdgeSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _request(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        settings = self._settings
        is_open = scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS"
        if not is_open and settings.is_allowed is not None and not settings.is_allowed(headers.get("authorization", "")):
            await _refuse(send, 401, "UnauthorizedError", "a valid bearer token is needed: Authorization: Bearer TOKEN")
            return
        page = settings.ops.page(scope["path"]) if settings.ops is not None and scope["method"] in ("GET", "HEAD") else None
        if page is not None:
            await _respond(send, page.status, page.body, page.content_type.encode(), [])
            return
        body = _Body(receive, headers, settings.max_body_bytes)
        receive = body
        try:
            terms = terms_of(headers, settings.slo_classes)
            body.check_stated()
            if scope["method"] == "POST":
                terms, receive = await _with_body_terms(terms, body, settings.slo_classes)
        except InvalidRequestError as error:
            await _refuse(send, 400, "BadRequestError", error.message, error.field)
            return
        except BodyTooLargeError as error:
            await _refuse(send, 413, "RequestEntityTooLargeError", str(error), closing=not await body.discard())
            return
        token = CURRENT.set(terms)
        try:
            await self._app(scope, receive, _Response(send, terms))
        finally:
            CURRENT.reset(token)


class _Body:
    """`receive`, with the body bounded. Raises BodyTooLargeError."""

    def __init__(self, receive: Receive, headers: Mapping[str, str], max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        stated = headers.get("content-length", "")
        self._stated_bytes = int(stated) if stated.isascii() and stated.isdigit() else 0
        self._waits = "expect" in headers  # the client sends its body when it is asked for it

    def check_stated(self) -> None:
        """Of what the headers say, before anything is read."""
        self._check(self._stated_bytes)

    async def discard(self) -> bool:
        """Take the rest off the wire without keeping it. False when that is too much, or not sent yet: then the connection has to go."""
        if self._waits or self._stated_bytes > MOST_DISCARDED_BYTES:
            return False
        while self._num_bytes <= MOST_DISCARDED_BYTES:
            message = await self._receive()
            if message["type"] != "http.request":
                return False
            self._num_bytes += len(message.get("body", b""))
            if not message.get("more_body"):
                return True
        return False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._check(self._num_bytes)
        return message

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise BodyTooLargeError(
                f"the request's body has over {self._max_bytes} bytes, the most that this gateway takes (gateway.max_message_mib)"
            )


async def _with_body_terms(terms: Terms, receive: Receive, classes: Sequence[SloClass]) -> tuple[Terms, Receive]:
    """Read the whole body, and take `slo_class` out of it. Returns the terms, and a `receive` that gives the body again."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return terms, _Replay([message], receive)
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b"".join(parts)
    if (num_messages := body.count(b'"role"')) > MAX_MESSAGES:
        raise InvalidRequestError(field="messages", value=f"{num_messages} messages", expected=f"at most {MAX_MESSAGES}")
    # Most requests don't have it, and are not parsed twice.
    if f'"{CLASS_FIELD}"'.encode() in body:
        terms, body = _take_class(terms, body, classes)
    return terms, _Replay([{"type": "http.request", "body": body, "more_body": False}], receive)


def _take_class(terms: Terms, body: bytes, classes: Sequence[SloClass]) -> tuple[Terms, bytes]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return terms, body  # vLLM says what is wrong with it
    if not isinstance(fields, dict):
        return terms, body
    found = False
    xargs = fields.get("vllm_xargs")
    for holder in (fields, xargs if isinstance(xargs, dict) else {}):
        if CLASS_FIELD in holder:
            terms = with_class(terms, CLASS_FIELD, holder.pop(CLASS_FIELD), classes)
            found = True
    return terms, json.dumps(fields).encode() if found else body


class _Replay:
    """`receive` that first gives messages already taken."""

    def __init__(self, messages: list[Message], receive: Receive) -> None:
        self._messages = messages
        self._receive = receive

    async def __call__(self) -> Message:
        return self._messages.pop(0) if self._messages else await self._receive()


class _Response:
    """`send`, with a stream's start held back until its first event, 404 for 501, and Retry-After added to what may be tried later."""

    def __init__(self, send: Send, terms: Terms) -> None:
        self._send = send
        self._terms = terms
        self._held: Message | None = None
        self._is_replaced = False

    async def __call__(self, message: Message) -> None:
        if self._is_replaced:
            return
        if message["type"] == "http.response.start":
            is_stream = message["status"] == 200 and _header(message, b"content-type").startswith(b"text/event-stream")
            if is_stream or message["status"] == HTTPStatus.NOT_IMPLEMENTED:
                self._held = message
                return
            if message["status"] in _TRY_LATER and self._terms.retry_after_s is not None:
                message["headers"] = [*message.get("headers", ()), (b"retry-after", _whole_seconds(self._terms.retry_after_s))]
        elif message["type"] == "http.response.body" and self._held is not None:
            held, self._held = self._held, None
            body = message.get("body", b"")
            if held["status"] == HTTPStatus.NOT_IMPLEMENTED or body.startswith(_ERROR_EVENT):
                self._is_replaced = True
                await self._replace(held, body)
                return
            await self._send(held)
        await self._send(message)

    async def _replace(self, held: Message, body: bytes) -> None:
        event = body.split(b"\n", 1)[0].removeprefix(b"data: ")
        try:
            error = json.loads(event)
            status = int(error["error"]["code"])
        except (ValueError, KeyError, TypeError):
            error, status = {"error": {"message": event.decode(errors="replace"), "type": "InternalServerError", "code": 500}}, 500
        if held["status"] == HTTPStatus.NOT_IMPLEMENTED:
            status = HTTPStatus.NOT_FOUND.value
            error["error"] |= {"type": "NotFoundError", "code": status}
        dropped = (b"content-type", b"content-length", b"retry-after")
        headers = [(name, value) for name, value in held.get("headers", ()) if name.lower() not in dropped]
        await _plain(self._send, status, error, headers, self._terms.retry_after_s if status in _TRY_LATER else None)


async def _refuse(send: Send, status: int, kind: str, message: str, param: str | None = None, *, closing: bool = False) -> None:
    """A refusal in the body format of vLLM's and OpenAI's errors. `closing`: the rest of the request will not be read."""
    error = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    await _plain(send, status, error, [(b"connection", b"close")] if closing else [], None)


async def _plain(send: Send, status: int, content: Any, headers: list[tuple[bytes, bytes]], retry_after_s: float | None) -> None:
    if retry_after_s is not None:
        headers = [*headers, (b"retry-after", _whole_seconds(retry_after_s))]
    await _respond(send, status, json.dumps(content).encode(), b"application/json", headers)


async def _respond(send: Send, status: int, body: bytes, content_type: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    more = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *more]})
    await send({"type": "http.response.body", "body": body})


def _header(message: Message, name: bytes) -> bytes:
    return next((value for key, value in message.get("headers", ()) if key.lower() == name), b"")


def _whole_seconds(seconds: float) -> bytes:
    return str(max(1, round(seconds + 0.5))).encode()
