"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the small real model; brought into the user's cache when it is not there."""
    from disagg.models import get_model

    return get_model("smollm2-135m")
