"""How input becomes source tokens: one file per encoder; `base` holds what they share, `registry` opens them by name."""
