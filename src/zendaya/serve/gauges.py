"""What the server counts, for Prometheus. Each server has a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SHORT_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
LONG_S = (0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 30.0)


class Gauges:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sessions = Gauge("zendaya_active_sessions", "Sessions that are held, orphaned ones too", registry=self.registry)
        self.queue = Gauge("zendaya_queue_depth", "Pieces of source that wait to be encoded or decoded", registry=self.registry)
        self.tokens = Counter("zendaya_tokens", "Target tokens written", registry=self.registry)
        self.source_s = Counter("zendaya_source_seconds", "Seconds of source taken", registry=self.registry)
        self.step_s = Histogram("zendaya_step_seconds", "Time of a decode round", buckets=SHORT_S, registry=self.registry)
        self.encode_s = Histogram("zendaya_encode_seconds", "Time to encode a piece of source", buckets=SHORT_S, registry=self.registry)
        self.first_token_s = Histogram(
            "zendaya_first_token_seconds", "From the beginning of a source to its first text", buckets=LONG_S, registry=self.registry
        )
        self.lag_s = Histogram("zendaya_lag_seconds", "Lag of a token by its kind", ("kind",), buckets=LONG_S, registry=self.registry)
        self.resumes = Counter("zendaya_resumes", "Sessions that were taken up again after a cut", registry=self.registry)
        self.rejections = Counter("zendaya_rejections", "Requests that were turned away", ("reason",), registry=self.registry)

    def text(self) -> bytes:
        """All of them, in Prometheus's text form."""
        return generate_latest(self.registry)
