"""What a run reads: the features of its corpus, its tokenizers, and its examples."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Sequence
from functools import cache
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
        digests = f"expected digest {data_digest[:12]}, got {store.signature.data_digest[:12]}"
        raise ConfigError(f"{folder}: features of other data: {digests}; give another --store")
    traits = _traits(EncoderSpec.parse(encoder), config.corpus, data)
    if traits is not None and traits.name != store.signature.encoder:
        expected = f"the recipe's encoder ({config.encoder}) is {traits.name!r}"
        raise ConfigError(f"{folder}: features of encoder {store.signature.encoder!r}: {expected}; give another --store")
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
    num_source = {(entry.split, entry.id): entry.num_tokens for entry in store}
    before = {(after.split, after.id): clip for clip, after in reading.pairs} if config.form == "inf" else {}
    max_ids = config.model.max_steps - 1

    @cache
    def windows(clip: Clip | None) -> list[StoredWindow]:
        """One window per text; none where the source is not encoded or does not fit."""
        number = 0 if clip is None else num_source.get((clip.split, clip.id), 0)
        if clip is None or not 1 <= number <= config.model.decoder.max_source:
            return []
        texts = (tuple(tokenizer.encode(learned_text(text, config.lower))) for text in clip.references)
        return [StoredWindow(clip.split, clip.id, number, ids) for ids in texts]

    def history(clip: Clip) -> StoredWindow | None:
        found = windows(before.get((clip.split, clip.id)))
        return dataclasses.replace(found[0], ids=found[0].ids[:max_ids]) if found else None

    examples: dict[str, Sequence[TextExample]] = {}
    left_out: dict[str, int] = {}
    for split, name in zip((TRAIN, VALID), config.splits, strict=True):
        clips = [clip for clip in reading.usable if clip.split == name]
        pairs = ((window, history(clip)) for clip in clips for window in windows(clip) if 1 <= len(window.ids) <= max_ids)
        found = [TextExample(window, past) for window, past in pairs]
        if not found:
            raise CorpusError(
                f"{config.corpus}: no example of split {name!r} fits the recipe's model; check the token rate of the features"
            )
        left_out[split] = sum(len(clip.references) for clip in clips) - len(found)
        examples[split] = found[:limit]
    return examples, left_out


def _check_encoded(config: TrainConfig, reading: Reading, store: FeatureStore) -> None:
    encoded = {(entry.split, entry.id) for entry in store}
    wanted = [(clip.split, clip.id) for clip in reading.usable if clip.split in config.splits]
    if missing := [key for key in wanted if key not in encoded]:
        held = f"{len(wanted) - len(missing)} of the {len(wanted)} clips of {' and '.join(config.splits)}"
        raise StoreError(f"{store.path}: holds {held}: run zendaya encode without --limit or --split, or give another --store")


def length_ratio(examples: Sequence[TextExample]) -> float:
    """ρ = mean F / mean N, to three digits, as it is printed in the stride of a schedule."""
    source = sum(example.window.num_source for example in examples)
    return round(source / sum(len(example.window.ids) + 1 for example in examples), 3)
