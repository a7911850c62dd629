"""A user's own data: a JSONL manifest, one clip per line, with the field names of Clip."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zendaya.data.corpora.base import Corpus
from zendaya.data.published import Fields, Malformed, add_new, checked, clean, clean_references, json_lines, report, skipping, unreadable
from zendaya.errors import CorpusError
from zendaya.files import write_atomically
from zendaya.records import Clip, Problem

NAME = "manifest"
NEEDS = "a .jsonl file with id, references (or text) and media, start_s, end_s (or source) per line; see docs/corpora.md"

_TEXTS = ("id", "split", "stream", "media", "source", "group")
_NUMBERS = ("start_s", "end_s", "media_start_s", "stream_s")
_COUNTS = ("num_source_tokens", "feature_row")
FIELDS = (*_TEXTS, *_NUMBERS, *_COUNTS, "references", "text")


def files(path: Path) -> list[Path]:
    """The manifest itself."""
    if not path.is_file():
        raise CorpusError(f"{path}: no such file; expected {NEEDS}")
    return [path]


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip per line, in file order."""
    files(path)
    seen: set[tuple[str, str]] = set()
    for where, record in json_lines(path, problems):
        for name in record.keys() - set(FIELDS):
            report(problems, "unknown-field", where, f"{name[:60]!r}; the fields are {', '.join(FIELDS)}")
        with skipping(problems, where):
            clip = _clip(record, where, problems)
            add_new(seen, (clip.split, clip.id))
            if clip.media and not (path.parent / clip.media).is_file():
                report(problems, "missing-media", where, f"{clip.media!r} does not exist, relative to the manifest's folder")
            if not clip.media and not clip.source:
                report(problems, "empty-source", where, f"{clip.id!r}: the source is empty")
            yield checked(clip, where, problems) if clip.media else clip
    if not seen:
        raise unreadable(path, "a JSON object per line with id, references and media or source", problems)


def _clip(record: Fields, where: str, problems: list[Problem]) -> Clip:
    identity = record.name("id")
    media = record.name("media") if "media" in record else ""
    source = clean(record["source"], where, problems, "source") if "source" in record else ""
    if not media and "source" not in record:
        raise Malformed("neither media nor source: a clip needs one of them")
    if media and "end_s" not in record:
        raise Malformed("no field 'end_s': a clip of a media file needs its end in seconds")
    if media and record.get("stream", media) != media and "media_start_s" not in record:
        raise Malformed("no field 'media_start_s': a stream other than the media needs the stream time at which the media begins")
    defaults = {"split": "train", "stream": media or identity, "start_s": 0, "end_s": record.get("start_s", 0), "media_start_s": 0}
    record = Fields(defaults | record)
    references = record.array("references") if "references" in record else [record.value("text")]
    return Clip(
        corpus=NAME, id=identity, split=record.name("split"), stream=record.name("stream"), media=media, source=source,
        references=clean_references(references, where, problems), start_s=record.number("start_s"), end_s=record.number("end_s"),
        media_start_s=record.number("media_start_s"), stream_s=record.number("stream_s") if "stream_s" in record else None,
        group=record.name("group") if "group" in record else "",
        num_source_tokens=record.count("num_source_tokens") if "num_source_tokens" in record else None,
        feature_row=record.count("feature_row") if "feature_row" in record else None,
    )  # fmt: skip


def write(clips: Iterable[Clip], path: Path) -> None:
    """Write clips as a manifest; fields at their defaults are left out."""
    lines = []
    for clip in clips:
        if clip.parts:
            raise CorpusError(f"{path}: a manifest holds no joined clips: got {clip.id!r}; write its parts instead")
        record: dict[str, Any] = {"id": clip.id, "split": clip.split, "stream": clip.stream, "references": list(clip.references)}
        optional = (*_TEXTS[3:], *_NUMBERS, *_COUNTS)
        record |= {name: value for name in optional if (value := getattr(clip, name)) not in ("", None)}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    write_atomically(path, "".join(lines).encode())


CORPUS = Corpus(
    name=NAME, task="your own data", modality="any", metrics=("bleu",), needs=NEEDS, where="you write it",
    licence="yours", files=files, clips=clips,
)  # fmt: skip
