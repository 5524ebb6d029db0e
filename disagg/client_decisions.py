"""Asks a gateway why it routed a request as it did."""

from __future__ import annotations

from typing import Any

import grpc

from disagg.client_types import CHANNEL_OPTIONS, Access, to_error
from disagg.errors import InvalidRequestError
from disagg.pb import decisions_pb2 as pb
from disagg.pb.decisions_pb2_grpc import DecisionsStub
from disagg.policy.decision import Candidate, DecisionRecord, Prediction, Verdict

TIMEOUT_S = 10.0


def fetch_decisions(address: str, request_id: str, access: Access | None = None) -> list[DecisionRecord]:
    """The decisions on a request, oldest first; on the latest one when `request_id` is empty. `at_s` is not told.

    Raises InvalidRequestError when the gateway keeps none of it, GatewayUnreachableError, AccessError.
    """
    access = access or Access()
    credentials = access.credentials()
    channel = (
        grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        if credentials is None
        else grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
    )
    with channel:
        stub: Any = DecisionsStub(channel)  # type: ignore[no-untyped-call]
        try:
            response = stub.Explain(pb.ExplainRequest(request_id=request_id), timeout=TIMEOUT_S, metadata=access.metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                message = str(error.details())
                raise InvalidRequestError(message, field="request_id", value=request_id, expected="a recent request's id") from None
            raise to_error(error, address, answered=False) from None
    return [_record(m) for m in response.decisions]


def _record(m: pb.Decision) -> DecisionRecord:
    return DecisionRecord(
        request_id=m.request_id,
        at_s=0.0,
        waited_s=m.waited_s,
        verdict=Verdict(m.verdict),
        reason=m.reason,
        slo_class=m.slo_class,
        priority=m.priority,
        context_tokens=m.context_tokens,
        max_tokens=m.max_tokens,
        ttft_target_s=m.ttft_target_s if m.HasField("ttft_target_s") else None,
        tpot_target_s=m.tpot_target_s if m.HasField("tpot_target_s") else None,
        queued_requests=m.queued_requests,
        attempt=m.attempt,
        candidates=tuple([_candidate(c) for c in m.candidates]),
        retry_after_s=m.retry_after_s if m.HasField("retry_after_s") else None,
    )


def _candidate(m: pb.Candidate) -> Candidate:
    prediction = Prediction(m.ttft_s, m.tpot_s, m.queue_s, m.prefill_s, m.transfer_s, m.output_tokens, m.kv_tokens, m.cached_tokens)
    return Candidate(m.prefill_worker, m.decode_worker, prediction, m.cost, m.note)
