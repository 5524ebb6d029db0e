"""Other people's servers beside our arms: stopped while another has its turn, gone in the end. Python's file servers stand in for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.peers.servers import Running, Server, free_port, running

FILES = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, bind='127.0.0.1', port={})"


def server(name: str) -> Server:
    port = free_port()
    return Server(name, [sys.executable, "-c", FILES.format(port)], port, "/")


def states(peer: Running) -> set[str]:
    """Of its processes, as the kernel names them: T is stopped."""
    return {Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] for process in peer.processes}


def test_a_peer_is_stopped_and_goes_on_and_nothing_is_left_of_it(tmp_path: Path):
    with running([server("worker"), server("router")], tmp_path) as peer:
        pids = [process.pid for process in peer.processes]
        assert len(pids) == 2
        peer.pause()
        assert states(peer) == {"T"}
        peer.go_on()
        assert "T" not in states(peer)
        peer.pause()  # and is ended all the same
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_server_that_does_not_come_up_is_told_with_its_log_and_ends_the_others(tmp_path: Path):
    broken = Server("broken", [sys.executable, "-c", "raise SystemExit('no such model')"], free_port(), "/")
    with pytest.raises(RuntimeError, match=r"broken did not come up; (.|\n)*no such model"), running([server("one"), broken], tmp_path):
        raise AssertionError("it is not up")
