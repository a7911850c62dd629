"""Streams of sound that live captions are measured on: chapters of a corpus, utterance after utterance, and noise."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zendaya.errors import ConfigError
from zendaya.evaluation.live import utterance
from zendaya.evaluation.metrics.speech import Utterance
from zendaya.records import Clip
from zendaya.sources.media import SAMPLE_RATE, Samples, read_audio

TEST_12 = (
    "61-70970", "4077-13754", "2961-961", "1284-1180", "121-127105", "7176-88083", "1580-141083", "260-123288", "908-157963", "4970-29095",
    "6829-68771", "3570-5694",
)  # fmt: skip
"""Chapters of test-clean for iterating, 46 min: of 200 to 300 s, in the order of the sha256 of their ids, the first of each speaker."""
NOISES = ("silence", "pink", "hum", "music", "room")
ROOM_UTTERANCES = 10
CHUNK = SAMPLE_RATE // 10


@dataclass(frozen=True)
class Noise:
    """Sound without speech, the same for the same seed."""

    kind: str
    duration_s: float
    seed: int

    def samples(self) -> Samples:
        """The sound: full scale is 1."""
        rng, size = np.random.default_rng([self.seed, NOISES.index(self.kind)]), round(self.duration_s * SAMPLE_RATE)
        at_s = np.arange(size) / SAMPLE_RATE
        if self.kind == "silence":
            return np.zeros(size, np.float32)
        if self.kind in ("pink", "room"):  # power falls with the frequency; that of a room faster, and it is faint
            spectrum = np.fft.rfft(rng.standard_normal(size))
            spectrum /= np.maximum(np.arange(spectrum.size) * SAMPLE_RATE / size, 20.0) ** (0.5 if self.kind == "pink" else 1.0)
            sound, level = np.fft.irfft(spectrum, size), 0.03 if self.kind == "pink" else 0.003
        elif self.kind == "hum":  # the mains and its harmonics, swelling slowly
            sound = sum(np.sin(2 * np.pi * 50 * k * at_s + k) / k for k in (1, 2, 3, 5, 7)) * (1 + 0.2 * np.sin(0.3 * at_s))
            level = 0.03
        else:  # three plucked voices in a pentatonic scale, four notes a second
            sound, level = np.zeros(size), 0.05
            for voice, (beat_s, octave) in enumerate(((0.25, 440.0), (0.5, 220.0), (1.0, 110.0))):
                notes = octave * 2.0 ** (rng.choice([0, 2, 4, 7, 9], math.ceil(self.duration_s / beat_s)) / 12)
                number = np.minimum((at_s / beat_s).astype(int), notes.size - 1)
                phase, fade = 2 * np.pi * notes[number] * at_s, np.exp(-3 * (at_s % beat_s) / beat_s)
                sound += fade * sum(np.sin(k * phase) / k**2 for k in range(1, 6)) / (voice + 1)
        return (level * sound / np.sqrt(np.mean(sound**2))).astype(np.float32)


@dataclass(frozen=True)
class SoundStream:
    """Recordings and noise, back to back."""

    name: str
    parts: tuple[Clip | Noise, ...]

    def sound(self, folder: Path) -> Iterator[Samples]:
        """Chunks of a tenth of a second."""
        for part in self.parts:
            if isinstance(part, Clip):
                yield from (chunk.samples for chunk in read_audio(folder / part.media))
            else:
                samples_S = part.samples()
                yield from (samples_S[first : first + CHUNK] for first in range(0, samples_S.size, CHUNK))

    def utterances(self, times: dict[str, Any]) -> list[Utterance]:
        """What is said in it, and when."""
        starts_s = itertools.accumulate((part.duration_s for part in self.parts), initial=0.0)
        return [utterance(part, start_s, times) for part, start_s in zip(self.parts, starts_s, strict=False) if isinstance(part, Clip)]

    @property
    def duration_s(self) -> float:
        return sum(part.duration_s for part in self.parts)


def by_hash(names: Sequence[str]) -> list[str]:
    """Names in an order that nobody chose."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def choose_chapters(clips: Sequence[Clip], wanted: str) -> list[SoundStream]:
    """The first chapters of the fixed list, then of the others in the order of their hashes; or all."""
    there = defaultdict[str, list[Clip]](list)
    for clip in clips:
        there[clip.stream].append(clip)
    order = [name for name in TEST_12 if name in there] + by_hash([name for name in there if name not in TEST_12])
    if wanted != "all" and not (wanted.isdecimal() and 1 <= int(wanted) <= len(order)):
        raise ConfigError(f"--chapters must be a number from 1 to {len(order)}, or all: got {wanted!r}")
    return [SoundStream(name, tuple(there[name])) for name in (order if wanted == "all" else order[: int(wanted)])]


def noise_streams(clips: Sequence[Clip], seconds: float, seed: int) -> list[SoundStream]:
    """One stream per kind of noise: so many seconds of it, then an utterance; room noise in ten pieces with an utterance after each."""
    named = {clip.id: clip for clip in clips if 5 <= clip.duration_s <= 12}
    if len(named) < len(NOISES) - 1 + ROOM_UTTERANCES:
        raise ConfigError(f"--noise needs {len(NOISES) - 1 + ROOM_UTTERANCES} utterances of 5 to 12 s: got {len(named)} in this split")
    chosen, streams = iter([named[name] for name in by_hash(list(named))]), []
    for kind in NOISES:
        pieces = ROOM_UTTERANCES if kind == "room" else 1
        noises = [Noise(kind, round(seconds / pieces, 1), seed * ROOM_UTTERANCES + piece) for piece in range(pieces)]
        parts = tuple(part for noise in noises for part in (noise, next(chosen)))
        streams.append(SoundStream(f"{kind}, {clips[0].split}, {seconds:g} s, seed {seed}", parts))
    return streams


def alone(streams: Sequence[SoundStream]) -> list[SoundStream]:
    """Each utterance of the streams as a stream of its own."""
    return [SoundStream(part.id, (part,)) for stream in streams for part in stream.parts if isinstance(part, Clip)]
