"""`zendaya sweep` and `zendaya report`: run, resume or price a grid; turn its results into tables, figures and a page."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from zendaya.cli.options import Force, Json, check_exists, command
from zendaya.cli.output import INTERRUPTED, number, print_table, say
from zendaya.errors import ConfigError
from zendaya.records import listed, option

if TYPE_CHECKING:
    from zendaya.research.sweep.cost import Estimate
    from zendaya.research.sweep.grids import Grid
    from zendaya.research.sweep.run import CellUpdate


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Where a sweep reads and writes, and how much of its grid runs at a time."""

    data: Path | None = option(None, "Folder of all corpora, or of the only one.", envvar="ZENDAYA_DATA")
    out: Path | None = option(None, "Folder of the sweep; a stopped or killed one goes on.")
    features: Path | None = option(None, "Folder of feature stores shared by several sweeps; features/ of --out if not given.")
    processes: int = option(1, "Cells at a time on this machine, one thread each.", min=1)
    ray: str | None = option(None, "A Ray cluster: host:port, auto, or local for one of --processes.", metavar="ADDRESS")
    seeds: tuple[int, ...] = option((), "Only the runs with these seeds, as 0,1; the others may follow.", parse=listed(int))
    tokens_per_s: float | None = option(None, "With --dry-run: the rate; else that of runs in --out, or measured.")
    export: Path | None = option(None, "Also write the results to FILE.csv or FILE.parquet.")


@command
def sweep(
    options: SweepOptions,
    grid: Annotated[str | None, typer.Argument(metavar="GRID", help="A grid by name (--list), or a .json file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and what they would cost; needs no data.")] = False,
    list_grids: Annotated[bool, typer.Option("--list", help="List the grids.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train and decode a whole grid into one table; a stopped run goes on with the same command."""
    if grid is not None and grid.endswith(".json"):
        check_exists(grid, "a grid")
    from zendaya.research.sweep import grids
    from zendaya.research.sweep.table import check_export

    if list_grids:
        rows = [["grid", "runs", "decodes", "about"]]
        for one in map(grids.grid, grids.grids()):
            runs = [(arm, config) for arm in one.arms for config in arm.configs()]
            decodes = sum(len(decode.schedules) for arm, _ in runs for decode in arm.decodes)
            rows.append([one.name, str(len(runs)), str(decodes), one.about])
        print_table(rows)
        return
    if grid is None:
        raise ConfigError("give a grid: zendaya sweep --list names them, or a .json file")
    wanted = grids.grid(grid)
    if options.seeds:
        wanted = wanted.only(set(options.seeds))
    if dry_run:
        _dry_run(wanted, options.out, options.tokens_per_s, as_json)
        return
    if options.data is None or options.out is None:
        needed = "--data (the folder of its corpora, or $ZENDAYA_DATA) and --out (the folder of the sweep)"
        raise ConfigError(f"grid {wanted.name} needs {needed}")
    if options.export is not None:
        check_export(options.export, force=force)
    _run(wanted, options, options.data, options.out, as_json)


def _run(grid: Grid, options: SweepOptions, data: Path, out: Path, as_json: bool) -> None:
    from zendaya.research.sweep.run import sweep as run
    from zendaya.research.sweep.table import Table

    console = Console(stderr=True)
    places = {"data": data, "out": out, "features": options.features, "processes": options.processes, "ray": options.ray}
    with _Bars(console) if console.is_terminal else contextlib.nullcontext() as bars:
        summary = run(grid, **places, report=_say if bars is None else bars.show)  # type: ignore[arg-type]
    if options.export is not None:
        Table(out).export(options.export, force=True)
    if as_json:
        facts = {"done": summary.done, "skipped": summary.skipped, "left": summary.left, "total": summary.total, "stopped": summary.stopped}
        typer.echo(json.dumps({"grid": grid.name, "out": str(out), **facts, "failed": [list(one) for one in summary.failed]}))
    else:
        before = f", {summary.skipped} of them before" if summary.skipped else ""
        typer.echo(f"{out}: {grid.name}: {summary.done} of {summary.total} cells done{before}")
    for label, error in summary.failed:
        say(f"failed: {label}: {error.strip().splitlines()[-1]}")
    if summary.stopped:
        say(f"stopped: {summary.done} of {summary.total} cells are done in {summary.out}; run the same command again to go on")
        raise typer.Exit(INTERRUPTED)
    if summary.failed:
        raise typer.Exit(1)


def _words(update: CellUpdate) -> str:
    return f"{'decode' if update.cell.kind == 'evaluate' else update.cell.kind} {update.cell.label}"


def _say(update: CellUpdate) -> None:
    """A line for a log: the start of a cell, and its end."""
    if update.state in ("begun", "done", "failed", "stopped"):
        state = "" if update.state == "begun" else f"{update.state} "
        error = f": {update.error.strip().splitlines()[-1]}" if update.error else ""
        seconds = f", {update.seconds:.0f} s" if update.state in ("done", "failed") else ""
        typer.echo(f"[{update.finished}/{update.total}] {state}{_words(update)}{seconds}{error}", err=True)


class _Bars(Bar):
    """Bars for a terminal: one for the sweep, one for each running cell."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True)
        self._whole = self.add_task("cells", total=None)
        self._cells: dict[str, TaskID] = {}

    def show(self, update: CellUpdate) -> None:
        self.update(self._whole, completed=update.finished, total=update.total)
        key = update.cell.key
        if update.state == "begun":
            self._cells[key] = self.add_task(_words(update), total=None)
        elif update.state == "running" and update.progress is not None and key in self._cells:
            description = f"{_words(update)}: {update.progress.detail or update.progress.stage}"
            self.update(self._cells[key], completed=update.progress.done, total=update.progress.total, description=description)
        elif key in self._cells:
            self.remove_task(self._cells.pop(key))
            if update.state == "failed":
                self.console.print(f"failed {_words(update)}: {update.error.strip().splitlines()[-1]}", markup=False, highlight=False)


def _dry_run(grid: Grid, out: Path | None, tokens_per_s: float | None, as_json: bool) -> None:
    from zendaya.research.sweep import cost
    from zendaya.research.sweep.table import RESULTS, Table

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
    rows = [["run", "recipe", "schedule", "seed", "decoded", "steps", "tokens", "PFLOP", "train h", "decode h"]]
    for place, one in enumerate(found, start=1):
        config, petaflops = one.config, None if one.flops is None else one.flops / 1e15
        modes, hours = f"{one.num_decodes} × {', '.join(one.modes)}", (number(one.train_h, ",.2f"), number(one.decode_h, ",.2f"))
        counts = (number(one.steps, ",d"), number(one.tokens, ",d"), number(petaflops, ",.2f"))
        rows.append([str(place), config.name, str(config.schedule), str(config.loop.seed), modes, *counts, *hours])
    print_table(rows)
    print()
    for mode in ("offline", "streaming"):
        if some := [one for one in found if one.modes == (mode,)]:
            print(_total(f"{len(some)} {mode} training runs", some))
    if some := [one for one in found if len(one.modes) > 1]:
        print(_total(f"{len(some)} training runs decoded both ways", some))
    print(_total(f"{len(found)} training runs in all", found))
    for name, rate in rates.items():
        print(f"rate of {name}: {rate.tokens_per_s:,.0f} tokens/s, {rate.where}")
    for where in dict.fromkeys(f"{arm.recipe.corpus}: {arm.sizes.where}" for arm in grid.arms if arm.sizes is not None):
        print(f"size of {where}")
    print("Estimates, for every epoch; early stopping may end a run sooner. Tokens and FLOPs (matrix products) are without padding.")


def _facts(one: Estimate) -> dict[str, object]:
    config = one.config
    return {
        "recipe": config.name, "schedule": str(config.schedule), "seed": config.loop.seed, "modes": one.modes, "decodes": one.num_decodes,
        "steps": one.steps, "tokens": one.tokens, "flops": one.flops, "train_h": one.train_h, "decode_h": one.decode_h,
        "tokens_per_s": one.rate.tokens_per_s if one.rate else None, "rate": one.rate.where if one.rate else None,
    }  # fmt: skip


def _total(words: str, found: list[Estimate]) -> str:
    known = [one for one in found if one.tokens is not None]
    if not known:
        return f"{words}: the sizes of their corpora are not known"
    tokens, flops, train, decode = (sum(getattr(one, name) or 0 for one in known) for name in ("tokens", "flops", "train_h", "decode_h"))
    hours = f", {train:,.1f} h of training" if train else ""
    hours += f" and {decode:,.1f} h of decoding" if decode else ""
    return f"{words}: about {tokens:,} tokens, {flops / 1e15:,.1f} PFLOP{hours}"


def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a sweep.")],
    formats: Annotated[list[str] | None, typer.Option("--format", help="md, latex or html; may be repeated; all if not given.")] = None,
    to: Annotated[Path | None, typer.Option(help="The folder the report goes to; OUT/report if not given.")] = None,
    export: Annotated[Path | None, typer.Option(help="Also write the table of results to FILE.csv or FILE.parquet.")] = None,
    force: Force = False,
) -> None:
    """Turn a sweep's results into tables, figures and one page with interactive plots.

    Tables are Markdown and LaTeX, as in the paper; figures are SVG.
    """
    from zendaya.research.report.write import write_report
    from zendaya.research.sweep.table import Table, check_export

    if export is not None:
        check_export(export, force=force)
    chosen = {"formats": formats} if formats else {}
    with Console(stderr=True).status("reading") as status:
        show = status.update if sys.stderr.isatty() else lambda words: typer.echo(words, err=True)
        paths = write_report(out, to=to, force=force, report=show, **chosen)  # type: ignore[arg-type]
    typer.echo("\n".join(map(str, paths)))
    if export is not None:
        typer.echo(f"{export}: {Table(out).export(export, force=force)} rows")
