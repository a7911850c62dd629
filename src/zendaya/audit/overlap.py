"""The audit of windows that overlap: no event depends on source tokens past its horizon, counted in the stream (method.md §10).

In time nothing would show: when a window slides, all tokens of its overlap have arrived. A word taken over whose row reads past its
horizon still tells the next step more than its own horizon licenses.

Shape suffixes as in encoders/base.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from zendaya.audit.probe import Violation
from zendaya.encoders.base import Tokens
from zendaya.errors import SourceError
from zendaya.records import Event
from zendaya.runtime.session import Session

Change = Literal["noise", "nan"]


@dataclass(frozen=True)
class OverlapAudit:
    """The result of an audit of overlapping windows."""

    num_compared: int
    """Events compared that follow words which their window took over."""
    violations: tuple[Violation, ...]

    @property
    def clean(self) -> bool:
        """No violation, and something was compared."""
        return not self.violations and self.num_compared > 0


def audit_overlap(open_session: Callable[[], Session], parts: Sequence[Tokens], *, num_events: int = 8, seed: int = 0) -> OverlapAudit:
    """Replace every version of the source tokens past the horizon of an event: the events up to it must be the same to the bit.

    `parts` are blocks as an encoder gives them, with the tokens that they revise and where they begin a span.
    """
    generator = torch.Generator().manual_seed(seed)
    reference = list(_events(open_session(), parts))
    after_slide = [n for n, event in enumerate(reference) if event.window_index and event.step > 1]
    # The first event after each slide is the sharpest: it follows rows of the words taken over alone.
    firsts = [n for n in after_slide if reference[n].window_index != reference[n - 1].window_index]
    after_slide = sorted({*firsts[:num_events], *after_slide[:: max(1, 2 * len(after_slide) // num_events)]})
    violations = list[Violation]()
    for n in after_slide:
        event = reference[n]
        keep = event.window_start + event.effective_horizon
        for change in get_args(Change):
            try:
                found = list(itertools.islice(_events(open_session(), list(_altered(parts, keep, change, generator))), n + 1))
            except SourceError as error:  # a token that it may not read was not finite
                detail, found = str(error), []
            else:
                detail = f"window {event.window_index}"
            if found != reference[: n + 1]:
                violations.append(Violation("overlap", change, event.step, keep + 1, float("nan"), detail))
    return OverlapAudit(len(after_slide), tuple(violations))


def _events(session: Session, parts: Sequence[Tokens]) -> Iterator[Event]:
    for part in parts:
        yield from session.push(part.values_TE, part.arrival_s, revised=part.revised, restart=part.restart)
    yield from session.finish()


def _altered(parts: Sequence[Tokens], keep: int, change: Change, generator: torch.Generator) -> Iterator[Tokens]:
    """The parts with every source token of the stream from `keep` on replaced."""
    given = 0
    for part in parts:
        first = given - part.revised
        count, given = min(len(part), max(0, keep - first)), first + len(part)
        other_TE = torch.full_like(part.values_TE, torch.nan) if change == "nan" else _noise(part.values_TE, generator)
        yield Tokens(torch.cat([part.values_TE[:count], other_TE[count:]]), part.arrival_s, part.revised, part.restart)


def _noise(like_TE: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like_TE.shape, generator=generator, dtype=like_TE.dtype)
