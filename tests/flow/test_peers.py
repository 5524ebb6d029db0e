"""Other people's servers beside our arms: stopped while another has its turn, gone in the end. Python's file servers stand in for them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bench.peers.servers import Running, Server, colocated, free_port, nixl, running
from disagg.config import load_topology, parse_topology

FILES = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, bind='127.0.0.1', port={})"


def server(name: str) -> Server:
    port = free_port()
    return Server(name, [sys.executable, "-c", FILES.format(port)], port, "/")


def are_stopped(peer: Running, wanted: bool) -> bool:
    """Whether all its processes come to be stopped, or none: a signal takes effect when its process gets a core."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        states = [Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] for process in peer.processes]
        if all((state == "T") is wanted for state in states):
            return True
        time.sleep(0.01)
    return False


def test_a_peer_is_stopped_and_goes_on_and_nothing_is_left_of_it(tmp_path: Path):
    with running([server("worker"), server("router")], tmp_path) as peer:
        pids = [process.pid for process in peer.processes]
        assert len(pids) == 2
        peer.pause()
        assert are_stopped(peer, True)
        peer.go_on()
        assert are_stopped(peer, False)
        peer.pause()  # and is ended all the same
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_server_that_does_not_come_up_is_told_with_its_log_and_ends_the_others(tmp_path: Path):
    broken = Server("broken", [sys.executable, "-c", "raise SystemExit('no such model')"], free_port(), "/")
    with pytest.raises(RuntimeError, match=r"broken did not come up; (.|\n)*no such model"), running([server("one"), broken], tmp_path):
        raise AssertionError("it is not up")


def test_stock_servers_are_given_no_argument_that_only_our_engines_know(tmp_path: Path):
    """Such a one is the bound of mixed steps, in the topology that the bench sizes and hands on in milliseconds."""
    path = Path(__file__).parents[2] / "cluster" / "topologies" / "cpu-1p1d.yaml"
    raw = load_topology(path).model_dump(mode="json", exclude_unset=True)
    raw["pools"]["prefill"]["args"]["mixed_step_tokens"] = 64
    topology = parse_topology(raw)
    given = {name for role in topology.active_pools() for name in topology.engine_args(role)}
    assert {"mixed_step_tokens", "mixed_step_ms"} <= given
    servers = [*colocated(topology, path.parent, tmp_path / "router"), *nixl(topology, path.parent, tmp_path / "router", tmp_path)]
    words = [word for one in servers for word in one.command]
    assert "--max-num-batched-tokens" in words
    assert not [word for word in words if "mixed-step" in word]
