"""LibriSpeech utterances joined to about 30 s: the text-dense geometry of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from zendaya.data.corpora import librispeech
from zendaya.data.published import Malformed, add_new, checked, clean_references, json_lines, report, skipping, unreadable
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "librispeech-long30"
NEEDS = "manifest.jsonl and long30.jsonl (id, split, idx, dur, text per line; idx are lines of the manifest from 0)"

_MAX_DURATION_ERROR_S = 0.05
"""Joined durations may differ by the rounding of their parts."""


def files(path: Path) -> list[Path]:
    """The manifest and the file that joins its utterances."""
    published = [path / "manifest.jsonl", path / "long30.jsonl"]
    for file in published:
        if not file.is_file():
            raise CorpusError(f"{file}: no such file; expected {NEEDS}")
    return published


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip per line of long30.jsonl: consecutive utterances of a chapter."""
    manifest, joined = files(path)
    by_line = {int(where.rpartition(":")[2]) - 1: clip for where, clip in librispeech.located_clips(path, [manifest], problems)}
    seen: set[str] = set()
    for where, record in json_lines(joined, problems):
        with skipping(problems, where):
            identity, indices = record.name("id"), record.array("idx")
            parts = tuple(by_line[index] for index in indices if type(index) is int and index in by_line)
            if not parts or len(parts) < len(indices):
                raise Malformed(f"idx must be lines of {manifest.name} that can be read, from 0", indices)
            if len({(part.stream, part.split) for part in parts}) > 1 or any(a.end_s != b.start_s for a, b in pairwise(parts)):
                raise Malformed("idx must be consecutive utterances of one chapter", indices)
            split, duration_s = record.name("split"), record.number("dur")
            references = clean_references([record.value("text")], where, problems)
            add_new(seen, identity)
            start_s, end_s = parts[0].start_s, parts[-1].end_s
            if abs(duration_s - (end_s - start_s)) > _MAX_DURATION_ERROR_S:
                detail = f"{identity}: dur is {duration_s} s, its utterances last {end_s - start_s:.3f} s"
                report(problems, "wrong-duration", where, detail)
            if references != (" ".join(part.references[0] for part in parts if part.references),) or split != parts[0].split:
                report(problems, "disagrees", where, f"{identity}: text or split differs from its utterances")
            clip = Clip(
                corpus=NAME, id=identity, split=split, stream=parts[0].stream, references=references, start_s=start_s, end_s=end_s,
                media_start_s=start_s, group=parts[0].group, parts=parts,
            )  # fmt: skip
            yield checked(clip, where, problems)
    if not seen:
        raise unreadable(joined, "lines with id, split, idx, dur and text", problems)


CORPUS = replace(
    librispeech.CORPUS, name=NAME, task="transcription of utterances joined to about 30 s", needs=NEEDS, files=files, clips=clips
)
