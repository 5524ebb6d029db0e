"""Workloads and topologies sized to the machine: equal times with fewer tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.ab import TUNED_ON, WORKLOADS
from disagg.ab.machine_fit import (
    REFERENCE_PREFILL_TOKENS_PER_S,
    REFERENCE_STEP_S,
    Fit,
    Speed,
    fitted_topology,
    fitted_workload,
    lone_worker,
    streams_only,
    times,
)
from disagg.ab.trace_workload import load_any_workload
from disagg.ab.workload import Lengths, load_workload
from disagg.cli_ab_fit import fit_of
from disagg.config import Topology, load_topology, parse_topology
from disagg.errors import ConfigError
from disagg.types import Mode, Role

SHIPPED = Path(__file__).parents[2] / "cluster" / "topologies"
REFERENCE = Speed(REFERENCE_PREFILL_TOKENS_PER_S, REFERENCE_STEP_S, start_s=30)
SLOW = Speed(REFERENCE_PREFILL_TOKENS_PER_S / 4, REFERENCE_STEP_S * 5, start_s=50)


@pytest.fixture(scope="module")
def topology() -> Topology:
    return load_topology(SHIPPED / "cpu-1p1d.yaml")


def test_on_the_machine_that_they_were_written_for_all_stays_as_it_is(topology: Topology):
    for name in WORKLOADS:
        own = load_workload(name)
        assert fitted_workload(own, REFERENCE).streams == own.streams
    fast = Speed(REFERENCE_PREFILL_TOKENS_PER_S * 9, REFERENCE_STEP_S / 9, 1)
    assert (fast.input_factor, fast.output_factor) == (1, 1)
    assert fitted_topology(topology, fast) == topology


def test_on_a_slower_machine_requests_take_as_long_and_have_fewer_tokens():
    document = next(s for s in fitted_workload(load_workload(TUNED_ON), SLOW).streams if s.name == "document")
    assert (document.input_tokens.fixed, document.output_tokens.fixed) == (750, 4)
    assert times(Lengths(uniform=(40, 160)), 0.25).uniform == (10, 40)
    assert times(Lengths.model_validate({"lognormal": {"median": 42, "sigma": 0.7, "max": 150}}), 0.2).lognormal.max == 30
    assert times(Lengths(fixed=3), 0.1).fixed == 3


def test_chunks_shrink_with_the_prompts_and_targets_grow_with_the_step(topology: Topology):
    found = fitted_topology(topology, SLOW)
    assert [c.tpot_ms for c in found.slo_classes] == [None if c.tpot_ms is None else 5 * c.tpot_ms for c in topology.slo_classes]
    assert [c.ttft_ms for c in found.slo_classes] == [c.ttft_ms for c in topology.slo_classes]
    prefill = found.engine_args(Role.PREFILL)
    assert (prefill["max_num_batched_tokens"], prefill["long_prefill_token_threshold"]) == (128, 104)
    decode = found.engine_args(Role.DECODE)
    assert (decode["max_num_batched_tokens"], decode["mixed_step_ms"]) == (128, 5 * 90)
    raw = topology.model_dump()
    raw["pools"]["decode"]["args"]["mixed_step_tokens"] = 256
    assert fitted_topology(parse_topology(raw), SLOW).engine_args(Role.DECODE)["mixed_step_tokens"] == 64
    assert found.with_mode(Mode.COLOCATED).engine_args(Role.COLOCATED)["max_num_batched_tokens"] == 64
    assert found.pools.prefill is not None
    assert found.pools.prefill.count == 1


def test_or_all_takes_longer_and_no_length_changes(topology: Topology):
    workload, found = fitted_workload(load_workload(TUNED_ON), SLOW, Fit.TIME), fitted_topology(topology, SLOW, Fit.TIME)
    own = load_workload(TUNED_ON)
    assert SLOW.slowness == 5
    assert (workload.duration_s, workload.timeout_s) == (5 * own.duration_s, 5 * own.timeout_s)
    for stream, before in zip(workload.streams, own.streams, strict=True):
        assert (stream.input_tokens, stream.output_tokens) == (before.input_tokens, before.output_tokens)
        assert stream.arrivals.mean_per_s() == pytest.approx(before.arrivals.mean_per_s() / 5)
        assert stream.arrivals.first_s == 5 * before.arrivals.first_s
    chats, chats_before = found.slo_classes[0], topology.slo_classes[0]
    assert chats_before.ttft_ms is not None
    assert chats_before.tpot_ms is not None
    assert (chats.ttft_ms, chats.tpot_ms) == (5 * chats_before.ttft_ms, 5 * chats_before.tpot_ms)
    own_args, args = topology.engine_args(Role.DECODE), found.engine_args(Role.DECODE)
    assert args == own_args | {"mixed_step_ms": 5 * own_args["mixed_step_ms"]}  # type: ignore[operator]  # a number
    sessions = fitted_workload(load_workload("chat-sessions"), SLOW, Fit.TIME).streams[0].sessions
    assert sessions is not None
    assert sessions.gap_s == 5 * load_workload("chat-sessions").streams[0].sessions.gap_s  # type: ignore[union-attr]


def test_what_is_neither_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"--fit-machine.*tokens"):
        fit_of("token")


@pytest.mark.parametrize("slower", [1.5, 3, 4.7, 5.5, 8, 20, 300])
def test_a_long_prompt_leaves_room_in_each_step(topology: Topology, slower: float):
    args = fitted_topology(topology, Speed(REFERENCE_PREFILL_TOKENS_PER_S / slower, REFERENCE_STEP_S, 1)).engine_args(Role.PREFILL)
    assert 48 <= args["long_prefill_token_threshold"] <= args["max_num_batched_tokens"] - 16
    assert args["max_num_batched_tokens"] == max(64, round(512 / slower / 32) * 32)


def test_a_step_still_holds_a_token_of_each_sequence(topology: Topology):
    raw = topology.model_dump()
    raw["pools"]["decode"]["args"]["max_num_seqs"] = 200
    assert fitted_topology(Topology.model_validate(raw), SLOW).engine_args(Role.DECODE)["max_num_batched_tokens"] == 224


def test_what_is_measured_is_one_worker_as_the_colocated_arm_has_it(topology: Topology):
    arm = lone_worker(topology).topology
    assert arm is not None
    (pool,) = arm.active_pools().values()
    assert (pool.count, pool.cores) == (1, 1)
    assert arm.engine_args(Role.COLOCATED)["max_num_batched_tokens"] == 256


def test_a_simulated_engine_and_a_trace_are_refused():
    with pytest.raises(ConfigError, match=r"--fit-machine.*engine.kind: vllm"):
        lone_worker(load_topology(SHIPPED / "sim-h100-4p4d.yaml"))
    with pytest.raises(ConfigError, match=r"--fit-machine.*a workload of streams"):
        streams_only(load_any_workload("azure-conv"))
