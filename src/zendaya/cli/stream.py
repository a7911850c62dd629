"""`zendaya stream`: captions while a recording, a pipe or a microphone is heard."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from zendaya.cli.options import check_exists, command
from zendaya.cli.output import INTERRUPTED, say
from zendaya.errors import ConfigError, SourceError, ZendayaError
from zendaya.records import option
from zendaya.runtime.options import Backend, Cut, DecodeOptions, Precision, Voice

if TYPE_CHECKING:
    from zendaya.records import Event
    from zendaya.runtime.pipeline import Pipeline
    from zendaya.runtime.policies.base import Policy
    from zendaya.runtime.subtitles import Subtitles
    from zendaya.schedule import Schedule
    from zendaya.sources.live import Arrival, Clock


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What is captioned, by which model and schedule, and where the text goes."""

    mic: bool = option(False, "Listen to the microphone instead.", name="--mic")
    device: str | None = option(None, "With --mic: which one, by its number or part of its name.")
    gamma: float | None = option(
        None, "The dial: 0 offline, 1 real time, at most 10; default 0.5. Models are trained up to 1.5. Keys [ and ] turn it."
    )  # fmt: skip
    policy: str | None = option(None, "Another policy instead: wait-k=10,stride=2, full, local-agreement=100 …")
    model: str = option("tiny.en-dial", "The shipped model, an adapter's folder, or a checkpoint.")
    encoder: str | None = option(None, "For a checkpoint: its encoder, if its training run does not name it.")
    realtime: bool | None = option(
        None, "Pace a file in real time (default on a terminal), or go as fast as possible.", name="--realtime/--fast"
    )  # fmt: skip
    raw: bool = option(False, "The source is bare samples: 16 kHz, one channel, s16le.", name="--raw")
    patience_s: float | None = option(None, "Seconds to wait for a late source; for ever if not given.", name="--patience")
    window_s: float | None = option(None, "Longest window in seconds; the model's if not given.", name="--window")
    cut: Cut = option("fixed", "Where windows end: at W (fixed), or where the speaker pauses (pauses).")
    voice: Voice = option("auto", "Decode speech alone, found by voice activity (gate; auto for sound), or everything (off).")
    engine: Backend = option("auto", "Decoder engine: native, torch, or auto (native where it was built).")
    precision: Precision = option("float32", "Precision of the native engine: float32 or int8.")
    vtt: Path | None = option(None, "Also write WebVTT subtitles to FILE.")
    srt: Path | None = option(None, "Also write SubRip subtitles to FILE.")
    as_json: bool = option(False, "Print one JSON object per event instead of text.", name="--json")

    def __post_init__(self) -> None:
        if self.mic and (self.realtime is False or self.raw):
            raise ConfigError("a microphone is heard in real time: --mic goes with neither --fast nor --raw")
        if self.patience_s is not None and not 0 <= self.patience_s < float("inf"):
            raise ConfigError(f"--patience: expected seconds, at least 0: got {self.patience_s}")
        if self.window_s is not None and not 0 < self.window_s < float("inf"):
            raise ConfigError(f"--window: expected seconds, above 0: got {self.window_s}")
        if self.device is not None and not self.mic:
            raise ConfigError("--device chooses a microphone: give --mic too")
        if self.gamma is not None and self.policy is not None:
            raise ConfigError("give --gamma or --policy, not both")

    @property
    def schedule(self) -> Schedule | Policy:
        """The schedule or policy that was asked for."""
        from zendaya.runtime.policies import parse_policy
        from zendaya.schedule import MAX_GAMMA, PowerLaw

        schedule = PowerLaw(0.5 if self.gamma is None else self.gamma) if self.policy is None else parse_policy(self.policy)
        if (gamma := schedule.gamma_or_none) is not None and gamma > MAX_GAMMA:
            raise ConfigError(f"--gamma: expected a number in 0 … {MAX_GAMMA:g}: got {gamma:g}")
        return schedule


@command
def stream(
    options: StreamOptions,
    source: Annotated[str | None, typer.Argument(metavar="FILE|-", help="A recording or a video, or - for standard input.")] = None,
    list_devices: Annotated[bool, typer.Option("--list-devices", help="List the microphones and stop.")] = False,
) -> None:
    """Caption a source while it is heard: text as it is decided, one line per window, on standard output.

    On a terminal a status line shows γ, the lag and its parts, exposure and window; [ and ] turn the dial, q ends the
    source there, and Ctrl-C stops with what is decided.
    """
    if list_devices:
        _print_devices()
        return
    if (source is None) == (not options.mic):
        raise ConfigError("give a file, - for standard input, or --mic: one of the three")
    if source not in (None, "-"):
        check_exists(source, "a recording or a video")
    _run(_StreamRun(options, source, options.schedule), _subtitles(source, options.vtt, options.srt))


@dataclass(frozen=True)
class _StreamRun:
    """One run of the command."""

    options: StreamOptions
    source: str | None
    """None: the microphone."""
    schedule: Schedule | Policy

    @property
    def is_file(self) -> bool:
        return self.source not in (None, "-")

    @property
    def live(self) -> bool:
        """Pace in real time: a pipe or microphone unless asked not to, a file if asked, or if captions go to a terminal."""
        if self.options.realtime is not None:
            return self.options.realtime
        return not self.is_file or sys.stdout.isatty()


def _run(job: _StreamRun, subtitles: Subtitles) -> None:
    """Open the source and the model, and caption the one by the other."""
    from zendaya.cli.terminal import Screen, caption
    from zendaya.sources.live import Clock

    _check_source(job)
    clock, heard_s = Clock(), 0.0
    pipeline = _pipeline(job, clock)
    source = _arrivals(job, pipeline, clock)
    screen = Screen(sys.stdout, sys.stderr, plain=job.options.as_json)

    def note(event: Event) -> None:
        nonlocal heard_s
        heard_s = max(heard_s, event.read_s)
        subtitles.add(event, event.spoken_s)

    with contextlib.closing(source), contextlib.closing(subtitles):
        try:
            stdin = None if job.source == "-" else sys.stdin
            caption(source, pipeline, screen, stdin=stdin, each=note, as_json=job.options.as_json)
        except KeyboardInterrupt:
            say(f"stopped: what was decided of the first {heard_s:.1f} s is written")
            raise typer.Exit(INTERRUPTED) from None
        except ZendayaError:
            subtitles.close(make=False)
            raise


_Chunks = Iterator[tuple[Any, float, float]]
"""Raw input, and the seconds of the source at which it begins and ends."""


def _check_source(job: _StreamRun) -> None:
    """What is wrong with the source is said before a model is loaded."""
    from zendaya.sources.media import probe
    from zendaya.sources.microphone import microphones

    if job.source is None:
        microphones()
    elif job.source == "-" and (sys.stdin is None or sys.stdin.isatty()):
        raise SourceError("standard input is a terminal or closed: expected sound from a pipe, as ffmpeg … -f wav - gives it")
    elif job.is_file:
        probe(job.source, raw=job.options.raw)


def _sound(job: _StreamRun) -> _Chunks:
    from zendaya.sources.media import read_audio, read_raw
    from zendaya.sources.microphone import read_microphone

    if job.source is None:
        device = job.options.device
        found = read_microphone(int(device) if device is not None and device.isdecimal() else device)
    else:
        found = read_raw(_bytes(job.source)) if job.options.raw else read_audio(_bytes(job.source))
    return ((chunk.samples, chunk.start_s, chunk.end_s) for chunk in found)


def _pictures(job: _StreamRun, fps: float) -> _Chunks:
    from zendaya.sources.media import read_video

    if job.source is None or job.options.raw or job.options.cut == "pauses":
        raise ConfigError(f"{job.options.model} sees and does not hear: it goes with a video, and not with --mic, --raw or --cut pauses")
    return (([frame], frame.time_s, frame.end_s) for frame in read_video(_bytes(job.source), fps=fps))


def _bytes(source: str) -> str | BinaryIO:
    # Not sys.stdin.buffer: a thread that waits in it would hold its lock when the program ends.
    return io.FileIO(0, closefd=False) if source == "-" else source


def _pipeline(job: _StreamRun, clock: Clock) -> Pipeline:
    """The model with its encoder, as the options ask."""
    from zendaya.runtime.loading import as_trained, gamma_warning, load_live
    from zendaya.runtime.pipeline import Pipeline

    model, encoder = load_live(job.options.model, job.options.encoder)
    schedule = as_trained(job.schedule, job.options.model)
    if model.config.length == "fix" and not schedule.decides_while_reading and schedule.needs_length:
        say("this model's length head reads a whole window first: text comes one window at a time (train its inf form)")
    if (warning := gamma_warning(schedule, job.options.model)) is not None:
        say(warning)
    given = job.options
    options = DecodeOptions(
        schedule=schedule, window_s=given.window_s, patience_s=float("inf") if given.patience_s is None else given.patience_s,
        cut=given.cut, voice=given.voice, engine=given.engine, precision=given.precision,
    )  # fmt: skip
    return Pipeline.open(model, encoder, options, clock=clock if job.live else None)


def _arrivals(job: _StreamRun, pipeline: Pipeline, clock: Clock) -> Generator[Arrival, None, None]:
    """The source: a file at its own speed or at once, a pipe or microphone as it comes; the clock begins with it."""
    from zendaya.sources import live

    assert pipeline.source is not None
    traits = pipeline.source.encoder.traits
    chunks = _sound(job) if traits.modality == "audio" else _pictures(job, traits.tokens_per_s)
    if not job.live:
        yield from live.at_once(raw for raw, _, _ in chunks)
    elif job.is_file:
        clock.begin()
        yield from live.paced(((raw, end_s) for raw, _, end_s in chunks), clock, lambda: pipeline.session.deadline_s)
    else:
        yield from live.listened(_begun(chunks, clock), clock, lambda: pipeline.session.deadline_s)


def _begun(chunks: _Chunks, clock: Clock) -> Generator[Any, None, None]:
    """The chunks; the first of them began when the clock does."""
    for raw, start_s, end_s in chunks:
        clock.begin(end_s - start_s)
        yield raw


def _subtitles(source: str | None, vtt: Path | None, srt: Path | None) -> Subtitles:
    from zendaya.runtime.subtitles import SubtitleFile, Subtitles

    named = [path for path in (vtt, srt, None if source in (None, "-") else Path(str(source))) if path is not None]
    if len({path.resolve() for path in named}) < len(named):
        raise ConfigError(f"{' and '.join(map(str, named))}: source and subtitles must be files of their own")
    files = [SubtitleFile(vtt, "vtt")] if vtt is not None else []
    return Subtitles(*files, *([SubtitleFile(srt, "srt")] if srt is not None else []))


def _print_devices() -> None:
    from zendaya.sources.microphone import microphones

    found = microphones()
    for one in found:
        print(f"{one.index}  {one.name}, {one.channels} channels{', the default' if one.default else ''}")
    if not found:
        say("this machine has no input device")
