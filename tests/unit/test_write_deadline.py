"""Writes to clients that take too long (disagg/front/write_deadline.py)."""

from __future__ import annotations

import asyncio

import pytest

from disagg.errors import DeadlineError
from disagg.front.write_deadline import WriteDeadline


async def test_a_write_that_nobody_takes_ends_and_its_task_goes_on():
    writes = WriteDeadline(0.02)
    stuck: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(DeadlineError, match=r"took nothing of its answer for 0\.02 s"):
        await writes.within(stuck)
    assert stuck.cancelled()
    assert asyncio.current_task().cancelling() == 0
    await writes.within(asyncio.sleep(0))


async def test_each_write_has_its_own_time():
    """One stuck client neither shortens the time of another that writes on, nor is forgotten because of it."""
    writes = WriteDeadline(0.2)

    async def busy() -> None:
        for _ in range(30):
            await writes.within(asyncio.sleep(0.01))

    other = asyncio.create_task(busy())
    with pytest.raises(DeadlineError):
        await writes.within(asyncio.Event().wait())
    await other


async def test_a_cancel_from_outside_is_a_cancel():
    writes = WriteDeadline(5.0)
    task = asyncio.create_task(writes.within(asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
