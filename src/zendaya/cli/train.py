"""The words of `zendaya train` and `zendaya recipes`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from zendaya.cli.encode import INTERRUPTED

if TYPE_CHECKING:
    from zendaya.encode import Progress
    from zendaya.training.loop import Shown


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe: `zendaya recipes` lists them.")],
    schedule: Annotated[
        str | None, typer.Option(help="0.3, wait-k=10 (its stride is the corpus's), full, or dial: every γ in one model; dial+wait-k.")
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="The dial: 0 offline, 1 real time, above 1 starved.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, batches, dropout and drawn schedules.", min=0)] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of the corpus; under $ZENDAYA_DATA if not given.")] = None,
    store: Annotated[Path | None, typer.Option(help="The folder of its features; encoded there if they are not; OUT/features.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; runs/RECIPE-SCHEDULE-SEED if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in OUT was stopped or killed.")] = False,
    epochs: Annotated[int | None, typer.Option(help="At most this many epochs.", min=1)] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Padded source tokens and text rows of a micro-batch.", min=1)] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches of a step, over all processes.", min=1)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="After the warm-up.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, 32-true or bf16-mixed.")] = None,
    limit: Annotated[int | None, typer.Option(help="The first N examples only.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train a model. Stopped or killed at any moment, the same command with --resume goes on to the same weights.

    For more than one GPU or machine: torchrun --nproc-per-node N $(which zendaya) train RECIPE --accumulate N …
    """
    from zendaya import recipes
    from zendaya.training.adapt import AdaptRecipe

    config = recipes.configured(recipe, schedule=schedule, gamma=gamma, seed=seed)
    given = {
        "epochs": epochs,
        "batch_tokens": batch_tokens,
        "accumulate": accumulate,
        "learning_rate": learning_rate,
        "precision": precision,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, **changes))  # type: ignore[arg-type]
    folder = out or Path("runs") / f"{config.name}-{str(config.schedule).replace('=', '')}-seed{config.loop.seed}"
    console = Console(stderr=True)
    watched = console.is_terminal and os.environ.get("RANK", "0") == "0"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not watched)
    task = bar.add_task("reading", total=None)
    preparing, begun = "labelling" if isinstance(config, AdaptRecipe) else "encoding", False

    def encoding(progress: Progress) -> None:
        bar.start()
        bar.update(task, description=preparing, completed=progress.done, total=progress.total)

    def show(shown: Shown) -> None:
        nonlocal begun
        if not begun:
            bar.start()
            bar.reset(task, total=shown.total, completed=shown.done - 1)
            begun = True
        best = f", best {shown.best:.3f}" if shown.best is not None else ""
        bar.update(
            task, description=f"epoch {shown.epoch}/{shown.epochs}, loss {shown.loss:.3f}{best}", completed=shown.done, total=shown.total
        )

    try:
        result = recipes.train(config, data=data, out=folder, store=store, resume=resume, report=show, encoding=encoding, limit=limit)
    finally:
        bar.stop()
    if result.interrupted:
        typer.echo(f"zendaya: stopped after step {result.steps}: the same command with --resume goes on", err=True)
        raise typer.Exit(INTERRUPTED)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(result), "folder": str(result.folder), "schedule": str(config.schedule)}))
    else:
        typer.echo(
            f"{result.folder}: {config.name}, {config.schedule}, seed {config.loop.seed}: {result.epochs} epochs, {result.steps} steps, "
            f"{result.seconds:.0f} s; best validation loss {result.best_loss:.4f} after epoch {result.best_epoch}, in best/"
        )


def recipes() -> None:
    """List the recipes: what each trains, and on what."""
    from zendaya.recipes import recipe
    from zendaya.recipes import recipes as names
    from zendaya.training.adapt import AdaptRecipe

    table = Table("recipe", "form", "corpus", "encoder", "schedule", "width", "layers", "epochs", box=None, pad_edge=False)
    for name in names():
        config = recipe(name)
        if isinstance(config, AdaptRecipe):
            table.add_row(name, "inf", config.folder, f"whisper:{config.adapt.base}", config.schedule, "384", "4", str(config.loop.epochs))
            continue
        decoder = config.model.decoder
        shape = (str(decoder.dim), str(decoder.layers), str(config.loop.epochs))
        table.add_row(name, config.form, config.corpus, config.encoder, str(config.schedule), *shape)
    Console(highlight=False, soft_wrap=not sys.stdout.isatty()).print(table)
