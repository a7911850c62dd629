"""Window state: the source tokens and the text of one window, and the arrivals that fill it.

Shape suffixes as in decoder.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from zendaya.runtime.arrival_queue import ArrivalQueue, Flags, StreamItem
from zendaya.runtime.options import Pace

LAST_TOKENS = 8
"""Source tokens from where the last word was heard to its end, about."""


class HeardAt(NamedTuple):
    """What a written token was heard from, in source tokens of the stream."""

    place: int
    """The source token that its alignment heads attended to most."""
    horizon: int
    """Source tokens of the stream up to the last that its step read."""


class Overlap(NamedTuple):
    """What a window has taken over from the one before."""

    anew: bool = False
    """Whether it began in the middle of the one before, whose text had lost its way."""

    tokens: int = 0
    """Source tokens that it began with."""
    floor: int = 0
    """The least horizon of the next step: the largest of the words, and of a step that was tried and held."""


class Window:
    """One window: W places for source tokens, of which the first have arrived, and the tokens written so far.

    A window that `slides` is not complete when it is full: what comes next says where the next one begins, which takes over its last
    words.
    """

    def __init__(self, index: int, start: int, tokens_TE: Tensor, add_text: Callable[[int], str], *, slides: bool = False) -> None:
        self.index = index
        self.start = start
        """Source tokens of the stream before this window."""
        self.tokens_TE = tokens_TE
        self.arrived = 0
        """A_k: source tokens that have arrived."""
        self.complete = False
        """Whether no more source tokens will come: W have arrived, the window was cut, or the source has ended."""
        self.after_silence = False
        """Whether silence was left out before this window, so that it has no history."""
        self.written = list[int]()
        self.closed = False
        """Whether the text has ended."""
        self.add_text = add_text
        """From the next token written to the text it adds."""
        self.slides = slides
        self.slide: StreamItem | None = None
        """What the next window begins with, once it has come."""
        self.heard = list[HeardAt]()
        """Where each written token was heard; in a window that slides."""
        self.overlap = Overlap()
        self.speech_T = np.zeros(tokens_TE.shape[0], np.bool_)
        """Which source tokens may hold speech."""
        self.revisions = 0
        """How often tokens that had arrived were replaced."""

    @property
    def width(self) -> int:
        """W."""
        return self.tokens_TE.shape[0]

    @property
    def arrived_TE(self) -> Tensor:  # noqa: N802
        """The source tokens that have arrived."""
        return self.tokens_TE[: self.arrived]

    @property
    def anew(self) -> bool:
        """Whether it began because the text of the one before had lost its way."""
        return self.overlap.anew

    @property
    def has_speech(self) -> bool:
        """Whether any token that has arrived may hold speech; before that nothing is written."""
        return bool(self.speech_T[: self.arrived].any())

    @property
    def last_place(self) -> int:
        """The latest source token at which a word was heard; before the first one where nothing is written."""
        return max((heard.place for heard in self.heard), default=self.start - 1) - self.start

    def begin_anew(self) -> None:
        """Let a window without this one's words begin after the last of them, as if it had slid there."""
        first = min(self.last_place + LAST_TOKENS, self.arrived - 1)
        tokens_TE, speech_T = self.tokens_TE[first : self.arrived].clone(), self.speech_T[first : self.arrived].copy()
        self.slide = StreamItem("slide", 0.0, tokens_TE, speech_T, self.start + first, own=True)

    def fill(self, tokens_TE: Tensor, speech_T: Flags | None = None) -> None:
        """Place the next source tokens; without flags all of them may hold speech."""
        count = tokens_TE.shape[0]
        self.speech_T[self.arrived : self.arrived + count] = True if speech_T is None else speech_T
        self.tokens_TE[self.arrived : self.arrived + count] = tokens_TE
        self.arrived += count
        self.complete = self.arrived == self.width and not self.slides

    def revise(self, tokens_TE: Tensor) -> int:
        """Replace the last tokens that have arrived; how many before them stay. Of tokens of an earlier window nothing is kept."""
        count = min(tokens_TE.shape[0], self.arrived)
        self.tokens_TE[self.arrived - count : self.arrived] = tokens_TE[tokens_TE.shape[0] - count :]
        self.revisions += 1
        return self.arrived - count


class WindowInput:
    """Lets arrivals into the current window, no more than a step needs, and knows how long a step may wait for them.

    Patience counts from when the step was reached or, where a pace is given, from when its last token is due.
    """

    def __init__(
        self, queue: ArrivalQueue, patience_s: float, pace: Pace | None, withdraw: Callable[[int], None] | None = None
    ) -> None:  # fmt: skip
        self.queue, self.patience_s, self.pace = queue, patience_s, pace
        self._withdraw = withdraw
        """Told how many source tokens of the window are as they were, when later ones were replaced."""
        self.now_s = -math.inf
        """Time of the stream: that of the last arrival taken, or of a patience that ran out."""
        self.reached_s = -math.inf
        """When the next step was reached."""
        self.deadline_s: float | None = None
        """When the step's patience runs out, while it waits on the clock."""
        self._first_s = -math.inf
        self._cut_start = 0
        self.window: Window

    def begin(self, window: Window) -> None:
        """Fill this window from now on."""
        self.window = window
        self._first_s = self.reached_s = self.now_s
        if self.pace is not None and window.arrived:  # tokens taken over came earlier
            first = window.start - self._cut_start
            self._first_s -= self.pace.between_s(first, first + window.arrived - 1)

    def wait(self, needed: int, *, patient: bool = True) -> bool:
        """Take arrivals until so many tokens of the window are there, will not come, or were waited for; False: not yet, or it slides.

        One token more than a window holds has come when the window is complete.
        """
        window, items = self.window, self.queue.items
        self.deadline_s = None
        while window.arrived < needed and not window.complete:
            if window.slide is not None:
                return False
            deadline_s = self._give_up_s(needed) if patient else math.inf
            if not items:
                self.deadline_s = deadline_s if deadline_s < math.inf else None
                return False
            if deadline_s < items[0].time_s:
                self.now_s = max(self.now_s, deadline_s)
                return True
            self._take(items[0], needed)
        return True

    @property
    def block(self) -> int:
        """Source tokens that arrive together; 1 where the pace is not known."""
        return 1 if self.pace is None else self.pace.block

    def next_try(self, horizon: int, most: int) -> int:
        """The end of the next block after a horizon, `most` at most: where a held step is tried again."""
        before = self.window.start - self._cut_start + horizon
        return min(most, horizon + self.block - before % self.block)

    def wait_for_speech(self) -> bool:
        """Take arrivals until the window holds speech or will hold none; False: not yet."""
        window = self.window
        while not window.has_speech and not window.complete:
            if not self.wait(window.arrived + 1, patient=False):
                return False
        return True

    def _give_up_s(self, needed: int) -> float:
        """When the patience for the window's first `needed` tokens is over."""
        due_s = self.reached_s
        if self.pace is not None:
            first = self.window.start - self._cut_start
            due_s = max(due_s, self._first_s + self.pace.between_s(first, first + min(needed, self.window.width) - 1))
        return due_s + self.patience_s

    def _take(self, item: StreamItem, needed: int) -> None:
        """Let the next item happen; of tokens, no more than are needed."""
        window = self.window
        self.now_s = max(self.now_s, item.time_s)
        if item.kind == "onset" and window.arrived:
            window.complete = True  # the onset begins the next one
            return
        if item.kind == "slide":
            window.slide = self.queue.items.popleft()
            return
        if item.tokens_TE is None:
            self.queue.items.popleft()
            if item.kind == "onset":
                window.start = self._cut_start = item.position
                window.after_silence = True
            if item.kind == "cut":
                self._cut_start = window.start + window.arrived
            window.complete = window.complete or item.kind == "end" or (item.kind == "cut" and window.arrived > 0)
            return
        if item.revised:
            kept = window.revise(item.tokens_TE[: item.revised])
            if self._withdraw is not None:
                self._withdraw(kept)
            self._shorten(item, item.revised)
        elif window.arrived == window.width:
            window.complete = True  # it does not slide: the tokens begin the next one
        else:
            if window.arrived == 0:
                self._first_s = self.reached_s = self.now_s
            count = min(needed, window.width) - window.arrived
            window.fill(item.tokens_TE[:count], None if item.speech_T is None else item.speech_T[:count])
            self._shorten(item, count)

    def _shorten(self, item: StreamItem, count: int) -> None:
        """Leave out the first tokens of an item, which were taken, and the item after its last."""
        assert item.tokens_TE is not None
        item.tokens_TE, item.speech_T = item.tokens_TE[count:], None if item.speech_T is None else item.speech_T[count:]
        item.revised = 0
        if item.tokens_TE.shape[0] == 0:
            self.queue.items.popleft()
