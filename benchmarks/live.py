"""Live speech, measured: chapters or speakers as endless streams, per setting word errors, lag, errors at edges, words in silence.

python benchmarks/live.py FOLDER [--setting "gamma=0.5;window_s=10" --setting alignatt=25,chunk=100 …] [--model NAME_OR_FOLDER]
    [--corpus NAME] [--split test|valid] [--chapters 12|all] [--whole | --joined | --noise [SECONDS]] [--against FOLDER]
    [--out DIR] [--processes N] [--table] [--json]

FOLDER holds manifest.jsonl, the recordings and, where there are any, align_*.jsonl (word times); of LibriSpeech the published
division, whose test is test-clean: settings are chosen on valid. A setting is a schedule or policy in
its printed form, then `;NAME=VALUE` for fields of DecodeOptions or settings of the encoder. Results are kept in DIR, a JSON line per
stream and setting: the same command goes on where it was stopped, and `--table` prints what is there without a model.
docs/evaluation.md says what is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zendaya
from zendaya.data.corpora.registry import read
from zendaya.errors import ConfigError, ZendayaError
from zendaya.evaluation import live_results
from zendaya.evaluation.live import word_times
from zendaya.evaluation.live_results import (
    OFFLINE,
    LivePlan,
    Made,
    ResultStore,
    code_digest,
    count_stream,
    figure,
    groups,
    interval,
    measure,
    run_jobs,
)  # fmt: skip
from zendaya.evaluation.metrics.quality import normaliser
from zendaya.evaluation.metrics.significance import RESAMPLES, bootstrap, quotient_bootstrap
from zendaya.evaluation.metrics.speech import SpeechCounts, WrittenWord, align, apart_if_unspoken
from zendaya.evaluation.streams import SoundStream, alone, choose_chapters, noise_streams
from zendaya.nn.whisper import TINY_EN_SHA256
from zendaya.runtime.setting import LiveSetting

SEEN_TEST = "@49fd7f61"
"""The shipped adapter that was trained on test-clean utterances."""


def measure_against(plan: LivePlan, other: LivePlan) -> list[dict[str, Any]]:
    """Of each setting, its × offline here, on another corpus, and the quotient of the two: what other speech costs beyond that corpus."""
    rows, offline = list[dict[str, Any]](), [groups(alone(p.streams), OFFLINE, p.made, p.store, p.times) for p in (plan, other)]
    for setting in plan.settings:
        figures = []
        for each, base in zip((plan, other), offline, strict=True):
            own = groups(each.streams, setting, each.made, each.store, each.times)
            names = sorted(own.keys() & base.keys())
            figures += [figure("ratio", [own[name] for name in names], [base[name] for name in names])] if names else []
        if len(figures) == 2:
            here, there = (interval(bootstrap(one, seed=plan.seed)) for one in figures)
            quotient_of = interval(quotient_bootstrap(*figures, seed=plan.seed))
            sizes = {"num_groups": figures[0].num_clips, "num_groups_against": figures[1].num_clips}
            rows.append({"setting": setting, "ratio": here, "ratio_against": there, "quotient": quotient_of, **sizes})
    return rows


def measure_joined(plan: LivePlan) -> list[dict[str, Any]]:
    """Of each setting, the errors in one long stream against those in a stream per chapter."""
    rows = []
    for setting in plan.settings:
        one, each = (groups(s, setting, plan.made, plan.store, plan.times) for s in (plan.joined, plan.streams))
        if one and one.keys() == each.keys():
            names = sorted(one)
            found = figure("ratio", [one[name] for name in names], [each[name] for name in names])
            wers = [figure("wer", list(part.values()), list(part.values())).score for part in (one, each)]
            ratio = interval(bootstrap(found, seed=plan.seed))
            rows.append({"setting": setting, "joined_wer": wers[0], "own_wer": wers[1], "ratio": ratio})
    return rows


def missing_words(streams: Sequence[SoundStream], setting: str, plan: LivePlan) -> set[tuple[str, float, str]]:
    """The reference words for which nothing was written: utterance, seconds in it, text. Words written too early do not count."""
    missing = set[tuple[str, float, str]]()
    for stream in streams:
        said, record = stream.utterances(plan.times), plan.store.records[plan.made.key(stream.name, setting)]
        for word, written, _ in apart_if_unspoken(align(said, [WrittenWord(*word) for word in record["words"]])):
            if word is not None and written is None:
                missing.add((said[word.utterance].id, round(word.start_s - said[word.utterance].start_s, 3), word.text))
    return missing


def measure_noise(plan: LivePlan) -> list[dict[str, Any]]:
    """Of each setting and noise, the words written in it and the words lost of the speech after it: here, by itself, and offline."""
    rows = []
    for setting, stream in itertools.product(plan.settings, plan.streams):
        record = plan.store.records.get(plan.made.key(stream.name, setting))
        own = groups(alone([stream]), setting, plan.made, plan.store, plan.times)
        if record and own and groups(alone([stream]), OFFLINE, plan.made, plan.store, plan.times):
            beyond = missing_words([stream], setting, plan) - missing_words(alone([stream]), OFFLINE, plan)
            counts = SpeechCounts()
            for each in count_stream(stream, record, plan.times, apart=True).values():
                counts.add(each)
            lost, wrong = (sum(getattr(group.counts, name) for group in own.values()) for name in ("deletions", "errors"))
            rows.append({
                "setting": setting, "noise": stream.name, "words_in_noise": counts.silent_words, "noise_s": round(counts.silent_s, 1),
                "words": counts.words, "lost": counts.deletions, "lost_alone": lost, "errors": counts.errors, "errors_alone": wrong,
                "lost_beyond_offline": len(beyond), "cpu": round(record["cpu_s"] / record["sound_s"], 4),
                "written": " ".join(word[0] for word in record["words"])[:200],
            })  # fmt: skip
    return rows


# The command.


def show(value: dict[str, float | None], digits: int = 2, *, sign: str = "", spread: bool = True) -> str:
    """A figure and its interval."""
    if value["value"] is None:
        return "–"
    parts = [f"{value[name]:{sign}.{digits}f}" if value[name] is not None else "–" for name in ("value", "low", "high")]
    return f"{parts[0]} [{parts[1]}, {parts[2]}]" if spread else parts[0]


def show_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table, and the differences to its first row."""

    def plain(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    columns = ("setting", "WER % [95 %]", "S/D/I", "× offline [95 %]", "lag s [95 %]", "median/90 %", "with computing, 90 %", "LAAL s",
               "edge/elsewhere %", "ratio [95 %]", "silent words/min (n in s)", "CPU s/s", "rows/token")  # fmt: skip
    lines = [columns]
    for each in rows:
        edge = "/".join(show(each[name], 1, spread=False) for name in ("edge_wer", "inner_wer"))
        silent = f"{show(each['silent_words_per_min'], 1, spread=False)} ({each['silent_words']} in {each['silent_s']:.0f})"
        lines.append((
            each["setting"], show(each["wer"]), f"{each['substitutions']}/{each['deletions']}/{each['insertions']}", show(each["ratio"]),
            show(each["lag_s"]), f"{plain(each['lag_50_s'])}/{plain(each['lag_90_s'])}",
            f"{show(each['aware_lag_s'], spread=False)}, {plain(each['aware_lag_90_s'])}", show(each["laal_s"], spread=False), edge,
            show(each["edge_ratio"]), silent, show(each["cpu"], 3, spread=False), show(each["rows_per_token"], spread=False),
        ))  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    yield from ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    for each in rows[1:-1]:
        gaps = "; ".join(f"{name} {show(gap, sign='+')} p = {gap['p']:.3f}" for name, gap in each["minus_first"].items())
        yield f"{each['setting']} − {rows[0]['setting']}: {gaps}"


def show_against(rows: Sequence[dict[str, Any]], named: str) -> Iterator[str]:
    """× offline here over × offline there."""
    for each in rows:
        yield (
            f"{each['setting']}: × offline {show(each['ratio'])} here ({each['num_groups']} streams), "
            f"{show(each['ratio_against'])} on {named} ({each['num_groups_against']}): {show(each['quotient'])} times as much"
        )


def show_noise(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Words written in noise and lost after it."""
    for each in rows:
        yield (
            f"{each['setting']}: {each['noise']}: {each['words_in_noise']} words in {each['noise_s']:.0f} s without speech; of "
            f"{each['words']} words after it {each['lost']} lost (by itself {each['lost_alone']}), {each['lost_beyond_offline']} of them "
            f"written by offline; {each['errors']} errors (by itself {each['errors_alone']}); CPU {each['cpu']:.3f} s/s"
        )
    for setting, group in itertools.groupby(rows, key=lambda each: each["setting"]):
        found = list(group)
        written, beyond, minutes = (sum(each[name] for each in found) for name in ("words_in_noise", "lost_beyond_offline", "noise_s"))
        yield f"{setting}: {written} words in all in {minutes / 60:.0f} min without speech; {beyond} words lost that offline writes"


def stored_made(store: ResultStore, data_digest: str, model: str | None) -> Made:
    """For --table: the model that the results are of."""
    live = [each for each in store.records.values() if each["setting"] != OFFLINE and each["data_digest"] == data_digest]
    known = {(each["model"], each["model_digest"], each["encoder"]) for each in live}
    known = {each for each in known if model is None or model in each or each[1].startswith(model)}
    if len(known) != 1:
        names = ", ".join(f"{name} ({digest[:16]})" for name, digest, _ in sorted(known)) or "none"
        raise ConfigError(f"{store.path}: expected results of one model on this data: got {names}; name one with --model, or its digest")
    return Made(*known.pop(), data_digest)


def make_plan(options: argparse.Namespace) -> tuple[LivePlan, dict[str, Any]]:
    """What the options ask for, and its signature."""
    reading = read(options.corpus, options.folder)
    clips = [clip for clip in reading.usable if clip.split == options.split]
    if options.by == "speaker":
        clips = [dataclasses.replace(clip, stream=clip.group) for clip in clips]
    if not clips:
        raise ConfigError(f"{options.folder}: no utterance of the split {options.split!r}")
    store = ResultStore(options.out, again=options.again)
    if options.table:
        made = stored_made(store, reading.digest, options.model)
    else:
        loaded = live_results.live_player(options.model or "tiny.en-dial")
        made = Made(loaded.name, loaded.digest, loaded.encoder.traits.name, reading.digest)
    chapters = choose_chapters(clips, options.chapters or ("12" if options.split == "test" else "all"))
    name = hashlib.sha256(" ".join(stream.name for stream in chapters).encode()).hexdigest()[:12]
    joined = [SoundStream(f"joined {name}", tuple(part for stream in chapters for part in stream.parts))] if options.joined else []
    streams = chapters if options.noise is None else noise_streams(clips, options.noise, options.seed)
    streams = alone(chapters) if options.whole else streams
    played = {stream.name for stream in streams}
    stored = [key[1] for key in store.records if key[1] != OFFLINE and key[0] in played and key[2] == made.model_digest]
    given = options.setting or (stored if options.table else ["gamma=0;window_s=30" if options.whole else "gamma=0.5"])
    settings = list(dict.fromkeys(str(LiveSetting.parse(text)) for text in given))
    for setting in () if options.table else settings:
        live_results.live_player(made.model).open(LiveSetting.parse(setting))  # what a model cannot do is said before anything is played
    signature = {
        "version": zendaya.__version__, "code": code_digest(), **dataclasses.asdict(made), "corpus": options.corpus,
        "split": options.split, "by": options.by, "streams": name, "num_streams": len(streams),
        "hours": round(sum(stream.duration_s for stream in streams) / 3600, 3), "settings": settings, "seed": options.seed,
        "resamples": RESAMPLES, "normaliser": normaliser("english")[1], "baseline": f"tiny.en {OFFLINE} {TINY_EN_SHA256['model.bin'][:16]}",
    }  # fmt: skip
    times = word_times(options.folder)
    return LivePlan(settings, streams, joined, made, store, times, options.seed), signature


def against(options: argparse.Namespace, settings: list[str]) -> LivePlan:
    """The same settings on chapters of LibriSpeech."""
    named = {"corpus": "librispeech", "by": "chapter", "folder": options.against, "split": options.against_split}
    changed = {**named, "chapters": options.against_chapters, "setting": settings, "joined": False, "noise": None}
    return make_plan(argparse.Namespace(**{**vars(options), **changed}))[0]


def report(plan: LivePlan, other: LivePlan | None, signature: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the figures with their signature, as text or JSON."""
    found: dict[str, Any] = {"noise": measure_noise(plan)} if options.noise is not None else measure(plan)
    if options.joined:
        found["joined"] = measure_joined(plan)
    if other is not None:
        found["against"] = measure_against(plan, other)
    if options.json:
        print(json.dumps({"signature": signature, **found}, indent=1))
        return
    print("|".join(f"{name}:{value[:16] if name.endswith('digest') else value}" for name, value in signature.items()))
    if len(found.get("chapters", ())) < found.get("num_wanted", 0):
        print(f"unfinished: {len(found['chapters'])} of {found['num_wanted']} chapters have all results, and only they are counted")
    for line in show_noise(found["noise"]) if options.noise is not None else show_rows(found["rows"]):
        print(line)
    for each in found.get("joined", ()):
        print(f"{each['setting']}: one stream {each['joined_wer']:.2f} %, own streams {each['own_wer']:.2f} %: {show(each['ratio'])}")
    for line in show_against(found.get("against", ()), f"librispeech {options.against_split}"):
        print(line)
    if not plan.times:
        print("note: the corpus has no word times: no lag; errors are placed as if the words of an utterance were spread evenly over it")
    used = [plan.store.records.get(plan.made.key(s.name, setting)) for s in plan.streams for setting in plan.settings]
    if other := sum(record is not None and record["code"] != code_digest() for record in used):
        print(f"note: {other} of the results were made by other code than this; --again makes them anew")
    if options.split == "test" and SEEN_TEST in plan.made.encoder:
        print("note: this adapter was trained on test-clean utterances: its figures on them may not be published")


def main(words: Sequence[str] | None = None) -> None:
    """Play what is missing, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--setting", action="append", help="repeat for several; the first is what others are compared with")
    parser.add_argument("--model", help="default: tiny.en-dial; with --table, the name or digest that the results have")
    parser.add_argument("--corpus", default="librispeech", help="as `zendaya corpora` lists them: librispeech, speechocean762 …")
    parser.add_argument("--split", default="test")
    parser.add_argument("--by", choices=["chapter", "speaker"], default="chapter", help="whose utterances make one stream")
    parser.add_argument("--chapters", help="how many, or all; default: 12 of test (a fixed list), all of another split")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--whole", action="store_true", help="each utterance as a stream of its own")
    mode.add_argument("--joined", action="store_true", help="also all chapters in one long stream")
    mode.add_argument("--noise", type=float, nargs="?", const=600.0, help="instead: so many seconds of each kind of noise, then speech")
    parser.add_argument(
        "--against", type=Path, metavar="FOLDER", help="of LibriSpeech: the same settings there, and × offline here over there"
    )
    parser.add_argument("--against-split", default="test")
    parser.add_argument("--against-chapters", help="as --chapters")
    parser.add_argument("--out", type=Path, default=Path("live-results"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the noise and of the bootstrap")
    parser.add_argument("--table", action="store_true", help="print what is stored, without a model")
    parser.add_argument("--again", action="store_true", help="play also what is stored")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    if options.against and options.noise is not None:
        raise ConfigError("--against compares word errors on two corpora: it does not go with --noise")
    plan, signature = make_plan(options)
    other = against(options, plan.settings) if options.against else None
    if other is not None:
        signature["against"] = f"librispeech {options.against_split}, {len(other.streams)} streams, {other.made.data_digest[:16]}"
    for each, folder in ((plan, options.folder), (other, options.against)):
        if each is not None and not options.table:
            run_jobs(each.jobs(noise=options.noise is not None), folder, each.made, each.store, options.processes)
    report(plan, other, signature, options)


if __name__ == "__main__":
    try:
        main()
    except ZendayaError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped: finished chapters are kept; the same command goes on with the others")
