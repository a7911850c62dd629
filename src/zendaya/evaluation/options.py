"""The options of an evaluation, from which the command line is made; this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from zendaya.errors import ConfigError
from zendaya.evaluation.metrics.quality import METRICS, Normalise
from zendaya.records import Scale, listed, option
from zendaya.runtime.policies import Policy, parse_policy
from zendaya.schedule import PowerLaw, Schedule


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """How a corpus is evaluated: which clips, how they are decoded, how they are scored, where the results go."""

    store: str | Path | None = option(None, "Feature store that zendaya encode made; default: features/ of the checkpoint's training run.")
    split: str = option("test", "Split to decode.")
    schedules: Sequence[Schedule | Policy] = option(
        (PowerLaw(0.0),), "Schedule or policy, as 0.3, gamma=1,head=2, wait-k=10, full, alignatt=4; may be repeated.", name="--schedule",
        each=parse_policy,
    )  # fmt: skip
    streaming: bool = option(
        False, "Streaming: one session per stream, with history across its clips. Offline: one session per clip.",
        name="--streaming/--offline",
    )  # fmt: skip
    scale: Scale | None = option(
        None, "Source length of the schedule: segment (the clip's own) or window (W, strictly causal); default: window if streaming."
    )
    window_tokens: int | None = option(None, "With --scale window: W in source tokens; default: the model's.", name="--window")
    steps: int | None = option(None, "Fixed N̂, in place of the length head.")
    max_steps: int | None = option(None, "Most steps per window.")
    metrics: Sequence[str] | None = option(
        None, f"Quality metrics with commas between: {', '.join(METRICS)}; default: those of the task.", parse=listed(str.lower)
    )
    normalise: Normalise = option("english", "For WER: english (Whisper's), basic (lower case, no punctuation) or none.")
    limit: int | None = option(None, "Decode only the first N clips.", min=1)
    computation_aware: bool = option(False, "Time the decoding, and add computation-aware latency in seconds.")
    workers: int = option(1, "Decoding processes, one thread each.", min=1)
    engine: Literal["auto", "torch", "native"] = option("auto", "Decoder engine; auto is native where it was built and on the CPU.")
    precision: Literal["float32", "int8"] = option("float32", "Precision of the native engine.")
    out: str | Path | None = option(None, "Folder for traces.jsonl and scores.json; an interrupted evaluation resumes there.")
    force: bool = option(False, "Replace finished results.")
    discard: bool = False
    """Replace the unfinished results of another evaluation."""

    def __post_init__(self) -> None:
        if not self.schedules:
            raise ConfigError("schedules must name at least one schedule or policy: got none")
        if self.streaming and self.schedule_scale != "window":
            raise ConfigError(f"streaming needs scale window, as a live stream has no known segment length: got scale {self.scale!r}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1 clip: got {self.limit}")
        check_replay(self.schedule_scale, self.window_tokens, self.workers, timed=self.computation_aware)

    @property
    def schedule_scale(self) -> Scale:
        """The scale given, else the default of the mode."""
        return self.scale or ("window" if self.streaming else "segment")


def check_replay(scale: str, window_tokens: int | None, workers: int, *, timed: bool) -> None:
    """Raise ConfigError for replay options that contradict each other."""
    if scale not in get_args(Scale):
        raise ConfigError(f"scale must be one of {', '.join(get_args(Scale))}: got {scale!r}")
    if scale == "segment" and window_tokens is not None:
        raise ConfigError(f"scale segment sets the window to the clip's length: got window {window_tokens}; omit it, or use scale window")
    if workers < 1:
        raise ConfigError(f"workers must be at least 1: got {workers}")
    if timed and workers > 1:
        raise ConfigError(f"computation-aware latency is measured with one worker: got {workers}")


@dataclass(frozen=True, kw_only=True)
class FrontierOptions:
    """How a frontier is measured, and where it goes."""

    settings: tuple[str, ...] = option(
        (), "A setting to try, as gamma=1,head=25;block_s=0.32; repeat it. A grid if not given.", name="--setting"
    )
    corpus: str = option("librispeech", "The corpus in FOLDER, with chapters.")
    split_choose: str = option("valid", "The split that settings are chosen on.")
    split_report: str = option("test", "The split that the chosen ones are reported on.")
    chapters: str = option("all", "How many chapters of each split, or all.")
    report_name: str | None = option(None, "Name of the reported data for readers, as LibriSpeech test-clean.", name="--name")
    results: Path = option(Path("frontier-results"), "Folder of results and log: the same command goes on from there.")
    out: Path | None = option(None, "The file to write; beside the model if not given.")
    processes: int = option(1, "Chapters that are played at the same time.", min=1)

    def __post_init__(self) -> None:
        if self.split_choose == self.split_report:
            raise ConfigError(f"--split-choose and --split-report: expected two splits: got {self.split_choose} twice")
        if self.chapters != "all" and not (self.chapters.isdecimal() and int(self.chapters)):
            raise ConfigError(f"--chapters: expected a number of at least 1, or all: got {self.chapters!r}")

    @property
    def names(self) -> dict[str, str]:
        """Names of splits for readers, where they were given."""
        return {} if self.report_name is None else {self.split_report: self.report_name}
