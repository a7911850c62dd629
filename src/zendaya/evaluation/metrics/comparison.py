"""Comparison of two decodes of the same clips: each score, the difference, its interval and p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zendaya
from zendaya.errors import ZendayaError
from zendaya.evaluation.metrics.quality import Normalise, check_metrics
from zendaya.evaluation.metrics.results import read_traces, signature_beside
from zendaya.evaluation.metrics.significance import RESAMPLES, Difference, paired_bootstrap, statistics
from zendaya.records import Trace
from zendaya.runtime.policies import parse_policy


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """One metric of two decodes."""

    name: str
    a: float
    b: float
    difference: Difference
    """A − B."""
    higher_is_better: bool
    signature: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two decodes of the same clips."""

    a: str
    """Schedule and file of A."""
    b: str
    num_clips: int
    metrics: tuple[MetricComparison, ...]
    record: dict[str, Any]
    """The whole comparison with its signature, as JSON."""


def compare_traces(
    a: str | Path, b: str | Path, *, metrics: Sequence[str] | None = None, a_schedule: str | None = None, b_schedule: str | None = None,
    normalise: Normalise | None = None, resamples: int = RESAMPLES, seed: int = 0,
) -> Comparison:  # fmt: skip
    """Compare a schedule of one traces file with one of another, or of the same, by paired bootstrap over clips."""
    (all_a, sha_a), (all_b, sha_b) = read_traces(a), read_traces(b)
    signed_a, signed_b = signature_beside(a, sha_a), signature_beside(b, sha_b)
    names = tuple(metrics) if metrics is not None else tuple(signed_a.get("metrics", ("bleu",)))
    norm: Normalise = normalise if normalise is not None else signed_a.get("normalise", "english")
    check_metrics(names, normalise=norm)
    for key in ("corpus", "data_sha256"):
        if key in signed_a and key in signed_b and signed_a[key] != signed_b[key]:
            raise ZendayaError(f"{a} and {b} are not of the same data: {key} is {signed_a[key]!r} and {signed_b[key]!r}")
    one, two = _of_schedule(all_a, a_schedule, a, "--a-schedule"), _of_schedule(all_b, b_schedule, b, "--b-schedule")
    if (one[0].schedule, sha_a) == (two[0].schedule, sha_b):
        raise ZendayaError(f"A and B are the same decode, {one[0].schedule} of {a}: give another file or schedule")
    two = _paired(one, two, a, b)
    references = [trace.references for trace in one]
    compared = []
    for name in names:
        stats = [statistics(name, [trace.text for trace in traces], references, normalise=norm) for traces in (one, two)]
        compared.append(
            MetricComparison(
                name=stats[0].name, a=stats[0].score, b=stats[1].score, higher_is_better=stats[0].higher_is_better,
                difference=paired_bootstrap(*stats, resamples=resamples, seed=seed), signature=stats[0].signature,
            )
        )  # fmt: skip
    labels = [f"{traces[0].schedule}, {path}" for traces, path in ((one, a), (two, b))]
    signature = {
        "version": zendaya.__version__, "resamples": resamples, "seed": seed, "interval": "percentile, 95 %", "p": "two-sided",
        "normalise": norm, "traces_sha256": [sha_a, sha_b],
    }  # fmt: skip
    record = {"signature": signature, "a": labels[0], "b": labels[1], "num_clips": len(one), "metrics": [asdict(each) for each in compared]}
    return Comparison(a=labels[0], b=labels[1], num_clips=len(one), metrics=tuple(compared), record=record)


def _of_schedule(traces: list[Trace], schedule: str | None, path: str | Path, option: str) -> list[Trace]:
    there = list(dict.fromkeys(trace.schedule for trace in traces))
    if schedule is None and len(there) > 1:
        raise ZendayaError(f"{path} holds {len(there)} schedules: choose one with {option}: {'; '.join(there)}")
    wanted = there[0] if schedule is None else schedule if schedule in there else str(parse_policy(schedule))
    if wanted not in there:
        raise ZendayaError(f"{path} holds no decode under {wanted}: {option} must be one of {'; '.join(there)}")
    return [trace for trace in traces if trace.schedule == wanted]


def _paired(one: list[Trace], two: list[Trace], a: str | Path, b: str | Path) -> list[Trace]:
    """B's traces in the order of A's clips."""
    first, second = ({(trace.split, trace.clip): trace for trace in traces} for traces in (one, two))
    for traces, by_clip, path in ((one, first, a), (two, second, b)):
        if len(by_clip) < len(traces):
            raise ZendayaError(f"{path}: a clip occurs twice under {traces[0].schedule}: compare one decode at a time")
    if alone := sorted(first.keys() ^ second.keys()):
        counts, (split, clip) = f"{len(first)} and {len(second)} clips, {len(alone)} of them in one file only", alone[0]
        raise ZendayaError(f"{a} and {b} are not of the same clips: {counts}, such as {clip!r} of split {split!r}")
    for key, trace in first.items():
        if trace.references != second[key].references:
            raise ZendayaError(f"{a} and {b} have different references for clip {key[1]!r}: they are not of the same data")
    return [second[key] for key in first]
