"""Consecutive pairs (S_{k−1}, S_k) for streaming: from one stream, in time order (Sec. 3.1 and 5.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from zendaya.records import Clip


def consecutive(clips: Iterable[Clip]) -> Iterator[tuple[Clip, Clip]]:
    """Each usable clip with the one before it in time, split by split and stream by stream; a tie is in the order given.

    Text sources have no stream, so no pairs.
    """
    streams: dict[tuple[str, str], list[Clip]] = defaultdict(list)
    for clip in clips:
        if clip.usable and clip.duration_s > 0:
            streams[clip.split, clip.stream].append(clip)
    for members in streams.values():
        members.sort(key=lambda clip: (clip.start_s, clip.end_s))
        yield from pairwise(members)


def overlap(before: Clip, after: Clip) -> bool:
    """Whether the second begins before the first has ended."""
    return after.start_s < before.end_s


def streaming_pairs(clips: Iterable[Clip]) -> Iterator[tuple[Clip, Clip]]:
    """The consecutive pairs that do not overlap.

    The history S_{k−1} must lie wholly in the past of window k. The paper says so of Charades-STA, whose segments overlap
    heavily (Sec. 5.1); those of other corpora that overlap break the same assumption, and are left out too.
    """
    return (pair for pair in consecutive(clips) if not overlap(*pair))
