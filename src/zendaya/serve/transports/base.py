"""A transport: one protocol by which clients reach a server.

A transport is one file of this folder that names its class `TRANSPORT`, or a class that another package names by an entry point of the
group `zendaya.transports`. A server mounts all there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import Receive

from zendaya.plugins import available, load
from zendaya.serve.config import ServeConfig
from zendaya.serve.server import Server

Result = TypeVar("Result")


class Transport:
    """A protocol of a server; a subclass overrides what it needs.

    Made before the model is loaded: a port of its own is bound in `__init__`, a wrong setting raises ConfigError there.
    """

    pinned: ClassVar[bool] = False
    """Whether its HTTP requests share state, so that a gateway must send all of them to one replica."""
    server: Server  # for subclasses that keep the server of `routes` or `start`

    def __init__(self, config: ServeConfig) -> None:
        self.config = config

    @property
    def address(self) -> str:
        """A line on where it listens, if that is not the server's own port."""
        return ""

    def routes(self, server: Server) -> Sequence[BaseRoute]:
        """Its routes. A gateway without a model asks for them too, so read `server` only once a request has come."""
        return ()

    async def start(self, server: Server) -> None:
        """Called once in the server's event loop, before the first request."""

    def end(self) -> None:
        """End every open source: the time for draining is over."""

    async def stop(self) -> None:
        """Called once when the server stops."""


def open_transports(config: ServeConfig) -> dict[str, Transport]:
    """All transports there are, built in or installed, by name."""
    return {name: load("transports", name)(config) for name in available("transports")}


async def within(seconds: float, request: Coroutine[Any, Any, Result]) -> Result:
    """Await a client's request; 408 if it takes longer: a client that sends a byte now and then must not hold a seat."""
    try:
        return await asyncio.wait_for(request, seconds)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {seconds:g} s: send it faster, or less of it") from None


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive, read: asyncio.Event | None = None) -> Result:
    """Await work for a client; cancelled with 499 if the client disconnects. `read` is set once its request has been read."""

    async def disconnected() -> None:
        if read is not None:
            await read.wait()
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise HTTPException(499, "the client disconnected")
        return doing.result()
    finally:
        await cancel(doing, gone)


async def cancel(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancel tasks and wait until they have ended; their results or exceptions."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
