"""Feature stores: clips of a corpus encoded once, read many times."""
