"""Figures: quality against γ and quality against lag, as data and as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zendaya.research.report.dial import pyplot
from zendaya.research.report.results import MORE_IS_BETTER, OWN, Group, Results, Setting


@dataclass(frozen=True)
class Point:
    """A setting in a figure, as means over seeds."""

    x: float
    y: float
    sd: float | None  # standard deviation of y over seeds
    label: str
    seeds: int


@dataclass(frozen=True)
class Series:
    """Points of one kind, in order of x."""

    name: str
    points: tuple[Point, ...]
    flat: bool = False  # whether it is a horizontal line across the panel: the baseline


@dataclass(frozen=True)
class Panel:
    """One plot."""

    figure: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]


def panels(results: Results) -> Iterator[Panel]:
    """All panels: offline against γ, streaming against AL."""
    for group in results.of("offline"):
        for measure in group.measures:
            yield from _offline(group, measure)
    streaming = results.of("streaming")
    for recipe, scale, split in dict.fromkeys((group.recipe, group.scale, group.split) for group in streaming):
        groups = [group for group in streaming if (group.recipe, group.scale, group.split) == (recipe, scale, split)]
        for measure in dict.fromkeys(name for group in groups for name in group.measures):
            series = tuple(one for group in groups for one in _streaming(group, measure))
            yield Panel("streaming", f"{recipe}, {split}, scale {scale}", "average lagging, source tokens", _axis(measure), series)


def _axis(measure: str) -> str:
    return measure if MORE_IS_BETTER[measure] else f"{measure} (less is better)"


def _point(one: Setting, x: float | None, measure: str, label: str) -> Iterator[Point]:
    found = one.over(measure)
    if found is not None and x is not None:
        yield Point(x, found.mean, found.sd, label, found.count)


def _offline(group: Group, measure: str) -> Iterator[Panel]:
    shown = [point for one in group.by_gamma() if one.gamma for point in _point(one, one.gamma, measure, f"γ={one.gamma:g}")]
    base = [] if group.baseline is None else list(_point(group.baseline, 0.0, measure, "γ→0"))
    if shown or base:
        series = [Series("ZENDAYA", tuple(shown))] if shown else []
        series += [Series("γ→0, full exposure", tuple(base), flat=True)] if base else []
        yield Panel("offline", f"{group.label}, {group.split}", "γ", _axis(measure), tuple(series))


def _streaming(group: Group, measure: str) -> Iterator[Series]:
    suffix = ("" if group.family == OWN else f", {group.family}") + group.mark
    for kind in dict.fromkeys(one.kind for one in group.ordered):
        settings = [one for one in group.ordered if one.kind == kind]
        points = [point for one in settings for point in _point(one, one.mean("AL"), measure, _dial(one))]
        if points:
            yield Series(f"{kind}{suffix}", tuple(sorted(points, key=lambda point: point.x)))


def _dial(one: Setting) -> str:
    return f"γ={one.gamma:g}" if one.gamma is not None else f"k={one.k}" if one.k is not None else one.name


def draw(shown: list[Panel], title: str) -> bytes:
    """Panels side by side as SVG; equal panels give equal bytes."""
    plots = pyplot("a figure")
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    with plots.rc_context({"svg.hashsalt": "zendaya", "font.size": 9}):
        figure, axes = plots.subplots(rows, columns, figsize=(4.4 * columns, 3.3 * rows), layout="constrained", squeeze=False)
        for place, each in enumerate(axes.flat):
            if place < len(shown):
                _panel(each, shown[place])
            else:
                each.set_visible(False)
        figure.suptitle(title)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
        plots.close(figure)
    return picture.getvalue()


def _panel(axes: Any, panel: Panel) -> None:
    for number, one in enumerate(panel.series):
        xs, ys = [point.x for point in one.points], [point.y for point in one.points]
        spreads = [math.nan if point.sd is None else point.sd for point in one.points]
        colour = f"C{number}"
        if one.flat:
            axes.axhline(ys[0], color=colour, linestyle="--", label=one.name)
            axes.axhspan(ys[0] - spreads[0], ys[0] + spreads[0], color=colour, alpha=0.15, linewidth=0)
            continue
        axes.plot(xs, ys, "o-", color=colour, label=one.name, markersize=4)
        low, high = ([y + sign * spread for y, spread in zip(ys, spreads, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        if len(xs) == 1:
            axes.errorbar(xs, ys, spreads, color=colour, capsize=3)
        for point in one.points:
            axes.annotate(point.label, (point.x, point.y), textcoords="offset points", xytext=(3, 4), fontsize=6)
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
