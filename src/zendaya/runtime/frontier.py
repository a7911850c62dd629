"""The dial in seconds (method.md §11): a model's measured frontier, in a file beside it, and the setting that a lag means.

Settings were chosen on one split and measured again on another. A lag picks by the first figures; what is shown are the second.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zendaya.errors import ConfigError, ZendayaError
from zendaya.files import write_atomically
from zendaya.nn.adapter import ADAPTER
from zendaya.nn.checkpoint import WEIGHTS, stated_digest
from zendaya.nn.config import ModelConfig
from zendaya.records import check_record, read_record
from zendaya.runtime.loading import weights_path
from zendaya.runtime.policies import Policy
from zendaya.runtime.setting import LiveSetting
from zendaya.schedule import PowerLaw, Schedule

FRONTIER = "frontier.json"
"""The file in the folder of an adapter or checkpoint; beside a shipped adapter it is NAME.frontier.json."""
DEFAULT_LAG_S = 1.0
"""The lag of a user who gives no dial, where the model has a frontier."""
DEFAULT_GAMMA = 0.5
"""The dial of a user who gives none, where it has none and its windows do not slide."""
DEFAULT_HOLD = 25
"""Newest source tokens, 0.5 s of speech, that no word may lean on: the default where windows slide."""
MAX_LAG_S, MAX_WER = 3600.0, 1e6
DELAYS = ("minimal", "low", "medium", "high", "xhigh")
"""OpenAI's names of delays, from fast to slow."""


@dataclass(frozen=True, kw_only=True)
class LagFigures:
    """What a setting gave on a split."""

    lag_s: float
    """Mean word lag, computing left out."""
    lag_p90_s: float
    """90 % of the words lag at most so much."""
    wer: float
    """Word errors in percent."""
    ratio: float | None
    """Word errors over those of the unadapted model offline; None where that made none."""

    def __post_init__(self) -> None:
        lag, errors = (-MAX_LAG_S, MAX_LAG_S), (0.0, MAX_WER)  # a lag is below 0 where words are written before they end
        check_record(self, "frontier", lag_s=lag, lag_p90_s=lag, wer=errors, **({} if self.ratio is None else {"ratio": errors}))


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """A setting and its figures."""

    setting: str
    """As `LiveSetting` prints it; its schedule is fixed before decoding, so that a stream can be turned to it."""
    chosen: LagFigures
    """On the split that settings are chosen on."""
    reported: LagFigures
    """On the split that they are reported on."""

    def __post_init__(self) -> None:
        setting = LiveSetting.parse(self.setting)
        if setting.schedule.decides_while_reading:
            raise ConfigError(f"frontier: setting: expected a schedule, as gamma=1,head=25: got the policy {self.setting!r}")
        if given := [name for name in ("engine", "precision") if name in setting.decoder]:
            raise ConfigError(f"frontier: setting: {given[0]} is chosen by machine: leave it out of {self.setting!r}")

    @property
    def live(self) -> LiveSetting:
        """The setting itself."""
        return LiveSetting.parse(self.setting)

    @property
    def seconds(self) -> str:
        """Its mean lag for readers."""
        return f"{self.reported.lag_s:.1f} s"

    @property
    def figures(self) -> dict[str, Any]:
        """What clients are told of it; `at_s` is the lag that asks for it."""
        shown = dataclasses.asdict(self.reported)
        return {name: shown[name] for name in ("lag_s", "lag_p90_s", "wer")} | {"at_s": self.chosen.lag_s, "setting": self.setting}


@dataclass(frozen=True, kw_only=True)
class FrontierData:
    """The streams that figures are of."""

    name: str
    """For readers, as LibriSpeech test-clean."""
    corpus: str
    split: str
    data_digest: str
    streams: str
    """Digest of the streams' names."""
    num_streams: int
    hours: float


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The settings of a model that no other beats in both lag and word errors, from fast to accurate."""

    model: str
    model_digest: str
    """The checksum in the file of its weights."""
    version: str
    code: str
    """Digest of the code that wrote the text."""
    baseline: str
    """What ratios are to."""
    seed: int | None = None
    """Of the model's training, where its run names one."""
    chosen_on: FrontierData
    reported_on: FrontierData
    points: tuple[FrontierPoint, ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("frontier: points: expected at least one: got none")
        if self.points != undominated(self.points):
            problem = "from fast to accurate, none of them worse than another in both lag and word errors"
            raise ConfigError(f"frontier: points: expected settings {problem}: got {', '.join(point.setting for point in self.points)}")

    def at(self, lag_s: float, option: str = "--lag") -> FrontierPoint:
        """The most accurate setting whose mean lag is at most so many seconds; `option` is what the user calls them."""
        fast, slow = (_rounded_up(point.chosen.lag_s) for point in (self.points[0], self.points[-1]))
        reached = [point for point in self.points if point.chosen.lag_s <= lag_s]
        if not reached or not math.isfinite(lag_s):
            raise ConfigError(f"{option}: this model reaches {fast:g} … {slow:g} s: got {lag_s:g}; ask for {option} {fast:g}")
        return reached[-1]

    @property
    def default(self) -> FrontierPoint:
        """Where nothing is asked for: a lag of 1 s, or the closest there is."""
        return self.points[0] if self.points[0].chosen.lag_s > DEFAULT_LAG_S else self.at(DEFAULT_LAG_S)

    def named(self, delay: str) -> FrontierPoint:
        """The setting of a delay by OpenAI's name, from minimal (the fastest) to xhigh (the most accurate), evenly between."""
        return self.points[round(DELAYS.index(delay) * (len(self.points) - 1) / (len(DELAYS) - 1))]

    def beside(self, point: FrontierPoint, places: int) -> FrontierPoint:
        """The setting so many places slower (faster if negative), or the last there is."""
        return self.points[max(0, min(len(self.points) - 1, self.points.index(point) + places))]

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_atomically(path, (json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n").encode())


def undominated(points: Iterable[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """The points that no other is as good as in both lag and word errors, from fast to accurate, by the figures they are chosen by."""
    kept = list[FrontierPoint]()
    for point in sorted(points, key=lambda point: (point.chosen.lag_s, point.chosen.wer, point.setting)):
        if not kept or point.chosen.wer < kept[-1].chosen.wer:
            kept.append(point)
    return tuple(kept)


def frontier_path(model: str | Path) -> Path | None:
    """Where the frontier of a model lies, or would; None where its weights are not on this machine."""
    weights = weights_path(model)
    if weights is None:
        return None
    return weights.with_name(FRONTIER if weights.name in (ADAPTER, WEIGHTS) else f"{weights.stem}.{FRONTIER}")


def read_frontier(model: str | Path) -> Frontier | None:
    """The frontier beside a model; None where there is none. One that was measured for other weights is refused."""
    path, weights = frontier_path(model), weights_path(model)
    if path is None or weights is None or not path.is_file():
        return None
    try:
        found = read_record(Frontier, path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ZendayaError as error:
        raise ConfigError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None
    if (digest := stated_digest(weights)) != found.model_digest:
        problem = f"measured for the weights {found.model_digest[:16]}: got {digest[:16]} in {weights.name}"
        raise ConfigError(f"{path}: {problem}; make it again with `zendaya frontier {model} FOLDER`, or delete it")
    return found


@dataclass(frozen=True)
class DialChoice:
    """How a stream runs, and the point of the frontier it was chosen from, if it was."""

    setting: LiveSetting
    point: FrontierPoint | None = None

    @staticmethod
    def of(point: FrontierPoint) -> DialChoice:
        return DialChoice(point.live, point)

    @property
    def schedule(self) -> Schedule | Policy:
        return self.setting.schedule


def choose_setting(
    frontier: Frontier | None, *, schedule: Schedule | Policy | None = None, lag_s: float | None = None, option: str = "--lag",
    config: ModelConfig | None = None, whole: bool = False,
) -> DialChoice:  # fmt: skip
    """The setting of a stream, for every entrance: by a schedule, else by a lag, else the default of the frontier, else of the model.

    `whole`: a recording is read as fast as it goes. Nobody waits for its words, and the default is the most accurate setting.
    """
    if schedule is not None:
        return DialChoice(LiveSetting(schedule, {}, {}))
    if lag_s is not None and frontier is None:
        raise ConfigError(f"{option}: this model has no measured frontier: give gamma, or measure one with `zendaya frontier MODEL FOLDER`")
    if frontier is None:
        return DialChoice(LiveSetting(_unmeasured(config, whole=whole), {}, {}))
    if lag_s is not None:
        return DialChoice.of(frontier.at(lag_s, option))
    return DialChoice.of(frontier.points[-1] if whole else frontier.default)


def _unmeasured(config: ModelConfig | None, *, whole: bool) -> Schedule:
    """The default of a model without a frontier: where windows slide, each word once it is heard."""
    if config is None or not config.overlap_tokens:
        return PowerLaw(DEFAULT_GAMMA)  # words have their times from its pace
    if whole:
        return PowerLaw(0.0)
    return PowerLaw(1.0, head=config.window_tokens, hold=DEFAULT_HOLD)


def _rounded_up(seconds: float) -> float:
    """Seconds to one place, never less: what can be asked for."""
    return math.ceil(round(10 * seconds, 6)) / 10
