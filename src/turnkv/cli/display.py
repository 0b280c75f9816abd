"""Where and how things are printed: results on stdout, what goes on meanwhile on stderr."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_UNSEEN_COLUMNS = 100
"""Width where no terminal is: the tables are made for it."""


def out_console() -> Console:
    """For results. Made anew each time, so that it follows a redirected stdout."""
    return _console(stderr=False)


def error_console() -> Console:
    """For errors and for what goes on."""
    return _console(stderr=True)


def say(line: str) -> None:
    """A line about what is being done."""
    error_console().print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def request_bar(label: str, num_requests: int) -> Iterator[Callable[[int, int], None]]:
    """A bar over requests with tokens per second; yields what moves it: (requests done, tokens run since the last).

    Without a terminal there is no bar, and one line when it ends.
    """
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TextColumn("{task.fields[speed]}", justify="right"),
        TimeElapsedColumn(),
        console=error_console(),
        disable=not error_console().is_terminal,
        expand=True,
    )
    task = progress.add_task(label, total=num_requests, speed="")
    meter = _Meter(progress, task)
    with progress:
        yield meter.move
    if progress.disable:
        say(f"{label}: {meter.num_answered} requests, {meter.tokens:,} tokens computed{meter.speed_text(', ')}")


class _Meter:
    """Counts tokens against the clock."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress, self._task = progress, task
        self._started_s = progress.get_time()
        self.num_answered = 0
        self.tokens = 0

    def move(self, done: int, tokens: int) -> None:
        self.num_answered += tokens > 0
        self.tokens += tokens
        self._progress.update(self._task, completed=done, speed=self.speed_text(""))

    def speed_text(self, before: str) -> str:
        seconds = self._progress.get_time() - self._started_s
        return f"{before}{self.tokens / seconds:,.0f} tok/s" if self.tokens and seconds > 0 else ""


def print_lines(lines: Sequence[str], *, style: str = "") -> None:
    """Plain lines on stdout, wrapped at words."""
    for line in lines:
        out_console().print(line, style=style, markup=False, highlight=False)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNSEEN_COLUMNS
    return console
