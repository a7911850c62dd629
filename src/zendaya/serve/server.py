"""What all transports of a server share: the hub, the seats, the figures, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from zendaya.serve.config import ServeConfig
from zendaya.serve.gauges import Gauges
from zendaya.serve.hub import Hub
from zendaya.serve.served import Served

LOG = logging.getLogger("zendaya.serve")
FINALS_S = 30.0
"""What may take the writing and delivering of what has come, once sources are ended."""
RETRY_S = 5
"""When who is turned away may come back, in seconds."""


@dataclass(eq=False, repr=False)
class Seat:
    """A place among the sessions a server takes; given back once."""

    server: Server
    held: bool = True

    def free(self) -> None:
        """Give it back."""
        if self.held:
            self.held = False
            self.server.seats.discard(self)
            self.server.gauges.sessions.set(len(self.server.seats))


@dataclass(eq=False, repr=False)
class Server:
    """One server: made when it starts, shared by all its routes."""

    config: ServeConfig
    served: Served
    hub: Hub
    gauges: Gauges
    seats: set[Seat] = field(default_factory=set)
    enders: set[Callable[[], None]] = field(default_factory=set)
    """What ends each source that is open, for when there is no more time."""
    draining: bool = False

    @property
    def full(self) -> bool:
        return self.draining or len(self.seats) >= self.config.max_sessions

    def take_seat(self) -> Seat | None:
        """A seat, or None where there is none."""
        if self.full:
            self.gauges.rejections.labels("draining" if self.draining else "full").inc()
            return None
        seat = Seat(self)
        self.seats.add(seat)
        self.gauges.sessions.set(len(self.seats))
        return seat

    async def drain(self, within_s: float) -> None:
        """Take nobody new, let streams go on for a time, then end them; done when all is written and delivered."""
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
