"""Sound and pictures in chunks, from a file, a pipe or a microphone: 16 kHz mono float samples, frames at a steady rate.

Files are opened here and handed to PyAV as bytes, with the demuxer their first bytes name; it opens nothing by itself, so that a
playlist, a reference to another file or a URL inside a file is never followed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from zendaya.encoders import Frame, Samples
from zendaya.errors import ConfigError, MissingExtraError, SourceError

if TYPE_CHECKING:
    import av.container

SAMPLE_RATE = 16_000
RESAMPLER_AHEAD_S = 0.002
"""A sample of a recording that is not at 16 kHz reads at most this far past itself: half of libswresample's filter, rounded up."""
MAX_PIXELS = 8192 * 8192
"""Largest picture decoded; beyond it a few bytes of file would ask for gigabytes."""
RATES, MAX_CHANNELS = (1000, 768_000), 8
"""Sample rates and channels that are read: up to 7.1. A resampler for absurd rates would need memory without end, and PyAV reads
past the end of planar frames of more than 8 channels."""
MAX_PAUSE_S = 600.0
"""Longest time one picture is held; beyond it the clock of the file is broken, and would ask for millions of the same picture."""
PEEK = 4096
"""Bytes looked at to tell the format; of a pipe, no more than it needs."""
MAGIC = 12
"""Bytes that tell every format that is read."""
MAX_PADDING = 2**24
"""Bytes of an mp4 in a pipe that are held in search of its index: writers leave kilobytes free there."""
SHORTFALL_S = 0.1
"""A recording that ends this much before the length its header gives is cut short; less is rounding and codec delay."""

FORMATS = "wav, flac, mp3, ogg (opus, vorbis), mp4, m4a, mov, webm, mkv, avi"
_EXACT = ("wav", "flac", "mov", "matroska", "avi")
"""Formats whose header gives the length exactly; mp3 and ogg estimate it."""
_NO_TRACK_LENGTHS = ("matroska",)
"""Formats whose header gives only the end of the track that ends last: any one track may well be shorter."""
_INDIRECT = (
    (b"#EXTM3U", "an HLS or M3U playlist"),
    (b"ffconcat", "a concat list"),
    (b"v=0", "an SDP session description"),
    (b"[playlist]", "a PLS playlist"),
    (b"[Reference]", "an ASX reference"),
    (b"RTSPtext", "a QuickTime reference"),
    (b"SMIL", "a QuickTime reference"),
    (b"<", "an XML manifest (DASH, Smooth Streaming, SMIL …)"),
)
_PICTURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp")

Source = str | Path | BinaryIO


@dataclass(frozen=True)
class AudioChunk:
    """Samples at 16 kHz, and when the first of them was heard, counted from the beginning of the recording."""

    samples: Samples
    start_s: float
    lost: bool = False
    """Whether a live source dropped samples just before these, because they were not fetched in time."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.samples.size / SAMPLE_RATE


def read_audio(source: Source, *, chunk_s: float = 0.1, allow_truncated: bool = False) -> Iterator[AudioChunk]:
    """The sound of a recording (a path, `-` for standard input, or an open binary file) in chunks of `chunk_s`."""
    size = _chunk_size(chunk_s)
    with _opened(source) as (container, name, kind, head):
        import av

        wav = _Wav.parse(head) if kind == "wav" else None
        if not container.streams.audio:
            raise SourceError(f"{name}: no sound in it: expected at least one audio stream; got {_contents(container)}")
        stream = _known(container.streams.audio[0], name)
        rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
        if not RATES[0] <= rate <= RATES[1] or channels > MAX_CHANNELS:
            raise SourceError(
                f"{name}: {channels} channels at {rate} Hz: expected at most {MAX_CHANNELS} at {RATES[0]} … {RATES[1]} Hz; it is damaged"
            )
        resampler = av.AudioResampler(format="flt", rate=SAMPLE_RATE)
        tracks = _Tracks() if kind in _NO_TRACK_LENGTHS else None

        def blocks() -> Iterator[Samples]:
            for frame in itertools.chain(_decoded(container, stream, name, tracks), [None]):
                try:
                    parts = resampler.resample(frame)
                except (av.error.FFmpegError, ValueError) as error:  # a rate or a number of channels that changes, or cannot be
                    raise SourceError(f"{name}: damaged: its samples cannot be brought to {SAMPLE_RATE} Hz: {_reason(error)}") from None
                # Channels are averaged here: libswresample would add them up in float, and a stereo recording would come out louder.
                yield from (part.to_ndarray().reshape(part.samples, -1).mean(1) for part in parts)

        heard = 0
        for chunk in _rechunk(blocks(), size):
            yield AudioChunk(chunk, heard / SAMPLE_RATE)
            heard += chunk.size
        if heard == 0:
            raise SourceError(f"{name}: empty: its audio stream holds no samples")
        if not allow_truncated:
            length_s = wav.length_s if wav else _length_s(container, stream, kind)
            _check_length(length_s, max(heard / SAMPLE_RATE, tracks.end_s if tracks else 0.0), name)


def probe(path: str | Path, *, raw: bool = False) -> None:
    """Open a recording and let it go: what is wrong with its beginning is an error at once."""
    with contextlib.ExitStack() as stack:
        if raw:
            _open_bytes(path, stack)
        else:
            stack.enter_context(_opened(path))


def read_raw(source: Source, *, chunk_s: float = 0.1) -> Iterator[AudioChunk]:
    """Bare samples (16 kHz, one channel, signed 16-bit little-endian, no header) in chunks of `chunk_s`, as they come."""
    size = _chunk_size(chunk_s)
    with contextlib.ExitStack() as stack:
        file, name = _open_bytes(source, stack)
        read: Callable[[int], bytes] = getattr(file, "read1", file.read)

        def blocks() -> Iterator[Samples]:
            odd = b""
            while piece := read(2 * size):
                data = odd + piece
                whole = len(data) // 2 * 2
                odd = data[whole:]
                yield np.frombuffer(data[:whole], "<i2").astype(np.float32) / np.float32(32768)

        heard = 0
        for chunk in _rechunk(blocks(), size):
            yield AudioChunk(chunk, heard / SAMPLE_RATE)
            heard += chunk.size
        if heard == 0:
            raise SourceError(f"{name}: empty: it holds no samples")


def read_video(source: Source, *, fps: float = 3.0, allow_truncated: bool = False) -> Iterator[Frame]:
    """The pictures of a video at `fps` a second: at each i/fps the frame that is being shown then."""
    if not 0 < fps <= 1000:
        raise ConfigError(f"fps must lie above 0 and up to 1000 frames a second: got {fps!r}")
    with _opened(source) as (container, name, kind, _):
        if not container.streams.video:
            raise SourceError(f"{name}: no pictures in it: expected at least one video stream; got {_contents(container)}")
        stream = _known(container.streams.video[0], name)
        _check_size(stream.codec_context.width, stream.codec_context.height, name)
        end_s = 0.0
        tracks = _Tracks() if kind in _NO_TRACK_LENGTHS else None

        def timed() -> Iterator[tuple[float, float, Any]]:
            nonlocal end_s
            first_s = last_s = 0.0
            frame_s = 1.0 / float(stream.average_rate or stream.guessed_rate or 25)
            for index, frame in enumerate(_decoded(container, stream, name, tracks)):
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
                # A phone films sideways and says so; degrees are counter-clockwise, as rot90's turns are.
                picture = (frame, np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))))
            yield Frame(picture[1], time_s, seen_s)
        if picture[0] is None:
            raise SourceError(f"{name}: empty: its video stream holds no frames")
        if not allow_truncated:
            _check_length(_length_s(container, stream, kind), max(end_s, tracks.end_s if tracks else 0.0), name)


Thing = TypeVar("Thing")


def sample(timed: Iterable[tuple[float, float, Thing]], fps: float) -> Iterator[tuple[float, float, Thing]]:
    """What is shown at 0, 1/fps, 2/fps … of things shown from a beginning to an end, in order: (moment, when it was known, thing).

    A thing is shown until the next begins, the last until its own end. That it stays after its own end is known with the next.

    >>> list(sample([(0.0, 0.4, "a"), (0.4, 0.8, "b"), (0.8, 1.2, "c")], fps=2))
    [(0.0, 0.4, 'a'), (0.5, 0.8, 'b'), (1.0, 1.2, 'c')]
    """
    slot, known_s = 0, 0.0
    shown: tuple[float, Thing] | None = None
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


# Files and pipes.


class _Pipe(io.RawIOBase):
    """A stream that cannot be wound back, its first bytes already looked at; `limit` bytes of it, if given."""

    def __init__(self, head: bytes, rest: BinaryIO, limit: int | None = None) -> None:
        self._head, self._rest, self._left = head, rest, sys.maxsize if limit is None else limit

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = min(size if size >= 0 else PEEK, self._left)
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
        else:
            # What is there is given at once: a live source must not wait until a buffer of it is full.
            read: Callable[[int], bytes] = getattr(self._rest, "read1", self._rest.read)
            data = read(size)
        self._left -= len(data)
        return data


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[tuple[av.container.InputContainer, str, str, bytes]]:
    """The container of a source, its name for messages, its format and first bytes; a source opened here is closed here."""
    try:
        import av
    except ModuleNotFoundError:
        raise MissingExtraError("av", "audio", "reading recordings and videos") from None
    with contextlib.ExitStack() as stack:
        file, name = _open_bytes(source, stack)
        seekable = file.seekable()
        held = bytearray()
        _read_on(file, held, PEEK if seekable else MAGIC)
        if not seekable and _known_format(bytes(held)) is None:
            _read_on(file, held, PEEK)  # blanks may come before what says that it is a playlist
        kind = _format(bytes(held), name)
        if seekable:
            file.seek(0)
        elif kind == "wav":
            while _Wav.parse(bytes(held)) is None and len(held) < PEEK and _read_on(file, held, len(held) + 1):
                pass
        elif kind == "mov":
            _read_to_index(file, held, name)
        head = bytes(held)

        def refuse(url: str, flags: int, options: dict[str, str]) -> Any:
            raise SourceError(f"{name}: refers to another file or address ({url!r}), which is never opened")

        opened: BinaryIO | _Pipe = file
        demuxer, options = kind, {"protocol_whitelist": "none"}
        if not seekable:
            options["analyzeduration"] = "100000"  # µs: a live source is not listened to for seconds before it is opened
            wav = _Wav.parse(head) if kind == "wav" else None
            if wav is not None and wav.plain:
                # FFmpeg's wav demuxer waits for 64 KiB, 2 s of speech, in case it were S/PDIF; past its header it is raw samples.
                demuxer, options["sample_rate"], options["ch_layout"] = "s16le", str(wav.rate), f"{wav.channels}C"
                opened = _Pipe(head[wav.start :], file, wav.size)
            else:
                opened = _Pipe(head, file)
        options["format_whitelist"] = _demuxers(demuxer)
        try:
            container = av.open(opened, "r", format=demuxer, io_open=refuse, metadata_errors="replace", container_options=options)
        except av.error.FFmpegError as error:
            raise SourceError(f"{name}: a damaged or cut {kind} file: {_reason(error)}; fetch or record it again") from None
        with container:
            yield container, name, kind, head


def _open_bytes(source: Source, stack: contextlib.ExitStack) -> tuple[BinaryIO, str]:
    if source == "-":
        return sys.stdin.buffer, "standard input"
    if not isinstance(source, str | Path):
        name = getattr(source, "name", None)  # of a file opened by its number, the number
        return source, str(name) if isinstance(name, str | Path) else "the open file" if source.seekable() else "the pipe"
    path = Path(source)
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise SourceError(f"{path}: expected a file or a pipe: got a folder or a device")
        return stack.enter_context(path.open("rb")), str(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise SourceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _read_on(file: BinaryIO, held: bytearray, least: int) -> bool:
    """Hold at least so many bytes of a file, and what else is there already; false if it ends before."""
    read: Callable[[int], bytes] = getattr(file, "read1", file.read)
    while len(held) < least:
        if not (piece := read(max(PEEK, least - len(held)))):
            return False
        held += piece
    return True


def _known_format(head: bytes) -> str | None:
    """The demuxer that the first bytes call for, if they are those of a format that is read."""
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    if head[4:8] in _MP4_BOXES:
        return "mov"
    for magic, kind in ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"\x1aE\xdf\xa3", "matroska"), (b"ID3", "mp3")):
        if head.startswith(magic):
            return kind
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 in (0xE2, 0xE4, 0xE6):  # MPEG audio sync, layers I–III
        return "mp3"
    return None


def _format(head: bytes, name: str) -> str:
    """The demuxer that the first bytes call for, or an error that says what they are; FFmpeg is never left to guess."""
    if not head:
        raise SourceError(f"{name}: empty: it holds no bytes")
    if (kind := _known_format(head)) is not None:
        return kind
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, what in _INDIRECT:
        if text[: len(magic)].lower() == magic.lower():
            raise SourceError(f"{name}: {what}, which names other files; nothing outside the given file is read: give the recording itself")
    if head.startswith(_PICTURES):
        raise SourceError(f"{name}: a single picture: expected a recording or a video ({FORMATS})")
    raise SourceError(f"{name}: not a format that is read here: expected {FORMATS}; its first bytes are {head[:8]!r}")


def _read_to_index(file: BinaryIO, held: bytearray, name: str) -> None:
    """Hold an mp4 in a pipe up to its index, which must come before its media: a pipe cannot be wound back to it."""
    place = 0
    while _read_on(file, held, place + 16):  # the end of the file is left to FFmpeg
        size, box = int.from_bytes(held[place : place + 4], "big"), held[place + 4 : place + 8]
        if box == b"moov":
            return
        if box == b"mdat":
            raise SourceError(
                f"{name}: an mp4 whose index (moov) comes after its media cannot be read from a pipe: "
                f"give the file itself, or write it with ffmpeg -movflags +faststart"
            )
        if size == 1:
            size = int.from_bytes(held[place + 8 : place + 16], "big")
        if size < 8:  # 0 is a box to the end of the file, anything else is damage, and FFmpeg says so
            return
        place += size
        if place > MAX_PADDING:
            raise SourceError(
                f"{name}: an mp4 with more than {MAX_PADDING} bytes before its index (moov) cannot be read from a pipe: "
                f"give the file itself, or write it with ffmpeg -movflags +faststart"
            )


def _demuxers(kind: str) -> str:
    """FFmpeg's own names of a demuxer, which is what its whitelist is compared with."""
    return {"mov": "mov,mp4,m4a,3gp,3g2,mj2", "matroska": "matroska,webm"}.get(kind, kind)


@dataclass
class _Tracks:
    """How far the packets of all tracks reach, counted from the beginning of the container's clock."""

    end_s: float = 0.0

    def see(self, packet: Any) -> None:
        if packet.pts is None or packet.time_base is None:
            return
        rate = getattr(packet.stream, "average_rate", None)
        length_s = float(packet.duration * packet.time_base) if packet.duration else 1.0 / float(rate) if rate else 0.0
        self.end_s = max(self.end_s, float(packet.pts * packet.time_base) + length_s)


def _decoded(container: Any, stream: Any, name: str, tracks: _Tracks | None) -> Iterator[Any]:
    """Frames of a stream in order; damage is an error in one line that says where. `tracks`, if given, sees what is not decoded too."""
    import av

    at_s = 0.0
    try:
        for packet in container.demux(stream) if tracks is None else container.demux():
            if tracks is not None:
                tracks.see(packet)
            if packet.stream.index != stream.index:
                continue
            for frame in packet.decode():
                at_s = frame.time if frame.time is not None else at_s
                yield frame
    except (av.error.FFmpegError, OSError) as error:
        raise SourceError(f"{name}: damaged or cut short after {at_s:.2f} s: {_reason(error)}; fetch or record it again") from None


def _length_s(container: Any, stream: Any, kind: str) -> float | None:
    """The length a header gives, where the format gives it exactly."""
    if kind not in _EXACT:
        return None
    if kind not in _NO_TRACK_LENGTHS and stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return container.duration / 1e6 if container.duration is not None else None


@dataclass(frozen=True)
class _Wav:
    """What a wav header says; `size` is none if it was written to a pipe, its end not known."""

    plain: bool
    """Whether its samples are 16-bit PCM without any extension."""
    channels: int
    rate: int
    bytes_per_s: int
    start: int
    size: int | None

    @staticmethod
    def parse(head: bytes) -> _Wav | None:
        place, form = 12, b""
        while place + 8 <= len(head):
            chunk, size = head[place : place + 4], int.from_bytes(head[place + 4 : place + 8], "little")
            if chunk == b"fmt ":
                form = head[place + 8 : place + 24]
            if chunk == b"data" and len(form) == 16:
                tag, channels, rate, bytes_per_s, _, bits = struct.unpack("<HHIIHH", form)
                known = size if 0 < size < 0xFFFFFFFF - 4096 and head[:4] == b"RIFF" else None
                return _Wav((tag, bits) == (1, 16), channels, rate, bytes_per_s, place + 8, known)
            place += 8 + size + size % 2
        return None

    @property
    def length_s(self) -> float | None:
        """The length, which FFmpeg replaces by what the file holds."""
        return self.size / self.bytes_per_s if self.size is not None and self.bytes_per_s else None


def _check_length(promised_s: float | None, got_s: float, name: str) -> None:
    """If less came out than the header says, the recording was cut."""
    if promised_s is not None and got_s < promised_s - max(SHORTFALL_S, 0.01 * promised_s):
        raise SourceError(
            f"{name}: cut short: its header says {promised_s:.2f} s and it holds {got_s:.2f} s; fetch it again, or allow cut recordings"
        )


def _known(stream: Any, name: str) -> Any:
    if stream.codec_context is None:
        raise SourceError(f"{name}: its {stream.type} is in a codec that is not known here: it is damaged, or convert it to another")
    return stream


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MAX_PIXELS:
        raise SourceError(f"{name}: pictures of {width} × {height}: expected at most {MAX_PIXELS} pixels; scale the video down")


def _contents(container: Any) -> str:
    kinds = [stream.type for stream in container.streams]
    return " and ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "no streams"


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0]


def _chunk_size(chunk_s: float) -> int:
    if not 1 / SAMPLE_RATE <= chunk_s <= 60:
        raise ConfigError(f"chunk_s must lie between one sample and 60 s: got {chunk_s!r}")
    return round(chunk_s * SAMPLE_RATE)


def _rechunk(blocks: Iterable[Samples], size: int) -> Iterator[Samples]:
    """The same samples in chunks of `size`, the last one shorter."""
    waiting, count = list[Samples](), 0
    for block in blocks:
        waiting.append(block)
        count += block.size
        if count >= size:
            whole = np.concatenate(waiting)
            for first in range(0, count - size + 1, size):
                yield whole[first : first + size]
            waiting = [whole[count - count % size :]]
            count %= size
    if count:
        yield np.concatenate(waiting)


# The microphone.


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
    """What a microphone hears (the default one, or one of `microphones` by index or part of its name), until the reader stops."""
    size = _chunk_size(chunk_s)
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
        raise SourceError(
            f"microphone: {device if device is not None else 'the default device'} cannot be read at 16 kHz: {error}"
        ) from None


def _sounddevice() -> Any:
    try:
        import sounddevice
    except ModuleNotFoundError:
        raise MissingExtraError("sounddevice", "audio", "the microphone") from None
    except OSError as error:  # the package is there, the PortAudio library it calls is not
        raise SourceError(f"microphone: {error}: install PortAudio (on Debian and Ubuntu: apt install libportaudio2)") from None
    return sounddevice
