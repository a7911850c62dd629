"""The corpora: what each needs and where to get it, and `read`, which gives its clips with every problem found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zendaya.corpora import activitynet, charades_sta, libriheavy, librispeech, manifest, msvd, multi30k, published
from zendaya.corpora.pairs import consecutive, overlap, streaming_pairs
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

__all__ = ["CORPORA", "Corpus", "Reading", "consecutive", "digest", "get", "overlap", "read", "streaming_pairs"]


@dataclass(frozen=True)
class Corpus:
    """One corpus that can be read."""

    name: str
    task: str
    needs: str
    where: str
    """Where its users get it."""
    licence: str
    files: Callable[[Path], list[Path]]
    """The published files a path holds."""
    clips: Callable[[Path, list[Problem]], Iterator[Clip]]
    """The clips of a path; what is odd is added to the list as it is met."""


_MULTI30K_LICENCE = "research use (the captions are Flickr30k's)"
_LIBRIHEAVY_LICENCE = "Apache-2.0 manifests (LongLibriHeavy: MIT), public-domain LibriVox recordings"

CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            charades_sta.NAME,
            "captioning of video segments",
            charades_sta.NEEDS,
            charades_sta.WHERE,
            "Charades licence, non-commercial research",
            charades_sta.files,
            charades_sta.clips,
        ),
        Corpus(
            activitynet.NAME,
            "captioning of video segments",
            activitynet.NEEDS,
            activitynet.WHERE,
            "research use",
            activitynet.files,
            activitynet.clips,
        ),
        Corpus(
            libriheavy.NAME,
            "transcription of audiobooks",
            libriheavy.NEEDS,
            libriheavy.WHERE,
            _LIBRIHEAVY_LICENCE,
            libriheavy.files,
            libriheavy.clips,
        ),
        Corpus(
            "libriheavy-6k",
            "transcription of audiobooks, the paper's 6k utterances with book-disjoint valid and test",
            libriheavy.NEEDS_SUBSET,
            libriheavy.WHERE,
            _LIBRIHEAVY_LICENCE,
            libriheavy.subset_files,
            libriheavy.subset_clips,
        ),
        Corpus(msvd.NAME, "captioning of short videos", msvd.NEEDS, msvd.WHERE, "research use", msvd.files, msvd.clips),
        Corpus(
            librispeech.NAME,
            "transcription of utterances",
            librispeech.NEEDS,
            librispeech.WHERE,
            "CC BY 4.0",
            librispeech.files,
            librispeech.clips,
        ),
        Corpus(
            "librispeech-long30",
            "transcription of utterances joined to about 30 s",
            librispeech.NEEDS_LONG,
            librispeech.WHERE,
            "CC BY 4.0",
            librispeech.long_files,
            librispeech.long_clips,
        ),
        Corpus(
            multi30k.NAME,
            "translation of sentences, English to German",
            multi30k.NEEDS,
            multi30k.WHERE,
            _MULTI30K_LICENCE,
            multi30k.files,
            multi30k.clips,
        ),
        Corpus(
            "multi30k-en-fr",
            "translation of sentences, English to French",
            multi30k.NEEDS,
            multi30k.WHERE,
            _MULTI30K_LICENCE,
            partial(multi30k.files, target="fr"),
            partial(multi30k.clips, target="fr"),
        ),
        Corpus(manifest.NAME, "your own data", manifest.NEEDS, manifest.WHERE, "yours", manifest.files, manifest.clips),
    )
}
"""Every corpus by name."""


@dataclass(frozen=True)
class Reading:
    """A corpus as it was read once."""

    corpus: Corpus
    clips: tuple[Clip, ...]
    """All of them, those with nothing to read or nothing to say too: counts are as published."""
    problems: tuple[Problem, ...]
    digest: str
    """sha256 of the published files; results carry it."""

    @property
    def usable(self) -> tuple[Clip, ...]:
        """The clips to train and score on."""
        return tuple(clip for clip in self.clips if clip.usable)

    @property
    def pairs(self) -> tuple[tuple[Clip, Clip], ...]:
        """The streaming pairs."""
        return tuple(streaming_pairs(self.clips))


def get(name: str) -> Corpus:
    """The corpus of that name."""
    if name not in CORPORA:
        raise CorpusError(f"no corpus is called {name!r}; there are {', '.join(CORPORA)}")
    return CORPORA[name]


def read(name: str, path: str | Path) -> Reading:
    """The clips of a corpus, what is odd about its files, and their digest."""
    corpus, folder = get(name), Path(path).expanduser()
    problems: list[Problem] = []
    clips = tuple(corpus.clips(folder, problems))
    problems += _shared(clips)
    return Reading(corpus, clips, tuple(problems), digest(name, folder))


def digest(name: str, path: str | Path) -> str:
    """sha256 of the published files a corpus is read from."""
    folder = Path(path).expanduser()
    return published.digest(get(name).files(folder), folder)


def _shared(clips: Iterable[Clip]) -> Iterator[Problem]:
    """A problem for each stream or group that is in the training split and in another; val_1 and val_2 may well share videos."""
    clips = tuple(clips)
    for kind, name in (("shared-stream", "stream"), ("shared-group", "group")):
        splits: dict[str, dict[str, str]] = defaultdict(dict)
        for clip in clips:
            if value := getattr(clip, name):
                splits[value].setdefault(clip.split, clip.id)
        for value, first in splits.items():
            if "train" in first and len(first) > 1:
                places = ", ".join(f"{split} as {identity}" for split, identity in first.items())
                yield Problem(kind, f"{clips[0].corpus}:{published.snippet(value)}", f"first in {places}")
