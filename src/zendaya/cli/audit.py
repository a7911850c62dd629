"""`zendaya audit` and `zendaya audit-raw`: exit code 1 where a leak is found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import zendaya
from zendaya.cli.options import check_exists, check_model, command
from zendaya.errors import ConfigError
from zendaya.records import option
from zendaya.runtime.options import Cut, DecodeOptions, Voice
from zendaya.runtime.policies import Policy, parse_policy
from zendaya.schedule import PowerLaw, Schedule, parse_schedule

if TYPE_CHECKING:
    from zendaya.audit import AuditReport
    from zendaya.audit.raw import Raw, RawAudit
    from zendaya.encoders.base import Encoder
    from zendaya.nn.model import Model

SCHEDULE = "A schedule, as 0.3, gamma=1,head=2, wait-k=10,stride=2, full"


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of an audit of a decoder."""

    random: bool = option(False, "Audit random weights instead, of every preset or of those named.")
    presets: tuple[str, ...] = option((), "With --random: a preset; may be repeated.", name="--preset")
    schedules: tuple[Schedule, ...] = option((), f"{SCHEDULE}; may be repeated.", name="--schedule", each=parse_schedule)
    scale: Literal["window", "segment"] = option("window", "window (strictly causal) or segment (the paper's, which leaks its length).")
    plant: str | None = option(None, "With --random: plant a leak first ('all' for each), to see it found.")
    cuts: int = option(4, "Horizons tried on each path.", min=1)
    seed: int = option(0, "Seed of weights, streams and cuts.", min=0, max=2**63 - 1)
    max_source: int = option(135, "Longest window tested, in source tokens.", min=1)
    max_steps: int = option(165, "Longest text tested, in steps.", min=1)
    engine: Literal["torch", "native", "auto"] = option("torch", "Decoder engine; auto is native where it was built.")
    precision: Literal["float32", "int8"] = option("float32", "Precision of the native engine.")

    def __post_init__(self) -> None:
        if self.plant is not None and not self.random:
            raise ConfigError("--plant goes with --random: a leak is planted in random weights")
        if self.plant is not None and (self.schedules or self.scale != "window"):
            raise ConfigError("a planted leak has its own schedule and scale: --plant takes neither --schedule nor --scale")
        if self.plant is not None and self.engine != "torch":
            raise ConfigError("a leak is planted in PyTorch's decoder: --plant goes with --engine torch")


@command
def audit(
    options: AuditOptions,
    checkpoint: Annotated[str | None, typer.Argument(help="A checkpoint folder, a hub id, or tiny.en-dial, the shipped model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per run.")] = False,
) -> None:
    """Test that no output depends on input that has not arrived; exit code 1 where one does.

    Everything beyond a horizon is replaced by other values, by NaN, by nothing and by more, alone and in batches,
    teacher-forced, incremental and live; what was written up to that horizon must not change by a bit. The incremental and
    live paths are those of the engine.
    """
    if (checkpoint is None) == (not options.random):
        raise ConfigError("give either a checkpoint or --random, one of the two")
    check_model(checkpoint)
    from zendaya.nn.model import Model
    from zendaya.nn.presets import presets
    from zendaya.runtime.loading import load_model

    names = options.presets or (["tiny"] if options.plant else presets()) if checkpoint is None else [checkpoint]
    passed = list[bool]()
    for name in names:
        model = Model.from_preset(name, seed=options.seed) if checkpoint is None else load_model(checkpoint)
        for words, engine, report in _reports(name, model, options):
            passed.append(report.passed)
            if as_json:
                print(json.dumps({"version": zendaya.__version__, "model": words, "engine": engine, **report.to_dict()}), flush=True)
                continue
            size = f"{report.window_tokens} source tokens by {report.steps} steps"
            steps = "; ".join(f"{path} {count}" for path, count in report.steps_tested.items())
            print(f"{'ok  ' if report.passed else 'LEAK'} {words} {report.schedule}: {report.probes} probes of {size}")
            print(f"     steps tested: {steps}", *([] if report.first is None else [f"     {report.first}"]), sep="\n", flush=True)
    if not all(passed):
        raise typer.Exit(1)


def _reports(name: str, model: Model, options: AuditOptions) -> Iterator[tuple[str, str, AuditReport]]:
    """What was audited, the engine that ran, and what was found."""
    from zendaya.audit import audit as run
    from zendaya.audit import default_schedules
    from zendaya.audit.leaks import LEAKS
    from zendaya.runtime.engine import engine_for, engine_name

    if options.plant is not None:
        if options.plant not in ("all", *LEAKS):
            raise ConfigError(f"--plant is one of {', '.join(LEAKS)}, all: got {options.plant!r}")
        for leak in LEAKS if options.plant == "all" else [options.plant]:
            yield f"{name} with {LEAKS[leak].what}", "torch", LEAKS[leak].audit(model, seed=options.seed, cuts=options.cuts)
        return
    engine = engine_for(model, options.engine, precision=options.precision)
    for schedule in options.schedules or default_schedules(model):
        report = run(
            model, schedule, scale=options.scale, seed=options.seed, cuts=options.cuts, max_source=options.max_source,
            max_steps=options.max_steps, engine=engine,
        )  # fmt: skip
        yield name, engine_name(model, options.engine, options.precision), report


@dataclass(frozen=True, kw_only=True)
class RawAuditOptions:
    """Options of an audit from raw input to text."""

    model: str | None = option(None, "A checkpoint folder or hub id; random weights if not given.")
    schedule: Schedule | Policy = option(PowerLaw(1.0), f"{SCHEDULE}, alignatt=4.", parse=parse_policy)
    arrivals: Literal["stated", "own"] = option("stated", "Arrival of a token: stated by the encoder, or the end of its own 1/rate.")
    cuts: int = option(4, "Moments at which the future is replaced.", min=1)
    seconds: float = option(30.0, "How much of the recording is used.", min=0.1)
    window_s: float | None = option(None, "Longest window in seconds; the model's if not given.", name="--window")
    cut: Cut = option("fixed", "Where windows end: at W (fixed), or where the speaker pauses (pauses).")
    voice: Voice = option("auto", "Decode speech alone, found by voice activity (gate; auto for sound), or everything (off).")
    seed: int = option(0, "Seed of weights, moments and changes.", min=0, max=2**63 - 1)

    @property
    def pipeline_asked(self) -> bool:
        """Whether options of a pipeline were given."""
        return self.window_s is not None or self.cut != "fixed" or self.voice == "gate"


@command
def audit_raw(
    encoder: Annotated[str, typer.Argument(help="The encoder, as `zendaya encode` names it: whisper:tiny.en,block_s=1, efficientnet …")],
    recording: Annotated[Path, typer.Argument(metavar="FILE", help="A recording or a video to audit it on.")],
    options: RawAuditOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per audit.")] = False,
) -> None:
    """Test from raw input to text: replace all input after a moment, and compare what came before.

    Tokens and text up to the moment must not change by a bit. The text is that of the whole pipeline: voice gate, encoder,
    windows and session. Encoders that are not live, and --arrivals own, are audited without gate and windows.
    """
    check_exists(recording, "a recording or a video")
    from zendaya.audit.raw import audit_encoder, open_raw
    from zendaya.encoders.registry import EncoderSpec

    opened, raw = open_raw(EncoderSpec.parse(encoder), recording, options.seconds)
    if (options.arrivals == "own" or not opened.traits.live) and options.pipeline_asked:
        raise ConfigError("--window, --cut and --voice need a live encoder and --arrivals stated: without them there is no pipeline")
    model = _model_for(encoder, opened.traits.dim, options)
    found = [
        audit_encoder(opened, raw, num_cuts=options.cuts, seed=options.seed, arrivals=options.arrivals),
        _audit_text(model, opened, raw, options),
    ]
    for one in found:
        if as_json:
            print(json.dumps({"version": zendaya.__version__, "seed": options.seed, "schedule": str(options.schedule), **one.to_dict()}))
        else:
            print(f"{'ok  ' if one.clean else 'LEAK' if one.leaks else 'none'} {one}")
    if any(one.leaks for one in found):
        raise typer.Exit(1)


def _audit_text(model: Model, encoder: Encoder[Any, Any], raw: Raw, options: RawAuditOptions) -> RawAudit:
    """The audit of the text: of a whole pipeline, or of encoder and session where a pipeline has no such arrivals."""
    from zendaya.audit.raw import audit_pipeline, audit_to_text
    from zendaya.runtime.engine import engine_for
    from zendaya.runtime.pipeline import Pipeline

    cuts, seed = options.cuts, options.seed
    if options.arrivals == "own" or not encoder.traits.live:
        steps = model.config.max_steps if model.length is None and options.schedule.needs_length else None
        arrivals = options.arrivals
        return audit_to_text(encoder, raw, lambda: model.open(options.schedule, steps=steps), num_cuts=cuts, seed=seed, arrivals=arrivals)
    decoding = DecodeOptions(schedule=options.schedule, window_s=options.window_s, cut=options.cut, voice=options.voice)
    engine = engine_for(model, decoding.engine, precision=decoding.precision)
    return audit_pipeline(lambda: Pipeline.open(model, encoder, decoding, engine=engine), raw, num_cuts=cuts, seed=seed)


def _model_for(encoder: str, dim: int, options: RawAuditOptions) -> Model:
    """The checkpoint, or random weights, that reads what the encoder gives."""
    from zendaya.nn.model import Model
    from zendaya.nn.presets import preset
    from zendaya.runtime.loading import load_model

    if options.model is None:
        shape = dataclasses.replace(preset("tiny").decoder, source_dim=dim)
        return Model.from_preset("tiny", seed=options.seed, decoder=shape)
    model = load_model(options.model)
    if model.config.decoder.source_dim != dim:
        reads = f"{options.model} reads {model.config.decoder.source_dim} features per token"
        raise ConfigError(f"{reads}, {encoder} gives {dim}: they do not fit")
    return model
