"""The work of one cell, the same in whatever process it is done: features encoded, a run trained, a checkpoint decoded and scored."""

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

import torch

from zendaya.errors import ZendayaError
from zendaya.evaluate import evaluate_corpus
from zendaya.metrics.results import SCORES, TRACES
from zendaya.metrics.scores import Scores
from zendaya.policies import parse_policy
from zendaya.schedule import WaitK
from zendaya.sweep.cells import DECODES, RUNS, Cell
from zendaya.sweep.grids import OWN
from zendaya.sweep.table import Row, now, to_json
from zendaya.training import prepare_features, train
from zendaya.training.loop import BEST
from zendaya.training.state import RECIPE

LOCK = ".lock"
CLAIM_S = 60.0
"""How long a run that another process holds is waited for."""


@dataclass(frozen=True)
class Told:
    """How far a cell is."""

    cell: str
    done: int
    total: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class Done:
    """What became of a cell."""

    status: Literal["done", "failed", "stopped"]
    error: str = ""
    seconds: float = 0.0
    steps: int | None = None
    tokens: int | None = None
    rows: tuple[Row, ...] = ()


Tell = Callable[[Told], None]

_SHORT = {
    "average_lagging": "AL",
    "length_adaptive_average_lagging": "LAAL",
    "average_proportion": "AP",
    "differentiable_average_lagging": "DAL",
}


def do(cell: Cell, tell: Tell) -> Done:
    """Do a cell; what goes wrong with it is its outcome, not the end of the sweep."""
    begun = time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums on two threads are rounded otherwise than on one: every worker has one
    try:
        work = {"encode": _encode, "train": _train, "evaluate": _evaluate}[cell.kind]
        return work(cell, tell)
    except ZendayaError as error:
        return Done(status="failed", error=" ".join(str(error).split()), seconds=time.monotonic() - begun)
    except Exception:
        return Done(status="failed", error=traceback.format_exc(), seconds=time.monotonic() - begun)
    finally:
        torch.set_num_threads(threads)


def _encode(cell: Cell, tell: Tell) -> Done:
    begun = time.monotonic()
    prepare_features(
        cell.config, cell.data, cell.store, cell.data_digest,
        lambda progress: tell(Told(cell.key, progress.done, progress.total, "encoding")),
    )  # fmt: skip
    return Done(status="done", seconds=time.monotonic() - begun)


def _train(cell: Cell, tell: Tell) -> Done:
    folder = cell.out / RUNS / cell.key
    with _claimed(folder):
        result = train(
            cell.config, data=cell.data, out=folder, store=cell.store, resume=True, limit=cell.limit,
            report=lambda shown: tell(
                Told(cell.key, shown.done, shown.total, f"epoch {shown.epoch}/{shown.epochs}, loss {shown.loss:.3f}")
            ),
        )  # fmt: skip
    status: Literal["done", "stopped"] = "stopped" if result.interrupted else "done"
    return Done(status=status, seconds=result.seconds, steps=result.steps, tokens=result.tokens)


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """A run of one's own: the worker of a sweep that was killed may still be in its last step."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        deadline = time.monotonic() + CLAIM_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ZendayaError(f"{folder}: another process is training this run; wait for it, or end it") from None
                time.sleep(0.1)
        yield


def _evaluate(cell: Cell, tell: Tell) -> Done:
    assert cell.decode is not None
    begun = time.monotonic()
    how, folder = cell.decode, cell.out / RUNS / cell.run
    training = json.loads((folder / RECIPE).read_bytes())
    out = cell.out / DECODES / cell.key
    schedule = parse_policy(_schedule(cell, training))
    found = evaluate_corpus(
        folder / BEST, cell.config.corpus, cell.data, store=cell.store, split=how.split, schedules=[schedule],
        scale=how.scale_of_mode, streaming=how.streams, metrics=how.metrics, normalise=how.normalise, limit=how.limit, out=out,
        force=any((out / name).exists() for name in (TRACES, SCORES)), discard=True,
        report=lambda progress: tell(Told(cell.key, progress.done, progress.total, "decoding")),
    )  # fmt: skip
    seconds = time.monotonic() - begun
    (scores,) = found.scores
    rows = tuple(_rows(cell, scores, found.record["signature"], training, (out / TRACES).relative_to(cell.out), seconds))
    return Done(status="done", seconds=seconds, rows=rows)


def _schedule(cell: Cell, training: dict[str, Any]) -> str:
    """The decoding schedule in full: a checkpoint's own, and wait-k at the stride of its corpus unless another is given."""
    text = str(training["schedule"]) if cell.schedule == OWN else cell.schedule
    schedule = parse_policy(text)
    return str(schedule.at_stride(training["rho"]) if isinstance(schedule, WaitK) else schedule)


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
    """Every number of a decode as (name, value, signature): quality in percent, lag in source tokens and, ending in _s, in seconds."""
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
