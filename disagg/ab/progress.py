"""What `disagg ab` says while it works: a bar in a terminal, otherwise a line per step."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class RunProgress:
    """Reports to `console` (standard error in the command line). Use it in a `with`. A turn is one arm's part of one round."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._turns_left = 0
        self._turn_s = 0.0
        self._turns_done = 0
        self._turn_started_s = 0.0

    def plan(self, turns: int, turn_s: float) -> None:
        """`turns` turns are to come, at most, of about `turn_s` seconds each; once turns have ended, their mean is the better guess."""
        if self._turns_left <= 0:  # what went before was not planned, and says nothing of these
            self._turns_done = 0
        self._turns_left = turns
        if not self._turns_done:
            self._turn_s = turn_s

    def say(self, line: str) -> None:
        """One line of news."""
        self._console.print(escape(line), highlight=False)

    def begin_turn(self, title: str, num_requests: int) -> None:
        """A turn of `num_requests` requests begins."""
        self._turn_started_s = time.monotonic()
        if self._bar is None:
            self.say(", ".join(filter(None, (f"{title}: {num_requests} requests", self._left()))))
        else:
            self._end_task()
            self._task = self._bar.add_task(escape(title), total=num_requests, left=self._left())

    def request_ended(self) -> None:
        """One of the turn's requests ended."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, left=self._left(time.monotonic() - self._turn_started_s))

    def end_turn(self) -> None:
        """The turn is over: the mean of all that are is the estimate of the others."""
        took_s = time.monotonic() - self._turn_started_s
        self._turns_done += 1
        self._turn_s = took_s if self._turns_done == 1 else self._turn_s + (took_s - self._turn_s) / self._turns_done
        self._turns_left -= 1
        self._end_task()

    def _left(self, passed_s: float = 0.0) -> str:
        """How long the planned turns will take, `passed_s` into the first of them; nothing where none is planned."""
        if self._turns_left <= 0:
            return ""
        return f"{_duration(max(0.0, self._turns_left * self._turn_s - passed_s))} left"

    def _end_task(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def __enter__(self) -> RunProgress:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(24),
                TextColumn("{task.completed}/{task.total} requests  {task.fields[left]}"),
            )
            self._bar = Progress(*columns, console=self._console, refresh_per_second=1, transient=True)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
