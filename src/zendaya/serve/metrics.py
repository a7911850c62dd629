"""The server's metrics for Prometheus; each server has a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SHORT_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
LONG_S = (0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 30.0)


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
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)
