"""The front of many replicas: it listens, looks at who comes, and hands each connection on to the replica that has its session.

Replicas are servers like any other, each on a port of its own with a key that only the front knows. The front has no model. It keeps to
the same limits as a server, since it is one: a connection that may not come in never gets to a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol
from yarl import URL

from zendaya.serve.app import broken, refused
from zendaya.serve.config import ServeConfig
from zendaya.serve.gauges import Gauges
from zendaya.serve.guard import HEADERS, Guard
from zendaya.serve.line import PROTOCOLS, Line
from zendaya.serve.native import LEFT
from zendaya.serve.server import FINALS_S, RETRY_S

LOG = logging.getLogger("zendaya.serve")
REACH_S = 5.0
"""What reaching a replica may take."""
LOST = 1011
"""How a connection is closed whose replica is gone; the client comes back, and is told that its session is unknown."""
GOING_ON = (1006, 1009, LOST)
"""Closed so by a replica, the session is kept there."""
OWN = frozenset({*HEADERS, "set-cookie", "transfer-encoding", "connection", "keep-alive", "date", "server"})
"""Of a replica's answer, what the front says itself."""
PRIVATE = frozenset(
    {"host", "authorization", "cookie", "origin", "connection", "keep-alive", "expect", "upgrade", "te", "trailer", "transfer-encoding"}
)
"""Of a request, what is the front's alone to know, or the connection's."""


@dataclass(eq=False, repr=False)
class Lease:
    """A seat on a replica, counted as long as it is held."""

    replica: str
    address: str
    """As 127.0.0.1:41000."""
    let_go: Callable[[], None]
    line: Line | None = None
    """The connection that has it, for now."""
    expiry: asyncio.TimerHandle | None = None


class Pool(Protocol):
    """Whoever runs the replicas."""

    async def lease(self) -> Lease | None:
        """A seat on the replica that has the most room; None where there is none."""

    async def any(self) -> tuple[str, str] | None:
        """Some replica and its address."""

    @property
    def running(self) -> int:
        """How many replicas run."""


@dataclass(eq=False, repr=False)
class Front:
    """One front: made when it starts, shared by its routes. To the listener it is what a server is."""

    config: ServeConfig
    pool: Pool
    key: str
    """That of the replicas."""
    gauges: Gauges
    http: aiohttp.ClientSession
    leases: set[Lease] = field(default_factory=set)
    places: dict[str, Lease] = field(default_factory=dict)
    """Where each session is."""
    replicas: dict[str, str] = field(default_factory=dict)
    """The addresses of replicas that were met."""
    evaluation: tuple[str, str] | None = None
    """The replica of SimulEval's one evaluation."""
    draining: bool = False

    @property
    def full(self) -> bool:
        return self.draining or len(self.leases) >= self.pool.running * self.config.max_sessions

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    # Seats.

    async def take(self) -> Lease | None:
        """A seat, or None where there is none."""
        lease = None if self.draining else await self.pool.lease()
        if lease is None:
            self.gauges.rejections.labels("draining" if self.draining else "full").inc()
            return None
        self.replicas[lease.replica] = lease.address
        self.leases.add(lease)
        return lease

    def free(self, lease: Lease) -> None:
        """Give a seat back, with the session that had it."""
        if lease in self.leases:
            self.leases.discard(lease)
            lease.let_go()
        if lease.expiry is not None:
            lease.expiry.cancel()
        for name in [name for name, place in self.places.items() if place is lease]:
            del self.places[name]

    def lose(self, replica: str) -> None:
        """A replica is gone, and its sessions with it."""
        if self.replicas.pop(replica, None) is not None:
            LOG.warning("a replica is lost", extra={"event": "replica_lost", "replica": replica})
        for lease in [lease for lease in self.leases if lease.replica == replica and lease.line is None]:
            self.free(lease)

    def refusal(self) -> JSONResponse:
        """The answer to who finds no seat."""
        what = "the server is going down" if self.draining else "all sessions are taken"
        return _unavailable("draining" if self.draining else "full", what)

    # Sockets.

    async def connect(self, websocket: WebSocket) -> None:
        """One connection, handed on to the replica of its session, or to any for a new one."""
        streams = websocket.scope["path"] == "/v1/stream"
        name = websocket.query_params.get("session", "") if streams else ""
        known = self.places.get(name)
        lease = known or await self.take()
        if lease is None:
            await websocket.send_denial_response(self.refusal())
            return
        if 0 < len(name) <= 64:
            self.places[name] = lease  # before it is answered: who is cut off meanwhile comes back to the same
        line, code = None, 1006
        try:
            replica = await self._reach(websocket, lease)
            if replica is None:
                return
            try:
                line = await Line.accept(websocket, self.config.slow_s)
                if not streams:
                    lease.line = line
                code = await self._relay(line, replica, lease, streams=streams)
            except ConnectionError as error:
                LOG.info("connection lost", extra={"event": "lost", "reason": str(error)})
            finally:
                replica.transport.abort()
        finally:
            if line is not None and lease.line is line:
                self._part(lease, line, code, streams=streams)
            elif known is None and lease.line is None and lease.expiry is None:
                self.free(lease)  # no session has come of it

    async def _reach(self, websocket: WebSocket, lease: Lease) -> ClientConnection | None:
        """A connection to the replica of a seat; None where it was refused, and the client has been told."""
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
            response = _unavailable("lost", "the replica does not answer")
            if isinstance(error, ConnectionRefusedError):  # nobody listens; who is slow, or cuts one off, may have the session still
                self.lose(lease.replica)
        await websocket.send_denial_response(response)
        return None

    async def _relay(self, line: Line, replica: ClientConnection, lease: Lease, *, streams: bool) -> int:
        """What both say, until one of them closes; how the replica has closed it, 1006 if it has not."""

        async def down() -> None:
            first = streams
            async for message in replica:
                assert isinstance(message, str)
                if first:
                    self._learn(message, lease, line)
                first = False
                await line.send(message)

        async def up() -> None:
            while (message := await line.receive()) is not None:
                await replica.send(message)

        downwards, upwards = asyncio.create_task(down()), asyncio.create_task(up())
        try:
            await asyncio.wait((downwards, upwards), return_when=asyncio.FIRST_COMPLETED)
            if not downwards.done() and upwards.exception() is None:  # the client has closed it
                if line.code in LEFT:
                    await replica.close(line.code)
                return 1006
            if not downwards.done():
                await asyncio.wait((downwards,), timeout=REACH_S)  # what a replica said before it closed
        finally:
            for task in (downwards, upwards):
                task.cancel()
            results = await asyncio.gather(downwards, upwards, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, ConnectionClosed):
                raise result
        code = replica.close_code or 1006
        if code in (1005, 1006):
            code = LOST
            await line.close(LOST, "the replica is gone")
        else:
            await line.close(code, replica.close_reason or "")
        return code

    def _learn(self, message: str, lease: Lease, line: Line) -> None:
        """What a replica says first: the session that it has opened, or gone on with, has this connection from now on."""
        opened = json.loads(message)
        if opened["type"] == "opened":
            self.places[opened["session"]] = lease
            lease.line = line
            if lease.expiry is not None:
                lease.expiry.cancel()
                lease.expiry = None

    def _part(self, lease: Lease, line: Line, code: int, *, streams: bool) -> None:
        """A connection is over; the seat of a session whose client may come back is held as long as its replica keeps it."""
        lease.line = None
        if not streams or line.code in LEFT or code not in GOING_ON or lease.replica not in self.replicas:
            self.free(lease)
        else:
            lease.expiry = asyncio.get_running_loop().call_later(self.config.orphan_s, self.free, lease)

    # Requests.

    async def stateless(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that any replica can answer."""
        await self._forward(await self._some(), scope, receive, send)

    async def seated(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that takes a seat."""
        lease = await self.take()
        if lease is None:
            await self.refusal()(scope, receive, send)
            return
        try:
            await self._forward((lease.replica, lease.address), scope, receive, send)
        finally:
            self.free(lease)

    async def pinned(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request of the one evaluation, which one replica answers from its beginning to its end."""
        gone = self.evaluation is not None and self.evaluation[0] not in self.replicas
        if gone and scope["path"] != "/reset":  # another replica has not heard what came before
            await _unavailable("lost", "the evaluation's replica is gone, reset")(scope, receive, send)
            return
        if gone or self.evaluation is None:
            self.evaluation = await self._some()
        await self._forward(self.evaluation, scope, receive, send)

    async def _some(self) -> tuple[str, str] | None:
        if not self.replicas and (found := await self.pool.any()) is not None:
            self.replicas[found[0]] = found[1]
        return next(iter(self.replicas.items()), None)

    async def _forward(self, replica: tuple[str, str] | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask a replica, as long as the client is there; its answer goes out as it comes."""
        if replica is None:
            await _unavailable("lost", "no replica runs")(scope, receive, send)
            return
        name, address = replica
        read = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError("the client has gone")
                if message.get("body"):
                    yield message["body"]
                if not message.get("more_body", False):
                    break
            read.set()

        async def gone() -> None:
            await read.wait()
            while (await receive())["type"] != "http.disconnect":
                pass

        started = False

        async def ask() -> None:
            nonlocal started
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"] if k.decode("latin-1") not in PRIVATE}
            data = body()
            if scope["method"] in ("GET", "HEAD"):  # what comes with these is read by nobody
                headers.pop("content-length", None)
                async for _ in data:
                    pass
            url = URL(f"http://{address}").with_path(scope["path"])
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

        asking, going = asyncio.create_task(ask()), asyncio.create_task(gone())
        try:
            await asyncio.wait((asking, going), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (asking, going):
                task.cancel()
            problem, _ = await asyncio.gather(asking, going, return_exceptions=True)
        if isinstance(problem, aiohttp.ClientConnectorError):
            self.lose(name)
        if isinstance(problem, aiohttp.ClientError | OSError | asyncio.TimeoutError) and not started:
            await _unavailable("lost", "the replica is gone")(scope, receive, send)
        elif isinstance(problem, Exception) and not isinstance(problem, aiohttp.ClientError | OSError | asyncio.TimeoutError):
            raise problem

    # Figures, and the end.

    async def figures(self) -> bytes:
        """Those of all replicas and of the front, told apart by the label `replica`."""

        async def of(name: str, address: str) -> tuple[str, str]:
            try:
                async with self.http.get(f"http://{address}/metrics", headers=self.headers) as answer:
                    return name, await answer.text()
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    self.lose(name)
                return name, ""

        parts = await asyncio.gather(*(of(*replica) for replica in list(self.replicas.items())))
        return together([("front", self.gauges.text().decode()), *parts])

    async def drain(self, within_s: float) -> None:
        """Take nobody new, let streams go on for a time, then end them; done when all is written and delivered."""
        self.draining = True
        LOG.info("draining", extra={"event": "drain", "sessions": len(self.leases), "within_s": within_s})
        await self._until(lambda: not self.leases, within_s)
        for lease in [lease for lease in self.leases if lease.line is None and lease.expiry is not None]:
            self.free(lease)
        await asyncio.gather(*(self._end(address) for address in self.replicas.values()))
        await self._until(lambda: not self.leases, FINALS_S)

    async def _end(self, address: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            async with self.http.post(f"http://{address}/drain", headers=self.headers):
                pass

    async def _until(self, condition: Callable[[], bool], within_s: float) -> None:
        end_s = asyncio.get_running_loop().time() + within_s
        while not condition() and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.02)


def together(parts: Iterable[tuple[str, str]]) -> bytes:
    """Prometheus's text form of several servers as one, each sample with the name of its server as the label `replica`.

    >>> text = "# HELP n Things\\n# TYPE n gauge\\nn 2.0\\n"
    >>> print(together([("a", text), ("b", text)]).decode(), end="")
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
    registry = CollectorRegistry()
    registry.register(_Collected(list(families.values())))
    return generate_latest(registry)


class _Collected:
    """Families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def drain_route() -> Route:
    """What a replica has beside the routes of a server: the front, which hands nobody on to it, says when sources are to end."""

    async def drain(request: Request) -> Response:
        await request.app.state.server.drain(0.0)
        return JSONResponse({})

    return Route("/drain", drain, methods=["POST"])


def make_front(config: ServeConfig, pool: Pool, key: str) -> Starlette:
    """The application; what the listener drains is `app.state.server` once it has started."""
    gauges = Gauges()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REACH_S)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()) as http:
            app.state.server = front = Front(config, pool, key, gauges, http)
            yield
            for lease in list(front.leases):
                front.free(lease)

    def asks(how: Callable[[Front], Callable[[Scope, Receive, Send], Awaitable[None]]]) -> Any:
        class Asked:
            """A route as an ASGI application."""

            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                await how(scope["app"].state.server)(scope, receive, send)

        return Asked()

    async def livez(request: Request) -> Response:
        alive = pool.running > 0
        return PlainTextResponse("ok" if alive else "no replica runs", 200 if alive else 503)

    async def readyz(request: Request) -> Response:
        front: Front = request.app.state.server
        if front.full:
            return PlainTextResponse("draining" if front.draining else "full", 503, {"Retry-After": str(RETRY_S)})
        return PlainTextResponse("ok")

    async def metrics(request: Request) -> Response:
        return Response(await request.app.state.server.figures(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def socket(websocket: WebSocket) -> None:
        await websocket.app.state.server.connect(websocket)

    stateless, seated, pinned = asks(lambda front: front.stateless), asks(lambda front: front.seated), asks(lambda front: front.pinned)
    routes: list[BaseRoute] = [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route("/v1/models", stateless, methods=["GET"]),
        WebSocketRoute("/v1/stream", socket),
        WebSocketRoute("/v1/realtime", socket),
        Route("/v1/audio/transcriptions", seated, methods=["POST"]),
        Route("/reset", pinned, methods=["POST"]),
        Route("/input", pinned, methods=["PUT"]),
        Route("/output", pinned, methods=["GET"]),
        Route("/", stateless, methods=["GET"]),
        Route("/page/{name}", stateless, methods=["GET"]),
    ]
    handlers: dict[type[Exception] | int, Callable[..., Response]] = {HTTPException: refused, Exception: broken}
    return Starlette(
        routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=[Middleware(Guard, config=config, gauges=gauges)]
    )


def _unavailable(code: str, what: str) -> JSONResponse:
    error = {"code": code, "message": f"{what}: come back in {RETRY_S} s", "type": "server_error", "param": None}
    return JSONResponse({"error": error}, 503, {"Retry-After": str(RETRY_S)})
