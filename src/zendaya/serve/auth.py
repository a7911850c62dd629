"""Access to a server: key, origin and host are checked before any route or socket; and the security headers of every answer."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections import Counter
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zendaya.serve.config import ServeConfig, is_loopback
from zendaya.serve.monitoring import LOG, Gauges
from zendaya.serve.server import RETRY_S, error_response

COOKIE = "zendaya"
"""Prefix of the cookie's name; the port follows, since browsers share cookies between the ports of a host."""
MOST_WRONG = 32  # requests with a wrong key per address that may wait for their answer at the same time
SUBPROTOCOL_KEY = "openai-insecure-api-key."
"""Prefix of a key sent as a WebSocket subprotocol, as OpenAI's browser clients do."""
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
    """ASGI middleware that checks every request and adds the security headers."""

    def __init__(self, app: ASGIApp, config: ServeConfig, gauges: Gauges) -> None:
        self.app, self.config, self.gauges = app, config, gauges
        # The cookie's value stands for the key in a browser; it is void once the server stops.
        self._pass = secrets.token_urlsafe(32)
        self._wrong = Counter[str]()  # requests with a wrong key that wait for their answer, per address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        begun, status, gives_cookie = time.perf_counter(), 0, False

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
        if how is None and self._sends_key(scope, headers) and not await self._slow_down(scope):
            await self._deny(scope, receive, answered, 429, "too_many", "too many wrong keys at once: retry in a few seconds")
        elif how is None:
            await self._deny(scope, receive, answered, 401, "unauthorized", "missing or wrong key: send Authorization: Bearer KEY")
        elif (problem := self._cross_origin(scope, headers)) is not None:
            await self._deny(scope, receive, answered, 403, "forbidden", problem)
        else:
            gives_cookie = how == "basic" and scope["type"] == "http"
            await self.app(scope, receive, answered)
        where = scope["path"] if status not in (401, 403, 404, 429) else "-"  # paths of refused requests are not logged
        about = {"method": scope.get("method", "WEBSOCKET"), "path": where, "status": status}
        LOG.info("request", extra={"event": "request", **about, "ms": round(1000 * (time.perf_counter() - begun), 1)})

    async def _slow_down(self, scope: Scope) -> bool:
        """Delay the answer to a wrong key, after all others of its address; False if too many wait.

        A right key is never delayed, nor is a request without one.
        """
        address = (scope.get("client") or ("", 0))[0]
        if self._wrong[address] >= MOST_WRONG:
            return False
        self._wrong[address] += 1
        try:
            await asyncio.sleep(self.config.wrong_key_s * self._wrong[address])
        finally:
            self._wrong[address] -= 1
            if not self._wrong[address]:
                del self._wrong[address]
        return True

    @staticmethod
    def _sends_key(scope: Scope, headers: dict[str, str]) -> bool:
        return "authorization" in headers or any(name.startswith(SUBPROTOCOL_KEY) for name in scope.get("subprotocols", ()))

    def _key_of(self, scope: Scope, headers: dict[str, str]) -> str | None:
        """How a request sends the right key; None if it does not. Comparisons take constant time."""
        if self.config.key is None:
            return "open"
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = {"bearer": given.strip(), "basic": _password(given)}.get(scheme.lower())
        if sent is not None and self._same(sent, self.config.key):
            return scheme.lower()
        for name in scope.get("subprotocols", ()):
            if name.startswith(SUBPROTOCOL_KEY) and self._same(name.removeprefix(SUBPROTOCOL_KEY), self.config.key):
                return "subprotocol"
        # By hand: Python's own parser rejects all cookies if another program's is malformed.
        for cookie in headers.get("cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == _cookie(scope) and self._same(value, self._pass):
                return "cookie"
        return None

    @staticmethod
    def _same(one: str, other: str) -> bool:
        # Digests, since comparing the strings themselves would reveal their lengths.
        return hmac.compare_digest(hashlib.sha256(one.encode()).digest(), hashlib.sha256(other.encode()).digest())

    def _cross_origin(self, scope: Scope, headers: dict[str, str]) -> str | None:
        """Why a request counts as another site's; None if it does not."""
        origin, port = headers.get("origin"), (scope.get("server") or ("", None))[1]
        named = {urlsplit(each).hostname for each in self.config.origins}
        if origin is not None and origin not in self.config.origins:
            try:
                parts = urlsplit(origin)
                own = self._is_own(parts.hostname) and (parts.port or {"http": 80, "https": 443}.get(parts.scheme)) == port
            except ValueError:
                own = False
            if not own and not (self.config.key is not None and origin == _address(scope, headers)):
                return "request from a page of another origin: start the server with --origin to allow it"
        # A picture or script that another site's page embeds sends no origin.
        if origin is None and headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return "request by a page of another site: open the address itself"
        # DNS rebinding: without a key, a foreign name that resolves to this machine must not count as ours.
        if self.config.key is None:
            try:
                host = urlsplit(f"//{headers.get('host', '')}").hostname
            except ValueError:
                host = None
            if not self._is_own(host) and host not in named:
                return "the Host header names another machine: use 127.0.0.1 or localhost, or start the server with --origin"
        return None

    def _is_own(self, host: str | None) -> bool:
        return host is not None and (is_loopback(host) or host == self.config.host)

    async def _deny(self, scope: Scope, receive: Receive, send: Send, status: int, code: str, message: str) -> None:
        self.gauges.rejections.labels(code).inc()
        if scope["type"] == "websocket":
            await receive()
        headers = dict[str, str]()
        if status == 401:
            # On navigation the browser asks the user for the key; for the page's own requests the page does.
            navigates = dict(scope["headers"]).get(b"sec-fetch-mode", b"navigate") == b"navigate"
            headers["www-authenticate"] = 'Basic realm="zendaya", charset="UTF-8"' if navigates else 'Bearer realm="zendaya"'
        if status == 429:
            headers["retry-after"] = str(RETRY_S)
        await error_response(status, message, code, headers=headers)(scope, receive, send)


def _cookie(scope: Scope) -> str:
    return f"{COOKIE}-{(scope.get('server') or ('', None))[1]}"


def _address(scope: Scope, headers: dict[str, str]) -> str:
    """The origin that a page at the requested address would have; any name can resolve to us, so without a key it proves nothing."""
    return f"{'https' if scope['scheme'] in ('https', 'wss') else 'http'}://{headers.get('host', '')}"


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""
