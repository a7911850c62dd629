"""The gateway in front of many replicas: it accepts clients and forwards each connection to the replica that has its session.

Replicas are ordinary servers, each on its own port, with a key that only the gateway knows. The gateway has no model. It has the guard and
limits of a server, so a refused connection never reaches a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, cast
from urllib.parse import urlencode

import aiohttp
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol
from yarl import URL

from zendaya.serve.app import PAGES, guarded_app
from zendaya.serve.auth import HEADERS
from zendaya.serve.config import ServeConfig
from zendaya.serve.connection import LEFT, PROTOCOLS, WebSocketConnection
from zendaya.serve.monitoring import LOG, Gauges
from zendaya.serve.server import Host, unavailable
from zendaya.serve.transports.base import cancel, open_transports, while_connected
from zendaya.serve.transports.websocket import PATH

REACH_S = 5.0  # seconds for connecting to a replica
LOST = 1011
"""Close code of a connection whose replica has died; the client reconnects and learns that its session is unknown."""
GOING_ON = (1006, 1009, LOST)  # close codes of a replica after which it keeps the session
OWN = frozenset({*HEADERS, "set-cookie", "transfer-encoding", "connection", "keep-alive", "date", "server"})
"""Headers of a replica's answer that the gateway sets itself."""
PRIVATE = frozenset(
    {"host", "authorization", "cookie", "origin", "connection", "keep-alive", "expect", "upgrade", "te", "trailer", "transfer-encoding"}
)
"""Headers of a request that are not forwarded: secrets of the gateway's clients, and those of one connection."""


@dataclass(eq=False, repr=False)
class Lease:
    """A seat on a replica."""

    replica: str
    address: str  # as 127.0.0.1:41000
    release: Callable[[], None]
    connection: WebSocketConnection | None = None  # the connection that uses it now
    expiry: asyncio.TimerHandle | None = None


class Pool(Protocol):
    """The replicas, however they are run."""

    async def lease(self) -> Lease | None:
        """A seat on the least loaded replica; None if all are full."""

    async def any(self) -> tuple[str, str] | None:
        """The name and address of any replica."""

    @property
    def running(self) -> int:
        """Number of running replicas."""


class Front(Host):
    """A running gateway, in the place of `Server` for the listener and the health routes; `key` is that of the replicas."""

    def __init__(self, config: ServeConfig, pool: Pool, key: str, gauges: Gauges, http: aiohttp.ClientSession) -> None:
        super().__init__(config, gauges)
        self.pool, self.http = pool, http
        self.headers = {"Authorization": f"Bearer {key}"}
        self.seats: set[Lease] = set()
        self.places = dict[str, Lease]()  # the seat of each session
        self.replicas = dict[str, str]()  # addresses of the replicas known so far
        self.evaluation: tuple[str, str] | None = None  # the replica that answers all pinned requests

    @property
    def num_seats(self) -> int:
        return self.pool.running * self.config.max_sessions

    @property
    def failure(self) -> str:
        return "" if self.pool.running else "no replica runs"

    # Seats.

    async def take(self) -> Lease:
        """A seat; NoSeatError if there is none."""
        lease = None if self.draining else await self.pool.lease()
        if lease is None:
            raise self.no_seat("all seats are taken")
        self.replicas[lease.replica] = lease.address
        self.seats.add(lease)
        return lease

    def free(self, lease: Lease) -> None:
        """Free a seat and forget its session."""
        if lease in self.seats:
            self.seats.discard(lease)
            lease.release()
        if lease.expiry is not None:
            lease.expiry.cancel()
        self.places = {name: place for name, place in self.places.items() if place is not lease}

    def lose(self, replica: str) -> None:
        """Forget a dead replica and its sessions."""
        if self.replicas.pop(replica, None) is not None:
            LOG.warning("replica lost", extra={"event": "replica_lost", "replica": replica})
        for lease in [lease for lease in self.seats if lease.replica == replica and lease.connection is None]:
            self.free(lease)

    # Sockets.

    async def connect(self, websocket: WebSocket) -> None:
        """Forward one connection to the replica of its session, or to any replica for a new one."""
        streams = websocket.scope["path"] == PATH
        name = websocket.query_params.get("session", "") if streams else ""
        known = self.places.get(name)
        lease = known or await self.take()
        if 0 < len(name) <= 64:
            self.places[name] = lease  # before the answer, so that a client that reconnects meanwhile gets the same replica
        connection, code = None, 1006
        try:
            replica = await self._reach(websocket, lease)
            if replica is None:
                return
            try:
                connection = await WebSocketConnection.accept(websocket, self.config.slow_s)
                if not streams:
                    lease.connection = connection
                code = await self._relay(connection, replica, lease, streams=streams)
            except ConnectionError as error:
                LOG.info("connection lost", extra={"event": "lost", "reason": str(error)})
            finally:
                replica.transport.abort()
        finally:
            if connection is not None and lease.connection is connection:
                lease.connection = None
                if not streams or connection.code in LEFT or code not in GOING_ON or lease.replica not in self.replicas:
                    self.free(lease)
                else:  # for as long as the replica keeps the session for a reconnect
                    lease.expiry = asyncio.get_running_loop().call_later(self.config.orphan_s, self.free, lease)
            elif known is None and lease.connection is None and lease.expiry is None:
                self.free(lease)  # no session was opened

    async def _reach(self, websocket: WebSocket, lease: Lease) -> ClientConnection | None:
        """Connect to the replica of a seat; None if that failed, and the client has been told."""
        offered = [Subprotocol(name) for name in PROTOCOLS if name in websocket.scope.get("subprotocols", [])]
        url = f"ws://{lease.address}{websocket.scope['path']}?{urlencode(websocket.query_params.multi_items())}"
        try:
            return await connect(
                url, additional_headers=self.headers, subprotocols=offered or None, compression=None, max_size=None, proxy=None,
                open_timeout=REACH_S, close_timeout=REACH_S, user_agent_header=None,
            )  # fmt: skip
        except InvalidStatus as error:
            answer = error.response
            kept = {name: value for name, value in answer.headers.raw_items() if name.lower() not in OWN}
            response = Response(bytes(answer.body or b""), answer.status_code, kept)
        except (OSError, InvalidHandshake, asyncio.TimeoutError) as error:
            response = unavailable("lost", "the replica does not answer")
            if isinstance(error, ConnectionRefusedError):  # nothing listens; a slow replica may still have the session
                self.lose(lease.replica)
        await websocket.send_denial_response(response)
        return None

    async def _relay(self, connection: WebSocketConnection, replica: ClientConnection, lease: Lease, *, streams: bool) -> int:
        """Forward messages both ways until one side closes; the replica's close code, 1006 if it has not closed."""

        async def down() -> None:
            first = streams
            async for message in replica:
                assert isinstance(message, str)
                if first and (opened := json.loads(message))["type"] == "opened":  # it names the session of this connection
                    self.places[opened["session"]] = lease
                    lease.connection = connection
                    if lease.expiry is not None:
                        lease.expiry.cancel()
                        lease.expiry = None
                first = False
                await connection.send(message)

        async def up() -> None:
            while (message := await connection.receive()) is not None:
                await replica.send(message)

        downwards, upwards = asyncio.create_task(down()), asyncio.create_task(up())
        try:
            await asyncio.wait((downwards, upwards), return_when=asyncio.FIRST_COMPLETED)
            if not downwards.done() and upwards.exception() is None:  # the client closed
                if connection.code in LEFT:
                    await replica.close(connection.code)
                return 1006
            if not downwards.done():
                await asyncio.wait((downwards,), timeout=REACH_S)  # the replica's last messages
        finally:
            results = await cancel(downwards, upwards)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, ConnectionClosed):
                raise result
        code, reason = replica.close_code or 1006, replica.close_reason or ""
        if code in (1005, 1006):
            code, reason = LOST, "the replica has died"
        await connection.close(code, reason)
        return code

    # Requests.

    async def stateless(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request that any replica can answer."""
        await self._forward(await self._some(), scope, receive, send)

    async def seated(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request that takes a seat."""
        lease = await self.take()
        try:
            await self._forward((lease.replica, lease.address), scope, receive, send)
        finally:
            self.free(lease)

    async def pinned(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request of a transport whose requests share state: one replica answers all of them."""
        gone = self.evaluation is not None and self.evaluation[0] not in self.replicas
        if gone and scope["path"] != "/reset":  # another replica lacks the state
            await unavailable("lost", "the evaluation's replica has died, reset")(scope, receive, send)
            return
        if gone or self.evaluation is None:
            self.evaluation = await self._some()
        await self._forward(self.evaluation, scope, receive, send)

    async def _some(self) -> tuple[str, str] | None:
        if not self.replicas and (found := await self.pool.any()) is not None:
            self.replicas[found[0]] = found[1]
        return next(iter(self.replicas.items()), None)

    async def _forward(self, replica: tuple[str, str] | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request while the client is connected; the answer is streamed back."""
        if replica is None:
            await unavailable("lost", "no replica runs")(scope, receive, send)
            return
        name, address = replica
        read, started = asyncio.Event(), False

        async def body() -> AsyncIterator[bytes]:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError("the client disconnected")
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body", False):
                    break
            read.set()

        async def ask() -> None:
            nonlocal started
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"] if k.decode("latin-1") not in PRIVATE}
            data = body()
            if scope["method"] in ("GET", "HEAD"):  # their bodies are ignored
                headers.pop("content-length", None)
                async for _ in data:
                    pass
            url = URL(f"http://{address}").with_path(scope["path"]).with_query(scope["query_string"].decode("latin-1"))
            async with self.http.request(
                scope["method"], url, headers={**headers, **self.headers}, data=None if read.is_set() else data, allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            ) as answer:  # fmt: skip
                kept = [(k.lower(), v) for k, v in answer.raw_headers if k.decode("latin-1").lower() not in OWN]
                started = True
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                async for piece in answer.content.iter_any():
                    await asyncio.wait_for(send({"type": "http.response.body", "body": piece, "more_body": True}), self.config.slow_s)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await while_connected(ask(), receive, read)
        except HTTPException:
            pass  # the client disconnected
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            if isinstance(error, aiohttp.ClientConnectorError):
                self.lose(name)
            if not started:
                await unavailable("lost", "the replica has died")(scope, receive, send)

    # Metrics and draining.

    async def figures(self) -> bytes:
        """The metrics of the gateway and all replicas, with the label `replica`."""

        async def of(name: str, address: str) -> tuple[str, str]:
            try:
                async with self.http.get(f"http://{address}/metrics", headers=self.headers) as answer:
                    return name, await answer.text()
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    self.lose(name)
                return name, ""

        parts = await asyncio.gather(*(of(*replica) for replica in list(self.replicas.items())))
        return merge_metrics([("front", self.gauges.text().decode()), *parts])

    async def end_sources(self) -> None:
        for lease in [lease for lease in self.seats if lease.connection is None and lease.expiry is not None]:
            self.free(lease)
        await asyncio.gather(*(self._end(address) for address in self.replicas.values()))

    async def _end(self, address: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            async with self.http.post(f"http://{address}/drain", headers=self.headers):
                pass


def merge_metrics(parts: Iterable[tuple[str, str]]) -> bytes:
    """The Prometheus texts of several servers as one, each sample with the label `replica`.

    >>> text = "# HELP n Things\\n# TYPE n gauge\\nn 2.0\\n"
    >>> print(merge_metrics([("a", text), ("b", text)]).decode(), end="")
    # HELP n Things
    # TYPE n gauge
    n{replica="a"} 2.0
    n{replica="b"} 2.0
    """
    families = dict[str, Metric]()
    for replica, text in parts:
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                family.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    return generate_latest(cast("Any", SimpleNamespace(collect=families.values)))


def drain_route() -> Route:
    """A replica's extra route, by which the gateway ends its sources; the gateway forwards no client to it."""

    async def drain(request: Request) -> Response:
        await request.app.state.server.drain(0.0)
        return JSONResponse({})

    return Route("/drain", drain, methods=["POST"])


def make_front(config: ServeConfig, pool: Pool, key: str) -> Starlette:
    """The application of a gateway; `app.state.server` is the Front once it has started."""
    gauges = Gauges()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REACH_S)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()) as http:
            app.state.server = front = Front(config, pool, key, gauges, http)
            for transport in app.state.transports.values():
                how = front.pinned if transport.pinned else front.seated
                app.router.routes.extend(_forwarded(route, front, how) for route in transport.routes(cast("Any", front)))
            app.router.routes.extend(_forwarded(route, front, front.stateless) for route in PAGES)
            yield
            for lease in list(front.seats):
                front.free(lease)

    app = guarded_app(config, gauges, [], lifespan)
    app.state.transports = open_transports(config)
    return app


def _forwarded(route: BaseRoute, front: Front, how: ASGIApp) -> BaseRoute:
    """A route of a server, forwarded to a replica."""
    assert isinstance(route, Route | WebSocketRoute)
    if isinstance(route, WebSocketRoute):
        return WebSocketRoute(route.path, front.connect)
    return Route(route.path, _Forward(how), methods=list(route.methods or ()))


@dataclass
class _Forward:
    """A forwarded route: an object, since Starlette takes a function for a handler of requests and not for an ASGI application."""

    how: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.how(scope, receive, send)
