"""A stream for transports that do not resume: its notes are waited for one by one, and its text is one piece of prose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from zendaya.errors import ZendayaError
from zendaya.records import Event
from zendaya.runtime.options import DecodeOptions
from zendaya.serve.fields import FieldError
from zendaya.serve.hub import StreamUpdate
from zendaya.serve.intake import Intake
from zendaya.serve.server import Server


class StreamFailedError(ZendayaError):
    """A stream that could not go on; `internal` if that is a bug of ours."""

    def __init__(self, message: str, *, internal: bool = False) -> None:
        super().__init__(message)
        self.internal = internal


class Feed:
    """A stream of the hub."""

    def __init__(self, server: Server, intake: Intake, options: DecodeOptions, *, timed: bool = True) -> None:
        self.server = server
        self._notes = asyncio.Queue[StreamUpdate]()
        self._room = asyncio.Event()
        self.stream = server.hub.open(intake, options, self._hear, timed=timed)

    def _hear(self, notes: list[StreamUpdate]) -> None:
        for note in notes:
            if note.kind == "taken":
                self.stream.unread -= note.num_bytes
                self._room.set()
            else:
                self._notes.put_nowait(note)

    async def send(self, payload: bytes, *, within_s: float | None = None) -> None:
        """More of the source, once there is room for it; a FieldError if there is none in time, or it cannot be."""
        limit = self.server.config.max_unread
        while not self.stream.closed and self.stream.unread and self.stream.unread + len(payload) > limit:
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), within_s)
            except asyncio.TimeoutError:
                raise FieldError("audio", f"audio: {limit} bytes wait to be heard: send no faster than it is spoken", "overrun") from None
        if self.stream.ended or self.stream.closed:
            raise FieldError("audio", "audio: the source has ended: begin a new one", "ended")
        if self.stream.source_s > self.server.config.max_source_s:
            raise FieldError("audio", f"audio: at most {self.server.config.max_source_s:g} s of source are taken at a time", "too_long")
        self.stream.source(payload)

    async def notes(self) -> AsyncIterator[StreamUpdate]:
        """What is written, up to the end; a StreamFailedError where it cannot go on."""
        while True:
            note = await self._notes.get()
            if note.kind == "failed":
                raise StreamFailedError(note.error, internal=note.internal)
            if note.kind == "refused":
                raise StreamFailedError(note.error)
            if note.kind == "finished":
                return
            yield note

    async def events(self) -> AsyncIterator[Event]:
        """The events that write text."""
        async for note in self.notes():
            if note.event is not None and not note.event.schedule:
                yield note.event

    def close(self) -> None:
        """Let the stream go; who waits for its notes, or for room, waits no longer."""
        if not self.stream.closed:
            self.stream.close()
            self._notes.put_nowait(StreamUpdate("failed", error="the stream was let go"))
            self._room.set()


class Prose:
    """Pieces of a text that add up to it: no blank before the first, one between windows.

    >>> prose, at = Prose(), (1, 1, 2, False)
    >>> "|".join(map(prose.add, [Event(0, 1, 5, " Good", *at), Event(0, 2, 6, " day", *at), Event(1, 1, 7, "sir", *at)]))
    'Good| day| sir'
    """

    def __init__(self) -> None:
        self.text = ""
        self._window = 0

    def add(self, event: Event) -> str:
        """The next piece."""
        piece = event.text if self.text else event.text.lstrip()
        if piece and event.window_index != self._window and self.text and not self.text[-1].isspace() and not piece[0].isspace():
            piece = " " + piece
        if piece:
            self._window = event.window_index
        self.text += piece
        return piece
