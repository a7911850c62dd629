"""The words of `zendaya learn-gamma`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar

from zendaya.cli.encode import INTERRUPTED
from zendaya.errors import ConfigError

if TYPE_CHECKING:
    from zendaya.training.loop import Shown


def learn_gamma(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a training run with --schedule dial.")],
    budget: Annotated[float | None, typer.Option(help="Mean lag allowed, as a share of the source.")] = None,
    like: Annotated[float | None, typer.Option(help="Instead: the lag of this fixed γ of the grid on the validation split.")] = None,
    gammas: Annotated[str | None, typer.Option(help="The grid to choose from, as 0.1,0.2,0.5,1.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of the corpus; under $ZENDAYA_DATA if not given.")] = None,
    store: Annotated[Path | None, typer.Option(help="The folder of its features; RUN/features if not given.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the result; RUN-learned if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in OUT was stopped or killed.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the head's weights and batches.", min=0)] = 0,
    epochs: Annotated[int | None, typer.Option(help="At most this many epochs.", min=1)] = None,
    texts: Annotated[int | None, typer.Option(help="At most this many texts of a clip.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(help="The first N examples only.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train a head that chooses γ for each window, before it is decoded, for a budget of lag; decode with the schedule `learned`."""
    from zendaya.recipes import data_folder
    from zendaya.training.learned import GAMMA, GAMMAS, LOOP, LearnConfig, recipe_of
    from zendaya.training.learned import learn_gamma as learn

    loop = dataclasses.replace(LOOP, seed=seed, epochs=epochs or LOOP.epochs)
    config = LearnConfig(gammas=_grid(gammas) if gammas else GAMMAS, budget=budget, like=like, loop=loop, texts=texts)
    folder = out or run.with_name(f"{run.name}-learned")
    with Bar(console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal) as bar:
        task = bar.add_task("reading", total=None)

        def measuring(done: int, total: int) -> None:
            bar.update(task, description="trying every γ", completed=done, total=total)

        def show(shown: Shown) -> None:
            bar.update(
                task, description=f"epoch {shown.epoch}/{shown.epochs}, loss {shown.loss:.3f}", completed=shown.done, total=shown.total
            )

        result = learn(
            run, config, data=data_folder(recipe_of(run), data), out=folder, store=store, resume=resume, limit=limit, report=show,
            measuring=measuring,
        )  # fmt: skip
    if result.interrupted:
        typer.echo(f"zendaya: stopped after step {result.steps}: the same command with --resume goes on", err=True)
        raise typer.Exit(INTERRUPTED)
    record = json.loads((folder / GAMMA).read_bytes())
    if as_json:
        typer.echo(json.dumps({**record, "folder": str(folder)}))
        return
    valid = record["valid"]
    chosen = ", ".join(f"{gamma} {share:.0%}" for gamma, share in record["chosen"].items() if share >= 0.005)
    typer.echo(f"{folder / 'best'}: budget {record['budget']:.3f} of the source, price {record['price']:.4g} nats a step, seed {seed}")
    typer.echo(f"validation: lag {valid['dal']:.3f}, {valid['nll']:.4f} nats a step; γ chosen, by steps: {chosen}")
    for gamma, fixed in record["fixed"].items():
        typer.echo(f"  fixed γ = {gamma}: lag {fixed['dal']:.3f}, {fixed['nll']:.4f} nats a step")


def _grid(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--gammas is a list of numbers, as 0.1,0.2,0.5,1: got {text!r}") from None
