"""Scores of live captions against an example made by hand."""

import dataclasses

import pytest

from zendaya.evaluation.metrics.quality import word_error_rate
from zendaya.evaluation.metrics.speech import Utterance, WrittenWord, align, apart_if_unspoken, count, written_words
from zendaya.records import Event
from zendaya.serve.server import Transcript

SAID = (
    Utterance("a-0", "a", 0.0, 4.0, (("hello", 0.5, 1.0), ("big", 1.0, 1.4), ("bad", 1.4, 2.0), ("world", 2.0, 2.5))),
    Utterance("a-1", "a", 4.0, 4.0, (("it's", 0.5, 1.0), ("twenty", 1.0, 1.5), ("one", 1.5, 2.0), ("dogs", 2.0, 2.6))),
    Utterance("b-0", "b", 8.0, 2.0, (("yes", 0.2, 0.8),)),
)
WRITTEN = [
    WrittenWord("Hello,", 2.0, 2.1, 0.9),
    WrittenWord("bad", 3.0, 3.1, 1.8),
    WrittenWord("world.", 3.0, 3.2, 2.4),
    WrittenWord("You", 4.0, 4.1, 3.0),
    WrittenWord("It", 6.0, 6.1, 4.8),
    WrittenWord("is", 6.0, 6.1, 4.9),
    WrittenWord("21", 7.0, 7.1, 5.9),
    WrittenWord("docks.", 8.0, 8.1, 6.6),
    WrittenWord("Yes.", 10.0, 10.1, 8.7),
]
"""One deletion (big), one insertion in the silence from 2.5 to 4.5 s (You), one substitution (dogs)."""


def counted(written=WRITTEN, edges_s=(6.0,), apart=False):
    pairs = align(SAID, written)
    return count(SAID, apart_if_unspoken(pairs) if apart else pairs, edges_s, 10.0)


def test_errors_are_counted_per_group():
    a, b = counted()["a"], counted()["b"]
    assert (a.words, a.substitutions, a.deletions, a.insertions) == (8, 1, 1, 1)  # hello big bad world it is 21 dogs
    assert (b.words, b.errors) == (1, 0)
    wer = word_error_rate([" ".join(word.text for word in WRITTEN)], [" ".join(word for each in SAID for word, _, _ in each.words)]).value
    assert wer == pytest.approx(100 * (a.errors + b.errors) / (a.words + b.words))


def test_lag_is_from_a_words_end_to_its_last_letter():
    found = counted()
    assert found["a"].lags_s == pytest.approx([1.0, 1.0, 0.5, 1.0, 1.0, 1.0])  # 21 ends with one, at 6.0
    assert found["a"].aware_lags_s == pytest.approx([1.1, 1.1, 0.7, 1.1, 1.1, 1.1])
    assert found["b"].lags_s == pytest.approx([1.2])
    assert found["b"].laal_s == pytest.approx([2.0])  # its one word came 2 s after it began


def test_words_without_measured_times_have_no_lag():
    said = [dataclasses.replace(SAID[0], timed=False), *SAID[1:]]
    assert count(said, align(said, WRITTEN), [], 10.0)["a"].lags_s == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("edge_s", "words", "errors"),
    [
        (6.0, 2, 1),  # 21 and dogs, with middles at 5.75 and 6.3; it's has its at 4.75
        (2.1, 3, 2),  # big, bad and world, and the insertion at 3.0; hello has its middle at 0.75
        (50.0, 0, 0),
    ],
)
def test_errors_at_an_edge(edge_s, words, errors):
    found = counted(edges_s=[edge_s])["a"]
    assert (found.edge_words, found.edge_errors) == (words, errors)


def test_an_insertion_lies_between_its_neighbours():
    late = [word._replace(spoken_s=9.0) if word.text == "You" else word for word in WRITTEN]
    assert counted(edges_s=[5.2])["a"].edge_errors == 0  # it was spoken at 3.0
    assert counted(late, edges_s=[5.2])["a"].edge_errors == 1  # no later than the next word begins, 4.5 s


def test_words_in_silence():
    found = counted()
    assert (found["a"].silent_words, found["b"].silent_words) == (1, 0)
    assert found["a"].silent_s == pytest.approx(2.0 + 1.6)  # 2.5 to 4.5, and 6.6 to 8.2
    assert found["b"].silent_s == pytest.approx(1.2)
    inside = [*WRITTEN[:2], WrittenWord("uh", 3.0, 3.0, 2.0), *WRITTEN[2:]]
    assert counted(inside)["a"].silent_words == 1  # an insertion within speech is none


def test_a_word_written_before_it_was_said_is_none():
    lost = [WrittenWord("You", 3.0, 3.0, 2.0)]
    said = [Utterance("c", "c", 5.0, 2.0, (("you", 0.5, 1.0),))]
    pairs = align(said, lost)
    assert count(said, pairs, [], 7.0)["c"].errors == 0
    found = count(said, apart_if_unspoken(pairs), [], 7.0)["c"]
    assert (found.silent_words, found.deletions) == (1, 1)


def test_a_word_invented_after_a_lost_one_is_no_try_at_it():
    said = (Utterance("c-0", "c", 0.0, 30.0, (("so", 0.0, 1.0), ("dogs", 1.0, 2.0))),)
    for spoken_s, lost, invented in ((3.9, 0, 0), (4.1, 1, 1)):
        pairs = align(said, [WrittenWord("So", 1.5, 1.5, 0.9), WrittenWord("You", 20.0, 20.0, spoken_s)])
        found = count(said, apart_if_unspoken(pairs), [], 30.0)["c"]
        assert (found.deletions, found.silent_words, found.errors) == (lost, invented, 1 + lost)


def test_nothing_written_loses_every_word():
    found = counted([])
    assert (found["a"].deletions, found["a"].insertions, found["a"].lags_s) == (8, 0, [])


def event(text, at_s, window=0):
    return Event(
        window_index=window, step=1, token=1, text=text, horizon=1, effective_horizon=1, predicted_steps=1, last=False, arrival_s=at_s,
        emission_s=at_s + 0.1, spoken_s=at_s - 1,
    )  # fmt: skip


def test_a_word_has_the_time_of_its_last_letter():
    pieces = [(" Mr", 1.0), (".", 2.0), (" Qu", 3.0), ("ilter", 4.0), ("'s", 5.0), (" -", 6.0), ("", 7.0)]
    events = [*(event(*piece) for piece in pieces), event("mad", 8.0, window=1), event("ness", 8.5, window=2)]
    found = written_words(events)
    assert [(word.text, word.written_s) for word in found] == [("Mr.", 1.0), ("Quilter's", 5.0), ("-", 6.0), ("mad", 8.0), ("ness", 8.5)]
    assert (found[0].emitted_s, found[0].spoken_s) == (1.1, 0.0)


def test_a_word_goes_on_where_a_window_took_it_over():
    at = (1, 1, 2, False)
    taken_over = [Event(0, 1, 5, " Good", *at), Event(1, 2, 6, "ness", *at), Event(1, 3, 7, " me", *at)]
    assert [word.text for word in written_words(taken_over)] == ["Goodness", "me"]
    anew = [dataclasses.replace(event, step=event.step - event.window_index) for event in taken_over]
    assert [word.text for word in written_words(anew)] == ["Good", "ness", "me"]
    for events, text in ((taken_over, "Goodness me"), (anew, "Good ness me")):
        transcript = Transcript()
        assert "".join(map(transcript.add, events)) == transcript.text == text
