"""The simulated engine's model: KV bytes from tokens, and the next token from all KV bytes. Pure.

    running state of token i   = sum over j <= i of mix(token j, j), plus a constant of the model       (64 bit, wraps)
    KV codes of token i        = mix(running state, lane) for each 8-byte lane, cut to the numbers of a token
    next token                 = draw from xxh3_64 over the KV codes of all tokens in order

How codes lie in box entries is simulated_kv.py's. So the KV of a token depends on all tokens before it, as attention's does, and one lost,
stale, swapped or flipped byte of KV changes every later token. Greedy and unseeded sampling draw alike; a seed with temperature > 0 draws
differently. Penalties, top_k, top_p and min_p have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from disagg.config import SimulatedSettings
from disagg.engine.simulated_kv import Codes
from disagg.engine.simulated_settings import simulated_layout
from disagg.types import FinishReason, Sampling, Token, TopLogprob, plain_token

States = NDArray[np.uint64]  # [tokens]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_REDRAWS: Final = 64
# Arrays without a dimension: of a scalar numpy makes one in each operation, and takes about as long for that as for a short prompt.
_STEP: Final = np.array(_GOLDEN, np.uint64)
_SHIFTS: Final = tuple([np.array(bits, np.uint64) for bits in (30, 27, 31)])
_FACTORS: Final = tuple([np.array(factor, np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)])
_PLACE_BITS: Final = np.array(32, np.uint64)
_FEW_LANES: Final = 16  # of one token: so many fit in one long number, with which Python is quicker than numpy with a short array


class KvState:
    """The KV of one sequence, as a digest of all its codes: what the next token is drawn from.

    `running` is the running state after `num_tokens` tokens. The codes themselves are made by `SimulatedModel.codes` and not kept.
    """

    __slots__ = ("_hash", "num_tokens", "running")

    def __init__(self, running: int) -> None:
        self.num_tokens = 0
        self.running = running
        self._hash = xxhash.xxh3_64()

    def append(self, kv: memoryview | bytes, num_tokens: int, running: int) -> None:
        """Take the contiguous KV codes of the next `num_tokens` tokens; `running` is the state after them."""
        self._hash.update(kv)
        self.num_tokens += num_tokens
        self.running = running

    @property
    def digest(self) -> int:
        """xxh3_64 of all KV codes so far, in token order."""
        return self._hash.intdigest()


class SimulatedModel:
    """The pure functions of one SimulatedSettings; stateless, so that one object serves all sequences of an engine.

    `num_codes`: numbers of one token.
    """

    def __init__(self, settings: SimulatedSettings) -> None:
        self.settings = settings
        layout = simulated_layout(settings)
        self.num_codes = 2 * layout.kv_heads * layout.head_dim or settings.kv_bytes_per_token
        num_lanes = -(-self.num_codes // 8)
        self._lanes: States = _mix(np.arange(1, num_lanes + 1, dtype=np.uint64)) | np.uint64(1)
        self._few = _FewLanes(self._lanes.tolist()) if num_lanes <= _FEW_LANES else None
        self._eos, self._eos_mean, self._vocab = settings.eos_token_id, settings.eos_mean_tokens, settings.vocab_size
        self._origin = xxhash.xxh3_64_intdigest(settings.shape.encode())

    def new_state(self) -> KvState:
        """The state before any token."""
        return KvState(self._origin)

    def running_states(self, token_ids: Sequence[int], start: int, running: int) -> States:
        """Running states [tokens] of tokens at positions start, start + 1, ... after state `running`."""
        ids = np.asarray(token_ids, dtype=np.uint64)
        positions = np.arange(start, start + len(ids), dtype=np.uint64)
        return _terms(ids, positions).cumsum() + np.uint64(running)

    def codes(self, states: States) -> Codes:
        """KV codes [tokens, num_codes] of tokens with these running states, contiguous."""
        lanes = _mix(states[:, None] * self._lanes[None, :])
        rows = lanes.view(np.uint8).reshape(len(states), -1)
        return np.ascontiguousarray(rows[:, : self.num_codes])

    def extend(self, state: KvState, token_ids: Sequence[int]) -> Codes:
        """Append `token_ids` to `state`; returns their KV codes."""
        states = self.running_states(token_ids, state.num_tokens, state.running)
        codes = self.codes(states)
        state.append(codes.data, len(states), int(states[-1]) if len(states) else state.running)
        return codes

    def extend_by_one(self, state: KvState, token_id: int) -> None:
        """`extend` by one token, whose codes nobody else wants. Most tokens are decoded, by few requests at a time."""
        if self._few is None:
            self.extend(state, (token_id,))
            return
        running = (_mix_int(token_id << 32 ^ state.num_tokens) + state.running) & _MASK
        state.append(self._few.mixed(running)[: self.num_codes], 1, running)

    def draw(self, digest: int, sampling: Sampling, num_output: int) -> Token:
        """The next token after KV of `digest`, as output number `num_output` (0 is the first).

        The end-of-sequence token comes up once in `eos_mean_tokens` draws; it and stop tokens are masked while there are fewer than
        `min_tokens` output tokens, so that an answer has more than `min_tokens` when it stops by itself.
        """
        x = digest
        if sampling.seed is not None and sampling.temperature > 0:
            x ^= _mix_int(sampling.seed & _MASK)
        if num_output >= sampling.min_tokens:
            x = _mix_int(x)
            token_id = self._token_of(x)
        else:
            token_id, x = self._unmasked(self._masked(sampling), x)
        return plain_token(token_id) if sampling.logprobs is None else self._with_logprobs(token_id, x, sampling.logprobs)

    def _unmasked(self, masked: frozenset[int], x: int) -> tuple[int, int]:
        """A token that is not `masked`, and the state of the draws after it."""
        for _ in range(_REDRAWS):
            x = _mix_int(x)
            if (token_id := self._token_of(x)) not in masked:
                return token_id, x
        return next((t for t in range(self._vocab) if t not in masked), self._token_of(x)), x

    def finish_reason(self, token_id: int, sampling: Sampling, num_output: int) -> FinishReason | None:
        """Whether `token_id`, the `num_output`-th output token (1 is the first), ends the answer. Same order as vLLM's check."""
        if (token_id == self._eos and not sampling.ignore_eos) or token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= sampling.max_tokens else None

    def _masked(self, sampling: Sampling) -> frozenset[int]:
        eos = () if sampling.ignore_eos else (self.settings.eos_token_id,)
        return frozenset((*sampling.stop_token_ids, *eos))

    def _token_of(self, x: int) -> int:
        if (x >> 40) % self._eos_mean == 0:
            return self._eos
        token_id = (x & 0xFFFFFFFFFF) % (self._vocab - 1)
        return token_id + (token_id >= self._eos)

    def _with_logprobs(self, token_id: int, x: int, num_top: int) -> Token:
        """`token_id` with the logprobs asked for: it takes 30 to 95 % of the mass, each further alternative half of the rest."""
        share = 0.30 + 0.65 * (x & 0xFFFF) / 0xFFFF
        logprob, rest = float(np.log(share)), 1.0 - share
        top = [TopLogprob(token_id, logprob)] if num_top else []
        seen = {token_id}
        while len(top) < min(num_top, self.settings.vocab_size):
            x = _mix_int(x)
            other = x % self.settings.vocab_size
            if other not in seen:
                seen.add(other)
                # Never above the sampled token's, which greedy sampling would otherwise not have taken.
                top.append(TopLogprob(other, min(float(np.log(rest / 2)), top[-1].logprob)))
                rest /= 2
        return Token(token_id, logprob, tuple(top))


class _FewLanes:
    """The lanes of one token as one long number, 128 bits for each: a product of two lanes stays in its place.

    The lanes with even numbers lie in the lower half, those with odd ones in the upper: one shift puts them between each other at the end.
    """

    def __init__(self, lanes: Sequence[int]) -> None:
        odd = lanes[1::2]
        self._num_even = len(lanes) - len(odd)
        self._lanes = _placed([*lanes[::2], *odd])
        self._low = _placed([_MASK] * len(lanes))
        self._steps = _placed([_GOLDEN] * len(lanes))

    def mixed(self, running: int) -> bytes:
        """`_mix` of each lane times `running`, in their order; zeros follow where their number is odd."""
        low, half = self._low, 128 * self._num_even
        x = (self._lanes * running & low) + self._steps & low
        x = (x ^ x >> 30 & low) * 0xBF58476D1CE4E5B9 & low
        x = (x ^ x >> 27 & low) * 0x94D049BB133111EB & low
        x ^= x >> 31 & low
        return (x & (1 << half) - 1 | x >> half << 64).to_bytes(half // 8, "little")


def _placed(lanes: Sequence[int]) -> int:
    return sum(lane << 128 * index for index, lane in enumerate(lanes))


def expected_tokens(
    settings: SimulatedSettings,
    prompt_ids: Sequence[int],
    max_tokens: int,
    sampling: Sampling | None = None,
    prior_output: Sequence[int] = (),
) -> tuple[int, ...]:
    """The right answer of any simulated engine, computed directly: what it gives after prompt + prior output, up to its end.

    `max_tokens` counts the prior output too, and overrides sampling's; without `sampling` it is greedy.
    """
    model = SimulatedModel(settings)
    chosen = replace(sampling or Sampling(temperature=0.0), max_tokens=max_tokens)
    state = model.new_state()
    model.extend(state, [*prompt_ids, *prior_output])
    output: list[int] = []
    while len(prior_output) + len(output) < max_tokens:
        num_output = len(prior_output) + len(output)
        token_id = model.draw(state.digest, chosen, num_output).token_id
        output.append(token_id)
        if model.finish_reason(token_id, chosen, num_output + 1) is not None:
            break
        model.extend(state, [token_id])
    return tuple(output)


def _terms(ids: States, positions: States) -> States:
    return _mix((ids << _PLACE_BITS) ^ positions)


def _mix(x: States) -> States:
    """splitmix64's finaliser on each element (Steele, Lea and Flood, 2014). [any shape] -> same shape."""
    x = x + _STEP
    x ^= x >> _SHIFTS[0]
    x *= _FACTORS[0]
    x ^= x >> _SHIFTS[1]
    x *= _FACTORS[1]
    x ^= x >> _SHIFTS[2]
    return x


def _mix_int(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
