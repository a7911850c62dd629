"""Running a sweep: cells are encoded, trained or decoded in the order of their dependencies, and recorded; done cells are skipped."""

from __future__ import annotations

import contextlib
import fcntl
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zendaya.data.features.store import HEADER
from zendaya.errors import ZendayaError
from zendaya.evaluation.corpus import evaluate_corpus
from zendaya.evaluation.metrics.results import SCORES, TRACES
from zendaya.evaluation.metrics.scores import Scores
from zendaya.evaluation.options import EvalOptions
from zendaya.nn.checkpoint import RECIPE
from zendaya.parallel import Executor, Finished, Workers
from zendaya.records import Progress
from zendaya.research.sweep.cells import DECODES, RUNS, Cell, cells_of
from zendaya.research.sweep.grids import OWN, Grid
from zendaya.research.sweep.table import Record, Row, Table, now, to_json
from zendaya.runtime.policies import parse_policy
from zendaya.training.loop import BEST, Report, handling
from zendaya.training.prepare import prepare_features
from zendaya.training.train import train

SWEEP_LOCK, RUN_LOCK = ".sweep.lock", ".lock"
CLAIM_S = 60.0
"""Longest wait for a run that another process trains: the worker of a killed sweep may still be in its last step."""


@dataclass(frozen=True)
class CellUpdate:
    """A change of a cell's state, or its progress."""

    state: Literal["skipped", "begun", "running", "done", "failed", "stopped", "left"]
    cell: Cell
    finished: int  # cells that are done or failed, those of earlier sweeps included
    total: int
    progress: Progress | None = None  # of a running cell
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """The result of a sweep."""

    out: Path
    total: int
    done: int  # cells that are done, those of earlier sweeps included
    skipped: int  # of these, done in earlier sweeps
    failed: tuple[tuple[str, str], ...]  # (label, error) of each cell that failed
    left: int  # cells that never began: a cell they depend on failed, or the sweep was stopped
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The result of a cell's work."""

    status: Literal["done", "failed", "stopped"]
    error: str = ""
    seconds: float = 0.0
    steps: int | None = None
    tokens: int | None = None
    rows: tuple[Row, ...] = ()


Message = tuple[str, Progress]  # the key of a cell, and its progress
Tell = Callable[[Message], None]


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
    busy = f"{table.folder}: another sweep is running there; wait for it, or give another --out"
    with locked(table.folder / SWEEP_LOCK, 0.0, busy):
        known = table.records()
        done = {cell.key for cell in cells if _is_done(cell, known.get(cell.key))}
        run = _Run(cells, done, table, report)
        if len(done) < len(cells):
            interruptible = handling(signal.default_int_handler, signal.SIGTERM)  # as Ctrl-C: running cells are saved
            with interruptible, Executor(cell_work, workers, purpose="a sweep on a Ray cluster") as executor:
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
                self._note(executor.wait(lambda message: self._tell("running", self.by_key[message[0]], progress=message[1])))
        except KeyboardInterrupt:
            self.stopped = True
        if self.stopped:
            for finished in executor.stop():  # some were just done; stopped training runs have been saved
                self._note(finished)
        for cell in executor.running:
            self._tell("stopped", cell)
        for cell in waiting:
            self._tell("left", cell)

    def _next(self, waiting: list[Cell]) -> Cell | None:
        ready = (place for place, cell in enumerate(waiting) if self.done.issuperset(cell.needs))
        place = next(ready, None)
        return None if place is None else waiting.pop(place)

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
        failed = tuple((self.by_key[key].label, error) for key, error in self.failed.items())
        left = len(self.cells) - len(self.done) - len(failed)
        return SweepSummary(
            out=self.table.folder, total=len(self.cells), done=len(self.done), skipped=skipped, failed=failed, left=left,
            stopped=self.stopped,
        )  # fmt: skip


# The work of one cell.

_SHORT = {
    "average_lagging": "AL", "length_adaptive_average_lagging": "LAAL", "average_proportion": "AP", "differentiable_average_lagging": "DAL",
}  # fmt: skip


@contextlib.contextmanager
def locked(path: Path, wait_s: float, complaint: str) -> Iterator[None]:
    """Exclusive use of what a lock file stands for."""
    with path.open("a+") as file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ZendayaError(complaint) from None
                time.sleep(0.1)
        yield


def cell_work() -> Callable[[Cell, Tell], CellResult]:
    """The work of a sweep's workers."""
    return run_cell


def run_cell(cell: Cell, tell: Tell) -> CellResult:
    """Run a cell; an error is its outcome, not the end of the sweep."""
    begun = time.monotonic()
    work = {"encode": _encode, "train": _train, "evaluate": _evaluate}[cell.kind]
    try:
        return work(cell, lambda progress: tell((cell.key, progress)))
    except Exception as error:
        text = " ".join(str(error).split()) if isinstance(error, ZendayaError) else traceback.format_exc()
        return CellResult(status="failed", error=text, seconds=time.monotonic() - begun)


def _encode(cell: Cell, report: Report) -> CellResult:
    begun = time.monotonic()
    prepare_features(cell.config, cell.data, cell.store, cell.data_digest, report)
    return CellResult(status="done", seconds=time.monotonic() - begun)


def _train(cell: Cell, report: Report) -> CellResult:
    folder = cell.out / RUNS / cell.key
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / RUN_LOCK, CLAIM_S, f"{folder}: another process is training this run; wait for it, or stop it"):
        result = train(cell.config, data=cell.data, out=folder, store=cell.store, resume=True, limit=cell.limit, report=report)
    status: Literal["done", "stopped"] = "stopped" if result.interrupted else "done"
    return CellResult(status=status, seconds=result.seconds, steps=result.steps, tokens=result.tokens)


def _evaluate(cell: Cell, report: Report) -> CellResult:
    assert cell.decode is not None
    begun = time.monotonic()
    how, folder = cell.decode, cell.out / RUNS / cell.run
    training = json.loads((folder / RECIPE).read_bytes())
    out = cell.out / DECODES / cell.key
    schedule = parse_policy(_schedule(cell, training))
    options = EvalOptions(
        store=cell.store, split=how.split, schedules=(schedule,), scale=how.scale_of_mode, streaming=how.streams, metrics=how.metrics,
        normalise=how.normalise, limit=how.limit, out=out, force=any((out / name).exists() for name in (TRACES, SCORES)), discard=True,
    )  # fmt: skip
    found = evaluate_corpus(folder / BEST, cell.config.corpus, cell.data, options, report)
    seconds = time.monotonic() - begun
    (scores,) = found.scores
    rows = tuple(_rows(cell, scores, found.record["signature"], training, (out / TRACES).relative_to(cell.out), seconds))
    return CellResult(status="done", seconds=seconds, rows=rows)


def _schedule(cell: Cell, training: dict[str, Any]) -> str:
    """The decoding schedule in full: `own` is the training schedule; default stride of wait-k: the corpus's ρ."""
    text = str(training["schedule"]) if cell.schedule == OWN else cell.schedule
    return str(parse_policy(text).for_run(training["rho"]))


def _rows(cell: Cell, scores: Scores, evaluation: dict[str, Any], training: dict[str, Any], traces: Path, seconds: float) -> Iterator[Row]:
    assert cell.decode is not None
    for metric, value, signature in measures(scores):
        yield Row(
            cell=cell.key, run=cell.run, grid=cell.grid, recipe=cell.config.name, corpus=cell.config.corpus, split=cell.decode.split,
            form=cell.config.form, mode=cell.decode.mode, scale=scores.scale, train_schedule=str(training["schedule"]),
            decode_schedule=scores.schedule, seed=cell.config.loop.seed, metric=metric, value=value, n=scores.num_clips,
            lag=scores.latency_tokens.average_lagging,
            signature=to_json({"metric": signature, "evaluation": evaluation, "training": training}), data_digest=cell.data_digest,
            checkpoint_digest=evaluation["checkpoint_sha256"], traces_digest=evaluation["traces_sha256"], traces=traces.as_posix(),
            seconds=round(seconds, 3), created=now(),
        )  # fmt: skip


def measures(scores: Scores) -> Iterator[tuple[str, float, str]]:
    """Every number of a decode as (name, value, signature): quality in percent, lag in source tokens or (suffix _s) seconds."""
    for quality in scores.quality:
        yield quality.name, quality.value, quality.signature
    for name, value in asdict(scores).items():
        if isinstance(value, dict):
            unit = name.removeprefix("latency").removesuffix("_tokens")
            for inner, number in value.items():
                if isinstance(number, int | float):
                    yield f"{_SHORT.get(inner, inner)}{unit}", float(number), name
        elif isinstance(value, int | float) and name != "num_clips":
            yield name, float(value), "scores"
