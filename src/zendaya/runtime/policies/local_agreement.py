"""LocalAgreement: decode again at each chunk, and write what two decodes in a row agree on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zendaya.runtime.policies.base import Policy, PolicyView, check_count, num_shared, parse_options

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class Agreement:
    """State of LocalAgreement within a window."""

    read: int = 0
    """Source tokens that the last hypothesis read."""
    hypothesis: list[int] = field(default_factory=list)
    """Tokens of the last hypothesis that are not agreed."""
    agreed: list[int] = field(default_factory=list)
    """Tokens that are agreed and not yet written."""


@dataclass(frozen=True)
class LocalAgreement(Policy):
    """LocalAgreement-2: write the prefix that two consecutive hypotheses share (Liu et al. 2020; for Whisper, Macháček et al. 2023).

    At each chunk of source the whole rest of the text is decoded again; once a window is complete, all of it is written.
    """

    form = "local-agreement[=CHUNK]"

    chunk: int | None = None

    def __post_init__(self) -> None:
        check_count(1, chunk=1 if self.chunk is None else self.chunk)

    def start(self) -> Agreement:
        return Agreement()

    def decide(self, view: PolicyView, state: Agreement) -> int | None:
        if state.read < view.arrived:
            state.read, before = view.arrived, state.hypothesis
            hypothesis = view.hypothesis()
            count = num_shared(before, hypothesis, view.end)
            state.agreed, state.hypothesis = hypothesis[:count], hypothesis[count:]
        if view.complete:
            state.agreed, state.hypothesis = state.agreed + state.hypothesis, []
        return state.agreed.pop(0) if state.agreed else None

    @classmethod
    def parse(cls, text: str) -> Self:
        chunk, _ = parse_options(text)
        return cls(int(chunk) if chunk else None)

    def __str__(self) -> str:
        return "local-agreement" + ("" if self.chunk is None else f"={self.chunk}")


POLICY = LocalAgreement
