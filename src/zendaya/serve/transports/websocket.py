"""The socket `/v1/stream`: sessions that outlive their connections (wire format: docs/protocol.md).

The client numbers its messages, the server its events. Each message is accepted once and in order, and each event is kept until the client
has acknowledged it. So a client that reconnects goes on where it was, with nothing lost or doubled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import secrets
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket

from zendaya.records import Event
from zendaya.runtime.frontier import DialChoice
from zendaya.runtime.options import Voice
from zendaya.serve import fields
from zendaya.serve.config import ServeConfig
from zendaya.serve.connection import BAD_HELLO, GONE, LEFT, NO_HELLO, OVERRUN, TAKEN_OVER, UNKNOWN, WRONG_TOKEN, WebSocketConnection
from zendaya.serve.fields import FieldError, Message
from zendaya.serve.hub import Stream, StreamUpdate
from zendaya.serve.intake import KINDS, Kind
from zendaya.serve.monitoring import INTERNAL, LOG
from zendaya.serve.server import Seat, Server
from zendaya.serve.transports.base import Transport, cancel

HEAD = struct.Struct("<Q")  # the head of a binary message: its number
ID = r"[A-Za-z0-9_-]{1,64}"
TOKEN = r"[A-Za-z0-9_-]{16,128}"
RESUME = ("type", "session", "token", "received")
OPEN = ("type", "session", "token", "source", "rate", "gamma", "policy", "lag_s", "window_s", "patience_s", "voice", "live", "received")
PARTING_S = 1.0  # seconds for which a broken connection is still read: the client's close code may come
PATH = "/v1/stream"


class HangUpError(Exception):
    """A connection that must be closed: its close code, and the error to send before."""

    def __init__(self, close: int, code: str, field: str, message: str) -> None:
        super().__init__(message)
        self.close, self.code, self.field = close, code, field


@dataclass(eq=False, repr=False)
class EventLog:
    """The numbered events of a session, each kept until the client has acknowledged it."""

    max_events: int
    events: deque[tuple[int, str]] = field(default_factory=deque)
    number: int = 0  # number of the last event
    sent: int = 0  # number of the last event sent, on any connection
    final: int = 0  # number of the event that ended the session, once there is one
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set when there may be something to send

    @property
    def first(self) -> int:
        """Number of the first event that is still kept."""
        return self.events[0][0] if self.events else self.number + 1

    def add(self, type: str, **what: Any) -> None:  # noqa: A002
        self.number += 1
        self.events.append((self.number, json.dumps({"type": type, "seq": self.number, **what}, ensure_ascii=False)))
        self.sent_up_to(self.sent)
        self.changed.set()

    def after(self, number: int, most: int) -> list[tuple[int, str]]:
        """Up to `most` kept events after one."""
        skip = max(0, number + 1 - self.first)
        return [self.events[at] for at in range(skip, min(skip + most, len(self.events)))]

    def sent_up_to(self, number: int) -> None:
        """Events up to one have been sent: of these, the oldest are dropped if there are too many."""
        self.sent = max(self.sent, number)
        while len(self.events) > self.max_events and self.events[0][0] <= self.sent:
            self.events.popleft()

    def acknowledge(self, received: int) -> None:
        """The client has all events up to one."""
        if received > self.number:
            raise FieldError("received", f"received: expected at most {self.number}, the last event: got {received}")
        while self.events and self.events[0][0] <= received:
            self.events.popleft()
        self.changed.set()


@dataclass(eq=False, repr=False)
class ResumableSession:
    """A session that outlives its connections: its stream, its events and its current connection."""

    id: str
    token: str
    seat: Seat
    log: EventLog
    kind: Kind
    choice: DialChoice
    connection: WebSocketConnection | None
    stream: Stream = field(init=False)
    received: int = 0  # number of the last message accepted
    received_s: float = 0.0  # when it was accepted, or the connection opened, by the loop's clock
    taken: int = 0  # number of the last message encoded: the client may forget it and all before
    opened: bool = False
    reason: str = "end"  # why the source ended
    expiry: asyncio.TimerHandle | None = None

    @property
    def settled(self) -> bool:
        """Whether the session has ended and the client has acknowledged all events."""
        return bool(self.log.final) and not self.log.events

    @property
    def over(self) -> bool:
        """Whether the server has ended the session: later messages are not accepted, and the client keeps them."""
        return bool(self.log.final) or self.reason != "end"

    def end(self, reason: str) -> None:
        """End the source, for a reason of the server's."""
        if not self.stream.ended:
            self.reason = reason
            self.stream.end()

    def on_notes(self, notes: list[StreamUpdate]) -> None:
        for note in notes:
            if note.kind == "opened":
                self.opened = True
                self.log.changed.set()
            elif note.kind == "taken":
                self.stream.unread -= note.num_bytes
                self.taken = max(self.taken, note.number)
                self.log.changed.set()
            elif note.kind == "refused":
                self.log.add("refused", of=note.number, code="bad_source", field=self.kind, message=note.error)
            elif note.kind == "event":
                assert note.event is not None
                self.log.add(**to_event(note.event, note.exposure))
            elif note.kind == "flushed":
                self.log.add("flushed", of=note.number)
            elif note.kind == "finished":
                self.finish("finished", reason=self.reason, source_s=round(self.stream.source_s, 6))
            elif note.kind == "failed":
                code = "internal" if note.internal else "bad_open" if not self.opened else "failed"
                self.finish("failed", code=code, message=note.error)

    def refuse(self, number: int, error: FieldError) -> None:
        """Report a message that cannot be used; the stream goes on without it."""
        self.log.add("refused", of=number, code=error.code, field=error.field, message=str(error))
        self.stream.skip(number)

    def finish(self, type_: str, **what: Any) -> None:
        """Append the last event and close the stream."""
        if not self.log.final:
            self.log.add(type_, **what)
            self.log.final = self.log.number
            self.stream.close()


def to_event(event: Event, exposure: float) -> dict[str, Any]:
    """An event on the wire, without its number (docs/protocol.md)."""
    place = {"window_index": event.window_index, "step": event.step, "horizon": event.horizon, "arrival_s": event.arrival_s}
    if event.schedule:
        return {"type": "turned", "schedule": event.schedule, **place}
    return {
        "type": "text", "text": event.text, "token": event.token, **place, "effective_horizon": event.effective_horizon,
        "predicted_steps": event.predicted_steps, "skipped_steps": event.skipped_steps, "window_start": event.window_start,
        "last": event.last, "gamma": event.gamma, "emission_s": event.emission_s, "spoken_s": event.spoken_s, "read_s": event.read_s,
        "policy_lag_s": event.policy_lag_s, "compute_lag_s": event.compute_lag_s, "exposure": exposure,
    }  # fmt: skip


class WebSocketTransport(Transport):
    """The sessions of `/v1/stream`."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self.sessions = dict[str, ResumableSession]()

    def routes(self, server: Server) -> list[BaseRoute]:
        self.server = server
        return [WebSocketRoute(PATH, self.connect)]

    def end(self) -> None:
        """End every source; sessions without a connection are dropped."""
        for session in list(self.sessions.values()):
            if session.connection is None:
                self.forget(session)
            else:
                session.end("draining")

    def forget(self, session: ResumableSession) -> None:
        """Drop a session and free its seat."""
        if self.sessions.get(session.id) is session:
            del self.sessions[session.id]
        if session.expiry is not None:
            session.expiry.cancel()
        session.stream.close()
        if session.seat in self.server.seats:
            counts = {"num_events": session.log.number, "messages": session.received}
            LOG.info("session ended", extra={"event": "session_end", "session": session.id, **counts})
        session.seat.free()

    async def connect(self, websocket: WebSocket) -> None:
        """Serve one connection; `?session=` names the session to resume, so that a full server still accepts it."""
        seat = None if websocket.query_params.get("session", "") in self.sessions else self.server.take_seat()
        connection: WebSocketConnection | None = None
        session: ResumableSession | None = None
        try:
            connection = await WebSocketConnection.accept(websocket, self.server.config.slow_s)
            session = await self._greet(connection, seat, websocket.query_params)
            if seat is not None and session.seat is not seat:
                seat.free()  # the resumed session has its own
            seat = None
            await self._serve(connection, session)
        except ConnectionError as error:
            LOG.info("connection lost", extra={"event": "lost", "reason": str(error)})
        except Exception as error:
            bye = error if isinstance(error, HangUpError) else HangUpError(1011, "internal", "", INTERNAL)
            if bye is not error:
                LOG.exception(INTERNAL, extra={"event": "bug"})
                if session is not None:
                    self.forget(session)
            if connection is not None:
                with contextlib.suppress(ConnectionError):
                    await connection.send({"type": "error", "code": bye.code, "field": bye.field, "message": str(bye)})
                await connection.close(bye.close, bye.code)
        finally:
            if seat is not None:
                seat.free()
            if session is not None and connection is not None and session.connection is connection:
                session.connection = None
                if session.settled or connection.code in LEFT or not session.opened:
                    self.forget(session)
                else:  # its client may reconnect
                    session.expiry = asyncio.get_running_loop().call_later(self.server.config.orphan_s, self.forget, session)

    async def _greet(self, connection: WebSocketConnection, seat: Seat | None, query: Mapping[str, str]) -> ResumableSession:
        """Read the first message: open a session, or resume one; `lag_s` of the query counts where the message has no dial."""
        try:
            first = await asyncio.wait_for(connection.receive(), self.server.config.hello_s)
        except asyncio.TimeoutError:
            raise HangUpError(NO_HELLO, "no_hello", "type", f"type: no open or resume within {self.server.config.hello_s:g} s") from None
        if first is None:
            raise ConnectionError("closed before its first message")
        try:
            hello = fields.parse(first) if isinstance(first, str) else {}
            opens = fields.choice(hello, "type", ("open", "resume")) == "open"
            fields.known(hello, OPEN if opens else RESUME)
            name = fields.pattern(hello, "session", ID, "1 to 64 letters, digits, _ or -", secrets.token_hex(16) if opens else None)
            words = "16 to 128 letters, digits, _ or -"
            token = fields.pattern(hello, "token", TOKEN, words, secrets.token_urlsafe(24) if opens else None)
            if (session := self.sessions.get(name)) is not None:
                return self._attach(session, token, fields.integer(hello, "received", 0, default=0 if opens else None), connection)
            if not opens:
                raise HangUpError(UNKNOWN, "unknown_session", "session", "session: unknown or expired: open a new one")
            if seat is None:
                raise HangUpError(UNKNOWN, "unknown_session", "session", "session: the one in the address has ended: connect again")
            if "lag_s" in query and not {"gamma", "policy", "lag_s"} & hello.keys():
                hello["lag_s"] = fields.from_text(query["lag_s"], "lag_s")
            return await self._open(hello, name, token, connection, seat)
        except FieldError as error:
            raise HangUpError(BAD_HELLO, error.code, error.field, str(error)) from None

    def _attach(self, session: ResumableSession, token: str, received: int, connection: WebSocketConnection) -> ResumableSession:
        """Move a session to another connection; the old one, if still open, is closed."""
        if not hmac.compare_digest(session.token, token):
            raise HangUpError(WRONG_TOKEN, "wrong_token", "token", "token: expected the token of this session")
        if received > session.log.number:
            raise FieldError("received", f"received: expected at most {session.log.number}, the last event: got {received}")
        if received + 1 < session.log.first:
            gone = f"received: events from {received + 1} were dropped: {session.log.first} is the first one kept"
            raise HangUpError(GONE, "events_gone", "received", gone)
        if session.connection is not None:
            asyncio.get_running_loop().create_task(session.connection.close(TAKEN_OVER, "taken over by another connection"))
        if session.expiry is not None:
            session.expiry.cancel()
        session.log.sent = max(session.log.sent, received)
        session.log.acknowledge(received)
        session.connection = connection
        self.server.gauges.resumes.inc()
        LOG.info("resumed", extra={"event": "resume", "session": session.id, "received": received, "number": session.received})
        return session

    async def _open(self, hello: Message, name: str, token: str, connection: WebSocketConnection, seat: Seat) -> ResumableSession:
        served, config = self.server.served, self.server.config
        kind = cast("Kind", fields.choice(hello, "source", KINDS, served.kinds[0]))
        rate = fields.number(hello, "rate", 0.001, 1e6) if "rate" in hello else None
        choice = self.server.choose(kind, schedule=fields.dial(hello), lag_s=fields.lag_s(hello))
        options = choice.setting.options(
            window_s=fields.number(hello, "window_s", 0.02, 3600) if "window_s" in hello else None,
            patience_s=fields.number(hello, "patience_s", 0, 3600) if "patience_s" in hello else math.inf,
            voice=cast("Voice", fields.choice(hello, "voice", get_args(Voice), config.voice)),
        )  # fmt: skip
        session = ResumableSession(name, token, seat, EventLog(config.max_events), kind, choice, connection)
        intake = served.intake(kind, rate, choice.setting)
        session.stream = self.server.hub.open(intake, options, session.on_notes, live=fields.flag(hello, "live"))
        self.sessions[name] = session
        try:
            while not (session.opened or session.log.final):
                await session.log.changed.wait()
                session.log.changed.clear()
        except BaseException:  # cancelled
            self.forget(session)
            raise
        if session.log.final:
            problem = json.loads(session.log.events[-1][1])
            self.forget(session)
            raise HangUpError(BAD_HELLO, problem["code"], "open", f"open: {problem['message']}")
        LOG.info("session opened", extra={"event": "session_open", "session": name, "source": kind, "setting": str(choice.setting)})
        return session

    async def _serve(self, connection: WebSocketConnection, session: ResumableSession) -> None:
        """Serve a session on one connection, until it is lost or the session has ended."""
        session.stream.ago_s, session.received_s = 0.0, asyncio.get_running_loop().time()
        config, served = self.server.config, self.server.served
        traits, acknowledged = session.stream.intake.encoder.traits, session.taken
        opened = {
            "type": "opened", "session": session.id, "token": session.token, "model": served.name, "source": session.kind,
            "schedule": str(session.stream.options.schedule), "window_tokens": session.stream.window_tokens,
            "tokens_per_s": traits.tokens_per_s, "dim": traits.dim, "received": acknowledged, "max_message": config.max_message,
            **self.server.dial_facts(session.kind, session.choice),
        }  # fmt: skip
        await connection.send({**opened, "max_unread": config.max_unread})
        session.log.changed.set()
        writer = asyncio.create_task(self._write(connection, session, acknowledged))
        reader = asyncio.create_task(self._read(connection, session))
        watcher = asyncio.create_task(self._watch(session))
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and writer.exception() is not None:
                await asyncio.wait((reader,), timeout=PARTING_S)  # it may get the client's close code
            for task in (writer, reader):
                if task.done():
                    task.result()
        finally:
            await cancel(writer, reader, watcher)

    async def _watch(self, session: ResumableSession) -> None:
        """End the source of a connected client that sends nothing."""
        while (left_s := session.received_s + self.server.config.idle_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left_s)
        session.end("idle")

    async def _write(self, connection: WebSocketConnection, session: ResumableSession, acknowledged: int) -> None:
        """Send events and acknowledgements; close once the client has acknowledged the last event."""
        place = session.log.first - 1
        while session.connection is connection:
            ahead = session.log.after(place, 64)
            if session.taken > acknowledged:  # before the events: a client that has the last one knows what was taken
                acknowledged = session.taken
                await connection.send({"type": "ack", "received": acknowledged})
            for number, text in ahead:
                await connection.send(text)
                session.log.sent_up_to(number)
                place = number
            if session.settled:
                await connection.close(1012 if self.server.draining else 1000, "finished")
                return
            if not ahead and session.taken == acknowledged:
                # A client that does not acknowledge the last event is not waited for forever; it may still reconnect.
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(session.log.changed.wait(), self.server.config.slow_s if session.log.final else None)
                if session.log.final and not session.log.changed.is_set():
                    await connection.close(1000, "finished")
                    return
                session.log.changed.clear()

    async def _read(self, connection: WebSocketConnection, session: ResumableSession) -> None:
        """Read the client's messages as they arrive, whatever the model is doing; an unexpected error ends the session alone."""
        while session.connection is connection and (message := await connection.receive()) is not None:
            try:
                if isinstance(message, bytes):
                    self._take_binary(session, message)
                else:
                    await self._take_text(connection, session, message)
            except FieldError as error:
                await connection.send({"type": "error", "code": error.code, "field": error.field, "message": str(error)})
            except (ConnectionError, HangUpError):
                raise
            except Exception:
                LOG.exception(INTERNAL, extra={"event": "bug", "session": session.id})
                session.finish("failed", code="internal", message=INTERNAL)

    def _take_binary(self, session: ResumableSession, message: bytes) -> None:
        if len(message) < HEAD.size:
            raise FieldError("seq", f"seq: expected a number of 8 bytes before the source: got {len(message)} bytes", "bad_number")
        (number,) = HEAD.unpack_from(message)
        if not self._is_next(session, number):
            return
        stream, payload, limit = session.stream, message[HEAD.size :], self.server.config.max_unread
        if stream.unread + len(payload) > limit:
            raise HangUpError(OVERRUN, "overrun", "seq", f"seq: more than {limit} bytes would wait: wait for acknowledgements")
        if stream.source_s > self.server.config.max_source_s and not stream.ended:
            session.end("too_long")
            return
        session.received, session.received_s = number, asyncio.get_running_loop().time()
        try:
            if stream.ended:
                raise FieldError("seq", "seq: the source has ended: open a new session for more", "ended")
            stream.source(payload, number)
        except FieldError as error:
            session.refuse(number, error)

    def _is_next(self, session: ResumableSession, number: int) -> bool:
        """Whether a message is the next to accept; one sent again after a lost connection is skipped."""
        if number and session.over:
            return False
        if number > session.received + 1 or number == 0:
            raise FieldError("seq", f"seq: expected {session.received + 1}: got {number}; send again from there", "out_of_order")
        return number == session.received + 1

    async def _take_text(self, connection: WebSocketConnection, session: ResumableSession, text: str) -> None:
        message = fields.parse(text)
        type_ = fields.choice(message, "type", ("ack", "turn", "flush", "end", "ping", "at"))
        if type_ == "ack":
            fields.known(message, ("type", "received"))
            session.log.acknowledge(fields.integer(message, "received", 0))
            return
        if type_ == "ping":
            fields.known(message, ("type", "id"))
            await connection.send({"type": "pong", "id": fields.string(message, "id", "", longest=64)})
            return
        stream = session.stream
        if type_ == "at":
            fields.known(message, ("type", "ago_s"))
            stream.ago_s = fields.number(message, "ago_s", 0, 24 * 3600)
            return
        number = fields.integer(message, "seq", 1, 2**64 - 1)
        if not self._is_next(session, number):
            return
        session.received, session.received_s = number, asyncio.get_running_loop().time()
        try:
            if stream.ended:
                raise FieldError("type", f"type: {type_} after the end of the source: open a new session", "ended")
            fields.known(message, ("type", "seq", "gamma", "policy", "lag_s") if type_ == "turn" else ("type", "seq"))
            if type_ == "turn":
                schedule, lag_s = fields.dial(message), fields.lag_s(message)
                if lag_s is not None:  # the schedule of its setting; the encoder's block stays as it was opened
                    schedule = self.server.choose(session.kind, lag_s=lag_s).schedule
                if schedule is None or schedule.decides_while_reading:
                    raise FieldError("gamma", "gamma: expected gamma, lag_s, or a schedule (wait-k=10, full) as policy")
                stream.turn(schedule, number)
            elif type_ == "flush":
                stream.flush(number)
            else:
                stream.end(number)
        except FieldError as error:
            session.refuse(number, error)


TRANSPORT = WebSocketTransport
