"""Error answers over HTTP, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

RETRY_S = 5
"""Seconds after which a client that found no seat should retry."""


def error_body(message: str, code: str, *, field: str | None = None, internal: bool = False) -> dict[str, Any]:
    """The JSON of an error: its message, its code for programs and the field that is wrong."""
    kind = "server_error" if internal else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": field}}


def error_response(
    status: int, message: str, code: str, *, field: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:  # fmt: skip
    """An error with its status."""
    return JSONResponse(error_body(message, code, field=field, internal=status >= 500), status, headers)


def unavailable(code: str, message: str) -> JSONResponse:
    """503: the client should retry later."""
    return error_response(503, f"{message}: retry in {RETRY_S} s", code, headers={"Retry-After": str(RETRY_S)})
