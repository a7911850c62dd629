"""The arrivals queue: what has happened to a stream and was not looked at yet, in the order of time."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from zendaya.errors import SourceError

Times = float | Sequence[float] | npt.NDArray[np.floating[Any]]
Flags = npt.NDArray[np.bool_]


@dataclass
class StreamItem:
    """Something that happens to a stream: tokens arrive, the window slides, is cut, speech begins, time passes, the source ends."""

    kind: Literal["tokens", "slide", "cut", "onset", "time", "end"]
    time_s: float
    tokens_TE: Tensor | None = None
    speech_T: Flags | None = None
    """Which of the tokens hold speech; None: all may."""
    position: int = 0
    """Of an onset, and of a window that slides: source tokens of the stream before it."""
    revised: int = 0
    """The first `revised` tokens replace the last ones that came before."""
    own: bool = False
    """Of a window that slides: whether its text asked for that, and not the encoder."""


class ArrivalQueue:
    """Items of one stream in order; times never go back, whatever a caller says."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock
        self.items = deque[StreamItem]()
        self.finished = False
        self._seen_s = self._pushed_s = -math.inf

    def push(self, tokens_TE: Tensor, arrival_s: Times | None, speech_T: Flags | None = None) -> None:
        """Queue tokens with one arrival time for all or one per token; without a time, the clock's or the last one."""
        self._check_open()
        for time_s, first, last in self._groups(tokens_TE.shape[0], arrival_s):
            flags_T = None if speech_T is None else speech_T[first:last]
            self.items.append(StreamItem("tokens", time_s, tokens_TE[first:last], flags_T))

    def push_again(self, item: StreamItem, arrival_s: Times | None) -> None:
        """Queue tokens of which the first were given before: they revise those, or begin a window that overlaps the one before."""
        self._check_open()
        assert item.tokens_TE is not None
        count = item.tokens_TE.shape[0]
        if not 0 <= item.revised <= count or count == 0:
            raise SourceError(f"of {count} source tokens, 0 … {count} can replace those before them: got {item.revised}")
        times = list(self._groups(count, arrival_s))
        if len(times) > 1:
            raise SourceError(f"source tokens that replace others arrive together, at one time: got {len(times)} times")
        item.time_s = times[0][0]
        self.items.append(item)

    def cut(self, now_s: float | None) -> None:
        """The window ends here."""
        self._check_open()
        self.items.append(StreamItem("cut", self._moment(now_s)))

    def begin_speech(self, position: int, now_s: float | None) -> None:
        """Speech begins after silence: the next token is that at `position`."""
        self._check_open()
        self.items.append(StreamItem("onset", self._moment(now_s), position=position))

    def advance(self, now_s: float | None) -> None:
        """Time has passed; after the end of the source it does not matter."""
        if not self.finished:
            self.items.append(StreamItem("time", self._moment(now_s)))

    def finish(self, now_s: float | None) -> None:
        """The source has ended; a second call changes nothing."""
        if not self.finished:
            self.items.append(StreamItem("end", self._moment(now_s)))
            self.finished = True

    def _check_open(self) -> None:
        if self.finished:
            raise SourceError("the stream was finished: open a new session for more source")

    def _moment(self, now_s: float | None) -> float:
        """A given time or the clock's; later items count as no earlier."""
        if now_s is None:
            now_s = self.clock() if self.clock is not None else self._seen_s if self._seen_s > -math.inf else 0.0
        if not math.isfinite(now_s):
            raise SourceError(f"a time must be finite: got {now_s}")
        self._seen_s = max(self._seen_s, now_s)
        return self._seen_s

    def _groups(self, count: int, arrival_s: Times | None) -> Iterator[tuple[float, int, int]]:
        """Tokens grouped by arrival: the time, the first token and the one past the last."""
        if arrival_s is None:
            arrival_s = self._moment(None)
        if count and isinstance(arrival_s, float) and math.isfinite(arrival_s) and arrival_s >= self._pushed_s:
            # The common live push, without arrays.
            self._pushed_s, self._seen_s = arrival_s, max(arrival_s, self._seen_s)
            return iter([(self._seen_s, 0, count)])
        times_T = np.asarray(arrival_s, np.float64)
        if times_T.ndim > 1 or (times_T.ndim == 1 and times_T.shape[0] != count):
            raise SourceError(f"arrival_s must be one time, or one for each of {count} tokens: got shape {times_T.shape}")
        times_T = np.broadcast_to(times_T, (count,))
        if count == 0:
            return iter(())
        if not np.isfinite(times_T).all() or (np.diff(times_T) < 0).any() or times_T[0] < self._pushed_s:
            after = f", after {self._pushed_s:g} s" if self._pushed_s > -math.inf else ""
            raise SourceError(f"arrival times must be finite and never go back: got {times_T[0]:g} … {times_T[-1]:g} s{after}")
        self._pushed_s = float(times_T[-1])
        times_T = np.maximum(times_T, self._seen_s)  # tokens pushed after time was advanced count from that time on
        self._seen_s = float(times_T[-1])
        edges = [0, *(np.flatnonzero(np.diff(times_T)) + 1).tolist(), count]
        return iter([(float(times_T[first]), first, last) for first, last in itertools.pairwise(edges)])
