"""Bad clients of a gateway before real engines: each gets its sentence, and nobody else notices.

    python -m bench.bad_clients

One prefill and one decode worker (SmolLM2-135M on CPU), a gateway with a bearer token, and an OpenTelemetry collector. Sends what clients
do wrong to both doors and prints a line for each: what came back, and after how long. After each, an ordinary request must be answered as
it was at first. Then a client that reads a byte a second: what the gateway's memory does, and how long others wait for their answers,
by turns with and without it. At the end: whose spans came for a request with a `traceparent`. Exit status 1 when anything was not as it
must be.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.doors_real import Server, our_server
from bench.load_clients import MODEL
from disagg.client import AsyncClient
from disagg.errors import DisaggError

TOKEN = "the-token-of-this-run"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
CALL_TIMEOUT_S = 120.0
SLOW_S, TURNS = 20.0, 3
MEMORY_ALLOWED_MIB = 32.0
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
JSON_TYPE = {"content-type": "application/json"}
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


def ask(prompt: Any = "The capital of France is", **fields: Any) -> bytes:
    return json.dumps({**FIELDS, "prompt": prompt, **fields}).encode()


def chat(*roles: str, **fields: Any) -> bytes:
    return json.dumps({**FIELDS, "messages": [{"role": role, "content": "Hi"} for role in roles], **fields}).encode()


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIFTY_MB = 50 * 10**6
# (what is wrong, path, body, headers, the status that it must get)
BAD_HTTP: list[tuple[str, str, bytes, dict[str, str], int]] = [
    ("malformed JSON", COMPLETIONS, b'{"model": ', {}, 400),
    ("wrong type", COMPLETIONS, ask(max_tokens="many"), {}, 400),
    ("50 MB of text", COMPLETIONS, ask("word " * (FIFTY_MB // 5)), {}, 413),
    ("50 MB of token ids", COMPLETIONS, ask([12345] * (FIFTY_MB // 7)), {}, 413),
    ("4 MB of token ids", COMPLETIONS, ask([12345] * (4 * 10**6 // 7)), {}, 400),
    ("70 MB", COMPLETIONS, b" " * (70 << 20), {}, 413),
    ("unknown model", COMPLETIONS, ask(model="nobody"), {}, 404),
    ("roles out of order", CHAT, chat("assistant", "user", chat_template=ALTERNATING), {}, 400),
    ("invalid UTF-8", COMPLETIONS, b'{"model": "smollm2-135m", "prompt": "\xff\xfe"}', {}, 400),
    ("schema that cannot compile", COMPLETIONS, ask(structured_outputs={"json": {"type": "nonsense"}}), {}, 400),
    ("grammar that cannot compile", COMPLETIONS, ask(structured_outputs={"grammar": "root ::= unknown"}), {}, 400),
    ("n = 0", COMPLETIONS, ask(n=0), {}, 400),
    ("token id 2^40", COMPLETIONS, ask([2**40]), {}, 400),
    ("token id beyond the vocabulary", COMPLETIONS, ask([10**6]), {}, 400),
    ("unknown class", COMPLETIONS, ask(), {"x-slo-class": "gold"}, 400),
    ("expired deadline", COMPLETIONS, ask(max_tokens=1500, ignore_eos=True), {"x-request-timeout-s": "0.5"}, 504),
    ("deadline of nothing", COMPLETIONS, ask(), {"x-request-timeout-s": "0"}, 400),
    ("wrong token", COMPLETIONS, ask(), {"authorization": "Bearer wrong"}, 401),
    ("no token", COMPLETIONS, ask(), {"authorization": ""}, 401),
]
# (what is wrong, prompt, options, the error that it must get)
BAD_GRPC: list[tuple[str, Any, dict[str, Any], str]] = [
    ("50 MB of text", "word " * (FIFTY_MB // 5), {}, "InvalidRequestError"),
    ("4 MB of token ids", [12345] * (4 * 10**6 // 2 - 100), {}, "InvalidRequestError"),
    ("70 MB", "x" * (70 << 20), {}, "InvalidRequestError"),
    ("a message without content", [{"role": "user"}], {}, "InvalidRequestError"),
    ("text that is not UTF-8", "\ud800", {}, "InvalidRequestError"),
    ("schema that cannot compile", "Hi", {"json_schema": {"type": "nonsense"}}, "InvalidRequestError"),
    ("grammar that cannot compile", "Hi", {"grammar": "root ::= unknown"}, "InvalidRequestError"),
    ("n = 0", "Hi", {"n": 0}, "InvalidRequestError"),
    ("token id 2^40", [2**40], {}, "InvalidRequestError"),
    ("unknown class", "Hi", {"slo_class": "gold"}, "InvalidRequestError"),
    ("expired deadline", "Hi", {"max_tokens": 1500, "ignore_eos": True, "timeout_s": 0.5}, "DeadlineError"),
]


@dataclass
class Bench:
    """The run: clients, and what went wrong."""

    server: Server
    http: httpx.AsyncClient
    grpc: AsyncClient
    wrong: list[str] = field(default_factory=list)

    def note(self, what: str, is_right: bool, said: str, began_s: float) -> None:
        print(f"{'  ' if is_right else '! '}{what}: {said[:160]!r} after {time.monotonic() - began_s:.2f} s", flush=True)
        if not is_right:
            self.wrong.append(what)

    async def answer(self) -> str:
        response = await self.http.post(COMPLETIONS, content=ask(ignore_eos=True), headers=JSON_TYPE)
        return str(response.json()["choices"][0]["text"]) if response.status_code == 200 else f"status {response.status_code}"

    async def bad_http(self, right: str) -> None:
        for what, path, body, headers, status in BAD_HTTP:
            began_s = time.monotonic()
            try:
                response = await self.http.post(path, content=body, headers=JSON_TYPE | headers)
                got, said = response.status_code, f"{response.status_code} {response.json().get('error', {}).get('message', response.text)}"
            except httpx.TransportError as error:  # a body that is too large may be refused, and the connection closed, before it is sent
                got, said = 413 if status == 413 else 0, repr(error)
            self.note(f"HTTP, {what}", got == status and await self.answer() == right, said, began_s)

    async def bad_grpc(self, right: str) -> None:
        for what, prompt, options, kind in BAD_GRPC:
            began_s = time.monotonic()
            said = "an answer"
            try:
                await self.grpc.generate_n(prompt, **{"max_tokens": 8, "timeout_s": CALL_TIMEOUT_S, **options})
            except DisaggError as error:
                said = f"{type(error).__name__}: {error.message}"
            self.note(f"gRPC, {what}", said.startswith(kind) and await self.answer() == right, said, began_s)
        async with AsyncClient(self.server.grpc_address, token="wrong-token-of-a-stranger") as stranger:
            began_s, said = time.monotonic(), "an answer"
            try:
                await stranger.generate("Hi", max_tokens=2)
            except DisaggError as error:
                said = f"{type(error).__name__}: {error.message}"
            self.note("gRPC, wrong token", "bearer token" in said, said, began_s)

    async def slow_reader(self, right: str) -> None:
        """Turns without and with a client that reads a byte a second: the others' seconds per answer, and the gateway's memory."""
        took_s: dict[bool, list[float]] = defaultdict(list)
        memory_mib = []
        began_s, end_s = time.monotonic(), 0.0
        for is_slow in [False, True] * TURNS:
            async with _byte_a_second(self.server.url) if is_slow else _nobody():
                end_s = time.monotonic() + SLOW_S / TURNS
                while time.monotonic() < end_s:
                    one_s = time.monotonic()
                    if await self.answer() != right:
                        self.wrong.append("slow reader: another's answer")
                    took_s[is_slow].append(time.monotonic() - one_s)
            memory_mib.append(_rss_mib(self.server.pid))
        grown_mib = memory_mib[-1] - memory_mib[0]
        medians = {is_slow: statistics.median(values) for is_slow, values in took_s.items()}
        said = f"others' median {medians[False]:.2f} s without, {medians[True]:.2f} s with (it decodes, too); gateway {grown_mib:+.1f} MiB"
        self.note("HTTP, a byte a second", grown_mib < MEMORY_ALLOWED_MIB, said, began_s)


@asynccontextmanager
async def _nobody() -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def _byte_a_second(url: str) -> AsyncIterator[None]:
    """A stream of 1,900 tokens with logprobs, over a socket with next to no buffer."""
    host, port = url.removeprefix("http://").split(":")
    body = ask("Once", max_tokens=1900, ignore_eos=True, stream=True, logprobs=5)
    lines = (f"POST {COMPLETIONS} HTTP/1.1", "host: x", f"authorization: Bearer {TOKEN}", "content-type: application/json")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    await loop.sock_sendall(sock, "\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body)

    async def read() -> None:
        while await loop.sock_recv(sock, 1):  # noqa: ASYNC110 - slowness is the matter
            await asyncio.sleep(1.0)

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        sock.close()


def _rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


async def main() -> list[str]:
    from tests.flow.test_tracing import collector

    with tempfile.NamedTemporaryFile("w", suffix=".tokens") as tokens:
        tokens.write(TOKEN + "\n")
        tokens.flush()
        async with collector() as (found, endpoint):
            settings = {"token_file": tokens.name, "traces_endpoint": endpoint, "http_args": {"trust_request_chat_template": True}}
            async with our_server(**settings) as server:
                headers = {"authorization": f"Bearer {TOKEN}"}
                async with (
                    httpx.AsyncClient(base_url=server.url, timeout=CALL_TIMEOUT_S, headers=headers, trust_env=False) as http,
                    AsyncClient(server.grpc_address, token=TOKEN) as grpc,
                ):
                    bench = Bench(server, http, grpc)
                    right = await bench.answer()
                    if right.startswith("status "):  # else every later failure would pass for the same answer
                        raise SystemExit(f"an ordinary request is not answered: {right}")
                    await bench.bad_http(right)
                    await bench.bad_grpc(right)
                    await bench.slow_reader(right)
                    await http.post(COMPLETIONS, content=ask(), headers=JSON_TYPE | {"traceparent": TRACEPARENT})
            began_s = time.monotonic()
            names = sorted({name for name, (_, span) in found.spans.items() if span.trace_id.hex() == TRACE})
            bench.note(
                "one trace", {"disagg.request", "disagg.worker.prefill", "disagg.worker.decode"} <= set(names), ", ".join(names), began_s
            )
    return bench.wrong


if __name__ == "__main__":
    sys.exit(1 if asyncio.run(main()) else 0)
