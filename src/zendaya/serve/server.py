"""The parts that all transports of a server share: seats, streams and error answers; and how a server drains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from zendaya.errors import ConfigError, ZendayaError
from zendaya.records import Event
from zendaya.runtime.frontier import DialChoice, choose_setting
from zendaya.runtime.policies import Policy
from zendaya.runtime.setting import LiveSetting
from zendaya.schedule import PowerLaw, Schedule
from zendaya.serve.config import ServeConfig
from zendaya.serve.fields import DELAYS, FieldError
from zendaya.serve.hub import Hub, StreamUpdate
from zendaya.serve.intake import Intake, Kind, Served
from zendaya.serve.monitoring import LOG, Gauges

FINALS_S = 30.0  # seconds in which the last text is written and delivered, once sources have ended
RETRY_S = 5  # seconds after which a client that found no seat should retry


class NoSeatError(ZendayaError):
    """No session can be opened now: all seats are taken (`full`), or the server is shutting down (`draining`)."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class StreamFailedError(ZendayaError):
    """A stream that cannot continue; `internal` if that is a bug of ours."""

    def __init__(self, message: str, *, internal: bool = False) -> None:
        super().__init__(message)
        self.internal = internal


def error_body(message: str, code: str, *, field: str | None = None, internal: bool = False) -> dict[str, Any]:
    """The JSON of an error in the form of OpenAI's API: its message, its code for programs and the malformed field."""
    kind = "server_error" if internal else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": field}}


def error_response(status: int, message: str, code: str, *, field: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """An error with its status."""
    return JSONResponse(error_body(message, code, field=field, internal=status >= 500), status, headers)


def unavailable(code: str, message: str) -> Response:
    """503: the client should retry later."""
    return error_response(503, f"{message}: retry in {RETRY_S} s", code, headers={"Retry-After": str(RETRY_S)})


class Host:
    """A server or a gateway: its seats, and how it drains. `app.state.server` is one."""

    def __init__(self, config: ServeConfig, gauges: Gauges) -> None:
        self.config, self.gauges = config, gauges
        self.seats = set[Any]()
        self.draining = False

    @property
    def num_seats(self) -> int:
        return self.config.max_sessions

    @property
    def full(self) -> bool:
        """Whether no new session is accepted."""
        return self.draining or len(self.seats) >= self.num_seats

    @property
    def failure(self) -> str:
        """Why nothing can be served; empty while all is well."""
        raise NotImplementedError

    async def figures(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return self.gauges.text()

    def no_seat(self, message: str) -> NoSeatError:
        """The error for a client that finds no seat; `message` is for a server that is not draining."""
        code = "draining" if self.draining else "full"
        self.gauges.rejections.labels(code).inc()
        return NoSeatError("the server is shutting down" if self.draining else message, code)

    async def drain(self, within_s: float) -> None:
        """Accept no new session, let streams run for a time, then end them; returns once all text is delivered."""
        self.draining = True
        LOG.info("draining", extra={"event": "drain", "sessions": len(self.seats), "within_s": within_s})
        await self._until_empty(within_s)
        await self.end_sources()
        await self._until_empty(FINALS_S)

    async def end_sources(self) -> None:
        """End every open source."""
        raise NotImplementedError

    async def _until_empty(self, within_s: float) -> None:
        end_s = asyncio.get_running_loop().time() + within_s
        while self.seats and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.02)


class Seat(contextlib.ExitStack):
    """One of the sessions that a server can hold; freed when its context ends, or before."""

    free = contextlib.ExitStack.close


class Server(Host):
    """A running server: the public surface for its transports."""

    def __init__(self, config: ServeConfig, served: Served, hub: Hub, gauges: Gauges) -> None:
        super().__init__(config, gauges)
        self.served, self.hub = served, hub
        gauges.sessions.set_function(lambda: len(self.seats))
        self.enders = set[Callable[[], None]]()
        """Calls that end open sources, once the time for draining is over."""

    @property
    def failure(self) -> str:
        return "" if self.hub.alive else "a model thread has stopped"

    def take_seat(self) -> Seat:
        """A seat; NoSeatError if there is none."""
        if self.full:
            raise self.no_seat(f"all {self.config.max_sessions} seats are taken")
        seat = Seat()
        self.seats.add(seat)
        seat.callback(self.seats.discard, seat)
        return seat

    def choose(
        self, kind: Kind, *, schedule: Schedule | Policy | None = None, lag_s: float | None = None, field: str = "lag_s",
        whole: bool = False,
    ) -> DialChoice:  # fmt: skip
        """The setting of a stream: what its client asks for, else the server's own dial, else the model's; `field` is for errors.

        `whole` as in `choose_setting`.
        """
        frontier = None if kind == "features" else self.served.frontier
        if lag_s is not None and kind == "features":
            raise FieldError(field, f"{field}: lag is measured from {self.served.kinds[0]}, not from features: give gamma")
        if schedule is None and lag_s is None:
            schedule = None if self.config.gamma is None else PowerLaw(self.config.gamma)
            lag_s = None if frontier is None or whole else self.config.lag_s
        try:
            config = self.served.model.config
            return choose_setting(frontier, schedule=schedule, lag_s=lag_s, option=field, config=config, whole=whole)
        except ConfigError as error:
            raise FieldError(field, str(error)) from None

    def choose_delay(self, delay: str) -> DialChoice:
        """The setting of a delay by OpenAI's name: along the frontier, or a γ where the model was not measured."""
        frontier = self.served.frontier
        return DialChoice(LiveSetting(PowerLaw(DELAYS[delay]), {}, {})) if frontier is None else DialChoice.of(frontier.named(delay))

    def dial_facts(self, kind: Kind, choice: DialChoice | None = None) -> dict[str, Any]:
        """For clients: the frontier, what it was measured on, and the setting that was chosen from it or else would be."""
        frontier = None if kind == "features" else self.served.frontier
        found = self.choose(kind) if choice is None else choice
        setting, lag_s = (str(found.setting), None) if found.point is None else (found.point.setting, found.point.reported.lag_s)
        return {
            "setting": setting, "lag_s": lag_s, "frontier": frontier and [point.figures for point in frontier.points],
            "measured_on": frontier and frontier.reported_on.name,
        }  # fmt: skip

    @contextlib.asynccontextmanager
    async def stream(
        self, source: Kind, *, rate: float | None = None, gamma: float | None = None, lag_s: float | None = None
    ) -> AsyncIterator[Feed]:  # fmt: skip
        """Open a stream with a seat of its own: send it a source, iterate over its `events()`.

        `rate` is samples or rows per second, `gamma` or `lag_s` the dial; the defaults are those of the model and of the server.
        """
        with self.take_seat():
            setting = self.choose(source, schedule=None if gamma is None else PowerLaw(gamma), lag_s=lag_s).setting
            feed = Feed(self, self.served.intake(source, rate, setting), setting)
            self.enders.add(feed.stream.end)
            try:
                yield feed
            finally:
                self.enders.discard(feed.stream.end)
                feed.close()

    async def end_sources(self) -> None:
        for end in list(self.enders):
            end()


class Feed:
    """A stream for transports that do not resume, with its seat, if it has one of its own."""

    def __init__(self, server: Server, intake: Intake, setting: LiveSetting, *, timed: bool = True, seat: Seat | None = None) -> None:
        self.server, self._seat = server, seat
        self._notes = asyncio.Queue[StreamUpdate | Exception]()
        self._room = asyncio.Event()
        self.stream = server.hub.open(intake, setting.options(voice=server.config.voice), self._hear, timed=timed)

    def _hear(self, notes: list[StreamUpdate]) -> None:
        for note in notes:
            if note.kind == "taken":
                self.stream.unread -= note.num_bytes
                self._room.set()
            elif note.kind in ("failed", "refused"):
                self.fail(StreamFailedError(note.error, internal=note.internal))
            else:
                self._notes.put_nowait(note)

    def fail(self, error: Exception) -> None:
        """Make `notes` raise an error, after the notes so far."""
        self._notes.put_nowait(error)

    async def send(self, payload: bytes, *, within_s: float | None = None) -> None:
        """Send source, once there is room for it; FieldError if there is none in time, or the source is not accepted."""
        stream, limit, max_source_s = self.stream, self.server.config.max_unread, self.server.config.max_source_s
        while not stream.closed and stream.unread and stream.unread + len(payload) > limit:
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), within_s)
            except asyncio.TimeoutError:
                raise FieldError("audio", f"audio: {limit} bytes wait to be heard: send no faster than it is spoken", "overrun") from None
        if stream.ended or stream.closed:
            raise FieldError("audio", "audio: the source has ended: begin a new one", "ended")
        if stream.source_s > max_source_s:
            raise FieldError("audio", f"audio: at most {max_source_s:g} s of source are taken at a time", "too_long")
        stream.source(payload)

    async def notes(self) -> AsyncIterator[StreamUpdate]:
        """The updates of the stream up to its end; StreamFailedError if it cannot continue."""
        while True:
            note = await self._notes.get()
            if isinstance(note, Exception):
                raise note
            if note.kind == "finished":
                return
            yield note

    async def events(self) -> AsyncIterator[Event]:
        """The events that write text."""
        async for note in self.notes():
            if note.event is not None and not note.event.schedule:
                yield note.event

    def close(self) -> None:
        """Drop the stream and free its seat; calls that wait for notes or for room return."""
        if not self.stream.closed:
            self.stream.close()
            self.fail(StreamFailedError("the stream was let go"))
            self._room.set()
        if self._seat is not None:
            self._seat.free()


class Transcript:
    """The text of events, in pieces that add up to it: no blank before the first, one between windows that do not overlap.

    >>> transcript, at = Transcript(), (1, 1, 2, False)
    >>> "|".join(map(transcript.add, [Event(0, 1, 5, " Good", *at), Event(0, 2, 6, " day", *at), Event(1, 1, 7, "sir", *at)]))
    'Good| day| sir'
    """

    def __init__(self) -> None:
        self.text = ""
        self._window, self._begins = 0, False

    def add(self, event: Event) -> str:
        piece = event.text if self.text else event.text.lstrip()
        if event.window_index != self._window:
            self._window, self._begins = event.window_index, self._begins or event.step == 1
        if piece and self._begins and self.text and not self.text[-1].isspace() and not piece[0].isspace():
            piece = " " + piece
        if piece:
            self._begins = False
        self.text += piece
        return piece
