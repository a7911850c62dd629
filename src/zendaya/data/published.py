"""Published files, read as published: lines and JSON, the problems found in them, and their digest."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zendaya.errors import CorpusError
from zendaya.files import file_digest
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
"""Every kind of problem that a reader reports, and how it is handled."""

MAX_LINE_BYTES = 1 << 26
"""Largest line that is read: the longest published one, all of ActivityNet's train.json, has 4 MB."""


class Malformed(Exception):  # noqa: N818  (never leaves the readers: it becomes a Problem)
    """A record that cannot be used, with the value it holds instead, and the kind of problem it is."""

    def __init__(self, detail: str, *got: object, kind: str = "malformed") -> None:
        super().__init__(": got ".join([detail, *map(snippet, got)]))
        self.kind = kind


def report(problems: list[Problem], kind: str, where: str, detail: str) -> None:
    """Add a problem of a known kind."""
    assert kind in KINDS, f"{kind} is not in KINDS, which says how it is handled"
    problems.append(Problem(kind, where, detail))


@contextlib.contextmanager
def skipping(problems: list[Problem], where: str) -> Iterator[None]:
    """Report a Malformed record and skip the rest of the block, so that the record gives no clip."""
    try:
        yield
    except Malformed as error:
        report(problems, error.kind, where, str(error))


def add_new(seen: set[Any], key: object) -> None:
    """Add an id to those seen so far; an id that occurs twice is Malformed."""
    if key in seen:
        raise Malformed(f"{snippet(key)} occurs twice", kind="duplicate-id")
    seen.add(key)


def snippet(value: object, width: int = 60) -> str:
    """A value from a file for a message: one line, no control characters, shortened."""
    text = ascii(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def found(folder: Path, names: Iterable[str], what: str, where_from: str) -> list[Path]:
    """The named files in a folder, plain or else gzipped; at least one must exist."""
    names = list(names)
    if not folder.is_dir():
        raise CorpusError(f"{folder}: no such folder; expected the one with {what} ({', '.join(names)}): {where_from}")
    both = [(folder / name, folder / f"{name}.gz") for name in names]
    paths = [plain if plain.is_file() else zipped for plain, zipped in both if plain.is_file() or zipped.is_file()]
    if not paths:
        raise CorpusError(f"{folder}: holds none of {', '.join(names)}; expected {what}: {where_from}")
    return paths


def lines(path: Path, problems: list[Problem], label: str | None = None) -> Iterator[tuple[str, str]]:
    """(where, text) of each line, plain or gzipped; only a newline ends a line."""
    for number, raw in enumerate(_raw_lines(path), 1):
        where = f"{label or path.name}:{number}"
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
        with path.open("rb") as file:
            # By the first bytes, not the name: files are unzipped under the old name, or zipped under it.
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise CorpusError(f"{path}: line {number} is longer than {MAX_LINE_BYTES >> 20} MB; expected one annotation per line")
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorpusError(f"{path}: damaged gzip after line {number} ({error}); download the file again") from None
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from None


class Fields(dict[str, Any]):
    """A published record; a field that is missing or of another type makes it Malformed."""

    owner = ""

    def value(self, name: str) -> Any:
        if name not in self:
            raise Malformed(f"no field {name!r}")
        return self[name]

    def name(self, name: str) -> str:
        """A printable text that is not blank: an id, a split, a path."""
        value = self.value(name)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise Malformed(f"{self.owner}{name} must be a printable text", value)
        return value

    def number(self, name: str) -> float:
        return as_number(self.value(name), self.owner + name)

    def count(self, name: str) -> int:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
            raise Malformed(f"{self.owner}{name} must be an integer, at least 0", value)
        return value

    def array(self, name: str) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, list):
            raise Malformed(f"{self.owner}{name} must be a list", value)
        return value


def json_lines(path: Path, problems: list[Problem]) -> Iterator[tuple[str, Fields]]:
    """(where, object) of each line of a JSONL file."""
    for where, text in lines(path, problems):
        with skipping(problems, where):
            if not text.strip():
                raise Malformed("the line is empty", kind="blank-line")
            record = _parse(text, Malformed)
            if not isinstance(record, dict):
                raise Malformed("expected a JSON object", text)
            yield where, Fields(record)


def json_object(path: Path, problems: list[Problem], label: str | None = None) -> dict[str, Any]:
    """The one object of a JSON file; a repeated key is reported."""
    text = "\n".join(line for _, line in lines(path, problems, label))

    def merge(items: list[tuple[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for key, value in items:
            if key in merged:
                report(problems, "duplicate-key", f"{label or path.name}:{snippet(key)}", "the key occurs twice")
            merged[key] = value
        return merged

    record = _parse(text, lambda reason: CorpusError(f"{path}: {reason}; download the file again"), object_pairs_hook=merge)
    if not isinstance(record, dict) or not record:
        raise CorpusError(f"{path}: expected a JSON object with one key per annotation: got {snippet(record)}")
    return record


def json_items(path: Path, problems: list[Problem], label: str | None = None) -> Iterator[tuple[str, str, Fields]]:
    """(where, key, object) of each annotation in the one object of a JSON file."""
    for key, value in json_object(path, problems, label).items():
        where = f"{label or path.name}:{snippet(key)}"
        with skipping(problems, where):
            yield where, Fields(key=key).name("key"), as_object(value, "the annotation")


def _parse(text: str, error_of: Callable[[str], Exception], **options: Any) -> Any:
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise error_of("not JSON: nested too deep") from None
    except ValueError as error:
        raise error_of(f"not JSON: {error}") from None


def unreadable(path: Path, expected: str, problems: Sequence[Problem]) -> CorpusError:
    """The error for a file without any usable record."""
    first = next((f" (first: {p.where}: {p.detail})" for p in problems if p.kind == "malformed" and path.name in p.where), "")
    return CorpusError(f"{path}: expected {expected}: got {'no line of that format' + first if path.stat().st_size else 'an empty file'}")


def as_object(value: object, name: str) -> Fields:
    """The value, which must be an object; errors about its fields carry its name."""
    if not isinstance(value, dict):
        raise Malformed(f"{name} must be an object", value)
    fields = Fields(value)
    fields.owner = f"{name}'s "
    return fields


def as_number(value: object, name: str) -> float:
    """The value, which must be a finite number or the text of one."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"{name} must be a number", value)
    # The first test is for integers beyond the range of floats, on which isfinite fails.
    if abs(value) > 1 << 53 or not math.isfinite(value):
        raise Malformed(f"{name} must be finite", value)
    return float(value)


def clean(text: object, where: str, problems: list[Problem], name: str = "the text") -> str:
    """A text for training and scoring: no white space at its ends, no line breaks; otherwise as published."""
    if not isinstance(text, str):
        raise Malformed(f"{name} must be a text", text)
    try:
        text.encode()
    except UnicodeEncodeError:
        report(problems, "bad-text", where, f"{name} has a lone surrogate: {snippet(text)}")
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    trimmed = text.strip()
    if trimmed and trimmed != text:
        report(problems, "untrimmed-text", where, f"{name} has white space at its ends: {snippet(text)}")
    parts = trimmed.splitlines()  # it also splits at form feeds and the like, which a text of one line must not have
    if len(parts) > 1:
        report(problems, "line-break", where, f"{name} has a line break: {snippet(text)}")
        trimmed = " ".join(part.strip() for part in parts if part.strip())
    return trimmed


def clean_references(texts: Iterable[object], where: str, problems: list[Problem]) -> tuple[str, ...]:
    """The references of a clip, cleaned; empty ones are left out."""
    references: list[str] = []
    for text in texts:
        reference = clean(text, where, problems, "the reference")
        if not reference:
            report(problems, "empty-reference", where, "the reference is empty")
            continue
        if reference in references:
            report(problems, "duplicate-reference", where, f"the same reference again: {snippet(reference)}")
        references.append(reference)
    return tuple(references)


def checked(clip: Clip, where: str, problems: list[Problem], seen: set[str] | None = None) -> Clip:
    """The clip, unchanged; impossible times are reported, and an id among those seen is Malformed."""
    if seen is not None:
        add_new(seen, clip.id)
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
    """sha256 of the output of `sha256sum` for the files, by their names relative to the root."""
    total, base = hashlib.sha256(), root if root.is_dir() else root.parent
    for name, path in sorted((path.relative_to(base).as_posix(), path) for path in files):
        try:
            total.update(f"{file_digest(path)}  {name}\n".encode())
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from None
    return total.hexdigest()
