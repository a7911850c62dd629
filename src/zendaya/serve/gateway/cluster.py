"""`zendaya serve --ray`: replicas on Ray Serve behind one gateway.

Ray Serve starts the replicas, checks their health and scales their number. A session is a Ray request that lasts as long as the session:
so Ray counts it, sends a replica no more than it has seats, and lets a replica finish before it stops. The traffic of a session does not
pass through Ray: see `zendaya.serve.gateway.front`.
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
from zendaya.parallel import ray_cluster
from zendaya.serve.config import ServeConfig, bind, in_url

LOG = logging.getLogger("zendaya.serve")
DEPLOYMENT = "replica"
SEAT_S = 1.0  # seconds to wait for a seat if all are taken: one may just become free
LOOK_S = 1.0  # seconds between two looks at the number of running replicas
BUSY = 0.7  # share of a replica's seats that autoscaling aims at, which leaves room while another replica starts
CONNECT_S = 5.0
LOCAL = "local"
STORE = 100 * 2**20  # bytes of a local Ray's object store, which sessions do not use


@dataclass(frozen=True)
class Replicas:
    """The least and the greatest number of replicas.

    >>> Replicas.parse("2"), Replicas.parse("1:4")
    (Replicas(least=2, most=2), Replicas(least=1, most=4))
    """

    least: int = 2
    most: int = 2

    @classmethod
    def parse(cls, text: str) -> Replicas:
        """A number, or MIN:MAX."""
        found = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text, re.ASCII)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise ConfigError(f"--replicas: expected a number, or MIN:MAX to follow the load: got {text!r}")
        return cls(least, most)


class Replica:
    """A server on a port of its own, in a Ray actor."""

    def __init__(self, config: ServeConfig, model: str, encoder: str | None, host: str | None) -> None:
        import ray
        import torch
        from ray import serve

        from zendaya.runtime.engine import engine_for, is_native
        from zendaya.serve.app import Listener, make_app
        from zendaya.serve.gateway.front import drain_route
        from zendaya.serve.intake import load_served
        from zendaya.serve.monitoring import log_to

        log_to()
        torch.set_num_threads(1)
        served = load_served(model, encoder)
        host = ray.util.get_node_ip_address() if host is None else host
        app = make_app(config, served, engine=engine_for(served.model, threads=1) if is_native(served.model) else None)
        app.router.routes.append(drain_route())
        self._listener = listener = Listener(app, dataclasses.replace(config, host=host))
        listening = bind(host, 0)
        # A loop of its own: Ray's own loop is busy with Ray's work.
        self._thread = threading.Thread(target=lambda: asyncio.run(listener.serve(sockets=[listening])), name="zendaya-serve", daemon=True)
        self._thread.start()
        while not listener.started and self._thread.is_alive():
            time.sleep(0.01)
        self.name, self.address = serve.get_replica_context().replica_id.unique_id, f"{in_url(host)}:{listening.getsockname()[1]}"

    async def sit(self) -> AsyncIterator[tuple[str, str]]:
        """The replica's name and address; the request lasts until it is cancelled, and so holds a seat."""
        yield self.name, self.address
        await asyncio.Event().wait()

    async def where(self) -> tuple[str, str]:
        return self.name, self.address

    async def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if not self._thread.is_alive() or not self._listener.app.state.server.hub.alive:
            raise RuntimeError("a model thread has stopped, or the server")


class RayPool:
    """The replicas of a Ray Serve deployment."""

    def __init__(self, handle: Any, deployed: Callable[[], int]) -> None:
        self._handle, self._deployed = handle, deployed
        self.running = deployed()

    async def watch(self) -> None:
        """Update the number of running replicas, forever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.running = await asyncio.wait_for(asyncio.to_thread(self._deployed), CONNECT_S)
            except Exception as error:  # Ray may raise anything; replicas that cannot be counted do not run
                if self.running:
                    LOG.warning("Ray does not answer", extra={"event": "no_ray", "reason": type(error).__name__})
                self.running = 0

    async def lease(self) -> Any:
        """A seat on the replica that Ray chooses; None if all are full."""
        from zendaya.serve.gateway.front import Lease

        sitting = self._handle.options(stream=True).sit.remote()
        try:
            name, address = await asyncio.wait_for(anext(sitting), SEAT_S)
        except BaseException as error:  # no seat in time, the replica has just died, or we were cancelled
            sitting.cancel()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, asyncio.TimeoutError):
                LOG.warning("no seat", extra={"event": "no_seat", "reason": type(error).__name__})
            return None
        return Lease(name, address, sitting.cancel)

    async def any(self) -> tuple[str, str] | None:
        """The name and address of any replica; None if none answers."""
        try:
            return await asyncio.wait_for(self._handle.where.remote(), SEAT_S)
        except Exception as error:  # as above
            LOG.warning("no replica answers", extra={"event": "no_replica", "reason": type(error).__name__})
            return None


def import_ray(address: str) -> None:
    """Import Ray, set up for an address; MissingExtraError if Ray Serve or aiohttp is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports from our users
    # Ray listens on all addresses and runs any code it is sent: a Ray started here obeys only holders of a token, which its processes
    # inherit. Ray reads these variables when it is imported.
    if address == LOCAL and "ray" not in sys.modules and os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import aiohttp  # noqa: F401
        from ray import serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "ray", "distributed", "a server on a Ray cluster") from None


def name_of(port: int) -> str:
    """The name of a server in its cluster: its machine and port."""
    return "zendaya-" + re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()) + f"-{port}"


@contextlib.contextmanager
def deployed(
    config: ServeConfig, model: str, encoder: str | None, *, name: str, address: str = LOCAL, replicas: Replicas | None = None
) -> Iterator[tuple[RayPool, str]]:
    """Deploy the replicas of a server on Ray Serve, and remove them afterwards; gives them and their key.

    The replicas that a killed server of the same name has left are replaced.
    """
    replicas = replicas or Replicas()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    import_ray(address)
    num_cpus = max(replicas.most, cores)
    with ray_cluster(address, purpose="a server on a Ray cluster", num_cpus=num_cpus, object_store_memory=STORE):
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        quiet = {"log_level": "ERROR", "enable_access_log": False}
        # Without Ray's own proxy: clients reach the gateway only. If Serve runs already, it stays as it is.
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
            with contextlib.suppress(Exception):  # a dead cluster has taken its replicas with it
                serve.delete(name)


async def run_front(config: ServeConfig, pool: RayPool, key: str, http: socket.socket, model: str, *, say: Callable[[str], None]) -> None:
    """Serve until a signal, and until all text is delivered; `say` prints the address."""
    from zendaya.serve.app import listen
    from zendaya.serve.gateway.front import make_front
    from zendaya.serve.transports.base import cancel

    watching = asyncio.create_task(pool.watch())
    await listen(make_front(config, pool, key), config, http, {"model": model}, say=say)
    await cancel(watching)
