"""The demo: the dial drawn, a stream decoded under it word by word, and the decoder audited."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from zendaya import report
from zendaya.audit import audit
from zendaya.audit.leaks import LEAKS
from zendaya.errors import MissingExtraError
from zendaya.model import Model
from zendaya.schedule import PowerLaw

GAMMAS = (0.0, 0.5, 1.0)


def run(console: Console) -> None:
    """Draw, decode, audit; where the speech model or its recording is not installed, a small random model stands in."""
    schedule = PowerLaw(0.5)
    ours, rival = report.dial_beside_wait_k(schedule, source=100, steps=165)
    console.print("[bold]1. The dial[/]: how much of the source each step may read\n")
    console.print(report.draw_curves({f"γ = {schedule.gamma}": ours.horizons, rival.schedule.split(",")[0]: rival.horizons}, top=100))
    console.print(
        f"\n   γ = {schedule.gamma} reads {ours.exposure:.1%} of the source on average "
        f"(limit 1/(1+γ) = {ours.exposure_limit:.1%}) and starts after {ours.first_token} of 100 tokens.\n"
    )
    model, source_TE, steps, what = _speech() or _random()
    console.print(f"[bold]2. A stream[/]: {what}\n")
    for gamma in GAMMAS:
        console.print(f"   γ = {gamma:<4}", end="")
        session = model.open(PowerLaw(gamma), window=source_TE.shape[0], steps=steps)
        emitted_at: list[int] = []
        for token_E in source_TE:  # one source token at a time, as they would arrive
            for event in session.push(token_E[None]):
                emitted_at.append(event.horizon)
                console.print(event.text, end="", markup=False)
        lead = 1 - sum(emitted_at) / len(emitted_at) / source_TE.shape[0]
        console.print(
            f"\n            first word after {emitted_at[0]} of {source_TE.shape[0]} source tokens; on average {lead:.0%} still unread\n"
        )
    console.print("[bold]3. The audit[/]: everything beyond each horizon replaced by other values, NaN, nothing, more\n")
    found = audit(model, schedule, cuts=2, max_source=80, max_steps=24)
    assert found.passed, found.first
    console.print(f"   [green]no leak[/]: {found.probes} probes of the decoder above, on {len(found.steps_tested)} paths")
    planted = LEAKS["softmax"].audit(Model.from_preset("tiny"), cuts=2)
    console.print(f"   a leak planted on purpose is found: {planted.first}\n")
    console.print(
        "Turn it yourself: .venv/bin/zendaya dial --gamma 1 --source 100 --steps 165; audit your own: .venv/bin/zendaya audit FOLDER"
    )


def _speech() -> tuple[Model, Tensor, int, str] | None:
    """Whisper tiny.en's decoder and the encoded recording, or None where either is not installed."""
    try:
        import soundfile

        from zendaya.encoders.whisper import SAMPLE_RATE, encode_offline, load_encoder, load_weights
        from zendaya.pretrained import whisper_decoder

        recording = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
        weights = load_weights("tiny.en")
    except (MissingExtraError, ModuleNotFoundError):
        return None
    samples, _ = soundfile.read(recording, dtype="float32")
    num_tokens = len(samples) * 50 // SAMPLE_RATE  # Whisper's encoder gives 50 tokens a second
    source_TE = encode_offline(load_encoder(weights), samples)[:num_tokens]
    return whisper_decoder(weights), source_TE, 24, (
        f"{len(samples) / SAMPLE_RATE:.0f} s of speech, Whisper tiny.en's decoder on the dial "
        "(its encoder still hears the whole clip; it becomes causal in a later version)"
    )  # fmt: skip


def _random() -> tuple[Model, Tensor, int, str]:
    model = Model.from_preset("tiny")
    source_TE = torch.randn(model.config.window, model.config.decoder.source_dim, generator=torch.Generator().manual_seed(0))
    return model, source_TE, 16, "random source tokens and a small random model (no speech model is installed): the ids it writes"
