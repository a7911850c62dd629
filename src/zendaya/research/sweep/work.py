"""The work of one cell: encode features, train a run, or decode and score a checkpoint."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zendaya.errors import ZendayaError
from zendaya.evaluation.corpus import evaluate_corpus
from zendaya.evaluation.metrics.results import SCORES, TRACES
from zendaya.evaluation.metrics.scores import Scores
from zendaya.evaluation.options import EvalOptions
from zendaya.nn.checkpoint import RECIPE
from zendaya.records import Progress
from zendaya.research.sweep.cells import DECODES, RUNS, Cell
from zendaya.research.sweep.grids import OWN
from zendaya.research.sweep.table import Row, now, to_json
from zendaya.runtime.policies import parse_policy
from zendaya.training.loop import BEST
from zendaya.training.prepare import prepare_features
from zendaya.training.train import train

LOCK = ".lock"
CLAIM_S = 60.0
"""How long to wait for a run that another process holds."""


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The end of a cell."""

    status: Literal["done", "failed", "stopped"]
    error: str = ""
    seconds: float = 0.0
    steps: int | None = None
    tokens: int | None = None
    rows: tuple[Row, ...] = ()


Message = tuple[str, Progress]
"""The key of a cell, and its progress."""
Tell = Callable[[Message], None]
Report = Callable[[Progress], None]

_SHORT = {
    "average_lagging": "AL",
    "length_adaptive_average_lagging": "LAAL",
    "average_proportion": "AP",
    "differentiable_average_lagging": "DAL",
}


def cell_work() -> Callable[[Cell, Tell], CellResult]:
    """The work of a sweep's workers."""
    return run_cell


def run_cell(cell: Cell, tell: Tell) -> CellResult:
    """Run a cell; an error is its outcome, not the end of the sweep."""
    begun = time.monotonic()

    def report(progress: Progress) -> None:
        tell((cell.key, progress))

    try:
        work = {"encode": _encode, "train": _train, "evaluate": _evaluate}[cell.kind]
        return work(cell, report)
    except ZendayaError as error:
        return CellResult(status="failed", error=" ".join(str(error).split()), seconds=time.monotonic() - begun)
    except Exception:
        return CellResult(status="failed", error=traceback.format_exc(), seconds=time.monotonic() - begun)


def _encode(cell: Cell, report: Report) -> CellResult:
    begun = time.monotonic()
    prepare_features(cell.config, cell.data, cell.store, cell.data_digest, report)
    return CellResult(status="done", seconds=time.monotonic() - begun)


def _train(cell: Cell, report: Report) -> CellResult:
    folder = cell.out / RUNS / cell.key
    with _claimed(folder):
        result = train(cell.config, data=cell.data, out=folder, store=cell.store, resume=True, limit=cell.limit, report=report)
    status: Literal["done", "stopped"] = "stopped" if result.interrupted else "done"
    return CellResult(status=status, seconds=result.seconds, steps=result.steps, tokens=result.tokens)


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Exclusive use of a run: the worker of a killed sweep may still be in its last step."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        deadline = time.monotonic() + CLAIM_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ZendayaError(f"{folder}: another process is training this run; wait for it, or stop it") from None
                time.sleep(0.1)
        yield


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
    """The decoding schedule in full: `own` is the training schedule; wait-k has the stride of the corpus unless one is given."""
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
    """Every number of a decode as (name, value, signature): quality in percent, lag in source tokens or, ending in _s, in seconds."""
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
