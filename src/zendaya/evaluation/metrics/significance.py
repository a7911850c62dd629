"""Significance: paired bootstrap over clips, means over seeds, and the paper's two rules for bold figures.

A corpus score is a function of sums over clips, so a resample is a row of clip counts, and a thousand resamples are one matrix product.
Shape suffixes: C clips, S statistics, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zendaya.errors import ZendayaError
from zendaya.evaluation.metrics import captions
from zendaya.evaluation.metrics.captions import Floats, References, Texts
from zendaya.evaluation.metrics.quality import Normalise, bleu_counts, check_metrics, check_references, only_references, word_errors

RESAMPLES = 1000
"""As in the paper (appendix app:ci)."""
_MAX_COUNTS = 50_000_000
"""Most clip counts in memory at once; more resamples are drawn in rounds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """Per-clip statistics whose sums give a corpus score."""

    metric: str
    """Name on the command line."""
    name: str
    """Name in tables."""
    signature: str
    values_CS: Floats
    of_sums: Callable[[Floats], Floats]
    """Scores (R), in percent, of statistics summed over clips (R, S)."""
    higher_is_better: bool = True

    @property
    def num_clips(self) -> int:
        return len(self.values_CS)

    @property
    def score(self) -> float:
        """The corpus score, in percent: equal to the metric's own."""
        return float(self.of_sums(self.values_CS.sum(0, keepdims=True))[0])


def statistics(metric: str, hypotheses: Texts, references_per_clip: References, *, normalise: Normalise = "english") -> Statistics:
    """The statistics of a metric by name.

    BLEU, WER and METEOR 1.5 are scored from pooled counts; NLTK's METEOR and CIDEr are means over clips. CIDEr's document frequencies
    are those of all references, whichever clips are drawn.

    >>> statistics("bleu", ["a man plays a guitar"], [["a man plays a guitar"]]).score
    100.0
    """
    check_metrics([metric], normalise=normalise)
    check_references(hypotheses, references_per_clip)
    values_CS: npt.NDArray[Any]
    of_sums = _percentage
    if metric in ("bleu", "bleu-lc"):
        values_CS, signature = bleu_counts(hypotheses, references_per_clip, lowercase=metric == "bleu-lc")
        name, of_sums = "BLEU" if metric == "bleu" else "BLEU-lc", _bleu_of
    elif metric == "wer":
        values_CS, signature = word_errors(hypotheses, only_references(hypotheses, references_per_clip), normalise=normalise)
        name = "WER"
    elif metric == "meteor" and captions.java_is_here():
        _, values_CS, signature = captions.meteor_1_5(hypotheses, references_per_clip)
        name, of_sums = "METEOR", _meteor_of
    else:
        scores, signature = (captions.cider if metric == "cider" else captions.meteor_nltk)(hypotheses, references_per_clip)
        name, values_CS = "CIDEr" if metric == "cider" else "METEOR-nltk", np.stack([scores, np.ones_like(scores)], 1)
    return Statistics(
        metric=metric, name=name, signature=signature, values_CS=values_CS.astype(np.float64), of_sums=of_sums,
        higher_is_better=metric != "wer",
    )  # fmt: skip


def _percentage(sums_RS: Floats) -> Floats:
    """100 · the first sum / the second; 0 where the second is 0."""
    return 100 * captions.ratio(sums_RS[:, 0], sums_RS[:, 1])


def _meteor_of(sums_RS: Floats) -> Floats:
    return 100 * captions.meteor_1_5_of(sums_RS)


def _bleu_of(sums_RS: Floats) -> Floats:
    """BLEU-4 with sacreBLEU's exponential smoothing: the k-th n-gram order without a match counts 1/2^k matches."""
    written_R, wanted_R, found_R4, total_R4 = sums_RS[:, 0], sums_RS[:, 1], sums_RS[:, 2:6], sums_RS[:, 6:10]
    some_R: npt.NDArray[np.bool_] = np.any(found_R4 > 0, 1) & np.all(total_R4 > 0, 1)
    smoothed_R4 = np.where(found_R4 > 0, found_R4, 0.5 ** np.cumsum(found_R4 == 0, 1))
    precision_R = np.exp(np.log(np.where(some_R[:, None], smoothed_R4 / np.maximum(total_R4, 1), 1.0)).mean(1))
    brevity_R = np.exp(np.minimum(0.0, 1 - wanted_R / np.maximum(written_R, 1)))
    return np.where(some_R, np.minimum(100.0, 100 * brevity_R * precision_R), 0.0)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A score and the 95 % percentile interval of its resamples."""

    value: float
    """Of all clips."""
    low: float
    high: float
    resamples: int
    seed: int
    clips: int

    @property
    def excludes_zero(self) -> bool:
        """The paper's rule for bold figures in tables of intervals (Tables 4 and A1)."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class Difference(Interval):
    """A's score minus B's on the same clips."""

    p: float
    """Two-sided: 2 · (1 + the resamples on the rarer side of 0, those at 0 included) / (1 + resamples), at most 1."""


def bootstrap(of: Statistics, *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """A score with its interval: as many clips as the corpus has are drawn with replacement."""
    (scores_R,) = _resample([of], resamples, seed)
    low, high = np.percentile(scores_R, [2.5, 97.5]).tolist()
    return Interval(value=of.score, low=low, high=high, resamples=resamples, seed=seed, clips=of.num_clips)


def paired_bootstrap(a: Statistics, b: Statistics, *, resamples: int = RESAMPLES, seed: int = 0) -> Difference:
    """A − B with its interval and p, from the same clips drawn for both (Koehn 2004).

    p is, to one resample, the level at which the percentile interval first holds 0; with 1,000 resamples it is at least 0.002.
    sacreBLEU instead counts how often |A* − B*| exceeds its own mean by more than |A − B|, and gives (1 + count) / (1 + resamples).
    """
    if a.num_clips != b.num_clips:
        raise ZendayaError(f"a paired comparison needs the same clips: got {a.num_clips} and {b.num_clips}")
    if a.signature != b.signature:
        raise ZendayaError(f"a paired comparison needs one metric: got {a.signature} and {b.signature}")
    first_R, second_R = _resample([a, b], resamples, seed)
    differences_R = first_R - second_R
    low, high = np.percentile(differences_R, [2.5, 97.5]).tolist()
    rarer = min(np.sum(differences_R <= 0), np.sum(differences_R >= 0))
    p = min(1.0, 2 * (1 + int(rarer)) / (1 + resamples))
    return Difference(value=a.score - b.score, low=low, high=high, p=p, resamples=resamples, seed=seed, clips=a.num_clips)


def quotient_bootstrap(a: Statistics, b: Statistics, *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """A / B with its interval, where the two were scored on different clips: each corpus is drawn for itself."""
    if a.signature != b.signature:
        raise ZendayaError(f"a quotient needs one metric: got {a.signature} and {b.signature}")
    ((above_R,), (below_R,)) = (_resample([of], resamples, seed + corpus) for corpus, of in enumerate((a, b)))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.percentile(above_R / below_R, [2.5, 97.5]).tolist()
    value = a.score / b.score if b.score else math.nan
    return Interval(value=value, low=low, high=high, resamples=resamples, seed=seed, clips=a.num_clips)


def _resample(systems: Sequence[Statistics], resamples: int, seed: int) -> list[Floats]:
    """Scores (R) of each system on the same resamples."""
    if resamples < 1:
        raise ZendayaError(f"resamples must be at least 1: got {resamples}")
    random, num_clips = np.random.default_rng(seed), systems[0].num_clips
    scores: list[list[Floats]] = [[] for _ in systems]
    done, most = 0, max(1, _MAX_COUNTS // num_clips)
    while done < resamples:
        num = min(most, resamples - done)
        drawn_RC = random.integers(num_clips, size=(num, num_clips)) + num_clips * np.arange(num)[:, None]
        counts_RC = np.bincount(drawn_RC.ravel(), minlength=num * num_clips).reshape(num, num_clips).astype(np.float64)
        for system, found in zip(systems, scores, strict=True):
            found.append(system.of_sums(counts_RC @ system.values_CS))
        done += num
    return [np.concatenate(found) for found in scores]


@dataclass(frozen=True)
class Seeds:
    """A score over training runs that differ in seed."""

    mean: float
    sd: float | None
    """Sample standard deviation (n − 1); None for one run."""
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.sd is None else f"{self.mean:.2f} ± {self.sd:.2f}"


def over_seeds(values: Sequence[float]) -> Seeds:
    """Mean and standard deviation of one score over seeds.

    >>> over_seeds([1.0, 2.0, 3.0])
    Seeds(mean=2.0, sd=1.0, count=3)
    """
    array = _finite(values)
    return Seeds(float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else None, array.size)


def beats_on_every_seed(values: Sequence[float], baseline: Sequence[float], *, higher_is_better: bool = True) -> bool:
    """The paper's rule for bold figures over seeds (Table A3): better on every seed, on average by at least three standard errors.

    One seed has no standard error and is never bold. Both lists must be in the same order of seeds.

    >>> beats_on_every_seed([3.0, 3.1, 3.2], [1.0, 1.0, 1.0]), beats_on_every_seed([1.1, 5.0, 3.0], [1.0, 1.0, 1.0])
    (True, False)
    """
    array, base = _finite(values), _finite(baseline)
    if array.size != base.size:
        raise ZendayaError(f"a paired difference needs the same seeds for both: got {array.size} and {base.size}")
    gains = (array - base) * (1 if higher_is_better else -1)
    if gains.size < 2 or gains.min() <= 0:
        return False
    return bool(gains.mean() >= 3 * gains.std(ddof=1) / math.sqrt(gains.size))


def _finite(values: Sequence[float]) -> Floats:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size == 0 or not np.all(np.isfinite(array)):
        raise ZendayaError(f"scores over seeds must be finite numbers, at least one: got {values!r}")
    return array
