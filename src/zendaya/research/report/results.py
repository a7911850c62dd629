"""Results of a sweep, grouped for tables and figures: the settings of one corpus, each with its values per seed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from zendaya.errors import ZendayaError
from zendaya.evaluation.metrics import significance
from zendaya.evaluation.metrics.results import read_traces
from zendaya.evaluation.metrics.significance import Statistics
from zendaya.records import Trace
from zendaya.research.sweep.table import RESULTS, Row, Table
from zendaya.runtime.policies import parse_policy

QUALITY = {
    "BLEU": ("BLEU-4", True), "BLEU-lc": ("BLEU-4", True), "METEOR": ("METEOR", True), "METEOR-nltk": ("METEOR", True),
    "WER": ("WER", False), "CIDEr": ("CIDEr", True),
}  # fmt: skip
"""Quality metrics by their name in the sweep's table: name in the report, and whether higher is better."""
MORE_IS_BETTER = dict(QUALITY.values())
OWN = "own"
Key = tuple[str, str, str, str, str, str]  # recipe, mode, family, scale, split and variant of a group


@dataclass
class Setting:
    """One decoding schedule or policy of a group."""

    decode: str
    rows: dict[int, dict[str, Row]] = field(default_factory=dict)  # by seed and metric

    @cached_property
    def gamma(self) -> float | None:
        """γ of a point of the paper's dial, which has no head start; 0, like full context, is the offline baseline."""
        return None if "head=" in self.decode else parse_policy(self.decode).gamma_or_none

    @cached_property
    def k(self) -> int | None:
        """k of wait-k."""
        return parse_policy(self.decode).k_or_none

    @property
    def name(self) -> str:
        """Name in the paper's tables: z-γ or w-k; other settings by their printed form."""
        return f"z-{self.gamma:g}" if self.gamma is not None else f"w-{self.k}" if self.k is not None else self.decode

    @property
    def kind(self) -> str:
        """ZENDAYA, wait-k, the head start, or the name of a policy."""
        other = self.decode.partition(",")[2] if "head=" in self.decode else self.decode.partition("=")[0]
        return "ZENDAYA" if self.gamma is not None else "wait-k" if self.k is not None else other

    @property
    def seeds(self) -> list[int]:
        return sorted(self.rows)

    def values(self, measure: str) -> dict[int, float]:
        """Its value per seed, quality as a fraction."""
        rows = {seed: self.row(seed, measure) for seed in self.seeds}
        return {seed: row.value / 100 if row.metric in QUALITY else row.value for seed, row in rows.items() if row is not None}

    def row(self, seed: int, measure: str) -> Row | None:
        """The row of a measure; the first of two metrics with one name in tables."""
        rows = self.rows.get(seed, {})
        return next((rows[name] for name in (*QUALITY, *rows) if name in rows and QUALITY.get(name, (name,))[0] == measure), None)

    def only(self, seeds: Collection[int]) -> Setting:
        """The setting with only these seeds."""
        return Setting(self.decode, {seed: rows for seed, rows in self.rows.items() if seed in seeds})

    def over(self, measure: str) -> significance.Seeds | None:
        """Mean and standard deviation over seeds; None without values."""
        values = list(self.values(measure).values())
        return significance.over_seeds(values) if values else None

    def mean(self, measure: str) -> float | None:
        """The mean over seeds."""
        found = self.over(measure)
        return None if found is None else found.mean


@dataclass
class Group:
    """Settings of one recipe, decoded in one mode, with one model per setting or one model for all."""

    recipe: str
    mode: str
    family: str  # `own`: one model per setting; else the training schedule of the one model for all
    scale: str
    split: str
    variant: str
    """Digest of every other choice: the recipe without schedule and seed, the data, the training and decoding limits."""
    marked: bool = False  # whether the label names the variant, because there are several
    settings: dict[str, Setting] = field(default_factory=dict)

    def keep_one_implementation(self) -> None:
        """Keep the most frequent implementation of each measure, such as METEOR with or without Java; two must not be compared."""
        rows = [rows for setting in self.settings.values() for rows in setting.rows.values()]
        for measure in MORE_IS_BETTER:
            names = [name for name, (shown, _) in QUALITY.items() if shown == measure]
            found = Counter(_implementation(each[name]) for name in names for each in rows if name in each)
            if len(found) > 1:
                kept = max(found, key=lambda one: found[one])  # a tie goes to the first
                for each in rows:
                    for name in names:
                        if name in each and _implementation(each[name]) != kept:
                            del each[name]

    @property
    def label(self) -> str:
        return self.recipe + ("" if self.family == OWN else f" ({self.family})") + self.mark

    @property
    def mark(self) -> str:
        """The suffix that tells it from other variants of its recipe."""
        return f" #{self.variant}" if self.marked else ""

    @property
    def any_row(self) -> Row:
        return next(row for setting in self.settings.values() for rows in setting.rows.values() for row in rows.values())

    @property
    def measures(self) -> list[str]:
        """Its quality measures, in the order of the paper's tables."""
        return [name for name in MORE_IS_BETTER if any(setting.values(name) for setting in self.settings.values())]

    def by_gamma(self) -> list[Setting]:
        return sorted((one for one in self.settings.values() if one.gamma is not None), key=lambda one: one.gamma or 0.0)

    def by_k(self) -> list[Setting]:
        return sorted((one for one in self.settings.values() if one.k is not None), key=lambda one: one.k or 0)

    def by_head(self) -> list[Setting]:
        return [one for one in self.policies() if "head=" in one.decode]

    def policies(self) -> list[Setting]:
        return [one for _, one in sorted(self.settings.items()) if one.gamma is None and one.k is None]

    @property
    def baseline(self) -> Setting | None:
        """γ→0."""
        return next((one for one in self.by_gamma() if one.gamma == 0), None)

    @property
    def ordered(self) -> list[Setting]:
        return [*self.by_gamma(), *self.by_k(), *self.policies()]


def _implementation(row: Row) -> tuple[str, str]:
    return row.metric, str(json.loads(row.signature)["metric"])


def shared(settings: Sequence[Setting]) -> list[Setting]:
    """Settings with only the seeds that all of them have, for a fair comparison."""
    common = set.intersection(*(set(one.seeds) for one in settings)) if settings else set[int]()
    return [one.only(common) for one in settings]


def measures_of(groups: Iterable[Group], *more: str) -> list[str]:
    """Quality measures of any of the groups, and more, in the order of the paper's tables."""
    found = {name for group in groups for name in group.measures} | {*more}
    return [name for name in MORE_IS_BETTER if name in found]


def best(settings: Iterable[Setting], measure: str) -> Setting | None:
    """The setting with the best mean."""
    known = [(mean, one) for one in settings if (mean := one.mean(measure)) is not None]
    sign = 1 if MORE_IS_BETTER[measure] else -1
    return max(known, key=lambda pair: sign * pair[0])[1] if known else None


def variant(row: Row) -> str:
    """A digest that tells experiments apart: rows of different variants must not be mixed."""
    signature = json.loads(row.signature)
    training, evaluation = signature.get("training", {}), signature.get("evaluation", {})
    recipe = {name: value for name, value in training.get("recipe", {}).items() if name != "schedule"}
    recipe["loop"] = {name: value for name, value in recipe.get("loop", {}).items() if name != "seed"}
    recipe["model"] = {name: value for name, value in recipe.get("model", {}).items() if name != "length"}  # wait-k has no head
    chosen = {name: evaluation.get(name) for name in ("limit", "window", "steps", "max_steps", "normalise", "streaming")}
    everything = [recipe, training.get("limit"), row.data_digest, chosen]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:6]


class Results:
    """A sweep's table in groups, with its traces."""

    def __init__(self, folder: str | Path, report: Callable[[str], None] = lambda _: None) -> None:
        """`report` is called with a line before each slow scoring of clips."""
        table = Table(folder)
        self._report = report
        self.folder, self.rows = table.folder, table.rows()
        if not self.rows:
            raise ZendayaError(f"{table.path}: holds no results yet; run the sweep, or check why its cells failed")
        self.failed = [record for record in table.records().values() if record.status == "failed"]
        groups: dict[Key, Group] = {}
        for row, key in sorted(((row, self._key(row)) for row in self.rows), key=lambda pair: pair[1][2] == OWN):
            families = [key]
            recipe, mode, family, *rest = key
            if family == OWN and (wider := (recipe, mode, row.train_schedule, *rest)) in groups:
                families.append(wider)  # the model was also decoded at other settings: it belongs to that family too
            for one in families:
                group = groups.setdefault(one, Group(*one))
                setting = group.settings.setdefault(row.decode_schedule, Setting(row.decode_schedule))
                setting.rows.setdefault(row.seed, {})[row.metric] = row
        for group in groups.values():
            group.keep_one_implementation()
        self.groups = [groups[key] for key in sorted(groups)]
        alike = Counter(key[:-1] for key in groups)
        for group_key, group in groups.items():
            group.marked = alike[group_key[:-1]] > 1
        self._traces: dict[str, list[Trace] | None] = {}
        self._statistics: dict[tuple[str, str], Statistics | None] = {}

    def _key(self, row: Row) -> Key:
        """The key of a row's group; family `own` where training and decoding schedule are the same."""
        family = OWN if row.train_schedule == row.decode_schedule else row.train_schedule
        try:
            if json.loads(row.signature).keys() >= {"metric", "training", "evaluation"}:
                return (row.recipe, row.mode, family, row.scale, row.split, variant(row))
        except (ValueError, AttributeError):
            pass
        where = f"{self.folder / RESULTS}: the {row.metric} of cell {row.cell}"
        raise ZendayaError(f"{where} has no readable signature: the table was changed; run the sweep in another folder")

    def of(self, mode: str) -> list[Group]:
        return [group for group in self.groups if group.mode == mode]

    def signature(self, row: Row) -> dict[str, Any]:
        """The signature of a row."""
        return dict(json.loads(row.signature))

    def traces(self, setting: Setting, seed: int) -> list[Trace] | None:
        """The traces of a decode; None where they were removed."""
        row = next(iter(setting.rows.get(seed, {}).values()), None)
        if row is None:
            return None
        if row.traces not in self._traces:
            file = self.folder / row.traces
            traces, digest = read_traces(file) if file.is_file() else (None, row.traces_digest)
            if digest != row.traces_digest:
                raise ZendayaError(f"{file}: the traces were changed after scoring; remove them and run the sweep again")
            self._traces[row.traces] = traces
        return self._traces[row.traces]

    def statistics(self, setting: Setting, seed: int, measure: str) -> Statistics | None:
        """Per-clip statistics of a decode's score; None where they cannot be computed."""
        traces, row = self.traces(setting, seed), setting.row(seed, measure)
        if traces is None or row is None:
            return None
        key = (row.traces, measure)
        if key not in self._statistics:
            normalise = self.signature(row)["evaluation"].get("normalise", "english")
            self._report(f"{row.metric} of each clip: {row.recipe} {row.train_schedule} seed {row.seed} at {row.decode_schedule}")
            texts, references = [trace.text for trace in traces], [trace.references for trace in traces]
            try:
                found = significance.statistics(row.metric.lower(), texts, references, normalise=normalise)
                # The interval of another implementation (without Java, say) would not belong to the sweep's score.
                self._statistics[key] = found if found.signature == self.signature(row)["metric"] else None
            except ZendayaError as error:  # its tool is not installed here
                self._report(f"no interval for {row.metric}: {error}")
                self._statistics[key] = None
        return self._statistics[key]

    def interval(self, setting: Setting, seed: int, measure: str) -> significance.Interval | None:
        """A score with its interval, in percent."""
        found = self.statistics(setting, seed, measure)
        return None if found is None else significance.bootstrap(found)

    def difference(self, a: Setting, b: Setting, seed: int, measure: str) -> significance.Difference | None:
        """A − B on the same clips, in percent; None where traces of that seed are missing or of other clips."""
        one, two = self.traces(a, seed), self.traces(b, seed)
        first, second = self.statistics(a, seed, measure), self.statistics(b, seed, measure)
        if one is None or two is None or first is None or second is None or [t.clip for t in one] != [t.clip for t in two]:
            return None
        return significance.paired_bootstrap(first, second)
