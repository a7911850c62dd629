"""Whisper's encoder over padded batches, differentiable: what `WhisperBlocks` gives a stream, for many recordings at once.

For training: a recording of at most one span gives the same tokens as the stream does, to float rounding. What follows its end is
silence up to the end of its last block, as in the stream, and later padding lies in later blocks, which no token attends to.

A token that is encoded again with later blocks has several versions. `encode_versions` gives all of them for one recording, and
`Versions` says which of them a reader at a given moment has.

Shape suffixes: B recordings, S samples, C mel bins, L mel frames, T tokens, M versions of tokens, N text rows, D model width, A heads,
K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from zendaya.encoders.whisper import AHEAD, HOP, TOKEN, WINDOW, attend
from zendaya.sources.media import Samples

if TYPE_CHECKING:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

QUERIES = 50
"""Queries attended with at once at least: enough to be one product. Where a block holds fewer, several go together behind a mask."""


def num_tokens(num_samples: int) -> int:
    """Tokens of a recording of that many samples."""
    return -(-num_samples // TOKEN)


def mel_filters(num_bins: int) -> Tensor:
    """Whisper's mel filters (C, frequencies)."""
    from transformers import WhisperFeatureExtractor

    return torch.from_numpy(np.ascontiguousarray(WhisperFeatureExtractor(feature_size=num_bins).mel_filters.T)).float()


def log_mel(recordings: Sequence[Samples], filters_CF: Tensor, *, block: int, floor: float | None) -> Tensor:
    """Log-mel frames 0 … 2T (B, C, 2T + 1) of recordings, silence after each, T the tokens of the longest in whole blocks.

    `floor` is the lowest log₁₀ energy, 8 below the fixed ceiling; None takes it from each recording's own maximum, as Whisper does.
    """
    blocks = max(-(-num_tokens(samples_S.size) // block) for samples_S in recordings)
    count = blocks * block
    padded_BS = torch.zeros(len(recordings), count * TOKEN + AHEAD)
    for row_S, samples_S in zip(padded_BS, recordings, strict=True):
        row_S[: samples_S.size] = torch.from_numpy(samples_S)
    padded_BS = torch.cat([padded_BS[:, 1 : WINDOW // 2 + 1].flip(1), padded_BS], 1)
    power_BLF = torch.fft.rfft(padded_BS.unfold(1, WINDOW, HOP) * torch.hann_window(WINDOW)).abs() ** 2
    log_BCL = (filters_CF @ power_BLF.transpose(1, 2)).clamp(min=1e-10).log10()
    lowest = log_BCL.amax((1, 2), keepdim=True) - 8.0 if floor is None else torch.full((len(recordings), 1, 1), floor)
    return (torch.maximum(log_BCL, lowest) + 4.0) / 4.0


def encode_batch(encoder: WhisperEncoder, mel_BCL: Tensor, *, block: int | None) -> Tensor:
    """Tokens (B, T, D) of log-mel frames 0 … 2T, each attending to its own block of `block` and those before, or (None) to all."""
    x_BDL = functional.gelu(functional.conv1d(functional.pad(mel_BCL, (1, 0)), encoder.conv1.weight, encoder.conv1.bias))
    x_BDT = functional.gelu(functional.conv1d(functional.pad(x_BDL, (1, 0)), encoder.conv2.weight, encoder.conv2.bias, stride=2))
    x_BTD = x_BDT.transpose(1, 2)
    x_BTD = x_BTD + encoder.embed_positions.weight[: x_BTD.shape[1]]
    for layer in encoder.layers:
        x_BTD = x_BTD + _attend(layer.self_attn, layer.self_attn_layer_norm(x_BTD), block)
        x_BTD = x_BTD + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x_BTD))))
    return encoder.layer_norm(x_BTD)


def _attend(attention: Any, x_BTD: Tensor, block: int | None) -> Tensor:
    def split(x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:2], attention.num_heads, -1).transpose(1, 2)

    q_BATK, k_BATK, v_BATK = split(attention.q_proj(x_BTD)), split(attention.k_proj(x_BTD)), split(attention.v_proj(x_BTD))
    if block is None:
        y_BATK = functional.scaled_dot_product_attention(q_BATK, k_BATK, v_BATK)
    else:
        parts, count = [], x_BTD.shape[1]
        step = -(-QUERIES // block) * block
        for first in range(0, count, step):
            stop = min(first + step, count)
            some_BATK = (q_BATK[:, :, first:stop], k_BATK[:, :, :stop], v_BATK[:, :, :stop])
            row = torch.arange(stop, device=x_BTD.device) // block
            alone = stop - first <= block
            parts.append(
                attend(*some_BATK) if alone else functional.scaled_dot_product_attention(*some_BATK, attn_mask=row <= row[first:, None])
            )
        y_BATK = torch.cat(parts, 2)
    return attention.out_proj(y_BATK.transpose(1, 2).flatten(2))


GROUP = 256
"""Versions attended with at once: few enough that little is computed behind the mask."""


@dataclass(frozen=True)
class Versions:
    """The blocks of a span, and the versions of its tokens: with each block the last `revise` tokens before it are encoded again."""

    ends: tuple[int, ...]
    """Where each block ends, in tokens of the span."""
    revise: int

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """First token and end of what is encoded with each block."""
        return [(max(0, before - self.revise), end) for before, end in zip((0, *self.ends), self.ends, strict=False)]

    @cached_property
    def token_M(self) -> Tensor:  # noqa: N802
        """The token of each version, block after block."""
        return torch.cat([torch.arange(first, end) for first, end in self._spans])

    @cached_property
    def block_M(self) -> Tensor:  # noqa: N802
        """The block that each version was encoded with."""
        return torch.cat([torch.full((end - first,), block) for block, (first, end) in enumerate(self._spans)])

    @cached_property
    def final_M(self) -> Tensor:  # noqa: N802
        """Which versions are never replaced."""
        kept_until = torch.tensor([*(end - self.revise for end in self.ends[:-1]), self.ends[-1]])
        return self.token_M < kept_until[self.block_M]

    def visible(self, horizons_N: Tensor) -> Tensor:
        """The versions (N, M) that each row reads: the newest of its first Ω tokens at the end of the block that Ω lies in."""
        block_N = torch.searchsorted(torch.tensor(self.ends), horizons_N)
        newest_NM = torch.where(self.block_M < block_N[:, None], self.final_M, self.block_M == block_N[:, None])
        return newest_NM & (self.token_M < horizons_N[:, None])


def encode_versions(encoder: WhisperEncoder, mel_1CL: Tensor, versions: Versions) -> Tensor:
    """All versions (M, D) of the tokens of one recording, from its log-mel frames 0 … 2T."""
    x_1DL = functional.gelu(functional.conv1d(functional.pad(mel_1CL, (1, 0)), encoder.conv1.weight, encoder.conv1.bias))
    x_1DT = functional.gelu(functional.conv1d(functional.pad(x_1DL, (1, 0)), encoder.conv2.weight, encoder.conv2.bias, stride=2))
    x_TD = x_1DT[0].T + encoder.embed_positions.weight[: x_1DT.shape[2]]
    x_MD = x_TD[versions.token_M]
    groups = _groups(versions)
    for layer in encoder.layers:
        x_MD = x_MD + _attend_versions(layer.self_attn, layer.self_attn_layer_norm(x_MD), versions, groups)
        x_MD = x_MD + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x_MD))))
    return encoder.layer_norm(x_MD)


def _groups(versions: Versions) -> list[tuple[int, int, int, Tensor]]:
    """Blocks attended with together: their first version and end, the final versions before them, the mask of their own keys."""
    edges = [0, *(torch.bincount(versions.block_M).cumsum(0)).tolist()]
    found, first = list[tuple[int, int, int, Tensor]](), 0
    for place, end in enumerate(edges[1:], start=1):
        if place < len(edges) - 1 and edges[place + 1] - first <= GROUP:
            continue
        block_Q, final_Q = versions.block_M[first:end], versions.final_M[first:end]
        own_QQ = (block_Q == block_Q[:, None]) | ((block_Q < block_Q[:, None]) & final_Q)
        before = int(versions.final_M[:first].sum())
        found.append((first, end, before, functional.pad(own_QQ, (before, 0), value=True)))
        first = end
    return found


def _attend_versions(attention: Any, x_MD: Tensor, versions: Versions, groups: Sequence[tuple[int, int, int, Tensor]]) -> Tensor:
    def split(x_MD: Tensor) -> Tensor:
        return x_MD.view(x_MD.shape[0], attention.num_heads, -1).transpose(0, 1)[None]

    q_1AMK, k_1AMK, v_1AMK = split(attention.q_proj(x_MD)), split(attention.k_proj(x_MD)), split(attention.v_proj(x_MD))
    final_1APK = [x_1AMK[:, :, versions.final_M] for x_1AMK in (k_1AMK, v_1AMK)]
    parts = []
    for first, end, before, mask_QP in groups:
        keys, values = (
            torch.cat([final[:, :, :before], own[:, :, first:end]], 2) for final, own in zip(final_1APK, (k_1AMK, v_1AMK), strict=True)
        )
        parts.append(functional.scaled_dot_product_attention(q_1AMK[:, :, first:end], keys, values, attn_mask=mask_QP))
    return attention.out_proj(torch.cat(parts, 2)[0].transpose(0, 1).flatten(1))
