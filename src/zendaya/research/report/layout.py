"""Table cells and how a report formats its numbers; a missing number is shown as missing."""

from __future__ import annotations

from dataclasses import dataclass

from zendaya.evaluation.metrics.significance import Interval, Seeds, beats_on_every_seed, over_seeds
from zendaya.research.report.results import MORE_IS_BETTER, Setting

MISSING = "–"


@dataclass(frozen=True)
class TableCell:
    """A cell of a table."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table: its name in the paper, caption, header and rows; a row of one cell is a heading."""

    name: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]


def score(value: float | None) -> str:
    """A quality score as a fraction."""
    return MISSING if value is None else f"{value:.4f}"


def lag(value: float | None) -> str:
    """A lag in source tokens."""
    return MISSING if value is None else f"{value:.1f}".replace("-", "−")


def share(value: float | None) -> str:
    """An exposure or another fraction."""
    return MISSING if value is None else f"{value:.3f}"


def better(value: float | None, base: float | None, measure: str) -> bool:
    """Whether both values are known and `value` is the better one."""
    return value is not None and base is not None and (value > base if MORE_IS_BETTER[measure] else value < base)


def gap(found: Interval) -> str:
    """A difference with its interval, as fractions."""
    low, high = (f"{value / 100:.4f}".replace("-", "−") for value in (found.low, found.high))
    return f"{found.value / 100:.4f} [{low}, {high}]".replace("-", "−")


def less(measure: str) -> str:
    """The suffix of a heading whose measure is better when lower."""
    return "" if MORE_IS_BETTER[measure] else ", less is better"


def mean_gap(ours: Setting, theirs: Setting, measure: str) -> TableCell:
    """The mean difference over seeds, bold where either is better by the paper's rule."""
    a, b = ours.values(measure), theirs.values(measure)
    if not a or a.keys() != b.keys():
        return TableCell(MISSING)
    found = over_seeds([a[seed] - b[seed] for seed in a])
    decided = any(beats_on_every_seed([*one.values()], [*other.values()]) for one, other in ((a, b), (b, a)))
    return TableCell(plain(found).replace("-", "−"), decided)


def interval(found: Interval | None) -> tuple[TableCell, TableCell]:
    """A score and its interval, in two cells."""
    if found is None:
        return TableCell(MISSING), TableCell(MISSING)
    return TableCell(f"{found.value / 100:.4f}"), TableCell(f"[{found.low / 100:.4f}, {found.high / 100:.4f}]")


def plain(found: Seeds | None) -> str:
    """A mean over seeds and its standard deviation."""
    if found is None:
        return MISSING
    return f"{found.mean:.4f}" if found.sd is None else f"{found.mean:.4f} ± {found.sd:.4f}"


def seeded(setting: Setting | None, base: Setting | None, measure: str) -> TableCell:
    """A mean over seeds, bold where it beats its baseline by the paper's rule."""
    found = None if setting is None else setting.over(measure)
    if setting is None or found is None:
        return TableCell(MISSING)
    text = plain(found) + (f" ({found.count})" if found.count != 3 else "")
    if base is None or base is setting:
        return TableCell(text)
    ours, theirs = setting.values(measure), base.values(measure)
    both = sorted(ours.keys() & theirs.keys())
    paired = ([ours[seed] for seed in both], [theirs[seed] for seed in both])
    return TableCell(text, bool(both) and beats_on_every_seed(*paired, higher_is_better=MORE_IS_BETTER[measure]))
