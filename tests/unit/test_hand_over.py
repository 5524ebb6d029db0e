"""The hand-over's time is learned as a fixed part and a part per byte."""

from __future__ import annotations

import pytest

from disagg.policy.hand_over import HandOver


def test_both_parts_are_learned_and_a_hiccup_teaches_little() -> None:
    learned = HandOver()
    for index in range(400):
        num_bytes = (1 + index % 7) * 10e6
        learned.learn(num_bytes, 0.010 + 1e-9 * num_bytes)
    assert learned.seconds(40e6) == pytest.approx(0.050, rel=0.03)
    assert learned.seconds(140e6) == pytest.approx(0.150, rel=0.05)  # beyond what was seen
    before_s = learned.seconds(40e6)
    learned.learn(40e6, 60.0)
    assert learned.seconds(40e6) < 1.1 * before_s
    for _ in range(20):
        learned.learn(40e6, 0.05)
    assert max(late_s for late_s, _ in learned.surprises) < 0.01


def test_those_that_take_far_longer_are_known_by_how_many_they_are() -> None:
    learned = HandOver()
    for index in range(200):
        learned.learn(1000, 3.0 if index % 20 == 0 else 0.01)
    (usual_s, usual), *_, (late_s, rare) = learned.surprises
    assert usual_s < 0.01
    assert (usual, rare) == pytest.approx((0.7, 0.1))
    assert late_s == pytest.approx(3.0, abs=0.1)
    assert sum(share for _, share in learned.surprises) == pytest.approx(1.0)
    assert learned.seconds(1000) < 0.05


def test_equal_sizes_teach_a_fixed_part_only() -> None:
    learned = HandOver()
    for _ in range(100):
        learned.learn(1000, 0.02)
    assert learned.per_byte_s == 0.0
    assert learned.seconds(1000) == pytest.approx(0.02, rel=0.05)
