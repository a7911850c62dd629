"""What N̂ costs: a checkpoint decoded with the lengths its head predicts, with the true ones, and with one length for all clips.

python benchmarks/length.py RUN/best CORPUS FOLDER --store STORE --gamma 0.7 [--split test] [--metric bleu] [--limit 100]

Each clip alone, at its own scale. The true length is that of its first reference, the one for all their mean: no decoder could know either.
Differences to the head are paired over clips (1,000 resamples, seed 0).
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from zendaya import DecodeOptions, Model, PowerLaw
from zendaya.data.corpora import registry as corpora
from zendaya.data.features.store import FeatureStore
from zendaya.evaluation.evaluate import evaluate
from zendaya.evaluation.metrics.quality import METRICS
from zendaya.evaluation.metrics.scores import score
from zendaya.evaluation.metrics.significance import paired_bootstrap, statistics
from zendaya.nn.tokenizer import learned_text
from zendaya.records import Trace


def main() -> None:
    """Print quality, lag and the error of the length for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("checkpoint", "corpus", "folder"):
        parser.add_argument(name)
    parser.add_argument("--store", required=True)
    parser.add_argument("--gamma", type=float, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--metric", default="bleu", choices=METRICS)
    parser.add_argument("--lower", action="store_true", help="references in lower case without punctuation, as the run learned them")
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, store = Model.from_pretrained(given.checkpoint), FeatureStore.open(given.store, corpus=given.corpus)
    reading = corpora.read(given.corpus, given.folder)
    clips = [clip for clip in reading.usable if clip.split == given.split][: given.limit]
    assert model.tokenizer is not None, "a trained model has a tokenizer"
    lengths = [len(model.tokenizer.encode(learned_text(clip.references[0], given.lower))) + 1 for clip in clips]
    one = round(float(np.mean(lengths)))

    def decode(steps: list[int] | list[None]) -> list[Trace]:
        schedule, found = PowerLaw(given.gamma), list[Trace]()
        for clip, number in zip(clips, steps, strict=True):
            source = store.get(clip.id, clip.split).values_TE
            found += evaluate(model, [(clip, source)], DecodeOptions(schedule=schedule, steps=number), lower=given.lower)
        return found

    print(f"{given.corpus} {given.split}, {len(clips)} clips, data {reading.digest[:12]}, γ = {given.gamma:g}, {given.checkpoint}")
    head = None
    for name, steps in (("head", [None] * len(clips)), ("true", lengths), (f"all {one}", [one] * len(clips))):
        traces = decode(steps)  # type: ignore[arg-type]
        (found,) = score(traces, metrics=[given.metric])
        error = float(np.mean([abs(sum(trace.predicted_steps) - length) for trace, length in zip(traces, lengths, strict=True)]))
        counted = statistics(given.metric, [trace.text for trace in traces], [trace.references for trace in traces])
        head = head or counted
        gap = paired_bootstrap(counted, head)
        lag = found.latency_tokens
        lags = f"AL {lag.average_lagging:.2f}, DAL {lag.differentiable_average_lagging:.2f}, AP {lag.average_proportion:.3f}"
        print(f"{name:8} {counted.name} {counted.score:6.2f}, {gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]; {lags}", end="; ")
        print(f"N̂ off by {error:.1f} of {np.mean(lengths):.1f}, written {found.steps:.1f}")


if __name__ == "__main__":
    main()
