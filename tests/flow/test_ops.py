"""Health, readiness, metrics, tokens and TLS of a whole gateway with simulated workers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from disagg.client import AsyncClient
from disagg.config import Topology, parse_topology
from disagg.errors import ConfigError, DisaggError, InvalidRequestError, PlacementError
from disagg.front.gateway import Gateway
from disagg.types import Role
from tests.builders import Cluster, sim_topology

TOKEN = "correct-horse-battery-staple"
CLASSES = [{"name": "chat", "ttft_ms": 60_000, "tpot_ms": 60_000}, {"name": "hasty", "ttft_ms": 0.000001}]


@dataclass(frozen=True)
class Served:
    gateway: Gateway
    cluster: Cluster
    client: AsyncClient

    async def get(self, path: str, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
        """(status, body) of a page."""
        assert self.gateway.http_endpoint is not None
        lines = [f"GET {path} HTTP/1.1", "host: x", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        status, body = await raw(self.gateway.http_endpoint, "\r\n".join(lines).encode() + b"\r\n\r\n", tls)
        return status, body

    async def metrics(self) -> dict[str, float]:
        """Samples as `name{label values}`."""
        status, body = await self.get("/metrics")
        assert status == 200
        samples = {}
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                labels = ",".join(sample.labels[name] for name in sorted(sample.labels))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples


async def raw(endpoint: str, request: bytes, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
    host, port = endpoint.rsplit(":", 1)
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls, server_hostname="localhost" if tls else None)
        writer.write(request)
        answer = (await reader.read()).decode()
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body


def with_gateway(topology: Topology, **gateway: Any) -> Topology:
    return parse_topology({**topology.model_dump(), "gateway": {"port": 0, **gateway}, "slo_classes": CLASSES})


@asynccontextmanager
async def served(topology: Topology | None = None, *, workers: bool = True, **client: Any) -> AsyncIterator[Served]:
    topology = topology or with_gateway(sim_topology())
    gateway = await Gateway.start(topology, None)
    cluster = Cluster(topology, gateway.pool, gateway.coordinator)
    try:
        for role, pool in topology.active_pools().items() if workers else ():
            for _ in range(pool.count):
                await cluster.add(role)
        async with AsyncClient(gateway.endpoint, **client) as c:
            yield Served(gateway, cluster, c)
    finally:
        await gateway.close()
        await cluster.close()


async def test_metrics_count_each_request_once_by_its_outcome() -> None:
    async with served() as s:
        for _ in range(3):
            await s.client.generate([1, 2, 3], max_tokens=5)
        await s.client.generate([1, 2, 3], max_tokens=5, slo_class="hasty")
        stream = s.client.stream([1, 2, 3], max_tokens=4000)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(InvalidRequestError):
            await s.client.generate([], max_tokens=5)
        await s.cluster.settle()
        got = await s.metrics()
        free, total = (f"disagg_worker_kv_{what}_tokens{{decode,decode-0}}" for what in ("free", "total"))
        async with asyncio.timeout(60):  # a worker tells of a cancelled request's room by its next report
            while (last := await s.metrics())[free] < last[total]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert got["disagg_requests_total{finished,chat}"] == 3
    assert got["disagg_requests_total{finished,hasty}"] == 1
    assert got["disagg_requests_total{cancelled,chat}"] == 1
    assert got["disagg_requests_slo_met_total{chat}"] == 3
    assert "disagg_requests_slo_met_total{hasty}" not in got or got["disagg_requests_slo_met_total{hasty}"] == 0
    assert got["disagg_ttft_seconds_count{chat}"] == 4
    assert got["disagg_request_duration_seconds_count{chat}"] == 3
    assert got["disagg_output_length_tokens_sum{chat}"] == 15
    assert got["disagg_prompt_tokens_total{hasty}"] == 3
    assert got["disagg_pool_live_workers{prefill}"] == got["disagg_pool_wanted_workers{prefill}"] == 1
    assert last[free] == last[total] > 0
    assert got["disagg_open_requests{decoding}"] == 0
    granted = [value for name, value in got.items() if name.startswith("disagg_decisions_total") and "disaggregated" in name]
    assert granted == [5]


async def test_metrics_tell_of_the_kv_that_moved_and_of_what_went_wrong_with_it() -> None:
    async with served() as s:
        source, sink = s.cluster.worker("prefill-0"), s.cluster.worker("decode-0")
        for _ in range(3):
            await s.client.generate([1, 2, 3], max_tokens=5)
        host, _, port = (source.address.endpoint("tcp") or "").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET ")  # read as the length of a header, and a far too large one
        assert await reader.read() == b""  # closed
        writer.close()
        await writer.wait_closed()
        await s.cluster.settle()
        async with asyncio.timeout(60):
            while (got := await s.metrics())["disagg_kv_garbage_connections_total{prefill,prefill-0}"] == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    num_bytes = 3 * sink.inbox.layout.entry_bytes(3)
    assert got["disagg_kv_sent_bytes_total{prefill,prefill-0}"] == got["disagg_kv_received_bytes_total{decode,decode-0}"] == num_bytes
    assert got["disagg_kv_completed_transfers_total{decode,decode-0}"] == 3
    assert 0 < got["disagg_kv_transfer_seconds_total{decode,decode-0}"] < 30
    assert got["disagg_kv_failed_transfers_total{decode,decode-0}"] == 0


async def test_names_follow_the_conventions() -> None:
    async with served() as s:
        await s.client.generate([1, 2, 3], max_tokens=3)
        _, body = await s.get("/metrics")
    families = list(text_string_to_metric_families(body))
    assert len(families) > 20
    for family in families:
        assert re.fullmatch(r"disagg_[a-z0-9_]+", family.name)
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_tokens"))
        for sample in family.samples:
            assert all(value for value in sample.labels.values()), sample


async def test_ready_follows_the_pools() -> None:
    async with served(workers=False) as s:
        assert await s.get("/health") == (200, "alive\n")
        assert await s.get("/ready") == (503, "not ready: no live prefill worker\n")
        await s.cluster.add(Role.PREFILL)
        assert await s.get("/ready") == (503, "not ready: no live decode worker\n")
        name = await s.cluster.add(Role.DECODE)
        assert await s.get("/ready") == (200, "ready\n")
        await s.cluster.pool.leave(name)
        assert (await s.get("/ready"))[0] == 503


async def test_a_wedged_pool_is_not_ready_though_its_worker_lives() -> None:
    """Steps that take minutes: the worker answers, and gives no token."""
    async with served(with_gateway(sim_topology(speed=0.000_01), wedged_after_s=0.3)) as s:
        assert (await s.get("/ready"))[0] == 200
        asking = asyncio.create_task(s.client.generate([5] * 500, max_tokens=5))
        status, body = 200, ""
        async with asyncio.timeout(60):
            while status == 200:
                await asyncio.wait({asking}, timeout=0.05)
                status, body = await s.get("/ready")
        assert "no prefill worker has done anything" in body
        health = health_pb2_grpc.HealthStub(s.client._channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert len(s.gateway.pool.view(0.0).workers) == 2
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_prompt_that_takes_longer_than_the_limit_but_shows_its_chunks_is_no_wedge() -> None:
    """The prefill of 16 chunks takes several times `wedged_after_s`; the decode pool waits for it meanwhile."""
    topology = sim_topology(speed=0.04, max_num_batched_tokens=256, admission={"worker_timeout_s": 2.0})
    async with served(with_gateway(topology, wedged_after_s=1.5)) as s:
        began_s = time.monotonic()
        asking = asyncio.create_task(s.client.generate([5] * 4096, max_tokens=2))
        while not asking.done():
            assert await s.get("/ready") == (200, "ready\n")
            await asyncio.wait({asking}, timeout=0.1)
        assert time.monotonic() - began_s > 3.0, "the prompt was too quick to show anything"
        assert len(asking.result().tokens) == 2


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404, "/metrics"),
        (b"POST /v1/completions HTTP/1.1\r\n\r\n{}", 405, "no OpenAI API"),
        (b"nonsense\r\n\r\n", 400, "HTTP"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", 400, "HTTP"),
        (b"HEAD /health HTTP/1.1\r\n\r\n", 200, ""),
    ],
)
async def test_odd_requests(request_: bytes, status: int, said: str) -> None:
    async with served(workers=False) as s:
        assert s.gateway.http_endpoint is not None
        got, body = await raw(s.gateway.http_endpoint, request_)
        assert got == status
        assert said in body


async def test_each_request_leaves_one_line_of_json(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="disagg.requests"):
        async with served() as s:
            await s.client.generate([1, 2, 3], max_tokens=4, request_id="mine")
    records = [json.loads(record.getMessage()) for record in caplog.records if record.name == "disagg.requests"]
    assert len(records) == 1
    assert records[0].items() >= {"request_id": "mine", "outcome": "finished", "output_tokens": 4, "decode_worker": "decode-0"}.items()


# ---- who may call


def token_file(folder: Path, text: str = f"# ours\n{TOKEN}\nanother-token-of-somebody\n") -> str:
    path = folder / "tokens"
    path.write_text(text)
    return str(path)


async def test_a_token_opens_both_doors(tmp_path: Path) -> None:
    topology = with_gateway(sim_topology(), token_file=token_file(tmp_path))
    async with served(topology, token=TOKEN) as s:
        assert (await s.client.generate([1, 2], max_tokens=2)).finish is not None
        assert (await s.get("/metrics", {"Authorization": f"Bearer {TOKEN}"}))[0] == 200


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x", ""])
async def test_without_the_right_token_nothing_is_served_but_health(tmp_path: Path, token: str | None) -> None:
    topology = with_gateway(sim_topology(), token_file=token_file(tmp_path))
    async with served(topology, token=token) as s:
        with pytest.raises(DisaggError, match="bearer token"):
            await s.client.generate([1, 2], max_tokens=2)
        with pytest.raises(DisaggError, match="bearer token"):
            await s.client.model_info()
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        assert (await s.get("/metrics", headers))[0] == 401
        assert (await s.get("/ready", headers))[0] == 200
        health = health_pb2_grpc.HealthStub(s.client._channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("text", ["", "# nothing\n\n", "short\n"])
async def test_a_token_file_of_no_use_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.token_file"):
        await Gateway.start(with_gateway(sim_topology(), token_file=token_file(tmp_path, text)), None)


def test_the_network_is_not_served_without_a_guard(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="insecure: true"):
        with_gateway(sim_topology(), host="0.0.0.0")
    assert with_gateway(sim_topology(), host="0.0.0.0", insecure=True).gateway.insecure
    assert with_gateway(sim_topology(), host="0.0.0.0", token_file=token_file(tmp_path)).gateway.host == "0.0.0.0"
    assert with_gateway(sim_topology(), host="127.1.2.3").gateway.host == "127.1.2.3"
    with pytest.raises(ConfigError, match="absolute path"):
        with_gateway(sim_topology(), token_file="tokens")


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca, server and client certificates, each with its key."""
    folder = tmp_path_factory.mktemp("pem")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=120)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test-ca", "-days", "2")
    for name in ("server", "client"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        signed = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", f"{name}.pem")
        openssl(*signed, "-days", "2", "-extfile", "ext")
    return folder


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_and_client_certificates(pem: Path, mutual: bool) -> None:
    tls = {"cert": str(pem / "server.pem"), "key": str(pem / "server.key"), "client_ca": str(pem / "ca.pem") if mutual else None}
    topology = with_gateway(sim_topology(), tls=tls)
    own = {"cert": str(pem / "client.pem"), "key": str(pem / "client.key")} if mutual else {}
    context = ssl.create_default_context(cafile=str(pem / "ca.pem"))
    if mutual:
        context.load_cert_chain(own["cert"], own["key"])
    async with served(topology, ca=str(pem / "ca.pem"), **own) as s:
        assert (await s.client.generate([1, 2], max_tokens=2)).finish is not None
        assert (await s.get("/ready", tls=context))[0] == 200
        async with AsyncClient(s.gateway.endpoint) as plain:
            with pytest.raises(DisaggError):
                await plain.model_info(timeout_s=5)
        if mutual:
            async with AsyncClient(s.gateway.endpoint, ca=str(pem / "ca.pem")) as stranger:
                with pytest.raises(DisaggError):
                    await stranger.model_info(timeout_s=5)


async def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("not a certificate")
    tls = {"cert": str(tmp_path / "x.pem"), "key": str(tmp_path / "x.pem")}
    with pytest.raises((ConfigError, PlacementError), match=r"gateway\.(tls|port)"):
        await Gateway.start(with_gateway(sim_topology(), tls=tls), None)
    with pytest.raises(ConfigError, match=r"gateway\.tls"):
        await Gateway.start(with_gateway(sim_topology(), tls={"cert": "/nowhere/a.pem", "key": "/nowhere/b.pem"}), None)


async def test_closing_is_not_ready_and_lets_running_requests_end() -> None:
    async with served(with_gateway(sim_topology(speed=5.0))) as s:
        asking = asyncio.create_task(s.client.generate([5] * 10, max_tokens=100))
        while not s.gateway.coordinator.open_runs:
            await asyncio.wait({asking}, timeout=0.01)
        closing = asyncio.create_task(s.gateway.close(20.0))
        await asyncio.wait({closing}, timeout=0.05)
        with pytest.raises(DisaggError):
            await s.client.generate([5], max_tokens=1, timeout_s=5)
        answer = await asking
        assert len(answer.tokens) == 100
        await closing


# ---- disagg top


async def cli(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from disagg.cli import app; app()",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "200"},
    )
    async with asyncio.timeout(240):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_top_shows_what_happened_between_two_looks() -> None:
    async with served(with_gateway(sim_topology(prefill=2))) as s:
        url = f"http://{s.gateway.http_endpoint}"
        looking = asyncio.create_task(cli("top", url, "--once", "--interval", "3"))
        while not looking.done():
            await s.client.generate([1, 2, 3], max_tokens=5)
            await asyncio.wait({looking}, timeout=0.1)
        status, out = await looking
    assert status == 0, out
    assert "ready" in out
    for name in ("chat", "hasty", "prefill-0", "prefill-1", "decode-0"):
        assert name in out
    chat = next(line for line in out.splitlines() if line.startswith("chat"))
    assert float(chat.split()[1]) > 0
    assert "100%" in chat
    assert chat.count(" ms") >= 4


async def test_top_says_what_is_wrong(tmp_path: Path) -> None:
    status, out = await cli("top", "http://127.0.0.1:9", "--once")
    assert (status, "no gateway answers" in out) == (1, True)
    status, out = await cli("top", "127.0.0.1:9", "--once")
    assert (status, "http://HOST:PORT" in out) == (2, True)
    topology = with_gateway(sim_topology(decode=2), token_file=token_file(tmp_path))
    async with served(topology, token=TOKEN) as s:
        url = f"http://{s.gateway.http_endpoint}"
        status, out = await cli("top", url, "--once")
        assert (status, "--token" in out) == (1, True)
        await s.cluster.pool.leave("prefill-0")
        status, out = await cli("top", url, "--once", "--interval", "0.2", "--token", TOKEN)
        assert status == 0, out
        assert "no live prefill worker" in out
        assert "1 of pool prefill missing" in out
