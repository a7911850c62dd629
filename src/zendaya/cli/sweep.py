"""The words of `zendaya sweep` and `zendaya report`: a grid run, resumed or priced; its table turned into tables, figures and a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table as Printed

from zendaya.cli.encode import INTERRUPTED
from zendaya.errors import ConfigError

if TYPE_CHECKING:
    from zendaya.sweep.cost import Estimate
    from zendaya.sweep.grids import Grid
    from zendaya.sweep.run import News, Summary

FAILED = 1


def sweep(
    grid: Annotated[str | None, typer.Argument(metavar="GRID", help="A grid by name (--list), or a .json file.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of all corpora, or of the only one.", envvar="ZENDAYA_DATA")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the sweep; one that was stopped or killed goes on.")] = None,
    features: Annotated[Path | None, typer.Option(help="Where feature stores are kept, for several sweeps; OUT/features.")] = None,
    processes: Annotated[int, typer.Option(help="Cells at a time on this machine, each on one thread.", min=1)] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster: host:port, auto, or local for one of PROCESSES.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Only the runs with these seeds, as 0,1; the others may follow.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and what they would cost; needs no data.")] = False,
    tokens_per_s: Annotated[float | None, typer.Option(help="With --dry-run: the rate; else that of runs in OUT, or measured.")] = None,
    export: Annotated[Path | None, typer.Option(help="Also write the results to FILE.csv or FILE.parquet.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --export.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the grids.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary, or the dry run, as one JSON object.")] = False,
) -> None:
    """Train and decode a whole grid into one table. Stopped or killed at any moment, the same command goes on where it was."""
    from zendaya.sweep import grids
    from zendaya.sweep.table import check_export

    if listed:
        _list()
        return
    if grid is None:
        raise ConfigError("give a grid: zendaya sweep --list names them, or a .json file")
    wanted = grids.grid(grid)
    if seeds is not None:
        wanted = wanted.only(_numbers(seeds))
    if dry_run:
        _dry_run(wanted, out, tokens_per_s, as_json)
        return
    if data is None or out is None:
        raise ConfigError(
            f"grid {wanted.name} needs --data (the folder of its corpora, or $ZENDAYA_DATA) and --out (the folder of the sweep)"
        )
    if export is not None:
        check_export(export, force=force)
    _run(wanted, data, out, features, processes, ray, export, as_json)


def _numbers(text: str) -> set[int]:
    try:
        return {int(part) for part in text.split(",")}
    except ValueError:
        raise ConfigError(f"--seeds: expected whole numbers with commas between, as 0,1: got {text!r}") from None


def _list() -> None:
    from zendaya.sweep import grids

    table = Printed("grid", "runs", "decodes", "", box=None, pad_edge=False)
    for name in grids.grids():
        grid = grids.grid(name)
        runs = [(arm, config) for arm in grid.arms for config in arm.configs()]
        decodes = sum(len(decode.schedules) for arm, _ in runs for decode in arm.decodes)
        table.add_row(name, str(len(runs)), str(decodes), grid.about)
    Console(highlight=False, soft_wrap=not sys.stdout.isatty()).print(table)


def _run(
    grid: Grid, data: Path, out: Path, features: Path | None, processes: int, ray: str | None, export: Path | None, as_json: bool
) -> None:
    from zendaya.sweep.run import sweep as run
    from zendaya.sweep.table import Table

    console = Console(stderr=True)
    if console.is_terminal:
        with _Bars(console) as bars:
            summary = run(grid, data=data, out=out, features=features, processes=processes, ray=ray, report=bars.show)
    else:
        summary = run(grid, data=data, out=out, features=features, processes=processes, ray=ray, report=_say)
    if export is not None:
        Table(out).export(export, force=True)
    if as_json:
        facts = {"done": summary.done, "skipped": summary.skipped, "left": summary.left, "total": summary.total, "stopped": summary.stopped}
        typer.echo(json.dumps({"grid": grid.name, "out": str(out), **facts, "failed": [list(one) for one in summary.failed]}))
    else:
        before = f", {summary.skipped} of them before" if summary.skipped else ""
        typer.echo(f"{out}: {grid.name}: {summary.done} of {summary.total} cells done{before}")
    _end(summary)


def _end(summary: Summary) -> None:
    for label, error in summary.failed:
        typer.echo(f"zendaya: failed: {label}: {error.strip().splitlines()[-1]}", err=True)
    if summary.stopped:
        typer.echo(
            f"zendaya: stopped: {summary.done} of {summary.total} cells are done in {summary.out}; run the same command again to go on",
            err=True,
        )
        raise typer.Exit(INTERRUPTED)
    if summary.failed:
        raise typer.Exit(FAILED)


def _words(news: News) -> str:
    kind = {"encode": "encode", "train": "train", "evaluate": "decode"}[news.cell.kind]
    return f"{kind} {news.cell.label}"


def _say(news: News) -> None:
    """A line for a log: what was begun and what became of it."""
    place = f"[{news.finished}/{news.total}]"
    if news.what == "begun":
        typer.echo(f"{place} {_words(news)}", err=True)
    elif news.what in ("done", "failed"):
        error = f": {news.error.strip().splitlines()[-1]}" if news.error else ""
        typer.echo(f"{place} {news.what} {_words(news)}, {news.seconds:.0f} s{error}", err=True)
    elif news.what == "stopped":
        typer.echo(f"{place} stopped {_words(news)}", err=True)


class _Bars:
    """Bars for a terminal: one for the sweep, one for each cell at work."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=console, transient=True)
        self._whole = self._bar.add_task("cells", total=None)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, news: News) -> None:
        self._bar.update(self._whole, completed=news.finished, total=news.total)
        key = news.cell.key
        if news.what == "begun":
            self._tasks[key] = self._bar.add_task(_words(news), total=None)
        elif news.what == "told" and news.told is not None and key in self._tasks:
            description = f"{_words(news)}: {news.told.detail}"
            self._bar.update(self._tasks[key], completed=news.told.done, total=news.told.total, description=description)
        elif key in self._tasks:
            self._bar.remove_task(self._tasks.pop(key))
            if news.what == "failed":
                self._bar.console.print(f"failed {_words(news)}: {news.error.strip().splitlines()[-1]}", markup=False, highlight=False)


# What it would cost.


def _dry_run(grid: Grid, out: Path | None, tokens_per_s: float | None, as_json: bool) -> None:
    from zendaya.sweep import cost
    from zendaya.sweep.table import RESULTS, Table

    if tokens_per_s is not None:
        rates = cost.given_rates(grid, tokens_per_s)
    else:
        before = Table(out) if out is not None and (out / RESULTS).exists() else None
        rates = cost.known_rates(grid, before.records(), before.rows()) if before is not None else {}
        missing = tuple(arm for arm in grid.arms if arm.recipe.name not in rates)
        if missing:
            rates |= cost.measured_rates(type(grid)(name=grid.name, about=grid.about, arms=missing))
    found = list(cost.estimates(grid, rates))
    if as_json:
        typer.echo(json.dumps({"grid": grid.name, "runs": [_facts(one) for one in found]}))
        return
    table = Printed(box=None, pad_edge=False)
    for name in ("run", "recipe", "schedule", "seed", "decoded", "steps", "tokens", "PFLOP", "train h", "decode h"):
        table.add_column(name, justify="left" if name in ("recipe", "schedule", "decoded") else "right", no_wrap=True)
    for number, one in enumerate(found, start=1):
        table.add_row(str(number), *_cells(one))
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print()
    for mode in ("offline", "streaming"):
        some = [one for one in found if one.modes == (mode,)]
        if some:
            console.print(_total(f"{len(some)} {mode} training runs", some))
    if any(len(one.modes) > 1 for one in found):
        some = [one for one in found if len(one.modes) > 1]
        console.print(_total(f"{len(some)} training runs decoded both ways", some))
    console.print(_total(f"{len(found)} training runs in all", found))
    for name, rate in rates.items():
        console.print(f"rate of {name}: {rate.tokens_per_s:,.0f} tokens/s, {rate.where}")
    for where in dict.fromkeys(f"{arm.recipe.corpus}: {arm.sizes.where}" for arm in grid.arms if arm.sizes is not None):
        console.print(f"size of {where}")
    console.print(
        "Estimates, for every epoch; early stopping may end a run sooner. Tokens and FLOPs (matrix products) are without padding."
    )


def _facts(one: Estimate) -> dict[str, object]:
    config = one.config
    return {
        "recipe": config.name, "schedule": str(config.schedule), "seed": config.loop.seed, "modes": one.modes, "decodes": one.num_decodes,
        "steps": one.steps, "tokens": one.tokens, "flops": one.flops, "train_h": one.train_h, "decode_h": one.decode_h,
        "tokens_per_s": one.rate.tokens_per_s if one.rate else None, "rate": one.rate.where if one.rate else None,
    }  # fmt: skip


def _cells(one: Estimate) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    config = one.config
    return [
        config.name, str(config.schedule), str(config.loop.seed), f"{one.num_decodes} × {', '.join(one.modes)}", number(one.steps, ",d"),
        number(one.tokens, ",d"), number(None if one.flops is None else one.flops / 1e15, ",.2f"), number(one.train_h, ",.2f"),
        number(one.decode_h, ",.2f"),
    ]  # fmt: skip


def _total(words: str, found: list[Estimate]) -> str:
    known = [one for one in found if one.tokens is not None]
    if not known:
        return f"{words}: the sizes of their corpora are not known"
    tokens, flops = sum(one.tokens or 0 for one in known), sum(one.flops or 0.0 for one in known)
    train, decode = sum(one.train_h or 0.0 for one in known), sum(one.decode_h or 0.0 for one in known)
    hours = f", {train:,.1f} h of training" if train else ""
    hours += f" and {decode:,.1f} h of decoding" if decode else ""
    return f"{words}: about {tokens:,} tokens, {flops / 1e15:,.1f} PFLOP{hours}"


# Its report.


def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a sweep.")],
    formats: Annotated[list[str] | None, typer.Option("--format", help="md, latex or html; may be repeated; all if not given.")] = None,
    to: Annotated[Path | None, typer.Option(help="The folder the report goes to; OUT/report if not given.")] = None,
    export: Annotated[Path | None, typer.Option(help="Also write the table of results to FILE.csv or FILE.parquet.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Turn a sweep's results into the paper's tables (Markdown, LaTeX), its figures (SVG) and one page with interactive plots."""
    from zendaya.report.write import write_report
    from zendaya.sweep.table import Table, check_export

    if export is not None:
        check_export(export, force=force)
    chosen = {"formats": formats} if formats else {}
    with Console(stderr=True).status("reading") as status:
        show = status.update if sys.stderr.isatty() else lambda words: typer.echo(words, err=True)
        paths = write_report(out, to=to, force=force, report=show, **chosen)  # type: ignore[arg-type]
    typer.echo("\n".join(map(str, paths)))
    if export is not None:
        typer.echo(f"{export}: {Table(out).export(export, force=force)} rows")
