"""Replay: a session driven by recorded or generated arrivals, faster than real time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from zendaya.records import Event
from zendaya.runtime.arrival_queue import Times
from zendaya.runtime.pipeline import Pipeline
from zendaya.runtime.session import Session, SourceTokens
from zendaya.schedule import Schedule


def replay(
    session: Session, tokens: SourceTokens, arrival_s: Times, *, turns: Iterable[tuple[float | Event, Schedule]] = (),
    cuts: Iterable[int] = (), end_s: float | None = None, until_s: float = math.inf,
) -> Iterator[Event]:  # fmt: skip
    """The events that a live run with these arrivals gives.

    `turns` are the moments at which the dial was turned, with the new schedule; of a live run, the event that marked the turn stands
    for the moment, since steps due by then may not have been written. `cuts` are token counts after which a window was cut, `end_s`
    when the source was known to have ended (default: with the last arrival). `until_s` gives what had been written by then.

    >>> from zendaya import Model, PowerLaw
    >>> model = Model.from_preset("tiny")
    >>> events = list(replay(model.open(PowerLaw(1)), np.zeros((24, 16)), np.arange(24) / 3, turns=[(4.0, PowerLaw(0.3))]))
    >>> [(event.schedule, event.arrival_s) for event in events if event.schedule]
    [('gamma=0.3', 4.0)]
    """
    turns, pipeline = list(turns), Pipeline(session)
    times_T = np.broadcast_to(np.asarray(arrival_s, np.float64), (len(tokens),))
    count = int(np.searchsorted(times_T, until_s, side="right"))
    marked = deque([(turn, schedule) for turn, schedule in turns if isinstance(turn, Event)])
    changes: list[tuple[int, int, float, Schedule | None]] = [
        (int(np.searchsorted(times_T, turn, side="right")), 1, turn, schedule)
        for turn, schedule in turns
        if not isinstance(turn, Event) and turn <= until_s
    ]
    changes += [(at, 0, float(times_T[at - 1]), None) for at in cuts if 0 < at <= count]

    def turn_where_marked() -> None:
        while marked and session.place == (marked[0][0].window_index, marked[0][0].step, marked[0][0].skipped_steps):
            pipeline.turn(marked.popleft()[1])

    pipeline.between = turn_where_marked
    first = 0
    for at, _, at_s, schedule in sorted(changes, key=lambda change: change[:3]):
        yield from pipeline.push(tokens[first:at], times_T[first:at])
        first = at
        if schedule is None:
            yield from pipeline.cut(at_s)
        else:
            yield from pipeline.advance(at_s)
            pipeline.turn(schedule)
    yield from pipeline.push(tokens[first:count], times_T[first:count])
    # A deadline has passed once the clock is past it.
    yield from pipeline.finish(end_s) if until_s == math.inf else pipeline.advance(math.nextafter(until_s, math.inf))
