"""Logs as JSON, a line each: what happened, to which session, how long it took. No transcripts, no keys."""

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
"""What may stand in a line beside its time, level and message: nothing gets in by accident."""


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record; of an exception, its kind and place, not what it said of the input."""
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
    """What a record says; asyncio adds the arguments of a callback and the result of a task, which may hold a text or a key."""
    said = record.getMessage()
    return re.split(r"[(<\n]", said, maxsplit=1)[0].strip() if record.name == "asyncio" else said


def _time(created: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created)) + f".{int(created % 1 * 1000):03}Z"


def log_to(stream: TextIO | None = None) -> None:
    """Send the logs of the server, and of uvicorn and asyncio what is worse than news, to a stream: standard error, if none is given."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter())
    for name, level in (("zendaya.serve", logging.INFO), ("uvicorn.error", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
