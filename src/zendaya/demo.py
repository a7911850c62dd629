"""The demo: the dial drawn, a recording captioned under it as it plays, and the whole way from samples to text audited."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from zendaya import report
from zendaya.audit import audit
from zendaya.audit.leaks import LEAKS
from zendaya.audit.raw import audit_to_text
from zendaya.encoders import Encoder, stream
from zendaya.encoders.features import Precomputed
from zendaya.errors import MissingExtraError
from zendaya.model import Model
from zendaya.schedule import PowerLaw
from zendaya.stream import Session

GAMMAS = (0.0, 0.3, 1.0)


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

    def open(self, gamma: float) -> Session:
        return self.model.open(PowerLaw(gamma), window=self.window, steps=self.steps)


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
        "Turn it yourself: .venv/bin/zendaya dial --gamma 1 --source 100 --steps 165; audit your own: .venv/bin/zendaya audit FOLDER"
    )


def _caption(console: Console, source: _Stream, gamma: float) -> None:
    console.print(f"   γ = {gamma:<4}", end="")
    session, times_s = source.open(gamma), list[float]()

    def show(events: Iterable[Any], now_s: float) -> None:
        for event in events:
            times_s.append(now_s)
            console.print(event.text, end="", markup=False)

    for tokens in stream(source.encoder, source.chunks):
        for value_E, arrival_s in zip(tokens.values_TE, tokens.arrival_s.tolist(), strict=True):
            show(session.push(value_E[None]), arrival_s)
    show(session.finish(), source.length_s)
    console.print(f"\n            first word {times_s[0]:.1f} s into {source.length_s:.1f} s, on average at {np.mean(times_s):.1f} s\n")


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
