"""Alignment of source and text: a CTC loss that finds where each token was spoken, and a loss that guides cross-attention there.

A decoder trained from scratch on hours of speech, not thousands of hours, takes long before its cross-attention finds the sound of
the next word. CTC (Graves et al. 2006) needs no attention and aligns within a few hundred steps. Its best path gives the source token
that the first head of each text layer should attend to. Both losses are for training only; decoding is unchanged. Source layers stay
causal and horizons stay masked, so no step reads more than its horizon.

Shape suffixes as in decoder.py; S states of CTC: a blank, and a token and a blank for each token of the text.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

BLANK = 0  # [PAD], which no text holds
UNLIKELY = -1e9  # log-probability of impossible paths; finite, so that sums stay finite
CREDIBLE_NATS = 4.0
"""Highest cost per token of a best path that is used; a CTC that has not learned yet gives costlier paths."""
NEAR = 1  # source tokens on either side of a token's place that count as near


def ctc_loss(log_probs_BFV: Tensor, source_lengths_B: Tensor, text_BN: Tensor, lengths_B: Tensor) -> Tensor:
    """Sum of the negative log-likelihoods of texts, over all alignments; a text too long for its source counts nothing."""
    return functional.ctc_loss(
        log_probs_BFV.transpose(0, 1), text_BN, source_lengths_B, lengths_B, blank=BLANK, reduction="sum", zero_infinity=True
    )


@torch.no_grad()
def places(log_probs_BFV: Tensor, source_lengths_B: Tensor, text_BN: Tensor, lengths_B: Tensor) -> Tensor:
    """The source token at which CTC's best path writes each token of a text; −1 past its end, and where no path is credible.

    >>> log_probs = torch.tensor([[[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8]]]).log()
    >>> places(log_probs, torch.tensor([4]), torch.tensor([[1, 2]]), torch.tensor([2])).tolist()
    [[1, 3]]
    """
    batch, num_source, _ = log_probs_BFV.shape
    num_text = text_BN.shape[1]
    states_BS = text_BN.new_full((batch, 2 * num_text + 1), BLANK)
    states_BS[:, 1::2] = text_BN
    emitted_BFS = log_probs_BFV.gather(2, states_BS[:, None].expand(-1, num_source, -1))
    skips_BS = torch.full_like(emitted_BFS[:, 0], UNLIKELY)  # a blank may be skipped between two tokens that differ
    skips_BS[:, 2:].masked_fill_((states_BS[:, 2:] != BLANK) & (states_BS[:, 2:] != states_BS[:, :-2]), 0.0)
    best_BS = torch.full_like(skips_BS, UNLIKELY)
    best_BS[:, :2] = emitted_BFS[:, 0, :2]
    came_BFS = torch.zeros(emitted_BFS.shape, dtype=torch.int8, device=text_BN.device)
    for place in range(1, num_source):
        one_BS, two_BS = (functional.pad(best_BS[:, :-by], (by, 0), value=UNLIKELY) for by in (1, 2))
        step_BS, came = torch.stack([best_BS, one_BS, two_BS + skips_BS]).max(0)
        came_BFS[:, place] = came
        best_BS = torch.where((place < source_lengths_B)[:, None], step_BS + emitted_BFS[:, place], best_BS)
    row_B = torch.arange(batch, device=text_BN.device)
    state_B = 2 * lengths_B
    state_B = torch.where(best_BS[row_B, state_B - 1] > best_BS[row_B, state_B], state_B - 1, state_B)
    credible_B = best_BS[row_B, state_B] > -CREDIBLE_NATS * lengths_B
    places_BN = torch.full_like(text_BN, -1)
    for place in reversed(range(num_source)):
        here_B = place < source_lengths_B
        writes_B = here_B & (state_B % 2 == 1)
        places_BN[row_B[writes_B], state_B[writes_B] // 2] = place
        state_B = torch.where(here_B, state_B - came_BFS[row_B, place, state_B], state_B)
    return places_BN.masked_fill(~credible_B[:, None], -1)


def guide_loss(log_weights: list[Tensor], horizons_BN: Tensor, places_BN: Tensor) -> Tensor:
    """Sum over steps of −ln of the attention near each token's place, mean over layers; steps that may not read it count nothing."""
    source_F = torch.arange(log_weights[0].shape[2], device=places_BN.device)
    placed_BN1 = places_BN[..., None] >= 0
    near_BNF = placed_BN1 & ((source_F - places_BN[..., None]).abs() <= NEAR) & (source_F < horizons_BN[..., None])
    told_BN = near_BNF.any(-1)
    near_RF = near_BNF[told_BN]
    total = log_weights[0].new_zeros(())
    for log_weights_BNF in log_weights:
        total = total - log_weights_BNF[told_BN].masked_fill(~near_RF, -torch.inf).logsumexp(-1).sum()
    return total / len(log_weights)
