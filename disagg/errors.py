"""Every error that disagg raises on purpose.

    DisaggError
    |- InvalidRequestError      the caller's input is wrong: names field, value and what would be right
    |- RejectedError            refused by admission; carries a retry-after
    |- DeadlineError            the request's deadline passed
    |- CancelledRequestError    the client went away or cancelled
    |- AccessError              the caller showed no valid token
    |- UnavailableError         nothing can serve it now
    |  |- WorkerLostError       a worker's process died or stopped answering
    |  |- NoWorkerError         a pool has no live worker
    |  `- GatewayUnreachableError   (client side) nothing listens at the address
    |- TransferError            the KV did not arrive whole
    |  |- TransferFencedError   stale epoch, released, expired or unknown transfer
    |  |- TransferCorruptError  checksum, length or order wrong
    |  `- LayoutMismatchError   the two sides' caches cannot exchange raw blocks
    |- DiskError                a file cannot be written
    |- EngineError              the engine failed or refused a request that passed the checks
    `- ConfigError              a topology, workload or command-line value is wrong
       |- ModelError            a model is missing, incomplete or unknown
       `- PlacementError        the cluster has no room for what is asked

`retryable` says whether the same request may succeed on another route or a little later. Foreign errors are translated once, at
the boundary where they arise. `to_wire`/`from_wire` carry an error across gRPC without losing its type.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from typing import Any, ClassVar


class DisaggError(Exception):
    """Root of the tree. `message` is one sentence for a person."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def details(self) -> dict[str, Any]:
        """The fields beside the message, JSON-serialisable; they are the constructor's other arguments."""
        return {}

    def __reduce__(self) -> tuple[Callable[[bytes], DisaggError], tuple[bytes]]:
        """Cross a process boundary as the wire form: the default would lose keyword-only arguments."""
        return from_wire, (to_wire(self),)


class InvalidRequestError(DisaggError):
    """The request is wrong. `field` is the public field's name, `value` a short rendering, `expected` what would be right."""

    def __init__(self, message: str = "", *, field: str, value: Any, expected: str) -> None:
        shown = shorten(value)
        super().__init__(message or f"{field}: got {shown}, expected {expected}")
        self.field = field
        self.value = shown
        self.expected = expected

    def details(self) -> dict[str, Any]:
        return {"field": self.field, "value": self.value, "expected": self.expected}


class RejectedError(DisaggError):
    """Admission refused the request; trying again after `retry_after_s` seconds may succeed."""

    retryable = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def details(self) -> dict[str, Any]:
        return {"retry_after_s": self.retry_after_s}


class DeadlineError(DisaggError):
    """The request's deadline passed before its answer was whole."""


class CancelledRequestError(DisaggError):
    """The client cancelled."""


class AccessError(DisaggError):
    """The caller showed no valid token."""


class UnavailableError(DisaggError):
    """Nothing can serve the request at the moment."""

    retryable = True


class WorkerLostError(UnavailableError):
    """Worker `worker` died or stopped answering."""

    def __init__(self, message: str = "", *, worker: str) -> None:
        super().__init__(message or f"worker {worker} was lost")
        self.worker = worker

    def details(self) -> dict[str, Any]:
        return {"worker": self.worker}


class NoWorkerError(UnavailableError):
    """No live worker can take this phase."""


class GatewayUnreachableError(UnavailableError):
    """No gateway answers at `address`."""

    def __init__(self, message: str = "", *, address: str) -> None:
        super().__init__(message or f"no gateway answers at {address}; start one with `disagg up TOPOLOGY`")
        self.address = address

    def details(self) -> dict[str, Any]:
        return {"address": self.address}


class TransferError(DisaggError):
    """The KV of a transfer did not arrive whole; the prompt must be prefilled again."""

    retryable = True


class TransferFencedError(TransferError):
    """The transfer is unknown, released, expired, or of another epoch."""


class TransferCorruptError(TransferError):
    """A frame's checksum, length or order is wrong."""


class LayoutMismatchError(TransferError):
    """The two sides' KV caches cannot exchange raw blocks: model, dtype, block size or backend differ."""


class EngineError(DisaggError):
    """The engine failed on this request."""

    retryable = True


class DiskError(DisaggError):
    """A file cannot be written: the disk is full, or its folder is gone. What was written before stays."""


class ConfigError(DisaggError):
    """A configured value is wrong. `key` is its dotted path, `expected` what would be right."""

    def __init__(self, message: str = "", *, key: str = "", value: Any = None, expected: str = "") -> None:
        super().__init__(message or f"{key}: got {shorten(value)}, expected {expected}")
        self.key = key
        self.value = shorten(value)
        self.expected = expected

    def details(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "expected": self.expected}


class ModelError(ConfigError):
    """A model is missing, incomplete or unknown."""


class PlacementError(ConfigError):
    """The cluster has no room for the topology, or what it needs is in use (a port)."""


def shorten(value: Any, limit: int = 80) -> str:
    """`repr` of a value, cut in the middle to `limit` characters, cheap also for huge strings and lists."""
    if isinstance(value, str) and len(value) > limit:
        return f"{value[: limit // 2]!r}... ({len(value)} characters)"
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"[{', '.join(map(repr, value[:8]))}, ... ({len(value)} items)]"
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, or the list of known ones."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"one of {', '.join(names)}"


def _tree(root: type[DisaggError]) -> dict[str, type[DisaggError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def to_wire(error: DisaggError) -> bytes:
    """JSON bytes that `from_wire` turns back into an equal error."""
    return json.dumps({"type": type(error).__name__, "message": error.message, **error.details()}).encode()


def from_wire(data: bytes) -> DisaggError:
    """The error that `to_wire` wrote. An unknown type or malformed data becomes a plain DisaggError with the text."""
    try:
        fields = json.loads(data)
        cls = _tree(DisaggError)[fields.pop("type")]
        error = cls(fields.pop("message"), **fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return DisaggError(data[:500].decode(errors="replace"))
    if isinstance(error, (InvalidRequestError, ConfigError)):
        error.value = fields["value"]  # rendered once, by the first constructor
    return error
