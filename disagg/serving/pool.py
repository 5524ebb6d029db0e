"""The workers that one gateway knows: connections, and the dispatcher that decides over them (policy/dispatch.py)."""

from __future__ import annotations

import time

from disagg.config import Topology
from disagg.errors import LayoutMismatchError
from disagg.kv.form import BLOCKS, agree
from disagg.perf.shapes import ModelShape
from disagg.policy.decision import Grant, Prediction
from disagg.policy.dispatch import Dispatcher
from disagg.policy.priors import pass_tokens_of, priors_of
from disagg.policy.view import PoolView, WorkerView
from disagg.serving.signal import Signal
from disagg.serving.worker_rpc_client import RemoteWorker
from disagg.types import Mode, ModelInfo, Role, Route, new_id


class Member:
    """One life of one worker in the pool."""

    def __init__(self, role: Role, worker: RemoteWorker) -> None:
        self.role = role
        self.worker = worker

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def is_live(self) -> bool:
        return not self.worker.is_lost


class Reservation:
    """What one attempt of one request holds of its two workers: a grant of the dispatcher, tied to their connections.

    granted -> first_token()  the prefill's place          -> arrived()   room in both boxes
            -> decoding()     KV now shows in d's state    -> close()     everything, idempotent
    """

    def __init__(self, grant: Grant, source: Member, sink: Member, form: str, dispatcher: Dispatcher, changes: Signal) -> None:
        self.form = form  # of the KV between the two
        self.route: Route = grant.route
        self.prediction: Prediction = grant.admitted
        self.source = source
        self.sink = sink
        self.is_whole = False  # set by its owner when the answer has come to its end
        self._key = grant.key
        self._dispatcher = dispatcher
        self._changes = changes

    def first_token(self, cached_tokens: int = 0) -> None:
        """The prefill is over: its place is free, and its time teaches. Idempotent."""
        self._dispatcher.first_token(self._key, time.monotonic(), cached_tokens)
        self._changes.fire()

    def arrived(self) -> None:
        """The KV has left the outbox, and the inbox as good as: the engine loads it at its next step. Idempotent."""
        self._dispatcher.arrived(self._key, time.monotonic())
        self._changes.fire()

    def decoding(self) -> None:
        """The decode engine holds the KV, so its state shows it. Idempotent."""
        self._dispatcher.decoding(self._key, time.monotonic())

    def progress(self, output_tokens: int) -> None:
        """So many tokens of this attempt have come."""
        self._dispatcher.progress(self._key, output_tokens, time.monotonic())

    def close(self) -> None:
        """Give back what is still held. Idempotent."""
        self._dispatcher.end(self._key, time.monotonic(), is_whole=self.is_whole)
        self._changes.fire()


class Pool:
    """The members by name. `changes` fires when a member joins, is lost or reports, and when a reservation gives something back."""

    def __init__(self, topology: Topology, model: ModelInfo, shape: ModelShape | None = None) -> None:
        """`shape`: of the model that real engines load, where it is known; predictions start from it."""
        self.gateway_id = new_id()
        self.changes = Signal()
        self.members: dict[str, Member] = {}
        self.dispatcher = Dispatcher(
            Mode(topology.mode), model, topology.slo_classes, topology.admission, priors_of(topology, shape), pass_tokens_of(topology)
        )
        self._model = model
        self._mode = Mode(topology.mode)
        self._timeout_s = topology.admission.worker_timeout_s
        self._wire_dtype = topology.kv.wire_dtype

    async def join(self, name: str, role: Role, target: str) -> None:
        """Connect to the worker at `target` ("host:port"); it takes requests when this returns.

        A worker of that name that is here already is replaced, and counts as lost. Raises WorkerLostError when the worker does not
        say hello within the topology's `worker_timeout_s`, LayoutMismatchError when it could not exchange KV with a member.
        """
        worker = await RemoteWorker.connect(name, target, self.gateway_id, self._timeout_s, self.changes)
        member = Member(Role(role), worker)
        try:
            self._check_pairs(member)
        except LayoutMismatchError:
            await worker.close()
            raise
        # Nothing is awaited from that check to here: another worker that joins meanwhile is checked against this one.
        before = self._forget(name)
        self.members[name] = member
        self.dispatcher.join(name, Role(role), worker.address.host_id, worker.state(), time.monotonic())
        self.changes.fire()
        if before is not None:
            await before.worker.close()

    def _check_pairs(self, member: Member) -> None:
        """Raise LayoutMismatchError unless KV can move on every route that `member` makes possible."""
        for other in self.members.values():
            if other.is_live and other.name != member.name:
                for source, sink in ((member, other), (other, member)):
                    if self._may_pair(source, sink):
                        self._form(source, sink)

    def _may_pair(self, source: Member, sink: Member) -> bool:
        if self._mode is Mode.ADAPTIVE:
            return True
        return (source.role, sink.role) == (Role.PREFILL, Role.DECODE)

    def _form(self, source: Member, sink: Member) -> str:
        """How KV moves between two members. Raises LayoutMismatchError with what differs."""
        if source is sink or source.worker.layout is None or sink.worker.layout is None:
            return BLOCKS
        try:
            return agree(source.worker.layout, sink.worker.layout, self._wire_dtype)
        except LayoutMismatchError as error:
            raise LayoutMismatchError(f"no KV can move from worker {source.name} to {sink.name}: {error.message}") from None

    async def leave(self, name: str) -> None:
        """Let go of a worker; its requests are served again elsewhere. Unknown is fine."""
        member = self._forget(name)
        if member is not None:
            await member.worker.close()

    def _forget(self, name: str) -> Member | None:
        member = self.members.pop(name, None)
        if member is not None:
            self.dispatcher.leave(name, time.monotonic())
        return member

    async def wait_lost(self, name: str) -> None:
        """Returns when the member of that name is lost or has left; at once when there is none."""
        member = self.members.get(name)
        if member is not None:
            await member.worker.wait_lost()

    def view(self, now_s: float) -> PoolView:
        """The live members at the instant `now_s`, which is now."""
        live = [m for m in self.members.values() if m.is_live]
        workers = tuple([WorkerView(m.name, m.role, m.worker.address.host_id, m.worker.state()) for m in live])
        return PoolView(now_s, self._mode, self._model, workers)

    def worked_s(self, name: str) -> float:
        """Instant at which the live member of that name last showed that its engine works."""
        return self.members[name].worker.worked_s

    def sync(self, now_s: float) -> None:
        """Tell the dispatcher what the workers have reported since the last time, and who is lost."""
        known = self.dispatcher.workers
        for name, member in self.members.items():
            if member.worker.is_lost:
                if name in known:
                    self.dispatcher.leave(name, now_s)
                continue
            for state in member.worker.take_reports():
                self.dispatcher.report(name, state, now_s)

    def reservation(self, grant: Grant) -> Reservation:
        """The grant, tied to its workers. They are live at the instant at which it was decided."""
        route = grant.route
        source, sink = self.members[route.prefill], self.members[route.decode]
        return Reservation(grant, source, sink, self._form(source, sink), self.dispatcher, self.changes)

    async def close(self) -> None:
        """Let go of all workers."""
        for name in list(self.members):
            await self.leave(name)

    def assert_empty(self) -> None:
        """No reservation is held, and no call or stream is open. For tests, and for an idle gateway."""
        self.dispatcher.assert_empty()
        for member in self.members.values():
            member.worker.assert_empty()
