"""The verdict over made-up machines that drift: equal arms show no difference, a planted slow-down is found, several rates and arms."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from disagg.ab.conclude import conclude, curves
from disagg.ab.goodput import compare_attainment, goodput_interval, goodput_rps
from disagg.ab.result import PointReport, arm_figures
from disagg.ab.stats import Blocks, Pooled, difference, interval, of_rounds, t_quantile, time_blocks
from disagg.ab.verdict import judge
from disagg.config import SloClass
from tests.synthetic_rows import Machine, served

CLASSES = (SloClass(name="chat", ttft_ms=500, tpot_ms=60),)
QUIET = Machine(drift=0.01, wobble=0.02)


def short(arm: str, machine: Machine, seed: int, rate_rps: float = 1.0) -> list:
    return served(arm, machine, seed, rounds=3, duration_s=40, tokens=40, rate_rps=rate_rps)


def test_equal_arms_show_no_difference_in_nine_of_ten_runs():
    machine = Machine(drift=0.03, wobble=0.03)
    chosen = [judge(short("disagg", machine, seed), short("colocated", machine, 100 + seed), CLASSES).choose for seed in range(20)]
    assert chosen.count("either") >= 18


def test_a_planted_slow_down_of_decode_by_ten_per_cent_is_found():
    slow = dataclasses.replace(QUIET, step_s=QUIET.step_s * 1.1)
    verdicts = [judge(short("disagg", slow, seed), short("colocated", QUIET, 100 + seed), CLASSES) for seed in range(8)]
    assert [v.choose for v in verdicts].count("colocated") >= 7
    median = next(c for c in verdicts[0].comparisons if c.measure == "TPOT p50")
    assert 0 < median.low < median.values[0] - median.values[1] < median.high


def test_shared_moments_do_not_count_as_many():
    """One long gap in each of twenty windows hits all requests of its window: resampling requests would see 20 x 10 independent ones."""
    rng = np.random.default_rng(1)
    windows = rng.normal(0.0, 1.0, 20)
    due = [w * 10 + i for w in range(20) for i in range(10)]
    samples = [(float(windows[w]) + 0.01 * i,) for w in range(20) for i in range(10)]
    by_window = time_blocks([1] * 200, due, memory_s=4.9)
    single = Blocks(np.arange(200), np.ones(200, dtype=int), np.zeros(200, dtype=int))
    widths = []
    for blocks in (by_window, single):
        found = interval(Pooled(samples, blocks.of_request, None), blocks)
        assert found is not None
        widths.append(found.high - found.low)
    assert widths[0] > 2.5 * widths[1]


def test_rounds_that_disagree_widen_the_interval_and_one_round_is_not_trusted_with_little():
    def effect(factors: tuple[float, ...]) -> tuple[float, float]:
        count = 30
        rounds = [r for r in range(len(factors)) for _ in range(count)]
        blocks = time_blocks(rounds, [float(i) for _ in factors for i in range(count)], memory_s=0.5)
        ours = Pooled([(0.1 * factors[r],) for r in rounds], blocks.of_request, None)
        theirs = Pooled([(0.1,) for _ in rounds], blocks.of_request, None)
        found = difference(ours, theirs, blocks, scale="ratio")
        assert found is not None
        return found.low, found.high

    assert effect((1.1, 1.1, 1.1))[0] > 0
    assert effect((1.3, 0.95, 1.05))[0] < 0
    assert effect((1.05,))[0] < 0
    assert effect((2.0,))[0] > 0


def test_simulations_do_not_drift():
    blocks = time_blocks([1] * 40, [float(i) for i in range(40)], memory_s=0.5)
    ours, theirs = (Pooled([(x,)] * 40, blocks.of_request, None) for x in (0.103, 0.1))
    found = difference(ours, theirs, blocks, scale="ratio", drift=0.0)
    assert found is not None
    assert found.low == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("probability", "degrees", "wanted"), [(0.975, 1, 12.7062), (0.975, 4, 2.7764), (0.995, 7, 3.4995), (0.975, 30, 2.0423)]
)
def test_quantiles_of_students_t(probability: float, degrees: int, wanted: float):
    assert t_quantile(probability, degrees) == pytest.approx(wanted, abs=1e-4)


def test_a_single_round_has_no_interval_of_rounds():
    assert of_rounds([1.0], 1.0, drift=0.0) is None
    found = of_rounds([1.0, 1.2, 1.1], 1.1, drift=0.0)
    assert found is not None
    assert found.low == pytest.approx(1.1 - 4.3027 * 0.1 / 3**0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("attainment", "rate", "bound"),
    [
        ({1.0: 1.0, 2.0: 0.8}, 1.5, "within"),
        ({1.0: 0.95, 2.0: 0.92}, 2.0, "at_least"),
        ({1.0: 0.8}, 0.5, "below"),
        ({1.0: 1.0, 2.0: 0.5, 3.0: 1.0}, 1.4, "within"),  # 0.75 at both: a rate beyond an overload is not sustained
        ({1.0: 0.8, 2.0: 1.0, 3.0: 0.95, 4.0: 0.5}, 3.0 + 0.01666667 / 0.41666667, "within"),
        ({1.0: 0.5, 2.0: 0.9}, 1 / 3, "below"),
    ],
)
def test_goodput_is_where_attainment_first_falls_through_the_level(attainment: dict[float, float], rate: float, bound: str):
    assert goodput_rps(attainment) == (pytest.approx(rate), bound)


STEEP = {0.6: 0.030, 1.0: 0.032, 1.5: 0.034, 2.0: 0.037, 2.5: 0.040}  # seconds a step: at the upper rates about the target of 40 ms
TIGHT = (SloClass(name="chat", ttft_ms=500, tpot_ms=40),)


def over_rates(arm: str, seed: int, slower: float = 1.0) -> list:
    """Two rounds of each rate, too short for goodput to be known."""
    return [
        row
        for rate, step_s in STEEP.items()
        for row in served(
            arm, Machine(step_s=slower * step_s, drift=0.04, stall_s=0.2), seed, rounds=2, duration_s=16, tokens=20, rate_rps=rate
        )
    ]


def test_over_all_rates_equal_arms_show_no_difference_and_a_slower_one_does():
    def better(slower: float) -> list[str | None]:
        found = [
            compare_attainment(over_rates("a", seed), over_rates("b", 50 + seed, slower), TIGHT, ("a", "b"), family=4) for seed in range(12)
        ]
        assert {c.measure for c in found if c is not None} == {"SLO attainment over all rates"}
        return [c.better for c in found if c is not None]

    assert better(1.0).count(None) >= 11
    assert better(1.25).count("a") >= 9
    one_turn = compare_attainment(over_rates("a", 1)[:9], over_rates("b", 2)[:9], TIGHT, ("a", "b"))
    assert one_turn is not None
    assert (one_turn.low, one_turn.better) == (None, None)


def test_a_clear_loss_over_all_rates_decides_where_goodput_is_not_known():
    rows = {"colocated": over_rates("colocated", 1), "disagg": over_rates("disagg", 2, 1.25)}
    verdict, reference = conclude(rows, TIGHT)
    assert verdict.choose == "colocated"
    decided = next(c for c in verdict.comparisons if c.better == "colocated")
    assert (decided.measure, decided.rate_rps) in {("goodput", None), ("SLO attainment over all rates", None)}
    probed, other = conclude(rows, TIGHT, probes=[reference])
    assert other < reference
    assert probed.choose == "colocated"


def test_a_rate_with_few_requests_does_not_decide_alone():
    """As measured: 77 % of 22 requests at the lightest rate, and more at the next three."""
    shares = {0.734: 0.77, 1.32: 0.94, 1.9: 0.96, 2.48: 0.97, 3.06: 0.85}
    sent = {0.734: 22.0, 1.32: 36.0, 1.9: 50.0, 2.48: 65.0, 3.06: 80.0}
    found, bound = goodput_rps(shares, sent=sent)
    assert (found, bound) == (pytest.approx(2.72, abs=0.01), "within")
    assert goodput_rps(shares)[0] == pytest.approx(2.58, abs=0.01)  # all rates alike


def test_over_several_rates_goodput_decides_between_any_number_of_arms():
    def arm(name: str, slope: float) -> list:
        return [
            r
            for rate in (0.5, 1, 2)
            for r in short(name, dataclasses.replace(QUIET, stall_s=0.2, step_s=0.03 * (1 + slope * rate)), 3, rate)
        ]

    rows = {"colocated": arm("colocated", 0.5), "disagg-1p2d": arm("disagg-1p2d", 0.1), "adaptive": arm("adaptive", 0.5)}
    verdict, reference = conclude(rows, CLASSES)
    assert (verdict.choose, reference) == ("disagg-1p2d", 2)
    first = verdict.comparisons[0]
    assert (first.measure, first.arms, first.better, first.rate_rps) == ("goodput", ("disagg-1p2d", "colocated"), "disagg-1p2d", None)
    assert verdict.reason.startswith("Disagg-1p2d is better in goodput (2.00 requests/s against ")
    found, bound = goodput_interval(rows["colocated"], CLASSES)
    assert found.low <= found.value <= found.high
    assert bound == "within"
    same, _ = conclude({"colocated": rows["colocated"], "adaptive": rows["adaptive"]}, CLASSES)
    assert same.choose == "either"
    assert same.reason.startswith("No difference shown")


def at_rates(arm: str, machine: Machine, seed: int) -> list:
    return [r for rate in (0.5, 1, 2) for r in served(arm, machine, seed, rounds=2, duration_s=20, tokens=40, rate_rps=rate)]


def test_where_a_bad_minute_blurs_the_goodput_attainment_over_all_rates_decides():
    """Every third answer of an arm is late at every rate; the other one had one bad round, at the lightest."""

    def late(rows: list, chosen) -> list:
        return [dataclasses.replace(r, token_s=tuple(t + 1.0 for t in r.token_s)) if chosen(r) else r for r in rows]

    worse = late(at_rates("disagg", QUIET, 1), lambda r: r.index % 3 == 0)
    better = late(at_rates("colocated", QUIET, 1), lambda r: r.rate_rps == 0.5 and r.round == 1 and r.index % 2 == 0)
    verdict, _ = conclude({"colocated": better, "disagg": worse}, CLASSES)
    goodput, attainment = verdict.comparisons[:2]
    assert (goodput.measure, goodput.values[1]) == ("goodput", 2.0)  # the bad round at the lightest rate is outweighed
    assert (attainment.measure, attainment.better, attainment.rate_rps) == ("SLO attainment over all rates", "colocated", None)
    assert verdict.choose == "colocated"


def test_equal_arms_at_several_rates_show_no_difference_in_nine_of_ten_runs():
    machine = Machine(drift=0.03, wobble=0.03)
    tight = (SloClass(name="chat", ttft_ms=500, tpot_ms=machine.step_s * 1e3 * 1.1),)  # half of the requests miss it now and then
    chosen = [
        conclude({"colocated": at_rates("colocated", machine, 100 + seed), "disagg": at_rates("disagg", machine, seed)}, tight)[0].choose
        for seed in range(20)
    ]
    assert chosen.count("either") >= 18


def test_an_arm_that_lost_its_requests_is_not_chosen_for_the_latencies_of_the_others():
    slow = dataclasses.replace(QUIET, step_s=QUIET.step_s * 2)
    kept = short("colocated", slow, 1)
    broken = [
        r if i < 8 else dataclasses.replace(r, outcome="failed", error="EngineError") for i, r in enumerate(short("disagg", QUIET, 2))
    ]
    verdict = judge(broken, kept, (SloClass(name="chat", ttft_ms=9000),))
    assert verdict.choose == "colocated"
    assert verdict.comparisons[0].measure == "completed"
    one_lost = [dataclasses.replace(r, outcome="failed") if i == 3 else r for i, r in enumerate(short("disagg", slow, 2))]
    assert judge(one_lost, kept, CLASSES).choose == "either"


def test_when_both_arms_miss_everything_neither_is_chosen_and_the_reason_says_so():
    slow = dataclasses.replace(QUIET, step_s=0.2)
    verdict = judge(short("disagg", slow, 1), short("colocated", dataclasses.replace(slow, step_s=0.3), 2), CLASSES)
    assert verdict.choose == "either"
    assert verdict.reason.startswith("Neither disagg nor colocated serves this load: SLO attainment (0% against 0%)")
    assert "Disagg is better in ITL" in verdict.reason
    without_targets = judge(
        short("disagg", slow, 1), short("colocated", dataclasses.replace(slow, step_s=0.3), 2), (SloClass(name="chat"),)
    )
    assert without_targets.choose == "disagg"


def test_a_short_round_with_failures_does_not_choose_the_arm_that_failed():
    loose = (SloClass(name="chat"),)
    slow = dataclasses.replace(QUIET, step_s=QUIET.step_s * 1.5)
    kept = served("colocated", slow, 1, rounds=1, duration_s=14, tokens=40)
    failed = [
        dataclasses.replace(r, outcome="failed", error="EngineError") if i % 3 == 0 else r
        for i, r in enumerate(served("disagg", QUIET, 2, rounds=1, duration_s=14, tokens=40))
    ]
    verdict = judge(failed, kept, loose)
    assert verdict.choose != "disagg"
    assert verdict.reason.startswith("Too little was measured to choose disagg: it may be worse in completed (6")
    all_failed = judge([dataclasses.replace(r, outcome="failed") for r in failed], kept, loose)
    assert all_failed.choose == "colocated"


def test_a_latency_does_not_choose_against_an_attainment_that_is_much_worse_and_not_known():
    """One round of a dozen requests: the arm with the smoother gaps is late with a third of its first tokens."""
    rough = served("colocated", dataclasses.replace(QUIET, stall_s=0.3), 1, rounds=1, duration_s=24, tokens=60)
    smooth = served("disagg", dataclasses.replace(QUIET, stall_s=0, step_s=0.02), 2, rounds=1, duration_s=24, tokens=60)
    late = [dataclasses.replace(r, token_s=tuple(t + 0.6 for t in r.token_s)) if r.index % 4 == 1 else r for r in smooth]
    assert judge(smooth, rough, CLASSES).choose == "disagg"
    verdict = judge(late, rough, CLASSES)
    assert verdict.choose == "either"
    assert verdict.reason.startswith("Too little was measured to choose disagg: it may be worse in SLO attainment (7")


def test_an_arm_whose_requests_were_all_cancelled_has_no_curve():
    rows = {name: [r for rate in (0.5, 1) for r in short(name, QUIET, 1, rate)] for name in ("disagg", "colocated")}
    rows["disagg"] = [dataclasses.replace(r, outcome="cancelled") for r in rows["disagg"]]
    points = [
        PointReport(rate_rps=rate, probe=False, rounds=[], arms={n: arm_figures(own, CLASSES, None) for n, own in rows.items()}, stopped="")
        for rate in (0.5, 1)
    ]
    assert set(curves(rows, points, {}, CLASSES)) == {"colocated"}
