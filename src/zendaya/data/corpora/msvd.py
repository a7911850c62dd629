"""MSVD, or YouTube2Text (Chen and Dolan 2011): 1,970 clips cut out of YouTube videos, some forty captions each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zendaya.data.corpora.base import CAPTION_METRICS, Corpus
from zendaya.data.published import (
    Malformed,
    as_count,
    as_list,
    as_name,
    as_number,
    checked,
    clean_references,
    found,
    get,
    json_lines,
    lines,
    report,
    snippet,
    unreadable,
)
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "msvd"
NEEDS = "msvd.jsonl (id, video, split, dur, F, captions a line), or AllVideoDescriptions.txt with youtube_mapping.txt"
WHERE = (
    "captions and videos: https://www.cs.utexas.edu/~ml/clamp/videoDescription/; the mapping comes with the common split (vid1 … vid1970)"
)

FEATURE_RATE = 3.0
"""Source tokens a second of the features that msvd.jsonl counts in F."""

_VIDEO = re.compile(r"(.+)_(\d+)_(\d+)")


def files(path: Path) -> list[Path]:
    """The published files in the folder: msvd.jsonl if it is there, else the two text files."""
    names = ["msvd.jsonl", "AllVideoDescriptions.txt", "youtube_mapping.txt"]
    published = {file.name.removesuffix(".gz"): file for file in found(path, names, "the MSVD captions", WHERE)}
    if names[0] in published:
        return [published[names[0]]]
    for name in names[1:]:
        if name not in published:
            raise CorpusError(
                f"{path / name}: no such file; captions are in {names[1]}, the numbers that say the split in {names[2]}: {WHERE}"
            )
    return [published[name] for name in names[1:]]


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip a video, with all its captions, in the order of the features."""
    published = files(path)
    seen: set[str] = set()
    for where, row, record in _jsonl(published[0], problems) if len(published) == 1 else _texts(published[0], published[1], problems):
        try:
            clip = _clip(record, row, where, problems)
        except Malformed as error:
            report(problems, "malformed", where, str(error))
            continue
        if clip.id in seen:
            report(problems, "duplicate-id", where, f"{snippet(clip.id)} is there twice")
            continue
        seen.add(clip.id)
        yield checked(clip, where, problems)
    if not seen:
        raise unreadable(published[0], "captions of videos", problems)


def _jsonl(file: Path, problems: list[Problem]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for where, record in json_lines(file, problems):
        # The features are in file order: a line that cannot be read still has its row.
        yield where, int(where.rpartition(":")[2]) - 1, record


def _texts(captions_file: Path, mapping_file: Path, problems: list[Problem]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Records as in msvd.jsonl, from `VIDEO caption` lines and `VIDEO vidN` lines."""
    captions: dict[str, list[str]] = {}
    for where, text in lines(captions_file, problems):
        if text.startswith("#"):
            continue
        video, _, caption = text.partition(" ")
        if not caption or not _VIDEO.fullmatch(video):
            report(problems, "malformed" if text.strip() else "blank-line", where, f"not `VIDEO caption`: {snippet(text)}")
            continue
        captions.setdefault(video, []).append(caption)
    rows: list[tuple[int, str, str]] = []
    for where, text in lines(mapping_file, problems):
        match = re.fullmatch(r"(\S+) vid(\d{1,6})", text.strip())
        if match is None:
            report(problems, "malformed" if text.strip() else "blank-line", where, f"not `VIDEO vidN`: {snippet(text)}")
        elif match[1] not in captions:
            report(problems, "no-text", where, f"{snippet(match[1])} has no caption in {captions_file.name}")
        else:
            rows.append((int(match[2]), match[1], where))
    for video in captions.keys() - {video for _, video, _ in rows}:
        report(problems, "unpaired", captions_file.name, f"{snippet(video)} has no number in {mapping_file.name}")
    for number, video, where in sorted(rows):
        # The split of Venugopalan et al. 2015, which all later work reports on.
        split = "train" if number <= 1200 else "val" if number <= 1300 else "test"
        yield where, number - 1, {"id": f"vid{number}", "video": video, "split": split, "captions": captions[video]}


def _clip(record: dict[str, Any], row: int, where: str, problems: list[Problem]) -> Clip:
    identity = as_name(get(record, "id"), "id")
    video = as_name(get(record, "video"), "video")
    match = _VIDEO.fullmatch(video)
    if match is None:
        raise Malformed(f"video must be NAME_start_end: got {snippet(video)}")
    start_s, end_s = as_number(match[2], "start"), as_number(match[3], "end")
    split, captions = as_name(get(record, "split"), "split"), as_list(get(record, "captions"), "captions")
    num_source_tokens = as_count(record["F"], "F") if "F" in record else None
    if "dur" in record and as_number(record["dur"], "dur") != end_s - start_s:
        report(problems, "wrong-duration", where, f"{identity}: dur is {record['dur']} s, the times in its name say {end_s - start_s} s")
    if num_source_tokens is not None and num_source_tokens + 1 < FEATURE_RATE * (end_s - start_s):
        report(
            problems,
            "features-short",
            where,
            f"{identity}: {num_source_tokens} source tokens cover {num_source_tokens / FEATURE_RATE:.1f} s of {end_s - start_s} s",
        )
    return Clip(
        corpus=NAME,
        id=identity,
        split=split,
        stream=match[1],
        references=clean_references(captions, where, problems),
        start_s=start_s,
        end_s=end_s,
        media=f"{video}.avi",
        media_start_s=start_s,
        num_source_tokens=num_source_tokens,
        feature_row=row,
    )


CORPUS = Corpus(
    name=NAME, task="captioning of short videos", modality="video", metrics=CAPTION_METRICS, needs=NEEDS, where=WHERE,
    licence="research use", files=files, clips=clips,
)  # fmt: skip
