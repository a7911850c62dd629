"""Who may come in: the key, the origin and the host, looked at before any route or socket; and what every answer carries."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import secrets
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zendaya.serve.config import ServeConfig, is_loopback
from zendaya.serve.gauges import Gauges
from zendaya.serve.server import RETRY_S

LOG = logging.getLogger("zendaya.serve")
COOKIE = "zendaya"
"""What the cookie's name begins with; the port follows, since browsers share cookies between the ports of a host."""
MOST_WRONG = 32
"""Wrong keys of one address that wait for their answer at the same time."""
SUBPROTOCOL_KEY = "openai-insecure-api-key."
"""Before the key among the subprotocols a browser offers; the name is that of OpenAI's clients."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self' blob:; connect-src 'self'; "
        "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(self)",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware around everything that the server answers."""

    def __init__(self, app: ASGIApp, config: ServeConfig, gauges: Gauges) -> None:
        self.app, self.config, self.gauges = app, config, gauges
        # What a browser carries instead of the key: known to this server alone, and void when it stops.
        self._pass = secrets.token_urlsafe(32)
        self._wrong = dict[str, int]()
        """Wrong keys of each address that wait for their answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or turn it away."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        begun, status = time.perf_counter(), 0
        gives_cookie = False

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                extra = dict(HEADERS)
                if gives_cookie:
                    extra["set-cookie"] = f"{_cookie(scope)}={self._pass}; Path=/; HttpOnly; SameSite=Strict"
                message = {**message, "headers": [*message.get("headers", []), *((k.encode(), v.encode()) for k, v in extra.items())]}
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        how = self._key_of(scope, headers)
        if how is None and self._shows_key(scope, headers) and not await self._slow_down(scope):
            await self._deny(scope, receive, answered, 429, "too_many", "too many wrong keys at once: come back in a few seconds")
        elif how is None:
            await self._deny(scope, receive, answered, 401, "unauthorized", "no key, or a wrong one: send Authorization: Bearer KEY")
        elif (problem := self._stranger(scope, headers)) is not None:
            await self._deny(scope, receive, answered, 403, "forbidden", problem)
        else:
            gives_cookie = how == "basic" and scope["type"] == "http"
            await self.app(scope, receive, answered)
        where = scope["path"] if status not in (401, 403, 404, 429) else "-"  # what strangers ask for is not written down
        LOG.info(
            "request", extra={"event": "request", "method": scope.get("method", "WEBSOCKET"), "path": where, "status": status,
            "ms": round(1000 * (time.perf_counter() - begun), 1)},
        )  # fmt: skip

    async def _slow_down(self, scope: Scope) -> bool:
        """Let who shows a wrong key wait, after all others of its address; False if there are too many. A right one is never kept waiting,
        and who shows none is told at once that one is needed."""
        address = (scope.get("client") or ("", 0))[0]
        waiting = self._wrong.get(address, 0)
        if waiting >= MOST_WRONG:
            return False
        self._wrong[address] = waiting + 1
        try:
            await asyncio.sleep(self.config.wrong_key_s * (waiting + 1))
        finally:
            self._wrong[address] -= 1
            if not self._wrong[address]:
                del self._wrong[address]
        return True

    @staticmethod
    def _shows_key(scope: Scope, headers: dict[str, str]) -> bool:
        return "authorization" in headers or any(name.startswith(SUBPROTOCOL_KEY) for name in scope.get("subprotocols", ()))

    def _key_of(self, scope: Scope, headers: dict[str, str]) -> str | None:
        """How a request shows the key; None if it does not. Every comparison takes the same time, whatever is wrong."""
        if self.config.key is None:
            return "open"
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._same(given.strip(), self.config.key):
            return "bearer"
        if scheme.lower() == "basic" and self._same(_password(given), self.config.key):
            return "basic"
        for name in scope.get("subprotocols", ()):
            if name.startswith(SUBPROTOCOL_KEY) and self._same(name.removeprefix(SUBPROTOCOL_KEY), self.config.key):
                return "subprotocol"
        # By hand: Python's own reader gives up on all cookies where another program's is not to its taste.
        for cookie in headers.get("cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == _cookie(scope) and self._same(value, self._pass):
                return "cookie"
        return None

    @staticmethod
    def _same(one: str, other: str) -> bool:
        # Digests: a comparison of texts would tell their lengths apart.
        return hmac.compare_digest(hashlib.sha256(one.encode()).digest(), hashlib.sha256(other.encode()).digest())

    def _stranger(self, scope: Scope, headers: dict[str, str]) -> str | None:
        """Why a request comes from a page that is not ours; None if it does not."""
        origin, port = headers.get("origin"), (scope.get("server") or ("", None))[1]
        named = {urlsplit(each).hostname for each in self.config.origins}
        if origin is not None and origin not in self.config.origins:
            try:
                parts = urlsplit(origin)
                own = self._is_own(parts.hostname) and (parts.port or {"http": 80, "https": 443}.get(parts.scheme)) == port
            except ValueError:
                own = False
            if not own and not (self.config.key is not None and origin == _address(scope, headers)):
                return "a page of another origin: start the server with --origin to let it in"
        # A picture or a script that another page asks for has no origin.
        if origin is None and headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return "asked for by a page of another site: go to the address itself"
        # Without a key, a page whose name was made to lead here would count as ours: only names of this machine are answered to.
        if self.config.key is None:
            try:
                host = urlsplit(f"//{headers.get('host', '')}").hostname
            except ValueError:
                host = None
            if not self._is_own(host) and host not in named:
                return "asked for under another name than this machine's: use 127.0.0.1 or localhost, or start the server with --origin"
        return None

    def _is_own(self, host: str | None) -> bool:
        return host is not None and (is_loopback(host) or host == self.config.host)

    async def _deny(self, scope: Scope, receive: Receive, send: Send, status: int, code: str, message: str) -> None:
        self.gauges.rejections.labels(code).inc()
        kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
        if scope["type"] == "websocket":
            await receive()
        body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": code, "param": None}}).encode()
        headers: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 401:
            # A browser asks for the key where somebody goes to the page; for what the page asks itself, the page does.
            mode = dict(scope["headers"]).get(b"sec-fetch-mode", b"navigate")
            challenge = b'Basic realm="zendaya", charset="UTF-8"' if mode == b"navigate" else b'Bearer realm="zendaya"'
            headers.append((b"www-authenticate", challenge))
        if status == 429:
            headers.append((b"retry-after", str(RETRY_S).encode()))
        start: dict[str, Any] = {"type": f"{kind}.start", "status": status, "headers": headers}
        await send(start)
        await send({"type": f"{kind}.body", "body": body})


def _cookie(scope: Scope) -> str:
    return f"{COOKIE}-{(scope.get('server') or ('', None))[1]}"


def _address(scope: Scope, headers: dict[str, str]) -> str:
    """Where a request went to, as the origin of a page from there. Any name can be made to lead here: without a key it proves nothing."""
    return f"{'https' if scope['scheme'] in ('https', 'wss') else 'http'}://{headers.get('host', '')}"


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""
