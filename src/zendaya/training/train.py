"""Training: a corpus through stored features, under one schedule or the whole dial, to a checkpoint.

corpus → encoder (stored features) → batch → schedule as mask → decoder → loss → checkpoint.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import zendaya
from zendaya.data.corpora import registry as corpora
from zendaya.data.features.store import FeatureStore
from zendaya.errors import ConfigError
from zendaya.nn.checkpoint import RECIPE
from zendaya.nn.config import ModelConfig
from zendaya.nn.model import Model
from zendaya.nn.tokenizer import Tokenizer
from zendaya.records import read_record
from zendaya.training.decoding import DecodingTask, standardise
from zendaya.training.loop import TRAIN, LoopConfig, Report, TrainResult, run
from zendaya.training.prepare import length_ratio, make_examples, prepare_features, train_tokenizer
from zendaya.training.schedule_sampler import SCHEDULE_PARSERS, TrainingSchedule
from zendaya.training.state import begin


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run without its data; what a recipe returns."""

    name: str
    corpus: str
    folder: str  # folder of the corpus, under the folder of all data
    encoder: str  # as `zendaya encode` takes it; `text` also trains the tokenizer of the source
    model: ModelConfig
    schedule: TrainingSchedule
    form: Literal["fix", "causal", "inf"] = "fix"
    """fix: each clip alone, its length predicted from the whole clip (Algorithm 1). causal: from what step 1 may read.
    inf: each clip after the one before it in its stream, its length as in causal (Sec. 3.1)."""
    scale: Literal["segment", "window"] = "segment"
    vocab_size: int = 8000
    lower: bool = False  # learn lower-case text without punctuation, as captions are scored
    splits: tuple[str, str] = ("train", "valid")
    length_weight: float = 0.1
    label_smoothing: float = 0.0
    source_noise: float = 0.0  # share of source tokens set to zero in training
    alignment: float | None = None  # weight of each of the two alignment losses (alignment.py)
    alignment_slots: int = 1
    """Tokens that CTC may write per source token; more than one where texts are longer than sources."""
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        if self.form not in ("fix", "causal", "inf") or self.scale not in ("segment", "window"):
            got = f"{self.form!r} and {self.scale!r}"
            raise ConfigError(f"recipe {self.name}: form must be fix, causal or inf, and scale segment or window: got {got}")
        if self.alignment is not None and not 0 < self.alignment < float("inf"):
            raise ConfigError(f"recipe {self.name}: alignment must be a weight above 0, or None: got {self.alignment!r}")
        if self.alignment_slots < 1:
            raise ConfigError(f"recipe {self.name}: alignment_slots must be at least 1: got {self.alignment_slots!r}")
        # Form and schedule determine the length head: wait-k predicts no length, so it has none (Sec. 5.1).
        length: Literal["fix", "inf", "none"] = "none" if not self.schedule.trains_length else "fix" if self.form == "fix" else "inf"
        object.__setattr__(self, "model", dataclasses.replace(self.model, length=length, history=self.form == "inf"))

    @property
    def scale_tokens(self) -> int | None:
        """The schedule's source length: W at scale `window`; None for each clip's own, the paper's protocol."""
        return self.model.window_tokens if self.scale == "window" else None

    def with_schedule(self, schedule: TrainingSchedule) -> TrainConfig:
        """The same run under another schedule."""
        return dataclasses.replace(self, schedule=schedule)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON holds it, the schedule in its printed form."""
        return {**dataclasses.asdict(self), "model": self.model.to_dict(), "schedule": str(self.schedule)}

    @classmethod
    def from_dict(cls, data: object, where: str = RECIPE) -> TrainConfig:
        """The config that `to_dict` gave; an unknown, missing or ill-typed field is a ConfigError."""
        return read_record(cls, data, where, parsers=SCHEDULE_PARSERS)


def train(
    config: TrainConfig, *, data: str | Path, out: str | Path, store: str | Path | None = None, resume: bool = False,
    report: Report = lambda _: None, limit: int | None = None,
) -> TrainResult:  # fmt: skip
    """Run a recipe on the corpus in `data`; `out` gets best/ and last/ (checkpoints), history.jsonl, tensorboard/ and the run's state.

    `store` is the folder of the features, which runs with the same corpus and encoder share (default: `out`/features).
    `limit` takes the first examples only. With `resume`, a run that was stopped or killed goes on, to the same weights.
    """
    folder = Path(out)
    reading = corpora.read(config.corpus, data)
    features = prepare_features(config, Path(data), Path(store) if store is not None else folder / "features", reading.digest, report)
    tokenizer = train_tokenizer(config, reading.usable)
    examples, left_out = make_examples(config, reading, features, tokenizer, limit)
    rho = length_ratio(examples[TRAIN])
    model = _model(config, features, tokenizer)
    standardise(model, features, [example.window for example in examples[TRAIN]])
    signature = {
        "version": zendaya.__version__, "recipe": config.to_dict(), "schedule": str(config.schedule.for_run(rho)),
        "data_digest": reading.digest, "encoder": features.signature.encoder, "encoder_digest": features.signature.encoder_digest,
        "limit": limit, "examples": {split: len(each) for split, each in examples.items()}, "left_out": left_out, "rho": rho,
        "parameters": model.num_parameters,
    }  # fmt: skip
    begin(folder, signature, resume)
    return run(DecodingTask(model, features, examples, config, rho), config.loop, folder, resume=resume, report=report)


def _model(config: TrainConfig, store: FeatureStore, tokenizer: Tokenizer) -> Model:
    decoder = config.model.decoder
    if store.signature.dim != decoder.source_dim:
        raise ConfigError(f"{store.path}: tokens of {store.signature.dim} features: the recipe's model reads {decoder.source_dim}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.loop.seed)
        return Model(config.model, tokenizer)
