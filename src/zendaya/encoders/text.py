"""Text as a source: BPE ids as words arrive, for simultaneous translation.

A token is the id itself, one number exact in float32; the decoder looks it up in a trained table (`source_vocab` of its config).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from zendaya.encoders.base import Encoder, EncoderFactory, Tokens, Traits
from zendaya.errors import ConfigError, SourceError
from zendaya.nn.tokenizer import Tokenizer

MAX_VOCAB = 2**24
"""Float32 holds every whole number up to 2²⁴ exactly."""
MAX_WORD = 10_000
"""Characters; a longer run without a space is not text, and would fill memory."""


@dataclass
class TextState:
    """A text so far: the number of complete words, and the word that has not ended."""

    num_words: int = 0
    word: str = ""


class TextEncoder(Encoder[str, TextState]):
    """A word's BPE ids once the word has ended: word w (from 0) arrives at (w+1)/words_per_s. Any white space is one space."""

    def __init__(self, tokenizer: Tokenizer, *, words_per_s: float = 1.0) -> None:
        if not 0 < words_per_s < float("inf"):
            raise ConfigError(f"text: words_per_s must be above 0: got {words_per_s!r}")
        if tokenizer.vocab_size > MAX_VOCAB:
            raise ConfigError(f"text: a vocabulary of at most {MAX_VOCAB} ids is exact in float32: got {tokenizer.vocab_size}")
        self.tokenizer, self.words_per_s = tokenizer, words_per_s
        self.traits = Traits(  # tokens_per_s counts words, of one or a few tokens each
            name=f"text vocab={tokenizer.vocab_size}", modality="text", dim=1, tokens_per_s=words_per_s, look_back_s=0.0, look_ahead_s=0.0,
            live=True, ids=True,
        )  # fmt: skip

    def start(self) -> TextState:
        return TextState()

    def read(self, state: TextState, raw: str) -> Tokens:
        text = state.word + raw
        *ended, state.word = text.split() if text and not text[-1].isspace() else [*text.split(), ""]
        if len(state.word) > MAX_WORD:
            raise SourceError(f"text: a word of more than {MAX_WORD} characters: expected words with spaces between them; is this text?")
        return Tokens.join([self._give(state, word) for word in ended], 1)

    def finish(self, state: TextState) -> Tokens:
        word, state.word = state.word, ""
        return self._give(state, word) if word else Tokens.none(1)

    def digest(self) -> str:
        return hashlib.sha256(self.tokenizer.to_json().encode()).hexdigest()

    def _give(self, state: TextState, word: str) -> Tokens:
        # A byte-level BPE never merges across the space before a word, which belongs to the word.
        ids = self.tokenizer.encode(word if state.num_words == 0 else " " + word)
        state.num_words += 1
        values_T1 = torch.tensor(ids, dtype=torch.float32).reshape(-1, 1)
        return Tokens(values_T1, np.full(len(ids), state.num_words / self.words_per_s))


def open_text(tokenizer: str = "", *, words_per_s: float = 1.0) -> TextEncoder:
    """Ids of the tokenizer in a tokenizer.json."""
    if not tokenizer:
        raise ConfigError("encoder text: expected a tokenizer: text:FILE, where FILE is a tokenizer.json")
    try:
        text = Path(tokenizer).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{tokenizer}: cannot be read as a tokenizer: {getattr(error, 'strerror', None) or error}") from None
    return TextEncoder(Tokenizer.from_json(text, tokenizer), words_per_s=words_per_s)


ENCODER = EncoderFactory(modality="text", open=open_text, which="a tokenizer.json", settings={"words_per_s": float})
