"""Published files, read as published: lines and JSON, what may be odd in them, and the digest of what was read."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

KINDS = {
    "bom": "skipped",
    "bad-text": "invalid Unicode becomes U+FFFD; the clip is kept",
    "blank-line": "no clip",
    "malformed": "no clip",
    "missing-split": "the other splits are read",
    "duplicate-key": "the last one counts, as in JSON",
    "duplicate-id": "the first one counts; no clip for the second",
    "duplicate-line": "both clips are kept",
    "duplicate-reference": "both are kept: a text that several people wrote weighs more",
    "empty-reference": "left out; a clip with none left is kept but unusable",
    "empty-source": "kept but unusable",
    "untrimmed-text": "white space at both ends is removed",
    "line-break": "becomes one space",
    "end-before-start": "kept as published but unusable: no source, no part in pairs",
    "start-past-stream": "kept as published but unusable: no source, no part in pairs",
    "end-past-stream": "kept as published; its source ends with the stream",
    "negative-start": "kept as published; its source begins with the stream",
    "out-of-order": "kept in file order; pairs are made in time order",
    "unknown-video": "kept; its length is unknown, so its end is not checked",
    "unknown-length": "kept; its length is unknown, so its end is not checked",
    "wrong-duration": "kept; the times count",
    "features-short": "kept; the published number of source tokens counts",
    "unpaired": "no clip",
    "gap": "kept; a new stream begins there, so no pair spans the gap",
    "no-text": "no clip",
    "no-segment": "no clip",
    "no-media": "kept; the media is named after the recording",
    "missing-media": "kept",
    "disagrees": "kept; segments and text count",
    "unsupported-cut": "no clip",
    "unknown-field": "ignored",
    "shared-stream": "kept in both",
    "shared-group": "kept in both",
}
"""Every kind of problem a reader may report, and what it does about it."""

MAX_LINE_BYTES = 1 << 26
"""A longer line is no annotation: the longest published one, all of ActivityNet's train.json, is 4 MB."""


class Malformed(Exception):  # noqa: N818  (never leaves the readers: it becomes a Problem)
    """One record that is not of the format."""


def report(problems: list[Problem], kind: str, where: str, detail: str) -> None:
    """Add a problem of a known kind."""
    assert kind in KINDS, f"{kind} is not in KINDS, which says what is done about it"
    problems.append(Problem(kind, where, detail))


def snippet(value: object, width: int = 60) -> str:
    """How a value from a file is quoted: on one line, without control characters, cut."""
    text = ascii(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def found(folder: Path, names: Iterable[str], what: str, where_from: str) -> list[Path]:
    """Those of the named files that are in the folder, plain or else gzipped; at least one must be."""
    names = list(names)
    if not folder.is_dir():
        raise CorpusError(f"{folder}: no such folder; expected the one with {what} ({', '.join(names)}): {where_from}")
    both = [(folder / name, folder / f"{name}.gz") for name in names]
    paths = [plain if plain.is_file() else zipped for plain, zipped in both if plain.is_file() or zipped.is_file()]
    if not paths:
        raise CorpusError(f"{folder}: holds none of {', '.join(names)}; expected {what}: {where_from}")
    return paths


def lines(path: Path, problems: list[Problem], label: str | None = None) -> Iterator[tuple[str, str]]:
    """(where, text) of each line, plain or gzipped; a line ends at a newline and nowhere else."""
    label = label or path.name
    for number, raw in enumerate(_raw_lines(path), 1):
        where = f"{label}:{number}"
        if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
            report(problems, "bom", where, "the file begins with a UTF-8 byte order mark")
            raw = raw[3:]
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            report(problems, "bad-text", where, f"not UTF-8 at byte {error.start + 1}: {snippet(raw[error.start : error.start + 8])}")
            text = raw.decode(errors="replace")
        yield where, text


def _raw_lines(path: Path) -> Iterator[bytes]:
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise CorpusError(f"{path}: line {number} is longer than {MAX_LINE_BYTES >> 20} MB; expected one annotation a line")
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorpusError(f"{path}: damaged gzip after line {number} ({error}); get the file again") from None
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> BinaryIO:
    # By its first bytes, not its name: people unzip files and keep the name, or the other way round.
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return cast("BinaryIO", gzip.open(path, "rb")) if zipped else path.open("rb")


def json_lines(path: Path, problems: list[Problem]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of each line of a JSONL file."""
    for where, text in lines(path, problems):
        if not text.strip():
            report(problems, "blank-line", where, "nothing on the line")
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            report(problems, "malformed", where, f"not JSON: {_reason(error)}")
            continue
        if isinstance(record, dict):
            yield where, record
        else:
            report(problems, "malformed", where, f"not a JSON object: {snippet(text)}")


def json_object(path: Path, problems: list[Problem], label: str | None = None) -> dict[str, Any]:
    """The one object a JSON file holds; a key given twice is reported, not lost in silence."""
    text = "\n".join(line for _, line in lines(path, problems, label))

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(items)
        if len(record) < len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    report(problems, "duplicate-key", f"{label or path.name}:{snippet(key)}", "the key is there twice")
                seen.add(key)
        return record

    try:
        record = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}: not JSON: {_reason(error)}; get the file again") from None
    if not isinstance(record, dict) or not record:
        raise CorpusError(f"{path}: expected a JSON object with a key an annotation: got {snippet(record)}")
    return record


def _reason(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def unreadable(path: Path, expected: str, problems: Sequence[Problem]) -> CorpusError:
    """The error for a file of which nothing could be read."""
    first = next((f" (first: {p.where}: {p.detail})" for p in problems if p.kind == "malformed" and path.name in p.where), "")
    return CorpusError(f"{path}: expected {expected}: got {'no line of that format' + first if path.stat().st_size else 'an empty file'}")


def get(record: dict[str, Any], name: str) -> Any:
    """The field of that name, which must be there."""
    if name not in record:
        raise Malformed(f"no field {name!r}")
    return record[name]


def as_object(value: object, name: str) -> dict[str, Any]:
    """The value, which must be an object."""
    if not isinstance(value, dict):
        raise Malformed(f"{name} must be an object: got {snippet(value)}")
    return value


def as_list(value: object, name: str) -> list[Any]:
    """The value, which must be a list."""
    if not isinstance(value, list):
        raise Malformed(f"{name} must be a list: got {snippet(value)}")
    return value


def as_name(value: object, name: str) -> str:
    """A text that names something (an id, a split, a path): not empty, and one that can be written to a file again."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise Malformed(f"{name} must be a printable text: got {snippet(value)}")
    return value


def as_number(value: object, name: str) -> float:
    """The value, which must be a finite number or the text of one."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise Malformed(f"{name} must be a number: got {snippet(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"{name} must be a number: got {snippet(value)}")
    # An int beyond the range of floats has no isfinite.
    if abs(value) > 1 << 53 or not math.isfinite(value):
        raise Malformed(f"{name} must be finite: got {snippet(value)}")
    return float(value)


def as_count(value: object, name: str) -> int:
    """The value, which must be a whole number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise Malformed(f"{name} must be a whole number, at least 0: got {snippet(value)}")
    return value


def clean(text: object, where: str, problems: list[Problem], name: str = "the text") -> str:
    """A text as it is taught and scored: without white space at its ends or line breaks inside; the rest as published."""
    if not isinstance(text, str):
        raise Malformed(f"{name} must be a text: got {snippet(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        report(problems, "bad-text", where, f"{name} holds half a surrogate pair: {snippet(text)}")
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    trimmed = text.strip()
    if trimmed and trimmed != text:
        report(problems, "untrimmed-text", where, f"{name} has white space at its ends: {snippet(text)}")
    # str.splitlines also breaks at form feeds and the like, none of which may be inside a text of one line.
    parts = trimmed.splitlines()
    if len(parts) > 1:
        report(problems, "line-break", where, f"{name} holds a line break: {snippet(text)}")
        trimmed = " ".join(part.strip() for part in parts if part.strip())
    return trimmed


def clean_references(texts: Iterable[object], where: str, problems: list[Problem]) -> tuple[str, ...]:
    """The references among the texts of a clip."""
    references: list[str] = []
    seen: set[str] = set()
    for text in texts:
        reference = clean(text, where, problems, "the reference")
        if not reference:
            report(problems, "empty-reference", where, "a reference without text")
            continue
        if reference in seen:
            report(problems, "duplicate-reference", where, f"the same reference again: {snippet(reference)}")
        seen.add(reference)
        references.append(reference)
    return tuple(references)


def checked(clip: Clip, where: str, problems: list[Problem]) -> Clip:
    """The clip itself, after its times were looked at."""
    if clip.end_s <= clip.start_s:
        report(problems, "end-before-start", where, f"{clip.id}: ends at {clip.end_s} s, starts at {clip.start_s} s")
    if clip.start_s < 0:
        report(problems, "negative-start", where, f"{clip.id}: starts at {clip.start_s} s")
    if clip.stream_s is not None and clip.start_s >= clip.stream_s:
        report(problems, "start-past-stream", where, f"{clip.id}: starts at {clip.start_s} s of {clip.stream_s} s")
    elif clip.stream_s is not None and clip.end_s > clip.stream_s:
        report(problems, "end-past-stream", where, f"{clip.id}: ends at {clip.end_s} s of {clip.stream_s} s")
    return clip


def digest(files: Iterable[Path], root: Path) -> str:
    """sha256 of what `sha256sum` prints for the files, by name relative to the root: the same wherever they lie."""
    total = hashlib.sha256()
    base = root if root.is_dir() else root.parent
    for name, path in sorted((path.relative_to(base).as_posix(), path) for path in files):
        try:
            with path.open("rb") as file:
                one = hashlib.sha256()
                while block := file.read(1 << 20):
                    one.update(block)
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from None
        total.update(f"{one.hexdigest()}  {name}\n".encode())
    return total.hexdigest()
