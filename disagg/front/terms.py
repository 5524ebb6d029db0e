"""What an HTTP client asks beside the OpenAI request itself: its SLO class, its place in the queue, until when it wants the answer.

Carried from the edge (http_edge.py) to the engine client by a context variable, because vLLM's handlers in between don't know of it.
"""

from __future__ import annotations

import contextvars
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from disagg.config import SloClass
from disagg.errors import InvalidRequestError, nearest
from disagg.front.validate import MAX_PRIORITY

CLASS_HEADER = "x-slo-class"
PRIORITY_HEADER = "x-priority"
TIMEOUT_HEADER = "x-request-timeout-s"
CLASS_FIELD = "slo_class"
LONGEST_TIMEOUT_S = 86_400.0


@dataclass(slots=True)
class Terms:
    """One request's terms. `priority`: higher goes first; None: the class's. `deadline_s`: monotonic instant; None: no limit.

    `retry_after_s` is the answer's part: set by whoever refuses the request for now, read where the response leaves. `is_understood`: the
    request was read and checked, and what goes wrong from here on is not its form.
    """

    slo_class: SloClass
    priority: int | None = None
    deadline_s: float | None = None
    retry_after_s: float | None = None
    is_understood: bool = False


CURRENT: contextvars.ContextVar[Terms | None] = contextvars.ContextVar("disagg_terms", default=None)


def terms_of(headers: Mapping[str, str], classes: Sequence[SloClass]) -> Terms:
    """The terms that the headers (lower-case names) state. Raises InvalidRequestError naming the header."""
    now_s = time.monotonic()
    terms = Terms(classes[0])
    if CLASS_HEADER in headers:
        terms = with_class(terms, CLASS_HEADER, headers[CLASS_HEADER], classes)
    if PRIORITY_HEADER in headers:
        terms.priority = _priority(headers[PRIORITY_HEADER])
    if TIMEOUT_HEADER in headers:
        terms.deadline_s = now_s + _timeout_s(headers[TIMEOUT_HEADER])
    return terms


def with_class(terms: Terms, field: str, name: object, classes: Sequence[SloClass]) -> Terms:
    """`terms` with the class of that name. Raises InvalidRequestError naming `field`."""
    for known in classes:
        if known.name == name:
            return replace(terms, slo_class=known)
    raise InvalidRequestError(field=field, value=name, expected=nearest(str(name), [c.name for c in classes]))


def _priority(text: str) -> int:
    expected = f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}; higher goes first"
    try:
        value = int(text)
    except ValueError:
        raise InvalidRequestError(field=PRIORITY_HEADER, value=text, expected=expected) from None
    if not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidRequestError(field=PRIORITY_HEADER, value=text, expected=expected)
    return value


def _timeout_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_TIMEOUT_S:
        raise InvalidRequestError(field=TIMEOUT_HEADER, value=text, expected=f"seconds above 0 and at most {LONGEST_TIMEOUT_S:g}")
    return value
