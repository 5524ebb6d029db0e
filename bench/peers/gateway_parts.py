"""The parts of `bench.peers.gateways` that are processes of their own: a fake backend, the load over HTTP, an application of Ray Serve.

Each prints a line when it is ready and lives until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from bench.micro.gateway_load import OUTPUT_TOKENS, WARM_SHARE, run, say

PROMPT = "In a village of La Mancha, the name of which I have no desire to call to mind, there lived not long since one of those gentlemen."
MODEL = "fake"
KV_PARAMETERS = {"remote_engine_id": "p", "remote_block_ids": [1, 2, 3, 4], "remote_host": "127.0.0.1", "remote_port": 1}
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(index: int) -> str:
    """A token as vLLM's server streams one."""
    choice = {"index": 0, "text": f" w{index}", "logprobs": None, "finish_reason": "length" if index == OUTPUT_TOKENS - 1 else None}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice], "usage": None}
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _chunk(text: str) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text.encode())


# ---- a backend that computes nothing


class FakeServer(asyncio.Protocol):
    """One connection to an OpenAI server without an engine. Prefill: one JSON answer with KV parameters. Decode: OUTPUT_TOKENS events.

    All streams of the process move on by one token per turn of the event loop, as in an engine whose steps take no time.
    """

    streams: ClassVar[dict[FakeServer, int]] = {}  # by connection, tokens sent
    events = (*(_chunk(event(i)) for i in range(OUTPUT_TOKENS)), _chunk("data: [DONE]\n\n") + b"0\r\n\r\n")

    def __init__(self, is_prefill: bool) -> None:
        self._received = bytearray()
        kv = {"do_remote_prefill": True, "do_remote_decode": False, **KV_PARAMETERS}
        body = json.dumps({"id": "cmpl-1", "model": MODEL, "choices": [{"index": 0, "text": " w"}], "kv_transfer_params": kv}).encode()
        self._answer = _HEAD % len(body) + body if is_prefill else b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end]).lower()
            assert b"transfer-encoding" not in head, "the request's body has no length"
            _, has_length, rest = head.partition(b"content-length:")
            length = int(rest.split(b"\r\n", 1)[0]) if has_length else 0
            if len(self._received) < end + 4 + length:
                return
            del self._received[: end + 4 + length]
            self._take(is_post=head.startswith(b"post"))

    def _take(self, *, is_post: bool) -> None:
        if not is_post:
            body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
            self._transport.write(_HEAD % len(body) + body)
        elif self._answer:
            self._transport.write(self._answer)
        else:
            self._transport.write(_STREAM_HEAD)
            if not self.streams:
                asyncio.get_running_loop().call_soon(self.step)
            self.streams[self] = 0

    @classmethod
    def step(cls) -> None:
        """A token for each stream."""
        for stream, sent in list(cls.streams.items()):
            stream._transport.write(cls.events[sent])
            if sent == OUTPUT_TOKENS:
                del cls.streams[stream]
            else:
                cls.streams[stream] = sent + 1
        if cls.streams:
            asyncio.get_running_loop().call_soon(cls.step)

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.pop(self, None)


async def serve_fake(kind: str) -> None:
    """A fake server, `prefill` or `decode`, until standard input ends."""
    server = await asyncio.get_running_loop().create_server(lambda: FakeServer(kind == "prefill"), "127.0.0.1", 0)
    say(str(server.sockets[0].getsockname()[1]))
    await asyncio.to_thread(os.read, 0, 1)


# ---- the load


class Client(asyncio.Protocol):
    """One connection that asks for one answer at a time, and looks at nothing but its ends."""

    def __init__(self, request: bytes) -> None:
        self._request = request

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self.first_s and b"data: " in self._received:
            self.first_s = time.perf_counter()
        if data.endswith(b"0\r\n\r\n") and not self._end.done():
            self._end.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._end.done():
            self._end.set_exception(ConnectionError(f"the server closed the connection; it had sent {bytes(self._received[-300:])!r}"))

    async def ask(self) -> float:
        """Returns the seconds to the first token. The answer is checked to be whole."""
        self._end = asyncio.get_running_loop().create_future()
        self._received = bytearray()
        self.first_s = 0.0
        began_s = time.perf_counter()
        self._transport.write(self._request)
        await asyncio.wait_for(self._end, 300)
        num_events = self._received.count(b"data: ")
        assert num_events == OUTPUT_TOKENS + 1, f"{num_events} events: {bytes(self._received[:300])!r}"
        return self.first_s - began_s


async def load(port: str, requests: str, streams: str) -> None:
    """Warm up, wait for a line, ask, and say what came: as `bench.micro.gateway_load` does for ours."""
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    request = head.encode() + body
    clients = [(await loop.create_connection(lambda: Client(request), "127.0.0.1", int(port)))[1] for _ in range(int(streams))]
    await _ask(clients, max(int(streams), int(int(requests) * WARM_SHARE)))
    say("warm")
    await asyncio.to_thread(sys.stdin.readline)
    say(json.dumps(await _ask(clients, int(requests))))
    await asyncio.to_thread(sys.stdin.readline)  # until its CPU time is read


async def _ask(clients: list[Client], requests: int) -> dict[str, Any]:
    ttft_ms: list[float] = []
    left = iter(range(requests))

    async def ask(client: Client) -> None:
        ttft_ms.extend([await client.ask() * 1e3 for _ in left])

    began_s = time.perf_counter()
    await asyncio.gather(*map(ask, clients))
    return {"requests": requests, "took_s": time.perf_counter() - began_s, "ttft_ms": ttft_ms}


# ---- Ray Serve


async def serve_ray(kind: str, port: str) -> None:
    """Deployments P, D and an ingress that streams D's answer after P's. `defaults`: as Serve comes; `tuned`: no limits, no logs."""
    import logging

    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import LoggingConfig
    from starlette.requests import Request
    from starlette.responses import StreamingResponse

    is_tuned = kind == "tuned"
    actor = {"num_cpus": 0}
    limits: dict[str, Any] = {"max_ongoing_requests": 1000} if is_tuned else {}
    events = [*map(event, range(OUTPUT_TOKENS)), "data: [DONE]\n\n"]

    @serve.deployment(ray_actor_options=actor, **limits)
    class Prefill:
        async def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
            return KV_PARAMETERS

    @serve.deployment(ray_actor_options=actor, **limits)
    class Decode:
        async def __call__(self, body: dict[str, Any]) -> AsyncIterator[str]:
            for text in events:
                yield text

    @serve.deployment(ray_actor_options=actor, **limits)
    class Ingress:
        def __init__(self, prefill: DeploymentHandle[Any], decode: DeploymentHandle[Any]) -> None:
            self._prefill = prefill
            self._decode = decode.options(stream=True)

        async def __call__(self, request: Request) -> StreamingResponse:
            body = await request.json()
            body["kv_transfer_params"] = await self._prefill.remote(body)
            return StreamingResponse(self._decode.remote(body), media_type="text/event-stream")

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config={"worker_niceness": 0},
    )
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=int(port)))
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False) if is_tuned else None
    application = Ingress.bind(Prefill.bind(), Decode.bind())  # type: ignore[attr-defined]
    await asyncio.to_thread(serve.run, application, route_prefix="/", logging_config=quiet)
    say(port)
    await asyncio.to_thread(os.read, 0, 1)
    await asyncio.to_thread(serve.shutdown)
    ray.shutdown()


PARTS = {"fake": serve_fake, "load": load, "ray": serve_ray}

if __name__ == "__main__":
    run(PARTS[sys.argv[1]](*sys.argv[2:]))
