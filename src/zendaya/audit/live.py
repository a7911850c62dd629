"""The live path: a stream pushed to a session, over several windows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zendaya.audit.probe import MORE, VARIANTS, Probe
from zendaya.errors import SourceError
from zendaya.nn.decoder import AttentionTap
from zendaya.records import Event
from zendaya.runtime.session import Session
from zendaya.schedule import PowerLaw


@dataclass(frozen=True)
class _Decode:
    """The events of a live decode, with the logits of each."""

    events: list[Event]
    rows: list[Tensor]


def check_live(probe: Probe) -> None:
    """Live, closed loop: from a stream pushed to a Session to its text and logits, over several windows."""
    # Three windows and part of a fourth; at scale segment a stream is one window of its own length.
    count = probe.window_tokens - MORE if probe.segment else 3 * probe.window_tokens + probe.window_tokens // 2
    stream_TE = probe.tokens(count)
    base = _decode(probe, stream_TE, [count])
    for event in base.events:
        schedule = probe.schedule if event.gamma is None else PowerLaw(event.gamma)
        # Skipped steps advance the schedule without writing, in the end to the whole window.
        place, window = event.step + event.skipped_steps, _live_window(probe, stream_TE)
        expected = window if place > probe.steps else int(schedule.at(place, source=window, steps=event.predicted_steps))
        least = expected
        if schedule.hold_tokens:  # a range instead of a point
            least = int(schedule.least_horizons(window, event.predicted_steps, num_steps=place)[-1])
        if not least <= event.horizon <= expected:
            detail = f"window {event.window_index}: the runtime read {event.horizon} tokens where the schedule gives {expected}"
            probe.add("live", "nothing", event.step, expected, detail=detail)
            return
    # An event may depend on earlier windows and on its horizon in its own (a fix head reads the whole window). An event written
    # because the stream had ended depends on that end, and has nothing after it to replace.
    whole_window = probe.model.config.length == "fix"
    keeps = [e.window_index * probe.window_tokens + (probe.window_tokens if whole_window else max(1, e.horizon)) for e in base.events]
    probe.count_tested("live", len(base.events))
    # Pushed one token at a time, every event is written before anything beyond its horizon has arrived.
    if _differs(probe, "nothing yet arrived", base, _decode(probe, stream_TE, [1] * count), len(base.events) - 1, keeps):
        return
    for number in probe.some([n for n, e in enumerate(base.events) if e.effective_horizon == e.horizon and keeps[n] <= count]):
        for variant in VARIANTS:
            if keeps[number] == count and variant != "more":
                continue
            replaced = _decode(probe, probe.replace(stream_TE, keeps[number], variant), None, number + 1)
            if _differs(probe, variant, base, replaced, number, keeps):
                return


def _differs(probe: Probe, variant: str, base: _Decode, other: _Decode, number: int, keeps: list[int]) -> bool:
    """Record a violation where the events up to that number, or their logits, are not the same."""
    probe.report.probes += 1
    pairs = [a == b and torch.equal(x, y) for a, b, x, y in zip(base.events, other.events, base.rows, other.rows, strict=False)]
    same = pairs[: number + 1]
    if len(same) > number and all(same):
        return False
    first = same.index(False) if False in same else len(same)
    size = float((base.rows[first] - other.rows[first]).abs().max()) if first < len(same) else math.nan
    event = base.events[first]
    where = f"window {event.window_index}" + ("; the segment's own length is future information" if probe.segment else "")
    probe.add("live", variant, event.step, keeps[first], size=size, detail=where)
    return True


def _live_window(probe: Probe, stream_TE: Tensor) -> int:
    return stream_TE.shape[0] if probe.segment else probe.window_tokens


def _decode(probe: Probe, stream_TE: Tensor, pieces: list[int] | None, limit: int | None = None) -> _Decode:
    """Decode a stream live, pushed in the given pieces or in random ones, up to `limit` events."""
    fixed = probe.steps if probe.model.length is None and probe.schedule.needs_length else None
    session = probe.model.open(
        probe.schedule, window_tokens=_live_window(probe, stream_TE), steps=fixed, max_steps=probe.steps, engine=probe.engine
    )
    rows: list[Tensor] = []
    last: list[Tensor] = []
    step = session.rows.step

    def watched(ids: Sequence[int], horizon: int, tap: AttentionTap | None = None) -> Tensor:
        last[:] = [step(ids, horizon, tap)]
        return last[0]

    session.rows.step = watched  # type: ignore[method-assign]
    events: list[Event] = []
    try:
        for event in _drive(probe, session, stream_TE, pieces):
            events.append(event)
            rows.append(last[0])
            if len(events) == limit:
                break
    except SourceError:  # a NaN within its horizon
        pass
    return _Decode(events, rows)


def _drive(probe: Probe, session: Session, stream_TE: Tensor, pieces: list[int] | None) -> Iterator[Event]:
    at = 0
    left = iter(pieces or [])
    while at < stream_TE.shape[0]:
        count = next(left, 0) or int(torch.randint(1, stream_TE.shape[0] - at + 1, (1,), generator=probe.rng))
        yield from session.push(stream_TE[at : at + count])
        at += count
    yield from session.finish()
