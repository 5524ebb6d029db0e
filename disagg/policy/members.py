"""The live workers: who may take which part of a request, in order of use, and what is typical of each pool. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from disagg.policy.admission import Largest
from disagg.policy.prefix_index import PrefixIndex
from disagg.policy.router import Pair
from disagg.policy.standing import Standing
from disagg.policy.step_cost import GENERIC, StepCost
from disagg.policy.view import missing_role
from disagg.policy.worker_book import Typical, WorkerBook
from disagg.types import EngineState, Mode, Role

REFRESH_S = 1.0  # how often workers are compared with their pool
LATELY_S = 3.0  # a worker whose last step is older does not count in that
ENOUGH_STEPS = 2  # of a kind, for others to lean on: the first one of an engine may be anything
EARLY_STEPS = 32  # of a worker; until then it is compared whenever it has twice as many


class Members:
    """Owner of the workers' books. `sources`, `sinks`: those that may take a first leg, and a second one; the least recently used first.

    `missing_role`: a role that the mode needs and that no live worker has. `typical`: cost of a typical source, by which the queue counts.
    `may_pass`: somewhere short prompts pass long ones. `cache_block_tokens`: of the workers; 0: none of them tells what it caches.
    """

    def __init__(self, mode: Mode, priors: Mapping[Role, StepCost], pass_tokens: Mapping[Role, int], tpot_s: float) -> None:
        """`tpot_s`: the tightest that decoding requests ask for."""
        self.books: dict[str, WorkerBook] = {}
        self.sources: list[WorkerBook] = []
        self.sinks: list[WorkerBook] = []
        self.prefixes = PrefixIndex()
        self.cache_block_tokens = 0
        self.missing_role = missing_role(mode, set())
        self.may_pass = False
        self.typical = next(iter(priors.values()), GENERIC)
        self._mode = mode
        self._priors = priors
        self._pass_tokens = pass_tokens
        self._tpot_s = tpot_s
        self._refreshed_s = 0.0
        self._stood: Standing | None = None
        self._largest: Largest | None = None

    def join(self, name: str, role: Role, host_id: str, state: EngineState, now_s: float) -> None:
        """A worker came up. One of that name that is known already is replaced."""
        self.leave(name)
        self.books[name] = WorkerBook(name, role, host_id, state, self._priors.get(role, GENERIC), now_s)
        self.books[name].pass_tokens = self._pass_tokens.get(role, 0)
        if size := state.cache_block_tokens:
            self.cache_block_tokens = size
            self.prefixes.join(name, state.total_kv_tokens // size)
            self.prefixes.update(name, state.cache_changes)
        self._changed()

    def leave(self, name: str) -> None:
        """A worker is gone. Unknown is fine."""
        book = self.books.pop(name, None)
        if book is not None:
            self.prefixes.leave(name)
            self._changed()

    def report(self, name: str, state: EngineState, now_s: float) -> None:
        """A worker's latest state. Unknown is fine."""
        book = self.books.get(name)
        if book is not None:
            before = book.fit.num_steps
            if self._largest is not None and _sizes(book.state) != _sizes(state):
                self._largest = None
            book.report(state, now_s, self._tpot_s)
            if before < EARLY_STEPS and before.bit_length() < book.fit.num_steps.bit_length():
                self._refreshed_s = -math.inf  # the first steps say most
            if state.cache_changes:
                self.prefixes.update(name, state.cache_changes)

    def _changed(self) -> None:
        books = sorted(self.books.values(), key=lambda w: w.last_used_s)
        self.missing_role = missing_role(self._mode, {w.role for w in books})
        self.may_pass = any(w.pass_tokens for w in books)
        is_apart = self._mode is Mode.DISAGG
        self.sources = [w for w in books if w.role is Role.PREFILL] if is_apart else list(books)
        self.sinks = [w for w in books if w.role is Role.DECODE] if is_apart else list(books)
        for book in books:
            book.takes_answers = not is_apart or book.role is Role.DECODE
        self._stood = self._largest = None

    @property
    def largest(self) -> Largest:
        """What no request may exceed."""
        if self._largest is None:
            self._largest = Largest.of(self.sources, self.sinks)
        return self._largest

    def used(self, pair: Pair) -> None:
        """The pair's workers go to the end of the lists."""
        self._stood = None
        for books, w in ((self.sources, pair.first.worker), (self.sinks, pair.second.worker)):
            books.remove(w)
            books.append(w)

    def standing(self, now_s: float) -> Standing:
        """How the workers stand now; the same until something is granted, or another instant begins."""
        if self._stood is None or self._stood.now_s != now_s:
            self._stood = Standing(self.sources, self.sinks, now_s)
        return self._stood

    def look_anew(self, now_s: float) -> None:
        """Something may have happened since the last decision, perhaps at the same instant; once a second, pools are compared."""
        self._stood = None
        if now_s - self._refreshed_s > REFRESH_S:
            self._refresh(now_s)

    def _refresh(self, now_s: float) -> None:
        """What the typical source is, and the typical worker of each role, by which the learned speeds of the others are judged."""
        self._refreshed_s = now_s
        self._share()
        if self.sources:
            self.typical = _median(_working(self.sources, now_s)).fit.cost
        for role in Role:
            if books := [w for w in self.books.values() if w.role is role]:
                lately = _working(books, now_s)
                typical = None
                if len(books) > 1:
                    fit = _median(lately).fit
                    typical = Typical(fit.cost, fit.pace_s, statistics.median_low([w.overhead_s for w in lately]))
                for book in books:
                    book.compare(typical)

    def _share(self) -> None:
        """Workers of one prior, whatever their role, tell each other what they have learned.

        Who has only decoded would otherwise believe of prompts what was believed before the first step, and be given a long one for it.
        """
        alike: dict[StepCost, list[WorkerBook]] = {}
        for book in self.books.values():
            alike.setdefault(self._priors.get(book.role, GENERIC), []).append(book)
        for prior, books in alike.items():
            if len(books) > 1:
                known = _known(prior, books)
                for book in books:
                    book.fit.lean_on(known)


def _known(prior: StepCost, books: Sequence[WorkerBook]) -> StepCost:
    """Of prompts what a typical one knows of those that have run most, of decoding likewise; where none has, the other's."""
    written = _most_taught(books, [w.fit.num_prompt_steps for w in books])
    decoded = _most_taught(books, [w.fit.num_steps - w.fit.num_prompt_steps for w in books])
    if not written and not decoded:
        return prior
    of_prompts = _median(written or decoded).fit.own_cost()
    of_decodes = _median(decoded or written).fit.own_cost()
    return replace(of_prompts, base_s=of_decodes.base_s, decode_s=of_decodes.decode_s, context_s=of_decodes.context_s)


def _most_taught(books: Sequence[WorkerBook], steps: Sequence[int]) -> list[WorkerBook]:
    """Those with at least half as many steps of a kind as the one with most: two short prompts say nothing of long ones."""
    least = max(ENOUGH_STEPS, max(steps) / 2)
    return [w for w, count in zip(books, steps, strict=True) if count >= least]


def _sizes(state: EngineState) -> tuple[int, int, int]:
    return state.total_kv_tokens, state.outbox_total_bytes, state.inbox_total_bytes


def _working(books: Sequence[WorkerBook], now_s: float) -> Sequence[WorkerBook]:
    """Those that have had work lately, or all: what idle workers last learned may be old."""
    return [w for w in books if now_s - w.fit.last_s <= LATELY_S] or books


def _median(books: Sequence[WorkerBook]) -> WorkerBook:
    """The worker of median speed, among those of which much is known; of an even number the faster of the two in the middle."""
    least = min(EARLY_STEPS, max([w.fit.num_steps for w in books])) // 2
    books = [w for w in books if w.fit.num_steps >= least]
    return sorted(books, key=lambda w: w.fit.pace_s)[(len(books) - 1) // 2]
