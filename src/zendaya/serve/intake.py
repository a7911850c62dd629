"""The served model, and the sources that clients send it: audio samples, feature rows or encoded pictures."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from zendaya.encoders._frames import FPS
from zendaya.encoders.base import Encoder, readable_prefix
from zendaya.encoders.features import Precomputed
from zendaya.encoders.registry import EncoderSpec
from zendaya.errors import ConfigError, MissingExtraError, SourceError
from zendaya.nn.decoder import LARGEST_FEATURE
from zendaya.nn.model import Model
from zendaya.runtime.frontier import Frontier, read_frontier
from zendaya.runtime.loading import as_trained, load_live, load_model
from zendaya.runtime.policies import Policy
from zendaya.runtime.setting import LiveSetting
from zendaya.schedule import Schedule
from zendaya.serve.fields import FieldError
from zendaya.sources.media import SAMPLE_RATE, Frame, Samples

Kind = Literal["audio", "features", "frames"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RATES = (8000, 48_000)  # lowest and highest sample rate, in samples per second
PIECE = 2 * SAMPLE_RATE
"""Bytes of audio encoded in one go, about a second, so that a long message does not delay other streams."""
MAX_PICTURE = 4096 * 4096  # pixels per picture: 48 MB once decoded
MAX_ROWS_S = 1000.0  # highest rate of feature rows, in rows per second


@dataclass(frozen=True)
class Served:
    """A model with its name and its encoder; without an encoder it reads features only."""

    name: str
    model: Model
    encoder: Encoder[Any, Any] | None = None
    checkpoint: str | None = None
    """The folder it was loaded from; its training run names the default stride of wait-k."""
    frontier: Frontier | None = None
    """What was measured of it with this encoder: the dial in seconds."""
    _encoders: dict[str, Encoder[Any, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of source it takes."""
        raw: dict[str, Kind] = {"audio": "audio", "video": "frames"}
        modality = None if self.encoder is None else self.encoder.traits.modality
        return (raw[modality], "features") if modality in raw else ("features",)

    def as_trained(self, schedule: Schedule | Policy) -> Schedule | Policy:
        """The schedule; a wait-k without a stride gets the one of training."""
        return as_trained(schedule, self.checkpoint or self.name)

    def encoder_for(self, setting: LiveSetting | None = None) -> Encoder[Any, Any] | None:
        """The encoder under a setting, made once for all streams that have it."""
        if self.encoder is None or setting is None or not setting.encoder:
            return self.encoder
        key = str(sorted(setting.encoder.items()))
        if key not in self._encoders:
            self._encoders[key] = setting.encoder_from(self.encoder)
        return self._encoders[key]

    def intake(self, kind: Kind, rate: float | None = None, setting: LiveSetting | None = None) -> Intake:
        """An intake for one source; `rate` is samples or rows per second, by default the model's own."""
        if kind not in self.kinds:
            raise FieldError("source", f"source: {self.name} takes {' or '.join(self.kinds)}: got {kind!r}")
        encoder = self.encoder_for(setting)
        if kind == "features" or encoder is None:
            own_rate = FPS if self.encoder is None else self.encoder.traits.tokens_per_s
            return FeatureIntake(self.model.config.decoder.source_dim, own_rate if rate is None else rate)
        return FrameIntake(encoder, rate) if kind == "frames" else AudioIntake(encoder, SAMPLE_RATE if rate is None else rate)


def load_served(name: str, encoder: str | None = None) -> Served:
    """Load a model and its live encoder; without the encoder if that only makes features beforehand."""
    spec = None if encoder is None else EncoderSpec.parse(encoder)
    if spec is not None and spec.modality == "features":
        return Served(Path(name).name, load_model(name), checkpoint=name)
    model, found = load_live(name, encoder)
    if not found.traits.live:
        problem = f"{found.traits.name}: cannot be served live: its tokens read the whole recording"
        raise ConfigError(f"{problem}; give --encoder with a live one, as whisper:tiny.en,block_s=1")
    return Served(Path(name).name, model, found, name, read_frontier(name) if encoder is None else None)


class Intake:
    """One source: turns the bytes of messages into raw input for an encoder, in order."""

    encoder: Encoder[Any, Any]

    def check(self, payload: bytes) -> float:
        """Seconds of source in a payload; FieldError if it is malformed. Fast: called in the event loop."""
        raise NotImplementedError

    def pieces(self, payload: bytes) -> Iterator[bytes]:
        """A payload in parts that are encoded one by one."""
        yield payload

    def raw(self, payload: bytes) -> Any:
        """The raw input of a part; SourceError if it is damaged, and the stream goes on without it."""
        raise NotImplementedError

    def rest(self) -> Any:
        """Raw input held back until now, None if there is none; the next payload begins a new span."""
        return None


class AudioIntake(Intake):
    """Mono samples, s16le or (`floats`) float32, resampled to the encoder's rate as they arrive."""

    def __init__(self, encoder: Encoder[Any, Any], rate: float = SAMPLE_RATE, *, floats: bool = False) -> None:
        if rate != int(rate) or not RATES[0] <= rate <= RATES[1]:
            raise FieldError("rate", f"rate: expected whole samples per second in {RATES[0]} … {RATES[1]}: got {rate:g}")
        self.encoder, self.rate, self.width = encoder, int(rate), 4 if floats else 2
        self._resampler = None if self.rate == SAMPLE_RATE else Resampler(self.rate)

    def check(self, payload: bytes) -> float:
        if len(payload) % self.width:
            problem = f"samples: expected s16le, two bytes each: got {len(payload)} bytes, a sample cut in two"
            raise FieldError("samples", problem, "bad_samples")
        return len(payload) / self.width / self.rate

    def pieces(self, payload: bytes) -> Iterator[bytes]:
        for first in range(0, len(payload), PIECE):
            yield payload[first : first + PIECE]

    def raw(self, payload: bytes) -> Samples:
        whole = self.width == 2
        samples_S = np.frombuffer(payload, "<i2").astype(np.float32) / np.float32(32768) if whole else np.frombuffer(payload, "<f4")
        return samples_S if self._resampler is None else self._resampler.read(samples_S)

    def rest(self) -> Samples | None:
        return None if self._resampler is None else self._resampler.finish()


class Resampler:
    """Streaming resampler to 16 kHz by libswresample, with a look-ahead of 2 ms.

    Its output does not depend on how the samples were cut into reads.
    """

    def __init__(self, rate: int) -> None:
        try:
            import av
        except ModuleNotFoundError:
            raise MissingExtraError("av", "audio", "resampling") from None
        self.rate = rate
        self._av = av
        self._resampler: av.AudioResampler | None = None

    def read(self, samples_S: Samples) -> Samples:
        """The output samples that the next input samples complete."""
        if not samples_S.size:
            return samples_S
        if self._resampler is None:
            self._resampler = self._av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
        frame = self._av.AudioFrame.from_ndarray(samples_S[None], format="flt", layout="mono")
        frame.sample_rate = self.rate
        return self._join(self._resampler.resample(frame))

    def finish(self) -> Samples:
        """The last output samples; the next input begins anew."""
        ended, self._resampler = self._resampler, None
        return self._join([] if ended is None else ended.resample(None))

    @staticmethod
    def _join(frames: list[Any]) -> Samples:
        return np.concatenate([np.zeros(0, np.float32), *(frame.to_ndarray().reshape(-1) for frame in frames)])


class FeatureIntake(Intake):
    """Feature rows, float32 little-endian: source tokens that an encoder made elsewhere."""

    def __init__(self, dim: int, rate: float) -> None:
        if not 0 < rate <= MAX_ROWS_S:
            raise FieldError("rate", f"rate: expected rows per second above 0, up to {MAX_ROWS_S:g}: got {rate:g}")
        self.dim, self.rate = dim, rate
        self.encoder = Precomputed(dim, rate)

    def check(self, payload: bytes) -> float:
        if len(payload) % (4 * self.dim):
            problem = f"features: expected rows of {self.dim} float32, {4 * self.dim} bytes each: got {len(payload)} bytes"
            raise FieldError("features", problem, "bad_shape")
        rows = self.raw(payload)
        good = readable_prefix(rows, LARGEST_FEATURE)
        if good < rows.shape[0]:
            problem = f"features: row {good} of the message holds a value that is not finite or not below {LARGEST_FEATURE:g}"
            raise FieldError("features", problem, "not_finite")
        return rows.shape[0] / self.rate

    def raw(self, payload: bytes) -> Any:
        return np.frombuffer(payload, "<f4").reshape(-1, self.dim)


class FrameIntake(Intake):
    """Encoded pictures, JPEG or PNG, one per message, at the encoder's own rate."""

    def __init__(self, encoder: Encoder[Any, Any], rate: float | None) -> None:
        self.encoder, self.rate = encoder, encoder.traits.tokens_per_s
        if rate is not None and rate != self.rate:
            raise FieldError("rate", f"rate: expected {self.rate:g} pictures per second: got {rate:g}; leave it out")
        self._num_read = 0

    def check(self, payload: bytes) -> float:
        if not payload.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")):
            raise FieldError("picture", "picture: expected one JPEG or PNG: got other bytes", "bad_picture")
        return 1 / self.rate

    def raw(self, payload: bytes) -> list[Frame]:
        pixels = decode_picture(payload)
        first, self._num_read = self._num_read, self._num_read + 1
        return [Frame(pixels, first / self.rate, (first + 1) / self.rate)]


def decode_picture(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The RGB pixels (height, width, 3) of a JPEG or PNG."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise MissingExtraError("pillow", "video", "reading pictures") from None
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if image.width * image.height > MAX_PICTURE:
                raise SourceError(f"picture: {image.width} × {image.height}: expected at most {MAX_PICTURE} pixels; scale it down")
            return np.asarray(image.convert("RGB"))
    except (SourceError, MemoryError):
        raise
    except Exception as error:  # a damaged picture can raise anything in Pillow
        raise SourceError(f"picture: damaged: {str(error).splitlines()[0][:120] if str(error) else type(error).__name__}") from None
