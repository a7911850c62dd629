"""OpenAI's file transcription: a whole recording, `POST /v1/audio/transcriptions`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from zendaya.errors import SourceError
from zendaya.records import Event
from zendaya.runtime.setting import LiveSetting
from zendaya.runtime.subtitles import Cue, Cues, to_srt, to_vtt
from zendaya.schedule import PowerLaw
from zendaya.serve import fields
from zendaya.serve.fields import DELAYS, FieldError
from zendaya.serve.intake import AudioIntake
from zendaya.serve.monitoring import INTERNAL, LOG
from zendaya.serve.server import Feed, Server, StreamFailedError, Transcript, error_body, error_response
from zendaya.serve.transports.base import Transport, cancel, while_connected, within
from zendaya.sources.media import read_audio

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
CHUNK_S = 5.0  # seconds of a recording that are decoded from its file in one go


class FilesTransport(Transport):
    """The route `/v1/audio/transcriptions`."""

    def routes(self, server: Server) -> list[BaseRoute]:
        return [Route("/v1/audio/transcriptions", _Transcription(server), methods=["POST"])]


TRANSPORT = FilesTransport


@dataclass
class _Transcription:
    """The route as an ASGI application: seat, stream and file are held until the answer is sent."""

    server: Server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, server = Request(scope, receive), self.server
        with server.take_seat():
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
    except HTTPException as error:
        if error.status_code == 413:
            raise
        raise FieldError("body", f"body: expected a form: {error.detail}") from None
    stack.push_async_callback(form.close)
    return form


@dataclass(frozen=True, kw_only=True)
class _TranscriptionOptions:
    setting: LiveSetting
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
    choice = server.choose("audio", whole=True)
    if "delay" in given:
        choice = server.choose_delay(fields.choice(given, "delay", tuple(DELAYS)))
    if "gamma" in given:
        choice = server.choose("audio", schedule=PowerLaw(fields.gamma(fields.from_text(given["gamma"], "gamma"))))
    streamed = fields.choice(given, "stream", ("true", "false", "True", "False", "1", "0"), "false").lower() in ("true", "1")
    granularities = [value for name, value in form.multi_items() if name.startswith("timestamp_granularities")]
    return upload.file, _TranscriptionOptions(
        setting=choice.setting, stream=streamed, format=fields.choice(given, "response_format", FORMATS, "json"),
        words="word" in granularities, language=given.get("language", "en"),
    )  # fmt: skip


async def _answer(request: Request, server: Server, form: FormData, stack: contextlib.AsyncExitStack) -> Response:
    file, options = _options(server, form)
    encoder = server.served.encoder_for(options.setting)
    assert encoder is not None
    feed = Feed(server, AudioIntake(encoder, floats=True), options.setting, timed=False)
    stack.callback(feed.close)
    stack.push_async_callback(cancel, asyncio.create_task(_read_file(feed, file)))
    if options.stream:
        return _EventStream(_events(feed), server.config.slow_s)
    events = await while_connected(_gathered(feed), request.receive)
    return _formed(events, feed, options, encoder.traits.tokens_per_s)


async def _read_file(feed: Feed, file: BinaryIO) -> None:
    """Decode a recording in another thread, and send it to the stream, which fails if that does."""
    try:
        chunks = read_audio(file, chunk_s=CHUNK_S)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            await feed.send(chunk.samples.astype("<f4").tobytes())
        feed.stream.end()
    except Exception as error:
        feed.fail(error)


async def _gathered(feed: Feed) -> list[Event]:
    return [event async for event in feed.events()]


async def _events(feed: Feed) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events with the text as it is written."""
    transcript = Transcript()
    try:
        async for event in feed.events():
            if piece := transcript.add(event):
                yield {"type": "transcript.text.delta", "delta": piece}
        yield {"type": "transcript.text.done", "text": transcript.text}
    except (SourceError, StreamFailedError, FieldError) as error:
        yield {"type": "error", **error_body(str(error), "bad_file", field="file")}
    except Exception:
        LOG.exception(INTERNAL, extra={"event": "bug"})
        yield {"type": "error", **error_body(INTERNAL, "internal", internal=True)}


class _EventStream(StreamingResponse):
    """Server-sent events; a client that does not read them in time is disconnected."""

    def __init__(self, events: AsyncIterator[dict[str, Any]], slow_s: float) -> None:
        lines = (f"data: {json.dumps(event, ensure_ascii=False)}\n\n" async for event in events)
        super().__init__(lines, media_type="text/event-stream")
        self._slow_s = slow_s

    async def stream_response(self, send: Send) -> None:
        async def in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), self._slow_s)

        with contextlib.suppress(asyncio.TimeoutError, OSError):
            await super().stream_response(in_time)


def _formed(events: list[Event], feed: Feed, options: _TranscriptionOptions, rate: float) -> Response:
    """The text in the response format of the request."""
    transcript, form, duration_s = Transcript(), options.format, round(feed.stream.source_s, 6)
    pieces = [(event, transcript.add(event)) for event in events]
    if form == "text":
        return PlainTextResponse(transcript.text + "\n")
    if form == "srt":
        return PlainTextResponse("".join(to_srt(cue, n) for n, cue in enumerate(_cues(events), start=1)))
    if form == "vtt":
        cues = [to_vtt(cue, n) for n, cue in enumerate(_cues(events), start=1)]
        return PlainTextResponse("".join(["WEBVTT\n\n", *cues]), media_type="text/vtt")
    usage = {"type": "duration", "seconds": duration_s}
    if form == "json":
        return JSONResponse({"text": transcript.text, "usage": usage})
    found: dict[str, Any] = {
        "task": "transcribe", "language": options.language, "duration": duration_s, "text": transcript.text,
        "segments": _segments(pieces, rate), "usage": usage,
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


def _segments(pieces: list[tuple[Event, str]], rate: float) -> list[dict[str, Any]]:
    """One segment per window; one that overlaps the window before begins where that one's text ends."""
    found = list[dict[str, Any]]()
    for event, piece in pieces:
        if not found or found[-1]["id"] != event.window_index:
            start = max(event.window_start / rate, found[-1]["end"] if found and event.step > 1 else 0.0)
            found.append({"id": event.window_index, "seek": 0, "start": start, "end": 0.0, "text": "", "tokens": []})
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
