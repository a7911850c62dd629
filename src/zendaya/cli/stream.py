"""The words of `zendaya stream`: captions while a recording, a pipe or a microphone is heard."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from zendaya.cli import options
from zendaya.cli.encode import INTERRUPTED
from zendaya.errors import ConfigError, SourceError, ZendayaError
from zendaya.schedule import PowerLaw, Schedule

if TYPE_CHECKING:
    from zendaya.encoders import Encoder
    from zendaya.live import Arrival, Clock, Moment
    from zendaya.policies import Policy
    from zendaya.stream import Session
    from zendaya.subtitles import Subtitles


def stream(
    source: Annotated[str | None, typer.Argument(metavar="FILE|-", help="A recording or a video, or - for standard input.")] = None,
    mic: Annotated[bool, typer.Option("--mic", help="Listen to the microphone instead.")] = False,
    device: Annotated[str | None, typer.Option(help="With --mic: which one, by its number or part of its name.")] = None,
    list_devices: Annotated[bool, typer.Option("--list-devices", help="List the microphones and stop.")] = False,
    gamma: Annotated[float | None, typer.Option(help="The dial: 0 offline, 1 real time; 0.5 if not given. Keys [ and ] turn it.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Another policy instead: wait-k=10,stride=2, full, local-agreement=100 …"),
    ] = None,
    model: Annotated[str, typer.Option(help="The shipped model, an adapter's folder, or a checkpoint.")] = "tiny.en-dial",
    encoder: Annotated[str | None, typer.Option(help="For a checkpoint: its encoder, if its run does not say it.")] = None,
    realtime: Annotated[
        bool | None, typer.Option("--realtime/--fast", help="At the recording's own speed (default on a terminal), or as fast as it goes.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The source is bare samples: 16 kHz, one channel, s16le.")] = False,
    patience: Annotated[float | None, typer.Option(help="Seconds a late source is waited for; for ever if not given.")] = None,
    window: Annotated[float | None, typer.Option(help="Seconds of a window at most; the model's if not given.")] = None,
    cut: Annotated[str, typer.Option(help="Windows end at W (fixed), or where the speaker pauses (pauses).")] = "fixed",
    engine: options.Engine = "auto",
    precision: options.Precision = "float32",
    vtt: Annotated[Path | None, typer.Option(help="Also write WebVTT subtitles to FILE.")] = None,
    srt: Annotated[Path | None, typer.Option(help="Also write SubRip subtitles to FILE.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an event instead of text.")] = False,
) -> None:
    """Caption a source while it is heard: text as it is decided, a line a window, on standard output.

    On a terminal a status line shows γ, the lag and what it is made of, exposure and window; [ and ] turn the dial, q ends the
    source there, and Ctrl-C stops with what is decided.
    """
    if list_devices:
        _print_devices()
        return
    if (source is None) == (not mic):
        raise ConfigError("give a file, - for standard input, or --mic: one of the three")
    if mic and (realtime is False or raw):
        raise ConfigError("a microphone is heard as it sounds: --mic goes with neither --fast nor --raw")
    if cut not in ("pauses", "fixed"):
        raise ConfigError(f"--cut is pauses or fixed: got {cut!r}")
    if patience is not None and not 0 <= patience < float("inf"):
        raise ConfigError(f"--patience is a number of seconds, at least 0: got {patience}")
    if window is not None and not 0 < window < float("inf"):
        raise ConfigError(f"--window is a number of seconds, above 0: got {window}")
    if device is not None and not mic:
        raise ConfigError("--device chooses a microphone: it goes with --mic")
    schedule = _policy(gamma, policy)
    _run(
        _Settings(
            source=source, device=device, raw=raw, schedule=schedule, model=model, encoder=encoder, realtime=realtime,
            patience_s=float("inf") if patience is None else patience, window_s=window, cut=cut, engine=engine,
            precision=precision, as_json=as_json,
        ),
        _subtitles(source, vtt, srt),
    )  # fmt: skip


def _policy(gamma: float | None, policy: str | None) -> Schedule | Policy:
    """The one place where a policy is named."""
    if gamma is not None and policy is not None:
        raise ConfigError("give --gamma or --policy, one of the two")
    if policy is None:
        return PowerLaw(0.5 if gamma is None else gamma)
    from zendaya.policies import parse_policy

    return parse_policy(policy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    source: str | None
    """None: the microphone."""
    device: str | None
    raw: bool
    schedule: Schedule | Policy
    model: str
    encoder: str | None
    realtime: bool | None
    patience_s: float
    window_s: float | None
    cut: str
    engine: str
    precision: str
    as_json: bool

    @property
    def is_file(self) -> bool:
        return self.source not in (None, "-")

    @property
    def live(self) -> bool:
        """Whether time passes as it does: what comes by itself unless asked not to, a file if asked, or if captions are watched."""
        if self.realtime is not None:
            return self.realtime
        return not self.is_file or sys.stdout.isatty()


def _run(settings: _Settings, subtitles: Subtitles) -> None:
    """Open the source and the model, and caption the one by the other."""
    from zendaya.encoders.pauses import PauseWindows
    from zendaya.live import Clock
    from zendaya.terminal import Screen, caption

    _check_source(settings)
    clock = Clock()
    session, encoder, hears = _session(settings, clock)
    rate, heard_s = encoder.traits.tokens_per_s, 0.0
    pauses = PauseWindows(session.window, rate) if hears and settings.cut == "pauses" else None
    source = _arrivals(settings, _sound(settings) if hears else _pictures(settings, rate), session, clock)
    screen = Screen(sys.stdout, sys.stderr, plain=settings.as_json)

    def note(moment: Moment) -> None:
        nonlocal heard_s
        heard_s = max(heard_s, moment.read_s)
        subtitles.add(moment.event, moment.spoken_s)

    with contextlib.closing(source), contextlib.closing(subtitles):
        try:
            caption(
                source, encoder, session, screen, stdin=None if settings.source == "-" else sys.stdin, pauses=pauses, each=note,
                as_json=settings.as_json,
            )  # fmt: skip
        except KeyboardInterrupt:
            typer.echo(f"zendaya: stopped: what was decided of the first {heard_s:.1f} s is written", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except ZendayaError:
            subtitles.close(make=False)
            raise


_Chunks = Iterator[tuple[Any, float, float]]
"""Raw input, and the seconds of the source at which it begins and ends."""


def _check_source(settings: _Settings) -> None:
    """What is wrong with the source is said before a model is loaded."""
    from zendaya.encoders.media import microphones, probe

    if settings.source is None:
        microphones()
    elif settings.source == "-" and (sys.stdin is None or sys.stdin.isatty()):
        raise SourceError("standard input is a terminal or closed: expected sound from a pipe, as ffmpeg … -f wav - gives it")
    elif settings.is_file:
        probe(settings.source, raw=settings.raw)


def _sound(settings: _Settings) -> _Chunks:
    from zendaya.encoders.media import read_audio, read_microphone, read_raw

    if settings.source is None:
        device = settings.device
        found = read_microphone(int(device) if device is not None and device.isdecimal() else device)
    else:
        found = read_raw(_bytes(settings.source)) if settings.raw else read_audio(_bytes(settings.source))
    return ((chunk.samples, chunk.start_s, chunk.end_s) for chunk in found)


def _pictures(settings: _Settings, fps: float) -> _Chunks:
    from zendaya.encoders.media import read_video

    if settings.source is None or settings.raw or settings.cut == "pauses":
        raise ConfigError(f"{settings.model} sees and does not hear: it goes with a video, and not with --mic, --raw or --cut pauses")
    return (([frame], frame.time_s, frame.end_s) for frame in read_video(_bytes(settings.source), fps=fps))


def _bytes(source: str) -> str | BinaryIO:
    # Not sys.stdin.buffer: a thread that waits in it would hold its lock when the program ends.
    return io.FileIO(0, closefd=False) if source == "-" else source


def _session(settings: _Settings, clock: Clock) -> tuple[Session, Encoder[Any, Any], bool]:
    """The session, its encoder, and whether that one hears."""
    from zendaya.encoders.whisper_stream import WhisperBlocks
    from zendaya.engine import engine_for
    from zendaya.pretrained import as_trained, load_live
    from zendaya.stream import Pace

    model, encoder = load_live(settings.model, settings.encoder)
    traits = encoder.traits
    if not traits.live:
        raise ConfigError(f"{traits.name}: offline only: its tokens read the whole recording; name a live encoder (whisper in block mode)")
    block = max(1, encoder.block // encoder.pool) if isinstance(encoder, WhisperBlocks) else 1
    schedule = as_trained(settings.schedule, settings.model)
    if model.config.length == "fix" and getattr(schedule, "needs_length", False):
        typer.echo(
            "zendaya: this model's length head reads a whole window first: text comes a window at a time (train its inf form)", err=True
        )
    session = model.open(
        schedule,
        window=None if settings.window_s is None else round(settings.window_s * traits.tokens_per_s),
        steps=model.config.max_steps if model.length is None and isinstance(schedule, Schedule) else None,
        patience_s=settings.patience_s, pace=Pace(traits.tokens_per_s, block), clock=clock if settings.live else None,
        engine=engine_for(model, settings.engine, precision=settings.precision),  # type: ignore[arg-type]
    )  # fmt: skip
    return session, encoder, isinstance(encoder, WhisperBlocks)


def _arrivals(settings: _Settings, chunks: _Chunks, session: Session, clock: Clock) -> Generator[Arrival, None, None]:
    """The source: a file at its own speed or at once, a pipe or microphone as it comes; the clock begins with it."""
    from zendaya import live

    if not settings.live:
        yield from live.at_once(raw for raw, _, _ in chunks)
    elif settings.is_file:
        clock.begin()
        yield from live.paced(((raw, end_s) for raw, _, end_s in chunks), clock, lambda: session.deadline_s)
    else:
        yield from live.listened(_begun(chunks, clock), clock, lambda: session.deadline_s)


def _begun(chunks: _Chunks, clock: Clock) -> Generator[Any, None, None]:
    """The chunks; the first of them began when the clock does."""
    for raw, start_s, end_s in chunks:
        clock.begin(end_s - start_s)
        yield raw


def _subtitles(source: str | None, vtt: Path | None, srt: Path | None) -> Subtitles:
    from zendaya.subtitles import SubtitleFile, Subtitles

    named = [path for path in (vtt, srt, None if source in (None, "-") else Path(str(source))) if path is not None]
    if len({path.resolve() for path in named}) < len(named):
        raise ConfigError(f"{' and '.join(map(str, named))}: source and subtitles must be files of their own")
    files = [SubtitleFile(vtt, "vtt")] if vtt is not None else []
    return Subtitles(*files, *([SubtitleFile(srt, "srt")] if srt is not None else []))


def _print_devices() -> None:
    from zendaya.encoders.media import microphones

    found = microphones()
    for one in found:
        print(f"{one.index}  {one.name}, {one.channels} channels{', the default' if one.default else ''}")
    if not found:
        typer.echo("zendaya: this machine has no input device", err=True)
