"""LibriHeavy (Kang et al. 2024): audiobooks, as lhotse cut manifests or Kaldi folders; LongLibriHeavy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from zendaya.data import published
from zendaya.data.corpora.base import Corpus
from zendaya.data.published import Fields, Malformed, as_number, checked, clean_references, report, skipping, snippet, unreadable
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "libriheavy"
NEEDS = "libriheavy_cuts_*.jsonl(.gz), or Kaldi folders (segments, text, wav.scp; LongLibriHeavy: data.json); one, or a folder of them"
WHERE = (
    "cuts: https://huggingface.co/datasets/pkufool/libriheavy; LongLibriHeavy: https://github.com/Miamoto/LongLibriHeavy; "
    "audio: https://github.com/facebookresearch/libri-light"
)

Transcript = Literal["book", "asr"]
"""Each cut has two texts: the book's, with case and punctuation, and a recogniser's output, used for the alignment."""


def files(path: Path) -> list[Path]:
    """The published files: the manifest given, or all manifests and Kaldi folders of the folder given."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CorpusError(f"{path}: no such file or folder; expected {NEEDS}: {WHERE}")
    cuts = sorted([*path.glob("libriheavy_cuts_*.jsonl"), *path.glob("libriheavy_cuts_*.jsonl.gz")])
    cuts = [file for file in cuts if file.suffix != ".gz" or file.with_suffix("") not in cuts]  # not both a file and its gzip
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
    """One clip per supervision of a cut or Kaldi segment, in file order."""
    found = files(path)
    folders = dict.fromkeys(file.parent for file in found if file.name in ("segments", "data.json"))
    for file in found:
        if file.parent not in folders:
            yield from _cut_clips(file, problems, transcript)
    for folder in folders:
        yield from _kaldi_clips(folder, problems) if (folder / "segments").is_file() else _json_clips(folder, problems)


def _kaldi(folder: Path) -> bool:
    return (folder / "segments").is_file() or (folder / "data.json").is_file()


def book_folder(recording: str) -> str:
    """The folder of a recording's book, as BOOK in `large/10191/BOOK/CHAPTER`."""
    return PurePosixPath(recording).parent.name or recording


def _cut_clips(file: Path, problems: list[Problem], transcript: Transcript) -> Iterator[Clip]:
    split = file.name.removesuffix(".gz").removesuffix(".jsonl").removeprefix("libriheavy_cuts_")
    seen: set[str] = set()
    for where, record in published.json_lines(file, problems):
        with skipping(problems, where):
            for clip in list(_cut(record, split, transcript, where, problems)):
                with skipping(problems, where):
                    yield checked(clip, where, problems, seen)
    if not seen:
        raise unreadable(file, "lhotse cuts, one per line", problems)


def _cut(record: Fields, split: str, transcript: Transcript, where: str, problems: list[Problem]) -> Iterator[Clip]:
    """One clip per supervision, whose start counts from the start of the cut."""
    identity = record.name("id")
    if record.get("type", "MonoCut") != "MonoCut":
        raise Malformed(f"{snippet(identity)}: expected a MonoCut", record["type"], kind="unsupported-cut")
    cut_start_s, supervisions = record.number("start"), record.array("supervisions")
    if not supervisions:
        report(problems, "no-text", where, f"{snippet(identity)}: the cut has no supervision")
    recording = published.as_object(record.get("recording") or {}, "the recording")
    sources = recording.array("sources") if "sources" in recording else []
    media = [source.get("source") for source in sources if isinstance(source, dict)]
    for value in supervisions:
        supervision = published.as_object(value, "the supervision")
        stream = recording.name("id") if recording.get("id") else supervision.name("recording_id")
        one_file = len(media) == 1 and isinstance(media[0], str)
        if not one_file:
            report(problems, "no-media", where, f"{snippet(identity)}: its recording does not name one audio file")
        # Rounded to lhotse's own precision, without the rounding errors of sums.
        start_s = round(cut_start_s + supervision.number("start"), 8)
        yield Clip(
            corpus=NAME, id=identity if len(supervisions) == 1 else supervision.name("id"), split=split, stream=stream,
            references=clean_references([_text(supervision, transcript)], where, problems), start_s=start_s,
            end_s=round(start_s + supervision.number("duration"), 8), media=str(media[0]) if one_file else stream,
            stream_s=recording.number("duration") if "duration" in recording else None, group=_title(record) or book_folder(stream),
        )  # fmt: skip


def _text(supervision: Fields, transcript: Transcript) -> object:
    """The chosen text of the two in the full manifests, or the only one in those prepared for recognition."""
    custom = supervision.get("custom")
    if not isinstance(custom, dict) or custom.get("texts") is None:
        return supervision.value("text")
    texts, index = Fields(custom).array("texts"), 0 if transcript == "book" else 1
    if len(texts) <= index:
        raise Malformed("texts must hold the book's text and the recogniser's", texts)
    return texts[index]


def _title(record: Fields) -> str:
    """The title of the book, by the path of its text; several readers may have read it, each in a folder of their own."""
    custom = record.get("custom")
    path = custom.get("text_path") if isinstance(custom, dict) else None
    return PurePosixPath(path).parent.name.casefold() if isinstance(path, str) else ""


def _kaldi_clips(folder: Path, problems: list[Problem]) -> Iterator[Clip]:
    """`ID RECORDING start end` with `ID text`; a data.json beside them must agree."""
    texts = dict(_keyed(folder, "text", problems))
    media = dict(_keyed(folder, "wav.scp", problems)) if (folder / "wav.scp").is_file() else {}
    other = published.json_object(folder / "data.json", problems, f"{folder.name}/data.json") if (folder / "data.json").is_file() else None
    seen: set[str] = set()
    for identity, (where, rest) in _keyed(folder, "segments", problems):
        with skipping(problems, where):
            try:
                recording, start, end = rest.split()
                start_s, end_s = as_number(start, "start"), as_number(end, "end")
            except (ValueError, Malformed):
                raise Malformed("expected `ID RECORDING start end`", rest) from None
            if identity not in texts:
                raise Malformed(f"{snippet(identity)} has a segment but no text", kind="no-text")
            seen.add(identity)
            text_where, text = texts[identity]
            if recording not in media:
                report(problems, "no-media", where, f"{snippet(recording)} is not in wav.scp")
            if other is not None and not _agrees(other.get(identity), start_s, end_s, text):
                report(problems, "disagrees", where, f"{snippet(identity)}: data.json lacks it, or has other times or another text")
            clip = Clip(
                corpus=NAME, id=identity, split=folder.name, stream=recording, start_s=start_s, end_s=end_s, group=book_folder(recording),
                references=clean_references([text], text_where, problems), media=_audio_path(recording, media.get(recording, ("", ""))[1]),
            )  # fmt: skip
            yield checked(clip, where, problems)
    for identity in texts.keys() - seen:
        report(problems, "no-segment", texts[identity][0], f"{snippet(identity)} has a text but no segment that can be read")
    if not seen:
        raise unreadable(folder / "segments", "lines `ID RECORDING start end`, with `ID text` lines in text beside it", problems)


def _keyed(folder: Path, name: str, problems: list[Problem]) -> Iterator[tuple[str, tuple[str, str]]]:
    """(key, (where, rest)) of each line of a Kaldi file; the first line of a key counts."""
    if not (folder / name).is_file():
        raise CorpusError(f"{folder / name}: no such file; a Kaldi folder has segments and text: {WHERE}")
    seen: set[str] = set()
    for where, line in published.lines(folder / name, problems, f"{folder.name}/{name}"):
        with skipping(problems, where):
            key, _, rest = line.partition(" ")
            if not key:
                raise Malformed("the line has no key", line, kind="malformed" if line.strip() else "blank-line")
            published.add_new(seen, key)
            yield key, (where, rest)


def _audio_path(recording: str, command: str) -> str:
    """The audio file of a wav.scp entry, relative to the audio root; shell commands, which are common there, are never run."""
    if match := re.search(re.escape(recording) + r"\.\w+", command):
        return match[0]
    return command.strip() if command.strip() and not command.rstrip().endswith("|") else recording


def _agrees(value: object, start_s: float, end_s: float, text: str) -> bool:
    return isinstance(value, dict) and (value.get("start"), value.get("end"), value.get("text")) == (start_s, end_s, text)


def _json_clips(folder: Path, problems: list[Problem]) -> Iterator[Clip]:
    """LongLibriHeavy's data.json alone: one object per segment, with audio_filepath, start, end and text."""
    num_clips = 0
    for where, identity, record in published.json_items(folder / "data.json", problems, f"{folder.name}/data.json"):
        with skipping(problems, where):
            audio = record.name("audio_filepath").removeprefix("path_librilight/")
            stream = PurePosixPath(audio).with_suffix("").as_posix()
            clip = Clip(
                corpus=NAME, id=identity, split=folder.name, stream=stream, media=audio, group=book_folder(stream),
                references=clean_references([record.value("text")], where, problems), start_s=record.number("start"),
                end_s=record.number("end"),
            )  # fmt: skip
            num_clips += 1
            yield checked(clip, where, problems)
    if not num_clips:
        raise unreadable(folder / "data.json", "an object of segments with audio_filepath, start, end and text", problems)


CORPUS = Corpus(
    name=NAME, task="transcription of audiobooks", modality="audio", metrics=("wer",), needs=NEEDS, where=WHERE,
    licence="Apache-2.0 manifests (LongLibriHeavy: MIT), public-domain LibriVox recordings", files=files, clips=clips,
)  # fmt: skip
