"""Sweeps: many runs as one grid, each cell a function of its config and data, into one table of results."""
