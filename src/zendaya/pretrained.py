"""Published decoders put into ours: Whisper's weights, one for one, and Whisper adapted to the dial."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from torch import Tensor

from zendaya.adapter import ADAPTER, Adapter, check_base
from zendaya.decoder import DecoderConfig
from zendaya.encoders import Encoder
from zendaya.encoders.clips import Pictures, Sounds, Spec
from zendaya.encoders.whisper import Precision, WhisperWeights, halve_products, has_bfloat16, load_encoder, load_weights
from zendaya.encoders.whisper_stream import WhisperBlocks
from zendaya.errors import CheckpointError, ConfigError
from zendaya.model import Model, ModelConfig
from zendaya.schedule import WaitK
from zendaya.text import Framing, Tokenizer

T = TypeVar("T")
RECIPE = "recipe.json"
"""What a training run leaves beside its checkpoints (`training.state`, which stands above)."""

LOOP_TOKENS = 8
"""A phrase said again and again for so many tokens is a loop, which Whisper is known to fall into; people say no such thing."""

# Our module names and transformers'. The names of a layer's parts come after these; `weight` and `bias` are the same.
_LAYER = {
    "self_attention.query": "self_attn.q_proj",
    "self_attention.key": "self_attn.k_proj",
    "self_attention.value": "self_attn.v_proj",
    "self_attention.out": "self_attn.out_proj",
    "around_self.norm": "self_attn_layer_norm",
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.key": "encoder_attn.k_proj",
    "cross_attention.value": "encoder_attn.v_proj",
    "cross_attention.out": "encoder_attn.out_proj",
    "around_cross.norm": "encoder_attn_layer_norm",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
    "around_feed_forward.norm": "final_layer_norm",
}


def whisper_decoder(weights: WhisperWeights, *, language: str = "en") -> Model:
    """Whisper's decoder as a Model: at γ = 0 it is Whisper, and the dial can be turned (it was not trained for that)."""
    config = weights.config
    tokenizer = Tokenizer.from_json(weights.tokenizer_json)
    decoder = DecoderConfig.whisper(
        dim=config.d_model, layers=config.decoder_layers, heads=config.decoder_attention_heads, vocab_size=config.vocab_size,
        ffn_dim=config.decoder_ffn_dim, max_rows=config.max_target_positions, max_source=config.max_source_positions,
    )  # fmt: skip
    framing = _framing(tokenizer, weights, language)
    steps = min(224, decoder.max_rows - len(framing.prompt) + 1)
    whole = ModelConfig(decoder=decoder, window=decoder.max_source, max_steps=steps, length="none", history=False, framing=framing)
    model = Model(whole, tokenizer)
    model.decoder.load_state_dict(_rename(weights.state, config.decoder_layers))
    model.decoder.lay_out_for_steps()
    model.alignment_heads = weights.alignment_heads
    return model.eval()


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
    weights = load_weights(config.base, **hub)
    check_base(adapter, weights, path)
    encoder, base = load_encoder(weights), whisper_decoder(weights)
    model = Model(dataclasses.replace(config.model, loop_tokens=config.model.loop_tokens or LOOP_TOKENS), base.tokenizer)
    model.decoder.load_state_dict(base.decoder.state_dict())
    model.alignment_heads = base.alignment_heads
    adapter.merge(encoder, model)
    model.decoder.lay_out_for_steps()
    known = f"{config.base}+{path.stem if path.name != ADAPTER else path.parent.name}@{adapter.digest[:8]}"
    if precision == "bfloat16" or (precision == "auto" and has_bfloat16()):
        halve_products(encoder)
        known += " bfloat16"
    return Adapted(WhisperBlocks(encoder, known, block_s=config.block_s, ceiling=config.ceiling), model.eval(), adapter.digest)


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
    parsed = Spec.parse(spec)
    if parsed.name not in ("whisper", "efficientnet", "clip"):
        raise ConfigError(f"{name}: its encoder ({spec}) takes no recording: expected one that hears or sees (whisper, efficientnet, clip)")
    model, opened = load_model(name), parsed.open(Path())
    assert isinstance(opened, Sounds | Pictures), opened
    if model.config.decoder.source_dim != opened.traits.dim or model.config.decoder.source_vocab:
        reads = "ids" if model.config.decoder.source_vocab else f"{model.config.decoder.source_dim} features a token"
        raise ConfigError(f"{name} reads {reads}, {spec} gives {opened.traits.dim} features: they do not fit")
    return model, opened.encoder


def as_trained(policy: T, checkpoint: str | Path) -> T | WaitK:
    """What a policy is for a checkpoint: a wait-k that says no stride has that of the corpus its run learned, 1 where it lies in no run."""
    if not isinstance(policy, WaitK):
        return policy
    return policy.at_stride(_of_run(Path(checkpoint).expanduser(), lambda run: float(run["rho"])))


def _of_run(folder: Path, look: Callable[[dict[str, Any]], T]) -> T | None:
    """What the record of the run says that a checkpoint lies in, if it lies in one."""
    for path in (folder / RECIPE, folder.resolve().parent / RECIPE):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return look(json.loads(path.read_bytes()))
    return None


def _trained_on(folder: Path) -> str:
    """The encoder that the run a checkpoint lies in was trained with."""
    if (encoder := _of_run(folder, lambda run: str(run["recipe"]["encoder"]))) is not None:
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


def _rename(state: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    theirs = {
        "tokens.weight": "embed_tokens.weight",
        "positions.weight": "embed_positions.weight",
        "norm.weight": "layer_norm.weight",
        "norm.bias": "layer_norm.bias",
    }
    for index in range(num_layers):
        for ours, name in _LAYER.items():
            for part in ("weight", "bias"):
                if (ours.endswith(".key"), part) != (True, "bias"):
                    theirs[f"layers.{index}.{ours}.{part}"] = f"layers.{index}.{name}.{part}"
    decoder = {key.removeprefix("model.decoder."): value for key, value in state.items() if key.startswith("model.decoder.")}
    if left := decoder.keys() ^ set(theirs.values()):
        raise CheckpointError(f"not the weights of a Whisper decoder of {num_layers} layers: {sorted(left)[0]} does not fit")
    return {ours: decoder[name] for ours, name in theirs.items()}


def _framing(tokenizer: Tokenizer, weights: WhisperWeights, language: str) -> Framing:
    framing = tokenizer.framing()
    prompt = framing.prompt
    if weights.config.vocab_size >= 51865:  # multilingual: language and task stand between the start and <|notimestamps|>
        middle = tokenizer.ids(f"<|{language}|>", "<|transcribe|>")
        if middle is None:
            raise CheckpointError(f"this Whisper does not know the language {language!r}")
        prompt = (prompt[0], *middle, prompt[1])
    suppress = tuple(dict.fromkeys((*framing.suppress, *weights.suppress)))
    return dataclasses.replace(framing, prompt=prompt, suppress=suppress, suppress_first=weights.suppress_first)
