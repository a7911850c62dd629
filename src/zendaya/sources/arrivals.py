"""Arrival processes: when source tokens arrive over a network link, simulated or recorded; a link keeps order and loses nothing."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zendaya.errors import ConfigError, SourceError, ZendayaError
from zendaya.files import write_atomically

FloatArray = npt.NDArray[np.float64]


class Link(ABC):
    """A network link: maps the times at which tokens are due to the times at which they arrive, never earlier."""

    @abstractmethod
    def arrivals(self, due_s: npt.ArrayLike) -> FloatArray:
        """Arrival times of tokens that are due at these times, in order."""

    def share_late(self, due_s: npt.ArrayLike) -> float:
        """Share of tokens that arrive late."""
        due = _due(due_s)
        return float(np.mean(self.arrivals(due) > due)) if due.size else 0.0


@dataclass(frozen=True)
class Steady(Link):
    """A perfect link: every token arrives when it is due.

    >>> Steady().arrivals([0.5, 1.0, 1.5])
    array([0.5, 1. , 1.5])
    """

    def arrivals(self, due_s: npt.ArrayLike) -> FloatArray:
        return _due(due_s).copy()

    def __str__(self) -> str:
        return "steady"


@dataclass(frozen=True)
class Bursty(Link):
    """Tokens arrive in bursts: at each, all that became due since the last one.

    >>> Bursty(every_s=2).arrivals([0.5, 1.0, 2.5, 4.0])
    array([2., 2., 4., 4.])
    """

    every_s: float

    def __post_init__(self) -> None:
        _positive("every_s", self.every_s)

    def arrivals(self, due_s: npt.ArrayLike) -> FloatArray:
        due = _due(due_s)
        return np.maximum(due, np.ceil(due / self.every_s) * self.every_s)

    def __str__(self) -> str:
        return f"burst={self.every_s:g}"


@dataclass(frozen=True)
class Outages(Link):
    """A degraded link: random outages of `outage_s` seconds, a share `late` of the time, with exponential gaps between them.

    Tokens due during an outage arrive at its end.

    >>> link = Outages(late=0.3, outage_s=4.0, seed=1)
    >>> due_s = np.arange(10_000) / 10
    >>> bool(abs(link.share_late(due_s) - 0.3) < 0.05), bool(np.max(link.arrivals(due_s) - due_s) <= 4)
    (True, True)
    """

    late: float
    outage_s: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.late < 1:
            raise ConfigError(f"late, the share of time a link is out, must lie between 0 and 1: got {self.late}")
        _positive("outage_s", self.outage_s)
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0: got {self.seed}")

    def arrivals(self, due_s: npt.ArrayLike) -> FloatArray:
        due = _due(due_s)
        if not due.size:
            return due
        # Outages are drawn one after another, so that those before a moment do not depend on later ones.
        rng, gap_s, begins = np.random.default_rng(self.seed), self.outage_s * (1 - self.late) / self.late, list[float]()
        begin_s = float(rng.exponential(gap_s))
        while begin_s <= due[-1]:
            begins.append(begin_s)
            begin_s += self.outage_s + float(rng.exponential(gap_s))
        starts = np.array([-math.inf, *begins])
        last_T = starts[np.searchsorted(starts, due, side="right") - 1]
        return np.where(due < last_T + self.outage_s, last_T + self.outage_s, due)

    def __str__(self) -> str:
        return f"late={self.late:g},outage={self.outage_s:g},seed={self.seed}"


@dataclass(frozen=True)
class Recorded(Link):
    """Arrivals recorded on a real link, one time per token.

    >>> Recorded((0.6, 1.9, 1.9)).arrivals([0.5, 1.0])
    array([0.6, 1.9])
    """

    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if any(not math.isfinite(time_s) for time_s in self.times_s) or any(np.diff(self.times_s) < 0):
            raise SourceError("recorded arrivals must be finite and must not decrease")

    def arrivals(self, due_s: npt.ArrayLike) -> FloatArray:
        count = _due(due_s).size
        if count > len(self.times_s):
            raise SourceError(f"the recorded arrivals cover {len(self.times_s)} tokens: got {count} tokens")
        return np.array(self.times_s[:count])

    @classmethod
    def load(cls, path: str | Path) -> Recorded:
        """The arrivals that `save` wrote, or any JSON list of seconds."""
        try:
            times = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
        except ValueError:
            raise SourceError(f"{path}: not JSON; expected a list of arrival times in seconds") from None
        if not isinstance(times, list) or any(isinstance(t, bool) or not isinstance(t, int | float) for t in times):
            raise SourceError(f"{path}: expected a JSON list of arrival times in seconds")
        try:
            return cls(tuple(map(float, times)))
        except SourceError as error:
            raise SourceError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the arrivals as a JSON list, atomically."""
        try:
            write_atomically(Path(path), json.dumps(self.times_s).encode() + b"\n")
        except OSError as error:
            raise SourceError(f"{path}: cannot be written: {error.strerror or error}") from None

    def __str__(self) -> str:
        return f"recorded ({len(self.times_s)} tokens)"


def parse_link(text: str) -> Link:
    """The link that its printed form names: `steady`, `burst=2`, `late=0.3,outage=4`, `late=0.3,outage=4,seed=1`, `recorded=FILE`.

    >>> str(parse_link("late=0.3,outage=4"))
    'late=0.3,outage=4,seed=0'
    """
    number = r"([^,=]+)"
    if text == "steady":
        return Steady()
    if text.startswith("recorded="):
        return Recorded.load(text.removeprefix("recorded="))
    try:
        if found := re.fullmatch(f"burst={number}", text):
            return Bursty(float(found[1]))
        if found := re.fullmatch(f"late={number},outage={number}(?:,seed={number})?", text):
            return Outages(float(found[1]), float(found[2]), int(found[3] or 0))
    except ValueError as error:
        if isinstance(error, ZendayaError):
            raise
    raise ConfigError(f"not a link: {text!r}; expected steady, burst=2, late=0.3,outage=4, recorded=FILE")


def _due(due_s: npt.ArrayLike) -> FloatArray:
    due: FloatArray = np.asarray(due_s, np.float64)
    if due.ndim != 1 or not np.isfinite(due).all() or (np.diff(due) < 0).any():
        raise SourceError("due times must be a list of finite numbers that do not decrease")
    return due


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be finite and above 0: got {value}")
