"""Among many workers: a sketch says at whom to look, and what was given since is in it."""

from __future__ import annotations

from collections import Counter

import pytest

from disagg.types import Mode
from tests.policy_rig import Rig


@pytest.mark.parametrize("mode", [Mode.DISAGG, Mode.ADAPTIVE])
def test_a_burst_spreads_over_many_workers(mode: Mode) -> None:
    """All at one instant, when every sketch was drawn before the first of them."""
    rig = Rig(mode, prefill=20, decode=20)
    rig.end(rig.decoding(rig.grant()).key)
    rig.now_s += 0.01
    routes = [rig.grant().route for _ in range(20)]
    assert max(Counter(r.prefill for r in routes).values()) == 1
    assert max(Counter(r.decode for r in routes).values()) == 1


def test_a_sketch_is_as_old_as_the_last_thing_given_or_half_a_second() -> None:
    rig = Rig(prefill=12, decode=12)
    book = rig.dispatcher.workers["d0"]
    drawn = book.outline(rig.now_s)
    rig.steps("d0", 1, 1.0)
    assert book.sketch(rig.now_s) is drawn, "a report changes it a little, all the time"
    book.touch()
    touched = book.sketch(rig.now_s)
    assert touched is not drawn
    assert book.sketch(rig.now_s + 0.4) is touched
    assert book.sketch(rig.now_s + 0.6) is not touched
