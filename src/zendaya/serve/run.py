"""A server as a process: it listens, says where, and ends as it should."""

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

from zendaya.engine import engine_for, engine_name, is_native
from zendaya.errors import ConfigError
from zendaya.serve.app import make_app
from zendaya.serve.config import ServeConfig
from zendaya.serve.line import Socket
from zendaya.serve.served import Served
from zendaya.serve.server import Server

LOG = logging.getLogger("zendaya.serve")
MOST_CORES = 16
"""More would wait for each other on models of this size."""


class Listener(uvicorn.Server):
    """uvicorn's server; the first signal lets streams end, the second does not wait for them."""

    def __init__(self, app: Starlette, config: ServeConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app, host=config.host, port=config.port, ws=Socket, ws_max_size=config.max_message, ws_per_message_deflate=False,
                ws_ping_interval=config.ping_s, ws_ping_timeout=config.ping_s, log_config=None, access_log=False, server_header=False,
                # Who comes is who connects: what a client says of that in a header could be anything.
                proxy_headers=False,
                # One parser of HTTP whatever else is installed, so that what is refused does not depend on it.
                http="h11", lifespan="on", timeout_graceful_shutdown=5, timeout_keep_alive=15, h11_max_incomplete_event_size=64 * 1024,
            )
        )  # fmt: skip
        self.app, self.serve_config = app, config
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; from now on signals drain."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM lets streams go on for a time, Ctrl-C writes out what has come; said again, the server stops at once."""
        if self._draining is not None or self._loop is None or self.should_exit:
            self.should_exit = self.force_exit = True
            return
        within_s = self.serve_config.drain_s if sig == signal.SIGTERM else 0.0
        self._loop.call_soon_threadsafe(self.begin_drain, within_s)

    def begin_drain(self, within_s: float) -> None:
        """Take nobody new, let who is there finish, then stop."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain(within_s))

    async def _drain(self, within_s: float) -> None:
        server: Server = self.app.state.server
        await server.drain(within_s)
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, or one line on why it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, asyncio sends each message at once on its connections; without, it would wait for the one before to be acknowledged.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
    except OSError as error:
        listening.close()
        raise ConfigError(f"{host}:{port} cannot be listened on: {error.strerror or error}; choose another --port") from None
    return listening


async def run(
    config: ServeConfig, served: Served, http: socket.socket, wyoming: socket.socket | None, *, say: Callable[[str], None]
) -> None:  # fmt: skip
    """Serve until a signal, and until all is delivered; `say` is told where."""
    # The encoder's thread and the decoder's work at the same time: each gets half of the cores.
    cores = min(MOST_CORES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    torch.set_num_threads(max(1, cores // 2))
    engine = engine_for(served.model, threads=cores - cores // 2) if is_native(served.model) else None
    listener = Listener(make_app(config, served, engine=engine, wyoming_socket=wyoming), config)
    task = asyncio.create_task(listener.serve(sockets=[http]))
    while not listener.started and not task.done():
        await asyncio.sleep(0.01)
    if listener.started:
        gc.freeze()  # the modules and the model are there to stay: not to be searched for garbage again and again
        about = {"host": config.host, "port": http.getsockname()[1], "model": served.name, "engine": engine_name(served.model)}
        LOG.info("started", extra={"event": "start", **about})
        host = f"[{config.host}]" if ":" in config.host else config.host
        say(f"zendaya: captions of {served.name} at http://{host}:{http.getsockname()[1]}")
        if wyoming is not None:
            say(f"zendaya: Wyoming at tcp://{host}:{wyoming.getsockname()[1]}")
    await task
