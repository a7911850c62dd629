"""A learned γ against every fixed γ at the same lag, on a split that neither the decoder nor the head has seen.

    python benchmarks/learned_gamma.py RUN LEARNED --data FOLDER --store STORE [--split test] [--free 200]

RUN is a whole-dial run, LEARNED what `zendaya learn-gamma RUN` made. Teacher-forced under N̂ as predicted live; means over steps. Three
rivals at the learned γ's own lag: the curve of fixed γ, at twice as many settings as the grid has, interpolated; its lower hull, the
best that any mixture of fixed γ blind to its window can do; and the oracle, which sees each window's text and every γ's loss on it.
`--free N` decodes the first N clips too, each after the window before it where the model has a history (WER, on lower-case words).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import zendaya
from zendaya import Learned, Model, PowerLaw, Schedule
from zendaya.data.features.store import FeatureStore
from zendaya.evaluation.metrics.latency import differentiable_average_lagging
from zendaya.nn.tokenizer import learned_text
from zendaya.training.decoding import TextExample
from zendaya.training.learned import GAMMA, PRICES, Costs, cached_costs, expect, open_run
from zendaya.training.loop import BEST, TRAIN

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
RESAMPLES = 1000


def hull(lag_G: Floats, loss_G: Floats) -> tuple[Floats, Floats]:
    """The lower convex hull of points, by rising lag."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(zip(lag_G.tolist(), loss_G.tolist(), strict=True)):
        while len(kept) > 1 and (kept[-1][0] - kept[-2][0]) * (y - kept[-2][1]) <= (x - kept[-2][0]) * (kept[-1][1] - kept[-2][1]):
            kept.pop()
        kept.append((x, y))
    return np.array([x for x, _ in kept]), np.array([y for _, y in kept])


def at_lag(lag: float, lag_G: Floats, loss_G: Floats) -> float:
    """The curve through points at a lag, linear between them."""
    order = np.argsort(lag_G)
    return float(np.interp(lag, lag_G[order], loss_G[order]))


def at_lag_on_hull(lag: float, lag_G: Floats, loss_G: Floats) -> float:
    """The lower hull of points at a lag."""
    return at_lag(lag, *hull(lag_G, loss_G))


def paired(
    clips: Sequence[str], weight_W: Floats, mine: tuple[Floats, Floats], fixed: tuple[Floats, Floats],
    rival: Callable[[float, Floats, Floats], float], seed: int,
) -> dict[str, float]:  # fmt: skip
    """Mine minus the rival at my own lag, with a 95 % interval and a two-sided p over resamples of clips; values are (lag, loss)."""
    names, place_W = np.unique(np.array(clips), return_inverse=True)
    rng = np.random.default_rng(seed)
    drawn_RC = rng.multinomial(names.size, np.full(names.size, 1 / names.size), RESAMPLES).astype(np.float64)
    weight_RW = np.concatenate([np.ones((1, weight_W.size)), drawn_RC[:, place_W]]) * weight_W
    total_R = weight_RW.sum(1)
    lag_R, loss_R = (weight_RW @ value / total_R for value in mine)
    lag_RG, loss_RG = (weight_RW @ value / total_R[:, None] for value in fixed)
    difference_R = np.array(
        [loss - rival(lag, lags, losses) for lag, loss, lags, losses in zip(lag_R, loss_R, lag_RG, loss_RG, strict=True)]
    )
    low, high = np.percentile(difference_R[1:], [2.5, 97.5])
    p = min(1.0, 2 * min(float(np.mean(difference_R[1:] >= 0)), float(np.mean(difference_R[1:] <= 0))))
    return {"difference": float(difference_R[0]), "low": float(low), "high": float(high), "p": p}


def oracle_at(lag: float, costs: Costs) -> float:
    """The least mean loss at a mean lag, choosing each window's γ from what it really came to."""
    lags, losses = [], []
    for price in PRICES.tolist():
        places_W = (costs.loss_WG + price * costs.lag).argmin(1)
        lags.append(costs.mean(costs.lag, places_W))
        losses.append(costs.mean(costs.loss_WG, places_W))
    return at_lag(lag, np.array(lags), np.array(losses))


def explained(truth_WG: Floats, said_WG: Floats, weight_W: Floats) -> float:
    """The share of the variance around each γ's mean that the head explains."""
    mean_G = np.average(truth_WG, axis=0, weights=weight_W)
    error, spread = (float(np.average((truth_WG - other) ** 2, axis=0, weights=weight_W).sum()) for other in (said_WG, mean_G))
    return 1 - error / spread


def decode(
    model: Model, store: FeatureStore, example: TextExample, schedule: Schedule, scale: int | None
) -> tuple[str, float, int, float | None]:
    """A window's text, its lag as a share of the source, its number of steps, and its γ if that was chosen."""
    source_TE = store.get(example.window.clip, example.window.split).values_TE
    session = model.open(schedule, window_tokens=scale or source_TE.shape[0])
    if model.config.history and example.before is not None:  # the window before, as if it had just been written
        window = session._window
        window.fill(store.get(example.before.clip, example.before.split).values_TE.to(window.tokens_TE))
        window.written, window.complete, window.closed = [*example.before.ids, model.config.framing.end], True, True
        with torch.inference_mode():
            for request in session._next_window():
                session.rows.compute(request)
    events = [*session.push(source_TE), *session.finish()]
    end = model.config.framing.end
    assert model.tokenizer is not None
    text = model.tokenizer.decode([event.token for event in events if event.token != end])
    delays = [min(event.effective_horizon, source_TE.shape[0]) for event in events]
    lag = differentiable_average_lagging(delays, source=source_TE.shape[0], target=len(delays)) / source_TE.shape[0]
    return text, lag, len(events), events[0].gamma


def free(
    model: Model, store: FeatureStore, examples: Sequence[TextExample], references: Sequence[str], scale: int | None, seed: int
) -> dict[str, object]:
    """WER and realised lag of the learned γ and of every fixed one, decoded freely."""
    import jiwer

    columns: dict[str, tuple[list[float], list[float]]] = {}
    words = np.array([float(len(reference.split())) for reference in references])
    for schedule in (Learned(), *(PowerLaw(gamma) for gamma in model.config.gammas)):
        errors, lags = [], []
        for example, reference in zip(examples, references, strict=True):
            text, lag, _, _ = decode(model, store, example, schedule, scale)
            scored = jiwer.process_words(reference, learned_text(text, True) or "∅")
            errors.append(float(scored.substitutions + scored.deletions + scored.insertions))
            lags.append(lag)
        columns[str(schedule)] = (lags, errors)
        wer, lag = sum(errors) / words.sum(), float(np.average(lags, weights=words))
        print(f"free, {len(examples)} clips: {schedule}: WER {wer:.4f}, lag {lag:.4f}", file=sys.stderr, flush=True)
    lag_WS, wer_WS = (np.array([column[index] for column in columns.values()]).T for index in (0, 1))
    wer_WS = wer_WS / words[:, None]
    found = paired(
        [example.window.clip for example in examples], words, (lag_WS[:, 0], wer_WS[:, 0]), (lag_WS[:, 1:], wer_WS[:, 1:]), at_lag, seed
    )
    table = {
        name: {"wer": float(np.average(wer_WS[:, place], weights=words)), "dal": float(np.average(lag_WS[:, place], weights=words))}
        for place, name in enumerate(columns)
    }
    return {"clips": len(examples), "table": table, "learned_minus_fixed_at_its_lag": found}


def main() -> None:
    """Read the two folders, compare, print and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("learned", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--texts", type=int, help="at most this many texts of a clip")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--free", type=int, default=0, help="decode this many clips freely")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the result goes as JSON; LEARNED/comparison-SPLIT.json")
    options = parser.parse_args()
    material = open_run(options.run, data=options.data, store=options.store)
    model = Model.from_pretrained(options.learned / BEST)
    gammas, price = model.config.gammas, model.config.lag_price
    examples = material.examples((options.split, options.split), limit=options.limit, texts=options.texts)[TRAIN]

    def tell(done: int, total: int) -> None:
        print(f"\rtrying every γ: {done}/{total}", end="" if done < total else "\n", file=sys.stderr, flush=True)

    costs = cached_costs(options.learned / f"costs-{options.split}.npz", material, examples, gammas, tell)
    expected = expect(model, material.store, examples, scale=material.config.scale_tokens)
    # The curve of fixed γ is measured between the settings of the grid too: it bends, and a chord would lie above it.
    between = [round((low + high) / 2, 3) for low, high in itertools.pairwise(gammas)]
    others = cached_costs(options.learned / f"costs-{options.split}-between.npz", material, examples, between, tell)
    every = np.argsort([*gammas, *between])
    rivals = tuple(np.concatenate(pair, 1)[:, every] for pair in ((costs.lag, others.lag), (costs.loss_WG, others.loss_WG)))
    weight_W, clips = costs.steps_W.astype(np.float64), [example.window.clip for example in examples]
    lag_G, loss_G = (np.average(value_WG, axis=0, weights=weight_W) for value_WG in rivals)

    def chosen(places_W: Ints | int) -> dict[str, float]:
        return {"nll": costs.mean(costs.loss_WG, places_W), **{name: costs.mean(lag, places_W) for name, lag in costs.lags_WG.items()}}

    def compared(at_price: float) -> dict[str, object]:
        places_W = expected.places(at_price)
        mine = chosen(places_W)
        each_W = np.arange(places_W.size)
        values = (costs.lag[each_W, places_W], costs.loss_WG[each_W, places_W])
        share_G = np.bincount(places_W, weights=weight_W, minlength=len(gammas)) / weight_W.sum()
        return {
            "price": at_price, **mine, "chosen": dict(zip(map(str, gammas), share_G.round(4).tolist(), strict=True)),
            "fixed_at_its_lag": at_lag(mine["dal"], lag_G, loss_G), "hull_at_its_lag": at_lag_on_hull(mine["dal"], lag_G, loss_G),
            "oracle_at_its_lag": oracle_at(mine["dal"], costs),
            "minus_fixed": paired(clips, weight_W, values, (rivals[0], rivals[1]), at_lag, options.seed),
            "minus_hull": paired(clips, weight_W, values, (rivals[0], rivals[1]), at_lag_on_hull, options.seed),
        }  # fmt: skip

    centred_WG = costs.loss_WG - costs.loss_WG.mean(1, keepdims=True)
    middle = len(gammas) // 2
    record = {
        "version": zendaya.__version__, "seed": options.seed, "corpus": material.config.corpus, "split": options.split,
        "form": material.config.form, "scale": material.config.scale, "windows": len(examples), "clips": len(set(clips)),
        "data_digest": material.reading.digest, "encoder": material.store.signature.encoder,
        "checkpoint_digest": material.checkpoint_digest, "budget": json.loads((options.learned / GAMMA).read_bytes())["budget"],
        "lag": "differentiable average lagging / F, mean over steps",
        "fixed": {str(gamma): chosen(place) for place, gamma in enumerate(gammas)},
        "curve": [
            {"gamma": gamma, "dal": float(lag), "nll": float(loss)}
            for gamma, lag, loss in zip(sorted([*gammas, *between]), lag_G, loss_G, strict=True)
        ],
        "explained": {
            "loss": explained(centred_WG, expected.loss_WPG[:, middle].numpy().astype(np.float64), weight_W),
            "lag": explained(costs.lag, expected.lag_WPG[:, middle].numpy().astype(np.float64), weight_W),
            "from_the_buffer_of": gammas[middle],
        },
        "learned": compared(price),
        "at_other_prices": [compared(price * factor) for factor in (0.25, 0.5, 0.71, 1.41, 2.0, 4.0)] if price else [],
    }  # fmt: skip
    if options.free:
        some = examples[: options.free]
        texts = {clip.id: learned_text(clip.references[0], True) for clip in material.reading.usable if clip.split == options.split}
        record["free"] = free(
            model, material.store, some, [texts[each.window.clip] for each in some], material.config.scale_tokens, options.seed
        )
    out = options.out or options.learned / f"comparison-{options.split}.json"
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
