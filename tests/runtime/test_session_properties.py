"""What must hold of every stream, however it arrives: checked by machines that push, stall, cut, turn the dial and end at random."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from shy import ShyModel

from zendaya import Full, Model, Pace, PowerLaw, Tokenizer, WaitK, ZendayaError, replay

TOKENIZER = Tokenizer.train(["the cat sat on the mat"], vocab_size=290)


CONFIG = dataclasses.replace(Model.from_preset("tiny").config, max_steps=10)
MODELS = {
    "ends": Model.from_preset("tiny", tokenizer=TOKENIZER, seed=2, max_steps=10),
    "pauses": ShyModel(dataclasses.replace(CONFIG, end_means_wait=True), TOKENIZER).eval(),
}
SCHEDULES = [PowerLaw(0), PowerLaw(0.4), PowerLaw(1), PowerLaw(2, "floor"), PowerLaw(1, head=2), WaitK(3, 0.7), Full()]
PATIENCES = [0.0, 0.3, 2.0, math.inf]
PACES = [None, Pace(4.0), Pace(4.0, 3)]
TOKENS = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
schedules, patiences, paces = st.sampled_from(SCHEDULES), st.sampled_from(PATIENCES), st.sampled_from(PACES)
gaps = st.sampled_from([0.0, 0.0, 0.1, 0.25, 0.25, 1.0, 7.0])


class Stream(RuleBasedStateMachine):
    """A session that lives through anything, beside what it has been told; at the end another one is told the same in other pieces."""

    @initialize(
        kind=st.sampled_from(sorted(MODELS)),
        schedule=schedules,
        window_tokens=st.integers(1, 24),
        patience_s=patiences,
        pace=paces,
        end_s=gaps,
    )
    def begin(self, kind, schedule, window_tokens, patience_s, pace, end_s):
        self.open = lambda: MODELS[kind].open(schedule, window_tokens=window_tokens, patience_s=patience_s, pace=pace)
        self.session, self.window_tokens = self.open(), window_tokens
        self.told, self.arrivals, self.events = [], [], []
        self.now_s, self.end_s = 0.0, end_s

    def tell(self, what, *given):
        self.told.append((what, *given))
        self.events += draw(self.session, what, *given)

    @rule(count=st.integers(0, 30), gap_s=gaps)
    def push(self, count, gap_s):
        self.now_s += gap_s
        count = min(count, len(TOKENS) - len(self.arrivals))
        first = len(self.arrivals)
        self.arrivals += [self.now_s] * count
        self.tell("push", TOKENS[first : first + count], [self.now_s] * count)

    @rule(gap_s=gaps)
    def stall(self, gap_s):
        self.now_s += gap_s
        self.tell("advance", self.now_s)

    @rule()
    def cut(self):
        self.tell("cut", self.now_s)

    @rule(schedule=schedules)
    def turn(self, schedule):
        self.tell("advance", self.now_s)
        self.tell("turn", schedule)

    @invariant()
    def nothing_is_read_before_it_arrives_and_horizons_never_decrease(self):
        written = [event for event in self.events if not event.schedule]
        for event in written[-40:]:
            read = event.window_start + event.effective_horizon
            assert event.effective_horizon <= event.horizon <= self.window_tokens
            assert read <= len(self.arrivals)
            assert read == 0 or self.arrivals[read - 1] <= event.arrival_s <= self.now_s
        for before, after in itertools.pairwise(written[-40:]):
            assert before.arrival_s <= after.arrival_s
            if before.window_index == after.window_index:
                assert after.step == before.step + 1
                assert not before.last
                assert before.horizon <= after.horizon
                assert before.effective_horizon <= after.effective_horizon
                assert before.predicted_steps == after.predicted_steps
            else:
                assert (after.window_index, after.step, before.last) == (before.window_index + 1, 1, True)
                assert before.window_start < after.window_start <= before.window_start + self.window_tokens

    def window_starts(self):
        """Where windows begin: each is as wide as W, or ends where it was cut, or with the source."""
        pushed, edges, starts = 0, [], []
        for what, *said in self.told:
            pushed += len(said[0]) if what == "push" else 0
            edges += [pushed] if what in ("cut", "finish") else []
        while (start := starts[-1][1] if starts else 0) < pushed:
            starts.append((start, min(start + self.window_tokens, *(edge for edge in edges if edge > start))))
        return [start for start, _ in starts]

    def teardown(self):
        if not hasattr(self, "told"):
            return
        self.now_s += self.end_s
        self.tell("finish", self.now_s)
        self.nothing_is_read_before_it_arrives_and_horizons_never_decrease()
        marks = [event for event in self.events if event.schedule]
        assert len(marks) == sum(told[0] == "turn" for told in self.told)
        assert all((event.token, event.text) == (-1, "") for event in marks)
        written = [event for event in self.events if not event.schedule]
        # Every window is written once and to its end, and together they hold every source token once.
        ends = [event for event in written if event.last]
        assert [event.window_index for event in ends] == list(range(len(ends)))
        assert [event.window_start for event in ends] == self.window_starts()
        # The same arrivals in other pieces, and handed over late, give the same events.
        assert replayed(self.open(), self.told, each=True) == self.events
        assert replayed(self.open(), self.told, each=False) == self.events


def draw(session, what, *given):
    if what == "turn":
        session.set_schedule(*given)
        return []
    return list(getattr(session, what)(*given))


def replayed(session, told, *, each):
    """What a session writes when told the same token by token, or as much as can be at once."""
    events, tokens, times_s, moment_s = [], [], [], 0.0

    def hand_over():
        if tokens:
            events.extend(session.push(torch.cat(tokens), times_s))
        tokens.clear()
        times_s.clear()

    for what, *given_ in told:
        if what == "push" and each:
            for token, time_s in zip(given_[0], given_[1], strict=True):
                events += session.push(token[None], time_s)
        elif what == "push":
            tokens.append(given_[0])
            times_s += given_[1]
        elif what != "advance" or each:
            hand_over()
            if what == "turn" and not each:  # the moment of the turn was told by `advance`
                events += session.advance(moment_s)
            events += draw(session, what, *given_)
        if what == "advance":
            moment_s = given_[0]
    hand_over()
    return events


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(schedules, patiences, st.integers(1, 60), st.floats(0.01, 5))
@settings(max_examples=30, deadline=None)
def test_an_endless_stream_is_the_same_with_and_without_a_clock(schedule, patience_s, count, rate_s):
    """A slow machine is late, and writes the same."""
    ticks = itertools.count(0.0, 1000.0)
    arrivals_s = np.arange(count) * rate_s
    model = MODELS["ends"]
    plain = list(replay(model.open(schedule, patience_s=patience_s), TOKENS[:count], arrivals_s))
    slow = model.open(schedule, patience_s=patience_s, clock=lambda: next(ticks))
    late = [event for token, at_s in zip(TOKENS, arrivals_s, strict=False) for event in slow.push(token[None], at_s)]
    late += slow.finish(float(arrivals_s[-1]))
    assert [dataclasses.replace(event, emission_s=event.arrival_s) for event in late] == plain
    assert len({event.emission_s for event in late}) == len(late)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_an_empty_and_a_one_token_stream(schedule, count):
    events = list(replay(MODELS["ends"].open(schedule), TOKENS[:count], np.zeros(count), end_s=3.0))
    assert [event.window_index for event in events if event.last] == [0] * count
    assert all(event.effective_horizon <= 1 for event in events)


def test_patience_runs_out_at_its_deadline_and_not_before():
    session = MODELS["ends"].open(PowerLaw(0), window_tokens=10, patience_s=2.0, pace=Pace(1.0))
    assert list(session.push(TOKENS[:4], [0.0, 1.0, 2.0, 3.0])) == []
    assert session.deadline_s == 0.0 + 9 + 2  # the tenth token is due nine seconds after the first
    assert list(session.advance(11.0)) == []
    first, *_ = session.advance(11.5)
    assert (first.arrival_s, first.horizon, first.effective_horizon) == (11.0, 10, 4)


def test_without_a_pace_patience_starts_when_a_step_is_reached():
    session = MODELS["ends"].open(PowerLaw(0), window_tokens=10, patience_s=2.0)
    session.push(TOKENS[:1], 5.0)
    events = list(session.advance(7.5))
    assert [(event.arrival_s, event.effective_horizon) for event in events][:1] == [(7.0, 1)]


def test_no_patience_writes_from_the_first_token_on():
    events = list(replay(MODELS["ends"].open(Full(), window_tokens=10, patience_s=0), TOKENS[:10], np.arange(10.0)))
    assert {event.effective_horizon for event in events} == {1}
    assert {event.arrival_s for event in events} == {0.0}


def test_turned_down_the_dial_reads_more_and_up_no_less():
    model = MODELS["ends"]
    plain = [event.horizon for event in replay(model.open(PowerLaw(1)), TOKENS[:24], np.arange(24.0))]
    for gamma in (0.0, 3.0):
        events = list(replay(model.open(PowerLaw(1)), TOKENS[:24], np.arange(24.0), turns=[(11.5, PowerLaw(gamma))]))
        at = next(i for i, event in enumerate(events) if event.schedule)
        assert 0 < at < len(events) - 1, "the turn fell outside the window"
        horizons = [event.horizon for event in events if not event.schedule]
        assert horizons[:at] == plain[:at]
        assert horizons[at] == (24 if gamma == 0 else horizons[at - 1])


def test_a_head_start_turned_mid_stream_begins_at_the_next_step():
    times_s, plain = np.arange(24.0), PowerLaw(1).horizons(24, 10).tolist()
    for schedule in (PowerLaw(1, head=5), PowerLaw(1)):
        other = PowerLaw(1) if schedule.head else PowerLaw(1, head=5)
        events = list(replay(MODELS["ends"].open(schedule, steps=10), TOKENS[:24], times_s, turns=[(14.5, other)]))
        at = next(i for i, event in enumerate(events) if event.schedule)
        assert events[at].schedule == str(other)
        horizons = [event.horizon for event in events if not event.schedule]
        assert 0 < at < len(horizons), "the turn fell outside the window"
        before, after = ([min(24, horizon + one.head) for horizon in plain] for one in (schedule, other))
        assert horizons[:at] == before[:at]
        assert horizons[at:] == [max(before[at - 1], horizon) for horizon in after[at : len(horizons)]]


def test_a_head_start_keeps_its_lead_to_the_end():
    lead = {}
    for schedule in (PowerLaw(0.7), PowerLaw(1, head=5)):
        session = MODELS["ends"].open(schedule, window_tokens=24, steps=10)
        curve = schedule.horizons(24, 10)
        written = [*session.push(TOKENS[:24]), *session.finish()]
        assert [event.horizon for event in written] == curve[: len(written)].tolist()
        lead[schedule.head] = curve - 24 * np.arange(1, 11) / 10
    assert lead[0][-2] < lead[0].max() / 2  # spent early, missing late
    assert lead[5][:7].min() >= 5  # until the whole source is read


@pytest.mark.parametrize(
    "do",
    [
        lambda session: session.push(TOKENS[:2], [1.0, 0.5]),
        lambda session: [session.push(TOKENS[:1], 1.0), session.push(TOKENS[:1], 0.5)],
        lambda session: session.push(TOKENS[:1], math.nan),
        lambda session: session.push(TOKENS[:2], [1.0, 2.0, 3.0]),
        lambda session: session.advance(math.inf),
        lambda session: [session.finish(), session.cut()],
        lambda session: session.model.open(Full(), patience_s=-1.0),
        lambda session: session.model.open(Full(), patience_s=math.nan),
        lambda session: Pace(0.0),
    ],
)
def test_misuse_is_one_clear_line(do):
    with pytest.raises(ZendayaError) as caught:
        do(MODELS["ends"].open(Full()))
    assert "\n" not in str(caught.value)
