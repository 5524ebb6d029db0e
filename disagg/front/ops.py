"""Health, readiness and metrics over HTTP: the pages themselves, and a small server for gateways without an OpenAI door."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from disagg.front.metrics import Metrics
from disagg.front.readiness import Readiness

logger = logging.getLogger(__name__)

HEALTH, READY, METRICS = "/health", "/ready", "/metrics"
OPEN_PATHS = frozenset({HEALTH, READY})
REQUEST_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 16 << 10
_TEXT = "text/plain; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Page:
    """One response."""

    status: int
    content_type: str
    body: bytes


class Ops:
    """The pages. /health: this process answers. /ready: a request could be served now, or why not. /metrics: for Prometheus."""

    def __init__(self, readiness: Readiness, metrics: Metrics) -> None:
        self._readiness = readiness
        self._metrics = metrics

    def page(self, path: str) -> Page | None:
        """The page at `path`; None when there is none."""
        if path == HEALTH:
            return Page(200, _TEXT, b"alive\n")
        if path == READY:
            obstacle = self._readiness.obstacle()
            return Page(200, _TEXT, b"ready\n") if obstacle is None else Page(503, _TEXT, f"not ready: {obstacle}\n".encode())
        if path == METRICS:
            return Page(200, *self._metrics.exposition())
        return None


class OpsServer:
    """The pages alone, served on a socket. GET and HEAD, one request per connection. Made by `start`, ended by `close`."""

    def __init__(self, ops: Ops, is_allowed: Callable[[str], bool] | None) -> None:
        self._ops = ops
        self._is_allowed = is_allowed
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(
        cls, ops: Ops, sock: socket.socket, is_allowed: Callable[[str], bool] | None = None, tls: ssl.SSLContext | None = None
    ) -> Self:
        """Serve on `sock`, which is bound and from now on this server's."""
        server = cls(ops, is_allowed)
        server._server = await asyncio.start_server(server._serve, sock=sock, limit=MAX_HEAD_BYTES, ssl=tls)
        return server

    async def close(self, grace_s: float) -> None:
        """Idempotent. Pages are whole at once, so there is nothing to wait for."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    page, with_body = await self._answer(reader)
                    writer.write(_head(page) + (page.body if with_body else b""))
                    await writer.drain()
            finally:
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[Page, bool]:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ", 2)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            return _error(400, "expected an HTTP request"), True
        if method not in ("GET", "HEAD"):
            return _error(405, "only GET is served here: this gateway has no OpenAI API, because its engine is not vLLM"), True
        path = target.split("?", 1)[0]
        names = (line.split(":", 1) for line in head[1:] if ":" in line)
        header = next((value.strip() for name, value in names if name.strip().lower() == "authorization"), "")
        if self._is_allowed is not None and path not in OPEN_PATHS and not self._is_allowed(header):
            return _error(401, "a valid bearer token is needed: Authorization: Bearer TOKEN"), True
        page = self._ops.page(path)
        return page or _error(404, f"{path} is not served here; expected {HEALTH}, {READY} or {METRICS}"), method == "GET"


def _head(page: Page) -> bytes:
    lines = (
        f"HTTP/1.1 {page.status} {_REASONS[page.status]}",
        f"content-type: {page.content_type}",
        f"content-length: {len(page.body)}",
        "connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _error(status: int, message: str) -> Page:
    error = {"error": {"message": message, "type": _REASONS[status].replace(" ", "") + "Error", "param": None, "code": status}}
    return Page(status, "application/json", json.dumps(error).encode())
