"""Policies on a view whose model is a table: when each writes which token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zendaya import ZendayaError
from zendaya.runtime.policies import parse_policy
from zendaya.runtime.policies.alignatt import AlignAtt
from zendaya.runtime.policies.edatt import EDAtt
from zendaya.runtime.policies.local_agreement import LocalAgreement
from zendaya.schedule import Full, PowerLaw, WaitK

END = 2


class Table:
    """A model that copies its source token by token, attends to the token it copies, and guesses 9 for the next one."""

    end = END

    def __init__(self, source):
        self.source, self.written, self.arrived, self.complete, self.decodes = source, [], 0, False, 0

    def _next(self, place):
        if place < self.arrived:
            return self.source[place]
        return 9 if place == self.arrived < len(self.source) else END

    def attend(self, layer, heads):
        self.decodes += 1
        place = len(self.written)
        attention = np.full(self.arrived, 0.1)
        attention[min(place, self.arrived - 1)] += 1
        return self._next(place), attention / attention.sum()

    def hypothesis(self):
        self.decodes += 1
        places = range(len(self.written), self.arrived + 2)
        tokens = [self._next(place) for place in places]
        return tokens[: tokens.index(END) + 1]


def run(policy, source, window_tokens=None):
    """Tokens written and the source arrived at each, asked as a Session does."""
    view, state, log = Table(source), policy.start(), []
    asked = 0
    while not (log and log[-1][0] == END):
        asked = min(asked + (policy.chunk or 1), len(source) + 1)
        view.arrived, view.complete = min(asked, len(source)), asked > len(source)
        while (token := policy.decide(view, state)) is not None:
            view.written.append(token)
            log.append((token, view.arrived))
            if token == END:
                break
    return log, view.decodes


def test_alignatt_waits_for_the_last_tokens():
    log, _ = run(AlignAtt(2), [5, 6, 7, 8])
    assert log == [(5, 3), (6, 4), (7, 4), (8, 4), (END, 4)]


def test_edatt_waits_while_the_last_tokens_are_attended():
    # With 3 arrived, a token copied from the first gives 0.2/1.3 to the last two; one copied from the second gives 1.2/1.3.
    log, _ = run(EDAtt(0.5, last=2), [5, 6, 7, 8])
    assert log == [(5, 3), (6, 4), (7, 4), (8, 4), (END, 4)]
    assert run(EDAtt(0.1, last=2), [5, 6, 7, 8])[0] == [(5, 4), (6, 4), (7, 4), (8, 4), (END, 4)]


def test_local_agreement_writes_the_shared_prefix():
    log, decodes = run(LocalAgreement(1), [5, 6, 7, 8])
    assert log == [(5, 2), (6, 3), (7, 4), (8, 4), (END, 4)]
    assert decodes == 4  # the last hypothesis is not decoded again when the source turns out to be over


def test_local_agreement_needs_two_hypotheses():
    assert run(LocalAgreement(3), [5, 6, 7])[0] == [(5, 3), (6, 3), (7, 3), (END, 3)]


@given(
    st.sampled_from([AlignAtt(1), AlignAtt(3, chunk=2), EDAtt(0.3), EDAtt(0.6, last=4, chunk=3), LocalAgreement(1), LocalAgreement(4)]),
    st.lists(st.integers(10, 90), min_size=1, max_size=12),
)
def test_everything_is_written_once_and_the_end_last(policy, source):
    log, _ = run(policy, source)
    tokens, arrived = [token for token, _ in log], [count for _, count in log]
    assert tokens.index(END) == len(tokens) - 1
    assert arrived == sorted(arrived)
    assert tokens[: len(source)] == source


@pytest.mark.parametrize(
    "policy",
    [
        LocalAgreement(10), AlignAtt(4), AlignAtt(4, chunk=2, layer=1), AlignAtt(1, heads=((1, 0), (2, 5))), EDAtt(0.4, last=3),
        EDAtt(1.0, chunk=7, layer=0), WaitK(3, 1.5), Full(), PowerLaw(0.3),
    ],
)  # fmt: skip
def test_a_policy_is_parsed_from_its_printed_form(policy):
    assert parse_policy(str(policy)) == policy
    assert policy.decides_while_reading == (not hasattr(policy, "horizons"))


@pytest.mark.parametrize(
    "do",
    [
        lambda: LocalAgreement(0),
        lambda: AlignAtt(0),
        lambda: AlignAtt(True),
        lambda: AlignAtt(2, chunk=0),
        lambda: AlignAtt(2, layer=-1),
        lambda: AlignAtt(2, heads=((0, -1),)),
        lambda: EDAtt(0.0),
        lambda: EDAtt(1.5),
        lambda: EDAtt(float("nan")),
        lambda: EDAtt(0.5, last=0),
        lambda: parse_policy("alignatt"),
        lambda: parse_policy("alignatt=x"),
        lambda: parse_policy("alignatt=2,chunk"),
        lambda: parse_policy("alignatt=2,heads=1-2"),
        lambda: parse_policy("local-agreement=2,last=3"),
        lambda: parse_policy("edatt=0.5,colour=red"),
        lambda: parse_policy("edatt=7"),
        lambda: parse_policy("nonsense"),
    ],
)
def test_misuse_is_one_clear_line(do):
    with pytest.raises(ZendayaError) as caught:
        do()
    assert "\n" not in str(caught.value)
