from __future__ import annotations

import json
from collections import Counter

import pytest

from zendaya.data.corpora import msvd
from zendaya.data.corpora.registry import read
from zendaya.errors import CorpusError
from zendaya.records import Clip


def line(**changes):
    record = {
        "id": "vid1",
        "video": "-4wsu_PCjDBc_5_15",
        "split": "train",
        "dur": 10,
        "F": 30,
        "captions": ["a cat eats", "a cat is eating"],
    }
    return json.dumps({k: v for k, v in (record | changes).items() if v is not None}) + "\n"


def test_a_line_is_a_clip_with_all_its_captions(put, collect):
    clips, kinds = collect(msvd.clips, put("msvd.jsonl", line()))
    assert clips == [
        Clip(
            corpus="msvd",
            id="vid1",
            split="train",
            stream="-4wsu_PCjDBc",
            references=("a cat eats", "a cat is eating"),
            start_s=5.0,
            end_s=15.0,
            media="-4wsu_PCjDBc_5_15.avi",
            media_start_s=5.0,
            num_source_tokens=30,
            feature_row=0,
        )
    ]
    assert kinds == {}


def test_each_oddity_is_reported_and_handled_as_stated(put, collect):
    content = [
        "\ufeff" + line(),
        line(),
        "broken\n",
        line(id="vid4", captions=["a", "a", "", "b"]),
        line(id="vid5", dur=9),
        line(id="vid6", video="abc_5_40", dur=35, F=80),
        line(id="vid7", video="abc_7_7", dur=0, F=0),
        line(id="vid8", F=-1),
        line(id="vid9", video="no times"),
        line(id="vid10", captions="one"),
        line(id="vid11", split=None),
        line(id="vid12", F=None, dur=None),
        line(id="vid13", F=0),
    ]
    clips, kinds = collect(msvd.clips, put("msvd.jsonl", "".join(content)))
    at = "msvd.jsonl:{}".format
    assert kinds == {
        "bom": [at(1)],
        "duplicate-id": [at(2)],
        "malformed": [at(3), at(8), at(9), at(10), at(11)],
        "duplicate-reference": [at(4)],
        "empty-reference": [at(4)],
        "wrong-duration": [at(5)],
        "features-short": [at(6), at(13)],
        "end-before-start": [at(7)],
    }
    found = {c.id: c for c in clips}
    assert list(found) == ["vid1", "vid4", "vid5", "vid6", "vid7", "vid12", "vid13"]
    assert found["vid4"].references == ("a", "a", "b")
    assert found["vid4"].feature_row == 3
    assert found["vid6"].num_source_tokens == 80
    assert found["vid12"].num_source_tokens is None
    assert [i for i, c in found.items() if not c.usable] == ["vid7", "vid13"]


def test_the_two_text_files(put, collect):
    put("AllVideoDescriptions.txt", "# a comment\n\nabc_1_5 A cat eats.\nabc_1_5 A cat.\nxy_z_2_4 A dog.\nlost_1_2 A fox.\nq A\n")
    folder = put("youtube_mapping.txt", "xy_z_2_4 vid1201\nabc_1_5 vid1\nnone_1_2 vid1301\nabc\n")
    clips, kinds = collect(msvd.clips, folder)
    assert [(c.id, c.split, c.stream, c.start_s, c.end_s, c.references, c.feature_row) for c in clips] == [
        ("vid1", "train", "abc", 1.0, 5.0, ("A cat eats.", "A cat."), 0),
        ("vid1201", "val", "xy_z", 2.0, 4.0, ("A dog.",), 1200),
    ]
    assert kinds == {
        "blank-line": ["AllVideoDescriptions.txt:2"],
        "malformed": ["AllVideoDescriptions.txt:7", "youtube_mapping.txt:4"],
        "no-text": ["youtube_mapping.txt:3"],
        "unpaired": ["AllVideoDescriptions.txt"],
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds none of msvd.jsonl"),
        ({"AllVideoDescriptions.txt": "a_1_2 A cat.\n"}, "youtube_mapping.txt: no such file"),
        ({"msvd.jsonl": '{"some": "json"}\n'}, "no line of that format"),
    ],
)
def test_what_is_missing_or_of_another_format_is_one_clear_line(put, tmp_path, files, message):
    for name, content in files.items():
        put(name, content)
    with pytest.raises(CorpusError, match=message):
        list(msvd.clips(tmp_path, []))


def test_the_published_files(data):
    reading = read("msvd", data("msvd"))
    assert Counter(c.split for c in reading.clips) == {"train": 1200, "val": 100, "test": 670}
    captions = Counter()
    for clip in reading.clips:
        captions[clip.split] += len(clip.references)
    assert captions == {"train": 48774, "val": 4290, "test": 27763}
    assert Counter(p.kind for p in reading.problems) == {"duplicate-reference": 10845, "features-short": 47, "shared-stream": 1}
    assert [c.feature_row for c in reading.clips] == list(range(1970))
    assert sum(c.num_source_tokens for c in reading.clips) == 56118
