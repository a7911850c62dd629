"""OpenAI's file transcription: a whole recording, `POST /v1/audio/transcriptions`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from zendaya.errors import SourceError
from zendaya.records import Event
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.subtitles import Cue, Cues, to_srt, to_vtt
from zendaya.schedule import PowerLaw
from zendaya.serve import fields
from zendaya.serve.feed import Feed, Prose, StreamFailedError
from zendaya.serve.fields import FieldError
from zendaya.serve.intake import AudioIntake
from zendaya.serve.responses import error_body, error_response
from zendaya.serve.server import Server
from zendaya.serve.transports._openai import DELAYS
from zendaya.serve.transports.base import Transport, within
from zendaya.sources.media import read_audio

LOG = logging.getLogger("zendaya.serve")
Result = TypeVar("Result")
FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
CHUNK_S = 5.0
"""Seconds of a recording that are decoded from its file in one go."""


class FilesTransport(Transport):
    """The route `/v1/audio/transcriptions`."""

    def routes(self, server: Server) -> list[BaseRoute]:
        """The route."""
        return [Route("/v1/audio/transcriptions", _Transcription(server), methods=["POST"])]


TRANSPORT = FilesTransport


class _Transcription:
    """The route as an ASGI application: seat, stream and file are held until the answer is sent."""

    def __init__(self, server: Server) -> None:
        self.server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, server = Request(scope, receive), self.server
        with server.seated():
            async with contextlib.AsyncExitStack() as stack:
                try:
                    form = await within(server.config.upload_s, _form(request, server.config.max_upload, stack))
                    answer = await _answer(request, server, form, stack)
                except SourceError as error:
                    answer = error_response(400, f"file: {error}", "bad_file", field="file")
                except StreamFailedError as error:
                    answer = error_response(500 if error.internal else 400, str(error), "failed", field="file")
                await answer(scope, receive, send)


async def _form(request: Request, most: int, stack: contextlib.AsyncExitStack) -> FormData:
    """Read the form of a request, and refuse a body that is too large while it arrives."""
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise FieldError("content-type", f"content-type: expected multipart/form-data: got {kind[:60]!r}")
    size, receive = 0, request.receive

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise HTTPException(413, f"expected a recording of at most {most} bytes: cut it, or stream it to /v1/realtime")
        return message

    try:
        form = await Request(request.scope, counted).form(max_files=1, max_fields=32, max_part_size=2**16)
    except (MultiPartException, HTTPException) as error:
        if isinstance(error, HTTPException) and error.status_code == 413:
            raise
        raise FieldError("body", f"body: expected a form: {getattr(error, 'message', None) or getattr(error, 'detail', '')}") from None
    stack.push_async_callback(form.close)
    return form


@dataclass(frozen=True, kw_only=True)
class _TranscriptionOptions:
    gamma: float
    stream: bool
    format: str
    words: bool
    language: str


def _options(server: Server, form: FormData) -> tuple[BinaryIO, _TranscriptionOptions]:
    """The recording and the options of a request."""
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise FieldError("file", "file: expected a recording, as multipart/form-data")
    given = {name: value for name, value in form.items() if isinstance(value, str)}
    fields.encodable(given)
    if given.get("model", server.served.name) != server.served.name:
        raise FieldError("model", f"model: expected {server.served.name}: got {given['model'][:60]!r}", "model_not_found")
    if "audio" not in server.served.kinds:
        raise FieldError("model", f"model: {server.served.name} does not take audio")
    gamma = server.config.gamma
    if "delay" in given:
        gamma = DELAYS[fields.choice(given, "delay", tuple(DELAYS))]
    if "gamma" in given:
        try:
            gamma = fields.gamma(float(given["gamma"]))
        except ValueError as error:
            raise (
                error if isinstance(error, FieldError) else FieldError("gamma", f"gamma: expected a number: got {given['gamma'][:40]!r}")
            ) from None
    streamed = fields.choice(given, "stream", ("true", "false", "True", "False", "1", "0"), "false").lower() in ("true", "1")
    granularities = [value for name, value in form.multi_items() if name.startswith("timestamp_granularities")]
    return upload.file, _TranscriptionOptions(
        gamma=gamma, stream=streamed, format=fields.choice(given, "response_format", FORMATS, "json"),
        words="word" in granularities, language=given.get("language", "en"),
    )  # fmt: skip


async def _answer(request: Request, server: Server, form: FormData, stack: contextlib.AsyncExitStack) -> Response:
    file, options = _options(server, form)
    encoder = server.served.encoder
    assert encoder is not None
    decoding = DecodeOptions(schedule=PowerLaw(options.gamma), voice=server.config.voice)
    feed = Feed(server, AudioIntake(encoder, floats=True), decoding, timed=False)
    stack.callback(feed.close)
    reading = asyncio.create_task(_read_file(feed, file))
    stack.push_async_callback(_cancel, reading)
    if options.stream:
        return _EventStream(_events(feed, reading), server.config.slow_s)
    events = await _while_connected(request, _gathered(feed, reading))
    return _formed(events, feed, options, encoder.traits.tokens_per_s)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _read_file(feed: Feed, file: BinaryIO) -> None:
    """Decode a recording in another thread, and send it to the stream."""
    chunks = read_audio(file, chunk_s=CHUNK_S)
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        await feed.send(chunk.samples.astype("<f4").tobytes())
    feed.stream.end()


async def _drawn(feed: Feed, reading: asyncio.Task[None]) -> AsyncIterator[Event]:
    """The events of the text; raises the error of reading the recording, if there is one."""
    events = feed.events()
    following: asyncio.Future[Event] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(events))
            waited: set[asyncio.Future[Any]] = {following} if reading.done() else {following, reading}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and reading.exception() is not None:
                reading.result()
            if following.done():
                try:
                    yield following.result()
                except StopAsyncIteration:
                    return
                following = None
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _gathered(feed: Feed, reading: asyncio.Task[None]) -> list[Event]:
    return [event async for event in _drawn(feed, reading)]


async def _while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await work for a client; it is cancelled if the client disconnects."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise HTTPException(499, "the client disconnected")
        return doing.result()
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(feed: Feed, reading: asyncio.Task[None]) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events with the text as it is written."""
    prose = Prose()
    try:
        async for event in _drawn(feed, reading):
            if piece := prose.add(event):
                yield {"type": "transcript.text.delta", "delta": piece}
        yield {"type": "transcript.text.done", "text": prose.text}
    except (SourceError, StreamFailedError, FieldError) as error:
        yield {"type": "error", **error_body(str(error), "bad_file", field="file")}
    except Exception:
        LOG.exception("internal server error", extra={"event": "bug"})
        yield {"type": "error", **error_body("internal server error", "internal", internal=True)}


class _EventStream(Response):
    """Server-sent events; a client that does not read them in time is disconnected."""

    def __init__(self, events: AsyncIterator[dict[str, Any]], slow_s: float) -> None:
        super().__init__(media_type="text/event-stream")
        self._events, self._slow_s = events, slow_s
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events while the client is connected."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.suppress(asyncio.TimeoutError, OSError, HTTPException):
            await _while_connected(Request(scope, receive), self._send(send))

    async def _send(self, send: Send) -> None:
        async for event in self._events:
            data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
            await asyncio.wait_for(send({"type": "http.response.body", "body": data, "more_body": True}), self._slow_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _formed(events: list[Event], feed: Feed, options: _TranscriptionOptions, rate: float) -> Response:
    """The text in the response format of the request."""
    prose, form = Prose(), options.format
    pieces = [(event, prose.add(event)) for event in events]
    if form == "text":
        return PlainTextResponse(prose.text + "\n")
    if form in ("srt", "vtt"):
        cues = _cues(events)
        parts = [to_srt(cue, n) if form == "srt" else to_vtt(cue, n) for n, cue in enumerate(cues, start=1)]
        return PlainTextResponse(
            ("WEBVTT\n\n" if form == "vtt" else "") + "".join(parts), media_type=f"text/{'vtt' if form == 'vtt' else 'plain'}"
        )
    usage = {"type": "duration", "seconds": round(feed.stream.source_s, 6)}
    if form == "json":
        return JSONResponse({"text": prose.text, "usage": usage})
    found: dict[str, Any] = {
        "task": "transcribe", "language": options.language, "duration": round(feed.stream.source_s, 6), "text": prose.text,
        "segments": _segments(pieces, feed, rate), "usage": usage,
    }  # fmt: skip
    if options.words:
        found["words"] = _words(pieces)
    return JSONResponse(found)


def _cues(events: list[Event]) -> list[Cue]:
    cues, done = Cues(), list[Cue]()
    for event in events:
        done += cues.add(event.text, event.spoken_s)
        if event.last:
            done += cues.part()
    return [*done, *cues.close()]


def _segments(pieces: list[tuple[Event, str]], feed: Feed, rate: float) -> list[dict[str, Any]]:
    """One segment per window."""
    found = list[dict[str, Any]]()
    for event, piece in pieces:
        if not found or found[-1]["id"] != event.window_index:
            found.append({"id": event.window_index, "seek": 0, "start": event.window_start / rate, "end": 0.0, "text": "", "tokens": []})
        found[-1]["text"] += piece
        found[-1]["tokens"].append(event.token)
        found[-1]["end"] = max(found[-1]["end"], event.read_s)
    return found


def _words(pieces: list[tuple[Event, str]]) -> list[dict[str, Any]]:
    """Words with estimated times; a word starts where the one before ended."""
    found, word, begun_s, last_s = list[dict[str, Any]](), "", 0.0, 0.0
    for event, piece in pieces:
        for letter in piece:
            if letter.isspace():
                if word:
                    found.append({"word": word, "start": begun_s, "end": last_s})
                word, begun_s = "", last_s
            else:
                word += letter
        last_s = max(last_s, event.spoken_s)
    return [*found, {"word": word, "start": begun_s, "end": last_s}] if word else found
