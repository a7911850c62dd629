"""Plots of schedules: source tokens readable at each step, for a terminal or a file."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zendaya.errors import MissingExtraError, ZendayaError
from zendaya.evaluation.metrics import latency
from zendaya.files import write_atomically
from zendaya.schedule import Schedule

PLOT_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class DialFacts:
    """Horizons, exposure and lag of a schedule, for F source tokens and N steps."""

    schedule: str
    horizons: list[int]
    first_token: int
    buffer: int
    exposure: float
    exposure_limit: float | None
    average_lagging: float
    average_proportion: float
    differentiable_average_lagging: float


def dial_facts(schedule: Schedule, *, source: int, steps: int) -> DialFacts:
    """Horizons, exposure, buffer and lag of a schedule, on the decode-step clock."""
    horizons = schedule.horizons(source, steps).tolist()
    measures = (latency.average_lagging, latency.average_proportion, latency.differentiable_average_lagging)
    return DialFacts(
        schedule=str(schedule), horizons=horizons, first_token=horizons[0], buffer=schedule.buffer(source, steps),
        exposure=schedule.exposure(source, steps), exposure_limit=schedule.exposure_limit_of(source),
        **{measure.__name__: measure(horizons, source=source, target=steps) for measure in measures},
    )  # fmt: skip


def dial_beside_wait_k(schedule: Schedule, *, source: int, steps: int) -> tuple[DialFacts, DialFacts]:
    """A schedule's facts, and those of the wait-k nearest to it in lag."""
    ours = dial_facts(schedule, source=source, steps=steps)
    rival = latency.wait_k_at_lag(ours.average_lagging, source=source, steps=steps)
    return ours, dial_facts(rival, source=source, steps=steps)


def draw_curves(curves: Mapping[str, Sequence[int]], *, top: int, width: int = 66, height: int = 15) -> str:
    """Up to two curves as text: the first in ●, the second in ○, both in ◉; steps across, source tokens up."""
    marks = ("●", "○")
    grid = [[" "] * width for _ in range(height)]
    for mark, values in zip(marks, curves.values(), strict=False):
        for column in range(width):
            value = values[round(column * (len(values) - 1) / max(1, width - 1))]
            row = height - 1 - round(value * (height - 1) / top)
            grid[row][column] = "◉" if grid[row][column] not in (" ", mark) else mark
    margin = len(str(top))
    labels = {0: str(top), height // 2: str(round(top / 2)), height - 1: "0"}
    lines = [f"{labels.get(row, ''):>{margin}} ┤{''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    steps = len(next(iter(curves.values())))
    lines.append(f"{'':>{margin}} └{'─' * width}")
    lines.append(f"{'':>{margin}}  1{'step':^{width - 2 - len(str(steps))}}{steps}")
    lines.append(f"{'':>{margin}}  " + "   ".join(f"{mark} {name}" for mark, name in zip(marks, curves, strict=False)))
    return "\n".join(lines)


def pyplot(purpose: str) -> Any:
    """Matplotlib's plotting module, without a display."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "eval", purpose) from None
    matplotlib.use("agg")
    return importlib.import_module("matplotlib.pyplot")


def plot_curves(path: Path, curves: Mapping[str, Sequence[int]], *, source: int, title: str) -> None:
    """The same curves as a figure, written atomically."""
    if path.suffix.lower() not in PLOT_FORMATS:
        raise ZendayaError(f"{path}: unknown plot format: expected one of {', '.join(PLOT_FORMATS)}, got {path.suffix or 'no suffix'!r}")
    plots = pyplot("a plot")
    figure, axes = plots.subplots(figsize=(6.4, 3.6), layout="constrained")
    for (name, values), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.step(range(1, len(values) + 1), values, style, where="post", label=name)
    axes.set(xlabel="decode step", ylabel="source tokens readable", title=title, xlim=(1, None), ylim=(0, source * 1.03))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    plots.close(figure)
    try:
        write_atomically(path, picture.getvalue())
    except OSError as error:
        raise ZendayaError(f"{path}: cannot be written: {error.strerror or error}") from None
