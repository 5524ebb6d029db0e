"""One simulated worker: an engine with its two boxes, and when it reports. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from disagg.config import SimulatedSettings
from disagg.sim.agenda import Agenda
from disagg.sim.engine import SimEngine
from disagg.types import EngineState, Role


class Room:
    """Bytes of one box, given first come first served: nobody overtakes, as in the live boxes."""

    def __init__(self, agenda: Agenda, num_bytes: int) -> None:
        self.total_bytes = num_bytes
        self.free_bytes = num_bytes
        self._agenda = agenda
        self._waiting: deque[tuple[int, Claim]] = deque()

    def take(self, num_bytes: int, granted: Callable[[], None]) -> Claim:
        """Have `granted` called once there is room, at once if there is."""
        claim = Claim(self, min(num_bytes, self.total_bytes), granted)
        self._waiting.append((claim.num_bytes, claim))
        self._grant()
        return claim

    def _grant(self) -> None:
        while self._waiting and (self._waiting[0][1].is_over or self._waiting[0][0] <= self.free_bytes):
            num_bytes, claim = self._waiting.popleft()
            if not claim.is_over:
                self.free_bytes -= num_bytes
                claim.is_held = True
                self._agenda.call_after(0.0, claim.granted)


class Claim:
    """Room that is asked for, then held, then given back."""

    def __init__(self, room: Room, num_bytes: int, granted: Callable[[], None]) -> None:
        self.num_bytes = num_bytes
        self.is_held = False
        self.is_over = False
        self._room = room
        self._granted = granted

    def granted(self) -> None:
        if not self.is_over:
            self._granted()

    def give_back(self) -> None:
        """Idempotent, also while still waiting."""
        if not self.is_over:
            self.is_over = True
            if self.is_held:
                self._room.free_bytes += self.num_bytes
            self._room._grant()


class SimWorker:
    """An engine, its outbox and its inbox. `reported_s`: when the gateway last heard of it; `is_dirty`: something happened since."""

    def __init__(
        self,
        agenda: Agenda,
        name: str,
        role: Role,
        settings: SimulatedSettings,
        *,
        outbox_bytes: int,
        inbox_bytes: int,
        prefix_unit_blocks: int,
        keep_tokens: bool,
    ) -> None:
        self.name = name
        self.role = role
        self.engine = SimEngine(agenda, name, settings, prefix_unit_blocks, keep_tokens=keep_tokens)
        self.outbox = Room(agenda, outbox_bytes)
        self.inbox = Room(agenda, inbox_bytes)
        self.reported_s = 0.0
        self.is_due = False
        self._told_steps = 0
        self._told_changes = 0
        self._was_idle = False

    @property
    def has_news(self) -> bool:
        """Whether a report would say anything new."""
        return not (self._was_idle and self.engine.is_idle and self.engine.num_steps == self._told_steps)

    def report(self) -> EngineState:
        """What the live worker would report now; of its steps those that the gateway has not heard of."""
        told_changes = self._told_changes
        if self.engine.prefixes is not None:
            self._told_changes = self.engine.prefixes.num_changes
        self._was_idle = self.engine.is_idle
        state = self.engine.state(
            self.name,
            self._told_steps,
            told_changes,
            (self.outbox.free_bytes, self.outbox.total_bytes),
            (self.inbox.free_bytes, self.inbox.total_bytes),
        )
        if state.steps:
            self._told_steps = state.steps[-1].number
        return state

    def assert_empty(self) -> None:
        """No leg is left, and both boxes are free."""
        self.engine.assert_empty()
        for box in (self.outbox, self.inbox):
            assert box.free_bytes == box.total_bytes, f"{self.name}: {box.total_bytes - box.free_bytes} bytes of a box leaked"
