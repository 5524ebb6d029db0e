"""Moving payload bytes: one pass that copies and digests, slice by slice while the bytes are in cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

SMALL_BYTES = 16 << 10  # below this arrays take longer to make than the bytes to move
_SLICE_BYTES = 256 << 10  # stays in a core's second-level cache between the copy and the digest


def copy_and_digest(destination: memoryview, parts: Sequence[memoryview]) -> int:
    """Copy consecutive `parts` to `destination` (equal lengths in all) and return xxh3_64 of what arrived there.

    The digest is of the destination, so bytes that change under the copy are noticed. For large parts both steps let go
    of the GIL.
    """
    if len(parts) == 1 and len(destination) <= SMALL_BYTES:
        destination[:] = parts[0]
        return xxhash.xxh3_64_intdigest(destination)
    target = np.frombuffer(destination, dtype=np.uint8)
    digest = xxhash.xxh3_64()
    at = 0
    for part in parts:
        source = np.frombuffer(part, dtype=np.uint8)
        for start in range(0, len(source), _SLICE_BYTES):
            piece = source[start : start + _SLICE_BYTES]
            arrived = target[at : at + len(piece)]
            np.copyto(arrived, piece)
            digest.update(arrived.data)
            at += len(piece)
    assert at == len(target), f"{at} bytes for a room of {len(target)}"
    return digest.intdigest()


def digest(payload: memoryview) -> int:
    """xxh3_64 of a payload: the `digest` of OutboxEntry.stage."""
    return xxhash.xxh3_64_intdigest(payload)
