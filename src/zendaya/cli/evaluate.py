"""The words of `zendaya evaluate` and `zendaya score`: a corpus decoded and scored, and traces scored again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from zendaya.corpora import CORPORA
from zendaya.metrics.quality import METRICS
from zendaya.metrics.results import SCORES, TRACES, rescore, write_scores
from zendaya.metrics.scores import Scores
from zendaya.policies import parse_policy
from zendaya.schedule import is_policy

if TYPE_CHECKING:
    from zendaya.evaluate import Progress

_Metrics = Annotated[str | None, typer.Option(help=f"Scores with commas between: {', '.join(METRICS)}; those of the task if not given.")]
_Normalise = typer.Option(help="For wer: english (Whisper's), basic (lower case, no punctuation) or none.")
_Json = Annotated[bool, typer.Option("--json", help=f"Print what {SCORES} holds.")]


def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint folder or hub id.")],
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help=f"One of: {', '.join(CORPORA)}.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder (or file) with the published files.")],
    store: Annotated[Path, typer.Option(help="The feature store that zendaya encode made of them.")],
    split: Annotated[str, typer.Option(help="The split to decode.")] = "test",
    schedule: Annotated[
        list[str] | None,
        typer.Option(help="A schedule or policy, as 0.3, wait-k=10,stride=2, full, alignatt=4; may be repeated; gamma=0 if not given."),
    ] = None,
    scale: Annotated[str, typer.Option(help="segment (the paper's: each clip's own length) or window (strictly causal).")] = "segment",
    window: Annotated[int | None, typer.Option(help="With --scale window: W in source tokens; the model's if not given.")] = None,
    steps: Annotated[int | None, typer.Option(help="Fix N̂, instead of the model's length head.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="End a window's text after so many steps.")] = None,
    metrics: _Metrics = None,
    normalise: Annotated[str, _Normalise] = "english",
    limit: Annotated[int | None, typer.Option(help="Decode the first N clips only.", min=1)] = None,
    workers: Annotated[int, typer.Option(help="Processes that decode, each on one thread.", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help=f"The folder that {TRACES} and {SCORES} go to.")] = None,
    as_json: _Json = False,
) -> None:
    """Decode a split of a corpus as its source arrives, and score quality, lag and exposure: a row a schedule."""
    from zendaya.evaluate import evaluate_corpus

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("decoding", total=None)
    shown = ""

    def show(progress: Progress) -> None:
        nonlocal shown
        if progress.schedule != shown:
            bar.start()
            bar.reset(task, total=progress.total, description=progress.schedule)
            shown = progress.schedule
        bar.update(task, completed=progress.done)

    try:
        found = evaluate_corpus(
            checkpoint, corpus, path, store=store, split=split, schedules=[parse_policy(text) for text in schedule or ["gamma=0"]],
            scale=scale, window=window, steps=steps, max_steps=max_steps, metrics=_names(metrics),  # type: ignore[arg-type]
            normalise=normalise, limit=limit, workers=workers, out=out, report=show,  # type: ignore[arg-type]
        )  # fmt: skip
    finally:
        bar.stop()
    if as_json:
        print(json.dumps(found.record, ensure_ascii=False))
        return
    _print_table(found.scores)
    if found.num_left_out:
        print(f"{found.num_left_out} clips could not be encoded and are left out: see problems.jsonl in {store}")


def score(
    traces: Annotated[Path, typer.Argument(metavar="TRACES", help=f"A {TRACES}, or the folder it lies in.")],
    metrics: _Metrics = None,
    normalise: Annotated[str | None, _Normalise] = None,
    out: Annotated[Path | None, typer.Option(help=f"The folder that {SCORES} goes to.")] = None,
    as_json: _Json = False,
) -> None:
    """Score traces again, without a model: as they were scored before, or with other metrics."""
    scores, record = rescore(traces, metrics=_names(metrics), normalise=normalise)  # type: ignore[arg-type]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_scores(out, record)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        _print_table(scores)


def _names(metrics: str | None) -> list[str] | None:
    return None if metrics is None else [name for name in metrics.lower().replace(" ", "").split(",") if name]


def _print_table(scores: Sequence[Scores]) -> None:
    timed = any(one.latency_s is not None for one in scores)
    names = [quality.name for quality in scores[0].quality]
    lags = ["AL", "LAAL", "AP", "DAL", "first", *(["AL s", "LAAL s", "DAL s", "first s"] if timed else [])]
    costs = ["rows", "revised"] if any(is_policy(one.schedule) for one in scores) else []
    rows = [
        ["schedule", *names, *lags, "Ē", "Ē plan", "1/(1+γ)", *costs],
        *([one.schedule, *_cells(one, timed), *(_costs(one) if costs else [])] for one in scores),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"{scores[0].num_clips} clips, scale {scores[0].scale}; lag in source tokens{' and seconds' if timed else ''}\n")
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]))
    print()
    for quality in scores[0].quality:
        print(f"{quality.name}: {quality.signature}")
    if costs:
        print("rows: text rows run through the decoder a clip; revised: tokens decoded and not written that the next decode changed")


def _cells(one: Scores, timed: bool) -> list[str]:
    tokens, clock = one.latency_tokens, one.latency_s
    cells = [f"{quality.value:.2f}" for quality in one.quality]
    cells += [f"{tokens.average_lagging:.2f}", f"{tokens.length_adaptive_average_lagging:.2f}", f"{tokens.average_proportion:.3f}"]
    cells += [f"{tokens.differentiable_average_lagging:.2f}", f"{tokens.first_token:.2f}"]
    if timed and clock is not None:
        seconds = (clock.average_lagging, clock.length_adaptive_average_lagging, clock.differentiable_average_lagging, clock.first_token)
        cells += [f"{value:.2f}" for value in seconds]
    elif timed:
        cells += ["–"] * 4
    limit = "–" if one.exposure_limit is None else f"{one.exposure_limit:.4f}"
    planned = "–" if is_policy(one.schedule) else f"{one.exposure_planned:.4f}"
    return [*cells, f"{one.exposure:.4f}", planned, limit]


def _costs(one: Scores) -> list[str]:
    """What the decoder was made to do, beside the steps it wrote."""
    return ["–" if value is None else f"{value:.1f}" for value in (one.decoder_rows, one.revised)]
