"""A server as a process: it listens, prints its addresses, and drains on a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import torch
import uvicorn
from starlette.applications import Starlette

from zendaya.runtime.engine import engine_for, engine_name, is_native
from zendaya.serve.app import make_app
from zendaya.serve.config import ServeConfig
from zendaya.serve.connection import WebSocketProtocol
from zendaya.serve.intake import Served
from zendaya.serve.listening import in_url
from zendaya.serve.server import Server
from zendaya.serve.transports.base import Transport

LOG = logging.getLogger("zendaya.serve")
MOST_CORES = 16
"""With more, threads wait for each other on models of this size."""


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
        server: Server = self.app.state.server
        await server.drain(within_s)
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
