"""The command line: words only. A user's mistake is one line on stderr and exit code 2; a leak found is exit code 1."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import zendaya
from zendaya.cli import audit as audit_command
from zendaya.cli import bench as bench_command
from zendaya.cli import corpora as corpora_command
from zendaya.cli import encode as encode_command
from zendaya.cli import evaluate as evaluate_command
from zendaya.cli import learn as learn_command
from zendaya.cli import serve as serve_command
from zendaya.cli import stream as stream_command
from zendaya.cli import sweep as sweep_command
from zendaya.cli import train as train_command
from zendaya.errors import ScheduleError, ZendayaError
from zendaya.schedule import PowerLaw, Rounding

app = typer.Typer(
    name="zendaya", help=zendaya.__doc__, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False,
)  # fmt: skip

app.add_typer(corpora_command.app, name="corpora")
app.command("encode")(encode_command.encode)
app.command("train")(train_command.train)
app.command("learn-gamma")(learn_command.learn_gamma)
app.command("recipes")(train_command.recipes)
app.command("evaluate")(evaluate_command.evaluate)
app.command("score")(evaluate_command.score)
app.command("sweep")(sweep_command.sweep)
app.command("report")(sweep_command.report)
app.command("compare")(evaluate_command.compare)
app.command("stream")(stream_command.stream)
app.command("serve", cls=serve_command.Serve)(serve_command.serve)
app.command("audit")(audit_command.audit)
app.command("audit-raw")(audit_command.audit_raw)
app.command("bench")(bench_command.bench)


def main() -> None:
    """Entry point: every expected failure ends in one line, without a traceback."""
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except ZendayaError as error:
        status = _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        status = _complain("interrupted", 130)
    except BrokenPipeError:  # the reader of our output has gone
        _close_stdout()
        status = 0
    except OSError as error:
        _close_stdout()
        status = _complain(f"{error.filename or 'output'}: {error.strerror or error}")
    except MemoryError:
        status = _complain("not enough memory for this: ask for less at a time")
    except Exception as error:
        # A usage error of click's, which typer carries inside itself or beside it, depending on its version.
        if not hasattr(error, "format_message"):
            raise
        status = _complain(error.format_message())
    sys.exit(status)


def _close_stdout() -> None:
    """What could not be written is given up; Python would try, and complain, again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, status: int = 2) -> int:
    print(f"zendaya: {' '.join(message.split())}", file=sys.stderr)
    return status


def _console() -> Console:
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


@app.callback(invoke_without_command=True)
def _top(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(zendaya.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command()
def dial(
    gamma: Annotated[float | None, typer.Option(help="The dial: 0 offline, 1 real time, above 1 starved.")] = None,
    source: Annotated[int, typer.Option(help="F, source tokens.")] = 100,
    steps: Annotated[int, typer.Option(help="N, decode steps.")] = 165,
    budget: Annotated[int | None, typer.Option(help="Solve for gamma: source tokens the first step should read.")] = None,
    rounding: Annotated[str, typer.Option(help="ceil (the theorem's form) or floor.")] = "ceil",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curve to FILE (.png, .svg, .pdf).")] = None,
) -> None:
    """Show what a setting of the dial reads: the horizon curve, exposure, buffer and lag, beside wait-k at the same lag."""
    from zendaya.report import dial as report

    schedule = _dial_schedule(gamma, budget, source, steps, rounding)
    ours, rival = report.dial_beside_wait_k(schedule, source=source, steps=steps)
    curves = {ours.schedule: ours.horizons, rival.schedule: rival.horizons}
    if plot is not None:
        report.plot_curves(plot, curves, source=source, title=f"F = {source}, N = {steps}")
    if as_json:
        record = {
            "version": zendaya.__version__, "gamma": float(schedule.gamma), "rounding": rounding, "source": source, "steps": steps,
            **dataclasses.asdict(ours), "wait_k": dataclasses.asdict(rival),
        }  # fmt: skip
        print(json.dumps(record))
        return
    console = _console()
    console.print(f"F = {source} source tokens, N = {steps} steps, ρ = F/N = {source / steps:.3g}\n")
    console.print(report.draw_curves(curves, top=source))
    table = Table("", ours.schedule, f"{rival.schedule.split(',')[0]} (nearest lag)", box=None, pad_edge=False)
    for name, attribute, digits in (
        ("first token reads (Ω₁)", "first_token", 0),
        ("buffer B", "buffer", 0),
        ("mean exposure, exact", "exposure", 4),
        ("mean exposure, limit 1/(1+γ)", "exposure_limit", 4),
        ("average lagging", "average_lagging", 2),
        ("average proportion", "average_proportion", 4),
        ("differentiable AL", "differentiable_average_lagging", 2),
    ):
        table.add_row(name, *(_number(getattr(facts, attribute), digits) for facts in (ours, rival)))
    console.print()
    console.print(table)


def _dial_schedule(gamma: float | None, budget: int | None, source: int, steps: int, rounding: str) -> PowerLaw:
    if (gamma is None) == (budget is None):
        raise ScheduleError("give either --gamma or --budget, one of the two")
    rounding_: Rounding = rounding  # type: ignore[assignment]  # PowerLaw checks it
    if budget is not None:
        return PowerLaw.for_budget(first=budget, source=source, steps=steps, rounding=rounding_)
    assert gamma is not None
    return PowerLaw(gamma, rounding_)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


@app.command()
def presets() -> None:
    """List the shapes the library knows, with their size."""
    from zendaya.model import Model, preset
    from zendaya.model import presets as names

    table = Table("preset", "parameters", "window W", "N_max", "length head", "source", box=None, pad_edge=False)
    for name in names():
        config = preset(name)
        size = f"{Model.from_preset(name).num_parameters:,}"
        table.add_row(name, size, str(config.window), str(config.max_steps), config.length, f"{config.decoder.source_dim}-d")
    _console().print(table)


@app.command()
def demo(page: Annotated[bool, typer.Option("--page", help="Serve the web page, after it has captioned the sample.")] = False) -> None:
    """Turn the dial on a real recording, watch each word's horizon, and audit the decoder that wrote it."""
    from zendaya.demo import run, serve

    (serve if page else run)(_console())
