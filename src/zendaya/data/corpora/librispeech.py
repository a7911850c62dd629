"""LibriSpeech (Panayotov et al. 2015): read utterances of book chapters, as openslr.org has it or as one manifest.jsonl."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zendaya.data.corpora.base import Corpus
from zendaya.data.published import (
    Malformed,
    as_name,
    as_number,
    checked,
    clean_references,
    get,
    json_lines,
    lines,
    report,
    snippet,
    unreadable,
)
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "librispeech"
NEEDS = "the folders of openslr.org (dev-clean/SPEAKER/CHAPTER/*.trans.txt, *.flac), or manifest.jsonl (id, split, dur, text, audio)"
WHERE = "https://www.openslr.org/12"

_ID = re.compile(r"(\d+)-(\d+)-(\d+)")


@dataclass(frozen=True)
class _Utterance:
    where: str
    id: str
    split: str
    duration_s: float
    text: str
    audio: str


def files(path: Path) -> list[Path]:
    """The published files: the manifest if it is there, else the transcripts of all chapters."""
    manifest = path / "manifest.jsonl"
    if manifest.is_file():
        return [manifest]
    # The folder given is LibriSpeech/, or one of its subsets.
    transcripts = sorted([*path.glob("*/*/*/*.trans.txt"), *path.glob("*/*/*.trans.txt")])
    if not transcripts:
        raise CorpusError(f"{path}: holds neither manifest.jsonl nor SUBSET/SPEAKER/CHAPTER/*.trans.txt; get LibriSpeech from {WHERE}")
    return transcripts


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip an utterance, in file order; a chapter is a stream of its utterances back to back, as no times in it are published."""
    for _, clip in located_clips(path, files(path), problems):
        yield clip


def located_clips(path: Path, published: list[Path], problems: list[Problem]) -> Iterator[tuple[str, Clip]]:
    """Each clip with the place of its line in the published files."""
    manifest = published[0].name == "manifest.jsonl"
    utterances = list(_manifest(path, published[0], problems) if manifest else _folders(path, published, problems))
    if not utterances:
        raise unreadable(published[0], "lines with id, split, dur, text and audio" if manifest else "lines `ID TEXT`", problems)
    for utterance, (stream, start_s) in zip(utterances, _places(utterances, problems), strict=True):
        clip = Clip(
            corpus=NAME,
            id=utterance.id,
            split=utterance.split,
            stream=stream,
            references=clean_references([utterance.text], utterance.where, problems),
            start_s=start_s,
            end_s=_sum_s(start_s, utterance.duration_s),
            media=utterance.audio,
            media_start_s=start_s,
            group=utterance.id.partition("-")[0],
        )
        yield utterance.where, checked(clip, utterance.where, problems)


def _sum_s(start_s: float, duration_s: float) -> float:
    # To the microsecond, far below one sample: sums of floats would show their last places.
    return round(start_s + duration_s, 6)


def _places(utterances: list[_Utterance], problems: list[Problem]) -> list[tuple[str, float]]:
    """The stream and the start of each utterance: a chapter's own, in the order of their numbers."""
    places = [("", 0.0)] * len(utterances)
    chapters: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for index, utterance in enumerate(utterances):
        chapter, _, number = utterance.id.rpartition("-")
        chapters[utterance.split, chapter].append((int(number), index))
    for (_, chapter), members in chapters.items():
        members.sort()
        stream, start_s, expected = chapter, 0.0, members[0][0]
        for position, index in members:
            if position != expected:
                where = utterances[index].where
                report(
                    problems,
                    "gap",
                    where,
                    f"{utterances[index].id}: the utterances {expected:04} to {position - 1:04} before it are not there",
                )
                stream, start_s = f"{chapter}+{position:04}", 0.0
            places[index] = stream, start_s
            start_s = _sum_s(start_s, max(0.0, utterances[index].duration_s))
            expected = position + 1
    return places


def _manifest(path: Path, file: Path, problems: list[Problem]) -> Iterator[_Utterance]:
    seen: set[str] = set()
    for where, record in json_lines(file, problems):
        try:
            utterance = _Utterance(
                where,
                _identity(get(record, "id")),
                as_name(get(record, "split"), "split"),
                as_number(get(record, "dur"), "dur"),
                get(record, "text"),
                as_name(get(record, "audio"), "audio"),
            )
            if not isinstance(utterance.text, str):
                raise Malformed(f"text must be a text: got {snippet(utterance.text)}")
        except Malformed as error:
            report(problems, "malformed", where, str(error))
            continue
        if utterance.id in seen:
            report(problems, "duplicate-id", where, f"{utterance.id} is there twice")
            continue
        seen.add(utterance.id)
        if not (path / utterance.audio).is_file():
            report(problems, "missing-media", where, f"{snippet(utterance.audio)} is not in the folder")
        yield utterance


def _folders(path: Path, transcripts: list[Path], problems: list[Problem]) -> Iterator[_Utterance]:
    seen: set[str] = set()
    for file in transcripts:
        label = file.relative_to(path).as_posix()
        for where, line in lines(file, problems, label):
            identity, _, text = line.partition(" ")
            if not _ID.fullmatch(identity):
                report(problems, "malformed" if line.strip() else "blank-line", where, f"not `ID TEXT`: {snippet(line)}")
                continue
            if identity in seen:
                report(problems, "duplicate-id", where, f"{identity} is there twice")
                continue
            seen.add(identity)
            audio = file.parent / f"{identity}.flac"
            try:
                duration_s = flac_duration_s(audio)
            except Malformed as error:
                report(problems, "missing-media", where, f"{audio.name}: {error}")
                duration_s = 0.0
            yield _Utterance(where, identity, file.parents[2].name, duration_s, text, audio.relative_to(path).as_posix())


def _identity(value: object) -> str:
    name = as_name(value, "id")
    if not _ID.fullmatch(name):
        raise Malformed(f"id must be SPEAKER-CHAPTER-NUMBER: got {snippet(name)}")
    return name


def flac_duration_s(file: Path) -> float:
    """Seconds of a FLAC file by its header: the STREAMINFO block, 34 bytes that follow the first 8 (RFC 9639, section 8.2)."""
    try:
        with file.open("rb") as opened:
            head = opened.read(42)
    except OSError as error:
        raise Malformed(error.strerror or str(error)) from None
    if len(head) < 42 or head[:4] != b"fLaC" or head[4] & 0x7F:
        raise Malformed("not a FLAC file")
    # 20 bits of sample rate, 3 of channels, 5 of depth, 36 of samples.
    packed = int.from_bytes(head[18:26], "big")
    rate, num_samples = packed >> 44, packed & (1 << 36) - 1
    if not rate or not num_samples:
        raise Malformed("its header does not say how long it is")
    return num_samples / rate


CORPUS = Corpus(
    name=NAME, task="transcription of utterances", modality="audio", metrics=("wer",), needs=NEEDS, where=WHERE, licence="CC BY 4.0",
    files=files, clips=clips,
)  # fmt: skip
