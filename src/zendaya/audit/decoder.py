"""The decoder's paths, teacher-forced and incremental, one clip and a batch; and its heads, which read no more than their buffer.

Shape suffixes: B clips, N steps, T source tokens, E features of a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zendaya.audit.probe import MORE, SAME_SHAPE, VARIANTS, Probe
from zendaya.nn.decoder import History
from zendaya.nn.model import Model
from zendaya.schedule import PowerLaw, Schedule

SWEEP = 64
"""Horizons tried with NaN, the sharpest replacement: any output that reads one shows it."""
Past = tuple[Tensor, list[int]] | None
DRAWS = 8
"""Windows that each head is tried on."""

Outputs = Callable[[Model, Tensor, Tensor, History | None], Tensor]
Decide = Callable[[Tensor, Past], int]


def check_schedule(probe: Probe) -> None:
    """The one condition of Theorem 1: horizons never decrease."""
    horizons = probe.schedule.horizons(probe.window_tokens, probe.steps)
    probe.count_tested("schedule", probe.steps)
    if drops := (np.nonzero(np.diff(horizons) < 0)[0] + 2).tolist():
        before, after = horizons[drops[0] - 2 : drops[0]].tolist()
        detail = f"the horizon decreases by {before - after}, so step {drops[0]} inherits what step {drops[0] - 1} read"
        probe.add("schedule", "nothing", drops[0], after, detail=detail)


def check_forced(probe: Probe, *, history: bool) -> None:
    """Teacher-forced, one clip: row i may change only with the first Ω_i tokens (of the active window, if there is a history)."""
    path = "teacher-forced, history" if history else "teacher-forced"
    source_TE, text = probe.tokens(probe.window_tokens - MORE), probe.text(probe.steps - 1)
    past = [(probe.tokens(probe.window_tokens), probe.text(probe.steps - 1))] if history else None

    def logits(model: Model, tokens_TE: Tensor) -> Tensor:
        return model(model.batch([tokens_TE], [text], probe.schedule, scale=probe.window_tokens, histories=past))[0]

    base_NV, base64_NV = logits(probe.model, source_TE), logits(probe.double, source_TE)

    def locate(step: int, first: int) -> int:
        for index in range(first, source_TE.shape[0]):
            changed_TE = source_TE.clone()
            changed_TE[index] = probe.tokens(1, spread=3.0)[0]
            if not torch.equal(base_NV[step - 1], logits(probe.model, changed_TE)[step - 1]):
                return index
        return first

    horizons = probe.horizons(source_TE.shape[0], probe.steps)
    keeps = [h for h in horizons if h < source_TE.shape[0]]
    thorough = set(probe.some(keeps))
    for keep in sorted({*probe.some(keeps, SWEEP), *thorough}):
        steps = [step for step, h in enumerate(horizons, start=1) if h <= keep]
        probe.count_tested(path, horizons.count(keep))
        for variant in VARIANTS if keep in thorough else ("nan",):
            probe_TE = probe.replace(source_TE, keep, variant)
            if variant in SAME_SHAPE:
                probe_NV = logits(probe.model, probe_TE)
                probe.compare(path, variant, steps, keep, base_NV, probe_NV, locate=locate)
                if variant == "nan":
                    _check_reads(probe, path, horizons, keep, probe_NV)
            elif keep > 0:  # a clip has at least one token
                probe.compare(path, variant, steps, keep, base64_NV, logits(probe.double, probe_TE), exact=False)


def _check_reads(probe: Probe, path: str, horizons: list[int], keep: int, probe_NV: Tensor) -> None:
    """The first step whose horizon reaches a NaN reads it: a mask that opens less than the schedule is not what decoding runs."""
    step = next((step for step, horizon in enumerate(horizons, start=1) if horizon > keep), None)
    if step is not None and bool(torch.isfinite(probe_NV[step - 1]).any()):
        detail = f"the mask does not read source token {keep}, though the schedule gives step {step} the first {horizons[step - 1]}"
        probe.add(path, "nan", step, keep, detail=detail)


def check_forced_batch(probe: Probe, *, history: bool) -> None:
    """Teacher-forced in a batch: other clips, their histories and the padding must not matter."""
    path = "teacher-forced, history, batch" if history else "teacher-forced, batch"
    sources = [probe.tokens(n) for n in (probe.window_tokens // 2, probe.window_tokens * 2 // 3, probe.window_tokens - MORE)]
    texts = [probe.text(n) for n in (probe.steps // 3, probe.steps // 2, probe.steps - 1)]
    pasts: list[tuple[Tensor, list[int]] | None] = [
        (probe.tokens(probe.window_tokens), probe.text(probe.steps - 1)), None, (probe.tokens(MORE), probe.text(1)),
    ]  # fmt: skip
    scale = None if probe.segment else probe.window_tokens

    def logits(model: Model, tokens: list[Tensor], targets: list[list[int]], histories: Any) -> Tensor:
        return model(model.batch(tokens, targets, probe.schedule, scale=scale, histories=histories if history else None))

    base_BNV, base64_BNV = logits(probe.model, sources, texts, pasts), logits(probe.double, sources, texts, pasts)
    for me in range(3):
        everything = list(range(1, len(texts[me]) + 2))
        num_source = sources[me].shape[0]
        probe.count_tested(path, len(everything))
        for variant in SAME_SHAPE:
            others = [s if i == me else probe.replace(s, 0, variant) for i, s in enumerate(sources)]
            probe_BNV = logits(probe.model, others, texts, pasts)
            probe.compare(path, f"neighbours' {variant}", everything, num_source, base_BNV[me], probe_BNV[me])
            horizons = probe.horizons(num_source, len(everything))
            for keep in [] if probe.segment else probe.some([h for h in horizons if h < num_source])[-2:]:
                changed = [probe.replace(s, keep if i == me else 0, variant) for i, s in enumerate(sources)]
                steps = [step for step, h in enumerate(horizons, start=1) if h <= keep]
                probe.compare(path, variant, steps, keep, base_BNV[me], logits(probe.model, changed, texts, pasts)[me])
        for size, length, count in (("shorter", 1, 1), ("longer", probe.window_tokens, probe.steps - 1)):
            others = [s if i == me else probe.tokens(length) for i, s in enumerate(sources)]
            targets = [t if i == me else probe.text(count) for i, t in enumerate(texts)]
            past = [p if i == me else (probe.tokens(length), probe.text(count)) for i, p in enumerate(pasts)]
            probe_BNV = logits(probe.double, others, targets, past)
            probe.compare(path, f"{size} neighbours", everything, num_source, base64_BNV[me], probe_BNV[me], exact=False)


def _forced_steps(probe: Probe, texts: list[list[int]], horizons: list[list[int]], source_BTE: Tensor, num_steps: int) -> Tensor:
    """Logits (B, N, V) of given texts, decoded incrementally in lock step from a source read at once."""
    decoder, framing = probe.engine or probe.model.decoder, probe.model.config.framing
    cache = decoder.start(batch=source_BTE.shape[0])
    decoder.read(cache, source_BTE)
    rows = []
    for i in range(num_steps):
        now = [h[i] for h in horizons]
        for column in range(len(framing.prompt)) if i == 0 else (i - 1,):
            ids = [framing.prompt[column]] * len(texts) if i == 0 else [text[column] for text in texts]
            logits_BV = decoder.step(cache, torch.tensor(ids), now)
        rows.append(logits_BV)
    return torch.stack(rows, 1)


def check_incremental(probe: Probe) -> None:
    """Incremental, one clip: every step with nothing read beyond its horizon, and some with replacements read there."""
    path = "incremental"
    decoder, framing = probe.engine or probe.model.decoder, probe.model.config.framing
    source_TE, text = probe.tokens(probe.window_tokens - MORE), probe.text(probe.steps - 1)
    horizons = probe.horizons(source_TE.shape[0], probe.steps)
    probed = set(probe.some([i for i, h in enumerate(horizons, start=1) if h < source_TE.shape[0]]))
    whole, part = decoder.start(), decoder.start()  # the whole source read first; only what each step may read
    decoder.read(whole, source_TE[None])
    base, rows = [], []
    for step, horizon in enumerate(horizons, start=1):
        while part.num_source < horizon:  # arrivals in random pieces, up to the horizon
            count = int(torch.randint(1, horizon - part.num_source + 1, (1,), generator=probe.rng))
            decoder.read(part, source_TE[None, part.num_source : part.num_source + count])
        ids = torch.tensor([framing.prompt if step == 1 else [text[step - 2]]])
        probes = {variant: part.clone() for variant in ("values", "huge", "nan", "more") if step in probed}
        base.append(decoder.prefill(whole, ids, horizon)[0])
        rows.append(decoder.prefill(part, ids, horizon)[0])
        for variant, cache in probes.items():
            decoder.read(cache, probe.replace(source_TE, cache.num_source, variant)[None, cache.num_source :])  # type: ignore[arg-type]
            probe_1V = decoder.prefill(cache, ids, horizon)
            probe.compare(path, variant, [step], horizon, base[-1].expand(step, -1), probe_1V.expand(step, -1))
    probe.count_tested(path, probe.steps)
    probe.compare(path, "nothing", list(range(1, probe.steps + 1)), horizons, torch.stack(base), torch.stack(rows))


def check_incremental_batch(probe: Probe) -> None:
    """Incremental in a batch at several horizons: other clips and later tokens must not matter."""
    path = "incremental, batch"
    num_steps, count = min(probe.steps, 24), probe.window_tokens - MORE
    source_BTE = torch.stack([probe.tokens(count) for _ in range(3)])
    texts = [probe.text(num_steps) for _ in range(3)]
    horizons = [probe.horizons(count, n, num_steps) for n in (num_steps, max(1, num_steps // 2), probe.steps)]
    base_BNV = _forced_steps(probe, texts, horizons, source_BTE, num_steps)
    for me in range(3):
        chosen = probe.some([i for i, h in enumerate(horizons[me], start=1) if h < count] or [num_steps])[-3:]
        probe.count_tested(path, len(chosen))
        for step in chosen:
            keep = horizons[me][step - 1]
            steps = [i for i in range(1, step + 1) if horizons[me][i - 1] <= keep]
            for variant in SAME_SHAPE:
                probe_BTE = torch.stack([probe.replace(s, keep if i == me else 0, variant) for i, s in enumerate(source_BTE)])
                probe_BNV = _forced_steps(probe, texts, horizons, probe_BTE, step)
                probe.compare(path, variant, steps, keep, base_BNV[me], probe_BNV[me])


def check_length(probe: Probe) -> None:
    """The length head reads its buffer of the window, and nothing of other clips or the padding."""
    if probe.model.length is None:
        return
    keep = _buffer(probe, probe.schedule)

    def steps(window_TE: Tensor, past: Past) -> int:
        return probe.model.predict_steps(window_TE, keep, past)

    _check_head(probe, "length head", keep, "the predicted length", lambda model, *given: model.length_logits(*given), steps)


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
                probe.compare(path, variant, [1], keep, base_1C, probe_1C)
            if causal and decide(probe.replace(source_BTE[0], keep, variant), past) != base:
                probe.add(path, variant, 1, keep, detail=f"{what} changes with tokens past the first {keep}")
                return
        longer = (probe.tokens(probe.window_tokens), probe.text(probe.steps - 1))
        source64_BTE = source_BTE.double()
        base64_1C, probe64_1C = (
            outputs(probe.double, source64_BTE, lengths_B, probe.double.pack_history(histories))[:1]
            for histories in ([past, None, past], [past, longer, longer])
        )
        probe.compare(path, "longer neighbours", [1], keep, base64_1C, probe64_1C, exact=False)
