"""`zendaya train` and `zendaya recipes`: train a model by a recipe, list the recipes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zendaya.cli.options import Json, RunOptions, check_exists, command
from zendaya.cli.output import INTERRUPTED, ProgressBar, print_table, say
from zendaya.errors import MissingExtraError
from zendaya.records import option

if TYPE_CHECKING:
    from zendaya.training.loop import TrainResult


@dataclass(frozen=True, kw_only=True)
class RecipeChanges:
    """Changes to a recipe; None leaves the recipe's own value."""

    schedule: str | None = option(None, "0.3, wait-k=10 (its stride is the corpus's), full, or dial: all γ in one model; dial+wait-k+head.")
    gamma: float | None = option(None, "The dial: 0 offline, 1 real time, above 1 starved.")
    head: int = option(0, "With --gamma: head start, source tokens that every step reads beyond its share.", min=0)
    seed: int | None = option(None, "Seed of weights, batches, dropout and drawn schedules.", min=0)
    epochs: int | None = option(None, "At most this many epochs.", min=1)
    batch_tokens: int | None = option(None, "Padded source tokens and text rows per micro-batch.", min=1)
    accumulate: int | None = option(None, "Micro-batches per step, over all processes.", min=1)
    learning_rate: float | None = option(None, "Learning rate after the warm-up.")
    precision: str | None = option(None, "auto, 32-true or bf16-mixed.")


@command
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe (`zendaya recipes` lists them), or a .json file.")],
    changes: RecipeChanges,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Train a model by a recipe; a stopped run goes on with --resume.

    A resumed run ends with the same weights as one that was never stopped.
    For more than one GPU or machine: torchrun --nproc-per-node N $(which zendaya) train RECIPE --accumulate N …
    """
    if recipe.endswith(".json"):
        check_exists(recipe, "a recipe, such as the recipe.json of a run")
    check_exists(run.data, "the folder of the corpus (--data)")
    if importlib.util.find_spec("lightning_fabric") is None:  # told before the corpus is encoded
        raise MissingExtraError("lightning-fabric", "train", "training")
    from zendaya.research import recipes

    loop = {name: value for name, value in vars(changes).items() if value is not None}
    of_recipe = {name: loop.pop(name, None) for name in ("schedule", "gamma", "head", "seed")}
    config = recipes.configured(recipe, **of_recipe)
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, **loop))
    out = run.out or Path("runs") / f"{config.name}-{str(config.schedule).replace('=', '')}-seed{config.loop.seed}"
    first = os.environ.get("RANK", "0") == "0"  # of the processes of a torchrun, one prints
    with ProgressBar(watched=first) as bar:
        result = recipes.train(config, data=run.data, out=out, store=run.store, resume=run.resume, limit=run.limit, report=bar.show)
    stop_if_interrupted(result)
    if as_json and first:
        print(json.dumps({**dataclasses.asdict(result), "folder": str(result.folder), "schedule": str(config.schedule)}))
    elif first:
        length = f"{result.epochs} epochs, {result.steps} steps, {result.seconds:.0f} s"
        best = f"best validation loss {result.best_loss:.4f} after epoch {result.best_epoch}, in best/"
        print(f"{result.folder}: {config.name}, {config.schedule}, seed {config.loop.seed}: {length}; {best}")


def stop_if_interrupted(result: TrainResult) -> None:
    """End the command if the training run was stopped, and print how to resume it."""
    if result.interrupted:
        say(f"stopped after step {result.steps}: the same command with --resume goes on")
        raise typer.Exit(INTERRUPTED)


def recipes() -> None:
    """List the recipes: what each trains, and on what."""
    from zendaya.research.recipes import recipe
    from zendaya.research.recipes import recipes as names
    from zendaya.training.adapt import AdaptRecipe

    rows = [["recipe", "form", "corpus", "schedule", "width", "layers", "epochs", "encoder"]]
    for name in names():
        config = recipe(name)
        if isinstance(config, AdaptRecipe):
            rows.append([name, "inf", config.folder, config.schedule, "384", "4", str(config.loop.epochs), f"whisper:{config.adapt.base}"])
            continue
        decoder = config.model.decoder
        shape = (str(decoder.dim), str(decoder.layers), str(config.loop.epochs))
        rows.append([name, config.form, config.corpus, str(config.schedule), *shape, config.encoder])
    print_table(rows)
