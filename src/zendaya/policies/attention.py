"""Policies that look where the decoder looks: a token that leans on the newest source waits for more of it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass

from zendaya.errors import ConfigError
from zendaya.policies.policy import Floats, Heads, Policy, View, check_count


@dataclass(frozen=True, kw_only=True)
class Looking(Policy):
    """A policy that looks at cross-attention: a mean over the `heads` given, else over all heads of the `layer` given, else over the
    model's alignment heads if it knows any (Whisper publishes its own), else over all heads of the layer two thirds of the way up."""

    chunk: int = 1
    layer: int | None = None
    """From 0."""
    heads: Heads = ()

    def __post_init__(self) -> None:
        check_count(1, chunk=self.chunk)
        check_count(0, layer=self.layer or 0, head=min((0, *(place for head in self.heads for place in head))))

    def start(self) -> None:
        """It remembers nothing."""

    def decide(self, view: View, state: None) -> int | None:
        token, attention = view.attend(self.layer, self.heads)
        return None if not view.complete and (token == view.end or self.looks_ahead(attention)) else token

    @abstractmethod
    def looks_ahead(self, attention: Floats) -> bool:
        """Whether a token that attends so to the source that has arrived leans on what is so new that more might change it."""

    def _places(self) -> str:
        """How chunk, layer and heads are printed."""
        heads = "+".join(f"{layer}.{head}" for layer, head in self.heads)
        return f",chunk={self.chunk}" + (f",layer={self.layer}" if self.layer is not None else "") + (f",heads={heads}" if heads else "")


@dataclass(frozen=True)
class AlignAtt(Looking):
    """Wait when the most attended source token is among the `last` that have arrived (Papi et al. 2023).

    >>> import numpy as np
    >>> attention = np.array([0.1, 0.6, 0.2, 0.1])
    >>> AlignAtt(2).looks_ahead(attention), AlignAtt(3).looks_ahead(attention)
    (False, True)
    """

    last: int

    def __post_init__(self) -> None:
        check_count(1, last=self.last)
        super().__post_init__()

    def looks_ahead(self, attention: Floats) -> bool:
        return int(attention.argmax()) >= attention.size - self.last

    def __str__(self) -> str:
        return f"alignatt={self.last}{self._places()}"


@dataclass(frozen=True)
class EDAtt(Looking):
    """Wait when the `last` source tokens that have arrived get at least a `share` of the attention (Papi et al. 2022).

    >>> import numpy as np
    >>> attention = np.array([0.4, 0.3, 0.2, 0.1])
    >>> EDAtt(0.5, last=2).looks_ahead(attention), EDAtt(0.25, last=2).looks_ahead(attention)
    (False, True)
    """

    share: float
    _: KW_ONLY
    last: int = 2

    def __post_init__(self) -> None:
        share: object = self.share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"a policy's share must lie above 0 and not above 1: got {share!r}")
        check_count(1, last=self.last)
        super().__post_init__()

    def looks_ahead(self, attention: Floats) -> bool:
        # All of it is 1, which a sum of floats may miss.
        return attention.size <= self.last or float(attention[-self.last :].sum()) >= self.share

    def __str__(self) -> str:
        return f"edatt={self.share},last={self.last}{self._places()}"
