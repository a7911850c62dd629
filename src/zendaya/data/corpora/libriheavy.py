"""LibriHeavy (Kang et al. 2024): audiobooks, as lhotse cut manifests or Kaldi folders; LongLibriHeavy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from zendaya.data.corpora.base import Corpus
from zendaya.data.published import (
    Malformed,
    as_list,
    as_name,
    as_number,
    as_object,
    checked,
    clean_references,
    get,
    json_lines,
    json_object,
    lines,
    report,
    snippet,
    unreadable,
)
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "libriheavy"
NEEDS = "libriheavy_cuts_*.jsonl(.gz), or Kaldi folders (segments, text, wav.scp; LongLibriHeavy: data.json); one, or a folder of them"
WHERE = (
    "cuts: https://huggingface.co/datasets/pkufool/libriheavy; LongLibriHeavy: https://github.com/Miamoto/LongLibriHeavy; "
    "audio: https://github.com/facebookresearch/libri-light"
)

Transcript = Literal["book", "asr"]
"""Each cut carries two texts: the book's, with case and punctuation, and what a recogniser heard, which served to align it."""


def files(path: Path) -> list[Path]:
    """The published files: the manifest given, or all manifests and Kaldi folders of the folder given."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CorpusError(f"{path}: no such file or folder; expected {NEEDS}: {WHERE}")
    cuts = sorted([*path.glob("libriheavy_cuts_*.jsonl"), *path.glob("libriheavy_cuts_*.jsonl.gz")])
    # Of a manifest and its unzipped copy, the copy.
    cuts = [file for file in cuts if file.suffix != ".gz" or file.with_suffix("") not in cuts]
    kaldi = [
        folder / name
        for folder in ([path] if _kaldi(path) else sorted(filter(_kaldi, path.iterdir())))
        for name in ("segments", "text", "wav.scp", "data.json")
        if (folder / name).is_file()
    ]
    if not cuts and not kaldi:
        raise CorpusError(f"{path}: holds no manifest; expected {NEEDS}: {WHERE}")
    return cuts + kaldi


def clips(path: Path, problems: list[Problem], transcript: Transcript = "book") -> Iterator[Clip]:
    """One clip a supervision of a cut or a Kaldi segment, in file order."""
    published = files(path)
    folders = dict.fromkeys(file.parent for file in published if file.name in ("segments", "data.json"))
    for file in published:
        if file.parent not in folders:
            yield from _cut_clips(file, problems, transcript)
    for folder in folders:
        yield from _kaldi_clips(folder, problems) if (folder / "segments").is_file() else _json_clips(folder, problems)


def _kaldi(folder: Path) -> bool:
    return (folder / "segments").is_file() or (folder / "data.json").is_file()


def book_folder(recording: str) -> str:
    """The book of a recording: LibriVox keeps each under its own name, `large/10191/BOOK/CHAPTER`."""
    return PurePosixPath(recording).parent.name or recording


def _cut_clips(file: Path, problems: list[Problem], transcript: Transcript) -> Iterator[Clip]:
    split = file.name.removesuffix(".gz").removesuffix(".jsonl").removeprefix("libriheavy_cuts_")
    seen: set[str] = set()
    for where, record in json_lines(file, problems):
        try:
            found = list(_cut(record, split, transcript, where, problems))
        except Malformed as error:
            report(problems, "malformed", where, str(error))
            continue
        for clip in found:
            if clip.id in seen:
                report(problems, "duplicate-id", where, f"{snippet(clip.id)} is there twice")
                continue
            seen.add(clip.id)
            yield checked(clip, where, problems)
    if not seen:
        raise unreadable(file, "lhotse cuts, one a line", problems)


def _cut(record: dict[str, Any], split: str, transcript: Transcript, where: str, problems: list[Problem]) -> Iterator[Clip]:
    """A clip for each supervision; its times are those of the cut and, within it, of the supervision."""
    identity = as_name(get(record, "id"), "id")
    if record.get("type", "MonoCut") != "MonoCut":
        report(problems, "unsupported-cut", where, f"{snippet(identity)}: expected a MonoCut: got {snippet(record['type'])}")
        return
    cut_start_s = as_number(get(record, "start"), "start")
    supervisions = as_list(get(record, "supervisions"), "supervisions")
    if not supervisions:
        report(problems, "no-text", where, f"{snippet(identity)}: a cut without a supervision")
    recording = as_object(record.get("recording") or {}, "recording")
    media = [source.get("source") for source in as_list(recording.get("sources", []), "sources") if isinstance(source, dict)]
    for value in supervisions:
        supervision = as_object(value, "a supervision")
        stream = as_name(recording.get("id") or get(supervision, "recording_id"), "the recording's id")
        if len(media) != 1 or not isinstance(media[0], str):
            report(problems, "no-media", where, f"{snippet(identity)}: its recording does not name one audio file")
        start_s = round(cut_start_s + as_number(get(supervision, "start"), "the supervision's start"), 8)
        yield Clip(
            corpus=NAME,
            id=identity if len(supervisions) == 1 else as_name(get(supervision, "id"), "the supervision's id"),
            split=split,
            stream=stream,
            references=clean_references([_text(supervision, transcript)], where, problems),
            start_s=start_s,
            # lhotse's own precision: a float sum would show places nobody published.
            end_s=round(start_s + as_number(get(supervision, "duration"), "the supervision's duration"), 8),
            media=media[0] if len(media) == 1 and isinstance(media[0], str) else stream,
            stream_s=as_number(recording["duration"], "the recording's duration") if "duration" in recording else None,
            group=_title(record) or book_folder(stream),
        )


def _text(supervision: dict[str, Any], transcript: Transcript) -> object:
    """The text asked for of the two in the full manifests, or the only one in those prepared for recognition."""
    custom = supervision.get("custom")
    texts = custom.get("texts") if isinstance(custom, dict) else None
    if texts is None:
        return get(supervision, "text")
    index = 0 if transcript == "book" else 1
    if len(as_list(texts, "texts")) <= index:
        raise Malformed(f"texts must hold the book's text and the recogniser's: got {snippet(texts)}")
    return texts[index]


def _title(record: dict[str, Any]) -> str:
    """The book by its text: one text may have been read by many, each under a directory of its own."""
    custom = record.get("custom")
    path = custom.get("text_path") if isinstance(custom, dict) else None
    return PurePosixPath(path).parent.name.casefold() if isinstance(path, str) else ""


def _kaldi_clips(folder: Path, problems: list[Problem]) -> Iterator[Clip]:
    """`ID RECORDING start end` with `ID text`; a data.json beside them is held against them."""
    texts = dict(_keyed(folder, "text", problems))
    media = (
        {recording: command for recording, (_, command) in _keyed(folder, "wav.scp", problems)} if (folder / "wav.scp").is_file() else {}
    )
    other = json_object(folder / "data.json", problems, f"{folder.name}/data.json") if (folder / "data.json").is_file() else None
    seen: set[str] = set()
    for identity, (where, rest) in _keyed(folder, "segments", problems):
        try:
            recording, start, end = rest.split()
            start_s, end_s = as_number(start, "start"), as_number(end, "end")
        except (ValueError, Malformed):
            report(problems, "malformed", where, f"not `ID RECORDING start end`: {snippet(rest)}")
            continue
        if identity not in texts:
            report(problems, "no-text", where, f"{snippet(identity)} has a segment but no text")
            continue
        seen.add(identity)
        text_where, text = texts[identity]
        if recording not in media:
            report(problems, "no-media", where, f"{snippet(recording)} is not in wav.scp")
        if other is not None and not _agrees(other.get(identity), start_s, end_s, text):
            report(problems, "disagrees", where, f"{snippet(identity)}: data.json lacks it, or has other times or another text")
        clip = Clip(
            corpus=NAME,
            id=identity,
            split=folder.name,
            stream=recording,
            references=clean_references([text], text_where, problems),
            start_s=start_s,
            end_s=end_s,
            media=_audio_path(recording, media.get(recording, "")),
            group=book_folder(recording),
        )
        yield checked(clip, where, problems)
    for identity in texts.keys() - seen:
        report(problems, "no-segment", texts[identity][0], f"{snippet(identity)} has a text but no segment that can be read")
    if not seen:
        raise unreadable(folder / "segments", "lines `ID RECORDING start end`, with `ID text` lines in text beside it", problems)


def _keyed(folder: Path, name: str, problems: list[Problem]) -> Iterator[tuple[str, tuple[str, str]]]:
    """(key, (where, rest)) of each line of a Kaldi file; the first of a key stands."""
    if not (folder / name).is_file():
        raise CorpusError(f"{folder / name}: no such file; a Kaldi folder has segments and text: {WHERE}")
    seen: set[str] = set()
    for where, line in lines(folder / name, problems, f"{folder.name}/{name}"):
        key, _, rest = line.partition(" ")
        if not key:
            report(problems, "malformed" if line.strip() else "blank-line", where, f"no key on the line: {snippet(line)}")
        elif key in seen:
            report(problems, "duplicate-id", where, f"{snippet(key)} is there twice")
        else:
            seen.add(key)
            yield key, (where, rest)


def _audio_path(recording: str, command: str) -> str:
    """The audio file a wav.scp entry reads, relative to the audio root; the entry is often a shell command, which is never run."""
    match = re.search(re.escape(recording) + r"\.\w+", command)
    if match:
        return match[0]
    return command.strip() if command.strip() and not command.rstrip().endswith("|") else recording


def _agrees(value: object, start_s: float, end_s: float, text: str) -> bool:
    return isinstance(value, dict) and (value.get("start"), value.get("end"), value.get("text")) == (start_s, end_s, text)


def _json_clips(folder: Path, problems: list[Problem]) -> Iterator[Clip]:
    """LongLibriHeavy's data.json alone: an object a segment, with audio_filepath, start, end and text."""
    label = f"{folder.name}/data.json"
    num_clips = 0
    for identity, value in json_object(folder / "data.json", problems, label).items():
        where = f"{label}:{snippet(identity)}"
        try:
            record = as_object(value, "the segment")
            audio = as_name(get(record, "audio_filepath"), "audio_filepath").removeprefix("path_librilight/")
            stream = PurePosixPath(audio).with_suffix("").as_posix()
            clip = Clip(
                corpus=NAME,
                id=as_name(identity, "id"),
                split=folder.name,
                stream=stream,
                references=clean_references([get(record, "text")], where, problems),
                start_s=as_number(get(record, "start"), "start"),
                end_s=as_number(get(record, "end"), "end"),
                media=audio,
                group=book_folder(stream),
            )
        except Malformed as error:
            report(problems, "malformed", where, str(error))
            continue
        num_clips += 1
        yield checked(clip, where, problems)
    if not num_clips:
        raise unreadable(folder / "data.json", "an object of segments with audio_filepath, start, end and text", problems)


CORPUS = Corpus(
    name=NAME, task="transcription of audiobooks", modality="audio", metrics=("wer",), needs=NEEDS, where=WHERE,
    licence="Apache-2.0 manifests (LongLibriHeavy: MIT), public-domain LibriVox recordings", files=files, clips=clips,
)  # fmt: skip
