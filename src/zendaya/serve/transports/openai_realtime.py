"""OpenAI's Realtime transcription: `/v1/realtime?intent=transcription`.

Audio is transcribed as it is appended, and text is sent as it is written, before the commit. `delay` sets γ by OpenAI's five settings;
`gamma` sets it directly, at any time. Each committed item is a stream of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import secrets
from typing import Any

from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket

from zendaya.runtime.options import DecodeOptions
from zendaya.schedule import PowerLaw
from zendaya.serve import fields
from zendaya.serve.connection import NO_HELLO, WebSocketConnection
from zendaya.serve.feed import Feed, Prose, StreamFailedError
from zendaya.serve.fields import FieldError, Message
from zendaya.serve.responses import error_body, error_response
from zendaya.serve.server import Server
from zendaya.serve.transports._openai import DELAYS
from zendaya.serve.transports.base import Transport

LOG = logging.getLogger("zendaya.serve")
RATES = (24_000, 16_000)
MAX_ITEMS = 8
"""Items per connection that are transcribed at the same time."""
ROOM_S = 5.0
"""Seconds that an append waits for room; with more, pings would go unanswered."""


class AudioItem:
    """The audio between two commits, with its stream."""

    def __init__(self, feed: Feed) -> None:
        self.name = f"item_{secrets.token_hex(12)}"
        self.feed = feed


class RealtimeSession:
    """One connection."""

    def __init__(self, server: Server, connection: WebSocketConnection) -> None:
        self.server, self.connection = server, connection
        self.gamma = server.config.gamma
        self.rate = RATES[0]
        self.open: AudioItem | None = None
        self.last: str | None = None
        """The item committed last."""
        self.writing = dict[AudioItem, asyncio.Task[None]]()
        self.session: Message = {
            "id": f"sess_{secrets.token_hex(12)}",
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": self.rate},
                    "noise_reduction": None,
                    "transcription": {"model": server.served.name, "language": None, "prompt": None, "delay": None, "gamma": self.gamma},
                    "turn_detection": None,
                }
            },
            "include": [],
        }

    async def send(self, type_: str, **what: Any) -> None:
        await self.connection.send({"type": type_, "event_id": f"event_{secrets.token_hex(12)}", **what})

    async def run(self) -> None:
        """Serve the client until it leaves, or the server shuts down and all text is written."""
        await self.send("session.created", session=self.session)
        while (text := await self._next()) is not None:
            event: Message = {}
            try:
                if isinstance(text, bytes):
                    raise FieldError("event", "event: expected JSON in a text message: got a binary message", "bad_json")
                event = fields.parse(text, "event")
                await self.take(event)
            except FieldError as error:
                given = event.get("event_id")
                await self._send_error(error, given[:512] if isinstance(given, str) else None)
            except ConnectionError:
                raise
            except Exception:
                LOG.exception("internal server error", extra={"event": "bug"})
                await self.send("error", **error_body("internal server error", "internal", internal=True))
                await self.connection.close(1011, "internal")
                return

    async def _send_error(self, error: FieldError, event_id: str | None = None) -> None:
        body = error_body(str(error), error.code, field=error.field)["error"]
        await self.send("error", error={**body, "event_id": event_id})

    async def _next(self) -> str | bytes | None:
        """The client's next message; the connection of an idle client is closed."""
        idle_s = self.server.config.idle_s
        try:
            return await asyncio.wait_for(self.connection.receive(), idle_s)
        except asyncio.TimeoutError:
            await self._send_error(FieldError("event", f"event: none for {idle_s:g} s", "idle"))
            await self.connection.close(NO_HELLO, "idle")
            return None

    async def take(self, event: Message) -> None:
        """Handle one event of the client."""
        takers = {
            "session.update": self.update,
            "transcription_session.update": self.update,
            "input_audio_buffer.append": self.append,
            "input_audio_buffer.commit": self.commit,
            "input_audio_buffer.clear": self.clear,
        }
        await takers[fields.choice(event, "type", tuple(takers))](event)

    async def update(self, event: Message) -> None:
        """Change the given settings, or none of them if one is malformed."""
        given, within = fields.mapping(event, "session"), "session."
        legacy = event["type"] == "transcription_session.update"
        if not legacy and "type" in given:
            fields.choice(given, "type", ("transcription",), within=within)
        session = copy.deepcopy(self.session)
        target = session["audio"]["input"]
        if legacy:
            names = {
                "input_audio_format": "format",
                "input_audio_transcription": "transcription",
                "input_audio_noise_reduction": "noise_reduction",
            }
            sound = {names.get(name, name): value for name, value in given.items()}
            where = within + "input_audio_"
            if "format" in sound:
                fields.choice(sound, "format", ("pcm16",), within=where)
                sound["format"] = {"type": "audio/pcm", "rate": 24_000}
        else:
            audio = fields.mapping(given, "audio", within=within)
            sound, where = fields.mapping(audio, "input", within=within + "audio."), within + "audio.input."
        if sound.get("format") is not None:
            form = fields.mapping(sound, "format", within=where)
            fields.choice(form, "type", ("audio/pcm",), "audio/pcm", within=where + "format.")
            if form.get("rate", RATES[0]) not in RATES:
                raise FieldError(f"{where}format.rate", f"{where}format.rate: expected 24000 or 16000: got {str(form['rate'])[:20]}")
            target["format"]["rate"] = form.get("rate", RATES[0])
            if self.open is not None and target["format"]["rate"] != self.rate:
                raise FieldError(f"{where}format.rate", f"{where}format.rate: commit or clear the appended audio first")
        if sound.get("turn_detection") is not None:
            raise FieldError(f"{where}turn_detection", f"{where}turn_detection: expected null: the client commits its turns")
        gamma = self._transcription(sound, target["transcription"], where)
        if "gamma" in given:
            gamma, target["transcription"]["delay"] = fields.gamma(given["gamma"], "session.gamma"), None
        if gamma is not None:
            target["transcription"]["gamma"] = gamma
        if "include" in given and isinstance(given["include"], list):
            session["include"] = []  # none of OpenAI's inclusions is supported
        self.session, self.rate = session, target["format"]["rate"]
        if gamma is not None and gamma != self.gamma:
            self.gamma = gamma
            if self.open is not None:
                self.open.feed.stream.turn(PowerLaw(gamma))
        await self.send("transcription_session.updated" if legacy else "session.updated", session=self.session)

    def _transcription(self, sound: Message, target: Message, where: str) -> float | None:
        """Read the transcription settings into `target`; γ, if it is among them."""
        given = fields.mapping(sound, "transcription", within=where) if sound.get("transcription") is not None else {}
        within, gamma = f"{where}transcription.", None
        if given.get("model") is not None:
            fields.choice(given, "model", (self.server.served.name,), within=within)
        for name in ("language", "prompt"):
            if given.get(name) is not None:
                target[name] = fields.string(given, name, within=within, longest=4096)
        if given.get("delay") is not None:
            target["delay"] = fields.choice(given, "delay", tuple(DELAYS), within=within)
            gamma = DELAYS[target["delay"]]
        if given.get("gamma") is not None:
            gamma, target["delay"] = fields.gamma(given["gamma"], f"{within}gamma"), None
        return gamma

    async def append(self, event: Message) -> None:
        """Append audio."""
        samples = fields.pcm(event, "audio", longest=self.server.config.max_message)
        if self.open is None:
            if len(self.writing) >= MAX_ITEMS:
                raise FieldError("audio", f"audio: {MAX_ITEMS} items are being transcribed: wait until one is completed", "too_many_items")
            intake = self.server.served.intake("audio", self.rate)
            self.open = AudioItem(Feed(self.server, intake, DecodeOptions(schedule=PowerLaw(self.gamma), voice=self.server.config.voice)))
            self.writing[self.open] = asyncio.create_task(self.write(self.open))
        await self.open.feed.send(samples, within_s=ROOM_S)

    async def commit(self, event: Message) -> None:
        """End the item."""
        item, self.open = self.open, None
        if item is None:
            raise FieldError("audio", "audio: expected audio since the last commit: got none", "input_audio_buffer_commit_empty")
        await self.send("input_audio_buffer.committed", item_id=item.name, previous_item_id=self.last)
        self.last = item.name
        item.feed.stream.end()

    async def clear(self, event: Message) -> None:
        """Drop the audio since the last commit."""
        item, self.open = self.open, None
        if item is not None:
            item.feed.close()
            if (writing := self.writing.pop(item, None)) is not None:
                writing.cancel()
        await self.send("input_audio_buffer.cleared")

    async def write(self, item: AudioItem) -> None:
        """Send the text of an item; whatever fails ends this item alone."""
        prose, kind = Prose(), "conversation.item.input_audio_transcription"
        try:
            async for event in item.feed.events():
                if piece := prose.add(event):
                    await self.send(f"{kind}.delta", item_id=item.name, content_index=0, delta=piece)
            usage = {"type": "duration", "seconds": item.feed.stream.source_s}
            await self.send(f"{kind}.completed", item_id=item.name, content_index=0, transcript=prose.text, usage=usage)
        except ConnectionError as error:
            LOG.info("connection lost", extra={"event": "lost", "reason": str(error)})
            await self.connection.close(1011)
        except Exception as error:
            if self.open is item:
                self.open = None  # the next append begins another item
            failed = error if isinstance(error, StreamFailedError) else StreamFailedError("internal server error", internal=True)
            if failed is not error:
                LOG.exception("internal server error", extra={"event": "bug"})
            with contextlib.suppress(ConnectionError):
                body = error_body(str(failed), "transcription_failed", internal=failed.internal)
                await self.send(f"{kind}.failed", item_id=item.name, content_index=0, **body)
        finally:
            item.feed.close()
            self.writing.pop(item, None)

    def finish(self) -> None:
        """Write out the audio so far and close the connection: the server shuts down."""

        async def finishing() -> None:
            with contextlib.suppress(FieldError, ConnectionError):
                await self.commit({})
            await asyncio.gather(*self.writing.values(), return_exceptions=True)
            await self.connection.close(1012, "shutting down")

        self._finishing = asyncio.get_running_loop().create_task(finishing())

    async def close(self) -> None:
        """Drop all items: the client has gone."""
        for item, task in list(self.writing.items()):
            item.feed.close()
            task.cancel()
        await asyncio.gather(*self.writing.values(), return_exceptions=True)


class RealtimeTransport(Transport):
    """The socket `/v1/realtime`."""

    def routes(self, server: Server) -> list[BaseRoute]:
        """The socket."""

        async def realtime(websocket: WebSocket) -> None:
            await connect(server, websocket)

        return [WebSocketRoute("/v1/realtime", realtime)]


TRANSPORT = RealtimeTransport


async def connect(server: Server, websocket: WebSocket) -> None:
    """Serve one connection."""
    problem = None
    if websocket.query_params.get("intent", "transcription") != "transcription":
        problem = 400, "intent", "intent: expected transcription, the only one served"
    elif websocket.query_params.get("model", server.served.name) != server.served.name:
        problem = 404, "model", f"model: expected {server.served.name}"
    elif "audio" not in server.served.kinds:
        problem = 404, "model", f"model: {server.served.name} does not take audio"
    if problem is not None:
        status, field, message = problem
        await websocket.send_denial_response(error_response(status, message, "bad_field", field=field))
        return
    seat = server.take_seat()
    try:
        connection = await WebSocketConnection.accept(websocket, server.config.slow_s)
    except ConnectionError:
        seat.free()
        return
    one = RealtimeSession(server, connection)
    server.enders.add(one.finish)
    LOG.info("session opened", extra={"event": "session_open", "session": one.session["id"], "source": "realtime"})
    try:
        await one.run()
    except ConnectionError as error:
        LOG.info("connection lost", extra={"event": "lost", "reason": str(error)})
    finally:
        server.enders.discard(one.finish)
        await one.close()
        seat.free()
        LOG.info("session ended", extra={"event": "session_end", "session": one.session["id"]})
