"""A structured answer that goes on in another engine: its grammar first takes the tokens that were sampled elsewhere.

vLLM compiles a request's grammar in a thread when the request comes in, and advances it by *output* tokens only. In a request that
continues an answer (decode after prefill, fail-over) the earlier output lies in the prompt; `extra_args[EARLIER_TOKENS]` says how much.
Applied in the engine's process, beside the scheduler.
"""

from __future__ import annotations

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
