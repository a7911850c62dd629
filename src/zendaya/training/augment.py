"""Sound made harder: other speeds, rooms, noises, music and lines, so that a model adapted on read speech hears other speech too.

Shape suffix: S samples. Everything is drawn from the generator that is passed in.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zendaya.sources.media import SAMPLE_RATE, Samples

Floats = npt.NDArray[np.float64]


def at_speed(samples_S: Samples, factor: float) -> Samples:
    """The sound played `factor` times as fast, and as much higher."""
    count = max(1, round(samples_S.size / factor))
    place_S = np.arange(count) * factor
    return np.interp(place_S, np.arange(samples_S.size), samples_S).astype(np.float32)


def noise(rng: np.random.Generator, count: int) -> Samples:
    """Sound without speech, of power 1: white, pink or brown noise, hum, or plucked notes."""
    kind = rng.integers(5)
    at_s = np.arange(count) / SAMPLE_RATE
    if kind < 3:  # power falls with the frequency, by its 0th, 1st or 2nd power
        spectrum = np.fft.rfft(rng.standard_normal(count))
        spectrum /= np.maximum(np.arange(spectrum.size) * SAMPLE_RATE / count, 20.0) ** (0.5 * kind)
        sound = np.fft.irfft(spectrum, count)
    elif kind == 3:
        mains = float(rng.choice([50.0, 60.0, 100.0])) * rng.uniform(0.98, 1.02)
        sound = np.sum([np.sin(2 * np.pi * mains * k * at_s + k) / k ** rng.uniform(0.5, 1.5) for k in range(1, 8)], 0)
    else:
        sound = _notes(rng, at_s)
    scaled: Samples = (sound / max(1e-9, float(np.sqrt(np.mean(sound**2))))).astype(np.float32)
    return scaled


def _notes(rng: np.random.Generator, at_s: Floats) -> Floats:
    """Three voices of decaying harmonic notes."""
    sound = np.zeros(at_s.size)
    for octave in (110.0, 220.0, 440.0):
        beat_s = float(rng.choice([0.2, 0.25, 0.33, 0.5, 1.0]))
        number = (at_s / beat_s).astype(int)
        pitch = octave * 2.0 ** (rng.integers(0, 12, int(number[-1]) + 1) / 12)
        phase = 2 * np.pi * pitch[number] * at_s
        sound += np.exp(-3 * (at_s % beat_s) / beat_s) * sum(np.sin(k * phase) / k**1.5 for k in range(1, 5)) * rng.uniform(0.2, 1)
    return sound


def in_room(rng: np.random.Generator, samples_S: Samples) -> Samples:
    """The sound in a room: its direct path, and an echo that dies away within 0.1 … 0.7 s."""
    decay_s = rng.uniform(0.1, 0.7)
    count = int(decay_s * SAMPLE_RATE)
    echo_S = rng.standard_normal(count) * 10 ** (-3 * np.arange(count) / count)
    echo_S[: int(rng.uniform(0.002, 0.02) * SAMPLE_RATE)] = 0.0
    echo_S *= rng.uniform(0.2, 0.9) / np.sqrt(np.sum(echo_S**2))
    echo_S[0] = 1.0
    size = 1 << (samples_S.size + count - 1).bit_length()
    heard_S = np.fft.irfft(np.fft.rfft(samples_S, size) * np.fft.rfft(echo_S, size), size)[: samples_S.size]
    return heard_S.astype(np.float32)


def on_line(rng: np.random.Generator, samples_S: Samples) -> Samples:
    """The sound through a narrow line: nothing below about 200 Hz or above 3 to 6 kHz."""
    spectrum = np.fft.rfft(samples_S)
    hertz = np.arange(spectrum.size) * SAMPLE_RATE / samples_S.size
    spectrum[(hertz < rng.uniform(50, 300)) | (hertz > rng.uniform(3000, 6000))] = 0.0
    return np.fft.irfft(spectrum, samples_S.size).astype(np.float32)


def harder(rng: np.random.Generator, samples_S: Samples) -> Samples:
    """The sound in a room, on a line, in noise and at another loudness, each now and then."""
    if rng.random() < 0.25:
        samples_S = in_room(rng, samples_S)
    if rng.random() < 0.1:
        samples_S = on_line(rng, samples_S)
    if rng.random() < 0.4:
        level = float(np.sqrt(np.mean(samples_S**2))) * 10 ** (-rng.uniform(5, 30) / 20)
        samples_S = samples_S + np.float32(level) * noise(rng, samples_S.size)
    if rng.random() < 0.5:
        samples_S = samples_S * np.float32(10 ** rng.uniform(-0.7, 0.3))
    return np.clip(samples_S, -1.0, 1.0)
