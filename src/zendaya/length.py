"""Length heads: how many steps a decode will take, from source that may be read before it begins (method.md §3).

A dial head is of the same kind, and says what each γ of a grid would cost. Shape suffixes as in decoder.py, and C outputs: of a
length head, class c is length c + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def pool(x_BTE: Tensor, lengths_B: Tensor) -> Tensor:
    """Mean of each row's first `lengths` vectors; what lies beyond is selected away, not multiplied, so that it may be anything."""
    inside_BT1 = (torch.arange(x_BTE.shape[1], device=x_BTE.device) < lengths_B[:, None])[..., None]
    return torch.where(inside_BT1, x_BTE, 0.0).sum(1) / lengths_B.clamp(min=1)[:, None]


def _dense(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


class FixLength(nn.Module):
    """fix: the mean-pooled source of the whole segment → two dense layers → classes (Sec. 2.4)."""

    def __init__(self, source_dim: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.dense = _dense(source_dim, hidden, outputs)

    def forward(self, source_BE: Tensor) -> Tensor:
        return self.dense(source_BE)


class InfLength(nn.Module):
    """inf: three pooled summaries, all arrived before the window decodes, each with its own embedding for when there is none (Sec. 3.2)."""

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
        """Outputs (B, C); a length of 0 means that summary is absent."""
        summaries = [
            torch.where(lengths_B[:, None] > 0, pool(x_BTE, lengths_B), absent)
            for x_BTE, lengths_B, absent in (
                (buffer_BTE, buffer_lengths_B, self.no_buffer),
                (previous_BGE, previous_lengths_B, self.no_previous),
                (text_BHD, text_lengths_B, self.no_text),
            )
        ]
        return self.dense(torch.cat(summaries, -1))
