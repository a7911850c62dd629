"""Fast ways to compute what decoder.py writes plainly: dense layers on oneDNN, dropout, the loss without its logits.

Shape suffixes as in decoder.py, and I inputs or outputs of several heads, L layers side by side, R rows, C rows per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LOSS_ROWS = 256
"""Rows per block of `tied_cross_entropy`: the most logits that exist at once."""


class Dense(nn.Linear):
    """A linear layer whose training on CPU runs on oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias)


def project_heads(x_BTD: Tensor, layers: Sequence[nn.Linear], heads: int) -> Sequence[Tensor]:
    """What each dense layer makes of x, split into heads (B, A, T, K), in one product."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = torch.cat([layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers])
    y_BTI = _linear(x_BTD, weight, bias)
    y_BTLAK = y_BTI.view(*y_BTI.shape[:-1], len(layers), heads, layers[0].out_features // heads)
    return [y_BTAK.transpose(1, 2) for y_BTAK in y_BTLAK.unbind(2)]


def dropout_noise(like: Tensor, dropout: float) -> Tensor:
    """The factors of dropout, 0 or 1/(1 − p), p to 16 bits: four per random draw, where torch's own on CPU takes one draw each."""
    drop = min(round(dropout * 2**16), 2**16 - 1)
    draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device).random_(-(2**63), None)
    kept = draws.view(torch.int16)[: like.numel()].view(like.shape)
    return torch.ge(kept, drop - 2**15, out=torch.empty_like(like)).mul_(2**16 / (2**16 - drop))


def tied_cross_entropy(x_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, smoothing: float) -> Tensor:
    """Sum of cross-entropies of the logits x·Wᵀ, with label smoothing; the logits of a batch never all exist."""
    loss: Tensor = _TiedCrossEntropy.apply(x_RD, weight_VD, targets_R, smoothing)  # type: ignore[no-untyped-call]
    return loss


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x·Wᵀ + b; where gradients are wanted, by `_Linear`."""
    learns = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
    if learns and not torch.is_autocast_enabled(x.device.type):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return functional.linear(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b, by oneDNN for 32-bit floats on CPU: on AMD processors it was faster than MKL, which torch chooses."""
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


class _TiedCrossEntropy(torch.autograd.Function):
    """`tied_cross_entropy` a block of rows at a time, with its gradients computed in the same pass."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, smoothing: float) -> Tensor:
        learns = any(ctx.needs_input_grad)
        vocab, rows = weight_VD.shape[0], min(x_RD.shape[0], LOSS_ROWS)
        p_CV, total = x_RD.new_empty(rows, vocab), x_RD.new_zeros(())
        if learns:
            dx_RD, dweight_VD = torch.empty_like(x_RD), torch.zeros_like(weight_VD)
        for first in range(0, x_RD.shape[0], LOSS_ROWS):
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
