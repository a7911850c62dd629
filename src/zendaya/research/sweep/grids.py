"""Grids: recipes × training schedules × seeds; each checkpoint is decoded under schedules and policies."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zendaya.errors import ConfigError
from zendaya.evaluation.metrics.quality import METRICS, Normalise
from zendaya.records import Scale, read_record
from zendaya.research.recipes import configured, read_json, recipe
from zendaya.runtime.policies import parse_policy
from zendaya.training.schedule_sampler import SCHEDULE_PARSERS, parse_training_schedule
from zendaya.training.train import TrainConfig

OWN = "own"  # the decoding schedule that equals the training schedule
Mode = Literal["offline", "streaming"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a corpus, for cost estimates that do not read it; F and N are means per example."""

    train_examples: int
    source_tokens: float
    steps: float  # N, the end included
    decode_clips: int
    where: str  # origin of the numbers

    def __post_init__(self) -> None:
        if not all(0 < one < math.inf for one in (self.train_examples, self.source_tokens, self.steps, self.decode_clips)):
            raise ConfigError(f"sizes of a corpus must be numbers above 0: got {self}")


def _check_limit(limit: int | None, what: str, unit: str) -> None:
    if limit is not None and limit < 1:
        raise ConfigError(f"{what}: limit must be at least 1 {unit}: got {limit!r}")


@dataclass(frozen=True, kw_only=True)
class Decode:
    """How each checkpoint of an arm is decoded."""

    mode: Mode = "offline"
    schedules: tuple[str, ...] = (OWN,)
    """As for `zendaya evaluate`, or `own`; default stride of wait-k: the corpus's ρ."""
    split: str = "test"
    scale: Scale | None = None  # default: segment if offline, window (strictly causal) if streaming
    metrics: tuple[str, ...] | None = None
    normalise: Normalise = "english"
    limit: int | None = None

    def __post_init__(self) -> None:
        meant = [text if text == OWN else str(parse_policy(text)) for text in self.schedules]
        if not meant or len(set(meant)) < len(meant):
            raise ConfigError(f"a decode needs at least one schedule, each once: got {', '.join(self.schedules) or 'none'}")
        if unknown := [name for name in self.metrics or () if name not in METRICS]:
            raise ConfigError(f"unknown metric: expected one of {', '.join(METRICS)}, got {unknown[0]!r}")
        if self.metrics == ():
            raise ConfigError(f"give a decode at least one metric of {', '.join(METRICS)}, or leave metrics out for those of the corpus")
        _check_limit(self.limit, "a decode", "clip")

    @property
    def scale_of_mode(self) -> Scale:
        """The given scale, or the default of the mode."""
        return self.scale or ("segment" if self.mode == "offline" else "window")

    @property
    def streams(self) -> bool:
        """Whether consecutive clips are decoded in one session; at scale `segment`, as in the paper, each clip has its own."""
        return self.mode == "streaming" and self.scale_of_mode == "window"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One recipe under several training schedules and seeds; all checkpoints are decoded in the same ways."""

    recipe: TrainConfig
    schedules: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    decodes: tuple[Decode, ...] = (Decode(),)
    limit: int | None = None  # number of training examples; the first ones are used
    sizes: Sizes | None = None

    def __post_init__(self) -> None:
        what = f"arm {self.recipe.name}"
        if not self.schedules or not self.seeds or not self.decodes:
            raise ConfigError(f"{what}: give at least one training schedule, one seed and one decode")
        meant = {str(parse_training_schedule(text)) for text in self.schedules}
        if len(meant) < len(self.schedules) or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"{what}: each schedule and seed once: got {', '.join(self.schedules)} and {self.seeds}")
        _check_limit(self.limit, what, "example")
        for config in self.configs():
            if config.schedule.sampled and any(OWN in decode.schedules for decode in self.decodes):
                raise ConfigError(f"{what}: trained on {config.schedule}, so with no schedule of its own: name the decoding schedules")

    def configs(self) -> Iterator[TrainConfig]:
        """The config of each training run."""
        for schedule in self.schedules:
            for seed in self.seeds:
                config = configured(self.recipe, schedule=schedule, seed=seed)
                assert isinstance(config, TrainConfig)
                yield config


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A whole sweep."""

    name: str
    about: str
    arms: tuple[Arm, ...]

    def __post_init__(self) -> None:
        if not self.arms:
            raise ConfigError(f"grid {self.name}: give at least one arm")

    def only(self, seeds: Collection[int]) -> Grid:
        """The runs with these seeds; other seeds can follow in the same folder."""
        known = {seed for arm in self.arms for seed in arm.seeds}
        if not seeds or set(seeds) - known:
            expected, got = (", ".join(map(str, sorted(some))) for some in (known, seeds))
            raise ConfigError(f"grid {self.name} has the seeds {expected}: got {got or 'none'}")
        arms = [(arm, tuple(seed for seed in arm.seeds if seed in seeds)) for arm in self.arms]
        return dataclasses.replace(self, arms=tuple(dataclasses.replace(arm, seeds=some) for arm, some in arms if some))

    def to_dict(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        for arm, plain in zip(self.arms, record["arms"], strict=True):
            plain["recipe"] = arm.recipe.to_dict()
        return dict(json.loads(json.dumps(record)))

    @classmethod
    def from_dict(cls, data: object, where: str) -> Grid:
        """A grid from `to_dict`, or with names of recipes; an unknown, missing or ill-typed field is a ConfigError."""
        if isinstance(data, Mapping):
            arms = data.get("arms")
            data = {"name": Path(where).stem, "about": "", **data}
            if isinstance(arms, list):
                data["arms"] = [_whole_arm(arm, f"{where}: arm {number}") for number, arm in enumerate(arms, start=1)]
        return read_record(cls, data, where, parsers=SCHEDULE_PARSERS)


def _whole_arm(arm: Any, where: str) -> Any:
    """An arm as in `Grid.to_dict`: with a whole recipe instead of its name, and schedules as texts."""
    if not isinstance(arm, Mapping):
        return arm
    fields = dict(arm)
    if isinstance(name := fields.get("recipe"), str):
        config = recipe(name)
        if not isinstance(config, TrainConfig):
            raise ConfigError(f"{where}: recipe {name!r} draws its own schedules, so it cannot be in a grid")
        fields["recipe"] = config.to_dict()
    if "loop" in fields and isinstance(fields.get("recipe"), Mapping):
        fields["recipe"] = {**fields["recipe"], "loop": {**fields["recipe"].get("loop", {}), **fields.pop("loop")}}
    if isinstance(fields.get("decodes"), list):
        fields["decodes"] = [_with_texts(decode) for decode in fields["decodes"]]
    return _with_texts(fields)


def _with_texts(fields: Any) -> Any:
    """Schedules as texts; a number is γ."""
    if not isinstance(fields, Mapping) or not isinstance(schedules := fields.get("schedules"), list):
        return fields
    return {**fields, "schedules": [str(one) if type(one) in (int, float) else one for one in schedules]}


GAMMAS_STREAMING = ("0.2", "0.3", "0.4", "1.0", "1.5")
SEEDS = (0, 1, 2)
_PAPER = {
    "offline": ("0", "0.1", "0.2", "0.3", "0.4", "0.7", "1.0"),
    "streaming": (*GAMMAS_STREAMING, *(f"wait-k={k}" for k in (5, 10, 15, 20, 25, 30, 40))),
}
"""Training schedules of the paper's sweeps (Sec. 5 and Appendix D)."""
_Q1 = ("0", "0.3", "0.7", "1.0")
_CAPS = "F and N are the caps of the paper's Table 1, so an upper bound; examples as published"
_COUNTED = "counted on the training split with the recipe's tokenizer"
_SIZES = {
    "charades-sta": Sizes(train_examples=12408, source_tokens=55, steps=20, decode_clips=3720, where=_CAPS),
    "activitynet": Sizes(train_examples=37421, source_tokens=135, steps=40, decode_clips=17031, where=_CAPS),
    "libriheavy": Sizes(train_examples=6000, source_tokens=100, steps=165, decode_clips=500, where=_CAPS),
    "msvd": Sizes(train_examples=48752, source_tokens=28.89, steps=8.88, decode_clips=670, where=_COUNTED),
    "multi30k": Sizes(train_examples=29000, source_tokens=14.87, steps=17.16, decode_clips=1000, where=_COUNTED),
    "librispeech": Sizes(
        train_examples=4257, source_tokens=91.26, steps=37.64, decode_clips=741, where=f"{_COUNTED}, 12.5 source tokens per second"
    ),
    "librispeech-long30": Sizes(
        train_examples=1208, source_tokens=129.14, steps=167.16, decode_clips=185, where=f"{_COUNTED}, 5 source tokens per second"
    ),
}
_SPLITS = {"activitynet": "val_2", "multi30k": "test_2016_flickr"}
"""Splits to decode, where not `test`. ActivityNet validates on val_1, the same videos with other sentences; its test texts are not
published."""
_METRICS = {
    "charades-sta": ("bleu-lc", "meteor"), "activitynet": ("bleu-lc", "meteor"), "libriheavy": ("bleu-lc", "meteor", "wer"),
    "librispeech": ("wer", "bleu-lc"), "librispeech-long30": ("wer", "bleu-lc"),
}  # fmt: skip


def _arm(name: str, schedules: tuple[str, ...], *decodes: Decode, form: str = "", seeds: tuple[int, ...] = SEEDS) -> Arm:
    """A recipe, in one of its forms, decoded on its test split and scored by the metrics of its corpus."""
    config = recipe(name + form)
    assert isinstance(config, TrainConfig)
    split, metrics = _SPLITS.get(name, "test"), _METRICS.get(name)
    whole = tuple(dataclasses.replace(decode, split=split, metrics=metrics) for decode in decodes or (Decode(),))
    return Arm(recipe=config, schedules=schedules, seeds=seeds, decodes=whole, sizes=_SIZES[name])


def _paper_arms(mode: Mode) -> list[Arm]:
    form, seeds = ("", SEEDS) if mode == "offline" else ("-inf", (0,))
    return [_arm(name, _PAPER[mode], Decode(mode=mode), form=form, seeds=seeds) for name in ("charades-sta", "activitynet", "libriheavy")]


def _frontier(name: str, offsets: tuple[int, ...], chunks: tuple[int, ...], pair: tuple[str, str]) -> list[Arm]:
    """Decoded at each clip's own scale, as the paper's frontiers, by models whose length head reads no more than their first step.

    `offsets` are the k of wait-k, `chunks` the source tokens between two decisions of a policy, `pair` two schedules trained alone.
    """
    policies = [f"{policy}={chunk}" for policy in ("local-agreement", "alignatt") for chunk in chunks]
    own = Decode(mode="streaming", scale="segment")
    whole = dataclasses.replace(own, schedules=(*GAMMAS_STREAMING, "0.7", *(f"wait-k={k}" for k in offsets), *policies))
    return [
        _arm(name, ("dial+wait-k",), whole, Decode(schedules=_Q1), form="-causal"),
        _arm(name, pair, own, form="-causal"),
    ]


_HEADS = ("0.7", "1.0", "wait-k=3", "wait-k=5", "wait-k=7", *(f"gamma={γ},head={h}" for h in (2, 3, 4) for γ in (1, 1.3, 1.6)))
_DILUTION = "three seeds, γ→0 against γ of 0.3, 0.7 and 1"
_FRONTIER = "a whole-dial model at every γ and k, LocalAgreement, AlignAtt, and a pair trained alone"
_GRIDS: dict[str, tuple[str, Callable[[], list[Arm]]]] = {
    "paper": ("The whole paper: 63 offline runs and 36 streaming runs.", lambda: _paper_arms("offline") + _paper_arms("streaming")),
    "paper-offline": (
        "The paper's fixed-window sweep: γ→0 and six γ, three corpora, three seeds, 63 runs.", lambda: _paper_arms("offline"),
    ),
    "paper-streaming": (
        "The paper's streaming sweep: five γ and seven k, three corpora, one seed, 36 runs.", lambda: _paper_arms("streaming"),
    ),
    "msvd-q1": (f"Offline dilution on MSVD, source-dense: {_DILUTION}.", lambda: [_arm("msvd", _Q1)]),
    "multi30k-q1": (
        f"Offline dilution on Multi30k, as many source tokens as text: {_DILUTION}.", lambda: [_arm("multi30k", _Q1)],
    ),
    "librispeech-q1": (f"Offline dilution on LibriSpeech utterances: {_DILUTION}.", lambda: [_arm("librispeech", _Q1)]),
    "long30-q1": (
        "Offline dilution on LibriSpeech joined to about 30 s, text-dense: one seed, γ→0 against γ of 0.3, 0.7, 1 and 1.5.",
        lambda: [_arm("librispeech-long30", (*_Q1, "1.5"), seeds=(0,))],
    ),
    "frontier-msvd": (
        f"Quality against lag on MSVD: {_FRONTIER}.", lambda: _frontier("msvd", (2, 5, 10, 15, 20), (4, 8), ("1.0", "wait-k=7")),
    ),
    "frontier-librispeech": (
        f"Quality against lag on LibriSpeech: {_FRONTIER}.",
        lambda: _frontier("librispeech", (5, 10, 20, 30, 40), (12, 25), ("0.7", "wait-k=20")),
    ),
    "frontier-multi30k": (
        f"Quality against lag on Multi30k: {_FRONTIER}.", lambda: _frontier("multi30k", (1, 3, 5, 7, 9), (2, 4), ("0.7", "wait-k=3")),
    ),
    "head-multi30k": (
        "Head starts on Multi30k: a whole-dial model that draws them, at heads of 2, 3 and 4 beside γ alone and wait-k, three seeds.",
        lambda: [_arm("multi30k", ("dial+wait-k+head",), Decode(mode="streaming", scale="segment", schedules=_HEADS), form="-causal")],
    ),
}  # fmt: skip
"""What each grid is about, and its arms."""


def grids() -> Iterator[str]:
    """Names of the grids."""
    return iter(_GRIDS)


def grid(name: str) -> Grid:
    """A grid: by name, or in a JSON file."""
    if name.endswith(".json"):
        return Grid.from_dict(read_json(Path(name), "a grid: an object with arms"), name)
    if name not in _GRIDS:
        raise ConfigError(f"no grid {name!r}; expected one of {', '.join(_GRIDS)}, or a .json file")
    about, arms = _GRIDS[name]
    return Grid(name=name, about=about, arms=tuple(arms()))
