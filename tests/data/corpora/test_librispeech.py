from __future__ import annotations

import json
from collections import Counter

import pytest

from zendaya.data.corpora import librispeech, librispeech_long30
from zendaya.data.corpora.registry import read
from zendaya.errors import CorpusError


def line(identity, **changes):
    record = {"id": identity, "split": "train", "speaker": "1", "dur": 1.5, "text": "A B", "audio": f"opus/{identity}.opus"} | changes
    return json.dumps({k: v for k, v in record.items() if v is not None}) + "\n"


def flac(num_samples, rate=16000):
    """A FLAC file as far as its header goes: 16-bit mono."""
    packed = rate << 44 | 0 << 41 | 15 << 36 | num_samples
    return b"fLaC" + bytes([0x80, 0, 0, 34]) + bytes(10) + packed.to_bytes(8, "big") + bytes(16)


def test_a_chapter_is_a_stream_of_its_utterances(put, collect):
    for name in ("1-2-0000", "1-2-0001", "1-3-0000"):
        put(f"opus/{name}.opus", "x")
    clips, kinds = collect(
        librispeech.clips, put("manifest.jsonl", line("1-2-0001", dur=0.1) + line("1-2-0000", dur=0.2) + line("1-3-0000"))
    )
    assert [(c.id, c.stream, c.start_s, c.end_s, c.media_start_s, c.media, c.group) for c in clips] == [
        ("1-2-0001", "1-2", 0.2, 0.3, 0.2, "opus/1-2-0001.opus", "1"),
        ("1-2-0000", "1-2", 0.0, 0.2, 0.0, "opus/1-2-0000.opus", "1"),
        ("1-3-0000", "1-3", 0.0, 1.5, 0.0, "opus/1-3-0000.opus", "1"),
    ]
    assert kinds == {}


def test_each_oddity_is_reported_and_handled_as_stated(put, collect):
    for n in range(10):
        put(f"opus/1-2-{n:04}.opus", "x")
    content = [
        line("1-2-0000"),
        line("1-2-0000"),
        line("1-2-0001", dur=0),
        line("1-2-0002", text=""),
        line("1-2-0005", audio="opus/none.opus"),
        line("speaker"),
        line("1-2-0006", dur=None),
        line("1-2-0007", text=7),
        line("1-2-0008", text=" A  B "),
        "\n",
    ]
    clips, kinds = collect(librispeech.clips, put("manifest.jsonl", "".join(content)))
    at = "manifest.jsonl:{}".format
    assert kinds == {
        "duplicate-id": [at(2)],
        "malformed": [at(6), at(7), at(8)],
        "missing-media": [at(5)],
        "blank-line": [at(10)],
        "gap": [at(5), at(9)],
        "end-before-start": [at(3)],
        "empty-reference": [at(4)],
        "untrimmed-text": [at(9)],
    }
    assert [(c.id, c.stream, c.start_s, c.usable) for c in clips] == [
        ("1-2-0000", "1-2", 0.0, True),
        ("1-2-0001", "1-2", 1.5, False),
        ("1-2-0002", "1-2", 1.5, False),
        ("1-2-0005", "1-2+0005", 0.0, True),
        ("1-2-0008", "1-2+0008", 0.0, True),
    ]
    assert clips[-1].references == ("A  B",)


def test_a_speaker_in_train_and_test_is_reported(put):
    put("opus/1-2-0000.opus", "x")
    put("opus/1-3-0000.opus", "x")
    reading = read("librispeech", put("manifest.jsonl", line("1-2-0000") + line("1-3-0000", split="test")))
    assert [(p.kind, p.where) for p in reading.problems] == [("shared-group", "librispeech:'1'")]
    # Two tests may share a speaker: nothing was learnt from either.
    reading = read("librispeech", put("manifest.jsonl", line("1-2-0000", split="valid") + line("1-3-0000", split="test")))
    assert not reading.problems


def test_the_folders_of_openslr(put, collect):
    put("dev-clean/1/2/1-2.trans.txt", "1-2-0000 A B\n1-2-0001 C\n1-2-0001 D\nnothing\n1-2-0002 E\n1-2-0003 F\n")
    put("dev-clean/1/2/1-2-0000.flac", flac(24000))
    put("dev-clean/1/2/1-2-0001.flac", flac(8000, 8000))
    put("dev-clean/1/2/1-2-0002.flac", b"RIFF")
    put("test-clean/3/4/3-4-0000.flac", flac(16000))
    root = put("test-clean/3/4/3-4.trans.txt", "3-4-0000 G\n")
    clips, kinds = collect(librispeech.clips, root)
    assert [(c.id, c.split, c.start_s, c.end_s, c.media, c.usable) for c in clips] == [
        ("1-2-0000", "dev-clean", 0.0, 1.5, "dev-clean/1/2/1-2-0000.flac", True),
        ("1-2-0001", "dev-clean", 1.5, 2.5, "dev-clean/1/2/1-2-0001.flac", True),
        ("1-2-0002", "dev-clean", 2.5, 2.5, "dev-clean/1/2/1-2-0002.flac", False),
        ("1-2-0003", "dev-clean", 2.5, 2.5, "dev-clean/1/2/1-2-0003.flac", False),
        ("3-4-0000", "test-clean", 0.0, 1.0, "test-clean/3/4/3-4-0000.flac", True),
    ]
    at = "dev-clean/1/2/1-2.trans.txt:{}".format
    assert kinds == {"duplicate-id": [at(3)], "malformed": [at(4)], "missing-media": [at(5), at(6)], "end-before-start": [at(5), at(6)]}
    assert [c.id for c in collect(librispeech.clips, root / "test-clean")[0]] == ["3-4-0000"]


def test_a_real_flac_header(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "a.flac", [0.0] * 12345, 16000)
    assert librispeech.flac_duration_s(tmp_path / "a.flac") == 12345 / 16000


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds neither manifest.jsonl nor"),
        ({"manifest.jsonl": "{}\n"}, "no line of that format .*no field 'id'"),
        ({"dev/1/2/1-2.trans.txt": "<html>\n"}, "expected lines `ID TEXT`"),
    ],
)
def test_what_is_missing_or_of_another_format_is_one_clear_line(put, tmp_path, files, message):
    for name, content in files.items():
        put(name, content)
    with pytest.raises(CorpusError, match=message):
        list(librispeech.clips(tmp_path, []))


def test_joined_utterances(put, collect):
    put("manifest.jsonl", "".join(line(f"1-2-{n:04}", text=f"W{n}") for n in range(4)) + line("1-3-0000"))
    for name in [f"1-2-{n:04}" for n in range(4)] + ["1-3-0000"]:
        put(f"opus/{name}.opus", "x")
    joined = [
        {"id": "a", "split": "train", "idx": [0, 1], "dur": 3.0, "text": "W0 W1"},
        {"id": "a", "split": "train", "idx": [2], "dur": 1.5, "text": "W2"},
        {"id": "b", "split": "train", "idx": [2, 3], "dur": 9.0, "text": "W2"},
        {"id": "c", "split": "train", "idx": [3, 4], "dur": 3.0, "text": "W3"},
        {"id": "d", "split": "train", "idx": [0, 2], "dur": 3.0, "text": "W0"},
        {"id": "e", "split": "train", "idx": [99], "dur": 3.0, "text": "W0"},
        {"id": "f", "split": "train", "idx": [], "dur": 3.0, "text": "W0"},
    ]
    clips, kinds = collect(librispeech_long30.clips, put("long30.jsonl", "".join(json.dumps(r) + "\n" for r in joined)))
    at = "long30.jsonl:{}".format
    assert kinds == {"duplicate-id": [at(2)], "wrong-duration": [at(3)], "disagrees": [at(3)], "malformed": [at(4), at(5), at(6), at(7)]}
    assert [(c.id, c.stream, c.start_s, c.end_s, c.references, [p.id for p in c.parts]) for c in clips] == [
        ("a", "1-2", 0.0, 3.0, ("W0 W1",), ["1-2-0000", "1-2-0001"]),
        ("b", "1-2", 3.0, 6.0, ("W2",), ["1-2-0002", "1-2-0003"]),
    ]


def test_the_published_files(data):
    reading = read("librispeech", data("librispeech"))
    assert Counter(c.split for c in reading.clips) == {"train": 4257, "valid": 325, "test": 741}
    assert not reading.problems
    assert len(reading.pairs) == 5139
    long = read("librispeech-long30", data("librispeech"))
    assert Counter(c.split for c in long.clips) == {"train": 1208, "valid": 117, "test": 185}
    assert not long.problems
    assert sorted(p.id for c in long.clips for p in c.parts) == sorted(c.id for c in reading.clips)
    assert len(long.pairs) == 1326
    assert long.digest != reading.digest
