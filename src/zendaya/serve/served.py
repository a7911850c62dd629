"""What is served, and what clients send of a source: samples, rows of features or encoded pictures, checked and made raw input."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from zendaya.encoders import Encoder, Frame, Samples, readable_prefix
from zendaya.encoders.clips import Spec
from zendaya.encoders.features import LARGEST_FEATURE, Precomputed
from zendaya.encoders.frames import FPS, FrameEncoder
from zendaya.encoders.media import SAMPLE_RATE
from zendaya.encoders.whisper_stream import WhisperBlocks
from zendaya.errors import ConfigError, MissingExtraError, SourceError
from zendaya.model import Model
from zendaya.pretrained import T, as_trained, load_live, load_model
from zendaya.schedule import WaitK
from zendaya.serve.fields import FieldError

Kind = Literal["audio", "features", "frames"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RATES = (8000, 48_000)
"""Samples a second that are taken."""
PIECE = 2 * SAMPLE_RATE
"""Bytes of sound that are heard in one go, about a second, so that a long message does not hold up others."""
MAX_PICTURE = 4096 * 4096
"""Pixels of a picture: 48 MB once it is decoded."""
MAX_ROWS_S = 1000.0
"""Largest rate of features, rows a second."""


@dataclass(frozen=True)
class Served:
    """A model under its name, and the encoder that hears or sees for it; without one it reads features alone."""

    name: str
    model: Model
    encoder: Encoder[Any, Any] | None = None
    checkpoint: str | None = None
    """Where it was loaded from; its run says at which stride it learned wait-k."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What it can be sent."""
        if isinstance(self.encoder, WhisperBlocks):
            return ("audio", "features")
        return ("frames", "features") if isinstance(self.encoder, FrameEncoder) else ("features",)

    def as_trained(self, schedule: T) -> T | WaitK:
        """A wait-k that says no stride at the one it was trained at."""
        return as_trained(schedule, self.checkpoint or self.name)

    @property
    def tokens_per_s(self) -> float:
        return FPS if self.encoder is None else self.encoder.traits.tokens_per_s

    def intake(self, kind: Kind, rate: float | None = None) -> Intake:
        """What takes one source of a kind; `rate` is samples or rows a second, the model's own if not given."""
        if kind not in self.kinds:
            raise FieldError("source", f"source: {self.name} takes {' or '.join(self.kinds)}: got {kind!r}")
        if kind == "audio":
            assert self.encoder is not None
            return Sound(self.encoder, SAMPLE_RATE if rate is None else rate)
        if kind == "frames":
            assert self.encoder is not None
            return Pictures(self.encoder, rate)
        return Features(self.model.config.decoder.source_dim, self.tokens_per_s if rate is None else rate)


def load_served(name: str, encoder: str | None = None) -> Served:
    """A model to serve: with the encoder that it hears or sees by, or, where that makes features beforehand, alone."""
    spec = None if encoder is None else Spec.parse(encoder)
    if spec is not None and spec.name in ("features", "c3d"):
        return Served(Path(name).name, load_model(name), checkpoint=name)
    model, found = load_live(name, encoder)
    if not found.traits.live:
        raise ConfigError(
            f"{found.traits.name}: offline only: its tokens read the whole recording; name a live encoder (whisper in block mode)"
        )
    return Served(Path(name).name, model, found, name)


class Intake:
    """One source: bytes of messages to raw input of an encoder, in order."""

    kind: Kind
    encoder: Encoder[Any, Any]

    def check(self, payload: bytes) -> float:
        """Refuse what cannot be, quickly; the seconds of source that a payload holds."""
        raise NotImplementedError

    def pieces(self, payload: bytes) -> Iterator[bytes]:
        """A payload in parts that are read one by one."""
        yield payload

    def raw(self, payload: bytes) -> Any:
        """The raw input of a part; SourceError where its bytes are not what they should be, and it is left out."""
        raise NotImplementedError

    def rest(self) -> Any:
        """Raw input that waited for more; None where nothing did. What follows begins anew."""
        return None


class Sound(Intake):
    """Samples of one channel, s16le or (`floats`) float32; another rate than the encoder's is resampled as it comes."""

    kind = "audio"

    def __init__(self, encoder: Encoder[Any, Any], rate: float = SAMPLE_RATE, *, floats: bool = False) -> None:
        if rate != int(rate) or not RATES[0] <= rate <= RATES[1]:
            raise FieldError("rate", f"rate: expected a whole number of samples a second in {RATES[0]} … {RATES[1]}: got {rate:g}")
        self.encoder, self.rate, self.width = encoder, int(rate), 4 if floats else 2
        self._resampler = None if self.rate == SAMPLE_RATE else Resampler(self.rate)

    def check(self, payload: bytes) -> float:
        if len(payload) % self.width:
            raise FieldError(
                "samples", f"samples: expected two bytes each, s16le: got {len(payload)} bytes, and a part of one", "bad_samples"
            )
        return len(payload) / self.width / self.rate

    def pieces(self, payload: bytes) -> Iterator[bytes]:
        for first in range(0, len(payload), PIECE):
            yield payload[first : first + PIECE]

    def raw(self, payload: bytes) -> Samples:
        whole = self.width == 2
        samples_S = np.frombuffer(payload, "<i2").astype(np.float32) / np.float32(32768) if whole else np.frombuffer(payload, "<f4")
        return samples_S if self._resampler is None else self._resampler.read(samples_S)

    def rest(self) -> Samples | None:
        if self._resampler is None:
            return None
        rest_S = self._resampler.finish()
        self._resampler = Resampler(self.rate)
        return rest_S


class Resampler:
    """Samples of another rate to 16 kHz as they come, by libswresample: a sample out reads 2 ms beyond itself, and no more.

    What comes out does not depend on how the samples were cut into reads.
    """

    def __init__(self, rate: int) -> None:
        try:
            import av
        except ModuleNotFoundError:
            raise MissingExtraError("av", "audio", "resampling") from None
        self.rate = rate
        self._frame, self._resampler = av.AudioFrame, av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
        self._heard = 0

    def read(self, samples_S: Samples) -> Samples:
        """Take the next samples; those that they complete."""
        if not samples_S.size:
            return samples_S
        frame = self._frame.from_ndarray(samples_S[None], format="flt", layout="mono")
        frame.sample_rate = self.rate
        self._heard += samples_S.size
        return self._join(self._resampler.resample(frame))

    def finish(self) -> Samples:
        """The samples that waited for more."""
        return self._join(self._resampler.resample(None)) if self._heard else np.zeros(0, np.float32)

    @staticmethod
    def _join(frames: list[Any]) -> Samples:
        parts = [frame.to_ndarray().reshape(-1) for frame in frames]
        return np.concatenate(parts).astype(np.float32, copy=False) if parts else np.zeros(0, np.float32)


class Features(Intake):
    """Rows of features, float32, little-endian: source tokens as an encoder elsewhere made them."""

    kind = "features"

    def __init__(self, dim: int, rate: float) -> None:
        if not 0 < rate <= MAX_ROWS_S:
            raise FieldError("rate", f"rate: expected rows a second above 0, up to {MAX_ROWS_S:g}: got {rate:g}")
        self.dim, self.rate = dim, rate
        self.encoder = Precomputed(dim, rate)

    def check(self, payload: bytes) -> float:
        if len(payload) % (4 * self.dim):
            raise FieldError(
                "features",
                f"features: expected rows of {self.dim} float32, {4 * self.dim} bytes each: got {len(payload)} bytes",
                "bad_shape",
            )
        rows = self.raw(payload)
        good = readable_prefix(rows, LARGEST_FEATURE)
        if good < rows.shape[0]:
            raise FieldError(
                "features", f"features: row {good} of the message holds a value that is not finite: leave it out", "not_finite"
            )
        return rows.shape[0] / self.rate

    def raw(self, payload: bytes) -> Any:
        return np.frombuffer(payload, "<f4").reshape(-1, self.dim)


class Pictures(Intake):
    """Encoded pictures, JPEG or PNG, one a message, at the encoder's own rate."""

    kind = "frames"

    def __init__(self, encoder: Encoder[Any, Any], rate: float | None) -> None:
        self.encoder, self.rate = encoder, encoder.traits.tokens_per_s
        if rate is not None and rate != self.rate:
            raise FieldError("rate", f"rate: this model sees {self.rate:g} pictures a second: got {rate:g}; send as many, or leave it out")
        self._seen = 0

    def check(self, payload: bytes) -> float:
        if not payload.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")):
            raise FieldError("picture", "picture: expected one JPEG or PNG: got other bytes", "bad_picture")
        return 1 / self.rate

    def raw(self, payload: bytes) -> list[Frame]:
        pixels = decode_picture(payload)
        first, self._seen = self._seen, self._seen + 1
        return [Frame(pixels, first / self.rate, (first + 1) / self.rate)]


def decode_picture(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """RGB bytes (height, width, 3) of a JPEG or PNG."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise MissingExtraError("pillow", "video", "reading pictures") from None
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if image.width * image.height > MAX_PICTURE:
                raise SourceError(f"picture: {image.width} × {image.height}: expected at most {MAX_PICTURE} pixels; scale it down")
            return np.asarray(image.convert("RGB"))
    except SourceError:
        raise
    except Exception as error:  # what damage raises in a decoder is no closed list
        raise SourceError(f"picture: damaged: {str(error).splitlines()[0][:120] if str(error) else type(error).__name__}") from None
