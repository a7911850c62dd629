"""`zendaya frontier`: measure the dial in seconds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zendaya.cli.options import Json, check_exists, check_model, command
from zendaya.cli.output import number, print_table, say
from zendaya.evaluation.options import FrontierOptions

if TYPE_CHECKING:
    from zendaya.runtime.frontier import Frontier


@command
def frontier(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A shipped adapter, or the folder of an adapter or checkpoint.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The corpus: recordings, manifest and word times.")],
    options: FrontierOptions,
    as_json: Json = False,
) -> None:
    """Measure a model's frontier: which setting each lag in seconds means; a stopped run goes on with the same command.

    Whole chapters are played as endless streams. Settings are chosen on one split; those that no other beats in both lag
    and word errors are played on another. The file beside the model makes `--lag` known everywhere.
    """
    check_model(model)
    check_exists(folder, "the folder of a corpus")
    from zendaya.evaluation.frontier import make_frontier

    try:
        found, path = make_frontier(model, folder, options)
    except KeyboardInterrupt:
        say(f"finished chapters are kept in {options.results}: the same command goes on from there")
        raise
    if as_json:
        print(json.dumps(dataclasses.asdict(found), ensure_ascii=False))
        return
    print_frontier(found)
    say(f"written: {path}")


def print_frontier(found: Frontier) -> None:
    """The settings from fast to accurate, with the figures of both splits."""
    print(f"{found.model} ({found.model_digest[:16]}), version {found.version}; ratios to {found.baseline}")
    for what, data in (("chosen on", found.chosen_on), ("reported on", found.reported_on)):
        print(f"{what} {data.name}: {data.num_streams} streams, {data.hours:g} h, data {data.data_digest[:16]}")
    print()
    rows = [["setting", "lag s", "90 % s", "WER %", "× offline", "chosen by: lag s", "WER %"]]
    for point in found.points:
        own, other = point.reported, point.chosen
        figures = (own.lag_s, own.lag_p90_s, own.wer, own.ratio, other.lag_s, other.wer)
        rows.append([point.setting, *(number(value, ".2f") for value in figures)])
    print_table(rows)
