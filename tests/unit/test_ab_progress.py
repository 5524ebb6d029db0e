"""What a run says of the time that is left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from disagg.ab.progress import RunProgress


def test_time_left_is_said_of_planned_turns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("disagg.ab.progress.time.monotonic", lambda: now_s)
    said = io.StringIO()
    progress = RunProgress(Console(file=said, width=200))

    def turn(title: str, took_s: float) -> None:
        nonlocal now_s
        progress.begin_turn(title, 7)
        now_s += took_s
        progress.end_turn()

    turn("a search", 500)  # of as many turns as it takes
    turn("a search", 500)
    progress.plan(4, 30.0)
    turn("first", 40)
    turn("second", 60)
    progress.plan(2, 30.0)
    turn("third", 50)
    turn("last", 50)
    turn("once more", 50)
    assert said.getvalue().splitlines() == [
        "a search: 7 requests",
        "a search: 7 requests",
        "first: 7 requests, 2 min 00 s left",
        "second: 7 requests, 2 min 00 s left",
        "third: 7 requests, 1 min 40 s left",
        "last: 7 requests, 50 s left",
        "once more: 7 requests",
    ]
