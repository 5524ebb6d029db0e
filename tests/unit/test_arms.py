"""Which arms there are, and that all of them stand on the same hardware."""

from __future__ import annotations

import pytest

from disagg.ab.arms import can_be_resident, deployed, known_context, most_workers, own_arms, parse_arms, setup_of, with_chunk
from disagg.ab.chunk_search import MOST_TRIALS, best, ladder
from disagg.ab.result import ChunkTrial
from disagg.config import Topology, parse_topology
from disagg.errors import ConfigError


def topology(engine: dict | None = None, **pools: dict) -> Topology:
    raw = {"prefill": {"count": 1}, "decode": {"count": 1}, **pools}
    rest = {"gateway": {"port": 8500}, "kv": {"port": 7000}, "engine": engine or {}}
    return parse_topology({"model": "m", "pools": raw, **rest})


def test_the_default_is_the_topologys_split_against_colocated_on_the_same_hardware():
    arms = deployed(own_arms(topology(prefill={"count": 2}, colocated={"count": 3, "args": {"max_num_batched_tokens": 256}})))
    assert {name: t.mode for name, t in arms.items()} == {"disagg": "disagg", "colocated": "colocated"}
    assert len({t.name for t in arms.values()}) == 2
    assert all(t.gateway.port == 0 and t.kv.port == 0 for t in arms.values())
    assert (most_workers(arms["disagg"]), most_workers(arms["colocated"])) == (2, 3)


def test_disagg_is_every_split_of_the_workers_and_one_split_has_its_own_name():
    arms = parse_arms("colocated, disagg, adaptive", topology(prefill={"count": 2}, decode={"count": 2}))
    setups = {arm.name: setup_of(arm) for arm in arms}
    assert list(setups) == ["colocated", "disagg-1p3d", "disagg-2p2d", "disagg-3p1d", "adaptive"]
    assert (setups["disagg-3p1d"].prefill, setups["disagg-3p1d"].decode) == (3, 1)
    assert (setups["adaptive"].prefill, setups["adaptive"].decode, setups["colocated"].colocated) == (2, 2, 4)
    assert {s.cores for s in setups.values()} == {4}
    assert [arm.name for arm in parse_arms("colocated,disagg", topology())] == ["colocated", "disagg"]
    assert [arm.name for arm in parse_arms("colocated,disagg-3p1d", topology(decode={"count": 3}))] == ["colocated", "disagg-3p1d"]


def test_unlike_workers_have_one_split():
    pools = {"prefill": {"count": 2, "cores": 2}, "decode": {"count": 2}, "colocated": {"count": 4}}
    with pytest.raises(ConfigError, match="6 cores in all"):
        parse_arms("disagg,colocated", topology(**pools))
    assert [arm.name for arm in parse_arms("disagg,adaptive", topology(**pools))] == ["disagg", "adaptive"]


def test_one_name_twice_is_an_aa_test_with_two_deployments():
    arms = parse_arms("colocated,colocated,colocated", topology())
    assert [arm.name for arm in arms] == ["colocated", "colocated-again", "colocated-again2"]
    assert len({t.name for t in deployed(arms).values()}) == 3


def test_external_arms_are_urls():
    arms = parse_arms("external=http://127.0.0.1:8000/v1/,external-vllm=http://h:1,colocated", topology())
    assert [(arm.name, arm.url) for arm in arms[:2]] == [("external", "http://127.0.0.1:8000/v1"), ("external-vllm", "http://h:1")]
    assert list(deployed(arms)) == ["colocated"]
    assert setup_of(arms[0]).prefix_cache is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colocated", "at least two arms"),
        ("colocated,adaptiv", "did you mean 'adaptive'"),
        ("colocated,external=8000", "a URL such as"),
        ("colocated,disagg-0p2d", "at least one prefill and one decode worker"),
        ("colocated,disagg-2p2d", "arm disagg-2p2d has 4 workers, arm colocated 2"),
    ],
)
def test_a_wrong_list_of_arms_is_named(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        parse_arms(text, topology())


@pytest.mark.parametrize(
    ("pools", "key"),
    [
        ({"colocated": {"count": 3}}, "pools.colocated.count"),
        ({"colocated": {"count": 2, "cores": 2}}, "pools.colocated.cores"),
        ({"colocated": {"count": 2, "gpus": 1}}, "pools.colocated.gpus"),
    ],
)
def test_unequal_hardware_is_refused(pools: dict, key: str):
    with pytest.raises(ConfigError, match="as many as prefill and decode have together") as caught:
        own_arms(topology(**pools))
    assert caught.value.key == key


def test_prefix_caches_are_on_in_all_arms_or_in_none():
    off = {"count": 2, "args": {"enable_prefix_caching": False}}
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        own_arms(topology(colocated=off))
    arms = own_arms(topology({"args": {"enable_prefix_caching": False}}))
    assert {setup_of(arm).prefix_cache for arm in arms} == {False}


def test_the_chunk_is_a_setting_of_the_colocated_arm():
    disagg, colocated = own_arms(topology(prefill={"count": 1, "args": {"max_num_batched_tokens": 512}}))
    assert setup_of(with_chunk(colocated, 128)).chunk_tokens == {"colocated": 128}
    assert setup_of(disagg).chunk_tokens == {"prefill": 512}
    with pytest.raises(ConfigError, match="--chunk"):
        with_chunk(colocated, 0)
    simulated = own_arms(topology({"kind": "simulated"}))[1]
    assert setup_of(with_chunk(simulated, 128)).chunk_tokens == {"colocated": 128}


@pytest.mark.parametrize("engine", [{}, {"kind": "simulated"}])
def test_adaptive_workers_take_that_chunk_beside_decodes(engine: dict[str, str]):
    section = "simulated" if engine else "args"
    adaptive, disagg = parse_arms("adaptive,disagg", topology(engine, prefill={"count": 1, section: {"max_num_batched_tokens": 96}}))
    setup = setup_of(with_chunk(adaptive, 128))
    assert setup.mixed_step_tokens == {"prefill": 96, "decode": 128}
    assert setup.chunk_tokens["prefill"] == 96
    assert with_chunk(disagg, 128) == disagg
    own = parse_arms("adaptive,disagg", topology(engine, prefill={"count": 1, section: {"mixed_step_tokens": 32}}))[0]
    assert setup_of(own).mixed_step_tokens == {"prefill": 32}
    assert setup_of(with_chunk(own, 128)).mixed_step_tokens == {"prefill": 32, "decode": 128}


def test_arms_stay_up_where_their_memory_fits():
    arms = deployed(own_arms(topology({"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}})))
    assert can_be_resident(arms)
    assert can_be_resident(arms, 20 << 30)
    assert not can_be_resident(arms, 8 << 30)
    gpus = {"count": 1, "gpus": 1}
    assert not can_be_resident(deployed(own_arms(topology(prefill=gpus, decode=gpus))), 1 << 40)


def test_the_context_is_known_early_where_the_topology_names_it():
    assert known_context(deployed(own_arms(topology()))) is None
    assert known_context(deployed(own_arms(topology(decode={"count": 1, "args": {"max_model_len": 4096}})))) == 4096


def test_a_split_arm_needs_both_pools():
    only = parse_topology({"model": "m", "mode": "colocated", "pools": {"colocated": {"count": 2}}})
    with pytest.raises(ConfigError, match=r"pools\.prefill"):
        own_arms(only)


def trial(size: int, attainment: float, e2e_s: float) -> ChunkTrial:
    return ChunkTrial(
        chunk_tokens=size,
        sent=10,
        slo_attainment=attainment,
        ttft_p50_s=None,
        tpot_p50_s=None,
        itl_max_s=None,
        e2e_mean_s=e2e_s,
        output_tokens_per_s=None,
    )


def test_the_chunk_search_climbs_to_the_best_size_and_looks_at_both_sides_of_it():
    steps = ladder(with_chunk(own_arms(topology())[1], 256))
    truth = {64: 0.5, 128: 0.9, 256: 0.7, 512: 0.6, 1024: 0.1}
    tried: dict[int, ChunkTrial] = {}
    while len(tried) < MOST_TRIALS and (size := steps.next_size(tried)) is not None:
        tried[size] = trial(size, truth[size], 1.0)
    assert list(tried) == [256, 512, 128, 64]
    assert best(tried.values()).chunk_tokens == 128
    assert best([trial(1, 1.0, 3.0), trial(2, 0.99, 2.0), trial(3, 0.9, 1.0)]).chunk_tokens == 2
