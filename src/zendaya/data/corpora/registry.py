"""Corpora by name: `librispeech` is the corpus of corpora/librispeech.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from zendaya import plugins
from zendaya.data import published
from zendaya.data.corpora.base import Corpus, Reading
from zendaya.records import Clip, Problem


def names() -> tuple[str, ...]:
    """The names of all corpora, installed plugins included."""
    return plugins.available("corpora")


def get(name: str) -> Corpus:
    """The corpus of that name."""
    return plugins.load("corpora", name)


def read(name: str, path: str | Path) -> Reading:
    """Read the clips of a corpus, the problems of its files, and their digest."""
    corpus, folder = get(name), Path(path).expanduser()
    problems: list[Problem] = []
    clips = tuple(corpus.clips(folder, problems))
    return Reading(corpus, clips, (*problems, *_shared(clips)), digest(name, folder))


def digest(name: str, path: str | Path) -> str:
    """sha256 of the published files of a corpus."""
    folder = Path(path).expanduser()
    return published.digest(get(name).files(folder), folder)


def _shared(clips: tuple[Clip, ...]) -> Iterator[Problem]:
    """One problem per stream or group that is in the training split and in another."""
    for kind, name in (("shared-stream", "stream"), ("shared-group", "group")):
        splits: dict[str, dict[str, str]] = defaultdict(dict)
        for clip in clips:
            if value := getattr(clip, name):
                splits[value].setdefault(clip.split, clip.id)
        for value, first in splits.items():
            if "train" in first and len(first) > 1:
                places = ", ".join(f"{split} as {identity}" for split, identity in first.items())
                yield Problem(kind, f"{clips[0].corpus}:{published.snippet(value)}", f"first in {places}")
