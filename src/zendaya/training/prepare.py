"""What a run reads: the features of its corpus, its tokenizers, and its examples."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zendaya.data.corpora import registry as corpora
from zendaya.data.corpora.base import Reading
from zendaya.data.features.clips import complete_spec, open_clip_encoder
from zendaya.data.features.encode import encode_corpus
from zendaya.data.features.store import HEADER, FeatureStore
from zendaya.encoders.base import Traits
from zendaya.encoders.registry import EncoderSpec
from zendaya.errors import CheckpointError, ConfigError, CorpusError, MissingExtraError, SourceError, StoreError
from zendaya.files import write_atomically
from zendaya.nn.tokenizer import Tokenizer, learned_text
from zendaya.records import Clip
from zendaya.training.decoding import StoredWindow, TextExample
from zendaya.training.loop import TRAIN, VALID, Report

if TYPE_CHECKING:
    from zendaya.training.train import TrainConfig

SOURCE_TOKENIZER = "source_tokenizer.json"


def prepare_features(config: TrainConfig, data: Path, folder: Path, data_digest: str, report: Report | None = None) -> FeatureStore:
    """The feature store of the recipe's encoder, encoded first if it is missing or unfinished."""
    encoder = config.encoder
    if encoder == "text":
        encoder = f"text:{_source_tokenizer(config, data, folder)}"
    while int(os.environ.get("RANK", "0")) and not _finished(folder):
        time.sleep(0.2)  # the first process of torchrun encodes
    if not _finished(folder):
        encode_corpus(config.corpus, data, folder, encoder=encoder, report=report)
    store = FeatureStore.open(folder, corpus=config.corpus)
    if store.signature.data_digest != data_digest:
        raise ConfigError(
            f"{folder}: features of other data: expected digest {data_digest[:12]}, got {store.signature.data_digest[:12]}; "
            "give another --store"
        )
    traits = _traits(EncoderSpec.parse(encoder), config.corpus, data)
    if traits is not None and traits.name != store.signature.encoder:
        raise ConfigError(
            f"{folder}: features of encoder {store.signature.encoder!r}: the recipe's encoder ({config.encoder}) is {traits.name!r}; "
            "give another --store"
        )
    return store


def _finished(folder: Path) -> bool:
    try:
        return json.loads((folder / HEADER).read_bytes()).get("finished") is True
    except FileNotFoundError:
        return False


def _traits(spec: EncoderSpec, corpus: str, data: Path) -> Traits | None:
    """The traits of an encoder; None where its weights or packages are missing: the store may come from another machine."""
    folder = data if data.is_dir() else data.parent
    try:
        return open_clip_encoder(complete_spec(spec, folder, lambda: corpora.read(corpus, data).clips), folder).traits
    except (CheckpointError, MissingExtraError, SourceError):
        return None


def _source_tokenizer(config: TrainConfig, data: Path, folder: Path) -> Path:
    """The file of the source tokenizer beside the store, trained first if it is missing."""
    path = folder.parent / f"{folder.name}.{SOURCE_TOKENIZER}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sentences = [clip.source for clip in corpora.read(config.corpus, data).usable if clip.split == config.splits[0]]
        write_atomically(path, Tokenizer.train(sentences, config.vocab_size).to_json().encode())
    return path


def train_tokenizer(config: TrainConfig, clips: Iterable[Clip]) -> Tokenizer:
    """A tokenizer of the texts of the training split."""
    texts = [learned_text(text, config.lower) for clip in clips if clip.split == config.splits[0] for text in clip.references]
    if not texts:
        raise CorpusError(f"{config.corpus}: no clip has a text in split {config.splits[0]!r}")
    return Tokenizer.train(texts, config.vocab_size)


def make_examples(
    config: TrainConfig, reading: Reading, store: FeatureStore, tokenizer: Tokenizer, limit: int | None
) -> tuple[dict[str, Sequence[TextExample]], dict[str, int]]:
    """The examples of both splits, and per split how many were left out because their source or text does not fit the model."""
    _check_encoded(config, reading, store)
    maker = _ExampleMaker(config, reading, store, tokenizer)
    examples: dict[str, Sequence[TextExample]] = {}
    left_out: dict[str, int] = {}
    for split, name in zip((TRAIN, VALID), config.splits, strict=True):
        clips = [clip for clip in reading.usable if clip.split == name]
        found = [example for clip in clips for example in maker.examples(clip)]
        if not found:
            raise CorpusError(
                f"{config.corpus}: no example of split {name!r} fits the recipe's model; the features may have another token rate"
            )
        left_out[split] = sum(len(clip.references) for clip in clips) - len(found)
        examples[split] = found[:limit]
    return examples, left_out


def _check_encoded(config: TrainConfig, reading: Reading, store: FeatureStore) -> None:
    encoded = {(entry.split, entry.id) for entry in store}
    wanted = [(clip.split, clip.id) for clip in reading.usable if clip.split in config.splits]
    if missing := [key for key in wanted if key not in encoded]:
        raise StoreError(
            f"{store.path}: holds {len(wanted) - len(missing)} of the {len(wanted)} clips of {' and '.join(config.splits)}: "
            "encode the rest (zendaya encode, without --limit or --split), or give another --store"
        )


class _ExampleMaker:
    """Clips as examples: one per reference that fits the model."""

    def __init__(self, config: TrainConfig, reading: Reading, store: FeatureStore, tokenizer: Tokenizer) -> None:
        self._lower, self._tokenizer = config.lower, tokenizer
        self._max_source, self._max_ids = config.model.decoder.max_source, config.model.max_steps - 1
        self._num_source = {(entry.split, entry.id): entry.num_tokens for entry in store}
        self._before = {(after.split, after.id): clip for clip, after in reading.pairs} if config.form == "inf" else {}
        self._texts: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def examples(self, clip: Clip) -> list[TextExample]:
        num_source = self._num_source.get((clip.split, clip.id), 0)
        if not 1 <= num_source <= self._max_source:
            return []
        history = self._history(clip)
        return [
            TextExample(StoredWindow(clip.split, clip.id, num_source, ids), history)
            for ids in self._ids(clip)
            if 1 <= len(ids) <= self._max_ids
        ]

    def _history(self, clip: Clip) -> StoredWindow | None:
        """The clip before, in the stream, where it is encoded and fits."""
        before = self._before.get((clip.split, clip.id))
        num_source = 0 if before is None else self._num_source.get((before.split, before.id), 0)
        if before is None or not 1 <= num_source <= self._max_source:
            return None
        return StoredWindow(before.split, before.id, num_source, self._ids(before)[0][: self._max_ids])

    def _ids(self, clip: Clip) -> list[tuple[int, ...]]:
        key = (clip.split, clip.id)
        if key not in self._texts:
            self._texts[key] = [tuple(self._tokenizer.encode(learned_text(text, self._lower))) for text in clip.references]
        return self._texts[key]


def length_ratio(examples: Sequence[TextExample]) -> float:
    """ρ = mean F / mean N, to three digits, as it is printed in the stride of a schedule."""
    source = sum(example.window.num_source for example in examples)
    return round(source / sum(len(example.window.ids) + 1 for example in examples), 3)
