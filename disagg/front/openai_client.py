"""vLLM's `EngineClient` over our coordinator: vLLM's API server on top takes the two pools of workers for one engine.

    vLLM's handler -> generate() -> input processor (vLLM's: checks, stop ids, bad words, grammar backend)
                                 -> one run per answer (n of them), each with a task that feeds
                                    output processor (vLLM's: text, stop strings, logprobs, usage) -> the handler

All text is made by vLLM's own code, so answers read as those of one vLLM server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from copy import copy
from typing import Any, NoReturn, Protocol

from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from disagg.config import SloClass
from disagg.errors import DisaggError, EngineError, RejectedError
from disagg.front.grpc_door import Coordinator, Pools
from disagg.front.openai_errors import retry_after_s, to_vllm
from disagg.front.openai_sampling import OutputTranslator, check_served, to_sampling
from disagg.front.terms import CURRENT, Terms
from disagg.front.validate import MAX_PRIORITY
from disagg.tracing import trace_context
from disagg.types import Phase, Request

logger = logging.getLogger(__name__)

TASKS = ("generate",)
MAX_N = 128


class OpenCoordinator(Coordinator, Protocol):
    """A coordinator that also says whether it would take a request now."""

    def refusal(self, num_requests: int, priority: int) -> RejectedError | None:
        """Why so many further requests of this priority would be refused, whatever they are; None when they may come."""
        ...


class GatewayClient(EngineClient):  # type: ignore[misc]
    """What vLLM's API server asks. Made and used on the gateway's event loop."""

    def __init__(self, vllm_config: VllmConfig, coordinator: OpenCoordinator, pools: Pools, default_class: SloClass) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._output_processor = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self._coordinator = coordinator
        self._pools = pools
        self._default_class = default_class
        self._num_running = 0

    @property
    def num_running(self) -> int:
        """Requests being answered now; each of n answers counts."""
        return self._num_running

    # ---- requests

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse before a response is started, when nothing more would be taken."""
        terms = CURRENT.get()
        refusal = self._coordinator.refusal(n, self._priority(terms))
        if refusal is not None:
            raise self._translated(refusal, terms)

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer's outputs as they come. Closing the generator, or cancelling who iterates it, ends the request on every worker."""
        # Here and not in the generator's body: the terms are those of whoever calls.
        terms = CURRENT.get()
        core = self._core_request(
            prompt,
            sampling_params,
            request_id,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        core.reasoning_ended = reasoning_ended
        core.reasoning_parser_kwargs = reasoning_parser_kwargs
        if terms is not None:
            terms.is_understood = True
        text = prompt_text if prompt_text is not None else prompt.get("prompt")
        return self._generate(core, text, terms)

    def _core_request(self, prompt: Any, params: SamplingParams, request_id: str, **arguments: Any) -> EngineCoreRequest:
        """The checked request, with parameters of its own. Raises VLLMValidationError."""
        if not isinstance(prompt, dict) or "type" not in prompt:
            raise VLLMValidationError("only rendered prompts are served here; expected text or token ids")
        if params.n > MAX_N:
            raise VLLMValidationError(f"n must be at most {MAX_N}, got {params.n}", parameter="n", value=params.n)
        if abs(priority := arguments["priority"]) > MAX_PRIORITY:
            expected = f"from {-MAX_PRIORITY} to {MAX_PRIORITY}, lower goes first"
            raise VLLMValidationError(f"priority must be {expected}, got {priority}", parameter="priority", value=priority)
        core = self.input_processor.process_inputs(request_id, prompt, params, supported_tasks=TASKS, **arguments)
        check_served(core, params)
        self.input_processor.assign_request_id(core)
        return core

    async def _generate(self, core: EngineCoreRequest, text: str | None, terms: Terms | None) -> AsyncGenerator[RequestOutput, None]:
        queue = RequestOutputCollector(core.params.output_kind, core.request_id)
        answers = self._register(core, text, queue)
        arrival_s = time.monotonic()
        tasks = [asyncio.create_task(self._run(answer, queue, terms, arrival_s)) for answer in answers]
        try:
            finished = False
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                yield output
        finally:
            for task in tasks:
                task.cancel()
            self._output_processor.abort_requests([core.request_id], internal=True)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _register(self, core: EngineCoreRequest, text: str | None, queue: RequestOutputCollector) -> list[EngineCoreRequest]:
        """One request per answer, known to the output processor. Seeds are derived as vLLM does for n answers."""
        if core.params.n == 1:
            self._output_processor.add_request(core, text, None, 0, queue)
            return [core]
        parent = ParentRequest(core)
        children = []
        for index in range(core.params.n):
            child = copy(core)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self._output_processor.add_request(child, text, parent, index, queue)
            children.append(child)
        return children

    async def _run(self, core: EngineCoreRequest, queue: RequestOutputCollector, terms: Terms | None, arrival_s: float) -> None:
        """Feed one answer's chunks to the output processor. Its errors reach whoever reads the queue."""
        self._num_running += 1
        try:
            await self._feed(core, self._request(core, terms, arrival_s))
        except DisaggError as error:
            logger.info("request %s ended: %s: %s", core.external_req_id, type(error).__name__, error.message)
            queue.put(self._translated(error, terms))
        except Exception as error:
            logger.error("request %s: unexpected error", core.external_req_id, exc_info=error)
            queue.put(to_vllm(EngineError(f"request {core.external_req_id} failed by a fault of the gateway; its log has the details")))
        finally:
            self._num_running -= 1

    async def _feed(self, core: EngineCoreRequest, request: Request) -> None:
        run = self._coordinator.submit(request)
        translator = OutputTranslator(core)
        async with aclosing(run.chunks()) as chunks:
            async for chunk in chunks:
                output = translator.translate(chunk, run.cached_tokens, run.newly_cached_tokens)
                processed = self._output_processor.process_outputs([output])
                if output.finished or processed.reqs_to_abort:
                    # A stop string ends an answer that its workers would go on with: whole, and not cancelled.
                    run.end(Phase.FINISHED)
                    return
        raise EngineError(f"the answer to request {core.external_req_id} ended without a finish reason")

    def _request(self, core: EngineCoreRequest, terms: Terms | None, arrival_s: float) -> Request:
        slo_class = terms.slo_class if terms is not None else self._default_class
        return Request(
            request_id=core.request_id,
            prompt_token_ids=tuple(core.prompt_token_ids or ()),
            sampling=to_sampling(core),
            slo_class=slo_class.name,
            priority=self._priority(terms, core.priority),
            arrival_s=arrival_s,
            deadline_s=terms.deadline_s if terms is not None else None,
            cache_salt=core.cache_salt or "",
            **trace_context(core.trace_headers or {}),
        )

    def _priority(self, terms: Terms | None, given: int = 0) -> int:
        """The header's, else the body's (vLLM's field: lower goes first), else the class's. Higher goes first."""
        if terms is not None and terms.priority is not None:
            return terms.priority
        return -given or (terms.slo_class if terms is not None else self._default_class).priority

    @staticmethod
    def _translated(error: DisaggError, terms: Terms | None) -> Exception:
        if terms is not None:
            terms.retry_after_s = retry_after_s(error)
        return to_vllm(error)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Requests end with the generator that reads them; there is nothing else to abort."""

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return TASKS

    # ---- health

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        """Never: lost workers are replaced, and what cannot be served meanwhile is refused request by request."""
        return False

    @property
    def dead_error(self) -> BaseException:
        error: BaseException = EngineDeadError()
        return error

    async def check_health(self) -> None:
        """Raise EngineDeadError while a pool has no live worker."""
        if self._pools.view(time.monotonic()).missing_role is not None:
            raise EngineDeadError()

    async def is_tracing_enabled(self) -> bool:
        return True

    async def do_log_stats(self) -> None:
        """The gateway's metrics are its own."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End vLLM's renderer threads; the coordinator and its workers have owners of their own."""
        self.renderer.shutdown()

    # ---- what belongs to one engine's owner, not to a gateway's client

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise VLLMValidationError("pooling (embeddings, scores) is not served here; expected a completion or chat request")

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is held for a request before the coordinator has it."""

    async def start_profile(self, *args: Any, **kwargs: Any) -> NoReturn:
        _not_here("profiling")

    async def stop_profile(self) -> NoReturn:
        _not_here("profiling")

    async def reset_mm_cache(self) -> None:
        """There is no multi-modal cache."""

    async def reset_encoder_cache(self) -> None:
        """There is no encoder cache."""

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        _not_here("resetting the prefix cache")

    async def sleep(self, *args: Any, **kwargs: Any) -> NoReturn:
        _not_here("sleeping")

    async def release_kv_cache_memory(self) -> NoReturn:
        _not_here("releasing KV memory")

    async def wake_up(self, *args: Any, **kwargs: Any) -> NoReturn:
        _not_here("waking up")

    async def is_sleeping(self) -> bool:
        return False

    async def add_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        _not_here("loading a LoRA adapter")

    async def pause_generation(self, *args: Any, **kwargs: Any) -> NoReturn:
        _not_here("pausing")

    async def resume_generation(self) -> NoReturn:
        _not_here("resuming")

    async def is_paused(self) -> bool:
        return False


def _not_here(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is for one engine's owner; a gateway before many workers does not offer it")
