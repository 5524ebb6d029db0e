"""`disagg up`, `status` and `down` as a user types them: foreground, background, on a cluster; ended by every way there is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray")

from disagg.client import Client
from disagg.errors import GatewayUnreachableError
from disagg.launch.processes import ProcessId, descendants, find_marked, wait_gone

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

DISAGG = [sys.executable, "-c", "from disagg.cli import app; app()"]
COMMAND_TIMEOUT_S = 240

HOLD_A_RAY = """
import sys
from disagg.config import load_topology
from disagg.launch.session import RaySession
topology = load_topology(sys.argv[1])
with RaySession.start([topology, topology]) as session:
    print(session.address, session.mark, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    raw = {
        "name": "up-test",
        "model": "simulated",
        "engine": {"kind": "simulated", "simulated": {"speed": 0, "tp": 4}},
        "pools": {"prefill": {"count": 1}, "decode": {"count": 1}},
        "kv": {"outbox_gib": 0.01, "inbox_gib": 0.01},
        "gateway": {"port": 0},
    }
    file = tmp_path / "topology.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "100"}


@pytest.fixture(autouse=True)
def _nothing_is_left(env: dict[str, str], tmp_path: Path) -> Iterator[None]:
    """Every mark that a test's records ever held is gone afterwards, as are the records."""
    yield
    state = tmp_path / "state" / "disagg" / "deployments"
    left = list(state.glob("*")) if state.exists() else []
    for file in left:
        subprocess.run([*DISAGG, "down", "--name", file.stem], env=env, timeout=COMMAND_TIMEOUT_S, check=False)
    assert left == []


def disagg(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DISAGG, *arguments], env=env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)


def record(env: dict[str, str], name: str = "up-test") -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((Path(env["XDG_STATE_HOME"]) / "disagg" / "deployments" / f"{name}.json").read_text())
    return loaded


def answers(endpoint: str) -> bool:
    """Whether a gateway serves there; raises nothing when none does."""
    with Client(endpoint) as client, contextlib.suppress(GatewayUnreachableError):
        return len(client.generate([5, 6, 7], max_tokens=4, temperature=0.0, timeout_s=30).tokens) == 4
    return False


@contextlib.contextmanager
def foreground(env: dict[str, str], topology: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`disagg up` with its own process group, as a terminal gives it; yields it and its endpoint once it serves."""
    command = [*DISAGG, "up", str(topology), *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"at (\S+:\d+)", first)
        assert found is not None, (first, process.stderr.read() if process.stderr else "")
        try:
            yield process, found[1]
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_foreground_and_leaves_nothing(env: dict[str, str], topology: Path, number: signal.Signals) -> None:
    with foreground(env, topology) as (process, endpoint):
        assert answers(endpoint)
        mark = record(env)["mark"]
        family = (*descendants(process.pid), *find_marked(mark))
        assert len(family) > 5
        os.killpg(process.pid, number)
        assert process.wait(timeout=120) == 0
    assert not answers(endpoint)
    assert [each for each in family if each.is_alive] == []
    assert find_marked(mark) == ()


def test_ctrl_c_while_it_starts(env: dict[str, str], topology: Path) -> None:
    command = [*DISAGG, "up", str(topology)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        assert "listens" in process.stderr.readline()
        mark = record(env)["mark"]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 0
        assert "nothing is left" in process.stderr.read()
    assert find_marked(mark) == ()


def test_background_status_a_second_up_and_down(env: dict[str, str], topology: Path) -> None:
    up = disagg(env, "up", str(topology), "--detach", "--set", "pools.decode.count=2")
    assert up.returncode == 0, up.stderr
    known = record(env)
    assert known["endpoint"] in up.stdout
    assert answers(known["endpoint"])
    status = disagg(env, "status")
    assert status.returncode == 0
    for words in ("up-test", known["endpoint"], "prefill-0", "decode-0", "decode-1", "live"):
        assert words in status.stdout
    again = disagg(env, "up", str(topology))
    assert again.returncode == 2
    assert "is up already" in again.stderr
    assert disagg(env, "status", "--name", "other").returncode == 2
    assert answers(known["endpoint"])
    down = disagg(env, "down")
    assert (down.returncode, down.stdout) == (0, "up-test is down\n")
    assert find_marked(known["mark"]) == ()
    assert not Path(known["temp_dir"]).exists()
    assert "no deployment is up" in disagg(env, "status").stdout
    assert disagg(env, "down").returncode == 2


def test_a_killed_owner_is_told_of_and_cleaned_up(env: dict[str, str], topology: Path) -> None:
    assert disagg(env, "up", str(topology), "--detach").returncode == 0
    known = record(env)
    owner = ProcessId(**known["owner"])
    owner.send(signal.SIGKILL)
    assert wait_gone([owner], 30) == ()
    status = disagg(env, "status")
    assert status.returncode == 1
    assert "abandoned" in status.stdout
    assert disagg(env, "down", "--name", "up-test").returncode == 0
    assert find_marked(known["mark"]) == ()
    assert not Path(known["temp_dir"]).exists()


def test_a_background_start_that_fails_says_why_and_leaves_nothing(env: dict[str, str], topology: Path) -> None:
    start_s = time.monotonic()
    up = disagg(env, "up", str(topology), "--detach", "--set", "pools.decode.simulated.kv_cache_tokens=1")
    assert up.returncode != 0
    assert "kv_cache_tokens" in up.stderr
    assert "Traceback" not in up.stderr
    assert time.monotonic() - start_s < COMMAND_TIMEOUT_S / 2


def test_detached_on_a_cluster(env: dict[str, str], topology: Path) -> None:
    """The actors outlive `up`; two deployments share the Ray; both are found by name, from records and from the Ray itself."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_A_RAY, str(topology)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        try:
            address, token = holder.stdout.readline().split()
            env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            for name in ("one", "two"):
                up = disagg(env, "up", str(topology), "--address", address, "--detach", "--name", name)
                assert up.returncode == 0, up.stderr
                assert answers(record(env, name)["endpoint"])
            full = disagg(env, "up", str(topology), "--address", address, "--detach", "--name", "three")
            assert full.returncode == 2
            assert "asks 1 x prefill (1 core), 1 x decode (1 core); the cluster has free host" in full.stderr
            assert "one" in (listed := disagg(env, "status", "--address", address).stdout)
            assert "two" in listed
            several = disagg(env, "down")
            assert several.returncode == 2
            assert "one, two" in several.stderr
            first = record(env, "one")["endpoint"]
            assert disagg(env, "down", "--name", "one").returncode == 0
            assert not answers(first)
            assert answers(record(env, "two")["endpoint"])
            assert disagg(env, "down", "--address", address).returncode == 0
            assert "no deployment is up" in disagg(env, "status", "--address", address).stdout
            with foreground(env, topology, "--address", address, "--name", "held") as (process, endpoint):
                assert answers(endpoint)
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=120) == 0
            assert "no deployment is up" in disagg(env, "status", "--address", address).stdout
        finally:
            holder.stdin.close()
            holder.wait(timeout=120)
    assert find_marked(token) == ()
