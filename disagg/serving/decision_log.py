"""The gateway's latest decisions, by request: each also one line of JSON in the log `disagg.decisions`."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict

from disagg.policy.decision import Candidate, DecisionRecord, Prediction

log = logging.getLogger("disagg.decisions")

KEPT_REQUESTS = 4096


class DecisionLog:
    """Keeps the decisions of the last KEPT_REQUESTS requests."""

    def __init__(self) -> None:
        self._by_request: OrderedDict[str, list[DecisionRecord]] = OrderedDict()

    def add(self, record: DecisionRecord) -> None:
        """Log and keep one decision."""
        self._by_request.setdefault(record.request_id, []).append(record)
        if len(self._by_request) > KEPT_REQUESTS:
            self._by_request.popitem(last=False)
        if log.isEnabledFor(logging.INFO):
            log.info("%s", to_json(record))

    def find(self, request_id: str) -> tuple[DecisionRecord, ...]:
        """The decisions on a request, oldest first; on the latest one when the id is empty. None when it is not known, or no more."""
        if not request_id:
            request_id = next(reversed(self._by_request), "")
        return tuple(self._by_request.get(request_id, ()))


def to_json(record: DecisionRecord) -> str:
    """One line; seconds rounded to microseconds."""
    return json.dumps(_rounded(record), separators=(",", ":"))


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (DecisionRecord, Candidate, Prediction)):
        return _rounded(value._asdict())
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value
