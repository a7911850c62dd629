"""Windows that overlap: which words a new window begins with, and how far their rows may read (method.md §10)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from zendaya.nn.tokenizer import Tokenizer
from zendaya.runtime.rows import RowRequest

EDGE_TOKENS = 25
"""Newest source tokens of a full window, 0.5 s of speech, on which no step is written: their right context is in the next window."""

REWIND_TOKENS = 50
"""A word that was heard this much before the last one, a second of speech, has been written before if the same word was heard there."""
STALL_TOKENS, STALL_WORDS = 100, 3
"""Source tokens of speech, 2 s, that a text may leave behind unwritten before it begins anew after its last word, and the tokens of text
that it takes to say so: a noise that wrote a word is no text."""


def first_kept(starts: Sequence[bool], places: Sequence[int], begin: int) -> int:
    """The first written token that belongs to a window from source token `begin` on: its whole words are kept or dropped.

    `starts` says which tokens begin a word. A word lies where its last token was heard. Of all places to split, the one with the fewest
    words on the wrong side is taken, and of equal ones the first.

    >>> first_kept([True, False, True, True], [3, 5, 12, 14], begin=10)
    2
    >>> first_kept([True, True, True], [11, 4, 15], begin=10)
    0
    """
    firsts = [index for index, start in enumerate(starts) if start or index == 0]
    late = [places[after - 1] >= begin for _, after in itertools.pairwise([*firsts, len(places)])]
    wrong = [sum(late[:split]) + len(late[split:]) - sum(late[split:]) for split in range(len(late) + 1)]
    return [*firsts, len(places)][wrong.index(min(wrong))]


def word_starts(tokens: Sequence[int], tokenizer: Tokenizer | None) -> list[bool]:
    """Which tokens begin a word: those whose text begins with a blank, all where there is no text."""
    return [tokenizer is None or tokenizer.decode([token])[:1].isspace() for token in tokens]


def same_word(one: int, other: int, tokenizer: Tokenizer | None) -> bool:
    """Whether two tokens are the same but for capitals."""
    return one == other or (tokenizer is not None and tokenizer.decode([one]).lower() == tokenizer.decode([other]).lower())


def prefix_rows(prompt: Sequence[int], prefix: Sequence[int], horizons: Sequence[int]) -> list[RowRequest]:
    """The rows before the last of a prefix, in runs of equal horizon: each reads as far as its own step did, and no further.

    >>> [(request.ids, request.horizon) for request in prefix_rows([1], [7, 8, 9], [4, 4, 6])]
    [([1, 7], 4), ([8], 6)]
    """
    if not prefix:
        return []
    rows = zip([*prompt, *prefix[:-1]], [*[horizons[0]] * len(prompt), *horizons[1:]], strict=True)
    runs = [(horizon, [token for token, _ in run]) for horizon, run in itertools.groupby(rows, key=lambda row: row[1])]
    return [RowRequest(ids, horizon, is_step=False) for horizon, ids in runs]
