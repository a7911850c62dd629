from __future__ import annotations

import json
from collections import Counter

import pytest

from zendaya.data.corpora import speechocean762
from zendaya.data.corpora.registry import read
from zendaya.errors import CorpusError


def line(identity, **changes):
    record = {"id": identity, "split": "train", "speaker": "0001", "dur": 1.5, "text": "A B", "audio": f"opus/{identity}.opus"} | changes
    return json.dumps({k: v for k, v in record.items() if v is not None}) + "\n"


def test_a_speaker_is_a_stream_of_utterances(put, collect):
    content = line("11") + line("21", speaker="0002", split="test") + line("12", dur=0.1) + line("13", dur=0.2)
    for name in ("11", "12", "13", "21"):
        put(f"opus/{name}.opus", "x")
    clips, kinds = collect(speechocean762.clips, put("manifest.jsonl", content))
    assert [(c.id, c.split, c.stream, c.start_s, c.end_s, c.media_start_s, c.group) for c in clips] == [
        ("11", "train", "0001", 0.0, 1.5, 0.0, "0001"),
        ("21", "test", "0002", 0.0, 1.5, 0.0, "0002"),
        ("12", "train", "0001", 1.5, 1.6, 1.5, "0001"),
        ("13", "train", "0001", 1.6, 1.8, 1.6, "0001"),
    ]
    assert clips[0].media == "opus/11.opus"
    assert kinds == {}


def test_oddities_are_reported(put, collect):
    content = line("11") + line("11") + line("12", speaker=None) + line("13", text="") + line("14", dur=-1) + line("15", speaker=7)
    for name in ("11", "13", "14"):
        put(f"opus/{name}.opus", "x")
    clips, kinds = collect(speechocean762.clips, put("manifest.jsonl", content))
    at = "manifest.jsonl:{}".format
    assert kinds == {
        "duplicate-id": [at(2)], "malformed": [at(3), at(6)], "empty-reference": [at(4)], "end-before-start": [at(5)],
    }  # fmt: skip
    assert [(c.id, c.start_s, c.usable) for c in clips] == [("11", 0.0, True), ("13", 1.5, False), ("14", 3.0, False)]


def test_a_folder_of_something_else_is_refused(put, tmp_path):
    with pytest.raises(CorpusError, match=r"manifest.jsonl: no such file; expected manifest.jsonl .id, split, speaker"):
        read("speechocean762", tmp_path)
    with pytest.raises(CorpusError, match="expected lines with id, split, speaker, dur, text and audio: got no line of that format"):
        read("speechocean762", put("manifest.jsonl", line("11", speaker=None)))


def test_the_published_corpus(data):
    reading = read("speechocean762", data("speechocean762"))
    assert not reading.problems
    assert Counter(clip.split for clip in reading.usable) == {"train": 2500, "test": 2500}
    assert set(Counter((clip.split, clip.stream) for clip in reading.clips).values()) == {20}
    assert all(clip.stream == clip.group for clip in reading.clips)
    assert len(reading.pairs) == 250 * 19
