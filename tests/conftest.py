"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

# A shell starts what it puts in the background with Ctrl-C ignored, and so would every command be that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files run side by side, each whole in one process, with those that use its engines: to start a set of these again costs more than a minute
# of a core. The longest begin first, so that none runs on alone at the end.
SHARES_ENGINES = {"test_serving_real.py": "test_parity.py"}
LONGEST_FIRST = (
    *("test_parity.py", "test_serving_real.py", "test_ray_real.py", "test_vllm_engine.py", "test_vllm_engine_death.py", "test_examples.py"),
    *("test_ab_ray.py", "test_up.py", "test_ray.py", "test_faults.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """That of `--dist loadfile`, with files that share engines taken as one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadEngines(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder, _, file = super()._split_scope(nodeid).rpartition("/")
            return f"{folder}/{SHARES_ENGINES.get(file, file)}"

    return LoadEngines(config, log)


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
