"""The socket `/v1/stream`: a session that outlives its connections (docs/protocol.md is the whole wire format).

Messages of the client have numbers, and so have events. A message is taken once, in order, whatever comes twice; an event is kept until
the client has acknowledged it. So after a cut both sides go on where they were, and nothing is lost or doubled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import secrets
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket

from zendaya.live import Moment
from zendaya.policies import Policy
from zendaya.serve import fields
from zendaya.serve.fields import FieldError, Message
from zendaya.serve.hub import Note, Stream, Wish
from zendaya.serve.line import Line
from zendaya.serve.served import KINDS, Kind
from zendaya.serve.server import RETRY_S, Seat, Server

LOG = logging.getLogger("zendaya.serve")
HEAD = struct.Struct("<Q")
"""What a binary message begins with: its number."""
ID = r"[A-Za-z0-9_-]{1,64}"
TOKEN = r"[A-Za-z0-9_-]{16,128}"
OPEN = ("type", "session", "token", "source", "rate", "gamma", "policy", "window_s", "patience_s", "live", "received")
# Why a connection was closed, beside WebSocket's own codes.
BAD_HELLO, WRONG_TOKEN, UNKNOWN, NO_HELLO, TAKEN_OVER, GONE, OVERRUN = 4400, 4403, 4404, 4408, 4409, 4410, 4413
PARTING_S = 1.0
"""What was sent before a connection was closed is read for so long."""
LEFT = (1000, 1001)
"""Closed so by the client, it will not come back."""


class HangUpError(Exception):
    """A connection that cannot go on: how it is closed, after an error was sent."""

    def __init__(self, close: int, code: str, field: str, message: str) -> None:
        super().__init__(message)
        self.close, self.code, self.field = close, code, field


@dataclass(eq=False, repr=False)
class Kept:
    """A session with its numbers, its events and, for now, its connection."""

    id: str
    token: str
    seat: Seat
    max_events: int
    stream: Stream | None = None
    kind: Kind = "audio"
    received: int = 0
    """The last message taken into the session."""
    heard_s: float = 0.0
    """When that was, by the loop's clock; or when a connection began."""
    taken: int = 0
    """The last that has been read: up to here the client may forget."""
    sent: int = 0
    """The last event sent, on any connection."""
    events: deque[tuple[int, str]] = field(default_factory=deque)
    number: int = 0
    """Of the last event."""
    opened: bool = False
    final: int = 0
    """The number of the last event there will be, once it is known."""
    reason: str = "end"
    """Why the source ends."""
    line: Line | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    expiry: asyncio.TimerHandle | None = None

    def note(self, sort: str, **what: Any) -> None:
        """Write an event down, until it is acknowledged."""
        self.number += 1
        self.events.append((self.number, json.dumps({"type": sort, "seq": self.number, **what}, ensure_ascii=False)))
        self.sent_up_to(self.sent)
        self.changed.set()

    def sent_up_to(self, number: int) -> None:
        """Events up to one have been sent: of these, the oldest go where there are too many."""
        self.sent = max(self.sent, number)
        while len(self.events) > self.max_events and self.events[0][0] <= self.sent:
            self.events.popleft()

    def acknowledge(self, received: int) -> None:
        """The client has all events up to one."""
        if received > self.number:
            raise FieldError("received", f"received: event {received} has not been sent: the last was {self.number}")
        while self.events and self.events[0][0] <= received:
            self.events.popleft()
        self.changed.set()

    @property
    def first(self) -> int:
        """The first event that is still there."""
        return self.events[0][0] if self.events else self.number + 1

    @property
    def settled(self) -> bool:
        """Whether all has been said and acknowledged."""
        return bool(self.final) and not self.events

    @property
    def over(self) -> bool:
        """Whether the server has ended it: what comes now is not taken, and stays the client's, for another session."""
        return bool(self.final) or self.reason != "end"

    def end(self, reason: str) -> None:
        """The source ends here, for a reason that is the server's."""
        if self.stream is not None and not self.stream.ended:
            self.reason = reason
            self.stream.end()

    def hear(self, notes: list[Note]) -> None:
        """What came of the stream."""
        assert self.stream is not None
        for note in notes:
            if note.kind == "opened":
                self.opened = True
                self.changed.set()
            elif note.kind == "taken":
                self.stream.unread -= note.num_bytes
                self.taken = max(self.taken, note.number)
                self.changed.set()
            elif note.kind == "refused":
                self.refuse(note.number, "bad_source", self.kind, note.error)
            elif note.kind == "moment":
                assert note.moment is not None
                sort, what = to_event(note.moment, note.exposure)
                self.note(sort, **what)
            elif note.kind == "flushed":
                self.note("flushed", of=note.number)
            elif note.kind == "finished":
                self._finish("finished", reason=self.reason, source_s=round(self.stream.source_s, 6))
            elif note.kind == "failed":
                code = "internal" if note.internal else "bad_open" if not self.opened else "failed"
                self._finish("failed", code=code, message=note.error)

    def refuse(self, number: int, code: str, field: str, message: str) -> None:
        """A message could not be used; the stream goes on without it."""
        self.note("refused", of=number, code=code, field=field, message=message)

    def _finish(self, sort: str, **what: Any) -> None:
        if not self.final:
            self.note(sort, **what)
            self.final = self.number
            assert self.stream is not None
            self.stream.close()


def to_event(moment: Moment, exposure: float) -> tuple[str, dict[str, Any]]:
    """A moment as an event of the wire: its type, and its fields but the number."""
    event = moment.event
    place = {"window": event.window, "step": event.step, "horizon": event.horizon, "arrival_s": event.arrival_s}
    if event.schedule:
        return "turned", {"schedule": event.schedule, **place}
    return "text", {
        "text": event.text, "token": event.token, **place, "effective_horizon": event.effective_horizon,
        "predicted_steps": event.predicted_steps, "pauses": event.pauses, "window_start": event.window_start, "last": event.last,
        "gamma": event.gamma, "emission_s": event.emission_s, "spoken_s": moment.spoken_s, "read_s": moment.read_s,
        "policy_lag_s": moment.policy_lag_s, "compute_lag_s": moment.compute_lag_s, "exposure": exposure,
    }  # fmt: skip


class Native:
    """The sessions of `/v1/stream`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.sessions = dict[str, Kept]()

    def end_all(self) -> None:
        """End every source; who is not connected is let go."""
        for kept in list(self.sessions.values()):
            if kept.line is None:
                self.forget(kept)
            else:
                kept.end("draining")

    def forget(self, kept: Kept) -> None:
        """Let a session go."""
        if self.sessions.get(kept.id) is kept:
            del self.sessions[kept.id]
        if kept.expiry is not None:
            kept.expiry.cancel()
        if kept.stream is not None:
            kept.stream.close()
        if kept.seat.held:
            LOG.info(
                "session ended", extra={"event": "session_end", "session": kept.id, "num_events": kept.number, "messages": kept.received}
            )
        kept.seat.free()

    async def connect(self, websocket: WebSocket) -> None:
        """A client comes, for the first time or again: `?session=` says whose, so that a full server takes its own back."""
        seat = None
        if websocket.query_params.get("session", "") not in self.sessions:
            seat = self.server.take_seat()
            if seat is None:
                await websocket.send_denial_response(refusal(self.server))
                return
        line: Line | None = None
        kept: Kept | None = None
        try:
            line = await Line.accept(websocket, self.server.config.slow_s)
            kept = await self._greet(line, seat)
            if seat is not None and kept.seat is not seat:
                seat.free()  # it goes on with a session that has one
            seat = None
            await self._serve(line, kept)
        except HangUpError as bye:
            assert line is not None
            with contextlib.suppress(ConnectionError):
                await line.send({"type": "error", "code": bye.code, "field": bye.field, "message": str(bye)})
            await line.close(bye.close, bye.code)
        except ConnectionError as error:
            LOG.info("connection lost", extra={"event": "lost", "reason": str(error)})
        finally:
            if seat is not None:
                seat.free()
            if kept is not None and line is not None and kept.line is line:
                self._part(kept, line)

    def _part(self, kept: Kept, line: Line) -> None:
        """A connection is over: a session whose client may come back is kept for a time."""
        kept.line = None
        if kept.settled or line.code in LEFT or not kept.opened:
            self.forget(kept)
        else:
            kept.expiry = asyncio.get_running_loop().call_later(self.server.config.orphan_s, self.forget, kept)

    async def _greet(self, line: Line, seat: Seat | None) -> Kept:
        """The first message: a new session, or one to go on with."""
        try:
            first = await asyncio.wait_for(line.receive(), self.server.config.hello_s)
        except asyncio.TimeoutError:
            raise HangUpError(NO_HELLO, "no_hello", "type", f"type: no open or resume within {self.server.config.hello_s:g} s") from None
        if first is None:
            raise ConnectionError("closed before it said anything")
        try:
            hello = fields.parse(first) if isinstance(first, str) else {}
            if fields.choice(hello, "type", ("open", "resume")) == "resume":
                return self._resume(hello, line)
            return await self._open(hello, line, seat)
        except FieldError as error:
            raise HangUpError(BAD_HELLO, error.code, error.field, str(error)) from None

    def _resume(self, hello: Message, line: Line) -> Kept:
        fields.known(hello, ("type", "session", "token", "received"))
        name = fields.pattern(hello, "session", ID, "1 to 64 letters, digits, _ or -")
        token = fields.pattern(hello, "token", TOKEN, "16 to 128 letters, digits, _ or -")
        kept = self.sessions.get(name)
        if kept is None:
            raise HangUpError(UNKNOWN, "unknown_session", "session", "session: not known here, or expired: open a new one")
        return self._take_up(kept, token, fields.whole(hello, "received", 0), line)

    def _take_up(self, kept: Kept, token: str, received: int, line: Line) -> Kept:
        """Go on with a session on another connection; the one before, should it still be there, is closed."""
        if not hmac.compare_digest(kept.token, token):
            raise HangUpError(WRONG_TOKEN, "wrong_token", "token", "token: not that of the session")
        if received > kept.number:
            raise FieldError("received", f"received: the session has {kept.number} events: got {received}")
        if received + 1 < kept.first:
            raise HangUpError(
                GONE, "events_gone", "received", f"received: events from {received + 1} are gone, {kept.first} is the first kept"
            )
        if kept.line is not None:
            asyncio.get_running_loop().create_task(kept.line.close(TAKEN_OVER, "taken over by another connection"))
        if kept.expiry is not None:
            kept.expiry.cancel()
            kept.expiry = None
        kept.sent = max(kept.sent, received)
        kept.acknowledge(received)
        kept.line = line
        self.server.gauges.resumes.inc()
        LOG.info("resumed", extra={"event": "resume", "session": kept.id, "received": received, "number": kept.received})
        return kept

    async def _open(self, hello: Message, line: Line, seat: Seat | None) -> Kept:
        fields.known(hello, OPEN)
        name = fields.pattern(hello, "session", ID, "1 to 64 letters, digits, _ or -", secrets.token_hex(16))
        token = fields.pattern(hello, "token", TOKEN, "16 to 128 letters, digits, _ or -", secrets.token_urlsafe(24))
        if (kept := self.sessions.get(name)) is not None:
            return self._take_up(kept, token, fields.whole(hello, "received", 0, default=0), line)
        if seat is None:
            raise HangUpError(UNKNOWN, "unknown_session", "session", "session: that of the address has gone meanwhile: connect again")
        served, config = self.server.served, self.server.config
        found = fields.choice(hello, "source", KINDS, served.kinds[0])
        kind = next(kind for kind in KINDS if kind == found)
        rate = fields.number(hello, "rate", 0.001, 1e6) if "rate" in hello else None
        schedule = fields.dial(hello, config.gamma)
        assert schedule is not None
        wish = Wish(
            schedule=schedule, window_s=fields.number(hello, "window_s", 0.02, 3600) if "window_s" in hello else None,
            patience_s=fields.number(hello, "patience_s", 0, 3600) if "patience_s" in hello else math.inf,
            live=fields.flag(hello, "live", default=False),
        )  # fmt: skip
        kept = Kept(name, token, seat, config.max_events, kind=kind, line=line)
        kept.stream = self.server.hub.open(served.intake(kind, rate), wish, kept.hear)
        self.sessions[name] = kept
        while not (kept.opened or kept.final):
            await kept.changed.wait()
            kept.changed.clear()
        if kept.final:
            problem = json.loads(kept.events[-1][1])
            self.forget(kept)
            raise HangUpError(BAD_HELLO, problem["code"], "open", f"open: {problem['message']}")
        LOG.info("session opened", extra={"event": "session_open", "session": name, "source": kind, "schedule": str(schedule)})
        return kept

    async def _serve(self, line: Line, kept: Kept) -> None:
        """One connection of a session, until it is cut or all is said."""
        assert kept.stream is not None
        kept.stream.ago_s, kept.heard_s = 0.0, asyncio.get_running_loop().time()
        config, served = self.server.config, self.server.served
        traits, acknowledged = kept.stream.intake.encoder.traits, kept.taken
        await line.send(
            {
                "type": "opened", "session": kept.id, "token": kept.token, "model": served.name, "source": kept.kind,
                "schedule": str(kept.stream.wish.schedule), "window": kept.stream.window, "tokens_per_s": traits.tokens_per_s,
                "dim": traits.dim, "received": acknowledged, "max_message": config.max_message, "max_unread": config.max_unread,
            }
        )  # fmt: skip
        kept.changed.set()
        writer = asyncio.create_task(self._write(line, kept, acknowledged))
        reader = asyncio.create_task(self._read(line, kept))
        watcher = asyncio.create_task(self._watch(kept))
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and writer.exception() is not None:
                await asyncio.wait((reader,), timeout=PARTING_S)  # it may know how the client has left
            for task in (writer, reader):
                if task.done():
                    task.result()
        finally:
            for task in (writer, reader, watcher):
                task.cancel()
            await asyncio.gather(writer, reader, watcher, return_exceptions=True)

    async def _watch(self, kept: Kept) -> None:
        """End the source of a client that is there and sends nothing of it."""
        while (left_s := kept.heard_s + self.server.config.idle_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left_s)
        kept.end("idle")

    async def _write(self, line: Line, kept: Kept, acknowledged: int) -> None:
        """Events, and how far the client's messages were taken; closed once the last is acknowledged."""
        place = kept.first - 1
        while kept.line is line:
            skip = max(0, place + 1 - kept.first)
            ahead = [kept.events[at] for at in range(skip, min(skip + 64, len(kept.events)))]
            if kept.taken > acknowledged:  # before these events: who is told the last one knows what was taken
                acknowledged = kept.taken
                await line.send({"type": "ack", "received": acknowledged})
            for number, text in ahead:
                await line.send(text)
                kept.sent_up_to(number)
                place = number
            if kept.settled:
                await line.close(1012 if self.server.draining else 1000, "finished")
                return
            if not ahead and kept.taken == acknowledged:
                # Who has all and does not say so is not waited for without end; it may still come back.
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(kept.changed.wait(), self.server.config.slow_s if kept.final else None)
                if kept.final and not kept.changed.is_set():
                    await line.close(1000, "finished")
                    return
                kept.changed.clear()

    async def _read(self, line: Line, kept: Kept) -> None:
        """The client's messages, which are looked at as they come, whatever the model is doing."""
        while kept.line is line and (message := await line.receive()) is not None:
            try:
                if isinstance(message, bytes):
                    self._take_binary(kept, message)
                else:
                    await self._take_text(line, kept, message)
            except FieldError as error:
                await line.send({"type": "error", "code": error.code, "field": error.field, "message": str(error)})

    def _take_binary(self, kept: Kept, message: bytes) -> None:
        if len(message) < HEAD.size:
            raise FieldError("seq", f"seq: a binary message begins with its number, 8 bytes: got {len(message)} bytes in all", "bad_number")
        (number,) = HEAD.unpack_from(message)
        if not self._is_next(kept, number):
            return
        stream, payload = kept.stream, message[HEAD.size :]
        assert stream is not None
        if stream.unread + len(payload) > self.server.config.max_unread:
            limit = self.server.config.max_unread
            raise HangUpError(OVERRUN, "overrun", "seq", f"seq: more than {limit} bytes would wait to be read: wait for acknowledgements")
        if stream.source_s > self.server.config.max_source_s and not stream.ended:
            kept.end("too_long")
            return
        kept.received, kept.heard_s = number, asyncio.get_running_loop().time()
        try:
            if stream.ended:
                raise FieldError("seq", "seq: the source has ended: open a new session for more", "ended")
            stream.source(payload, number)
        except FieldError as error:
            self._refuse(kept, number, error)

    def _refuse(self, kept: Kept, number: int, error: FieldError) -> None:
        kept.refuse(number, error.code, error.field, str(error))
        assert kept.stream is not None
        kept.stream.skip(number)

    def _is_next(self, kept: Kept, number: int) -> bool:
        """Whether a message is the one to take now; one that was taken comes twice after a cut, and is passed over."""
        if number and kept.over:
            return False
        if number > kept.received + 1 or number == 0:
            raise FieldError("seq", f"seq: expected {kept.received + 1}: got {number}; send again from there", "out_of_order")
        return number == kept.received + 1

    async def _take_text(self, line: Line, kept: Kept, text: str) -> None:
        message = fields.parse(text)
        sort = fields.choice(message, "type", ("ack", "turn", "flush", "end", "ping", "at"))
        if sort == "ack":
            fields.known(message, ("type", "received"))
            kept.acknowledge(fields.whole(message, "received", 0))
            return
        if sort == "ping":
            fields.known(message, ("type", "id"))
            await line.send({"type": "pong", "id": fields.string(message, "id", "", longest=64)})
            return
        stream = kept.stream
        assert stream is not None
        if sort == "at":
            fields.known(message, ("type", "ago_s"))
            stream.ago_s = fields.number(message, "ago_s", 0, 24 * 3600)
            return
        number = fields.whole(message, "seq", 1, 2**64 - 1)
        if not self._is_next(kept, number):
            return
        kept.received, kept.heard_s = number, asyncio.get_running_loop().time()
        try:
            if stream.ended:
                raise FieldError("type", f"type: {sort} after the end: open a new session", "ended")
            fields.known(message, ("type", "seq", "gamma", "policy") if sort == "turn" else ("type", "seq"))
            if sort == "turn":
                schedule = fields.dial(message)
                if schedule is None or isinstance(schedule, Policy):
                    raise FieldError("gamma", "gamma: a turn names a dial: give gamma, or a schedule (wait-k=10, full) as policy")
                stream.turn(schedule, number)
            elif sort == "flush":
                stream.flush(number)
            else:
                stream.end(number)
        except FieldError as error:
            self._refuse(kept, number, error)


def refusal(server: Server) -> JSONResponse:
    """The answer to who finds no seat."""
    what = "the server is going down" if server.draining else f"all {server.config.max_sessions} sessions are taken"
    error = {"code": "draining" if server.draining else "full", "message": f"{what}: come back in {RETRY_S} s", "type": "server_error"}
    return JSONResponse({"error": error}, 503, {"Retry-After": str(RETRY_S)})
