"""How far expectations were off: of whole answers with both numbers, medians with and without sign."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.ab.prediction import tpot_errors, ttft_errors
from disagg.ab.rows import Row

ROW = Row(
    arm="adaptive",
    round=1,
    index=0,
    stream="s",
    slo_class="chat",
    input_tokens=10,
    max_output_tokens=3,
    prompt_digest="d",
    due_s=0.0,
    sent_s=1.0,
    end_s=2.0,
    token_s=(1.2, 1.3, 1.4),
    outcome="completed",
)


def expecting(*ttfts_s: float | None) -> list[Row]:
    """Answers that got 200 ms."""
    return [replace(ROW, predicted_ttft_s=s) for s in ttfts_s]


def test_errors_are_shares_of_what_was_measured() -> None:
    errors = ttft_errors(expecting(0.1, 0.22, 0.24))
    assert errors is not None
    assert errors.count == 3
    assert errors.median_abs == pytest.approx(0.2)
    assert errors.bias == pytest.approx(0.1)


def test_tpot_is_of_the_tokens_after_the_first() -> None:
    errors = tpot_errors([replace(ROW, predicted_tpot_s=0.05)])
    assert errors is not None
    assert errors.bias == pytest.approx(-0.5)


def test_only_whole_answers_with_both_numbers_count() -> None:
    failed = replace(ROW, outcome="failed", predicted_ttft_s=9.0)
    one_token = replace(ROW, token_s=(1.2,), predicted_tpot_s=0.1)
    errors = ttft_errors([*expecting(0.2, None), failed])
    assert errors is not None
    assert errors.count == 1
    assert ttft_errors(expecting(None)) is None
    assert tpot_errors([one_token]) is None
