"""Running a sweep: cells in the order of their dependencies, each recorded when done; cells done before are skipped."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zendaya.data.features.store import HEADER
from zendaya.errors import ZendayaError
from zendaya.evaluation.metrics.results import TRACES
from zendaya.parallel import Executor, Finished, Workers
from zendaya.records import Progress
from zendaya.research.sweep.cells import DECODES, RUNS, Cell, cells_of
from zendaya.research.sweep.grids import Grid
from zendaya.research.sweep.table import Record, Table, now, to_json
from zendaya.research.sweep.work import CellResult, Message, cell_work
from zendaya.training.loop import BEST

LOCK = ".sweep.lock"


@dataclass(frozen=True)
class CellUpdate:
    """A change of a cell's state, or its progress."""

    state: Literal["skipped", "begun", "running", "done", "failed", "stopped", "left"]
    cell: Cell
    finished: int
    """Cells that are done or failed, those of earlier sweeps included."""
    total: int
    progress: Progress | None = None
    """Of a running cell."""
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """The result of a sweep."""

    out: Path
    total: int
    done: int
    """Cells that are done, those of earlier sweeps included."""
    skipped: int
    """Of these, done in earlier sweeps."""
    failed: tuple[tuple[str, str], ...]
    """(label, error) of each cell that failed."""
    left: int
    """Cells that never began: a cell they depend on failed, or the sweep was stopped."""
    stopped: bool


def sweep(
    grid: Grid, *, data: str | Path, out: str | Path, features: str | Path | None = None, processes: int = 1, ray: str | None = None,
    report: Callable[[CellUpdate], None] = lambda _: None,
) -> SweepSummary:  # fmt: skip
    """Run every cell of a grid that is not done; the same call continues a sweep that was stopped or killed.

    `data` is the folder of all corpora, or of the only one. `features` is the folder of feature stores (default `out`/features), which
    sweeps may share. `ray` is `local`, or the address of a cluster whose machines all see these folders.
    """
    workers = Workers(processes if ray in (None, "local") else 0, ray=ray is not None, address=ray, gpus=True)
    cells = cells_of(grid, data=data, out=out, features=features)  # a missing corpus is an error before anything is written
    table = Table(out, create=True)
    with _alone(table.folder):
        known = table.records()
        done = {cell.key for cell in cells if _is_done(cell, known.get(cell.key))}
        run = _Run(cells, done, table, report)
        if len(done) < len(cells):
            with _terminated_as_interrupted(), Executor(cell_work, workers, purpose="a sweep on a Ray cluster") as executor:
                run.go(executor)
        return run.summary(len(done))


def _is_done(cell: Cell, record: Record | None) -> bool:
    """Whether a cell was done, and its files still exist."""
    if record is None or record.status != "done":
        return False
    made = {"encode": cell.store / HEADER, "train": cell.out / RUNS / cell.key / BEST, "evaluate": cell.out / DECODES / cell.key / TRACES}
    return made[cell.kind].exists()


class _Run:
    def __init__(self, cells: list[Cell], done: set[str], table: Table, report: Callable[[CellUpdate], None]) -> None:
        self.cells, self.done, self.table, self.report = cells, set(done), table, report
        self.by_key = {cell.key: cell for cell in cells}
        self.failed: dict[str, str] = {}
        self.stopped = False
        for cell in cells:
            if cell.key in done:
                self._tell("skipped", cell)

    def go(self, executor: Executor[Cell, CellResult]) -> None:
        waiting = [cell for cell in self.cells if cell.key not in self.done]
        try:
            while not self.stopped:
                while executor.num_idle and (cell := self._next(waiting)) is not None:
                    self._tell("begun", cell)
                    executor.submit(cell)
                if not executor.running:
                    break
                self._note(executor.wait(self._running))
        except KeyboardInterrupt:
            self.stopped = True
        if self.stopped:
            for finished in executor.stop():  # some were just done; stopped training runs have been saved
                self._note(finished)
        for cell in executor.running:
            self._tell("stopped", cell)
        for cell in waiting:
            self._tell("left", cell)

    def _running(self, message: Message) -> None:
        key, progress = message
        self._tell("running", self.by_key[key], progress=progress)

    def _next(self, waiting: list[Cell]) -> Cell | None:
        for place, cell in enumerate(waiting):
            if all(need in self.done for need in cell.needs):
                return waiting.pop(place)
        return None

    def _note(self, finished: Finished[Cell, CellResult]) -> None:
        cell, outcome = finished.job, finished.result or CellResult(status="failed", error=str(finished.error))
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

    def _tell(self, state: Any, cell: Cell, *, progress: Progress | None = None, error: str = "", seconds: float = 0.0) -> None:
        self.report(CellUpdate(state, cell, len(self.done) + len(self.failed), len(self.cells), progress, error, seconds))

    def summary(self, skipped: int) -> SweepSummary:
        labels = {cell.key: cell.label for cell in self.cells}
        failed = tuple((labels[key], error) for key, error in self.failed.items())
        left = len(self.cells) - len(self.done) - len(failed)
        return SweepSummary(
            out=self.table.folder, total=len(self.cells), done=len(self.done), skipped=skipped, failed=failed, left=left,
            stopped=self.stopped,
        )  # fmt: skip


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One sweep per folder at a time: two would train the same runs."""
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ZendayaError(f"{folder}: another sweep is running there; wait for it, or give another --out") from None
        yield


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM stops a sweep as Ctrl-C does: running cells are saved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
