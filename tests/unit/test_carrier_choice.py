"""Which carrier is taken, and what is said when none can be."""

from __future__ import annotations

import pytest

from disagg.errors import ConfigError
from disagg.kv.carrier import choose_carrier, this_host_id
from disagg.types import KvAddress

BOTH = (("shm", "@disagg-1"), ("grpc", "10.0.0.1:7"))


def address(host_id: str = "here", endpoints: tuple[tuple[str, str], ...] = BOTH) -> KvAddress:
    return KvAddress("prefill-0", "1", host_id, endpoints)


def test_auto_takes_shared_memory_on_one_host_and_grpc_otherwise() -> None:
    assert choose_carrier(address(), ("grpc", "shm"), "here") == "shm"
    assert choose_carrier(address("there"), ("grpc", "shm"), "here") == "grpc"
    assert choose_carrier(address(), ("grpc",), "here") == "grpc"
    assert choose_carrier(address(endpoints=BOTH[1:]), ("grpc", "shm"), "here") == "grpc"


def test_a_fixed_choice_is_obeyed() -> None:
    assert choose_carrier(address(), ("grpc", "shm"), "here", "grpc") == "grpc"
    assert choose_carrier(address(), ("grpc", "shm"), "here", "shm") == "shm"


def test_why_not_and_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"prefill-0 \(shm: the workers are on different hosts .*expected auto or one of \['grpc'\]"):
        choose_carrier(address("there"), ("grpc", "shm"), "here", "shm")
    with pytest.raises(ConfigError, match="grpc: not served by the source"):
        choose_carrier(address(endpoints=BOTH[:1]), ("grpc", "shm"), "here", "grpc")
    with pytest.raises(ConfigError, match=r"shm: the workers are on different hosts.*grpc: not available in this worker"):
        choose_carrier(address("there"), ("shm",), "here")


def test_a_host_knows_itself() -> None:
    assert this_host_id() == this_host_id()
    assert len(this_host_id()) > 40
