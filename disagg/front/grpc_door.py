"""The gRPC door: disagg.v1.Inference over a coordinator.

One request, in `_generate`: check what is cheap, make tokens, check the rest, submit, and send every chunk on as it comes. The client's
deadline becomes the request's; a client that cancels, vanishes or stops reading ends the run on every worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Protocol

import grpc
import grpc.aio

from disagg.config import Topology
from disagg.engine.engine import Chunks
from disagg.errors import DeadlineError, DisaggError, EngineError, InvalidRequestError
from disagg.front.model_info import Served
from disagg.front.status import Status, status_of
from disagg.front.text import TextPart, TextStream
from disagg.front.validate import Limits, check_head, check_text_size, to_request
from disagg.pb import inference_pb2 as pb
from disagg.pb.inference_pb2_grpc import InferenceServicer
from disagg.policy.view import PoolView
from disagg.serving.timeline import Timeline
from disagg.types import FinishReason, Phase, Request, Role, Route, Token, new_id

logger = logging.getLogger(__name__)

# Shorter texts are tokenised in place: a thread would cost more than they do.
INLINE_TEXT_CHARS = 4096
# A client that takes no bytes for so long is gone, whatever its connection says.
WRITE_TIMEOUT_S = 60.0
# The request's own deadline comes a little before the call's, so that the typed error is there in time.
DEADLINE_MARGIN_S = 0.05

_FINISH = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}

Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class Run(Protocol):
    """What the door needs of one submitted request (serving/coordinator.py)."""

    @property
    def timeline(self) -> Timeline: ...

    @property
    def route(self) -> Route | None:
        """The latest route; None until there is one."""
        ...

    @property
    def attempts(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    def chunks(self) -> Chunks:
        """The answer. Closing it cancels everywhere."""
        ...

    def end(self, phase: Phase) -> None:
        """Say how the request ended; only the first word counts."""
        ...


class Coordinator(Protocol):
    """Takes requests (serving/coordinator.py)."""

    def submit(self, request: Request) -> Run: ...


class Pools(Protocol):
    """Says which workers are live (serving/pool.py)."""

    def view(self, now_s: float) -> PoolView: ...


class InferenceDoor(InferenceServicer):
    """The servicer. One per gateway; methods are called by grpc.aio on the gateway's event loop."""

    def __init__(self, topology: Topology, served: Served, coordinator: Coordinator, pools: Pools) -> None:
        self._topology = topology
        self._tokenizer = served.tokenizer
        max_token_bytes = served.tokenizer.max_token_bytes if served.tokenizer else None
        self._limits = Limits(served.info, topology.slo_classes, max_token_bytes)
        self._coordinator = coordinator
        self._pools = pools
        self._running: set[str] = set()

    @property
    def num_running(self) -> int:
        """Requests being answered now."""
        return len(self._running)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802 - the name of the RPC
        arrival_s = time.monotonic()
        request_id = request.request_id or new_id()
        try:
            await self._generate(request, request_id, arrival_s, context)
            return
        except Exception as error:  # noqa: BLE001 - the edge: a fault of one request must not be more than that
            status = _status(error, request_id)
        await context.abort(status.code, status.details, status.metadata)

    async def GetModelInfo(  # noqa: N802 - the name of the RPC
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.ModelInfo]
    ) -> pb.ModelInfo:
        try:
            return self._model_info()
        except Exception as error:  # noqa: BLE001 - the edge
            status = _status(error, "for model info")
        return await context.abort(status.code, status.details, status.metadata)

    def _model_info(self) -> pb.ModelInfo:
        model, topology = self._limits.model, self._topology
        view = self._pools.view(time.monotonic())
        return pb.ModelInfo(
            model=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            mode=topology.mode,
            slo_classes=[pb.SloClass(name=c.name, ttft_s=c.ttft_s, tpot_s=c.tpot_s, priority=c.priority) for c in topology.slo_classes],
            pools=[_pool(role, pool.count, view) for role, pool in topology.active_pools().items()],
            engine=topology.engine.kind,
            accepts_text=self._tokenizer is not None,
            eos_token_ids=model.eos_token_ids,
            kv_bytes_per_token=model.kv_bytes_per_token,
        )

    async def _generate(self, message: pb.GenerateRequest, request_id: str, arrival_s: float, context: Context) -> None:
        with self._registered(request_id):
            request = await self._checked(message, request_id, arrival_s, _deadline_s(context, arrival_s))
            run = self._coordinator.submit(request)
            await self._answer(request, run, context)

    async def _checked(self, message: pb.GenerateRequest, request_id: str, arrival_s: float, deadline_s: float | None) -> Request:
        """The request for serving. Raises InvalidRequestError."""
        limits = self._limits
        head = check_head(message, limits)
        if message.WhichOneof("prompt") == "text":
            token_ids: Sequence[int] = await self._tokens(message.text)
        else:
            token_ids = message.token_ids.ids
        return to_request(request_id, head, token_ids, limits, arrival_s=arrival_s, deadline_s=deadline_s)

    async def _tokens(self, text: str) -> list[int]:
        check_text_size(text, self._limits)
        assert self._tokenizer is not None
        if len(text) <= INLINE_TEXT_CHARS:
            return self._tokenizer.encode(text)
        return await asyncio.to_thread(self._tokenizer.encode, text)

    async def _answer(self, request: Request, run: Run, context: Context) -> None:
        """Send the answer as it comes; the last response, with usage, once the run has ended on every worker."""
        text = self._text_stream(request)
        num_tokens = 0
        last: TextPart | None = None
        async with aclosing(run.chunks()) as chunks:
            async for chunk in chunks:
                part = text.push(chunk.tokens, chunk.finish) if text else TextPart(chunk.tokens, "", chunk.finish)
                num_tokens += len(part.tokens)
                if part.finish is not None:
                    last = part
                    # A stop string ends an answer that its workers would go on with: whole, and not cancelled.
                    run.end(Phase.FINISHED)
                    break
                await _write(context, _response(request.request_id, part))
        if last is None:
            raise EngineError(f"the answer ended after {num_tokens} tokens without a finish reason")
        response = _response(request.request_id, last)
        response.usage.CopyFrom(_usage(request, run, num_tokens))
        await _write(context, response)

    def _text_stream(self, request: Request) -> TextStream | None:
        if self._tokenizer is None:
            return None
        return TextStream(self._tokenizer, request.prompt_token_ids, request.sampling.stop, request.sampling.min_tokens)

    @contextmanager
    def _registered(self, request_id: str) -> Iterator[None]:
        """Hold a request id: two running requests of one id could not be told apart in logs and engines."""
        if request_id in self._running:
            raise InvalidRequestError(field="request_id", value=request_id, expected="an id that no running request has, or nothing")
        self._running.add(request_id)
        try:
            yield
        finally:
            self._running.discard(request_id)


def _status(error: Exception, request_id: str) -> Status:
    """What the client is told; a fault of ours is a sentence to it, and a traceback in the log."""
    if isinstance(error, DisaggError):
        logger.info("request %s ended: %s: %s", request_id, type(error).__name__, error.message)
        return status_of(error)
    logger.error("request %s: unexpected error", request_id, exc_info=error)
    return status_of(EngineError(f"request {request_id} failed by a fault of the gateway; its log has the details"))


def _deadline_s(context: Context, now_s: float) -> float | None:
    remaining_s: float | None = context.time_remaining()
    return None if remaining_s is None else now_s + max(0.0, remaining_s - min(DEADLINE_MARGIN_S, 0.1 * remaining_s))


async def _write(context: Context, response: pb.GenerateResponse) -> None:
    """Hand one response to the transport; waits while the client's window is full. DeadlineError: the client stopped reading."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(response)
    except TimeoutError:
        raise DeadlineError(f"the client took nothing of its answer for {WRITE_TIMEOUT_S:g} s") from None


def _response(request_id: str, part: TextPart) -> pb.GenerateResponse:
    response = pb.GenerateResponse(request_id=request_id, tokens=[_token(token) for token in part.tokens], text=part.text)
    if part.finish is not None:
        response.finish_reason = _FINISH[part.finish]
    return response


def _token(token: Token) -> pb.Token:
    if token.logprob is None:
        return pb.Token(id=token.token_id)
    top = [pb.TopLogprob(id=t.token_id, logprob=t.logprob) for t in token.top]
    return pb.Token(id=token.token_id, logprob=token.logprob, top_logprobs=top)


def _usage(request: Request, run: Run, num_tokens: int) -> pb.Usage:
    timeline, route = run.timeline, run.route
    return pb.Usage(
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=num_tokens,
        cached_tokens=run.cached_tokens,
        prefill_worker=route.prefill if route else "",
        decode_worker=route.decode if route else "",
        attempts=run.attempts,
        timing=pb.Timing(
            queue_s=timeline.queue_s, prefill_s=timeline.prefill_s, transfer_s=timeline.transfer_s, decode_s=timeline.decode_s
        ),
    )


def _pool(role: Role, count: int, view: PoolView) -> pb.Pool:
    names = sorted(worker.name for worker in view.of(role))
    return pb.Pool(role=role, workers=names, live=len(names), wanted=count)
