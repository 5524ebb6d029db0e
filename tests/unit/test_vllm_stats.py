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


def test_what_a_step_will_take_is_learned_from_those_before() -> None:
    clock = StepClock()
    prompt, decode, both = [(0, 100)], [(100, 1)], [(0, 50), (101, 1)]
    assert clock.start(1.0, prompt) == 0.0, "nothing is known yet"
    clock.end(3.0)
    assert clock.start(4.0, decode) == 0.0
    clock.end(4.5)
    assert clock.start(5.0, []) == 0.0
    clock.end(6.0)
    assert clock.start(7.0, both) == 0.5 + 50 * 0.02
    clock.end(8.5)
    assert (clock.decode_s, clock.prompt_token_s) == (0.5, 0.02), "as expected, so nothing was learned"
