"""AlignAtt: wait while the decoder looks at the newest source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zendaya.runtime.policies.base import AttentionPolicy, Floats, check_count, parse_options

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class AlignAtt(AttentionPolicy):
    """Wait when the most attended source token is among the `last` that have arrived (Papi et al. 2023).

    >>> import numpy as np
    >>> attention = np.array([0.1, 0.6, 0.2, 0.1])
    >>> AlignAtt(2).looks_ahead(attention), AlignAtt(3).looks_ahead(attention)
    (False, True)
    """

    form = "alignatt=LAST[,chunk=N][,layer=N][,heads=LAYER.HEAD+LAYER.HEAD]"

    last: int

    def __post_init__(self) -> None:
        check_count(1, last=self.last)
        super().__post_init__()

    def looks_ahead(self, attention: Floats) -> bool:
        return int(attention.argmax()) >= attention.size - self.last

    @classmethod
    def parse(cls, text: str) -> Self:
        last, options = parse_options(text, **cls.kinds)
        return cls(int(last), **options)

    def __str__(self) -> str:
        return f"alignatt={self.last}{self._options()}"


POLICY = AlignAtt
