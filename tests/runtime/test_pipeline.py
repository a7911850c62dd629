"""The driver: whatever brings the source, the session gets the same arrivals and gives the same text; threads end and errors arrive."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from zendaya import Model, PowerLaw
from zendaya.encoders.features import Precomputed
from zendaya.errors import SourceError
from zendaya.runtime.options import Pace
from zendaya.runtime.pipeline import Pipeline, SourceEncoder
from zendaya.sources.live import MAX_CHUNKS, Arrival, at_once, listened, paced

RATE, DIM = 3.0, 16


@pytest.fixture(scope="module")
def model():
    return Model.from_preset("tiny", seed=1)


@pytest.fixture(scope="module")
def rows():
    return [np.random.default_rng(n).standard_normal((3, DIM)).astype(np.float32) for n in range(20)]


def encoder():
    return Precomputed(DIM, RATE)


class Clock:
    """A clock that runs a hundred times too fast."""

    def __init__(self):
        self.begun = time.monotonic()

    def __call__(self):
        return 100 * (time.monotonic() - self.begun)


def run(source, encoder, session, pauses=None, between=None):
    pipeline = Pipeline(session, SourceEncoder(encoder, pauses))
    pipeline.between = between
    return pipeline.run(source)


def texts(moments):
    return [(m.window_index, m.step, m.token, m.arrival_s) for m in moments]


@pytest.mark.parametrize("patience_s", [0.1, float("inf")])
def test_a_file_at_its_own_speed_gives_the_text_of_one_at_once(model, rows, patience_s):
    late = [(row, float(n + 1 + (5 if n > 8 else 0))) for n, row in enumerate(rows)]  # the link is down for 5 s
    stamps = iter([end_s for _, end_s in late])
    fast = model.open(PowerLaw(0.7), window_tokens=12, patience_s=patience_s, pace=Pace(RATE))
    at = [Arrival(row, next(stamps)) for row in rows]
    expected = texts(run(at, encoder(), fast))
    clock = Clock()
    slow = model.open(PowerLaw(0.7), window_tokens=12, patience_s=patience_s, pace=Pace(RATE), clock=clock)

    def stamped():
        times = iter([end_s for _, end_s in late])
        for arrival in paced(late, clock, lambda: slow.deadline_s):
            yield arrival if arrival.raw is None else replace(arrival, now_s=next(times))

    found = list(run(stamped(), encoder(), slow))
    assert texts(found) == expected
    assert all(m.emission_s >= m.arrival_s for m in found)
    assert clock() >= late[-1][1]


@pytest.mark.parametrize("patience_s", [0.0, 0.2])
def test_time_within_a_chunk_is_no_time_that_was_waited(model, rows, patience_s):
    """The encoder stamps tokens before the chunk that brings them has ended: they are on time."""
    expected = texts(run(at_once(rows), encoder(), model.open(PowerLaw(0.7), window_tokens=12, patience_s=patience_s, pace=Pace(RATE))))
    clock = Clock()
    session = model.open(PowerLaw(0.7), window_tokens=12, patience_s=patience_s, pace=Pace(RATE), clock=clock)
    chunks = [(row, float(n + 1)) for n, row in enumerate(rows)]
    assert texts(run(paced(chunks, clock, lambda: session.deadline_s), encoder(), session)) == expected


def test_at_once_uses_the_times_of_the_encoder(model, rows):
    session = model.open(PowerLaw(1.0), window_tokens=12)
    found = list(run(at_once(rows), encoder(), session))
    assert found
    for one in found:
        assert one.arrival_s == one.emission_s
        assert one.spoken_s <= one.read_s <= one.arrival_s + 1e-9
        assert one.policy_lag_s >= 0 == one.compute_lag_s


def test_a_thread_gives_all_chunks_in_order_and_time_between(rows):
    clock = Clock()

    def chunks():
        for row in rows[:4]:
            time.sleep(0.08)
            yield row

    found = list(listened(chunks(), clock))
    assert [arrival.raw is rows[n] for n, arrival in enumerate(a for a in found if a.raw is not None)] == [True] * 4
    assert any(arrival.raw is None for arrival in found)
    assert [a.now_s for a in found] == sorted(a.now_s for a in found)


def test_what_waits_is_taken_before_time_passes(rows):
    source = listened(iter(rows), Clock())
    next(source)
    time.sleep(0.1)  # the thread has read the rest
    assert all(arrival.raw is not None for arrival in source)


def test_an_error_in_the_thread_comes_after_what_was_read(rows):
    def chunks():
        yield rows[0]
        raise SourceError("the cable is out")

    source = listened(chunks(), Clock())
    got = []
    with pytest.raises(SourceError, match="cable"):
        got.extend(arrival for arrival in source if arrival.raw is not None)
    assert len(got) == 1


def test_a_source_thread_ends_with_its_reader_and_keeps_limits(rows):
    count, closed = 0, False

    def chunks():
        nonlocal count, closed
        try:
            while True:
                count += 1
                yield rows[0]
        finally:
            closed = True

    source = listened(chunks(), Clock())
    next(source)
    time.sleep(0.2)
    assert count <= MAX_CHUNKS + 2
    source.close()
    assert closed
    assert not any(thread.name == "zendaya-source" for thread in threading.enumerate())


def test_a_read_that_never_returns_does_not_hold_up_the_end():
    never = threading.Event()

    def chunks():
        never.wait(20)
        yield None

    source = listened(chunks(), Clock())
    assert next(source).raw is None
    begun = time.monotonic()
    source.close()
    assert time.monotonic() - begun < 3
    never.set()


def test_patience_is_over_while_nothing_arrives(model, rows):
    clock = Clock()
    session = model.open(PowerLaw(0.3), window_tokens=24, patience_s=3.0, clock=clock)
    asleep = threading.Event()

    def chunks():
        yield rows[0]
        asleep.wait(1.0)  # a hundred seconds by the clock
        yield rows[1]

    found = list(run(listened(chunks(), clock, lambda: session.deadline_s), encoder(), session))
    early = [m for m in found if m.effective_horizon <= 3]
    assert early
    assert all(m.effective_horizon < m.horizon for m in early)


def test_the_dial_is_turned_between_steps(model, rows):
    session = model.open(PowerLaw(1.0), window_tokens=24)
    calls = 0

    def between():
        nonlocal calls
        calls += 1
        if calls == 12:
            session.set_schedule(PowerLaw(0.1))

    found = list(run(at_once(rows), encoder(), session, between=between))
    (mark,) = [m for m in found if m.schedule]
    assert (mark.schedule, mark.text) == ("gamma=0.1", "")


class Cutter:
    """Ends a window after the fifth token of each piece."""

    heard = 0
    cut_s = 0.0

    def hear(self, raw):
        self.heard += len(raw)

    def cut(self, tokens):
        if len(tokens) < 3 or self.heard % 6:
            return None
        return 2


def test_windows_end_where_they_are_cut(model, rows):
    session = model.open(PowerLaw(0.5), window_tokens=24)
    found = list(run(at_once(rows), encoder(), session, pauses=Cutter()))
    assert sorted({m.window_start for m in found})[:4] == [0, 5, 11, 17]
    assert sum(m.last for m in found) == len({m.window_index for m in found})


def test_where_an_event_stands_in_the_source(model):
    session = model.open(PowerLaw(0.5), window_tokens=20, steps=10, pace=Pace(2.0))
    events = [*session.push(torch.zeros(20, DIM), 8.0), *session.finish(8.0)]
    found = events[1]  # step 2 of 10 reads 9 of 20 tokens, and stands for the first 4
    assert (found.read_s, found.spoken_s, found.policy_lag_s) == (4.5, 2.0, 6.0)
