"""Results of live runs: a JSON line per stream, setting and model, made where it is missing; and the figures of a setting over chapters."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import zendaya
from zendaya.errors import ConfigError
from zendaya.evaluation.live import LivePlayer, OfflinePlayer
from zendaya.evaluation.metrics.significance import Interval, Statistics, bootstrap, paired_bootstrap
from zendaya.evaluation.metrics.speech import SpeechCounts, WrittenWord, align, apart_if_unspoken, count
from zendaya.evaluation.streams import SoundStream, alone
from zendaya.nn.whisper import TINY_EN_SHA256
from zendaya.parallel import Executor, Workers
from zendaya.records import Clip
from zendaya.runtime.setting import LiveSetting

OFFLINE = "offline"
"""The setting of the baseline: unadapted tiny.en, whole utterances; its errors are 1.0×."""


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


class ResultStore:
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


Job = tuple[str, list[SoundStream]]
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


def run_jobs(jobs: Sequence[Job], folder: Path, made: Made, store: ResultStore, processes: int) -> None:
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


@dataclass(frozen=True)
class LivePlan:
    """What is measured."""

    settings: list[str]
    streams: list[SoundStream]
    joined: list[SoundStream]
    made: Made
    store: ResultStore
    times: dict[str, Any]
    seed: int

    def jobs(self, *, noise: bool) -> list[Job]:
        """Chapter by chapter, every setting of it, so that an unfinished run compares the same chapters."""
        chapters = defaultdict[str, list[SoundStream]](list)
        for stream in self.streams:
            chapters[stream.name if noise else next(part.stream for part in stream.parts if isinstance(part, Clip))].append(stream)
        jobs = list[Job]()
        for streams in chapters.values():
            jobs += [(setting, streams + (alone(streams) if noise else [])) for setting in self.settings]
            jobs.append((OFFLINE, alone(streams)))
        return jobs + [(setting, self.joined) for setting in self.settings if self.joined]


# Figures.


@dataclass
class ChapterCounts:
    """All that is counted of one chapter under one setting."""

    counts: SpeechCounts = dataclasses.field(default_factory=SpeechCounts)
    cpu_s: float = 0.0
    sound_s: float = 0.0
    rows: int = 0
    tokens: int = 0


def count_stream(stream: SoundStream, record: dict[str, Any], times: dict[str, Any], *, apart: bool = False) -> dict[str, SpeechCounts]:
    """The counts of a result, per chapter; `apart` takes no word for one that was said after it was written."""
    said = stream.utterances(times)
    pairs = align(said, [WrittenWord(*word) for word in record["words"]])
    return count(said, apart_if_unspoken(pairs) if apart else pairs, record["edges_s"], record["sound_s"])


def groups(streams: Sequence[SoundStream], setting: str, made: Made, store: ResultStore, times: dict[str, Any]) -> dict[str, ChapterCounts]:
    """The counts of a setting per chapter, of those chapters whose streams all have a result."""
    found, lacking = defaultdict[str, ChapterCounts](ChapterCounts), set[str]()
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


FIGURES: dict[str, Callable[[ChapterCounts, ChapterCounts], tuple[float, ...]]] = {
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


def figure(name: str, own: Sequence[ChapterCounts], offline: Sequence[ChapterCounts]) -> Statistics:
    """A figure as statistics for the bootstrap over chapters."""
    values_CS = np.array([FIGURES[name](*pair) for pair in zip(own, offline, strict=True)], np.float64)
    return Statistics(metric=name, name=name, signature=name, values_CS=values_CS, of_sums=quotient, higher_is_better=False)


def interval(found: Interval) -> dict[str, float | None]:
    """A figure for JSON: null where there is none."""
    kept = {name: getattr(found, name) for name in ("value", "low", "high", "p") if hasattr(found, name)}
    return {name: None if math.isnan(value) else round(value, 4) for name, value in kept.items()}


def row(
    setting: str, own: Sequence[ChapterCounts], first: Sequence[ChapterCounts], offline: Sequence[ChapterCounts], seed: int
) -> dict[str, Any]:
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


def measure(plan: LivePlan) -> dict[str, Any]:
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
