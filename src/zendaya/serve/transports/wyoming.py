"""Wyoming, the voice protocol of Home Assistant, on a port of its own: each event is a line of JSON, then its data and payload.

Audio is transcribed while it arrives, and text is sent as it is written. The framing is parsed here, to bound its sizes. The protocol has
no keys, so it is served to this machine only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import zendaya
from zendaya.errors import ConfigError
from zendaya.schedule import PowerLaw
from zendaya.serve import fields
from zendaya.serve.config import ServeConfig, bind, in_url, is_loopback
from zendaya.serve.fields import FieldError, Message
from zendaya.serve.monitoring import INTERNAL, LOG
from zendaya.serve.server import RETRY_S, Feed, NoSeatError, Server, StreamFailedError, Transcript
from zendaya.serve.transports.base import Transport, cancel

MAX_LINE = 2**16
SPARE = 8  # connections beyond the number of sessions, for clients that only ask what is served


class WyomingTransport(Transport):
    """A port of its own, if `wyoming_port` is set."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self._talks = set[asyncio.Task[None]]()
        self._listening: asyncio.Server | None = None
        if config.wyoming_port is not None and (config.key is not None or not is_loopback(config.host)):
            raise ConfigError("Wyoming has no keys: give --wyoming-port to a server on 127.0.0.1 without --api-key-file, and tunnel to it")
        self.socket = None if config.wyoming_port is None else bind(config.host, config.wyoming_port, "--wyoming-port")

    @property
    def address(self) -> str:
        return "" if self.socket is None else f"Wyoming at tcp://{in_url(self.config.host)}:{self.socket.getsockname()[1]}"

    async def start(self, server: Server) -> None:
        self.server = server
        if self.socket is not None:
            self._listening = await asyncio.start_server(self._connected, sock=self.socket, limit=MAX_LINE)

    async def stop(self) -> None:
        if self._listening is not None:
            self._listening.close()
        await cancel(*self._talks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        talk = _WyomingConnection(self.server, reader, writer)
        self.server.enders.add(talk.end)
        try:
            if len(self._talks) > self.server.config.max_sessions + SPARE:
                await talk.send("error", {"text": "too many connections", "code": "full"})
            else:
                await talk.run()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except Exception:
            LOG.exception(INTERNAL, extra={"event": "bug"})
            with contextlib.suppress(ConnectionError):
                await talk.send("error", {"text": INTERNAL, "code": "internal"})
        finally:
            self.server.enders.discard(talk.end)
            talk.close()
            self._talks.discard(task)
            writer.close()


class _WyomingConnection:
    """One connection: any number of recordings, one after the other."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server, self._reader, self._writer = server, reader, writer
        self._feed: Feed | None = None
        self._task: asyncio.Task[None] | None = None
        self._gamma: float | None = None

    def end(self) -> None:
        """End the source, or the connection if it has none."""
        if self._feed is not None:
            self._feed.stream.end()
        else:
            self._writer.close()

    def close(self) -> None:
        """Drop the recording."""
        if self._task is not None:
            self._task.cancel()
        if self._feed is not None:
            self._feed.close()
        self._feed = self._task = None

    async def send(self, type_: str, data: dict[str, Any]) -> None:
        """Send one event; ConnectionError if the client does not read it in time."""
        body = json.dumps(data, ensure_ascii=False).encode() if data else b""
        head = {"type": type_, "version": zendaya.__version__, **({"data_length": len(body)} if body else {})}
        self._writer.write(json.dumps(head).encode() + b"\n" + body)
        try:
            await asyncio.wait_for(self._writer.drain(), self.server.config.slow_s)
        except asyncio.TimeoutError:
            self._writer.transport.abort()
            raise ConnectionError("the client does not read") from None

    async def run(self) -> None:
        """Serve the client until it leaves or sends a malformed event."""
        while True:
            try:
                found = await asyncio.wait_for(self._event(), self.server.config.idle_s)
            except asyncio.TimeoutError:
                await self.send("error", {"text": f"no event for {self.server.config.idle_s:g} s", "code": "idle"})
                return
            except ValueError as error:  # a FieldError, or a line too long
                await self.send("error", {"text": str(error), "code": getattr(error, "code", "bad_line")})
                return
            if found is None:
                return
            try:
                await self._take(*found)
            except FieldError as error:
                await self.send("error", {"text": str(error), "code": error.code})

    async def _event(self) -> tuple[str, Message, bytes] | None:
        """Read an event with its data and payload; None once the connection is closed."""
        if not (line := await self._reader.readline()):
            return None
        head = fields.parse(line, "event")
        data = fields.mapping(head, "data") if head.get("data") is not None else {}
        limits = {"data_length": MAX_LINE, "payload_length": self.server.config.max_message}
        length, size = (fields.integer(head, name, 0, most) if head.get(name) is not None else 0 for name, most in limits.items())
        if length:
            data = {**data, **fields.parse(await self._reader.readexactly(length), "data")}
        return fields.string(head, "type"), data, await self._reader.readexactly(size)

    async def _take(self, type_: str, data: Message, payload: bytes) -> None:
        if type_ == "describe":
            await self.send("info", describe(self.server))
        elif type_ == "ping":
            await self.send("pong", {"text": data.get("text")})
        elif type_ == "transcribe":
            self._gamma = fields.gamma(data["gamma"]) if "gamma" in data else None
        elif type_ == "audio-start":
            await self._begin(data)
        elif type_ == "audio-chunk":
            if self._feed is None:
                await self._begin(data)
            assert self._feed is not None
            await self._feed.send(payload)
        elif type_ == "audio-stop":
            if self._feed is None or self._task is None:
                raise FieldError("audio-stop", "audio-stop: no recording has begun: send audio-start first", "out_of_order")
            self._feed.stream.end()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self.close()
        # Unknown events are ignored, as the protocol asks.

    async def _begin(self, data: Message) -> None:
        fields.integer(data, "width", 2, 2)
        fields.integer(data, "channels", 1, 1)
        setting = self.server.choose("audio", schedule=None if self._gamma is None else PowerLaw(self._gamma)).setting
        intake = self.server.served.intake("audio", fields.integer(data, "rate", 8000, 48_000), setting)
        self.close()
        try:
            self._feed = Feed(self.server, intake, setting, seat=self.server.take_seat())
        except NoSeatError as error:
            raise FieldError("audio-start", f"audio-start: {error}: retry in {RETRY_S} s", "full") from None
        self._task = asyncio.create_task(self._write(self._feed))

    async def _write(self, feed: Feed) -> None:
        """Send the text as it is written, then as a whole."""
        transcript = Transcript()
        try:
            await self.send("transcript-start", {})
            async for event in feed.events():
                if piece := transcript.add(event):
                    await self.send("transcript-chunk", {"text": piece})
            await self.send("transcript", {"text": transcript.text})
            await self.send("transcript-stop", {})
        except StreamFailedError as error:
            await self.send("error", {"text": str(error), "code": "failed"})
        except ConnectionError:
            self._writer.close()
        except Exception:
            LOG.exception(INTERNAL, extra={"event": "bug"})
            await self.send("error", {"text": INTERNAL, "code": "internal"})
        if self.server.draining:
            self._writer.close()  # no further recording is accepted


def describe(server: Server) -> dict[str, Any]:
    """What is served, as a Wyoming `info` event."""
    made_by = {"name": "zendaya", "url": "https://pypi.org/project/zendaya"}
    known = {"attribution": made_by, "installed": True, "version": zendaya.__version__}
    model = {"name": server.served.name, "description": f"{server.served.name}, with a latency dial", "languages": ["en"], **known}
    program = {"name": "zendaya", "description": "Live captions with a dial for latency", **known, "models": [model]}
    return {"asr": [{**program, "supports_transcript_streaming": True}] if "audio" in server.served.kinds else []}


TRANSPORT = WyomingTransport
