"""What a model is but its weights: the frozen records that checkpoints hold. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from zendaya.errors import ConfigError
from zendaya.records import check_record

MAX_TOKENS = 2**22
"""Largest vocabulary, window or text of a config: far above any published decoder's. A file that claims more is damaged."""
MAX_WIDTH = 2**16
"""Largest width of a layer or of a source token."""
MAX_LAYERS = 1024


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder; the defaults are the paper's (Sec. 5.1), `whisper` gives the shape of Whisper's."""

    vocab_size: int
    source_dim: int
    max_source: int
    """Longest window, in source tokens."""
    max_rows: int
    """Longest text, in rows: history, prompt and steps together."""
    dim: int = 768
    layers: int = 4
    heads: int = 8
    head_dim: int = 64
    ffn_dim: int = 1536
    dropout: float = 0.1
    activation: Literal["gelu", "relu"] = "gelu"
    norm: Literal["pre", "post"] = "post"
    embed_source: bool = True
    """Project source features to `dim` and add learned positions. Whisper's encoder does both itself: off, features are read as given."""
    source_vocab: int = 0
    """Above 0, a source token is an id below this number, as the text encoder gives; its vector is learned."""
    source_layers: int = 0
    """Self-attention layers over the source tokens; causal, so that no token depends on a later one."""

    def __post_init__(self) -> None:
        tokens, width, layers = (1, MAX_TOKENS), (1, MAX_WIDTH), (1, MAX_LAYERS)
        check_record(
            self, "decoder config", vocab_size=tokens, max_source=tokens, max_rows=tokens, source_vocab=(0, MAX_TOKENS), source_dim=width,
            dim=width, head_dim=width, ffn_dim=width, heads=layers, layers=layers, source_layers=(0, MAX_LAYERS), dropout=(0, 1),
        )  # fmt: skip
        if self.source_vocab and (self.source_dim != 1 or not self.embed_source):
            raise ConfigError(
                f"decoder config: source_vocab needs source_dim=1 and embed_source=True: got {self.source_dim} and {self.embed_source}"
            )
        if self.dropout == 1:
            raise ConfigError("decoder config: dropout: expected a number below 1: got 1")
        if not self.embed_source and self.source_dim != self.dim:
            raise ConfigError(
                f"decoder config: without embed_source, source_dim and dim must be equal: got {self.source_dim} and {self.dim}"
            )

    @classmethod
    def whisper(
        cls, *, dim: int, layers: int, heads: int, vocab_size: int, ffn_dim: int | None = None, max_rows: int = 448, max_source: int = 1500
    ) -> DecoderConfig:
        """Whisper's decoder: pre-norm, biases, GELU, learned positions, tied output; 448 text rows over 1,500 source tokens."""
        return cls(
            vocab_size=vocab_size, source_dim=dim, max_source=max_source, max_rows=max_rows, dim=dim, layers=layers, heads=heads,
            head_dim=dim // heads, ffn_dim=ffn_dim or 4 * dim, dropout=0.0, norm="pre", embed_source=False,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Framing:
    """The special ids around a text."""

    prompt: tuple[int, ...] = (1,)
    """Stands for y_0: its last id predicts step 1."""
    end: int = 2
    """Closes a text."""
    previous: int = 3
    """Opens a history."""
    suppress: tuple[int, ...] = (0, 1, 3)
    """Never written."""
    suppress_first: tuple[int, ...] = ()
    """Not written at step 1."""

    def __post_init__(self) -> None:
        check_record(self, "framing")
        if not self.prompt:
            raise ConfigError("framing: prompt: expected at least one id, which predicts step 1: got none")

    @property
    def ids(self) -> tuple[int, ...]:
        """Every id of the framing."""
        return (*self.prompt, self.end, self.previous, *self.suppress, *self.suppress_first)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model but its weights and its tokenizer."""

    decoder: DecoderConfig
    window_tokens: int
    """W: source tokens per window, the live scale of the schedule."""
    max_steps: int
    """N_max: the longest decode of a window, its end included."""
    length: Literal["none", "fix", "inf"] = "inf"
    """The kind of the length head."""
    length_hidden: int = 256
    history: bool = True
    """Decode a window after the text of the one before it (prefix forcing, Sec. 3.1)."""
    end_means_wait: bool = False
    """An end chosen before the whole window may be read means "not yet": nothing is written, and the next step of the schedule decides
    again. For models trained not to guess words that they have not heard."""
    loop_tokens: int = 0
    """Above 0, guard against loops: a phrase that filled this many tokens, at least three times over, is not written again. A window
    that reached no end then leaves no history."""
    framing: Framing = field(default_factory=Framing)
    pace: bool = False
    """The length head predicts N̂ of a whole window, at the pace of the source, even where the source ends sooner."""
    gammas: tuple[float, ...] = ()
    """The γ that the gamma head chooses from for each window, rising; empty: there is no gamma head."""
    overlap_tokens: int = 0
    """Source tokens that two windows of a stream share: a full window slides, and its text goes on in the next. 0: windows are disjoint."""
    lag_price: float = 0.0
    """Price of a lag of the whole source, in nats per step; solved for a latency budget when the gamma head was trained."""

    def __post_init__(self) -> None:
        check_record(
            self, "model config", window_tokens=(1, MAX_TOKENS), max_steps=(1, MAX_TOKENS), length_hidden=(1, MAX_WIDTH),
            loop_tokens=(0, MAX_TOKENS), overlap_tokens=(0, MAX_TOKENS),
        )  # fmt: skip
        if self.overlap_tokens > self.window_tokens // 2:
            raise ConfigError(
                f"model config: overlap_tokens: expected at most half of window_tokens={self.window_tokens}: got {self.overlap_tokens}"
            )
        if self.overlap_tokens and self.length == "fix":
            raise ConfigError("model config: a window that slides is never whole, which length 'fix' waits for: expected 'inf' or 'none'")
        if self.window_tokens > self.decoder.max_source:
            raise ConfigError(
                f"model config: window_tokens={self.window_tokens} is more than the decoder's max_source={self.decoder.max_source}"
            )
        rows = len(self.framing.prompt) + self.max_steps - 1 + (1 + self.max_steps if self.history else 0)
        if rows > self.decoder.max_rows:
            raise ConfigError(f"model config: max_steps={self.max_steps} needs {rows} text rows: the decoder has {self.decoder.max_rows}")
        if min(self.framing.ids) < 0 or max(self.framing.ids) >= self.decoder.vocab_size:
            raise ConfigError(f"model config: framing: expected ids below vocab_size={self.decoder.vocab_size}: got {self.framing.ids}")
        if not all(0 <= value < float("inf") for value in (*self.gammas, self.lag_price)):
            raise ConfigError(
                f"model config: gammas and lag_price: expected finite numbers, at least 0: got {self.gammas}, {self.lag_price!r}"
            )
        if self.gammas and (len(self.gammas) < 2 or any(a >= b for a, b in itertools.pairwise(self.gammas))):
            raise ConfigError(f"model config: gammas: expected two or more, in rising order: got {self.gammas}")
        if self.gammas and self.length == "none":
            raise ConfigError("model config: a gamma head is of the length head's kind: expected length 'fix' or 'inf': got 'none'")

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON holds it; later fields are left out at their defaults, so that older files keep their digests."""
        record: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        if not self.gammas:
            del record["gammas"], record["lag_price"]
        for name in ("pace", "end_means_wait", "loop_tokens", "overlap_tokens"):
            if not record[name]:
                del record[name]
        return record
