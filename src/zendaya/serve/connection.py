"""The server's end of a WebSocket: a deadline for clients that do not read, and the close codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

CLOSE_S = 3.0  # seconds for the last bytes and the client's close frame
PROTOCOLS = ("zendaya", "realtime")  # supported subprotocols; the server takes the first of them that a client offers
BAD_HELLO, WRONG_TOKEN, UNKNOWN, NO_HELLO, TAKEN_OVER, GONE, OVERRUN = 4400, 4403, 4404, 4408, 4409, 4410, 4413
"""Close codes of our own (docs/protocol.md)."""
LEFT = (1000, 1001)  # close codes of a client that will not come back


class WebSocketConnection:
    """An accepted WebSocket."""

    def __init__(self, websocket: WebSocket, slow_s: float) -> None:
        self._websocket, self._slow_s = websocket, slow_s
        self._sending = asyncio.Lock()
        self.code = 1006
        """The client's close code; 1006 before there is one."""
        self._closing = False

    @staticmethod
    async def accept(websocket: WebSocket, slow_s: float) -> WebSocketConnection:
        """Accept a connection; ConnectionError if the client has gone already."""
        offered = websocket.scope.get("subprotocols", [])
        try:
            await websocket.accept(subprotocol=next((name for name in PROTOCOLS if name in offered), None))
        except (WebSocketDisconnect, RuntimeError, OSError, AssertionError) as error:
            raise ConnectionError(f"closed before it was accepted: {type(error).__name__}") from None
        return WebSocketConnection(websocket, slow_s)

    async def receive(self) -> str | bytes | None:
        """The next message; None once the connection is closed."""
        try:
            message = await self._websocket.receive()
        except (WebSocketDisconnect, RuntimeError):
            return None
        if message["type"] == "websocket.disconnect":
            self.code = 1006 if self._closing else message.get("code") or 1005
            return None
        return message["text"] if message.get("text") is not None else message["bytes"]

    async def send(self, message: str | dict[str, Any]) -> None:
        """Send one message; ConnectionError if the client does not read it in time, or has gone."""
        text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
        try:
            async with self._sending:
                await asyncio.wait_for(self._websocket.send_text(text), self._slow_s)
        except asyncio.TimeoutError:
            raise ConnectionError(f"the client has read nothing for {self._slow_s:g} s") from None
        except (WebSocketDisconnect, RuntimeError) as error:
            raise ConnectionError(str(error)) from None

    async def close(self, code: int, reason: str = "") -> None:
        self._closing = True
        if self._websocket.application_state is WebSocketState.CONNECTED:
            with contextlib.suppress(asyncio.TimeoutError, WebSocketDisconnect, RuntimeError):
                await asyncio.wait_for(self._websocket.close(code, reason[:120]), self._slow_s)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, but a client that does not read is dropped: a close frame alone would wait for it forever."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.close_timeout = CLOSE_S

    async def run_asgi(self) -> None:
        """As uvicorn's, then drop the connection once the last bytes had time to go out."""
        await super().run_asgi()
        self.loop.call_later(self.close_timeout, self.transport.abort)

    async def send(self, message: Any) -> None:
        """As uvicorn's, which would log a refused connection as an error."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        """As uvicorn's, but drop the connection at once."""
        super().keepalive_timeout()
        self.transport.abort()
