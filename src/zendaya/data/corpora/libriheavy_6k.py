"""The paper's LibriHeavy subset: 6k utterances, with book-disjoint valid and test (Sec. 5.1)."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from zendaya.data.corpora import libriheavy
from zendaya.data.corpora.libriheavy import book_folder
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

TRAINING_SIZES = ("small", "medium", "large")


def files(path: Path) -> list[Path]:
    """The manifest of the subset: the one given, or the smallest training manifest of a folder."""
    published = libriheavy.files(path)
    for size in TRAINING_SIZES:
        for file in published:
            if file.name.removesuffix(".gz") == f"libriheavy_cuts_{size}.jsonl":
                return [file]
    return published


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """The 6k-utterance subset of the paper (Sec. 5.1) from a published manifest."""
    published = files(path)
    yield from subset(libriheavy.clips(published[0] if len(published) == 1 else path, problems))


def subset(clips: Iterable[Clip], *, num_train: int = 6000, num_valid: int = 500, num_test: int = 500, seed: int = 0) -> list[Clip]:
    """A seeded choice of recordings for train, valid and test; no book is in two of them.

    The paper sets the 6k and the disjoint books (Sec. 5.1), we the other sizes. Books, in the order of a hash of seed and name, fill test,
    then valid, then train. Within a split, whole recordings in such an order are taken; the last one is cut off in time.
    """
    usable = [clip for clip in clips if clip.usable]
    books = _books(usable)
    members: dict[str, list[Clip]] = defaultdict(list)
    for clip in usable:
        members[books[clip.group, book_folder(clip.stream)]].append(clip)
    order = iter(sorted(members, key=lambda book: _draw(seed, book)))
    chosen: list[Clip] = []
    for split, wanted in (("test", num_test), ("valid", num_valid), ("train", num_train)):
        pool: list[Clip] = []
        while (split == "train" or len(pool) < wanted) and (book := next(order, None)) is not None:
            pool += members[book]
        if len(pool) < wanted:
            raise CorpusError(
                f"the subset needs {num_train} + {num_valid} + {num_test} utterances of books that no two splits share: got "
                f"{len(usable)} usable utterances of {len(members)} books, which left {len(pool)} for {split}; read a larger manifest"
            )
        pool.sort(key=lambda clip: (_draw(seed, clip.stream), clip.stream, clip.start_s, clip.end_s, clip.id))
        chosen += [replace(clip, split=split) for clip in pool[:wanted]]
    return chosen


def _draw(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()


def _books(clips: Iterable[Clip]) -> dict[tuple[str, str], str]:
    """The book of each (title, directory); pairs that share either are one book, named by the first of its names."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = name = parent[parent[name]]
        return name

    keys = {(clip.group, book_folder(clip.stream)) for clip in clips}
    for title, directory in keys:
        low, high = sorted((root(f"title:{title}"), root(f"directory:{directory}")))
        parent[high] = low
    return {(title, directory): root(f"title:{title}") for title, directory in keys}


CORPUS = replace(
    libriheavy.CORPUS, name="libriheavy-6k",
    task="transcription of audiobooks, the paper's 6k utterances with book-disjoint valid and test",
    needs="libriheavy_cuts_small.jsonl(.gz), or any other LibriHeavy manifest with at least 7,000 utterances", files=files, clips=clips,
)  # fmt: skip
