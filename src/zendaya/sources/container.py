"""A file or a pipe opened for decoding, by the demuxer that its first bytes name; files and URLs that it refers to are never opened."""

from __future__ import annotations

import contextlib
import io
import re
import stat
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from zendaya.errors import MissingExtraError, SourceError

if TYPE_CHECKING:
    import av.container

PEEK = 4096
"""Bytes read to find the format; of a pipe, no more than needed."""
MAGIC = 12
"""Bytes that identify every supported format."""
MAX_PADDING = 2**24
"""Bytes of an mp4 in a pipe that are buffered while looking for its index; encoders leave only kilobytes before it."""
SHORTFALL_S = 0.1
"""A recording that ends this much before the length in its header is cut short; less is rounding and codec delay."""

FORMATS = "wav, flac, mp3, ogg (opus, vorbis), mp4, m4a, mov, webm, mkv, avi"
_EXACT = ("wav", "flac", "mov", "matroska", "avi")
"""Formats whose header gives the length exactly; mp3 and ogg estimate it."""
_NO_TRACK_LENGTHS = ("matroska",)
"""Formats whose header gives only the end of the longest track: any one track may be shorter."""
_FFMPEG_NAMES = {"mov": "mov,mp4,m4a,3gp,3g2,mj2", "matroska": "matroska,webm"}
_INDIRECT = (
    (b"#EXTM3U", "an HLS or M3U playlist"), (b"ffconcat", "a concat list"), (b"v=0", "an SDP session description"),
    (b"[playlist]", "a PLS playlist"), (b"[Reference]", "an ASX reference"), (b"RTSPtext", "a QuickTime reference"),
    (b"SMIL", "a QuickTime reference"), (b"<", "an XML manifest (DASH, Smooth Streaming, SMIL …)"),
)  # fmt: skip
_PICTURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_MAGIC = (
    ("wav", rb"(RIFF|RF64)....WAVE"), ("avi", rb"RIFF....AVI "), ("mov", rb"....(ftyp|moov|mdat|free|skip|wide|pnot|styp)"),
    ("flac", rb"fLaC"), ("ogg", rb"OggS"), ("matroska", rb"\x1aE\xdf\xa3"),
    ("mp3", rb"ID3|\xff[\xe2-\xe7\xea-\xef\xf2-\xf7\xfa-\xff]"),  # the sync word of MPEG audio, layers I–III
)  # fmt: skip

Source = str | Path | BinaryIO


@dataclass
class OpenMedia:
    """An open recording or video; every error names it."""

    container: av.container.InputContainer
    name: str
    format: str
    wav: WavHeader | None
    """Header of a wav file."""
    tracks_end_s: float = 0.0
    """End of the packets read so far, of any track, where the header gives only the end of the longest one."""

    def stream(self, kind: Literal["audio", "video"]) -> Any:
        """The first stream of a kind."""
        counts = Counter(stream.type for stream in self.container.streams)
        if not counts[kind]:
            what, got = "sound" if kind == "audio" else "pictures", " and ".join(f"{n} {name}" for name, n in sorted(counts.items()) if n)
            raise SourceError(f"{self.name}: no {what} in it: expected at least one {kind} stream; got {got or 'no streams'}")
        stream = next(stream for stream in self.container.streams if stream.type == kind)
        if stream.codec_context is None:
            raise SourceError(f"{self.name}: unknown {kind} codec: the file is damaged, or must be converted to another codec")
        return stream

    def frames(self, stream: Any) -> Iterator[Any]:
        """Decoded frames of a stream, in order; damage is an error that says where."""
        import av

        frame: Any
        at_s, all_tracks = 0.0, self.format in _NO_TRACK_LENGTHS
        try:
            for packet in self.container.demux() if all_tracks else self.container.demux(stream):
                if all_tracks:
                    self._count(packet)
                for frame in packet.decode() if packet.stream.index == stream.index else ():
                    at_s = frame.time if frame.time is not None else at_s
                    yield frame
        except (av.error.FFmpegError, OSError) as error:
            raise SourceError(f"{self.name}: damaged or cut short after {at_s:.2f} s: {reason(error)}; fetch or record it again") from None

    def _count(self, packet: Any) -> None:
        if packet.pts is None or packet.time_base is None:
            return
        rate = getattr(packet.stream, "average_rate", None)
        length_s = float(packet.duration * packet.time_base) if packet.duration else 1.0 / float(rate) if rate else 0.0
        self.tracks_end_s = max(self.tracks_end_s, float(packet.pts * packet.time_base) + length_s)

    def check_length(self, stream: Any, got_s: float) -> None:
        """Raise SourceError if less was decoded than the header promises: the recording was cut."""
        promised_s: float | None = None
        if self.wav is not None:
            promised_s = self.wav.length_s
        elif self.format in _EXACT and self.format not in _NO_TRACK_LENGTHS and None not in (stream.duration, stream.time_base):
            promised_s = float(stream.duration * stream.time_base)
        elif self.format in _EXACT and self.container.duration is not None:
            promised_s = self.container.duration / 1e6
        got_s = max(got_s, self.tracks_end_s)
        if promised_s is not None and got_s < promised_s - max(SHORTFALL_S, 0.01 * promised_s):
            found = f"its header says {promised_s:.2f} s and it holds {got_s:.2f} s"
            raise SourceError(f"{self.name}: cut short: {found}; fetch it again, or allow cut recordings")


class _Pipe(io.RawIOBase):
    """A stream that cannot seek, with its first bytes already read; ends after `limit` bytes, if given."""

    def __init__(self, head: bytes, rest: BinaryIO, limit: int | None = None) -> None:
        self._head, self._rest, self._left = head, rest, sys.maxsize if limit is None else limit

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = min(size if size >= 0 else PEEK, self._left)
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
        else:
            # Return what is there at once: a live source must not wait for a full buffer.
            read: Callable[[int], bytes] = getattr(self._rest, "read1", self._rest.read)
            data = read(size)
        self._left -= len(data)
        return data


@contextlib.contextmanager
def open_container(source: Source) -> Iterator[OpenMedia]:
    """A source opened for decoding, and closed afterwards if it was a path."""
    try:
        import av
    except ModuleNotFoundError:
        raise MissingExtraError("av", "audio", "reading recordings and videos") from None
    with contextlib.ExitStack() as stack:
        file, name = open_bytes(source, stack)
        seekable = file.seekable()
        held = bytearray()
        _read_on(file, held, PEEK if seekable else MAGIC)
        if not seekable and _known_format(bytes(held)) is None:
            _read_on(file, held, PEEK)  # a playlist may begin with blanks
        kind = _format(bytes(held), name)
        if seekable:
            file.seek(0)
        elif kind == "wav":
            while WavHeader.parse(bytes(held)) is None and len(held) < PEEK and _read_on(file, held, len(held) + 1):
                pass
        elif kind == "mov":
            _read_to_index(file, held, name)
        head = bytes(held)
        wav = WavHeader.parse(head) if kind == "wav" else None

        def refuse(url: str, flags: int, options: dict[str, str]) -> Any:
            raise SourceError(f"{name}: refers to another file or address ({url!r}), which is never opened")

        opened: BinaryIO | _Pipe = file
        demuxer, options = kind, {"protocol_whitelist": "none"}
        if not seekable:
            options["analyzeduration"] = "100000"  # µs: the default would wait for seconds of a live source
            if wav is not None and wav.plain:
                # FFmpeg's wav demuxer waits for 64 KiB, 2 s of speech, to rule out S/PDIF; after the header there are only raw samples.
                demuxer, options["sample_rate"], options["ch_layout"] = "s16le", str(wav.rate), f"{wav.channels}C"
                opened = _Pipe(head[wav.start :], file, wav.size)
            else:
                opened = _Pipe(head, file)
        options["format_whitelist"] = _FFMPEG_NAMES.get(demuxer, demuxer)
        try:
            container = av.open(opened, "r", format=demuxer, io_open=refuse, metadata_errors="replace", container_options=options)
        except av.error.FFmpegError as error:
            raise SourceError(f"{name}: a damaged or cut {kind} file: {reason(error)}; fetch or record it again") from None
        with container:
            yield OpenMedia(container, name, kind, wav)


def open_bytes(source: Source, stack: contextlib.ExitStack) -> tuple[BinaryIO, str]:
    """The source as bytes, and its name for error messages."""
    if source == "-":
        return sys.stdin.buffer, "standard input"
    if not isinstance(source, str | Path):
        name = getattr(source, "name", None)  # the number, for a file opened by its descriptor
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
    """Buffer at least that many bytes of a file, and more if they are there; False if it ends before."""
    read: Callable[[int], bytes] = getattr(file, "read1", file.read)
    while len(held) < least:
        if not (piece := read(max(PEEK, least - len(held)))):
            return False
        held += piece
    return True


def _known_format(head: bytes) -> str | None:
    """The demuxer for the first bytes of a supported format, else None."""
    return next((kind for kind, magic in _MAGIC if re.match(magic, head, re.DOTALL)), None)


def _format(head: bytes, name: str) -> str:
    """The demuxer for the first bytes, or an error that says what they are; FFmpeg never guesses."""
    if not head:
        raise SourceError(f"{name}: empty: it holds no bytes")
    if (kind := _known_format(head)) is not None:
        return kind
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, what in _INDIRECT:
        if text[: len(magic)].lower() == magic.lower():
            raise SourceError(f"{name}: {what}, which names other files; only the given file is read: give the recording itself")
    if head.startswith(_PICTURES):
        raise SourceError(f"{name}: a single picture: expected a recording or a video ({FORMATS})")
    raise SourceError(f"{name}: unknown format: expected {FORMATS}; got first bytes {head[:8]!r}")


def _read_to_index(file: BinaryIO, held: bytearray, name: str) -> None:
    """Buffer an mp4 in a pipe up to its index, which must come before its media: a pipe cannot seek back."""
    place, advice = 0, "give the file itself, or write it with ffmpeg -movflags +faststart"
    while _read_on(file, held, place + 16):  # the end of the file is left to FFmpeg
        size, box = int.from_bytes(held[place : place + 4], "big"), held[place + 4 : place + 8]
        if box == b"moov":
            return
        if box == b"mdat":
            raise SourceError(f"{name}: an mp4 whose index (moov) comes after its media cannot be read from a pipe: {advice}")
        if size == 1:
            size = int.from_bytes(held[place + 8 : place + 16], "big")
        if size < 8:  # 0: a box to the end of the file; else damage, which FFmpeg reports
            return
        place += size
        if place > MAX_PADDING:
            what = f"an mp4 with more than {MAX_PADDING} bytes before its index (moov)"
            raise SourceError(f"{name}: {what} cannot be read from a pipe: {advice}")


@dataclass(frozen=True)
class WavHeader:
    """A wav header; `size` is None if it was written to a pipe, where the end was not known."""

    plain: bool
    """16-bit PCM without any extension."""
    channels: int
    rate: int
    bytes_per_s: int
    start: int
    size: int | None

    @staticmethod
    def parse(head: bytes) -> WavHeader | None:
        place, form = 12, b""
        while place + 8 <= len(head):
            chunk, size = head[place : place + 4], int.from_bytes(head[place + 4 : place + 8], "little")
            if chunk == b"fmt ":
                form = head[place + 8 : place + 24]
            if chunk == b"data" and len(form) == 16:
                tag, channels, rate, bytes_per_s, _, bits = struct.unpack("<HHIIHH", form)
                known = size if 0 < size < 0xFFFFFFFF - 4096 and head[:4] == b"RIFF" else None
                return WavHeader((tag, bits) == (1, 16), channels, rate, bytes_per_s, place + 8, known)
            place += 8 + size + size % 2
        return None

    @property
    def length_s(self) -> float | None:
        """The length in the header; FFmpeg would give that of the file."""
        return self.size / self.bytes_per_s if self.size is not None and self.bytes_per_s else None


def reason(error: Exception) -> str:
    """The first line of an error of FFmpeg or the system."""
    return str(getattr(error, "strerror", None) or error).splitlines()[0]
