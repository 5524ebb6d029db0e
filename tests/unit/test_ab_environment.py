"""What is read of the machine before a run."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from disagg.ab import environment
from disagg.ab.environment import busy_cores


async def test_a_program_at_work_is_seen() -> None:
    spinning = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        found = await busy_cores(0.5)
    finally:
        spinning.kill()
        await spinning.wait()
    assert found is not None
    assert 0.1 < found < 1.1 * (os.cpu_count() or 1)


async def test_a_core_that_idles_or_waits_for_a_disk_is_not_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 0 20 1000 500 1 2 3 9 9\ncpu0 5 0 10 500 250 1 1 2 5 5\n")
    monkeypatch.setattr(environment, "_STAT", stat)
    asked = asyncio.ensure_future(busy_cores(0.3))
    await asyncio.sleep(0.02)
    stat.write_text("cpu  10 0 20 2000 900 1 2 3 9 9\n")
    assert await asked == 0.0


@pytest.mark.parametrize("text", [None, "", "cpu of another kind\n"])
async def test_a_kernel_that_does_not_say_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    monkeypatch.setattr(environment, "_STAT", tmp_path / "stat")
    assert await busy_cores(0.01) is None
