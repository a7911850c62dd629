"""A user's own data: a JSONL manifest, one clip a line, with the field names of Clip."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zendaya.data.corpora.base import Corpus
from zendaya.data.published import (
    Malformed,
    as_count,
    as_list,
    as_name,
    as_number,
    checked,
    clean,
    clean_references,
    get,
    json_lines,
    report,
    snippet,
    unreadable,
)
from zendaya.errors import CorpusError
from zendaya.files import write_atomically
from zendaya.records import Clip, Problem

NAME = "manifest"
NEEDS = "a .jsonl file with id, references (or text) and media, start_s, end_s (or source) a line; see docs/corpora.md"
WHERE = "you write it"

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
    """One clip a line, in file order."""
    files(path)
    seen: set[tuple[str, str]] = set()
    for where, record in json_lines(path, problems):
        for name in record.keys() - set(FIELDS):
            report(problems, "unknown-field", where, f"{snippet(name)}; the fields are {', '.join(FIELDS)}")
        try:
            clip = _clip(record, where, problems)
        except Malformed as error:
            report(problems, "malformed", where, str(error))
            continue
        if (clip.split, clip.id) in seen:
            report(problems, "duplicate-id", where, f"{snippet(clip.id)} is there twice in {snippet(clip.split)}")
            continue
        seen.add((clip.split, clip.id))
        if clip.media and not (path.parent / clip.media).is_file():
            report(problems, "missing-media", where, f"{snippet(clip.media)} is not there, seen from the folder of the manifest")
        if not clip.media and not clip.source:
            report(problems, "empty-source", where, f"{snippet(clip.id)}: a source without text")
        yield checked(clip, where, problems) if clip.media else clip
    if not seen:
        raise unreadable(path, "a JSON object a line with id, references and media or source", problems)


def _clip(record: dict[str, Any], where: str, problems: list[Problem]) -> Clip:
    identity = as_name(get(record, "id"), "id")
    media = as_name(record["media"], "media") if "media" in record else ""
    source = clean(record["source"], where, problems, "source") if "source" in record else ""
    if not media and "source" not in record:
        raise Malformed("neither media nor source: one of them is what the clip is read from")
    if media and "end_s" not in record:
        raise Malformed("no field 'end_s': a clip of a media file needs its end in seconds")
    references = as_list(record["references"], "references") if "references" in record else [get(record, "text")]
    start_s = as_number(record.get("start_s", 0), "start_s")
    stream = as_name(record.get("stream", media or identity), "stream")
    if media and stream != media and "media_start_s" not in record:
        raise Malformed("no field 'media_start_s': a stream other than the media needs the stream time at which the media begins")
    return Clip(
        corpus=NAME,
        id=identity,
        split=as_name(record.get("split", "train"), "split"),
        stream=stream,
        references=clean_references(references, where, problems),
        start_s=start_s,
        end_s=as_number(record.get("end_s", start_s), "end_s"),
        media=media,
        media_start_s=as_number(record.get("media_start_s", 0), "media_start_s"),
        stream_s=as_number(record["stream_s"], "stream_s") if "stream_s" in record else None,
        source=source,
        group=as_name(record["group"], "group") if "group" in record else "",
        num_source_tokens=as_count(record["num_source_tokens"], "num_source_tokens") if "num_source_tokens" in record else None,
        feature_row=as_count(record["feature_row"], "feature_row") if "feature_row" in record else None,
    )


def write(clips: Iterable[Clip], path: Path) -> None:
    """The clips as a manifest; what is at its default is left out."""
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
    name=NAME, task="your own data", modality="any", metrics=("bleu",), needs=NEEDS, where=WHERE,
    licence="yours", files=files, clips=clips,
)  # fmt: skip
