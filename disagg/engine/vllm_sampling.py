"""One request in vLLM's terms, leg by leg, and vLLM's outputs in ours.

A leg sees only its part of the answer, so what counts over the whole answer is adapted: max_tokens, min_tokens, penalties on output
tokens, the position in a seeded random sequence. Text does not exist here: stop strings are applied where text is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from disagg.engine.vllm_patches import SKIP_DRAWS
from disagg.errors import EngineError, InvalidRequestError
from disagg.types import Chunk, FinishReason, Request, Sampling, Token, TopLogprob

PENALTIES = "disagg_penalties"  # as in vllm_penalties, which needs torch


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can run: context length and vocabulary in tokens, the model's end tokens, and whether its runner is V1."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_v1_runner: bool
    max_logprobs: int


def check(request: Request, limits: Limits) -> None:
    """Raises InvalidRequestError for what this engine cannot run; a front door has usually checked it already."""
    sampling = request.sampling
    if not request.prompt_token_ids:
        raise InvalidRequestError(field="prompt", value="", expected="at least one token")
    context = (*request.prompt_token_ids, *request.prior_output)
    low, top = min(context), max(context)
    if low < 0 or top >= limits.vocab_size:
        raise InvalidRequestError(
            field="prompt_token_ids", value=low if low < 0 else top, expected=f"token ids from 0 to {limits.vocab_size - 1}"
        )
    if sampling.max_tokens < 1 or request.remaining_tokens < 1:
        raise InvalidRequestError(field="max_tokens", value=sampling.max_tokens, expected="at least one token still to produce")
    room = limits.max_model_len - request.num_prompt_tokens
    if room < 1:
        raise InvalidRequestError(
            field="prompt", value=f"{request.num_prompt_tokens} tokens", expected=f"at most {limits.max_model_len - 1} tokens"
        )
    if sampling.max_tokens > room:
        raise InvalidRequestError(
            field="max_tokens",
            value=sampling.max_tokens,
            expected=f"at most {room}: the context of {limits.max_model_len} tokens less {request.num_prompt_tokens} of the prompt",
        )
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= limits.max_logprobs:
        raise InvalidRequestError(field="logprobs", value=sampling.logprobs, expected=f"0 to {limits.max_logprobs} alternatives")


def sampling_params(
    request: Request, limits: Limits, *, max_tokens: int, num_earlier: int, transfer: dict[str, list[Any]] | None
) -> SamplingParams:
    """vLLM's parameters of one leg that may produce `max_tokens`, after `num_earlier` output tokens that lie in its prompt.

    `transfer`: what the connector is told. Raises InvalidRequestError for values that vLLM refuses.
    """
    s = request.sampling
    extra: dict[str, Any] = {}
    if transfer is not None:
        extra["kv_transfer_params"] = transfer
    if s.seed is not None and num_earlier and limits.has_v1_runner:
        extra[SKIP_DRAWS] = num_earlier
    presence, frequency, repetition = s.presence_penalty, s.frequency_penalty, s.repetition_penalty
    if num_earlier and (presence or frequency):
        if not limits.has_v1_runner:
            raise InvalidRequestError(
                "presence and frequency penalties are not carried over between workers by vLLM's V2 model runner yet; "
                "serve this model colocated, or set VLLM_USE_V2_MODEL_RUNNER=0",
                field="presence_penalty" if presence else "frequency_penalty",
                value=presence or frequency,
                expected="0",
            )
        extra[PENALTIES] = [presence, frequency, repetition, num_earlier]
        presence, frequency, repetition = 0.0, 0.0, 1.0
    stop_ids = list(dict.fromkeys([*s.stop_token_ids, *(() if s.ignore_eos else limits.eos_token_ids)]))
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, max(0, s.min_tokens - num_earlier)),
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
            seed=s.seed,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            stop_token_ids=stop_ids,
            ignore_eos=s.ignore_eos,
            logprobs=s.logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra or None,
        )
    except ValueError as error:
        raise _refused(s, error) from error


def _refused(sampling: Sampling, error: ValueError) -> InvalidRequestError:
    """vLLM's refusal, with the field that its message names."""
    named = next((name for name in Sampling.__dataclass_fields__ if name in str(error)), "sampling")
    return InvalidRequestError(str(error), field=named, value=getattr(sampling, named, None), expected="a value that vLLM accepts")


def tokens_of(output: CompletionOutput, num_top: int | None) -> tuple[Token, ...]:
    """The new tokens of one delta; with logprobs and `num_top` alternatives each when the request asked for them."""
    ids = output.token_ids
    if num_top is None or output.logprobs is None:
        return tuple(Token(token_id) for token_id in ids)
    tokens = []
    for token_id, entries in zip(ids, output.logprobs, strict=True):
        # vLLM adds the sampled token's own entry to the top ones; where it is not one of them its rank sorts it last.
        ranked = sorted(entries.items(), key=lambda item: item[1].rank)
        top = tuple(TopLogprob(i, entry.logprob) for i, entry in ranked[:num_top])
        tokens.append(Token(token_id, entries[token_id].logprob, top))
    return tuple(tokens)


def finish_of(output: CompletionOutput, request_id: str) -> FinishReason | None:
    """Why this leg ended, or None while it goes on. Raises EngineError when vLLM gave the request up."""
    if output.finish_reason is None:
        return None
    if output.finish_reason in ("stop", "length"):
        return FinishReason(output.finish_reason)
    raise EngineError(f"vLLM ended request {request_id} with {output.finish_reason!r}")


def chunk_of(output: CompletionOutput, request: Request) -> Chunk:
    """One delta as a chunk."""
    return Chunk(tokens_of(output, request.sampling.logprobs), finish_of(output, request.request_id))
