"""The decoder: a causal transformer whose cross-attention reads only the source tokens that its horizon Ω allows.

Two paths give the same logits. `forward` is teacher-forced and masks; `read`, `prefill` and `step` are incremental: they project a source
token once, when it has arrived, and slice its keys and values to [:Ω]. Theorem 1 holds for both, whatever the weights.

Shape suffixes: B batch, N text rows, H history rows, F source tokens, G source tokens of the window before, M memory tokens
(G + F), E source features, D model width, A attention heads, K width of a head, V vocabulary, T any length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from zendaya.errors import SourceError
from zendaya.nn.cache import BLOCK, Cache, KeysValues, write_rows
from zendaya.nn.config import DecoderConfig
from zendaya.nn.fused import Dense, dropout_noise, project_heads, tied_cross_entropy

LARGEST_FEATURE = 1e12
"""A source token with a feature beyond ± this, or NaN, is unreadable: no encoder gives such numbers, and their products overflow."""


@dataclass
class History:
    """What windows inherit (method.md §4): the text of the window before and the source it was written from, padded to a batch."""

    ids_BH: Tensor
    lengths_B: Tensor
    source_BGE: Tensor
    source_lengths_B: Tensor


@dataclass
class Intermediates:
    """Inner values of a teacher-forced pass, for losses on them; `rows` fills it."""

    memory_BFD: Tensor | None = None
    """The window's source tokens as cross-attention reads them."""
    log_weights: list[Tensor] = field(default_factory=list)
    """ln of the cross-attention weights of each layer's first head (B, N, F)."""


@dataclass
class AttentionTap:
    """Reads the cross-attention weights of some heads at each step."""

    heads: tuple[tuple[int, int], ...]
    """As (layer, head), from 0."""
    weights_F: list[Tensor] = field(default_factory=list)
    """After a step, the weights of its last row, per head in the order of the layers."""
    unless: Callable[[AttentionTap], bool] | None = None
    """Says from the weights that the row is not needed: an engine may leave out its logits."""
    _needless: bool | None = None

    def mean(self) -> Tensor:
        """The weights averaged over the heads (F)."""
        return torch.stack(self.weights_F).mean(0)

    def most_attended(self) -> int:
        """The source token that the heads attend to most; 0 for a row that read none."""
        attention_F = self.mean()
        return int(attention_F.argmax()) if attention_F.shape[0] else 0

    def needless(self) -> bool:
        """Whether `unless` says that the row is not needed; asked once."""
        if self._needless is None:
            self._needless = self.unless is not None and self.unless(self)
        return self._needless


Taps = Sequence[AttentionTap | None]  # per stream of a call; None where no attention is asked for


class Attention(nn.Module):
    """Multi-head attention: softmax(q·kᵀ/√K)·v per head. Keys carry no bias, which the softmax would cancel."""

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
        """Self-attention of x, with queries, keys and values from one product."""
        q_BATK, k_BATK, v_BATK = project_heads(x_BTD, [self.query, self.key, self.value], self.heads)
        return self._join(functional.scaled_dot_product_attention(q_BATK, k_BATK, v_BATK, attn_mask=mask, is_causal=causal))

    def forward(self, x_BTD: Tensor, k_BATK: Tensor, v_BATK: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q_BATK = self._split(self.query(x_BTD))
        y_BATK = functional.scaled_dot_product_attention(q_BATK, k_BATK, v_BATK, attn_mask=mask, is_causal=causal)
        return self._join(y_BATK)

    def weights(self, x_BTD: Tensor, k_BATK: Tensor) -> Tensor:
        """softmax(q·kᵀ/√K) (B, A, T, T), which `forward` uses without materialising it."""
        q_BATK = self._split(self.query(x_BTD))
        return (q_BATK @ k_BATK.transpose(-1, -2) / math.sqrt(q_BATK.shape[-1])).softmax(-1)

    def first_head(self, x_BTD: Tensor, k_BATK: Tensor, mask_B1TT: Tensor) -> Tensor:
        """ln of the first head's weights (B, T, T)."""
        width = k_BATK.shape[-1]
        q_BTK = functional.linear(x_BTD, self.query.weight[:width], self.query.bias[:width])
        return (q_BTK @ k_BATK[:, 0].transpose(1, 2) / width**0.5 + mask_B1TT[:, 0]).log_softmax(-1)

    def _split(self, x_BTI: Tensor) -> Tensor:
        return x_BTI.view(*x_BTI.shape[:-1], self.heads, x_BTI.shape[-1] // self.heads).transpose(1, 2)

    def _join(self, y_BATK: Tensor) -> Tensor:
        return self.out(y_BATK.transpose(1, 2).flatten(-2))


Attend = Callable[[Attention, Tensor], Tensor]
"""How a layer's attention is computed: over whole rows with masks, or over a cache."""


class FeedForward(nn.Module):
    """Two dense layers with an activation between, position by position."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up = Dense(config.dim, config.ffn_dim)
        self.down = Dense(config.ffn_dim, config.dim)
        self.activation = nn.GELU() if config.activation == "gelu" else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Residual(nn.Module):
    """The residual connection of a block f: x + f(norm(x)) for pre-norm, norm(x + f(x)) for post-norm."""

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
        return x.addcmul(y, dropout_noise(y, self.dropout)) if self.training and self.dropout else x + y


class SourceLayer(nn.Module):
    """Causal self-attention and feed-forward over source tokens."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.around_attention, self.around_feed_forward = Residual(config), Residual(config)

    def forward(self, x_BTD: Tensor, attend: Attend) -> Tensor:
        x_BTD = self.around_attention(x_BTD, lambda x: attend(self.attention, x))
        return self.around_feed_forward(x_BTD, self.feed_forward)


class TextLayer(nn.Module):
    """Causal self-attention, horizon-limited cross-attention, feed-forward (Theorem 1's layer)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attention, self.cross_attention, self.feed_forward = Attention(config), Attention(config), FeedForward(config)
        self.around_self, self.around_cross, self.around_feed_forward = Residual(config), Residual(config), Residual(config)

    def forward(self, x_BND: Tensor, attend_self: Attend, attend_cross: Attend) -> Tensor:
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

        The rows of a history come first, read the window before and nothing else, and are not returned (method.md §4).
        """
        x_BND, invalid_BN = self.rows(ids_BN, source_BFE, horizons_BN, history=history)
        logits_BNV = self.project(x_BND)
        return logits_BNV.masked_fill(invalid_BN[..., None], torch.nan) if invalid_BN.any() else logits_BNV

    def loss(
        self, ids_BN: Tensor, source_BFE: Tensor, horizons_BN: Tensor, targets_BN: Tensor, *,
        history: History | None = None, label_smoothing: float = 0.0, intermediates: Intermediates | None = None,
    ) -> Tensor:  # fmt: skip
        """Sum of the cross-entropies of `forward`'s logits; rows with a negative target have no loss."""
        x_BND, invalid_BN = self.rows(ids_BN, source_BFE, horizons_BN, history=history, intermediates=intermediates)
        wanted_BN = targets_BN >= 0
        read_R = (wanted_BN & ~invalid_BN).flatten().nonzero()[:, 0]
        x_RD = x_BND.flatten(0, 1)
        if read_R.shape[0] < x_RD.shape[0]:
            x_RD = x_RD.index_select(0, read_R)
        targets_R = targets_BN.flatten()[read_R]
        loss = tied_cross_entropy(self.norm(x_RD), self.tokens.weight, targets_R, label_smoothing)
        return loss + torch.nan if (wanted_BN & invalid_BN).any() else loss

    def rows(
        self, ids_BN: Tensor, source_BFE: Tensor, horizons_BN: Tensor, *, history: History | None = None,
        intermediates: Intermediates | None = None, visible_BNF: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The last hidden states of the rows, and which rows are invalid: their logits are NaN.

        `visible_BNF` says instead of horizons which source tokens each row reads, where the source holds several versions of a token.
        """
        if visible_BNF is None and source_BFE.shape[1] > self.config.max_source:
            raise SourceError(f"a window holds at most {self.config.max_source} source tokens: got {source_BFE.shape[1]}")
        memory_BMD, readable_BM = self._embed_memory(source_BFE, history)
        num_history = 0 if history is None else history.ids_BH.shape[1]
        ids_BN = ids_BN if history is None else torch.cat([history.ids_BH, ids_BN], 1)
        visible_BNM = self._visible(horizons_BN, source_BFE.shape[1], history) if visible_BNF is None else visible_BNF
        # A masked score is -inf and its weight exactly 0, but 0 · NaN is NaN. So unreadable tokens are zeroed for the sums, and so are
        # rows that overflow, before the next layer mixes rows. A row that may see an unreadable token or that overflows is invalid, and
        # so are all rows after it, as on the incremental path.
        invalid_BN = torch.zeros_like(ids_BN, dtype=torch.bool)
        if not readable_BM.all():
            memory_BMD = torch.where(readable_BM[..., None], memory_BMD, 0.0)
            invalid_BN = (visible_BNM & ~readable_BM[:, None]).any(-1)
        mask_self = None if history is None else _additive(self._visible_rows(history, ids_BN.shape[1]), memory_BMD.dtype)
        attend_cross = self._masked_cross_attention(memory_BMD, visible_BNM, intermediates)

        def attend_self(attention: Attention, x_BND: Tensor) -> Tensor:
            return attention.within(x_BND, mask=mask_self, causal=mask_self is None)

        x_BND = self._embed_text(ids_BN, self._row_positions(history, ids_BN.shape[1]))
        for layer in self.layers:
            x_BND, overflowed_BN = _zero_overflow(layer(x_BND, attend_self, attend_cross))
            invalid_BN = invalid_BN if overflowed_BN is None else invalid_BN | overflowed_BN
        if intermediates is not None:
            num_previous = memory_BMD.shape[1] - source_BFE.shape[1]
            intermediates.memory_BFD = memory_BMD[:, num_previous:]
            intermediates.log_weights = [weights[:, num_history:, num_previous:] for weights in intermediates.log_weights]
        return x_BND[:, num_history:], _any_so_far(invalid_BN)[:, num_history:]

    def _embed_memory(self, source_BFE: Tensor, history: History | None) -> tuple[Tensor, Tensor]:
        """Memory tokens, those of the window before first, and which of them are readable."""
        memory_BFD, readable_BF = self._embed_source(source_BFE)
        if history is None:
            return memory_BFD, readable_BF
        previous_BGD, previous_readable_BG = self._embed_source(history.source_BGE)
        return torch.cat([previous_BGD, memory_BFD], 1), torch.cat([previous_readable_BG, readable_BF], 1)

    def _masked_cross_attention(self, memory_BMD: Tensor, visible_BNM: Tensor, intermediates: Intermediates | None) -> Attend:
        """The cross-attention of every layer, in which each row reads the memory tokens that are visible to it."""
        blind_BN1 = ~visible_BNM.any(-1, keepdim=True)
        any_blind = bool(blind_BN1.any())
        if any_blind:  # a row that sees nothing outputs zero; for the sums it reads the first token, so that no gradient is NaN
            visible_BNM = visible_BNM | (blind_BN1 & (torch.arange(visible_BNM.shape[2], device=blind_BN1.device) == 0))
        mask_B1NM = _additive(visible_BNM[:, None], memory_BMD.dtype)
        attentions = [layer.cross_attention for layer in self.layers if isinstance(layer, TextLayer)]
        projections = [dense for attention in attentions for dense in (attention.key, attention.value)]
        projected = project_heads(memory_BMD, projections, self.config.heads)
        keys_values = dict(zip(attentions, zip(projected[::2], projected[1::2], strict=True), strict=True))

        def attend(attention: Attention, x_BND: Tensor) -> Tensor:
            if intermediates is not None:
                intermediates.log_weights.append(attention.first_head(x_BND, keys_values[attention][0], mask_B1NM))
            y_BND = self._cross(attention, x_BND, *keys_values[attention], mask_B1NM)
            return y_BND.masked_fill(blind_BN1, 0.0) if any_blind else y_BND

        return attend

    def _visible(self, horizons_BN: Tensor, num_source: int, history: History | None) -> Tensor:
        """The memory tokens that each row may read: w_k[:Ω] for the rows of this window, w_{k−1} for those of the history."""
        active_BNF = torch.arange(num_source, device=horizons_BN.device) < horizons_BN[..., None]
        if history is None:
            return active_BNF
        batch, num_history = history.ids_BH.shape
        previous_B1G = torch.arange(history.source_BGE.shape[1], device=horizons_BN.device) < history.source_lengths_B[:, None, None]
        visible_BNM = active_BNF.new_zeros(batch, num_history + horizons_BN.shape[1], previous_B1G.shape[2] + num_source)
        visible_BNM[:, :num_history, : previous_B1G.shape[2]] = previous_B1G
        visible_BNM[:, num_history:, previous_B1G.shape[2] :] = active_BNF
        return visible_BNM

    def _cross(self, attention: Attention, x_BND: Tensor, k_BAMK: Tensor, v_BAMK: Tensor, mask_B1NM: Tensor) -> Tensor:
        return attention.forward(x_BND, k_BAMK, v_BAMK, mask=mask_B1NM)

    @staticmethod
    def _visible_rows(history: History, num_rows: int) -> Tensor:
        """The text rows (B, 1, T, T) that each may read: itself and those before it, without the padding of shorter histories."""
        row = torch.arange(num_rows, device=history.lengths_B.device)
        padding_BT = (row < history.ids_BH.shape[1]) & (row >= history.lengths_B[:, None])
        causal_TT = row[:, None] >= row
        return ((causal_TT & ~padding_BT[:, None]) | (row[:, None] == row))[:, None]

    def _row_positions(self, history: History | None, num_rows: int) -> Tensor:
        """The position of each row; rows of the window count on from the history's own length, not its padded one."""
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
        return x_BND * dropout_noise(x_BND, self.config.dropout) if self.training and self.config.dropout else x_BND

    def project(self, x_BND: Tensor) -> Tensor:
        """Logits of last hidden states."""
        return functional.linear(self.norm(x_BND), self.tokens.weight)

    def lay_out_for_steps(self) -> None:
        """Store the output matrix by columns: a single row times it then takes a third of the time on CPU."""
        self.tokens.weight.data = self.tokens.weight.data.t().contiguous().t()

    def _embed_source(self, source_BFE: Tensor) -> tuple[Tensor, Tensor]:
        """Memory tokens, and which of them are readable; source layers also make every token after an unreadable one so."""
        readable_BF = self._readable(source_BFE)
        memory_BFD = self._place_source(source_BFE, readable_BF, 0)
        for layer in self.source_layers:
            memory_BFD, overflowed_BF = _zero_overflow(layer(memory_BFD, self._attend_source))
            readable_BF = readable_BF if overflowed_BF is None else readable_BF & ~overflowed_BF
        if self.source_layers:
            readable_BF = ~_any_so_far(~readable_BF)
        return memory_BFD, readable_BF

    def _attend_source(self, attention: Attention, x_BFD: Tensor) -> Tensor:
        return attention.within(x_BFD, causal=True)

    def _place_source(self, source_BTE: Tensor, readable_BT: Tensor, start: int) -> Tensor:
        """Source tokens at the model's width, with their positions from `start` on; unreadable ones zeroed."""
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
        """What length heads pool: the features of source tokens, or the learned vectors of ids."""
        if self.source_tokens is None:
            return source_BTE
        return self._widen(torch.where(self._readable(source_BTE)[..., None], source_BTE, 0.0))

    def _readable(self, source_BTE: Tensor) -> Tensor:
        """Which tokens hold finite features of sensible size (a NaN compares false), or ids of the vocabulary."""
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
        """Project source tokens that have arrived into the cache.

        Tokens are projected in blocks of `BLOCK`. A block that is not yet full is padded with zeros, and projected again when more of it
        arrives. So a token always stands at the same place of a product of the same shape, and any chunking gives the same bits.
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
            x_BTD, overflowed_BT = _zero_overflow(y_BTD)
            readable_BT = readable_BT if overflowed_BT is None else readable_BT & ~overflowed_BT
        if self.source_layers:
            readable_BT = ~_any_so_far(~readable_BT)
            if cache.unreadable_B is not None:
                readable_BT = readable_BT & ~cache.unreadable_B[:, None]
            if full:
                cache.unreadable_B = ~readable_BT[:, -1]
        x_BTD = x_BTD.masked_fill(~readable_BT[..., None], torch.nan)
        for index, text_layer in enumerate(self.layers):
            assert isinstance(text_layer, TextLayer)
            write_rows(cache.cross, index, start, text_layer.cross_attention.keys_values(x_BTD))

    def _attend_context(self, cache: Cache, index: int, attention: Attention, x_BTD: Tensor, start: int) -> Tensor:
        """Attention of a block of source tokens over the blocks before it and, causally, itself."""
        write_rows(cache.context, index, start, attention.keys_values(x_BTD))
        k_BATK, v_BATK = (t[:, :, : start + BLOCK] for t in cache.context[index])
        row = torch.arange(start + BLOCK, device=x_BTD.device)
        return attention.forward(x_BTD, k_BATK, v_BATK, mask=row <= row[start:, None])

    def prefill(self, cache: Cache, ids_BN: Tensor, horizon: int, *, tap: AttentionTap | None = None) -> Tensor:
        """Write rows whose ids are given (a history, a prompt), all reading `[:horizon]`; the logits of the last row (B, V).

        A `tap` reads the cross-attention of the last row of a single stream, and changes no bit of the logits.
        """
        return self._write_rows(cache, ids_BN, [horizon] * cache.batch, tap)

    def step(self, cache: Cache, ids_B: Tensor, horizons: int | Sequence[int], *, tap: AttentionTap | None = None) -> Tensor:
        """One decode step: the row of the last token, reading `[:Ω]` of each stream's source; logits (B, V)."""
        per_stream = [int(h) for h in horizons] if isinstance(horizons, Sequence) else [int(horizons)] * cache.batch
        return self._write_rows(cache, ids_B[:, None], per_stream, tap)

    def _write_rows(self, cache: Cache, ids_BN: Tensor, horizons: list[int], tap: AttentionTap | None = None) -> Tensor:
        if max(horizons) > cache.num_source or min(horizons) < 0:
            raise SourceError(f"a step may read at most the {cache.num_source} source tokens that have arrived: got horizons {horizons}")
        num_rows = ids_BN.shape[1]
        row = torch.arange(cache.num_rows, cache.num_rows + num_rows, device=ids_BN.device)
        mask = None if num_rows == 1 else torch.arange(int(row[-1]) + 1, device=row.device) <= row[:, None]
        x_BND = self._embed_text(ids_BN, row)
        if tap is not None:
            assert cache.batch == 1, "a tap follows one stream"
            tap.weights_F = []
        for index, layer in enumerate(self.layers):

            def attend_self(attention: Attention, x_BND: Tensor, index: int = index) -> Tensor:
                write_rows(cache.text, index, cache.num_rows, attention.keys_values(x_BND))
                k_BATK, v_BATK = (t[:, :, : cache.num_rows + num_rows] for t in cache.text[index])
                return attention.forward(x_BND, k_BATK, v_BATK, mask=mask)

            def attend_cross(attention: Attention, x_BND: Tensor, index: int = index) -> Tensor:
                if tap is not None and any(layer == index for layer, _ in tap.heads):
                    weights_1A1F = attention.weights(x_BND[:, -1:], cache.cross[index][0][:, :, : horizons[0]])
                    tap.weights_F += [weights_1A1F[0, head, 0] for layer, head in tap.heads if layer == index]
                return torch.cat([self._cross_sliced(attention, x_BND, cache.cross, index, b, h) for b, h in enumerate(horizons)])

            x_BND = layer(x_BND, attend_self, attend_cross)
        cache.num_rows += num_rows
        return self.project(x_BND[:, -1])

    @staticmethod
    def _cross_sliced(attention: Attention, x_BND: Tensor, cross: KeysValues, index: int, stream: int, horizon: int) -> Tensor:
        """Cross-attention of one stream over its first `horizon` source tokens and no others; zero where the horizon is 0."""
        x_1ND = x_BND[stream : stream + 1]
        if horizon == 0:
            return torch.zeros_like(x_1ND)
        k_1AMK, v_1AMK = (t[stream : stream + 1, :, :horizon] for t in cross[index])
        return attention.forward(x_1ND, k_1AMK, v_1AMK)


def _zero_overflow(x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
    """x with rows that overflowed set to zero, and which those were; None for none."""
    if x_BTD.detach().sum().isfinite():  # one pass suffices: a sum with a NaN or an infinity in it is not finite
        return x_BTD, None
    overflowed_BT = ~torch.isfinite(x_BTD).all(-1)
    return torch.where(overflowed_BT[..., None], 0.0, x_BTD), overflowed_BT


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask to add to attention scores: 0 where visible, −∞ elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _any_so_far(flags_BT: Tensor) -> Tensor:
    """Whether a flag is set here or anywhere before."""
    return flags_BT.cumsum(1) > 0
