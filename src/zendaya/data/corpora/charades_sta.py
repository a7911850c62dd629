"""Charades-STA (Gao et al. 2017): sentences for action segments of home videos, one line `VIDEO start end##sentence` each."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from zendaya.data.corpora.base import CAPTION_METRICS, Corpus
from zendaya.data.published import Malformed, as_number, checked, clean_references, found, lines, report, skipping, snippet, unreadable
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "charades-sta"
SPLITS = ("train", "test")
WHERE = "sentences: https://github.com/jiyanggao/TALL; csv files and videos: https://prior.allenai.org/projects/charades"

_LINE = re.compile(r"(\S+) (\S+) (\S+?)##(.*)")


def files(path: Path) -> list[Path]:
    """The published files in the folder: the sentences of each split, then the csv files with the lengths of the videos."""
    sentences = found(path, [f"charades_sta_{split}.txt" for split in SPLITS], "the Charades-STA sentences", WHERE)
    lengths = [path / f"Charades_v1_{_split(file)}.csv" for file in sentences]
    for file in lengths:
        if not file.is_file():
            raise CorpusError(f"{file}: no such file; it has the lengths of the videos: {WHERE}")
    return [*sentences, *lengths]


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip per line, in file order: each description of a segment is a clip, as in the paper's single-reference scores."""
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
    where = f"{file.name}:1"

    def texts() -> Iterator[str]:  # the csv module joins lines again where a quoted script holds line breaks
        nonlocal where
        for where, text in lines(file, problems):  # noqa: B007
            yield text + "\n"

    rows = csv.DictReader(texts())
    try:
        if not {"id", "length"} <= set(rows.fieldnames or ()):
            raise CorpusError(f"{file}: expected a csv with the columns id and length: got {snippet(rows.fieldnames)}")
        for row in rows:
            with skipping(problems, where):
                video = row["id"]
                if not video:
                    raise Malformed("a row without an id")
                if video in lengths:
                    raise Malformed(f"{snippet(video)} occurs twice", kind="duplicate-id")
                lengths[video] = None
                try:
                    lengths[video] = as_number(row["length"], "length")
                except Malformed as error:
                    raise Malformed(f"{snippet(video)}: {error}", kind="unknown-length") from None
    except csv.Error as error:
        raise CorpusError(f"{file}: not a csv after {where}: {error}; download the file again") from None
    return lengths


def _split_clips(file: Path, lengths: dict[str, float | None], problems: list[Problem]) -> Iterator[Clip]:
    seen: set[str] = set()
    for where, text in lines(file, problems):
        with skipping(problems, where):
            if not text.strip():
                raise Malformed("the line is empty", kind="blank-line")
            match = _LINE.fullmatch(text)
            if match is None:
                raise Malformed("expected `VIDEO start end##sentence`", text)
            video, start_s, end_s = match[1], as_number(match[2], "start"), as_number(match[3], "end")
            if text in seen:
                report(problems, "duplicate-line", where, f"the same line again: {snippet(text)}")
            seen.add(text)
            if video not in lengths:
                report(problems, "unknown-video", where, f"{snippet(video)} is not in the csv of its split")
            clip = Clip(
                corpus=NAME, id=f"{video}/{where.rpartition(':')[2]}", split=_split(file), stream=video, media=f"{video}.mp4",
                references=clean_references([match[4]], where, problems), start_s=start_s, end_s=end_s, stream_s=lengths.get(video),
            )  # fmt: skip
            yield checked(clip, where, problems)
    if not seen:
        raise unreadable(file, "lines `VIDEO start end##sentence`", problems)


CORPUS = Corpus(
    name=NAME, task="captioning of video segments", modality="video", metrics=CAPTION_METRICS, where=WHERE, files=files, clips=clips,
    needs="charades_sta_{train,test}.txt and Charades_v1_{train,test}.csv in one folder",
    licence="Charades licence, non-commercial research",
)  # fmt: skip
