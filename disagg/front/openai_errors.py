"""Our errors as the ones that vLLM's API server turns into response bodies and statuses."""

from __future__ import annotations

from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from disagg.errors import (
    CancelledRequestError,
    DeadlineError,
    DisaggError,
    InvalidRequestError,
    RejectedError,
    UnavailableError,
)

RETRY_SOON_S = 1.0


def to_vllm(error: DisaggError) -> Exception:
    """The error for vLLM's handlers: 400 with the field, 429, 503, 504, 499 or 500."""
    if isinstance(error, InvalidRequestError):
        translated: Exception = VLLMValidationError(error.message, parameter=error.field, value=error.value)
    else:
        translated = GracefulHTTPError(error.message, _status(error))
    return translated


def retry_after_s(error: DisaggError) -> float | None:
    """When the client may try again; None where nothing says that it would help."""
    if isinstance(error, RejectedError):
        return error.retry_after_s
    return RETRY_SOON_S if isinstance(error, UnavailableError) else None


def _status(error: DisaggError) -> HTTPStatus:
    match error:
        case RejectedError():
            return HTTPStatus.TOO_MANY_REQUESTS
        case DeadlineError():
            return HTTPStatus.GATEWAY_TIMEOUT
        case UnavailableError() | CancelledRequestError():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR
