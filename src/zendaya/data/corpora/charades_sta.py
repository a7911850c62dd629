"""Charades-STA (Gao et al. 2017): sentences for action segments of home videos, `VIDEO start end##sentence` a line."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from zendaya.data.corpora.base import CAPTION_METRICS, Corpus
from zendaya.data.published import Malformed, as_number, checked, clean_references, found, lines, report, snippet, unreadable
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "charades-sta"
SPLITS = ("train", "test")
NEEDS = "charades_sta_{train,test}.txt and Charades_v1_{train,test}.csv in one folder"
WHERE = "sentences: https://github.com/jiyanggao/TALL; csv files and videos: https://prior.allenai.org/projects/charades"

_LINE = re.compile(r"(\S+) (\S+) (\S+?)##(.*)")


def files(path: Path) -> list[Path]:
    """The published files in the folder: the sentences of each split with the csv that holds the lengths of its videos."""
    sentences = found(path, [f"charades_sta_{split}.txt" for split in SPLITS], "the Charades-STA sentences", WHERE)
    lengths = [path / f"Charades_v1_{_split(file)}.csv" for file in sentences]
    for file in lengths:
        if not file.is_file():
            raise CorpusError(f"{file}: no such file; the lengths of the videos are in it: {WHERE}")
    return [*sentences, *lengths]


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip a line, in file order: a segment several people described is as many clips, as in the paper's single-reference scores."""
    published = files(path)
    sentences = published[: len(published) // 2]
    for split in SPLITS:
        if not any(_split(file) == split for file in sentences):
            report(problems, "missing-split", f"charades_sta_{split}.txt", "no such file")
    for file, csv_file in zip(sentences, published[len(sentences) :], strict=True):
        yield from _split_clips(file, _lengths(csv_file, problems), problems)


def _split(file: Path) -> str:
    return file.name.removesuffix(".gz").removesuffix(".txt").removeprefix("charades_sta_")


def _lengths(file: Path, problems: list[Problem]) -> dict[str, float | None]:
    """Seconds of each video of the csv."""
    lengths: dict[str, float | None] = {}
    # A quoted script may hold line breaks: the csv module puts them together again from the lines.
    where = f"{file.name}:1"

    def texts() -> Iterator[str]:
        nonlocal where
        for where, text in lines(file, problems):  # noqa: B007
            yield text + "\n"

    rows = csv.DictReader(texts())
    try:
        if not {"id", "length"} <= set(rows.fieldnames or ()):
            raise CorpusError(f"{file}: expected a csv with the columns id and length: got {snippet(rows.fieldnames)}")
        for row in rows:
            video, length = row["id"], row["length"]
            if not video:
                report(problems, "malformed", where, "a row without an id")
                continue
            if video in lengths:
                report(problems, "duplicate-id", where, f"{snippet(video)} is there twice")
                continue
            try:
                lengths[video] = as_number(length, "length")
            except Malformed as error:
                report(problems, "unknown-length", where, f"{snippet(video)}: {error}")
                lengths[video] = None
    except csv.Error as error:
        raise CorpusError(f"{file}: not a csv after {where}: {error}; get the file again") from None
    return lengths


def _split_clips(file: Path, lengths: dict[str, float | None], problems: list[Problem]) -> Iterator[Clip]:
    seen: set[str] = set()
    num_clips = 0
    for where, text in lines(file, problems):
        if not text.strip():
            report(problems, "blank-line", where, "nothing on the line")
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            report(problems, "malformed", where, f"not `VIDEO start end##sentence`: {snippet(text)}")
            continue
        video, start, end, sentence = match.groups()
        try:
            start_s, end_s = as_number(start, "start"), as_number(end, "end")
        except Malformed as error:
            report(problems, "malformed", where, str(error))
            continue
        if text in seen:
            report(problems, "duplicate-line", where, f"the same line again: {snippet(text)}")
        seen.add(text)
        if video not in lengths:
            report(problems, "unknown-video", where, f"{snippet(video)} is not in the csv of its split")
        num_clips += 1
        yield checked(
            Clip(
                corpus=NAME,
                id=f"{video}/{where.rpartition(':')[2]}",
                split=_split(file),
                stream=video,
                references=clean_references([sentence], where, problems),
                start_s=start_s,
                end_s=end_s,
                media=f"{video}.mp4",
                stream_s=lengths.get(video),
            ),
            where,
            problems,
        )
    if not num_clips:
        raise unreadable(file, "lines `VIDEO start end##sentence`", problems)


CORPUS = Corpus(
    name=NAME, task="captioning of video segments", modality="video", metrics=CAPTION_METRICS, needs=NEEDS, where=WHERE,
    licence="Charades licence, non-commercial research", files=files, clips=clips,
)  # fmt: skip
