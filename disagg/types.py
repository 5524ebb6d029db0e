"""The vocabulary of disagg: values that every layer shares. Standard library only, frozen, no behaviour beyond derived facts.

Units: times are seconds (`_s`), sizes are bytes (`num_bytes`) or tokens (`_tokens`). Instants come from one monotonic clock
per process (`time.monotonic()`); only durations may cross a wire.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache


class Mode(StrEnum):
    """How requests are routed. `disagg` picks from prefill x decode workers, `colocated` uses (w, w), `adaptive` picks from all pairs."""

    DISAGG = "disagg"
    COLOCATED = "colocated"
    ADAPTIVE = "adaptive"


class Role(StrEnum):
    """What a worker's pool is for. A colocated worker runs both phases."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Phase(StrEnum):
    """Where a request is. The last four are ends: each request reaches exactly one of them, once."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    WAITING = "waiting"
    DECODING = "decoding"
    FINISHED = "finished"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"


class FinishReason(StrEnum):
    """Why an answer is whole. `stop`: end-of-sequence, a stop token or a stop string; `length`: max_tokens reached."""

    STOP = "stop"
    LENGTH = "length"


class StructureKind(StrEnum):
    """What kind of form a structured answer follows; vLLM's names."""

    JSON = "json"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that an answer must follow.

    `spec`: a JSON schema, a regular expression, a JSON list of choices, a grammar (EBNF or Lark), or a structural tag, as text; empty for
    `json_object`. `reasoning_ended`: False when the form begins only after the model's reasoning, True when that is over; None leaves
    it to the engine. `reasoning_json`: arguments of the engine's reasoning parser as a JSON object, empty for none.
    """

    kind: StructureKind
    spec: str = ""
    any_whitespace: bool = True
    additional_properties: bool = True
    whitespace_pattern: str | None = None
    reasoning_ended: bool | None = None
    reasoning_json: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request, with vLLM's names, meanings and neutral values.

    `logprobs`: None for none, else the number of top alternatives wanted beside the sampled token's own; -1 for the whole vocabulary.
    `logprob_token_ids`: alternatives wanted instead of the top ones. `prompt_logprobs`: as `logprobs`, for the prompt's tokens.
    `bad_words`: token sequences that must not come up. `allowed_token_ids`: empty for all. `logit_bias`: (token id, bias) pairs.
    `stop` strings, and the last two fields, are applied where text is made (the front door), never inside an engine.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    structure: Structure | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def num_top(self) -> int | None:
        """How many alternatives each token comes with: -1 for all, None when no logprobs are wanted."""
        if self.logprobs is not None:
            return self.logprobs
        return len(self.logprob_token_ids) if self.logprob_token_ids else None


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the serving layers see it: token ids in, token ids out.

    `prior_output`: tokens that the client already has from an earlier attempt (empty at first). An engine continues
    after prompt + prior_output, and counts them against `sampling.max_tokens` and `min_tokens`.
    `arrival_s`: monotonic instant at the gateway. `deadline_s`: monotonic instant after which nobody wants the answer.
    `cache_salt`: prefix caches share blocks only among requests of one salt. `traceparent` and
    `tracestate`: W3C trace context, passed on; empty for none.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    slo_class: str = "default"
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    prior_output: tuple[int, ...] = ()
    cache_salt: str = ""
    traceparent: str = ""
    tracestate: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the client's prompt, in tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_context_tokens(self) -> int:
        """Tokens that must be in the KV cache before the next one is sampled: prompt plus prior output."""
        return len(self.prompt_token_ids) + len(self.prior_output)

    @property
    def remaining_tokens(self) -> int:
        """Output tokens that may still be produced."""
        return self.sampling.max_tokens - len(self.prior_output)


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at a position: token id and natural-log probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. `logprob`, `top` and `rank` (1 for the likeliest, 0 unknown) only where the request asked for logprobs."""

    token_id: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()
    rank: int = 0


@lru_cache(maxsize=1 << 16)
def plain_token(token_id: int) -> Token:
    """A token without logprobs: a value, so one object serves all answers."""
    return Token(token_id)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of a prompt's tokens but the first, as one flat table of rows.

    Row i is of prompt token i + 1: that token itself, then the `width - 1` alternatives, the likeliest first. `token_ids` and `logprobs`
    hold rows x width values; `ranks` the prompt tokens' own ranks, one a row.
    """

    width: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one engine step gave one request: usually one token. `finish` is set on the last chunk only.

    The first chunk also has `prompt_logprobs` where asked for, and on a colocated route the numbers of `cached_tokens` and
    `newly_cached_tokens` (see Prefilled).
    """

    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None
    cached_tokens: int = 0
    newly_cached_tokens: int = 0


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Consecutive chunks of one answer, from the first that is not handed out yet, as one."""
    first = chunks[0]
    if len(chunks) == 1:
        return first
    tokens = tuple([token for chunk in chunks for token in chunk.tokens])
    return Chunk(tokens, chunks[-1].finish, first.prompt_logprobs, first.cached_tokens, first.newly_cached_tokens)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prefill leg's result: the first sampled token, and `finish` when that token already ends the request.

    `cached_tokens`: prompt tokens that the prefill worker's prefix cache held; `newly_cached_tokens`: that it holds since.
    """

    first: Token
    finish: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    newly_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KvAddress:
    """Where a worker's outbox can be read, one way per carrier, and which process life (epoch) owns it.

    `host_id` is equal exactly for workers that can map each other's memory (same kernel boot and network namespace).
    `endpoints` maps a carrier's name to its address string, for example {"grpc": "10.0.0.1:7001", "shm": "@disagg-..."}.
    """

    worker: str
    epoch: str
    host_id: str
    endpoints: tuple[tuple[str, str], ...]

    def endpoint(self, carrier: str) -> str | None:
        """The address for `carrier`, or None when the worker does not offer it."""
        return dict(self.endpoints).get(carrier)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One movement of a prompt's KV from a prefill worker's outbox to a decode worker's inbox.

    `transfer_id` is random (128 bit, hex): peers meet on it, never on an engine's request id. `attempt` counts the request's
    routes from 0. `source` names the outbox. `num_tokens` is the number of context tokens whose KV is staged.
    `token_hash` is `hash_tokens(context token ids)`; a reader refuses KV of other tokens. `form` is how the KV lies in the boxes and on the
    wire, as the two layouts agreed (kv/form.py). The reader has the first `first_token` tokens already: only the others move.
    `traceparent`, `tracestate`: as in the request.
    """

    transfer_id: str
    attempt: int
    source: KvAddress
    num_tokens: int
    token_hash: str
    form: str = "blocks"
    first_token: int = 0
    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one engine step did and how long it took; the router learns each worker's speed from these.

    `number` counts an engine's steps. `seconds`: from the step's start to its end, without idling. `prefill_tokens`: prompt tokens
    computed, and `prefill_pairs` the (query, key) pairs of their attention, n x (cached + (n + 1) / 2) for n tokens after `cached` ones.
    `decode_requests`: requests that decoded one token, and `context_tokens` the sum of their contexts.
    """

    number: int
    seconds: float
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    decode_requests: int = 0
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KvCounters:
    """What one worker's boxes and carriers have done since its process started.

    `sent_*`: frames handed to peers, and their payload. `received_*`: frames that arrived and were verified. `completed`, `failed`,
    `released`: pulls by their end; `corrupt` of the failed ones met a wrong digest, length or order. `transfer_s`: seconds from the
    source's first message to the last block verified, summed over completed pulls. `fenced`: entries of either box whose lease ran out.
    `refused`: pulls that this worker's outbox did not serve. `late`: calls and messages after a transfer's end, or said twice.
    `garbage`: connections to the KV port that did not speak as a peer does; `turned_away`: those that were one too many.
    """

    sent_frames: int = 0
    sent_bytes: int = 0
    received_frames: int = 0
    received_bytes: int = 0
    completed: int = 0
    failed: int = 0
    released: int = 0
    corrupt: int = 0
    transfer_s: float = 0.0
    fenced: int = 0
    refused: int = 0
    late: int = 0
    garbage: int = 0
    turned_away: int = 0


@dataclass(frozen=True, slots=True)
class CacheChange:
    """What one engine step changed in the engine's prefix cache, as identities of blocks (disagg/prefix.py).

    `number` counts an engine's changes. `stored` came, then `removed` went; with `is_cleared` everything that was there before went first.
    """

    number: int
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_cleared: bool = False


@dataclass(frozen=True, slots=True)
class EngineState:
    """A cheap snapshot of one worker, in tokens and seconds; it is what the pool's view is made of.

    `step_s`: smoothed duration of the latest engine steps (0 when idle since the start).
    `outbox_free_bytes`/`inbox_free_bytes`: room for new transfers. `preemptions`: count since the start.
    `max_step_tokens`: tokens that one step computes at most, `mixed_step_tokens`: the same for a step in which somebody decodes (0: no
    other limit), `mixed_step_s`: seconds that such a step may take (0: no such limit; see engine/mixed_step.py), and
    `max_running_requests`: requests in it at most (0: not known).
    `steps`: the latest steps, oldest first; over the wire only those that the gateway has not seen. So are `cache_changes`, the latest ones
    of the prefix cache, which counts in blocks of `cache_block_tokens` (0: it does not tell). `kv`: counted by
    the worker.
    """

    epoch: str
    waiting_requests: int = 0
    waiting_tokens: int = 0
    running_requests: int = 0
    free_kv_tokens: int = 0
    total_kv_tokens: int = 0
    step_s: float = 0.0
    outbox_free_bytes: int = 0
    outbox_total_bytes: int = 0
    inbox_free_bytes: int = 0
    inbox_total_bytes: int = 0
    preemptions: int = 0
    max_step_tokens: int = 0
    max_running_requests: int = 0
    mixed_step_tokens: int = 0
    mixed_step_s: float = 0.0
    steps: tuple[StepRecord, ...] = ()
    kv: KvCounters = KvCounters()
    cache_block_tokens: int = 0
    cache_changes: tuple[CacheChange, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the gateway must know of the served model to check a request before any worker sees it."""

    name: str
    max_model_len: int
    vocab_size: int
    kv_bytes_per_token: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """A pair (prefill worker, decode worker) by name, and why it was picked. Equal names mean colocated."""

    prefill: str
    decode: str
    reason: str

    @property
    def is_colocated(self) -> bool:
        """True when one worker runs both phases and no KV moves."""
        return self.prefill == self.decode


def new_id() -> str:
    """A random 128-bit identifier in hex: transfer ids, epochs and request ids."""
    return os.urandom(16).hex()  # the same bytes as from `secrets`, for a third of the time
