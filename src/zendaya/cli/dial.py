"""`zendaya dial` and `zendaya presets`: what a setting of the dial reads, and the model shapes that have a name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

import zendaya
from zendaya.cli.output import number, print_table
from zendaya.errors import ScheduleError
from zendaya.schedule import PowerLaw, Rounding

_FACTS = (
    ("first token reads (Ω₁)", "first_token", 0), ("buffer B", "buffer", 0), ("mean exposure, exact", "exposure", 4),
    ("mean exposure, limit 1/(1+γ)", "exposure_limit", 4), ("average lagging", "average_lagging", 2),
    ("average proportion", "average_proportion", 4), ("differentiable AL", "differentiable_average_lagging", 2),
)  # fmt: skip
"""Rows of the table: name, attribute and digits."""


def dial(
    gamma: Annotated[float | None, typer.Option(help="The dial: 0 offline, 1 real time, above 1 starved.")] = None,
    source: Annotated[int, typer.Option(help="F, source tokens.")] = 100,
    steps: Annotated[int, typer.Option(help="N, decode steps.")] = 165,
    head: Annotated[int, typer.Option(help="Head start: source tokens that every step reads beyond its share.")] = 0,
    budget: Annotated[int | None, typer.Option(help="Solve for gamma: source tokens the first step should read.")] = None,
    rounding: Annotated[Rounding, typer.Option(help="ceil (the theorem's form) or floor.")] = "ceil",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curve to FILE (.png, .svg, .pdf).")] = None,
) -> None:
    """Show what a setting of the dial reads: the horizon curve, exposure, buffer and lag, beside wait-k at the same lag."""
    from zendaya.research.report import dial as report

    if (gamma is None) == (budget is None):
        raise ScheduleError("give either --gamma or --budget, one of the two")
    if gamma is not None:
        schedule = PowerLaw(gamma, rounding, head)
    else:
        schedule = PowerLaw.for_budget(first=budget or 0, source=source, steps=steps, rounding=rounding, head=head)
    ours, rival = report.dial_beside_wait_k(schedule, source=source, steps=steps)
    curves = {ours.schedule: ours.horizons, rival.schedule: rival.horizons}
    if plot is not None:
        report.plot_curves(plot, curves, source=source, title=f"F = {source}, N = {steps}")
    if as_json:
        record = {
            "version": zendaya.__version__, "gamma": float(schedule.gamma), "head": head, "rounding": rounding, "source": source,
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
