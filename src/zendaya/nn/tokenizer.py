"""Tokenizers: byte-level BPE trained per corpus, or a published tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from zendaya.errors import CheckpointError, ConfigError
from zendaya.nn.config import Framing

SPECIAL_TOKENS = ("[PAD]", "[BOS]", "[EOS]", "[PREV]")
"""Ids 0 … 3 of every tokenizer that `Tokenizer.train` makes."""


class Tokenizer:
    """Text to target ids and back.

    >>> tokenizer = Tokenizer.train(["a small test", "a smaller test"], vocab_size=280)
    >>> tokenizer.decode(tokenizer.encode("a test"))
    'a test'
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = 8000) -> Tokenizer:
        """A byte-level BPE of at most `vocab_size` ids, which encodes any text."""
        alphabet = ByteLevel.alphabet()
        if vocab_size < len(alphabet) + len(SPECIAL_TOKENS):
            raise ConfigError(
                f"vocab_size: expected at least {len(alphabet) + len(SPECIAL_TOKENS)}, the bytes and special ids: got {vocab_size}"
            )
        backend = tokenizers.Tokenizer(BPE())
        backend.normalizer = NFC()
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
        backend.decoder = ByteLevelDecoder()
        trainer = BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=sorted(alphabet), show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def from_json(cls, text: str, where: str = "tokenizer.json") -> Tokenizer:
        """The tokenizer in a tokenizer.json of the tokenizers library, such as `to_json` gives."""
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{where}: not a tokenizer of the tokenizers library: {error}") from None

    def to_json(self) -> str:
        return self._backend.to_str()

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without prompt or end."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._backend.decode(list(ids))

    def stream(self) -> Callable[[int], str]:
        """A function that takes ids one by one and returns the text each adds; a character comes once all its bytes have."""
        state = DecodeStream(skip_special_tokens=True)
        return lambda token: state.step(self._backend, token) or ""

    def framing(self) -> Framing:
        """The framing of a tokenizer from `train`, or of English-only Whisper's."""
        if (ids := self.ids(*SPECIAL_TOKENS)) is not None:
            pad, begin, end, previous = ids
            return Framing(prompt=(begin,), end=end, previous=previous, suppress=(pad, begin, previous))
        if (ids := self.ids(*_WHISPER_TOKENS)) is not None:
            start, no_timestamps, end, previous = ids
            return Framing(prompt=(start, no_timestamps), end=end, previous=previous, suppress=(start, no_timestamps, previous))
        raise ConfigError(
            f"the tokenizer has neither {', '.join(SPECIAL_TOKENS)} nor Whisper's special tokens: set `framing` in the model config"
        )

    def ids(self, *names: str) -> list[int] | None:
        """The ids of special tokens; None if one is unknown."""
        ids = [self._backend.token_to_id(name) for name in names]
        return [i for i in ids if i is not None] if None not in ids else None


_WHISPER_TOKENS = ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>", "<|startofprev|>")


def learned_text(text: str, lower: bool) -> str:
    """A text as training sees it; its steps are counted on this form.

    >>> learned_text("A man's  dog, RUNS.", lower=True)
    "a man's dog runs"
    """
    text = " ".join(text.split())
    return re.sub(r"[^\w\s']", "", text.lower()).strip() if lower else text
