"""A client of `/v1/stream`: send a source, receive its text; after a lost connection it reconnects and goes on where it was.

A killed server takes its sessions with it. So the client keeps all it has sent: it opens another session, sends everything again and skips
the events it had. The text depends only on what was sent, so the events are the same; the client compares them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, cast
from urllib.parse import urlencode

import numpy as np

from zendaya.errors import ConfigError, MissingExtraError, SourceError, ZendayaError
from zendaya.records import Event

HEAD = struct.Struct("<Q")
ACK_EVERY = 32  # events per acknowledgement
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0  # seconds before reconnecting: doubled each time, up to the longest
REFUSED = {4400, 4403, 4404, 4409, 4410, 4413}  # close codes after which a session cannot be resumed
KEEP = 256 * 2**20  # bytes of source kept for sending again: more than two hours of audio
BATCH = 64  # messages taken from the outbox in one go
OLD_S = 0.25  # seconds after which a message is sent with its age


class _LostError(Exception):
    """The server no longer has the session."""


class ServerError(ZendayaError):
    """The server refused a message, or cannot be reached; `code` is the server's error code."""

    def __init__(self, message: str, code: str = "", field: str = "") -> None:
        super().__init__(message)
        self.code, self.field = code, field


@dataclass(frozen=True)
class Caption:
    """An event (`zendaya.Event`) with the times that the server adds to it (docs/protocol.md)."""

    event: Event
    spoken_s: float = 0.0
    read_s: float = 0.0
    policy_lag_s: float = 0.0
    compute_lag_s: float = 0.0
    exposure: float = 0.0

    @property
    def text(self) -> str:
        return self.event.text


@dataclass(frozen=True)
class _Sent:
    """A numbered message, and when it was first sent."""

    number: int
    message: str | bytes
    posted_s: float

    @property
    def size(self) -> int:
        """Bytes of source."""
        return len(self.message) - HEAD.size if isinstance(self.message, bytes) else 0


class _Outbox:
    """Messages on their way to the server, shared by the caller's thread and the client's; `changed` is its lock."""

    def __init__(self, keep: int) -> None:
        self.changed = threading.Condition()
        self.closed = False  # whether no further message is accepted
        self.more = asyncio.Event()  # set in the client's thread when there may be something to send
        self.buffered = 0  # bytes of source that the server has not acknowledged
        self.limit = 2**62  # bytes that the server lets wait
        self.keep = keep
        self._number = 0
        self._waiting = deque[_Sent]()  # messages that the server has not acknowledged
        self._kept: list[_Sent] | None = []  # all messages; None once they are larger than `keep`
        self._kept_bytes = self._sent = self._in_flight = 0

    def add(self, message: dict[str, Any] | bytes) -> bool:
        """Number a message and append it, once there is room for it; False if the outbox is closed."""
        size = len(message) if isinstance(message, bytes) else 0
        with self.changed:
            self.changed.wait_for(lambda: self.closed or not self.buffered or self.buffered + size <= self.limit)
            if self.closed:
                return False
            self._number += 1
            numbered = HEAD.pack(self._number) + message if isinstance(message, bytes) else json.dumps({**message, "seq": self._number})
            self._waiting.append(sent := _Sent(self._number, numbered, time.monotonic()))
            self.buffered += size
            self._kept_bytes += size
            if self._kept is not None:
                self._kept.append(sent)
                if self._kept_bytes > self.keep:
                    self._kept = None
        return True

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def acknowledge(self, received: int) -> None:
        """The server has the messages up to one."""
        with self.changed:
            while self._waiting and self._waiting[0].number <= received:
                one = self._waiting.popleft()
                self.buffered -= one.size
                self._in_flight -= one.size if one.number <= self._sent else 0
            self.changed.notify_all()
        self.more.set()

    def restart(self) -> None:
        """Send all waiting messages again, on a new connection."""
        self._sent = self._in_flight = 0

    def unsent(self) -> Iterator[_Sent]:
        """Waiting messages that were not sent on this connection, as far as the server has room."""
        with self.changed:
            skip = max(0, self._sent + 1 - self._waiting[0].number) if self._waiting else 0
            ahead = list(itertools.islice(self._waiting, skip, skip + BATCH))
        for one in ahead:
            if self._in_flight and self._in_flight + one.size > self.limit:
                return
            self._sent, self._in_flight = one.number, self._in_flight + one.size
            yield one

    def rewind(self) -> bool:
        """Make every message wait again, for a new session; False if they were not all kept."""
        with self.changed:
            if self._kept is None:
                return False
            self._waiting, self.buffered = deque(self._kept), self._kept_bytes
        return True


class _EventDigest:
    """Number and digest of a session's events, without their times, which depend on the clock."""

    def __init__(self) -> None:
        self.count, self.digest = 0, hashlib.sha256()

    def add(self, event: Event) -> None:
        self.count += 1
        what = (event.window_index, event.step, event.token, event.text, event.horizon, event.effective_horizon, event.last, event.schedule)
        self.digest.update(repr(what).encode())


class _RemoteSession:
    """A session on the server: its name, and how much of it was received."""

    def __init__(self) -> None:
        self.name, self.token = secrets.token_hex(16), secrets.token_urlsafe(24)
        self.opened = False
        self.received = self.acknowledged = 0
        self.events = _EventDigest()
        """Its events so far; fewer than the caller was given while a rebuilt session catches up."""


class _Inbox:
    """Captions on their way to the caller, each once: those that a rebuilt session writes again are compared only."""

    def __init__(self, url: str) -> None:
        self.delivered = _EventDigest()
        self.error: ZendayaError | None = None  # the error that ended the session
        self._url = url
        self._arrived = queue.SimpleQueue[Caption | ZendayaError | None]()

    def deliver(self, caption: Caption, events: _EventDigest) -> None:
        """Append a caption to the events of its session, and give it to the caller if it is new."""
        new = events.count == self.delivered.count
        events.add(caption.event)
        if new:
            self.delivered.add(caption.event)
            self._arrived.put(caption)
        elif events.count == self.delivered.count and events.digest.digest() != self.delivered.digest.digest():
            raise self.different()

    def different(self) -> ServerError:
        """The error of a rebuilt session that writes other events."""
        problem = "the server has lost the session and now writes another text from the same source"
        reason = "the model has changed, or patience_s makes the text depend on time"
        return ServerError(f"{self._url}: {problem}: open a new client ({reason})", "different")

    def end(self, error: ZendayaError | None = None) -> None:
        """No caption follows; with an error, the caller gets it."""
        self.error = error
        self._arrived.put(error)

    def captions(self, *, wait: bool) -> Iterator[Caption]:
        """The captions that have arrived by now; with `wait`, all up to the end."""
        while wait or not self._arrived.empty():
            found = self._arrived.get()
            if not isinstance(found, Caption):
                self._arrived.put(found)  # for the next call
                if found is not None:
                    raise found
                return
            yield found


class Client(contextlib.AbstractContextManager["Client"]):
    """One session on a server. Use it as a context manager: leaving it ends the session.

        with zendaya.Client("ws://127.0.0.1:8765", lag_s=1.0) as client:  # or gamma=0.5, or the server's own dial
            for samples in audio:  # float samples or s16le bytes at 16 kHz, as they arrive
                client.send(samples)
                for caption in client.captions():  # those that are there by now
                    print(caption.text, end="")
            for caption in client.finish():
                print(caption.text, end="")

    A lost connection is restored for up to `patience_s`; messages wait meanwhile. A session that the server has lost is rebuilt from all
    that was sent, if that is at most `keep` bytes. `num_resumes` and `num_rebuilds` count both; `buffered` is the number of bytes that
    wait for the server.
    """

    def __init__(
        self, url: str = "ws://127.0.0.1:8765", *, key: str | None = None, source: Literal["audio", "features", "frames"] = "audio",
        lag_s: float | None = None, gamma: float | None = None, policy: str | None = None, patience_s: float = 60.0, keep: int = KEEP,
        **options: Any,
    ) -> None:  # fmt: skip
        try:
            import websockets  # noqa: F401
        except ModuleNotFoundError:
            raise MissingExtraError("websockets", "serve", "a client") from None
        if not url.startswith(("ws://", "wss://")):
            raise ConfigError(f"expected a server's address, as ws://127.0.0.1:8765: got {url!r}")
        self.url, self.source, self.patience_s = url.rstrip("/"), source, patience_s
        self.num_resumes = self.num_rebuilds = 0
        self.opened: dict[str, Any] = {}
        """The server's `opened` message: model, window, setting, the frontier of lags it can keep, and limits."""
        self.reason = ""
        """Why the session has ended: `end`, `idle`, `draining` or `too_long`; empty before."""
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._open = {"type": "open", "source": source, **options}
        self._open |= {name: value for name, value in (("gamma", gamma), ("policy", policy), ("lag_s", lag_s)) if value is not None}
        self._outbox, self._session, self._inbox = _Outbox(keep), _RemoteSession(), _Inbox(self.url)
        self._greeted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zendaya-client", daemon=True)
        self._thread.start()
        self._greeted.wait()
        if self._inbox.error is not None:
            self.close()
            raise self._inbox.error

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def buffered(self) -> int:
        """Bytes of source that the server has not acknowledged."""
        return self._outbox.buffered

    def send(self, source: Any) -> None:
        """Send source: an array of samples or feature rows, or their bytes, or an encoded picture; blocks while the server is behind."""
        payload = bytes(source) if isinstance(source, bytes | bytearray | memoryview) else self._payload(np.asarray(source))
        unit = {"audio": 2, "features": 4 * int(self.opened["dim"]), "frames": max(1, len(payload))}[self.source]
        most = int(self.opened["max_message"]) - HEAD.size
        if unit > most:
            raise SourceError(f"expected a picture or row of at most {most} bytes: got {unit}; make it smaller")
        for first in range(0, len(payload), most // unit * unit):
            self._post(payload[first : first + most // unit * unit])

    def turn(self, gamma: float | str | None = None, *, lag_s: float | None = None) -> None:
        """Change the schedule: a γ, a schedule by name (`wait-k=10`), or a lag in seconds, where the encoder's block stays as it is."""
        if (gamma is None) == (lag_s is None):
            raise ConfigError(f"turn: give gamma or lag_s, one of the two: got {gamma} and {lag_s}")
        dial = {"lag_s": lag_s} if gamma is None else {"policy": gamma} if isinstance(gamma, str) else {"gamma": gamma}
        self._post({"type": "turn", **dial})

    def flush(self) -> None:
        """Write out the text of all source so far; the next source begins a new window."""
        self._post({"type": "flush"})

    def captions(self) -> Iterator[Caption]:
        """The captions that have arrived by now."""
        return self._inbox.captions(wait=False)

    def finish(self) -> Iterator[Caption]:
        """End the source; the remaining captions, as they arrive."""
        self._post({"type": "end"})
        yield from self._inbox.captions(wait=True)

    def close(self) -> None:
        """End the session, finished or not."""
        if self._thread.is_alive():
            self._outbox.close()
            self._call(self._task.cancel)
            self._thread.join()

    def _payload(self, values: Any) -> bytes:
        if self.source == "features":
            return values.astype("<f4").tobytes()
        if values.dtype.kind == "f":
            values = np.clip(np.rint(values * 32768.0), -32768, 32767)
        return values.astype("<i2").tobytes()

    def _post(self, message: dict[str, Any] | bytes) -> None:
        """Hand a message to the client's thread."""
        if not self._outbox.add(message):
            raise self._inbox.error or ServerError(f"the session has ended ({self.reason or 'closed'}): open a new client", "over")
        self._call(self._outbox.more.set)

    def _call(self, function: Callable[[], Any]) -> None:
        """Call a function in the client's thread, if it still runs; otherwise `captions` raises the reason."""
        with contextlib.suppress(RuntimeError):
            self._task.get_loop().call_soon_threadsafe(function)

    # In the client's thread.

    def _run(self) -> None:
        try:
            asyncio.run(self._keep_connected())
        except asyncio.CancelledError:
            pass
        except ZendayaError as error:
            self._inbox.end(error)
        finally:
            self._outbox.close()
            self._greeted.set()

    async def _keep_connected(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
        from websockets.typing import Subprotocol

        self._task = cast("asyncio.Task[None]", asyncio.current_task())
        wait_s, lost_s = FIRST_WAIT_S, time.monotonic()
        while True:
            num_opened = self.num_resumes + self.num_rebuilds
            address = f"{self.url}/v1/stream?{urlencode({'session': self._session.name})}"
            try:
                async with connect(
                    address, additional_headers=self._headers, subprotocols=[Subprotocol("zendaya")], compression=None, max_size=None,
                    proxy=None, close_timeout=2, open_timeout=self.patience_s,
                ) as connection:  # fmt: skip
                    try:
                        if await self._talk(connection):
                            return
                    except (asyncio.CancelledError, ServerError, _LostError):
                        await connection.close()  # properly closed: the server need not keep the session
                        raise
                problem = "the connection was lost"
            except _LostError:
                problem = "the server has lost the session"
                if self._session.opened:  # another session is sent everything again
                    if not self._outbox.rewind():
                        lost = f"the session is lost, and more than {self._outbox.keep} bytes were sent"
                        raise ServerError(f"{self.url}: {lost}: open a new client with a larger keep", "lost") from None
                    self._session = _RemoteSession()
            except ConnectionClosed as closed:
                if closed.rcvd is not None and closed.rcvd.code in REFUSED:
                    raise ServerError(f"the server closed the session: {closed.rcvd.reason}", closed.rcvd.reason) from None
                problem = str(closed)
            except InvalidStatus as refused:
                status = refused.response.status_code
                problem = f"refused with {status}: {_reason(refused.response.body)}"
                if status in (401, 403, 404) or not self.opened:
                    raise ServerError(f"{self.url}: {problem}", str(status)) from None
            except (OSError, InvalidHandshake, asyncio.TimeoutError) as error:
                problem = str(error) or type(error).__name__
                if not self.opened and isinstance(error, ConnectionRefusedError | socket.gaierror):
                    raise ServerError(f"{self.url}: no server answers: {problem}", "unreachable") from None
            if self.num_resumes + self.num_rebuilds > num_opened:
                wait_s, lost_s = FIRST_WAIT_S, time.monotonic()
            if time.monotonic() - lost_s > self.patience_s:
                raise ServerError(f"{self.url}: no connection for {self.patience_s:g} s: {problem}", "unreachable")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _talk(self, connection: Any) -> bool:
        """Use one connection until it is lost (False) or the session has ended (True)."""
        session = self._session
        known = {"session": session.name, "token": session.token}
        hello = {"type": "resume", **known, "received": session.received} if session.opened else {**self._open, **known}
        await connection.send(json.dumps(hello))
        sender: asyncio.Task[None] | None = None
        try:
            async for text in connection:
                message = json.loads(text)
                type_ = message["type"]
                if type_ == "opened":
                    self.num_resumes += session.opened
                    self.num_rebuilds += not session.opened and bool(self.opened)
                    session.opened = True
                    self.opened, self._outbox.limit = message, int(message["max_unread"])
                    self._outbox.acknowledge(message["received"])
                    sender = asyncio.create_task(self._send_on(connection))
                    self._greeted.set()
                elif type_ == "ack":
                    self._outbox.acknowledge(message["received"])
                elif type_ == "error" and message["code"] == "unknown_session":
                    raise _LostError
                elif type_ == "error":
                    raise ServerError(message["message"], message["code"], message["field"])
                elif message.get("seq") == session.received + 1:
                    session.received += 1
                    last = self._take(message)
                    if last or session.received - session.acknowledged >= ACK_EVERY:
                        session.acknowledged = session.received
                        await connection.send(json.dumps({"type": "ack", "received": session.received}))
                    if last:
                        await connection.wait_closed()
                        return True
        finally:
            if sender is not None:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
        return False

    async def _send_on(self, connection: Any) -> None:
        """Send waiting messages, from the first that the server has not acknowledged, until the connection is lost."""
        self._outbox.restart()
        was_old = False
        while True:
            self._outbox.more.clear()
            idle = True
            for one in self._outbox.unsent():
                idle, ago_s = False, time.monotonic() - one.posted_s
                if was_old or ago_s > OLD_S:
                    was_old = ago_s > OLD_S
                    await connection.send(json.dumps({"type": "at", "ago_s": ago_s if was_old else 0.0}))
                await connection.send(one.message)
            if idle:
                await self._outbox.more.wait()

    def _take(self, message: dict[str, Any]) -> bool:
        """Handle an event; True if it is the last."""
        type_ = message["type"]
        if type_ in ("text", "turned"):
            given = {"token": -1, "text": "", "effective_horizon": 0, "predicted_steps": 0, "last": False, **message}
            event = Event(**{field.name: given[field.name] for field in fields(Event) if field.name in given})
            beside = {name: given.get(name, 0.0) for name in ("spoken_s", "read_s", "policy_lag_s", "compute_lag_s", "exposure")}
            self._inbox.deliver(Caption(event, **beside), self._session.events)
        elif type_ in ("refused", "failed"):
            raise ServerError(message["message"], message["code"], message.get("field", ""))
        elif type_ == "finished":
            if self._session.events.count < self._inbox.delivered.count:
                raise self._inbox.different()
            with self._outbox.changed:
                self.reason, self._outbox.closed = message["reason"], True
                left = self.buffered
            if left:
                unread = f"the server has ended the session ({self.reason}) without the last {left} bytes: send them with a new client"
                raise ServerError(unread, "over")
            self._inbox.end()
            return True
        return False


def _reason(body: bytes | bytearray | None) -> str:
    try:
        return str(json.loads(body or b"")["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"
