"""The policy that decodes again and again, and writes what two decodes say alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from zendaya.policies.policy import Policy, View, check_count


@dataclass
class Agreement:
    """A window as LocalAgreement knows it."""

    read: int = 0
    """Source tokens that the last hypothesis read."""
    hypothesis: list[int] = field(default_factory=list)
    """What of it is not agreed."""
    agreed: list[int] = field(default_factory=list)
    """What of it is, and is not yet written."""


@dataclass(frozen=True)
class LocalAgreement(Policy):
    """LocalAgreement-2: at each chunk of source decode the whole rest of the text, and write the beginning that this hypothesis shares
    with the one before it; of a complete window, write it all (Liu et al. 2020; for Whisper, Macháček et al. 2023)."""

    chunk: int

    def __post_init__(self) -> None:
        check_count(1, chunk=self.chunk)

    def start(self) -> Agreement:
        return Agreement()

    def decide(self, view: View, state: Agreement) -> int | None:
        if state.read < view.arrived:
            state.read, before = view.arrived, state.hypothesis
            hypothesis = view.hypothesis()
            count = num_shared(before, hypothesis, view.end)
            state.agreed, state.hypothesis = hypothesis[:count], hypothesis[count:]
        if view.complete:
            state.agreed, state.hypothesis = state.agreed + state.hypothesis, []
        return state.agreed.pop(0) if state.agreed else None

    def __str__(self) -> str:
        return f"local-agreement={self.chunk}"


def num_shared(one: list[int], other: list[int], end: int) -> int:
    """How many tokens two texts begin with alike, their end not among them.

    >>> num_shared([5, 6, 7, 2], [5, 6, 8], end=2), num_shared([5, 2], [5, 2], end=2)
    (2, 1)
    """
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count] != end:
        count += 1
    return count
