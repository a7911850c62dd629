"""PyTorch's engine: the decoder itself, on any device, one stream after another.

Shape suffixes as in decoder.py; S streams of a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zendaya.nn.cache import Cache
from zendaya.nn.decoder import AttentionTap, Decoder, Taps


class TorchEngine:
    """Runs a decoder's rows by PyTorch, in the decoder's own type."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.config = decoder, decoder.config

    def start(self, batch: int = 1) -> Cache:
        return self.decoder.start(batch)

    def read(self, cache: Cache, source_BTE: Tensor) -> None:
        self.decoder.read(cache, source_BTE)

    def read_many(self, caches: Sequence[Cache], tokens: Sequence[Tensor]) -> None:
        for cache, tokens_TE in zip(caches, tokens, strict=True):
            self.decoder.read(cache, tokens_TE[None])

    def prefill(self, cache: Cache, ids_BN: Tensor, horizon: int, *, tap: AttentionTap | None = None) -> Tensor:
        return self.decoder.prefill(cache, ids_BN, horizon, tap=tap)

    def step(self, cache: Cache, ids_B: Tensor, horizons: int | Sequence[int], *, tap: AttentionTap | None = None) -> Tensor:
        return self.decoder.step(cache, ids_B, horizons, tap=tap)

    def rows(self, caches: Sequence[Cache], ids: Sequence[Sequence[int]], horizons: Sequence[int], taps: Taps = ()) -> Tensor:
        device = self.decoder.tokens.weight.device
        return torch.cat([
            self.decoder.prefill(cache, torch.tensor([list(each)], device=device), horizon, tap=tap)
            for cache, each, horizon, tap in zip(caches, ids, horizons, taps or [None] * len(caches), strict=True)
        ])  # fmt: skip
