"""Which carrier is taken, and what is said when none can be."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from disagg.config import KvSettings, validated
from disagg.errors import ConfigError
from disagg.kv.carrier import choose_carrier, expected_carrier, offered_carriers, this_host_id
from disagg.kv.carriers.cuda_ipc import CudaIpcCarrier
from disagg.serving.start import make_carriers
from disagg.types import KvAddress
from tests.builders import sim_topology

BOTH = (("shm", "@disagg-1"), ("tcp", "10.0.0.1:7"))


def address(host_id: str = "here", endpoints: tuple[tuple[str, str], ...] = BOTH) -> KvAddress:
    return KvAddress("prefill-0", "1", host_id, endpoints)


def test_auto_takes_shared_memory_on_one_host_and_tcp_otherwise() -> None:
    assert choose_carrier(address(), ("tcp", "shm"), "here") == "shm"
    assert choose_carrier(address("there"), ("tcp", "shm"), "here") == "tcp"
    assert choose_carrier(address(), ("tcp",), "here") == "tcp"
    assert choose_carrier(address(endpoints=BOTH[1:]), ("tcp", "shm"), "here") == "tcp"


def test_auto_prefers_what_moves_device_memory() -> None:
    """GPU workers, as each offers what its boxes allow: the same device memory first, then NCCL, then sockets."""
    everything = tuple((name, "x") for name in ("grpc", "tcp", "torch_dist", "cuda_ipc"))
    names = [name for name, _ in everything]
    assert choose_carrier(address(endpoints=everything), names, "here") == "cuda_ipc"
    assert choose_carrier(address("there", everything), names, "here") == "torch_dist"
    assert choose_carrier(address("there", everything), ("grpc", "tcp"), "here") == "tcp"


def test_a_fixed_choice_is_obeyed() -> None:
    for name in ("grpc", "torch_dist", "shm", "tcp"):
        endpoints = (*BOTH, (name, "x"))
        assert choose_carrier(address(endpoints=endpoints), ("tcp", "shm", name), "here", name) == name  # type: ignore[arg-type]


def test_why_not_and_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"prefill-0 \(shm: the workers are on different hosts .*expected auto or one of \['tcp'\]"):
        choose_carrier(address("there"), ("tcp", "shm"), "here", "shm")
    with pytest.raises(ConfigError, match="tcp: not served by the source"):
        choose_carrier(address(endpoints=BOTH[:1]), ("tcp", "shm"), "here", "tcp")
    with pytest.raises(ConfigError, match=r"shm: the workers are on different hosts.*tcp: not available in this worker"):
        choose_carrier(address("there"), ("shm",), "here")
    with pytest.raises(ConfigError, match="did you mean 'grpc'"):
        choose_carrier(address(), ("shm",), "here", "gprc")  # type: ignore[arg-type]


@pytest.mark.parametrize(("choice", "near", "far"), [("auto", "shm", "tcp"), ("grpc", "grpc", "grpc"), ("torch_dist",) * 3])
def test_what_will_be_used_is_known_before_workers_exist(choice: Any, near: str, far: str) -> None:
    assert expected_carrier(choice, same_host=True) == near
    assert expected_carrier(choice, same_host=False) == far
    assert {near, far} == set(offered_carriers(choice))


def test_what_cannot_reach_is_known_before_workers_exist() -> None:
    with pytest.raises(ConfigError, match="different hosts"):
        expected_carrier("shm", same_host=False)


def test_an_unknown_carrier_in_a_topology_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"carrier: Input should be .*; did you mean 'grpc'\?, got 'gprc'"):
        validated(KvSettings, {"carrier": "gprc"}, "t.yaml")


def test_a_carrier_that_cannot_be_had_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="boxes of these workers are in host memory; expected auto"):
        make_carriers(sim_topology(carrier="cuda_ipc"), "127.0.0.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="torch_dist needs torch, which is not installed; expected tcp or grpc"):
        make_carriers(sim_topology(carrier="torch_dist"), "127.0.0.1")
    with pytest.raises(ConfigError, match="cuda_ipc needs a CUDA GPU and torch"):
        CudaIpcCarrier()


def test_a_host_knows_itself() -> None:
    assert this_host_id() == this_host_id()
    assert len(this_host_id()) > 40
