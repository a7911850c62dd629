"""The heads: the length head and the gamma head read no more than their buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zendaya.audit.probe import MORE, SAME_SHAPE, VARIANTS, Probe, Replacement
from zendaya.nn.decoder import History
from zendaya.nn.model import Model
from zendaya.schedule import PowerLaw, Schedule

Past = tuple[Tensor, list[int]] | None
DRAWS = 8
"""Windows that each head is tried on."""

Outputs = Callable[[Model, Tensor, Tensor, History | None], Tensor]
Decide = Callable[[Tensor, Past], int]


def check_length(probe: Probe) -> None:
    """The length head reads its buffer of the window, and nothing of other clips or the padding."""
    if probe.model.length is None:
        return
    keep = _buffer(probe, probe.schedule)

    def logits(model: Model, source_BTE: Tensor, lengths_B: Tensor, history: History | None) -> Tensor:
        return model.length_logits(source_BTE, lengths_B, history)

    def steps(window_TE: Tensor, past: Past) -> int:
        return probe.model.predict_steps(window_TE, keep, past)

    _check_head(probe, "length head", keep, "the predicted length", logits, steps)


def check_gamma(probe: Probe, schedule: Schedule) -> None:
    """The gamma head reads, for each γ it may choose, no more than the buffer of that γ."""
    gammas = probe.model.config.gammas

    def costs(model: Model, source_BTE: Tensor, lengths_B: Tensor, history: History | None) -> Tensor:
        return torch.cat(model.gamma_costs(source_BTE, lengths_B, history), -1)

    for place in range(len(gammas) - 1, 0, -1):
        keep = _buffer(probe, PowerLaw(gammas[place]))

        def settles(window_TE: Tensor, past: Past, place: int = place, keep: int = keep) -> int:
            return probe.model.settles_for(place, window_TE, keep, past, price=schedule.price)

        _check_head(probe, "gamma head", keep, f"whether gamma={gammas[place]} is taken", costs, settles)


def _buffer(probe: Probe, schedule: Schedule) -> int:
    """Source tokens of a window that a head may read under a schedule."""
    causal = probe.model.config.length == "inf"
    return schedule.buffer(probe.window_tokens, probe.model.config.max_steps) if causal else probe.window_tokens


def _check_head(probe: Probe, path: str, keep: int, what: str, outputs: Outputs, decide: Decide) -> None:
    """Test one head: its buffer, its raw outputs and its decision."""
    causal = probe.model.config.length == "inf"
    lengths_B = torch.tensor([keep] * 3)
    for _ in range(DRAWS):
        source_BTE = torch.stack([probe.tokens(probe.window_tokens + MORE) for _ in range(3)])
        past = (probe.tokens(probe.window_tokens // 2), probe.text(probe.steps // 2))
        base_1C = outputs(probe.model, source_BTE, lengths_B, probe.model.pack_history([past, None, past]))[:1]
        base = decide(source_BTE[0], past)
        probe.count_tested(path, 1)
        for variant in VARIANTS:
            if variant in SAME_SHAPE:
                probe_BTE = torch.stack([probe.replace(s, keep if i == 0 else 0, variant) for i, s in enumerate(source_BTE)])
                probe_1C = outputs(probe.model, probe_BTE, lengths_B, probe.model.pack_history([past, past, None]))[:1]
                probe.compare(Replacement(path, variant, [1], keep), base_1C, probe_1C)
            if causal and decide(probe.replace(source_BTE[0], keep, variant), past) != base:
                probe.add(path, variant, 1, keep, detail=f"{what} changes with tokens past the first {keep}")
                return
        longer = (probe.tokens(probe.window_tokens), probe.text(probe.steps - 1))
        source64_BTE = source_BTE.double()
        base64_1C, probe64_1C = (
            outputs(probe.double, source64_BTE, lengths_B, probe.double.pack_history(histories))[:1]
            for histories in ([past, None, past], [past, longer, longer])
        )
        probe.compare(Replacement(path, "longer neighbours", [1], keep, exact=False), base64_1C, probe64_1C)
