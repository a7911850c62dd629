"""Decoder rows of one stream: its cache in the engine, the source tokens it has not read yet, and what they cost.

Shape suffixes as in decoder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zendaya.errors import SourceError
from zendaya.nn.decoder import AttentionTap
from zendaya.runtime.engine import Engine, EngineCache
from zendaya.runtime.policies.base import Cost
from zendaya.runtime.window import Window


@dataclass(frozen=True)
class RowRequest:
    """Rows that a session needs before it can go on: their ids, how much of the window they read, whether the last is a step."""

    ids: Sequence[int]
    horizon: int
    is_step: bool
    tap: AttentionTap | None = None
    """Gets the attention of the last row, where the session asks for it."""


class DecoderRows:
    """Runs a stream's text rows through the engine, each reading the first tokens of the current window."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cache: EngineCache = engine.start()
        self.cost = Cost()
        self.window: Window

    def restart(self) -> None:
        """Forget all text and source."""
        self.cache = self.engine.start()

    def withdraw(self, kept: int) -> None:
        """Source tokens after the first `kept` were replaced: they are read again when a row needs them."""
        self.cache.keep_source(kept)

    def compute(self, request: RowRequest) -> Tensor:
        """The logits (V) of the last row asked for."""
        return (self.step if request.is_step else self.run)(request.ids, request.horizon, request.tap)

    def step(self, ids: Sequence[int], horizon: int, tap: AttentionTap | None = None) -> Tensor:
        """The logits (V) of a decode step."""
        return self.run(ids, horizon, tap)

    def run(self, ids: Sequence[int], horizon: int, tap: AttentionTap | None = None) -> Tensor:
        """Rows of text that read the window's first `horizon` tokens: the logits (V) of the last."""
        unread_TE = self.unread(horizon)
        if unread_TE.shape[0]:
            self.engine.read(self.cache, unread_TE[None])
        ids_1N = torch.tensor([list(ids)], device=self.window.tokens_TE.device)
        logits_1V = self.engine.prefill(self.cache, ids_1N, horizon, tap=tap)
        self.count(len(ids), horizon, finite=all(finite_rows(logits_1V)))
        return logits_1V[0]

    def unread(self, horizon: int) -> Tensor:
        """Of the window's first `horizon` tokens, those (T, E) that the cache has not read."""
        return self.window.tokens_TE[self.cache.num_source : horizon]

    def count(self, num_rows: int, horizon: int, *, finite: bool) -> None:
        """Count computed rows; logits that are not finite are a SourceError."""
        self.cost.rows += num_rows
        self.cost.passes += 1
        if not finite:
            raise SourceError(
                f"window {self.window.index}: a source token among the first {horizon} is not finite or no known id; check the encoder"
            )


def finite_rows(logits_SV: Tensor) -> list[bool]:
    """Whether all logits of each stream are finite; a finite sum says so more cheaply."""
    found = logits_SV.sum(-1).isfinite().tolist()
    return found if all(found) else logits_SV.isfinite().all(-1).tolist()
