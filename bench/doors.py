"""What a token costs at the gateway's doors: gRPC against OpenAI's HTTP, over simulated workers that do not wait.

    python -m bench.doors --streams 32 --tokens 256 --requests 256

The server process holds gateway, doors and workers (a worker's own cost is the same for both); the load comes from another process.
Prints one JSON object per door: tokens per second, and CPU seconds of the server per 1,000 tokens. Needs vLLM and the small model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = list(range(5, 37))


async def serve() -> None:
    from disagg.front.model_info import Served
    from disagg.front.server import DoorServer
    from disagg.models import get_model
    from tests.openai_rig import door

    async with door(get_model("smollm2-135m"), check_empty=False, prefill=2, decode=2, kv_cache_tokens=1 << 20) as d:
        from disagg.front.readiness import Readiness
        from disagg.front.text import load_tokenizer
        from disagg.types import ModelInfo

        topology = d.cluster.topology
        topology = topology.model_copy(update={"gateway": topology.gateway.model_copy(update={"port": 0})})
        served = Served(ModelInfo("smollm2-135m", 8192, 49152, 64, (2,)), load_tokenizer(get_model("smollm2-135m")))
        grpc = await DoorServer.start(topology, served, d.cluster.coordinator, Readiness(d.cluster.pool, d.cluster.coordinator, 60.0))
        print(json.dumps({"grpc": grpc.endpoint, "http": f"127.0.0.1:{d.port}"}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await grpc.close(0.0)


async def over_grpc(address: str, tokens: int) -> int:
    from disagg.client import AsyncClient

    async with AsyncClient(address) as client:
        return len((await client.generate(PROMPT, max_tokens=tokens, ignore_eos=True)).tokens)


class Http:
    """Streams by HTTP/1.1 with as little client as possible: the server's cost is asked for, not the client's."""

    def __init__(self, address: str) -> None:
        self.host, _, self.port = address.partition(":")

    async def ask(self, tokens: int) -> int:
        fields = {"model": "smollm2-135m", "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
        reader, writer = await asyncio.open_connection(self.host, int(self.port))
        headers = ("host: x", "connection: close", "content-type: application/json", f"content-length: {len(body)}")
        head = "\r\n".join(("POST /v1/completions HTTP/1.1", *headers)) + "\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        return int(re.findall(rb'"completion_tokens":(\d+)', answer)[-1])


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


async def measure(ask: Any, requests: int, streams: int, tokens: int, pid: int) -> dict[str, float]:
    gate = asyncio.Semaphore(streams)

    async def one() -> int:
        async with gate:
            return int(await ask(tokens))

    await asyncio.gather(*(one() for _ in range(streams)))  # warm
    began_s, began_cpu_s = time.monotonic(), cpu_s(pid)
    total = sum(await asyncio.gather(*(one() for _ in range(requests))))
    took_s, took_cpu_s = time.monotonic() - began_s, cpu_s(pid) - began_cpu_s
    return {"tokens": total, "tokens_per_s": round(total / took_s), "server_cpu_ms_per_1000_tokens": round(1e6 * took_cpu_s / total, 1)}


async def main(streams: int, tokens: int, requests: int) -> dict[str, Any]:
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.doors", "--serve", stdin=pipe, stdout=pipe)
    assert server.stdout is not None
    assert server.stdin is not None
    while not (line := (await server.stdout.readline()).decode()).startswith("{"):
        assert line, "the server did not start"
    addresses = json.loads(line)
    http = Http(addresses["http"])
    result = {
        "grpc": await measure(lambda n: over_grpc(addresses["grpc"], n), requests, streams, tokens, server.pid),
        "http": await measure(http.ask, requests, streams, tokens, server.pid),
    }
    server.stdin.write(b"\n")
    await server.wait()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        asyncio.run(serve())
    else:
        print(json.dumps(asyncio.run(main(chosen.streams, chosen.tokens, chosen.requests)), indent=2))
