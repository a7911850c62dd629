"""SimulEval's remote agent: `/reset`, `/input` and `/output`, by which `simuleval --remote-eval` scores the server.

The protocol has no sessions: there is one evaluation at a time, and `/reset` begins it. `/output` answers once the text of all input is
written, so that delays are those of the source and not of the network.
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
from starlette.routing import BaseRoute, Route

from zendaya.encoders.whisper import LARGEST_SAMPLE
from zendaya.evaluation.simuleval import Words
from zendaya.serve import fields
from zendaya.serve.config import ServeConfig
from zendaya.serve.fields import FieldError, Message
from zendaya.serve.intake import AudioIntake
from zendaya.serve.server import Feed, Server, StreamFailedError, error_response
from zendaya.serve.transports.base import Transport, within
from zendaya.sources.media import SAMPLE_RATE

MAX_BODY = 2**24  # bytes per segment: samples are JSON numbers of about twenty characters each


class SimulEvalTransport(Transport):
    """The one evaluation."""

    pinned = True

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        self._feed: Feed | None = None
        self._words = Words()
        self._marks = 0
        self._turn = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None

    def routes(self, server: Server) -> list[BaseRoute]:
        self.server = server
        return [
            Route("/reset", self.reset, methods=["POST"]),
            Route("/input", self.input, methods=["PUT"]),
            Route("/output", self.output, methods=["GET"]),
        ]

    def end(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    @contextlib.asynccontextmanager
    async def _asked(self) -> AsyncIterator[None]:
        """Handle one request at a time; without a next one, the evaluation expires."""
        async with self._turn:
            if self._expiry is not None:
                self._expiry.cancel()
            try:
                yield
            finally:
                if self._feed is not None:
                    self._expiry = asyncio.get_running_loop().call_later(self.server.config.orphan_s, self.end)

    async def reset(self, request: Request) -> Response:
        async with self._asked():
            self.end()
        return JSONResponse({})

    async def input(self, request: Request) -> Response:
        async with self._asked():
            body = await within(self.server.config.slow_s, _body(request))
            samples, finished = await asyncio.to_thread(_segment, body)
            feed = self._feed or self._begin()
            if feed.stream.ended:
                raise FieldError("content", "content: the source has ended: ask for the output, or reset")
            if samples.size:
                await feed.send(samples.tobytes())
            if finished:
                feed.stream.end()
            return JSONResponse({})

    def _begin(self) -> Feed:
        if "audio" not in self.server.served.kinds:
            raise FieldError("data_type", f"data_type: {self.server.served.name} does not take audio")
        setting = self.server.choose("audio").setting
        encoder = self.server.served.encoder_for(setting)
        assert encoder is not None
        intake, seat = AudioIntake(encoder, floats=True), self.server.take_seat()
        self._words, self._feed = Words(), Feed(self.server, intake, setting, timed=False, seat=seat)
        return self._feed

    async def output(self, request: Request) -> Response:
        """The words completed by the input so far."""
        async with self._asked():
            words, finished = list[str](), False
            if self._feed is not None:
                try:
                    words, finished = await self._written(self._feed)
                except StreamFailedError as error:
                    self.end()
                    if self.server.draining:
                        self.server.take_seat()  # raises NoSeatError
                    return error_response(400, f"content: {error}", "failed", field="content")
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
            if note.event is not None and not note.event.schedule:
                words += self._words.add(note.event.text, last=note.event.last)
        self.end()
        return words, True


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"expected a segment of at most {MAX_BODY} bytes: make --source-segment-size smaller")
    return bytes(body)


def _segment(body: bytes) -> tuple[np.ndarray[Any, np.dtype[np.float32]], bool]:
    """The samples of a segment, and whether it is the last. Parsing takes too long for the event loop."""
    segment = fields.parse(body, "segment")
    return _samples(segment), fields.flag(segment, "finished")


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


TRANSPORT = SimulEvalTransport
