"""Wyoming, the protocol of Home Assistant's voice, on a port of its own: a line of JSON an event, and what it says follows.

Sound is heard as it comes, and the text goes out as it is decided. The framing is read here, within bounds; the protocol has no keys, so
it is served on this machine alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from typing import Any

import zendaya
from zendaya.schedule import PowerLaw
from zendaya.serve import fields
from zendaya.serve.feed import Feed, Prose, StreamFailedError
from zendaya.serve.fields import FieldError, Message
from zendaya.serve.hub import Wish
from zendaya.serve.server import Seat, Server

LOG = logging.getLogger("zendaya.serve")
MAX_LINE = 2**16
SPARE = 8
"""Connections beyond the sessions there may be: who only asks what is served."""


class Wyoming:
    """The port."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._talks = set[asyncio.Task[None]]()
        self._listening: asyncio.Server | None = None

    async def start(self, listening: socket.socket) -> None:
        """Listen."""
        self._listening = await asyncio.start_server(self._connected, sock=listening, limit=MAX_LINE)

    async def close(self) -> None:
        """Let all go."""
        if self._listening is not None:
            self._listening.close()
        for talk in list(self._talks):
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        talk = _Talk(self.server, reader, writer)
        self.server.enders.add(talk.end)
        try:
            if len(self._talks) > self.server.config.max_sessions + SPARE:
                await talk.send("error", {"text": "too many connections", "code": "full"})
            else:
                await talk.run()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.server.enders.discard(talk.end)
            talk.close()
            self._talks.discard(task)
            writer.close()


class _Talk:
    """One connection: any number of recordings, one after the other."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server, self._reader, self._writer = server, reader, writer
        self._feed: Feed | None = None
        self._seat: Seat | None = None
        self._task: asyncio.Task[None] | None = None
        self._gamma = server.config.gamma

    def end(self) -> None:
        """The source ends here."""
        if self._feed is not None:
            self._feed.stream.end()
        else:
            self._writer.close()

    def close(self) -> None:
        """Let the recording go."""
        if self._task is not None:
            self._task.cancel()
        if self._feed is not None:
            self._feed.close()
        if self._seat is not None:
            self._seat.free()
        self._feed = self._seat = self._task = None

    async def send(self, sort: str, data: dict[str, Any]) -> None:
        """One event; ConnectionError if it is not taken in time."""
        body = json.dumps(data, ensure_ascii=False).encode() if data else b""
        head = {"type": sort, "version": zendaya.__version__, **({"data_length": len(body)} if body else {})}
        self._writer.write(json.dumps(head).encode() + b"\n" + body)
        try:
            await asyncio.wait_for(self._writer.drain(), self.server.config.slow_s)
        except asyncio.TimeoutError:
            self._writer.transport.abort()
            raise ConnectionError("the client does not read") from None

    async def run(self) -> None:
        """Until the client leaves, or sends what cannot be read at all."""
        while True:
            try:
                found = await asyncio.wait_for(self._event(), self.server.config.idle_s)
                if found is None:
                    return
            except asyncio.TimeoutError:
                await self.send("error", {"text": f"nothing came for {self.server.config.idle_s:g} s", "code": "idle"})
                return
            except (FieldError, ValueError) as error:  # ValueError: a line without end
                await self.send("error", {"text": str(error), "code": getattr(error, "code", "bad_line")})
                return
            try:
                await self._take(*found)
            except FieldError as error:
                await self.send("error", {"text": str(error), "code": error.code})

    async def _event(self) -> tuple[str, Message, bytes] | None:
        """An event and what follows its line; None when there will be no more."""
        if not (line := await self._reader.readline()):
            return None
        head = fields.parse(line, "event")
        data = fields.mapping(head, "data") if head.get("data") is not None else {}
        length = fields.whole(head, "data_length", 0, MAX_LINE, 0) if head.get("data_length") is not None else 0
        size = fields.whole(head, "payload_length", 0, self.server.config.max_message, 0) if head.get("payload_length") is not None else 0
        if length:
            data = {**data, **fields.parse(await self._reader.readexactly(length), "data")}
        return fields.string(head, "type"), data, await self._reader.readexactly(size)

    async def _take(self, sort: str, data: Message, payload: bytes) -> None:
        if sort == "describe":
            await self.send("info", describe(self.server))
        elif sort == "ping":
            await self.send("pong", {"text": data.get("text")})
        elif sort == "transcribe":
            self._gamma = fields.gamma(data["gamma"]) if "gamma" in data else self.server.config.gamma
        elif sort == "audio-start":
            await self._begin(data)
        elif sort == "audio-chunk":
            if self._feed is None:
                await self._begin(data)
            assert self._feed is not None
            await self._feed.send(payload)
        elif sort == "audio-stop":
            if self._feed is None or self._task is None:
                raise FieldError("audio-stop", "audio-stop: nothing was begun: send audio-start first", "out_of_order")
            self._feed.stream.end()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self.close()
        # What is not known is passed over, as the protocol has it.

    async def _begin(self, data: Message) -> None:
        """A recording begins."""
        fields.whole(data, "width", 2, 2)
        fields.whole(data, "channels", 1, 1)
        intake = self.server.served.intake("audio", fields.whole(data, "rate", 8000, 48_000))
        self.close()
        self._seat = self.server.take_seat()
        if self._seat is None:
            raise FieldError("audio-start", "audio-start: all sessions are taken: come back in a few seconds", "full")
        self._feed = Feed(self.server, intake, Wish(schedule=PowerLaw(self._gamma)))
        self._task = asyncio.create_task(self._write(self._feed))

    async def _write(self, feed: Feed) -> None:
        """The text as it is decided, then as a whole."""
        prose = Prose()
        try:
            await self.send("transcript-start", {})
            async for moment in feed.moments():
                if piece := prose.add(moment.event):
                    await self.send("transcript-chunk", {"text": piece})
            await self.send("transcript", {"text": prose.text})
            await self.send("transcript-stop", {})
        except StreamFailedError as error:
            await self.send("error", {"text": str(error), "code": "failed"})
        except ConnectionError:
            self._writer.close()
        if self.server.draining:
            self._writer.close()  # there is no other recording to wait for


def describe(server: Server) -> dict[str, Any]:
    """What is served, in Wyoming's words."""
    made_by = {"name": "zendaya", "url": "https://pypi.org/project/zendaya"}
    known = {"attribution": made_by, "installed": True, "version": zendaya.__version__}
    model = {"name": server.served.name, "description": f"{server.served.name}, on the dial", "languages": ["en"], **known}
    program = {"name": "zendaya", "description": "Live captions with a dial for latency", **known, "models": [model]}
    return {"asr": [{**program, "supports_transcript_streaming": True}] if "audio" in server.served.kinds else []}
