"""How much of the KV that lies in the inbox a step may load. Pure; vLLM's connector and the simulated engines share it.

A prompt's KV takes as long to copy as a whole decode step or longer. Beside requests that run, a step copies for a small share of its time,
and what does not fit there waits for several steps (vllm_loads.py says how, simulated_loads.py what that takes).
"""

from __future__ import annotations

from dataclasses import dataclass

STEP_SHARE = 0.08  # of a step's time is added to it
SPREAD_STEPS = 16  # a step copies at least so much that what waits now is over after about as many: what waits cannot grow without end
PIECE_BYTES = 2 << 20  # copied between two looks at the clock; less than this is not worth slicing either
DEVICE_BYTES_PER_S = 16e9  # a GPU's copies end after the clock was read: at most what PCIe 4.0 x16 brings counts as done in the time
HOST_BYTES_PER_S = 1e9  # what one core copies at least, while others use the memory, too


@dataclass(slots=True)
class LoadRoom:
    """Which loads are made at once beside running requests: those that all together lengthen the next step by `STEP_SHARE` at most.

    A load of several steps costs its request a step more than its copies take: the step that is scheduled next copies, and only the
    one after it computes. Where one step has time for all of it, that step computes with it, too.
    """

    on_host: bool  # the cache's memory; else a device's
    _taken_bytes: int = 0

    def fits(self, num_bytes: int, step_s: float) -> bool:
        """Whether a load has room in the step that is being scheduled. `step_s`: about how long it takes. No side effects."""
        bytes_per_s = HOST_BYTES_PER_S if self.on_host else DEVICE_BYTES_PER_S
        return num_bytes <= max(PIECE_BYTES, STEP_SHARE * step_s * bytes_per_s - self._taken_bytes)

    def take(self, num_bytes: int) -> None:
        """The step has one more load."""
        self._taken_bytes += num_bytes

    def clear(self) -> None:
        """The step is scheduled."""
        self._taken_bytes = 0
