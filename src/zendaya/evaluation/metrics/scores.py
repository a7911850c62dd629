"""Scores of a decode from its traces: quality, lag and exposure, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from zendaya.errors import ZendayaError
from zendaya.evaluation.metrics.latency import SCORERS
from zendaya.evaluation.metrics.quality import Normalise, Quality, check_metrics, quality
from zendaya.records import Scale, Trace
from zendaya.runtime.policies import Policy, parse_policy
from zendaya.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Lags in one unit of source, as means over clips; AL and LAAL are paced by the reference's steps, as in SimulEval."""

    average_lagging: float
    length_adaptive_average_lagging: float
    average_proportion: float
    differentiable_average_lagging: float
    first_token: float
    """Source that had arrived when the first step was written, including the length head's wait."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of one schedule on one set of clips."""

    schedule: str
    scale: Scale
    num_clips: int
    quality: tuple[Quality, ...]
    latency_tokens: Latency
    """In source tokens, on the decode-step clock: delays are g(i) = Ω^eff_i."""
    latency_s: Latency | None
    """In seconds, without computation time: delays are the times at which steps could be written; None without arrival times."""
    latency_computing_s: Latency | None
    """In seconds, computation-aware: delays are the emission times; None where they were not measured."""
    exposure: float
    """Realised Ē: the mean over written steps of Ω^eff / source tokens of the window."""
    exposure_planned: float
    """Exact Ē of the schedule at each window's W and N̂ (Eq. 2); for a learned schedule or a policy, from its horizons."""
    exposure_limit: float | None
    """The closed form 1/(1+γ) (Eq. 3), where the schedule has one; with a head start, that of method.md §8 at each clip's W."""
    steps: float
    """Mean steps written per clip, ends included."""
    predicted_steps: float
    """Mean N̂ per clip."""
    reference_steps: float | None
    """Mean N of the references per clip; None where the model has no tokenizer to count it."""
    decoder_rows: float | None = None
    """Mean decoder rows per clip, the cost of policies; None where the traces lack it."""
    revised: float | None = None
    """Mean tokens per clip that were decoded, not written, and changed by a later decode."""
    normalised_erasure: float | None = None
    """Mean over clips of revised tokens / tokens written (Arivazhagan et al. 2020), as if every decode were displayed.
    It is 0 for a schedule; no policy revises text that is written."""


def wanted_metrics(names: Iterable[str], *, normalise: Normalise = "english") -> tuple[str, ...]:
    """The metrics of those names, each once, after a check that each can be computed."""
    wanted = tuple(dict.fromkeys(names))
    if normalise not in get_args(Normalise):  # even if no metric uses it: it is part of the signature
        raise ZendayaError(f"normalise must be one of {', '.join(get_args(Normalise))}: got {normalise!r}")
    check_metrics(wanted, normalise=normalise)
    return wanted


def score(traces: Iterable[Trace], *, metrics: Sequence[str], normalise: Normalise = "english") -> tuple[Scores, ...]:
    """Scores of each schedule among the traces, in order of first occurrence."""
    groups: dict[tuple[str, Scale], list[Trace]] = {}
    for trace in traces:
        groups.setdefault((trace.schedule, trace.scale), []).append(trace)
    if not groups:
        raise ZendayaError("nothing to score: there are no traces")
    return tuple(_score(group, metrics, normalise) for group in groups.values())


def _score(traces: list[Trace], metrics: Sequence[str], normalise: Normalise) -> Scores:
    keys = [(trace.split, trace.clip) for trace in traces]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ZendayaError(f"clip {twice[1]!r} of split {twice[0]!r} occurs twice under {traces[0].schedule}: score one decode at a time")
    schedule = parse_policy(traces[0].schedule)
    hypotheses, references = [trace.text for trace in traces], [trace.references for trace in traces]
    counted = [float(np.mean(trace.reference_steps)) for trace in traces if trace.reference_steps]
    planned = [_planned(schedule, trace) for trace in traces]
    return Scores(
        schedule=traces[0].schedule, scale=traces[0].scale, num_clips=len(traces),
        quality=tuple(quality(name, hypotheses, references, normalise=normalise) for name in metrics),
        latency_tokens=_latency(traces, lambda trace: (trace.delays, trace.num_source_tokens, trace.arrived[0])),
        latency_s=_latency_s(traces, lambda trace: trace.delays_s),
        latency_computing_s=_latency_s(traces, lambda trace: trace.computing_s),
        exposure=float(np.mean([_exposure(trace) for trace in traces])),
        exposure_planned=float(np.mean(planned)),
        exposure_limit=_limit(schedule, traces),
        steps=float(np.mean([len(trace.tokens) for trace in traces])),
        predicted_steps=float(np.mean([sum(trace.predicted_steps) for trace in traces])),
        reference_steps=float(np.mean(counted)) if counted else None,
        decoder_rows=_mean([trace.decoder_rows for trace in traces]),
        revised=_mean([trace.revised for trace in traces]),
        normalised_erasure=_mean([None if trace.revised is None else trace.revised / len(trace.tokens) for trace in traces]),
    )  # fmt: skip


def _mean(counts: Sequence[float | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return float(np.mean(known)) if len(known) == len(counts) else None


def _planned(schedule: Schedule | Policy, trace: Trace) -> float:
    """Ē by the schedule's closed form; for a learned schedule or a policy, from its horizons."""
    if schedule.decides_while_reading or schedule.learned:
        return float(np.mean(trace.horizons)) / trace.window_tokens
    return float(np.mean([schedule.exposure(trace.window_tokens, steps) for steps in trace.predicted_steps]))


def _limit(schedule: Schedule | Policy, traces: list[Trace]) -> float | None:
    """The limit of Ē in closed form; where it depends on the source, its mean over clips."""
    if schedule.decides_while_reading or schedule.exposure_limit is not None:
        return schedule.exposure_limit
    return _mean([schedule.exposure_limit_of(trace.window_tokens) for trace in traces])


def _latency_s(traces: list[Trace], moments: Callable[[Trace], tuple[float, ...] | None]) -> Latency | None:
    """Latency in seconds, if every clip has arrival times and times of its steps."""
    if any(not trace.arrivals_s or trace.arrivals_s[-1] <= 0 or moments(trace) is None for trace in traces):
        return None

    def clock(trace: Trace) -> tuple[Sequence[float], float, float]:
        delays, arrivals = moments(trace), trace.arrivals_s
        assert delays is not None
        assert arrivals is not None
        return delays, arrivals[-1], delays[0]

    return _latency(traces, clock)


def _latency(traces: list[Trace], clock: Callable[[Trace], tuple[Sequence[float], float, float]]) -> Latency:
    """Means over clips; `clock` gives a trace's delays, the length of its source, and its first token's lag."""
    rows = []
    for trace in traces:
        delays, source, first = clock(trace)
        target = float(np.mean(trace.reference_steps)) if trace.reference_steps else len(delays)
        rows.append([*(scorer(delays, source=source, target=target) for scorer in SCORERS.values()), first])
    lag, adaptive, proportion, differentiable, first_token = np.mean(rows, 0).tolist()
    return Latency(
        average_lagging=lag, length_adaptive_average_lagging=adaptive, average_proportion=proportion,
        differentiable_average_lagging=differentiable, first_token=first_token,
    )  # fmt: skip


def _exposure(trace: Trace) -> float:
    shares = [read / trace.tokens_of_window(k) for k, read in zip(trace.windows, trace.effective_horizons, strict=True)]
    return float(np.mean(shares))
