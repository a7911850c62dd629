"""Subtitles from events, live: WebVTT and SubRip cues of at most two lines of 42 characters, never overlapping.

A cue is written once, when it is complete, in one write: the file is valid at any moment, even after a kill.
"""

from __future__ import annotations

import html
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zendaya.errors import SourceError
from zendaya.records import Event

WIDTH, LINES = 42, 2
"""Characters per line and lines per cue, as broadcasters and streaming services require."""
MIN_S, MAX_S = 1.0, 7.0
"""Shortest time a cue is shown, unless the text runs ahead, and the longest time that its words may span."""
PAUSE_S = 1.0
"""Words this far apart go to separate cues."""
BEHIND_S, CATCH_UP_S = 2.0, 0.25
"""Cues that begin this much after their words are shown only that long, or as long as the words last, until they catch up."""
WORD_S, LETTER_S = 0.4, 0.08
"""Longest time to say a word, plus this much per letter: anything before is silence."""
FULL = 24
"""Characters of a sentence that make a cue of their own; a shorter sentence waits for the next."""

_SENTENCE = re.compile(r"[.!?…。！？][\"'”’»)\]]*$")
_CLAUSE = re.compile(r"[,;:–—][\"'”’»)\]]*$")


@dataclass(frozen=True)
class Cue:
    """Lines shown together, from one time of the source to another."""

    start_s: float
    end_s: float
    lines: tuple[str, ...]


@dataclass(frozen=True)
class _Word:
    text: str
    start_s: float
    end_s: float


class Cues:
    """Turns text pieces, each with the source time it was spoken by, into cues; every word is shown once and never taken back.

    >>> cues = Cues()
    >>> [*cues.add(" Good", 0.4), *cues.add(" evening.", 0.9), *cues.close()]
    [Cue(start_s=0.0, end_s=1.0, lines=('Good evening.',))]
    """

    def __init__(self) -> None:
        self._open = ""
        """A word that may still grow."""
        self._open_start_s = self._now_s = 0.0
        self._words = list[_Word]()
        self._end_s = 0.0
        """End of the last cue."""

    def add(self, text: str, spoken_s: float) -> Iterator[Cue]:
        """Add the next piece of text, spoken by that time; yields the cues it completes."""
        done = list[Cue]()
        for letter in text:
            if letter.isspace():
                done += self._end_word()
            elif unicodedata.category(letter) not in ("Cc", "Cs"):
                if not self._open:
                    self._open_start_s = self._now_s
                self._open += letter
        self._now_s = max(self._now_s, spoken_s)
        return iter(done)

    def part(self) -> Iterator[Cue]:
        """End the current word, at the end of a window."""
        return iter(self._end_word())

    def close(self) -> Iterator[Cue]:
        """End the text; yields the remaining cues."""
        done = self._end_word()
        while self._words:
            done.append(self._take(len(self._words)))
        return iter(done)

    def _end_word(self) -> list[Cue]:
        """End the open word; returns the cues that have no room for it, and the one that it completes."""
        if not self._open:
            return []
        whole, self._open = self._open, ""
        start_s = max(self._open_start_s, self._now_s - WORD_S - LETTER_S * len(whole))
        done = list[Cue]()
        for first in range(0, len(whole), WIDTH):
            word = _Word(whole[first : first + WIDTH], start_s, self._now_s)
            if self._words and word.start_s - self._words[-1].end_s >= PAUSE_S:
                done.append(self._take(len(self._words)))
            while self._words and not self._fits(word):
                done.append(self._take(self._best_break()))
            self._words.append(word)
        text = " ".join(each.text for each in self._words)
        if _SENTENCE.search(text) and len(text) >= FULL:
            done.append(self._take(len(self._words)))
        return done

    def _fits(self, word: _Word) -> bool:
        words = [*self._words, word]
        return word.end_s - words[0].start_s <= MAX_S and _wrap([each.text for each in words]) is not None

    def _best_break(self) -> int:
        """Number of waiting words for the next cue: to the end of a sentence, else of a clause, unless too short, else all."""
        for pattern in (_SENTENCE, _CLAUSE):
            for count in range(len(self._words), 0, -1):
                if pattern.search(self._words[count - 1].text) and len(" ".join(w.text for w in self._words[:count])) >= FULL:
                    return count
        return len(self._words)

    def _take(self, count: int) -> Cue:
        words, self._words = self._words[:count], self._words[count:]
        start_s = max(words[0].start_s, self._end_s)
        behind = start_s - words[0].start_s > BEHIND_S
        end_s = max(words[-1].end_s, start_s + (CATCH_UP_S if behind else MIN_S))
        # In whole milliseconds, so that rounding never makes two cues overlap.
        start_ms = round(start_s * 1000)
        self._end_s = max(start_ms + 1, round(end_s * 1000)) / 1000
        lines = _wrap([word.text for word in words])
        assert lines is not None, words
        return Cue(start_ms / 1000, self._end_s, lines)


def _wrap(words: list[str]) -> tuple[str, ...] | None:
    """The words in one or two lines, broken after punctuation or where the lengths are most alike; None if they do not fit."""
    text = " ".join(words)
    if len(text) <= WIDTH:
        return (text,)
    best: tuple[float, tuple[str, str]] | None = None
    for count in range(1, len(words)):
        upper, lower = " ".join(words[:count]), " ".join(words[count:])
        if max(len(upper), len(lower)) <= WIDTH:
            punctuated = _SENTENCE.search(upper) or _CLAUSE.search(upper)
            cost = abs(len(upper) - len(lower)) - (12 if punctuated else 0)
            if best is None or cost < best[0]:
                best = cost, (upper, lower)
    return best[1] if best else None


# The two formats.


def to_vtt(cue: Cue, number: int) -> str:
    """A WebVTT cue.

    >>> print(to_vtt(Cue(1.5, 3661.25, ("Salt & pepper,", "a --> b")), 1), end="")
    00:00:01.500 --> 01:01:01.250
    Salt &amp; pepper,
    a --&gt; b
    <BLANKLINE>
    """
    text = "\n".join(html.escape(line, quote=False) for line in cue.lines)
    return f"{_time(cue.start_s, '.')} --> {_time(cue.end_s, '.')}\n{text}\n\n"


def to_srt(cue: Cue, number: int) -> str:
    """A SubRip cue. The format has no escapes, so `-->` in the text, which would look like a time, becomes `→`."""
    text = "\n".join(line.replace("-->", "→") for line in cue.lines)
    return f"{number}\n{_time(cue.start_s, ',')} --> {_time(cue.end_s, ',')}\n{text}\n\n"


def _time(moment_s: float, point: str) -> str:
    seconds, ms = divmod(round(moment_s * 1000), 1000)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{point}{ms:03}"


Format = Literal["vtt", "srt"]
_FORMATS: dict[Format, tuple[str, Callable[[Cue, int], str]]] = {"vtt": ("WEBVTT\n\n", to_vtt), "srt": ("", to_srt)}


class SubtitleFile:
    """A subtitle file that grows by whole cues; created with the first cue, or when it is closed."""

    def __init__(self, path: str | Path, form: Format) -> None:
        self.path, (self._head, self._to_text) = Path(path), _FORMATS[form]
        self._number, self._size, self._handle, self._closed = 0, 0, -1, False
        try:
            folder = self.path.parent.stat()
            kind = self.path.stat().st_mode if self.path.exists() else stat.S_IFREG
        except (OSError, ValueError) as error:
            raise SourceError(f"{self.path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
        if not stat.S_ISDIR(folder.st_mode) or stat.S_ISDIR(kind):
            raise SourceError(f"{self.path}: cannot be written: expected a file name in an existing folder")
        if not os.access(self.path if self.path.exists() else self.path.parent, os.W_OK):
            raise SourceError(f"{self.path}: cannot be written: no permission to write there")

    def write(self, cue: Cue) -> None:
        """Append one cue, atomically."""
        self._number += 1
        self._append(self._to_text(cue, self._number))

    def close(self, *, make: bool = True) -> None:
        """Close the file; `make` creates it if there was no cue."""
        if not self._closed:
            self._closed = True
            if make:
                self._append("")
            if self._handle >= 0:
                os.close(self._handle)

    def _append(self, text: str) -> None:
        try:
            if self._handle < 0:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                text = self._head + text
            data = text.encode()
            written = os.write(self._handle, data) if data else 0
            if written < len(data):
                os.ftruncate(self._handle, self._size)
                raise OSError(28, "No space left on device")
            self._size += written
        except OSError as error:
            raise SourceError(f"{self.path}: cannot be written: {error.strerror or error}; it holds the cues before this one") from None


class Subtitles:
    """Events to cues to files: `add` each event with the source time it was spoken by, then `close`."""

    def __init__(self, *files: SubtitleFile) -> None:
        self._cues, self._files = Cues(), files

    def add(self, event: Event, spoken_s: float) -> None:
        """Add the next event; a cue it completes is in the files when this returns."""
        self._write(self._cues.add(event.text, spoken_s))
        if event.last:
            self._write(self._cues.part())

    def close(self, *, make: bool = True) -> None:
        """Write the remaining cues and close the files; `make` creates files even without cues."""
        self._write(self._cues.close())
        for file in self._files:
            file.close(make=make)

    def _write(self, cues: Iterator[Cue]) -> None:
        for cue in cues:
            for file in self._files:
                file.write(cue)
