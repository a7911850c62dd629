"""Named model shapes: the paper's three corpora, small ones for CPU, Whisper's decoder."""

from __future__ import annotations

from collections.abc import Iterator

from zendaya.errors import ConfigError
from zendaya.nn.config import DecoderConfig, Framing, ModelConfig


def _paper(source_dim: int, window_tokens: int, max_steps: int) -> ModelConfig:
    """The paper's shape (Sec. 5.1, Table 1): about 29 M parameters, 8k BPE."""
    rows = 2 * max_steps + 1
    decoder = DecoderConfig(vocab_size=8000, source_dim=source_dim, max_source=window_tokens, max_rows=rows)
    return ModelConfig(decoder=decoder, window_tokens=window_tokens, max_steps=max_steps)


def _small(dim: int, layers: int, heads: int, vocab_size: int, source_dim: int, window_tokens: int, max_steps: int) -> ModelConfig:
    """A small shape for CPU: pre-norm, feed-forward of twice the width."""
    decoder = DecoderConfig(
        vocab_size=vocab_size, source_dim=source_dim, max_source=window_tokens, max_rows=2 * max_steps + 1, dim=dim, layers=layers,
        heads=heads, head_dim=dim // heads, ffn_dim=2 * dim, norm="pre",
    )  # fmt: skip
    return ModelConfig(decoder=decoder, window_tokens=window_tokens, max_steps=max_steps, length_hidden=dim)


def _whisper(dim: int, layers: int, heads: int) -> ModelConfig:
    """English-only Whisper's decoder, which was trained for neither length head nor history."""
    framing = Framing(prompt=(50257, 50362), end=50256, previous=50360, suppress=(50257, 50360, 50362), suppress_first=(220, 50256))
    decoder = DecoderConfig.whisper(dim=dim, layers=layers, heads=heads, vocab_size=51864)
    return ModelConfig(decoder=decoder, window_tokens=1500, max_steps=224, length="none", history=False, framing=framing)


_PRESETS = {
    "charades-sta": lambda: _paper(512, 55, 20),
    "activitynet": lambda: _paper(500, 135, 40),
    "libriheavy": lambda: _paper(512, 100, 165),
    "tiny": lambda: _small(64, 2, 2, vocab_size=512, source_dim=16, window_tokens=24, max_steps=32),
    "small": lambda: _small(256, 4, 4, vocab_size=4000, source_dim=512, window_tokens=100, max_steps=100),
    "whisper-tiny.en": lambda: _whisper(384, 4, 6),
}


def presets() -> Iterator[str]:
    """Names of the presets."""
    return iter(_PRESETS)


def preset(name: str) -> ModelConfig:
    """The config of a named shape."""
    if name not in _PRESETS:
        raise ConfigError(f"no preset {name!r}: expected one of {', '.join(_PRESETS)}")
    return _PRESETS[name]()
