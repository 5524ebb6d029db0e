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

from collections.abc import Collection, Mapping, Sequence

from disagg.config import AdmissionSettings, SloClass
from disagg.policy.decision import Decisions
from disagg.policy.step_cost import StepCost
from disagg.types import EngineState, Mode, ModelInfo, Request, Role


class Dispatcher:
    """Owner of the queue, of the accounts of what each worker has been given, and of what was learned of its speed."""

    def __init__(
        self,
        mode: Mode,
        model: ModelInfo,
        classes: Sequence[SloClass],
        admission: AdmissionSettings,
        priors: Mapping[Role, StepCost] | None = None,
    ) -> None:
        """`priors`: step costs to start from per role (policy/step_cost.py); a role without one starts from a generic guess."""
        raise NotImplementedError

    # ---- workers

    def join(self, name: str, role: Role, host_id: str, state: EngineState, now_s: float) -> None:
        """A worker came up. One of that name that is known already is replaced."""
        raise NotImplementedError

    def leave(self, name: str, now_s: float) -> None:
        """A worker is gone. What was granted on it stays booked until its owner calls `end`. Unknown is fine."""
        raise NotImplementedError

    def report(self, name: str, state: EngineState, now_s: float) -> None:
        """A worker's latest state; `state.steps` holds only steps that were not reported before."""
        raise NotImplementedError

    # ---- requests

    def submit(self, request: Request, now_s: float, avoid: Collection[str] = (), attempt: int = 0) -> int:
        """Queue a request and return its key. A retry (`attempt` > 0) is never refused for load. `avoid`: workers that failed it.

        Raises InvalidRequestError when no live worker could ever hold it.
        """
        raise NotImplementedError

    def withdraw(self, key: int) -> None:
        """The client of a queued request is gone. Unknown is fine."""
        raise NotImplementedError

    def decide(self, now_s: float) -> Decisions:
        """Grants and refusals as of now. Call it after each event, and at `wake_at_s`."""
        raise NotImplementedError

    # ---- the life of a granted request; all are idempotent, and unknown keys are fine

    def first_token(self, key: int, now_s: float, cached_tokens: int = 0) -> None:
        """The prefill is over. `cached_tokens`: what the worker found in its prefix cache."""
        raise NotImplementedError

    def arrived(self, key: int, now_s: float) -> None:
        """The KV lies whole in the decode side's inbox."""
        raise NotImplementedError

    def decoding(self, key: int, now_s: float) -> None:
        """The decode engine holds the KV: its second token came (or its first, on one worker)."""
        raise NotImplementedError

    def progress(self, key: int, output_tokens: int) -> None:
        """So many tokens of the answer have come."""
        raise NotImplementedError

    def end(self, key: int, now_s: float, *, is_whole: bool) -> None:
        """Give back everything. `is_whole`: the answer came to its end, and its length teaches what to expect."""
        raise NotImplementedError
