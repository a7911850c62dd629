"""OpenAI's Realtime transcription, as its clients speak it: `/v1/realtime?intent=transcription`.

Sound is heard as it is appended, and text comes as it is decided, not only once it is committed. `delay` is the dial in five words;
`gamma` is the dial itself, at any time. Each committed item is a stream of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import secrets
from typing import Any

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket

from zendaya.schedule import PowerLaw
from zendaya.serve import fields
from zendaya.serve.feed import Feed, Prose, StreamFailedError
from zendaya.serve.fields import FieldError, Message
from zendaya.serve.hub import Wish
from zendaya.serve.line import Line
from zendaya.serve.native import NO_HELLO, refusal
from zendaya.serve.server import Server

LOG = logging.getLogger("zendaya.serve")
DELAYS = {"minimal": 1.0, "low": 0.7, "medium": 0.5, "high": 0.3, "xhigh": 0.1}
"""γ by OpenAI's words for how long to wait; on the shipped model a word comes after 1.9, 2.4, 3.1, 4.0 and 5.0 s."""
RATES = (24_000, 16_000)
MAX_ITEMS = 8
"""Items of a connection that are written at the same time."""
ROOM_S = 5.0
"""So long an append waits for room; longer, and pings would go unanswered."""


class Item:
    """A piece of sound between two commits, being written."""

    def __init__(self, feed: Feed) -> None:
        self.name = f"item_{secrets.token_hex(12)}"
        self.feed = feed


class Realtime:
    """One connection."""

    def __init__(self, server: Server, line: Line) -> None:
        self.server, self.line = server, line
        self.gamma = server.config.gamma
        self.rate = RATES[0]
        self.open: Item | None = None
        self.last: str | None = None
        """The item committed last."""
        self.writing = dict[Item, asyncio.Task[None]]()
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

    async def send(self, sort: str, **what: Any) -> None:
        await self.line.send({"type": sort, "event_id": f"event_{secrets.token_hex(12)}", **what})

    async def run(self) -> None:
        """Until the client leaves, or the server does and all is written."""
        await self.send("session.created", session=self.session)
        while (text := await self._next()) is not None:
            event: Message = {}
            try:
                if isinstance(text, bytes):
                    raise FieldError("event", "event: expected JSON in a text message: got a binary one", "bad_json")
                event = fields.parse(text, "event")
                await self.take(event)
            except FieldError as error:
                given = event.get("event_id")
                problem = {
                    "type": "invalid_request_error", "code": error.code, "message": str(error), "param": error.field,
                    "event_id": given[:512] if isinstance(given, str) else None,
                }  # fmt: skip
                await self.send("error", error=problem)

    async def _next(self) -> str | bytes | None:
        """The client's next message; who sends none for too long is told so, and the connection closed."""
        idle_s = self.server.config.idle_s
        try:
            return await asyncio.wait_for(self.line.receive(), idle_s)
        except asyncio.TimeoutError:
            problem = {
                "type": "invalid_request_error", "code": "idle", "message": f"event: none came for {idle_s:g} s", "param": "event",
                "event_id": None,
            }  # fmt: skip
            await self.send("error", error=problem)
            await self.line.close(NO_HELLO, "idle")
            return None

    async def take(self, event: Message) -> None:
        """One event of the client."""
        takers = {
            "session.update": self.update,
            "transcription_session.update": self.update,
            "input_audio_buffer.append": self.append,
            "input_audio_buffer.commit": self.commit,
            "input_audio_buffer.clear": self.clear,
        }
        await takers[fields.choice(event, "type", tuple(takers))](event)

    async def update(self, event: Message) -> None:
        """Change what is given and leave the rest; all of it, or, where something cannot be, nothing."""
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
                raise FieldError(f"{where}format.rate", f"{where}format.rate: {self.rate} until what was appended is committed or cleared")
        if sound.get("turn_detection") is not None:
            raise FieldError(f"{where}turn_detection", f"{where}turn_detection: expected null: turns are yours to commit")
        gamma = self._transcription(sound, target["transcription"], where)
        if "gamma" in given:
            gamma, target["transcription"]["delay"] = fields.gamma(given["gamma"], "session.gamma"), None
        if gamma is not None:
            target["transcription"]["gamma"] = gamma
        if "include" in given and isinstance(given["include"], list):
            session["include"] = []  # nothing of what could be included is known here
        self.session, self.rate = session, target["format"]["rate"]
        if gamma is not None and gamma != self.gamma:
            self.gamma = gamma
            if self.open is not None:
                self.open.feed.stream.turn(PowerLaw(gamma))
        await self.send("transcription_session.updated" if legacy else "session.updated", session=self.session)

    def _transcription(self, sound: Message, target: Message, where: str) -> float | None:
        """What is said of the transcription; the dial, if that is among it."""
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
        """More sound."""
        samples = fields.pcm(event, "audio", longest=self.server.config.max_message)
        if self.open is None:
            if len(self.writing) >= MAX_ITEMS:
                raise FieldError(
                    "audio", f"audio: {MAX_ITEMS} items are still being written: wait for one to be completed", "too_many_items"
                )
            intake = self.server.served.intake("audio", self.rate)
            self.open = Item(Feed(self.server, intake, Wish(schedule=PowerLaw(self.gamma))))
            self.writing[self.open] = asyncio.create_task(self.write(self.open))
        await self.open.feed.send(samples, within_s=ROOM_S)

    async def commit(self, event: Message) -> None:
        """The item ends here."""
        item, self.open = self.open, None
        if item is None:
            raise FieldError("audio", "audio: nothing was appended since the last commit", "input_audio_buffer_commit_empty")
        await self.send("input_audio_buffer.committed", item_id=item.name, previous_item_id=self.last)
        self.last = item.name
        item.feed.stream.end()

    async def clear(self, event: Message) -> None:
        """What was appended since the last commit counts for nothing."""
        item, self.open = self.open, None
        if item is not None:
            item.feed.close()
            if (writing := self.writing.pop(item, None)) is not None:
                writing.cancel()
        await self.send("input_audio_buffer.cleared")

    async def write(self, item: Item) -> None:
        """What is written of an item."""
        prose, kind = Prose(), "conversation.item.input_audio_transcription"
        try:
            async for moment in item.feed.moments():
                if piece := prose.add(moment.event):
                    await self.send(f"{kind}.delta", item_id=item.name, content_index=0, delta=piece)
            usage = {"type": "duration", "seconds": item.feed.stream.source_s}
            await self.send(f"{kind}.completed", item_id=item.name, content_index=0, transcript=prose.text, usage=usage)
        except StreamFailedError as error:
            if self.open is item:
                self.open = None  # what is appended next begins another
            problem = {"type": "server_error" if error.internal else "invalid_request_error", "code": "transcription_failed"}
            with contextlib.suppress(ConnectionError):
                await self.send(
                    f"{kind}.failed", item_id=item.name, content_index=0, error={**problem, "message": str(error), "param": None}
                )
        except ConnectionError as error:
            LOG.info("connection lost", extra={"event": "lost", "reason": str(error)})
            await self.line.close(1011)
        finally:
            item.feed.close()
            self.writing.pop(item, None)

    def finish(self) -> None:
        """The server goes down: what has come is written out, and the connection closed."""

        async def finishing() -> None:
            with contextlib.suppress(FieldError, ConnectionError):
                await self.commit({})
            await asyncio.gather(*self.writing.values(), return_exceptions=True)
            await self.line.close(1012, "going down")

        self._finishing = asyncio.get_running_loop().create_task(finishing())

    async def close(self) -> None:
        """Nobody listens any more."""
        for item, task in list(self.writing.items()):
            item.feed.close()
            task.cancel()
        await asyncio.gather(*self.writing.values(), return_exceptions=True)


async def connect(server: Server, websocket: WebSocket) -> None:
    """A client comes."""
    problem = None
    if websocket.query_params.get("intent", "transcription") != "transcription":
        problem = 400, "intent", "intent: expected transcription, which is what is served here"
    elif websocket.query_params.get("model", server.served.name) != server.served.name:
        problem = 404, "model", f"model: {server.served.name} is served here"
    elif "audio" not in server.served.kinds:
        problem = 404, "model", f"model: {server.served.name} does not hear"
    if problem is not None:
        error = {"message": problem[2], "type": "invalid_request_error", "param": problem[1], "code": "bad_field"}
        await websocket.send_denial_response(JSONResponse({"error": error}, problem[0]))
        return
    seat = server.take_seat()
    if seat is None:
        await websocket.send_denial_response(refusal(server))
        return
    try:
        line = await Line.accept(websocket, server.config.slow_s)
    except ConnectionError:
        seat.free()
        return
    one = Realtime(server, line)
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
