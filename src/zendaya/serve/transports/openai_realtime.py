"""OpenAI's Realtime transcription: `/v1/realtime?intent=transcription`.

Audio is transcribed as it is appended, and text is sent as it is written, before the commit. `delay` sets the dial, in seconds or by
OpenAI's five names, which go along the model's frontier from fast to accurate; `gamma` sets γ. Each committed item is a stream of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from dataclasses import dataclass
from typing import Any

from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket

from zendaya.runtime.frontier import MAX_LAG_S, DialChoice
from zendaya.schedule import PowerLaw
from zendaya.serve import fields
from zendaya.serve.connection import NO_HELLO, WebSocketConnection
from zendaya.serve.fields import DELAYS, FieldError, Message
from zendaya.serve.monitoring import INTERNAL, LOG
from zendaya.serve.server import Feed, Server, StreamFailedError, Transcript, error_body, error_response
from zendaya.serve.transports.base import Transport, cancel

RATES = (24_000, 16_000)
MAX_ITEMS = 8  # items per connection that are transcribed at the same time
ROOM_S = 5.0  # seconds that an append waits for room; with more, pings would go unanswered


@dataclass(eq=False)
class AudioItem:
    """The audio between two commits, with its stream."""

    name: str
    feed: Feed


class RealtimeSession:
    """One connection."""

    def __init__(self, server: Server, connection: WebSocketConnection) -> None:
        self.server, self.connection = server, connection
        self.choice = server.choose("audio")
        self.rate = RATES[0]
        self.open: AudioItem | None = None
        self.last: str | None = None  # the item committed last
        self.writing = dict[AudioItem, asyncio.Task[None]]()
        transcription = {"model": server.served.name, "language": None, "prompt": None, "delay": None, **dial_of(self.choice)}
        sound = {"format": {"type": "audio/pcm", "rate": self.rate}, "noise_reduction": None, "transcription": transcription}
        self.session: Message = {
            "id": f"sess_{secrets.token_hex(12)}", "object": "realtime.transcription_session", "type": "transcription",
            "audio": {"input": {**sound, "turn_detection": None}}, "include": [],
        }  # fmt: skip

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
                LOG.exception(INTERNAL, extra={"event": "bug"})
                await self.send("error", **error_body(INTERNAL, "internal", internal=True))
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
        takers = {"session.update": self.update, "transcription_session.update": self.update}
        takers |= {f"input_audio_buffer.{taker.__name__}": taker for taker in (self.append, self.commit, self.clear)}
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
            names = ("input_audio_format", "input_audio_transcription", "input_audio_noise_reduction")
            sound = {name.removeprefix("input_audio_") if name in names else name: value for name, value in given.items()}
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
        choice = self._transcription(sound, target["transcription"], where)
        if "gamma" in given:
            choice = self.server.choose("audio", schedule=PowerLaw(fields.gamma(given["gamma"], "session.gamma")))
            target["transcription"]["delay"] = None
        if choice is not None:
            target["transcription"].update(dial_of(choice))
        self.session, self.rate = session, target["format"]["rate"]
        if choice is not None and choice != self.choice:
            self.choice, schedule = choice, choice.schedule
            assert not schedule.decides_while_reading  # neither γ nor a frontier names a policy
            if self.open is not None:  # the encoder's block stays until the next item
                self.open.feed.stream.turn(schedule)
        await self.send("transcription_session.updated" if legacy else "session.updated", session=self.session)

    def _transcription(self, sound: Message, target: Message, where: str) -> DialChoice | None:
        """Read the transcription settings into `target`; the dial, if it is among them."""
        given = fields.mapping(sound, "transcription", within=where) if sound.get("transcription") is not None else {}
        within, choice = f"{where}transcription.", None
        if given.get("model") is not None:
            fields.choice(given, "model", (self.server.served.name,), within=within)
        for name in ("language", "prompt"):
            if given.get(name) is not None:
                target[name] = fields.string(given, name, within=within, longest=4096)
        if given.get("delay") is not None:
            choice, target["delay"] = self._delay(given["delay"], f"{within}delay"), given["delay"]
        if given.get("gamma") is not None:
            choice = self.server.choose("audio", schedule=PowerLaw(fields.gamma(given["gamma"], f"{within}gamma")))
            target["delay"] = None
        return choice

    def _delay(self, given: Any, field: str) -> DialChoice:
        """The setting of a delay: a number of seconds, or one of OpenAI's names."""
        if isinstance(given, int | float) and not isinstance(given, bool):
            return self.server.choose("audio", lag_s=fields.number({field: given}, field, 0, MAX_LAG_S), field=field)
        if not isinstance(given, str) or given not in DELAYS:
            raise FieldError(field, f"{field}: expected seconds, or one of {', '.join(DELAYS)}: got {str(given)[:40]!r}")
        return self.server.choose_delay(given)

    async def append(self, event: Message) -> None:
        samples = fields.pcm(event, "audio", longest=self.server.config.max_message)
        if self.open is None:
            if len(self.writing) >= MAX_ITEMS:
                raise FieldError("audio", f"audio: {MAX_ITEMS} items are being transcribed: wait until one is completed", "too_many_items")
            intake = self.server.served.intake("audio", self.rate, self.choice.setting)
            self.open = AudioItem(f"item_{secrets.token_hex(12)}", Feed(self.server, intake, self.choice.setting))
            self.writing[self.open] = asyncio.create_task(self.write(self.open))
        await self.open.feed.send(samples, within_s=ROOM_S)

    async def commit(self, event: Message) -> None:
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
        transcript, kind = Transcript(), "conversation.item.input_audio_transcription"
        try:
            async for event in item.feed.events():
                if piece := transcript.add(event):
                    await self.send(f"{kind}.delta", item_id=item.name, content_index=0, delta=piece)
            usage = {"type": "duration", "seconds": item.feed.stream.source_s}
            await self.send(f"{kind}.completed", item_id=item.name, content_index=0, transcript=transcript.text, usage=usage)
        except ConnectionError as error:
            LOG.info("connection lost", extra={"event": "lost", "reason": str(error)})
            await self.connection.close(1011)
        except Exception as error:
            if self.open is item:
                self.open = None  # the next append begins another item
            failed = error if isinstance(error, StreamFailedError) else StreamFailedError(INTERNAL, internal=True)
            if failed is not error:
                LOG.exception(INTERNAL, extra={"event": "bug"})
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
        for item in self.writing:
            item.feed.close()
        await cancel(*self.writing.values())


def dial_of(choice: DialChoice) -> Message:
    """The dial as a session shows it: γ, and the measured lag of its setting, if it is of the frontier."""
    return {"gamma": choice.schedule.gamma_or_none, "lag_s": None if choice.point is None else choice.point.reported.lag_s}


class RealtimeTransport(Transport):
    """The socket `/v1/realtime`."""

    def routes(self, server: Server) -> list[BaseRoute]:
        self.server = server
        return [WebSocketRoute("/v1/realtime", self.connect)]

    async def connect(self, websocket: WebSocket) -> None:
        problem, server = None, self.server
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
        with server.take_seat():
            try:
                connection = await WebSocketConnection.accept(websocket, server.config.slow_s)
            except ConnectionError:
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
                LOG.info("session ended", extra={"event": "session_end", "session": one.session["id"]})


TRANSPORT = RealtimeTransport
