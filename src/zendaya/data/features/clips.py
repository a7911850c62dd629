"""A clip of a corpus to its tokens, for any encoder, by its modality.

Audio is encoded from the clip's first sample with a fresh state, like a live session that begins there. Video frames and feature
rows are encoded as one stream; a clip gets the tokens that arrive during it. Arrival times count from the start of the clip.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zendaya.data.features.files import Rows, read_array, read_features
from zendaya.encoders.base import Encoder, FloatArray, Tokens, Traits, encode, stream
from zendaya.encoders.registry import ROW_KEY, EncoderSpec
from zendaya.errors import ConfigError, SourceError
from zendaya.files import file_digest
from zendaya.records import Clip
from zendaya.sources.media import SAMPLE_RATE, Frame, Samples, read_audio, read_video

CHUNK = SAMPLE_RATE
"""Samples per decoded chunk; the tokens do not depend on it."""
KEPT_CHUNKS = 3600
"""Chunks of a recording kept for later clips: an hour, 230 MB."""
SHORT_S = 0.5
"""A source that ends this much before its clip is reported; less is rounding of published times."""
SAME_S = 1e-6
"""Times this close are equal: 10/30 and 1/3."""
_VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov")
_FEATURE_SUFFIXES = (".npy", ".npz", ".safetensors", ".h5", ".hdf5")
_PACKED = {"q.npy", "scale.npy", "offset.npy"}
"""Arrays of an npz that holds all clips: clip n is q[offset[n]:offset[n+1]] · scale."""
_KEYS: dict[str, Callable[[Clip], str]] = {
    "media": lambda clip: clip.media,
    "stem": lambda clip: Path(clip.media).stem,
    "stream": lambda clip: clip.stream,
    "id": lambda clip: clip.id,
}


@dataclass(frozen=True)
class Encoded:
    """The tokens of a clip, and the problem with its source, if any."""

    tokens: Tokens
    kind: str = ""
    reason: str = ""


class ClipEncoder(ABC):
    """Clips to tokens. The tokens depend on the clip alone, not on the clips before it."""

    def __init__(self, encoder: Encoder[Any, Any]) -> None:
        self.encoder, self.traits = encoder, encoder.traits

    def digest(self) -> str:
        """sha256 of the weights, or of the feature file; empty if there is neither."""
        return self.encoder.digest()

    @abstractmethod
    def encode(self, clip: Clip) -> Encoded:
        """The tokens of a clip."""


def complete_spec(spec: EncoderSpec, folder: Path, clips: Callable[[], Iterable[Clip]]) -> EncoderSpec:
    """The spec with its number of features, read from the clips if it is not given, so that all workers agree."""
    if spec.modality != "features" or "dim" not in spec.factory.settings or spec.given("dim"):
        return spec
    return spec.with_setting("dim", _feature_source(spec, folder).dim(clips()))


def open_clip_encoder(spec: EncoderSpec, folder: Path) -> ClipEncoder:
    """Open an encoder, by a complete spec, for clips whose media are in a folder."""
    if spec.modality == "audio":
        return AudioClips(spec.open(), folder)
    if spec.modality == "video":
        return VideoClips(spec.open(), folder)
    if spec.modality == "text":
        return TextClips(spec.open())
    return FeatureClips(spec.open(), _feature_source(spec, folder))


def _feature_source(spec: EncoderSpec, folder: Path) -> FeatureSource:
    return FeatureSource(spec.which, folder, spec.given(ROW_KEY) or "stem")


def media_path(folder: Path, media: str, suffixes: Iterable[str] = ()) -> Path:
    """The file of a clip; published names that lead out of the folder are refused, links inside it are followed."""
    base = folder.resolve()  # "../x" would count as relative to "."
    path = Path(os.path.normpath(base / media))
    if not media or not path.is_relative_to(base):
        raise SourceError(f"{media!r} does not lie in the media folder: give the folder that holds it with --media")
    return next((named for suffix in ("", *suffixes) if (named := path.parent / (path.name + suffix)).is_file()), path)


def media_span(clip: Clip) -> tuple[float, float]:
    """Start and end of a clip, in seconds of its media."""
    start_s = max(0.0, clip.start_s)
    return max(0.0, start_s - clip.media_start_s), max(0.0, start_s + clip.duration_s - clip.media_start_s)


def _short(where: Path | str, got_s: float, wanted_s: float) -> str:
    return f"{where}: ends {wanted_s - got_s:.2f} s before the clip does" if wanted_s - got_s > SHORT_S else ""


def _noted(tokens: Tokens, reasons: Iterable[str]) -> Encoded:
    reason = "; ".join(filter(None, reasons))
    return Encoded(tokens, "short" if reason else "", reason)


class _Recording:
    """A recording, decoded as its clips need it: once, if they come in time order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first = 0
        """Index of the first chunk kept."""
        self._chunks: deque[Samples] = deque()
        self._rest = read_audio(path, chunk_s=CHUNK / SAMPLE_RATE)
        self._end: str | None = None
        """Why there is no next chunk: an error, or empty at the end of the recording."""

    def between(self, start: int, stop: int) -> Samples:
        """Samples start … stop−1, or fewer if the recording ends before."""
        assert start >= self.first * CHUNK, (start, self.first)
        while self._heard() < stop and self._end is None:
            try:
                self._chunks.append(next(self._rest).samples)
            except StopIteration:
                self._end = ""
            except SourceError as error:
                self._end = str(error)
            # Never drop a chunk that this clip needs.
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


class AudioClips(ClipEncoder):
    """Clips of recordings; the source of a joined clip is its parts, back to back."""

    def __init__(self, encoder: Encoder[Samples, Any], folder: Path) -> None:
        super().__init__(encoder)
        self._folder = folder
        self._recording: _Recording | None = None

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


class _Film:
    """The tokens of a video, computed as its clips need them."""

    def __init__(self, path: Path, tokens: Iterator[Tokens], dim: int) -> None:
        self.path, self._rest, self._dim = path, tokens, dim
        self._parts: list[Tokens] = []
        self._end: str | None = None
        """Why there is no next token: an error, or empty at the end of the video."""

    def between(self, start_s: float, end_s: float) -> Tokens:
        """The tokens that arrive in that time, and possibly a few before and after."""
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


class VideoClips(ClipEncoder):
    """Clips of videos: the tokens of the video that arrive during the clip."""

    def __init__(self, encoder: Encoder[list[Frame], Any], folder: Path) -> None:
        super().__init__(encoder)
        self._folder = folder
        self._film: _Film | None = None

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
        raise SourceError(f"clip {clip.id} is joined from {len(clip.parts)} clips; {what} cannot be joined: encode its parent corpus")


def _during(tokens: Tokens, start_s: float, end_s: float, where: Path | str, traits: Traits) -> Encoded:
    """The tokens that arrive during a clip, timed from its start."""
    arrival_s: FloatArray = tokens.arrival_s
    first, stop = np.searchsorted(arrival_s, [start_s + SAME_S, end_s + SAME_S], side="right")
    if first >= stop:
        got = f"the last arrives at {arrival_s[-1]:.2f} s" if len(tokens) else "there is none"
        raise SourceError(f"{where}: no token arrives between {start_s:.2f} and {end_s:.2f} s: {got}")
    chosen = Tokens(tokens.values_TE[first:stop], arrival_s[first:stop] - start_s)
    return _noted(chosen, [] if stop < len(tokens) else [_short(where, float(arrival_s[-1]) + 1 / traits.tokens_per_s, end_s)])


class FeatureSource:
    """Where feature rows are stored: one file of all clips or streams, a folder of files, or the media file of each clip."""

    def __init__(self, which: str, folder: Path, key: str) -> None:
        if key not in _KEYS:
            raise ConfigError(f"encoder features: key must be one of {', '.join(_KEYS)}: got {key!r}")
        self._key, self._folder = _KEYS[key], folder
        self.path = None if not which else folder / which if (folder / which).exists() else Path(which)
        if self.path is not None and not self.path.exists():
            raise SourceError(f"{self.path}: no such feature file or folder, neither here nor in {folder}")
        if self.path is not None and self.path.is_file() and self.path.suffix.lower() == ".npy":
            raise ConfigError(f"{self.path}: one array for all clips: expected a folder of .npy files, or a file with one name per clip")
        self.per_clip = self.path is not None and self.path.suffix.lower() == ".npz" and _is_packed(self.path)
        """Whether rows are stored per clip, not per stream."""

    def dim(self, clips: Iterable[Clip]) -> int:
        """Features per row, from the first clip that can be read."""
        if self.path is not None and self.per_clip:
            return read_array(self.path, "scale").size
        first: SourceError | None = None
        for clip in clips:
            try:
                return self.rows(clip)[0].shape[1]
            except SourceError as error:
                first = first or error
        raise SourceError(f"no features of any clip can be read; the first: {first}" if first else "no clip has features")

    def rows(self, clip: Clip) -> tuple[Rows, str]:
        """The rows of a clip or its stream, and the place they were read from."""
        if self.per_clip:
            return self._packed_rows(clip), f"{self.path}, row {clip.feature_row}"
        path, name = self.place(clip)
        return read_features(path, name), f"{path}" if name is None else f"{path}, {name!r}"

    def place(self, clip: Clip) -> tuple[Path, str | None]:
        """The file of a clip, and its array in the file."""
        if self.path is None:
            return media_path(self._folder, clip.media, _FEATURE_SUFFIXES), None
        if self.path.is_dir():
            return media_path(self.path, self._key(clip), _FEATURE_SUFFIXES), None
        return self.path, self._key(clip)

    @cached_property
    def _packed(self) -> tuple[Any, Any, Any]:
        """The levels, scale and offsets of an npz that holds all clips."""
        assert self.path is not None
        levels, scale, offsets = (read_array(self.path, name) for name in ("q", "scale", "offset"))
        shapes = f"q {levels.shape}, scale {scale.shape} and offset {offsets.shape}"
        fits = levels.ndim == 2 and scale.shape == levels.shape[1:] and offsets.ndim == 1 and offsets.size > 1
        fits = fits and offsets.dtype.kind in "iu" and offsets[0] == 0 and offsets[-1] == levels.shape[0]
        if not fits or (np.diff(offsets.astype(np.int64)) < 0).any():
            raise SourceError(f"{self.path}: {shapes} do not fit: expected (rows, dim), (dim,) and rising offsets from 0 to rows")
        return levels, scale.astype(np.float32), offsets.astype(np.int64)

    def _packed_rows(self, clip: Clip) -> Rows:
        levels, scale, offsets = self._packed
        if clip.feature_row is None or clip.feature_row + 1 >= offsets.size:
            raise SourceError(f"{self.path}: clip {clip.id} has row {clip.feature_row}: expected a row in 0 … {offsets.size - 2}")
        first, stop = offsets[clip.feature_row : clip.feature_row + 2]
        if first == stop:
            raise SourceError(f"{self.path}: empty: row {clip.feature_row}, clip {clip.id}, has no features")
        return levels[first:stop].astype(np.float32) * scale


def _is_packed(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist()) >= _PACKED
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(f"{path}: not a whole npz file: {error}") from None


class FeatureClips(ClipEncoder):
    """Clips of feature rows: a clip's own, or those of its stream that arrive during it."""

    def __init__(self, encoder: Encoder[Rows, Any], source: FeatureSource) -> None:
        super().__init__(encoder)
        self._source = source
        self._last: tuple[object, Tokens, str] | None = None

    def digest(self) -> str:
        path, weights = self._source.path, self.encoder.digest()
        stored = file_digest(path) if path is not None and path.is_file() else ""
        return hashlib.sha256(f"{stored}{weights}".encode()).hexdigest() if weights else stored

    def encode(self, clip: Clip) -> Encoded:
        _refuse_joined(clip, "features")
        if self._source.per_clip:
            rows, where = self._source.rows(clip)
            tokens = encode(self.encoder, [rows], where)
            if clip.num_source_tokens not in (None, len(tokens)):
                return Encoded(tokens, "disagrees", f"{where}: {len(tokens)} rows; the corpus counts {clip.num_source_tokens}")
            return Encoded(tokens)
        place = self._source.place(clip)
        if self._last is None or self._last[0] != place:
            rows, where = self._source.rows(clip)
            self._last = place, encode(self.encoder, [rows], where), where
        start_s, end_s = media_span(clip)
        return _during(self._last[1], start_s, end_s, self._last[2], self.traits)


class TextClips(ClipEncoder):
    """Sentences to translate: the ids of their words."""

    def encode(self, clip: Clip) -> Encoded:
        return Encoded(encode(self.encoder, [clip.source], where=f"clip {clip.id}"))
