"""Which few requests the timeline shows: the same ones in every arm, around the longest gap that any of them had. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from disagg.ab.rows import Row


def same_requests(rows: Mapping[str, Sequence[Row]], count: int) -> dict[str, list[Row]]:
    """Up to `count` requests of one round that all arms completed, those nearest to the worst moment. `rows`: by arm, of one rate."""
    by_key = {arm: {(r.round, r.index): r for r in own if r.is_whole} for arm, own in rows.items()}
    shared = set.intersection(*(set(own) for own in by_key.values())) if by_key else set()
    if not shared:
        return {}
    every = [own[key] for own in by_key.values() for key in shared]
    worst = max(every, key=lambda r: max(r.itl_s, default=0.0))
    gaps = worst.itl_s
    place = max(range(len(gaps)), key=gaps.__getitem__) if gaps else 0
    moment_s = worst.token_s[place]
    near = sorted((key for key in shared if key[0] == worst.round), key=lambda key: abs(by_key[worst.arm][key].sent_s - moment_s))
    chosen = sorted(near[:count])
    return {arm: [own[key] for key in chosen] for arm, own in by_key.items()}
