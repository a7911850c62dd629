"""The hub: the streams of all clients on one model, encoded in one thread and decoded together in another.

The event loop hands over what clients send and is given updates; it never waits for the model. Operations of a stream happen in the
order they were sent: the dial turns, a window is cut and the source ends when all that came before has been written. So a stream's
text depends on its own input alone, and is the same to the byte whatever else is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from zendaya.errors import SourceError, ZendayaError
from zendaya.records import Event
from zendaya.runtime.batcher import Batcher, Round
from zendaya.runtime.engine import Engine, engine_for
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.pipeline import Pipeline, SourceEncoder, Span, resolve
from zendaya.runtime.session import Session
from zendaya.schedule import Schedule
from zendaya.serve.intake import Intake, Served
from zendaya.serve.monitoring import INTERNAL, LOG, Gauges
from zendaya.sources.live import Clock


@dataclass(frozen=True)
class StreamUpdate:
    """An update of a stream: it was opened, took or refused a message, wrote an event, was flushed, reached a mark, or ended."""

    kind: Literal["opened", "taken", "refused", "event", "flushed", "marked", "finished", "failed"]
    number: int = 0  # the client's number of the message that it answers
    event: Event | None = None
    exposure: float = 0.0  # mean share of the window that the steps so far have read
    num_bytes: int = 0  # bytes of source that were taken
    error: str = ""
    internal: bool = False  # whether a failure is a bug of ours


Notify = Callable[[list[StreamUpdate]], None]


@dataclass
class _Operation:
    """An operation of a stream, on its way through the two threads."""

    kind: Literal["open", "source", "tokens", "turn", "flush", "mark", "end", "skip"]
    now_s: float | None = None
    number: int = 0
    payload: bytes = b""
    span: Span | None = None
    schedule: Schedule | None = None


@dataclass(eq=False)
class _StreamWork:
    """State of a stream in the two threads."""

    sent: deque[_Operation] = field(default_factory=deque)  # to be encoded
    encoded: deque[_Operation] = field(default_factory=deque)  # to be decoded
    in_flight: int = 0  # operations that were not decoded yet; kept under the hub's lock
    options: DecodeOptions | None = None
    source: SourceEncoder | None = None
    pipeline: Pipeline | None = None
    answer: StreamUpdate | None = None  # the update to send once the session waits again
    steps: int = 0
    read: int = 0  # source tokens that the steps have read, for the mean exposure


@dataclass(eq=False, repr=False)
class Stream:
    """One source being written out: operations are taken in order, updates come in the event loop."""

    hub: Hub
    intake: Intake
    options: DecodeOptions
    notify: Notify
    timed: bool = True
    """Whether the source comes in real time; if not, tokens arrive when the encoder says, and computing takes no time."""
    live: bool = False  # whether nothing of it can come before it was spoken: a first message that seems to was late
    unread: int = 0  # bytes of source that wait to be encoded
    source_s: float = 0.0  # seconds of source taken so far
    clock: Clock = field(default_factory=Clock)
    ago_s: float = 0.0  # age of the current message: above 0 if a client sends again source that a server has lost
    ended: bool = False
    closed: bool = False
    work: _StreamWork = field(default_factory=_StreamWork)
    _latest_s: float = 0.0

    @property
    def window_tokens(self) -> int:
        """W, once it is opened."""
        return 0 if self.work.pipeline is None else self.work.pipeline.session.window_tokens

    def source(self, payload: bytes, number: int = 0) -> None:
        """Send source; FieldError if it is malformed."""
        seconds = self.intake.check(payload)
        if self.timed:
            self.clock.begin(seconds + self.ago_s)
        self.unread += len(payload)
        self.source_s += seconds
        if self.live:
            self.clock.reach(self.source_s + self.ago_s)
        self.hub.gauges.source_s.inc(seconds)
        now_s = self._now_s()
        *parts, last = list(self.intake.pieces(payload)) or [b""]
        for part in parts:
            self.hub.put(self, _Operation("source", now_s, payload=part))
        self.hub.put(self, _Operation("source", now_s, number, last))

    def turn(self, schedule: Schedule, number: int = 0) -> None:
        """Turn the dial, once all source before is written."""
        self.hub.put(self, _Operation("turn", self._now_s(), number, schedule=schedule))

    def flush(self, number: int = 0) -> None:
        """Write out all source so far; the next source begins a new window."""
        self.hub.put(self, _Operation("flush", self._now_s(), number))

    def mark(self, number: int = 0) -> None:
        """Ask for an update when all that was sent before has been written."""
        self.hub.put(self, _Operation("mark", number=number))

    def end(self, number: int = 0) -> None:
        """End the source here; a second call changes nothing."""
        if not self.ended:
            self.ended = True
            self.hub.put(self, _Operation("end", self._now_s(), number))

    def skip(self, number: int) -> None:
        """Take a refused message in its turn, and do nothing."""
        self.hub.put(self, _Operation("skip", number=number))

    def close(self) -> None:
        """Drop the stream, whatever is still to be written; no update comes any more."""
        if not self.closed:
            self.closed = True
            self.hub.drop(self)

    def _now_s(self) -> float | None:
        """Arrival time of the current message; never earlier than the last one."""
        if not self.timed:
            return None
        self._latest_s = max(self._latest_s, self.clock() - self.ago_s)
        return self._latest_s


class Hub:
    """The two threads and the queues between them; made and closed by the event loop that gets the updates."""

    def __init__(self, served: Served, gauges: Gauges, *, engine: Engine | None = None) -> None:
        self.served, self.gauges = served, gauges
        self._batcher = Batcher(engine_for(served.model) if engine is None else engine)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._sent, self._encoded = threading.Condition(self._lock), threading.Condition(self._lock)
        self._to_encode = deque[Stream]()
        self._to_feed = dict[Stream, None]()
        self._streams = set[Stream]()
        self._dropped = list[Stream]()
        self._busy = dict[Session, Stream]()
        self._patient = set[Stream]()  # streams whose patience is limited
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._repeat, args=(each,), name=f"zendaya-{name}", daemon=True)
            for name, each in (("encode", self._encode_next), ("decode", self._decode_round))
        ]
        for thread in self._threads:
            thread.start()

    # In the event loop.

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, intake: Intake, options: DecodeOptions, notify: Notify, *, timed: bool = True, live: bool = False) -> Stream:
        """A new stream; its first update says whether it could be opened."""
        stream = Stream(self, intake, options, notify, timed, live)
        self._streams.add(stream)
        self.put(stream, _Operation("open"))
        return stream

    def put(self, stream: Stream, operation: _Operation) -> None:
        if stream.closed:
            return
        with self._lock:
            stream.work.in_flight += 1
            stream.work.sent.append(operation)
            if len(stream.work.sent) == 1:
                self._to_encode.append(stream)
                self._sent.notify()
        self.gauges.queue.inc()

    def drop(self, stream: Stream) -> None:
        self._streams.discard(stream)
        with self._lock:
            self.gauges.queue.dec(len(stream.work.sent))
            stream.work.sent.clear()
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

    def _deliver(self, updates: list[tuple[Stream, StreamUpdate]]) -> None:
        by_stream = dict[Stream, list[StreamUpdate]]()
        for stream, update in updates:
            by_stream.setdefault(stream, []).append(update)
        for stream, its in by_stream.items():
            if not stream.closed:
                try:
                    stream.notify(its)
                except Exception:  # a bug of one stream's transport must not cost the others their updates
                    LOG.exception("a bug in a transport", extra={"event": "bug"})

    # In the threads.

    def _repeat(self, each: Callable[[], bool]) -> None:
        """Call a function until it returns False; a bug must not end the thread that all streams need."""
        while True:
            try:
                if not each():
                    return
            except Exception:
                LOG.exception("a bug in the hub", extra={"event": "bug"})
                self._fail_busy()

    def _fail_busy(self) -> None:
        """End the streams of a round that failed as a whole: the faulty one is not known."""
        with self._lock:
            busy, self._busy = dict(self._busy), {}
        for session in busy:
            with contextlib.suppress(ZendayaError):
                self._batcher.remove(session)
        self._say([(stream, StreamUpdate("failed", error=INTERNAL, internal=True)) for stream in busy.values()])

    def _say(self, updates: list[tuple[Stream, StreamUpdate]]) -> None:
        if updates:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._deliver, updates)

    def _encode_next(self) -> bool:
        """One operation of the stream whose turn it is."""
        with self._lock:
            self._sent.wait_for(lambda: self._to_encode or self._stopped)
            if self._stopped:
                return False
            stream = self._to_encode.popleft()
            operation = stream.work.sent[0]
        try:
            updates, ready = self._encode(stream, operation)
        except Exception as error:
            updates, ready = [_failure(error, operation.number)], []
        self._say([(stream, update) for update in updates])
        with self._lock:
            if stream.work.sent and stream.work.sent[0] is operation:  # it was not dropped meanwhile
                stream.work.sent.popleft()
                if stream.work.sent:
                    self._to_encode.append(stream)
                stream.work.in_flight += len(ready) - 1
                stream.work.encoded.extend(ready)
                self.gauges.queue.inc(len(ready) - 1)
                self._to_feed[stream] = None
                self._encoded.notify()
        return True

    def _encode(self, stream: Stream, operation: _Operation) -> tuple[list[StreamUpdate], list[_Operation]]:
        """Encode an operation: the updates for its client, and the operations for the decoder."""
        work, taken = stream.work, StreamUpdate("taken", operation.number, num_bytes=len(operation.payload))
        if operation.kind == "open":
            options = dataclasses.replace(stream.options, schedule=self.served.as_trained(stream.options.schedule))
            work.options = resolve(options, self.served.model, stream.intake.encoder)
            work.source = SourceEncoder.of(stream.intake.encoder, work.options, self.served.model)
            return [], [operation]
        if operation.kind == "skip" or work.source is None:
            return [taken], []
        try:
            if operation.kind == "source":
                begun = time.perf_counter()
                spans = list(work.source.read(stream.intake.raw(operation.payload), operation.now_s))
                self.gauges.encode_s.observe(time.perf_counter() - begun)
                return [taken], _tokens(spans)
            if operation.kind in ("flush", "end"):
                rest = stream.intake.rest()
                spans = list(work.source.read(rest, operation.now_s)) if rest is not None and rest.size else []
                return [taken], [*_tokens([*spans, *work.source.finish(operation.now_s)]), operation]
        except SourceError as error:
            return [StreamUpdate("refused", operation.number, error=str(error)), taken], []
        return [taken], [operation]

    def _decode_round(self) -> bool:
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
        updates = list[tuple[Stream, StreamUpdate]]()
        try:
            for stream in feed:
                updates += self._feed(stream)
            for stream in self._patient:
                self._end_patience(stream)
            if self._busy:
                begun = time.perf_counter()
                now = self._batcher.round()
                self.gauges.step_s.observe(time.perf_counter() - begun)
                updates += self._outcomes(now)
        finally:
            self._say(updates)
        return True

    def _outcomes(self, now: Round) -> list[tuple[Stream, StreamUpdate]]:
        updates = list[tuple[Stream, StreamUpdate]]()
        for outcome in now.outcomes:
            stream = self._busy[outcome.session]
            if outcome.event is not None:
                updates.append((stream, self._written(stream, outcome.event)))
            else:
                assert outcome.error is not None
                del self._busy[outcome.session]
                updates.append((stream, _failure(outcome.error)))
        for session in now.waiting:
            stream = self._busy.pop(session)
            self._batcher.remove(session)
            if stream.work.answer is not None:
                updates.append((stream, stream.work.answer))
                stream.work.answer = None
            updates += self._feed(stream)
        return updates

    def _written(self, stream: Stream, event: Event) -> StreamUpdate:
        work = stream.work
        if event.token >= 0:
            work.steps += 1
            work.read += event.effective_horizon
            self.gauges.tokens.inc()
            if stream.timed:
                self.gauges.lag_s.labels("policy").observe(event.policy_lag_s)
                self.gauges.lag_s.labels("compute").observe(event.compute_lag_s)
                if work.steps == 1:
                    self.gauges.first_token_s.observe(event.emission_s)
        return StreamUpdate("event", event=event, exposure=work.read / max(1, work.steps) / stream.window_tokens)

    def _feed(self, stream: Stream) -> list[tuple[Stream, StreamUpdate]]:
        """Operations of a stream, up to one that makes it busy; an error, of whatever kind, ends this stream alone."""
        updates = list[StreamUpdate]()
        work = stream.work
        while not stream.closed and (work.pipeline is None or work.pipeline.session not in self._busy):
            with self._lock:
                if not work.encoded:
                    break
                operation = work.encoded.popleft()
                work.in_flight -= 1
            self.gauges.queue.dec()
            try:
                updates += self._apply(stream, operation)
            except Exception as error:
                updates.append(_failure(error, operation.number))
        return [(stream, update) for update in updates]

    def _apply(self, stream: Stream, operation: _Operation) -> list[StreamUpdate]:
        work, pipeline = stream.work, stream.work.pipeline
        if operation.kind == "open":
            assert work.options is not None
            clock = stream.clock if stream.timed else None
            work.pipeline = Pipeline(Session(self.served.model, work.options, clock=clock, engine=self._batcher.engine), work.source)
            if work.options.patience_s < math.inf:
                self._patient.add(stream)
            return [StreamUpdate("opened")]
        if pipeline is None:
            return []  # it could not be opened, and its client was told
        if operation.kind == "mark":
            return [StreamUpdate("marked", operation.number)]
        if operation.kind == "turn":
            assert operation.schedule is not None
            try:
                pipeline.turn(self.served.as_trained(operation.schedule))
            except ZendayaError as error:
                return [StreamUpdate("refused", operation.number, error=f"gamma: {error}")]
            return [self._written(stream, mark) for mark in pipeline.session.take_marks()]
        if operation.kind == "flush":
            work.answer = StreamUpdate("flushed", operation.number)
            pipeline.cut(operation.now_s)
        elif operation.kind == "end":
            work.answer = StreamUpdate("finished", operation.number)
            pipeline.finish(operation.now_s)
        else:
            assert operation.span is not None
            pipeline.decode(operation.span)
        self._let_write(stream, pipeline.session)
        return []

    def _let_write(self, stream: Stream, session: Session) -> None:
        """Let the batcher draw the events of a session, in place of the pipeline's iterator."""
        self._busy[session] = stream
        self._batcher.add(session)

    def _forget(self, stream: Stream) -> None:
        pipeline, stream.work.pipeline = stream.work.pipeline, None
        self._patient.discard(stream)
        with self._lock:
            self.gauges.queue.dec(len(stream.work.encoded))
            stream.work.encoded.clear()
            self._to_feed.pop(stream, None)
        if pipeline is not None and self._busy.pop(pipeline.session, None) is not None:
            self._batcher.remove(pipeline.session)

    def _patience_left_s(self) -> float | None:
        """Seconds until a waiting session would write; None: not before something comes."""
        waiting = [(stream, stream.work.pipeline.session) for stream in self._patient if stream.work.pipeline is not None]
        due = [session.deadline_s - stream.clock() for stream, session in waiting if session.deadline_s is not None]
        return max(0.005, min(due)) if due else None

    def _end_patience(self, stream: Stream) -> None:
        """Let a stream write once its patience is over."""
        pipeline = stream.work.pipeline
        if pipeline is None or pipeline.session in self._busy or pipeline.session.deadline_s is None:
            return
        with self._lock:
            if stream.work.in_flight:  # what has come, though it is not encoded yet, came before this moment
                return
        now_s = stream.clock()
        if now_s > pipeline.session.deadline_s:
            pipeline.advance(now_s)
            self._let_write(stream, pipeline.session)


def _tokens(spans: list[Span]) -> list[_Operation]:
    return [_Operation("tokens", span=span) for span in spans if not span.empty]


def _failure(error: Exception, number: int = 0) -> StreamUpdate:
    """The update of a stream that an error has ended; the text of a bug stays in the log."""
    if isinstance(error, ZendayaError):
        return StreamUpdate("failed", number, error=str(error))
    if isinstance(error, MemoryError):
        return StreamUpdate("failed", number, error="out of memory: this stream cannot go on", internal=True)
    LOG.error("a bug in a stream", exc_info=error, extra={"event": "bug"})
    return StreamUpdate("failed", number, error=INTERNAL, internal=True)
