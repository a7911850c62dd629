"""The voice gate: of a sound only speech is decoded, from just before it begins until a while after it ends.

Silence between two stretches of speech is heard by the detector alone. Where a stretch begins and ends depends on the samples up to
that moment, not on their chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zendaya.encoders.base import readable_prefix
from zendaya.errors import SourceError
from zendaya.runtime.arrival_queue import Flags
from zendaya.sources.media import SAMPLE_RATE, Samples
from zendaya.sources.vad import FRAME, VoiceDetector

BEFORE, AFTER = round(0.4 * SAMPLE_RATE), round(2.0 * SAMPLE_RATE)
"""Samples kept before speech, and samples without speech that end a stretch: `speech_pad_ms` and `min_silence_duration_ms` of
faster-whisper, which uses the same detector. A shorter pause is part of the stretch."""
BEGIN_FRAMES = 3
"""Frames of speech in a row that begin a stretch, 0.1 s: shorter than a word, longer than a click."""
LARGEST_SAMPLE = 1e6
"""Full scale is 1; a larger sample is damage."""


class GateStep(NamedTuple):
    """What comes out of the gate: a stretch of speech begins, more of its sound, or its end."""

    begins: bool = False
    ends: bool = False
    samples_S: Samples | None = None


class VoiceGate:
    """Lets speech through, in stretches. Places are counted in samples of the stream."""

    def __init__(self, tokens_per_s: float, voice: VoiceDetector | None = None) -> None:
        self._token = SAMPLE_RATE / tokens_per_s
        self._voice = voice or VoiceDetector()
        self._state = self._voice.start()
        self.heard = 0
        """Samples so far."""
        self.position: int | None = None
        """Source tokens before the present stretch; None in silence."""
        self.known = 0
        """Samples that had been heard when the stretch was found."""
        self._kept_S = np.zeros(0, np.float32)
        """In silence: the last sound, which may come just before speech."""
        self._speech = list[bool]()
        """Speech or not, for each frame from `_first` on."""
        self._first = 0
        self._run = 0
        """Frames of speech in a row up to now."""
        self._last = 0
        """End of the last frame of speech."""
        self._problem = ""

    @property
    def begin(self) -> int:
        """First sample of the present stretch."""
        assert self.position is not None
        return round(self.position * self._token)

    def read(self, samples_S: Samples) -> Iterator[GateStep]:
        """Steps that the next samples bring. Those before a damaged sample count; the next call raises its error."""
        if self._problem:
            raise SourceError(self._problem)
        good_S = self._good(samples_S)
        first = 0
        while first < good_S.size:
            piece_S = good_S[first : first + FRAME - self.heard % FRAME]  # a stretch begins and ends between two frames
            first += piece_S.size
            self.heard += piece_S.size
            if self.position is None:
                self._keep(piece_S)
            else:
                yield GateStep(samples_S=piece_S)
            for speech in self._voice.read(self._state, piece_S):
                yield from self._decide(speech)
        if self._problem and not good_S.size:
            raise SourceError(self._problem)

    def finish(self) -> None:
        """End the stretch here, if there is one; raise the error of a damaged sample."""
        self.position, self._kept_S = None, self._kept_S[:0]
        problem, self._problem = self._problem, ""
        if problem:
            raise SourceError(problem)

    def speech_of(self, first: int, count: int) -> Flags:
        """Which of `count` source tokens of the stretch, from its token `first` on, hold speech as far as it was heard."""
        edges = [round(((self.position or 0) + first + n) * self._token) for n in range(count + 1)]
        frames = [(begin // FRAME - self._first, (end - 1) // FRAME + 1 - self._first) for begin, end in itertools.pairwise(edges)]
        found = np.array([any(self._speech[max(0, begin) : end]) for begin, end in frames], np.bool_)
        self._forget(edges[-1])
        return found

    def _decide(self, speech: bool) -> Iterator[GateStep]:
        """Begin or end a stretch after the frame that was just heard."""
        self._speech.append(speech)
        self._run = self._run + 1 if speech else 0
        self._last = self.heard if speech else self._last
        if self.position is not None and self.heard - self._last >= AFTER:
            yield GateStep(ends=True)
            self.position = None
        elif self.position is None and self._run >= BEGIN_FRAMES:
            kept_from = self.heard - self._kept_S.size
            start = max(kept_from, self.heard - self._run * FRAME - BEFORE)
            self.position = int(start / self._token)
            self.position += self.begin < kept_from
            self.known = self.heard
            yield GateStep(begins=True)
            yield GateStep(samples_S=self._kept_S[self.begin - kept_from :])

    def _keep(self, piece_S: Samples) -> None:
        kept = BEFORE + BEGIN_FRAMES * FRAME + round(self._token)
        self._kept_S = np.concatenate([self._kept_S, piece_S])[-kept:]
        self._forget(self.heard - kept)

    def _forget(self, before: int) -> None:
        """Drop the frames that end before a place."""
        done = max(0, before // FRAME - self._first)
        del self._speech[:done]
        self._first = max(self._first, before // FRAME)

    def _good(self, samples_S: Samples) -> Samples:
        """The samples before the first damaged one, as float32."""
        if samples_S.ndim != 1 or samples_S.dtype.kind != "f":
            raise SourceError(
                f"audio: expected one channel of float samples at {SAMPLE_RATE} Hz, shape (any,): "
                f"got {samples_S.dtype} of shape {samples_S.shape}; mix down and convert first"
            )
        good = readable_prefix(samples_S, LARGEST_SAMPLE)
        if good < samples_S.size:
            place = self.heard + good
            self._problem = (
                f"audio: sample {place} ({place / SAMPLE_RATE:.3f} s) is {samples_S[good]}: "
                f"expected a number below {LARGEST_SAMPLE:g} in magnitude; the recording is damaged, or not float audio"
            )
        return samples_S[:good].astype(np.float32, copy=False)
