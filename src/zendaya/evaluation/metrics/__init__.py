"""Numbers from traces: quality, latency, significance. No torch."""
