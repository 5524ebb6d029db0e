"""Engines that files of tests share: those that `SHARES_ENGINES` in tests/conftest.py names, so that one process runs them all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest_asyncio

if TYPE_CHECKING:
    from tests.real_rig import Servers


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(quick_model: Path) -> AsyncIterator[Servers]:
    """Disaggregated and colocated serving side by side."""
    from tests.real_rig import serve  # needs vLLM

    async with serve(quick_model) as both:
        yield both
