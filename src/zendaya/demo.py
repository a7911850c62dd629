"""The demo. In a terminal: the dial drawn, a recording captioned under it as it plays, and the whole way from samples to text audited.
On a page: a server that captions the same recording once, says where its page is, and goes on serving.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from zendaya.audit import audit
from zendaya.audit.leaks import LEAKS
from zendaya.audit.raw import audit_to_text
from zendaya.encoders import Encoder
from zendaya.encoders.features import Precomputed
from zendaya.errors import ConfigError, MissingExtraError
from zendaya.live import Clock, Moment, at_once, paced
from zendaya.live import run as run_live
from zendaya.model import Model
from zendaya.report import dial as report
from zendaya.schedule import PowerLaw
from zendaya.stream import Session
from zendaya.terminal import Screen
from zendaya.terminal import caption as caption_on

GAMMAS = (0.0, 0.3, 1.0)
PORT = 8765
CHUNK = 1280
"""Samples that are sent at a time: 80 ms."""


@dataclass(frozen=True)
class _Stream:
    """Something to decode: what it is, its raw input in chunks, and the encoder and model that take it."""

    what: str
    raw: Any
    chunks: list[Any]
    length_s: float
    encoder: Encoder[Any, Any]
    model: Model
    window: int
    """W: a constant, not the recording's own length, which is future information."""
    steps: int | None = None
    """N̂ where the model has not been trained to predict it."""

    def open(self, gamma: float, clock: Clock | None = None) -> Session:
        return self.model.open(PowerLaw(gamma), window=self.window, steps=self.steps, clock=clock)


def run(console: Console) -> None:
    """Draw, caption, audit; where the speech model or its recording is not installed, a small random model stands in."""
    schedule = PowerLaw(0.5)
    ours, rival = report.dial_beside_wait_k(schedule, source=100, steps=165)
    console.print("[bold]1. The dial[/]: how much of the source each step may read\n")
    console.print(report.draw_curves({f"γ = {schedule.gamma}": ours.horizons, rival.schedule.split(",")[0]: rival.horizons}, top=100))
    console.print(
        f"\n   γ = {schedule.gamma} reads {ours.exposure:.1%} of the source on average "
        f"(limit 1/(1+γ) = {ours.exposure_limit:.1%}) and starts after {ours.first_token} of 100 tokens.\n"
    )
    source = _speech() or _random()
    console.print(f"[bold]2. A stream[/]: {source.what}\n")
    if sys.stdin.isatty() and sys.stdout.isatty():
        console.print("   Keys: [bold]\\[[/] and [bold]][/] turn the dial while it plays, [bold]q[/] goes on to the audit.\n")
        _play(console, source, 0.5)
    else:
        for gamma in GAMMAS:
            _caption(console, source, gamma)
    console.print("[bold]3. The audit[/]: everything beyond each horizon replaced by other values, huge ones, NaN, nothing, more\n")
    found = audit(source.model, schedule, cuts=2, max_source=60, max_steps=16)
    assert found.passed, found.first
    console.print(f"   [green]no leak[/] in the decoder: {found.probes} probes on {len(found.steps_tested)} paths")
    through = audit_to_text(source.encoder, source.raw, lambda: source.open(1.0), num_cuts=2)
    assert through.clean, str(through)
    console.print(f"   [green]no leak[/] from raw input to text: {through.num_compared} written tokens compared under another future")
    planted = LEAKS["softmax"].audit(Model.from_preset("tiny"), cuts=2)
    console.print(f"   a leak planted on purpose is found: {planted.first}\n")
    console.print(
        "Caption your own: .venv/bin/zendaya stream FILE; listen: .venv/bin/zendaya stream --mic; audit: .venv/bin/zendaya audit FOLDER"
    )


def serve(console: Console) -> None:
    """Serve the page and caption the sample through it; in a terminal until Ctrl-C, elsewhere that once."""
    try:
        from zendaya.encoders.media import read_audio
        from zendaya.serve.app import make_app
        from zendaya.serve.client import Client
        from zendaya.serve.config import ServeConfig
        from zendaya.serve.page import find_sample
        from zendaya.serve.run import Listener, bind
        from zendaya.serve.served import load_served

        served = load_served("tiny.en-dial")
    except (MissingExtraError, ModuleNotFoundError) as error:
        console.print(f"No page: {error}. The demo in the terminal instead.\n", markup=False)
        run(console)
        return
    stays = sys.stdin.isatty() and sys.stdout.isatty()
    config = ServeConfig(port=PORT)
    try:
        listening = bind(config.host, PORT)
    except ConfigError:  # another server has it
        listening = bind(config.host, 0)
    address = f"{config.host}:{listening.getsockname()[1]}"
    listener = Listener(make_app(config, served), config)
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve(sockets=[listening])), name="zendaya-server", daemon=True)
    thread.start()
    try:
        while not listener.started and thread.is_alive():
            time.sleep(0.01)
        sample = find_sample()
        if sample is not None:
            samples = np.concatenate([chunk.samples for chunk in read_audio(sample)])
            console.print("The sample, heard by the server and written at γ = 0.5:\n")
            with Client(f"ws://{address}", gamma=0.5) as client:
                begun_s = time.monotonic()
                for first in range(0, samples.size, CHUNK):
                    if stays:  # at its own speed
                        time.sleep(max(0.0, begun_s + first / 16000 - time.monotonic()))
                    client.send(samples[first : first + CHUNK])
                    for caption in client.captions():
                        console.print(caption.text, end="", markup=False)
                for caption in client.finish():
                    console.print(caption.text, end="", markup=False)
            console.print("\n")
        console.print(f"The page: http://{address}", markup=False)
        if stays:
            console.print(
                "Open it, choose Sample, Microphone or a file, and turn the dial. Ctrl-C ends it; DEMO=terminal make demo stays here."
            )
            thread.join()
        else:
            console.print("Not in a terminal, so this ends here: `zendaya serve` serves it for good.", markup=False)
    except KeyboardInterrupt:
        console.print()
    finally:
        listener.should_exit = True
        thread.join(10)


def _play(console: Console, source: _Stream, gamma: float) -> None:
    """The source at its own speed, with keys, as `zendaya stream` runs it."""
    clock, moments = Clock(), list[Moment]()
    session = source.open(gamma, clock=clock)
    clock.begin()
    ends_s = np.linspace(0, source.length_s, len(source.chunks) + 1)[1:].tolist()
    arrivals = paced(zip(source.chunks, ends_s, strict=True), clock)
    caption_on(arrivals, source.encoder, session, Screen(sys.stdout, sys.stderr), stdin=sys.stdin, each=moments.append)
    _say_lag(console, source, moments)


def _caption(console: Console, source: _Stream, gamma: float) -> None:
    """The source as fast as it goes."""
    console.print(f"   γ = {gamma:<4}", end="")
    moments = list(run_live(at_once(source.chunks), source.encoder, source.open(gamma)))
    console.print("".join(moment.event.text for moment in moments), markup=False)
    _say_lag(console, source, moments)


def _say_lag(console: Console, source: _Stream, moments: list[Moment]) -> None:
    written = [moment for moment in moments if moment.event.text]
    if written:
        lag_s, first_s = np.mean([moment.policy_lag_s + moment.compute_lag_s for moment in written]), written[0].event.emission_s
        console.print(f"            first word {first_s:.1f} s into {source.length_s:.1f} s, each some {lag_s:.1f} s after it was said\n")


def _speech() -> _Stream | None:
    """Whisper tiny.en, adapted to the dial, on a real recording, or None where either is not installed."""
    try:
        from zendaya.encoders.media import SAMPLE_RATE, read_audio
        from zendaya.pretrained import load_adapted

        recording = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
        adapted = load_adapted()
        chunks = [chunk.samples for chunk in read_audio(recording)]
    except (MissingExtraError, ModuleNotFoundError):
        return None
    samples, block_s = np.concatenate(chunks), adapted.encoder.block / adapted.encoder.traits.tokens_per_s
    return _Stream(
        what=f"speech, heard by Whisper tiny.en in blocks of {block_s:g} s and written on the dial, both adapted to it",
        raw=samples, chunks=chunks, length_s=samples.size / SAMPLE_RATE, encoder=adapted.encoder, model=adapted.model,
        window=adapted.model.config.window,
    )  # fmt: skip


def _random() -> _Stream:
    model = Model.from_preset("tiny")
    rows = np.random.default_rng(0).standard_normal((30, model.config.decoder.source_dim)).astype(np.float32)
    return _Stream(
        what="random source tokens and a small random model (no speech model is installed): the ids it writes",
        raw=rows, chunks=list(np.split(rows, 10)), length_s=10.0, encoder=Precomputed(rows.shape[1], 3.0), model=model,
        window=24, steps=16,
    )  # fmt: skip
