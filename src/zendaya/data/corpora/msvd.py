"""MSVD, or YouTube2Text (Chen and Dolan 2011): 1,970 clips of YouTube videos with about forty captions each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from zendaya.data.corpora.base import CAPTION_METRICS, Corpus
from zendaya.data.published import Fields, Malformed, checked, clean_references, found, json_lines, lines, report, skipping, unreadable
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "msvd"
NEEDS = "msvd.jsonl (id, video, split, dur, F, captions per line), or AllVideoDescriptions.txt with youtube_mapping.txt"
WHERE = "captions and videos: https://www.cs.utexas.edu/~ml/clamp/videoDescription/; mapping: with the common split (vid1 … vid1970)"

FEATURE_RATE = 3.0
"""Source tokens per second of the features that msvd.jsonl counts in F."""

_VIDEO = re.compile(r"(.+)_(\d{1,9})_(\d{1,9})")


def files(path: Path) -> list[Path]:
    """The published files in the folder: msvd.jsonl if it exists, else the two text files."""
    names = ["msvd.jsonl", "AllVideoDescriptions.txt", "youtube_mapping.txt"]
    published = {file.name.removesuffix(".gz"): file for file in found(path, names, "the MSVD captions", WHERE)}
    if names[0] in published:
        return [published[names[0]]]
    for name in names[1:]:
        if name not in published:
            raise CorpusError(f"{path / name}: no such file; {names[1]} has the captions, {names[2]} the numbers for the split: {WHERE}")
    return [published[name] for name in names[1:]]


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip per video, with all its captions, in the order of the features."""
    published = files(path)
    seen: set[str] = set()
    for where, row, record in _jsonl(published[0], problems) if len(published) == 1 else _texts(published[0], published[1], problems):
        with skipping(problems, where):
            yield checked(_clip(record, row, where, problems), where, problems, seen)
    if not seen:
        raise unreadable(published[0], "captions of videos", problems)


def _jsonl(file: Path, problems: list[Problem]) -> Iterator[tuple[str, int, Fields]]:
    for where, record in json_lines(file, problems):
        # The features are in file order: a line that cannot be read still has its row.
        yield where, int(where.rpartition(":")[2]) - 1, record


def _texts(captions_file: Path, mapping_file: Path, problems: list[Problem]) -> Iterator[tuple[str, int, Fields]]:
    """Records as in msvd.jsonl, from `VIDEO caption` lines and `VIDEO vidN` lines."""
    captions: dict[str, list[str]] = {}
    for where, text in lines(captions_file, problems):
        video, _, caption = text.partition(" ")
        with skipping(problems, where):
            if not text.startswith("#"):
                if not caption or not _VIDEO.fullmatch(video):
                    raise Malformed("expected `VIDEO caption`", text, kind="malformed" if text.strip() else "blank-line")
                captions.setdefault(video, []).append(caption)
    rows: list[tuple[int, str, str]] = []
    for where, text in lines(mapping_file, problems):
        match = re.fullmatch(r"(\S+) vid(\d{1,6})", text.strip())
        with skipping(problems, where):
            if match is None:
                raise Malformed("expected `VIDEO vidN`", text, kind="malformed" if text.strip() else "blank-line")
            if match[1] not in captions:
                raise Malformed(f"no caption in {captions_file.name} for this video", match[1], kind="no-text")
            rows.append((int(match[2]), match[1], where))
    for video in captions.keys() - {video for _, video, _ in rows}:
        report(problems, "unpaired", captions_file.name, f"{video!r} has no number in {mapping_file.name}")
    for number, video, where in sorted(rows):
        # The split of Venugopalan et al. 2015, which all later work uses.
        split = "train" if number <= 1200 else "val" if number <= 1300 else "test"
        yield where, number - 1, Fields(id=f"vid{number}", video=video, split=split, captions=captions[video])


def _clip(record: Fields, row: int, where: str, problems: list[Problem]) -> Clip:
    identity, video = record.name("id"), record.name("video")
    match = _VIDEO.fullmatch(video)
    if match is None:
        raise Malformed("video must be NAME_start_end", video)
    start_s, end_s = float(match[2]), float(match[3])
    split, captions = record.name("split"), record.array("captions")
    num_source_tokens = record.count("F") if "F" in record else None
    if "dur" in record and record.number("dur") != end_s - start_s:
        report(problems, "wrong-duration", where, f"{identity}: dur is {record['dur']} s, the times in its name give {end_s - start_s} s")
    if num_source_tokens is not None and num_source_tokens + 1 < FEATURE_RATE * (end_s - start_s):
        detail = f"{identity}: {num_source_tokens} source tokens cover {num_source_tokens / FEATURE_RATE:.1f} s of {end_s - start_s} s"
        report(problems, "features-short", where, detail)
    return Clip(
        corpus=NAME, id=identity, split=split, stream=match[1], references=clean_references(captions, where, problems), start_s=start_s,
        end_s=end_s, media=f"{video}.avi", media_start_s=start_s, num_source_tokens=num_source_tokens, feature_row=row,
    )  # fmt: skip


CORPUS = Corpus(
    name=NAME, task="captioning of short videos", modality="video", metrics=CAPTION_METRICS, needs=NEEDS, where=WHERE,
    licence="research use", files=files, clips=clips,
)  # fmt: skip
