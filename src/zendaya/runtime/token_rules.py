"""Token rules: which token may follow a window's text, a chain of small rules over the logits.

Shape suffixes as in decoder.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from zendaya.nn.config import Framing, ModelConfig

LONGEST_PHRASE = 12
"""Tokens of the longest phrase whose repetition counts as a loop: about a clause."""
END_SHARE = 0.5
"""Where the end may mean "not yet", it is taken only if it is likelier than all words together."""


START_SHARE = 0.2
"""Least probability of a text's first token: between those of noise and of speech (`benchmarks/first_tokens.py`, docs/LOG.md)."""
START_TOKENS = 75
"""Source tokens of speech, 1.5 s, after which a text begins with any word, however unsure: a name may always be a guess."""


class TokenRule:
    """One rule of the chain; by itself it allows everything."""

    def banned(self, text: Sequence[int]) -> Collection[int]:
        """Ids that may not follow the text."""
        return ()

    def doubts(self, token: int, text: Sequence[int]) -> bool:
        """Whether the likeliest id needs `adjust` before it is taken."""
        return False

    def adjust(self, logits_V: Tensor, text: Sequence[int]) -> None:
        """Change the logits in place, after all banned ids were taken out."""


class Suppression(TokenRule):
    """Ids that a model never writes, and those that no text begins with."""

    def __init__(self, framing: Framing) -> None:
        self._always = frozenset(framing.suppress)
        self._first = self._always | frozenset(framing.suppress_first)

    def banned(self, text: Sequence[int]) -> Collection[int]:
        return self._always if text else self._first


class RepetitionGuard(TokenRule):
    """A phrase repeated for `loop_tokens` tokens is not continued."""

    def __init__(self, loop_tokens: int) -> None:
        self._loop_tokens = loop_tokens

    def banned(self, text: Sequence[int]) -> Collection[int]:
        return repeated_phrase_tokens(text, self._loop_tokens)


class LikelyEnd(TokenRule):
    """The end of a text must be likelier than all words together."""

    def __init__(self, end: int) -> None:
        self._end = end

    def doubts(self, token: int, text: Sequence[int]) -> bool:
        return token == self._end

    def adjust(self, logits_V: Tensor, text: Sequence[int]) -> None:
        if float(logits_V.softmax(-1)[self._end]) < END_SHARE:
            logits_V[self._end] = -torch.inf


class SureStart(TokenRule):
    """A text whose first token would be a guess among many does not begin: there is no speech, or too little was heard."""

    def __init__(self, end: int) -> None:
        self._end = end

    def doubts(self, token: int, text: Sequence[int]) -> bool:
        return not text and token != self._end

    def adjust(self, logits_V: Tensor, text: Sequence[int]) -> None:
        if text:
            return
        words_V = logits_V.softmax(-1)
        words_V[self._end] = 0.0
        if float(words_V.max()) < START_SHARE:
            logits_V.fill_(-torch.inf)
            logits_V[self._end] = 0.0


class TokenRules:
    """The chain: the likeliest token that every rule allows."""

    def __init__(self, rules: Sequence[TokenRule]) -> None:
        self.rules = tuple(rules)
        self._spoken = tuple(rule for rule in self.rules if not isinstance(rule, SureStart))

    @staticmethod
    def of(config: ModelConfig, *, speech_only: bool = False) -> TokenRules:
        """The rules that a model's config asks for; with `speech_only`, also the guard against text without speech."""
        rules: list[TokenRule] = [Suppression(config.framing)]
        if config.loop_tokens:
            rules.append(RepetitionGuard(config.loop_tokens))
        if config.end_means_wait or config.overlap_tokens:
            rules += [SureStart(config.framing.end)] if speech_only else []
            # In windows that slide a word that is less likely than "not yet" is asked for again soon.
            rules += [] if config.overlap_tokens else [LikelyEnd(config.framing.end)]
        return TokenRules(rules)

    def choose(self, logits_V: Tensor, text: Sequence[int], *, speech: int = 0) -> int:
        """The greedy choice after a window's text, of which so many source tokens hold speech."""
        rules = self.rules if speech < START_TOKENS else self._spoken
        best = int(logits_V.numpy().argmax() if logits_V.is_cpu else logits_V.argmax())  # NumPy's is four times as fast
        if not any(best in rule.banned(text) or rule.doubts(best, text) for rule in rules):
            return best
        banned = {token for rule in rules for token in rule.banned(text)}
        logits_V = logits_V.clone()
        logits_V[list(banned)] = -torch.inf
        for rule in rules:
            rule.adjust(logits_V, text)
        return int(logits_V.argmax())


def repeated_phrase_tokens(written: Sequence[int], num_tokens: int) -> list[int]:
    """Tokens that would continue a phrase repeated for so many tokens, and at least three times, up to the last one.

    >>> repeated_phrase_tokens([5, 7, 7, 7, 7], 4), repeated_phrase_tokens([7, 7, 7], 4), repeated_phrase_tokens([1, 2] * 3, 4)
    ([7], [], [1])
    """
    found = []
    for period in range(1, LONGEST_PHRASE + 1):
        stretch = max(num_tokens, 3 * period)
        tail = written[-stretch:]
        if len(tail) == stretch and tail[period:] == tail[:-period]:
            found.append(tail[-period])
    return found
