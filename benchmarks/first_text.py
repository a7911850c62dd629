"""How long the shipped speech model computes from the arrival of a block of sound to the first text it licenses: batch 1, one thread.

python benchmarks/first_text.py [RECORDING …] [--gamma 0.5] [--cut fixed] [--clock wall] [--engine native] [--json]

Each block's last samples arrive; the encoder makes its tokens, and the session writes. The first text of a block is what is measured, of
all blocks that license any, after a warm-up of `--warm-up` blocks. Without a recording, the demo's is used, over and over for `--minutes`.
`--clock wall` is what a reader waits; `--clock cpu` counts only the time this process was given, which is what it would be on a
machine that does nothing else. Another machine gives other figures; nothing is drawn at random.
"""

from __future__ import annotations

import argparse
import importlib.resources
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from zendaya.runtime.engine import engine_for, missing
from zendaya.runtime.loading import load_adapted
from zendaya.runtime.pauses import PauseWindows
from zendaya.schedule import PowerLaw
from zendaya.sources.media import SAMPLE_RATE, read_audio


@dataclass(frozen=True)
class First:
    """Milliseconds of a block: hearing for pauses, the encoder, and the decoder up to the first text."""

    pauses_ms: float
    encoder_ms: float
    decoder_ms: float
    new_window: bool
    """Whether the first text was that of a new window: its source is projected and its length predicted first."""

    @property
    def total_ms(self) -> float:
        return self.pauses_ms + self.encoder_ms + self.decoder_ms


def chunks(recordings: list[str], minutes: float) -> Iterator[np.ndarray]:
    """Sound in chunks of 0.1 s: the recordings, over and over."""
    paths = recordings or [str(importlib.resources.files("moonshine_voice") / "assets" / "beckett.wav")]
    limit = round(minutes * 600)
    samples = (chunk.samples for path in itertools.cycle(paths) for chunk in read_audio(Path(path)))
    return itertools.islice((chunk for chunk in samples if chunk.size == SAMPLE_RATE // 10), limit)


def measure(options: argparse.Namespace) -> list[First]:
    """The first texts of a stream."""
    speech = load_adapted(options.model)
    engine = engine_for(speech.model, options.engine, precision=options.precision, threads=None if options.engine == "torch" else 1)
    session = speech.model.open(PowerLaw(options.gamma), engine=engine)
    pauses = PauseWindows(session.window_tokens, speech.encoder.traits.tokens_per_s) if options.cut == "pauses" else None
    now = time.perf_counter if options.clock == "wall" else time.process_time
    state, found, blocks, window = speech.encoder.start(), list[First](), 0, -1
    for chunk in chunks(options.recordings, options.minutes):
        begun = now()
        if pauses is not None:
            pauses.hear(chunk)
        heard = now()
        tokens = speech.encoder.read(state, chunk)
        encoded = now()
        if not len(tokens):
            continue
        blocks += 1
        first = None
        for number, piece in enumerate([tokens] if pauses is None else pauses.split(tokens)):
            now_s = float(tokens.arrival_s[-1])
            for events in [session.cut(now_s)] if number else []:
                first = first or next(((now(), event) for event in events if event.text), None)
                for _ in events:
                    pass
            events = session.push(piece.values_TE, now_s)
            first = first or next(((now(), event) for event in events if event.text), None)
            for _ in events:
                pass
        if first is not None and blocks > options.warm_up:
            at, event = first
            found.append(First(1e3 * (heard - begun), 1e3 * (encoded - heard), 1e3 * (at - encoded), event.window_index != window))
        window = first[1].window_index if first is not None else window
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", metavar="RECORDING")
    parser.add_argument("--model", default="tiny.en-dial")
    parser.add_argument("--gamma", type=float, default=0.5)
    parser.add_argument("--cut", choices=["fixed", "pauses"], default="fixed")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--engine", choices=["torch", "native"], default="native" if missing() is None else "torch")
    parser.add_argument("--precision", choices=["float32", "int8"], default="float32", help="of the decoder's weights")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = measure(options)
    parts = {"total": [each.total_ms for each in found]}
    for name in ("pauses", "encoder", "decoder"):
        parts[name] = [getattr(each, f"{name}_ms") for each in found]
    record = {name: [float(np.percentile(values, share)) for share in (10, 50, 90)] for name, values in parts.items()}
    new = [each.total_ms for each in found if each.new_window]
    if options.json:
        print(json.dumps({"gamma": options.gamma, "cut": options.cut, "clock": options.clock, "blocks": len(found), "ms_10_50_90": record}))
        return
    head = f"first text after a licensed block, γ = {options.gamma}, windows {options.cut}"
    print(f"{head}: {len(found)} blocks, one thread, {options.clock} time; engine {options.engine}, {options.precision}")
    for name, (low, median, high) in record.items():
        print(f"  {name:8} median {median:6.1f} ms   (10 % {low:6.1f}, 90 % {high:6.1f})")
    print(f"  in a new window ({len(new)} blocks) the total is {np.median(new):.1f} ms at the median" if new else "")


if __name__ == "__main__":
    main()
