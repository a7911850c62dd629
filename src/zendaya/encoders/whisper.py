"""Whisper's encoder over a stream: `full` is Whisper as published, offline only; `block` reads no further than its own block.

Token k of a 30 s span covers samples 320k … 320k+319. Two convolutions of kernel 3 (the second of stride 2) run over mel frames
of 400 samples every 160, so the token reads samples 320k−520 … 320k+519. A block of tokens [k0, k1) is computed, and arrives,
when sample 320·k1+199 does: 12.5 ms after its own end. Audio that has not arrived is never replaced by silence.

With `revise_s` the tokens just before a block are provisional: they are computed again with it, from more right context. With
`overlap_s` a span that is full slides: the next one begins at a quiet moment within it (method.md §10).

Shape suffixes: S samples, C mel bins, L mel frames, T tokens of a block, P positions of a span, D model width, A heads, K head width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from zendaya.encoders.base import Encoder, EncoderFactory, Tokens, Traits, readable_prefix, weights_digest
from zendaya.errors import ConfigError, SourceError
from zendaya.nn.whisper import SAMPLE_RATE, encode_offline, load_encoder, load_weights, published_name
from zendaya.sources.media import Samples

if TYPE_CHECKING:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

WINDOW, HOP = 400, 160
"""Mel frames of Whisper, in samples: 25 ms every 10 ms."""
TOKEN = 2 * HOP
"""Samples per token: the second convolution has stride 2."""
AHEAD = WINDOW // 2
"""Samples read past the end of a token: mel frame 2k+2 is centred there."""
BEHIND = 2 * HOP + WINDOW // 2
"""Samples read before the start of a token: mel frame 2k−2 is centred 2 hops before it."""

SPAN_S = 30.0
"""Longest span: the positions of Whisper's encoder."""
REVISE_S = 4.0
"""Longest stretch of provisional tokens: beyond it a token hardly changes, and each costs as much as a new one."""
SEARCH_S = (3.0, 1.0)
"""A span begins at the quietest moment between 3 s before and 1 s after the overlap asked for: people pause that often."""
MIN_OVERLAP_S = 1.0
"""Least overlap of two spans: about two words."""
QUIET_TOKENS = 10
"""Tokens, 0.2 s, over which quietness is measured: shorter than a pause, longer than a stop consonant."""
BLOCK_S = (0.24, 2.0)
"""Shortest and longest block: a shorter one loses phone information, a longer one is as late as an offline encoder."""
CEILING = 1.0
"""log₁₀ of the loudest mel energy expected; the floor lies 8 below. Whisper uses the clip's own maximum, which is future
information. 1.0 is near the median maximum of 61 LibriSpeech clips (train split, of dev-clean): 1.08; 5–95 %: −0.1–1.7."""
LARGEST_SAMPLE = 1e6
"""Full scale is 1; a larger sample is damage, and its energy would overflow float32."""


def load_whisper(
    name: str = "tiny.en", *, mode: Literal["full", "block"] = "block", block_s: float = 1.0, revise_s: float = 0.0, pool: int = 1,
    ceiling: float = CEILING, **hub: Any,
) -> WhisperFull | WhisperBlocks:  # fmt: skip
    """Open a Whisper encoder: tiny.en from its package, any other hub id or folder through transformers."""
    if mode not in ("full", "block"):
        raise ConfigError(f"whisper: mode must be 'full' (offline only) or 'block': got {mode!r}")
    encoder = load_encoder(load_weights(name, **hub))
    name = published_name(name)
    if mode == "full":
        return WhisperFull(encoder, name, pool=pool)
    return WhisperBlocks(encoder, name, block_s=block_s, revise_s=revise_s, pool=pool, ceiling=ceiling)


@dataclass
class _Heard:
    """The samples of a stream that are still needed, and the error in the next one."""

    total: int = 0
    """Samples since the stream began."""
    first: int = 0
    """Index of the first sample kept."""
    kept_S: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    problem: str | None = None

    def take(self, samples_S: Samples) -> None:
        """Add the samples before the first bad one; the next call raises its error."""
        self.check()
        if samples_S.ndim != 1 or samples_S.dtype.kind != "f":
            raise SourceError(
                f"audio: expected one channel of float samples at {SAMPLE_RATE} Hz, shape (any,): "
                f"got {samples_S.dtype} of shape {samples_S.shape}; mix down and convert first"
            )
        good = readable_prefix(samples_S, LARGEST_SAMPLE)
        if good < samples_S.size:
            self.problem = (
                f"audio: sample {self.total + good} ({(self.total + good) / SAMPLE_RATE:.3f} s) is {samples_S[good]}: "
                f"expected a number below {LARGEST_SAMPLE:g} in magnitude; the recording is damaged, or not float audio"
            )
        self.kept_S = np.concatenate([self.kept_S, samples_S[:good].astype(np.float32, copy=False)])
        self.total += good
        if good == 0:
            self.check()

    def check(self) -> None:
        if self.problem is not None:
            raise SourceError(self.problem)

    def between(self, start: int, stop: int) -> Tensor:
        """Samples start … stop−1; silence past the end of the stream."""
        assert start >= self.first, (start, self.first)
        heard_S = self.kept_S[start - self.first : stop - self.first]
        return functional.pad(torch.from_numpy(heard_S), (0, stop - start - heard_S.size))

    def forget(self, before: int) -> None:
        self.kept_S = self.kept_S[before - self.first :].copy()
        self.first = before


def _tokens(name: str, seconds: float, low_s: float = 0.0, high_s: float = SPAN_S) -> int:
    """Tokens of a length in seconds, which is checked."""
    tokens = seconds * SAMPLE_RATE / TOKEN
    if not low_s - 1e-9 <= seconds <= high_s + 1e-9 or abs(tokens - round(tokens)) > 1e-6:
        raise ConfigError(f"whisper: {name} must be a multiple of 0.02 s in {low_s:g} … {high_s:g}: got {seconds!r}")
    return round(tokens)


def _check_pool(pool: int, span: int) -> int:
    if not isinstance(pool, int) or not 1 <= pool <= span:
        raise ConfigError(f"whisper: pool must be a whole number of tokens in 1 … {span} (15 gives 3.3 tokens/s): got {pool!r}")
    return pool


class WhisperFull(Encoder[Samples, _Heard]):
    """Whisper as published, offline only: bidirectional attention, log-mel floor relative to the loudest moment.

    All tokens arrive at the end of the recording. A recording longer than 30 s is encoded in pieces of 30 s.
    """

    def __init__(self, encoder: WhisperEncoder, name: str, *, pool: int = 1) -> None:
        self.encoder = encoder.eval()
        self.span: int = encoder.config.max_source_positions
        self.pool = _check_pool(pool, self.span)
        self.traits = Traits(
            name=f"whisper {name} full pool={pool}", modality="audio", dim=encoder.config.d_model, tokens_per_s=SAMPLE_RATE / TOKEN / pool,
            look_back_s=math.inf, look_ahead_s=math.inf, live=False,
        )  # fmt: skip

    def digest(self) -> str:
        return weights_digest(self.encoder)

    def start(self) -> _Heard:
        return _Heard()

    def read(self, state: _Heard, raw: Samples) -> Tokens:
        state.take(raw)
        return Tokens.none(self.traits.dim)

    def finish(self, state: _Heard) -> Tokens:
        state.check()
        pooled = []
        for first in range(0, state.total, self.span * TOKEN):
            piece_S = state.kept_S[first : first + self.span * TOKEN]
            values_TD = encode_offline(self.encoder, piece_S)[: math.ceil(piece_S.size / TOKEN)]
            pooled += [group_TD.mean(0, keepdim=True) for group_TD in torch.split(values_TD, self.pool)] if self.pool > 1 else [values_TD]
        if not pooled:
            return Tokens.none(self.traits.dim)
        values_TD = torch.cat(pooled)
        return Tokens(values_TD, np.full(values_TD.shape[0], state.total / SAMPLE_RATE))


@dataclass
class BlockState:
    """A stream between two blocks: its last samples, the span's keys and values so far, the tokens not yet pooled."""

    heard: _Heard = field(default_factory=_Heard)
    span_start: int = 0
    """First sample of the span."""
    place: int = 0
    """Tokens of the span so far."""
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values per layer, (A, P, K); the first `place` are written."""
    tail_TD: Tensor | None = None
    """Inputs of the attention layers for the tokens that the next block computes again."""
    again: int = 0
    """After a slide: the tokens of the span before that the first block computes again."""
    unpooled: list[Tensor] = field(default_factory=list)


def attend(q_BATK: Tensor, k_BAPK: Tensor, v_BAPK: Tensor) -> Tensor:
    """Attention in the precision of the keys; in bfloat16 as two matrix products, which on CPU takes half the time of torch's."""
    if k_BAPK.dtype != torch.bfloat16:
        return functional.scaled_dot_product_attention(q_BATK, k_BAPK, v_BAPK)
    scores_BATP = (q_BATK * q_BATK.shape[-1] ** -0.5).to(k_BAPK.dtype) @ k_BAPK.transpose(-1, -2)
    return (scores_BATP.softmax(-1) @ v_BAPK).to(q_BATK.dtype)


class WhisperBlocks(Encoder[Samples, BlockState]):
    """Whisper with block-causal attention: a token attends to its own block and the blocks before it in its 30 s span.

    Positions, convolutions and attention restart with each span, so a stream needs constant memory. The shape of every matrix
    product depends on the position in the span alone, so any chunks give the same bits. The last `revise_s` before a block are computed
    again with it. With `overlap_s`, a span of `span_s` that is full goes on from a quiet moment about that long before its end.
    """

    def __init__(
        self, encoder: WhisperEncoder, name: str, *, block_s: float = 1.0, revise_s: float = 0.0, pool: int = 1, ceiling: float = CEILING,
        span_s: float = SPAN_S, overlap_s: float = 0.0,
    ) -> None:  # fmt: skip
        config = encoder.config
        if not math.isfinite(ceiling):
            raise ConfigError(f"whisper: ceiling must be a finite log10 energy, near {CEILING}: got {ceiling!r}")
        self.encoder = encoder.eval().requires_grad_(False)
        self.name = name
        self.settings: dict[str, Any] = {
            "block_s": block_s, "revise_s": revise_s, "pool": pool, "ceiling": ceiling, "span_s": span_s, "overlap_s": overlap_s,
        }  # fmt: skip
        self.block = _tokens("block_s", block_s, *BLOCK_S)
        self.revise = _tokens("revise_s", revise_s, 0.0, REVISE_S)
        self.span = min(_tokens("span_s", span_s, 2 * BLOCK_S[0], SPAN_S), config.max_source_positions)
        self.overlap = _tokens("overlap_s", overlap_s, MIN_OVERLAP_S, self.span * TOKEN / SAMPLE_RATE / 2) if overlap_s else 0
        self.pool = _check_pool(pool, self.span)
        if pool > 1 and (self.revise or self.overlap):
            raise ConfigError(f"whisper: revise_s and overlap_s are for tokens that are not pooled, pool=1: got pool={pool}")
        if self.overlap and self.span < 2 * self.block + 2 * _tokens("overlap_s", MIN_OVERLAP_S):
            raise ConfigError(
                f"whisper: overlap_s needs a span of two blocks and {2 * MIN_OVERLAP_S:g} s: got span_s={span_s!r}, block_s={block_s!r}; "
                f"give a longer span_s, or overlap_s=0"
            )
        self.floor = ceiling - 8.0
        self.heads: int = config.encoder_attention_heads
        self.traits = self._traits(span_s, ceiling)
        from transformers import WhisperFeatureExtractor

        filters = WhisperFeatureExtractor(feature_size=config.num_mel_bins).mel_filters
        self._filters_CF = torch.from_numpy(np.ascontiguousarray(filters.T)).float()
        self._window_S = torch.hann_window(WINDOW)

    def _traits(self, span_s: float, ceiling: float) -> Traits:
        token_s = TOKEN / SAMPLE_RATE
        name = f"whisper {self.name} block={self.block * token_s:g}s pool={self.pool} ceiling={ceiling:g}"
        name += f" revise={self.revise * token_s:g}s" if self.revise else ""
        name += f" span={span_s:g}s" if span_s != SPAN_S else ""
        name += f" overlap={self.overlap * token_s:g}s" if self.overlap else ""
        return Traits(
            name=name, modality="audio", dim=self.encoder.config.d_model, tokens_per_s=SAMPLE_RATE / TOKEN / self.pool,
            look_back_s=(self.span - self.pool) * token_s, look_ahead_s=(self.block - 1) * token_s + AHEAD / SAMPLE_RATE, live=True,
            block_tokens=max(1, self.block // self.pool),
            revise_tokens=max(self.revise, self._longest_overlap if self.overlap else 0),
        )  # fmt: skip

    def digest(self) -> str:
        return weights_digest(self.encoder)

    def start(self) -> BlockState:
        config = self.encoder.config
        shape = (self.heads, self.span, config.d_model // self.heads)
        dtype = next(self.encoder.layers[0].self_attn.q_proj.parameters()).dtype
        return BlockState(cache=[(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(config.encoder_layers)])

    def read(self, state: BlockState, raw: Samples) -> Tokens:
        return Tokens.join(list(self.blocks(state, raw)), self.traits.dim)

    def blocks(self, state: BlockState, raw: Samples) -> Iterator[Tokens]:
        state.heard.take(raw)
        while (needed := self._block_end(state) + AHEAD) <= state.heard.total:
            yield self._next_tokens(state, needed)
        # What the next span may begin in stays: the last block, or the overlap with its search.
        kept = max(self.block, self._longest_overlap + QUIET_TOKENS) if self.overlap else self.block
        state.heard.forget(max(state.heard.first, state.span_start + (state.place - kept) * TOKEN - BEHIND))

    def begin_span(self, state: BlockState, *, at_s: float) -> bool:
        sample = round(at_s * SAMPLE_RATE)
        last = state.span_start + (state.place - self.block) * TOKEN
        if not max(0, last) <= sample <= state.heard.total:
            raise SourceError(f"whisper: a span begins in the last block, at samples {max(0, last)} … {state.heard.total}: got {sample}")
        state.span_start, state.place, state.tail_TD = sample, 0, None
        state.unpooled.clear()
        return True

    def context_start_s(self, state: BlockState) -> float:
        return state.span_start / SAMPLE_RATE

    def with_settings(self, **settings: Any) -> WhisperBlocks:
        if unknown := settings.keys() - self.settings.keys():
            raise ConfigError(f"whisper: no setting {', '.join(sorted(unknown))}; expected one of {', '.join(self.settings)}")
        return WhisperBlocks(self.encoder, self.name, **{**self.settings, **settings})

    def finish(self, state: BlockState) -> Tokens:
        return Tokens.join(self.last_blocks(state), self.traits.dim)

    def last_blocks(self, state: BlockState) -> Iterator[Tokens]:
        state.heard.check()
        total = state.heard.total
        while (left := total - state.span_start - state.place * TOKEN) > 0:
            yield self._next_tokens(state, total, most=math.ceil(left / TOKEN))  # silence follows the end, as in Whisper's training
        if state.unpooled:
            yield self._flush(state, total)

    def _next_tokens(self, state: BlockState, arrived: int, most: int | None = None) -> Tokens:
        """The next block, `most` new tokens of it, with the tokens before it that it revises."""
        slides = self.overlap > 0 and state.place + self.block > self.span
        if slides:
            self._slide(state)
        revised = state.again if slides else 0 if state.tail_TD is None else state.tail_TD.shape[0]
        values_TD = self._encode_block(state)
        tokens = self._pool(state, values_TD[: None if most is None else revised + most], arrived)
        return dataclasses.replace(tokens, revised=revised, restart=state.span_start // TOKEN if slides else None) if revised else tokens

    @property
    def _longest_overlap(self) -> int:
        return min(self.overlap + _tokens("overlap_s", SEARCH_S[0]), self.span // 2)

    def _slide(self, state: BlockState) -> None:
        """Begin the next span at the quietest moment around the overlap, as far as it was heard before the next block."""
        shortest = max(self.overlap - _tokens("overlap_s", SEARCH_S[1]), _tokens("overlap_s", MIN_OVERLAP_S))
        low, high, half = state.place - self._longest_overlap, state.place - shortest, QUIET_TOKENS // 2
        heard_S = state.heard.between(*(state.span_start + token * TOKEN for token in (low - half, high + half))).numpy()
        energy_T = (heard_S.astype(np.float64) ** 2).reshape(-1, TOKEN).sum(1)
        around_T = np.lib.stride_tricks.sliding_window_view(energy_T, QUIET_TOKENS).sum(1)
        begin = low + int(around_T.argmin())
        state.again = state.place - begin
        state.span_start, state.place, state.tail_TD = state.span_start + begin * TOKEN, 0, None

    def _block_end(self, state: BlockState) -> int:
        stop = state.place + state.again + self.block
        return state.span_start + (stop if self.overlap else min(stop, self.span)) * TOKEN

    @torch.inference_mode()
    def _encode_block(self, state: BlockState) -> Tensor:
        """Compute the next block of tokens, after those before it that it revises, and move the state past it."""
        first, stop = state.place, min(state.place + state.again + self.block, self.span)
        x_TD = self._convolve(self._log_mel(state), first=state.place == 0)
        x_TD = x_TD + self.encoder.embed_positions.weight[state.place : stop]
        if self.revise:
            if state.tail_TD is not None:
                x_TD, first = torch.cat([state.tail_TD, x_TD]), first - state.tail_TD.shape[0]
            state.tail_TD = x_TD[-self.revise :].clone()
        for layer, (k_APK, v_APK) in zip(self.encoder.layers, state.cache, strict=True):
            attend = self._attention(layer.self_attn, k_APK, v_APK, first, stop)
            x_TD = x_TD + attend(layer.self_attn_layer_norm(x_TD))
            x_TD = x_TD + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x_TD))))
        state.place, state.again = stop, 0
        if stop == self.span and not self.overlap:
            state.span_start, state.place, state.tail_TD = state.span_start + self.span * TOKEN, 0, None
        return self.encoder.layer_norm(x_TD)

    def _log_mel(self, state: BlockState) -> Tensor:
        """Mel frames 2·k0−2 … 2·k1 of the block [k0, k1); frame 0 of a span is mirrored at its left edge, as in Whisper."""
        start, stop = state.span_start + state.place * TOKEN - BEHIND, self._block_end(state) + AHEAD
        if state.place == 0:
            samples_S = state.heard.between(state.span_start, stop)
            samples_S = torch.cat([samples_S[1 : WINDOW // 2 + 1].flip(0), samples_S])
        else:
            samples_S = state.heard.between(start, stop)
        power_LF = torch.fft.rfft(samples_S.unfold(0, WINDOW, HOP) * self._window_S).abs() ** 2
        log_CL = (self._filters_CF @ power_LF.T).clamp(min=1e-10).log10()
        return (log_CL.clamp(min=self.floor) + 4.0) / 4.0

    def _convolve(self, mel_CL: Tensor, *, first: bool) -> Tensor:
        """The two convolutions over the frames they read; only the start of a span is zero-padded, as in Whisper."""
        conv1, conv2 = self.encoder.conv1, self.encoder.conv2
        edge = (1, 0) if first else (0, 0)
        x_DL = functional.gelu(functional.conv1d(functional.pad(mel_CL, edge), conv1.weight, conv1.bias))
        x_DT = functional.gelu(functional.conv1d(functional.pad(x_DL, edge), conv2.weight, conv2.bias, stride=2))
        return x_DT.T

    def _attention(self, attention: Any, k_APK: Tensor, v_APK: Tensor, place: int, stop: int) -> Callable[[Tensor], Tensor]:
        def split(x_TD: Tensor) -> Tensor:
            return x_TD.view(x_TD.shape[0], self.heads, -1).transpose(0, 1)

        def attended(x_TD: Tensor) -> Tensor:
            k_APK[:, place:stop], v_APK[:, place:stop] = split(attention.k_proj(x_TD)), split(attention.v_proj(x_TD))
            q_ATK = split(attention.q_proj(x_TD))
            y_ATK = attend(q_ATK[None], k_APK[None, :, :stop], v_APK[None, :, :stop])[0]
            return attention.out_proj(y_ATK.transpose(0, 1).flatten(1))

        return attended

    def _pool(self, state: BlockState, values_TD: Tensor, arrived: int) -> Tokens:
        """Means of `pool` tokens, which arrive with their last token; no group crosses a span."""
        if self.pool == 1:
            return Tokens(values_TD.clone(), np.full(values_TD.shape[0], arrived / SAMPLE_RATE))
        parts = []
        for value_D in values_TD:
            state.unpooled.append(value_D)
            if len(state.unpooled) == self.pool:
                parts.append(self._flush(state, arrived))
        if state.place == 0 and state.unpooled:  # the span has ended inside a group
            parts.append(self._flush(state, arrived))
        return Tokens.join(parts, self.traits.dim)

    def _flush(self, state: BlockState, arrived: int) -> Tokens:
        mean_1D = torch.stack(state.unpooled).mean(0, keepdim=True)
        state.unpooled.clear()
        return Tokens(mean_1D, np.array([arrived / SAMPLE_RATE]))


ENCODER = EncoderFactory(
    modality="audio", open=load_whisper, which="tiny.en, a hub id or a folder",
    settings={"mode": str, "block_s": float, "revise_s": float, "pool": int, "ceiling": float},
)  # fmt: skip
