"""Hold until heard (method.md §9): a step has a range of horizons, and waits in it while it attends to the newest source."""

import numpy as np
import pytest
import torch

from zendaya import Model, PowerLaw
from zendaya.errors import ScheduleError
from zendaya.runtime.batcher import Batcher
from zendaya.runtime.engine import engine_for, missing
from zendaya.runtime.options import DecodeOptions, Pace
from zendaya.runtime.session import Session

HOLD = PowerLaw(1, head=9, hold=3)
ENGINES = ["torch", pytest.param("native", marks=pytest.mark.skipif(missing() is not None, reason=f"no native engine: {missing()}"))]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return Model.from_preset("tiny").eval()


def source(count=60, seed=0):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def decode(model, schedule, tokens_TE, *, pieces=(1,), block=1, engine=None, steps=None):
    session = Session(model, DecodeOptions(schedule=schedule, pace=Pace(10.0, block), steps=steps), engine=engine)
    events, at = [], 0
    while at < len(tokens_TE):
        count = pieces[at % len(pieces)]
        # A block arrives at its end, however it is pushed.
        ends = (np.arange(at, min(at + count, len(tokens_TE))) // block + 1) * block / 10
        events += session.push(tokens_TE[at : at + count], ends)
        at += count
    return [*events, *session.finish(len(tokens_TE) / 10)], session


def test_horizons_stay_in_their_range_and_never_fall(model):
    events, session = decode(model, HOLD, source())
    within, before = 0, {}
    for event in events:
        width = session.window_tokens
        most = int(HOLD.at(event.step + event.skipped_steps, source=width, steps=event.predicted_steps))
        least = int(HOLD.least_horizons(width, event.predicted_steps, num_steps=event.step)[-1])
        assert min(least, width) <= event.horizon <= most
        assert event.horizon >= before.get(event.window_index, 0)
        before[event.window_index] = event.horizon
        within += least < event.horizon < most
    assert within, "no step was held"
    assert session.cost.withdrawn > 0
    assert session.cost.rows > len(events)


def test_a_hold_of_the_whole_head_writes_at_the_top(model):
    """Every step that looks anywhere is held when the hold covers the window: written at U, as without a hold."""
    tokens_TE = source()
    held, _ = decode(model, PowerLaw(1, head=9, hold=10**6), tokens_TE, steps=12)
    plain, _ = decode(model, PowerLaw(1, head=9), tokens_TE, steps=12)
    assert [(e.token, e.effective_horizon, e.arrival_s) for e in held] == [(e.token, e.effective_horizon, e.arrival_s) for e in plain]


@pytest.mark.parametrize("block", [1, 4])
def test_text_depends_on_arrivals_not_on_pushes(model, block):
    one, _ = decode(model, HOLD, source(), pieces=(1,), block=block)
    assert one == decode(model, HOLD, source(), pieces=(7, 3, 1), block=block)[0]
    assert one == decode(model, HOLD, source(), pieces=(60,), block=block)[0]


def test_a_held_step_is_tried_once_per_block(model):
    _, fine = decode(model, HOLD, source(), block=1)
    _, coarse = decode(model, HOLD, source(), block=4)
    assert 0 < coarse.cost.withdrawn < fine.cost.withdrawn


@pytest.mark.parametrize("backend", ENGINES)
def test_alone_and_in_company_are_equal(model, backend):
    engine = engine_for(model, backend)
    schedules = [HOLD, PowerLaw(0.5), PowerLaw(2, head=20, hold=2)]
    streams = [source(48, seed) for seed in range(3)]
    alone = [
        decode(model, schedule, tokens_TE, pieces=(48,), engine=engine)[0] for schedule, tokens_TE in zip(schedules, streams, strict=True)
    ]
    batcher, found = Batcher(engine), {}
    for schedule, tokens_TE in zip(schedules, streams, strict=True):
        session = batcher.add(Session(model, DecodeOptions(schedule=schedule, pace=Pace(10.0, 1)), engine=engine))
        found[session] = []
        session.push(tokens_TE, np.arange(1, 49) / 10)
        session.finish(4.8)
    for outcome in batcher.run():
        found[outcome.session].append(outcome.event)
    assert list(found.values()) == alone


def test_what_comes_after_the_horizon_changes_nothing(model):
    """The lemma of adapted horizons: an event, and when it was written, depend on its horizon's tokens alone."""
    tokens_TE = source(24)
    base, _ = decode(model, HOLD, tokens_TE, pieces=(24,))
    for index, event in enumerate(base):
        keep = event.window_start + event.horizon
        if event.effective_horizon < event.horizon or keep >= 24:
            continue
        for other_TE in (torch.randn(24 - keep, 16), torch.full((24 - keep, 16), 1e3), torch.zeros(40, 16)):
            changed, _ = decode(model, HOLD, torch.cat([tokens_TE[:keep], other_TE]), pieces=(24,))
            assert changed[: index + 1] == base[: index + 1]


def test_any_adapted_rule_keeps_the_lemma(model, monkeypatch):
    """Rules that hold at random, by what step and source so far say: no event depends on what lies beyond its horizon."""
    from zendaya.runtime.writers import ScheduleWriter

    def rule(writer, tap):
        heard_F = tap.mean()
        return float(heard_F.sum() * 1e6 + heard_F[-1] * 1e4) % 1.0 < 0.6

    monkeypatch.setattr(ScheduleWriter, "_looks_ahead", rule)
    tokens_TE = source(24, seed=5)
    base, session = decode(model, HOLD, tokens_TE)
    assert session.cost.withdrawn
    for index, event in enumerate(base):
        keep = event.window_start + event.horizon
        if event.effective_horizon == event.horizon and keep < 24:
            changed, _ = decode(model, HOLD, torch.cat([tokens_TE[:keep], torch.randn(24 - keep, 16)]))
            assert changed[: index + 1] == base[: index + 1]


def test_a_rule_that_looks_beyond_is_caught(model, monkeypatch):
    """The same check fails for a rule that reads a token which no step may read yet."""
    from zendaya.runtime.writers import ScheduleWriter

    tokens_TE = source(24, seed=5)

    def leaky(writer, tap):
        window = writer.context.window
        ahead = min(len(tap.mean()), 23)
        return float(current[0][window.start + ahead if window.start + ahead < 24 else 23, 0]) > 0

    monkeypatch.setattr(ScheduleWriter, "_looks_ahead", leaky)
    current = [tokens_TE]
    base, _ = decode(model, HOLD, tokens_TE)
    differs = False
    for index, event in enumerate(base):
        keep = event.window_start + event.horizon
        if event.effective_horizon == event.horizon and keep < 24:
            current[0] = torch.cat([tokens_TE[:keep], -tokens_TE[keep:]])
            differs |= decode(model, HOLD, current[0])[0][: index + 1] != base[: index + 1]
    assert differs


def test_the_dial_turns_into_a_hold_and_out_of_it(model):
    tokens_TE = source(24)
    session = Session(model, DecodeOptions(schedule=PowerLaw(1)))
    events = [*session.push(tokens_TE[:8], 0.8)]
    session.set_schedule(HOLD)
    events += session.push(tokens_TE[8:16], 1.6)
    session.set_schedule(PowerLaw(0.5))
    events += [*session.push(tokens_TE[16:], 2.4), *session.finish(2.4)]
    horizons = [event.horizon for event in events if event.window_index == 0 and not event.schedule]
    assert horizons == sorted(horizons)


def test_printed_forms_are_read_back():
    assert str(PowerLaw(1, head=100, hold=25)) == "gamma=1,head=100,hold=25"
    assert PowerLaw.parse("gamma=1,hold=25,head=100") == PowerLaw(1.0, head=100, hold=25)
    assert PowerLaw.parse("gamma=1,hold=25,hold=3,head=4") is None
    with pytest.raises(ScheduleError, match="head="):
        PowerLaw(1, hold=5)
    with pytest.raises(ScheduleError, match="hold must be"):
        PowerLaw(1, head=1, hold=-1)
