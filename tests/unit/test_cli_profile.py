"""Which cores `disagg profile` measures on."""

from __future__ import annotations

import os
from typing import Any

import pytest

from disagg.cli_profile import _cores
from disagg.config import Topology, parse_topology
from disagg.errors import ConfigError


def topology(**colocated: Any) -> Topology:
    pools = {"prefill": {"count": 1}, "decode": {"count": 2}, "colocated": {"count": 3, **colocated}}
    raw = {"name": "t", "model": "m", "pools": pools, "slo_classes": [{"name": "chat"}]}
    return parse_topology(raw)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("colocated", "workers", "cores"),
    [
        ({}, None, [[7], [6], [5]]),  # as many as the topology has
        ({}, 1, [[7]]),
        ({}, 5, [[7], [6], [5], [4], [3]]),
        ({"cores": 3}, None, [[5, 6, 7], [2, 3, 4]]),  # as many as there is room for
        ({"cores": 16}, None, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"bind_cores": False}, 2, [None, None]),
        ({"gpus": 1}, None, [None]),
    ],
)
def test_cpu_workers_are_measured_side_by_side(colocated: dict[str, Any], workers: int | None, cores: list[list[int] | None]) -> None:
    assert _cores(topology(**colocated), workers) == cores


def test_more_workers_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2: each has 4 of this machine's 8 cores"):
        _cores(topology(cores=4), 3)
