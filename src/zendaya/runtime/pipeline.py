"""The pipeline: source → encoder → session → timed events, one loop for every entrance.

The command, the demo, the server, evaluation, replay and SimulEval's agents all drive sessions through a `Pipeline`. Its two halves
may run in two threads: a `SourceEncoder` makes spans of source tokens, `Pipeline.decode` hands them to the session.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zendaya.encoders.base import Encoder, Tokens
from zendaya.errors import ConfigError
from zendaya.nn.model import Model
from zendaya.records import Event
from zendaya.runtime.arrival_queue import Flags, Times
from zendaya.runtime.engine import Engine, engine_for
from zendaya.runtime.options import DecodeOptions, Pace
from zendaya.runtime.pauses import PauseWindows
from zendaya.runtime.policies.base import Policy
from zendaya.runtime.session import Session, SourceTokens
from zendaya.runtime.voice import VoiceGate
from zendaya.schedule import Schedule
from zendaya.sources.live import Arrival
from zendaya.sources.media import SAMPLE_RATE


@dataclass(frozen=True)
class Span:
    """Encoded source tokens on their way to the session, and where the window ends after them."""

    tokens: Tokens
    now_s: float | None = None
    """When they arrived; without it, when the encoder says."""
    cut_s: float | None = None
    """When a pause after them was known; None where the window goes on."""
    speech_T: Flags | None = None
    """Which of the tokens hold speech; None where nobody listens for it."""
    onset: tuple[int, float] | None = None
    """Speech begins before them: the source tokens of the stream before it, and when that was known."""

    @property
    def empty(self) -> bool:
        """Whether it tells the session nothing."""
        return not len(self.tokens) and self.cut_s is None and self.onset is None


class SourceEncoder:
    """The encoder's half: raw input to spans, gated by voice activity and cut where it finds a pause.

    Behind a gate each stretch of speech is encoded like a recording of its own; times and positions stay those of the stream.
    """

    def __init__(self, encoder: Encoder[Any, Any], pauses: PauseWindows | None = None, gate: VoiceGate | None = None) -> None:
        self.encoder, self.pauses, self.gate = encoder, pauses, gate
        self._state: Any = None
        self._opened_s = 0.0
        """When the gate was opened."""
        self._before = self._given = 0
        """Source tokens of the stream before the encoder began, and since."""
        self.slid_s: float | None = None
        """When the encoder's span last slid."""

    @staticmethod
    def of(encoder: Encoder[Any, Any], options: DecodeOptions, model: Model | None = None) -> SourceEncoder:
        """The half that resolved options ask for; where the windows of the model overlap, the encoder's spans are its windows."""
        rate = encoder.traits.tokens_per_s
        assert options.window_tokens is not None
        overlap = 0 if model is None else model.config.overlap_tokens
        if overlap and encoder.traits.modality == "audio":
            longest = options.window_tokens // 2  # where a window is shorter than the model's
            encoder = encoder.with_settings(span_s=options.window_tokens / rate, overlap_s=min(overlap, longest) / rate)
        pauses = PauseWindows(options.window_tokens, rate) if options.cut == "pauses" else None
        return SourceEncoder(encoder, pauses, VoiceGate(rate) if options.voice == "gate" else None)

    def read(self, raw: Any, now_s: float | None = None) -> Iterator[Span]:
        """Spans of the source tokens that the next raw input completes."""
        if self.gate is None:
            yield from self._encode(raw, now_s)
            return
        for step in self.gate.read(raw):
            if step.begins:
                yield self._begin(self.gate, now_s)
            elif step.ends:
                yield from self._finish(now_s)
                yield dataclasses.replace(self._silent(now_s), cut_s=self.gate.heard / SAMPLE_RATE if now_s is None else now_s)
            else:
                yield from (span for span in self._encode(step.samples_S, now_s) if not span.empty)

    def finish(self, now_s: float | None = None) -> Iterator[Span]:
        """The source tokens that waited for more raw input; input after this begins anew."""
        if self.gate is None or self.gate.position is not None:
            yield from self._finish(now_s)
        if self.gate is not None:
            self.gate.finish()

    def _silent(self, now_s: float | None) -> Span:
        return Span(Tokens.none(self.encoder.traits.dim), now_s)

    def _begin(self, gate: VoiceGate, now_s: float | None) -> Span:
        """A stretch of speech begins."""
        assert gate.position is not None
        self._state, self._opened_s = None, gate.known / SAMPLE_RATE
        self._before, self._given = gate.position, 0
        if self.pauses is not None:
            self.pauses.restart()
        return dataclasses.replace(self._silent(now_s), onset=(gate.position, self._opened_s if now_s is None else now_s))

    def _placed(self, span: Span) -> Span:
        """A span with the positions and times of the stream: what waited for the gate came when it opened."""
        tokens, gate = span.tokens, self.gate
        new = len(tokens) - tokens.revised
        first, self._given = self._given, self._given + new
        if tokens.restart is not None:
            tokens = dataclasses.replace(tokens, restart=self._before + tokens.restart)
        if gate is not None:
            # On whole samples, so that rounding makes no token earlier than its last sample.
            arrival_s = np.maximum(np.ceil(tokens.arrival_s * SAMPLE_RATE - 1e-3) + gate.begin, self._opened_s * SAMPLE_RATE) / SAMPLE_RATE
            tokens = dataclasses.replace(tokens, arrival_s=arrival_s)
            # Of tokens that were given before it is known.
            speech_T = np.concatenate([np.zeros(tokens.revised, np.bool_), gate.speech_of(first, new)])
            cut_s = span.cut_s
            if cut_s is not None and span.now_s is None:
                cut_s = max(self._opened_s, cut_s + gate.begin / SAMPLE_RATE)
            span = dataclasses.replace(span, cut_s=cut_s, speech_T=speech_T)
        if tokens.restart is not None:
            self.slid_s = float(tokens.arrival_s[-1]) if span.now_s is None else span.now_s
        return dataclasses.replace(span, tokens=tokens)

    def _encode(self, raw: Any, now_s: float | None) -> Iterator[Span]:
        if self._state is None:
            self._state = self.encoder.start()
        if self.pauses is not None:
            self.pauses.hear(raw)
        for tokens in self.encoder.blocks(self._state, raw):
            spans = iter([Span(tokens, now_s)]) if self.pauses is None else self._cut(tokens, self.pauses, now_s)
            yield from map(self._placed, spans)

    def _finish(self, now_s: float | None) -> Iterator[Span]:
        state, self._state = self._state, None
        for tokens in self.encoder.last_blocks(self.encoder.start() if state is None else state):
            yield self._placed(Span(tokens, now_s))
        self._before, self._given = self._before + self._given, 0

    @property
    def context_start_s(self) -> float:
        """Where in the source the encoder's context begins."""
        if self._state is None:
            return 0.0
        return self._before / self.encoder.traits.tokens_per_s + self.encoder.context_start_s(self._state)

    def _cut(self, tokens: Tokens, pauses: PauseWindows, now_s: float | None) -> Iterator[Span]:
        """Tokens split where windows end in a pause."""
        while (at := pauses.cut(tokens)) is not None:
            yield Span(tokens[:at], now_s, now_s if now_s is not None else float(tokens.arrival_s[min(at, len(tokens) - 1)]))
            if self.encoder.begin_span(self._state, at_s=pauses.cut_s):
                return  # the new window is heard from its beginning, as the model learned to read it
            tokens = tokens[at:]
        yield Span(tokens, now_s)


def resolve(options: DecodeOptions, model: Model, encoder: Encoder[Any, Any]) -> DecodeOptions:
    """The options with window, steps and pace filled in from the model and its encoder."""
    traits = encoder.traits
    if not traits.live:
        raise ConfigError(f"{traits.name}: offline only: its tokens read the whole recording; name a live encoder (whisper in block mode)")
    for name, wrong, instead in (("cut", "pauses", "fixed"), ("voice", "gate", "off")):
        if getattr(options, name) == wrong and traits.modality != "audio":
            raise ConfigError(f"{name}={wrong} needs sound, and {traits.name} reads {traits.modality}: give {name}={instead}")
    if options.cut == "pauses" and (model.config.overlap_tokens or traits.revise_tokens):
        what = "windows of this model overlap" if model.config.overlap_tokens else f"{traits.name} gives tokens again"
        raise ConfigError(f"cut=pauses is for windows that end for good, and the {what}: give cut=fixed")
    window_tokens = options.window_tokens if options.window_s is None else round(options.window_s * traits.tokens_per_s)
    fixed = model.length is None and not options.schedule.decides_while_reading
    return dataclasses.replace(
        options,
        window_s=None,
        window_tokens=model.config.window_tokens if window_tokens is None else window_tokens,
        steps=model.config.max_steps if options.steps is None and fixed else options.steps,
        voice=options.voice if options.voice != "auto" else "gate" if traits.modality == "audio" else "off",
        pace=options.pace or Pace(traits.tokens_per_s, traits.block_tokens),
    )


class Pipeline:
    """One stream from raw input, or from source tokens, to events.

    >>> import numpy as np
    >>> from zendaya import Model, PowerLaw
    >>> from zendaya.encoders.features import Precomputed
    >>> pipeline = Pipeline.open(Model.from_preset("tiny"), Precomputed(16, 3.0), DecodeOptions(schedule=PowerLaw(0.5)))
    >>> events = [*pipeline.read(np.zeros((24, 16), np.float32)), *pipeline.end()]
    >>> events[0].spoken_s <= events[0].read_s <= events[0].arrival_s
    True
    """

    def __init__(self, session: Session, source: SourceEncoder | None = None) -> None:
        self.session, self.source = session, source
        self.between: Callable[[], None] | None = None
        """Called before each step; it may turn the dial."""
        self._end_s = 0.0
        if source is not None and session.tokens_per_s is None:
            session.tokens_per_s = source.encoder.traits.tokens_per_s

    @classmethod
    def open(
        cls, model: Model, encoder: Encoder[Any, Any], options: DecodeOptions, *, clock: Callable[[], float] | None = None,
        engine: Engine | None = None,
    ) -> Pipeline:  # fmt: skip
        """A pipeline for a model and its encoder."""
        options = resolve(options, model, encoder)
        engine = engine_for(model, options.engine, precision=options.precision) if engine is None else engine
        return cls(Session(model, options, clock=clock, engine=engine), SourceEncoder.of(encoder, options, model))

    # From raw input.

    def run(self, source: Iterable[Arrival]) -> Iterator[Event]:
        """Events of a source, to its end."""
        last_s = None
        for arrival in source:
            if arrival.raw is None:
                yield from self.advance(arrival.now_s)
                continue
            last_s = arrival.now_s
            yield from self.read(arrival.raw, last_s)
        yield from self.end(last_s)

    def read(self, raw: Any, now_s: float | None = None) -> Iterator[Event]:
        """Raw input that has arrived; the events it allows are decoded as the iterator is drawn."""
        assert self.source is not None
        for span in self.source.read(raw, now_s):
            yield from self.decode(span)

    def end(self, now_s: float | None = None) -> Iterator[Event]:
        """The raw input has ended."""
        assert self.source is not None
        for span in self.source.finish(now_s):
            yield from self.decode(span)
        yield from self.finish(self._end_s)

    # From source tokens.

    def decode(self, span: Span) -> Iterator[Event]:
        """Hand a span to the session, at once; the events it allows are decoded as the iterator is drawn."""
        tokens, events = span.tokens, list[Iterator[Event]]()
        if span.onset is not None:
            events.append(self._drawn(self.session.begin_speech(*span.onset)))
        if len(tokens):
            self._end_s = span.now_s if span.now_s is not None else float(tokens.arrival_s[-1])
            arrival_s = tokens.arrival_s if span.now_s is None else span.now_s
            revised, restart = tokens.revised, tokens.restart
            events.append(self.push(tokens.values_TE, arrival_s, speech_T=span.speech_T, revised=revised, restart=restart))
        if span.cut_s is not None:
            events.append(self.cut(span.cut_s))
        return itertools.chain(*events)

    def push(
        self, tokens: SourceTokens, arrival_s: Times | None = None, *, speech_T: Flags | None = None, revised: int = 0,
        restart: int | None = None,
    ) -> Iterator[Event]:  # fmt: skip
        """Source tokens that have arrived; `revised` and `restart` as in `Session.push`."""
        return self._drawn(self.session.push(tokens, arrival_s, speech_T=speech_T, revised=revised, restart=restart))

    def cut(self, now_s: float | None = None) -> Iterator[Event]:
        """End the window here."""
        return self._drawn(self.session.cut(now_s))

    def advance(self, now_s: float | None = None) -> Iterator[Event]:
        """Let time pass without arrivals."""
        return self._drawn(self.session.advance(now_s))

    def finish(self, now_s: float | None = None) -> Iterator[Event]:
        """The source tokens have ended."""
        return self._drawn(self.session.finish(now_s))

    def turn(self, schedule: Schedule | Policy) -> None:
        """Turn the dial, from the next step on."""
        self.session.set_schedule(schedule)

    def _drawn(self, events: Iterator[Event]) -> Iterator[Event]:
        if self.between is None:
            return events
        return self._watched(events, self.between)

    @staticmethod
    def _watched(events: Iterator[Event], between: Callable[[], None]) -> Iterator[Event]:
        while True:
            between()
            event = next(events, None)
            if event is None:
                return
            yield event
