"""The live driver: source → encoder → Session → moments, one loop for the command, the demo and the server. It decides nothing itself.

A source is an iterator of Arrivals: a file as fast as it can be read (`at_once`), a file at its own speed (`paced`), or a pipe or
microphone that is read in a thread of its own (`listened`).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zendaya.encoders import Encoder, Tokens
from zendaya.encoders.pauses import SAMPLE_RATE, PauseWindows
from zendaya.encoders.whisper_stream import WhisperBlocks
from zendaya.records import Event
from zendaya.stream import Session

TICK_S = 0.05
"""The longest time nothing happens: keys, deadlines and the status are looked at that often."""
HELD = 600
"""Chunks of a thread that are held; a pipe is not read further, and a microphone loses sound, if decoding is that far behind."""


@dataclass(frozen=True)
class Arrival:
    """A chunk of raw input, or (None) the news that nothing came; `now_s` None: the tokens made of it arrived when the encoder says."""

    raw: Any
    now_s: float | None = None


@dataclass(frozen=True)
class Moment:
    """An event, and where it stands in the source."""

    event: Event
    read_s: float
    """The end of the last source token the step read."""
    spoken_s: float
    """About when it was spoken: the window's pace, W/N̂ tokens a step, and no later than `read_s`."""

    @property
    def policy_lag_s(self) -> float:
        """From the speaking to the arrival that licensed the writing: what the dial and the encoder's blocks cost."""
        return max(0.0, self.event.arrival_s - self.spoken_s)

    @property
    def compute_lag_s(self) -> float:
        """From that arrival to the writing: what the machine cost."""
        return max(0.0, self.event.emission_s - self.event.arrival_s)


def moment(event: Event, window: int, tokens_per_s: float) -> Moment:
    """Where an event stands in a source of so many tokens a second."""
    place = window * min(1.0, (event.step + event.pauses) / max(1, event.predicted_steps))
    spoken = min(place, event.effective_horizon)
    return Moment(event, (event.window_start + event.effective_horizon) / tokens_per_s, (event.window_start + spoken) / tokens_per_s)


def run(
    source: Iterable[Arrival], encoder: Encoder[Any, Any], session: Session, *, pauses: PauseWindows | None = None,
    between: Callable[[], None] = lambda: None,
) -> Iterator[Moment]:  # fmt: skip
    """Drive a session by a source to its end; `between` is called before each step and each look at the source, and may turn the dial."""
    rate, end_s = encoder.traits.tokens_per_s, 0.0

    def drawn(events: Iterator[Event]) -> Iterator[Moment]:
        while True:
            between()
            event = next(events, None)
            if event is None:
                return
            yield moment(event, session.window, rate)

    def push(tokens: Tokens, now_s: float | None) -> Iterator[Moment]:
        nonlocal end_s
        if len(tokens):
            end_s = now_s if now_s is not None else float(tokens.arrival_s[-1])
            yield from drawn(session.push(tokens.values_TE, tokens.arrival_s if now_s is None else now_s))

    def take(tokens: Tokens, now_s: float | None) -> Iterator[Moment]:
        while pauses is not None and (at := pauses.cut(tokens)) is not None:
            known_s = now_s if now_s is not None else float(tokens.arrival_s[min(at, len(tokens) - 1)])
            yield from push(tokens[:at], now_s)
            yield from drawn(session.cut(known_s))
            if isinstance(encoder, WhisperBlocks):  # it hears the new window from its beginning, as the model learned to read it
                encoder.begin_span(state, round(pauses.cut_s * SAMPLE_RATE))
                return
            tokens = tokens[at:]
        yield from push(tokens, now_s)

    def heard(raw: Any) -> Iterator[Tokens]:
        if pauses is None or not isinstance(encoder, WhisperBlocks):
            yield encoder.read(state, raw)
        else:
            yield from encoder.blocks(state, raw)

    state, last_s = encoder.start(), None
    for arrival in source:
        if arrival.raw is None:
            yield from drawn(session.advance(arrival.now_s))
            continue
        if pauses is not None:
            pauses.hear(arrival.raw)
        last_s = arrival.now_s
        for tokens in heard(arrival.raw):
            yield from take(tokens, last_s)
    yield from push(encoder.finish(state), last_s)
    yield from drawn(session.finish(end_s))


# Sources.


class Clock:
    """Seconds since the source began; 0 before."""

    def __init__(self) -> None:
        self._origin_s = math.inf

    def begin(self, already_s: float = 0.0) -> None:
        """The source began so long ago; said again, it changes nothing."""
        if math.isinf(self._origin_s):
            self.reach(already_s)

    def reach(self, already_s: float) -> None:
        """The source began at least so long ago."""
        self._origin_s = min(self._origin_s, time.monotonic() - already_s)

    def __call__(self) -> float:
        return max(0.0, time.monotonic() - self._origin_s)


def at_once(chunks: Iterable[Any]) -> Iterator[Arrival]:
    """Chunks as fast as they can be read, on the clock of the source."""
    return (Arrival(raw) for raw in chunks)


def paced(
    chunks: Iterable[tuple[Any, float]], clock: Callable[[], float], deadline_s: Callable[[], float | None] = lambda: None
) -> Iterator[Arrival]:
    """Chunks of a recording, each with the moment it ends, not before that moment; between them, time that passes.

    No moment is given out that lies past what has been heard, so the text is the one `at_once` gives.
    """
    heard_s = 0.0
    for raw, end_s in chunks:
        while (now_s := clock()) < end_s:
            yield Arrival(None, min(now_s, heard_s))
            due_s = deadline_s()
            time.sleep(max(0.0, min(end_s - now_s, TICK_S, TICK_S if due_s is None else max(0.001, due_s - now_s))))
        yield Arrival(raw)
        heard_s = end_s


def listened(
    chunks: Iterable[Any], clock: Callable[[], float], deadline_s: Callable[[], float | None] = lambda: None
) -> Generator[Arrival, None, None]:
    """Chunks read in a thread, each stamped as it comes; where none is waiting, time that passes. Close it to end the thread."""
    ready = threading.Condition()
    waiting = deque[Arrival]()
    failed = list[BaseException]()
    ended = stopped = False

    def read() -> None:
        nonlocal ended
        try:
            for raw in chunks:
                with ready:
                    ready.wait_for(lambda: stopped or len(waiting) < HELD)
                    if stopped:
                        break
                    waiting.append(Arrival(raw, clock()))
                    ready.notify_all()
        except BaseException as error:
            failed.append(error)
        finally:
            if isinstance(chunks, Generator):
                with contextlib.suppress(Exception):
                    chunks.close()
            with ready:
                ended = True
                ready.notify_all()

    thread = threading.Thread(target=read, name="zendaya-source", daemon=True)  # a read that never returns must not hold up the end
    thread.start()
    try:
        while True:
            with ready:
                due_s = deadline_s()
                ready.wait_for(lambda: waiting or ended, TICK_S if due_s is None else min(TICK_S, max(0.0, due_s - clock())))
                # Under the lock: a chunk that is not here now gets a later stamp than this moment.
                arrival = waiting.popleft() if waiting else None if ended else Arrival(None, clock())
                ready.notify_all()
            if arrival is None:
                break
            yield arrival
        if failed:
            raise failed[0]
    finally:
        with ready:
            stopped = True
            ready.notify_all()
        thread.join(0.5)
