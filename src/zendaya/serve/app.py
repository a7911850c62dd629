"""The application of a server: its transports, the list of models and the page."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from zendaya.runtime.engine import Engine
from zendaya.serve.config import ServeConfig
from zendaya.serve.health import guarded_app
from zendaya.serve.hub import Hub
from zendaya.serve.intake import Served
from zendaya.serve.metrics import Gauges
from zendaya.serve.page import read_page
from zendaya.serve.server import Server
from zendaya.serve.transports.base import Transport, open_transports


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
    app.state.page = read_page(served)
    return app


async def _models(request: Request) -> Response:
    served: Served = request.app.state.server.served
    found = {"id": served.name, "object": "model", "created": 0, "owned_by": "zendaya", "sources": served.kinds}
    return JSONResponse({"object": "list", "data": [found]})


async def _page(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in request.app.state.page:
        raise HTTPException(404)
    data, media_type = request.app.state.page[name]
    return Response(data, media_type=media_type)


PAGES = (Route("/v1/models", _models), Route("/", _page), Route("/page/{name}", _page))
"""Routes that any replica answers alike."""
