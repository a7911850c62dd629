"""The decoder as a policy sees it: every row reads all source that has arrived, so text is read again when more comes.

Shape suffixes as in decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from zendaya.nn.decoder import AttentionTap
from zendaya.nn.model import Model
from zendaya.runtime.engine import EngineCache
from zendaya.runtime.policies.base import Cost, Floats, Heads, chosen_heads, num_shared

Run = Callable[[Sequence[int], int, AttentionTap | None], Tensor]
"""Runs text rows through the decoder, reading so many source tokens, with a tap or without: the logits (V) of the last row."""


class WindowView:
    """One window's `PolicyView`; it counts the tokens that a later decode changed."""

    def __init__(
        self, model: Model, cache: EngineCache, written: Sequence[int], run: Run, choose: Callable[[Tensor, Sequence[int]], int], *,
        max_steps: int, cost: Cost,
    ) -> None:  # fmt: skip
        self.arrived, self.complete = 0, False
        self._model, self._cache, self._written, self._run, self._choose = model, cache, written, run, choose
        self._max_steps, self._cost = max_steps, cost
        self._first_row = cache.num_rows  # rows of the history stay
        self._read = self._fed = 0
        self._logits_V: Tensor | None = None
        self._tap: AttentionTap | None = None
        self._decoded = list[int]()  # the text written then, and what the last decode would have added

    @property
    def end(self) -> int:
        return self._model.config.framing.end

    def attend(self, layer: int | None, heads: Heads) -> tuple[int, Floats]:
        if self._tap is None:
            self._tap = AttentionTap(chosen_heads(self._model, layer, heads))
        token = self._choose(self._ahead(), self._written)
        self._compare([token])
        return token, self._tap.mean().numpy(force=True)

    def hypothesis(self) -> list[int]:
        logits_V, tokens = self._ahead(), list[int]()
        rows = self._cache.num_rows
        while True:
            tokens.append(self._choose(logits_V, [*self._written, *tokens]))
            if tokens[-1] == self.end or len(self._written) + len(tokens) == self._max_steps:
                break
            logits_V = self._run(tokens[-1:], self.arrived, None)
        self._cache.num_rows = rows
        self._compare(tokens)
        return tokens

    def _ahead(self) -> Tensor:
        """Logits of the next step: all rows are run again if more source has arrived, else only the new ones."""
        if self._read < self.arrived:
            self._cache.num_rows, self._read, self._fed = self._first_row, self.arrived, 0
            ids = [*self._model.config.framing.prompt, *self._written]
        else:
            ids = list(self._written[self._fed :])
        if ids:
            self._logits_V, self._fed = self._run(ids, self.arrived, self._tap), len(self._written)
        assert self._logits_V is not None
        return self._logits_V

    def _compare(self, tokens: Sequence[int]) -> None:
        """Count the unwritten tokens of the decode before that this one changed."""
        before, said = self._decoded[len(self._written) :], [token for token in tokens if token != self.end]
        self._cost.revised += len(before) - num_shared(before, said, self.end)
        self._decoded = [*self._written, *said]
