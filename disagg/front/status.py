"""Typed errors as gRPC statuses: the one translation at the door's edge. The way back is in client_types.py."""

from __future__ import annotations

import json
from dataclasses import dataclass

import grpc

from disagg.errors import (
    AccessError,
    CancelledRequestError,
    ConfigError,
    DeadlineError,
    DisaggError,
    InvalidRequestError,
    RejectedError,
    UnavailableError,
    to_wire,
)

ERROR_KEY = "disagg-error-bin"
# HTTP/2 peers commonly accept 8 KiB of headers; base64 and the other headers take their share.
MAX_ERROR_BYTES = 4096
MAX_DETAIL_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Status:
    """What a failed call ends with."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, bytes], ...]


def status_of(error: DisaggError) -> Status:
    """The status of an error; its trailing metadata holds the error itself as JSON."""
    details = error.message if len(error.message) <= MAX_DETAIL_CHARS else f"{error.message[:MAX_DETAIL_CHARS]}..."
    if isinstance(error, RejectedError):
        details = f"{details} (retry after {error.retry_after_s:.1f} s)"
    return Status(_code(error), details, ((ERROR_KEY, _bounded_wire(error)),))


def _code(error: DisaggError) -> grpc.StatusCode:
    match error:
        case InvalidRequestError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case RejectedError():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case DeadlineError():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case AccessError():
            return grpc.StatusCode.UNAUTHENTICATED
        case CancelledRequestError():
            return grpc.StatusCode.CANCELLED
        case UnavailableError():
            return grpc.StatusCode.UNAVAILABLE
        case ConfigError():
            return grpc.StatusCode.FAILED_PRECONDITION
        case _:
            return grpc.StatusCode.INTERNAL


def _bounded_wire(error: DisaggError) -> bytes:
    data = to_wire(error)
    if len(data) <= MAX_ERROR_BYTES:
        return data
    cut = {key: f"{value[:400]}..." if isinstance(value, str) and len(value) > 400 else value for key, value in json.loads(data).items()}
    return json.dumps(cut).encode()
