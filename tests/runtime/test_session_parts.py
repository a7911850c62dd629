"""The parts of a session, each alone: the arrivals queue, the window and its input, the token rules."""

import math

import pytest
import torch

from zendaya.errors import SourceError
from zendaya.nn.config import Framing
from zendaya.runtime.arrival_queue import ArrivalQueue
from zendaya.runtime.options import Pace
from zendaya.runtime.token_rules import LikelyEnd, RepetitionGuard, Suppression, TokenRules
from zendaya.runtime.window import Window, WindowInput


def tokens(count):
    return torch.arange(count, dtype=torch.float32)[:, None]


def filled_by(queue, *, width=8, patience_s=math.inf, pace=None):
    arrivals = WindowInput(queue, patience_s, pace)
    arrivals.begin(Window(0, 0, torch.zeros(width, 1), str))
    return arrivals


def test_tokens_of_one_moment_are_one_item():
    queue = ArrivalQueue()
    queue.push(tokens(4), [0.5, 0.5, 1.0, 1.0])
    queue.cut(1.5)
    queue.finish(2.0)
    assert [(item.kind, item.time_s) for item in queue.items] == [("tokens", 0.5), ("tokens", 1.0), ("cut", 1.5), ("end", 2.0)]


def test_times_never_go_back_and_the_end_is_the_end():
    queue = ArrivalQueue()
    queue.push(tokens(1), 2.0)
    with pytest.raises(SourceError, match="never go back"):
        queue.push(tokens(1), 1.0)
    queue.advance(3.0)
    queue.push(tokens(1), 2.5)  # handed over after 3 s had passed: it counts from then
    assert queue.items[-1].time_s == 3.0
    queue.finish(None)
    queue.advance(9.0)
    assert [item.kind for item in queue.items][-1] == "end"
    with pytest.raises(SourceError, match="was finished"):
        queue.push(tokens(1), 4.0)


def test_a_window_takes_no_more_than_a_step_needs():
    queue = ArrivalQueue()
    queue.push(tokens(6), 1.0)
    arrivals = filled_by(queue)
    assert arrivals.wait(2)
    assert (arrivals.window.arrived, arrivals.window.arrived_TE.tolist(), len(queue.items)) == (2, [[0.0], [1.0]], 1)
    assert not arrivals.wait(7)
    assert (arrivals.window.arrived, arrivals.window.complete) == (6, False)
    queue.cut(2.0)
    assert arrivals.wait(7)
    assert arrivals.window.complete


def test_patience_counts_from_when_tokens_are_due():
    queue = ArrivalQueue()
    queue.push(tokens(2), 1.0)
    arrivals = filled_by(queue, patience_s=0.5, pace=Pace(2.0))
    assert arrivals.wait(1, patient=False)
    assert not arrivals.wait(5)  # the fifth is due 2 s after the first
    assert arrivals.deadline_s == 3.5
    queue.advance(3.6)
    assert arrivals.wait(5)
    assert (arrivals.window.arrived, arrivals.now_s) == (2, 3.5)


def logits(**values):
    logits_V = torch.zeros(10)
    for name, value in values.items():
        logits_V[int(name[1:])] = value
    return logits_V


def test_suppressed_ids_are_not_chosen():
    rules = TokenRules([Suppression(Framing(suppress=(7,), suppress_first=(6,)))])
    assert [rules.choose(logits(_7=9, _6=8, _5=7), text) for text in ([], [3])] == [5, 6]


def test_a_repeated_phrase_is_not_continued():
    rules = TokenRules([RepetitionGuard(4)])
    assert rules.choose(logits(_7=9, _5=8), [7, 7, 7]) == 7
    assert rules.choose(logits(_7=9, _5=8), [7, 7, 7, 7]) == 5


def test_an_end_must_be_likelier_than_all_words():
    rules = TokenRules([LikelyEnd(2)])
    assert rules.choose(logits(_2=1.0, _5=0.9), [4]) == 5
    assert rules.choose(logits(_2=9.0, _5=0.9), [4]) == 2
