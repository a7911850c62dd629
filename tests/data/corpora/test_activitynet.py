from __future__ import annotations

import json
from collections import Counter

import pytest

from zendaya.data.corpora import activitynet
from zendaya.data.corpora.registry import read
from zendaya.errors import CorpusError


def test_a_sentence_is_a_clip_with_its_published_times(put, collect):
    folder = put(
        "val_1.json", json.dumps({"v_a": {"duration": 82.73, "timestamps": [[0.83, 19.86], [17, 60.81]], "sentences": ["One.", "Two."]}})
    )
    clips, kinds = collect(activitynet.clips, folder)
    assert [(c.id, c.stream, c.split, c.start_s, c.end_s, c.stream_s, c.media, c.references) for c in clips] == [
        ("v_a/1", "v_a", "val_1", 0.83, 19.86, 82.73, "v_a", ("One.",)),
        ("v_a/2", "v_a", "val_1", 17.0, 60.81, 82.73, "v_a", ("Two.",)),
    ]
    assert kinds == {"missing-split": ["train.json", "val_2.json"]}


def test_each_oddity_is_reported_and_handled_as_stated(put, collect):
    def video(timestamps, sentences, **more):
        return json.dumps({"duration": 10.0, "timestamps": timestamps, "sentences": sentences} | more)

    videos = [
        ("v_times", video([[3, 3], [5, 4], [6, 12], [11, 12], [-1, 2]], ["a"] * 5)),
        ("v_texts", video([[0, 1], [1, 2], [2, 3], [3, 4]], ["", " b ", "c \n d", "\ud800"])),
        ("v_unpaired", video([[0, 1], [1, 2]], ["a"])),
        ("v_bad", video([[0], "x", [0, None], [0, 1]], ["a", "a", "a", 7])),
        ("v_length", video([[0, 99]], ["a"], duration=None)),
        ("v_list", "[]"),
        ("v_none", json.dumps({"duration": 1.0})),
        ("v_twice", video([[0, 1]], ["first"])),
        ("v_twice", video([[0, 1]], ["second"])),
    ]
    content = "\ufeff{" + ",".join(f"{json.dumps(name)}: {value}" for name, value in videos) + "}"
    for split in ("val_1", "val_2"):
        put(f"{split}.json", '{"v_ok": ' + video([[0, 1]], ["a"]) + "}")
    clips, kinds = collect(activitynet.clips, put("train.json", content))
    assert kinds == {
        "bom": ["train.json:1"],
        "duplicate-key": ["train.json:'v_twice'"],
        "end-before-start": ["train.json:v_times[1]", "train.json:v_times[2]"],
        "end-past-stream": ["train.json:v_times[3]"],
        "start-past-stream": ["train.json:v_times[4]"],
        "out-of-order": ["train.json:v_times[5]"],
        "negative-start": ["train.json:v_times[5]"],
        "empty-reference": ["train.json:v_texts[1]"],
        "untrimmed-text": ["train.json:v_texts[2]"],
        "line-break": ["train.json:v_texts[3]"],
        "bad-text": ["train.json:v_texts[4]"],
        "unpaired": ["train.json:'v_unpaired'"],
        "malformed": [*(f"train.json:v_bad[{n}]" for n in (1, 2, 3, 4)), "train.json:'v_list'", "train.json:'v_none'"],
        "unknown-length": ["train.json:'v_length'"],
    }
    found = {c.id: c for c in clips if c.split == "train"}
    assert sorted(found) == sorted(
        [*(f"v_times/{n}" for n in range(1, 6)), *(f"v_texts/{n}" for n in range(1, 5)), "v_unpaired/1", "v_length/1", "v_twice/1"]
    )
    assert [i for i, c in found.items() if not c.usable] == ["v_times/1", "v_times/2", "v_times/4", "v_texts/1"]
    assert [found[f"v_texts/{n}"].references for n in (2, 3, 4)] == [("b",), ("c d",), ("\ufffd",)]
    assert found["v_times/3"].end_s == 12.0
    assert found["v_times/3"].duration_s == 4.0
    assert found["v_twice/1"].references == ("second",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1, 2]", "expected a JSON object"),
        ("{}", "expected a JSON object"),
        ("[" * 100_000, "not JSON: nested too deep"),
        ('{"database": {"v_a": {}}, "version": "1.3"}', "an object of videos with duration, timestamps and sentences"),
        (b"\x89HDF\r\n\x1a\n", "not JSON"),
    ],
)
def test_another_format_is_one_clear_line(put, content, message):
    with pytest.raises(CorpusError, match=message) as raised:
        list(activitynet.clips(put("train.json", content), []))
    assert "\n" not in str(raised.value)
    assert "train.json" in str(raised.value)


def test_the_published_files(data):
    reading = read("activitynet", data("annotations/activitynet_captions"))
    videos = {split: len({c.stream for c in reading.clips if c.split == split}) for split in activitynet.SPLITS}
    assert videos == {"train": 10009, "val_1": 4917, "val_2": 4885}
    assert Counter(c.split for c in reading.clips) == {"train": 37421, "val_1": 17505, "val_2": 17031}
    assert len({(c.split, c.id) for c in reading.clips}) == len(reading.clips)
    assert Counter(p.kind for p in reading.problems) == {
        "untrimmed-text": 48853,
        "out-of-order": 559,
        "end-past-stream": 506,
        "end-before-start": 4,
        "line-break": 4,
    }
    assert len(reading.clips) - len(reading.usable) == 4
    assert Counter(b.split for _, b in reading.pairs) == {"train": 18780, "val_1": 8299, "val_2": 7199}
