"""The frame around a server's routes, and around a gateway's: health routes, error answers, and the guard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.websockets import WebSocket

from zendaya.serve.auth import Guard
from zendaya.serve.config import ServeConfig
from zendaya.serve.feed import StreamFailedError
from zendaya.serve.fields import FieldError
from zendaya.serve.metrics import Gauges
from zendaya.serve.responses import RETRY_S, error_response, unavailable
from zendaya.serve.server import NoSeatError


class Health(Protocol):
    """State that the health routes report: `app.state.server` is one."""

    draining: bool

    @property
    def full(self) -> bool:
        """Whether no new session is accepted."""

    @property
    def failure(self) -> str:
        """Why nothing can be served; empty while all is well."""

    async def figures(self) -> bytes:
        """The metrics in Prometheus's text format."""


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
    health: Health = request.app.state.server
    if health.full:
        return PlainTextResponse("draining" if health.draining else "full", 503, {"Retry-After": str(RETRY_S)})
    return PlainTextResponse("ok")


async def _metrics(request: Request) -> Response:
    return Response(await request.app.state.server.figures(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _refuse(connection: HTTPConnection, error: Exception) -> Response:
    response = _response(error)
    if isinstance(connection, WebSocket):
        await connection.send_denial_response(response)
    return response


def _response(error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return error_response(error.status_code, error.detail, f"http_{error.status_code}", headers=dict(error.headers or {}))
    if isinstance(error, NoSeatError):
        return unavailable(error.code, str(error))
    if isinstance(error, FieldError):
        return error_response(400, str(error), error.code, field=error.field)
    if isinstance(error, StreamFailedError):
        return error_response(500 if error.internal else 400, str(error), "failed")
    return error_response(500, "internal server error", "internal")  # without its message, which may quote input
