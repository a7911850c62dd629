"""Questions beyond the paper's tables: each γ against γ→0 and against wait-k, closed forms, and the cost of one model for all γ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from zendaya.evaluation.metrics.significance import beats_on_every_seed
from zendaya.research.report import layout
from zendaya.research.report.layout import MISSING, Bold, Sheet, bold, number
from zendaya.research.report.results import MORE_IS_BETTER, OWN, Group, Results, Setting, measures_of, shared

RESAMPLED = ("BLEU-4", "WER")
"""Measures with intervals: others take too long (METEOR 1.5 takes 20 s of Java per decode, and CIDEr tokenises with Java)."""
_HOW = (
    "One seed: the difference and its paired-bootstrap 95 % interval, bold where it excludes 0. Several seeds: mean ± standard deviation, "
    "and the number of seeds whose interval excludes 0 on that side; bold where one side is better on every seed by a mean of at least "
    f"three standard errors. Measures other than {' and '.join(RESAMPLED)} have no interval here (Tables 4 and A1 have some)."
)


def sheets(results: Results) -> Iterator[Sheet]:
    """One table per question that the results can answer."""
    for made in (against_full, against_wait_k, lossless_gammas, against_alone):
        sheet = made(results)
        if sheet.rows:
            yield sheet


def against_full(results: Results) -> Sheet:
    """Q1: every γ against γ→0 of its group, beside the closed forms."""
    groups = [group for group in results.of("offline") if group.baseline is not None]
    measures = measures_of(groups)
    header = ("Dataset", "ρ", "setting", "seeds", *_headings(measures), "Ē", "1/(1+γ)", "first", "F/N̂^γ")
    rows = []
    for group in groups:
        base = group.baseline
        assert base is not None
        for one in group.by_gamma():
            if not one.gamma:
                continue
            ours, full = shared([one, base])
            waits = group.any_row.form == "fix"  # its length head reads the whole source before the first step
            firsts = (MISSING if waits else number(value, 1) for value in (one.mean("first_token"), _budget(full, one.gamma)))
            gaps = (_difference(results, ours, full, name) for name in measures)
            shares = (number(one.mean(name), 3) for name in ("exposure", "exposure_limit"))
            rows.append((group.label, f"{_rho(results, group):.2f}", one.name, str(len(ours.seeds)), *gaps, *shares, *firsts))
    caption = (
        f"Offline, γ minus γ→0. {_HOW} Ē is the realised exposure; first is the source that had arrived at the first token, F/N̂^γ its "
        "value by the rule for γ*, from the means of F and N̂ at γ→0 (missing where the length head waits for the whole source)."
    )
    return Sheet("Q1", caption, header, tuple(rows))


def lossless_gammas(results: Results) -> Sheet:
    """Q3: the largest γ without loss, beside ρ and γ*."""
    header = ("Dataset", "ρ", "γ* for B = 0.3 F", "γ* for B = 0.1 F", "by", "seeds", "no loss shown up to", "loss from")
    rows = []
    for group in results.of("offline"):
        measure = next((name for name in group.measures if name in RESAMPLED), None)
        settings = shared(group.by_gamma())
        if measure is None or group.baseline is None or len(settings) < 2 or not settings[0].seeds:
            continue
        worse = [_is_worse(results, one, settings[0], measure) for one in settings[1:]]
        if None in worse:
            found = (MISSING, MISSING)
        else:
            first = worse.index(True) + 1 if True in worse else len(settings)
            found = (f"{settings[first - 1].gamma:g}", f"{settings[first].gamma:g}" if first < len(settings) else MISSING)
        steps = settings[0].mean("predicted_steps")
        dials = [MISSING if steps is None else f"{-math.log(share) / math.log(max(2.0, steps)):.2f}" for share in (0.3, 0.1)]
        rows.append((group.label, f"{_rho(results, group):.2f}", *dials, measure, str(len(settings[0].seeds)), *found))
    caption = (
        "The first γ, of those that were run, that loses quality. Loss with one seed: the 95 % interval of the paired difference to γ→0 "
        "lies on the worse side of 0. Loss with several: γ is worse on every seed by a mean of at least three standard errors. "
        "γ* = ln(F/B)/ln N̂ with the mean N̂ at γ→0."
    )
    return Sheet("Q3", caption, header, tuple(rows))


def against_wait_k(results: Results) -> Sheet:
    """Q2: every γ, with a head start or without, against the wait-k nearest to it in lag."""
    groups = [group for group in results.of("streaming") if (group.by_gamma() or group.by_head()) and group.by_k()]
    measures = measures_of(groups)
    header = ("Dataset", "pair", "AL", "DAL", "first", "seeds", *_headings(measures))
    rows = []
    for group in groups:
        for one in (*group.by_gamma(), *group.by_head()):
            rivals = [pair for k in group.by_k() if (pair := shared([one, k]))[0].seeds]
            if not rivals:
                continue
            ours, theirs = min(rivals, key=lambda pair: abs((pair[0].mean("AL") or 0.0) - (pair[1].mean("AL") or 0.0)))
            lags = (layout.lags(ours, theirs, by=name) for name in ("AL", "DAL", "first_token"))
            gaps = (_difference(results, ours, theirs, name) for name in measures)
            rows.append((group.label, f"{ours.name} vs {theirs.name}", *lags, str(len(ours.seeds)), *gaps))
    caption = f"Streaming, γ minus the wait-k nearest in average lagging, with two measures of lag and the first token of each. {_HOW}"
    return Sheet("Q2", caption, header, tuple(rows))


def against_alone(results: Results) -> Sheet:
    """One model for all γ against models of one setting each."""
    alone = {_conditions(group, one): one for group in results.groups if group.family == OWN for one in group.ordered}
    both: dict[tuple[str, ...], tuple[Group, Setting, Setting]] = {}
    for group in results.groups:
        for one in group.ordered:
            key = _conditions(group, one)
            if group.family not in (OWN, one.decode) and key in alone:
                both.setdefault((group.family, *key), (group, one, alone[key]))
    measures = measures_of([group for group, *_ in both.values()])
    rows = []
    for group, one, single in both.values():
        whole, own = shared([one, single])
        if whole.seeds:
            gaps = (_difference(results, whole, own, name) for name in measures)
            rows.append((group.label, one.name, layout.lags(whole, own), str(len(whole.seeds)), *gaps))
    header = ("Dataset", "setting", "AL, of both", "seeds", *_headings(measures))
    return Sheet("Whole dial", f"One model for the whole dial minus the model trained at that setting only. {_HOW}", header, tuple(rows))


def _conditions(group: Group, one: Setting) -> tuple[str, ...]:
    return group.recipe, group.scale, group.split, group.variant, one.decode


def _headings(measures: Sequence[str]) -> Iterator[str]:
    return (f"Δ {name}{layout.less(name)}" for name in measures)


def _rho(results: Results, group: Group) -> float:
    return float(results.signature(group.any_row)["training"]["rho"])


def _budget(full: Setting, gamma: float) -> float | None:
    """B of γ by the rule γ* = ln(F/B)/ln N̂ (Eq. 4), from the means of F and N̂ of a decode that reads the whole source."""
    source, steps = full.mean("first_token"), full.mean("predicted_steps")
    return None if source is None or steps is None else source / steps**gamma


def _difference(results: Results, a: Setting, b: Setting, measure: str) -> str:
    """A − B for two settings with the same seeds."""
    found = [results.difference(a, b, seed, measure) for seed in a.seeds] if measure in RESAMPLED else []
    known = [gap for gap in found if gap is not None]
    mean = layout.mean_gap(a, b, measure)
    if not known or len(known) < len(found):
        return mean
    if len(known) == 1:
        return layout.gap(*layout.fractions(known[0]))
    above = sum(gap.value for gap in known) > 0
    decided = sum(gap.low > 0 if above else gap.high < 0 for gap in known)
    return bold(f"{mean} ({decided} of {len(known)})", isinstance(mean, Bold))


def _is_worse(results: Results, one: Setting, base: Setting, measure: str) -> bool | None:
    """Whether a setting is significantly worse than its baseline; None where that is unknown."""
    ours, theirs = one.values(measure), base.values(measure)
    if not ours or ours.keys() != theirs.keys():
        return None
    if len(ours) > 1:
        return beats_on_every_seed([*theirs.values()], [*ours.values()], higher_is_better=MORE_IS_BETTER[measure])
    gap = results.difference(one, base, one.seeds[0], measure)
    return None if gap is None else gap.high < 0 if MORE_IS_BETTER[measure] else gap.low > 0
