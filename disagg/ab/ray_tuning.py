"""The chunk search on deployments of its own, before a comparison's arms are up."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from disagg.ab.chunk_search import search_chunk, trial_arms
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.ray_arms import RayArms
from disagg.ab.run import Comparison, search_rate_rps, tuned, workload_at

if TYPE_CHECKING:
    from disagg.launch.session import RaySession


async def tuned_on_ray(
    comparison: Comparison, session: RaySession | None, base_dir: Path, folder: OutFolder, progress: RunProgress, most_trials: int
) -> Comparison:
    """The comparison with the chunk that a search finds for its colocated arms; as it is, where it has none.

    What the search measures is kept in `folder`, and is not measured again. Its time counts towards the rounds' limit. `base_dir`: what a
    relative model path counts from. Raises what `search_chunk` raises; its deployments are gone in any case.
    """
    arm = next((arm for arm in comparison.arms if arm.kind == "colocated"), None)
    if arm is None:
        return comparison
    begin_s = time.monotonic()
    rate = search_rate_rps(comparison)
    source = RayArms(session, list(trial_arms(arm).values()), resident=False, base_dir=base_dir, say=progress.say)
    own_folder = OutFolder(folder.path / "chunk-search", resume=True)
    try:
        paced = workload_at(comparison, rate)
        found = await search_chunk(arm, paced, rate, comparison.classes, source, own_folder, progress, most_trials=most_trials)
    finally:
        await source.close()
    return replace(tuned(comparison, found), rounds=comparison.rounds.after(time.monotonic() - begin_s))
