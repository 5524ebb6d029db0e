"""The colocated arm's chunk size, found by measuring: a baseline that is not tuned proves nothing.

Tokens per engine step trade the running answers' gaps (small chunks) against prompts' speed (large ones); which is better depends on
model, machine, workload and classes. So the arm itself is measured, for a short time each, from the topology's own chunk upwards and
downwards by factors of two for as long as it gets better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from disagg.ab.arms import Arm, ArmSource, chunk_tokens, with_chunk
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.result import ArmFigures, ChunkSearch, ChunkTrial, arm_figures
from disagg.ab.trace_plan import AnyWorkload, plan_round
from disagg.ab.turns import Turns
from disagg.config import SloClass
from disagg.types import Role

TRIAL_S = 25.0
MOST_TRIALS = 5
TIE = 0.02  # attainments this close are equal; then the mean time of an answer decides
RULE = f"highest SLO attainment; among those within {TIE:.0%} of each other, the shortest mean end-to-end time"
_SMALLEST, _LARGEST, _START = 64, 8192, 512


@dataclass(frozen=True, slots=True)
class ChunkLadder:
    """The sizes that may be tried, ascending, and where to begin."""

    sizes: tuple[int, ...]
    start: int

    def next_size(self, trials: Mapping[int, ChunkTrial]) -> int | None:
        """What to try next; None when the best one has been passed on both sides."""
        if not trials:
            return self.start
        place = self.sizes.index(best(trials.values()).chunk_tokens)
        around = [self.sizes[i] for i in (place + 1, place - 1) if 0 <= i < len(self.sizes)]
        return next((size for size in around if size not in trials), None)


def ladder(arm: Arm) -> ChunkLadder:
    """Powers of two around the arm's own chunk, within what engines take."""
    assert arm.topology is not None
    own = chunk_tokens(arm.topology, Role.COLOCATED) or _START
    sizes = sorted({own * 2**i for i in range(-6, 7)} | {own // 2**i for i in range(7)})
    return ChunkLadder(tuple(size for size in sizes if size == own or _SMALLEST <= size <= _LARGEST), own)


def trial_arms(arm: Arm) -> dict[int, Arm]:
    """One arm per size that may be tried."""
    return {size: with_chunk(arm, size, f"{arm.name}-chunk{size}") for size in ladder(arm).sizes}


def best(trials: Iterable[ChunkTrial]) -> ChunkTrial:
    """The trial that RULE picks."""
    found = list(trials)
    highest = max(trial.slo_attainment or 0.0 for trial in found)
    tied = [trial for trial in found if (trial.slo_attainment or 0.0) >= highest - TIE]
    return min(tied, key=lambda trial: trial.e2e_mean_s if trial.e2e_mean_s is not None else math.inf)


async def search_chunk(
    arm: Arm,
    workload: AnyWorkload,
    rate_rps: float,
    classes: Sequence[SloClass],
    source: ArmSource,
    out: OutFolder,
    progress: RunProgress,
    *,
    most_trials: int = MOST_TRIALS,
) -> ChunkSearch:
    """Measure and choose. `source` knows the arms of `trial_arms(arm)`; `workload` is paced to `rate_rps` already.

    `out` keeps the trials' rows; what is in it is not measured again. Raises what Turns.measure raises.
    """
    arms = trial_arms(arm)
    whole_round = plan_round(workload, classes, workload.seed, 0)
    begin_s = whole_round[0].due_s
    planned = [replace(r, due_s=round(r.due_s - begin_s, 6), seed=f"{r.seed}/chunk") for r in whole_round if r.due_s < begin_s + TRIAL_S]
    trials: dict[int, ChunkTrial] = {}
    with Turns(source, out, progress, classes, vocab_size=None, resume=True) as turns:
        while len(trials) < most_trials and (size := ladder(arm).next_size(trials)) is not None:
            key = (arms[size].name, rate_rps, 1)
            if not turns.is_measured(key):
                await turns.measure(arms[size], workload, rate_rps, planned, len(trials), f"colocated with chunks of {size} tokens")
            trials[size] = _trial(size, arm_figures(turns.rows[key], classes, None))
            progress.say(_told(trials[size]))
    return ChunkSearch(rate_rps=rate_rps, trials=list(trials.values()), chosen_tokens=best(trials.values()).chunk_tokens, rule=RULE)


def _trial(size: int, figures: ArmFigures) -> ChunkTrial:
    return ChunkTrial(
        chunk_tokens=size,
        sent=figures.sent,
        slo_attainment=figures.slo_attainment,
        ttft_p50_s=figures.ttft_s.p50,
        tpot_p50_s=figures.tpot_s.p50,
        itl_max_s=figures.itl_s.max,
        e2e_mean_s=figures.e2e_s.mean,
        output_tokens_per_s=figures.output_tokens_per_s,
    )


def _told(trial: ChunkTrial) -> str:
    share = "nothing sent" if trial.slo_attainment is None else f"{trial.slo_attainment:.0%} within their class"
    mean = "" if trial.e2e_mean_s is None else f", {trial.e2e_mean_s:.2f} s for an answer on average"
    return f"chunks of {trial.chunk_tokens} tokens: {share}{mean}"
