"""The router as one object without I/O: requests and what workers report go in, grants and refusals come out.

    submit ──> queue ──decide──> granted ──first_token──arrived──decoding──progress──> end
                 │                                                                       ^
                 └── refused, or withdrawn by its client ────────────────────────────────┘

The live gateway, tests and the discrete-event simulator drive the same object; time comes in as an argument (`now_s`, monotonic seconds).
A worker is given its next prompt only when it is about to run dry, so order and place stay open as long as possible.

    d = Dispatcher(Mode.ADAPTIVE, model, topology.slo_classes, topology.admission)
    d.join("p0", Role.PREFILL, host_id, state, now_s)
    key = d.submit(request, now_s)
    for grant in d.decide(now_s).grants: ...
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from disagg.config import AdmissionSettings, SloClass
from disagg.errors import InvalidRequestError
from disagg.policy.admission import MIN_RETRY_S, RECORDED_PAIRS, check_fits, foreseen, retry_after, why_not
from disagg.policy.booking import Booking
from disagg.policy.decision import Candidate, Decisions, Grant, Refusal, Verdict
from disagg.policy.drain import Drain
from disagg.policy.members import Members
from disagg.policy.outlook import Outlook, outlook
from disagg.policy.outputs import OutputLengths
from disagg.policy.record import describe, record_of
from disagg.policy.router import Ask, Pair, Router, Shortage, candidate
from disagg.policy.standing import SHORTLIST
from disagg.policy.step_cost import StepCost
from disagg.policy.targets import SOFT_TPOT_S, Targets
from disagg.policy.turn import FEED_S, is_any_ready, is_hopeless, is_ready, may_join, queue_price
from disagg.policy.waiting import Waiter, WaitingQueue
from disagg.policy.worker_book import WorkerBook
from disagg.prefix import block_identities, root_identity
from disagg.types import EngineState, Mode, ModelInfo, Request, Role, Route

LOOK_AHEAD = 4  # waiters that are tried although one before them has to wait on
MIN_NAP_S = 2e-3
MAX_NAP_S = 0.1  # a worker that is overdue, or a decode side that is full, is looked at again after so long
AGED_S = 30.0  # a request that has waited so long gets a turn now and then, whatever its priority
AGED_TURN = 20  # one grant in so many
MIN_TAUGHT_WAIT_S = 0.02
MANY_WAITING = 32  # for one that comes behind so many, a FEW workers are weighed: how they stand now says little of its turn
FEW = 3
WAIT_LEARNING_RATE = 0.03
_NOTHING = Decisions()


class Dispatcher:
    """Owner of the queue, of the accounts of what each worker has been given, and of what was learned of its speed."""

    def __init__(
        self,
        mode: Mode,
        model: ModelInfo,
        classes: Sequence[SloClass],
        admission: AdmissionSettings,
        priors: Mapping[Role, StepCost] | None = None,
        pass_tokens: Mapping[Role, int] | None = None,
    ) -> None:
        """`priors`: step costs to start from per role (policy/step_cost.py); a role without one starts from a generic guess.

        `pass_tokens`: tokens of a step that engines of a role keep from a long prompt, so that short ones pass it.
        """
        self.mode = mode
        self.model = model
        self._admission = admission
        self._targets = {c.name: Targets.of(c) for c in classes}
        tpot_s = min((t.tpot_s for t in self._targets.values() if t.tpot_s is not None), default=SOFT_TPOT_S)
        self._outputs: defaultdict[str, OutputLengths] = defaultdict(OutputLengths)
        self._members = Members(mode, priors or {}, pass_tokens or {}, tpot_s)
        self._waiting = WaitingQueue()
        self._bookings: dict[int, Booking] = {}
        self._router = Router(mode)
        self._keys = itertools.count(1)
        self._grants = 0
        self._fresh: tuple[tuple[int, int, float], Ask, list[Pair] | Shortage] | None = None  # weighed by admission: for which, when, what
        self._wait_factor = 1.0  # learned: measured over predicted time in the queue
        self._starved_since_s: float | None = None
        self._drain = Drain()

    # ---- workers

    def join(self, name: str, role: Role, host_id: str, state: EngineState, now_s: float) -> None:
        """A worker came up. One of that name that is known already is replaced."""
        self._members.join(name, role, host_id, state, now_s)

    def leave(self, name: str, now_s: float) -> None:
        """A worker is gone. What was granted on it stays booked until its owner calls `end`. Unknown is fine."""
        self._members.leave(name)

    def report(self, name: str, state: EngineState, now_s: float) -> None:
        """A worker's latest state; steps that it has told of before do not count twice. Unknown is fine."""
        self._members.report(name, state, now_s)

    @property
    def workers(self) -> Mapping[str, WorkerBook]:
        """The live workers by name. To look at."""
        return self._members.books

    @property
    def missing_role(self) -> Role | None:
        """A role that the mode needs and that no live worker has."""
        return self._members.missing_role

    # ---- requests

    def submit(
        self, request: Request, now_s: float, avoid: Collection[str] = (), attempt: int = 0, prefix: Sequence[int] | None = None
    ) -> int:
        """Queue a request and return its key. A retry (`attempt` > 0) is never refused for load. `avoid`: workers that failed it.

        `prefix`: identities of its context's full blocks, where they do not follow from its tokens (traces know identities only).
        Raises InvalidRequestError when no live worker could ever hold it.
        """
        check_fits(request, self.mode, self.model, self._members.largest)
        targets = self._targets.get(request.slo_class) or Targets.none(request.slo_class)
        lengths = self._lengths(request.slo_class)
        if prefix is None or not self._members.cache_block_tokens:
            prefix = self._identities(request)
        waiter = Waiter(
            key=next(self._keys),
            request=request,
            targets=targets,
            queued_s=now_s,
            attempt=attempt,
            avoid=avoid,
            output_tokens=lengths.mean(request),
            spread=lengths.spread(request),
            spread_tokens=lengths.spread_mean(request),
            keep=lengths.reserve(request),
            work_s=self._members.typical.prefill_s(request.num_context_tokens, 0, 2048),
            box_bytes=request.num_context_tokens * self.model.kv_bytes_per_token,
            prefix=prefix,
        )
        self._look_up(waiter)
        self._waiting.add(waiter)
        return waiter.key

    def withdraw(self, key: int) -> None:
        """The client of a queued request is gone. Unknown is fine."""
        self._waiting.remove(key)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def full(self, more: int, now_s: float, priority: int) -> tuple[str, float] | None:
        """Why `more` further requests would overfill the queue, and when to try again; None when they may come: lower ones give way."""
        if not len(self._waiting) or self._waiting.not_below(priority) + more <= self._admission.max_queued_requests:
            return None
        last = self._waiting.last_new()
        retry_s = self._retry_s(last, now_s) if last is not None else MIN_RETRY_S
        return f"{len(self._waiting)} requests with {self._waiting.tokens} prompt tokens wait already", retry_s

    def decide(self, now_s: float) -> Decisions:
        """Grants and refusals as of now. Call it after each event, and at `wake_at_s`."""
        self._members.look_anew(now_s)
        if not len(self._waiting):
            return _NOTHING
        over = "the deadline passed while it waited"
        refusals = [self._refuse(w, now_s, over, self._retry_s(w, now_s)) for w in self._waiting.expired(now_s)]
        grants: list[Grant] = []
        if (missing := self.missing_role) is not None:
            refusals += self._starved(missing, now_s)
        else:
            self._starved_since_s = None
            refusals += self._admit(now_s)
            grants, hopeless = self._grant(now_s)
            refusals += hopeless
        refusals += self._bound(now_s)
        return Decisions(tuple(grants), tuple(refusals), self._wake_at_s(now_s))

    # ---- the life of a granted request; all are idempotent, and unknown keys are fine

    def first_token(self, key: int, now_s: float, cached_tokens: int = 0) -> None:
        """The prefill is over. `cached_tokens`: what the worker found in its prefix cache."""
        booking = self._bookings.get(key)
        if booking is None:
            return
        booking.first_token(now_s, cached_tokens)
        if booking.prefix:
            self._members.prefixes.learn(booking.source.name, booking.prefix, cached_tokens // self._members.cache_block_tokens)

    def arrived(self, key: int, now_s: float) -> None:
        """The KV lies whole in the decode side's inbox."""
        booking = self._bookings.get(key)
        if booking is not None:
            booking.arrived()

    def decoding(self, key: int, now_s: float) -> None:
        """The decode engine holds the KV: its second token came (or its first, on one worker)."""
        booking = self._bookings.get(key)
        if booking is None:
            return
        hand_over_s = booking.decoding(now_s)
        if hand_over_s is not None:
            self._router.hand_over.learn(booking.box_bytes, hand_over_s)

    def progress(self, key: int, output_tokens: int, now_s: float) -> None:
        """So many tokens of the answer have come. An answer longer than expected keeps more room."""
        booking = self._bookings.get(key)
        if booking is None:
            return
        is_long = booking.progress(output_tokens, now_s)
        if output_tokens >= booking.tell_at_tokens:
            self._outlasts(booking)
            is_long = True
        if is_long:
            booking.reserve(self._lengths(booking.request.slo_class).reserve(booking.request, output_tokens))

    def _outlasts(self, booking: Booking) -> None:
        """An answer that goes on teaches what to expect, too."""
        prior, tokens = len(booking.request.prior_output), booking.output_tokens
        if booking.request.sampling.ignore_eos:
            booking.tell_at_tokens = math.inf
        else:
            booking.tell_at_tokens = self._lengths(booking.request.slo_class).outlasts(prior + booking.told_tokens, prior + tokens) - prior
            booking.told_tokens = tokens

    def end(self, key: int, now_s: float, *, is_whole: bool) -> None:
        """Give back everything. `is_whole`: the answer came to its end, and its length teaches what to expect."""
        booking = self._bookings.pop(key, None)
        if booking is None:
            return
        booking.end(now_s)
        if is_whole and not booking.request.sampling.ignore_eos:
            prior = len(booking.request.prior_output)
            self._lengths(booking.request.slo_class).learn(prior + booking.output_tokens, prior + booking.told_tokens)

    def assert_empty(self) -> None:
        """Nobody waits and nothing is booked."""
        assert not len(self._waiting), f"{len(self._waiting)} requests wait"
        assert not self._bookings, f"{len(self._bookings)} bookings are open"
        for book in self._members.books.values():
            assert book.accounts.is_empty, f"{book.name}: {book.accounts}"
            assert not book.prefilling, f"{book.name}: {book.prefilling}"

    # ---- entry

    def _admit(self, now_s: float) -> list[Refusal]:
        """Look at those that came since the last time: may they wait?"""
        refusals = []
        for waiter in self._waiting.unchecked():
            waiter.is_checked = True
            if waiter.attempt or not self._admission.by_slo:
                continue
            ask = self._ask(waiter, now_s)
            shortlist = SHORTLIST if len(self._waiting) <= MANY_WAITING else FEW
            pairs = self._router.pairs(ask, self._members.standing(now_s), {}, RECORDED_PAIRS, shortlist)
            self._fresh = ((waiter.key, self._grants, now_s), ask, pairs)
            ahead = self._outlook(waiter, ask, now_s)
            found = why_not(ask, [] if isinstance(pairs, Shortage) else pairs, ahead, waiter.work_s)
            if found is None:
                if not isinstance(pairs, Shortage):
                    waiter.admitted = foreseen(pairs[0], ask, ahead).prediction
            elif waiter.targets.may_reject:
                refusals.append(self._refuse(waiter, now_s, found.reason, found.retry_after_s, found.candidates))
            else:
                self._waiting.demote(waiter)
        return refusals

    def _bound(self, now_s: float) -> list[Refusal]:
        """Refuse the last ones of a queue that is too long, the lowest first. Retries stay, and one request may wait whatever its size."""
        settings, refusals = self._admission, []
        while len(self._waiting) > settings.max_queued_requests or (
            len(self._waiting) > 1 and self._waiting.tokens > settings.max_queued_tokens
        ):
            last = self._waiting.last_new()
            if last is None:
                break
            others, tokens = len(self._waiting) - 1, self._waiting.tokens - last.request.num_context_tokens
            reason = f"{others} requests with {tokens} prompt tokens wait already"
            refusals.append(self._refuse(last, now_s, reason, self._retry_s(last, now_s)))
        return refusals

    def _starved(self, missing: Role, now_s: float) -> list[Refusal]:
        """A pool without a live worker: those that have waited for one long enough give up."""
        if self._starved_since_s is None:
            self._starved_since_s = now_s
        timeout_s = self._admission.worker_timeout_s
        due = [w for w in self._waiting.in_order() if max(self._starved_since_s, w.queued_s) + timeout_s <= now_s]
        reason = f"no live {missing} worker, and none came within {timeout_s:g} s"
        return [self._refuse(w, now_s, reason, MIN_RETRY_S, no_worker=True) for w in due]

    def _refuse(
        self, waiter: Waiter, now_s: float, reason: str, retry_s: float, candidates: tuple[Candidate, ...] = (), *, no_worker: bool = False
    ) -> Refusal:
        self._waiting.remove(waiter.key)
        record = record_of(waiter, len(self._waiting), now_s, Verdict.REJECTED, reason, candidates, retry_s)
        return Refusal(waiter.key, waiter.request, reason, retry_s, record, no_worker)

    def _retry_s(self, waiter: Waiter, now_s: float) -> float:
        """When what waits now will have been started."""
        ask = self._ask(waiter, now_s)
        return retry_after(self._outlook(waiter, ask, now_s).start_s)

    def _outlook(self, waiter: Waiter, ask: Ask, now_s: float) -> Outlook:
        """When its turn comes; corrected by how such predictions did lately."""
        ahead, work_s = self._waiting.ahead(waiter)
        found = outlook(ask, self._members.standing(now_s), ahead, work_s, self._members.typical)
        return Outlook(found.start_s * self._wait_factor, found.place_s) if ahead else found

    def _learn_wait(self, waiter: Waiter, pair: Pair, ask: Ask) -> None:
        """Its turn has come: was it foreseen?"""
        if waiter.admitted is not None and waiter.admitted.queue_s > MIN_TAUGHT_WAIT_S:
            ratio = max(MIN_TAUGHT_WAIT_S, ask.waited_s + pair.first.wait_s) / waiter.admitted.queue_s
            self._wait_factor *= min(2.0, max(0.5, ratio)) ** WAIT_LEARNING_RATE
            self._wait_factor = min(3.0, max(0.3, self._wait_factor))

    # ---- grants

    def _grant(self, now_s: float) -> tuple[list[Grant], list[Refusal]]:
        """Give prompts to workers that are about to run dry. One meant for a busy worker waits on, and counts as work before later ones."""
        grants: list[Grant] = []
        refusals: list[Refusal] = []
        spent: set[str] = set()  # workers that somebody waits for already
        held_s: dict[str, float] = {}
        can_pass = self._members.may_pass and any(w.pass_tokens and w.prefilling for w in self._members.sources)
        has_ready = is_any_ready(self._members.standing(now_s), self._admission, spent)
        price = queue_price(self._waiting, len(self._members.sources), now_s) if has_ready else 0.0
        blocked = 0
        self._drain.look_anew(self._waiting, self._members.books)
        for waiter in self._candidates(now_s):
            if blocked >= LOOK_AHEAD or not (has_ready or can_pass):
                break
            ask, pairs = self._weighed(waiter, price, held_s, now_s)
            if isinstance(pairs, Shortage):
                if now_s - waiter.queued_s > AGED_S and waiter is self._waiting.oldest():
                    self._drain.begin(waiter, ask, self._members.standing(now_s))
                if (outgrown := self._outgrown(waiter, now_s)) is not None:
                    refusals.append(outgrown)
                else:
                    blocked += 1
                continue
            pair = pairs[0]
            if pair.second.worker.name == self._drain.kept_from(waiter):
                blocked += 1
                continue
            source = pair.first.worker
            may_start = source.name not in spent and is_ready(source, self._admission, pair.first.wait_s, source.outline(now_s))
            if not (may_start or pair.first.passes):
                held_s[source.name] = held_s.get(source.name, 0.0) + pair.first.prefill_s
                spent.add(source.name)
                has_ready = is_any_ready(self._members.standing(now_s), self._admission, spent)
                blocked += 1
            elif is_hopeless(waiter, self._admission, ask, pair):
                prediction = candidate(pair, ask, "too late")
                reason = f"class {ask.targets.name} cannot be met any more: it has waited {ask.waited_s * 1e3:.0f} ms"
                refusals.append(self._refuse(waiter, now_s, reason, retry_after(pair.first.prefill_s), (prediction,)))
            elif not may_join(waiter, self._admission, ask, pair, now_s):
                blocked += 1
            else:
                grants.append(self._book(waiter, ask, pairs, now_s))
                has_ready = is_any_ready(self._members.standing(now_s), self._admission, spent)
        return grants, refusals

    def _outgrown(self, waiter: Waiter, now_s: float) -> Refusal | None:
        """A refusal for what only a worker could hold that has left since it came, and none like it has come within the time for that."""
        if now_s - waiter.queued_s < self._admission.worker_timeout_s:
            return None
        try:
            check_fits(waiter.request, self.mode, self.model, self._members.largest)
        except InvalidRequestError as error:
            return self._refuse(waiter, now_s, f"no live worker could hold it: {error.message}", MIN_RETRY_S, no_worker=True)
        return None

    def _weighed(self, waiter: Waiter, price: float, held_s: Mapping[str, float], now_s: float) -> tuple[Ask, list[Pair] | Shortage]:
        """Its pairs; those that admission has just weighed, when nothing has changed since."""
        fresh, self._fresh = self._fresh, None
        if fresh is not None and fresh[0] == (waiter.key, self._grants, now_s) and not held_s and price == 0.0:
            return fresh[1], fresh[2]
        ask = self._ask(waiter, now_s)
        if price > 0.0:  # lower work has no claim on a higher one's time
            ask.queue_price = price * (self._waiting.not_below(waiter.request.priority) - 1)
        shortlist = SHORTLIST if len(self._waiting) <= MANY_WAITING else SHORTLIST // 2
        return ask, self._router.pairs(ask, self._members.standing(now_s), held_s, RECORDED_PAIRS, shortlist)

    def _candidates(self, now_s: float) -> Iterator[Waiter]:
        """In order; but the one for whom a worker empties goes first, and every so often the one that has waited longest."""
        if self._drain.waiter is not None:
            yield self._drain.waiter
        oldest = self._waiting.oldest()
        if oldest is not None and self._grants % AGED_TURN == AGED_TURN - 1 and now_s - oldest.queued_s > AGED_S:
            yield oldest
        yield from self._waiting.in_order()

    def _book(self, waiter: Waiter, ask: Ask, pairs: Sequence[Pair], now_s: float) -> Grant:
        pair = pairs[0]
        self._grants += 1
        self._learn_wait(waiter, pair, ask)
        self._waiting.remove(waiter.key)
        seen = tuple([candidate(p, ask) for p in pairs[:RECORDED_PAIRS]])
        reason = describe(pair)
        record = record_of(waiter, len(self._waiting), now_s, Verdict.GRANTED, reason, seen)
        route = Route(seen[0].prefill, seen[0].decode, reason)
        booking = self._bookings[waiter.key] = Booking(waiter.key, waiter.request, pair, ask, now_s)
        booking.prefix = waiter.prefix
        self._members.used(pair)
        return Grant(waiter.key, waiter.request, route, seen[0].prediction, record, waiter.admitted or seen[0].prediction)

    # ---- small parts

    def _identities(self, request: Request) -> Sequence[int]:
        if not self._members.cache_block_tokens:
            return ()
        root = root_identity(request.cache_salt)
        return block_identities((*request.prompt_token_ids, *request.prior_output), self._members.cache_block_tokens, root)

    def _look_up(self, waiter: Waiter) -> None:
        """What the workers hold of its context, and so the work that it will be."""
        if not waiter.prefix:
            return
        size, most = self._members.cache_block_tokens, waiter.request.num_context_tokens - 1
        waiter.cached = {name: min(most, blocks * size) for name, blocks in self._members.prefixes.cached_blocks(waiter.prefix).items()}
        if waiter.cached:
            cached = max(waiter.cached.values())
            waiter.work_s = self._members.typical.prefill_s(most + 1 - cached, cached, 2048)

    def _lengths(self, name: str) -> OutputLengths:
        return self._outputs[name]

    def _ask(self, waiter: Waiter, now_s: float) -> Ask:
        request, keep, kept_from = waiter.request, waiter.keep, self._drain.kept_from(waiter)
        context = request.num_context_tokens
        return Ask(  # by place: by name takes twice as long
            context,
            waiter.output_tokens,
            waiter.spread,
            waiter.spread_tokens,
            context + max(1, request.remaining_tokens),
            context + keep.tokens,
            keep.variance,
            waiter.box_bytes,
            request.remaining_tokens > 1,
            waiter.targets,
            max(0.0, now_s - request.arrival_s),
            waiter.avoid if kept_from is None else (*waiter.avoid, kept_from),
            waiter.cached,
            0.0,
            len(self._waiting) > 1,
            waiter.known,
        )

    def _wake_at_s(self, now_s: float) -> float | None:
        """When to look again, if nothing happens before: a deadline passes, a worker runs dry, or waiting for a worker is over."""
        if not len(self._waiting):
            return None
        instants = []
        if (expiry_s := self._waiting.next_expiry_s()) is not None:
            instants.append(expiry_s)
        if self._starved_since_s is not None:
            timeout_s = self._admission.worker_timeout_s
            instants += [max(self._starved_since_s, w.queued_s) + timeout_s for w in self._waiting.in_order()]
        else:
            soon_s = now_s + FEED_S
            dry_s = min([w.busy_until_s for w in self._members.sources if w.prefilling and w.busy_until_s > soon_s], default=now_s)
            nap_s = dry_s - FEED_S - now_s if dry_s > now_s else MAX_NAP_S
            instants.append(now_s + min(MAX_NAP_S, max(MIN_NAP_S, nap_s)))
        return min(instants)
