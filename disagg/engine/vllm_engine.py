"""Engine `vllm`: vLLM's AsyncLLM with our KV connector, as one engine of a worker.

The worker process holds this object, both boxes and all bookkeeping. vLLM's engine runs in a process of its own, which maps the boxes and
tells over the channel (vllm_channel) what it has staged, and when it will never touch an entry again.

    prefill   vLLM request: context, one token                        the connector stages the context's blocks, chunk by chunk
    decode    vLLM request: context + first token as its prompt       the connector loads the context's blocks; one token is computed
    generate  vLLM request: context                                   no connector
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from disagg.engine.engine import Chunks
from disagg.engine.vllm_args import MIXED_STEP_MS, MIXED_STEP_TOKENS, engine_args, engine_environment
from disagg.engine.vllm_channel import BoxMemory, WorkerChannel
from disagg.engine.vllm_ledger import EntryLedger
from disagg.engine.vllm_plan import READ, WRITE, transfer_params
from disagg.engine.vllm_sampling import (
    Limits,
    check,
    chunk_of,
    finish_of,
    prompt_logprobs_of,
    reasoning_arguments,
    refused,
    sampling_params,
    tokens_of,
)
from disagg.errors import ConfigError, EngineError, InvalidRequestError
from disagg.kv.api import InboxEntry, OutboxEntry
from disagg.kv.layout import KvLayout
from disagg.types import Chunk, EngineState, FinishReason, ModelInfo, Prefilled, Request, Sampling

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 30.0  # from vLLM being ready to the last rank's hello, which has usually come before
SHUTDOWN_TIMEOUT_S = 5.0
WARM_UP_TOKENS = 40  # more than a block, so that one lands in the prefix cache too
_environment_lock = threading.Lock()


async def start_vllm_engine(
    model: str, args: Mapping[str, Any], outbox: BoxMemory, inbox: BoxMemory, name: str, cores: Sequence[int] | None = None
) -> VllmEngine:
    """Starts vLLM on `model` (a local folder or hub name) and returns once it serves.

    `args`: fields of vLLM's AsyncEngineArgs. `outbox`/`inbox`: boxes that the engine's process maps; they must outlive the engine.
    `cores`: the cores on which a CPU engine computes (None: all). Raises ConfigError for arguments or models that cannot serve.
    """
    checked = engine_args(model, args)
    ledger = EntryLedger()
    channel = WorkerChannel(outbox, inbox, ledger)
    channel.open()
    try:
        llm = await _start_llm(checked, engine_environment(channel.address, cores, args), ledger)
    except BaseException:
        channel.close()
        raise
    engine = VllmEngine(name, model, llm, channel, ledger)
    try:
        await asyncio.wait_for(ledger.ready.wait(), HELLO_TIMEOUT_S)
        await engine._warm_up()
    except BaseException as error:
        await engine.close()
        if isinstance(error, TimeoutError):
            raise EngineError(f"engine {name}: its KV connector did not report within {HELLO_TIMEOUT_S:.0f} s") from error
        raise
    return engine


async def _start_llm(args: AsyncEngineArgs, env: Mapping[str, str], ledger: EntryLedger) -> AsyncLLM:
    """AsyncLLM, made in a thread because it blocks until the engine's process has loaded its weights."""

    def make() -> AsyncLLM:
        with _environment_lock, _environment(env):
            return AsyncLLM.from_engine_args(args)

    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_shut_down_orphan)
        raise
    except Exception as error:
        reason = ledger.refusal or str(error)
        raise ConfigError(
            f"vLLM does not start: {reason}", key="engine", value=args.model, expected="a model that vLLM can serve"
        ) from error


def _shut_down_orphan(making: asyncio.Future[AsyncLLM]) -> None:
    """The caller stopped waiting for a start: what came up meanwhile goes down again."""
    if not making.cancelled() and making.exception() is None:
        making.result().shutdown(SHUTDOWN_TIMEOUT_S)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the processes that start inside, then puts the old ones back."""
    old = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in old.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


class VllmEngine:
    """One running vLLM engine; implements `Engine`. Made by `start_vllm_engine`, ended by `close`."""

    def __init__(self, name: str, model: str, llm: AsyncLLM, channel: WorkerChannel, ledger: EntryLedger) -> None:
        self.name = name
        self._model = model
        self._llm = llm
        self._channel = channel
        self._ledger = ledger
        self._limits = _limits(llm)
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting_tokens: dict[int, int] = {}  # tokens to compute, of calls without a token yet, by a key of the call
        self._num_running = 0
        self._watcher = asyncio.ensure_future(self._watch())

    @property
    def layout(self) -> KvLayout:
        return self._ledger.layouts[0]

    @property
    def max_context_tokens(self) -> int:
        return self._limits.max_model_len

    @property
    def model_info(self) -> ModelInfo:
        """What a gateway must know of the model."""
        layout = self.layout
        return ModelInfo(
            name=self._model,
            max_model_len=self._limits.max_model_len,
            vocab_size=self._limits.vocab_size,
            kv_bytes_per_token=layout.num_ranks * layout.slab_bytes // layout.block_tokens,
            eos_token_ids=self._limits.eos_token_ids,
        )

    @property
    def is_alive(self) -> bool:
        return not (self._is_closed or self._ledger.dead.is_set() or self._llm.errored)

    async def wait_dead(self) -> None:
        await self._ledger.dead.wait()

    @property
    def process_ids(self) -> frozenset[int]:
        """The engine's own processes."""
        return self._channel.process_ids

    async def prefill(self, request: Request, entry: OutboxEntry) -> Prefilled:
        try:
            self._check(request)
            params = sampling_params(
                request,
                self._limits,
                max_tokens=1,
                num_earlier=len(request.prior_output),
                transfer={WRITE: transfer_params(entry, 0)},
            )
            self._ledger.open_write(entry)
        except BaseException:
            entry.end_write()
            raise
        context = [*request.prompt_token_ids, *request.prior_output]
        async with aclosing(self._outputs(request, context, params, (WRITE, entry.transfer_id))) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                if completion.token_ids:
                    finish = self._first_finish(request, finish_of(completion, request))
                    first = tokens_of(completion, request.sampling)[0]
                    table, created = prompt_logprobs_of(output, request.sampling), output.num_cache_creation_tokens or 0
                    return Prefilled(first, finish, output.num_cached_tokens or 0, table, created)
                finish_of(completion, request)
        raise EngineError(f"vLLM ended the prefill of request {request.request_id} without a token")

    def _first_finish(self, request: Request, finish: FinishReason | None) -> FinishReason | None:
        """Whether the first token ends the whole answer: the leg's own `length` says nothing, for it ends after one token anyway."""
        is_last = request.remaining_tokens <= 1 or request.num_context_tokens + 1 >= self._limits.max_model_len
        return FinishReason.STOP if finish is FinishReason.STOP else FinishReason.LENGTH if is_last else None

    def decode(self, request: Request, prefilled: Prefilled, entry: InboxEntry) -> Chunks:
        return _EntryChunks(self._decode(request, prefilled, entry), entry)

    async def _decode(self, request: Request, prefilled: Prefilled, entry: InboxEntry) -> AsyncGenerator[Chunk]:
        try:
            self._check(request)
            if request.remaining_tokens < 2:
                raise InvalidRequestError(
                    field="max_tokens", value=request.sampling.max_tokens, expected="room for a token after the first one"
                )
            params = sampling_params(
                request,
                self._limits,
                max_tokens=request.remaining_tokens - 1,
                num_earlier=len(request.prior_output) + 1,
                transfer={READ: transfer_params(entry, entry.first_token)},
            )
            self._ledger.open_read(entry)
        except BaseException:
            entry.end_read()
            raise
        prompt = [*request.prompt_token_ids, *request.prior_output, prefilled.first.token_id]
        async with aclosing(self._outputs(request, prompt, params, (READ, entry.transfer_id))) as outputs:
            async for output in outputs:
                yield chunk_of(output, request, is_continued=True)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk]:
        self._check(request)
        params = sampling_params(
            request, self._limits, max_tokens=request.remaining_tokens, num_earlier=len(request.prior_output), transfer=None
        )
        async with aclosing(self._outputs(request, [*request.prompt_token_ids, *request.prior_output], params, None)) as outputs:
            num_tokens = 0
            async for output in outputs:
                yield chunk_of(output, request, is_continued=num_tokens > 0)
                num_tokens += len(output.outputs[0].token_ids)

    async def cached_tokens(self, request: Request) -> int:
        block = self.layout.block_tokens
        context = [*request.prompt_token_ids, *request.prior_output]
        return await self._channel.cached_blocks(context, block, request.cache_salt or "") * block

    def state(self) -> EngineState:
        stats, config = self._ledger.stats, self._llm.vllm_config
        own = config.kv_transfer_config.get_from_extra_config
        total = int(config.cache_config.num_gpu_blocks or 0) * self.layout.block_tokens
        return EngineState(
            epoch="",
            waiting_requests=len(self._waiting_tokens),
            waiting_tokens=sum(self._waiting_tokens.values()),
            running_requests=self._num_running,
            free_kv_tokens=round(total * (1 - stats.kv_usage)),
            total_kv_tokens=total,
            step_s=stats.step_s,
            preemptions=stats.preemptions,
            max_step_tokens=int(config.scheduler_config.max_num_batched_tokens),
            mixed_step_tokens=own(MIXED_STEP_TOKENS, None) or 0,
            mixed_step_s=(own(MIXED_STEP_MS, None) or 0.0) / 1e3,
            max_running_requests=int(config.scheduler_config.max_num_seqs),
            steps=tuple(stats.steps),
            cache_changes=tuple(stats.cache_changes),
            cache_block_tokens=self.layout.block_tokens if config.cache_config.enable_prefix_caching else 0,
        )

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_pending()
        if len(self.process_ids) == 1:  # several end each other in order, with shared memory to clean up
            self._channel.dismiss()
        await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_TIMEOUT_S)
        self._channel.close()
        self._ledger.dead.set()
        self._ledger.on_ranks_lost()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Fails what is pending as soon as an engine process ends; vLLM itself notices later."""
        await self._ledger.dead.wait()
        if not self._is_closed:
            logger.error("engine %s died", self.name)
            self._fail_pending()

    def _fail_pending(self) -> None:
        """Every pending call raises EngineError now. vLLM's output task goes first: it would log its end as a fault."""
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        self._llm.output_processor.propagate_error(EngineDeadError())

    async def _warm_up(self) -> None:
        """First uses compile and allocate: spend them on a request of nobody, so that no client waits for them."""
        tokens = min(WARM_UP_TOKENS, self._limits.max_model_len - 2)
        sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=min(1, self._limits.max_logprobs))
        async with aclosing(self.generate(Request("warm-up", (0,) * tokens, sampling))) as chunks:
            async for _ in chunks:
                pass
        assert self._llm.output_handler is not None
        self._ledger.die_with(self._llm.output_handler)
        if not self.is_alive:
            raise EngineError(f"engine {self.name} did not live through its first request; its log says why")

    def _check(self, request: Request) -> None:
        if not self.is_alive:
            raise EngineError(f"engine {self.name} is dead")
        check(request, self._limits)

    async def _outputs(
        self, request: Request, prompt: list[int], params: SamplingParams, transfer: tuple[str, str] | None
    ) -> AsyncGenerator[RequestOutput]:
        """vLLM's outputs of one request, its errors as ours. Closing it aborts the request in the engine.

        `transfer`: kind and id of the entry that the ledger holds open for this request; the engine ends it, except where it never saw it.
        """
        queue = await self._add(request, prompt, params, transfer)
        key = id(queue)
        self._waiting_tokens[key] = 1 if transfer is not None and transfer[0] == READ else len(prompt)
        is_finished = False
        try:
            while not is_finished:
                output = queue.get_nowait() or await queue.get()
                if self._waiting_tokens.pop(key, None) is not None:
                    self._num_running += 1
                is_finished = output.finished
                if is_finished and transfer is not None and output.outputs[0].finish_reason == "error":
                    self._ledger.end(*transfer)  # it never ran, or its load failed: what a rank still reads, nobody uses
                yield output
        except Exception as error:  # what vLLM's output task dies of reaches every reader as it is
            if self.is_alive and not isinstance(error, EngineDeadError):
                raise
            is_finished = True
            raise EngineError(f"engine {self.name} died") from error
        finally:
            if self._waiting_tokens.pop(key, None) is None:
                self._num_running -= 1
            if not is_finished:
                self._spawn(self._abort(queue.request_id))
            queue.close()

    async def _add(self, request: Request, prompt: list[int], params: SamplingParams, transfer: tuple[str, str] | None) -> Any:
        """Hands the request to vLLM; cancelled half-way, it is aborted once it is in. Raises InvalidRequestError or EngineError."""
        priority = -request.priority if self._llm.vllm_config.scheduler_config.policy == "priority" else 0
        reasoning = reasoning_arguments(request.sampling.structure)
        tokens = tokens_input(prompt, cache_salt=request.cache_salt or None)
        is_traced = request.traceparent and self._llm.observability_config.otlp_traces_endpoint is not None
        headers = {"traceparent": request.traceparent, "tracestate": request.tracestate} if is_traced else None
        add = self._llm.add_request(request.request_id, tokens, params, priority=priority, trace_headers=headers, **reasoning)
        adding = self._spawn(add)
        try:
            return await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(lambda _: self._abort_added(adding, transfer))
            raise
        except EngineDeadError as error:
            raise EngineError(f"engine {self.name} died") from error
        except (VLLMClientError, ValueError) as error:
            self._end(transfer)
            raise refused(request.sampling, error) from error
        except BaseException:
            self._end(transfer)
            raise

    def _abort_added(self, adding: asyncio.Task[Any], transfer: tuple[str, str] | None) -> None:
        if adding.cancelled() or adding.exception() is not None:
            self._end(transfer)
        else:
            self._spawn(self._abort(adding.result().request_id))

    async def _abort(self, vllm_request_id: str) -> None:
        """Ends a request inside the engine; a dead engine has none."""
        with contextlib.suppress(EngineDeadError):
            await self._llm.abort(vllm_request_id, internal=True)

    def _end(self, transfer: tuple[str, str] | None) -> None:
        if transfer is not None:
            self._ledger.end(*transfer)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this engine: kept until it is done."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _EntryChunks:
    """The chunks of a decode. Closing them before the first one was asked for ends the entry too, which a generator's body would not."""

    def __init__(self, chunks: AsyncGenerator[Chunk], entry: InboxEntry) -> None:
        self._chunks = chunks
        self._entry = entry
        self._is_started = False

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        self._is_started = True
        return await anext(self._chunks)

    async def aclose(self) -> None:
        if not self._is_started:
            self._entry.end_read()
        await self._chunks.aclose()


def _limits(llm: AsyncLLM) -> Limits:
    config = llm.model_config
    eos = (config.try_get_generation_config() or {}).get("eos_token_id") or getattr(config.hf_config, "eos_token_id", None)
    ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    return Limits(
        max_model_len=int(config.max_model_len),
        vocab_size=int(config.get_vocab_size()),
        eos_token_ids=ids,
        has_v1_runner=not llm.vllm_config.use_v2_model_runner,
        max_logprobs=int(config.max_logprobs),
    )
