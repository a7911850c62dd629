"""Logs as JSON lines: event, session and duration; never transcripts or keys."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any, TextIO

FIELDS = (
    "event", "session", "source", "schedule", "num_events", "messages", "received", "number", "method", "path", "status", "ms", "reason",
    "sessions", "within_s", "host", "port", "model", "engine", "replica",
)  # fmt: skip
"""The only fields of a log line beside time, level and message, so that nothing private gets in by accident."""


class JsonFormatter(logging.Formatter):
    """One JSON object per log record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record; of an exception its type and place, not its message, which may quote input."""
        line: dict[str, Any] = {"time": _time(record.created), "level": record.levelname.lower(), "message": _message(record)}
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info and record.exc_info[0] is not None:
            trace, where = record.exc_info[2], list[str]()
            while trace is not None:
                where.append(f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}")
                trace = trace.tb_next
            line |= {"error": record.exc_info[0].__name__, "where": where[-8:]}
        return json.dumps(line, ensure_ascii=False)


def _message(record: logging.LogRecord) -> str:
    """A record's message; asyncio's are cut before callback arguments and task results, which may hold text or a key."""
    message = record.getMessage()
    return re.split(r"[(<\n]", message, maxsplit=1)[0].strip() if record.name == "asyncio" else message


def _time(created: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created)) + f".{int(created % 1 * 1000):03}Z"


def log_to(stream: TextIO | None = None) -> None:
    """Write the server's logs, and WARNING and above of uvicorn and asyncio, to a stream; by default standard error."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter())
    for name, level in (("zendaya.serve", logging.INFO), ("uvicorn.error", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
