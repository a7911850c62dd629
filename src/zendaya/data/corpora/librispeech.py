"""LibriSpeech (Panayotov et al. 2015): read utterances of book chapters, from the folders of openslr.org or one manifest.jsonl."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zendaya.data.corpora.base import Corpus
from zendaya.data.published import Fields, Malformed, add_new, checked, clean_references, json_lines, lines, report, skipping, unreadable
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "librispeech"
NEEDS = "the folders of openslr.org (dev-clean/SPEAKER/CHAPTER/*.trans.txt, *.flac), or manifest.jsonl (id, split, dur, text, audio)"
WHERE = "https://www.openslr.org/12"

_ID = re.compile(r"(\d+)-(\d+)-(\d+)")


@dataclass(frozen=True)
class SpokenLine:
    """An utterance as published, and the place of its line."""

    where: str
    id: str
    split: str
    duration_s: float
    text: str
    audio: str
    speaker: str

    def clip(self, corpus: str, stream: str, start_s: float, problems: list[Problem]) -> Clip:
        """The clip of a corpus that it is, from a moment of a stream on."""
        found = Clip(
            corpus=corpus, id=self.id, split=self.split, stream=stream, start_s=start_s, media_start_s=start_s,
            references=clean_references([self.text], self.where, problems), end_s=sum_s(start_s, self.duration_s),
            media=self.audio, group=self.speaker,
        )  # fmt: skip
        return checked(found, self.where, problems)


def files(path: Path) -> list[Path]:
    """The published files: the manifest if there is one, else the transcripts of all chapters."""
    manifest = path / "manifest.jsonl"
    if manifest.is_file():
        return [manifest]
    # The folder given is LibriSpeech/, or one of its subsets.
    transcripts = sorted([*path.glob("*/*/*/*.trans.txt"), *path.glob("*/*/*.trans.txt")])
    if not transcripts:
        raise CorpusError(f"{path}: holds neither manifest.jsonl nor SUBSET/SPEAKER/CHAPTER/*.trans.txt; get LibriSpeech from {WHERE}")
    return transcripts


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip per utterance, in file order; a stream is a chapter's utterances back to back, as no times are published."""
    for _, clip in located_clips(path, files(path), problems):
        yield clip


def located_clips(path: Path, published: list[Path], problems: list[Problem]) -> Iterator[tuple[str, Clip]]:
    """Each clip with the place of its line in the published files."""
    manifest = published[0].name == "manifest.jsonl"
    utterances = list(manifest_lines(path, published[0], problems, _speaker) if manifest else _folders(path, published, problems))
    if not utterances:
        raise unreadable(published[0], "lines with id, split, dur, text and audio" if manifest else "lines `ID TEXT`", problems)
    for utterance, (stream, start_s) in zip(utterances, _places(utterances, problems), strict=True):
        yield utterance.where, utterance.clip(NAME, stream, start_s, problems)


def sum_s(start_s: float, duration_s: float) -> float:
    """The end of what lasts so long: to the microsecond, far below one sample, without the rounding errors of sums."""
    return round(start_s + duration_s, 6)


def _places(utterances: list[SpokenLine], problems: list[Problem]) -> list[tuple[str, float]]:
    """The stream of each utterance and its start there: the chapter's, in the order of their numbers."""
    places = [("", 0.0)] * len(utterances)
    chapters: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for index, utterance in enumerate(utterances):
        chapter, _, number = utterance.id.rpartition("-")
        chapters[utterance.split, chapter].append((int(number), index))
    for (_, chapter), members in chapters.items():
        members.sort()
        stream, start_s, expected = chapter, 0.0, members[0][0]
        for position, index in members:
            utterance = utterances[index]
            if position != expected:
                detail = f"{utterance.id}: the utterances {expected:04} to {position - 1:04} before it are missing"
                report(problems, "gap", utterance.where, detail)
                stream, start_s = f"{chapter}+{position:04}", 0.0
            places[index] = stream, start_s
            start_s = sum_s(start_s, max(0.0, utterance.duration_s))
            expected = position + 1
    return places


def _speaker(record: Fields) -> str:
    """The speaker that an id names."""
    identity = record.name("id")
    if not _ID.fullmatch(identity):
        raise Malformed("id must be SPEAKER-CHAPTER-NUMBER", identity)
    return identity.partition("-")[0]


def manifest_lines(path: Path, file: Path, problems: list[Problem], speaker: Callable[[Fields], str]) -> Iterator[SpokenLine]:
    """The lines of a manifest.jsonl with id, split, dur, text and audio; `speaker` finds who speaks, and checks what else there is."""
    seen: set[str] = set()
    for where, record in json_lines(file, problems):
        with skipping(problems, where):
            identity, split, duration_s = record.name("id"), record.name("split"), record.number("dur")
            utterance = SpokenLine(where, identity, split, duration_s, record.value("text"), record.name("audio"), speaker(record))
            if not isinstance(utterance.text, str):
                raise Malformed("text must be a text", utterance.text)
            add_new(seen, identity)
            if not (path / utterance.audio).is_file():
                report(problems, "missing-media", where, f"{utterance.audio!r} is not in the folder")
            yield utterance


def _folders(path: Path, transcripts: list[Path], problems: list[Problem]) -> Iterator[SpokenLine]:
    seen: set[str] = set()
    for file in transcripts:
        for where, line in lines(file, problems, file.relative_to(path).as_posix()):
            with skipping(problems, where):
                identity, _, text = line.partition(" ")
                if not _ID.fullmatch(identity):
                    raise Malformed("expected `ID TEXT`", line, kind="malformed" if line.strip() else "blank-line")
                add_new(seen, identity)
                audio, duration_s = file.parent / f"{identity}.flac", 0.0
                with skipping(problems, where):
                    duration_s = flac_duration_s(audio)
                place, speaker = audio.relative_to(path).as_posix(), identity.partition("-")[0]
                yield SpokenLine(where, identity, file.parents[2].name, duration_s, text, place, speaker)


def flac_duration_s(file: Path) -> float:
    """Seconds of a FLAC file by its header: the STREAMINFO block, 34 bytes after the first 8 (RFC 9639, section 8.2)."""
    try:
        with file.open("rb") as opened:
            head = opened.read(42)
    except OSError as error:
        raise Malformed(f"{file.name}: {error.strerror or error}", kind="missing-media") from None
    # Bytes 18 to 25: 20 bits of sample rate, 3 of channels, 5 of depth, 36 of samples.
    packed = int.from_bytes(head[18:26], "big")
    rate, num_samples = packed >> 44, packed & (1 << 36) - 1
    if len(head) < 42 or head[:4] != b"fLaC" or head[4] & 0x7F:
        raise Malformed(f"{file.name}: not a FLAC file", kind="missing-media")
    if not rate or not num_samples:
        raise Malformed(f"{file.name}: its header does not give its length", kind="missing-media")
    return num_samples / rate


CORPUS = Corpus(
    name=NAME, task="transcription of utterances", modality="audio", metrics=("wer",), needs=NEEDS, where=WHERE, licence="CC BY 4.0",
    files=files, clips=clips,
)  # fmt: skip
