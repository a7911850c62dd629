"""The findings of an audit."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


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
