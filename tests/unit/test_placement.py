"""Who goes where: groups, core slots, and refusals that say what is asked and what there is."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.config import Topology, parse_topology
from disagg.errors import ConfigError, PlacementError
from disagg.launch.placement import Host, groups, place, worker_specs


def topology(**changes: Any) -> Topology:
    """1P + 1D real workers of one core; `changes` are dotted keys with `__` for the dot."""
    raw = {"model": "m", "pools": {"prefill": {"count": 1}, "decode": {"count": 1}}}
    return parse_topology(raw, overrides={key.replace("__", "."): value for key, value in changes.items()})


def host(name: str, cores: float, gpus: float = 0, **named: float) -> Host:
    return Host(name, tuple({"CPU": cores, "GPU": gpus, **named}.items()))


def where(topo: Topology, *hosts: Host) -> dict[str, str]:
    return {each.spec.name: each.host for each in place(topo, hosts)}


def test_bound_workers_get_their_own_cores_in_order() -> None:
    topo = topology(pools__prefill__count=2, pools__prefill__cores=2, pools__decode__cores=3)
    slots = {each.spec.name: each.core_slots for each in place(topo, [host("a", 8)])}
    assert slots == {"prefill-0": (0, 1), "prefill-1": (2, 3), "decode-0": (4, 5, 6)}


def test_cores_start_anew_on_each_host() -> None:
    placed = place(topology(), [host("a", 1), host("b", 1)])
    assert [(each.host, each.core_slots) for each in placed] == [("a", (0,)), ("b", (0,))]


@pytest.mark.parametrize("change", [{"pools__prefill__bind_cores": False}, {"engine__kind": "simulated"}])
def test_unbound_workers_get_none(change: dict[str, Any]) -> None:
    assert place(topology(**change), [host("a", 8)])[0].core_slots is None


def test_pairs_share_a_host_where_shared_memory_may_carry() -> None:
    topo = topology(pools__prefill__count=2, pools__decode__count=2)
    assert where(topo, host("a", 2), host("b", 2)) == {"prefill-0": "a", "decode-0": "a", "prefill-1": "b", "decode-1": "b"}


def test_a_pair_is_split_rather_than_refused_with_auto_but_not_with_shm() -> None:
    hosts = [host("a", 1), host("b", 1)]
    assert set(where(topology(), *hosts).values()) == {"a", "b"}
    with pytest.raises(PlacementError, match="together, which carrier shm needs"):
        place(topology(kv__carrier="shm"), hosts)


def test_grpc_spreads() -> None:
    assert set(where(topology(kv__carrier="grpc"), host("a", 4), host("b", 4)).values()) == {"a", "b"}


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (1, 3), (3, 1), (2, 5), (4, 4), (7, 3)])
def test_groups_hold_every_worker_once_and_both_roles(prefills: int, decodes: int) -> None:
    topo = topology(pools__prefill__count=prefills, pools__decode__count=decodes)
    specs = worker_specs(topo)
    found = groups(topo, specs)
    assert sorted(spec.name for group in found for spec in group) == sorted(spec.name for spec in specs)
    assert all({spec.role.value for spec in group} == {"prefill", "decode"} for group in found)
    assert len(found) == min(prefills, decodes)


def test_custom_resources_pick_the_host() -> None:
    topo = topology(pools__prefill__resources={"left": 0.1}, pools__decode__resources={"right": 0.1})
    assert where(topo, host("b", 4, right=1), host("a", 4, left=1)) == {"prefill-0": "a", "decode-0": "b"}


def on_gpus(prefill: str | None, decode: str | None) -> Topology:
    return topology(pools__prefill__gpus=1, pools__decode__gpus=1, pools__prefill__gpu=prefill, pools__decode__gpu=decode, ray__gpu="h100")


def test_a_pool_that_names_its_gpus_gets_hosts_with_such() -> None:
    hosts = (host("a", 8, gpus=2, **{"accelerator_type:H200": 1}), host("b", 8, gpus=2, **{"accelerator_type:H100": 1}))
    assert where(on_gpus("h100", "NVIDIA H200"), *hosts) == {"prefill-0": "b", "decode-0": "a"}
    assert where(on_gpus(None, "h200"), *hosts) == {"prefill-0": "b", "decode-0": "a"}, "the others are ray.gpu's"
    assert where(on_gpus(None, None), *hosts) == {"prefill-0": "a", "decode-0": "a"}, "no pool names any: all will do"


def test_gpus_of_a_kind_that_are_short_are_named() -> None:
    hosts = [host("a", 8, gpus=8, **{"accelerator_type:H100": 1})]
    with pytest.raises(PlacementError, match=r"1 x decode \(1 H200 GPU, 1 core\).*host a: 8 GPUs, 8 cores, H100: short of 1 H200 GPU$"):
        place(on_gpus(None, "h200"), hosts)
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        place(on_gpus(None, "h2000"), hosts)
    with pytest.raises(ConfigError, match=r"pools.decode.gpu: got 'h200', expected no name of GPUs where pools.decode.gpus is 0"):
        place(topology(pools__decode__gpu="h200"), hosts)


def test_unequal_sizes_find_room_that_a_first_fit_by_pairs_misses() -> None:
    """Pairs of 4 + 1 GPUs do not fit 4-GPU hosts; the workers do."""
    topo = topology(
        pools__prefill__gpus=4, pools__prefill__args={"tensor_parallel_size": 4}, pools__decode__gpus=1, pools__decode__count=4,
    )  # fmt: skip
    found = where(topo, host("a", 9, gpus=4), host("b", 9, gpus=4))
    assert [name for name, at in found.items() if at == found["prefill-0"]] == ["prefill-0"]


def test_a_refusal_says_what_is_asked_what_there_is_and_what_is_short() -> None:
    topo = topology(pools__prefill__count=4, pools__prefill__gpus=1, pools__prefill__cores=8)
    with pytest.raises(PlacementError) as caught:
        place(topo, [host("10.0.0.1", 64, gpus=2), host("10.0.0.2", 3)])
    message = caught.value.message
    assert "4 x prefill (1 GPU, 8 cores), 1 x decode (1 core)" in message
    assert "host 10.0.0.1: 2 GPUs, 64 cores; host 10.0.0.2: 0 GPUs, 3 cores" in message
    assert message.endswith("short of 2 GPUs")


def test_enough_in_sum_but_on_no_host() -> None:
    with pytest.raises(PlacementError, match="no single host has what one worker needs"):
        place(topology(pools__prefill__cores=4), [host("a", 3), host("b", 3)])


def test_no_host_at_all() -> None:
    with pytest.raises(PlacementError, match="no live host"):
        place(topology(), [])


@pytest.mark.parametrize(("gpus", "degree", "fine"), [(0, None, True), (1, None, True), (2, 2, True), (2, None, False), (1, 2, False)])
def test_gpus_equal_the_parallel_degree(gpus: int, degree: int | None, fine: bool) -> None:
    args = {} if degree is None else {"tensor_parallel_size": degree}
    topo = topology(pools__decode__gpus=gpus, pools__decode__args=args)
    if fine:
        assert worker_specs(topo)[1].gpus == gpus
    else:
        with pytest.raises(ConfigError, match=r"pools.decode.gpus: got .*tensor_parallel_size"):
            worker_specs(topo)


def test_simulated_engines_use_no_gpu() -> None:
    with pytest.raises(ConfigError, match=r"pools.prefill.gpus: got 1, expected 0"):
        worker_specs(topology(engine__kind="simulated", pools__prefill__gpus=1))
