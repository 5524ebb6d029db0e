"""How long an answer will be, learned per SLO class from the answers that ended. Pure.

A histogram over logarithmic lengths, with old answers fading. Two readings: the mean, for times; and a cautious quantile, for KV room.
The bound is the request's own `max_tokens`; a request that ignores the end token runs exactly to it.
"""

from __future__ import annotations

import math

from disagg.policy.targets import Spread
from disagg.types import Request

BUCKETS_PER_DOUBLING = 4
NUM_BUCKETS = 17 * BUCKETS_PER_DOUBLING  # up to 131,072 tokens
FORGET = 1.0 / 500  # weight that an answer loses with each further one
UNKNOWN_TOKENS = 512  # expected of a class without answers yet
UNKNOWN_WEIGHT = 4.0  # of that guess, in answers
RESERVE_QUANTILE = 0.8
SPREAD_AT = (0.02, 0.05, 0.1, 0.2, 0.4, 1.0)  # shares of answers, the shortest first, between which they are taken together
SPREAD_AGE = 16  # answers learned until that is done anew


class OutputLengths:
    """Answer lengths of one class."""

    __slots__ = ("_counts", "_mean", "_mean_inverse", "_spread", "_spread_age", "_weight")

    def __init__(self) -> None:
        self._counts = [0.0] * NUM_BUCKETS
        self._counts[_bucket(UNKNOWN_TOKENS)] = UNKNOWN_WEIGHT
        self._weight = UNKNOWN_WEIGHT
        self._mean = float(UNKNOWN_TOKENS)
        self._mean_inverse = 1.0 / UNKNOWN_TOKENS
        self._spread: Spread = ((UNKNOWN_TOKENS, 1.0),)
        self._spread_age = 0

    def learn(self, tokens: int) -> None:
        """An answer ended after `tokens` tokens."""
        keep = 1.0 - FORGET
        self._counts = [keep * c for c in self._counts]
        self._counts[_bucket(tokens)] += 1.0
        self._weight = keep * self._weight + 1.0
        self._mean += (tokens - self._mean) / self._weight
        if tokens > 1:
            self._mean_inverse += (1.0 / (tokens - 1) - self._mean_inverse) / self._weight
        self._spread_age += 1
        if self._spread_age >= SPREAD_AGE:
            self._spread_age = 0
            self._spread = self._spread_now()

    def mean(self, request: Request) -> float:
        """Further tokens that the answer is expected to have, at least 1."""
        remaining = request.remaining_tokens
        if request.sampling.ignore_eos:
            return max(1, remaining)
        return min(max(1, remaining), max(1.0, self._mean - len(request.prior_output)))

    def spread(self, request: Request) -> Spread:
        """Likely numbers of further tokens after the first, the least first, at least 1 each."""
        remaining = float(max(1, request.remaining_tokens - 1))
        if request.sampling.ignore_eos:
            return ((remaining, 1.0),)
        given = len(request.prior_output)
        return tuple([(min(remaining, max(1.0, tokens - given)), share) for tokens, share in self._spread])

    def _spread_now(self) -> Spread:
        """Harmonic means between the shares of SPREAD_AT."""
        found = []
        bucket, left, done = 0, self._counts[0], 0.0
        for share in SPREAD_AT:
            wanted = weight = share * self._weight - done
            inverse = 0.0
            while wanted > 0:
                taken = min(left, wanted)
                inverse += taken / max(1.0, 2.0 ** ((bucket + 0.5) / BUCKETS_PER_DOUBLING) - 1.0)
                wanted -= taken
                left -= taken
                if left <= 0:
                    if bucket == NUM_BUCKETS - 1:
                        break
                    bucket += 1
                    left = self._counts[bucket]
            done += weight
            found.append((weight / inverse, weight / self._weight))
        return tuple(found)

    def spread_mean(self, request: Request) -> float:
        """Tokens over which a delay of the answer is spread, as its TPOT counts it: the harmonic mean of the further tokens, at least 1."""
        remaining = max(1, request.remaining_tokens - 1)
        if request.sampling.ignore_eos:
            return remaining
        return min(remaining, max(1.0, 1.0 / self._mean_inverse))

    def reserve(self, request: Request, generated: int = 0) -> int:
        """Output tokens to keep room for, `generated` of them there already: few answers run longer."""
        remaining = max(1, request.remaining_tokens)
        if request.sampling.ignore_eos:
            return remaining
        wanted = self._quantile_above(len(request.prior_output) + generated) - len(request.prior_output)
        return min(remaining, max(generated + 1, wanted))

    def _quantile_above(self, tokens: int) -> int:
        """The length that RESERVE_QUANTILE of the answers longer than `tokens` do not exceed."""
        first = _bucket(tokens + 1)
        left = sum(self._counts[first:]) * RESERVE_QUANTILE
        for bucket in range(first, NUM_BUCKETS):
            left -= self._counts[bucket]
            if left <= 0 and self._counts[bucket] > 0:
                return math.ceil(2 ** ((bucket + 1) / BUCKETS_PER_DOUBLING))
        return 2 * tokens + 16  # longer than anything seen


def _bucket(tokens: int) -> int:
    return min(NUM_BUCKETS - 1, int(math.log2(max(1, tokens)) * BUCKETS_PER_DOUBLING))
