"""A probe of one model: random inputs, replacements beyond a horizon, the comparison of outputs, and the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from zendaya.nn.model import Model
from zendaya.runtime.engine import Engine
from zendaya.schedule import Schedule

Variant = Literal["values", "huge", "nan", "nothing", "more"]
VARIANTS: tuple[Variant, ...] = ("values", "huge", "nan", "nothing", "more")
SAME_SHAPE: tuple[Variant, ...] = ("values", "huge", "nan")
TOLERANCE = 1e-9
"""Relative, in float64: rounding stays near 1e-14, and a leak through real weights is many orders above."""
MORE = 5
"""Tokens that `more` adds past the end."""


@dataclass(frozen=True)
class Violation:
    """A step whose output changed with input beyond its horizon."""

    path: str
    variant: str
    step: int
    source_index: int
    """The first source token beyond the horizon that the step depends on."""
    size: float
    """Largest change of a logit; NaN where it became NaN, or where the change is not in a logit."""
    detail: str = ""

    def __str__(self) -> str:
        moved = "" if math.isnan(self.size) else f", logits moved by {self.size:.3g}"
        what = f"{self.path}: step {self.step} depends on source token {self.source_index}, beyond its horizon"
        return f"{what} (replaced by {self.variant}{moved}){': ' + self.detail if self.detail else ''}"


@dataclass
class AuditReport:
    """The tests run and the violations found."""

    schedule: str
    seed: int
    scale: str
    window_tokens: int
    """Source tokens of the windows tested, at most the model's own."""
    steps: int
    """Steps of the texts tested, at most the model's own."""
    steps_tested: dict[str, int] = field(default_factory=dict)
    """For each path, the number of steps tested at their own horizon."""
    probes: int = 0
    violations: list[Violation] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations

    @property
    def first(self) -> Violation | None:
        """The earliest violation of the first path that has one."""
        return self.violations[0] if self.violations else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; NaN becomes None."""
        record = {**dataclasses.asdict(self), "passed": self.passed}
        for violation in record["violations"]:
            violation["size"] = violation["size"] if math.isfinite(violation["size"]) else None
        return record


@dataclass
class Probe:
    """One audit in progress: the model, the schedule, the random generator and the findings."""

    model: Model
    schedule: Schedule
    window_tokens: int
    steps: int
    cuts: int
    report: AuditReport
    rng: torch.Generator
    segment: bool
    double: Model
    """The same model in float64, for replacements that change shapes."""
    engine: Engine | None = None
    """Engine of the incremental and live paths; default: the decoder."""

    def tokens(self, count: int, spread: float = 1.0) -> Tensor:
        if self.model.config.decoder.source_vocab:
            return torch.randint(self.model.config.decoder.source_vocab, (count, 1), generator=self.rng).float()
        return torch.randn(count, self.model.config.decoder.source_dim, generator=self.rng) * spread

    def text(self, count: int) -> list[int]:
        return torch.randint(self.model.config.decoder.vocab_size, (count,), generator=self.rng).tolist()

    def replace(self, source_TE: Tensor, keep: int, variant: Variant) -> Tensor:
        """The source with all tokens from index `keep` on replaced."""
        kept_TE, beyond = source_TE[:keep], source_TE.shape[0] - keep
        if variant == "nothing":
            return kept_TE.clone()
        if variant == "nan":
            return torch.cat([kept_TE, torch.full_like(source_TE[keep:], torch.nan)])
        other_TE = self.tokens(beyond + (MORE if variant == "more" else 0), spread=3.0)
        if variant == "huge":  # finite, of every magnitude in float32
            other_TE = torch.sign(other_TE) * 10 ** torch.empty_like(other_TE).uniform_(3, 38, generator=self.rng)
        return torch.cat([kept_TE, other_TE])

    def some(self, values: Sequence[int], count: int | None = None) -> list[int]:
        """At most `count` (default: `cuts`) of the distinct values, evenly spread, with the first and the last."""
        distinct = sorted(set(values))
        places = np.unique(np.linspace(0, len(distinct) - 1, min(count or self.cuts, len(distinct))).round().astype(int))
        return [distinct[place] for place in places] if distinct else []

    def horizons(self, num_source: int, steps: int, num_steps: int | None = None) -> list[int]:
        """How many of `num_source` tokens each step may read."""
        return np.minimum(self.schedule.horizons(self.window_tokens, steps, num_steps=num_steps), num_source).tolist()

    def count_tested(self, path: str, steps: int) -> None:
        self.report.steps_tested[path] = self.report.steps_tested.get(path, 0) + steps

    def add(self, path: str, variant: str, step: int, source_index: int, *, size: float = math.nan, detail: str = "") -> None:
        """Record a violation."""
        self.report.violations.append(Violation(path, variant, step, source_index, size, detail))

    def compare(
        self, path: str, variant: str, steps: Sequence[int], keep: int | Sequence[int], base_NV: Tensor, probe_NV: Tensor, *,
        exact: bool = True, locate: Callable[[int, int], int] | None = None,
    ) -> None:  # fmt: skip
        """Record a violation at the first of the steps (from 1) where the probe's logits differ from the base's.

        `keep` is the number of source tokens kept, one or per step. Where not `exact`, a replacement changed shapes and TOLERANCE holds.
        `locate` finds the source token that a step depends on, at or after an index; default: the first one replaced.
        """
        self.report.probes += 1
        for step in steps:
            base_V, probe_V = base_NV[step - 1], probe_NV[step - 1]
            size = float((base_V - probe_V).abs().max())
            if torch.equal(base_V, probe_V) if exact else size <= TOLERANCE * max(1.0, float(base_V.abs().max())):
                continue
            index = keep if isinstance(keep, int) else keep[step - 1]
            self.add(path, variant, step, index if locate is None else locate(step, index), size=size)
            return
