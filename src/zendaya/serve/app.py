"""The routes of a server, behind the guard."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from zendaya.engine import Engine
from zendaya.serve.config import ServeConfig
from zendaya.serve.gauges import Gauges
from zendaya.serve.guard import Guard
from zendaya.serve.hub import Hub
from zendaya.serve.native import Native
from zendaya.serve.page import read_page
from zendaya.serve.realtime import connect as connect_realtime
from zendaya.serve.remote import Remote
from zendaya.serve.served import Served
from zendaya.serve.server import RETRY_S, Server
from zendaya.serve.transcriptions import Transcriptions
from zendaya.serve.wyoming import Wyoming


def make_app(
    config: ServeConfig, served: Served, *, engine: Engine | None = None, wyoming_socket: socket.socket | None = None
) -> Starlette:  # fmt: skip
    """The application; its server is `app.state.server` once it has started. Wyoming is spoken on a socket of its own, if one is given."""
    gauges, page = Gauges(), read_page(served)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        hub = Hub(served, gauges, engine=engine)
        app.state.server = server = Server(config, served, hub, gauges)
        app.state.native = Native(server)
        app.state.remote = remote = Remote(server)
        server.enders |= {app.state.native.end_all, remote.close}
        wyoming = Wyoming(server)
        if wyoming_socket is not None:
            await wyoming.start(wyoming_socket)
        yield
        await wyoming.close()
        await hub.close()

    async def livez(request: Request) -> Response:
        alive = request.app.state.server.hub.alive
        return PlainTextResponse("ok" if alive else "a thread of the model has died", 200 if alive else 503)

    async def readyz(request: Request) -> Response:
        server: Server = request.app.state.server
        if server.full:
            return PlainTextResponse("draining" if server.draining else "full", 503, {"Retry-After": str(RETRY_S)})
        return PlainTextResponse("ok")

    async def metrics(request: Request) -> Response:
        return Response(gauges.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(request: Request) -> Response:
        found = {"id": served.name, "object": "model", "created": 0, "owned_by": "zendaya", "sources": served.kinds}
        return JSONResponse({"object": "list", "data": [found]})

    async def shown(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in page:
            raise HTTPException(404)
        data, kind = page[name]
        return Response(data, media_type=kind)

    async def stream(websocket: WebSocket) -> None:
        await websocket.app.state.native.connect(websocket)

    async def realtime(websocket: WebSocket) -> None:
        await connect_realtime(websocket.app.state.server, websocket)

    async def reset(request: Request) -> Response:
        return await request.app.state.remote.reset(request)

    async def take_input(request: Request) -> Response:
        return await request.app.state.remote.input(request)

    async def give_output(request: Request) -> Response:
        return await request.app.state.remote.output(request)

    routes: list[BaseRoute] = [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        WebSocketRoute("/v1/stream", stream),
        WebSocketRoute("/v1/realtime", realtime),
        Route("/v1/audio/transcriptions", Transcriptions(), methods=["POST"]),
        Route("/reset", reset, methods=["POST"]),
        Route("/input", take_input, methods=["PUT"]),
        Route("/output", give_output),
        Route("/", shown),
        Route("/page/{name}", shown),
    ]
    handlers: dict[type[Exception] | int, Callable[..., Response]] = {HTTPException: refused, Exception: broken}
    return Starlette(
        routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=[Middleware(Guard, config=config, gauges=gauges)]
    )


def refused(request: Request, error: HTTPException) -> Response:
    """A request that no route takes, in the form of OpenAI's errors."""
    body = {"error": {"message": error.detail, "type": "invalid_request_error", "code": f"http_{error.status_code}", "param": None}}
    return JSONResponse(body, error.status_code, error.headers)


def broken(request: Request, error: Exception) -> Response:
    """A bug of ours, without what it said."""
    body = {"message": "an error of the server's own", "type": "server_error", "code": "internal", "param": None}
    return JSONResponse({"error": body}, 500)
