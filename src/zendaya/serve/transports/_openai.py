"""What OpenAI's two transcription APIs share."""

DELAYS = {"minimal": 1.0, "low": 0.7, "medium": 0.5, "high": 0.3, "xhigh": 0.1}
"""γ per OpenAI delay setting; with the shipped model, words come 1.9, 2.4, 3.1, 4.0 and 5.0 s after they were spoken."""
