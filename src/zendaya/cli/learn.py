"""`zendaya learn-gamma`: train a head that chooses γ for each window."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from zendaya.cli.options import Json, RunOptions, command
from zendaya.cli.output import ProgressBar
from zendaya.cli.train import stop_if_interrupted
from zendaya.research.recipes import data_folder
from zendaya.training import learned
from zendaya.training.learned import LearnConfig


@command
def learn_gamma(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a training run with --schedule dial.")],
    config: LearnConfig,
    options: RunOptions,
    seed: Annotated[int, typer.Option(help="Seed of the head's weights and batches.", min=0)] = 0,
    epochs: Annotated[int | None, typer.Option(help="At most this many epochs.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Train a head that chooses γ for each window, for a budget of lag.

    γ is chosen before the window is decoded; decode with the schedule `learned`.
    """
    loop = dataclasses.replace(config.loop, seed=seed, epochs=epochs or config.loop.epochs)
    out = options.out or run.with_name(f"{run.name}-learned")
    with ProgressBar() as bar:
        result = learned.learn_gamma(
            run, dataclasses.replace(config, loop=loop), data=data_folder(learned.recipe_of(run), options.data), out=out,
            store=options.store, resume=options.resume, limit=options.limit, report=bar.show,
        )  # fmt: skip
    stop_if_interrupted(result)
    record = json.loads((out / learned.GAMMA).read_bytes())
    if as_json:
        print(json.dumps({**record, "folder": str(out)}))
        return
    valid = record["valid"]
    chosen = ", ".join(f"{gamma} {share:.0%}" for gamma, share in record["chosen"].items() if share >= 0.005)
    print(f"{out / 'best'}: budget {record['budget']:.3f} of the source, price {record['price']:.4g} nats per step, seed {seed}")
    print(f"validation: lag {valid['dal']:.3f}, {valid['nll']:.4f} nats per step; γ chosen, by steps: {chosen}")
    for gamma, fixed in record["fixed"].items():
        print(f"  fixed γ = {gamma}: lag {fixed['dal']:.3f}, {fixed['nll']:.4f} nats per step")
