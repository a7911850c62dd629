import dataclasses
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shy import ShyModel

from zendaya import Full, Model, PowerLaw, Tokenizer, WaitK, ZendayaError, replay
from zendaya.runtime.policies.local_agreement import LocalAgreement
from zendaya.schedule import parse_schedule

TOKENIZER = Tokenizer.train(["the cat sat on the mat"], vocab_size=290)
MODEL = Model.from_preset("tiny", tokenizer=TOKENIZER, seed=2)
SCHEDULES = [PowerLaw(0), PowerLaw(0.4), PowerLaw(1), PowerLaw(2, "floor"), WaitK(3, 0.7), Full()]


def stream(count, seed=0):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def decode(session, tokens, pieces=()):
    events, at = [], 0
    for piece in [*pieces, len(tokens)]:
        events += session.push(tokens[at : at + piece])
        at = min(len(tokens), at + piece)
    return [*events, *session.finish()]


@given(st.sampled_from(SCHEDULES), st.integers(1, 60), st.lists(st.integers(0, 20), max_size=12))
def test_any_chunking_gives_the_same_events(schedule, count, pieces):
    whole = decode(MODEL.open(schedule), stream(count))
    assert decode(MODEL.open(schedule), stream(count), pieces) == whole


@given(st.sampled_from(SCHEDULES), st.integers(1, 60))
def test_every_window_is_written_once_within_its_licence(schedule, count):
    events = decode(MODEL.open(schedule), stream(count))
    windows = -(-count // 24)
    assert [e.window_index for e in events if e.last] == list(range(windows))
    for window in range(windows):
        mine = [e for e in events if e.window_index == window]
        arrived = min(24, count - window * 24)
        assert [e.step for e in mine] == list(range(1, len(mine) + 1))
        steps = mine[0].predicted_steps
        assert [e.horizon for e in mine] == schedule.horizons(24, steps, num_steps=len(mine)).tolist()
        assert [e.effective_horizon for e in mine] == [min(e.horizon, arrived) for e in mine]
        assert len(mine) <= MODEL.config.max_steps
        assert mine[-1].token == MODEL.config.framing.end or len(mine) == MODEL.config.max_steps


def test_nothing_is_written_before_its_horizon_has_arrived():
    session = MODEL.open(PowerLaw(1))
    for arrived, token in enumerate(stream(70), start=1):
        for event in session.push(token[None]):
            assert event.window_index * 24 + event.horizon <= arrived


def test_without_tokens_there_is_no_text():
    session = MODEL.open(PowerLaw(0.5))
    assert list(session.push(np.zeros((0, 16)))) == []
    assert list(session.finish()) == []


def test_the_text_of_the_events_is_the_text():
    events = decode(MODEL.open(PowerLaw(0.4)), stream(24))
    ids = [e.token for e in events if e.token != MODEL.config.framing.end]
    assert TOKENIZER.decode(ids).startswith("".join(e.text for e in events))


def test_history_changes_the_next_window_and_only_that():
    forgetful = Model.from_preset("tiny", tokenizer=TOKENIZER, seed=2, history=False)
    forgetful.load_state_dict(MODEL.state_dict())
    first, second = stream(24), stream(24, seed=1)
    with_past = MODEL.open(WaitK(3, 0.7))
    events = [*with_past.push(torch.cat([first, second])), *with_past.finish()]
    again = decode(MODEL.open(WaitK(3, 0.7)), torch.cat([stream(24, seed=9), second]))
    assert [e for e in events if e.window_index == 0] == decode(forgetful.open(WaitK(3, 0.7)), first)
    one, other = ([dataclasses.replace(e, text="") for e in es if e.window_index == 1] for es in (events, again))
    assert one != other  # another first window, another history, another second window
    plain = decode(forgetful.open(WaitK(3, 0.7)), torch.cat([first, second]))
    fresh = decode(forgetful.open(WaitK(3, 0.7)), torch.cat([stream(24, seed=9), second]))
    assert [e.token for e in plain if e.window_index == 1] == [e.token for e in fresh if e.window_index == 1]


def test_memory_is_bounded_over_a_long_stream():
    session = MODEL.open(PowerLaw(1), steps=4)
    sizes = set()
    for token in stream(24 * 12):
        for _ in session.push(token[None]):
            pass
        cached = sum(k.numel() for pairs in (session.rows.cache.cross, session.rows.cache.text) for k, _ in pairs)
        sizes.add((session._window.tokens_TE.shape[0] <= 24, not session.has_pending_input, cached <= 2 * 2 * 128 * 64))
    assert sizes == {(True, True, True)}


def test_a_fix_model_waits_for_its_window():
    model = Model.from_preset("tiny", length="fix", history=False)
    session = model.open(PowerLaw(1))
    assert list(session.push(stream(23))) == []
    assert list(session.push(stream(1)))


def test_what_needs_no_length_does_not_wait_for_one():
    model = Model.from_preset("tiny", length="fix", history=False)
    assert [event.horizon for event in model.open(WaitK(2, 1)).push(stream(5))] == [2, 3, 4, 5]
    assert list(model.open(Full()).push(stream(23))) == []


def test_a_buffer_that_was_pushed_may_be_used_again():
    buffer = stream(24).numpy()
    session, expected = MODEL.open(PowerLaw(1)), decode(MODEL.open(PowerLaw(1)), stream(24))
    events = session.push(buffer)
    buffer[:] = 0
    assert [*events, *session.finish()] == expected


@pytest.mark.parametrize("clock", [None, time.monotonic])
def test_a_turn_between_two_steps_is_replayed_by_its_mark(clock):
    tokens, times_s = stream(60), np.arange(60) / 3
    session, events = MODEL.open(PowerLaw(1), clock=clock), []
    for event in session.push(tokens, times_s):
        if event.step == 3 and not event.schedule:
            session.set_schedule(PowerLaw(0.3 if event.window_index == 0 else 1.5))
        events.append(event)
    events += session.finish(20.0)
    marks = [event for event in events if event.schedule]
    assert [(mark.window_index, mark.step) for mark in marks] == [(0, 4), (1, 4)]
    turns = [(mark, parse_schedule(mark.schedule)) for mark in marks]
    found = list(replay(MODEL.open(PowerLaw(1)), tokens, times_s, turns=turns, end_s=20.0))
    assert found == [dataclasses.replace(event, emission_s=event.arrival_s) for event in events]
    assert max(event.arrival_s for event in events) == 20.0  # of the source, whatever the clock says


def test_horizons_do_not_fall_after_a_pause_and_a_turn():
    model = ShyModel(dataclasses.replace(MODEL.config, end_means_wait=True), TOKENIZER).eval()
    session = model.open(PowerLaw(0), window_tokens=12, patience_s=0.0)
    events = [*session.push(stream(2), 0.0), *session.advance(0.5)]
    session.set_schedule(PowerLaw(2))
    events += [*session.push(stream(10), 1.0), *session.finish(2.0)]
    horizons = [event.horizon for event in events if not event.schedule]
    assert horizons == sorted(horizons)
    assert horizons[0] == 12


def test_a_nan_stops_the_stream_where_it_is_read_and_not_before():
    tokens = stream(24)
    clean = decode(MODEL.open(WaitK(2, 1)), tokens)
    tokens[12] = torch.nan
    session, events = MODEL.open(WaitK(2, 1)), []
    with pytest.raises(ZendayaError, match="not finite"):
        events.extend(session.push(tokens))
    assert events == clean[:11]


def test_a_nan_in_history_is_blamed_on_its_own_window():
    tokens = stream(30)
    tokens[23] = torch.nan
    session, events = MODEL.open(WaitK(2, 0.1)), []
    with pytest.raises(ZendayaError, match="window 0"):
        events.extend(session.push(tokens))
    assert events[-1].last


@pytest.mark.parametrize(
    "do",
    [
        lambda: MODEL.open(PowerLaw(0.5), window_tokens=0),
        lambda: MODEL.open(PowerLaw(0.5), window_tokens=25),
        lambda: MODEL.open(PowerLaw(0.5), steps=0),
        lambda: MODEL.open(PowerLaw(0.5), steps=33),
        lambda: Model.from_preset("tiny", length="none").open(PowerLaw(0.5)),
        lambda: MODEL.open(Full()).push(torch.zeros(3, 15)),
        lambda: MODEL.open(Full()).push(torch.zeros(16)),
    ],
)
def test_misuse_is_one_clear_line(do):
    with pytest.raises(ZendayaError) as caught:
        do()
    assert "\n" not in str(caught.value)


def test_a_finished_stream_takes_no_more():
    session = MODEL.open(Full())
    list(session.finish())
    with pytest.raises(ZendayaError, match="finished"):
        session.push(stream(1))


@given(st.sampled_from(SCHEDULES), st.integers(1, 60), st.lists(st.integers(0, 20), max_size=12))
def test_an_early_end_is_a_pause_where_the_model_pauses(schedule, count, pieces):
    model = ShyModel(dataclasses.replace(MODEL.config, end_means_wait=True), TOKENIZER).eval()
    events = decode(model.open(schedule), stream(count), pieces)
    assert events == decode(model.open(schedule), stream(count))
    for window in range(-(-count // 24)):
        mine, arrived = [e for e in events if e.window_index == window], min(24, count - window * 24)
        assert [e.last for e in mine] == [False] * (len(mine) - 1) + [True]
        horizons = [e.effective_horizon for e in mine]
        assert horizons == sorted(horizons)
        assert horizons[-1] == arrived
        assert len(mine) == min(8, arrived // 2) + 1
        assert all(e.effective_horizon >= 2 * e.step for e in mine[:-1])


def stuck(model, schedule):
    """A session that says one thing for ever unless it may not; then its end."""
    session = model.open(schedule)
    run = session.rows.run

    def stuck_run(ids, horizon, tap=None):
        run(ids, horizon, tap)
        logits_V = torch.zeros(model.config.decoder.vocab_size)
        logits_V[[7, model.config.framing.end]] = torch.tensor([9.0, 5.0])
        return logits_V

    session.rows.run = stuck_run
    session._begin_window(0, 0)  # a policy's view of the window takes the function above
    return session


@pytest.mark.parametrize("policy", [Full(), LocalAgreement(5)], ids=str)
@pytest.mark.parametrize(("loop_tokens", "lengths"), [(0, [32, 32]), (5, [6, 6])])
def test_a_loop_is_left_where_the_model_says_so(loop_tokens, lengths, policy):
    model = Model(dataclasses.replace(MODEL.config, loop_tokens=loop_tokens), TOKENIZER).eval()
    events = decode(stuck(model, policy), stream(48))
    assert [event.step for event in events if event.last] == lengths


def test_an_unended_window_leaves_no_history_under_loop_rules():
    for loop_tokens, forgets in ((0, False), (8, True)):
        model = Model(dataclasses.replace(MODEL.config, loop_tokens=loop_tokens), TOKENIZER).eval()
        session = model.open(Full(), max_steps=5)
        session._context.rules.choose = lambda logits_V, text, **_: 101 + len(text)  # never ends
        list(session.push(stream(25)))
        assert (session.place[0], session._context.previous is None) == (1, forgets)
