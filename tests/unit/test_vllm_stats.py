"""The clock of an engine's steps, several of which are under way at a time."""

from __future__ import annotations

from disagg.engine.vllm_stats import StepClock


def test_an_empty_step_tells_nothing_and_shifts_no_other() -> None:
    clock = StepClock()
    clock.start(10.0, [(0, 100)])
    clock.start(10.1, [])  # only a load of several steps goes on, or blocks are freed
    clock.start(10.2, [(100, 1), (7, 1)])
    assert clock.end(11.0) == (1.0, 100, 100 * 101 / 2, 0, 0)
    assert clock.end(11.5) is None
    assert clock.end(12.0) == (0.5, 0, 0.0, 2, 109)


def test_only_steps_without_a_prompt_tell_how_long_a_decode_step_takes() -> None:
    clock = StepClock()
    for now_s, work in ((1.0, [(0, 100)]), (2.0, [(100, 1)]), (3.0, []), (4.0, [(0, 5), (101, 1)])):
        clock.start(now_s, work)
        clock.end(now_s + 0.5)
    assert clock.decode_s == 0.5
