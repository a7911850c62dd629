"""`zendaya stream`: captions while a recording, a pipe or a microphone is heard."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zendaya.cli.options import check_exists, command
from zendaya.cli.output import INTERRUPTED, say
from zendaya.errors import ConfigError, SourceError, ZendayaError
from zendaya.records import option
from zendaya.runtime.options import Backend, Cut, Precision, Voice

if TYPE_CHECKING:
    from zendaya.encoders.base import Encoder, Traits
    from zendaya.nn.config import ModelConfig
    from zendaya.nn.model import Model
    from zendaya.records import Event
    from zendaya.runtime.frontier import DialChoice, Frontier
    from zendaya.runtime.pipeline import Pipeline
    from zendaya.runtime.policies.base import Policy
    from zendaya.runtime.subtitles import Format, Subtitles
    from zendaya.schedule import Schedule
    from zendaya.sources.live import Arrival, Clock


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The source, the model and schedule that caption it, and the output."""

    mic: bool = option(False, "Listen to the microphone instead.", name="--mic")
    device: str | None = option(None, "With --mic: which one, by its number or part of its name.")
    lag_s: float | None = option(
        None, "The dial in seconds, as 1.0: the most accurate setting measured within it. Keys: [ and ].", name="--lag"
    )
    gamma: float | None = option(None, "The dial as γ: 0 offline, 1 real time, at most 10, trained up to 1.5. Keys: [ and ].")
    head: int = option(0, "Head start: source tokens that every step reads beyond its share of the window.", min=0)
    policy: str | None = option(None, "Another policy instead: gamma=1,head=500,hold=25, wait-k=10,stride=2, full, alignatt=25 …")
    model: str = option("tiny.en-dial", "The shipped model, an adapter's folder, or a checkpoint.")
    encoder: str | None = option(None, "For a checkpoint: its encoder, if its training run does not name it.")
    realtime: bool | None = option(None, "A file in real time (default on a terminal), or as fast as possible.", name="--realtime/--fast")
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
    source: str | None = None
    """A file, `-`, or None for the microphone; an argument of the command."""

    def __post_init__(self) -> None:
        if self.mic and (self.realtime is False or self.raw):
            raise ConfigError("a microphone is heard in real time: --mic goes with neither --fast nor --raw")
        if self.patience_s is not None and not 0 <= self.patience_s < float("inf"):
            raise ConfigError(f"--patience: expected seconds, at least 0: got {self.patience_s}")
        if self.window_s is not None and not 0 < self.window_s < float("inf"):
            raise ConfigError(f"--window: expected seconds, above 0: got {self.window_s}")
        if self.device is not None and not self.mic:
            raise ConfigError("--device chooses a microphone: give --mic too")
        if (self.gamma is not None or self.head) and self.policy is not None:
            raise ConfigError("give --gamma and --head, or --policy, not both")
        if self.lag_s is not None and (self.gamma is not None or self.head or self.policy is not None or self.encoder is not None):
            raise ConfigError("--lag chooses a measured setting of the model: it goes with neither --gamma, --head, --policy nor --encoder")

    @property
    def schedule(self) -> Schedule | Policy | None:
        """The schedule or policy that was asked for; None where a lag was, or nothing."""
        from zendaya.runtime.frontier import DEFAULT_GAMMA
        from zendaya.runtime.policies import parse_policy
        from zendaya.schedule import MAX_GAMMA, PowerLaw

        if self.gamma is None and not self.head and self.policy is None:
            return None
        dial = DEFAULT_GAMMA if self.gamma is None else self.gamma
        schedule = PowerLaw(dial, head=self.head) if self.policy is None else parse_policy(self.policy)
        if (gamma := schedule.gamma_or_none) is not None and gamma > MAX_GAMMA:
            raise ConfigError(f"--gamma: expected a number in 0 … {MAX_GAMMA:g}: got {gamma:g}")
        return schedule

    @property
    def is_file(self) -> bool:
        return self.source not in (None, "-")

    @property
    def live(self) -> bool:
        """Pace in real time: a pipe or microphone unless asked not to, a file if asked, or if captions go to a terminal."""
        return self.realtime if self.realtime is not None else not self.is_file or sys.stdout.isatty()


@command
def stream(
    options: StreamOptions,
    source: Annotated[str | None, typer.Argument(metavar="FILE|-", help="A recording or a video, or - for standard input.")] = None,
    list_devices: Annotated[bool, typer.Option("--list-devices", help="List the microphones and stop.")] = False,
) -> None:
    """Caption a source while it is heard: text as it is decided, one line per window, on standard output.

    On a terminal a status line shows the dial, the lag and its parts, exposure and window; [ and ] turn the dial, q ends
    the source there, and Ctrl-C stops with what is decided.
    """
    if list_devices:
        from zendaya.sources.live import microphones

        for one in (found := microphones()):
            print(f"{one.index}  {one.name}, {one.channels} channels{', the default' if one.default else ''}")
        if not found:
            say("this machine has no input device")
        return
    if (source is None) == (not options.mic):
        raise ConfigError("give a file, - for standard input, or --mic: one of the three")
    options = dataclasses.replace(options, source=source)
    if options.is_file:
        check_exists(source, "a recording or a video")
    frontier = _frontier(options)
    _choice(options, frontier)  # a bad dial is told before a model is loaded
    _run(options, frontier, _subtitles(options))


def _frontier(options: StreamOptions) -> Frontier | None:
    """What the keys turn through: a frontier is measured with the model's own encoder."""
    from zendaya.runtime.frontier import read_frontier

    return read_frontier(options.model) if options.schedule is None and options.encoder is None else None


def _choice(options: StreamOptions, frontier: Frontier | None, config: ModelConfig | None = None) -> DialChoice:
    """The setting that was asked for, or the default of the model with this config."""
    from zendaya.runtime.frontier import choose_setting

    return choose_setting(frontier, schedule=options.schedule, lag_s=options.lag_s, config=config, whole=not options.live)


def _run(options: StreamOptions, frontier: Frontier | None, subtitles: Subtitles) -> None:
    """Open the source and the model, and caption the one by the other."""
    from zendaya.cli.terminal import LagKeys, Screen, caption
    from zendaya.runtime.loading import load_live
    from zendaya.sources.live import Clock

    _check_source(options)
    clock, heard_s = Clock(), 0.0
    model, encoder = load_live(options.model, options.encoder)
    choice = _choice(options, frontier, model.config)
    pipeline = _pipeline(options, choice, model, encoder, clock)
    lags = None if frontier is None or choice.point is None else LagKeys(frontier, choice.point)
    source, screen = _arrivals(options, pipeline, clock), Screen(sys.stdout, sys.stderr, plain=options.as_json)

    def note(event: Event) -> None:
        nonlocal heard_s
        heard_s = max(heard_s, event.read_s)
        subtitles.add(event, event.spoken_s)

    with contextlib.closing(source), contextlib.closing(subtitles):
        try:
            stdin = None if options.source == "-" else sys.stdin
            caption(source, pipeline, screen, stdin=stdin, each=note, as_json=options.as_json, lags=lags)
        except KeyboardInterrupt:
            say(f"stopped: what was decided of the first {heard_s:.1f} s is written")
            raise typer.Exit(INTERRUPTED) from None
        except ZendayaError:
            subtitles.close(make=False)
            raise


def _check_source(options: StreamOptions) -> None:
    """Refuse a bad source before a model is loaded."""
    from zendaya.sources.live import microphones
    from zendaya.sources.media import probe

    if options.source is None:
        microphones()
    elif options.source == "-" and (sys.stdin is None or sys.stdin.isatty()):
        raise SourceError("standard input is a terminal or closed: expected sound from a pipe, as ffmpeg … -f wav - gives it")
    elif options.is_file:
        probe(options.source, raw=options.raw)


def _chunks(options: StreamOptions, traits: Traits) -> Iterator[tuple[Any, float, float]]:
    """Raw input, and the seconds of the source at which it begins and ends."""
    from zendaya.sources.live import read_microphone
    from zendaya.sources.media import read_audio, read_raw, read_video

    # Not sys.stdin.buffer: a thread that waits in it would hold its lock when the program ends.
    source: Any = io.FileIO(0, closefd=False) if options.source == "-" else options.source
    if traits.modality != "audio":
        if source is None or options.raw or options.cut == "pauses":
            name = options.model
            raise ConfigError(f"{name} sees and does not hear: it goes with a video, and not with --mic, --raw or --cut pauses")
        return (([frame], frame.time_s, frame.end_s) for frame in read_video(source, fps=traits.tokens_per_s))
    if source is None:
        device = options.device
        found = read_microphone(int(device) if device is not None and device.isdecimal() else device)
    else:
        found = read_raw(source) if options.raw else read_audio(source)
    return ((chunk.samples, chunk.start_s, chunk.end_s) for chunk in found)


def _pipeline(given: StreamOptions, choice: DialChoice, model: Model, encoder: Encoder[Any, Any], clock: Clock) -> Pipeline:
    """The model with its encoder, as the setting and the options ask."""
    from zendaya.runtime.loading import as_trained, gamma_warning
    from zendaya.runtime.pipeline import Pipeline

    schedule = as_trained(choice.schedule, given.model)
    if model.config.length == "fix" and not schedule.decides_while_reading and schedule.needs_length:
        say("this model's length head reads a whole window first: text comes one window at a time (train its inf form)")
    if choice.point is None and (warning := gamma_warning(schedule, given.model)) is not None:
        say(warning)
    options = choice.setting.options(
        window_s=given.window_s, patience_s=float("inf") if given.patience_s is None else given.patience_s,
        cut=given.cut, voice=given.voice, engine=given.engine, precision=given.precision,
    )  # fmt: skip
    options = dataclasses.replace(options, schedule=schedule)
    return Pipeline.open(model, choice.setting.encoder_from(encoder), options, clock=clock if given.live else None)


def _arrivals(options: StreamOptions, pipeline: Pipeline, clock: Clock) -> Generator[Arrival, None, None]:
    """The source: a file at its own speed or at once, a pipe or microphone as it comes; the clock begins with it."""
    from zendaya.sources import live

    assert pipeline.source is not None
    chunks = _chunks(options, pipeline.source.encoder.traits)

    def begun() -> Generator[Any, None, None]:
        for raw, start_s, end_s in chunks:
            clock.begin(end_s - start_s)  # the first chunk began when the clock does
            yield raw

    if not options.live:
        yield from live.at_once(raw for raw, _, _ in chunks)
    elif options.is_file:
        clock.begin()
        yield from live.paced(((raw, end_s) for raw, _, end_s in chunks), clock, lambda: pipeline.session.deadline_s)
    else:
        yield from live.listened(begun(), clock, lambda: pipeline.session.deadline_s)


def _subtitles(options: StreamOptions) -> Subtitles:
    from zendaya.runtime.subtitles import SubtitleFile, Subtitles

    files: list[tuple[Path | None, Format]] = [(options.vtt, "vtt"), (options.srt, "srt")]
    named = [path for path in (options.vtt, options.srt, Path(str(options.source)) if options.is_file else None) if path is not None]
    if len({path.resolve() for path in named}) < len(named):
        raise ConfigError(f"{' and '.join(map(str, named))}: source and subtitles must be files of their own")
    return Subtitles(*(SubtitleFile(path, form) for path, form in files if path is not None))
