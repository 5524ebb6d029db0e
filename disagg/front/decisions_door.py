"""The gRPC service disagg.v1.Decisions: the router's latest decisions, for `disagg explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc
import grpc.aio

from disagg.pb import decisions_pb2 as pb
from disagg.pb.decisions_pb2_grpc import DecisionsServicer
from disagg.policy.decision import Candidate, DecisionRecord

NAME: str = pb.DESCRIPTOR.services_by_name["Decisions"].full_name


class DecisionSource(Protocol):
    """Keeps decisions (serving/decision_log.py)."""

    def find(self, request_id: str) -> Sequence[DecisionRecord]:
        """Those on one request, oldest first; on the latest request when the id is empty."""
        ...


class DecisionsDoor(DecisionsServicer):
    """The servicer."""

    def __init__(self, source: DecisionSource) -> None:
        self._source = source

    async def Explain(  # noqa: N802 - the name of the RPC
        self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext[pb.ExplainRequest, pb.ExplainResponse]
    ) -> pb.ExplainResponse:
        found = self._source.find(request.request_id)
        if not found:
            which = f"request {request.request_id!r}" if request.request_id else "any request"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no decision on {which} is kept; only those on the latest requests are")
        return pb.ExplainResponse(decisions=[_decision(record) for record in found])


def _decision(r: DecisionRecord) -> pb.Decision:
    return pb.Decision(
        request_id=r.request_id,
        verdict=r.verdict,
        reason=r.reason,
        waited_s=r.waited_s,
        slo_class=r.slo_class,
        priority=r.priority,
        context_tokens=r.context_tokens,
        max_tokens=r.max_tokens,
        ttft_target_s=r.ttft_target_s,
        tpot_target_s=r.tpot_target_s,
        queued_requests=r.queued_requests,
        attempt=r.attempt,
        candidates=[_candidate(c) for c in r.candidates],
        retry_after_s=r.retry_after_s,
    )


def _candidate(c: Candidate) -> pb.Candidate:
    p = c.prediction
    return pb.Candidate(
        prefill_worker=c.prefill,
        decode_worker=c.decode,
        cost=c.cost,
        note=c.note,
        ttft_s=p.ttft_s,
        tpot_s=p.tpot_s,
        queue_s=p.queue_s,
        prefill_s=p.prefill_s,
        transfer_s=p.transfer_s,
        output_tokens=p.output_tokens,
        kv_tokens=p.kv_tokens,
        cached_tokens=p.cached_tokens,
    )
