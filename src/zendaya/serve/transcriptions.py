"""A recording sent whole, as OpenAI's clients do: `POST /v1/audio/transcriptions`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, BinaryIO, TypeVar

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from zendaya.encoders.media import read_audio
from zendaya.errors import SourceError
from zendaya.live import Moment
from zendaya.schedule import PowerLaw
from zendaya.serve import fields
from zendaya.serve.feed import Feed, Prose, StreamFailedError
from zendaya.serve.fields import FieldError
from zendaya.serve.hub import Wish
from zendaya.serve.native import refusal
from zendaya.serve.realtime import DELAYS
from zendaya.serve.served import Sound
from zendaya.serve.server import Server
from zendaya.subtitles import Cue, Cues, to_srt, to_vtt

Sent = TypeVar("Sent")
FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
CHUNK_S = 5.0
"""Seconds of a recording that are decoded in one go."""


class Transcriptions:
    """The route, as an ASGI application: seat, stream and file are held as long as the answer takes, and no longer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; what is wrong with it names the field."""
        request = Request(scope, receive)
        server: Server = request.app.state.server
        seat = server.take_seat()
        if seat is None:
            await refusal(server)(scope, receive, send)
            return
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    form = await in_time(_form(request, server.config.max_upload, stack), server.config.upload_s)
                    answer = await _answer(request, server, form, stack)
                except FieldError as error:
                    answer = _problem(error.field, str(error), error.code)
                except SourceError as error:
                    answer = _problem("file", f"file: {error}", "bad_file")
                except StreamFailedError as error:
                    answer = _problem("file", str(error), "failed", 500 if error.internal else 400)
                await answer(scope, receive, send)
        finally:
            seat.free()


async def in_time(work: Coroutine[Any, Any, Sent], within_s: float) -> Sent:
    """What a client sends, if it is there in time: who sends a byte now and then would hold a seat without end."""
    try:
        return await asyncio.wait_for(work, within_s)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the request was not there within {within_s:g} s: send it faster, or less of it") from None


def _problem(field: str, message: str, code: str, status: int = 400) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": field, "code": code}}, status)


async def _form(request: Request, most: int, stack: contextlib.AsyncExitStack) -> FormData:
    """The fields of a request, whose body is counted as it comes."""
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise FieldError("content-type", f"content-type: expected multipart/form-data: got {kind[:60]!r}")
    size, receive = 0, request.receive

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise HTTPException(413, f"a recording of more than {most} bytes: cut it, or stream it to /v1/realtime")
        return message

    try:
        form = await Request(request.scope, counted).form(max_files=1, max_fields=32, max_part_size=2**16)
    except (MultiPartException, HTTPException) as error:
        if isinstance(error, HTTPException) and error.status_code == 413:
            raise
        raise FieldError("body", f"body: not a form: {getattr(error, 'message', None) or getattr(error, 'detail', '')}") from None
    stack.push_async_callback(form.close)
    return form


def _options(server: Server, form: FormData) -> tuple[BinaryIO, dict[str, Any]]:
    """The recording, and what is asked of it."""
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise FieldError("file", "file: expected a recording")
    given = {name: value for name, value in form.items() if isinstance(value, str)}
    fields.sayable(given)
    if given.get("model", server.served.name) != server.served.name:
        raise FieldError("model", f"model: {server.served.name} is served here: got {given['model'][:60]!r}", "model_not_found")
    if "audio" not in server.served.kinds:
        raise FieldError("model", f"model: {server.served.name} does not hear")
    gamma = server.config.gamma
    if "delay" in given:
        gamma = DELAYS[fields.choice(given, "delay", tuple(DELAYS))]
    if "gamma" in given:
        try:
            gamma = fields.gamma(float(given["gamma"]))
        except ValueError as error:
            raise FieldError(
                "gamma", str(error) if isinstance(error, FieldError) else f"gamma: not a number: {given['gamma'][:40]!r}"
            ) from None
    streamed = fields.choice(given, "stream", ("true", "false", "True", "False", "1", "0"), "false").lower() in ("true", "1")
    form_ = fields.choice(given, "response_format", FORMATS, "json")
    granularities = [value for name, value in form.multi_items() if name.startswith("timestamp_granularities")]
    return upload.file, {
        "gamma": gamma,
        "stream": streamed,
        "format": form_,
        "words": "word" in granularities,
        "language": given.get("language", "en"),
    }


async def _answer(request: Request, server: Server, form: FormData, stack: contextlib.AsyncExitStack) -> Response:
    file, options = _options(server, form)
    encoder = server.served.encoder
    assert encoder is not None
    feed = Feed(server, Sound(encoder, floats=True), Wish(schedule=PowerLaw(options["gamma"]), timed=False))
    stack.callback(feed.close)
    heard = asyncio.create_task(_hear(feed, file))
    stack.push_async_callback(_cancel, heard)
    if options["stream"]:
        return _Sent(_events(feed, heard), server.config.slow_s)
    moments = await _unless_gone(request, _gathered(feed, heard))
    return _formed(moments, feed, options, encoder.traits.tokens_per_s)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _hear(feed: Feed, file: BinaryIO) -> None:
    """Hand a recording over as it is decoded, in a thread of its own."""
    chunks = read_audio(file, chunk_s=CHUNK_S)
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        await feed.send(chunk.samples.astype("<f4").tobytes())
    feed.stream.end()


async def _moments(feed: Feed, heard: asyncio.Task[None]) -> AsyncIterator[Moment]:
    """What is written, or what is wrong with the recording."""
    moments = feed.moments()
    following: asyncio.Future[Moment] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(moments))
            waited: set[asyncio.Future[Any]] = {following} if heard.done() else {following, heard}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if heard.done() and heard.exception() is not None:
                heard.result()
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


async def _gathered(feed: Feed, heard: asyncio.Task[None]) -> list[Moment]:
    return [moment async for moment in _moments(feed, heard)]


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Sent]) -> Sent:
    """Do something for a client, as long as it is there."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise HTTPException(499, "the client has gone")
        return doing.result()
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(feed: Feed, heard: asyncio.Task[None]) -> AsyncIterator[dict[str, Any]]:
    """The text as it is decided, as server-sent events."""
    prose = Prose()
    try:
        async for moment in _moments(feed, heard):
            if piece := prose.add(moment.event):
                yield {"type": "transcript.text.delta", "delta": piece}
        yield {"type": "transcript.text.done", "text": prose.text}
    except (SourceError, StreamFailedError, FieldError) as error:
        yield {"type": "error", "error": {"message": str(error), "type": "invalid_request_error", "param": "file", "code": "bad_file"}}


class _Sent(Response):
    """Server-sent events, each taken in time or the connection is given up."""

    def __init__(self, events: AsyncIterator[dict[str, Any]], slow_s: float) -> None:
        super().__init__(media_type="text/event-stream")
        self._events, self._slow_s = events, slow_s
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them all, as long as the client is there."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.suppress(asyncio.TimeoutError, OSError, HTTPException):
            await _unless_gone(Request(scope, receive), self._send(send))

    async def _send(self, send: Send) -> None:
        async for event in self._events:
            data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
            await asyncio.wait_for(send({"type": "http.response.body", "body": data, "more_body": True}), self._slow_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _formed(moments: list[Moment], feed: Feed, options: dict[str, Any], rate: float) -> Response:
    """What was written, in the form that was asked for."""
    prose, form = Prose(), options["format"]
    pieces = [(moment, prose.add(moment.event)) for moment in moments]
    if form == "text":
        return PlainTextResponse(prose.text + "\n")
    if form in ("srt", "vtt"):
        cues = _cues(moments)
        parts = [to_srt(cue, n) if form == "srt" else to_vtt(cue, n) for n, cue in enumerate(cues, start=1)]
        return PlainTextResponse(
            ("WEBVTT\n\n" if form == "vtt" else "") + "".join(parts), media_type=f"text/{'vtt' if form == 'vtt' else 'plain'}"
        )
    usage = {"type": "duration", "seconds": round(feed.stream.source_s, 6)}
    if form == "json":
        return JSONResponse({"text": prose.text, "usage": usage})
    found: dict[str, Any] = {
        "task": "transcribe", "language": options["language"], "duration": round(feed.stream.source_s, 6), "text": prose.text,
        "segments": _segments(pieces, feed, rate), "usage": usage,
    }  # fmt: skip
    if options["words"]:
        found["words"] = _words(pieces)
    return JSONResponse(found)


def _cues(moments: list[Moment]) -> list[Cue]:
    cues, done = Cues(), list[Cue]()
    for moment in moments:
        done += cues.add(moment.event.text, moment.spoken_s)
        if moment.event.last:
            done += cues.part()
    return [*done, *cues.close()]


def _segments(pieces: list[tuple[Moment, str]], feed: Feed, rate: float) -> list[dict[str, Any]]:
    """A segment a window."""
    found = list[dict[str, Any]]()
    for moment, piece in pieces:
        event = moment.event
        if not found or found[-1]["id"] != event.window:
            found.append({"id": event.window, "seek": 0, "start": event.window_start / rate, "end": 0.0, "text": "", "tokens": []})
        found[-1]["text"] += piece
        found[-1]["tokens"].append(event.token)
        found[-1]["end"] = max(found[-1]["end"], moment.read_s)
    return found


def _words(pieces: list[tuple[Moment, str]]) -> list[dict[str, Any]]:
    """Words with about when each was spoken; one begins where the one before ended."""
    found, word, begun_s, last_s = list[dict[str, Any]](), "", 0.0, 0.0
    for moment, piece in pieces:
        for letter in piece:
            if letter.isspace():
                if word:
                    found.append({"word": word, "start": begun_s, "end": last_s})
                word, begun_s = "", last_s
            else:
                word += letter
        last_s = max(last_s, moment.spoken_s)
    return [*found, {"word": word, "start": begun_s, "end": last_s}] if word else found
