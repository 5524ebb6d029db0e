"""Workers that change roles in a simulation, as a controller asks: drain, wait, join the new pool. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from disagg.errors import ConfigError
from disagg.policy.fleet import FleetController, FleetObservation, Move
from disagg.sim.agenda import Agenda
from disagg.sim.dispatch import SimDispatcher
from disagg.sim.worker import SimWorker
from disagg.trace import TraceRequest
from disagg.types import Role


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """`controller` is asked every `tick_s`. `move_s`: from an empty worker to its first request in the new role.

    The answers' lengths that it hears are the mean of those that ended so far; before the first one, `first_guess_tokens`.
    """

    controller: FleetController
    tick_s: float = 1.0
    move_s: float = 1.0
    first_guess_tokens: float = 100.0

    def __post_init__(self) -> None:
        if not self.tick_s > 0:
            raise ConfigError(key="fleet.tick_s", value=self.tick_s, expected="a number above 0")


class SimFleet:
    """Which worker has which role. `moves`: (second, worker, move) of all that were begun."""

    def __init__(
        self,
        agenda: Agenda,
        workers: Mapping[str, SimWorker],
        dispatcher: SimDispatcher,
        settings: FleetSettings,
        is_over: Callable[[], bool],
    ) -> None:
        self.moves: list[tuple[float, str, Move]] = []
        self._agenda = agenda
        self._workers = workers
        self._dispatcher = dispatcher
        self._settings = settings
        self._is_over = is_over
        self._held: dict[str, int] = dict.fromkeys(workers, 0)  # requests that a worker has to do with
        self._leaving: dict[str, Role | None] = {}
        self._joining = 0
        self._spare: list[str] = []
        self._roles: dict[str, Role] = {name: worker.role for name, worker in workers.items()}
        self._arrivals = self._prompt_tokens = self._waiting_tokens = 0
        self._ended = self._ended_tokens = 0
        self._agenda.after(settings.tick_s, self._tick)

    # ---- what the simulation tells

    def arrived(self, request: TraceRequest) -> None:
        self._arrivals += 1
        self._prompt_tokens += request.input_tokens
        self._waiting_tokens += request.input_tokens

    def dropped(self, request: TraceRequest) -> None:
        """Refused, or out of time, while it waited."""
        self._waiting_tokens -= request.input_tokens

    def granted(self, request: TraceRequest, *names: str) -> None:
        self._waiting_tokens -= request.input_tokens
        for name in set(names):
            self._held[name] += 1

    def ended(self, request: TraceRequest, *names: str) -> None:
        self._ended += 1
        self._ended_tokens += request.output_tokens
        for name in set(names):
            self._held[name] -= 1
            if name in self._leaving and self._held[name] == 0:
                self._left(name)

    # ---- ticks

    def _tick(self) -> None:
        if self._is_over():
            return
        now_s = self._agenda.now_s
        roles = list(self._roles.values())
        mean = self._ended_tokens / self._ended if self._ended else self._settings.first_guess_tokens
        seen = FleetObservation(
            span_s=self._settings.tick_s,
            arrivals=self._arrivals,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._arrivals * mean,
            waiting_tokens=self._waiting_tokens,
            prefill=roles.count(Role.PREFILL),
            decode=roles.count(Role.DECODE),
            moving=len(self._leaving) + self._joining,
            spare=len(self._spare),
        )
        self._arrivals = self._prompt_tokens = 0
        for move in self._settings.controller.on_tick(seen, now_s):
            self._begin(move)
        self._agenda.after(self._settings.tick_s, self._tick)

    def _begin(self, move: Move) -> None:
        if move.source is None:
            if self._spare and move.target is not None:
                name = self._spare.pop()
                self.moves.append((self._agenda.now_s, name, move))
                self._join_later(name, move.target)
            return
        # The one with the least to finish; a pool keeps one worker whatever is asked.
        names = [name for name, role in self._roles.items() if role is move.source]
        if len(names) < 2:
            return
        name = min(names, key=lambda n: self._held[n])
        del self._roles[name]
        self.moves.append((self._agenda.now_s, name, move))
        self._dispatcher.leave(name, self._agenda.now_s)
        self._leaving[name] = move.target
        if self._held[name] == 0:
            self._left(name)

    def _left(self, name: str) -> None:
        target = self._leaving.pop(name)
        if target is None:
            self._spare.append(name)
        else:
            self._join_later(name, target)

    def _join_later(self, name: str, target: Role) -> None:
        self._joining += 1
        self._agenda.after(self._settings.move_s, lambda: self._join(name, target))

    def _join(self, name: str, target: Role) -> None:
        worker = self._workers[name]
        worker.role = target
        self._joining -= 1
        self._roles[name] = target
        self._dispatcher.join(name, target, "host", worker.report(), self._agenda.now_s)
