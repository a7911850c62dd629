"""The frozen records that cross borders between rooms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One target token, written and never taken back."""

    window: int
    step: int
    """From 1 within the window."""
    token: int
    text: str
    horizon: int
    """Ω: how many source tokens of the window the schedule licensed."""
    effective_horizon: int
    """Ω^eff = min(Ω, A): how many of them had arrived, and so were read."""
    predicted_steps: int
    """N̂ of the window."""
    last: bool
    """Whether the window's text ends here."""
