"""Grids: recipes × training schedules × seeds, each checkpoint decoded under schedules and policies; one function a named grid."""

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
from zendaya.research.recipes import configured, recipe
from zendaya.runtime.policies import parse_policy
from zendaya.training.schedule_sampler import SCHEDULE_PARSERS, parse_training_schedule
from zendaya.training.train import TrainConfig

OWN = "own"
"""The decoding schedule that is the one a checkpoint was trained under."""
Mode = Literal["offline", "streaming"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large a corpus is, for costs that are estimated before it is read."""

    train_examples: int
    source_tokens: float
    """F of an example."""
    steps: float
    """N of an example, its end included."""
    decode_clips: int
    where: str
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        numbers = (self.train_examples, self.source_tokens, self.steps, self.decode_clips)
        if not all(0 < one < math.inf for one in numbers):
            raise ConfigError(f"sizes of a corpus must be numbers above 0: got {self}")


def _check_limit(limit: int | None, what: str, unit: str) -> None:
    if limit is not None and limit < 1:
        raise ConfigError(f"{what}: limit must be at least 1 {unit}: got {limit!r}")


@dataclass(frozen=True, kw_only=True)
class Decode:
    """How each checkpoint of an arm is decoded."""

    mode: Mode = "offline"
    schedules: tuple[str, ...] = (OWN,)
    """As `zendaya evaluate` takes them, or `own`; wait-k without a stride has that of the corpus."""
    split: str = "test"
    scale: Scale | None = None
    """Not given: segment offline, window (strictly causal) when streaming."""
    metrics: tuple[str, ...] | None = None
    normalise: Normalise = "english"
    limit: int | None = None

    def __post_init__(self) -> None:
        meant = [text if text == OWN else str(parse_policy(text)) for text in self.schedules]
        if not meant or len(set(meant)) < len(meant):
            raise ConfigError(f"a decode needs at least one schedule, each once: got {', '.join(self.schedules) or 'none'}")
        for name in self.metrics or ():
            if name not in METRICS:
                raise ConfigError(f"no metric is called {name!r}; there are {', '.join(METRICS)}")
        if self.metrics == ():
            raise ConfigError(f"give a decode at least one metric of {', '.join(METRICS)}, or leave metrics out for those of the corpus")
        _check_limit(self.limit, "a decode", "clip")

    @property
    def scale_of_mode(self) -> Scale:
        """The scale that is used."""
        return self.scale or ("segment" if self.mode == "offline" else "window")

    @property
    def streams(self) -> bool:
        """Whether consecutive clips are decoded in one session; at the scale of each segment, as the paper has it, each has its own."""
        return self.mode == "streaming" and self.scale_of_mode == "window"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One recipe under several training schedules and seeds, each checkpoint decoded in the same ways."""

    recipe: TrainConfig
    schedules: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    decodes: tuple[Decode, ...] = (Decode(),)
    limit: int | None = None
    """Train on the first examples only."""
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
                raise ConfigError(
                    f"{what}: trained on the whole dial ({config.schedule}) it has no schedule of its own: name those to decode"
                )

    def configs(self) -> Iterator[TrainConfig]:
        """The whole config of each training run."""
        for schedule in self.schedules:
            for seed in self.seeds:
                config = configured(self.recipe, schedule=parse_training_schedule(schedule), seed=seed)
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
        """Its runs with these seeds; the others may follow in the same folder."""
        unknown = set(seeds) - {seed for arm in self.arms for seed in arm.seeds}
        if unknown or not seeds:
            known = sorted({seed for arm in self.arms for seed in arm.seeds})
            raise ConfigError(
                f"grid {self.name} has the seeds {', '.join(map(str, known))}: got {', '.join(map(str, sorted(seeds))) or 'none'}"
            )
        arms = [(arm, tuple(seed for seed in arm.seeds if seed in seeds)) for arm in self.arms]
        return dataclasses.replace(self, arms=tuple(dataclasses.replace(arm, seeds=some) for arm, some in arms if some))

    def to_dict(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        for arm, plain in zip(self.arms, record["arms"], strict=True):
            plain["recipe"] = arm.recipe.to_dict()
        return dict(json.loads(json.dumps(record)))

    @classmethod
    def from_dict(cls, data: object, where: str) -> Grid:
        """The grid that `to_dict` gave, or one whose recipes are names; an unknown, missing or ill-typed field is a ConfigError."""
        if isinstance(data, Mapping):
            arms = data.get("arms")
            data = {"name": Path(where).stem, "about": "", **data}
            if isinstance(arms, list):
                data["arms"] = [_whole_arm(arm, f"{where}: arm {number}") for number, arm in enumerate(arms, start=1)]
        return read_record(cls, data, where, parsers=SCHEDULE_PARSERS)


def _whole_arm(arm: Any, where: str) -> Any:
    """An arm as `Grid.to_dict` writes it: with the whole recipe in place of its name, and schedules as texts."""
    if not isinstance(arm, Mapping):
        return arm
    fields = dict(arm)
    if isinstance(name := fields.get("recipe"), str):
        config = recipe(name)
        if not isinstance(config, TrainConfig):
            raise ConfigError(f"{where}: recipe {name!r} draws its own schedules, and cannot be part of a grid")
        fields["recipe"] = config.to_dict()
    if "loop" in fields and isinstance(fields.get("recipe"), Mapping):
        fields["recipe"] = {**fields["recipe"], "loop": {**fields["recipe"].get("loop", {}), **fields.pop("loop")}}
    if isinstance(fields.get("decodes"), list):
        fields["decodes"] = [_with_texts(decode) for decode in fields["decodes"]]
    return _with_texts(fields)


def _with_texts(fields: Any) -> Any:
    """Schedules as texts; a bare number stands for γ."""
    if not isinstance(fields, Mapping) or not isinstance(schedules := fields.get("schedules"), list):
        return fields
    return {**fields, "schedules": [str(one) if type(one) in (int, float) else one for one in schedules]}


# The paper's own (Sec. 5 and Appendix D).

GAMMAS_OFFLINE = ("0", "0.1", "0.2", "0.3", "0.4", "0.7", "1.0")
GAMMAS_STREAMING = ("0.2", "0.3", "0.4", "1.0", "1.5")
WAIT_K_STREAMING = tuple(f"wait-k={k}" for k in (5, 10, 15, 20, 25, 30, 40))
SEEDS = (0, 1, 2)

_CAPS = "F and N are the caps of the paper's Table 1, so an upper bound; examples as published"
_PAPER = {
    "charades-sta": (Sizes(train_examples=12408, source_tokens=55, steps=20, decode_clips=3720, where=_CAPS), "test"),
    "activitynet": (Sizes(train_examples=37421, source_tokens=135, steps=40, decode_clips=17031, where=_CAPS), "val_2"),
    "libriheavy": (Sizes(train_examples=6000, source_tokens=100, steps=165, decode_clips=500, where=_CAPS), "test"),
}
"""Validated on val_1, ActivityNet is decoded on val_2: other sentences, though of the same videos; its test texts are not published."""


def paper_offline() -> Grid:
    """The paper's fixed-window sweep: γ→0 and six γ, three corpora, three seeds, 63 runs."""
    arms = tuple(_paper_arm(name, "offline", GAMMAS_OFFLINE, SEEDS) for name in _PAPER)
    return Grid(name="paper-offline", about=_about(paper_offline), arms=arms)


def paper_streaming() -> Grid:
    """The paper's streaming sweep: five γ and seven k, three corpora, one run each, 36 runs."""
    arms = tuple(_paper_arm(name, "streaming", (*GAMMAS_STREAMING, *WAIT_K_STREAMING), (0,)) for name in _PAPER)
    return Grid(name="paper-streaming", about=_about(paper_streaming), arms=arms)


def paper() -> Grid:
    """The whole of the paper: 63 offline runs and 36 streaming ones."""
    return Grid(name="paper", about=_about(paper), arms=(*paper_offline().arms, *paper_streaming().arms))


def _paper_arm(name: str, mode: Mode, schedules: tuple[str, ...], seeds: tuple[int, ...]) -> Arm:
    sizes, split = _PAPER[name]
    metrics = ("bleu-lc", "meteor", *(("wer",) if name == "libriheavy" else ()))
    decode = Decode(mode=mode, split=split, metrics=metrics)
    return Arm(
        recipe=_recipe(name if mode == "offline" else f"{name}-inf"), schedules=schedules, seeds=seeds, decodes=(decode,), sizes=sizes
    )


# The paper's questions on corpora that a CPU can train on.

_COUNTED = "counted on the training split with the recipe's tokenizer"
_MSVD = Sizes(train_examples=48752, source_tokens=28.89, steps=8.88, decode_clips=670, where=_COUNTED)
_MULTI30K = Sizes(train_examples=29000, source_tokens=14.87, steps=17.16, decode_clips=1000, where=_COUNTED)
_LIBRISPEECH = Sizes(
    train_examples=4257, source_tokens=91.26, steps=37.64, decode_clips=741, where=f"{_COUNTED}, 12.5 source tokens a second"
)
_LONG30 = Sizes(train_examples=1208, source_tokens=129.14, steps=167.16, decode_clips=185, where=f"{_COUNTED}, 5 source tokens a second")
_Q1 = ("0", "0.3", "0.7", "1.0")


def msvd_q1() -> Grid:
    """Offline dilution on MSVD, source-dense: γ→0 against γ of 0.3, 0.7 and 1, three seeds."""
    return Grid(name="msvd-q1", about=_about(msvd_q1), arms=(Arm(recipe=_recipe("msvd"), schedules=_Q1, seeds=SEEDS, sizes=_MSVD),))


def multi30k_q1() -> Grid:
    """Offline dilution on Multi30k, as many source tokens as text: γ→0 against γ of 0.3, 0.7 and 1, three seeds."""
    decode = Decode(split="test_2016_flickr")
    arm = Arm(recipe=_recipe("multi30k"), schedules=_Q1, seeds=SEEDS, decodes=(decode,), sizes=_MULTI30K)
    return Grid(name="multi30k-q1", about=_about(multi30k_q1), arms=(arm,))


def librispeech_q1() -> Grid:
    """Offline dilution on LibriSpeech utterances: γ→0 against γ of 0.3, 0.7 and 1, three seeds."""
    arm = Arm(recipe=_recipe("librispeech"), schedules=_Q1, seeds=SEEDS, decodes=(Decode(metrics=("wer", "bleu-lc")),), sizes=_LIBRISPEECH)
    return Grid(name="librispeech-q1", about=_about(librispeech_q1), arms=(arm,))


def long30_q1() -> Grid:
    """Offline dilution on LibriSpeech joined to about 30 s, more text than source: γ→0 against γ of 0.3, 0.7, 1 and 1.5."""
    arm = Arm(recipe=_recipe("librispeech-long30"), schedules=(*_Q1, "1.5"), decodes=(Decode(metrics=("wer", "bleu-lc")),), sizes=_LONG30)
    return Grid(name="long30-q1", about=_about(long30_q1), arms=(arm,))


def frontier_msvd() -> Grid:
    """Quality against lag on MSVD: a whole-dial model at every γ and k, LocalAgreement, AlignAtt, and a pair trained alone."""
    return _frontier(frontier_msvd, "msvd", _MSVD, (2, 5, 10, 15, 20), rivals=(4, 8), pair=("1.0", "wait-k=7"))


def frontier_librispeech() -> Grid:
    """Quality against lag on LibriSpeech: a whole-dial model at every γ and k, LocalAgreement, AlignAtt, and a pair trained alone."""
    pair = ("0.7", "wait-k=20")
    return _frontier(
        frontier_librispeech, "librispeech", _LIBRISPEECH, (5, 10, 20, 30, 40), rivals=(12, 25), pair=pair, metrics=("wer", "bleu-lc")
    )


def frontier_multi30k() -> Grid:
    """Quality against lag on Multi30k: a whole-dial model at every γ and k, LocalAgreement, AlignAtt, and a pair trained alone."""
    pair = ("0.7", "wait-k=3")
    return _frontier(frontier_multi30k, "multi30k", _MULTI30K, (1, 3, 5, 7, 9), rivals=(2, 4), pair=pair, split="test_2016_flickr")


def head_multi30k() -> Grid:
    """Head starts on Multi30k: a whole-dial model that draws them, at heads of 2, 3 and 4 beside γ alone and wait-k, three seeds."""
    settings = ("0.7", "1.0", "wait-k=3", "wait-k=5", "wait-k=7", *heads(("1", "1.3", "1.6"), (2, 3, 4)))
    decode = Decode(mode="streaming", scale="segment", schedules=settings, split="test_2016_flickr")
    arm = Arm(recipe=_recipe("multi30k-causal"), schedules=("dial+wait-k+head",), seeds=SEEDS, decodes=(decode,), sizes=_MULTI30K)
    return Grid(name="head-multi30k", about=_about(head_multi30k), arms=(arm,))


def heads(gammas: Collection[str], numbers: Collection[int]) -> tuple[str, ...]:
    """Every γ with every head start.

    >>> heads(("1", "1.3"), (2,))
    ('gamma=1,head=2', 'gamma=1.3,head=2')
    """
    return tuple(f"gamma={gamma},head={number}" for number in numbers for gamma in gammas)


def _frontier(
    grid: Callable[[], Grid], name: str, sizes: Sizes, offsets: tuple[int, ...], *, rivals: tuple[int, ...], pair: tuple[str, str],
    split: str = "test", metrics: tuple[str, ...] | None = None,
) -> Grid:  # fmt: skip
    """Decoded at each clip's own scale, as the paper's frontiers are, by models whose length head waits for no more than their first step;
    policies ask after so many source tokens as `rivals` says."""
    recipe = _recipe(f"{name}-causal")
    policies = [f"{policy}={count}" for policy in ("local-agreement", "alignatt") for count in rivals]
    settings = (*GAMMAS_STREAMING, "0.7", *(f"wait-k={k}" for k in offsets), *policies)
    whole = Decode(mode="streaming", scale="segment", schedules=settings, split=split, metrics=metrics)
    offline = Decode(schedules=_Q1, split=split, metrics=metrics)
    own = Decode(mode="streaming", scale="segment", split=split, metrics=metrics)
    arms = (
        Arm(recipe=recipe, schedules=("dial+wait-k",), seeds=SEEDS, decodes=(whole, offline), sizes=sizes),
        Arm(recipe=recipe, schedules=pair, seeds=SEEDS, decodes=(own,), sizes=sizes),
    )
    return Grid(name=f"frontier-{name}", about=_about(grid), arms=arms)


def _recipe(name: str) -> TrainConfig:
    config = recipe(name)
    assert isinstance(config, TrainConfig)
    return config


def _about(function: Callable[[], Grid]) -> str:
    return (function.__doc__ or "").strip()


_GRIDS: dict[str, Callable[[], Grid]] = {
    "paper": paper,
    "paper-offline": paper_offline,
    "paper-streaming": paper_streaming,
    "msvd-q1": msvd_q1,
    "multi30k-q1": multi30k_q1,
    "librispeech-q1": librispeech_q1,
    "long30-q1": long30_q1,
    "frontier-msvd": frontier_msvd,
    "frontier-librispeech": frontier_librispeech,
    "frontier-multi30k": frontier_multi30k,
    "head-multi30k": head_multi30k,
}


def grids() -> Iterator[str]:
    """Names of the grids."""
    return iter(_GRIDS)


def grid(name: str) -> Grid:
    """A grid: by name, or in a JSON file."""
    if not name.endswith(".json"):
        if name not in _GRIDS:
            raise ConfigError(f"no grid {name!r}; expected one of {', '.join(_GRIDS)}, or a .json file")
        return _GRIDS[name]()
    try:
        data = json.loads(Path(name).read_bytes())
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{name}: not JSON ({error}); expected a grid: an object with arms") from None
    return Grid.from_dict(data, name)
