"""A client of `/v1/stream`: send a source, take what is written; cut off, it connects again and goes on where it was.

A server that is killed takes its sessions with it. So the client keeps what it has sent: it opens another session, sends all of it
again, and passes over what it was told before. What is written depends on what was sent alone, so that is the same, and is compared.
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
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal
from urllib.parse import urlencode

import numpy as np

from zendaya.errors import ConfigError, MissingExtraError, SourceError, ZendayaError
from zendaya.records import Event

HEAD = struct.Struct("<Q")
ACK_EVERY = 32
"""Events after which the server is told that they have come."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
"""Before connecting again: doubled each time, up to the longest."""
REFUSED = {4400, 4403, 4404, 4409, 4410, 4413}
"""Closed so, the session cannot be gone on with."""
KEEP = 256 * 2**20
"""Bytes of source that are kept to be sent again: more than two hours of sound."""
BATCH = 64
"""Messages that are looked at together on their way out."""
OLD_S = 0.25
"""Sent again later than this, a message is said to be old."""


class _LostError(Exception):
    """The server has the session no longer."""


class ServerError(ZendayaError):
    """The server refused something, or is gone for good; `code` is its word for it."""

    def __init__(self, message: str, code: str = "", field: str = "") -> None:
        super().__init__(message)
        self.code, self.field = code, field


@dataclass(frozen=True)
class Caption:
    """An event of the session, and what the server says beside it: see `zendaya.Event`, and `docs/protocol.md` for the rest."""

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
    """A message, and when it was first sent."""

    number: int
    message: str | bytes
    posted_s: float

    @property
    def size(self) -> int:
        """Bytes of source."""
        return len(self.message) - HEAD.size if isinstance(self.message, bytes) else 0


class _Told:
    """What a session has written: how much, and its digest. Times are left out: they depend on the clock."""

    def __init__(self) -> None:
        self.count, self.digest = 0, hashlib.sha256()

    def add(self, event: Event) -> None:
        """One more event."""
        self.count += 1
        what = (event.window, event.step, event.token, event.text, event.horizon, event.effective_horizon, event.last, event.schedule)
        self.digest.update(repr(what).encode())


class Client:
    """One session on a server. Use it as a context: leaving it lets the session go.

        with zendaya.Client("ws://127.0.0.1:8765", gamma=0.5) as client:
            for samples in sound:  # float samples or s16le bytes at 16 kHz, as they come
                client.send(samples)
                for caption in client.captions():  # what has come by now
                    print(caption.text, end="")
            for caption in client.finish():
                print(caption.text, end="")

    A connection that is lost is made again for up to `patience_s`; what was sent meanwhile is kept and sent then. A session that the
    server has lost is made again from all that was sent, as long as that is at most `keep` bytes. `num_resumes`, `num_rebuilds` and
    `buffered` tell how often that was, and how many bytes wait for the server.
    """

    def __init__(
        self, url: str = "ws://127.0.0.1:8765", *, key: str | None = None, source: Literal["audio", "features", "frames"] = "audio",
        gamma: float | None = None, policy: str | None = None, patience_s: float = 60.0, keep: int = KEEP, **options: Any,
    ) -> None:  # fmt: skip
        try:
            import websockets  # noqa: F401
        except ModuleNotFoundError:
            raise MissingExtraError("websockets", "serve", "a client") from None
        if not url.startswith(("ws://", "wss://")):
            raise ConfigError(f"a server's address begins with ws:// or wss://: got {url!r}")
        self.url, self.source, self.patience_s = url.rstrip("/"), source, patience_s
        self.num_resumes = self.num_rebuilds = 0
        self.opened: dict[str, Any] = {}
        """What the server said when it opened the session: its model, window and schedule."""
        self._key = key
        self.reason = ""
        """Why the server has ended the session, once it has: `end`, `idle`, `draining` or `too_long`."""
        self._wish = {"type": "open", "source": source, **options}
        self._wish |= {name: value for name, value in (("gamma", gamma), ("policy", policy)) if value is not None}
        self._number = 0
        self._waiting = deque[_Sent]()
        """Messages that the server has not acknowledged."""
        self.buffered = 0
        self._kept: list[_Sent] | None = []
        """All messages; None once they are too many."""
        self._keep = keep
        self._kept_bytes = self._sent = self._in_flight = 0
        self._told = _Told()
        self._begin()
        self._arrived = queue.SimpleQueue[Caption | ZendayaError | None]()
        self._over = False
        self._error: ZendayaError | None = None
        self._room = threading.Condition()
        self._limit = 2**62
        self._more = asyncio.Event()
        self._greeted = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="zendaya-client", daemon=True)
        self._thread.start()
        self._greeted.wait()
        if self._error is not None:
            self.close()
            raise self._error

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, source: Any) -> None:
        """More of the source: samples or rows (arrays), or their bytes, or an encoded picture; waits while the server is behind."""
        payload = bytes(source) if isinstance(source, bytes | bytearray | memoryview) else self._payload(np.asarray(source))
        unit = {"audio": 2, "features": 4 * int(self.opened["dim"]), "frames": max(1, len(payload))}[self.source]
        most = int(self.opened["max_message"]) - HEAD.size
        if unit > most:
            raise SourceError(f"a picture or row of {unit} bytes: the server takes {most} at a time; make it smaller")
        for first in range(0, len(payload), most // unit * unit):
            self._post(payload[first : first + most // unit * unit])

    def turn(self, gamma: float | str) -> None:
        """Turn the dial: a γ, or the name of a schedule (`wait-k=10`)."""
        self._post({"type": "turn", **({"policy": gamma} if isinstance(gamma, str) else {"gamma": gamma})})

    def flush(self) -> None:
        """Write out what has been sent; what follows begins a new window."""
        self._post({"type": "flush"})

    def captions(self) -> Iterator[Caption]:
        """What has come by now."""
        while not self._arrived.empty():
            if (caption := self._next()) is None:
                return
            yield caption

    def finish(self) -> Iterator[Caption]:
        """The source ends here; all that is still to be written, as it comes."""
        self._post({"type": "end"})
        while (caption := self._next()) is not None:
            yield caption

    def close(self) -> None:
        """Let the session go, wherever it is."""
        if self._thread.is_alive():
            self._over = True
            with self._room:
                self._room.notify_all()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop)
            self._thread.join()

    def _begin(self) -> None:
        """A session of its own name, of which nothing has come."""
        self._name, self._token = secrets.token_hex(16), secrets.token_urlsafe(24)
        self._is_open = False
        self._received = self._acknowledged = 0
        self._again = _Told()
        """What this session has told; less than what was told in all while it catches up."""

    def _payload(self, values: Any) -> bytes:
        if self.source == "features":
            return values.astype("<f4").tobytes()
        if values.dtype.kind == "f":
            values = np.clip(np.rint(values * 32768.0), -32768, 32767)
        return values.astype("<i2").tobytes()

    def _next(self) -> Caption | None:
        found = self._arrived.get()
        if isinstance(found, ZendayaError):
            self._arrived.put(found)  # whoever asks again is told again
            raise found
        if found is None:
            self._arrived.put(None)
        return found

    def _post(self, message: dict[str, Any] | bytes) -> None:
        """Number a message and hand it to the thread."""
        size = len(message) if isinstance(message, bytes) else 0
        with self._room:
            self._room.wait_for(lambda: self._over or self.buffered + size <= self._limit or not self.buffered)
            if self._over:
                raise self._error or ServerError(f"the session is over ({self.reason or 'closed'}): open a new client", "over")
            self._number += 1
            numbered = HEAD.pack(self._number) + message if isinstance(message, bytes) else json.dumps({**message, "seq": self._number})
            self.buffered += size
            self._waiting.append(sent := _Sent(self._number, numbered, time.monotonic()))
            self._kept_bytes += size
            if self._kept is not None:
                self._kept.append(sent)
                if self._kept_bytes > self._keep:
                    self._kept = None
        with contextlib.suppress(RuntimeError):  # it has ended meanwhile, and whoever asks for captions is told why
            self._loop.call_soon_threadsafe(self._more.set)

    # In the thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._task = self._loop.create_task(self._keep_connected())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except ZendayaError as error:
            self._error = error
            self._arrived.put(error)
        finally:
            self._over = True
            with self._room:
                self._room.notify_all()
            self._greeted.set()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _stop(self) -> None:
        self._task.cancel()

    async def _keep_connected(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
        from websockets.typing import Subprotocol

        wait_s, lost_s = FIRST_WAIT_S, time.monotonic()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key is not None else {}
        while True:
            num_opened = self.num_resumes + self.num_rebuilds
            address = f"{self.url}/v1/stream?{urlencode({'session': self._name})}"
            try:
                async with connect(
                    address, additional_headers=headers, subprotocols=[Subprotocol("zendaya")], compression=None, max_size=None,
                    proxy=None, close_timeout=2, open_timeout=self.patience_s,
                ) as connection:  # fmt: skip
                    try:
                        if await self._talk(connection):
                            return
                    except (asyncio.CancelledError, ServerError, _LostError):
                        await connection.close()  # with a word: the server need not keep the session
                        raise
                problem = "it was cut off"
            except _LostError:
                problem = "the server has lost the session"
                if self._is_open:
                    self._rebuild()
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
                    raise ServerError(f"{self.url}: nobody answers there: {problem}", "unreachable") from None
            if self.num_resumes + self.num_rebuilds > num_opened:
                wait_s, lost_s = FIRST_WAIT_S, time.monotonic()
            if time.monotonic() - lost_s > self.patience_s:
                raise ServerError(f"{self.url}: not reached for {self.patience_s:g} s: {problem}", "unreachable")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _talk(self, connection: Any) -> bool:
        """One connection, until it is cut (False) or all has been said."""
        known = {"session": self._name, "token": self._token}
        hello = {"type": "resume", **known, "received": self._received} if self._is_open else {**self._wish, **known}
        await connection.send(json.dumps(hello))
        sender: asyncio.Task[None] | None = None
        try:
            async for text in connection:
                message = json.loads(text)
                sort = message["type"]
                if sort == "opened":
                    self._was_opened(message)
                    self._forget(message["received"])
                    sender = asyncio.create_task(self._send_on(connection))
                    self._greeted.set()
                elif sort == "ack":
                    self._forget(message["received"])
                elif sort == "error" and message["code"] == "unknown_session":
                    raise _LostError
                elif sort == "error":
                    raise ServerError(message["message"], message["code"], message["field"])
                elif message.get("seq") == self._received + 1:
                    self._received += 1
                    last = self._take(message)
                    if last or self._received - self._acknowledged >= ACK_EVERY:
                        self._acknowledged = self._received
                        await connection.send(json.dumps({"type": "ack", "received": self._received}))
                    if last:
                        await connection.wait_closed()
                        return True
        finally:
            if sender is not None:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
        return False

    async def _send_on(self, connection: Any) -> None:
        """All that waits, from the first that was not acknowledged, and what comes then."""
        from websockets.exceptions import ConnectionClosed

        self._sent = self._in_flight = 0
        was_old = False
        with contextlib.suppress(ConnectionClosed):
            while True:
                self._more.clear()
                with self._room:
                    skip = max(0, self._sent + 1 - self._waiting[0].number) if self._waiting else 0
                    ahead = list(itertools.islice(self._waiting, skip, skip + BATCH))
                before = self._sent
                for one in ahead:
                    if self._in_flight and self._in_flight + one.size > self._limit:
                        break
                    ago_s = time.monotonic() - one.posted_s
                    if was_old or ago_s > OLD_S:
                        was_old = ago_s > OLD_S
                        await connection.send(json.dumps({"type": "at", "ago_s": ago_s if was_old else 0.0}))
                    self._sent, self._in_flight = one.number, self._in_flight + one.size
                    await connection.send(one.message)
                if self._sent == before:
                    await self._more.wait()

    def _rebuild(self) -> None:
        """Another session, which is sent all that was sent."""
        with self._room:
            if self._kept is None:
                raise ServerError(
                    f"{self.url}: the server has lost the session, and more than {self._keep} bytes were sent: too many to send again; "
                    f"let keep be larger, or open a new client",
                    "lost",
                )
            self._waiting = deque(self._kept)
            self.buffered = self._kept_bytes
        self._begin()

    def _was_opened(self, message: dict[str, Any]) -> None:
        self.num_resumes += self._is_open
        self.num_rebuilds += not self._is_open and bool(self.opened)
        self._is_open = True
        self.opened, self._limit = message, int(message["max_unread"])

    def _forget(self, received: int) -> None:
        """The server has the messages up to one."""
        with self._room:
            while self._waiting and self._waiting[0].number <= received:
                one = self._waiting.popleft()
                self.buffered -= one.size
                self._in_flight -= one.size if one.number <= self._sent else 0
            self._room.notify_all()
        self._more.set()

    def _take(self, message: dict[str, Any]) -> bool:
        """An event; True if it is the last."""
        sort = message["type"]
        if sort in ("text", "turned"):
            given = {"token": -1, "text": "", "effective_horizon": 0, "predicted_steps": 0, "last": False, **message}
            event = Event(**{field.name: given[field.name] for field in fields(Event) if field.name in given})
            beside = {name: given.get(name, 0.0) for name in ("spoken_s", "read_s", "policy_lag_s", "compute_lag_s", "exposure")}
            self._tell(Caption(event, **beside))
        elif sort == "refused":
            raise ServerError(message["message"], message["code"], message["field"])
        elif sort == "failed":
            raise ServerError(message["message"], message["code"])
        elif sort == "finished":
            if self._again.count < self._told.count:
                raise _different(self.url)
            with self._room:
                self.reason, self._over = message["reason"], True
                left = self.buffered
            if left:
                said = f"the server has ended the session ({self.reason}) without the last {left} bytes: send them with a new client"
                raise ServerError(said, "over")
            self._arrived.put(None)
            return True
        return False

    def _tell(self, caption: Caption) -> None:
        """Hand a caption on; of a session that was made again, what is new, once the rest has been the same."""
        new = self._again.count == self._told.count
        self._again.add(caption.event)
        if new:
            self._told.add(caption.event)
            self._arrived.put(caption)
        elif self._again.count == self._told.count and self._again.digest.digest() != self._told.digest.digest():
            raise _different(self.url)


def _different(url: str) -> ServerError:
    return ServerError(
        f"{url}: the server has lost the session, and writes another text from the same source: open a new client "
        f"(another model is served, or patience_s makes the text depend on the time)",
        "different",
    )


def _reason(body: bytes | bytearray | None) -> str:
    try:
        return str(json.loads(body or b"")["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"
