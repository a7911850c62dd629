"""The words of `zendaya audit` and `zendaya audit-raw`: exit code 1 where a leak is found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

import zendaya
from zendaya.cli import options
from zendaya.errors import ConfigError
from zendaya.schedule import parse_schedule


def audit(
    checkpoint: Annotated[str | None, typer.Argument(help="A checkpoint folder, a hub id, or tiny.en-dial, the shipped model.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Audit random weights instead, of every preset or those named.")] = False,
    preset: Annotated[list[str] | None, typer.Option(help="With --random: a preset; may be repeated.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="A schedule, as 0.3, wait-k=10,stride=2, full; may be repeated.")] = None,
    scale: Annotated[
        str, typer.Option(help="window (strictly causal) or segment (the paper's protocol, which leaks its length).")
    ] = "window",
    plant: Annotated[str | None, typer.Option(help="With --random: plant a leak first ('all' for each), to see it found.")] = None,
    cuts: Annotated[int, typer.Option(help="Horizons tried on each path.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Seed of weights, streams and cuts.", min=0, max=2**63 - 1)] = 0,
    max_source: Annotated[int, typer.Option(help="Longest window tested, in source tokens.", min=1)] = 135,
    max_steps: Annotated[int, typer.Option(help="Longest text tested, in steps.", min=1)] = 165,
    engine: options.Engine = "torch",
    precision: options.Precision = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a run.")] = False,
) -> None:
    """Test that no output depends on input that has not arrived; exit code 1 where one does.

    Everything beyond a horizon is replaced by other values, by NaN, by nothing and by more, alone and in batches,
    teacher-forced, incremental and live; what was written up to that horizon must not change by a bit. The incremental and
    live paths are those of the engine.
    """
    from zendaya.audit import AuditReport, default_schedules
    from zendaya.audit import audit as run
    from zendaya.audit.leaks import LEAKS
    from zendaya.engine import Backend, engine_for, engine_name
    from zendaya.engine import Precision as Weights
    from zendaya.model import Model
    from zendaya.model import presets as names
    from zendaya.pretrained import load_model

    if (checkpoint is None) == (not random):
        raise ConfigError("give either a checkpoint or --random, one of the two")
    if plant is not None and (not random or (plant != "all" and plant not in LEAKS)):
        raise ConfigError(f"--plant goes with --random and is one of {', '.join(LEAKS)}, all: got {plant!r}")
    if plant is not None and (schedule or scale != "window"):
        raise ConfigError("a planted leak comes with its own schedule and scale: --plant takes neither --schedule nor --scale")
    if scale not in ("window", "segment"):
        raise ConfigError(f"--scale is window or segment: got {scale!r}")
    live_scale: Literal["window", "segment"] = scale  # type: ignore[assignment]
    backend: Backend = engine  # type: ignore[assignment]
    weights: Weights = precision  # type: ignore[assignment]
    if plant is not None and engine != "torch":
        raise ConfigError("a leak is planted in PyTorch's decoder: --plant goes with --engine torch")
    chosen = [parse_schedule(text) for text in schedule or []]
    wanted = [checkpoint] if checkpoint is not None else preset or (["tiny"] if plant else list(names()))
    failed = False

    def show(name: str, report: AuditReport, computed: str = "torch") -> None:
        nonlocal failed
        failed = failed or not report.passed
        if as_json:
            print(json.dumps({"version": zendaya.__version__, "model": name, "engine": computed, **report.to_dict()}), flush=True)
            return
        steps = "; ".join(f"{path} {count}" for path, count in report.steps_tested.items())
        size = f"{report.window} source tokens by {report.steps} steps"
        print(f"{'ok  ' if report.passed else 'LEAK'} {name} {report.schedule}: {report.probes} probes of {size}", flush=True)
        print(f"     steps tested: {steps}", flush=True)
        if report.first is not None:
            print(f"     {report.first}", flush=True)

    for name in wanted:
        model = load_model(name) if checkpoint is not None else Model.from_preset(name, seed=seed)
        if plant is not None:
            for leak in LEAKS if plant == "all" else [plant]:
                show(f"{name} with {LEAKS[leak].what}", LEAKS[leak].audit(model, seed=seed, cuts=cuts))
            continue
        computes, computed = engine_for(model, backend, precision=weights), engine_name(model, backend, weights)
        for one in chosen or default_schedules(model):
            found = run(model, one, scale=live_scale, seed=seed, cuts=cuts, max_source=max_source, max_steps=max_steps, engine=computes)
            show(name, found, computed)
    if failed:
        raise typer.Exit(1)


def audit_raw(
    encoder: Annotated[str, typer.Argument(help="The encoder, as `zendaya encode` names it: whisper:tiny.en,block_s=1, efficientnet …")],
    recording: Annotated[Path, typer.Argument(metavar="FILE", help="A recording or a video to audit it on.")],
    model: Annotated[str | None, typer.Option(help="A checkpoint folder or hub id; random weights if not given.")] = None,
    schedule: Annotated[str, typer.Option(help="A schedule, as 0.3, wait-k=10,stride=2, full.")] = "1",
    arrivals: Annotated[
        str, typer.Option(help="stated: when the encoder says a token arrives; own: at the end of the token's own place in time.")
    ] = "stated",
    cuts: Annotated[int, typer.Option(help="Moments at which the future is replaced.", min=1)] = 4,
    seconds: Annotated[float, typer.Option(help="How much of the recording is used.", min=0.1)] = 30.0,
    seed: Annotated[int, typer.Option(help="Seed of weights, moments and changes.", min=0, max=2**63 - 1)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an audit.")] = False,
) -> None:
    """Test from raw input on: replace all samples or frames after a moment; tokens and text up to it must not change by a bit."""
    from zendaya.audit.raw import audit_encoder, audit_to_text
    from zendaya.encoders.clips import Spec
    from zendaya.model import Model, preset
    from zendaya.pretrained import load_model

    if arrivals not in ("stated", "own"):
        raise ConfigError(f"--arrivals is stated or own: got {arrivals!r}")
    claimed: Literal["stated", "own"] = arrivals  # type: ignore[assignment]
    chosen = parse_schedule(schedule)
    opened, raw = Spec.parse(encoder).raw(recording, seconds)
    dim = opened.traits.dim
    if model is None:
        config = preset("tiny")
        decoder = Model.from_preset("tiny", seed=seed, decoder=dataclasses.replace(config.decoder, source_dim=dim))
    else:
        decoder = load_model(model)
        if decoder.config.decoder.source_dim != dim:
            raise ConfigError(f"{model} reads {decoder.config.decoder.source_dim} features a token, {encoder} gives {dim}: they do not fit")
    steps = decoder.config.max_steps if decoder.length is None and chosen.needs_length else None
    found = [
        audit_encoder(opened, raw, num_cuts=cuts, seed=seed, arrivals=claimed),
        audit_to_text(opened, raw, lambda: decoder.open(chosen, steps=steps), num_cuts=cuts, seed=seed, arrivals=claimed),
    ]
    for one in found:
        if as_json:
            print(json.dumps({"version": zendaya.__version__, "seed": seed, "schedule": str(chosen), **one.to_dict()}))
        else:
            print(f"{'ok  ' if one.clean else 'LEAK' if one.leaks else 'none'} {one}")
    if any(one.leaks for one in found):
        raise typer.Exit(1)
