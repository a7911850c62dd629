"""Sampling of schedules: each training example draws its own, so that one checkpoint serves the whole dial."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from zendaya.errors import ScheduleError
from zendaya.schedule import PowerLaw, Schedule, WaitK, parse_schedule

STEP = 20  # drawn γ are multiples of 1/20


@dataclass(frozen=True, kw_only=True)
class ScheduleSampler:
    """γ = 0 with probability `offline`, wait-k with probability `wait_k`, else γ uniform over 0.05, 0.10 … `top`.

    k is uniform over 1 … half the source, at the stride of the corpus. With probability `head` such a γ has a head start too, uniform
    over 1 … a quarter of the source.
    """

    sampled: ClassVar[Literal[True]] = True
    trains_length: ClassVar[bool] = True

    top: float = 1.5
    offline: float = 0.2
    wait_k: float = 0.0
    head: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.offline, self.wait_k, self.head)
        if not 1.0 < self.top <= 10 or min(shares) < 0 or sum(shares) >= 1:
            raise ScheduleError(f"a dial needs top above 1 and at most 10, and offline + wait_k + head below 1, none negative: got {self}")

    def draw(self, rng: np.random.Generator, *, source: int, stride: float) -> Schedule:
        """The schedule of one example of `source` tokens."""
        kind = rng.random()
        if kind < self.offline:
            return PowerLaw(0.0)
        if kind < self.offline + self.wait_k:
            return WaitK(int(rng.integers(1, max(1, source // 2) + 1)), stride)
        gamma = int(rng.integers(1, round(self.top * STEP) + 1)) / STEP
        has_head = kind < self.offline + self.wait_k + self.head
        return PowerLaw(gamma, head=int(rng.integers(1, max(1, source // 4) + 1)) if has_head else 0)

    def for_run(self, rho: float | None) -> Self:
        """Itself: the stride is an argument of `draw`."""
        return self

    def __str__(self) -> str:
        top = f"={self.top:g}" if self.top != 1.5 else ""
        offline = f",offline={self.offline:g}" if self.offline != 0.2 else ""
        rest = [f"+{name}={share:g}" for name, share in (("wait-k", self.wait_k), ("head", self.head)) if share]
        return f"dial{top}{offline}{''.join(rest)}"


if TYPE_CHECKING:
    from typing_extensions import Self

    TrainingSchedule = Schedule | ScheduleSampler
else:

    class TrainingSchedule(ABC):  # noqa: B024
        """A schedule or a sampler of schedules, as one class: msgspec reads no unions of classes."""

    TrainingSchedule.register(Schedule)
    TrainingSchedule.register(ScheduleSampler)


def parse_training_schedule(text: str) -> TrainingSchedule:
    """What `--schedule` names: `dial` (γ to 1.5), `dial=2`, `dial,offline=0.5` (half of the instances γ = 0), `dial+wait-k` (a fifth
    of them wait-k), `dial+head` (a fifth of them with a head start), `dial+wait-k+head`, or any one schedule.

    >>> parse_training_schedule("dial+wait-k")
    ScheduleSampler(top=1.5, offline=0.2, wait_k=0.2, head=0.0)
    >>> parse_training_schedule("0.3")
    PowerLaw(gamma=0.3, rounding='ceil', head=0, hold=0)
    """
    compact = text.replace(" ", "").lower()
    if match := re.fullmatch(r"dial(?:=([0-9.]+))?(?:,offline=([0-9.]+))?(\+wait-?k(?:=([0-9.]+))?)?(\+head(?:=([0-9.]+))?)?", compact):
        try:
            return ScheduleSampler(
                top=float(match[1] or 1.5), offline=float(match[2] or 0.2), wait_k=(float(match[4] or 0.2) if match[3] else 0.0),
                head=(float(match[6] or 0.2) if match[5] else 0.0),
            )  # fmt: skip
        except ValueError:
            raise ScheduleError(f"not a dial: {text!r}; expected dial, dial=2, dial,offline=0.5, dial+wait-k, dial+head=0.3") from None
    return parse_schedule(text)


SCHEDULE_PARSERS: Mapping[Any, Callable[[str], TrainingSchedule]] = {TrainingSchedule: parse_training_schedule}
"""For `read_record`: recipes store a schedule in its printed form."""
