"""Published decoders put into ours: Whisper's weights, one for one, and Whisper adapted to the dial."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from zendaya.encoders.base import Encoder
from zendaya.encoders.registry import EncoderSpec
from zendaya.encoders.whisper import WhisperBlocks
from zendaya.errors import CheckpointError, ConfigError
from zendaya.nn.adapter import ADAPTER, Adapter
from zendaya.nn.checkpoint import WEIGHTS, read_run_record
from zendaya.nn.model import Model
from zendaya.nn.whisper import Precision, has_bfloat16, load_weights, use_bfloat16_linears
from zendaya.runtime.policies import Policy
from zendaya.schedule import Schedule

T = TypeVar("T")
TRAINED_GAMMA = 1.5
"""Largest γ of the training of a model whose run does not name another: the top of the `dial` schedule."""


@dataclass(frozen=True)
class Adapted:
    """A speech model for live use: the encoder that hears in blocks, the model that writes on the dial, what they were made from."""

    encoder: WhisperBlocks
    model: Model
    digest: str
    """SHA-256 of the adapter."""


def load_adapted(name: str | Path = "tiny.en-dial", *, precision: Precision = "auto", **hub: Any) -> Adapted:
    """Whisper adapted to the dial: one that is shipped with the library by its name, or the folder or file a training wrote."""
    if precision not in get_args(Precision):
        raise ConfigError(f"precision must be one of {', '.join(get_args(Precision))}: got {precision!r}")
    path = _adapter_path(name)
    adapter = Adapter.load(path)
    config = adapter.config
    encoder, model = adapter.build(load_weights(config.base, **hub), path)
    known = f"{config.base}+{path.stem if path.name != ADAPTER else path.parent.name}@{adapter.digest[:8]}"
    if precision == "bfloat16" or (precision == "auto" and has_bfloat16()):
        use_bfloat16_linears(encoder)
        known += " bfloat16"
    blocks = WhisperBlocks(encoder, known, block_s=config.block_s, revise_s=config.revise_s, ceiling=config.ceiling)
    return Adapted(blocks, model, adapter.digest)


def load_model(name: str | Path) -> Model:
    """The model of a checkpoint folder, of a hub id, or of an adapter: a folder that holds one, or a shipped name."""
    folder = Path(name)
    shipped = not folder.exists() and "/" not in str(name) and _shipped(name).is_file()
    return load_adapted(name).model if shipped or (folder / ADAPTER).is_file() else Model.from_pretrained(name)


def load_live(name: str | Path, encoder: str | None = None) -> tuple[Model, Encoder[Any, Any]]:
    """A model and the encoder that hears or sees for it: an adapter's own, the one named, or that of the training run it lies in."""
    folder = Path(name)
    shipped = not folder.exists() and "/" not in str(name)
    if encoder is None and (shipped or (folder / ADAPTER).is_file() or folder.suffix == ".safetensors"):
        adapted = load_adapted(name)
        return adapted.model, adapted.encoder
    spec = encoder or _trained_on(folder)
    parsed = EncoderSpec.parse(spec)
    if not parsed.reads_media:
        raise ConfigError(f"{name}: its encoder ({spec}) reads {parsed.modality}: expected one that reads audio or video, as whisper")
    model, opened = load_model(name), parsed.open()
    if model.config.decoder.source_dim != opened.traits.dim or model.config.decoder.source_vocab:
        reads = "ids" if model.config.decoder.source_vocab else f"{model.config.decoder.source_dim} features a token"
        raise ConfigError(f"{name} reads {reads}, {spec} gives {opened.traits.dim} features: they do not fit")
    return model, opened


def weights_path(name: str | Path) -> Path | None:
    """The file that a model's weights are read from: of an adapter or a checkpoint; None where the name is a hub id or of nothing here."""
    folder = Path(name).expanduser()
    shipped = [] if folder.exists() or "/" in str(name) else [_shipped(name)]
    places = [*shipped, folder / ADAPTER, folder / WEIGHTS, *([folder] if folder.suffix == ".safetensors" else [])]
    return next((path for path in places if path.is_file()), None)


def as_trained(policy: Schedule | Policy, checkpoint: str | Path) -> Schedule | Policy:
    """A schedule or policy with the defaults that a checkpoint's training run gives it, such as the stride of wait-k."""
    return policy.for_run(read_run_record(checkpoint).rho)


def gamma_warning(schedule: Schedule | Policy, checkpoint: str | Path) -> str | None:
    """One line for the user if a model was not trained for so large a γ, else None."""
    gamma, top = schedule.gamma_or_none, max(read_run_record(checkpoint).max_gamma or 0.0, TRAINED_GAMMA)
    if gamma is None or gamma <= top:
        return None
    return f"γ = {gamma:g} is beyond what {checkpoint} was trained for, {top:g} at most: expect worse text"


def _trained_on(folder: Path) -> str:
    """The encoder that the run a checkpoint lies in was trained with."""
    if (encoder := read_run_record(folder).encoder) is not None:
        return encoder
    raise ConfigError(f"{folder}: nothing says which encoder it was trained with: give --encoder, as whisper:tiny.en,block_s=1,pool=4")


def _shipped(name: str | Path) -> Path:
    return Path(str(importlib.resources.files("zendaya"))) / "shipped" / f"{name}.safetensors"


def _adapter_path(name: str | Path) -> Path:
    path = Path(name)
    if path.is_dir():
        path = path / ADAPTER
    elif path.suffix != ".safetensors":
        path = _shipped(name)
        if not path.is_file():
            shipped = ", ".join(sorted(file.stem for file in path.parent.glob("*.safetensors"))) or "none"
            raise CheckpointError(f"{name}: no adapter of that name is shipped (there are: {shipped}), and no such folder is here")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such adapter; expected a folder with {ADAPTER}, a .safetensors file, or a shipped name")
    return path
