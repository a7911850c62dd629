"""Windows that end where the speaker pauses, found by voice activity detection while the sound arrives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from zendaya.encoders.base import Tokens
from zendaya.errors import ConfigError
from zendaya.sources.media import Samples
from zendaya.sources.vad import FRAME_S, PAUSE_S, SHARE, VoiceDetector


class PauseWindows:
    """Cuts source tokens into windows at pauses: after its minimum share a window ends in the next pause, and at W without one.

    A cut is decided when the tokens around it arrive, from the sound up to that moment, whatever the chunk size.
    """

    def __init__(
        self, window_tokens: int, tokens_per_s: float, *, pause_s: float = PAUSE_S, share: float = SHARE, voice: VoiceDetector | None = None
    ) -> None:
        if not FRAME_S <= pause_s <= 10:
            raise ConfigError(f"pause_s must lie in {FRAME_S} … 10 s: got {pause_s!r}")
        if not 0 < share <= 1:
            raise ConfigError(f"share, the minimum share of a window, must lie above 0 and up to 1: got {share!r}")
        self.window_tokens, self.tokens_per_s = window_tokens, tokens_per_s
        self._least, self._pause = max(1, round(share * window_tokens)), round(pause_s / FRAME_S)
        self._voice = voice or VoiceDetector()
        self.restart()

    def restart(self) -> None:
        """Begin with a new stream."""
        self._state = self._voice.start()
        self._speech = list[bool]()
        """Speech or not, for each frame from `_first` on."""
        self._first = 0
        self._begin = 0
        """First source token of the current window."""
        self._given = 0
        """Source tokens passed on so far."""

    def hear(self, samples_S: Samples) -> None:
        """Read the sound, before or together with the tokens made from it."""
        self._speech += self._voice.read(self._state, samples_S)

    @property
    def cut_s(self) -> float:
        """Start of the current window on the source clock: the last cut, unless W tokens have passed since."""
        return self._begin / self.tokens_per_s

    def cut(self, tokens: Tokens) -> int | None:
        """How many of the tokens come before the next cut; None if there is no cut. Call again with the tokens after it."""
        first, count = self._given, 0
        for arrival_s, together in itertools.groupby(tokens.arrival_s.tolist()):
            count += len(list(together))
            cut = self._first_cut(first + count, arrival_s)
            if cut is not None:
                return cut - first
        return None

    def _first_cut(self, newest: int, now_s: float) -> int | None:
        """The first cut among the tokens up to `newest`, which has just arrived."""
        while self._given < newest:
            cut = self._cut(newest, now_s)
            if cut is not None:
                self._begin = self._given = cut
                return cut
            if newest < self._begin + self.window_tokens:
                break
            self._begin += self.window_tokens  # the session starts the next window by itself
        self._given = newest
        self._forget()
        return None

    def _cut(self, newest: int, now_s: float) -> int | None:
        """The cut in the longest pause among the tokens not passed on yet; the later pause wins a tie."""
        earliest = max(self._begin + self._least, self._given)
        latest = min(newest, self._begin + self.window_tokens - 1)
        best: tuple[int, int] | None = None
        for start, stop in self._pauses(int(now_s / FRAME_S + 1e-6)):
            first, last = (round(frame * FRAME_S * self.tokens_per_s) for frame in (start, stop))
            low, high = max(earliest, first), min(latest, last)
            if low <= high and (best is None or stop - start >= best[0]):
                best = stop - start, min(max((first + last) // 2, low), high)
        return best[1] if best else None

    def _pauses(self, num_frames: int) -> Iterator[tuple[int, int]]:
        """Long enough pauses in the first `num_frames` frames, as (first frame, frame after the last)."""
        start = None
        for place, speech in enumerate([*self._speech[: num_frames - self._first], True], start=self._first):
            if not speech and start is None:
                start = place
            if speech and start is not None:
                if place - start >= self._pause:
                    yield start, place
                start = None

    def _forget(self) -> None:
        """Drop old frames: only the end of a pause that reaches the next tokens matters."""
        before = int(self._given / self.tokens_per_s / FRAME_S) - 4 * self._pause
        if before > self._first:
            del self._speech[: before - self._first]
            self._first = before
