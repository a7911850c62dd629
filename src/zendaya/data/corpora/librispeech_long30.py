"""LibriSpeech utterances joined to about 30 s: the text-dense geometry of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from zendaya.data.corpora import librispeech
from zendaya.data.corpora.librispeech import located_clips
from zendaya.data.published import (
    Malformed,
    as_count,
    as_list,
    as_name,
    as_number,
    checked,
    clean_references,
    get,
    json_lines,
    report,
    snippet,
    unreadable,
)
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "librispeech-long30"
NEEDS = "manifest.jsonl and long30.jsonl (id, split, idx, dur, text per line; idx are lines of the manifest from 0)"

_MAX_DURATION_ERROR_S = 0.05
"""Joined durations may differ by the rounding of their parts."""


def files(path: Path) -> list[Path]:
    """The manifest and the file that joins its utterances."""
    for name in ("manifest.jsonl", "long30.jsonl"):
        if not (path / name).is_file():
            raise CorpusError(f"{path / name}: no such file; expected {NEEDS}")
    return [path / "manifest.jsonl", path / "long30.jsonl"]


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip a line of long30.jsonl: consecutive utterances of a chapter joined to about 30 s, the text-dense geometry of the paper."""
    manifest, joined = files(path)
    by_line = {int(where.rpartition(":")[2]) - 1: clip for where, clip in located_clips(path, [manifest], problems)}
    seen: set[str] = set()
    for where, record in json_lines(joined, problems):
        try:
            identity = as_name(get(record, "id"), "id")
            indices = [as_count(index, "idx") for index in as_list(get(record, "idx"), "idx")]
            parts = tuple(by_line[index] for index in indices if index in by_line)
            if not parts or len(parts) < len(indices):
                raise Malformed(f"idx must be lines of {manifest.name} that can be read, from 0: got {snippet(indices)}")
            if len({(part.stream, part.split) for part in parts}) > 1 or any(a.end_s != b.start_s for a, b in pairwise(parts)):
                raise Malformed(f"idx must be consecutive utterances of one chapter: got {snippet(indices)}")
            split, duration_s = as_name(get(record, "split"), "split"), as_number(get(record, "dur"), "dur")
            references = clean_references([get(record, "text")], where, problems)
        except Malformed as error:
            report(problems, "malformed", where, str(error))
            continue
        if identity in seen:
            report(problems, "duplicate-id", where, f"{snippet(identity)} is there twice")
            continue
        seen.add(identity)
        if abs(duration_s - (parts[-1].end_s - parts[0].start_s)) > _MAX_DURATION_ERROR_S:
            report(
                problems,
                "wrong-duration",
                where,
                f"{identity}: dur is {duration_s} s, its utterances last {parts[-1].end_s - parts[0].start_s:.3f} s",
            )
        if references != (" ".join(part.references[0] for part in parts if part.references),) or split != parts[0].split:
            report(problems, "disagrees", where, f"{identity}: text or split is not that of its utterances")
        clip = Clip(
            corpus=NAME,
            id=identity,
            split=split,
            stream=parts[0].stream,
            references=references,
            start_s=parts[0].start_s,
            end_s=parts[-1].end_s,
            media_start_s=parts[0].start_s,
            group=parts[0].group,
            parts=parts,
        )
        yield checked(clip, where, problems)
    if not seen:
        raise unreadable(joined, "lines with id, split, idx, dur and text", problems)


CORPUS = replace(
    librispeech.CORPUS, name=NAME, task="transcription of utterances joined to about 30 s", needs=NEEDS, files=files, clips=clips
)
