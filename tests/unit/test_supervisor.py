"""What `disagg up` says while it serves."""

from __future__ import annotations

import threading

import pytest

from disagg.errors import EngineError
from disagg.launch import supervisor
from disagg.launch.report import DeploymentStatus, WorkerStatus
from disagg.types import Role

LOST = {"is_live": False, "trouble": "lost; waiting for its restart"}
# What each look finds of p0 and d0; None: the gateway does not answer.
LOOKS = [({}, {}), ({}, LOST), ({}, LOST), None, ({"restarts": 3}, {"restarts": 1}), ({"restarts": 3}, {"restarts": 1})]


def test_a_worker_that_is_lost_and_comes_back_is_told_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WATCH_S", 0.001)
    looks, ended, lines = iter(LOOKS), threading.Event(), list[str]()

    def status() -> DeploymentStatus:
        found = next(looks, None)
        if found is None:
            if not looks.__length_hint__():
                ended.set()
            raise EngineError("the gateway does not answer")
        named = zip(("p0", "d0"), (Role.PREFILL, Role.DECODE), found, strict=True)
        workers = tuple(WorkerStatus(name, role, **{"is_live": True, **state}) for name, role, state in named)
        return DeploymentStatus("a", "m", "disagg", "127.0.0.1:1", 1, workers)

    supervisor.tell_changes(status, lines.append, ended)
    assert lines == [
        "worker d0: lost; waiting for its restart (restarts: 0)",
        "worker p0: serves again (restarts: 3)",
        "worker d0: serves again (restarts: 1)",
    ]
