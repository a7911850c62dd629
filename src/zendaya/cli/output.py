"""Output of commands: tables, progress bars and one-line messages."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence

from zendaya.records import Progress

INTERRUPTED = 130
"""Exit code of a program stopped by Ctrl-C, as shells have it."""
_NUMBER = re.compile(r"[-+±–\[]?[\d.,]|–$|$")
_GAP = "  "


def say(message: str) -> None:
    """Print one line on stderr, under the program's name."""
    print(f"zendaya: {' '.join(message.split())}", file=sys.stderr, flush=True)


def number(value: float | None, form: str) -> str:
    """A number in a format, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a header and its rows, numbers right-aligned; a narrow terminal, or $COLUMNS, wraps rows between columns."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(map(_NUMBER.match, column[1:])) for column in columns]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal() else None
    places, used = [[0]], widths[0]  # the columns on each line
    for place, width in enumerate(widths[1:], start=1):
        used += len(_GAP) + width
        if limit is not None and used > limit:
            places.append([])
            used = 4 + width
        places[-1].append(place)
    for row in rows:
        cells = [cell.rjust(width) if to else cell.ljust(width) for cell, width, to in zip(row, widths, right, strict=True)]
        for number, line in enumerate(places):
            print(("    " if number else "") + _GAP.join(cells[place] for place in line).rstrip())


class ProgressBar:
    """A progress bar on stderr, if that is a terminal."""

    def __init__(self, watched: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
        hidden = not (watched and console.is_terminal)
        self._bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task("", total=None)
        self.last: Progress | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Draw the progress of a job; a new stage restarts the estimate, from the work still to do."""
        if self.last is None or progress.stage != self.last.stage:
            self._bar.start()
            self._bar.reset(self._task, total=progress.total, completed=progress.done)
        self.last = progress
        self._bar.update(self._task, description=progress.detail or progress.stage, completed=progress.done, total=progress.total)
