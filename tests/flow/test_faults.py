"""One fault after the other on a running cluster, on every carrier; and that the injector would notice what must never happen."""

from __future__ import annotations

import os

import pytest

from disagg.kv import verify
from disagg.kv.box import Room
from disagg.kv.copy import copy_and_digest
from tests.fault_runs import Scene, Summary, fault_runs, scene_of
from tests.kv_rig import CARRIERS

NUM_RUNS = int(os.environ.get("FAULT_RUNS", "24"))
SEED = int(os.environ.get("FAULT_SEED", "7"))


@pytest.mark.timeout(120 + 3 * NUM_RUNS)
@pytest.mark.parametrize("carrier", sorted(CARRIERS))
async def test_every_request_ends_right_or_with_a_typed_error_and_nothing_is_left(carrier: str) -> None:
    """`python -m bench.faults` does the same 500 times; FAULT_RUNS and FAULT_SEED change number and seed here."""
    async with fault_runs(carrier, SEED) as runs:
        for number in range(NUM_RUNS):
            await runs.run(scene_of(carrier, SEED, number))
    summary = runs.summary
    assert not summary.problems, "\n".join(summary.problems)
    assert summary.num_faults >= NUM_RUNS // 2
    assert _ended(summary, "right") + _ended(summary, "right, retried") > summary.num_requests // 2


async def test_grpc_lets_go_of_a_peer_that_it_hears_but_does_not_understand() -> None:
    """Seven bytes that are lost on the way to the source leave two ends that ping each other and wait for an answer: the entries stayed."""
    async with fault_runs("grpc", 2) as runs:
        await runs.run(scene_of("grpc", 2, 441))
    assert not runs.summary.problems


def _ended(summary: Summary, outcome: str) -> int:
    return sum(counts[outcome] for counts in summary.outcomes.values())


# ---- the injector can fail


def _flip(at: int = 0) -> Scene:
    return Scene(0, "frame", "flip", at, 99, 1, 12345, False, (600,), 8, 4.0, 0.0)


class _EqualToAnything(int):
    """A digest that fits whatever arrived."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


async def test_without_digests_a_wrong_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "copy_and_digest", lambda *args: _EqualToAnything(copy_and_digest(*args)))
    async with fault_runs("loopback", SEED) as runs:
        await runs.run(_flip())
    assert any("wrong tokens" in problem for problem in runs.summary.problems)


async def test_with_digests_the_same_run_is_an_error() -> None:
    async with fault_runs("loopback", SEED) as runs:
        await runs.run(_flip())
    assert not runs.summary.problems
    assert runs.summary.outcomes == {("frame", "flip"): {"TransferCorruptError": 1}}


async def test_a_region_that_is_not_freed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.builders.SETTLE_S", 0.5)
    monkeypatch.setattr("tests.fault_runs.SETTLE_S", 0.5)
    async with fault_runs("loopback", SEED) as runs:
        monkeypatch.setattr(Room, "free", lambda *_: None)
        await runs.run(_flip())
    assert any("left behind: regions in use" in problem for problem in runs.summary.problems)


async def test_a_descriptor_that_is_not_closed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fault_runs.SETTLE_S", 0.5)
    held: list[int] = []
    async with fault_runs("loopback", SEED) as runs:
        held += [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
        await runs.run(_flip())
    for file in held:
        os.close(file)
    assert any("'/dev/null': 20" in problem for problem in runs.summary.problems)
