"""What it takes a simulated engine to load KV from its inbox: the connector's rule (load_room.py) at a given speed of copies. Pure.

waiting ──fits the step, or nothing runs──> loaded in the step that computes with it, which is as much longer
   └─────beside requests that run─────────> its blocks are held; each step copies a little ──> the step after the last copy computes
"""

from __future__ import annotations

from typing import Generic, TypeVar

from disagg.config import SimulatedSettings
from disagg.engine.load_room import HOST_BYTES_PER_S, PIECE_BYTES, SPREAD_STEPS, STEP_SHARE, LoadRoom
from disagg.perf.memory import rank_kv_bytes_per_token
from disagg.perf.model_config import load_shape
from disagg.perf.profile import load_profile

SequenceT = TypeVar("SequenceT")


class Loads(Generic[SequenceT]):
    """One rank's loads; of several ranks each loads its own part, all at the same time. Seconds are those of the engine at speed 1.

    `bytes_per_token`: of the rank's KV; `bytes_per_s`: of its copies. `decode_s`: what the latest step without prompts took; whoever runs
    the steps keeps it.
    """

    def __init__(self, bytes_per_token: int, bytes_per_s: float) -> None:
        self.decode_s = 0.0
        self._bytes_per_token = bytes_per_token
        self._bytes_per_s = bytes_per_s
        self._room = LoadRoom(on_host=True)
        self._left: dict[SequenceT, float] = {}  # bytes, first come first served
        self._made_bytes = 0  # at once, in the step that is being scheduled

    def __len__(self) -> int:
        """Loads of several steps that are under way."""
        return len(self._left)

    def fits(self, num_tokens: int) -> bool:
        """Whether the step that is being scheduled has time to load so many tokens beside requests that run."""
        return self._room.fits(num_tokens * self._bytes_per_token, self.decode_s)

    def make(self, num_tokens: int) -> None:
        """The step that is being scheduled loads them, and computes with them."""
        self._room.take(num_tokens * self._bytes_per_token)
        self._made_bytes += num_tokens * self._bytes_per_token

    def begin(self, sequence: SequenceT, num_tokens: int) -> None:
        """`sequence` waits until so many are loaded."""
        self._left[sequence] = num_tokens * self._bytes_per_token

    def give_up(self, sequence: SequenceT) -> None:
        """Nobody wants it any more. Unknown is fine."""
        self._left.pop(sequence, None)

    def step(self, step_s: float) -> tuple[float, list[SequenceT]]:
        """The step is scheduled, and takes `step_s` without loads (0: no request is in it): by how much they lengthen it, and whose end."""
        bytes_now, self._made_bytes = float(self._made_bytes), 0
        self._room.clear()
        waiting = sum(self._left.values())
        if not step_s:
            ended, self._left = list(self._left), {}
            return (bytes_now + waiting) / self._bytes_per_s, ended
        may_copy = max(PIECE_BYTES, STEP_SHARE * step_s * self._bytes_per_s, waiting / SPREAD_STEPS)
        bytes_now += min(waiting, may_copy)
        ended = []
        for sequence, left in list(self._left.items()):
            if left > may_copy:
                self._left[sequence] = left - may_copy
                break
            may_copy -= left
            del self._left[sequence]
            ended.append(sequence)
        return bytes_now / self._bytes_per_s, ended


def loads_of(settings: SimulatedSettings) -> Loads[SequenceT] | None:
    """Of an engine with these settings; None where loads take no time.

    A measured worker on cores copies as quickly as its link, which is this memory, too.
    """
    if settings.speed == 0:
        return None
    if settings.profile is not None:
        profile = load_profile(settings.profile)
        bytes_per_s = max(HOST_BYTES_PER_S, (profile.link_bandwidth or 0.0) / profile.tp)
        return Loads(profile.kv_bytes_per_token // profile.tp, bytes_per_s) if profile.is_on_host else None
    if settings.gpu != "cpu":
        return None
    return Loads(rank_kv_bytes_per_token(load_shape(settings.shape), settings.tp, settings.kv_dtype), HOST_BYTES_PER_S)
