"""A corpus that can be read, its clips, and their streaming pairs (S_{k−1}, S_k): one stream, in time order (Sec. 3.1 and 5.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from zendaya.records import Clip, Problem

CAPTION_METRICS = ("bleu-lc", "meteor", "cider")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus that can be read; each file in this folder ends in one, `CORPUS`."""

    name: str
    task: str
    modality: Literal["audio", "video", "text", "any"]
    """Of the source."""
    metrics: tuple[str, ...]
    """Defaults of `zendaya evaluate`."""
    needs: str
    """The files it is read from, in words."""
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
    """sha256 of the published files, for the signatures of results."""

    @property
    def usable(self) -> tuple[Clip, ...]:
        """The clips for training and scoring."""
        return tuple(clip for clip in self.clips if clip.usable)

    @property
    def pairs(self) -> tuple[tuple[Clip, Clip], ...]:
        """The streaming pairs."""
        return tuple(streaming_pairs(self.clips))


def consecutive(clips: Iterable[Clip]) -> Iterator[tuple[Clip, Clip]]:
    """Each usable clip of a stream with the one before it in time; equal times keep their order. Text sources give no pairs."""
    streams: dict[tuple[str, str], list[Clip]] = defaultdict(list)
    for clip in clips:
        if clip.usable and clip.duration_s > 0:
            streams[clip.split, clip.stream].append(clip)
    for members in streams.values():
        yield from pairwise(sorted(members, key=lambda clip: (clip.start_s, clip.end_s)))


def overlap(before: Clip, after: Clip) -> bool:
    """Whether the second clip begins before the first has ended."""
    return after.start_s < before.end_s


def streaming_pairs(clips: Iterable[Clip]) -> Iterator[tuple[Clip, Clip]]:
    """The consecutive pairs that do not overlap.

    The history S_{k−1} must lie before window k. The paper leaves overlapping segments of Charades-STA out (Sec. 5.1); so do we for all.
    """
    return (pair for pair in consecutive(clips) if not overlap(*pair))
