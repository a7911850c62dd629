"""Metrics for Prometheus, and logs as JSON lines: event, session and duration; never transcripts or keys."""

from __future__ import annotations

import json
import logging
import re
import traceback
from datetime import datetime, timezone
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LOG = logging.getLogger("zendaya.serve")
INTERNAL = "internal server error"
FIELDS = (
    "event", "session", "source", "schedule", "num_events", "messages", "received", "number", "method", "path", "status", "ms", "reason",
    "sessions", "within_s", "host", "port", "model", "engine", "replica",
)  # fmt: skip
"""The only fields of a log line beside time, level and message, so that nothing private gets in by accident."""
SHORT_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
LONG_S = (0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 30.0)


class JsonFormatter(logging.Formatter):
    """One JSON object per log record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record; of an exception its type and place, not its message, which may quote input."""
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "message": _message(record)}
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info and record.exc_info[0] is not None:
            frames = [f"{frame.f_globals.get('__name__', '?')}:{number}" for frame, number in traceback.walk_tb(record.exc_info[2])]
            line |= {"error": record.exc_info[0].__name__, "where": frames[-8:]}
        return json.dumps(line, ensure_ascii=False)


def _message(record: logging.LogRecord) -> str:
    """A record's message; asyncio's are cut before callback arguments and task results, which may hold text or a key."""
    message = record.getMessage()
    return re.split(r"[(<\n]", message, maxsplit=1)[0].strip() if record.name == "asyncio" else message


def log_to(stream: TextIO | None = None) -> None:
    """Write the server's logs, and WARNING and above of uvicorn and asyncio, to a stream; by default standard error."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    for name, level in ((LOG.name, logging.INFO), ("uvicorn.error", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class Gauges:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sessions = Gauge("zendaya_active_sessions", "Open sessions, disconnected ones included", registry=self.registry)
        self.queue = Gauge("zendaya_queue_depth", "Source chunks waiting to be encoded or decoded", registry=self.registry)
        self.tokens = Counter("zendaya_tokens", "Target tokens written", registry=self.registry)
        self.source_s = Counter("zendaya_source_seconds", "Seconds of source accepted", registry=self.registry)
        self.step_s = Histogram("zendaya_step_seconds", "Duration of one decoding round", buckets=SHORT_S, registry=self.registry)
        self.encode_s = Histogram("zendaya_encode_seconds", "Time to encode one source chunk", buckets=SHORT_S, registry=self.registry)
        self.first_token_s = Histogram(
            "zendaya_first_token_seconds", "Time from the start of a source to its first text", buckets=LONG_S, registry=self.registry
        )
        self.lag_s = Histogram("zendaya_lag_seconds", "Lag per token by kind", ("kind",), buckets=LONG_S, registry=self.registry)
        self.resumes = Counter("zendaya_resumes", "Sessions resumed after a lost connection", registry=self.registry)
        self.rejections = Counter("zendaya_rejections", "Requests refused", ("reason",), registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
