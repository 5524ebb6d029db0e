"""Python's cycle collector in a process that serves: nearly all garbage of a request is freed by reference counts."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000  # between two looks at young objects: by default 700, a few requests' worth, of which most are still under way


def settle_heap() -> None:
    """Call once, when the process is up: what lives now stays, and is not looked at any more; young objects are looked at less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
