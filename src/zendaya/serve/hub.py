"""The hub: the streams of all clients on one model, encoded in one thread and decoded together in another.

The event loop hands over what clients send and is handed notes of what came of it; it never waits for the model. What happens to a
stream happens in the order it was sent: the dial turns, a window is cut and the source ends when all that came before has been
written. So its text depends on what was sent alone, and is the same to the byte whoever else is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from zendaya.encoders import Tokens
from zendaya.encoders.whisper_stream import WhisperBlocks
from zendaya.engine import Engine, NativeEngine, engine_for
from zendaya.errors import SourceError, ZendayaError
from zendaya.live import Clock, Moment, moment
from zendaya.policies import Policy
from zendaya.records import Event
from zendaya.schedule import Schedule
from zendaya.scheduler import Round, Scheduler, Written
from zendaya.serve.gauges import Gauges
from zendaya.serve.served import Intake, Served
from zendaya.stream import Pace, Session

LOG = logging.getLogger("zendaya.serve")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How a stream is to be decoded."""

    schedule: Schedule | Policy
    window_s: float | None = None
    patience_s: float = math.inf
    timed: bool = True
    """Whether the source comes as it is spoken; if not, its tokens arrive when the encoder says, and computing takes no time."""
    live: bool = False
    """Whether nothing of it can come before it was spoken: what seems to has a first message that was late."""


@dataclass(frozen=True)
class Note:
    """What came of a stream: it was opened, a message was taken or refused, something was written, it has flushed, come to
    a mark, finished or failed."""

    kind: Literal["opened", "taken", "refused", "moment", "flushed", "marked", "finished", "failed"]
    number: int = 0
    """The client's number of the message that it answers."""
    moment: Moment | None = None
    exposure: float = 0.0
    """Mean share of the window that the steps so far have read."""
    num_bytes: int = 0
    """Of the source that was taken."""
    error: str = ""
    internal: bool = False
    """Whether a failure is a bug of ours."""


@dataclass
class _Op:
    """Something sent to a stream, on its way through the two threads."""

    kind: Literal["open", "source", "tokens", "turn", "flush", "mark", "end", "skip"]
    now_s: float | None = None
    number: int = 0
    payload: bytes = b""
    tokens: Tokens | None = None
    schedule: Schedule | None = None


@dataclass(eq=False, repr=False)
class Stream:
    """One source being written out. What is sent is taken in order; what comes of it comes as notes, in the event loop."""

    hub: Hub
    intake: Intake
    wish: Wish
    notify: Callable[[list[Note]], None]
    unread: int = 0
    """Bytes of source that wait to be encoded."""
    source_s: float = 0.0
    """Seconds of source taken so far."""
    window: int = 0
    """W, once it is opened."""
    clock: Clock = field(default_factory=Clock)
    ago_s: float = 0.0
    """How long ago came what is handed over now: more than 0 where a client sends again what a server has lost."""
    ended: bool = False
    closed: bool = False
    # Of the encoder's thread.
    _sent: deque[_Op] = field(default_factory=deque)
    _state: Any = None
    # Of the decoder's thread.
    _encoded: deque[_Op] = field(default_factory=deque)
    _in_flight: int = 0
    """Ops that have not been decoded yet; kept under the hub's lock."""
    _session: Session | None = None
    _answer: Note | None = None
    """What to say once the session waits again."""
    _steps: int = 0
    _read: int = 0
    _latest_s: float = 0.0

    def source(self, payload: bytes, number: int = 0) -> None:
        """More of the source; a FieldError where it cannot be."""
        seconds = self.intake.check(payload)
        if self.wish.timed:
            self.clock.begin(seconds + self.ago_s)
        self.unread += len(payload)
        self.source_s += seconds
        if self.wish.live:
            self.clock.reach(self.source_s + self.ago_s)
        self.hub.gauges.source_s.inc(seconds)
        now_s = self._now_s()
        parts = list(self.intake.pieces(payload)) or [b""]
        for part in parts[:-1]:
            self._put(_Op("source", now_s, payload=part))
        self._put(_Op("source", now_s, number, parts[-1]))

    def turn(self, schedule: Schedule, number: int = 0) -> None:
        """Turn the dial, once what came before is written."""
        self._put(_Op("turn", self._now_s(), number, schedule=schedule))

    def flush(self, number: int = 0) -> None:
        """Write out what has been sent; what follows begins a new window."""
        self._put(_Op("flush", self._now_s(), number))

    def mark(self, number: int = 0) -> None:
        """Say when all that was sent before has been written."""
        self._put(_Op("mark", number=number))

    def end(self, number: int = 0) -> None:
        """The source ends here; said again, it changes nothing."""
        if not self.ended:
            self.ended = True
            self._put(_Op("end", self._now_s(), number))

    def skip(self, number: int) -> None:
        """A message that was refused, and is taken in its turn all the same."""
        self._put(_Op("skip", number=number))

    def close(self) -> None:
        """Let it go, whatever is still to be written; no note comes any more."""
        if not self.closed:
            self.closed = True
            self.hub.drop(self)

    def _now_s(self) -> float | None:
        """When what is handed over came; it never goes back."""
        if not self.wish.timed:
            return None
        self._latest_s = max(self._latest_s, self.clock() - self.ago_s)
        return self._latest_s

    def _put(self, op: _Op) -> None:
        self.hub.put(self, op)


class _OneByOne:
    """Sessions of PyTorch's engine, a step of each in turn: what `Scheduler` is to the native one."""

    def __init__(self) -> None:
        self._sessions = dict[Session, Iterator[Event]]()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session, events: Iterator[Event]) -> None:
        self._sessions[session] = events

    def remove(self, session: Session) -> None:
        del self._sessions[session]

    def round(self) -> Round:
        now = Round()
        for session, events in list(self._sessions.items()):
            try:
                event = next(events, None)
            except ZendayaError as error:
                now.written.append(Written(session, error=error))
                now.failed.append(session)
                self.remove(session)
                continue
            if event is None:
                now.waiting.append(session)
            else:
                now.written.append(Written(session, event))
        return now


class _Together:
    """Sessions of the native engine, all in one call."""

    def __init__(self, engine: NativeEngine) -> None:
        self._scheduler = Scheduler(engine)
        self.remove, self.round = self._scheduler.remove, self._scheduler.round

    def __len__(self) -> int:
        return len(self._scheduler)

    def add(self, session: Session, events: Iterator[Event]) -> None:
        self._scheduler.add(session)


class Hub:
    """The two threads and what lies between them. Made and closed by the event loop that is given the notes."""

    def __init__(self, served: Served, gauges: Gauges, *, engine: Engine | None = None) -> None:
        self.served, self.gauges = served, gauges
        self.engine = engine_for(served.model) if engine is None else engine
        self._company: _Together | _OneByOne = _Together(self.engine) if isinstance(self.engine, NativeEngine) else _OneByOne()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._sent, self._encoded = threading.Condition(self._lock), threading.Condition(self._lock)
        self._to_encode = deque[Stream]()
        self._to_feed = dict[Stream, None]()
        self._streams = set[Stream]()
        self._dropped = list[Stream]()
        self._busy = dict[Session, Stream]()
        self._timed = set[Stream]()
        """Streams that wait with a patience."""
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, args=(each,), name=f"zendaya-{name}", daemon=True)
            for name, each in (("encode", self._encode_on), ("decode", self._decode_on))
        ]
        for thread in self._threads:
            thread.start()

    # In the event loop.

    @property
    def alive(self) -> bool:
        """Whether both threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, intake: Intake, wish: Wish, notify: Callable[[list[Note]], None]) -> Stream:
        """A new stream; whether it can be is in its first note."""
        stream = Stream(self, intake, wish, notify)
        self._streams.add(stream)
        self.put(stream, _Op("open"))
        return stream

    def put(self, stream: Stream, op: _Op) -> None:
        """Hand an op to the threads."""
        if stream.closed:
            return
        with self._lock:
            stream._in_flight += 1
            stream._sent.append(op)
            if len(stream._sent) == 1:
                self._to_encode.append(stream)
                self._sent.notify()
        self.gauges.queue.inc()

    def drop(self, stream: Stream) -> None:
        """Forget a stream."""
        self._streams.discard(stream)
        with self._lock:
            self.gauges.queue.dec(len(stream._sent))
            stream._sent.clear()
            with contextlib.suppress(ValueError):
                self._to_encode.remove(stream)
            self._dropped.append(stream)
            self._encoded.notify()

    async def close(self) -> None:
        """End both threads; what was not written is lost."""
        with self._lock:
            self._stopped = True
            self._sent.notify()
            self._encoded.notify()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _deliver(self, notes: list[tuple[Stream, Note]]) -> None:
        by_stream = dict[Stream, list[Note]]()
        for stream, note in notes:
            by_stream.setdefault(stream, []).append(note)
        for stream, its in by_stream.items():
            if not stream.closed:
                stream.notify(its)

    # In the threads.

    def _work(self, each: Callable[[], bool]) -> None:
        """Do it again and again; a bug must not end the thread that all streams need."""
        while True:
            try:
                if not each():
                    return
            except Exception:
                LOG.exception("a bug in the hub", extra={"event": "bug"})
                with self._lock:
                    busy, self._busy = dict(self._busy), {}
                for session in busy:
                    with contextlib.suppress(ZendayaError, KeyError):
                        self._company.remove(session)
                self._say([(stream, Note("failed", error="an error of the server's own", internal=True)) for stream in busy.values()])

    def _say(self, notes: list[tuple[Stream, Note]]) -> None:
        if notes:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._deliver, notes)

    def _encode_on(self) -> bool:
        """One op of the stream whose turn it is."""
        with self._lock:
            self._sent.wait_for(lambda: self._to_encode or self._stopped)
            if self._stopped:
                return False
            stream = self._to_encode.popleft()
            op = stream._sent[0]
        try:
            notes, ready = self._encode(stream, op)
        except Exception as error:
            if not isinstance(error, ZendayaError):
                LOG.exception("a bug in an encoder", extra={"event": "bug"})
            ours = "an error of the server's own" if not isinstance(error, ZendayaError) else str(error)
            notes, ready = [Note("failed", op.number, error=ours, internal=not isinstance(error, ZendayaError))], []
        self._say([(stream, note) for note in notes])
        with self._lock:
            if stream._sent and stream._sent[0] is op:  # it was not dropped meanwhile
                stream._sent.popleft()
                if stream._sent:
                    self._to_encode.append(stream)
                stream._in_flight += len(ready) - 1
                stream._encoded.extend(ready)
                if not ready:
                    self.gauges.queue.dec()
                else:
                    self.gauges.queue.inc(len(ready) - 1)
                self._to_feed[stream] = None
                self._encoded.notify()
        return True

    def _encode(self, stream: Stream, op: _Op) -> tuple[list[Note], list[_Op]]:
        """What an op comes to on the way to the decoder."""
        encoder = stream.intake.encoder
        if op.kind == "open":
            return [], [op]
        if op.kind == "skip":
            return self._taken(stream, op), []
        begun = time.perf_counter()
        try:
            if stream._state is None:
                stream._state = encoder.start()
            if op.kind == "source":
                tokens = encoder.read(stream._state, stream.intake.raw(op.payload))
                self.gauges.encode_s.observe(time.perf_counter() - begun)
                return self._taken(stream, op), [_Op("tokens", op.now_s, tokens=tokens)] if len(tokens) else []
            if op.kind in ("flush", "end"):
                rest = stream.intake.rest()
                parts = [encoder.read(stream._state, rest)] if rest is not None and rest.size else []
                tokens = Tokens.join([*parts, encoder.finish(stream._state)], encoder.traits.dim)
                stream._state = None
                return self._taken(stream, op), [*([_Op("tokens", op.now_s, tokens=tokens)] if len(tokens) else []), op]
        except SourceError as error:
            return [Note("refused", op.number, error=str(error)), *self._taken(stream, op)], []
        return self._taken(stream, op), [op]

    def _taken(self, stream: Stream, op: _Op) -> list[Note]:
        return [Note("taken", op.number, num_bytes=len(op.payload))]

    def _decode_on(self) -> bool:
        """Feed the streams that can go on, and let all that are busy write one step."""
        with self._lock:
            if not self._busy:
                self._encoded.wait_for(lambda: self._to_feed or self._dropped or self._stopped, self._patience_left_s())
            if self._stopped:
                return False
            feed, self._to_feed = list(self._to_feed), {}
            dropped, self._dropped = self._dropped, []
        for stream in dropped:
            self._forget(stream)
        notes = list[tuple[Stream, Note]]()
        try:
            for stream in feed:
                notes += self._feed(stream)
            for stream in self._timed:
                self._wait_no_longer(stream)
            if self._busy:
                begun = time.perf_counter()
                now = self._company.round()
                self.gauges.step_s.observe(time.perf_counter() - begun)
                notes += self._written(now)
        finally:
            self._say(notes)
        return True

    def _written(self, now: Round) -> list[tuple[Stream, Note]]:
        notes = list[tuple[Stream, Note]]()
        for written in now.written:
            stream = self._busy[written.session]
            if written.event is not None:
                notes.append((stream, self._moment(stream, written.event)))
            else:
                del self._busy[written.session]
                notes.append((stream, Note("failed", error=str(written.error))))
        for session in now.waiting:
            stream = self._busy.pop(session)
            self._company.remove(session)
            if stream._answer is not None:
                notes.append((stream, stream._answer))
                stream._answer = None
            notes += self._feed(stream)
        return notes

    def _moment(self, stream: Stream, event: Event) -> Note:
        assert stream._session is not None
        found = moment(event, stream._session.window, stream.intake.encoder.traits.tokens_per_s)
        if event.token >= 0:
            stream._steps += 1
            stream._read += event.effective_horizon
            self.gauges.tokens.inc()
            if stream.wish.timed:
                self.gauges.lag_s.labels("policy").observe(found.policy_lag_s)
                self.gauges.lag_s.labels("compute").observe(found.compute_lag_s)
                if stream._steps == 1:
                    self.gauges.first_token_s.observe(event.emission_s)
        return Note("moment", moment=found, exposure=stream._read / max(1, stream._steps) / stream._session.window)

    def _feed(self, stream: Stream) -> list[tuple[Stream, Note]]:
        """Ops of a stream, up to one that makes it busy."""
        notes = list[Note]()
        while stream._session not in self._busy and not stream.closed:
            with self._lock:
                if not stream._encoded:
                    break
                op = stream._encoded.popleft()
                stream._in_flight -= 1
            self.gauges.queue.dec()
            try:
                notes += self._apply(stream, op)
            except ZendayaError as error:
                notes.append(Note("failed", op.number, error=str(error)))
        return [(stream, note) for note in notes]

    def _apply(self, stream: Stream, op: _Op) -> list[Note]:
        session = stream._session
        if op.kind == "open":
            stream._session = self._opened(stream)
            stream.window = stream._session.window
            return [Note("opened")]
        if session is None:
            return []  # it could not be opened, and its client has been told
        if op.kind == "tokens":
            assert op.tokens is not None
            self._let_write(stream, session.push(op.tokens.values_TE, op.tokens.arrival_s if op.now_s is None else op.now_s))
        elif op.kind == "turn":
            assert op.schedule is not None
            try:
                session.set_schedule(self.served.as_trained(op.schedule))
            except ZendayaError as error:
                return [Note("refused", op.number, error=f"gamma: {error}")]
            return [self._moment(stream, mark) for mark in session.take_marks()]
        elif op.kind == "mark":
            return [Note("marked", op.number)]
        elif op.kind == "flush":
            stream._answer = Note("flushed", op.number)
            self._let_write(stream, session.cut(op.now_s))
        elif op.kind == "end":
            stream._answer = Note("finished", op.number)
            self._let_write(stream, session.finish(op.now_s))
        return []

    def _let_write(self, stream: Stream, events: Iterator[Event]) -> None:
        assert stream._session is not None
        self._busy[stream._session] = stream
        self._company.add(stream._session, events)

    def _opened(self, stream: Stream) -> Session:
        model, wish, traits = self.served.model, stream.wish, stream.intake.encoder.traits
        encoder = stream.intake.encoder
        block = max(1, encoder.block // encoder.pool) if isinstance(encoder, WhisperBlocks) else 1
        schedule = self.served.as_trained(wish.schedule)
        session = model.open(
            schedule, window=None if wish.window_s is None else round(wish.window_s * traits.tokens_per_s),
            steps=model.config.max_steps if model.length is None and isinstance(schedule, Schedule) else None,
            patience_s=wish.patience_s, pace=Pace(traits.tokens_per_s, block), clock=stream.clock if wish.timed else None,
            engine=self.engine,
        )  # fmt: skip
        if wish.patience_s < math.inf:
            self._timed.add(stream)
        return session

    def _forget(self, stream: Stream) -> None:
        session, stream._session = stream._session, None
        self._timed.discard(stream)
        with self._lock:
            self.gauges.queue.dec(len(stream._encoded))
            stream._encoded.clear()
            self._to_feed.pop(stream, None)
        if session is not None and self._busy.pop(session, None) is not None:
            self._company.remove(session)

    def _patience_left_s(self) -> float | None:
        """Seconds until a session that waits would write; None: not before something comes."""
        due = [
            stream._session.deadline_s - stream.clock()
            for stream in self._timed
            if stream._session is not None and stream._session.deadline_s is not None
        ]
        return max(0.005, min(due)) if due else None

    def _wait_no_longer(self, stream: Stream) -> None:
        """Let a stream write whose patience is over."""
        session = stream._session
        if session is None or session in self._busy or session.deadline_s is None:
            return
        with self._lock:
            if stream._in_flight:  # what has come, though it is not encoded yet, came before this moment
                return
        now_s = stream.clock()
        if now_s > session.deadline_s:
            self._let_write(stream, session.advance(now_s))
