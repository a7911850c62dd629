"""`zendaya dial` and `zendaya presets`: what a setting of the dial reads, and the model shapes that have a name."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import zendaya
from zendaya.cli.options import check_model, command
from zendaya.cli.output import number, print_table
from zendaya.errors import ConfigError, ScheduleError
from zendaya.records import option
from zendaya.schedule import PowerLaw, Rounding

_FACTS = (
    ("first token reads (Ω₁)", "first_token", 0), ("buffer B", "buffer", 0), ("mean exposure, exact", "exposure", 4),
    ("mean exposure, limit 1/(1+γ)", "exposure_limit", 4), ("average lagging", "average_lagging", 2),
    ("average proportion", "average_proportion", 4), ("differentiable AL", "differentiable_average_lagging", 2),
)  # fmt: skip
"""Rows of the table: name, attribute and digits."""


@dataclass(frozen=True, kw_only=True)
class DialOptions:
    """A setting of the dial, and the instance it is shown on; or a model whose measured settings are shown."""

    gamma: float | None = option(None, "The dial: 0 offline, 1 real time, above 1 starved.")
    source: int = option(100, "F, source tokens.")
    steps: int = option(165, "N, decode steps.")
    head: int = option(0, "Head start: source tokens that every step reads beyond its share.")
    budget: int | None = option(None, "Solve for gamma: source tokens the first step should read.")
    rounding: Rounding = option("ceil", "ceil (the theorem's form) or floor.")
    model: str | None = option(None, "Instead: the measured frontier of this model, the dial in seconds.")

    def __post_init__(self) -> None:
        given = [name for name in ("gamma", "budget", "model") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ScheduleError(f"give either --gamma or --budget, one of the two, or --model: got {' and '.join(given) or 'none'}")

    @property
    def schedule(self) -> PowerLaw:
        if self.gamma is not None:
            return PowerLaw(self.gamma, self.rounding, self.head)
        return PowerLaw.for_budget(first=self.budget or 0, source=self.source, steps=self.steps, rounding=self.rounding, head=self.head)


@command
def dial(
    options: DialOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curve to FILE (.png, .svg, .pdf).")] = None,
) -> None:
    """Show what a setting of the dial reads: the horizon curve, exposure, buffer and lag, beside wait-k at the same lag.

    With --model: the settings of a model that no other beats in both lag and word errors, and the seconds they mean.
    """
    if options.model is not None:
        _show_frontier(options.model, as_json=as_json)
        return
    from zendaya.research.report import dial as report

    schedule, source, steps, head = options.schedule, options.source, options.steps, options.head
    ours, rival = report.dial_beside_wait_k(schedule, source=source, steps=steps)
    curves = {ours.schedule: ours.horizons, rival.schedule: rival.horizons}
    if plot is not None:
        report.plot_curves(plot, curves, source=source, title=f"F = {source}, N = {steps}")
    if as_json:
        record = {
            "version": zendaya.__version__, "gamma": float(schedule.gamma), "head": head, "rounding": options.rounding, "source": source,
            "steps": steps, **dataclasses.asdict(ours), "wait_k": dataclasses.asdict(rival),
        }  # fmt: skip
        print(json.dumps(record))
        return
    print(f"F = {source} source tokens, N = {steps} steps, ρ = F/N = {source / steps:.3g}\n")
    print(report.draw_curves(curves, top=source), end="\n\n")
    rows = [["", ours.schedule, f"{rival.schedule.split(',')[0]} (nearest lag)"]]
    for name, attribute, digits in _FACTS:
        shown = name.replace("1/(1+γ)", "ηx + x^(1+γ)/(1+γ) + 1 − x") if head else name  # method.md §8
        rows.append([shown, *(number(getattr(facts, attribute), f".{digits}f") for facts in (ours, rival))])
    print_table(rows)
    if head:
        print(f"\nh = {head}, η = min(1, h/F) = {min(1, head / source):.3g}, x = (1−η)^(1/γ)")


def _show_frontier(model: str, *, as_json: bool) -> None:
    from zendaya.cli.frontier import print_frontier
    from zendaya.runtime.frontier import read_frontier

    check_model(model)
    if (found := read_frontier(model)) is None:
        raise ConfigError(f"--model: {model} has no measured frontier: `zendaya frontier {model} FOLDER` makes one")
    if as_json:
        print(json.dumps(dataclasses.asdict(found), ensure_ascii=False))
    else:
        print_frontier(found)


def presets() -> None:
    """List the model shapes that have a name, with their size."""
    from zendaya.nn.model import Model
    from zendaya.nn.presets import preset
    from zendaya.nn.presets import presets as names

    rows = [["preset", "parameters", "window W", "N_max", "length head", "source"]]
    for name in names():
        config = preset(name)
        size = f"{Model.from_preset(name).num_parameters:,}"
        rows.append([name, size, str(config.window_tokens), str(config.max_steps), config.length, f"{config.decoder.source_dim}-d"])
    print_table(rows)
