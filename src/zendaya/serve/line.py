"""One end of a WebSocket: messages in, messages out with a deadline for who does not read them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

CLOSE_S = 3.0
"""What the last bytes and the answer to a goodbye may take."""
PROTOCOLS = ("zendaya", "realtime")
"""Subprotocols that are spoken; the server takes the first of them that a client offers."""


class Line:
    """A WebSocket that has been accepted."""

    def __init__(self, websocket: WebSocket, slow_s: float) -> None:
        self._websocket, self._slow_s = websocket, slow_s
        self._sending = asyncio.Lock()
        self.code = 1006
        """How the client has closed it, once it has."""
        self._closing = False

    @staticmethod
    async def accept(websocket: WebSocket, slow_s: float) -> Line:
        """Take a connection; ConnectionError if the client has gone already."""
        offered = websocket.scope.get("subprotocols", [])
        try:
            await websocket.accept(subprotocol=next((name for name in PROTOCOLS if name in offered), None))
        except (WebSocketDisconnect, RuntimeError, OSError, AssertionError) as error:
            raise ConnectionError(f"gone before it was accepted: {type(error).__name__}") from None
        return Line(websocket, slow_s)

    async def receive(self) -> str | bytes | None:
        """The next message; None when there will be no more."""
        try:
            message = await self._websocket.receive()
        except (WebSocketDisconnect, RuntimeError):
            return None
        if message["type"] == "websocket.disconnect":
            self.code = 1006 if self._closing else message.get("code") or 1005
            return None
        return message["text"] if message.get("text") is not None else message["bytes"]

    async def send(self, message: str | dict[str, Any]) -> None:
        """Send one message; ConnectionError if it is not taken in time, or cannot be."""
        text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
        try:
            async with self._sending:
                await asyncio.wait_for(self._websocket.send_text(text), self._slow_s)
        except asyncio.TimeoutError:
            raise ConnectionError(f"the client has read nothing for {self._slow_s:g} s") from None
        except (WebSocketDisconnect, RuntimeError) as error:
            raise ConnectionError(str(error)) from None

    async def close(self, code: int, reason: str = "") -> None:
        """Say goodbye, if somebody listens."""
        self._closing = True
        if self._websocket.application_state is WebSocketState.CONNECTED:
            with contextlib.suppress(asyncio.TimeoutError, WebSocketDisconnect, RuntimeError):
                await asyncio.wait_for(self._websocket.close(code, reason[:120]), self._slow_s)


class Socket(WebSocketsSansIOProtocol):
    """uvicorn's socket, which lets go for good of a client that does not read: closing alone would wait for it without end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.close_timeout = CLOSE_S

    async def run_asgi(self) -> None:
        """As uvicorn's, then so long for the last bytes to go out."""
        await super().run_asgi()
        self.loop.call_later(self.close_timeout, self.transport.abort)

    async def send(self, message: Any) -> None:
        """As uvicorn's, which would call a connection that was turned away an error."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        """As uvicorn's, and at once."""
        super().keepalive_timeout()
        self.transport.abort()
