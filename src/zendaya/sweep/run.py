"""Running a sweep: cells in an order that their needs allow, each recorded once it is done; what is done is skipped."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zendaya.encoders.store import HEADER
from zendaya.errors import ZendayaError
from zendaya.metrics.results import TRACES
from zendaya.sweep.cells import DECODES, RUNS, Cell, cells_of
from zendaya.sweep.crew import Crew, crew
from zendaya.sweep.grids import Grid
from zendaya.sweep.table import Record, Table, now, to_json
from zendaya.sweep.work import Done, Told
from zendaya.training.loop import BEST

LOCK = ".sweep.lock"


@dataclass(frozen=True)
class News:
    """Something happened to a cell."""

    what: Literal["skipped", "begun", "told", "done", "failed", "stopped", "left"]
    cell: Cell
    finished: int
    """Cells that are over, those that were done before included."""
    total: int
    told: Told | None = None
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a sweep came to."""

    out: Path
    total: int
    done: int
    """Cells that are done, those from before included."""
    skipped: int
    """Of these, done before."""
    failed: tuple[tuple[str, str], ...]
    """(label, error) of each cell that failed."""
    left: int
    """Cells that were not begun, because one they need failed or the sweep was stopped."""
    stopped: bool


def sweep(
    grid: Grid, *, data: str | Path, out: str | Path, features: str | Path | None = None, processes: int = 1, ray: str | None = None,
    report: Callable[[News], None] = lambda _: None,
) -> Summary:  # fmt: skip
    """Run every cell of a grid that is not done; a sweep that was stopped or killed goes on where it was by the same call.

    `data` is the folder of all corpora, or of the only one; `features` where feature stores are kept (`out`/features if not given), which
    sweeps may share. `ray` is the address of a cluster, whose machines all see these folders, or `local`.
    """
    cells = cells_of(grid, data=data, out=out, features=features)  # a corpus that is not there is said before anything is written
    table = Table(out, create=True)
    with _alone(table.folder):
        known = table.records()
        done = {cell.key for cell in cells if _is_done(cell, known.get(cell.key))}
        run = _Run(cells, done, table, report)
        if len(done) < len(cells):
            with _terminated_as_interrupted(), crew(processes, ray) as workers:
                run.go(workers)
        return run.summary(len(done))


def _is_done(cell: Cell, record: Record | None) -> bool:
    """Whether a cell was done and what it made is still there."""
    if record is None or record.status != "done":
        return False
    made = {
        "encode": cell.store / HEADER,
        "train": cell.out / RUNS / cell.key / BEST,
        "evaluate": cell.out / DECODES / cell.key / TRACES,
    }
    return made[cell.kind].exists()


class _Run:
    def __init__(self, cells: list[Cell], done: set[str], table: Table, report: Callable[[News], None]) -> None:
        self.cells, self.done, self.table, self.report = cells, set(done), table, report
        self.failed: dict[str, str] = {}
        self.stopped = False
        for cell in cells:
            if cell.key in done:
                self._tell("skipped", cell)

    def go(self, workers: Crew) -> None:
        waiting = [cell for cell in self.cells if cell.key not in self.done]
        idle, busy = list(range(workers.size))[::-1], dict[int, Cell]()
        by_key = {cell.key: cell for cell in self.cells}
        try:
            while not self.stopped:
                while idle and (cell := self._next(waiting)) is not None:
                    busy[idle[-1]] = cell
                    self._tell("begun", cell)
                    workers.give(idle.pop(), cell)
                if not busy:
                    break
                worker, outcome = workers.take(lambda told: self._tell("told", by_key[told.cell], told=told))
                idle.append(worker)
                self._note(busy.pop(worker), outcome)
        except KeyboardInterrupt:
            self.stopped = True
        if self.stopped:
            for worker, outcome in workers.stop():  # some were just done; a run that was asked to stop has been saved
                self._note(busy.pop(worker), outcome)
        for cell in busy.values():
            self._tell("stopped", cell)
        for cell in waiting:
            self._tell("left", cell)

    def _next(self, waiting: list[Cell]) -> Cell | None:
        for place, cell in enumerate(waiting):
            if all(need in self.done for need in cell.needs):
                return waiting.pop(place)
        return None

    def _note(self, cell: Cell, outcome: Done) -> None:
        if outcome.status == "stopped":
            self.stopped = True
            self._tell("stopped", cell)
            return
        record = Record(
            cell=cell.key, kind=cell.kind, label=cell.label, status=outcome.status, error=outcome.error, recipe=cell.config.name,
            steps=outcome.steps, tokens=outcome.tokens, seconds=round(outcome.seconds, 3), config=to_json(cell.facts), created=now(),
        )  # fmt: skip
        self.table.write(record, outcome.rows)
        if outcome.status == "done":
            self.done.add(cell.key)
        else:
            self.failed[cell.key] = outcome.error
        self._tell(outcome.status, cell, error=outcome.error, seconds=outcome.seconds)

    def _tell(self, what: Any, cell: Cell, *, told: Told | None = None, error: str = "", seconds: float = 0.0) -> None:
        self.report(News(what, cell, len(self.done) + len(self.failed), len(self.cells), told, error, seconds))

    def summary(self, skipped: int) -> Summary:
        labels = {cell.key: cell.label for cell in self.cells}
        failed = tuple((labels[key], error) for key, error in self.failed.items())
        left = len(self.cells) - len(self.done) - len(failed)
        return Summary(
            out=self.table.folder, total=len(self.cells), done=len(self.done), skipped=skipped, failed=failed, left=left,
            stopped=self.stopped,
        )  # fmt: skip


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One sweep a folder at a time: two would train the same runs."""
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ZendayaError(f"{folder}: another sweep is at work there; wait for it, or give another --out") from None
        yield


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM stops a sweep as Ctrl-C does, saving what there is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
