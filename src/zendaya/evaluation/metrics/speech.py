"""Scores of live captions of speech: word errors and their places, word lag, errors near edges, words in silence. No torch.

What was written is aligned with what was said, over a whole stream. A deletion or substitution stands at its word's middle; an
insertion between its neighbours, at the time it was taken to be spoken.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from zendaya.errors import MissingExtraError
from zendaya.evaluation.metrics.latency import length_adaptive_average_lagging
from zendaya.evaluation.metrics.quality import normaliser
from zendaya.records import Event

EDGE_S = 1.0
"""An error this near to an edge counts as one at the edge."""
SILENCE_S = 1.0
"""A longer gap between two words is silence."""
LATE_S = 2.0
"""A wrong word that was spoken so long after the word it is aligned with was invented; `spoken_s` is far less wrong than that."""


class WrittenWord(NamedTuple):
    """A word as it was written, on the clock of the stream."""

    text: str
    written_s: float
    """When the token with its last letter could be written: computing takes no time."""
    emitted_s: float
    """When it was written, computing included."""
    spoken_s: float
    """About when it was spoken (`Event.spoken_s`)."""


class SaidWord(NamedTuple):
    """A word of the reference, on the clock of the stream."""

    text: str
    start_s: float
    end_s: float
    utterance: int
    """Its place among the utterances of the stream."""


@dataclass(frozen=True)
class Utterance:
    """What was said in one stretch of a stream."""

    id: str
    group: str
    """What figures are summed over and resampled by: the chapter."""
    start_s: float
    duration_s: float
    words: tuple[tuple[str, float, float], ...]
    """Text, start and end of each word, from the utterance's own start."""
    timed: bool = True
    """Whether the word times are measured; if not, they are spread evenly and give no lag."""


Word = TypeVar("Word", WrittenWord, SaidWord)


class Pair(NamedTuple):
    """One place of an alignment: an insertion has no `said`, a deletion no `written`."""

    said: SaidWord | None
    written: WrittenWord | None
    right: bool = False


@dataclass
class SpeechCounts:
    """Counts of one group of utterances; all figures are quotients of their sums."""

    words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    edge_words: int = 0
    edge_errors: int = 0
    silent_words: int = 0
    silent_s: float = 0.0
    lags_s: list[float] = field(default_factory=list)
    """Of each word rightly written: from its end to its writing."""
    aware_lags_s: list[float] = field(default_factory=list)
    """The same, computing included."""
    laal_s: list[float] = field(default_factory=list)
    """Of each utterance of which anything was written."""

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    def add(self, other: SpeechCounts) -> None:
        """Add the counts of more of the group."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def written_words(events: Iterable[Event]) -> list[WrittenWord]:
    """The words of a stream, each with the times of the token that wrote its last letter; a word ends with its window.

    A window that took over words of the one before, whose steps so begin after 1, goes on with the last of them.
    """
    found, text, last, window = list[WrittenWord](), "", None, -1
    for event in events:
        for letter in (" " if event.window_index != window and event.step == 1 else "") + event.text:
            if not letter.isspace():
                last = event if last is None or letter.isalnum() else last
                text += letter
            elif last is not None:
                found.append(WrittenWord(text, last.arrival_s, last.emission_s, last.spoken_s))
                text, last = "", None
        window = event.window_index
    return found if last is None else [*found, WrittenWord(text, last.arrival_s, last.emission_s, last.spoken_s)]


def align(utterances: Sequence[Utterance], written: Sequence[WrittenWord]) -> list[Pair]:
    """The alignment of least word errors, after Whisper's English normalisation (that of `word_error_rate`)."""
    spoken = [
        SaidWord(text, each.start_s + start_s, each.start_s + end_s, index)
        for index, each in enumerate(utterances)
        for text, start_s, end_s in each.words
    ]
    said, ours = _normalised(spoken), _normalised(written)
    pairs = list[Pair]()
    for kind, theirs_at, ours_at in _edits([word for word, _ in said], [word for word, _ in ours]):
        both = itertools.zip_longest(said[theirs_at], ours[ours_at])
        pairs += [Pair(a and a[1], b and b[1], kind == "equal") for a, b in both]
    return pairs


def apart_if_unspoken(pairs: Sequence[Pair]) -> list[Pair]:
    """The alignment without pairs that cannot be: each becomes an insertion beside a deletion.

    A word written before its reference began is no try at it; nor is a wrong one that was taken to be spoken long after it.
    """
    found = list[Pair]()
    for pair in pairs:
        said, written, right = pair
        if said and written and written.written_s < said.start_s:
            found += [Pair(None, written), Pair(said, None)]
        elif said and written and not right and written.spoken_s > said.end_s + LATE_S:
            found += [Pair(said, None), Pair(None, written)]
        else:
            found.append(pair)
    return found


def count(utterances: Sequence[Utterance], pairs: Sequence[Pair], edges_s: Sequence[float], sound_s: float) -> dict[str, SpeechCounts]:
    """The counts of each group of utterances in one stream of so many seconds; an edge is a moment at which state was dropped."""
    found: dict[str, SpeechCounts] = {each.group: SpeechCounts() for each in utterances}
    near = _near(edges_s)
    for place in _placed(pairs, sound_s):
        pair, counts = place.pair, found[utterances[place.utterance].group]
        at_edge, wrong = near(place.time_s), not pair.right
        counts.words += pair.said is not None
        counts.edge_words += at_edge and pair.said is not None
        counts.edge_errors += at_edge and wrong
        counts.substitutions += wrong and None not in (pair.said, pair.written)
        counts.deletions += pair.written is None
        counts.insertions += pair.said is None
        counts.silent_words += pair.said is None and place.in_silence
        if pair.right and pair.said and pair.written and utterances[place.utterance].timed:
            counts.lags_s.append(pair.written.written_s - pair.said.end_s)
            counts.aware_lags_s.append(pair.written.emitted_s - pair.said.end_s)
    for utterance, seconds in _gaps(utterances, sound_s):
        found[utterances[utterance].group].silent_s += seconds
    for utterance, laal_s in _laal(utterances, pairs):
        found[utterances[utterance].group].laal_s.append(laal_s)
    return found


class _Placed(NamedTuple):
    """A pair with its time, the utterance it counts for, and whether it lies in silence."""

    pair: Pair
    time_s: float
    utterance: int
    in_silence: bool


def _placed(pairs: Sequence[Pair], sound_s: float) -> Iterator[_Placed]:
    """Each pair with its place; an insertion counts for the utterance before it."""
    following, next_start_s = list[float](), sound_s
    for pair in reversed(pairs):
        following.append(next_start_s)
        next_start_s = pair.said.start_s if pair.said else next_start_s
    end_s, utterance = 0.0, 0
    for pair, start_s in zip(pairs, reversed(following), strict=True):
        if pair.said:
            yield _Placed(pair, (pair.said.start_s + pair.said.end_s) / 2, pair.said.utterance, in_silence=False)
            end_s, utterance = pair.said.end_s, pair.said.utterance
        elif pair.written:
            time_s = max(end_s, min(start_s, pair.written.spoken_s))
            yield _Placed(pair, time_s, utterance, in_silence=start_s - end_s > SILENCE_S)


def _gaps(utterances: Sequence[Utterance], sound_s: float) -> Iterator[tuple[int, float]]:
    """Seconds of each silence of the reference, with the utterance it counts for: the one before, as of insertions."""
    end_s, last = 0.0, 0
    for index, each in enumerate(utterances):
        for _, from_s, to_s in each.words:
            if each.start_s + from_s - end_s > SILENCE_S:
                yield last, each.start_s + from_s - end_s
            end_s, last = each.start_s + to_s, index
    if sound_s - end_s > SILENCE_S:
        yield last, sound_s - end_s


def _laal(utterances: Sequence[Utterance], pairs: Sequence[Pair]) -> Iterator[tuple[int, float]]:
    """LAAL of each utterance from the words aligned with its own, as in StreamLAAL (Papi et al. 2024)."""
    delays_s, num_words = defaultdict[int, list[float]](list), defaultdict[int, int](int)
    for pair in pairs:
        if pair.said:
            num_words[pair.said.utterance] += 1
            if pair.written:
                delays_s[pair.said.utterance].append(max(0.0, pair.written.written_s - utterances[pair.said.utterance].start_s))
    for index, delays in delays_s.items():
        yield index, length_adaptive_average_lagging(delays, source=utterances[index].duration_s, target=num_words[index])


def _near(edges_s: Sequence[float]) -> Callable[[float], bool]:
    """Whether a time is within a second of an edge."""
    sorted_E = np.array([-math.inf, *sorted(edges_s), math.inf])

    def near(time_s: float) -> bool:
        after = int(np.searchsorted(sorted_E, time_s))
        return bool(min(time_s - sorted_E[after - 1], sorted_E[after] - time_s) <= EDGE_S)

    return near


# Normalised words, each with the word it came from.


@lru_cache(maxsize=1)
def _normal() -> Callable[[str], str]:
    return lru_cache(maxsize=100_000)(normaliser("english")[0])


def _normalised(words: Sequence[Word]) -> list[tuple[str, Word]]:
    """The normalised text word by word, each with the last of the words it was made from: twenty one is 21."""
    normal = _normal()
    alone = [(part, word) for word in words for part in normal(word.text).split()]
    wanted = normal(" ".join(word.text for word in words)).split()
    if not alone or wanted == [part for part, _ in alone]:
        return alone
    found, before = list[tuple[str, Word]](), ""
    for kind, alone_at, wanted_at in _edits([part for part, _ in alone], wanted):
        if kind == "delete" and before == "substitute":
            found[-1] = found[-1][0], alone[alone_at.stop - 1][1]
        elif kind == "insert":
            found += [(word, alone[max(0, alone_at.start - 1)][1]) for word in wanted[wanted_at]]
        elif kind != "delete":
            found += [(word, origin) for word, (_, origin) in zip(wanted[wanted_at], alone[alone_at], strict=True)]
        before = kind
    return found


def _edits(one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[str, slice, slice]]:
    """The runs of the least edit from one text to another: equal, substitute, insert, delete, with their places in both."""
    if not one or not other:
        yield ("delete" if one else "insert"), slice(0, len(one)), slice(0, len(other))
        return
    try:
        import jiwer
    except ModuleNotFoundError:
        raise MissingExtraError("jiwer", "eval", "the word error rate") from None
    for run in jiwer.process_words(" ".join(one), " ".join(other)).alignments[0]:
        yield run.type, slice(run.ref_start_idx, run.ref_end_idx), slice(run.hyp_start_idx, run.hyp_end_idx)
