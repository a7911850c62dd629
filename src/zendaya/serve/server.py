"""The state that all transports of a server share: hub, seats and metrics; and how a server drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zendaya.errors import ZendayaError
from zendaya.runtime.options import DecodeOptions
from zendaya.schedule import PowerLaw
from zendaya.serve.config import ServeConfig
from zendaya.serve.hub import Hub
from zendaya.serve.intake import Kind, Served
from zendaya.serve.metrics import Gauges

if TYPE_CHECKING:
    from zendaya.serve.feed import Feed

LOG = logging.getLogger("zendaya.serve")
FINALS_S = 30.0
"""Seconds in which the last text is written and delivered, once sources have ended."""


class NoSeatError(ZendayaError):
    """No session can be opened now: all seats are taken (`full`), or the server is shutting down (`draining`)."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False, repr=False)
class Seat:
    """One of the sessions that a server can hold; freed once."""

    server: Server
    held: bool = True

    def free(self) -> None:
        """Give the seat back."""
        if self.held:
            self.held = False
            self.server.seats.discard(self)
            self.server.gauges.sessions.set(len(self.server.seats))


@dataclass(eq=False, repr=False)
class Server:
    """A running server: the public surface for its transports."""

    config: ServeConfig
    served: Served
    hub: Hub
    gauges: Gauges
    seats: set[Seat] = field(default_factory=set)
    enders: set[Callable[[], None]] = field(default_factory=set)
    """Calls that end open sources, once the time for draining is over."""
    draining: bool = False

    @property
    def full(self) -> bool:
        """Whether no new session is accepted."""
        return self.draining or len(self.seats) >= self.config.max_sessions

    @property
    def failure(self) -> str:
        """Why nothing can be served; empty while all is well."""
        return "" if self.hub.alive else "a model thread has stopped"

    async def figures(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return self.gauges.text()

    def take_seat(self) -> Seat:
        """A seat; NoSeatError if there is none."""
        if self.full:
            code = "draining" if self.draining else "full"
            self.gauges.rejections.labels(code).inc()
            raise NoSeatError("the server is shutting down" if self.draining else f"all {self.config.max_sessions} seats are taken", code)
        seat = Seat(self)
        self.seats.add(seat)
        self.gauges.sessions.set(len(self.seats))
        return seat

    @contextlib.contextmanager
    def seated(self) -> Iterator[None]:
        """Hold a seat; NoSeatError if there is none."""
        seat = self.take_seat()
        try:
            yield
        finally:
            seat.free()

    @contextlib.asynccontextmanager
    async def stream(self, source: Kind, *, rate: float | None = None, gamma: float | None = None) -> AsyncIterator[Feed]:
        """Open a stream with a seat of its own: send it a source, iterate over its `events()`.

        `rate` is samples or rows per second, `gamma` the dial; without them, those of the model and of the server.
        """
        from zendaya.serve.feed import Feed

        with self.seated():
            schedule = PowerLaw(self.config.gamma if gamma is None else gamma)
            feed = Feed(self, self.served.intake(source, rate), DecodeOptions(schedule=schedule, voice=self.config.voice))
            self.enders.add(feed.stream.end)
            try:
                yield feed
            finally:
                self.enders.discard(feed.stream.end)
                feed.close()

    async def drain(self, within_s: float) -> None:
        """Accept no new session, let streams run for a time, then end them; returns once all text is delivered."""
        self.draining = True
        LOG.info("draining", extra={"event": "drain", "sessions": len(self.seats), "within_s": within_s})
        await self._until_empty(within_s)
        for end in list(self.enders):
            end()
        await self._until_empty(FINALS_S)

    async def _until_empty(self, within_s: float) -> None:
        end_s = asyncio.get_running_loop().time() + within_s
        while self.seats and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.02)
