"""The application of a server, with the frame that a gateway has too; and its process, which listens and drains on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from types import FrameType
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.websockets import WebSocket

from zendaya.runtime.engine import Engine, engine_for, engine_name, is_native
from zendaya.serve.auth import Guard
from zendaya.serve.config import ServeConfig, in_url
from zendaya.serve.connection import WebSocketProtocol
from zendaya.serve.fields import FieldError
from zendaya.serve.hub import Hub
from zendaya.serve.intake import Served
from zendaya.serve.monitoring import INTERNAL, LOG, Gauges
from zendaya.serve.page import read_page
from zendaya.serve.server import RETRY_S, Host, NoSeatError, Server, StreamFailedError, error_response, unavailable
from zendaya.serve.transports.base import Transport, open_transports

MOST_CORES = 16  # with more, threads wait for each other on models of this size


def make_app(
    config: ServeConfig, served: Served, *, engine: Engine | None = None, transports: dict[str, Transport] | None = None
) -> Starlette:  # fmt: skip
    """The application of a server; `app.state.server` is the Server once it has started. By default all transports are mounted."""
    gauges = Gauges()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        hub = Hub(served, gauges, engine=engine)
        app.state.server = server = Server(config, served, hub, gauges)
        for transport in app.state.transports.values():
            app.router.routes.extend(transport.routes(server))
            server.enders.add(transport.end)
            await transport.start(server)
        yield
        for transport in app.state.transports.values():
            await transport.stop()
        await hub.close()

    app = guarded_app(config, gauges, PAGES, lifespan)
    app.state.transports = open_transports(config) if transports is None else transports
    app.state.page = read_page()
    return app


def guarded_app(config: ServeConfig, gauges: Gauges, routes: Sequence[BaseRoute], lifespan: Any) -> Starlette:
    """An application with these routes and the health routes, behind the guard."""
    health = [Route("/livez", _livez), Route("/readyz", _readyz), Route("/metrics", _metrics)]
    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, NoSeatError, FieldError, StreamFailedError, Exception), _refuse)
    middleware = [Middleware(Guard, config=config, gauges=gauges)]
    return Starlette(routes=[*health, *routes], lifespan=lifespan, exception_handlers=handlers, middleware=middleware)


async def _livez(request: Request) -> Response:
    failure = request.app.state.server.failure
    return PlainTextResponse(failure or "ok", 503 if failure else 200)


async def _readyz(request: Request) -> Response:
    host: Host = request.app.state.server
    if host.full:
        return PlainTextResponse("draining" if host.draining else "full", 503, {"Retry-After": str(RETRY_S)})
    return PlainTextResponse("ok")


async def _metrics(request: Request) -> Response:
    return Response(await request.app.state.server.figures(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _models(request: Request) -> Response:
    server: Server = request.app.state.server
    served = server.served
    found = {"id": served.name, "object": "model", "created": 0, "owned_by": "zendaya", "sources": served.kinds}
    found |= server.dial_facts(served.kinds[0])
    return JSONResponse({"object": "list", "data": [found]})


async def _page(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in request.app.state.page:
        raise HTTPException(404)
    data, media_type = request.app.state.page[name]
    return Response(data, media_type=media_type)


PAGES = (Route("/v1/models", _models), Route("/", _page), Route("/page/{name}", _page))
"""Routes that any replica answers alike."""


async def _refuse(connection: HTTPConnection, error: Exception) -> Response:
    response = error_response(500, INTERNAL, "internal")  # without the error's message, which may quote input
    if isinstance(error, HTTPException):
        response = error_response(error.status_code, error.detail, f"http_{error.status_code}", headers=dict(error.headers or {}))
    elif isinstance(error, NoSeatError):
        response = unavailable(error.code, str(error))
    elif isinstance(error, FieldError):
        response = error_response(400, str(error), error.code, field=error.field)
    elif isinstance(error, StreamFailedError):
        response = error_response(500 if error.internal else 400, str(error), "failed")
    if isinstance(connection, WebSocket):
        await connection.send_denial_response(response)
    return response


class Listener(uvicorn.Server):
    """uvicorn's server; the first signal drains it, the second stops it at once."""

    def __init__(self, app: Starlette, config: ServeConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app, host=config.host, port=config.port, ws=WebSocketProtocol, ws_max_size=config.max_message, ws_per_message_deflate=False,
                ws_ping_interval=config.ping_s, ws_ping_timeout=config.ping_s, log_config=None, access_log=False, server_header=False,
                # The peer of the connection is the client: a header could claim anything.
                proxy_headers=False,
                # One HTTP parser whatever else is installed, so that all servers refuse the same requests.
                http="h11", lifespan="on", timeout_graceful_shutdown=5, timeout_keep_alive=15, h11_max_incomplete_event_size=64 * 1024,
            )
        )  # fmt: skip
        self.app, self.serve_config = app, config
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; from here on a signal drains."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM lets streams run for a time, Ctrl-C writes out what has arrived; a second signal stops at once."""
        if self._draining is not None or self._loop is None or self.should_exit:
            self.should_exit = self.force_exit = True
            return
        within_s = self.serve_config.drain_s if sig == signal.SIGTERM else 0.0
        self._loop.call_soon_threadsafe(self.begin_drain, within_s)

    def begin_drain(self, within_s: float) -> None:
        """Accept no new session, let open ones finish, then stop."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain(within_s))

    async def _drain(self, within_s: float) -> None:
        await self.app.state.server.drain(within_s)
        self.should_exit = True


async def run(
    config: ServeConfig, served: Served, http: socket.socket, transports: dict[str, Transport], *, say: Callable[[str], None]
) -> None:  # fmt: skip
    """Serve until a signal, and until all text is delivered; `say` prints the addresses."""
    # The encoder thread and the decoder thread run at the same time: each gets half of the cores.
    cores = min(MOST_CORES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    torch.set_num_threads(max(1, cores // 2))
    engine = engine_for(served.model, threads=cores - cores // 2) if is_native(served.model) else None
    app = make_app(config, served, engine=engine, transports=transports)
    about = {"model": served.name, "engine": engine_name(served.model)}
    await listen(app, config, http, about, say=say)


async def listen(app: Starlette, config: ServeConfig, http: socket.socket, about: dict[str, str], *, say: Callable[[str], None]) -> None:
    """Serve an application until a signal; `about` goes to the log."""
    listener = Listener(app, config)
    task = asyncio.create_task(listener.serve(sockets=[http]))
    while not listener.started and not task.done():
        await asyncio.sleep(0.01)
    if listener.started:
        gc.freeze()  # modules and model stay for good: the collector need not search them again and again
        port = http.getsockname()[1]
        LOG.info("started", extra={"event": "start", "host": config.host, "port": port, **about})
        say(f"zendaya: captions of {about['model']} at http://{in_url(config.host)}:{port}")
        for transport in app.state.transports.values():
            if transport.address:
                say(f"zendaya: {transport.address}")
    await task
