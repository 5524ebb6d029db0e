"""A Ray that does not start or is not there: typed errors, and nothing left. No Ray is started here."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from disagg.config import Topology, parse_topology
from disagg.errors import ConfigError, EngineError, PlacementError
from disagg.launch import session
from disagg.launch.session import RaySession


@pytest.fixture(autouse=True)
def _own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.tempfile, "gettempdir", lambda: "/tmp")
    monkeypatch.setattr(session.tempfile, "mkdtemp", lambda **_: _made(tmp_path / "ray"))


def _made(path: Path) -> str:
    path.mkdir()
    return str(path)


def topology(**pool: Any) -> Topology:
    raw = {"model": "m", "engine": {"kind": "simulated"}, "pools": {"prefill": {"count": 1, **pool}, "decode": {"count": 1}}}
    return parse_topology(raw)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_start_that_ray_misses_is_tried_once_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: int) -> None:
    calls: list[dict[str, Any]] = []

    def init(**settings: Any) -> None:
        calls.append(settings)
        assert os.environ["RAY_AUTH_MODE"] == "token"
        if len(calls) <= failures:
            raise Exception("The current node timed out during startup.")
        raise KeyboardInterrupt

    before = os.environ.copy()
    monkeypatch.setattr(session.ray, "init", init)
    with pytest.raises(EngineError if failures == 2 else KeyboardInterrupt):
        RaySession.start([topology()])
    assert len(calls) == 2
    assert {name: value for name, value in os.environ.items() if name in before or "RAY" in name or "DISAGG" in name} == before
    assert list(tmp_path.iterdir()) == []


def test_real_workers_beyond_this_machines_cores_are_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.ray, "init", lambda **settings: pytest.fail("Ray was started"))
    real = parse_topology({"model": "m", "pools": {"prefill": {"count": 1000}, "decode": {"count": 1}}})
    with pytest.raises(PlacementError, match=r"asks 1000 x prefill \(1 core\), .*this machine has host 127\.0\.0\.1: \d+ cores?: short of"):
        RaySession.start([real])


def test_no_ray_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"no Ray to join at '127\.0\.0\.1:{port}' \(.*refused"):
        RaySession.start([], f"127.0.0.1:{port}")
    monkeypatch.setenv("RAY_TMPDIR", tempfile.gettempdir())
    with pytest.raises(ConfigError, match="no Ray to join at 'nonsense'"):
        RaySession.start([], "nonsense")
