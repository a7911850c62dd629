"""The frozen records that cross borders between rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One annotated segment of a corpus: where its source lies and the texts people wrote for it, as published."""

    corpus: str
    id: str
    """Unique within its split."""
    split: str
    stream: str
    """The continuous recording or video it belongs to; consecutive clips of one stream make streaming pairs."""
    references: tuple[str, ...]
    start_s: float = 0.0
    """As published, on the clock of the stream."""
    end_s: float = 0.0
    """As published, even at or before the start or past the end of the stream; `duration_s` is what there is to read."""
    media: str = ""
    """Path or feature key of the source as published, relative; empty where the source is text."""
    media_start_s: float = 0.0
    """Stream time at which the media begins: 0 for a whole stream, `start_s` for a file cut out of one."""
    stream_s: float | None = None
    """Length of the whole stream where it is published."""
    source: str = ""
    """The source of a translation."""
    group: str = ""
    """What splits must not share: the book, the speaker."""
    num_source_tokens: int | None = None
    """F where features are published; else it follows from the encoder's token rate."""
    feature_row: int | None = None
    """Place in the published feature file, from 0."""
    parts: tuple[Clip, ...] = ()
    """The clips this one was joined from: its source is theirs, back to back."""

    @property
    def duration_s(self) -> float:
        """Seconds of source there are: from the start or 0 to the end or the end of the stream, never negative."""
        end_s = self.end_s if self.stream_s is None else min(self.end_s, self.stream_s)
        return max(0.0, end_s - max(0.0, self.start_s))

    @property
    def usable(self) -> bool:
        """Whether there is a source to read and a text to learn or score."""
        return bool(self.references) and (bool(self.source) or self.duration_s > 0) and self.num_source_tokens != 0


@dataclass(frozen=True)
class Problem:
    """One oddity of a published file."""

    kind: str
    where: str
    """file:line, or file:key where the file has no lines."""
    detail: str


@dataclass(frozen=True)
class Event:
    """One target token, written and never taken back; or, where `schedule` is set, the mark of a turned dial, which writes nothing."""

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
    gamma: float | None = None
    """γ of the window where the model chose it, before its first step; None where the schedule was given."""
    pauses: int = 0
    """Steps of the schedule that passed in the window before this one was written: its horizon is that of step + pauses."""
    window_start: int = 0
    """Source tokens of the stream before the window."""
    arrival_s: float = 0.0
    """When the step could be written: what licensed it had arrived, or the patience for it was over."""
    emission_s: float = 0.0
    """When it was, by the session's clock; what lies between is computing. Without a clock the same."""
    schedule: str = ""
    """Above nothing: the schedule from this step on. Such an event has no token (-1) and no text."""


Scale = Literal["segment", "window"]
"""What the schedule's source length is: each segment's own F, as the paper has it, or W, which is strictly causal (method.md §4)."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One clip as it was decoded: what was written, and what of the source each step had. Scores need nothing else."""

    clip: str
    split: str
    schedule: str
    """The schedule or policy."""
    scale: Scale
    window: int
    """Source tokens of a window, the length the schedule was scaled to; F itself in scale `segment`, where the decoder holds it."""
    num_source_tokens: int
    """F."""
    text: str
    references: tuple[str, ...]
    reference_steps: tuple[int, ...]
    """Length of each reference in decode steps, its end included; empty where the model has no tokenizer."""
    predicted_steps: tuple[int, ...]
    """N̂ of each window."""
    tokens: tuple[int, ...]
    """What each step wrote, the ends of the windows included."""
    windows: tuple[int, ...]
    """The window of each step, from 0."""
    horizons: tuple[int, ...]
    """Ω of each step, counted within its window."""
    effective_horizons: tuple[int, ...]
    """Ω^eff of each step."""
    arrived: tuple[int, ...]
    """Source tokens of the clip that had arrived when each step was written: those it reads, or more where the length head waited."""
    arrivals_s: tuple[float, ...] | None = None
    """When each source token arrived, from the beginning of the clip; None where the source has no clock."""
    emissions_s: tuple[float, ...] | None = None
    """When each step was written, on the same clock: with the computing where that was timed, else at the arrival that licensed it."""
    decoder_rows: int | None = None
    """Text rows run through the decoder; None where it was not counted."""
    revised: int | None = None
    """Tokens decoded but not written that the next decode did not repeat; None where it was not counted."""

    @property
    def delays(self) -> tuple[int, ...]:
        """Source tokens up to the last that each step reads: the delays of the decode-step clock, g(i) = Ω_i."""
        return tuple(k * self.window + read for k, read in zip(self.windows, self.effective_horizons, strict=True))

    @property
    def delays_s(self) -> tuple[float, ...] | None:
        """The moment each step could be written, on the clock of the source: computing takes no time."""
        return None if self.arrivals_s is None else tuple(self.arrivals_s[count - 1] for count in self.arrived)

    @property
    def computing_s(self) -> tuple[float, ...] | None:
        """The moment each step was written where computing was timed; None where it was not."""
        return None if self.emissions_s == self.delays_s else self.emissions_s

    def window_tokens(self, window: int) -> int:
        """Source tokens that a window holds: the last may hold fewer than W."""
        return min(self.window, self.num_source_tokens - window * self.window)
