"""How many rounds are enough, whether the warm-up was, and which rates are measured."""

from __future__ import annotations

import random

import pytest

from disagg.ab.rows import Row
from disagg.ab.rules import RangeSearch, RoundRule, rounded, warm_up_report
from disagg.config import SloClass

CLASSES = (SloClass(name="chat", ttft_ms=500),)


def row(index: int, round_: int = 1, *, ttft: float = 0.1, gap: float = 0.02, tokens: int = 10, arm: str = "a") -> Row:
    token_s = tuple(index + ttft + gap * i for i in range(tokens))
    return Row(arm, round_, index, "s", "chat", 8, tokens, "d", float(index), float(index), token_s[-1], token_s, "completed")


def point(miss_a: float, miss_b: float, rounds: int, seed: int = 0, count: int = 40) -> dict[str, list[Row]]:
    rng = random.Random(seed)
    return {
        arm: [row(i, n, ttft=0.9 if rng.random() < miss else 0.1, arm=arm) for n in range(1, rounds + 1) for i in range(count)]
        for arm, miss in (("a", miss_a), ("b", miss_b))
    }


def test_rounds_stop_when_the_difference_is_clear_or_known_narrowly_and_at_the_most():
    rule = RoundRule(2, 4)
    assert rule.stopped(1, point(0, 0, 1), CLASSES) is None
    assert "clear" in (rule.stopped(2, point(0, 0.5, 2), CLASSES) or "")
    assert "known (in attainment to 5%" in (rule.stopped(2, point(0, 0, 2), CLASSES) or "")
    assert rule.stopped(2, point(0.3, 0.3, 2), CLASSES) is None
    assert rule.stopped(4, point(0.3, 0.3, 4), CLASSES) == "4 rounds, the most"
    assert RoundRule(2, 2).stopped(2, point(0.3, 0.3, 2), CLASSES) == "2 rounds, as asked"


def test_rounds_go_on_while_a_slower_decode_may_hide_in_the_noise():
    """Rounds of the second arm are up to 6 % slower or faster than they should be: two do not know its TPOT, several do."""
    machine = (0.94, 1.06, 0.99, 1.01, 1.0, 0.98, 1.02)

    def noisy(rounds: int, slower: float) -> dict[str, list[Row]]:
        speeds = {"a": [1.0] * rounds, "b": [slower * machine[n % len(machine)] for n in range(rounds)]}
        return {arm: [row(i, n + 1, gap=0.02 * own[n], arm=arm) for n in range(rounds) for i in range(60)] for arm, own in speeds.items()}

    rule = RoundRule(2, 20)
    assert rule.stopped(2, noisy(2, 1.0), CLASSES) is None
    assert rule.stopped(2, noisy(2, 1.1), CLASSES) is None
    assert "clear" in (rule.stopped(14, noisy(14, 1.1), CLASSES) or "")
    assert "clear" in (rule.stopped(14, noisy(14, 1.0), CLASSES) or "")
    assert "clear" in (rule.stopped(2, noisy(2, 2.0), CLASSES) or "")


def test_few_requests_without_a_difference_do_not_stop_it():
    assert RoundRule(1, 9).stopped(1, point(0, 0, 1, count=6), CLASSES) is None


def test_a_cold_start_shows_in_the_first_window():
    warm = [row(i) for i in range(30)]
    cold = [row(i, gap=0.05 if i < 10 else 0.02) for i in range(30)]
    assert warm_up_report(4, [warm, warm]).ratio == pytest.approx(1.0)
    for rounds in ([cold, warm], [cold]):
        report = warm_up_report(4, rounds)
        assert report.ratio == pytest.approx(2.5)
        assert report.enough is False
    assert warm_up_report(4, [warm[:3]]).enough is None


def found(search: RangeSearch, true_rps: float) -> tuple[float, ...]:
    steps = search.rates(1.0)
    rate = next(steps)
    while True:
        try:
            rate = steps.send(1.0 if rate < true_rps else 0.5)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("true_rps", [0.07, 1.0, 3.3, 60.0])
def test_the_range_goes_from_light_to_past_saturation_wherever_that_is(true_rps: float):
    rates = found(RangeSearch(points=5, most_probes=20), true_rps)
    assert len(rates) == 5
    assert list(rates) == sorted(rates)
    assert rates[0] < 0.4 * true_rps
    assert 1.05 * true_rps < rates[-1] < 1.6 * true_rps
    assert sum(rate < true_rps for rate in rates) >= 3


def test_a_range_without_an_end_stops_after_the_probes():
    assert found(RangeSearch(most_probes=3), 1e9)[-1] == 5.0
    assert rounded(1234.5) == 1230
