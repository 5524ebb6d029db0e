"""How long an answer will be, learned per SLO class from the answers that ended, and from those that have not. Pure.

Lengths in logarithmic buckets, old answers fading. An answer that runs on says that it is longer than so many tokens; left out, whoever
comes to a fresh class would meet the short answers alone, because those end first. So what is learned is the share that ends in each
bucket of those that reach it (Kaplan & Meier 1958), and a distribution follows from that. Three readings: the mean, for times; likely
lengths with their shares, for delays; and what it will hold, for KV room. The bound is the request's own `max_tokens`; a request that
ignores the end token runs exactly to it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from disagg.policy.targets import Spread
from disagg.types import Request

BUCKETS_PER_DOUBLING = 4
NUM_BUCKETS = 17 * BUCKETS_PER_DOUBLING  # up to 131,072 tokens
FORGET = 1.0 / 500  # weight that an answer loses with each further one
UNKNOWN_TOKENS = 512  # expected of a class without answers yet
UNKNOWN_WEIGHT = 4.0  # of that guess, in answers
MANY_DOUBT = 0.3  # standard deviations that each of some fifty answers adds when twice that of their sum is kept
SPREAD_AT = (0.02, 0.05, 0.1, 0.2, 0.4, 1.0)  # shares of answers, the shortest first, between which they are taken together
TELL_FROM = 64  # tokens of an answer, from which on its length teaches while it runs
TELL_BUCKETS = 2  # whole ones that it gets through between two times
SUMMED_UP = 16  # things learned until they are summed up anew
NONE_LEFT = 1e-6
LENGTHS = tuple([math.ceil(math.pow(2.0, (bucket + 1) / BUCKETS_PER_DOUBLING)) for bucket in range(NUM_BUCKETS)])  # beyond each


class Keep(NamedTuple):
    """Room for an answer: `tokens` expected, and the variance of that, in tokens squared."""

    tokens: int
    variance: int


class OutputLengths:
    """Answer lengths of one class."""

    __slots__ = ("_age", "_ended", "_longest", "_mean", "_mean_inverse", "_outlasted", "_reach", "_shares", "_spread", "_tokens")

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
        return LENGTHS[min(NUM_BUCKETS - 1, last + TELL_BUCKETS)]

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
                left = max(0.0, left - shares[bucket])  # the share is rounded: it may be more than all that is left
                self._count(shares[bucket], self._tokens[bucket] / ended)
        if left > NONE_LEFT:  # longer than anything seen: as long again
            bucket = min(NUM_BUCKETS - 1, longest + BUCKETS_PER_DOUBLING)
            shares[bucket] += left
            self._count(left, 2.0 ** ((bucket + 0.5) / BUCKETS_PER_DOUBLING))
            longest = bucket
        self._longest = longest
        reach, self._reach = 1.0, []  # the share of all answers that get to a bucket
        for share in shares:
            self._reach.append(reach)
            reach = max(0.0, reach - share)
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

    def reserve(self, request: Request, generated: int = 0) -> Keep:
        """What to keep of a KV cache for the answer, `generated` tokens of it there already.

        Answers that share a cache do not all end late: so much is kept as they are expected to hold, prompts included, at the moment at
        which that is most, and how far it may be off is added up over all of them: no less than half of what it is expected to grow beyond
        that, for of few answers, behind long prompts, none may have ended by then.
        """
        remaining = max(1, request.remaining_tokens)
        if request.sampling.ignore_eos:
            return Keep(remaining, 0)
        prior, prompt = len(request.prior_output), request.num_prompt_tokens
        first, longest = _bucket(prior + generated + 1), prior + remaining
        reached = self._reach[first]
        if reached <= NONE_LEFT:  # longer than anything seen
            return Keep(min(remaining, 2 * generated + prior + 16), 0)
        most, share, held = 0.0, 1.0, prompt + prior + generated + 1
        growth, at = 0.0, prior + generated
        for bucket in range(first, self._longest + 1):
            tokens = min(longest, LENGTHS[bucket])
            alive = self._reach[bucket] / reached
            growth, at = growth + alive * (tokens - at), tokens
            likely = (alive + MANY_DOUBT * math.sqrt(alive * (1.0 - alive))) * (prompt + tokens)
            if likely > most:
                most, share, held = likely, alive, prompt + tokens
            if tokens == longest:
                break
        tokens = min(remaining, max(generated + 1, round(share * held) - prompt - prior))
        uncovered = max(0.0, growth - (tokens - generated))
        return Keep(tokens, round(max(share * (1.0 - share) * held * held, (0.5 * uncovered) ** 2)))


def _bucket(tokens: int) -> int:
    return min(NUM_BUCKETS - 1, int(math.log2(max(1, tokens)) * BUCKETS_PER_DOUBLING))
