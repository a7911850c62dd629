"""Text as a source: BPE ids as words arrive, for simultaneous translation.

What is learned cannot live in a frozen encoder. So the encoder gives the id itself, as a token of one number, exact in float32; the
decoder (`source_vocab` of its config) looks it up in a table that is trained and saved with it. Feature stores and sessions carry
one number a token, nothing is one-hot, and changing the embedding does not touch stored features.

Shape suffixes: T tokens, E features of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from zendaya.encoders import Tokens, Traits
from zendaya.errors import ConfigError, SourceError

MAX_VOCAB = 2**24
"""Float32 holds every whole number up to here."""
MAX_WORD = 10_000
"""Characters; a longer run without a space is not text, and would be held in memory until one came."""


class SupportsEncode(Protocol):
    """What is asked of a tokenizer: `zendaya.text.Tokenizer` has it."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass
class TextState:
    """A text so far: how many words were given out, and the one that has not ended."""

    num_words: int = 0
    word: str = ""


class TextEncoder:
    """A word's BPE ids, once the word has ended: before that, more letters could change them.

    Time is counted in words: word w (from 0) arrives at (w+1)/words_per_s, with all its tokens. White space of any kind and length
    is one space, so that word by word gives the same ids as the whole text at once.
    """

    def __init__(self, tokenizer: SupportsEncode, *, words_per_s: float = 1.0) -> None:
        if not 0 < words_per_s < float("inf"):
            raise ConfigError(f"text: words_per_s must be above 0: got {words_per_s!r}")
        if tokenizer.vocab_size > MAX_VOCAB:
            raise ConfigError(f"text: a vocabulary of at most {MAX_VOCAB} ids is exact in float32: got {tokenizer.vocab_size}")
        self.tokenizer, self.words_per_s = tokenizer, words_per_s
        self.traits = Traits(
            # A rate of words: a word is one token or a few.
            name=f"text vocab={tokenizer.vocab_size}",
            dim=1,
            tokens_per_s=words_per_s,
            look_back_s=0.0,
            look_ahead_s=0.0,
            live=True,
            ids=True,
        )

    def start(self) -> TextState:
        return TextState()

    def read(self, state: TextState, raw: str) -> Tokens:
        *ended, state.word = _split(state.word + raw)
        if len(state.word) > MAX_WORD:
            raise SourceError(f"text: a word of more than {MAX_WORD} characters: expected words with spaces between them; is this text?")
        return Tokens.join([self._give(state, word) for word in ended if word], 1)

    def finish(self, state: TextState) -> Tokens:
        word, state.word = state.word, ""
        return self._give(state, word) if word else Tokens.none(1)

    def _give(self, state: TextState, word: str) -> Tokens:
        # A byte-level BPE never merges across the space before a word, which belongs to the word.
        ids = self.tokenizer.encode(word if state.num_words == 0 else " " + word)
        state.num_words += 1
        values_T1 = torch.tensor(ids, dtype=torch.float32).reshape(-1, 1)
        return Tokens(values_T1, np.full(len(ids), state.num_words / self.words_per_s))


def _split(text: str) -> list[str]:
    """Words, of which the last has not ended (it is empty if the text ends in white space)."""
    words = text.split()
    return [*words, ""] if not text or text[-1].isspace() else words
