"""Could a request be served now? Asked by /ready, by gRPC health, by whoever balances load.

Not when a pool has no live worker, and not when every live worker of a pool is wedged: it answers heartbeats, holds requests of ours, and
its engine has done nothing for long: no token, and no step either. A prompt of many chunks shows its progress in steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from disagg.policy.view import PoolView
from disagg.serving.run import Run
from disagg.serving.signal import Signal
from disagg.types import Phase, Role


class Pools(Protocol):
    """Live workers, and an event when they change (serving/pool.py)."""

    @property
    def changes(self) -> Signal: ...

    def view(self, now_s: float) -> PoolView: ...

    def worked_s(self, name: str) -> float:
        """When that live worker's engine last showed that it works."""
        ...


class OpenRuns(Protocol):
    """Requests under way (serving/coordinator.py)."""

    @property
    def open_runs(self) -> Iterable[Run]: ...


class Readiness:
    """One per gateway. `obstacle` says why not."""

    def __init__(self, pools: Pools, coordinator: OpenRuns, wedged_after_s: float) -> None:
        self.pools = pools
        self._coordinator = coordinator
        self._wedged_after_s = wedged_after_s
        self._closing = False

    @property
    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Not ready from now on, so that balancers turn away while running requests end."""
        self._closing = True
        self.pools.changes.fire()

    def obstacle(self) -> str | None:
        """Why a request that comes now could not be served; None when it could."""
        if self._closing:
            return "the gateway is closing"
        now_s = time.monotonic()
        view = self.pools.view(now_s)
        if view.missing_role is not None:
            return f"no live {view.missing_role} worker"
        waiting = self._waiting_since_s()
        for role in Role:
            live = [worker.name for worker in view.of(role)]
            silent_s = [now_s - max(waiting[name], self.pools.worked_s(name)) for name in live if name in waiting]
            if live and len(silent_s) == len(live) and min(silent_s) > self._wedged_after_s:
                return f"no {role} worker has done anything for {min(silent_s):.0f} s, and all hold requests"
        return None

    def _waiting_since_s(self) -> dict[str, float]:
        """Worker -> since when it owes a token to some request: the oldest of its requests' latest events."""
        since: dict[str, float] = {}
        for run in self._coordinator.open_runs:
            if run.route is None or run.phase is Phase.QUEUED:
                continue
            timeline = run.timeline
            if run.phase is Phase.PREFILLING:
                name, at_s = run.route.prefill, timeline.last_token_s or timeline.routed_s
            else:
                name, at_s = run.route.decode, timeline.last_token_s or timeline.first_token_s
            if at_s is not None:
                since[name] = min(since.get(name, at_s), at_s)
        return since
