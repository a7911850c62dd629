"""Corpora: one reader per file; `base` holds what they share, `registry` finds them by name."""
