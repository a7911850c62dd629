from __future__ import annotations

import gzip
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zendaya.data.corpora import libriheavy, libriheavy_6k
from zendaya.data.corpora.base import streaming_pairs
from zendaya.data.corpora.registry import read
from zendaya.errors import CorpusError
from zendaya.records import Clip


def cut(name="small/1/book_mp3/ch1_0", start=1.5, duration=2.25, **changes):
    recording = name.rpartition("_")[0]
    supervision = {
        "id": name,
        "recording_id": recording,
        "start": 0,
        "duration": duration,
        "custom": {"texts": ["Said he.", "SAID HE"], "pre_texts": ["…", "…"]},
    }
    record = {
        "id": name,
        "start": start,
        "duration": duration,
        "channel": 0,
        "supervisions": [supervision | changes.pop("supervision", {})],
        "recording": {"id": recording, "sources": [{"type": "file", "source": f"download/{recording}.flac"}], "duration": 60.5},
        "custom": {"text_path": "texts/The Book/text.txt"},
        "type": "MonoCut",
    }
    return record | changes


def jsonl(*records):
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)


@pytest.mark.parametrize("name", ["libriheavy_cuts_dev.jsonl", "libriheavy_cuts_dev.jsonl.gz"])
def test_a_cut_is_a_clip_with_its_published_times(put, collect, name):
    content = jsonl(cut(start=243.919, duration=7.36)).encode()
    folder = put(name, gzip.compress(content) if name.endswith(".gz") else content)
    for path in (folder, folder / name):
        clips, kinds = collect(libriheavy.clips, path)
        assert clips == [
            Clip(
                corpus="libriheavy",
                id="small/1/book_mp3/ch1_0",
                split="dev",
                stream="small/1/book_mp3/ch1",
                references=("Said he.",),
                start_s=243.919,
                end_s=251.279,
                media="download/small/1/book_mp3/ch1.flac",
                stream_s=60.5,
                group="the book",
            )
        ]
        assert kinds == {"start-past-stream": [f"{name}:1"]}
    assert collect(libriheavy.clips, folder, transcript="asr")[0][0].references == ("SAID HE",)


def test_each_oddity_of_a_cut_is_reported_and_handled_as_stated(put, collect):
    two = [{"id": f"s{n}", "recording_id": "r", "start": n, "duration": 1, "text": f"part {n}"} for n in (0, 1)]
    records = [
        cut("a/1/b/c_1"),
        cut("a/1/b/c_1"),
        cut("a/1/b/c_2", type="MixedCut"),
        cut("a/1/b/c_3", supervisions=[]),
        cut("a/1/b/c_4", supervisions=two),
        cut("a/1/b/c_5", duration=0),
        cut("a/1/b/c_6", duration=100),
        cut("a/1/b/c_7", recording=None),
        cut("a/1/b/c_8", supervision={"custom": {"texts": []}}),
        cut("a/1/b/c_9", supervision={"custom": None}),
        cut("a/1/b/c_10", supervision={"custom": {"texts": ["", ""]}}),
        cut("a/1/b/c_11", start="soon"),
        "{not json",
        "[]",
        "",
        cut("a/1/b/c_12", supervision={"custom": None, "text": "only text"}),
    ]
    clips, kinds = collect(libriheavy.clips, put("libriheavy_cuts_small.jsonl", jsonl(*records)))
    at = "libriheavy_cuts_small.jsonl:{}".format
    assert kinds == {
        "duplicate-id": [at(2)],
        "unsupported-cut": [at(3)],
        "no-text": [at(4)],
        "end-before-start": [at(6)],
        "end-past-stream": [at(7)],
        "no-media": [at(8)],
        "malformed": [at(9), at(10), at(12), at(13), at(14)],
        "empty-reference": [at(11)],
        "blank-line": [at(15)],
    }
    found = {c.id: c for c in clips}
    assert list(found) == [f"a/1/b/c_{n}" if isinstance(n, int) else n for n in (1, "s0", "s1", 5, 6, 7, 10, 12)]
    assert (found["s1"].start_s, found["s1"].end_s, found["s1"].references) == (2.5, 3.5, ("part 1",))
    assert found["a/1/b/c_7"].media == "a/1/b/c"
    assert found["a/1/b/c_12"].references == ("only text",)
    assert [i for i, c in found.items() if not c.usable] == ["a/1/b/c_5", "a/1/b/c_10"]


def kaldi(put, folder, segments, texts, wavs, data=None):
    put(f"{folder}/segments", "".join(f"{line}\n" for line in segments))
    put(f"{folder}/text", "".join(f"{line}\n" for line in texts))
    if data is not None:
        put(f"{folder}/data.json", json.dumps(data))
    return put(f"{folder}/wav.scp", "".join(f"{line}\n" for line in wavs))


def test_a_kaldi_folder(put, collect):
    root = kaldi(
        put,
        "long_dev",
        ["l/1/b/c_1 l/1/b/c 0.00 1.50", "l/1/b/c_2 l/1/b/c 1.50 9.25", "l/1/b/d_1 l/1/b/d 0 2"],
        ["l/1/b/c_1 ONE TWO", "l/1/b/c_2 THREE", "l/1/b/d_1 FOUR"],
        ["l/1/b/c sox /somewhere/l/1/b/c.flac -t wav - |", "l/1/b/d plain/d.wav"],
        {"l/1/b/c_1": {"audio_filepath": "path_librilight/l/1/b/c.flac", "start": 0.0, "end": 1.5, "text": "ONE TWO"}},
    )
    for path in (root, root / "long_dev"):
        clips, kinds = collect(libriheavy.clips, path)
        assert [(c.id, c.stream, c.split, c.start_s, c.end_s, c.media, c.group, c.references) for c in clips] == [
            ("l/1/b/c_1", "l/1/b/c", "long_dev", 0.0, 1.5, "l/1/b/c.flac", "b", ("ONE TWO",)),
            ("l/1/b/c_2", "l/1/b/c", "long_dev", 1.5, 9.25, "l/1/b/c.flac", "b", ("THREE",)),
            ("l/1/b/d_1", "l/1/b/d", "long_dev", 0.0, 2.0, "plain/d.wav", "b", ("FOUR",)),
        ]
        assert kinds == {"disagrees": ["long_dev/segments:2", "long_dev/segments:3"]}


def test_oddities_of_a_kaldi_folder_are_reported_and_handled(put, collect):
    root = kaldi(
        put,
        "d",
        ["u1 r 0 1", "u2 r 1 1", "u3 r 2", "u4 r 3 4", "u1 r 5 6", "", "u5 q 0 1", "u6 r x 1"],
        ["u1 A", "u2 B", "u3 C", "u5", "u7 G", "u6 F"],
        ["r sox r.flac |", "r again.flac"],
    )
    clips, kinds = collect(libriheavy.clips, root)
    assert kinds == {
        "duplicate-id": ["d/wav.scp:2", "d/segments:5"],
        "end-before-start": ["d/segments:2"],
        "malformed": ["d/segments:3", "d/segments:8"],
        "no-text": ["d/segments:4"],
        "blank-line": ["d/segments:6"],
        "no-media": ["d/segments:7"],
        "empty-reference": ["d/text:4"],
        "no-segment": kinds["no-segment"],
    }
    assert sorted(kinds["no-segment"]) == ["d/text:3", "d/text:5", "d/text:6"]
    assert [(c.id, c.usable, c.media) for c in clips] == [("u1", True, "r.flac"), ("u2", False, "r.flac"), ("u5", False, "q")]


def test_data_json_alone(put, collect):
    good = {"audio_filepath": "path_librilight/l/1/b/c.flac", "start": 1.25, "end": 2, "duration": 0.75, "text": "ONE"}
    root = put("long_test/data.json", json.dumps({"u1": good, "u2": good | {"end": None}, "u3": 3}))
    clips, kinds = collect(libriheavy.clips, root)
    assert [(c.id, c.stream, c.start_s, c.end_s, c.media, c.group) for c in clips] == [("u1", "l/1/b/c", 1.25, 2.0, "l/1/b/c.flac", "b")]
    assert kinds == {"malformed": ["long_test/data.json:'u2'", "long_test/data.json:'u3'"]}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no manifest"),
        ({"libriheavy_cuts_dev.jsonl": "text\n"}, "expected lhotse cuts, one per line: got no line of that format"),
        ({"libriheavy_cuts_dev.jsonl": ""}, "got an empty file"),
        ({"libriheavy_cuts_dev.jsonl.gz": gzip.compress(jsonl(cut()).encode() * 50)[:-30]}, "damaged gzip"),
        ({"d/segments": "u r 0 1\n"}, "text: no such file"),
        ({"d/segments": "nothing\n", "d/text": "u A\n"}, "expected lines `ID RECORDING start end`"),
    ],
)
def test_what_is_missing_or_of_another_format_is_one_clear_line(put, tmp_path, files, message):
    for name, content in files.items():
        put(name, content)
    with pytest.raises(CorpusError, match=message) as raised:
        list(libriheavy.clips(tmp_path, []))
    assert "\n" not in str(raised.value)


def test_a_line_without_end_is_refused(put, monkeypatch):
    monkeypatch.setattr("zendaya.data.published.MAX_LINE_BYTES", 1000)
    folder = put("libriheavy_cuts_dev.jsonl.gz", gzip.compress(b"x" * 100_000))
    with pytest.raises(CorpusError, match="line 1 is longer than"):
        list(libriheavy.clips(folder, []))


def library(num_books, per_recording, *, titles=None):
    """Books of two recordings each; `titles` maps (book, chapter) to a title shared with others."""
    for book in range(num_books):
        for chapter in range(2):
            for number in range(per_recording):
                stream = f"small/{book}/dir{book}/ch{chapter}"
                yield Clip(
                    corpus="libriheavy",
                    id=f"{stream}_{number}",
                    split="small",
                    stream=stream,
                    references=("x",),
                    start_s=10.0 * number,
                    end_s=10.0 * number + 9,
                    group=(titles or {}).get((book, chapter), f"dir{book}"),
                )


@given(
    seed=st.integers(0, 2**32),
    order=st.randoms(use_true_random=False),
    titles=st.dictionaries(st.tuples(st.integers(0, 29), st.integers(0, 1)), st.sampled_from(["emma", "ulysses"]), max_size=6),
)
def test_the_subset_is_book_disjoint_and_the_same_in_any_order(seed: int, order: random.Random, titles: dict[tuple[int, int], str]):
    clips = list(library(30, 6, titles=titles))
    chosen = libriheavy_6k.subset(clips, num_train=100, num_valid=20, num_test=25, seed=seed)
    assert [sum(c.split == s for c in chosen) for s in ("train", "valid", "test")] == [100, 20, 25]
    assert len({c.id for c in chosen}) == 145
    books = [{c.group for c in chosen if c.split == s} for s in ("train", "valid", "test")]
    assert sum(map(len, books)) == len(set.union(*books))
    directories = [{c.stream.split("/")[2] for c in chosen if c.split == s} for s in ("train", "valid", "test")]
    assert sum(map(len, directories)) == len(set.union(*directories))
    order.shuffle(clips)
    assert libriheavy_6k.subset(clips, num_train=100, num_valid=20, num_test=25, seed=seed) == chosen
    # Recordings are taken whole, so consecutive utterances stay consecutive: all pairs are neighbours.
    assert all(int(b.id.rpartition("_")[2]) == int(a.id.rpartition("_")[2]) + 1 for a, b in streaming_pairs(chosen))
    assert len(list(streaming_pairs(chosen))) == 145 - len({(c.split, c.stream) for c in chosen})


def test_the_subset_depends_on_the_seed():
    clips = list(library(30, 6))
    chosen = [{(c.split, c.id) for c in libriheavy_6k.subset(clips, num_train=100, num_valid=20, num_test=25, seed=s)} for s in (0, 1)]
    assert chosen[0] != chosen[1]


def test_the_recordings_within_a_split_depend_on_the_seed():
    clips = list(library(30, 6))
    chosen = [{c.stream for c in libriheavy_6k.subset(clips, num_train=60, num_valid=0, num_test=0, seed=s)} for s in (0, 1)]
    assert chosen[0] != chosen[1]
    assert all(len(streams) == 10 for streams in chosen)


def test_a_directory_with_two_titles_joins_their_books():
    # dir0 and dir1 share a title in one chapter, dir1 and dir2 another: the three are one book.
    titles = {(0, 0): "emma", (1, 0): "emma", (1, 1): "ulysses", (2, 1): "ulysses"}
    for seed in range(20):
        chosen = libriheavy_6k.subset(library(6, 5, titles=titles), num_train=5, num_valid=5, num_test=5, seed=seed)
        assert len({c.split for c in chosen if c.stream.split("/")[2] in ("dir0", "dir1", "dir2")}) <= 1


def test_one_book_cannot_be_split():
    with pytest.raises(CorpusError, match="60 usable utterances of 1 books, which left 0 for valid; read a larger manifest"):
        libriheavy_6k.subset(library(5, 6, titles={(book, 1): "emma" for book in range(5)}), num_train=10, num_valid=10, num_test=10)


def test_the_subset_reads_the_smallest_training_manifest(put):
    records = [cut(f"small/{n // 10}/book{n // 10}/ch{n % 2}_{n}", start=n / 1000, custom={}) for n in range(7600)]
    put("libriheavy_cuts_test_clean.jsonl", jsonl(cut()))
    put("libriheavy_cuts_medium.jsonl", jsonl(cut()))
    folder = put("libriheavy_cuts_small.jsonl.gz", gzip.compress(jsonl(*records).encode(), 1))
    reading = read("libriheavy-6k", folder)
    assert [sum(c.split == s for c in reading.clips) for s in ("train", "valid", "test")] == [6000, 500, 500]
    assert not reading.problems
    assert read("libriheavy-6k", folder / "libriheavy_cuts_small.jsonl.gz") == reading


def test_the_published_sample_cut(data):
    reading = read("libriheavy", data("annotations/libriheavy") / "libriheavy_cuts_sample.jsonl")
    (clip,) = reading.clips
    assert (clip.split, clip.start_s, clip.end_s, clip.stream_s, clip.group) == ("sample", 243.919, 251.279, 597.942, "sea fairies")
    assert clip.references[0].startswith("The little girl was thoughtful")
    assert clip.media.endswith("small/100/sea_fairies_0812_librivox_64kb_mp3/01_baum_sea_fairies_64kb.flac")
    assert not reading.problems


def test_the_published_longlibriheavy(data, collect, put):
    folder = data("annotations/libriheavy")
    reading = read("libriheavy", folder)
    counts = {split: sum(c.split == split for c in reading.clips) for split in dict.fromkeys(c.split for c in reading.clips)}
    assert counts == {"sample": 1, "longlibriheavy_dev": 98, "longlibriheavy_test_30": 1203}
    assert not reading.problems
    assert len(reading.pairs) == 4 + 1113
    # The JSON form alone says the same, word for word.
    alone, kinds = collect(libriheavy.clips, put("longlibriheavy_dev/data.json", (folder / "longlibriheavy_dev/data.json").read_bytes()))
    assert alone == [c for c in reading.clips if c.split == "longlibriheavy_dev"]
    assert not kinds
    chosen = libriheavy_6k.subset(reading.clips, num_train=800, num_valid=100, num_test=100)
    books = [{c.group for c in chosen if c.split == s} for s in ("train", "valid", "test")]
    assert sum(map(len, books)) == len(set.union(*books))
