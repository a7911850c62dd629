"""SimulEval's remote agent: `/reset`, `/input` and `/output`, so that `simuleval --remote-eval` scores the server from outside.

Its protocol knows no sessions: there is one evaluation at a time, which `/reset` begins. `/output` answers once all that was sent has
been written, so that delays are those of the source and not of the network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from zendaya.encoders.media import SAMPLE_RATE
from zendaya.encoders.whisper_stream import LARGEST_SAMPLE
from zendaya.schedule import PowerLaw
from zendaya.serve import fields
from zendaya.serve.feed import Feed, StreamFailedError
from zendaya.serve.fields import FieldError, Message
from zendaya.serve.hub import Wish
from zendaya.serve.native import refusal
from zendaya.serve.served import Sound
from zendaya.serve.server import Seat, Server
from zendaya.serve.transcriptions import in_time
from zendaya.simuleval import Words

MAX_BODY = 2**24
"""Bytes of a segment: samples are written out in JSON, twenty letters each."""


class Remote:
    """The one evaluation."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._feed: Feed | None = None
        self._seat: Seat | None = None
        self._words = Words()
        self._marks = 0
        self._turn = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Let the evaluation go."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._feed is not None:
            self._feed.close()
        if self._seat is not None:
            self._seat.free()
        self._feed = self._seat = None

    @contextlib.asynccontextmanager
    async def _asked(self) -> AsyncIterator[None]:
        """One request after the other; between them the evaluation waits so long, and no longer."""
        async with self._turn:
            if self._expiry is not None:
                self._expiry.cancel()
            try:
                yield
            finally:
                if self._feed is not None:
                    self._expiry = asyncio.get_running_loop().call_later(self.server.config.orphan_s, self.close)

    async def reset(self, request: Request) -> Response:
        """A new source begins."""
        async with self._asked():
            self.close()
        return JSONResponse({})

    async def input(self, request: Request) -> Response:
        """A segment of the source."""
        async with self._asked():
            try:
                body = await in_time(_body(request), self.server.config.slow_s)
                samples, finished = await asyncio.to_thread(_segment, body)
                if self._feed is None and (answer := self._begin()) is not None:
                    return answer
                feed = self._feed
                assert feed is not None
                if feed.stream.ended:
                    raise FieldError("content", "content: the source has ended: ask for the output, or reset")
                if samples.size:
                    await feed.send(samples.tobytes())
                if finished:
                    feed.stream.end()
            except FieldError as error:
                return JSONResponse({"error": {"message": str(error), "param": error.field, "code": error.code}}, 400)
            return JSONResponse({})

    def _begin(self) -> Response | None:
        if "audio" not in self.server.served.kinds:
            raise FieldError("data_type", f"data_type: {self.server.served.name} does not hear")
        self._seat = self.server.take_seat()
        if self._seat is None:
            return refusal(self.server)
        assert self.server.served.encoder is not None
        wish = Wish(schedule=PowerLaw(self.server.config.gamma), timed=False)
        self._feed, self._words = Feed(self.server, Sound(self.server.served.encoder, floats=True), wish), Words()
        return None

    async def output(self, request: Request) -> Response:
        """The words that what was sent has made whole."""
        async with self._asked():
            words, finished = list[str](), False
            if self._feed is not None:
                try:
                    words, finished = await self._written(self._feed)
                except StreamFailedError as error:
                    self.close()
                    if self.server.draining:
                        return refusal(self.server)
                    return JSONResponse({"error": {"message": f"content: {error}", "param": "content", "code": "failed"}}, 400)
            segment: dict[str, Any] = {"index": 0, "finished": finished, "tgt_lang": None, "config": {}}
            if words or finished:
                segment |= {"content": " ".join(words), "is_empty": False, "data_type": "text"}
            else:
                segment |= {"content": [], "is_empty": True, "data_type": None}
            return JSONResponse(segment)

    async def _written(self, feed: Feed) -> tuple[list[str], bool]:
        self._marks += 1
        if not feed.stream.ended:
            feed.stream.mark(self._marks)
        words = list[str]()
        async for note in feed.notes():
            if note.kind == "marked" and note.number == self._marks:
                return words, False
            if note.moment is not None and not note.moment.event.schedule:
                words += self._words.add(note.moment.event.text, last=note.moment.event.last)
        self.close()
        return words, True


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a segment of more than {MAX_BODY} bytes: make --source-segment-size smaller")
    return bytes(body)


def _segment(body: bytes) -> tuple[np.ndarray[Any, np.dtype[np.float32]], bool]:
    """The samples of a segment, and whether it is the last; too long to be read in the event loop."""
    segment = fields.parse(body, "segment")
    return _samples(segment), fields.flag(segment, "finished", default=False)


def _samples(segment: Message) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The samples of a segment."""
    if segment.get("is_empty") is True:
        return np.zeros(0, np.float32)
    fields.choice(segment, "data_type", ("speech",))
    if segment.get("sample_rate") != SAMPLE_RATE:
        raise FieldError("sample_rate", f"sample_rate: expected {SAMPLE_RATE}: got {str(segment.get('sample_rate'))[:20]}")
    content = segment.get("content")
    if not isinstance(content, list) or not all(isinstance(value, int | float) and abs(value) <= LARGEST_SAMPLE for value in content):
        raise FieldError("content", "content: expected a list of samples, numbers of full scale 1")
    return np.asarray(content, "<f4")
