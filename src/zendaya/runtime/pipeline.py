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

from zendaya.encoders.base import Encoder, Tokens
from zendaya.errors import ConfigError
from zendaya.nn.model import Model
from zendaya.records import Event
from zendaya.runtime.arrival_queue import Times
from zendaya.runtime.engine import Engine, engine_for
from zendaya.runtime.options import DecodeOptions, Pace
from zendaya.runtime.pauses import PauseWindows
from zendaya.runtime.policies.base import Policy
from zendaya.runtime.session import Session, SourceTokens
from zendaya.schedule import Schedule
from zendaya.sources.live import Arrival


@dataclass(frozen=True)
class Span:
    """Encoded source tokens on their way to the session, and where the window ends after them."""

    tokens: Tokens
    now_s: float | None = None
    """When they arrived; without it, when the encoder says."""
    cut_s: float | None = None
    """When a pause after them was known; None where the window goes on."""


class SourceEncoder:
    """The encoder's half: raw input to spans, cut where voice activity finds a pause."""

    def __init__(self, encoder: Encoder[Any, Any], pauses: PauseWindows | None = None) -> None:
        self.encoder, self.pauses = encoder, pauses
        self._state: Any = None

    @staticmethod
    def of(encoder: Encoder[Any, Any], options: DecodeOptions) -> SourceEncoder:
        """The half that resolved options ask for."""
        if options.cut == "fixed":
            return SourceEncoder(encoder)
        assert options.window_tokens is not None
        return SourceEncoder(encoder, PauseWindows(options.window_tokens, encoder.traits.tokens_per_s))

    def read(self, raw: Any, now_s: float | None = None) -> Iterator[Span]:
        """Spans of the source tokens that the next raw input completes."""
        if self._state is None:
            self._state = self.encoder.start()
        if self.pauses is None:
            yield Span(self.encoder.read(self._state, raw), now_s)
            return
        self.pauses.hear(raw)
        for tokens in self.encoder.blocks(self._state, raw):
            yield from self._cut(tokens, self.pauses, now_s)

    def finish(self, now_s: float | None = None) -> Span:
        """The source tokens that waited for more raw input; input after this begins anew."""
        state, self._state = self._state, None
        return Span(self.encoder.finish(self.encoder.start() if state is None else state), now_s)

    @property
    def context_start_s(self) -> float:
        """Where in the source the encoder's context begins."""
        return 0.0 if self._state is None else self.encoder.context_start_s(self._state)

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
    if options.cut == "pauses" and traits.modality != "audio":
        raise ConfigError(f"cut=pauses needs sound, and {traits.name} reads {traits.modality}: cut at fixed windows")
    window_tokens = options.window_tokens if options.window_s is None else round(options.window_s * traits.tokens_per_s)
    fixed = model.length is None and not options.schedule.decides_while_reading
    return dataclasses.replace(
        options,
        window_s=None,
        window_tokens=model.config.window_tokens if window_tokens is None else window_tokens,
        steps=model.config.max_steps if options.steps is None and fixed else options.steps,
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
        return cls(Session(model, options, clock=clock, engine=engine), SourceEncoder.of(encoder, options))

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
        yield from self.decode(self.source.finish(now_s))
        yield from self.finish(self._end_s)

    # From source tokens.

    def decode(self, span: Span) -> Iterator[Event]:
        """Hand a span to the session, at once; the events it allows are decoded as the iterator is drawn."""
        tokens, events = span.tokens, list[Iterator[Event]]()
        if len(tokens):
            self._end_s = span.now_s if span.now_s is not None else float(tokens.arrival_s[-1])
            events.append(self.push(tokens.values_TE, tokens.arrival_s if span.now_s is None else span.now_s))
        if span.cut_s is not None:
            events.append(self.cut(span.cut_s))
        return itertools.chain(*events)

    def push(self, tokens: SourceTokens, arrival_s: Times | None = None) -> Iterator[Event]:
        """Source tokens that have arrived."""
        return self._drawn(self.session.push(tokens, arrival_s))

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
