"""The asynchronous regime: quality and lag of live captions against the quality of the link (Corollary 1), with several patiences.

python benchmarks/asynchronous.py FOLDER [--every 4] [--schedules 0.3,1.0,wait-k=150] [--links "0.1/2 0.3/2 0.3/8"]
    [--patiences 0,2,inf] [--plot FILE] [--processes 2]

FOLDER holds LibriSpeech as published (test is test-clean) and align_valid_test.jsonl (word times). Chapters of test are streams,
encoded once by the shipped model's encoder; tokens are due when their block has been heard, and arrive over links that fail for a share
of the time, so many seconds at a time. Wait-k's stride is the split's own source tokens a text token. Word lag: from
the end of a word that was rightly written to its writing, computing taking no time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zendaya.data.corpora.registry import read
from zendaya.encoders.base import encode
from zendaya.evaluation.live import utterance, word_times
from zendaya.evaluation.metrics.speech import SpeechCounts, WrittenWord, align, count, written_words
from zendaya.records import Clip
from zendaya.runtime.loading import Adapted, load_adapted
from zendaya.runtime.options import Pace
from zendaya.runtime.replay import replay
from zendaya.schedule import Schedule, parse_schedule
from zendaya.sources.arrivals import Link, Outages, Steady
from zendaya.sources.media import SAMPLE_RATE, read_audio

Setting = tuple[str, str, float]
"""Schedule, link, patience."""


@functools.cache
def adapted() -> Adapted:
    """The shipped model, loaded once a process."""
    torch.set_num_threads(1)
    return load_adapted()


def decode(job: tuple[Path, list[Clip], Sequence[Schedule], Sequence[Link], Sequence[float], int]) -> dict[Setting, Any]:
    """One chapter under every setting."""
    folder, clips, schedules, links, patiences, window = job
    samples_S = np.concatenate([chunk.samples for clip in clips for chunk in read_audio(folder / clip.media)])
    encoder, model = adapted().encoder, adapted().model
    tokens = encode(encoder, [samples_S])
    per_s, length_s = encoder.traits.tokens_per_s, samples_S.size / SAMPLE_RATE
    pace, found = Pace(per_s, encoder.block), dict[Setting, Any]()
    for schedule, link, patience_s in itertools.product(schedules, links, patiences):
        if isinstance(link, Steady) and (str(schedule), str(link), patiences[0]) in found:  # nothing is late: patience is never needed
            found[str(schedule), str(link), patience_s] = found[str(schedule), str(link), patiences[0]]
            continue
        session = model.open(schedule, window_tokens=window, patience_s=patience_s, pace=pace)
        arrival_s = link.arrivals(tokens.arrival_s)
        events = replay(session, tokens.values_TE, arrival_s, end_s=max(length_s, float(arrival_s[-1])))
        found[str(schedule), str(link), patience_s] = (written_words(events), int((arrival_s > tokens.arrival_s).sum()), len(tokens))
    return found


def main() -> None:
    """Decode, score, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schedules", default="0.3,1.0,wait-k=150")
    parser.add_argument("--links", default="0.1/2 0.3/2 0.3/8", help="share of the time a link is out / seconds at a time")
    parser.add_argument("--patiences", default="0,2,inf")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=4, help="take every n-th chapter")
    parser.add_argument("--window", type=int, default=500)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    reading = read("librispeech", options.folder)
    clips = [clip for clip in reading.usable if clip.split == "test"]
    chapters = [list(group) for _, group in itertools.groupby(clips, key=lambda clip: clip.stream)][:: options.every]
    tokenizer = adapted().model.tokenizer
    assert tokenizer is not None
    num_text = sum(len(tokenizer.encode(clip.references[0].capitalize())) + 1 for clip in clips)
    rho = round(sum(clip.duration_s for clip in clips) * adapted().encoder.traits.tokens_per_s / num_text, 2)
    schedules = [parse_schedule(text) for text in options.schedules.split(",")]
    schedules = [each.for_run(rho) for each in schedules]
    rates = [[float(part) for part in link.split("/")] for link in options.links.split()]
    links: list[Link] = [Steady(), *(Outages(late, outage_s, options.seed) for late, outage_s in rates)]
    patiences = [float(part) for part in options.patiences.split(",")]
    jobs = [(options.folder, chapter, schedules, links, patiences, options.window) for chapter in chapters]
    begun = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        results = pool.map(decode, sorted(jobs, key=lambda job: -sum(clip.duration_s for clip in job[1])), chunksize=1)
    chapters.sort(key=lambda chapter: -sum(clip.duration_s for clip in chapter))
    hours = sum(clip.duration_s for chapter in chapters for clip in chapter) / 3600
    print(f"LibriSpeech test, data sha256:{reading.digest[:16]}, {len(chapters)} chapters, {hours:.2f} h; window {options.window} tokens")
    print(f"adapter sha256:{adapted().digest[:16]}; link seed {options.seed}; wait-k's stride {rho}; pace in the encoder's blocks")
    rows = score(options.folder, chapters, results)
    print(f"\n{'schedule':24} {'link':26} {'late':>6} {'patience':>8} {'WER %':>7} {'word lag s':>10} {'90 %':>6} {'LAAL s':>7}")
    for (schedule, link, patience_s), row in rows.items():
        name = f"{schedule:24} {link.rsplit(',', 1)[0] if link != 'steady' else link:26}"
        print(f"{name} {row[4]:6.1%} {patience_s:8g} {row[0]:7.2f} {row[1]:10.2f} {row[2]:6.2f} {row[3]:7.2f}")
    print(f"\n{time.perf_counter() - begun:.0f} s in {options.processes} processes")
    if options.plot:
        plot(options.plot, rows)


def heard(chapter: list[Clip], written: list[WrittenWord], times: dict[str, Any]) -> SpeechCounts:
    """The counts of one chapter."""
    starts_s = itertools.accumulate((clip.duration_s for clip in chapter), initial=0.0)
    said = [utterance(clip, start_s, times) for clip, start_s in zip(chapter, starts_s, strict=False)]
    return count(said, align(said, written), [], sum(clip.duration_s for clip in chapter))[chapter[0].stream]


def score(folder: Path, chapters: list[list[Clip]], results: list[dict[Setting, Any]]) -> dict[Setting, list[float]]:
    """WER, mean and 90 % word lag, LAAL and the share of late tokens of each setting."""
    times = word_times(folder)
    assert times, "word times (align_valid_test.jsonl) are needed for the lag"
    rows = {}
    for setting in results[0]:
        counts = SpeechCounts()
        for chapter, result in zip(chapters, results, strict=True):
            counts.add(heard(chapter, result[setting][0], times))
        late = sum(result[setting][1] for result in results) / sum(result[setting][2] for result in results)
        lags = [float(np.mean(counts.lags_s)), float(np.percentile(counts.lags_s, 90)), float(np.mean(counts.laal_s))]
        rows[setting] = [100 * counts.errors / counts.words, *lags, late]
    return rows


def plot(path: Path, rows: dict[Setting, list[float]]) -> None:
    """WER and word lag against the link, a column a patience, a line a schedule."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    schedules, links, patiences = (list(dict.fromkeys(setting[i] for setting in rows)) for i in range(3))
    figure, axes = pyplot.subplots(2, len(patiences), figsize=(3.6 * len(patiences), 5.6), sharex=True, sharey="row", squeeze=False)
    names = [
        link if link == "steady" else link.rsplit(",", 1)[0].replace("late=", "").replace(",outage=", " for ") + " s" for link in links
    ]
    for column, patience_s in enumerate(patiences):
        for row, label in enumerate(("word errors, %", "word lag, s")):
            axis = axes[row][column]
            for schedule in schedules:
                name = schedule.replace("gamma=", "γ = ").split(",")[0]
                axis.plot(names, [rows[schedule, link, patience_s][row] for link in links], marker="o", label=name)
            axis.set_ylabel(label if column == 0 else "")
            axis.tick_params(axis="x", rotation=40)
            axis.grid(alpha=0.3)
        axes[0][column].set_title(f"patience {'∞' if math.isinf(patience_s) else f'{patience_s:g} s'}")
    axes[0][0].legend()
    figure.supxlabel("link: share of time it is out, seconds at a time")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(path)


if __name__ == "__main__":
    main()
