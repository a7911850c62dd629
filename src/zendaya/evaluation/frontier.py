"""A model's frontier, measured: settings are played and chosen on one split, and what no other beats is played again on another."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import zendaya
from zendaya.data.corpora.registry import read
from zendaya.errors import ConfigError
from zendaya.evaluation import live_results
from zendaya.evaluation.live import word_times
from zendaya.evaluation.live_results import OFFLINE, LivePlan, Made, ResultStore, code_digest, figure, groups, run_jobs
from zendaya.evaluation.options import FrontierOptions
from zendaya.evaluation.streams import SoundStream, alone, choose_chapters
from zendaya.nn.adapter import ADAPTER
from zendaya.nn.checkpoint import WEIGHTS, read_run_record, stated_digest
from zendaya.nn.config import ModelConfig
from zendaya.nn.whisper import TINY_EN_SHA256
from zendaya.runtime.frontier import Frontier, FrontierData, FrontierPoint, LagFigures, frontier_path, undominated
from zendaya.runtime.loading import weights_path
from zendaya.runtime.setting import LiveSetting

BLOCKS_S, HOLDS = (0.32, 0.5, 1.0, 2.0), (8, 12, 18, 25, 36, 50, 75, 100)


def grid(config: ModelConfig) -> list[str]:
    """The settings that are tried where none is given: holds under the largest head start (method.md §9), and the plain dial.

    N̂ is the longest text there is, so that the least horizons never lie beyond what is said; with each block twice its length, a second
    at most, is encoded again.
    """
    held = (f"gamma=1,head={config.window_tokens},hold={hold};steps={config.max_steps}" for hold in HOLDS)
    schedules = [*held, "gamma=1,head=25", "gamma=1,head=50", "gamma=1,head=100", "gamma=0.5"]
    return [f"{schedule};block_s={block_s:g};revise_s={min(1.0, 2 * block_s):g}" for block_s in BLOCKS_S for schedule in schedules]


def make_frontier(model: str, folder: Path, options: FrontierOptions) -> tuple[Frontier, Path]:
    """Play what is not played yet, and write the frontier; the frontier and its file."""
    weights, out = weights_path(model), options.out or frontier_path(model)
    if weights is None or out is None:
        raise ConfigError(f"{model}: its weights are not here; expected a shipped adapter, or the folder of an adapter or checkpoint")
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"{out}: cannot be written; give --out a file in an existing folder")
    tried = _checked(model, options.settings or grid(live_results.live_player(model).model.config))
    trial = _Trial(model, folder, options)
    chosen, chosen_on = trial.measure(options.split_choose, tried)
    kept = [each.setting for each in undominated(FrontierPoint(setting=name, chosen=one, reported=one) for name, one in chosen.items())]
    if not kept:
        raise ConfigError(f"{folder}: no setting wrote a right word of {options.split_choose}: nothing can be chosen")
    reported, reported_on = trial.measure(options.split_report, kept)
    if lacking := [name for name in kept if name not in reported]:
        raise ConfigError(f"{folder}: {lacking[0]} wrote no right word of {options.split_report}: its lag cannot be reported")
    frontier = Frontier(
        model=weights.parent.name if weights.name in (ADAPTER, WEIGHTS) else weights.stem, model_digest=stated_digest(weights),
        version=zendaya.__version__, code=code_digest(), baseline=f"tiny.en {OFFLINE} {TINY_EN_SHA256['model.bin'][:16]}",
        seed=read_run_record(model).seed, chosen_on=chosen_on, reported_on=reported_on,
        points=tuple(FrontierPoint(setting=name, chosen=chosen[name], reported=reported[name]) for name in kept),
    )  # fmt: skip
    frontier.write(out)
    return frontier, out


def _checked(model: str, given: Sequence[str]) -> list[str]:
    """Settings in their printed form, each once; what a model cannot do is said before anything is played."""
    settings = list(dict.fromkeys(str(LiveSetting.parse(text)) for text in given))
    for text in settings:
        setting = LiveSetting.parse(text)
        if setting.schedule.decides_while_reading:
            raise ConfigError(f"--setting: a frontier holds schedules, to which a stream can be turned: got the policy {text!r}")
        live_results.live_player(model).open(setting)
    return settings


class _Trial:
    """A model that plays a corpus under settings, with the results so far."""

    def __init__(self, model: str, folder: Path, options: FrontierOptions) -> None:
        self.folder, self.options = folder, options
        self.reading, self.times = read(options.corpus, folder), word_times(folder)
        loaded = live_results.live_player(model)
        self.made = Made(loaded.name, loaded.digest, loaded.encoder.traits.name, self.reading.digest)
        self.store = ResultStore(options.results)

    def measure(self, split: str, settings: list[str]) -> tuple[dict[str, LagFigures], FrontierData]:
        """Play a split under settings, and count."""
        streams = self._streams(split)
        data = FrontierData(
            name=self.options.names.get(split, f"{self.options.corpus} {split}"), corpus=self.options.corpus, split=split,
            data_digest=self.reading.digest, num_streams=len(streams), hours=round(sum(each.duration_s for each in streams) / 3600, 3),
            streams=hashlib.sha256(" ".join(each.name for each in streams).encode()).hexdigest()[:12],
        )  # fmt: skip
        self.store.say(f"{split}: {len(settings)} settings on {len(streams)} chapters, {data.hours:g} h")
        plan = LivePlan(settings, streams, [], self.made, self.store, self.times, seed=0)
        run_jobs(plan.jobs(noise=False), self.folder, self.made, self.store, self.options.processes)
        return _figures(plan), data

    def _streams(self, split: str) -> list[SoundStream]:
        """All chapters of a split, or the first so many of the fixed order; a split with fewer is played whole."""
        clips = [clip for clip in self.reading.usable if clip.split == split]
        if not clips:
            raise ConfigError(f"{self.folder}: no utterance of the split {split!r}: name another with --split-choose or --split-report")
        wanted, num_chapters = self.options.chapters, len({clip.stream for clip in clips})
        return choose_chapters(clips, "all" if wanted != "all" and int(wanted) > num_chapters else wanted)


def _figures(plan: LivePlan) -> dict[str, LagFigures]:
    """The figures of each setting; one that wrote no right word has no lag, and is left out."""
    offline, found = groups(alone(plan.streams), OFFLINE, plan.made, plan.store, plan.times), dict[str, LagFigures]()
    base = [offline[name] for name in sorted(offline)]
    for setting in plan.settings:
        counted = groups(plan.streams, setting, plan.made, plan.store, plan.times)
        own = [counted[name] for name in sorted(offline)]
        lags_s = [lag_s for each in own for lag_s in each.counts.lags_s]
        if not lags_s:
            plan.store.say(f"{setting}: left out: it wrote no right word")
            continue
        lag_s, wer, ratio = (round(float(figure(name, own, base).score), 4) for name in ("lag_s", "wer", "ratio"))
        most_s = round(float(np.percentile(lags_s, 90)), 4)
        found[setting] = LagFigures(lag_s=lag_s, lag_p90_s=most_s, wer=wer, ratio=ratio if math.isfinite(ratio) else None)
    return found
