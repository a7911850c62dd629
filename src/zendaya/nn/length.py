"""Length heads: predict the number of steps of a decode from source that may be read before it begins (method.md §3).

A gamma head has the same form and predicts the costs of each γ. Shape suffixes as in decoder.py, and C outputs: class c of a length head
is length c + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def pool(x_BTE: Tensor, lengths_B: Tensor) -> Tensor:
    """Mean of each row's first `lengths` vectors; the others are dropped by selection, not by a product with 0, so they may be NaN."""
    inside_BT1 = (torch.arange(x_BTE.shape[1], device=x_BTE.device) < lengths_B[:, None])[..., None]
    return torch.where(inside_BT1, x_BTE, 0.0).sum(1) / lengths_B.clamp(min=1)[:, None]


def _dense(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


class FixLength(nn.Module):
    """fix: two dense layers over the mean of the whole segment's source (Sec. 2.4)."""

    def __init__(self, source_dim: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.dense = _dense(source_dim, hidden, outputs)

    def forward(self, source_BE: Tensor) -> Tensor:
        return self.dense(source_BE)


class InfLength(nn.Module):
    """inf: two dense layers over the means of buffer, previous source and previous text (Sec. 3.2); an absent one has its own embedding."""

    def __init__(self, source_dim: int, text_dim: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.dense = _dense(2 * source_dim + text_dim, hidden, outputs)
        self.no_buffer = nn.Parameter(torch.zeros(source_dim))
        self.no_previous = nn.Parameter(torch.zeros(source_dim))
        self.no_text = nn.Parameter(torch.zeros(text_dim))

    def forward(
        self, buffer_BTE: Tensor, buffer_lengths_B: Tensor, previous_BGE: Tensor, previous_lengths_B: Tensor,
        text_BHD: Tensor, text_lengths_B: Tensor,
    ) -> Tensor:  # fmt: skip
        """Outputs (B, C); a length of 0 means that the summary is absent."""
        summaries = [
            torch.where(lengths_B[:, None] > 0, pool(x_BTE, lengths_B), absent)
            for x_BTE, lengths_B, absent in (
                (buffer_BTE, buffer_lengths_B, self.no_buffer),
                (previous_BGE, previous_lengths_B, self.no_previous),
                (text_BHD, text_lengths_B, self.no_text),
            )
        ]
        return self.dense(torch.cat(summaries, -1))
