"""vLLM's request in our words, and our chunks in vLLM's: what the engine client (openai_client.py) translates.

What cannot pass between two workers is refused with a sentence; nothing is dropped.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinish
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from disagg.types import Chunk, FinishReason, PromptLogprobs, Sampling, Structure, StructureKind, Token

# Parameters that only one engine that runs the whole request could honour, and why.
_UNSERVED = {
    "thinking_token_budget": "thinking is counted over the whole answer, which two workers share",
    "trace_decode_token_ids": "replaying a trace is for one engine alone",
    "prompt_logprob_token_ids": "scores of chosen tokens per prompt position are not passed between workers",
}
_FINISH = {FinishReason.STOP: VllmFinish.STOP, FinishReason.LENGTH: VllmFinish.LENGTH}


def check_served(request: EngineCoreRequest, given: SamplingParams) -> None:
    """Refuse what does not pass between workers. Raises VLLMValidationError."""
    params = request.sampling_params
    if params is None:
        raise VLLMValidationError("only generation is served here; expected a completion or chat request")
    if request.mm_features or request.prompt_embeds is not None:
        raise VLLMValidationError("images, audio and prompt embeddings are not served by separate workers; expected text or token ids")
    if request.lora_request is not None:
        raise VLLMValidationError("LoRA adapters are not served by separate workers; expected the base model", parameter="model")
    for name, reason in _UNSERVED.items():
        if getattr(params, name) is not None:
            raise VLLMValidationError(f"{name} is not served here: {reason}", parameter=name, value=getattr(params, name))
    if given.watermarking:
        raise VLLMValidationError("watermarking is not served here; expected no value", parameter="watermarking", value=given.watermarking)
    for name in params.extra_args or {}:
        raise VLLMValidationError(
            f"{name} is not passed on to the workers; expected only parameters that vLLM itself defines", parameter="vllm_xargs", value=name
        )
    if request.data_parallel_rank is not None:
        raise VLLMValidationError("a data-parallel rank cannot be chosen here: the router chooses workers", parameter="data_parallel_rank")


def to_sampling(request: EngineCoreRequest) -> Sampling:
    """What the workers are asked. Text (stop strings, detokenizing) stays with vLLM's output processor, here at the gateway."""
    p = request.sampling_params
    return Sampling(
        max_tokens=p.max_tokens,
        min_tokens=p.min_tokens,
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=max(0, p.top_k),
        min_p=p.min_p,
        seed=p.seed,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        repetition_penalty=p.repetition_penalty,
        stop_token_ids=tuple(p.stop_token_ids or ()),
        ignore_eos=p.ignore_eos,
        logprobs=p.logprobs,
        logprob_token_ids=tuple(p.logprob_token_ids or ()),
        prompt_logprobs=p.prompt_logprobs,
        logit_bias=tuple(sorted((p.logit_bias or {}).items())),
        bad_words=tuple([tuple(word) for word in p.bad_words_token_ids or ()]),
        allowed_token_ids=tuple(p.allowed_token_ids or ()),
        structure=_structure(p.structured_outputs, request) if p.structured_outputs is not None else None,
    )


def _structure(given: StructuredOutputsParams, request: EngineCoreRequest) -> Structure | None:
    kind = next((kind for kind in StructureKind if getattr(given, kind) is not None), None)
    if kind is None:
        return None
    value: Any = getattr(given, kind)
    spec = "" if kind is StructureKind.JSON_OBJECT else value if isinstance(value, str) else json.dumps(value)
    return Structure(
        kind=kind,
        spec=spec,
        any_whitespace=not given.disable_any_whitespace,
        additional_properties=not given.disable_additional_properties,
        whitespace_pattern=given.whitespace_pattern,
        reasoning_ended=request.reasoning_ended,
        reasoning_json=json.dumps(request.reasoning_parser_kwargs) if request.reasoning_parser_kwargs else "",
    )


class OutputTranslator:
    """One request's chunks as what vLLM's output processor takes from an engine."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self._request_id = request.request_id
        self._params: SamplingParams = request.sampling_params
        self._num_prompt_tokens = len(request.prompt_token_ids or ())
        self._is_first = True
        self._output: list[int] = []
        self._repeats = False

    def translate(self, chunk: Chunk, cached_tokens: int, newly_cached_tokens: int) -> EngineCoreOutput:
        """Counts of prompt tokens that the first worker had in its prefix cache, and has since."""
        num_kept = self._until_repetition(chunk.tokens)
        tokens = chunk.tokens[:num_kept]
        finish, stop_reason = self._finish(chunk)
        if num_kept < len(chunk.tokens) or (self._repeats and finish is None):
            finish, stop_reason = VllmFinish.REPETITION, "repetition_detected"
        output = EngineCoreOutput(
            request_id=self._request_id,
            new_token_ids=[token.token_id for token in tokens],
            new_logprobs=_logprobs(tokens) if self._params.num_logprobs is not None and tokens else None,
            new_prompt_logprobs_tensors=_prompt_logprobs(chunk.prompt_logprobs),
            finish_reason=finish,
            stop_reason=stop_reason,
            prefill_stats=self._prefill_stats(cached_tokens, newly_cached_tokens) if self._is_first else None,
        )
        self._is_first = False
        return output

    def _finish(self, chunk: Chunk) -> tuple[VllmFinish | None, int | str | None]:
        """vLLM's reasons: an end-of-sequence token has none of its own, a stop token is its own reason."""
        params = self._params
        if chunk.finish is None:
            return None, None
        last = chunk.tokens[-1].token_id if chunk.tokens else None
        is_stop_token = chunk.finish is FinishReason.STOP and last != params.eos_token_id and last in (params.stop_token_ids or ())
        return _FINISH[chunk.finish], last if is_stop_token else None

    def _until_repetition(self, tokens: tuple[Token, ...]) -> int:
        """How many of the new tokens belong to the answer. (vLLM's scheduler, which looks for repetition, sees only one worker's part.)"""
        params = self._params
        if params.repetition_detection is None:
            return len(tokens)
        for index, token in enumerate(tokens):
            self._output.append(token.token_id)
            if len(self._output) >= params.min_tokens and check_sequence_repetition(self._output, params.repetition_detection):
                self._repeats = True
                return index + 1
        return len(tokens)

    def _prefill_stats(self, cached_tokens: int, newly_cached_tokens: int) -> PrefillStats:
        stats = PrefillStats()
        stats.set(self._num_prompt_tokens, min(cached_tokens, self._num_prompt_tokens), 0)
        stats.finalize(cached_tokens + newly_cached_tokens)
        return stats


def _logprobs(tokens: tuple[Token, ...]) -> LogprobsLists:
    """Rows of [the token itself, its alternatives]."""
    ids = np.array([[t.token_id, *(top.token_id for top in t.top)] for t in tokens], dtype=np.int32)
    logprobs = np.array([[t.logprob, *(top.logprob for top in t.top)] for t in tokens], dtype=np.float32)
    return LogprobsLists(ids, logprobs, np.array([t.rank for t in tokens], dtype=np.int32))


def _prompt_logprobs(table: PromptLogprobs | None) -> LogprobsTensors | None:
    if table is None:
        return None
    # vLLM only asks for shapes and lists, which arrays give as tensors do.
    shape = (-1, table.width) if table.width else (0, 1)
    ids = np.array(table.token_ids, dtype=np.int32).reshape(shape)
    logprobs = np.array(table.logprobs, dtype=np.float32).reshape(shape)
    return LogprobsTensors(ids, logprobs, np.array(table.ranks, dtype=np.int32))
