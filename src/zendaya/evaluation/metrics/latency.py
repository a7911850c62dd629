"""Latency metrics of a decode: `delays[i−1]` is how much source had been read when target token i was written.

On the decode-step clock the delays are the horizons, g(i) = Ω_i. Definitions follow SimulEval's scorers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from zendaya.errors import ZendayaError
from zendaya.schedule import Schedule, WaitK

Delays = Sequence[float] | npt.NDArray[Any]


def _checked(delays: Delays, source: float, target: float) -> npt.NDArray[np.float64]:
    try:
        array, lengths = np.asarray(delays, np.float64), np.array([source, target], np.float64)
    except (TypeError, ValueError):
        raise ZendayaError(f"delays, source and target must be numbers: got {_short(delays)}, {_short(source)}, {_short(target)}") from None
    if array.ndim != 1 or array.size == 0 or not np.all(np.isfinite(array)):
        raise ZendayaError(f"delays must be a list of finite numbers, one per target token: got {_short(delays)}")
    if not np.all((lengths > 0) & np.isfinite(lengths)):
        raise ZendayaError(f"source and target lengths must be finite and above 0: got source={source}, target={target}")
    return array


def _short(value: object) -> str:
    """A value for an error message, in one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}…"


def _lagging(delays: npt.NDArray[np.float64], source: float, per_step: float) -> float:
    """Mean of d_i − (i−1)·per_step up to the first step that has read the whole source."""
    if delays[0] > source:
        return float(delays[0])
    complete = np.nonzero(delays >= source)[0]
    tau = int(complete[0]) + 1 if complete.size else delays.size
    return float(np.mean(delays[:tau] - np.arange(tau) * per_step))


def average_lagging(delays: Delays, *, source: float, target: float) -> float:
    """AL = (1/τ) Σ_{i≤τ} d_i − (i−1)·F/N, τ the first step with d_i ≥ F (Ma et al. 2019).

    >>> average_lagging([1, 2, 3], source=3, target=3)
    1.0
    """
    return _lagging(_checked(delays, source, target), source, source / target)


def length_adaptive_average_lagging(delays: Delays, *, source: float, target: float) -> float:
    """LAAL: AL paced by the longer of hypothesis and reference, so overlong output gains nothing (Papi et al. 2022).

    >>> length_adaptive_average_lagging([1, 2, 3, 3], source=3, target=2)
    1.25
    """
    array = _checked(delays, source, target)
    return _lagging(array, source, source / max(array.size, target))


def average_proportion(delays: Delays, *, source: float, target: float) -> float:
    """AP = (1/(F·N)) Σ d_i (Cho and Esipova 2016).

    >>> average_proportion([1, 2, 3], source=3, target=3)
    0.6666666666666666
    """
    return float(np.sum(_checked(delays, source, target)) / (source * target))


def differentiable_average_lagging(delays: Delays, *, source: float, target: float) -> float:
    """DAL = (1/N) Σ d'_i − (i−1)·F/N with d'_i = max(d_i, d'_{i−1} + F/N), N the number written (Arivazhagan et al. 2019).

    The pace is set by the number of delays, as in SimulEval; `target` is only checked, so that all metrics are called alike.

    >>> differentiable_average_lagging([3, 3, 3], source=3, target=3)
    3.0
    """
    array = _checked(delays, source, target)
    # d'_i − (i−1)·pace is the running maximum of d_i − (i−1)·pace.
    return float(np.mean(np.maximum.accumulate(array - np.arange(array.size) * (source / array.size))))


SCORERS = {
    "AL": average_lagging, "LAAL": length_adaptive_average_lagging, "AP": average_proportion, "DAL": differentiable_average_lagging,
}  # fmt: skip
"""The latency metrics by SimulEval's names."""


def schedule_lag(schedule: Schedule, *, source: int, steps: int) -> float:
    """AL of a schedule on the decode-step clock, g(i) = Ω_i."""
    return average_lagging(schedule.horizons(source, steps), source=source, target=steps)


def wait_k_at_lag(lag: float, *, source: int, steps: int) -> WaitK:
    """The wait-k of catch-up stride F/N whose AL is nearest to `lag`, by bisection: AL grows with k."""
    stride = Fraction(source, steps)
    low, high = 1, source
    while low < high:
        middle = (low + high) // 2
        if schedule_lag(WaitK(middle, stride), source=source, steps=steps) < lag:
            low = middle + 1
        else:
            high = middle
    candidates = [WaitK(k, stride) for k in (low - 1, low) if k >= 1]
    return min(candidates, key=lambda schedule: abs(schedule_lag(schedule, source=source, steps=steps) - lag))
