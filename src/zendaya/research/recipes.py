"""Recipes: the whole config of each published run; `train` runs one by name."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from zendaya.errors import ConfigError
from zendaya.nn.config import DecoderConfig, ModelConfig
from zendaya.nn.presets import preset
from zendaya.records import read_record
from zendaya.schedule import PowerLaw, Schedule
from zendaya.training.adapt import AdaptRecipe, train_adapter
from zendaya.training.loop import LoopConfig, TrainResult
from zendaya.training.schedule_sampler import ScheduleSampler, parse_training_schedule
from zendaya.training.train import TrainConfig
from zendaya.training.train import train as run

PAPER = LoopConfig(epochs=40, learning_rate=2e-4, warmup_steps=1000, patience=5, batch_tokens=16384)
"""AdamW, warm-up to 2e-4, cosine decay, at most 40 epochs (Sec. 5.1); warm-up length, batch and patience are not in the paper."""


def _paper(name: str, folder: str, encoder: str, gamma: float, splits: tuple[str, str], **changes: Any) -> TrainConfig:
    config = TrainConfig(
        name=name, corpus=name, folder=folder, encoder=encoder, model=preset(name), schedule=PowerLaw(gamma), splits=splits, loop=PAPER,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


def _small(name: str, encoder: str, gamma: float, model: ModelConfig, **config: Any) -> TrainConfig:
    return TrainConfig(
        name=name, corpus=name, folder=name, encoder=encoder, schedule=PowerLaw(gamma), model=model, vocab_size=model.decoder.vocab_size,
        label_smoothing=0.1, **config,
    )  # fmt: skip


def _small_model(*, dim: int, window_tokens: int, max_steps: int, **decoder: Any) -> ModelConfig:
    """A shape for CPU at a corpus's lengths: pre-norm, heads of 64, feed-forward of twice the width."""
    shape = DecoderConfig(
        max_source=window_tokens, max_rows=2 * max_steps + 1, dim=dim, layers=2, heads=dim // 64, head_dim=64, ffn_dim=2 * dim, norm="pre",
        **decoder,
    )  # fmt: skip
    return ModelConfig(decoder=shape, window_tokens=window_tokens, max_steps=max_steps, length_hidden=dim)


def causal(config: TrainConfig, *, pace_tokens: int | None = None) -> TrainConfig:
    """The causal form of a recipe: each clip alone, its length predicted from what its first step may read.

    `pace_tokens` is for texts as long as their source, whose length the first token does not tell. The length head then predicts the
    pace: the steps per `pace_tokens` source tokens. N̂ is in proportion to F.
    """
    model = config.model if pace_tokens is None else dataclasses.replace(config.model, pace=True, window_tokens=pace_tokens)
    return dataclasses.replace(config, name=f"{config.name}-causal", form="causal", model=model)


def inf(config: TrainConfig) -> TrainConfig:
    """The streaming form of a recipe: each window after the one before it, its length predicted from what has arrived, at scale W."""
    return dataclasses.replace(config, name=f"{config.name}-inf", form="inf", scale="window")


Recipe = TrainConfig | AdaptRecipe


@cache
def _recipes() -> dict[str, Recipe]:
    """Every recipe by name: the paper's corpora, then small decoders for a CPU, then Whisper tiny.en on the dial."""
    # CLIP B/32 at 3 frames per second, source-dense: γ* for the lean budget.
    charades = _paper("charades-sta", "annotations/charades_sta", "openai-clip:openai/clip-vit-base-patch32,fps=3", 0.7, ("train", "test"))
    # C3D fc7 by PCA to 500.
    activitynet = _paper("activitynet", "annotations/activitynet_captions", "c3d:sub_activitynet_v1-3.c3d.hdf5", 0.3, ("train", "val_1"))
    # The paper's 6k utterances, block-causal Whisper-base at about 3 tokens per second, text-dense.
    libriheavy = _paper(
        "libriheavy", "libriheavy", "whisper:openai/whisper-base.en,block_s=1,pool=15", 0.3, ("train", "valid"),
        corpus="libriheavy-6k", lower=True,
    )  # fmt: skip
    # Captions of short videos, on the published VGG-16 features.
    msvd = _small(
        "msvd", "features:msvd_vgg16_pca512_3fps.npz,rate=3", 0.3, lower=True, splits=("train", "val"), source_noise=0.1,
        model=_small_model(dim=256, source_dim=512, window_tokens=80, max_steps=40, dropout=0.2, vocab_size=3000),
        loop=LoopConfig(epochs=3, batch_tokens=3000, learning_rate=1e-3, warmup_steps=300, patience=3, weight_decay=0.05),
    )  # fmt: skip
    # Utterances from scratch, on block-causal Whisper tiny.en features at 12.5 tokens per second.
    librispeech = _small(
        "librispeech", "whisper:tiny.en,block_s=1,pool=4", 0.3, lower=True, source_noise=0.05, alignment=0.4,
        model=_small_model(dim=192, source_dim=384, window_tokens=450, max_steps=200, dropout=0.1, vocab_size=1000, source_layers=2),
        loop=LoopConfig(epochs=8, batch_tokens=2000, short_first=1, learning_rate=2e-3, warmup_steps=200, patience=5, weight_decay=0.05),
    )  # fmt: skip
    # Utterances joined to about 30 s, 5 source tokens per second, a small vocabulary: text-dense, as in the paper.
    long30 = dataclasses.replace(
        librispeech, name="librispeech-long30", corpus="librispeech-long30", encoder="whisper:tiny.en,block_s=1,pool=10",
        model=_small_model(dim=192, source_dim=384, window_tokens=180, max_steps=280, dropout=0.1, vocab_size=500, source_layers=2),
        vocab_size=500, alignment_slots=3, loop=dataclasses.replace(librispeech.loop, epochs=12),
    )  # fmt: skip
    # English to German, BPE on both sides, causal source layers.
    translator = _small_model(
        dim=192, source_dim=1, window_tokens=64, max_steps=80, dropout=0.1, vocab_size=3000, source_vocab=3000, source_layers=2
    )
    loop = LoopConfig(epochs=4, batch_tokens=2500, learning_rate=2e-3, warmup_steps=250, patience=3, weight_decay=0.01)
    multi30k = _small("multi30k", "text", 0.7, translator, splits=("train", "val"), loop=loop)
    # MSVD and Multi30k have no inf form: their clips are not neighbours in a stream.
    every: tuple[Recipe, ...] = (
        charades, inf(charades), activitynet, inf(activitynet), libriheavy, inf(libriheavy), msvd, causal(msvd),
        librispeech, causal(librispeech, pace_tokens=225), inf(librispeech), long30, multi30k, causal(multi30k, pace_tokens=32),
        AdaptRecipe(),
    )  # fmt: skip
    return {config.name: config for config in every}


def recipes() -> Iterator[str]:
    """Names of the recipes."""
    return iter(_recipes())


def recipe(name: str) -> Recipe:
    """A recipe's config: by name, or in a JSON file, such as the recipe.json of a run."""
    if not name.endswith(".json"):
        if name not in _recipes():
            raise ConfigError(f"no recipe {name!r}; expected one of {', '.join(_recipes())}, or a .json file")
        return _recipes()[name]
    data = read_json(Path(name), "a recipe, such as the recipe.json of a run")
    fields = data.get("recipe", data) if isinstance(data, dict) else data
    if isinstance(fields, dict) and "adapt" in fields:
        return read_record(AdaptRecipe, fields, name)
    return TrainConfig.from_dict(fields, name)


def read_json(path: Path, expected: str) -> Any:
    """The content of a JSON file that a user names."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); expected {expected}") from None


def train(
    recipe_or_config: str | Recipe, *, data: str | Path | None = None, out: str | Path,
    schedule: str | Schedule | ScheduleSampler | None = None,
    gamma: float | None = None, seed: int | None = None, **options: Any,
) -> TrainResult:  # fmt: skip
    """Train a recipe, by name or config, under its own schedule, another schedule, one γ, or the whole dial (`dial`).

    `data` is the folder of the corpus (default: the recipe's folder in $ZENDAYA_DATA). `options` are those of
    `zendaya.training.train.train`.
    """
    config = configured(recipe_or_config, schedule=schedule, gamma=gamma, seed=seed)
    folder = data_folder(config, data)
    if isinstance(config, AdaptRecipe):
        return train_adapter(config, data=folder, out=out, **options)
    return run(config, data=folder, out=out, **options)


def configured(
    recipe_or_config: str | Recipe, *, schedule: str | Schedule | ScheduleSampler | None = None, gamma: float | None = None,
    head: int = 0, seed: int | None = None,
) -> Recipe:  # fmt: skip
    """A recipe with another schedule, γ (and head start) or seed."""
    config = recipe(recipe_or_config) if isinstance(recipe_or_config, str) else recipe_or_config
    if schedule is not None and gamma is not None:
        raise ConfigError("give a schedule or gamma, one of the two")
    if head and gamma is None:
        raise ConfigError(f"a head start goes with gamma: give both, or name a schedule, as gamma=1,head={head}")
    if gamma is not None:
        schedule = PowerLaw(gamma, head=head)
    if isinstance(schedule, str):
        schedule = parse_training_schedule(schedule)
    if schedule is not None:
        if isinstance(config, AdaptRecipe):
            raise ConfigError(f"recipe {config.name} draws its own schedules, over the whole dial: give neither --schedule nor --gamma")
        config = config.with_schedule(schedule)
    if seed is not None:
        config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, seed=seed))
    return config


def data_folder(config: Recipe, data: str | Path | None) -> Path:
    """The folder of a recipe's corpus."""
    if data is not None:
        return Path(data)
    if root := os.environ.get("ZENDAYA_DATA"):
        return Path(root) / config.folder
    raise ConfigError(f"recipe {config.name} needs its corpus ({config.folder}): give its folder with --data, or set ZENDAYA_DATA")
