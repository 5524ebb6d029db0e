"""What engine processes are told before they load anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("tqdm")

USE = """
import io, multiprocessing
multiprocessing.set_start_method("spawn")  # as in an engine's process
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock
for _ in tqdm([1], file=io.StringIO()):
    pass
print(hasattr(TqdmDefaultWriteLock, "mp_lock"))
"""
TOLD = "from disagg.engine.vllm_plugin import keep_progress_bars_to_threads as told\ntold()\n"


@pytest.mark.parametrize(("before", "makes_one"), [("", "True"), (TOLD, "False")])
def test_a_progress_bar_makes_no_semaphore_with_a_name(before: str, makes_one: str) -> None:
    ran = subprocess.run([sys.executable, "-c", before + USE], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == [makes_one]
