"""Training: a corpus through stored features, under a schedule or the whole dial, to a checkpoint.

corpus → encoder (stored features) → batch → schedule as mask → decoder → loss → checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import zendaya
from zendaya import corpora
from zendaya.atomic import write_atomically
from zendaya.encode import Progress as EncodeProgress
from zendaya.encode import encode_corpus
from zendaya.encoders import Traits
from zendaya.encoders.clips import Spec
from zendaya.encoders.store import HEADER, FeatureStore
from zendaya.errors import CheckpointError, ConfigError, CorpusError, MissingExtraError, SourceError, StoreError
from zendaya.model import Model, ModelConfig
from zendaya.records import Clip
from zendaya.schedule import Schedule, WaitK
from zendaya.text import Tokenizer, learned_text
from zendaya.training.decoding import DecodingTask, Example, TaskConfig, Window, standardise
from zendaya.training.dial import Dial, parse_training_schedule
from zendaya.training.loop import TRAIN, VALID, LoopConfig, Result, Shown, run
from zendaya.training.state import RECIPE, begin

SOURCE_TOKENIZER = "source_tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run but its data: what a recipe returns."""

    name: str
    corpus: str
    folder: str
    """Where the corpus lies under the folder of all data."""
    encoder: str
    """As `zendaya encode` takes it; `text` alone trains the tokenizer of the source too."""
    model: ModelConfig
    schedule: Schedule | Dial
    form: Literal["fix", "causal", "inf"] = "fix"
    """fix: each clip alone (Algorithm 1), its length from all of it. causal: alone, its length from what step 1 may read. inf: after the
    clip before it in its stream (Sec. 3.1), its length as in causal."""
    scale: Literal["segment", "window"] = "segment"
    vocab_size: int = 8000
    lower: bool = False
    """Learn lower-case text without punctuation, as captions are scored."""
    splits: tuple[str, str] = ("train", "valid")
    length_weight: float = 0.1
    label_smoothing: float = 0.0
    source_noise: float = 0.0
    alignment: float | None = None
    """Weight of the losses that align source and text (alignment.py); None: none."""
    alignment_slots: int = 1
    """How many tokens may be said at a source token."""
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        if self.form not in ("fix", "causal", "inf") or self.scale not in ("segment", "window"):
            raise ConfigError(f"recipe {self.name}: form is fix, causal or inf, scale segment or window: got {self.form!r}, {self.scale!r}")
        if self.alignment is not None and not 0 < self.alignment < float("inf"):
            raise ConfigError(f"recipe {self.name}: alignment is a weight above 0, or None: got {self.alignment!r}")
        if self.alignment_slots < 1:
            raise ConfigError(f"recipe {self.name}: alignment_slots is a whole number above 0: got {self.alignment_slots!r}")
        # What form and schedule determine is derived: wait-k predicts no length, so it has no head (Sec. 5.1).
        length: Literal["fix", "inf", "none"] = "none" if isinstance(self.schedule, WaitK) else "fix" if self.form == "fix" else "inf"
        object.__setattr__(self, "model", dataclasses.replace(self.model, length=length, history=self.form == "inf"))

    def with_schedule(self, schedule: Schedule | Dial) -> TrainConfig:
        """The same run under another schedule."""
        return dataclasses.replace(self, schedule=schedule)

    def to_dict(self) -> dict[str, Any]:
        return {
            field.name: value if isinstance(value := getattr(self, field.name), str | int | float | bool) else _plain(value)
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = RECIPE) -> TrainConfig:
        """The config that `to_dict` gave; an unknown, missing or ill-typed field is a ConfigError."""
        try:
            fields = dict(data)
            fields["model"] = ModelConfig.from_dict(fields["model"], where)
            fields["schedule"] = parse_training_schedule(fields["schedule"])
            fields["loop"] = LoopConfig(**{**fields.get("loop", {}), "betas": tuple(fields.get("loop", {}).get("betas", (0.9, 0.98)))})
            fields["splits"] = tuple(fields.get("splits", ("train", "valid")))
            return cls(**fields)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ConfigError(f"{where}: not a recipe of this version: {error}") from None


def train(
    config: TrainConfig, *, data: str | Path, out: str | Path, store: str | Path | None = None, resume: bool = False,
    report: Callable[[Shown], None] = lambda _: None, encoding: Callable[[EncodeProgress], None] | None = None, limit: int | None = None,
) -> Result:  # fmt: skip
    """Run a recipe on the corpus in `data`; `out` holds best/ and last/ (checkpoints), history.jsonl, tensorboard/ and the run's state.

    `store` is where features are kept, and found again by other runs of the same corpus and encoder (default: `out`/features);
    `limit` takes the first examples only. A run that was stopped or killed goes on with `resume`, to the same weights.
    """
    folder = Path(out)
    reading = corpora.read(config.corpus, data)
    features = prepare_features(config, Path(data), Path(store) if store is not None else folder / "features", reading.digest, encoding)
    tokenizer = _tokenizer(config, reading.usable)
    examples, left_out = _examples(config, reading, features, tokenizer, limit)
    stride = _stride(examples[TRAIN])
    schedule = config.schedule
    if isinstance(schedule, WaitK):
        schedule = schedule.at_stride(stride)
    model = _model(config, features, tokenizer)
    standardise(model, features, [example.window for example in examples[TRAIN]])
    signature = {
        "version": zendaya.__version__, "recipe": config.to_dict(), "schedule": str(schedule), "data_digest": reading.digest,
        "encoder": features.signature.encoder, "encoder_digest": features.signature.encoder_digest, "limit": limit,
        "examples": {split: len(each) for split, each in examples.items()}, "left_out": left_out, "rho": stride,
        "parameters": model.num_parameters,
    }  # fmt: skip
    begin(folder, signature, resume)
    task = DecodingTask(
        model, features, examples,
        TaskConfig(
            schedule=schedule, stride=stride, scale=config.model.window if config.scale == "window" else None,
            length_weight=config.length_weight, label_smoothing=config.label_smoothing, source_noise=config.source_noise,
            alignment=config.alignment, alignment_slots=config.alignment_slots,
        ),
    )  # fmt: skip
    return run(task, config.loop, folder, resume=resume, report=report)


def prepare_features(
    config: TrainConfig, data: Path, folder: Path, data_digest: str, report: Callable[[EncodeProgress], None] | None = None
) -> FeatureStore:
    """The store of the recipe's encoder, encoded now if it is not there."""
    encoder = config.encoder
    if encoder == "text":
        encoder = f"text:{_source_tokenizer(config, data, folder)}"
    while int(os.environ.get("RANK", "0")) and not _finished(folder):
        time.sleep(0.2)  # the first of torchrun's processes encodes
    if not _finished(folder):
        encode_corpus(config.corpus, data, folder, encoder=encoder, report=report)
    store = FeatureStore.open(folder, corpus=config.corpus)
    if store.signature.data_digest != data_digest:
        raise ConfigError(
            f"{folder}: features of other data (digest {store.signature.data_digest[:12]}, the corpus has {data_digest[:12]})"
        )
    traits = _traits(Spec.parse(encoder), config.corpus, data)
    if traits is not None and traits.name != store.signature.encoder:
        raise ConfigError(
            f"{folder}: features of encoder {store.signature.encoder!r}: the recipe's ({config.encoder}) is {traits.name!r}; "
            "give another --store"
        )
    return store


def _finished(folder: Path) -> bool:
    try:
        return json.loads((folder / HEADER).read_bytes()).get("finished") is True
    except FileNotFoundError:
        return False


def _traits(spec: Spec, corpus: str, data: Path) -> Traits | None:
    """What an encoder says of itself; None where it cannot be had here: a store may come from a machine that has its weights."""
    counted = spec.name != "features" or "dim" in dict(spec.settings)  # else clips are asked for it
    try:
        return spec.open(data if data.is_dir() else data.parent, () if counted else corpora.read(corpus, data).clips).traits
    except (CheckpointError, MissingExtraError, SourceError):
        return None


def _source_tokenizer(config: TrainConfig, data: Path, folder: Path) -> Path:
    """The file of the source tokenizer beside the store, trained if it is not there."""
    path = folder.parent / f"{folder.name}.{SOURCE_TOKENIZER}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sentences = [clip.source for clip in corpora.read(config.corpus, data).usable if clip.split == config.splits[0]]
        write_atomically(path, Tokenizer.train(sentences, config.vocab_size).to_json().encode())
    return path


def _tokenizer(config: TrainConfig, clips: Iterable[Clip]) -> Tokenizer:
    texts = [learned_text(text, config.lower) for clip in clips if clip.split == config.splits[0] for text in clip.references]
    if not texts:
        raise CorpusError(f"{config.corpus}: no clip with text in its split {config.splits[0]!r}")
    return Tokenizer.train(texts, config.vocab_size)


def _model(config: TrainConfig, store: FeatureStore, tokenizer: Tokenizer) -> Model:
    decoder = config.model.decoder
    if store.signature.dim != decoder.source_dim:
        raise ConfigError(f"{store.path}: tokens of {store.signature.dim} features: the recipe's model reads {decoder.source_dim}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.loop.seed)
        return Model(config.model, tokenizer)


def _examples(
    config: TrainConfig, reading: corpora.Reading, store: FeatureStore, tokenizer: Tokenizer, limit: int | None
) -> tuple[dict[str, Sequence[Example]], dict[str, int]]:
    """The examples of both splits, and how many were left out because their source or text does not fit the model."""
    before = {(after.split, after.id): clip for clip, after in reading.pairs} if config.form == "inf" else {}
    longest_source, longest_text = config.model.decoder.max_source, config.model.max_steps - 1
    lengths = {(entry.split, entry.id): entry.num_tokens for entry in store}
    wanted = [(clip.split, clip.id) for clip in reading.usable if clip.split in config.splits]
    if gone := [key for key in wanted if key not in lengths]:
        raise StoreError(
            f"{store.path}: holds {len(wanted) - len(gone)} of the {len(wanted)} clips of {' and '.join(config.splits)}: encode the rest "
            "(zendaya encode, without --limit or --split), or give another --store"
        )
    encoded: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def texts(clip: Clip) -> list[tuple[int, ...]]:
        key = (clip.split, clip.id)
        if key not in encoded:
            encoded[key] = [tuple(tokenizer.encode(learned_text(text, config.lower))) for text in clip.references]
        return encoded[key]

    examples: dict[str, Sequence[Example]] = {}
    left_out: dict[str, int] = {}
    for split, name in zip((TRAIN, VALID), config.splits, strict=True):
        found: list[Example] = []
        left_out[split] = 0
        for clip in reading.usable:
            if clip.split != name:
                continue
            key = (clip.split, clip.id)
            num_source = lengths.get(key, 0)
            previous = before.get(key)
            history = None
            if previous is not None and 0 < lengths.get((previous.split, previous.id), 0) <= longest_source:
                history = Window(previous.split, previous.id, lengths[previous.split, previous.id], texts(previous)[0][:longest_text])
            for ids in texts(clip):
                if 1 <= len(ids) <= longest_text and 1 <= num_source <= longest_source:
                    found.append(Example(Window(clip.split, clip.id, num_source, ids), history))
                else:
                    left_out[split] += 1
        if not found:
            raise CorpusError(f"{config.corpus}: no example in split {name!r} fits the recipe's model; its features may be of another rate")
        examples[split] = found[:limit]
    return examples, left_out


def _stride(examples: Sequence[Example]) -> float:
    """ρ = mean F / mean N, to three digits: a stride that can be said."""
    source = sum(example.window.num_source for example in examples)
    return round(source / sum(len(example.window.ids) + 1 for example in examples), 3)


def _plain(value: object) -> object:
    if isinstance(value, ModelConfig):
        return value.to_dict()
    if isinstance(value, Schedule | Dial):
        return str(value)
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
