"""A server with OpenAI's completions that is not ours: it answers by itself, and can go wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

ODD: dict[str, dict[str, Any]] = {
    "odd choices": {"choices": 5},
    "odd choice": {"choices": ["x"]},
    "odd ids": {"choices": [{"token_ids": 7}]},
    "odd usage": {"choices": [], "usage": {"completion_tokens": [1]}},
    "odd reason": {"choices": [{"text": "", "finish_reason": ["stop"]}]},
}


class OpenAiServer:
    """OpenAI's completions: as many tokens as asked, `tokens_a_message` at a time. `fault`: what goes wrong, after the warm-up."""

    def __init__(self, fault: str | None = None, tokens_a_message: int = 1, *, names_ids: bool = True) -> None:
        self.fault = fault
        self.tokens_a_message = tokens_a_message
        self.names_ids = names_ids
        self.bodies: list[dict[str, Any]] = []
        self.sound_requests = 8

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a-model", "max_model_len": 4096}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        fault = self.fault if len(self.bodies) > self.sound_requests else None
        if fault == "busy":
            return web.json_response({"error": "full"}, status=503, headers={"Retry-After": "2"})
        if fault == "broken":
            return web.Response(status=500, text="it broke")
        if fault == "other letters":
            return web.Response(status=502, body=b"<html>caf\xe9 \xff</html>", content_type="text/html")
        if fault == "a page":
            return web.Response(text="<html>Welcome</html>", content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        left = body["max_tokens"]
        while left:
            count = min(left, self.tokens_a_message)
            left -= count
            ids = {"token_ids": [7] * count} if self.names_ids else {}
            choice = {"text": "x" * count, "finish_reason": None if left else "length", **ids}
            await send(response, {"choices": [choice]})
            await asyncio.sleep(0.002)
            if fault == "cut":
                return response
            if fault == "garbage":
                await response.write(b"data: {not json\n\n")
            if fault == "silence":
                await asyncio.sleep(60)
            if fault in ODD:
                await send(response, ODD[fault])
        await send(response, {"choices": [], "usage": {"completion_tokens": body["max_tokens"], "prompt_tokens": len(body["prompt"])}})
        await response.write(b"data: [DONE]\n\n")
        return response


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def serving(server: OpenAiServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
