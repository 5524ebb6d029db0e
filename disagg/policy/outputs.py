"""How long an answer will be, learned per SLO class from the answers that ended, and from those that have not. Pure.

Lengths in logarithmic buckets, old answers fading. An answer that runs on says that it is longer than so many tokens; left out, whoever
comes to a fresh class would meet the short answers alone, because those end first. So what is learned is the share that ends in each
bucket of those that reach it (Kaplan & Meier 1958), and a distribution follows from that. Three readings: the mean, for times; likely
lengths with their shares, for delays; and a cautious quantile, for KV room. The bound is the request's own `max_tokens`; a request that
ignores the end token runs exactly to it.
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
SUMMED_UP = 16  # things learned until they are summed up anew
NONE_LEFT = 1e-6


class OutputLengths:
    """Answer lengths of one class."""

    __slots__ = ("_age", "_ended", "_mean", "_mean_inverse", "_outlasted", "_shares", "_spread", "_tokens")

    def __init__(self) -> None:
        self._ended = [0.0] * NUM_BUCKETS  # answers that ended there, and the sum of their tokens
        self._tokens = [0.0] * NUM_BUCKETS
        self._outlasted = [0.0] * NUM_BUCKETS  # answers that went on from there
        self._age = 0
        self._add(UNKNOWN_TOKENS, 1, UNKNOWN_WEIGHT)
        self._sum_up()

    def learn(self, tokens: int, told: int = 1) -> None:
        """An answer ended after `tokens` tokens; that it would have more than `told` was learned already."""
        keep = 1.0 - FORGET
        self._ended = [keep * n for n in self._ended]
        self._tokens = [keep * n for n in self._tokens]
        self._outlasted = [keep * n for n in self._outlasted]
        self._add(tokens, told, 1.0)
        self._grow_old()

    def outlasts(self, told: int, tokens: int) -> int:
        """An answer runs on after `tokens` tokens, after `told` as was learned before. Returns from how many on there is more to learn."""
        last = _bucket(tokens)
        for bucket in range(_bucket(told), last):
            self._outlasted[bucket] += 1.0
            self._grow_old()
        return math.ceil(2.0 ** ((last + 1) / BUCKETS_PER_DOUBLING))

    def _add(self, tokens: int, told: int, weight: float) -> None:
        last = _bucket(tokens)
        for bucket in range(_bucket(told), last):
            self._outlasted[bucket] += weight
        self._ended[last] += weight
        self._tokens[last] += weight * tokens

    def _grow_old(self) -> None:
        self._age += 1
        if self._age >= SUMMED_UP:
            self._sum_up()

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

    def _sum_up(self) -> None:
        """What share of all answers ends in each bucket, and what follows from it."""
        self._age = 0
        self._shares = shares = [0.0] * NUM_BUCKETS
        left, longest = 1.0, 0
        self._mean = self._mean_inverse = 0.0
        for bucket, (ended, outlasted) in enumerate(zip(self._ended, self._outlasted, strict=True)):
            if ended + outlasted <= 0.0:
                continue
            longest = bucket
            if ended > 0.0:
                shares[bucket] = left * ended / (ended + outlasted)
                left -= shares[bucket]
                self._count(shares[bucket], self._tokens[bucket] / ended)
        if left > NONE_LEFT:  # longer than anything seen: as long again
            bucket = min(NUM_BUCKETS - 1, longest + BUCKETS_PER_DOUBLING)
            shares[bucket] += left
            self._count(left, 2.0 ** ((bucket + 0.5) / BUCKETS_PER_DOUBLING))
        self._spread = self._spread_now()

    def _count(self, share: float, tokens: float) -> None:
        self._mean += share * tokens
        self._mean_inverse += share / max(1.0, tokens - 1.0)

    def _spread_now(self) -> Spread:
        """Harmonic means between the shares of SPREAD_AT."""
        found = []
        bucket, left, done = 0, self._shares[0], 0.0
        for share in SPREAD_AT:
            wanted = weight = share - done
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
                    left = self._shares[bucket]
            done += weight
            if inverse > 0.0:
                found.append((weight / inverse, weight))
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
        left = sum(self._shares[first:]) * RESERVE_QUANTILE
        for bucket in range(first, NUM_BUCKETS):
            left -= self._shares[bucket]
            if left <= 0 and self._shares[bucket] > 0:
                return math.ceil(2 ** ((bucket + 1) / BUCKETS_PER_DOUBLING))
        return 2 * tokens + 16  # longer than anything seen


def _bucket(tokens: int) -> int:
    return min(NUM_BUCKETS - 1, int(math.log2(max(1, tokens)) * BUCKETS_PER_DOUBLING))
