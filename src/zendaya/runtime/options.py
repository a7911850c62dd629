"""How a stream is decoded: one record for the command, the server, evaluation and SimulEval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from zendaya.errors import ConfigError

if TYPE_CHECKING:
    from zendaya.runtime.policies.base import Policy
    from zendaya.schedule import Schedule

Backend = Literal["auto", "torch", "native"]
Precision = Literal["float32", "int8"]
Cut = Literal["fixed", "pauses"]
Voice = Literal["auto", "gate", "off"]


@dataclass(frozen=True)
class Pace:
    """When source tokens are due: at a steady rate, in blocks where the encoder gives them so."""

    tokens_per_s: float
    block: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.tokens_per_s < math.inf or self.block < 1:
            raise ConfigError(f"a pace is a finite rate above 0, in blocks of at least 1: got {self.tokens_per_s} and {self.block}")

    def between_s(self, first: int, last: int) -> float:
        """Seconds from the arrival of one token of the stream, counted from 0, to the arrival of a later one."""
        return (last // self.block - first // self.block) * self.block / self.tokens_per_s


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How one stream is decoded, from the source tokens to the text."""

    schedule: Schedule | Policy
    window_tokens: int | None = None
    """W; the model's own if not given."""
    window_s: float | None = None
    """W in seconds of source, where a pipeline knows the encoder's rate."""
    steps: int | None = None
    """N̂, instead of the length head's prediction."""
    max_steps: int | None = None
    """Longest text of a window; the model's own limit if not given."""
    patience_s: float = math.inf
    """Seconds that a late source is waited for: 0 never waits, infinity always does."""
    pace: Pace | None = None
    """When source tokens are due; a pipeline takes it from its encoder."""
    cut: Cut = "fixed"
    """Where windows end: at W, or also where voice activity finds a pause."""
    voice: Voice = "auto"
    """Whether only speech is decoded, found by voice activity (gate), or everything (off); auto: gate where the source is sound."""
    engine: Backend = "auto"
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if not self.patience_s >= 0:
            raise ConfigError(f"patience_s must be at least 0 (0 never waits, inf always does): got {self.patience_s}")
        if self.window_s is not None and not 0 < self.window_s < math.inf:
            raise ConfigError(f"window_s must be a number of seconds above 0: got {self.window_s}")
        for name, kinds in (("cut", Cut), ("voice", Voice), ("engine", Backend), ("precision", Precision)):
            if getattr(self, name) not in get_args(kinds):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(kinds))}: got {getattr(self, name)!r}")
