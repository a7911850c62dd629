"""A long stream: memory, compute lag and bookkeeping of a live session over hours of real speech, as fast as the machine goes.

python benchmarks/long_stream.py FOLDER [--hours 2] [--gamma 0.5] [--engine native]

FOLDER holds LibriSpeech in its published division; the recordings of test (test-clean) are played one after another, again and again,
through the shipped model in blocks. Compute lag: from a block's last sample being handed over to the last event it allows, the encoder's
work in it. The memory's slope is fitted to readings once a minute of stream after the first quarter hour.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jiwer
import numpy as np
import torch

from zendaya.data.corpora.registry import read
from zendaya.evaluation.metrics.quality import normaliser
from zendaya.records import Event
from zendaya.runtime.engine import engine_for, missing
from zendaya.runtime.loading import load_adapted
from zendaya.runtime.options import Pace
from zendaya.schedule import PowerLaw
from zendaya.sources.media import SAMPLE_RATE, Samples, read_audio

WARM_UP_S = 900.0
CHUNK = SAMPLE_RATE // 2
Points = list[tuple[float, float]]
"""Seconds of stream, and what was measured then."""


def rss_mb() -> float:
    """Memory the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def speech(folder: Path, said: list[str]) -> tuple[str, Iterator[Samples]]:
    """The digest of the data, and its test recordings for ever, in chunks of half a second; `said` takes the references of those begun."""
    reading = read("librispeech", folder)
    clips = [clip for clip in reading.usable if clip.split == "test"]

    def chunks() -> Iterator[Samples]:
        rest = np.zeros(0, np.float32)
        for clip in itertools.cycle(clips):
            said.append(clip.references[0])
            rest = np.concatenate([rest, *(chunk.samples for chunk in read_audio(folder / clip.media))])
            while rest.size >= CHUNK:
                yield rest[:CHUNK]
                rest = rest[CHUNK:]

    return reading.digest, chunks()


def main() -> None:
    """Stream, watch, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--gamma", type=float, default=0.5)
    parser.add_argument("--patience", type=float, default=2.0)
    parser.add_argument("--engine", choices=["torch", "native"], default="native" if missing() is None else "torch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    adapted = load_adapted()
    encoder, per_s = adapted.encoder, adapted.encoder.traits.tokens_per_s
    engine = engine_for(adapted.model, options.engine, threads=None if options.engine == "torch" else 1)
    session = adapted.model.open(PowerLaw(options.gamma), patience_s=options.patience, pace=Pace(per_s, encoder.block), engine=engine)
    state = encoder.start()
    said = list[str]()
    digest, chunks = speech(options.folder, said)
    written_text = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # not kept in the memory that is measured
    readings, lags_ms, works_ms = (Points() for _ in range(3))
    begun = time.perf_counter()
    num_tokens = num_events = num_words = num_windows = 0
    expected, problems, heard_s, next_reading_s = (0, 1), list[str](), 0.0, 0.0

    def follow(events: Iterator[Event]) -> int:
        """Check that the events are each window's steps, in order and once; how many there were."""
        nonlocal expected, num_events, num_words, num_windows
        count = 0
        for event in events:
            count += 1
            if (event.window_index, event.step) != expected:
                problems.append(f"expected window and step {expected}: got {(event.window_index, event.step)}")
            read = event.window_start + event.effective_horizon
            if read > num_tokens:
                problems.append(f"window {event.window_index} read token {read} of {num_tokens}")
            if event.window_start != event.window_index * session.window_tokens:
                problems.append(f"window {event.window_index} began at token {event.window_start}")
            written_text.write(event.text)
            num_words += event.text.startswith(" ")
            num_windows += event.last
            expected = (event.window_index + 1, 1) if event.last else (event.window_index, event.step + 1)
        num_events += count
        return count

    for chunk in chunks:
        heard_s += chunk.size / SAMPLE_RATE
        handed_over, at_work = time.perf_counter(), time.process_time()
        tokens = encoder.read(state, chunk)
        num_tokens += len(tokens)
        written = follow(session.push(tokens.values_TE, tokens.arrival_s))
        if written:
            lags_ms.append((heard_s, 1000 * (time.perf_counter() - handed_over)))
            works_ms.append((heard_s, 1000 * (time.process_time() - at_work)))
        if heard_s >= next_reading_s:
            readings.append((heard_s, rss_mb()))
            next_reading_s += 60
            print(
                f"\r{heard_s / 3600:.2f} h, {heard_s / (time.perf_counter() - begun):.1f}x real time, {rss_mb():.0f} MB",
                end="",
                file=sys.stderr,
            )
        if heard_s >= 3600 * options.hours:
            break
    tokens = encoder.finish(state)
    num_tokens += len(tokens)
    follow(session.push(tokens.values_TE, tokens.arrival_s))
    follow(session.finish())
    print(file=sys.stderr)
    report(options, digest, adapted.digest, readings, lags_ms, works_ms, heard_s / (time.perf_counter() - begun))
    windows = -(-num_tokens // session.window_tokens)
    print(f"{num_tokens} source tokens in {windows} windows; {num_windows} windows written, {num_events} events, {num_words} words")
    problems += [f"{windows} windows arrived, {num_windows} were written"] if windows != num_windows else []
    normal, _ = normaliser("english")
    written_text.seek(0)
    errors = jiwer.wer(normal(" ".join(said)), normal(written_text.read()))
    print(f"word error rate {100 * errors:.2f} % of all that was said, the last recording as a whole")
    print("lost or doubled: " + (f"{len(problems)}, first: {problems[0]}" if problems else "nothing"))


def report(
    options: argparse.Namespace, digest: str, adapter: str, readings: Points, lags_ms: Points, works_ms: Points, speed: float
) -> None:  # fmt: skip
    """Print the slopes of memory and compute lag, and the lag over time."""
    print(f"LibriSpeech test looped, data sha256:{digest[:16]}, adapter sha256:{adapter[:16]}, gamma={options.gamma}, {options.hours:g} h")
    print(f"{speed:.1f}x real time on one thread, engine {options.engine}")
    for name, points, unit in (("memory", readings, "MB"), ("compute lag", lags_ms, "ms"), ("compute lag, CPU time", works_ms, "ms")):
        at_s, values = np.array(points).T
        kept = at_s >= min(WARM_UP_S, at_s[-1] / 4)
        slope = np.polyfit(at_s[kept] / 3600, values[kept], 1)[0] if kept.sum() > 2 else float("nan")
        print(f"{name}: median {np.median(values[kept]):.1f} {unit}, slope {slope:+.2f} {unit} an hour of stream")
        edges = np.linspace(0, at_s[-1], 9)
        parts = [np.median(part) for low, high in itertools.pairwise(edges) if (part := values[(at_s > low) & (at_s <= high)]).size]
        print(f"  by eighths: {' '.join(f'{part:.1f}' for part in parts)}")


if __name__ == "__main__":
    main()
