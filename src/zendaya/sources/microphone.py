"""The microphones of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zendaya.errors import MissingExtraError, SourceError
from zendaya.sources.media import SAMPLE_RATE, AudioChunk, chunk_size


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
