"""Decoding a corpus as its source arrives, and scoring the traces."""
