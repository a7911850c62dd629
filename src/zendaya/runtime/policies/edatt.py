"""EDAtt: wait while much of the attention is on the newest source."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from zendaya.errors import ConfigError
from zendaya.runtime.policies.base import AttentionPolicy, Floats, check_count, parse_options

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class EDAtt(AttentionPolicy):
    """Wait when the `last` source tokens that have arrived get at least a `share` of the attention (Papi et al. 2022).

    >>> import numpy as np
    >>> attention = np.array([0.4, 0.3, 0.2, 0.1])
    >>> EDAtt(0.5, last=2).looks_ahead(attention), EDAtt(0.25, last=2).looks_ahead(attention)
    (False, True)
    """

    form = "edatt=SHARE[,last=N][,chunk=N][,layer=N][,heads=LAYER.HEAD+LAYER.HEAD]"

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
        # The share of all tokens is 1, which a sum of floats may miss.
        return attention.size <= self.last or float(attention[-self.last :].sum()) >= self.share

    @classmethod
    def parse(cls, text: str) -> Self:
        share, options = parse_options(text, last=int, **cls.kinds)
        return cls(float(share), **options)

    def __str__(self) -> str:
        return f"edatt={self.share},last={self.last}{self._options()}"


POLICY = EDAtt
