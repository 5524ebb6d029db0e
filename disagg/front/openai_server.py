"""vLLM's API server, served on the gateway's event loop over the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from argparse import Namespace
from collections.abc import Generator
from http import HTTPStatus
from typing import Self

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import GracefulHTTPError

from disagg.config import Topology
from disagg.front.grpc_door import Pools
from disagg.front.http_edge import App, EdgeSettings, HttpEdge
from disagg.front.openai_client import TASKS, GatewayClient, OpenCoordinator
from disagg.front.openai_config import server_args, vllm_config
from disagg.front.terms import CURRENT
from disagg.types import ModelInfo

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0


class _Server(uvicorn.Server):
    """Leaves signals to the gateway's process, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class OpenAiServer:
    """A running HTTP door. Made by `start`, ended by `close`."""

    def __init__(self, server: _Server, serving: asyncio.Task[None], client: GatewayClient) -> None:
        self._server = server
        self._serving = serving
        self.client = client

    @classmethod
    async def start(
        cls,
        topology: Topology,
        model: str,
        info: ModelInfo,
        coordinator: OpenCoordinator,
        pools: Pools,
        sock: socket.socket,
        edge: EdgeSettings,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Serve on `sock`, which is bound and from now on this server's. Raises ConfigError and ModelError."""
        app, client, args = await asyncio.to_thread(_make_app, topology, model, info, coordinator, pools)
        server = _Server(_uvicorn_config(HttpEdge(app, edge), args, tls))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        async with asyncio.timeout(START_TIMEOUT_S):
            up = asyncio.create_task(server.is_up.wait())
            await asyncio.wait({up, serving}, return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
        if serving.done():
            await serving
        return cls(server, serving, client)

    async def close(self, grace_s: float) -> None:
        """Take no new requests, let running ones end for `grace_s` seconds, then cut them off. Idempotent."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s)) if grace_s > 0 else 0
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=grace_s + 10.0)
        self._serving.cancel()
        await asyncio.to_thread(self.client.shutdown)


def _make_app(
    topology: Topology, model: str, info: ModelInfo, coordinator: OpenCoordinator, pools: Pools
) -> tuple[App, GatewayClient, Namespace]:
    """vLLM's application. Takes seconds, so not in an event loop; nothing of it is bound to one before it serves."""
    config = vllm_config(topology, model, info)
    args = server_args(topology, model, config)
    client = GatewayClient(config, coordinator, pools, topology.slo_classes[0])
    with _root_logger_kept():
        app = build_app(args, TASKS, config.model_config)
    for fault in (AttributeError, LookupError, AssertionError, RecursionError):
        app.exception_handler(fault)(_misread)
    app.exception_handler(HTTPException)(_plainly)
    app.exception_handler(TypeError)(_no_text)
    app.middleware_stack = app.build_middleware_stack()  # anew: what vLLM hangs around its application may have built it before those
    asyncio.run(init_app_state(client, app.state, args, TASKS))
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(_is_news)
    return app, client, args


@contextlib.contextmanager
def _root_logger_kept() -> Generator[None, None, None]:
    """A library that vLLM's server imports (model_hosting_container_standards) shuts up the whole process below ERROR: undone here.

    Else nobody would read that a worker was lost, nor the line of each request.
    """
    root = logging.getLogger()
    before = (root.level, [(handler, handler.level) for handler in root.handlers])
    try:
        yield
    finally:
        root.setLevel(before[0])
        for handler, level in before[1]:
            handler.setLevel(level)


async def _plainly(request: Request, fault: HTTPException) -> JSONResponse:
    """What the framework refuses by itself, in the form of every other error: a body that is no JSON, a path that is not served."""
    status = HTTPStatus(fault.status_code)
    message = fault.detail
    if fault.__cause__ is not None:
        message = f"the body cannot be read as JSON: {fault.__cause__}"
    elif status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        message = f"{request.method} {request.url.path} is not served here"
    error = create_error_response(message, status.phrase, status)
    return JSONResponse(error.model_dump(), status, fault.headers)


async def _no_text(request: Request, fault: TypeError) -> JSONResponse:
    """Tokenizers say of half a surrogate pair (JSON can write one) that it is no string."""
    if "TextEncodeInput" in str(fault):
        found = "it has half of a surrogate pair (\\ud800 to \\udfff)"
        fault = TypeError(f"the prompt cannot be written as UTF-8: {found}; expected whole characters")
    response: JSONResponse = await exception_handler(request, fault)
    return response


async def _misread(request: Request, fault: Exception) -> JSONResponse:
    """vLLM stumbles over some malformed fields (structured_outputs: 3) where it means to check them: the client's error, not ours."""
    terms = CURRENT.get()
    is_malformed = terms is not None and not terms.is_understood
    logger.error("%s: %s", "malformed request" if is_malformed else "unexpected error", request.url.path, exc_info=fault)
    if is_malformed:
        error = create_error_response(f"the request is malformed: {fault}")
    else:
        message = "the request failed by a fault of the gateway; its log has the details"
        error = create_error_response(message, "InternalServerError", HTTPStatus.INTERNAL_SERVER_ERROR)
    return JSONResponse(error.model_dump(), error.error.code)


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traceback that vLLM logs of each stream that was refused: under overload there are many, and all are meant."""
    return not (record.exc_info and isinstance(record.exc_info[1], GracefulHTTPError))


def _uvicorn_config(app: App, args: Namespace, tls: ssl.SSLContext | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        log_level=args.uvicorn_log_level,
        access_log=False,
        log_config=None,  # the gateway's own logging goes on
        timeout_keep_alive=65,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        lifespan="on",
    )
    config.h11_max_header_count = args.h11_max_header_count  # type: ignore[attr-defined]
    config.load()
    config.ssl = tls
    return config
