"""Two checks that every field of numbers goes through. Pure."""

from __future__ import annotations

import math

from disagg.errors import InvalidRequestError


def between(field: str, value: int, low: int, high: int) -> int:
    """`value`, or InvalidRequestError naming the bounds."""
    if not low <= value <= high:
        raise InvalidRequestError(field=field, value=value, expected=f"an integer from {low} to {high}")
    return value


def number(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> float:
    """`value`, or InvalidRequestError naming the bounds. NaN fails both comparisons."""
    if not (math.isfinite(value) and low <= value <= high and not (open_low and value == low)):
        expected = f"a number above {low:g} and at most {high:g}" if open_low else f"a number from {low:g} to {high:g}"
        raise InvalidRequestError(field=field, value=value, expected=expected)
    return value
