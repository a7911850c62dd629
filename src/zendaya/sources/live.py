"""Live sources: chunks of raw input as they arrive, from a file at once or at its own speed, a pipe or a microphone."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zendaya.errors import MissingExtraError, SourceError
from zendaya.sources.media import SAMPLE_RATE, AudioChunk, chunk_size

TICK_S = 0.05
"""Longest time between two arrivals: keys, deadlines and the status line are looked at that often."""
MAX_CHUNKS = 600
"""Chunks that a reading thread may be ahead; beyond it a pipe is not read further, and a microphone loses sound."""
Deadline = Callable[[], float | None]
"""When the next decision is due, in seconds of the source."""


@dataclass(frozen=True)
class Arrival:
    """A chunk of raw input, or None where only time has passed; without `now_s` its tokens arrive when the encoder says."""

    raw: Any
    now_s: float | None = None


class Clock:
    """Seconds since the source began; 0 before."""

    def __init__(self) -> None:
        self._origin_s = math.inf

    def begin(self, already_s: float = 0.0) -> None:
        """The source began so long ago; a second call changes nothing."""
        if math.isinf(self._origin_s):
            self.reach(already_s)

    def reach(self, already_s: float) -> None:
        """The source began at least so long ago."""
        self._origin_s = min(self._origin_s, time.monotonic() - already_s)

    def __call__(self) -> float:
        return max(0.0, time.monotonic() - self._origin_s)


def at_once(chunks: Iterable[Any]) -> Iterator[Arrival]:
    """Chunks as fast as they can be read, on the clock of the source."""
    return (Arrival(raw) for raw in chunks)


def paced(chunks: Iterable[tuple[Any, float]], clock: Callable[[], float], deadline_s: Deadline = lambda: None) -> Iterator[Arrival]:
    """Chunks of a recording in real time, each with its end; no moment past the sound heard is given, so the text is `at_once`'s."""
    heard_s = 0.0
    for raw, end_s in chunks:
        while (now_s := clock()) < end_s:
            yield Arrival(None, min(now_s, heard_s))
            due_s = deadline_s()
            time.sleep(max(0.0, min(end_s - now_s, TICK_S, TICK_S if due_s is None else max(0.001, due_s - now_s))))
        yield Arrival(raw)
        heard_s = end_s


def listened(chunks: Iterable[Any], clock: Callable[[], float], deadline_s: Deadline = lambda: None) -> Generator[Arrival, None, None]:
    """Chunks read in a thread and stamped as they come, and time that passes while none waits. Closing it ends the thread."""
    ready = threading.Condition()
    waiting = deque[Arrival]()
    failed = list[BaseException]()
    ended = stopped = False

    def read() -> None:
        nonlocal ended
        try:
            for raw in chunks:
                with ready:
                    ready.wait_for(lambda: stopped or len(waiting) < MAX_CHUNKS)
                    if stopped:
                        break
                    waiting.append(Arrival(raw, clock()))
                    ready.notify_all()
        except BaseException as error:
            failed.append(error)
        finally:
            if isinstance(chunks, Generator):
                with contextlib.suppress(Exception):
                    chunks.close()
            with ready:
                ended = True
                ready.notify_all()

    thread = threading.Thread(target=read, name="zendaya-source", daemon=True)  # a read that never returns must not hold up the end
    thread.start()
    try:
        while True:
            with ready:
                due_s = deadline_s()
                ready.wait_for(lambda: waiting or ended, TICK_S if due_s is None else min(TICK_S, max(0.0, due_s - clock())))
                # Under the lock: a chunk that is not here now gets a later stamp than this moment.
                arrival = waiting.popleft() if waiting else None if ended else Arrival(None, clock())
                ready.notify_all()
            if arrival is None:
                break
            yield arrival
        if failed:
            raise failed[0]
    finally:
        with ready:
            stopped = True
            ready.notify_all()
        thread.join(0.5)


@dataclass(frozen=True)
class Microphone:
    """An input device of this machine."""

    index: int
    name: str
    channels: int
    default: bool


def microphones() -> list[Microphone]:
    """The input devices of this machine; an empty list where there is none."""
    sounddevice = _sounddevice()
    default = sounddevice.default.device[0]
    return [
        Microphone(index, str(device["name"]), int(device["max_input_channels"]), index == default)
        for index, device in enumerate(sounddevice.query_devices())
        if device["max_input_channels"] > 0
    ]


def read_microphone(device: int | str | None = None, *, chunk_s: float = 0.1) -> Iterator[AudioChunk]:
    """Sound of a microphone, until the reader stops: the default, or one of `microphones` by index or part of its name."""
    size = chunk_size(chunk_s)
    sounddevice = _sounddevice()
    found = microphones()
    if not found:
        raise SourceError("microphone: this machine has no input device: connect one, or give a file or a pipe")
    if device is not None and not any(device == one.index or (isinstance(device, str) and device in one.name) for one in found):
        names = "; ".join(f"{one.index} {one.name}" for one in found)
        raise SourceError(f"microphone: no input device {device!r}: expected one of {names}")
    heard = 0
    try:
        with sounddevice.InputStream(samplerate=SAMPLE_RATE, channels=1, dtype="float32", device=device) as stream:
            while True:
                samples, lost = stream.read(size)
                yield AudioChunk(np.asarray(samples, np.float32)[:, 0].copy(), heard / SAMPLE_RATE, bool(lost))
                heard += size
    except sounddevice.PortAudioError as error:
        name = "the default device" if device is None else device
        raise SourceError(f"microphone: {name} cannot be read at 16 kHz: {error}") from None


def _sounddevice() -> Any:
    try:
        import sounddevice
    except ModuleNotFoundError:
        raise MissingExtraError("sounddevice", "audio", "the microphone") from None
    except OSError as error:  # the package is installed, the PortAudio library is not
        raise SourceError(f"microphone: {error}: install PortAudio (on Debian and Ubuntu: apt install libportaudio2)") from None
    return sounddevice
