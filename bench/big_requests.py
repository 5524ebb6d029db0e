"""How long big requests hold up everybody else: the longest that a gateway's event loop stood still while each was read.

    python -m bench.big_requests [--bytes 50000000]

A gRPC and an OpenAI door over simulated workers in this process, the sender in one of its own. A line for each request: what came back,
and the longest delay of a task here that sleeps 10 ms. (One that asks for less than the gateway's bound is parsed; `--bytes 4000000`.)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

import httpx

from disagg.client import AsyncClient
from disagg.errors import DisaggError
from disagg.models import get_model

MODEL = "smollm2-135m"
MAX_BODY_BYTES = 4 << 20
TICK_S = 0.01
CASES = ("text", "token ids", "chat messages")


def prompt(what: str, num_bytes: int, door: str) -> object:
    if what == "text":
        return "word " * (num_bytes // 5)
    if what == "token ids":
        return [12345] * (num_bytes // (7 if door == "http" else 2))
    return [{"role": "user", "content": "w"}] * (num_bytes // (34 if door == "http" else 11))


async def send(door: str, address: str, what: str, num_bytes: int) -> str:
    asked = prompt(what, num_bytes, door)
    if door == "grpc":
        async with AsyncClient(address) as client:
            try:
                await client.generate(asked, max_tokens=2, timeout_s=60)  # type: ignore[arg-type]
            except DisaggError as error:
                return error.message[:80]
            return "an answer"
    field, path = ("messages", "/v1/chat/completions") if what == "chat messages" else ("prompt", "/v1/completions")
    async with httpx.AsyncClient(base_url=address, timeout=60, trust_env=False) as http:
        response = await http.post(path, json={"model": MODEL, "max_tokens": 2, field: asked})
        return f"{response.status_code} {response.json()['error']['message'][:80]}"


async def longest_stop_s(work: asyncio.Task[tuple[bytes, bytes]]) -> float:
    longest_s = 0.0
    while not work.done():
        before_s = time.monotonic()
        await asyncio.sleep(TICK_S)
        longest_s = max(longest_s, time.monotonic() - before_s - TICK_S)
    return longest_s


async def main(num_bytes: int) -> None:
    from tests.builders import sim_topology
    from tests.flow.test_gateway import served
    from tests.openai_rig import door

    async with contextlib.AsyncExitStack() as stack:
        grpc = (await stack.enter_async_context(served(sim_topology()))).gateway.endpoint
        http = await stack.enter_async_context(door(Path(get_model(MODEL)), check_empty=False, max_body_bytes=MAX_BODY_BYTES))
        for name, address in (("grpc", grpc), ("http", f"http://127.0.0.1:{http.port}")):
            for what in CASES:
                me = (sys.executable, "-m", "bench.big_requests", "--bytes", str(num_bytes), "--send", json.dumps([name, address, what]))
                sender = await asyncio.create_subprocess_exec(*me, stdout=asyncio.subprocess.PIPE)
                work = asyncio.create_task(sender.communicate())
                stood_s = await longest_stop_s(work)
                print(f"{name}, {num_bytes / 1e6:g} MB of {what}: {stood_s:.2f} s; {(await work)[0].decode().strip()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=50_000_000)
    parser.add_argument("--send", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.send:
        print(asyncio.run(send(*given.send, given.bytes)))
    else:
        asyncio.run(main(given.bytes))
