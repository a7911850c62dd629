"""Table cells and how a report formats its numbers; a missing number is shown as missing."""

from __future__ import annotations

from dataclasses import dataclass

from zendaya.evaluation.metrics.significance import Interval, Seeds, beats_on_every_seed, over_seeds
from zendaya.research.report.results import MORE_IS_BETTER, Setting

MISSING = "–"


class Bold(str):
    """A table cell in bold; other cells are plain strings."""


@dataclass(frozen=True)
class Sheet:
    """A table: its name in the paper, caption, header and rows; a row of one cell is a heading."""

    name: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def bold(text: str, condition: bool) -> str:
    """A cell that is bold on a condition."""
    return Bold(text) if condition else text


def number(value: float | None, digits: int) -> str:
    """A number with a fixed number of digits: 4 for scores, 3 for shares, 1 for lags in source tokens."""
    return MISSING if value is None else f"{value:.{digits}f}".replace("-", "−")


def lags(*settings: Setting, by: str = "AL") -> str:
    """Mean lags of settings, with commas between them."""
    return ", ".join(number(one.mean(by), 1) for one in settings)


def better(value: float | None, base: float | None, measure: str) -> bool:
    """Whether both values are known and `value` is the better one."""
    return value is not None and base is not None and (value > base if MORE_IS_BETTER[measure] else value < base)


def fractions(found: Interval) -> tuple[float, float, float]:
    """A score in percent and its interval, as fractions."""
    return found.value / 100, found.low / 100, found.high / 100


def scored(value: float, low: float, high: float, *, digits: int = 4) -> tuple[str, str]:
    """A score and its interval, in two cells; `digits` are those of the interval."""
    return number(value, 4), f"[{number(low, digits)}, {number(high, digits)}]"


def gap(value: float, low: float, high: float, *, digits: int = 4) -> str:
    """A difference with its interval, bold where that excludes zero."""
    return bold(" ".join(scored(value, low, high, digits=digits)), low > 0 or high < 0)


def less(measure: str) -> str:
    """The suffix of a heading whose measure is better when lower."""
    return "" if MORE_IS_BETTER[measure] else ", less is better"


def mean_gap(ours: Setting, theirs: Setting, measure: str) -> str:
    """The mean difference over seeds, bold where either is better by the paper's rule."""
    a, b = ours.values(measure), theirs.values(measure)
    if not a or a.keys() != b.keys():
        return MISSING
    decided = any(beats_on_every_seed([*one.values()], [*other.values()]) for one, other in ((a, b), (b, a)))
    return bold(mean(over_seeds([a[seed] - b[seed] for seed in a])), decided)


def mean(found: Seeds | None) -> str:
    """A mean over seeds and its standard deviation."""
    if found is None:
        return MISSING
    return number(found.mean, 4) + ("" if found.sd is None else f" ± {found.sd:.4f}")


def seeded(setting: Setting | None, base: Setting | None, measure: str) -> str:
    """A mean over seeds, bold where it beats its baseline by the paper's rule."""
    found = None if setting is None else setting.over(measure)
    if setting is None or found is None:
        return MISSING
    text = mean(found) + (f" ({found.count})" if found.count != 3 else "")
    ours, theirs = setting.values(measure), {} if base is None else base.values(measure)
    both = sorted(ours.keys() & theirs.keys())
    paired = ([ours[seed] for seed in both], [theirs[seed] for seed in both])
    return bold(text, bool(both) and beats_on_every_seed(*paired, higher_is_better=MORE_IS_BETTER[measure]))
