"""Sweeps: a grid of training runs and decodes, into one table of results."""
