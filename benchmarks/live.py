"""Live speech, measured: chapters or speakers as endless streams, per setting word errors, lag, errors at edges, words in silence.

python benchmarks/live.py FOLDER [--setting "gamma=0.5;window_s=10" --setting alignatt=25,chunk=100 …] [--model NAME_OR_FOLDER]
    [--corpus NAME] [--split test|valid] [--chapters 12|all] [--whole | --joined | --noise [SECONDS]] [--against FOLDER]
    [--out DIR] [--processes N] [--table] [--json]

FOLDER holds manifest.jsonl, the recordings and, where there are any, align_*.jsonl (word times). A setting is a schedule or policy in
its printed form, then `;NAME=VALUE` for fields of DecodeOptions or settings of the encoder. Results are kept in DIR, a JSON line per
stream and setting: the same command goes on where it was stopped, and `--table` prints what is there without a model.
docs/evaluation.md says what is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import zendaya
from zendaya.data.corpora.registry import read
from zendaya.errors import ConfigError, ZendayaError
from zendaya.evaluation.live import LivePlayer, LiveSetting, OfflinePlayer, utterance, word_times
from zendaya.evaluation.metrics.quality import normaliser
from zendaya.evaluation.metrics.significance import RESAMPLES, Interval, Statistics, bootstrap, paired_bootstrap, quotient_bootstrap
from zendaya.evaluation.metrics.speech import SpeechCounts, Utterance, WrittenWord, align, apart_if_unspoken, count
from zendaya.nn.whisper import TINY_EN_SHA256
from zendaya.parallel import Executor, Workers
from zendaya.records import Clip
from zendaya.sources.media import SAMPLE_RATE, Samples, read_audio

TEST_12 = (
    "61-70970", "4077-13754", "2961-961", "1284-1180", "121-127105", "7176-88083", "1580-141083", "260-123288", "908-157963", "4970-29095",
    "6829-68771", "3570-5694",
)  # fmt: skip
"""Chapters of test-clean for iterating, 46 min: of 200 to 300 s, in the order of the sha256 of their ids, the first of each speaker."""
OFFLINE = "offline"
"""The setting of the baseline: unadapted tiny.en, whole utterances; its errors are 1.0×."""
NOISES = ("silence", "pink", "hum", "music", "room")
ROOM_UTTERANCES = 10
SEEN_TEST = "@49fd7f61"
"""The shipped adapter that was trained on test-clean utterances."""
CHUNK = SAMPLE_RATE // 10


# Streams.


@dataclass(frozen=True)
class Noise:
    """Sound without speech, the same for the same seed."""

    kind: str
    duration_s: float
    seed: int

    def samples(self) -> Samples:
        """The sound: full scale is 1."""
        rng, size = np.random.default_rng([self.seed, NOISES.index(self.kind)]), round(self.duration_s * SAMPLE_RATE)
        at_s = np.arange(size) / SAMPLE_RATE
        if self.kind == "silence":
            return np.zeros(size, np.float32)
        if self.kind in ("pink", "room"):  # power falls with the frequency; that of a room faster, and it is faint
            spectrum = np.fft.rfft(rng.standard_normal(size))
            spectrum /= np.maximum(np.arange(spectrum.size) * SAMPLE_RATE / size, 20.0) ** (0.5 if self.kind == "pink" else 1.0)
            sound, level = np.fft.irfft(spectrum, size), 0.03 if self.kind == "pink" else 0.003
        elif self.kind == "hum":  # the mains and its harmonics, swelling slowly
            sound = sum(np.sin(2 * np.pi * 50 * k * at_s + k) / k for k in (1, 2, 3, 5, 7)) * (1 + 0.2 * np.sin(0.3 * at_s))
            level = 0.03
        else:  # three plucked voices in a pentatonic scale, four notes a second
            sound, level = np.zeros(size), 0.05
            for voice, (beat_s, octave) in enumerate(((0.25, 440.0), (0.5, 220.0), (1.0, 110.0))):
                notes = octave * 2.0 ** (rng.choice([0, 2, 4, 7, 9], math.ceil(self.duration_s / beat_s)) / 12)
                number = np.minimum((at_s / beat_s).astype(int), notes.size - 1)
                phase, fade = 2 * np.pi * notes[number] * at_s, np.exp(-3 * (at_s % beat_s) / beat_s)
                sound += fade * sum(np.sin(k * phase) / k**2 for k in range(1, 6)) / (voice + 1)
        return (level * sound / np.sqrt(np.mean(sound**2))).astype(np.float32)


@dataclass(frozen=True)
class Stream:
    """Recordings and noise, back to back."""

    name: str
    parts: tuple[Clip | Noise, ...]

    def sound(self, folder: Path) -> Iterator[Samples]:
        """Chunks of a tenth of a second."""
        for part in self.parts:
            if isinstance(part, Clip):
                yield from (chunk.samples for chunk in read_audio(folder / part.media))
            else:
                samples_S = part.samples()
                yield from (samples_S[first : first + CHUNK] for first in range(0, samples_S.size, CHUNK))

    def utterances(self, times: dict[str, Any]) -> list[Utterance]:
        """What is said in it, and when."""
        starts_s = itertools.accumulate((part.duration_s for part in self.parts), initial=0.0)
        return [utterance(part, start_s, times) for part, start_s in zip(self.parts, starts_s, strict=False) if isinstance(part, Clip)]

    @property
    def duration_s(self) -> float:
        return sum(part.duration_s for part in self.parts)


def by_hash(names: Sequence[str]) -> list[str]:
    """Names in an order that nobody chose."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def choose_chapters(clips: Sequence[Clip], wanted: str) -> list[Stream]:
    """The first chapters of the fixed list, then of the others in the order of their hashes; or all."""
    there = defaultdict[str, list[Clip]](list)
    for clip in clips:
        there[clip.stream].append(clip)
    order = [name for name in TEST_12 if name in there] + by_hash([name for name in there if name not in TEST_12])
    if wanted != "all" and not (wanted.isdecimal() and 1 <= int(wanted) <= len(order)):
        raise ConfigError(f"--chapters must be a number from 1 to {len(order)}, or all: got {wanted!r}")
    return [Stream(name, tuple(there[name])) for name in (order if wanted == "all" else order[: int(wanted)])]


def noise_streams(clips: Sequence[Clip], seconds: float, seed: int) -> list[Stream]:
    """One stream per kind of noise: so many seconds of it, then an utterance; room noise in ten pieces with an utterance after each."""
    named = {clip.id: clip for clip in clips if 5 <= clip.duration_s <= 12}
    if len(named) < len(NOISES) - 1 + ROOM_UTTERANCES:
        raise ConfigError(f"--noise needs {len(NOISES) - 1 + ROOM_UTTERANCES} utterances of 5 to 12 s: got {len(named)} in this split")
    chosen, streams = iter([named[name] for name in by_hash(list(named))]), []
    for kind in NOISES:
        pieces = ROOM_UTTERANCES if kind == "room" else 1
        noises = [Noise(kind, round(seconds / pieces, 1), seed * ROOM_UTTERANCES + piece) for piece in range(pieces)]
        parts = tuple(part for noise in noises for part in (noise, next(chosen)))
        streams.append(Stream(f"{kind}, {clips[0].split}, {seconds:g} s, seed {seed}", parts))
    return streams


def alone(streams: Sequence[Stream]) -> list[Stream]:
    """Each utterance of the streams as a stream of its own."""
    return [Stream(part.id, (part,)) for stream in streams for part in stream.parts if isinstance(part, Clip)]


# Results: a JSON line per stream, setting and model.


@dataclass(frozen=True)
class Made:
    """What results are made from: a result is used again where all of it is the same."""

    model: str
    model_digest: str
    encoder: str
    data_digest: str

    def key(self, stream: str, setting: str) -> tuple[str, ...]:
        """By which a result is found."""
        return stream, setting, TINY_EN_SHA256["model.bin"] if setting == OFFLINE else self.model_digest, self.data_digest


class Store:
    """The results in a folder, and its log. A line that was cut off by a crash is passed over."""

    def __init__(self, folder: Path, *, again: bool = False) -> None:
        self.path, self.log = folder / "results.jsonl", folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        self.records = dict[tuple[str, ...], dict[str, Any]]()
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else ():
            try:
                self._keep(json.loads(line))
            except (ValueError, KeyError):
                self.say(f"{self.path}: passed over a line that is no result: {line[:40]!r}")
        self.done = set[tuple[str, ...]]() if again else set(self.records)

    def _keep(self, record: dict[str, Any]) -> tuple[str, ...]:
        key = tuple(record[name] for name in ("stream", "setting", "model_digest", "data_digest"))
        self.records[key] = record
        return key

    def add(self, record: dict[str, Any]) -> None:
        """Append a result in one write."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(handle).st_size
            torn = size and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, (("\n" if torn else "") + json.dumps(record) + "\n").encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        self.done.add(self._keep(json.loads(json.dumps(record))))

    def say(self, line: str) -> None:
        """A line to stderr and to the log."""
        print(line, file=sys.stderr, flush=True)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


@functools.cache
def code_digest() -> str:
    """sha256 of the source files that a text depends on."""
    package, digest = Path(zendaya.__file__).parent, hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".c", ".h", ".inc")):
        name = path.relative_to(package)
        if name.parts[0] in ("runtime", "encoders", "nn", "sources", "schedule.py") or name.as_posix() == "evaluation/live.py":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


Job = tuple[str, list[Stream]]
"""A setting, and the streams of one chapter."""
live_player = functools.cache(LivePlayer)
offline_player = functools.cache(OfflinePlayer)


def player(folder: Path, made: Made) -> Callable[[Job, Any], list[dict[str, Any]]]:
    """The work of a process: a job to its results."""

    def work(job: Job, _: Any) -> list[dict[str, Any]]:
        setting, streams = job
        found = []
        for stream in streams:
            sound = stream.sound(folder)
            heard = offline_player().play(sound) if setting == OFFLINE else live_player(made.model).play(LiveSetting.parse(setting), sound)
            key = dict(zip(("stream", "setting", "model_digest", "data_digest"), made.key(stream.name, setting), strict=True))
            named = {"model": "tiny.en"} if setting == OFFLINE else {"model": made.model, "encoder": made.encoder}
            own = {**named, "version": zendaya.__version__, "code": code_digest()}
            found.append({**key, **own, **dataclasses.asdict(heard)})
        return found

    return work


def run_jobs(jobs: Sequence[Job], folder: Path, made: Made, store: Store, processes: int) -> None:
    """Play what is not there yet, and keep each result as it comes."""
    missing = [
        (setting, left) for setting, streams in jobs if (left := [s for s in streams if made.key(s.name, setting) not in store.done])
    ]
    if not missing:
        return
    total_s, done_s, begun = sum(stream.duration_s for _, streams in missing for stream in streams), 0.0, time.monotonic()
    with Executor(functools.partial(player, folder, made), Workers(min(processes, len(missing)))) as executor:
        rest = iter(missing)
        for number in range(1, len(missing) + 1):
            while executor.num_idle and (job := next(rest, None)) is not None:
                executor.submit(job)
            finished = executor.wait()
            if finished.error is not None:
                raise finished.error
            for record in finished.result or ():
                store.add(record)
            setting, streams = finished.job
            sound_s = sum(stream.duration_s for stream in streams)
            done_s += sound_s
            cpu_s, left_s = sum(record["cpu_s"] for record in finished.result or ()), (time.monotonic() - begun) * (total_s / done_s - 1)
            name = streams[0].name if len(streams) == 1 else f"{streams[0].name} … {streams[-1].name}"
            store.say(f"{number}/{len(missing)} {name} {setting}: {sound_s:.0f} s of sound, {cpu_s:.1f} s CPU; {left_s:.0f} s left")


# Figures.


@dataclass
class Group:
    """All that is counted of one chapter under one setting."""

    counts: SpeechCounts = dataclasses.field(default_factory=SpeechCounts)
    cpu_s: float = 0.0
    sound_s: float = 0.0
    rows: int = 0
    tokens: int = 0


def count_stream(stream: Stream, record: dict[str, Any], times: dict[str, Any], *, apart: bool = False) -> dict[str, SpeechCounts]:
    """The counts of a result, per chapter; `apart` takes no word for one that was said after it was written."""
    said = stream.utterances(times)
    pairs = align(said, [WrittenWord(*word) for word in record["words"]])
    return count(said, apart_if_unspoken(pairs) if apart else pairs, record["edges_s"], record["sound_s"])


def groups(streams: Sequence[Stream], setting: str, made: Made, store: Store, times: dict[str, Any]) -> dict[str, Group]:
    """The counts of a setting per chapter, of those chapters whose streams all have a result."""
    found, lacking = defaultdict[str, Group](Group), set[str]()
    for stream in streams:
        record = store.records.get(made.key(stream.name, setting))
        if record is None:
            lacking |= {part.stream for part in stream.parts if isinstance(part, Clip)}
            continue
        counted = count_stream(stream, record, times)
        for name, counts in counted.items():
            found[name].counts.add(counts)
        group = found[next(iter(counted))]
        group.cpu_s, group.sound_s = group.cpu_s + record["cpu_s"], group.sound_s + record["sound_s"]
        group.rows, group.tokens = group.rows + record["decoder_rows"], group.tokens + record["num_tokens"]
    return {name: group for name, group in found.items() if name not in lacking}


FIGURES: dict[str, Callable[[Group, Group], tuple[float, ...]]] = {
    "wer": lambda own, _: (100 * own.counts.errors, own.counts.words),
    "ratio": lambda own, base: (own.counts.errors, own.counts.words, base.counts.errors, base.counts.words),
    "lag_s": lambda own, _: (sum(own.counts.lags_s), len(own.counts.lags_s)),
    "aware_lag_s": lambda own, _: (sum(own.counts.aware_lags_s), len(own.counts.aware_lags_s)),
    "laal_s": lambda own, _: (sum(own.counts.laal_s), len(own.counts.laal_s)),
    "edge_wer": lambda own, _: (100 * own.counts.edge_errors, own.counts.edge_words),
    "inner_wer": lambda own, _: (100 * (own.counts.errors - own.counts.edge_errors), own.counts.words - own.counts.edge_words),
    "edge_ratio": lambda own, _: (
        own.counts.edge_errors, own.counts.edge_words, own.counts.errors - own.counts.edge_errors, own.counts.words - own.counts.edge_words,
    ),
    "silent_words_per_min": lambda own, _: (60 * own.counts.silent_words, own.counts.silent_s),
    "cpu": lambda own, _: (own.cpu_s, own.sound_s),
    "rows_per_token": lambda own, _: (own.rows, own.tokens),
}  # fmt: skip
"""Each figure as the sums per chapter that it is a quotient of: a/b, or a/b over c/d."""
COMPARED = ("wer", "ratio", "lag_s", "edge_ratio")


def quotient(sums_RS: Any) -> Any:
    """a/b, or a/b over c/d; not a number where a divisor is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value_R = sums_RS[:, 0] / sums_RS[:, 1]
        value_R = value_R if sums_RS.shape[1] == 2 else value_R / (sums_RS[:, 2] / sums_RS[:, 3])
    return np.where(np.isfinite(value_R), value_R, np.nan)


def figure(name: str, own: Sequence[Group], offline: Sequence[Group]) -> Statistics:
    """A figure as statistics for the bootstrap over chapters."""
    values_CS = np.array([FIGURES[name](*pair) for pair in zip(own, offline, strict=True)], np.float64)
    return Statistics(metric=name, name=name, signature=name, values_CS=values_CS, of_sums=quotient, higher_is_better=False)


def interval(found: Interval) -> dict[str, float | None]:
    """A figure for JSON: null where there is none."""
    kept = {name: getattr(found, name) for name in ("value", "low", "high", "p") if hasattr(found, name)}
    return {name: None if math.isnan(value) else round(value, 4) for name, value in kept.items()}


def row(setting: str, own: Sequence[Group], first: Sequence[Group], offline: Sequence[Group], seed: int) -> dict[str, Any]:
    """All figures of a setting, and its differences to the first one."""
    pooled = SpeechCounts()
    for group in own:
        pooled.add(group.counts)
    sums = ("words", "substitutions", "deletions", "insertions", "edge_words", "edge_errors", "silent_words")
    found: dict[str, Any] = {"setting": setting, **{name: getattr(pooled, name) for name in sums}, "silent_s": round(pooled.silent_s, 1)}
    found |= {name: interval(bootstrap(figure(name, own, offline), seed=seed)) for name in FIGURES}
    for name, values in (("lag", pooled.lags_s), ("aware_lag", pooled.aware_lags_s)):
        found |= {f"{name}_{q}_s": round(float(np.percentile(values, q)), 4) if values else None for q in (50, 90)}
    pairs = {name: (figure(name, own, offline), figure(name, first, offline)) for name in COMPARED}
    return found | {"minus_first": {name: interval(paired_bootstrap(*pair, seed=seed)) for name, pair in pairs.items()}}


def measure(plan: Plan) -> dict[str, Any]:
    """The table: a row per setting, over the chapters that have all results."""
    found = {setting: groups(plan.streams, setting, plan.made, plan.store, plan.times) for setting in plan.settings}
    offline = groups(alone(plan.streams), OFFLINE, plan.made, plan.store, plan.times)
    wanted = sorted({clip.stream for stream in plan.streams for clip in stream.parts if isinstance(clip, Clip)})
    names = [name for name in wanted if name in offline and all(name in each for each in found.values())]
    if not names:
        raise ConfigError(f"{plan.store.path}: no chapter has a result for every setting and offline: run without --table first")
    parts = [[each[name] for name in names] for each in (*found.values(), offline)]
    rows = [row(setting, own, parts[0], parts[-1], plan.seed) for setting, own in zip([*found, OFFLINE], parts, strict=True)]
    return {"chapters": names, "num_wanted": len(wanted), "rows": rows}


def measure_against(plan: Plan, other: Plan) -> list[dict[str, Any]]:
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


def measure_joined(plan: Plan) -> list[dict[str, Any]]:
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


def missing_words(streams: Sequence[Stream], setting: str, plan: Plan) -> set[tuple[str, float, str]]:
    """The reference words for which nothing was written: utterance, seconds in it, text. Words written too early do not count."""
    missing = set[tuple[str, float, str]]()
    for stream in streams:
        said, record = stream.utterances(plan.times), plan.store.records[plan.made.key(stream.name, setting)]
        for word, written, _ in apart_if_unspoken(align(said, [WrittenWord(*word) for word in record["words"]])):
            if word is not None and written is None:
                missing.add((said[word.utterance].id, round(word.start_s - said[word.utterance].start_s, 3), word.text))
    return missing


def measure_noise(plan: Plan) -> list[dict[str, Any]]:
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


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    settings: list[str]
    streams: list[Stream]
    joined: list[Stream]
    made: Made
    store: Store
    times: dict[str, Any]
    seed: int

    def jobs(self, *, noise: bool) -> list[Job]:
        """Chapter by chapter, every setting of it, so that an unfinished run compares the same chapters."""
        chapters = defaultdict[str, list[Stream]](list)
        for stream in self.streams:
            chapters[stream.name if noise else next(part.stream for part in stream.parts if isinstance(part, Clip))].append(stream)
        jobs = list[Job]()
        for streams in chapters.values():
            jobs += [(setting, streams + (alone(streams) if noise else [])) for setting in self.settings]
            jobs.append((OFFLINE, alone(streams)))
        return jobs + [(setting, self.joined) for setting in self.settings if self.joined]


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


def stored_made(store: Store, data_digest: str, model: str | None) -> Made:
    """For --table: the model that the results are of."""
    live = [each for each in store.records.values() if each["setting"] != OFFLINE and each["data_digest"] == data_digest]
    known = {(each["model"], each["model_digest"], each["encoder"]) for each in live}
    known = {each for each in known if model is None or model in each or each[1].startswith(model)}
    if len(known) != 1:
        names = ", ".join(f"{name} ({digest[:16]})" for name, digest, _ in sorted(known)) or "none"
        raise ConfigError(f"{store.path}: expected results of one model on this data: got {names}; name one with --model, or its digest")
    return Made(*known.pop(), data_digest)


def make_plan(options: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    """What the options ask for, and its signature."""
    reading = read(options.corpus, options.folder)
    clips = [clip for clip in reading.usable if clip.split == options.split]
    if options.by == "speaker":
        clips = [dataclasses.replace(clip, stream=clip.group) for clip in clips]
    if not clips:
        raise ConfigError(f"{options.folder}: no utterance of the split {options.split!r}")
    store = Store(options.out, again=options.again)
    if options.table:
        made = stored_made(store, reading.digest, options.model)
    else:
        loaded = live_player(options.model or "tiny.en-dial")
        made = Made(loaded.name, loaded.digest, loaded.encoder.traits.name, reading.digest)
    chapters = choose_chapters(clips, options.chapters or ("12" if options.split == "test" else "all"))
    name = hashlib.sha256(" ".join(stream.name for stream in chapters).encode()).hexdigest()[:12]
    joined = [Stream(f"joined {name}", tuple(part for stream in chapters for part in stream.parts))] if options.joined else []
    streams = chapters if options.noise is None else noise_streams(clips, options.noise, options.seed)
    streams = alone(chapters) if options.whole else streams
    played = {stream.name for stream in streams}
    stored = [key[1] for key in store.records if key[1] != OFFLINE and key[0] in played and key[2] == made.model_digest]
    given = options.setting or (stored if options.table else ["gamma=0;window_s=30" if options.whole else "gamma=0.5"])
    settings = list(dict.fromkeys(str(LiveSetting.parse(text)) for text in given))
    for setting in () if options.table else settings:
        live_player(made.model).open(LiveSetting.parse(setting))  # what a model cannot do is said before anything is played
    signature = {
        "version": zendaya.__version__, "code": code_digest(), **dataclasses.asdict(made), "corpus": options.corpus,
        "split": options.split, "by": options.by, "streams": name, "num_streams": len(streams),
        "hours": round(sum(stream.duration_s for stream in streams) / 3600, 3), "settings": settings, "seed": options.seed,
        "resamples": RESAMPLES, "normaliser": normaliser("english")[1], "baseline": f"tiny.en {OFFLINE} {TINY_EN_SHA256['model.bin'][:16]}",
    }  # fmt: skip
    times = word_times(options.folder)
    return Plan(settings, streams, joined, made, store, times, options.seed), signature


def against(options: argparse.Namespace, settings: list[str]) -> Plan:
    """The same settings on chapters of LibriSpeech."""
    named = {"corpus": "librispeech", "by": "chapter", "folder": options.against, "split": options.against_split}
    changed = {**named, "chapters": options.against_chapters, "setting": settings, "joined": False, "noise": None}
    return make_plan(argparse.Namespace(**{**vars(options), **changed}))[0]


def report(plan: Plan, other: Plan | None, signature: dict[str, Any], options: argparse.Namespace) -> None:
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
