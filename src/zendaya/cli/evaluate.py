"""The words of `zendaya evaluate`, `score` and `compare`: a corpus decoded and scored, traces scored again, and two of them compared."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from zendaya.cli import options
from zendaya.corpora import CORPORA, get
from zendaya.errors import ConfigError
from zendaya.metrics.comparison import compare_traces
from zendaya.metrics.quality import METRICS
from zendaya.metrics.results import SCORES, TRACES, UNFINISHED, check_free, rescore, write_scores
from zendaya.metrics.scores import Scores, check_normalise
from zendaya.metrics.significance import RESAMPLES
from zendaya.policies import parse_policy
from zendaya.schedule import is_policy

if TYPE_CHECKING:
    from zendaya.evaluate import Progress

_Metrics = Annotated[str | None, typer.Option(help=f"Scores with commas between: {', '.join(METRICS)}; those of the task if not given.")]
_Normalise = typer.Option(help="For wer: english (Whisper's), basic (lower case, no punctuation) or none.")
_Force = Annotated[bool, typer.Option(help="Replace results that are there.")]
_SECONDS = {
    "AL": "average_lagging", "LAAL": "length_adaptive_average_lagging", "DAL": "differentiable_average_lagging", "first": "first_token"
}  # fmt: skip
_Json = Annotated[bool, typer.Option("--json", help=f"Print what {SCORES} holds.")]


def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint folder or hub id.")],
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help=f"One of: {', '.join(CORPORA)}.")],
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="The folder (or file) with the published files; under $ZENDAYA_DATA if not given.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="The feature store that zendaya encode made of them; the run's own if not given.")
    ] = None,
    split: Annotated[str, typer.Option(help="The split to decode.")] = "test",
    schedule: Annotated[
        list[str] | None,
        typer.Option(help="A schedule or policy, as 0.3, wait-k=10,stride=2, full, alignatt=4; may be repeated; gamma=0 if not given."),
    ] = None,
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming/--offline",
            help="Streaming: one session a stream, its consecutive clips cut at their ends, each with the one before for history, "
            "the schedule scaled by W. Offline: each clip alone, the schedule scaled by its own length.",
        ),
    ] = False,
    scale: Annotated[
        str | None, typer.Option(help="segment (each clip's own length) or window (strictly causal); that of the form if not given.")
    ] = None,
    window: Annotated[int | None, typer.Option(help="With --scale window: W in source tokens; the model's if not given.")] = None,
    steps: Annotated[int | None, typer.Option(help="Fix N̂, instead of the model's length head.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="End a window's text after so many steps.")] = None,
    metrics: _Metrics = None,
    normalise: Annotated[str, _Normalise] = "english",
    limit: Annotated[int | None, typer.Option(help="Decode the first N clips only.", min=1)] = None,
    computation_aware: Annotated[bool, typer.Option(help="Time the decoding, and score lag in seconds with it too.")] = False,
    workers: Annotated[int, typer.Option(help="Processes that decode, each on one thread.", min=1)] = 1,
    engine: options.Engine = "auto",
    precision: options.Precision = "float32",
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"The folder that {TRACES} and {SCORES} go to, evaluated/CORPUS-SPLIT if not given; an evaluation that was interrupted "
            "goes on there."
        ),
    ] = None,
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Decode a split of a corpus as its source arrives, and score quality, lag, exposure and stability: a row a schedule."""
    from zendaya.evaluate import evaluate_corpus

    path, out = path or _folder(corpus), out or Path("evaluated") / f"{corpus}-{split}"
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
            scale=scale or ("window" if streaming else "segment"), streaming=streaming, window=window,  # type: ignore[arg-type]
            steps=steps, max_steps=max_steps, metrics=_names(metrics), normalise=normalise,  # type: ignore[arg-type]
            computation_aware=computation_aware, limit=limit, workers=workers, backend=engine, precision=precision,  # type: ignore[arg-type]
            out=out, force=force, report=show,
        )  # fmt: skip
    except KeyboardInterrupt:
        if (out / UNFINISHED).exists():
            console.print(f"what was decoded is kept in {out}: the same command goes on from there", soft_wrap=True)
        raise
    finally:
        bar.stop()
    if as_json:
        print(json.dumps(found.record, ensure_ascii=False))
        return
    _print_table(found.scores, found.record)
    Console(stderr=True).print(f"{out}: {TRACES} and {SCORES}", soft_wrap=True, highlight=False)
    if found.num_without_reference:
        print(f"{found.num_without_reference} clips have no reference to be scored against and are left out: see {path}")
    if found.num_left_out:
        print(f"{found.num_left_out} clips could not be encoded and are left out: see problems.jsonl in {store or 'the store'}")


def _folder(corpus: str) -> Path:
    """Where the recipes look for a corpus."""
    from zendaya.recipes import data_folder, recipe, recipes

    get(corpus)
    known = [config for config in map(recipe, recipes()) if getattr(config, "corpus", "") == corpus]
    if not known or "ZENDAYA_DATA" not in os.environ:
        raise ConfigError(f"the corpus {corpus} needs its folder or file: give PATH" + (", or set ZENDAYA_DATA" if known else ""))
    return data_folder(known[0], None)


def score(
    traces: Annotated[Path, typer.Argument(metavar="TRACES", help=f"A {TRACES}, or the folder it lies in.")],
    metrics: _Metrics = None,
    normalise: Annotated[str | None, _Normalise] = None,
    out: Annotated[Path | None, typer.Option(help=f"The folder that {SCORES} goes to.")] = None,
    force: _Force = False,
    as_json: _Json = False,
) -> None:
    """Score traces again, without a model: as they were scored before, or with other metrics."""
    if out is not None:
        check_free(out, force=force, names=[SCORES])
    scores, record = rescore(traces, metrics=_names(metrics), normalise=normalise)  # type: ignore[arg-type]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_scores(out, record)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        _print_table(scores, record)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help=f"A {TRACES}, or the folder it lies in.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another, of the same clips; or the same one, for two of its schedules.")],
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", "--metric", help=f"With commas between: {', '.join(METRICS)}; those of A's scores if not given."),
    ] = None,
    a_schedule: Annotated[str | None, typer.Option(help="Which schedule of A, where it holds several.")] = None,
    b_schedule: Annotated[str | None, typer.Option(help="Which of B.")] = None,
    normalise: Annotated[str | None, _Normalise] = None,
    resamples: Annotated[int, typer.Option(help="Times that clips are drawn.", min=1)] = RESAMPLES,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two decodes of the same clips: both scores, their difference A − B, its 95 % interval and two-sided p."""
    if normalise is not None:
        check_normalise(normalise)
    found = compare_traces(
        a, b, metrics=_names(metrics), a_schedule=a_schedule, b_schedule=b_schedule, normalise=normalise,  # type: ignore[arg-type]
        resamples=resamples, seed=seed,
    )  # fmt: skip
    if as_json:
        print(json.dumps(found.record, ensure_ascii=False))
        return
    print(f"A  {found.a}\nB  {found.b}\n{found.num_clips} clips, paired bootstrap of {resamples} resamples, seed {seed}\n")
    rows = [["", "A", "B", "A − B", "95 % interval", "p"]]
    for one in found.metrics:
        gap = one.difference
        interval = f"[{gap.low:+.2f}, {gap.high:+.2f}]{' *' if gap.excludes_zero else '  '}"
        rows.append([one.name, f"{one.a:.2f}", f"{one.b:.2f}", f"{gap.value:+.2f}", interval, f"{gap.p:.3f}"])
    _print_rows(rows)
    print("\n* the interval excludes 0; p: 2 · (1 + resamples on the rarer side of 0) / (1 + resamples)")
    for one in found.metrics:
        print(f"{one.name}: {one.signature}{'' if one.higher_is_better else '; lower is better'}")


def _names(metrics: str | None) -> list[str] | None:
    """What was asked for, each once."""
    return None if metrics is None else list(dict.fromkeys(name for name in metrics.lower().replace(" ", "").split(",") if name))


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is words and whose others are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]))


def _print_table(scores: Sequence[Scores], record: dict[str, Any]) -> None:
    timed = any(one.latency_s is not None for one in scores)
    computing = any(one.latency_computing_s is not None for one in scores)
    names = [quality.name for quality in scores[0].quality]
    lags = [
        "AL",
        "LAAL",
        "AP",
        "DAL",
        "first",
        *(f"{name} s" for name in _SECONDS if timed),
        *(f"{name} ca" for name in _SECONDS if computing),
    ]
    costs = ["rows", "revised", "NE"] if any(is_policy(one.schedule) for one in scores) else []
    differing = [name for name in ("num_clips", "scale") if len({getattr(one, name) for one in scores}) > 1]  # then each row says its own
    rows = [
        ["schedule", *(name.removeprefix("num_") for name in differing), *names, *lags, "Ē", "Ē plan", "1/(1+γ)", *costs],
        *(
            [
                one.schedule,
                *(str(getattr(one, name)) for name in differing),
                *_cells(one, timed, computing),
                *(_costs(one) if costs else []),
            ]
            for one in scores
        ),
    ]
    shared = {"num_clips": f"{scores[0].num_clips} clips", "scale": f"scale {scores[0].scale}"}
    head = ", ".join(words for name, words in shared.items() if name not in differing) or "clips and scale by row"
    print(f"{head}; lag in source tokens{' and seconds' if timed else ''}\n")
    _print_rows(rows)
    print()
    for row in record["scores"]:
        print(row["signature"])
    for quality in scores[0].quality:
        print(f"{quality.name}: {quality.signature}")
    if computing:
        print("ca: seconds with the time that decoding took (not that of encoding, which was done before)")
    if costs:
        print(
            "rows: text rows run through the decoder a clip; revised: tokens decoded and not written that the next decode changed; "
            "NE: those by the tokens written"
        )


def _cells(one: Scores, timed: bool, computing: bool) -> list[str]:
    tokens = one.latency_tokens
    cells = [f"{quality.value:.2f}" for quality in one.quality]
    cells += [f"{tokens.average_lagging:.2f}", f"{tokens.length_adaptive_average_lagging:.2f}", f"{tokens.average_proportion:.3f}"]
    cells += [f"{tokens.differentiable_average_lagging:.2f}", f"{tokens.first_token:.2f}"]
    for wanted, clock in ((timed, one.latency_s), (computing, one.latency_computing_s)):
        if wanted:
            cells += ["–" if clock is None else f"{getattr(clock, name):.2f}" for name in _SECONDS.values()]
    limit = "–" if one.exposure_limit is None else f"{one.exposure_limit:.4f}"
    planned = "–" if is_policy(one.schedule) else f"{one.exposure_planned:.4f}"
    return [*cells, f"{one.exposure:.4f}", planned, limit]


def _costs(one: Scores) -> list[str]:
    """What the decoder was made to do, beside the steps it wrote."""
    counts = ["–" if value is None else f"{value:.1f}" for value in (one.decoder_rows, one.revised)]
    return [*counts, "–" if one.normalised_erasure is None else f"{one.normalised_erasure:.2f}"]
