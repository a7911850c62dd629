"""The decoder as a policy sees it: whatever source has arrived is read by every row, so that text is read again when more has come.

Shape suffixes as in decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from zendaya.decoder import Gaze
from zendaya.engine import EngineCache
from zendaya.errors import ConfigError
from zendaya.model import Model
from zendaya.policies.agreement import num_shared
from zendaya.policies.attention import Looking
from zendaya.policies.policy import Cost, Floats, Heads, Policy

Run = Callable[[Sequence[int], int, Gaze | None], Tensor]
"""Rows of text run through the decoder, reading so many source tokens, with a gaze or without: the logits (V) of the last."""


class WindowView:
    """One window's `View`; it counts its decodes that came to nothing."""

    def __init__(
        self, model: Model, cache: EngineCache, written: Sequence[int], run: Run, choose: Callable[[Tensor, Sequence[int]], int], *,
        max_steps: int, cost: Cost,
    ) -> None:  # fmt: skip
        self.arrived, self.complete = 0, False
        self._model, self._cache, self._written, self._run, self._choose = model, cache, written, run, choose
        self._max_steps, self._cost = max_steps, cost
        self._first_row = cache.num_rows  # those of the history stay
        self._read = self._fed = 0
        self._logits_V: Tensor | None = None
        self._gaze: Gaze | None = None
        self._decoded = list[int]()
        self._decoded_from = 0

    @property
    def end(self) -> int:
        return self._model.config.framing.end

    def attend(self, layer: int | None, heads: Heads) -> tuple[int, Floats]:
        if self._gaze is None:
            self._gaze = Gaze(chosen_heads(self._model, layer, heads))
        token = self._choose(self._ahead(), self._written)
        self._compare([token])
        return token, self._gaze.mean().numpy(force=True)

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
        """Logits of the next step: rows are made again where they read less source than has arrived, else the new ones are added."""
        if self._read < self.arrived:
            self._cache.num_rows, self._read, self._fed = self._first_row, self.arrived, 0
            ids = [*self._model.config.framing.prompt, *self._written]
        else:
            ids = list(self._written[self._fed :])
        if ids:
            self._logits_V, self._fed = self._run(ids, self.arrived, self._gaze), len(self._written)
        assert self._logits_V is not None
        return self._logits_V

    def _compare(self, tokens: Sequence[int]) -> None:
        """Count what the decode before this one had, not yet written, that this one has not."""
        before, said = self._decoded[len(self._written) - self._decoded_from :], [token for token in tokens if token != self.end]
        self._cost.revised += len(before) - num_shared(before, said, self.end)
        self._decoded, self._decoded_from = said, len(self._written)


def chosen_heads(model: Model, layer: int | None, heads: Heads) -> Heads:
    """The heads whose mean a policy looks at, see `Looking`; one that the decoder does not have is a ConfigError."""
    config = model.config.decoder
    if not heads and layer is None:
        heads = model.alignment_heads
    if not heads:
        layer = -(-2 * config.layers // 3) - 1 if layer is None else layer
        heads = tuple((layer, head) for head in range(config.heads))
    for place in heads:
        if place[0] >= config.layers or place[1] >= config.heads:
            raise ConfigError(
                f"the policy looks at layer {place[0]}, head {place[1]}: this decoder has layers 0 … {config.layers - 1} of heads 0 … "
                f"{config.heads - 1}"
            )
    return heads


def check_policy(policy: Policy, model: Model) -> None:
    """Refuse a policy that looks where the model has nothing."""
    if isinstance(policy, Looking):
        chosen_heads(model, policy.layer, policy.heads)
