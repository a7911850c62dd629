"""The live path: a stream pushed to a session, over several windows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zendaya.audit.probe import MORE, VARIANTS, Probe
from zendaya.errors import SourceError
from zendaya.nn.decoder import AttentionTap
from zendaya.records import Event
from zendaya.schedule import PowerLaw

_Decode = list[tuple[Event, Tensor]]
"""The events of a live decode, each with its logits."""


def check_live(probe: Probe) -> None:
    """Live, closed loop: from a stream pushed to a Session to its text and logits, over several windows."""
    # Three windows and part of a fourth; at scale segment a stream is one window of its own length.
    count = probe.window_tokens - MORE if probe.segment else 3 * probe.window_tokens + probe.window_tokens // 2
    stream_TE = probe.tokens(count)
    base = _decode(probe, stream_TE, count)
    events = [event for event, _ in base]
    for event in events:
        schedule = probe.schedule if event.gamma is None else PowerLaw(event.gamma)
        # Skipped steps advance the schedule without writing, in the end to the whole window.
        place, window = event.step + event.skipped_steps, count if probe.segment else probe.window_tokens
        expected = window if place > probe.steps else int(schedule.at(place, source=window, steps=event.predicted_steps))
        least = int(schedule.least_horizons(window, event.predicted_steps, num_steps=place)[-1]) if schedule.hold else expected
        if not least <= event.horizon <= expected:
            detail = f"window {event.window_index}: the runtime read {event.horizon} tokens where the schedule gives {expected}"
            probe.add("live", "nothing", event.step, expected, detail=detail)
            return
    # An event may depend on earlier windows and on its horizon in its own (a fix head reads the whole window). An event written
    # because the stream had ended depends on that end, and has nothing after it to replace.
    whole_window = probe.model.config.length == "fix"
    keeps = [e.window_index * probe.window_tokens + (probe.window_tokens if whole_window else max(1, e.horizon)) for e in events]
    probe.count_tested("live", len(events))
    # Pushed one token at a time, every event is written before anything beyond its horizon has arrived.
    if _differs(probe, "nothing yet arrived", base, _decode(probe, stream_TE, 1), len(events) - 1, keeps):
        return
    for number in probe.some([n for n, e in enumerate(events) if e.effective_horizon == e.horizon and keeps[n] <= count]):
        for variant in VARIANTS:
            if keeps[number] < count or variant == "more":
                replaced = _decode(probe, probe.replace(stream_TE, keeps[number], variant), limit=number + 1)
                if _differs(probe, variant, base, replaced, number, keeps):
                    return


def _differs(probe: Probe, variant: str, base: _Decode, other: _Decode, number: int, keeps: list[int]) -> bool:
    """Record a violation where the events up to that number, or their logits, are not the same."""
    probe.report.probes += 1
    same = [a == b and torch.equal(x, y) for (a, x), (b, y) in zip(base[: number + 1], other, strict=False)]
    if len(same) > number and all(same):
        return False
    first = same.index(False) if False in same else len(same)
    size = float((base[first][1] - other[first][1]).abs().max()) if first < len(same) else math.nan
    event = base[first][0]
    where = f"window {event.window_index}" + ("; the segment's own length is future information" if probe.segment else "")
    probe.add("live", variant, event.step, keeps[first], size=size, detail=where)
    return True


def _decode(probe: Probe, stream_TE: Tensor, size: int | None = None, limit: int | None = None) -> _Decode:
    """Decode a stream live, pushed in pieces of `size` tokens or in random ones, up to `limit` events."""
    fixed = probe.steps if probe.model.length is None and probe.schedule.needs_length else None
    window = stream_TE.shape[0] if probe.segment else probe.window_tokens
    session = probe.model.open(probe.schedule, window_tokens=window, steps=fixed, max_steps=probe.steps, engine=probe.engine)
    found: _Decode = []
    last: list[Tensor] = []
    step = session.rows.step

    def watched(ids: Sequence[int], horizon: int, tap: AttentionTap | None = None) -> Tensor:
        last[:] = [step(ids, horizon, tap)]
        return last[0]

    session.rows.step = watched  # type: ignore[method-assign]

    def driven() -> Iterator[Event]:
        at = 0
        while at < stream_TE.shape[0]:
            count = size or int(torch.randint(1, stream_TE.shape[0] - at + 1, (1,), generator=probe.rng))
            yield from session.push(stream_TE[at : at + count])
            at += count
        yield from session.finish()

    with contextlib.suppress(SourceError):  # a NaN within its horizon
        for event in driven():
            found.append((event, last[0]))
            if len(found) == limit:
                break
    return found
