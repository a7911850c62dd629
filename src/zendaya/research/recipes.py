"""Recipes: one function a published run, each returning a whole config; `train` runs one by name."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
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
"""AdamW, warm-up to 2e-4 and cosine decay, at most 40 epochs (Sec. 5.1); the paper gives no warm-up length, batch or patience."""


def charades_sta() -> TrainConfig:
    """Charades-STA, CLIP B/32 at 3 frames a second, source-dense: γ* for the lean budget."""
    return _paper("charades-sta", "annotations/charades_sta", "openai-clip:openai/clip-vit-base-patch32,fps=3", 0.7, ("train", "test"))


def activitynet() -> TrainConfig:
    """ActivityNet Captions, C3D fc7 by PCA to 500."""
    return _paper("activitynet", "annotations/activitynet_captions", "c3d:sub_activitynet_v1-3.c3d.hdf5", 0.3, ("train", "val_1"))


def libriheavy() -> TrainConfig:
    """LibriHeavy, the paper's 6k utterances, Whisper-base block by block at about 3 tokens a second, text-dense."""
    config = _paper("libriheavy", "libriheavy", "whisper:openai/whisper-base.en,block_s=1,pool=15", 0.3, ("train", "valid"))
    return dataclasses.replace(config, corpus="libriheavy-6k", lower=True)


def msvd() -> TrainConfig:
    """MSVD on its published VGG-16 features, small: captions of short videos on a CPU."""
    return TrainConfig(
        name="msvd", corpus="msvd", folder="msvd", encoder="features:msvd_vgg16_pca512_3fps.npz,rate=3", schedule=PowerLaw(0.3),
        model=_small(dim=256, layers=2, source_dim=512, window_tokens=80, max_steps=40, dropout=0.2, vocab_size=3000), vocab_size=3000,
        lower=True,
        splits=("train", "val"), label_smoothing=0.1, source_noise=0.1,
        loop=LoopConfig(epochs=3, batch_tokens=3000, learning_rate=1e-3, warmup_steps=300, patience=3, weight_decay=0.05),
    )  # fmt: skip


def librispeech() -> TrainConfig:
    """LibriSpeech utterances on block-causal Whisper tiny.en features at 12.5 tokens a second, small, from scratch."""
    return TrainConfig(
        name="librispeech", corpus="librispeech", folder="librispeech", encoder="whisper:tiny.en,block_s=1,pool=4", schedule=PowerLaw(0.3),
        model=_small(
            dim=192, layers=2, source_dim=384, window_tokens=450, max_steps=200, dropout=0.1, vocab_size=1000, source_layers=2
        ), vocab_size=1000, lower=True, label_smoothing=0.1, source_noise=0.05, alignment=0.4,
        loop=LoopConfig(epochs=8, batch_tokens=2000, short_first=1, learning_rate=2e-3, warmup_steps=200, patience=5, weight_decay=0.05),
    )  # fmt: skip


def librispeech_long30() -> TrainConfig:
    """LibriSpeech joined to about 30 s, at 5 tokens a second and written in short pieces: more text than source, as in the paper."""
    config = librispeech()
    return dataclasses.replace(
        config, name="librispeech-long30", corpus="librispeech-long30", encoder="whisper:tiny.en,block_s=1,pool=10",
        model=_small(
            dim=192, layers=2, source_dim=384, window_tokens=180, max_steps=280, dropout=0.1, vocab_size=500, source_layers=2
        ), vocab_size=500, alignment_slots=3,
        loop=dataclasses.replace(config.loop, epochs=12),
    )  # fmt: skip


def multi30k() -> TrainConfig:
    """Multi30k English to German, BPE on both sides, the source read by causal layers of its own, small."""
    model = _small(
        dim=192, layers=2, source_dim=1, window_tokens=64, max_steps=80, dropout=0.1, vocab_size=3000, source_vocab=3000, source_layers=2
    )
    return TrainConfig(
        name="multi30k", corpus="multi30k", folder="multi30k", encoder="text", schedule=PowerLaw(0.7), model=model, vocab_size=3000,
        splits=("train", "val"), label_smoothing=0.1,
        loop=LoopConfig(epochs=4, batch_tokens=2500, learning_rate=2e-3, warmup_steps=250, patience=3, weight_decay=0.01),
    )  # fmt: skip


def adapt_tiny_en() -> AdaptRecipe:
    """Whisper tiny.en put on the dial: encoder in blocks of 1 s, decoder on horizons, low-rank adapters trained on LibriSpeech."""
    return AdaptRecipe()


Recipe = TrainConfig | AdaptRecipe

_RECIPES: dict[str, Callable[[], Recipe]] = {
    "charades-sta": charades_sta,
    "charades-sta-inf": lambda: inf(charades_sta()),
    "activitynet": activitynet,
    "activitynet-inf": lambda: inf(activitynet()),
    "libriheavy": libriheavy,
    "libriheavy-inf": lambda: inf(libriheavy()),
    "msvd": msvd,
    "msvd-causal": lambda: causal(msvd()),
    "librispeech": librispeech,
    "librispeech-causal": lambda: causal(librispeech(), paced=225),
    "librispeech-inf": lambda: inf(librispeech()),
    "librispeech-long30": librispeech_long30,
    "multi30k": multi30k,
    "multi30k-causal": lambda: causal(multi30k(), paced=32),
    "adapt-tiny.en": adapt_tiny_en,
}
"""The clips of MSVD and Multi30k have no neighbours in a stream, so those have no inf form."""


def recipes() -> Iterator[str]:
    """Names of the recipes."""
    return iter(_RECIPES)


def recipe(name: str) -> Recipe:
    """A recipe's config: by name, or in a JSON file, such as the recipe.json that every run leaves."""
    if name.endswith(".json"):
        return _from_file(Path(name))
    if name not in _RECIPES:
        raise ConfigError(f"no recipe {name!r}; expected one of {', '.join(_RECIPES)}, or a .json file")
    return _RECIPES[name]()


def _from_file(path: Path) -> Recipe:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{path}: not JSON; expected a recipe, such as the recipe.json of a run") from None
    fields = data.get("recipe", data) if isinstance(data, dict) else data
    if isinstance(fields, dict) and "adapt" in fields:
        return read_record(AdaptRecipe, fields, str(path))
    return TrainConfig.from_dict(fields, str(path))


def causal(config: TrainConfig, *, paced: int | None = None) -> TrainConfig:
    """The form of a recipe that streams clip by clip: each alone, its length predicted from what its first step may read.

    `paced` is for texts as long as their source: the head then predicts the pace, as the text of so many source tokens, and a schedule
    over F of them takes N̂ in proportion; how long a whole clip will be, its first token does not tell.
    """
    model = config.model if paced is None else dataclasses.replace(config.model, pace=True, window_tokens=paced)
    return dataclasses.replace(config, name=f"{config.name}-causal", form="causal", model=model)


def inf(config: TrainConfig) -> TrainConfig:
    """The streaming form of a recipe: after the window before it, its length predicted from what has arrived, at the scale W."""
    return dataclasses.replace(config, name=f"{config.name}-inf", form="inf", scale="window")


def train(
    recipe_or_config: str | Recipe, *, data: str | Path | None = None, out: str | Path,
    schedule: str | Schedule | ScheduleSampler | None = None,
    gamma: float | None = None, seed: int | None = None, **options: Any,
) -> TrainResult:  # fmt: skip
    """Train a recipe, by name or config, under its own schedule, another one, one γ, or `dial`, the whole dial in one model.

    `data` is the folder of the corpus; if not given, the recipe's folder under the environment variable ZENDAYA_DATA.
    Further options are those of `zendaya.training.train.train`.
    """
    config = configured(recipe_or_config, schedule=schedule, gamma=gamma, seed=seed)
    folder = data_folder(config, data)
    if isinstance(config, AdaptRecipe):
        return train_adapter(config, data=folder, out=out, **options)
    return run(config, data=folder, out=out, **options)


def configured(
    recipe_or_config: str | Recipe,
    *,
    schedule: str | Schedule | ScheduleSampler | None = None,
    gamma: float | None = None,
    head: int = 0,
    seed: int | None = None,
) -> Recipe:
    """A recipe with its schedule, or γ and head start, and its seed changed."""
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
    """Where the corpus of a recipe lies."""
    if data is not None:
        return Path(data)
    if root := os.environ.get("ZENDAYA_DATA"):
        return Path(root) / config.folder
    raise ConfigError(f"recipe {config.name} needs its corpus ({config.folder}): give its folder with --data, or set ZENDAYA_DATA")


def _paper(name: str, folder: str, encoder: str, gamma: float, splits: tuple[str, str]) -> TrainConfig:
    return TrainConfig(
        name=name, corpus=name, folder=folder, encoder=encoder, model=preset(name), schedule=PowerLaw(gamma), splits=splits, loop=PAPER,
    )  # fmt: skip


def _small(
    *, dim: int, layers: int, source_dim: int, window_tokens: int, max_steps: int, dropout: float, vocab_size: int, **decoder: Any
) -> ModelConfig:
    """A shape for CPU at a corpus's lengths: pre-norm, heads of 64, feed-forward of twice the width."""
    shape = DecoderConfig(
        vocab_size=vocab_size, source_dim=source_dim, max_source=window_tokens, max_rows=2 * max_steps + 1, dim=dim, layers=layers,
        heads=dim // 64, head_dim=64, ffn_dim=2 * dim, dropout=dropout, norm="pre", **decoder,
    )  # fmt: skip
    return ModelConfig(decoder=shape, window_tokens=window_tokens, max_steps=max_steps, length_hidden=dim)
