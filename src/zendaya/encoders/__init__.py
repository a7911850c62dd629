"""Frozen encoders: raw input to source tokens."""
