"""The decoder as a policy sees it: every row reads all source that has arrived, so text is read again when more comes.

Shape suffixes as in decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from zendaya.nn.decoder import AttentionTap
from zendaya.nn.model import Model
from zendaya.runtime.policies.base import Floats, Heads, chosen_heads, num_shared
from zendaya.runtime.rows import DecoderRows


class WindowView:
    """One window's `PolicyView`; it counts the tokens that a later decode changed.

    Where the window slides, it also notes the source token that each token of a decode attends to most.
    """

    def __init__(
        self, model: Model, rows: DecoderRows, choose: Callable[[Tensor, Sequence[int]], int], *, max_steps: int
    ) -> None:  # fmt: skip
        self.arrived, self.complete = 0, False
        self._model, self._rows, self._choose, self._max_steps = model, rows, choose, max_steps
        self._window = rows.window
        self._first_row = rows.cache.num_rows  # rows of the history stay
        self._read, self._fed = (0, 0), 0
        self._logits_V: Tensor | None = None
        self._place = 0
        self._tap = AttentionTap(chosen_heads(model, None, ())) if self._window.slides else None
        self._decoded = list[int]()  # the text written then, and what the last decode would have added
        self.places = [0] * len(self._written)
        """Of each token of the text written, and of what the last decode would add."""

    @property
    def end(self) -> int:
        return self._model.config.framing.end

    @property
    def _written(self) -> Sequence[int]:
        return self._window.written

    def attend(self, layer: int | None, heads: Heads) -> tuple[int, Floats]:
        if self._tap is None:
            self._tap = AttentionTap(chosen_heads(self._model, layer, heads))
        token = self._choose(self._ahead(), self._written)
        self.places[len(self._written) :] = [self._place]
        self._compare([token])
        return token, self._tap.mean().numpy(force=True)

    def hypothesis(self) -> list[int]:
        logits_V, tokens, places = self._ahead(), list[int](), [self._place]
        num_rows, tap = self._rows.cache.num_rows, self._tap if self._window.slides else None
        while True:
            tokens.append(self._choose(logits_V, [*self._written, *tokens]))
            if tokens[-1] == self.end or len(self._written) + len(tokens) == self._max_steps:
                break
            logits_V = self._rows.run(tokens[-1:], self.arrived, tap)
            places.append(0 if tap is None else tap.most_attended())
        self._rows.cache.num_rows = num_rows
        self.places[len(self._written) :] = places
        self._compare(tokens)
        return tokens

    def _ahead(self) -> Tensor:
        """Logits of the next step: all rows are run again if more source has arrived, or other, else only the new ones."""
        if self._read != (self.arrived, self._window.revisions):
            self._rows.cache.num_rows, self._read, self._fed = self._first_row, (self.arrived, self._window.revisions), 0
            ids = [*self._model.config.framing.prompt, *self._written]
        else:
            ids = list(self._written[self._fed :])
        if ids:
            self._logits_V, self._fed = self._rows.run(ids, self.arrived, self._tap), len(self._written)
            self._place = self._tap.most_attended() if self._tap is not None and self._window.slides else 0
        assert self._logits_V is not None
        return self._logits_V

    def _compare(self, tokens: Sequence[int]) -> None:
        """Count the unwritten tokens of the decode before that this one changed."""
        before, said = self._decoded[len(self._written) :], [token for token in tokens if token != self.end]
        self._rows.cost.revised += len(before) - num_shared(before, said, self.end)
        self._decoded = [*self._written, *said]
