"""The paper's tables from a sweep's results, with the published numbers beside ours; missing numbers are shown as missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from zendaya.data.corpora import registry as corpora
from zendaya.errors import MissingExtraError
from zendaya.records import Trace
from zendaya.research.report import layout, published
from zendaya.research.report.layout import MISSING, Sheet, TableCell
from zendaya.research.report.results import MORE_IS_BETTER, OWN, Group, Results, Setting, best, shared

PAPER = "paper"
SAMPLE = 9
"""Clips per system in the qualitative sample (app:qual)."""
ANCHORS = 8
"""Most settings shown as anchors; of more, some are chosen."""


def sheets(results: Results) -> Iterator[Sheet]:
    """The tables of the paper."""
    yield setup(results)
    yield fixed(results)
    yield from anchors(results)
    yield pairs(results)
    yield intervals(results)
    yield from samples(results)
    yield seeded(results)


def setup(results: Results) -> Sheet:
    """Table 1: corpora and configuration."""
    columns = {}
    for group in results.groups:
        if group.recipe in columns:
            continue
        signature = results.signature(group.any_row)
        training, evaluation = signature["training"], signature["evaluation"]
        config, rho = training["recipe"], training["rho"]
        modality = corpora.get(config["corpus"]).modality
        rate = next((part for part in evaluation["store"]["encoder"].split() if part.startswith("rate=")), "")
        columns[group.recipe] = (
            modality if modality != "any" else MISSING, config["encoder"], f"{rate[5:]} /s" if rate else MISSING,
            str(config["model"]["decoder"]["source_dim"]), str(config["model"]["window_tokens"]), str(config["model"]["max_steps"]),
            f"{rho:.2f}",
            "source-dense" if rho > 1 else "text-dense",
        )  # fmt: skip
    header = ("", *columns, *(f"{name} ({PAPER})" for name in published.CORPORA.values()))
    values = [*columns.values(), *(published.SETUP[recipe] for recipe in published.CORPORA)]
    rows = [(TableCell(name), *(TableCell(column[number]) for column in values)) for number, name in enumerate(published.SETUP_ROWS)]
    steps = published.SETUP_ROWS.index("N (=N_max)")
    for share in (0.1, 0.3):
        dials = [-math.log(share) / math.log(max(2, int(column[steps]))) for column in values]
        rows.append((TableCell(f"γ* for B = {share:g} F"), *(TableCell(f"{gamma:.2f}") for gamma in dials)))
    caption = (
        "Datasets and configuration. Our ρ is mean F / mean N of the training split; the paper's is F / N of the caps. "
        "γ* = ln(F/B)/ln N of the caps."
    )
    return Sheet("Table 1", caption, header, tuple(rows))


def fixed(results: Results) -> Sheet:
    """Table 2: the best γ against γ→0."""
    groups = [group for group in results.of("offline") if group.by_gamma()]
    measures = _measures(groups)
    header = ("Dataset", *(f"{name} {what}" for name in measures for what in ("base", "ZENDAYA")), "Rel.", "Ē", "seeds")
    rows = []
    for group in groups:
        chosen_by = group.measures[0] if group.measures else measures[0]
        base, top = _base_and_best(group)
        cells = [TableCell(group.label)]
        for name in measures:
            left, right = (None if one is None else one.mean(name) for one in (base, top))
            said = "" if top is None or name != chosen_by else f" (γ={top.gamma:g})"
            cells += [
                TableCell(layout.score(left)),
                TableCell(layout.score(right) + (said if right is not None else ""), layout.better(right, left, name)),
            ]
        before, after = (None if one is None else one.mean(chosen_by) for one in (base, top))
        rel = MISSING if before is None or after is None or not before else f"{100 * (after - before) / before:+.1f}%"
        exposure = None if top is None else top.mean("exposure")
        count = 0 if top is None else len(top.seeds)
        rows.append((*cells, TableCell(rel), TableCell(MISSING if exposure is None else f"{exposure:.2f}"), TableCell(str(count))))
    for recipe, name in published.CORPORA.items():
        if not any(group.recipe == recipe for group in groups):
            rows.append((TableCell(f"{name}, ours"), *(TableCell(MISSING) for _ in header[1:])))
        one = published.FIXED[recipe]
        known = {"BLEU-4": (one.bleu_base, one.bleu, f" (γ={one.gamma:.2f})"), "METEOR": (one.meteor_base, one.meteor, "")}
        cells = [TableCell(f"{name} ({PAPER})")]
        for measure in measures:
            base_value, value, said = known.get(measure, (None, None, ""))
            cells += [TableCell(layout.score(base_value)), TableCell(layout.score(value) + said, layout.better(value, base_value, measure))]
        rows.append((*cells, TableCell(one.rel), TableCell(f"{one.exposure:.2f}"), TableCell("1")))
    caption = (
        "Fixed-window results, means over the seeds that all settings of a row have. The best γ is selected by the first measure, on the "
        "clips it is reported on; Rel. is that margin. Our Ē is the realised one, the paper's is 1/(1+γ). Bold: mean above its baseline, "
        "without a test. Our METEOR is the implementation named above, not the paper's: compare it within a row."
    )
    return Sheet("Table 2", caption, header, tuple(rows))


def anchors(results: Results) -> Iterator[Sheet]:
    """Table 3: streaming anchors, one block per corpus."""
    for group in results.of("streaming"):
        shown = _anchors(group)
        rows = []
        for name in (*group.measures, "AL", "first_token"):
            means = [one.mean(name) for one in shown]
            least = name not in MORE_IS_BETTER or not MORE_IS_BETTER[name]
            known = [value for value in means if value is not None]
            top = (min(known) if least else max(known)) if known else None
            form: Callable[[float | None], str] = layout.score if name in MORE_IS_BETTER else layout.lag
            rows.append(
                (
                    TableCell("first" if name == "first_token" else name),
                    *(TableCell(form(value), value is not None and value == top) for value in means),
                )
            )
        seeds = ", ".join(sorted({str(len(one.seeds)) for one in shown}))
        caption = (
            f"Streaming anchors, scale {group.scale}, split {group.split}, means over {seeds} seeds. z-γ is ZENDAYA, w-k is wait-k. "
            "AL counts the source each step may read; first is the source that had arrived at the first token. Best in row is bold."
        )
        if group.scale == "segment":
            caption += " As in the paper, z-γ uses each clip's own length, which is unknown while live; wait-k does not."
        if group.family != OWN:
            caption += f" One model, trained under {group.family}, decodes all of them."
        yield Sheet("Table 3", caption, (group.label, *(one.name for one in shown)), tuple(rows))
    for recipe, name in published.CORPORA.items():
        block = published.STREAM[recipe]
        rows = []
        for number, measure in enumerate(("BLEU-4", "METEOR", "AL")):
            values = [anchor[number] for anchor in block.values()]
            top = min(values) if measure == "AL" else max(values)
            rows.append(
                (
                    TableCell(measure),
                    *(TableCell(layout.lag(value) if measure == "AL" else layout.score(value), value == top) for value in values),
                )
            )
        missing = "" if any(group.recipe.startswith(recipe) for group in results.of("streaming")) else " Ours: missing."
        yield Sheet("Table 3", f"Streaming anchors as published.{missing}", (f"{name} ({PAPER})", *block), tuple(rows))


def pairs(results: Results) -> Sheet:
    """Table 4: paired bootstrap of the anchor pairs, seed by seed."""
    groups = results.of("streaming")
    measures = _measures(groups)
    header = ("Dataset", "Anchor pair", "AL", "seed", *(f"Δ {name} [95 %]" + layout.less(name) for name in measures))
    rows = []
    for group in groups:
        found = anchor_pairs(group)
        if not found:
            rows.append((TableCell(group.label), *(TableCell(MISSING) for _ in header[1:])))
        for why, ours, theirs in found:
            label = (TableCell(group.label), TableCell(f"{ours.name} vs {theirs.name} ({why})"))
            for seed in ours.seeds:
                lags = TableCell(f"{layout.lag(ours.only([seed]).mean('AL'))}, {layout.lag(theirs.only([seed]).mean('AL'))}")
                gaps = [results.difference(ours, theirs, seed, name) for name in measures]
                cells = [TableCell(MISSING) if gap is None else TableCell(layout.gap(gap), gap.excludes_zero) for gap in gaps]
                rows.append((*label, lags, TableCell(str(seed)), *cells))
            if len(ours.seeds) > 1:
                lags = TableCell(f"{layout.lag(ours.mean('AL'))}, {layout.lag(theirs.mean('AL'))}")
                rows.append(
                    (*label, lags, TableCell(f"mean of {len(ours.seeds)}"), *(layout.mean_gap(ours, theirs, name) for name in measures))
                )
    for recipe, name in published.CORPORA.items():
        pair, bleu, meteor = published.PAIRS[recipe]
        known = {"BLEU-4": bleu, "METEOR": meteor}
        cells = []
        for measure in measures:
            if (gap := known.get(measure)) is None:
                cells.append(TableCell(MISSING))
            else:
                cells.append(TableCell(f"{gap[0]:.4f} [{gap[1]:.3f}, {gap[2]:.3f}]".replace("-", "−"), gap[1] > 0 or gap[2] < 0))
        lags = TableCell(", ".join(layout.lag(published.STREAM[recipe][one][2]) for one in pair.split(" vs ")))
        rows.append((TableCell(f"{name} ({PAPER})"), TableCell(pair), lags, TableCell("1 run"), *cells))
    caption = (
        "Paired-bootstrap 95 % intervals (1000 resamples of clips), ZENDAYA (z-γ) minus wait-k (w-k), with the lag of each. Pairs are "
        "nearest in lag, and best against best by the first measure, both chosen on these clips. Bold excludes zero; for a mean over seeds "
        "(± standard deviation), bold: better on every seed by a mean of at least three times its standard error."
    )
    return Sheet("Table 4", caption, header, tuple(rows))


def intervals(results: Results) -> Sheet:
    """Table A1: the interval behind every entry of Table 2, for the lowest seed."""
    header = ("Dataset", "Metric", "ZENDAYA", "95 % CI", "γ→0", "95 % CI", "Δ (95 % CI)", "p")
    rows: list[tuple[TableCell, ...]] = []
    for group in results.of("offline"):
        base, top = _base_and_best(group)
        if base is None or top is None:
            continue
        seeds = sorted(set(base.seeds) & set(top.seeds))
        for name in group.measures:
            label = TableCell(f"{group.label} (γ = {top.gamma:g}, seed {seeds[0] if seeds else MISSING})")
            ours, theirs = (results.interval(one, seeds[0], name) if seeds else None for one in (top, base))
            gap = results.difference(top, base, seeds[0], name) if seeds else None
            delta = TableCell(MISSING) if gap is None else TableCell(layout.gap(gap), gap.excludes_zero)
            p = TableCell(MISSING if gap is None else f"{gap.p:.3f}")
            rows.append((label, TableCell(name), *layout.interval(ours), *layout.interval(theirs), delta, p))
    for recipe, name in published.CORPORA.items():
        for metric, numbers in published.INTERVALS[recipe].items():
            score, low, high, base_score, base_low, base_high, delta_value, delta_low, delta_high, p_value = numbers
            gap_text = f"{delta_value:.4f} [{delta_low:.4f}, {delta_high:.4f}]".replace("-", "−")
            rows.append(
                (
                    TableCell(f"{name} ({PAPER}, γ = {published.FIXED[recipe].gamma:.2f})"), TableCell(metric),
                    TableCell(layout.score(score)), TableCell(f"[{low:.4f}, {high:.4f}]"),
                    TableCell(layout.score(base_score)), TableCell(f"[{base_low:.4f}, {base_high:.4f}]"),
                    TableCell(gap_text, delta_low > 0 or delta_high < 0), TableCell(p_value or MISSING),
                )
            )  # fmt: skip
    caption = (
        "Fixed-window paired bootstrap, 1000 resamples, one run each. Bold marks intervals excluding zero. Published scores are means over "
        "resamples."
    )
    return Sheet("Table A1", caption, header, tuple(rows))


def samples(results: Results) -> Iterator[Sheet]:
    """Table A2: the clips on which each of two systems scores highest, with both decodes (symmetric protocol)."""
    for group in results.of("streaming"):
        chosen = [(ours, theirs) for why, ours, theirs in anchor_pairs(group) if why.endswith("best")]
        if not chosen:
            continue
        ours, theirs = chosen[0]
        seeds = sorted(set(ours.seeds) & set(theirs.seeds))
        one, two = (results.traces(each, seeds[0]) if seeds else None for each in (ours, theirs))
        if one is None or two is None or [trace.clip for trace in one] != [trace.clip for trace in two]:
            continue
        rows: list[tuple[TableCell, ...]] = []
        for system, first, second in ((ours.name, one, two), (theirs.name, two, one)):
            rows.append((TableCell(f"Clips where {system} scores highest", bold=True),))
            for place in symmetric(first):
                a, b = (first[place], second[place]) if first is one else (second[place], first[place])
                rows.append((TableCell(first[place].references[0]), TableCell(a.text), TableCell(b.text)))
        caption = (
            f"Decodes of identical clips of {group.label}, split {group.split}, seed {seeds[0]}: the {SAMPLE} clips on which "
            f"each system has its highest sentence BLEU-4, one per distinct reference, with both decodes; the first of several references "
            f"is shown."
        )
        yield Sheet("Table A2", caption, ("reference", ours.name, theirs.name), tuple(rows))


def symmetric(traces: Sequence[Trace], number: int = SAMPLE) -> list[int]:
    """Indices of the clips with a system's highest sentence BLEU, one per distinct reference; ties in corpus order."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError:
        raise MissingExtraError("sacrebleu", "eval", "the qualitative sample") from None
    scorer = BLEU(lowercase=True, effective_order=True)
    scores = [scorer.sentence_score(trace.text, list(trace.references)).score for trace in traces]
    taken, seen = list[int](), set[tuple[str, ...]]()
    for place in sorted(range(len(traces)), key=lambda place: -scores[place]):
        references = tuple(text.lower() for text in traces[place].references)
        if references not in seen and len(taken) < number:
            seen.add(references)
            taken.append(place)
    return taken


def seeded(results: Results) -> Sheet:
    """Table A3: mean and standard deviation over seeds, bold by the paper's rule."""
    groups = [group for group in results.of("offline") if group.by_gamma()]
    columns = [(group, name) for group in groups for name in group.measures]
    ours = {one.gamma for group in groups for one in group.by_gamma()}
    gammas = sorted({gamma for gamma in ours if gamma is not None} | set(published.SEEDED["charades-sta"]))
    theirs = [(recipe, number, name) for recipe in published.CORPORA for number, name in enumerate(("BLEU-4", "METEOR"))]
    header = (
        "γ", *(f"{group.label} {name}" for group, name in columns),
        *(f"{published.CORPORA[recipe]} {name} ({PAPER})" for recipe, _, name in theirs),
    )  # fmt: skip
    rows = []
    for gamma in gammas:
        cells = [TableCell("γ→0" if gamma == 0 else f"{gamma:g}")]
        for group, name in columns:
            setting = next((one for one in group.by_gamma() if one.gamma == gamma), None)
            cells.append(layout.seeded(setting, group.baseline, name))
        for recipe, number, name in theirs:
            found = published.SEEDED[recipe].get(gamma)
            bold = gamma in published.SEEDED_BOLD[recipe][name]
            cells.append(TableCell(MISSING) if found is None else TableCell(f"{found[number][0]:.4f} ± {found[number][1]:.4f}", bold))
        rows.append(tuple(cells))
    caption = (
        "Fixed-window sweep over seeds, mean ± standard deviation (number of seeds in brackets if not three). Bold marks a setting that "
        "beats its baseline on every seed by a mean paired difference of at least three times its standard error."
    )
    return Sheet("Table A3", caption, header, tuple(rows))


def every(results: Results) -> Sheet:
    """All decodes: quality, lag, and exposure beside its closed form."""
    measures = _measures(results.groups)
    lags = {
        "AL": "AL", "LAAL": "LAAL", "AP": "AP", "DAL": "DAL", "first_token": "first", "normalised_erasure": "erasure",
        "decoder_rows": "rows",
    }  # fmt: skip
    header = ("Dataset", "mode", "scale", "model", "setting", "seeds", *measures, *lags.values(), "Ē", "Ē planned", "1/(1+γ)")
    rows = []
    for group in results.groups:
        for one in group.ordered:
            cells = [
                group.recipe + group.mark,
                group.mode,
                group.scale,
                "its own" if group.family == OWN else group.family,
                one.name,
                str(len(one.seeds)),
            ]
            cells += [layout.plain(one.over(name)) for name in measures]
            cells += [layout.share(one.mean(name)) if name in ("AP", "normalised_erasure") else layout.lag(one.mean(name)) for name in lags]
            cells += [layout.share(one.mean(name)) for name in ("exposure", "exposure_planned", "exposure_limit")]
            rows.append(tuple(TableCell(text) for text in cells))
    caption = (
        "Every decode of the sweep, means over seeds ± standard deviation. Lags in source tokens; first is the source that had arrived at "
        "the first token; AP is relative to the reference's length, so above 1 where far more is written; erasure is normalised erasure; "
        "rows are decoder rows per clip; z-γ+h has a head start of h, and in place of 1/(1+γ) its own limit of Ē."
    )
    return Sheet("All decodes", caption, header, tuple(rows))


# Choice of settings.


def _base_and_best(group: Group) -> tuple[Setting | None, Setting | None]:
    """γ→0 and the best other γ by the first measure, on the seeds that every γ has."""
    settings = shared(group.by_gamma())
    top = best([one for one in settings if one.gamma], group.measures[0]) if group.measures else None
    return next((one for one in settings if one.gamma == 0), None), top


def anchor_pairs(group: Group) -> list[tuple[str, Setting, Setting]]:
    """(reason, ours, theirs): the γ and k nearest in lag, and the best of each by the first measure, on the seeds that all have."""
    settings = shared([*(one for one in group.by_gamma() if one.gamma), *group.by_k()])
    ours, theirs = [one for one in settings if one.gamma is not None], [one for one in settings if one.k is not None]
    if not ours or not theirs or not group.measures or not ours[0].seeds:
        return []
    lags = [(abs((a.mean("AL") or 0.0) - (b.mean("AL") or 0.0)), n, m) for n, a in enumerate(ours) for m, b in enumerate(theirs)]
    _, n, m = min(lags)
    pairs = [("nearest lag", ours[n], theirs[m])]
    top, rival = best(ours, group.measures[0]), best(theirs, group.measures[0])
    if top is ours[n] and rival is theirs[m]:
        pairs = [("nearest lag, best", top, rival)]
    elif top is not None and rival is not None:
        pairs.append(("best", top, rival))
    return pairs


def _anchors(group: Group) -> list[Setting]:
    if len(group.settings) <= ANCHORS or not group.measures:
        return group.ordered
    kept = {one.decode for _, *pair in anchor_pairs(group) for one in pair}
    for settings in (group.by_gamma(), group.by_k()):
        if settings:
            kept.add(min(settings, key=lambda one: one.mean("AL") or 0.0).decode)
    others = [*group.by_head(), *group.policies()]
    for kind in dict.fromkeys(one.kind for one in others):
        top = best([one for one in others if one.kind == kind], group.measures[0])
        kept |= {top.decode} if top is not None else set()
    return [one for one in group.ordered if one.decode in kept]


def _measures(groups: Sequence[Group]) -> list[str]:
    found = {name for group in groups for name in group.measures} | {"BLEU-4", "METEOR"}
    return [name for name in MORE_IS_BETTER if name in found]
