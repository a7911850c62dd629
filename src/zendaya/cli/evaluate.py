"""`zendaya evaluate`, `score` and `compare`: decode a corpus and score it, score traces again, compare two decodes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from zendaya.cli.options import Corpus, Force, Json, check_exists, check_model, command
from zendaya.cli.output import ProgressBar, number, print_table, say
from zendaya.data.corpora.registry import get
from zendaya.errors import ConfigError
from zendaya.evaluation.metrics.quality import Normalise
from zendaya.evaluation.metrics.results import SCORES, TRACES, UNFINISHED, check_free, rescore, write_scores
from zendaya.evaluation.metrics.scores import Scores
from zendaya.evaluation.metrics.significance import RESAMPLES
from zendaya.evaluation.options import EvalOptions
from zendaya.records import listed, option
from zendaya.runtime.policies import parse_policy

_LAGS = {
    "AL": "average_lagging", "LAAL": "length_adaptive_average_lagging", "AP": "average_proportion",
    "DAL": "differentiable_average_lagging", "first": "first_token",
}  # fmt: skip
_CLOCKS = {"s": "latency_s", "ca": "latency_computing_s"}
_HELP = {field.name: field.metadata.get("help", "") for field in dataclasses.fields(EvalOptions)}
_Traces = Annotated[Path, typer.Argument(help=f"A {TRACES}, or the folder it lies in.")]


@command
def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint folder or hub id.")],
    corpus: Corpus,
    options: EvalOptions,
    path: Annotated[Path | None, typer.Argument(metavar="PATH", help="The corpus as published; default: under $ZENDAYA_DATA.")] = None,
    as_json: Json = False,
) -> None:
    """Decode a split of a corpus as its source arrives; score quality, lag, exposure and stability.

    Prints one row per schedule, and writes the traces and scores.
    """
    get(corpus)
    check_model(checkpoint)
    out = Path(options.out or Path("evaluated") / f"{corpus}-{options.split}")
    if path is None:
        from zendaya.research.recipes import data_folder, recipe, recipes

        known = [config for config in map(recipe, recipes()) if getattr(config, "corpus", "") == corpus]
        if not known or "ZENDAYA_DATA" not in os.environ:
            raise ConfigError(f"the corpus {corpus} needs its folder or file: give PATH" + (", or set ZENDAYA_DATA" if known else ""))
        path = data_folder(known[0], None)
    check_exists(path, f"the corpus {corpus}")
    check_exists(options.store, "a feature store (zendaya encode makes one)")
    from zendaya.evaluation.corpus import evaluate_corpus

    with ProgressBar() as bar:
        try:
            found = evaluate_corpus(checkpoint, corpus, path, dataclasses.replace(options, out=out), report=bar.show)
        except KeyboardInterrupt:
            if (out / UNFINISHED).exists():
                say(f"what was decoded is kept in {out}: the same command goes on from there")
            raise
    if as_json:
        print(json.dumps(found.record, ensure_ascii=False))
        return
    _print_table(found.scores, found.record)
    say(f"{out}: {TRACES} and {SCORES}")
    if found.num_without_reference:
        print(f"{found.num_without_reference} clips have no reference and are left out: see {path}")
    if found.num_left_out:
        print(f"{found.num_left_out} clips could not be encoded and are left out: see problems.jsonl in {options.store or 'the store'}")


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """How traces are scored again."""

    metrics: Sequence[str] | None = option(None, _HELP["metrics"], parse=listed(str.lower))
    normalise: Normalise | None = option(None, _HELP["normalise"])


@command
def score(
    traces: _Traces,
    options: ScoreOptions,
    out: Annotated[Path | None, typer.Option(help=f"The folder that {SCORES} goes to.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Score traces again, without a model.

    Metrics and normalisation not given are those of the evaluation.
    """
    if out is not None:
        check_free(out, force=force, names=[SCORES])
    scores, record = rescore(traces, metrics=options.metrics, normalise=options.normalise)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_scores(out, record)
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
    else:
        _print_table(scores, record)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """How two decodes are compared."""

    metrics: Sequence[str] | None = option(None, _HELP["metrics"], name="--metrics --metric", parse=listed(str.lower))
    a_schedule: str | None = option(None, "The schedule of A to compare, where A holds several.")
    b_schedule: str | None = option(None, "The schedule of B.")
    normalise: Normalise | None = option(None, _HELP["normalise"])
    resamples: int = option(RESAMPLES, "Bootstrap resamples of the clips.", min=1)
    seed: int = option(0, "Seed of the resamples.", min=0)


@command
def compare(a: _Traces, b: _Traces, options: CompareOptions, as_json: Json = False) -> None:
    """Compare two decodes of the same clips, with confidence intervals.

    A and B may be the same traces, for two of their schedules. Prints both scores, their difference A − B, its 95 %
    interval and two-sided p.
    """
    from zendaya.evaluation.metrics.comparison import compare_traces

    found = compare_traces(a, b, **vars(options))
    if as_json:
        print(json.dumps(found.record, ensure_ascii=False))
        return
    print(f"A  {found.a}\nB  {found.b}\n{found.num_clips} clips, paired bootstrap of {options.resamples} resamples, seed {options.seed}\n")
    rows = [["", "A", "B", "A − B", "95 % interval", "p"]]
    for one in found.metrics:
        gap = one.difference
        interval = f"[{gap.low:+.2f}, {gap.high:+.2f}]{' *' if gap.excludes_zero else '  '}"
        rows.append([one.name, f"{one.a:.2f}", f"{one.b:.2f}", f"{gap.value:+.2f}", interval, f"{gap.p:.3f}"])
    print_table(rows)
    print("\n* the interval excludes 0; p: 2 · (1 + resamples on the rarer side of 0) / (1 + resamples)")
    for one in found.metrics:
        print(f"{one.name}: {one.signature}{'' if one.higher_is_better else '; lower is better'}")


def _print_table(scores: Sequence[Scores], record: dict[str, Any]) -> None:
    clocks = {unit: name for unit, name in _CLOCKS.items() if any(getattr(one, name) is not None for one in scores)}
    policies = [parse_policy(one.schedule).decides_while_reading for one in scores]
    differing = [name for name in ("num_clips", "scale") if len({getattr(one, name) for one in scores}) > 1]  # then each row says its own
    shared = {"num_clips": f"{scores[0].num_clips} clips", "scale": f"scale {scores[0].scale}"}
    head = ", ".join(words for name, words in shared.items() if name not in differing) or "clips and scale by row"
    print(f"{head}; lag in source tokens{' and seconds' if 's' in clocks else ''}\n")
    columns = {"schedule": [one.schedule for one in scores]}
    columns |= {name.removeprefix("num_"): [str(getattr(one, name)) for one in scores] for name in differing}
    columns |= {first.name: [f"{one.quality[place].value:.2f}" for one in scores] for place, first in enumerate(scores[0].quality)}
    for name, lag in _LAGS.items():
        columns[name] = [number(getattr(one.latency_tokens, lag), ".3f" if name == "AP" else ".2f") for one in scores]
    for unit, clock in clocks.items():
        for name, lag in _LAGS.items():
            if name != "AP":
                columns[f"{name} {unit}"] = [number(getattr(getattr(one, clock), lag, None), ".2f") for one in scores]
    columns["Ē"] = [f"{one.exposure:.4f}" for one in scores]
    columns["Ē plan"] = [number(None if policy else one.exposure_planned, ".4f") for one, policy in zip(scores, policies, strict=True)]
    columns["1/(1+γ)"] = [number(one.exposure_limit, ".4f") for one in scores]
    if any(policies):
        columns["rows"] = [number(one.decoder_rows, ".1f") for one in scores]
        columns["revised"] = [number(one.revised, ".1f") for one in scores]
        columns["NE"] = [number(one.normalised_erasure, ".2f") for one in scores]
    print_table([list(columns), *zip(*columns.values(), strict=True)])
    print("", *(row["signature"] for row in record["scores"]), sep="\n")
    for quality in scores[0].quality:
        print(f"{quality.name}: {quality.signature}")
    if "ca" in clocks:
        print("ca: seconds with the time of decoding; encoding was done before")
    if any(policies):
        print("rows: decoder rows per clip; revised: tokens decoded and not written that the next decode changed; ", end="")
        print("NE: normalised erasure, revised per token written")
