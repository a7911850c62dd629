"""A corpus that can be read, and the result of reading it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zendaya.data.pairs import streaming_pairs
from zendaya.records import Clip, Problem

CAPTION_METRICS = ("bleu-lc", "meteor", "cider")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus that can be read; the file of each ends in one, `CORPUS`."""

    name: str
    task: str
    """What its models do, in words."""
    modality: Literal["audio", "video", "text", "any"]
    """Of the source."""
    metrics: tuple[str, ...]
    """Scored by `zendaya evaluate` if no metrics are given."""
    needs: str
    """Files that must be there, in words."""
    where: str
    """Where to get them."""
    licence: str
    files: Callable[[Path], list[Path]]
    """The published files at a path."""
    clips: Callable[[Path, list[Problem]], Iterator[Clip]]
    """The clips at a path; problems are added to the list as they are found."""


@dataclass(frozen=True)
class Reading:
    """The clips of a corpus, and the problems of its files."""

    corpus: Corpus
    clips: tuple[Clip, ...]
    """All clips as published, unusable ones included."""
    problems: tuple[Problem, ...]
    digest: str
    """sha256 of the published files, which results carry."""

    @property
    def usable(self) -> tuple[Clip, ...]:
        """The clips to train and score on."""
        return tuple(clip for clip in self.clips if clip.usable)

    @property
    def pairs(self) -> tuple[tuple[Clip, Clip], ...]:
        """The streaming pairs."""
        return tuple(streaming_pairs(self.clips))
