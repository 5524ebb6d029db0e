"""The gRPC door: disagg.v1.Inference over a coordinator.

One request, in `_generate`: check what is cheap, make tokens, check the rest, submit, and send every chunk on as it comes. The client's
deadline becomes the request's; a client that cancels, vanishes or stops reading ends the run on every worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import grpc
import grpc.aio

from disagg.config import Topology
from disagg.engine.engine import Chunks
from disagg.errors import DisaggError, EngineError, InvalidRequestError
from disagg.front.model_info import Served
from disagg.front.status import Status, status_of
from disagg.front.text import TextPart, TextStream
from disagg.front.validate import Limits, check_head, check_messages, check_text_size, to_request
from disagg.front.write_deadline import WriteDeadline
from disagg.pb import inference_pb2 as pb
from disagg.pb.inference_pb2_grpc import InferenceServicer
from disagg.policy.decision import Prediction
from disagg.policy.view import PoolView
from disagg.serving.pace import Pace
from disagg.serving.timeline import Timeline
from disagg.tracing import TRACEPARENT, TRACESTATE, TraceContext, trace_context
from disagg.types import FinishReason, Phase, PromptLogprobs, Request, Role, Route, Token, new_id

logger = logging.getLogger(__name__)

# Shorter texts are tokenised in place: a thread would cost more than they do.
INLINE_TEXT_CHARS = 4096
# A client that takes no bytes for so long is gone, whatever its connection says.
WRITE_TIMEOUT_S = 60.0
# The request's own deadline comes a little before the call's, so that the typed error is there in time.
DEADLINE_MARGIN_S = 0.05
TIMING_KEY = "server-timing"
NO_TRACE = trace_context({})

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

    @property
    def newly_cached_tokens(self) -> int: ...

    @property
    def prediction(self) -> Prediction | None:
        """What the router expected when it admitted the request; None until then."""
        ...

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
        self._chat = served.chat
        self._limits = Limits(
            served.info,
            topology.slo_classes,
            served.tokenizer.max_token_bytes if served.tokenizer else None,
            partial(served.tokenizer.encode, is_whole=False) if served.tokenizer else None,
            has_logits=topology.engine.kind != "simulated",
        )
        self._coordinator = coordinator
        self._pools = pools
        self._running: set[str] = set()
        self._pace = Pace()  # of all answers' messages
        self._writes = WriteDeadline(WRITE_TIMEOUT_S)

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
            head = check_head(message, self._limits)
            token_ids = await self._token_ids(message)
            deadline_s = _deadline_s(context, arrival_s)
            request = to_request(
                request_id,
                head,
                token_ids,
                self._limits,
                arrival_s=arrival_s,
                deadline_s=deadline_s,
                context=_trace_context(context),
            )
            answer = _AnswerStream(context, request_id, self._writes, is_shared=head.n > 1)
            if head.n == 1:
                await self._answer(0, request, answer)
            else:
                await _all(self._answer(index, _nth(request, index), answer) for index in range(head.n))

    async def _token_ids(self, message: pb.GenerateRequest) -> Sequence[int]:
        """The prompt's. Raises InvalidRequestError."""
        kind = message.WhichOneof("prompt")
        if kind == "text":
            check_text_size(message.text, self._limits)
            return await self._tokens(message.text, is_whole=True)
        if kind == "chat":
            messages, arguments = check_messages(message.chat, self._limits)
            if self._chat is None:
                raise InvalidRequestError(
                    field="chat", value="messages", expected="text or token ids: the served model has no chat template"
                )
            text = await asyncio.to_thread(self._chat.render, messages, arguments)
            check_text_size(text, self._limits)
            return await self._tokens(text, is_whole=False)
        return message.token_ids.ids[:]  # a slice is read in one go

    async def _tokens(self, text: str, *, is_whole: bool) -> list[int]:
        assert self._tokenizer is not None
        if len(text) <= INLINE_TEXT_CHARS:
            return self._tokenizer.encode(text, is_whole=is_whole)
        return await asyncio.to_thread(self._tokenizer.encode, text, is_whole=is_whole)

    async def _answer(self, index: int, request: Request, answer: _AnswerStream) -> None:
        """Send one answer as it comes; its last response, with usage, once the run has ended on every worker."""
        run = self._coordinator.submit(request)
        text = self._text_stream(request)
        num_tokens = 0
        wrote_s = math.inf  # so that it rests after the first message
        last: TextPart | None = None
        table: PromptLogprobs | None = None
        async with aclosing(run.chunks()) as chunks:
            async for chunk in chunks:
                part = text.push(chunk.tokens, chunk.finish) if text else TextPart(chunk.tokens, "", chunk.finish)
                num_tokens += len(part.tokens)
                table = table or chunk.prompt_logprobs
                if part.finish is not None:
                    last = part
                    # A stop string ends an answer that its workers would go on with: whole, and not cancelled.
                    run.end(Phase.FINISHED)
                    break
                began_s = time.monotonic()
                await answer.write(index, part, request, table)
                table = None
                gap_s, wrote_s = began_s - wrote_s, time.monotonic()
                if rest_s := self._pace.wrote(wrote_s - began_s, gap_s):
                    await asyncio.sleep(rest_s)  # what comes meanwhile goes in one message
        if last is None:
            raise EngineError(f"the answer ended after {num_tokens} tokens without a finish reason")
        await answer.write(index, last, request, table, _usage(request, run, num_tokens))

    def _text_stream(self, request: Request) -> TextStream | None:
        if self._tokenizer is None:
            return None
        sampling = request.sampling
        return TextStream(
            self._tokenizer,
            request.prompt_token_ids,
            sampling.stop,
            sampling.min_tokens,
            keep_stop=sampling.include_stop_str_in_output,
            skip_special=sampling.skip_special_tokens,
        )

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


class _AnswerStream:
    """The call's responses. Where several answers write (`is_shared`), they take turns: the transport takes one response at a time."""

    def __init__(self, context: Context, request_id: str, writes: WriteDeadline, *, is_shared: bool) -> None:
        self._context = context
        self._request_id = request_id
        self._writes = writes
        self._lock = asyncio.Lock() if is_shared else None

    async def write(
        self, index: int, part: TextPart, request: Request, table: PromptLogprobs | None, usage: pb.Usage | None = None
    ) -> None:
        """Hand one response to the transport; waits while the client's window is full. DeadlineError: the client stopped reading."""
        response = pb.GenerateResponse(request_id=self._request_id, text=part.text, index=index)
        plain = [token.token_id for token in part.tokens if token.logprob is None]
        if len(plain) == len(part.tokens):
            response.MergeFromString(b"".join(map(_plain_token, plain)))
        else:
            for token in part.tokens:
                _add_token(response, token)
        if table is not None:
            response.prompt_logprobs.extend(_prompt_tokens(request, table))
        if part.finish is not None:
            response.finish_reason = _FINISH[part.finish]
        if usage is not None:
            response.usage.CopyFrom(usage)
            self._context.set_trailing_metadata(((TIMING_KEY, server_timing(usage.timing)),))
        if self._lock is None:
            await self._writes.within(self._context.write(response))
            return
        async with self._lock:
            await self._writes.within(self._context.write(response))


def server_timing(timing: pb.Timing) -> str:
    """The phases in the syntax of HTTP's Server-Timing, in milliseconds."""
    spans = (("queue", timing.queue_s), ("prefill", timing.prefill_s), ("transfer", timing.transfer_s), ("decode", timing.decode_s))
    return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in spans)


def _nth(request: Request, index: int) -> Request:
    """One of several answers' requests. Seeds are derived as vLLM does."""
    seed = request.sampling.seed
    sampling = request.sampling if seed is None else replace(request.sampling, seed=seed + index)
    return replace(request, request_id=f"{index}_{request.request_id}", sampling=sampling)


async def _all(answers: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them; the first error ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(answer)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _prompt_tokens(request: Request, table: PromptLogprobs) -> list[pb.Token]:
    """One message per prompt token; the first has nothing before it to be likely after."""
    tokens = [pb.Token(id=request.prompt_token_ids[0])]
    for row, rank in enumerate(table.ranks):
        begin = row * table.width
        ids, logprobs = table.token_ids[begin : begin + table.width], table.logprobs[begin : begin + table.width]
        top = [pb.TopLogprob(id=i, logprob=p) for i, p in zip(ids[1:], logprobs[1:], strict=True)]
        tokens.append(pb.Token(id=ids[0], logprob=logprobs[0], top_logprobs=top, rank=rank))
    return tokens


def _status(error: Exception, request_id: str) -> Status:
    """What the client is told; a fault of ours is a sentence to it, and a traceback in the log."""
    if isinstance(error, DisaggError):
        logger.info("request %s ended: %s: %s", request_id, type(error).__name__, error.message)
        return status_of(error)
    logger.error("request %s: unexpected error", request_id, exc_info=error)
    return status_of(EngineError(f"request {request_id} failed by a fault of the gateway; its log has the details"))


def _trace_context(context: Context) -> TraceContext:
    metadata = context.invocation_metadata() or ()
    if not any(key == TRACEPARENT for key, _ in metadata):
        return NO_TRACE
    given = [(key, value) for key, value in metadata if isinstance(value, str)]
    states = ",".join(value for key, value in given if key == TRACESTATE)  # the header may come in parts
    return trace_context(dict(given) | {TRACESTATE: states})


def _deadline_s(context: Context, now_s: float) -> float | None:
    remaining_s: float | None = context.time_remaining()
    return None if remaining_s is None else now_s + max(0.0, remaining_s - min(DEADLINE_MARGIN_S, 0.1 * remaining_s))


@lru_cache(maxsize=1 << 16)
def _plain_token(token_id: int) -> bytes:
    """A response with this token alone: put behind one another, and read as one message, they are a response with all."""
    return pb.GenerateResponse(tokens=[pb.Token(id=token_id)]).SerializeToString()


def _add_token(response: pb.GenerateResponse, token: Token) -> None:
    if token.logprob is None:
        response.tokens.add(id=token.token_id)
        return
    top = [pb.TopLogprob(id=t.token_id, logprob=t.logprob) for t in token.top]
    response.tokens.add(id=token.token_id, logprob=token.logprob, top_logprobs=top, rank=token.rank)


def _usage(request: Request, run: Run, num_tokens: int) -> pb.Usage:
    timeline, route, predicted = run.timeline, run.route, run.prediction
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
        predicted_ttft_s=predicted.ttft_s if predicted else None,
        predicted_tpot_s=predicted.tpot_s if predicted else None,
    )


def _pool(role: Role, count: int, view: PoolView) -> pb.Pool:
    names = sorted(worker.name for worker in view.of(role))
    return pb.Pool(role=role, workers=names, live=len(names), wanted=count)
