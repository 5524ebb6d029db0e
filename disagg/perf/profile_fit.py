"""From steps that a worker reported to the coefficients of its profile. Pure.

Weighted least squares of relative errors, in five passes with outliers weighing less each time (a shared machine's hiccups). First
without bounds: a coefficient that comes out below zero by more than its own uncertainty, and that matters, says that the steps were
disturbed or that the form does not hold, and the fit is refused. Then with every coefficient held at zero or above. The ridge, up to
which tokens are free beside the weights, is the best of a few; none unless it makes the fit clearly better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from disagg.perf.profile import StepCoefficients, check_physical
from disagg.types import StepRecord

NAMES = ("base_s", "over_s", "prompt_token_s", "pair_s", "decode_s", "context_s")
RIDGES = (16, 32, 64, 96, 128, 192, 256, 384, 512)
MIN_STEPS = 40
PASSES = 5
CLEARLY = 0.97  # a ridge must bring the loss below this share of that without
SURE = 3.0  # standard errors
MATTERS = 0.05  # of a typical step
_SPREAD = 0.1  # relative error from which on a step weighs less
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fitted:
    """`median_error`: of the steps fitted on, relative."""

    steps: StepCoefficients
    num_steps: int
    median_error: float


def fit_steps(records: Sequence[StepRecord]) -> Fitted:
    """Raises ConfigError when the steps are too few or too alike, or when what they say is not physical."""
    used = [r for r in records if r.seconds > 0 and r.prefill_tokens + r.decode_requests > 0]
    if len(used) < MIN_STEPS:
        raise ConfigError(key="profile", value=f"{len(used)} steps", expected=f"at least {MIN_STEPS} measured steps")
    if not any(r.prefill_tokens for r in used) or not any(r.prefill_tokens == 0 for r in used):
        raise ConfigError(key="profile", value=f"{len(used)} steps", expected="steps with prompts and steps without")
    seconds = np.array([r.seconds for r in used])
    best, ridge = _solve(_features(used, 0.0), seconds), 0.0
    for tried in RIDGES:
        found = _solve(_features(used, tried), seconds)
        if found.loss < CLEARLY * best.loss and found.bounded[1] > 0:
            best, ridge = found, float(tried)
    _refuse_unphysical(best, _features(used, ridge), seconds)
    coefficients = {name: float(value) for name, value in zip(NAMES, best.bounded, strict=True)}
    steps = StepCoefficients(**coefficients, ridge_tokens=ridge)
    check_physical(steps, "profile")
    return Fitted(steps, len(used), float(np.median(np.abs(best.errors))))


@dataclass(frozen=True, slots=True)
class _Solved:
    free: Floats
    free_error: Floats  # standard errors
    bounded: Floats
    errors: Floats
    loss: float


def _features(records: Sequence[StepRecord], ridge: float) -> Floats:
    """[steps, 6]; without a ridge the second column is zero."""
    rows = []
    for r in records:
        over = max(0.0, r.prefill_tokens + r.decode_requests - ridge) if ridge else 0.0
        rows.append([1.0, over, r.prefill_tokens, r.prefill_pairs, r.decode_requests, r.context_tokens])
    return np.array(rows, dtype=np.float64)


def _solve(features: Floats, seconds: Floats) -> _Solved:
    largest = features.max(axis=0)
    scale = np.where(largest > 0, largest, 1.0)
    scaled = features / scale
    expected = seconds + np.median(seconds)  # one freak of a short step must not count for a hundred others
    weights = np.ones(len(seconds))
    bounded, errors = np.zeros(len(scale)), np.zeros(len(seconds))
    for _ in range(PASSES):
        bounded = _non_negative(scaled / expected[:, None], seconds / expected, weights)
        expected = np.maximum(scaled @ bounded, 1e-3 * np.median(seconds))
        errors = seconds / expected - 1.0
        weights = 1.0 / np.maximum(1.0, np.abs(errors) / _SPREAD)
    free, gram = _least_squares(scaled / expected[:, None], seconds / expected, weights)
    left = (seconds - scaled @ free) / expected
    variance = float(np.sum(weights * left**2) / max(1, len(seconds) - len(scale)))
    free_error = np.sqrt(variance * np.clip(np.diag(np.linalg.pinv(gram)), 0, None)) / scale
    robust = np.where(np.abs(errors) < _SPREAD, errors**2, _SPREAD * (2 * np.abs(errors) - _SPREAD))
    return _Solved(free / scale, free_error, bounded / scale, errors, float(np.sum(robust)))


def _least_squares(rows: Floats, target: Floats, weights: Floats) -> tuple[Floats, Floats]:
    gram = rows.T @ (weights[:, None] * rows)
    return np.asarray(np.linalg.pinv(gram, rcond=1e-12) @ (rows.T @ (weights * target))), gram


def _non_negative(rows: Floats, target: Floats, weights: Floats) -> Floats:
    """Least squares with values >= 0, by coordinate descent."""
    values, gram = _least_squares(rows, target, weights)
    right = rows.T @ (weights * target)
    values = np.maximum(values, 0.0)
    for _ in range(2000):
        before = values.copy()
        for i in range(len(values)):
            if gram[i, i] > 0:
                values[i] = max(0.0, values[i] + (right[i] - gram[i] @ values) / gram[i, i])
        if np.allclose(values, before, rtol=1e-9, atol=0):
            break
    return values


def _refuse_unphysical(solved: _Solved, features: Floats, seconds: Floats) -> None:
    typical_s = float(np.median(seconds))
    for name, value, error, column in zip(NAMES, solved.free, solved.free_error, features.T, strict=True):
        used = column[column > 0]
        part_s = -value * float(np.median(used)) if len(used) else 0.0
        if value < -SURE * error and part_s > MATTERS * typical_s:
            raise ConfigError(
                f"profile: the measured steps say {name} = {value:.3g} +- {error:.1g}; expected 0 or more. "
                "Something disturbed the measurement, or the steps are not of this form: measure again on a quiet machine",
                key=f"profile.{name}",
                value=float(value),
                expected="0 or more",
            )
