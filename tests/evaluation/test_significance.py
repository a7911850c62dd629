"""Significance: resamples equal the scores of the clips they draw, intervals and p by hand, seeds and the rules for bold figures."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU

from zendaya.errors import ZendayaError
from zendaya.evaluation.metrics import captions
from zendaya.evaluation.metrics.quality import quality
from zendaya.evaluation.metrics.significance import (
    Statistics,
    _bleu_of,
    beats_on_every_seed,
    bootstrap,
    over_seeds,
    paired_bootstrap,
    quotient_bootstrap,
    statistics,
)

WORDS = ["a", "man", "dog", "runs", "plays", "the", "guitar", "is", "in", "park"]


def corpus(num_clips, seed=0, *, num_references=1):
    draw = random.Random(seed)

    def text(low):
        return " ".join(draw.choices(WORDS, k=draw.randint(low, 9)))

    return [text(0) for _ in range(num_clips)], [[text(1) for _ in range(num_references)] for _ in range(num_clips)]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=4, max_size=4),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_bleu_of_sums_is_that_of_sacrebleu(counts, written, wanted):
    found, total = [min(pair) for pair in counts], [max(pair) for pair in counts]
    expected = BLEU.compute_bleu(found, total, written, wanted, smooth_method="exp").score
    sums = np.array([[written, wanted, *found, *total]], np.float64)
    if written == 0 < wanted:
        assert expected == 0  # nothing written, so nothing found: the counts below cannot be
        return
    assert _bleu_of(sums)[0] == pytest.approx(min(100.0, expected), abs=1e-9)


@pytest.mark.parametrize("metric", ["bleu", "bleu-lc", "wer"])
def test_the_corpus_score_is_the_metrics_own(metric):
    hypotheses, references = corpus(60)
    for extra in ([], [["a man runs", "the dog"]]):  # clips may differ in how many references they have
        if metric == "wer" and extra:
            continue
        wanted = [*references[len(extra) :], *extra]
        found, whole = statistics(metric, hypotheses, wanted), quality(metric, hypotheses, wanted)
        assert found.score == pytest.approx(whole.value, abs=1e-9)
        assert (found.name, found.signature) == (whole.name, whole.signature)


@pytest.mark.parametrize("metric", ["bleu", "wer"])
def test_a_resample_scores_as_the_clips_it_draws(metric):
    (one, references), (other, _) = corpus(12), corpus(12, seed=1)
    a, b = statistics(metric, one, references), statistics(metric, other, references)
    drawn = np.random.default_rng(5).integers(12, size=(40, 12))

    def slow(texts):
        return np.array([quality(metric, [texts[c] for c in row], [references[c] for c in row]).value for row in drawn])

    differences = slow(one) - slow(other)
    found = paired_bootstrap(a, b, resamples=40, seed=5)
    assert (found.low, found.high) == pytest.approx(np.percentile(differences, [2.5, 97.5]), abs=1e-9)
    assert found.p == min(1.0, 2 * (1 + min(sum(differences <= 0), sum(differences >= 0))) / 41)
    assert found.value == pytest.approx(a.score - b.score)
    assert (found.resamples, found.seed, found.clips) == (40, 5, 12)
    alone = bootstrap(a, resamples=40, seed=5)
    assert (alone.low, alone.high) == pytest.approx(np.percentile(slow(one), [2.5, 97.5]), abs=1e-9)


def mean_of(values):
    """Statistics of a score that is a mean over clips, in percent."""
    rows = np.stack([np.asarray(values, np.float64), np.ones(len(values))], 1)
    return Statistics(metric="m", name="M", signature="m", values_CS=rows, of_sums=lambda sums: 100 * sums[:, 0] / sums[:, 1])


def test_intervals_and_p_by_hand():
    same = paired_bootstrap(mean_of([0.1, 0.5, 0.3]), mean_of([0.1, 0.5, 0.3]))
    assert (same.value, same.low, same.high, same.p, same.excludes_zero) == (0, 0, 0, 1.0, False)
    above = paired_bootstrap(mean_of([0.2] * 9), mean_of([0.1] * 9))
    assert (above.value, above.low, above.high) == pytest.approx((10, 10, 10))
    assert (above.p, above.excludes_zero) == (2 / 1001, True)  # none of a thousand is at or below 0
    below = paired_bootstrap(mean_of([0.1] * 9), mean_of([0.2] * 9))
    assert (below.value, below.p, below.excludes_zero) == (-above.value, above.p, True)
    one = bootstrap(mean_of([0.4]), resamples=3)
    assert (one.value, one.low, one.high, one.clips) == (40, 40, 40, 1)


def test_the_interval_of_a_mean_is_that_of_the_normal():
    random = np.random.default_rng(3)
    a, b = random.normal(0.5, 0.1, 2000), random.normal(0.49, 0.1, 2000)
    found = paired_bootstrap(mean_of(a), mean_of(b), resamples=4000)
    error = 100 * np.std(a - b, ddof=1) / math.sqrt(2000)
    assert found.low == pytest.approx(found.value - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.value + 1.96 * error, abs=0.1 * error)
    assert found.p == pytest.approx(math.erfc(found.value / error / math.sqrt(2)), abs=0.01)


def test_the_quotient_of_two_corpora():
    few, many = (mean_of(np.random.default_rng(size).uniform(1, 3, size)) for size in (40, 400))
    found = quotient_bootstrap(few, many)
    assert found.value == pytest.approx(few.score / many.score)
    # By the delta method: the variances of the two means, each over its own mean squared, add up.
    relative = sum(np.var(values := one.values_CS[:, 0]) / values.size / values.mean() ** 2 for one in (few, many))
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * found.value * math.sqrt(relative), rel=0.1)
    with pytest.raises(ZendayaError, match="a quotient needs one metric: got m and n"):
        quotient_bootstrap(few, dataclasses.replace(many, signature="n"))


def test_many_clips_are_drawn_in_rounds(monkeypatch):
    a, b = mean_of(np.linspace(0, 1, 30)), mean_of(np.linspace(1, 0, 30))
    whole = paired_bootstrap(a, b, resamples=50)
    monkeypatch.setattr("zendaya.evaluation.metrics.significance._MAX_COUNTS", 100)
    rounds = paired_bootstrap(a, b, resamples=50)
    assert (rounds.low, rounds.high, rounds.p) == pytest.approx((whole.low, whole.high, whole.p))
    assert paired_bootstrap(a, b, resamples=50, seed=1) != whole


def test_unpaired_systems_are_refused():
    a = mean_of([0.1, 0.2])
    with pytest.raises(ZendayaError, match="needs the same clips: got 2 and 1"):
        paired_bootstrap(a, mean_of([0.1]))
    hypotheses, references = corpus(2)
    with pytest.raises(ZendayaError, match=r"needs one metric: got bleu\|.*case:mixed.* and bleu\|.*case:lc"):
        paired_bootstrap(statistics("bleu", hypotheses, references), statistics("bleu-lc", hypotheses, references))
    with pytest.raises(ZendayaError, match="resamples must be at least 1: got 0"):
        bootstrap(a, resamples=0)
    with pytest.raises(ZendayaError, match="unknown metric 'rouge'"):
        statistics("rouge", ["a"], [["a"]])
    with pytest.raises(ZendayaError, match="as many hypotheses as references, at least one: got 0 and 0"):
        statistics("bleu", [], [])


# METEOR 1.5 from its statistics.


@pytest.mark.skipif(not captions.java_is_here(), reason="no Java")
def test_meteor_of_its_statistics_is_that_of_java():
    hypotheses, references = corpus(40, num_references=2)
    hypotheses[0], hypotheses[1] = references[0][0], ""  # a whole text in one piece, and none
    value, rows, _ = captions.meteor_1_5(hypotheses, references)
    assert captions.meteor_1_5_of(rows.sum(0, keepdims=True))[0] == pytest.approx(value, abs=1e-12)


# Seeds.


def test_seeds_by_hand():
    found = over_seeds([30.0, 32.0, 34.0])
    assert (found.mean, found.sd, found.count, str(found)) == (32.0, 2.0, 3, "32.00 ± 2.00")
    assert (over_seeds([30.0]).sd, str(over_seeds([30.0]))) == (None, "30.00")
    for bad in ([], [float("nan")], [[1.0]]):
        with pytest.raises(ZendayaError, match="at least one"):
            over_seeds(bad)


@pytest.mark.parametrize(
    ("values", "baseline", "bold"),
    [
        # Differences 1, 2, 3: mean 2, standard error 1/√3 = 0.577, 3.46 of them.
        ([2, 4, 6], [1, 2, 3], True),
        # Differences 1, 2, 4: mean 2.33, standard error 0.882, 2.65 of them.
        ([2, 4, 7], [1, 2, 3], False),
        # Far above on average, below on one seed.
        ([0, 12, 13], [1, 2, 3], False),
        # Equal on one seed is not better.
        ([1, 3, 4], [1, 2, 3], False),
        ([5], [1], False),
        ([2, 3], [1, 2], True),  # always by the same: no error at all
    ],
)
def test_the_papers_rule_over_seeds(values, baseline, bold):
    assert beats_on_every_seed(values, baseline) is bold
    lower = [-value for value in values], [-value for value in baseline]
    assert beats_on_every_seed(*lower, higher_is_better=False) is bold


def test_seeds_must_be_paired():
    with pytest.raises(ZendayaError, match="same seeds for both: got 2 and 3"):
        beats_on_every_seed([1, 2], [1, 2, 3])
