"""speechocean762 (Zhang et al. 2021): short English sentences by non-native speakers, half of them children, from one manifest.jsonl."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from zendaya.data.corpora.base import Corpus
from zendaya.data.corpora.librispeech import manifest_lines, sum_s
from zendaya.data.published import unreadable
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "speechocean762"
NEEDS = "manifest.jsonl (id, split, speaker, dur, text, audio per line) and the recordings that it names"
WHERE = "https://www.openslr.org/101"


def files(path: Path) -> list[Path]:
    """The manifest."""
    manifest = path / "manifest.jsonl"
    if not manifest.is_file():
        raise CorpusError(f"{manifest}: no such file; expected {NEEDS}; get speechocean762 from {WHERE}")
    return [manifest]


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip per utterance, in file order; a stream is a speaker's utterances back to back, as each was recorded by itself."""
    (manifest,) = files(path)
    ends_s, found = defaultdict[tuple[str, str], float](float), False
    for line in manifest_lines(path, manifest, problems, lambda record: record.name("speaker")):
        found, stream = True, (line.split, line.speaker)
        yield line.clip(NAME, line.speaker, ends_s[stream], problems)
        ends_s[stream] = sum_s(ends_s[stream], max(0.0, line.duration_s))
    if not found:
        raise unreadable(manifest, "lines with id, split, speaker, dur, text and audio", problems)


CORPUS = Corpus(
    name=NAME, task="transcription of utterances of non-native speakers", modality="audio", metrics=("wer",), needs=NEEDS, where=WHERE,
    licence="free for commercial and non-commercial use", files=files, clips=clips,
)  # fmt: skip
