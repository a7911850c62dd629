from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zendaya.data.corpora.base import consecutive, overlap, streaming_pairs
from zendaya.records import Clip


def clip(identity, start_s, end_s, stream="v", split="train", **more):
    return Clip(corpus="x", id=str(identity), split=split, stream=stream, references=("a",), start_s=start_s, end_s=end_s, **more)


def ids(pairs):
    return [(a.id, b.id) for a, b in pairs]


def test_pairs_are_consecutive_in_time_without_overlaps():
    clips = [clip("c", 10, 20), clip("a", 0, 5), clip("b", 5, 12), clip("d", 20, 30), clip("e", 21, 22)]
    assert ids(consecutive(clips)) == [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")]
    assert ids(streaming_pairs(clips)) == [("a", "b"), ("c", "d")]


def test_pairs_stay_within_stream_and_split():
    clips = [clip("a", 0, 1), clip("b", 1, 2, stream="w"), clip("c", 2, 3, split="test"), clip("d", 3, 4, stream="w")]
    assert ids(streaming_pairs(clips)) == [("b", "d")]


def test_clips_without_source_or_text_are_not_in_pairs():
    empty = Clip(corpus="x", id="e", split="train", stream="v", references=(), start_s=3, end_s=4)
    text = Clip(corpus="x", id="t", split="train", stream="v", references=("b",), source="a")
    clips = [clip("a", 0, 1), clip("b", 5, 4), empty, text, clip("c", 8, 9), clip("d", 50, 60, stream_s=40.0)]
    assert ids(streaming_pairs(clips)) == [("a", "c")]


def test_two_sentences_of_one_segment_are_no_pair():
    assert ids(streaming_pairs([clip("a", 0, 5), clip("b", 0, 5), clip("c", 5, 6)])) == [("b", "c")]


times = st.floats(0, 100, allow_subnormal=False)


@given(st.lists(st.tuples(times, times, st.sampled_from("uvw"), st.sampled_from(["train", "test"])), max_size=40))
def test_pairs_are_in_order_of_one_stream_and_do_not_overlap(rows):
    clips = [clip(n, *row) for n, row in enumerate(rows)]
    pairs = list(streaming_pairs(clips))
    for before, after in pairs:
        assert (before.split, before.stream) == (after.split, after.stream)
        assert before.end_s <= after.start_s
        assert before.usable
        assert after.usable
        # Consecutive: no usable clip of the stream begins strictly between the two.
        others = [c for c in clips if c.usable and (c.split, c.stream) == (after.split, after.stream)]
        assert not [c for c in others if before.start_s < c.start_s < after.start_s]
    everything = list(consecutive(clips))
    streams = {(c.split, c.stream) for c in clips if c.usable}
    assert len(everything) == sum(c.usable for c in clips) - len(streams)
    assert len(pairs) == sum(not overlap(*pair) for pair in everything)
    assert len({b.id for _, b in everything}) == len(everything)
