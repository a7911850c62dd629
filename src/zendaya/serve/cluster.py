"""`zendaya serve --ray`: replicas on Ray Serve behind one front.

Ray Serve starts the replicas, looks after their health, and lets there be more or fewer of them as sessions come and go: a session is a
request that lasts as long as it does, so that Ray counts it, sends no more to a replica than it has seats, and lets a replica that is
to go finish what it has. What is said in a session does not go through Ray: see `zendaya.serve.front`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zendaya.errors import ConfigError, MissingExtraError
from zendaya.serve.config import ServeConfig

LOG = logging.getLogger("zendaya.serve")
DEPLOYMENT = "replica"
SEAT_S = 1.0
"""What waiting for a seat may take, where all are taken: one may just come free."""
LOOK_S = 1.0
"""How often Ray is asked how many replicas run."""
BUSY = 0.7
"""Share of a replica's seats that autoscaling aims at: there is room while another starts."""
CONNECT_S = 5.0
LOCAL = "local"
STORE = 100 * 2**20
"""Bytes of a local Ray's object store: nothing of a session goes through it."""


@dataclass(frozen=True)
class Replicas:
    """How many: at least and at most.

    >>> Replicas.parse("2"), Replicas.parse("1:4")
    (Replicas(least=2, most=2), Replicas(least=1, most=4))
    """

    least: int = 2
    most: int = 2

    @classmethod
    def parse(cls, text: str) -> Replicas:
        """A number, or MIN:MAX."""
        found = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text, re.ASCII)
        least = int(found[1]) if found else 0
        most = int(found[2] or found[1]) if found else 0
        if not 1 <= least <= most:
            raise ConfigError(f"--replicas is a number, or MIN:MAX to let it follow the sessions: got {text!r}")
        return cls(least, most)


class Replica:
    """A server on a port of its own, in an actor of Ray's."""

    def __init__(self, config: ServeConfig, model: str, encoder: str | None, host: str | None) -> None:
        import ray
        import torch
        from ray import serve

        from zendaya.engine import engine_for, is_native
        from zendaya.serve.app import make_app
        from zendaya.serve.front import drain_route
        from zendaya.serve.logs import log_to
        from zendaya.serve.run import Listener, bind
        from zendaya.serve.served import load_served

        log_to()
        torch.set_num_threads(1)
        served = load_served(model, encoder)
        host = ray.util.get_node_ip_address() if host is None else host
        app = make_app(config, served, engine=engine_for(served.model, threads=1) if is_native(served.model) else None)

        app.router.routes.append(drain_route())
        self._listener = listener = Listener(app, dataclasses.replace(config, host=host))
        listening = bind(host, 0)
        # A loop of its own: Ray's has Ray's work to do.
        self._thread = threading.Thread(target=lambda: asyncio.run(listener.serve(sockets=[listening])), name="zendaya-serve", daemon=True)
        self._thread.start()
        while not listener.started and self._thread.is_alive():
            time.sleep(0.01)
        address = f"[{host}]" if ":" in host else host
        self.name, self.address = serve.get_replica_context().replica_id.unique_id, f"{address}:{listening.getsockname()[1]}"

    async def sit(self) -> AsyncIterator[tuple[str, str]]:
        """Where the replica is; the request lasts until it is cancelled."""
        yield self.name, self.address
        await asyncio.Event().wait()

    async def where(self) -> tuple[str, str]:
        """Where the replica is."""
        return self.name, self.address

    async def check_health(self) -> None:
        """Asked by Ray: a replica that raises is replaced."""
        if not self._thread.is_alive() or not self._listener.app.state.server.hub.alive:
            raise RuntimeError("a thread of the model has died, or nobody listens")


class RayPool:
    """The replicas of a deployment, by its handle."""

    def __init__(self, handle: Any, deployed: Callable[[], int]) -> None:
        self._handle, self._deployed = handle, deployed
        self.running = deployed()

    async def watch(self) -> None:
        """Keep looking how many run."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.running = await asyncio.wait_for(asyncio.to_thread(self._deployed), CONNECT_S)
            except Exception as error:  # Ray's own, of which there is no closed list: who does not answer runs nothing
                if self.running:
                    LOG.warning("Ray does not answer", extra={"event": "no_ray", "reason": type(error).__name__})
                self.running = 0

    async def lease(self) -> Any:
        """A seat where Ray has one to give."""
        from zendaya.serve.front import Lease

        sitting = self._handle.options(stream=True).sit.remote()
        try:
            name, address = await asyncio.wait_for(anext(sitting), SEAT_S)
        except BaseException as error:  # none was free in time, or the replica has just died, or nobody waits any more
            sitting.cancel()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, asyncio.TimeoutError):
                LOG.warning("no seat", extra={"event": "no_seat", "reason": type(error).__name__})
            return None
        return Lease(name, address, sitting.cancel)

    async def any(self) -> tuple[str, str] | None:
        """Some replica."""
        try:
            return await asyncio.wait_for(self._handle.where.remote(), SEAT_S)
        except Exception as error:  # as above
            LOG.warning("no replica answers", extra={"event": "no_replica", "reason": type(error).__name__})
            return None


def import_ray(address: str) -> None:
    """Import Ray as it is needed for an address; say it where Ray Serve, or what the front needs, is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library does not report its users
    # Ray listens on all addresses of a machine and runs what it is sent: of one that is started here, only who has the token, which its
    # processes inherit, may ask. How it asks, Ray reads when it is imported.
    if address == LOCAL and "ray" not in sys.modules and os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import aiohttp  # noqa: F401
        from ray import serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "ray", "distributed", "a server on a Ray cluster") from None


@contextlib.contextmanager
def connected(address: str, num_cpus: int) -> Iterator[None]:
    """Ray, at an address or (`local`) started here and ended with it."""
    import_ray(address)
    import ray

    host, _, port = address.removeprefix("ray://").rpartition(":")
    local: dict[str, Any] = {}
    if address == LOCAL:
        local = {"include_dashboard": False, "num_cpus": num_cpus, "object_store_memory": STORE}
    elif host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()  # Ray would wait for minutes
        except OSError as error:
            raise ConfigError(f"no Ray cluster at {address}: {error.strerror or error}; give host:port, auto, or local") from None
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(f"no Ray cluster at {address}: {first}; give host:port, auto, or local") from None
    try:
        yield
    finally:
        if started:
            ray.shutdown()


def name_of(port: int) -> str:
    """The name of a server among those of a cluster: its machine and port."""
    return "zendaya-" + re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()) + f"-{port}"


@contextlib.contextmanager
def deployed(
    config: ServeConfig, model: str, encoder: str | None, *, name: str, address: str = LOCAL, replicas: Replicas | None = None
) -> Iterator[tuple[RayPool, str]]:
    """The replicas of a server on Ray Serve, and the key they ask for; gone with the context. Of a name there is one server in a cluster:
    what one that was killed has left is replaced."""
    replicas = replicas or Replicas()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with connected(address, max(replicas.most, cores)):
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        quiet = {"log_level": "ERROR", "enable_access_log": False}
        # Without a proxy of Ray's: nobody but the front is to be asked. Where Serve runs already, it stays as it is.
        serve.start(proxy_location="Disabled", logging_config=quiet)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        key = secrets.token_urlsafe(32)
        inner = dataclasses.replace(config, key=key, port=0, wyoming_port=None, origins=())
        seats = config.max_sessions
        following: dict[str, Any] = {"num_replicas": replicas.least}
        if replicas.most > replicas.least:
            scaling = {"min_replicas": replicas.least, "max_replicas": replicas.most, "target_ongoing_requests": max(1.0, BUSY * seats)}
            scaling |= {"metrics_interval_s": 2.0, "look_back_period_s": 6.0, "upscale_delay_s": 2.0, "downscale_delay_s": 120.0}
            following = {"autoscaling_config": scaling}
        made = serve.deployment(Replica, name=DEPLOYMENT).options(
            max_ongoing_requests=seats, graceful_shutdown_timeout_s=config.drain_s + 5.0, health_check_period_s=5.0,
            health_check_timeout_s=30.0, ray_actor_options={"num_cpus": 1}, logging_config=quiet, **following,
        )  # fmt: skip
        try:
            handle = serve.run(made.bind(inner, model, encoder, "127.0.0.1" if address == LOCAL else None), name=name, route_prefix=None)
        except RuntimeError as error:
            raise ConfigError(f"the replicas could not be started: {str(error).strip().splitlines()[-1]}; see Ray's logs") from None

        def running() -> int:
            return serve.status().applications[name].deployments[DEPLOYMENT].replica_states.get("RUNNING", 0)

        try:
            yield RayPool(handle, running), key
        finally:
            with contextlib.suppress(Exception):  # a cluster that is gone takes its replicas with it
                serve.delete(name)


async def run_front(config: ServeConfig, pool: RayPool, key: str, http: socket.socket, model: str, *, say: Callable[[str], None]) -> None:
    """Listen until a signal, and until all is delivered; `say` is told where."""
    from zendaya.serve.front import make_front
    from zendaya.serve.run import Listener

    listener = Listener(make_front(config, pool, key), config)
    watching = asyncio.create_task(pool.watch())
    task = asyncio.create_task(listener.serve(sockets=[http]))
    while not listener.started and not task.done():
        await asyncio.sleep(0.01)
    if listener.started:
        LOG.info("started", extra={"event": "start", "host": config.host, "port": http.getsockname()[1], "model": model})
        host = f"[{config.host}]" if ":" in config.host else config.host
        say(f"zendaya: captions of {model} at http://{host}:{http.getsockname()[1]}")
    await task
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
