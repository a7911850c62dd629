"""Sound and pictures of a file or a pipe, in chunks: 16 kHz mono float samples, frames at a steady rate."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zendaya.errors import ConfigError, SourceError
from zendaya.sources.container import Source, open_bytes, open_container, reason

Samples = npt.NDArray[np.float32]
SAMPLE_RATE = 16_000
RESAMPLER_AHEAD_S = 0.002
"""Look-ahead of the resampler for recordings not at 16 kHz: half of libswresample's filter, rounded up."""
MAX_PIXELS = 8192 * 8192
"""Largest picture decoded; a few bytes of a file could ask for gigabytes."""
RATES, MAX_CHANNELS = (1000, 768_000), 8
"""Supported sample rates in Hz, and channels (7.1). A resampler for absurd rates needs unbounded memory, and PyAV reads past the end of
planar frames with more than 8 channels."""
MAX_PAUSE_S = 600.0
"""Longest time one picture is shown; beyond it the file's clock is broken, and would ask for millions of copies."""


@dataclass(frozen=True)
class Frame:
    """One picture of a video: RGB bytes (height, width, 3), its moment on the video's clock, and when it is complete."""

    pixels: npt.NDArray[np.uint8]
    time_s: float
    end_s: float


@dataclass(frozen=True)
class AudioChunk:
    """Samples at 16 kHz, and the start of the first, in seconds from the beginning of the recording."""

    samples: Samples
    start_s: float
    lost: bool = False
    """A live source dropped samples just before these, because they were not fetched in time."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.samples.size / SAMPLE_RATE


def read_audio(source: Source, *, chunk_s: float = 0.1, allow_truncated: bool = False) -> Iterator[AudioChunk]:
    """The sound of a recording (a path, `-` for standard input, or an open binary file) in chunks of `chunk_s`."""
    size = chunk_size(chunk_s)
    with open_container(source) as media:
        import av

        stream, name = media.stream("audio"), media.name
        rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
        if not RATES[0] <= rate <= RATES[1] or channels > MAX_CHANNELS:
            expected = f"at most {MAX_CHANNELS} at {RATES[0]} … {RATES[1]} Hz"
            raise SourceError(f"{name}: {channels} channels at {rate} Hz: expected {expected}; damaged?")
        resampler = av.AudioResampler(format="flt", rate=SAMPLE_RATE)

        def blocks() -> Iterator[Samples]:
            for frame in itertools.chain(media.frames(stream), [None]):
                try:
                    parts = resampler.resample(frame)
                except (av.error.FFmpegError, ValueError) as error:  # a sample rate or channel count that changes, or is impossible
                    raise SourceError(f"{name}: damaged: its samples cannot be resampled to {SAMPLE_RATE} Hz: {reason(error)}") from None
                # Channels are averaged here: libswresample adds them in float, so stereo would come out louder.
                yield from (part.to_ndarray().reshape(part.samples, -1).mean(1) for part in parts)

        for chunk in _rechunk(blocks(), size, f"{name}: empty: its audio stream holds no samples"):
            yield chunk
        if not allow_truncated:
            media.check_length(stream, chunk.end_s)


def probe(path: str | Path, *, raw: bool = False) -> None:
    """Open a recording and close it, so that a bad file is an error at once."""
    with contextlib.ExitStack() as stack:
        if raw:
            open_bytes(path, stack)
        else:
            stack.enter_context(open_container(path))


def read_raw(source: Source, *, chunk_s: float = 0.1) -> Iterator[AudioChunk]:
    """Raw samples (16 kHz, mono, signed 16-bit little-endian, no header) in chunks of `chunk_s`, as they come."""
    size = chunk_size(chunk_s)
    with contextlib.ExitStack() as stack:
        file, name = open_bytes(source, stack)
        read: Callable[[int], bytes] = getattr(file, "read1", file.read)

        def blocks() -> Iterator[Samples]:
            data = b""
            while piece := read(2 * size):
                data += piece
                whole = len(data) // 2
                yield np.frombuffer(data, "<i2", whole).astype(np.float32) / np.float32(32768)
                data = data[2 * whole :]

        yield from _rechunk(blocks(), size, f"{name}: empty: it holds no samples")


def read_video(source: Source, *, fps: float = 3.0, allow_truncated: bool = False) -> Iterator[Frame]:
    """The pictures of a video at `fps` frames per second: at each i/fps the frame shown then."""
    if not 0 < fps <= 1000:
        raise ConfigError(f"fps must lie above 0 and up to 1000 frames per second: got {fps!r}")
    with open_container(source) as media:
        stream, name = media.stream("video"), media.name
        _check_size(stream.codec_context.width, stream.codec_context.height, name)
        end_s = 0.0

        def timed() -> Iterator[tuple[float, float, Any]]:
            nonlocal end_s
            first_s = last_s = 0.0
            frame_s = 1.0 / float(stream.average_rate or stream.guessed_rate or 25)
            for index, frame in enumerate(media.frames(stream)):
                _check_size(frame.width, frame.height, name)
                at_s = index * frame_s if frame.time is None else frame.time
                if index == 0:
                    first_s = last_s = at_s
                if at_s - last_s > MAX_PAUSE_S:
                    raise SourceError(f"{name}: damaged: the clock of its pictures jumps from {last_s:.2f} to {at_s:.2f} s")
                last_s = at_s
                length_s = float(frame.duration * frame.time_base) if frame.duration else frame_s
                if not 0 < length_s <= MAX_PAUSE_S:
                    raise SourceError(f"{name}: damaged: a picture at {at_s:.2f} s is to be shown for {length_s:g} s")
                yield at_s - first_s, at_s - first_s + length_s, frame
                end_s = max(end_s, at_s - first_s + length_s)

        picture: tuple[Any, Any] = (None, None)
        for time_s, seen_s, frame in sample(timed(), fps):
            if frame is not picture[0]:
                # Phone videos carry a rotation; degrees are counter-clockwise, like the turns of rot90.
                picture = (frame, np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))))
            yield Frame(picture[1], time_s, seen_s)
        if picture[0] is None:
            raise SourceError(f"{name}: empty: its video stream holds no frames")
        if not allow_truncated:
            media.check_length(stream, end_s)


def sample(timed: Iterable[tuple[float, float, Any]], fps: float) -> Iterator[tuple[float, float, Any]]:
    """Resample things with a begin and an end to the moments 0, 1/fps, 2/fps …: (moment, when it was known, thing).

    A thing is shown until the next begins, the last until its own end. That it lasts beyond its own end is known when the next begins.

    >>> list(sample([(0.0, 0.4, "a"), (0.4, 0.8, "b"), (0.8, 1.2, "c")], fps=2))
    [(0.0, 0.4, 'a'), (0.5, 0.8, 'b'), (1.0, 1.2, 'c')]
    """
    slot, known_s = 0, 0.0
    shown: tuple[float, Any] | None = None
    for begin_s, end_s, thing in timed:
        while shown is not None and slot / fps < begin_s - 1e-6:  # 10/30 and 1/3 are the same moment
            known_s = max(known_s, shown[0] if slot / fps < shown[0] - 1e-6 else end_s)
            yield slot / fps, known_s, shown[1]
            slot += 1
        shown = (end_s, thing)
    while shown is not None and (slot == 0 or slot / fps < shown[0] - 1e-6):
        known_s = max(known_s, shown[0])
        yield slot / fps, known_s, shown[1]
        slot += 1


def chunk_size(chunk_s: float) -> int:
    """Samples per chunk, after a check of the range."""
    if not 1 / SAMPLE_RATE <= chunk_s <= 60:
        raise ConfigError(f"chunk_s must lie between one sample and 60 s: got {chunk_s!r}")
    return round(chunk_s * SAMPLE_RATE)


def _rechunk(blocks: Iterable[Samples], size: int, empty: str) -> Iterator[AudioChunk]:
    """The same samples in chunks of `size`, the last may be shorter; `empty` is the error where there are none."""
    waiting, count, heard = list[Samples](), 0, 0
    for block in blocks:
        waiting.append(block)
        count += block.size
        if count >= size:
            whole = np.concatenate(waiting)
            for first in range(0, count - size + 1, size):
                yield AudioChunk(whole[first : first + size], heard / SAMPLE_RATE)
                heard += size
            waiting = [whole[count - count % size :]]
            count %= size
    if count:
        yield AudioChunk(np.concatenate(waiting), heard / SAMPLE_RATE)
    elif heard == 0:
        raise SourceError(empty)


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MAX_PIXELS:
        raise SourceError(f"{name}: pictures of {width} × {height}: expected at most {MAX_PIXELS} pixels; scale the video down")
