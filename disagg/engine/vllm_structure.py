"""A structured answer that goes on in another engine, with two things mended in vLLM's manager of grammars, in the engine's process.

Its grammar first takes the tokens that were sampled elsewhere. vLLM compiles a request's grammar in a thread when the request comes in, and
advances it by *output* tokens only. In a request that continues an answer (decode after prefill, fail-over) the earlier output lies in the
prompt; `extra_args[EARLIER_TOKENS]` says how much.

And each request has the backend that took it. By vLLM's default (`auto`) a form goes to the first of xgrammar, guidance and outlines that
takes it, but an engine then compiles every form with the backend of its first one: what was valid would depend on what came before, and
two engines that share an answer might differ.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from disagg.engine.vllm_sampling import EARLIER_TOKENS

if TYPE_CHECKING:
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


def patch_structured_output() -> None:
    """Mends the manager's class in this process. Idempotent."""
    from vllm.v1.structured_output import StructuredOutputManager

    if getattr(StructuredOutputManager, "_disagg_patched", False):
        return
    StructuredOutputManager._disagg_patched = True
    StructuredOutputManager._create_grammar = _with_earlier_tokens(StructuredOutputManager._create_grammar)
    StructuredOutputManager.grammar_init = _with_own_backend(StructuredOutputManager.grammar_init)


def _with_own_backend(grammar_init: Any) -> Any:
    """One manager for each backend: the engine's own for that of its first form, which also allocates the masks, and copies of it.

    Copies share threads and tokenizer. Called in one thread. Where another backend's masks have another width, they cannot share a batch's:
    such a form goes to the first backend, as in vLLM.
    """

    @functools.wraps(grammar_init)
    def wrapped(self: StructuredOutputManager, request: Request) -> None:
        if request.structured_output_request is None:
            return
        managers: dict[str, StructuredOutputManager] = self.__dict__.setdefault("_disagg_managers", {})
        name = request.sampling_params.structured_outputs._backend
        if name in managers:
            grammar_init(managers[name], request)
            return
        own = self
        if self.backend is not None:
            own = copy.copy(self)
            own.backend = None
        grammar_init(own, request)
        if _mask_width(own) != _mask_width(self):
            own = self
            grammar_init(self, request)
        managers[name] = own

    return wrapped


def _mask_width(manager: StructuredOutputManager) -> int:
    return int(manager.backend.allocate_token_bitmask(1).shape[1])


def _with_earlier_tokens(create_grammar: Any) -> Any:
    @functools.wraps(create_grammar)
    def wrapped(self: StructuredOutputManager, request: Request) -> StructuredOutputGrammar:
        grammar = create_grammar(self, request)
        num_earlier = (request.sampling_params.extra_args or {}).get(EARLIER_TOKENS, 0)
        if num_earlier:
            _advance(self, request, grammar, num_earlier)
        return grammar

    return wrapped


def _advance(manager: StructuredOutputManager, request: Request, grammar: StructuredOutputGrammar, num_earlier: int) -> None:
    """Take the earlier tokens, from where the model's reasoning ended. ValueError when they do not fit: vLLM then fails this request."""
    prompt = list(request.prompt_token_ids or ())
    earlier = prompt[len(prompt) - num_earlier :]
    structured = request.structured_output_request
    reasoner = manager._get_reasoner(request)
    start = 0
    if reasoner is not None and not manager.enable_in_reasoning:
        if structured.reasoning_ended is None:
            structured.reasoning_ended = bool(reasoner.is_reasoning_end(prompt[: len(prompt) - num_earlier]))
        if not structured.reasoning_ended:
            start = manager._get_constraint_bounds(request, earlier, spec_tokens_committed=True).grammar_start
            if start > num_earlier:
                return
            structured.reasoning_ended = True
    if earlier[start:] and not grammar.accept_tokens(request.request_id, earlier[start:]):
        raise ValueError(f"the grammar of request {request.request_id} does not take the {num_earlier} tokens sampled before")
