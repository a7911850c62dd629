"""The decoder: a causal transformer whose cross-attention reads only the source tokens its horizon licenses.

Two paths, the same logits: `forward` is teacher-forced and masks; `read`, `prefill` and `step` are incremental, project a
source token once it has arrived and slice its keys and values to [:Ω]. Theorem 1 holds for both, whatever the weights.

Shape suffixes: B batch, N text rows, H history rows, F source tokens, G source tokens of the window before, M memory tokens
(G + F), E source features, D model width, A attention heads, K width of a head, V vocabulary, T any length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zendaya.errors import ConfigError, SourceError

BLOCK = 16
"""Source tokens are projected in blocks of this many, each token always at the same place of its block: see `Decoder.read`."""

LARGEST_FEATURE = 1e12
"""A source token with a feature beyond this (or NaN) is unreadable: no encoder gives such numbers, and their products overflow."""


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
    """Project source features to `dim` and add learned positions; off, the features are read as they are (Whisper's carry both)."""
    source_vocab: int = 0
    """Above 0, a source token is an id below it (one number, as the text encoder gives), looked up in a learned table."""
    source_layers: int = 0
    """Causal self-attention layers over the source tokens; causal, so that a token still knows nothing of later ones."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "source_dim", "max_source", "max_rows", "dim", "layers", "heads", "head_dim", "ffn_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"decoder config: {name} must be a whole number, at least 1: got {value!r}")
        for name in ("source_layers", "source_vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"decoder config: {name} must be a whole number, at least 0: got {value!r}")
        if self.source_vocab and (self.source_dim != 1 or not self.embed_source):
            raise ConfigError(f"decoder config: with source_vocab, a token is one number and embedded: got source_dim={self.source_dim}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"decoder config: dropout must lie in [0, 1): got {self.dropout!r}")
        if self.activation not in ("gelu", "relu"):
            raise ConfigError(f"decoder config: activation must be 'gelu' or 'relu': got {self.activation!r}")
        if self.norm not in ("pre", "post"):
            raise ConfigError(f"decoder config: norm must be 'pre' or 'post': got {self.norm!r}")
        if not self.embed_source and self.source_dim != self.dim:
            raise ConfigError(f"decoder config: without embed_source, source_dim must equal dim: got {self.source_dim} and {self.dim}")

    @classmethod
    def whisper(
        cls, *, dim: int, layers: int, heads: int, vocab_size: int, ffn_dim: int | None = None, max_rows: int = 448, max_source: int = 1500
    ) -> DecoderConfig:
        """Whisper's decoder: pre-norm, biases, GELU, learned positions, tied output; 448 text rows over 1,500 source tokens."""
        return cls(
            vocab_size=vocab_size, source_dim=dim, max_source=max_source, max_rows=max_rows, dim=dim, layers=layers, heads=heads,
            head_dim=dim // heads, ffn_dim=ffn_dim or 4 * dim, dropout=0.0, norm="pre", embed_source=False,
        )  # fmt: skip


@dataclass
class History:
    """What a window inherits (method.md §4): the text of the window before, and the source it was written from, padded per batch."""

    ids_BH: Tensor
    lengths_B: Tensor
    source_BGE: Tensor
    source_lengths_B: Tensor


@dataclass
class Watched:
    """What a teacher-forced pass saw on its way, for losses that look inside; `rows` fills it."""

    memory_BFD: Tensor | None = None
    """The window's source tokens as cross-attention reads them."""
    log_weights: list[Tensor] = field(default_factory=list)
    """ln of the attention of each layer's first head, text rows over the window's source tokens (B, N, F)."""


@dataclass
class Cache:
    """The explicit state of an incremental decode of `batch` streams in step: projected source, and keys and values of the text rows."""

    batch: int
    num_source: int = 0
    num_rows: int = 0
    cross: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    text: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    context: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pending_BTE: Tensor | None = None
    """Raw tokens of the block not yet full."""
    unreadable_B: Tensor | None = None
    """Streams whose source layers have met an unreadable token in an earlier block."""

    def clone(self) -> Cache:
        """An independent copy."""

        def copies(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
            return [(k.clone(), v.clone()) for k, v in pairs]

        return Cache(
            batch=self.batch, num_source=self.num_source, num_rows=self.num_rows,
            cross=copies(self.cross), text=copies(self.text), context=copies(self.context),
            pending_BTE=None if self.pending_BTE is None else self.pending_BTE.clone(),
            unreadable_B=None if self.unreadable_B is None else self.unreadable_B.clone(),
        )  # fmt: skip

    def forget_source(self) -> None:
        """Drop the source and keep the text rows: the next tokens read are those of a new window."""
        self.num_source = 0
        self.cross, self.context = [], []
        self.pending_BTE = self.unreadable_B = None

    def forget_text(self) -> None:
        """Drop the text rows and keep the source."""
        self.num_rows = 0
        self.text = []


@dataclass
class Gaze:
    """Heads of the cross-attention to look at, as (layer, head) from 0, and after a step where its last row looked with each, layer
    by layer."""

    heads: tuple[tuple[int, int], ...]
    weights_F: list[Tensor] = field(default_factory=list)

    def mean(self) -> Tensor:
        """How much the row gave to each source token (F), averaged over the heads."""
        return torch.stack(self.weights_F).mean(0)


class Dense(nn.Linear):
    """A linear layer whose training on CPU runs on oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """Multi-head attention with separate projections; keys carry no bias, which the softmax would cancel anyway."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_dim
        self.heads = config.heads
        self.query = Dense(config.dim, inner)
        self.key = Dense(config.dim, inner, bias=False)
        self.value = Dense(config.dim, inner)
        self.out = Dense(inner, config.dim)

    def keys_values(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(self.key(x_BTD)), self._split(self.value(x_BTD))

    def within(self, x_BTD: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Self-attention of whole rows: queries, keys and values in one product."""
        q_BATK, k_BATK, v_BATK = _project(x_BTD, [self.query, self.key, self.value], self.heads)
        return self._join(functional.scaled_dot_product_attention(q_BATK, k_BATK, v_BATK, attn_mask=mask, is_causal=causal))

    def forward(self, x_BTD: Tensor, k_BATK: Tensor, v_BATK: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q_BATK = self._split(self.query(x_BTD))
        y_BATK = functional.scaled_dot_product_attention(q_BATK, k_BATK, v_BATK, attn_mask=mask, is_causal=causal)
        return self._join(y_BATK)

    def weights(self, x_BTD: Tensor, k_BATK: Tensor) -> Tensor:
        """How much each query gives to each key, (B, A, T, T): what `forward` sums by, which never makes it."""
        q_BATK = self._split(self.query(x_BTD))
        return (q_BATK @ k_BATK.transpose(-1, -2) / math.sqrt(q_BATK.shape[-1])).softmax(-1)

    def first_head(self, x_BTD: Tensor, k_BATK: Tensor, mask_B1TT: Tensor) -> Tensor:
        """ln of the weights of the first head."""
        width = k_BATK.shape[-1]
        q_BTK = functional.linear(x_BTD, self.query.weight[:width], self.query.bias[:width])
        return (q_BTK @ k_BATK[:, 0].transpose(1, 2) / width**0.5 + mask_B1TT[:, 0]).log_softmax(-1)

    def _split(self, x_BTI: Tensor) -> Tensor:
        return x_BTI.view(*x_BTI.shape[:-1], self.heads, x_BTI.shape[-1] // self.heads).transpose(1, 2)

    def _join(self, y_BATK: Tensor) -> Tensor:
        return self.out(y_BATK.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two dense layers, position by position."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up = Dense(config.dim, config.ffn_dim)
        self.down = Dense(config.ffn_dim, config.dim)
        self.activation = nn.GELU() if config.activation == "gelu" else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Residual(nn.Module):
    """Residual and normalisation around a block: x + f(norm(x)) before, norm(x + f(x)) after."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim)
        self.dropout = config.dropout
        self.before = config.norm == "pre"

    def forward(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        if self.before:
            return self._add(x, block(self.norm(x)))
        return self.norm(self._add(x, block(x)))

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return x.addcmul(y, _dropout_noise(y, self.dropout)) if self.training and self.dropout else x + y


class SourceLayer(nn.Module):
    """Causal self-attention and feed-forward over source tokens."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.around_attention, self.around_feed_forward = Residual(config), Residual(config)

    def forward(self, x_BTD: Tensor, attend: Callable[[Attention, Tensor], Tensor]) -> Tensor:
        x_BTD = self.around_attention(x_BTD, lambda x: attend(self.attention, x))
        return self.around_feed_forward(x_BTD, self.feed_forward)


class TextLayer(nn.Module):
    """Causal self-attention, horizon-limited cross-attention, feed-forward (Theorem 1's layer)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attention, self.cross_attention, self.feed_forward = Attention(config), Attention(config), FeedForward(config)
        self.around_self, self.around_cross, self.around_feed_forward = Residual(config), Residual(config), Residual(config)

    def forward(
        self, x_BND: Tensor, attend_self: Callable[[Attention, Tensor], Tensor], attend_cross: Callable[[Attention, Tensor], Tensor]
    ) -> Tensor:
        x_BND = self.around_self(x_BND, lambda x: attend_self(self.self_attention, x))
        x_BND = self.around_cross(x_BND, lambda x: attend_cross(self.cross_attention, x))
        return self.around_feed_forward(x_BND, self.feed_forward)


class Decoder(nn.Module):
    """Token and position embedding, text layers, output projection tied to the embedding (method.md §2)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.max_rows, config.dim)
        self.source_projection = Dense(config.source_dim, config.dim) if config.embed_source and not config.source_vocab else None
        self.source_tokens = nn.Embedding(config.source_vocab, config.dim) if config.source_vocab else None
        self.source_positions = nn.Embedding(config.max_source, config.dim) if config.embed_source else None
        self.source_layers = nn.ModuleList(SourceLayer(config) for _ in range(config.source_layers))
        self.layers = nn.ModuleList(TextLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim) if config.norm == "pre" else nn.Identity()
        for embedding in (self.tokens, self.positions, self.source_positions, self.source_tokens):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=0.02)  # as GPT-2 and BERT

    # The teacher-forced path: masks.

    def forward(self, ids_BN: Tensor, source_BFE: Tensor, horizons_BN: Tensor, *, history: History | None = None) -> Tensor:
        """Logits of every row at once; row n reads `source[:horizons[n]]` and the rows before it.

        With a history, its rows come first, read the window before and nothing else, and are not returned (method.md §4).
        """
        x_BND, spoiled_BN = self.rows(ids_BN, source_BFE, horizons_BN, history=history)
        logits_BNV = self.project(x_BND)
        return logits_BNV.masked_fill(spoiled_BN[..., None], torch.nan) if spoiled_BN.any() else logits_BNV

    def loss(
        self, ids_BN: Tensor, source_BFE: Tensor, horizons_BN: Tensor, targets_BN: Tensor, *,
        history: History | None = None, label_smoothing: float = 0.0, watched: Watched | None = None,
    ) -> Tensor:  # fmt: skip
        """Sum of the cross-entropies of `forward`'s logits to the targets that are not negative; rows without one are not projected."""
        x_BND, spoiled_BN = self.rows(ids_BN, source_BFE, horizons_BN, history=history, watched=watched)
        wanted_BN = targets_BN >= 0
        read_R = (wanted_BN & ~spoiled_BN).flatten().nonzero()[:, 0]
        x_RD = x_BND.flatten(0, 1)
        if read_R.shape[0] < x_RD.shape[0]:
            x_RD = x_RD.index_select(0, read_R)
        targets_R = targets_BN.flatten()[read_R]
        loss: Tensor = _TiedLoss.apply(self.norm(x_RD), self.tokens.weight, targets_R, label_smoothing)  # type: ignore[no-untyped-call]
        return loss + torch.nan if (wanted_BN & spoiled_BN).any() else loss

    def rows(
        self, ids_BN: Tensor, source_BFE: Tensor, horizons_BN: Tensor, *, history: History | None = None, watched: Watched | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rows' last states, which `forward` projects to logits, and which of them are spoiled: their logits are NaN."""
        if source_BFE.shape[1] > self.config.max_source:
            raise SourceError(f"a window holds at most {self.config.max_source} source tokens: got {source_BFE.shape[1]}")
        memory_BMD, readable_BM = self._embed_source(source_BFE)
        num_history = 0
        mask_self: Tensor | None = None
        if history is not None:
            num_history = history.ids_BH.shape[1]
            previous_BGD, previous_readable_BG = self._embed_source(history.source_BGE)
            memory_BMD = torch.cat([previous_BGD, memory_BMD], 1)
            readable_BM = torch.cat([previous_readable_BG, readable_BM], 1)
            ids_BN = torch.cat([history.ids_BH, ids_BN], 1)
            mask_self = self._self_licence(history.lengths_B, num_history, ids_BN.shape[1])
        licence_BNM = self._licence(horizons_BN, source_BFE.shape[1], history)
        # A masked score is -inf and its weight exactly 0, but 0 · NaN is NaN: unreadable tokens are zeroed for the sums, and so
        # is a row that overflowed before later layers mix rows. The rows that were licensed to read an unreadable token, or
        # overflowed, and all rows after them end as NaN, as the sliced path makes them.
        spoiled_BN = torch.zeros_like(ids_BN, dtype=torch.bool)
        if not readable_BM.all():
            memory_BMD = torch.where(readable_BM[..., None], memory_BMD, 0.0)
            spoiled_BN = (licence_BNM & ~readable_BM[:, None]).any(-1)
        blind_BN1 = ~licence_BNM.any(-1, keepdim=True)
        any_blind = bool(blind_BN1.any())
        if any_blind:  # such a row outputs zero; for the sums it looks at the first token, so that no gradient is NaN
            licence_BNM = licence_BNM | (blind_BN1 & (torch.arange(licence_BNM.shape[2], device=blind_BN1.device) == 0))
        mask_B1NM = _additive(licence_BNM[:, None], memory_BMD.dtype)
        mask_self = None if mask_self is None else _additive(mask_self, memory_BMD.dtype)
        crossings = [layer.cross_attention for layer in self.layers if isinstance(layer, TextLayer)]
        memories = _project(memory_BMD, [dense for attention in crossings for dense in (attention.key, attention.value)], self.config.heads)
        keys_values = dict(zip(crossings, zip(memories[::2], memories[1::2], strict=True), strict=True))
        num_previous = memory_BMD.shape[1] - source_BFE.shape[1]
        if watched is not None:
            watched.memory_BFD = memory_BMD[:, num_previous:]

        def attend_self(attention: Attention, x_BND: Tensor) -> Tensor:
            return attention.within(x_BND, mask=mask_self, causal=mask_self is None)

        def attend_cross(attention: Attention, x_BND: Tensor) -> Tensor:
            if watched is not None:
                log_weights_BNM = attention.first_head(x_BND, keys_values[attention][0], mask_B1NM)
                watched.log_weights.append(log_weights_BNM[:, num_history:, num_previous:])
            y_BND = self._cross(attention, x_BND, *keys_values[attention], mask_B1NM)
            return y_BND.masked_fill(blind_BN1, 0.0) if any_blind else y_BND

        x_BND = self._embed_text(ids_BN, self._row_positions(history, ids_BN.shape[1]))
        for layer in self.layers:
            x_BND, overflowed_BN = _contain(layer(x_BND, attend_self, attend_cross))
            spoiled_BN = spoiled_BN if overflowed_BN is None else spoiled_BN | overflowed_BN
        return x_BND[:, num_history:], _so_far(spoiled_BN)[:, num_history:]

    def _licence(self, horizons_BN: Tensor, num_source: int, history: History | None) -> Tensor:
        """What each row may read of the memory: active rows `w_k[:Ω]` alone, history rows `w_{k−1}` alone."""
        active_BNF = torch.arange(num_source, device=horizons_BN.device) < horizons_BN[..., None]
        if history is None:
            return active_BNF
        batch, num_history = history.ids_BH.shape
        previous_B1G = torch.arange(history.source_BGE.shape[1], device=horizons_BN.device) < history.source_lengths_B[:, None, None]
        licence_BNM = active_BNF.new_zeros(batch, num_history + horizons_BN.shape[1], previous_B1G.shape[2] + num_source)
        licence_BNM[:, :num_history, : previous_B1G.shape[2]] = previous_B1G
        licence_BNM[:, num_history:, previous_B1G.shape[2] :] = active_BNF
        return licence_BNM

    def _cross(self, attention: Attention, x_BND: Tensor, k_BAMK: Tensor, v_BAMK: Tensor, mask_B1NM: Tensor) -> Tensor:
        return attention.forward(x_BND, k_BAMK, v_BAMK, mask=mask_B1NM)

    @staticmethod
    def _self_licence(lengths_B: Tensor, num_history: int, num_rows: int) -> Tensor:
        """Causal, and blind to the padding of shorter histories; every row sees itself."""
        row = torch.arange(num_rows, device=lengths_B.device)
        padding_BT = (row < num_history) & (row >= lengths_B[:, None])
        causal_TT = row[:, None] >= row
        return ((causal_TT & ~padding_BT[:, None]) | (row[:, None] == row))[:, None]

    def _row_positions(self, history: History | None, num_rows: int) -> Tensor:
        """Rows count on from the history's true length, whatever it was padded to."""
        row = torch.arange(num_rows, device=self.tokens.weight.device)
        if history is None:
            return row
        padding_B1 = history.ids_BH.shape[1] - history.lengths_B[:, None]
        return torch.where(row < history.ids_BH.shape[1], row, row - padding_B1)

    # Shared by both paths.

    def _embed_text(self, ids_BN: Tensor, positions: Tensor) -> Tensor:
        if int(positions.max()) >= self.config.max_rows:
            raise SourceError(f"the text is longer than the decoder's {self.config.max_rows} rows: got {int(positions.max()) + 1}")
        x_BND = self.tokens(ids_BN) + self.positions(positions)
        return x_BND * _dropout_noise(x_BND, self.config.dropout) if self.training and self.config.dropout else x_BND

    def project(self, x_BND: Tensor) -> Tensor:
        """Logits of the rows' last states."""
        return functional.linear(self.norm(x_BND), self.tokens.weight)

    def lay_out_for_steps(self) -> None:
        """Keep the output matrix column by column: it means the same, and a single row times it takes a third of the time on CPU."""
        self.tokens.weight.data = self.tokens.weight.data.t().contiguous().t()

    def _embed_source(self, source_BFE: Tensor) -> tuple[Tensor, Tensor]:
        """Memory tokens, and which of them are readable: finite, and behind no unreadable one where source layers mix them."""
        readable_BF = self._readable(source_BFE)
        memory_BFD = self._place_source(source_BFE, readable_BF, 0)
        for layer in self.source_layers:
            memory_BFD, overflowed_BF = _contain(layer(memory_BFD, self._attend_source))
            readable_BF = readable_BF if overflowed_BF is None else readable_BF & ~overflowed_BF
        if self.source_layers:
            readable_BF = ~_so_far(~readable_BF)
        return memory_BFD, readable_BF

    def _attend_source(self, attention: Attention, x_BFD: Tensor) -> Tensor:
        return attention.within(x_BFD, causal=True)

    def _place_source(self, source_BTE: Tensor, readable_BT: Tensor, start: int) -> Tensor:
        """Source features at the model's width, at their positions from `start`; unreadable ones zeroed."""
        if not readable_BT.all():
            source_BTE = torch.where(readable_BT[..., None], source_BTE, 0.0)
        if self.source_positions is None:
            return source_BTE
        # A block's padding may reach past the last position; it is never read.
        position_T = torch.arange(start, start + source_BTE.shape[1], device=source_BTE.device).clamp_(max=self.config.max_source - 1)
        return self._widen(source_BTE) + self.source_positions(position_T)

    def _widen(self, source_BTE: Tensor) -> Tensor:
        """Readable source tokens at the model's width: ids looked up, features projected."""
        if self.source_tokens is not None:
            return self.source_tokens(source_BTE[..., 0].long())
        assert self.source_projection is not None
        return self.source_projection(source_BTE)

    def source_features(self, source_BTE: Tensor) -> Tensor:
        """What a length head may pool of source tokens: their features, or the learned vectors of ids."""
        if self.source_tokens is None:
            return source_BTE
        return self._widen(torch.where(self._readable(source_BTE)[..., None], source_BTE, 0.0))

    def _readable(self, source_BTE: Tensor) -> Tensor:
        """Which tokens are finite and not absurdly large (a NaN compares false), or ids of the vocabulary."""
        readable_BT = source_BTE.abs().amax(-1) < LARGEST_FEATURE
        if self.source_tokens is not None:
            ids_BT = source_BTE[..., 0]
            readable_BT &= (ids_BT >= 0) & (ids_BT < self.config.source_vocab) & (ids_BT == ids_BT.floor())
        return readable_BT

    # The incremental path: slices.

    def start(self, batch: int = 1) -> Cache:
        """A fresh cache: nothing read, nothing written."""
        return Cache(batch=batch)

    def read(self, cache: Cache, source_BTE: Tensor) -> None:
        """Take source tokens that have arrived: project each once, into the cache.

        Tokens are projected in blocks of `BLOCK`, a block not yet full padded with zeros and projected again when more of it
        arrives. So a token is always computed at the same place of a product of the same shape, whatever arrives with it
        or after it, and any chunking of the same arrivals gives the same bits.
        """
        if source_BTE.ndim != 3 or source_BTE.shape[0] != cache.batch or source_BTE.shape[2] != self.config.source_dim:
            raise SourceError(
                f"source tokens must have shape ({cache.batch}, any, {self.config.source_dim}): got {tuple(source_BTE.shape)}"
            )
        total = cache.num_source + source_BTE.shape[1]
        if total > self.config.max_source:
            raise SourceError(f"a window holds at most {self.config.max_source} source tokens: got {total}")
        start = cache.num_source // BLOCK * BLOCK
        waiting_BTE = source_BTE if cache.pending_BTE is None else torch.cat([cache.pending_BTE, source_BTE], 1)
        for first in range(0, waiting_BTE.shape[1], BLOCK):
            block_BTE = waiting_BTE[:, first : first + BLOCK]
            padded_BTE = functional.pad(block_BTE, (0, 0, 0, BLOCK - block_BTE.shape[1]))
            self._read_block(cache, padded_BTE, start + first, full=block_BTE.shape[1] == BLOCK)
        rest = total % BLOCK
        cache.pending_BTE = waiting_BTE[:, waiting_BTE.shape[1] - rest :].clone() if rest else None
        cache.num_source = total

    def _read_block(self, cache: Cache, block_BTE: Tensor, start: int, *, full: bool) -> None:
        readable_BT = self._readable(block_BTE)
        x_BTD = self._place_source(block_BTE, readable_BT, start)
        for index, source_layer in enumerate(self.source_layers):
            y_BTD = source_layer(x_BTD, lambda attention, x, index=index: self._attend_context(cache, index, attention, x, start))
            x_BTD, overflowed_BT = _contain(y_BTD)
            readable_BT = readable_BT if overflowed_BT is None else readable_BT & ~overflowed_BT
        if self.source_layers:
            readable_BT = ~_so_far(~readable_BT)
            if cache.unreadable_B is not None:
                readable_BT = readable_BT & ~cache.unreadable_B[:, None]
            if full:
                cache.unreadable_B = ~readable_BT[:, -1]
        x_BTD = x_BTD.masked_fill(~readable_BT[..., None], torch.nan)
        for index, text_layer in enumerate(self.layers):
            assert isinstance(text_layer, TextLayer)
            _write(cache.cross, index, start, text_layer.cross_attention.keys_values(x_BTD))

    def _attend_context(self, cache: Cache, index: int, attention: Attention, x_BTD: Tensor, start: int) -> Tensor:
        """A block of source tokens attends to those before it and, causally, to itself."""
        _write(cache.context, index, start, attention.keys_values(x_BTD))
        k_BATK, v_BATK = (t[:, :, : start + BLOCK] for t in cache.context[index])
        row = torch.arange(start + BLOCK, device=x_BTD.device)
        return attention.forward(x_BTD, k_BATK, v_BATK, mask=row <= row[start:, None])

    def prefill(self, cache: Cache, ids_BN: Tensor, horizon: int, *, gaze: Gaze | None = None) -> Tensor:
        """Write rows that are given, not decided (a history, a prompt), all reading `[:horizon]`; the logits of the last.

        A `gaze` takes the cross-attention of the last row of the one stream; the logits are the same to the bit with and without it.
        """
        return self._write_rows(cache, ids_BN, [horizon] * cache.batch, gaze)

    def step(self, cache: Cache, ids_B: Tensor, horizons: int | Sequence[int], *, gaze: Gaze | None = None) -> Tensor:
        """One decode step: the row that holds the last token, reading `[:Ω]` of each stream's source; logits (B, V)."""
        per_stream = [int(h) for h in horizons] if isinstance(horizons, Sequence) else [int(horizons)] * cache.batch
        return self._write_rows(cache, ids_B[:, None], per_stream, gaze)

    def _write_rows(self, cache: Cache, ids_BN: Tensor, horizons: list[int], gaze: Gaze | None = None) -> Tensor:
        if max(horizons) > cache.num_source or min(horizons) < 0:
            raise SourceError(f"a step may read at most the {cache.num_source} source tokens that have arrived: got horizons {horizons}")
        num_rows = ids_BN.shape[1]
        row = torch.arange(cache.num_rows, cache.num_rows + num_rows, device=ids_BN.device)
        mask = None if num_rows == 1 else torch.arange(int(row[-1]) + 1, device=row.device) <= row[:, None]
        x_BND = self._embed_text(ids_BN, row)
        if gaze is not None:
            assert cache.batch == 1, "a gaze follows one stream"
            gaze.weights_F = []
        for index, layer in enumerate(self.layers):

            def attend_self(attention: Attention, x_BND: Tensor, index: int = index) -> Tensor:
                _write(cache.text, index, cache.num_rows, attention.keys_values(x_BND))
                k_BATK, v_BATK = (t[:, :, : cache.num_rows + num_rows] for t in cache.text[index])
                return attention.forward(x_BND, k_BATK, v_BATK, mask=mask)

            def attend_cross(attention: Attention, x_BND: Tensor, index: int = index) -> Tensor:
                if gaze is not None and any(layer == index for layer, _ in gaze.heads):
                    weights_1A1F = attention.weights(x_BND[:, -1:], cache.cross[index][0][:, :, : horizons[0]])
                    gaze.weights_F += [weights_1A1F[0, head, 0] for layer, head in gaze.heads if layer == index]
                return torch.cat([self._cross_sliced(attention, x_BND, cache.cross, index, b, h) for b, h in enumerate(horizons)])

            x_BND = layer(x_BND, attend_self, attend_cross)
        cache.num_rows += num_rows
        return self.project(x_BND[:, -1])

    @staticmethod
    def _cross_sliced(
        attention: Attention, x_BND: Tensor, cross: list[tuple[Tensor, Tensor]], index: int, stream: int, horizon: int
    ) -> Tensor:
        """Cross-attention of one stream over exactly its first `horizon` tokens; nothing beyond is touched, none gives zero."""
        x_1ND = x_BND[stream : stream + 1]
        if horizon == 0:
            return torch.zeros_like(x_1ND)
        k_1AMK, v_1AMK = (t[stream : stream + 1, :, :horizon] for t in cross[index])
        return attention.forward(x_1ND, k_1AMK, v_1AMK)


def _contain(x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows that overflowed set to zero, so that they stay their own; and which they were, None for none."""
    if x_BTD.detach().sum().isfinite():  # no sum with a NaN or an infinity in it is finite: one pass, and nothing to contain
        return x_BTD, None
    overflowed_BT = ~torch.isfinite(x_BTD).all(-1)
    return torch.where(overflowed_BT[..., None], 0.0, x_BTD), overflowed_BT


def _additive(licence: Tensor, dtype: torch.dtype) -> Tensor:
    """A licence as what is added to the scores: 0 where it is given, −∞ where not; made once for all layers."""
    return torch.zeros(licence.shape, dtype=dtype, device=licence.device).masked_fill_(~licence, -torch.inf)


def _project(x_BTD: Tensor, denses: Sequence[nn.Linear], heads: int) -> Sequence[Tensor]:
    """What each dense layer makes of x, split into heads, in one product."""
    weight = torch.cat([dense.weight for dense in denses])
    bias = torch.cat([dense.weight.new_zeros(dense.out_features) if dense.bias is None else dense.bias for dense in denses])
    y_BTI = _linear(x_BTD, weight, bias)
    y_BTLAK = y_BTI.view(*y_BTI.shape[:-1], len(denses), heads, denses[0].out_features // heads)
    return [y_BTAK.transpose(1, 2) for y_BTAK in y_BTLAK.unbind(2)]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x·Wᵀ + b; where gradients are wanted, by `_Linear`."""
    learns = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
    if learns and not torch.is_autocast_enabled(x.device.type):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return functional.linear(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b by oneDNN if they are 32-bit floats on CPU and torch has it: on AMD's it was faster than MKL, torch's choice."""
    available = torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if available and hasattr(torch.ops.mkldnn, "_linear_pointwise") and x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """A linear layer by `_product`, backward too; the weight's gradient is MKL's, which is as fast there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        gradient_TO = gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t()) if of_x else None,
            gradient_TO.t() @ x.flatten(0, -2) if of_weight else None,
            gradient_TO.sum(0) if of_bias else None,
        )


def _dropout_noise(like: Tensor, dropout: float) -> Tensor:
    """What dropout multiplies by: 0 or 1/(1 − p), with p to 16 bits; four are drawn at once, which torch's own draw on CPU is not."""
    drop = min(round(dropout * 2**16), 2**16 - 1)
    draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device).random_(-(2**63), None)
    kept = draws.view(torch.int16)[: like.numel()].view(like.shape)
    return torch.ge(kept, drop - 2**15, out=torch.empty_like(like)).mul_(2**16 / (2**16 - drop))


class _TiedLoss(torch.autograd.Function):
    """Sum of cross-entropies of x·Wᵀ, a block of rows at a time, its gradients beside it: the logits of a batch never all exist.

    Suffixes: R rows, C rows of a block.
    """

    ROWS = 256

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, smoothing: float) -> Tensor:
        learns = any(ctx.needs_input_grad)
        vocab, rows = weight_VD.shape[0], min(x_RD.shape[0], _TiedLoss.ROWS)
        p_CV, total = x_RD.new_empty(rows, vocab), x_RD.new_zeros(())
        if learns:
            dx_RD, dweight_VD = torch.empty_like(x_RD), torch.zeros_like(weight_VD)
        for first in range(0, x_RD.shape[0], _TiedLoss.ROWS):
            x_CD, target_C1 = x_RD[first : first + rows], targets_R[first : first + rows, None]
            p = p_CV[: x_CD.shape[0]]
            logits = _product(x_CD, weight_VD)
            torch.softmax(logits, 1, out=p)
            # log Σ exp from the largest, whose probability cannot underflow
            log_sum_C = logits.amax(1) - p.amax(1).log()
            total += (log_sum_C - (1 - smoothing) * logits.gather(1, target_C1)[:, 0]).sum()
            if smoothing:
                total -= smoothing * logits.mean(1).sum()
                p -= smoothing / vocab
            if learns:
                p.scatter_add_(1, target_C1, p.new_full(target_C1.shape, smoothing - 1))
                torch.mm(p, weight_VD, out=dx_RD[first : first + rows])
                dweight_VD.addmm_(p.t(), x_CD)
        if learns:
            ctx.save_for_backward(dx_RD, dweight_VD)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx_RD, dweight_VD = ctx.saved_tensors
        return dx_RD * gradient, dweight_VD * gradient, None, None


def _so_far(flags_BT: Tensor) -> Tensor:
    """Whether a flag is up here or anywhere before."""
    return flags_BT.cumsum(1) > 0


def _write(store: list[tuple[Tensor, Tensor]], index: int, start: int, keys_values: tuple[Tensor, Tensor]) -> None:
    """Put keys and values at rows `start …` of a layer's store, which grows by doubling so that memory follows what was read."""
    k_BATK, _ = keys_values
    end = start + k_BATK.shape[2]
    if index == len(store):
        store.append((k_BATK[:, :, :0], k_BATK[:, :, :0]))
    old = store[index]
    if end > old[0].shape[2]:
        room = max(end, 2 * old[0].shape[2], 2 * BLOCK)
        grown = tuple(k_BATK.new_zeros(*k_BATK.shape[:2], room, k_BATK.shape[3]) for _ in range(2))
        for new, was in zip(grown, old, strict=True):
            new[:, :, : was.shape[2]] = was
        store[index] = (grown[0], grown[1])
    for row_store, rows in zip(store[index], keys_values, strict=True):
        row_store[:, :, start:end] = rows
