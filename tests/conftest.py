"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# A shell starts what it puts in the background with Ctrl-C ignored, and so would every command be that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files run side by side, each whole in one process: the longest begin first, so that none runs on alone at the end.
LONGEST_FIRST = (
    *("test_vllm_engine.py", "test_serving_real.py", "test_parity.py", "test_ray_real.py", "test_vllm_engine_death.py"),
    *("test_ab_ray.py", "test_up.py", "test_ray.py", "test_faults.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the small real model; brought into the user's cache when it is not there."""
    from disagg.models import get_model

    return get_model("smollm2-135m")


@pytest.fixture(scope="session")
def quick_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small real model's first layers: for real engines whose answers need not make sense."""
    from tests.machine import first_layers

    return first_layers(smollm2, tmp_path_factory.mktemp("models") / "first-layers")
