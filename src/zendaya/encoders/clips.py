"""A clip of a corpus to its tokens: where its source lies, the part of it that is the clip's, and an encoder by name.

Sound is encoded from the clip's first sample with a fresh state, as a live session that begins there would. Pictures and
precomputed rows are those of the whole stream that arrive during the clip, so that consecutive clips share none and lose none.
Arrival times count from the beginning of the clip.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn
from torch import uint8 as torch_uint8

from zendaya.encoders import Encoder, FloatArray, Frame, Samples, Tokens, Traits, encode, stream
from zendaya.encoders.features import PCA, Precomputed, Rows, read_array, read_features
from zendaya.encoders.media import SAMPLE_RATE, read_audio, read_video
from zendaya.encoders.store import file_digest
from zendaya.errors import ConfigError, SourceError
from zendaya.records import Clip
from zendaya.text import Tokenizer

CHUNK = SAMPLE_RATE
"""Samples decoded at a time; the tokens do not depend on it."""
KEPT_CHUNKS = 3600
"""Chunks of a recording that are held for the clips still to come: an hour, 230 MB."""
SHORT_S = 0.5
"""A source that ends this much before its clip does is reported; less is the rounding of published times."""
SAME_S = 1e-6
"""Moments that are this close are the same: 10/30 and 1/3."""
_VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov")
_FEATURE_SUFFIXES = (".npy", ".npz", ".safetensors", ".h5", ".hdf5")
_PACKED = {"q.npy", "scale.npy", "offset.npy"}
"""An npz of all clips: clip n is q[offset[n]:offset[n+1]] · scale."""

SETTINGS: dict[str, dict[str, Callable[[str], Any]]] = {
    "whisper": {"mode": str, "block_s": float, "pool": int, "ceiling": float},
    "efficientnet": {"fps": float},
    "clip": {"fps": float},
    "features": {"rate": float, "window_s": float, "dim": int, "pca": str, "key": str},
    "c3d": {"fps": float, "pca": str, "key": str},
    "text": {"words_per_s": float},
}
"""The encoders by name, and what can be set of each."""
_KEYS: dict[str, Callable[[Clip], str]] = {
    "media": lambda clip: clip.media,
    "stem": lambda clip: Path(clip.media).stem,
    "stream": lambda clip: clip.stream,
    "id": lambda clip: clip.id,
}


@dataclass(frozen=True)
class Encoded:
    """The tokens of a clip, and what was odd about its source."""

    tokens: Tokens
    kind: str = ""
    reason: str = ""


class ClipEncoder(Protocol):
    """What turns clips into tokens. The tokens depend on the clip alone, not on the clips before it."""

    @property
    def traits(self) -> Traits: ...

    def digest(self) -> str:
        """sha256 of the weights, or of the file the tokens come from; empty where there is none."""

    def encode(self, clip: Clip) -> Encoded: ...


@dataclass(frozen=True)
class Spec:
    """An encoder as the command line names it: NAME, NAME:WHICH, each with settings: `whisper:tiny.en,block_s=0.5,pool=15`."""

    name: str
    which: str
    settings: tuple[tuple[str, Any], ...]

    @staticmethod
    def parse(text: str) -> Spec:
        """The spec a text names.

        >>> Spec.parse("whisper:tiny.en,pool=15")
        Spec(name='whisper', which='tiny.en', settings=(('pool', 15),))
        """
        head, *given = re.split(r",(?=\w+=)", text)
        name, _, which = head.partition(":")
        if name not in SETTINGS:
            raise ConfigError(f"no encoder is called {name!r}; there are {', '.join(SETTINGS)}")
        settings = []
        for pair in given:
            key, _, value = pair.partition("=")
            if key not in SETTINGS[name]:
                raise ConfigError(f"encoder {name}: nothing to set is called {key!r}; there are {', '.join(SETTINGS[name])}")
            try:
                settings.append((key, SETTINGS[name][key](value)))
            except ValueError:
                raise ConfigError(
                    f"encoder {name}: {key} must be {'a whole number' if SETTINGS[name][key] is int else 'a number'}: got {value!r}"
                ) from None
        return Spec(name, which, tuple(settings))

    def open(self, folder: Path, clips: Iterable[Clip] = ()) -> ClipEncoder:
        """The encoder, for clips whose media lie in a folder; `clips` are asked for the size of features where nothing else says it."""
        given = dict(self.settings)
        if self.name == "whisper":
            from zendaya.encoders.whisper_stream import load_whisper

            whisper = load_whisper(self.which or "tiny.en", **given)
            return Sounds(whisper, whisper.encoder, folder)
        if self.name in ("efficientnet", "clip"):
            return self._pictures(folder, given)
        if self.name == "text":
            return Texts(_tokenizer(self.which), **given)
        return self._features(folder, given, clips)

    def raw(self, path: Path, seconds: float) -> tuple[Encoder[Any, Any], Samples | list[Frame]]:
        """The encoder itself, and the raw input of one recording or video, as the audit takes them."""
        if self.name not in ("whisper", "efficientnet", "clip"):
            raise ConfigError(f"encoder {self.name}: expected one that hears or sees (whisper, efficientnet, clip)")
        opened = self.open(path.parent)
        if isinstance(opened, Sounds):
            chunks = itertools.takewhile(lambda chunk: chunk.start_s < seconds, read_audio(path))
            return opened.encoder, np.concatenate([chunk.samples for chunk in chunks])
        assert isinstance(opened, Pictures)
        frames = itertools.takewhile(lambda frame: frame.time_s < seconds, read_video(path, fps=opened.traits.tokens_per_s))
        return opened.encoder, list(frames)

    def _pictures(self, folder: Path, given: dict[str, Any]) -> ClipEncoder:
        if self.name == "efficientnet":
            from zendaya.encoders.efficientnet import EfficientNetLite0

            efficientnet = EfficientNetLite0(**given)
            return Pictures(efficientnet, efficientnet.model, folder)
        from zendaya.encoders.clip import Clip as ClipModel

        clip_model = ClipModel(self.which, **given) if self.which else ClipModel(**given)
        return Pictures(clip_model, clip_model.model, folder)

    def _features(self, folder: Path, given: dict[str, Any], clips: Iterable[Clip]) -> ClipEncoder:
        source = FeatureSource(self.which, folder, given.get("key", "stem"))
        pca = PCA.load(given["pca"]) if "pca" in given else None
        if self.name == "c3d":
            return Features(Precomputed.c3d(**{"fps": given["fps"]} if "fps" in given else {}, pca=pca), source)
        dim = given.get("dim") or source.dim(clips)
        return Features(Precomputed(dim, given.get("rate", 3.0), window_s=given.get("window_s"), pca=pca), source)


def weights_digest(module: nn.Module) -> str:
    """sha256 over every name, type, shape and byte of a network's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch_uint8).numpy().tobytes())
    return digest.hexdigest()


def media_path(folder: Path, media: str, suffixes: Iterable[str] = ()) -> Path:
    """The file of a clip; a name that leads out of the folder is refused, as a published file could name anything.

    A link inside the folder was put there by its owner, and is followed.
    """
    base = folder.resolve()  # not ".", to which anything is relative, "../x" too
    path = Path(os.path.normpath(base / media))
    if not media or not path.is_relative_to(base):
        raise SourceError(f"{media!r} does not lie in the media folder: give the folder that holds it")
    return next((named for suffix in ("", *suffixes) if (named := path.parent / (path.name + suffix)).is_file()), path)


def media_span(clip: Clip) -> tuple[float, float]:
    """The seconds of its media that are the clip's."""
    start_s = max(0.0, clip.start_s)
    return max(0.0, start_s - clip.media_start_s), max(0.0, start_s + clip.duration_s - clip.media_start_s)


def _short(where: Path | str, got_s: float, wanted_s: float) -> str:
    return f"{where}: ends {wanted_s - got_s:.2f} s before the clip does" if wanted_s - got_s > SHORT_S else ""


def _noted(tokens: Tokens, reasons: Iterable[str]) -> Encoded:
    reason = "; ".join(filter(None, reasons))
    return Encoded(tokens, "short" if reason else "", reason)


# Sound.


class _Recording:
    """A recording that is decoded as its clips ask for it, once if they come in time order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first = 0
        """Number of the first chunk that is held."""
        self._chunks: deque[Samples] = deque()
        self._rest = read_audio(path, chunk_s=CHUNK / SAMPLE_RATE)
        self._end: str | None = None
        """Why there is no next chunk: an error, or empty at the end."""

    def between(self, start: int, stop: int) -> Samples:
        """Samples start … stop−1, as far as there are any."""
        assert start >= self.first * CHUNK, (start, self.first)
        while self._heard() < stop and self._end is None:
            try:
                self._chunks.append(next(self._rest).samples)
            except StopIteration:
                self._end = ""
            except SourceError as error:
                self._end = str(error)
            # Never what this clip needs itself.
            while len(self._chunks) > KEPT_CHUNKS and (self.first + 1) * CHUNK <= start:
                self._chunks.popleft()
                self.first += 1
        if self._end and self._heard() < stop:
            raise SourceError(self._end)
        wanted = range(start // CHUNK - self.first, min(-(-stop // CHUNK) - self.first, len(self._chunks)))
        samples = np.concatenate([np.zeros(0, np.float32), *(self._chunks[n] for n in wanted)])
        skipped = start - (start // CHUNK) * CHUNK
        return samples[skipped : skipped + stop - start]

    def _heard(self) -> int:
        """Samples decoded so far; the last chunk of a recording may be short."""
        return (self.first + len(self._chunks) - 1) * CHUNK + self._chunks[-1].size if self._chunks else self.first * CHUNK


class Sounds:
    """Clips of recordings; the source of a joined clip is that of its parts, back to back."""

    def __init__(self, encoder: Encoder[Samples, Any], weights: nn.Module, folder: Path) -> None:
        self.encoder, self.traits, self._weights, self._folder = encoder, encoder.traits, weights, folder
        self._recording: _Recording | None = None

    def digest(self) -> str:
        return weights_digest(self._weights)

    def encode(self, clip: Clip) -> Encoded:
        notes = list[str]()
        parts = (self._samples(part, notes) for part in clip.parts or (clip,))
        chunks = (part[first : first + CHUNK] for part in parts for first in range(0, part.size, CHUNK))
        return _noted(encode(self.encoder, chunks, where=f"clip {clip.id}"), notes)

    def _samples(self, clip: Clip, notes: list[str]) -> Samples:
        path = media_path(self._folder, clip.media)
        start, stop = (round(moment_s * SAMPLE_RATE) for moment_s in media_span(clip))
        if self._recording is None or self._recording.path != path or start < self._recording.first * CHUNK:
            self._recording = _Recording(path)
        samples = self._recording.between(start, stop)
        notes.append(_short(path, samples.size / SAMPLE_RATE, (stop - start) / SAMPLE_RATE))
        return samples


# Pictures.


class _Film:
    """The tokens of a video, made as its clips ask for them."""

    def __init__(self, path: Path, tokens: Iterator[Tokens], dim: int) -> None:
        self.path, self._rest, self._dim = path, tokens, dim
        self._parts: list[Tokens] = []
        self._end: str | None = None
        """Why there is no next token: an error, or empty at the end."""

    def between(self, start_s: float, end_s: float) -> Tokens:
        """The tokens that arrive in that time, and perhaps some just before and after."""
        while self._end is None and (not self._parts or self._parts[-1].arrival_s[-1] <= end_s + SAME_S):
            try:
                if len(part := next(self._rest)):
                    self._parts.append(part)
            except StopIteration:
                self._end = ""
            except SourceError as error:
                self._end = str(error)
        if self._end and (not self._parts or self._parts[-1].arrival_s[-1] <= end_s + SAME_S):
            raise SourceError(self._end)
        kept = [part for part in self._parts[:-1] if part.arrival_s[-1] >= start_s - SAME_S]
        return Tokens.join([*kept, *self._parts[-1:]], self._dim)


class Pictures:
    """Clips of videos: the tokens of the video that arrive during the clip."""

    def __init__(self, encoder: Encoder[list[Frame], Any], weights: nn.Module, folder: Path) -> None:
        self.encoder, self.traits, self._weights, self._folder = encoder, encoder.traits, weights, folder
        self._film: _Film | None = None

    def digest(self) -> str:
        return weights_digest(self._weights)

    def encode(self, clip: Clip) -> Encoded:
        _refuse_joined(clip, "videos")
        path = media_path(self._folder, clip.media, _VIDEO_SUFFIXES)
        start_s, end_s = media_span(clip)
        if self._film is None or self._film.path != path:
            frames = ([frame] for frame in read_video(path, fps=self.traits.tokens_per_s))
            self._film = _Film(path, stream(self.encoder, frames), self.traits.dim)
        return _during(self._film.between(start_s, end_s), start_s, end_s, path, self.traits)


def _refuse_joined(clip: Clip, what: str) -> None:
    if clip.parts:
        raise SourceError(f"clip {clip.id} is joined from {len(clip.parts)}: {what} are not joined; encode the corpus it was joined from")


def _during(tokens: Tokens, start_s: float, end_s: float, where: Path | str, traits: Traits) -> Encoded:
    """The tokens that arrive during a clip, on its own clock."""
    arrival_s: FloatArray = tokens.arrival_s
    first, stop = np.searchsorted(arrival_s, [start_s + SAME_S, end_s + SAME_S], side="right")
    if first >= stop:
        got = f"the last arrives at {arrival_s[-1]:.2f} s" if len(tokens) else "there is none"
        raise SourceError(f"{where}: no token arrives between {start_s:.2f} and {end_s:.2f} s of it: {got}")
    chosen = Tokens(tokens.values_TE[first:stop], arrival_s[first:stop] - start_s)
    over = stop < len(tokens)
    return _noted(chosen, [] if over else [_short(where, float(arrival_s[-1]) + 1 / traits.tokens_per_s, end_s)])


# Precomputed features.


class FeatureSource:
    """Where precomputed rows lie: one file of all clips or streams, a folder of files, or the media of each clip itself."""

    def __init__(self, which: str, folder: Path, key: str) -> None:
        if key not in _KEYS:
            raise ConfigError(f"encoder features: key must be one of {', '.join(_KEYS)}: got {key!r}")
        self._key, self._folder = _KEYS[key], folder
        self.path = None if not which else folder / which if (folder / which).exists() else Path(which)
        if self.path is not None and not self.path.exists():
            raise SourceError(f"{self.path}: no such feature file or folder, neither here nor in {folder}")
        if self.path is not None and self.path.is_file() and self.path.suffix.lower() == ".npy":
            raise ConfigError(f"{self.path}: one array for all clips: expected a folder of .npy files, or a file with a name for each")
        self._packed = _read_packed(self.path) if self.path is not None and self.path.suffix.lower() == ".npz" else None

    def dim(self, clips: Iterable[Clip]) -> int:
        """Features of a row: those of the first clip that can be read."""
        first: SourceError | None = None
        for clip in clips:
            try:
                return self.rows(clip)[0].shape[1]
            except SourceError as error:
                first = first or error
        raise SourceError(f"no features of any clip can be read; the first: {first}" if first else "no clip has features")

    def rows(self, clip: Clip) -> tuple[Rows, str]:
        """The rows a clip lies in, and where they are from."""
        if self._packed is not None:
            return self._packed_rows(clip), f"{self.path}, row {clip.feature_row}"
        path, name = self.place(clip)
        return read_features(path, name), f"{path}" if name is None else f"{path}, {name!r}"

    def place(self, clip: Clip) -> tuple[Path, str | None]:
        """The file of a clip, and its name in there."""
        if self.path is None:
            return media_path(self._folder, clip.media, _FEATURE_SUFFIXES), None
        if self.path.is_dir():
            return media_path(self.path, self._key(clip), _FEATURE_SUFFIXES), None
        return self.path, self._key(clip)

    @property
    def whole(self) -> bool:
        """Whether the rows of a clip are its own, not those of its stream."""
        return self._packed is not None

    def digest(self) -> str:
        return file_digest(self.path) if self.path is not None and self.path.is_file() else ""

    def _packed_rows(self, clip: Clip) -> Rows:
        assert self._packed is not None
        levels, scale, offsets = self._packed
        if clip.feature_row is None or clip.feature_row + 1 >= offsets.size:
            raise SourceError(f"{self.path}: clip {clip.id} has row {clip.feature_row}: expected one of 0 … {offsets.size - 2}")
        first, stop = offsets[clip.feature_row : clip.feature_row + 2]
        if first == stop:
            raise SourceError(f"{self.path}: empty: row {clip.feature_row}, clip {clip.id}, has no features")
        return levels[first:stop].astype(np.float32) * scale


def _read_packed(path: Path) -> tuple[Any, Any, Any] | None:
    try:
        with zipfile.ZipFile(path) as archive:
            if not set(archive.namelist()) >= _PACKED:
                return None
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(f"{path}: not a whole npz file: {error}") from None
    levels, scale, offsets = (read_array(path, name) for name in ("q", "scale", "offset"))
    fits = levels.ndim == 2 and scale.shape == levels.shape[1:] and offsets.ndim == 1 and offsets.size > 1 and offsets.dtype.kind in "iu"
    if not fits or offsets[0] != 0 or offsets[-1] != levels.shape[0] or (np.diff(offsets.astype(np.int64)) < 0).any():
        raise SourceError(
            f"{path}: q {levels.shape}, scale {scale.shape} and offset {offsets.shape} do not belong together: "
            f"expected (rows, dim), (dim,) and rising offsets from 0 to rows"
        )
    return levels, scale.astype(np.float32), offsets.astype(np.int64)


class Features:
    """Clips of precomputed rows: a clip's own, or those of its stream that arrive during it."""

    def __init__(self, encoder: Precomputed, source: FeatureSource) -> None:
        self.encoder, self.traits, self._source = encoder, encoder.traits, source
        self._last: tuple[object, Tokens, str] | None = None

    def digest(self) -> str:
        own = self._source.digest()
        pca = self.encoder.pca
        return (
            own
            if pca is None
            else hashlib.sha256(f"{own}{_tensor_digest(pca.mean_D)}{_tensor_digest(pca.components_DE)}".encode()).hexdigest()
        )

    def encode(self, clip: Clip) -> Encoded:
        _refuse_joined(clip, "features")
        if self._source.whole:
            rows, where = self._source.rows(clip)
            tokens = encode(self.encoder, [rows], where)
            if clip.num_source_tokens not in (None, len(tokens)):
                return Encoded(tokens, "disagrees", f"{where}: {len(tokens)} rows, and the corpus says {clip.num_source_tokens}")
            return Encoded(tokens)
        place = self._source.place(clip)
        if self._last is None or self._last[0] != place:
            rows, where = self._source.rows(clip)
            self._last = place, encode(self.encoder, [rows], where), where
        start_s, end_s = media_span(clip)
        return _during(self._last[1], start_s, end_s, self._last[2], self.traits)


def _tensor_digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


# Text.


class Texts:
    """Sentences to translate: the ids of their words."""

    def __init__(self, tokenizer: Tokenizer, **settings: float) -> None:
        from zendaya.encoders.text import TextEncoder

        self.encoder = TextEncoder(tokenizer, **settings)
        self.traits = self.encoder.traits
        self._tokenizer = tokenizer

    def digest(self) -> str:
        return hashlib.sha256(self._tokenizer.to_json().encode()).hexdigest()

    def encode(self, clip: Clip) -> Encoded:
        return Encoded(encode(self.encoder, [clip.source], where=f"clip {clip.id}"))


def _tokenizer(path: str) -> Tokenizer:
    if not path:
        raise ConfigError("encoder text: say which tokenizer: text:FILE, a tokenizer.json")
    try:
        return Tokenizer.from_json(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a tokenizer: {getattr(error, 'strerror', None) or error}") from None
