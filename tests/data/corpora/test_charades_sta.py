from __future__ import annotations

import pytest

from zendaya.data.corpora import charades_sta
from zendaya.data.corpora.base import streaming_pairs
from zendaya.data.corpora.registry import read
from zendaya.errors import CorpusError

HEADER = "id,subject,scene,script,length\n"


def test_a_line_is_a_clip_with_its_published_times(put, collect):
    put("charades_sta_train.txt", "AAA11 0.0 6.9##a person reads.\nAAA11 6.9 12.25##the person sleeps.\n")
    folder = put("Charades_v1_train.csv", HEADER + 'AAA11,S,Room,"two\nlines, and ""quotes""",30.5\n')
    clips, kinds = collect(charades_sta.clips, folder)
    assert [(c.id, c.stream, c.split, c.start_s, c.end_s, c.stream_s, c.media, c.references) for c in clips] == [
        ("AAA11/1", "AAA11", "train", 0.0, 6.9, 30.5, "AAA11.mp4", ("a person reads.",)),
        ("AAA11/2", "AAA11", "train", 6.9, 12.25, 30.5, "AAA11.mp4", ("the person sleeps.",)),
    ]
    assert kinds == {"missing-split": ["charades_sta_test.txt"]}


def test_each_oddity_is_reported_and_handled_as_stated(put, collect):
    put("Charades_v1_train.csv", HEADER + "AAA11,S,R,x,10.0\nBBB22,S,R,x,\nAAA11,S,R,x,99\n,S,R,x,5\n")
    put("Charades_v1_test.csv", HEADER + "TTT99,S,R,x,10.0\n")
    put("charades_sta_test.txt", "TTT99 0.0 1.0##fine.\n")
    lines = [
        "\ufeffAAA11 0.0 6.9##first.",
        "AAA11 5.0 4.0##ends before it starts.",
        "AAA11 5.0 5.0##no length.",
        "AAA11 5.0 11.5##past the end.",
        "AAA11 12.0 13.0##all past the end.",
        "AAA11 -1.0 2.0##before the beginning.",
        "AAA11 0.0 6.9##first.",
        "BBB22 0.0 6.9##length unknown.",
        "ZZZ00 0.0 6.9##not in the csv.",
        "AAA11 0.0 6.9##",
        "AAA11 0.0 6.9## spaces ",
        "not a line at all",
        "AAA11 zero 6.9##not a number.",
        "AAA11 0.0 nan##not a number.",
        "",
        "AAA11 1.0 2.0##a sentence with ## inside.",
    ]
    folder = put("charades_sta_train.txt", "\n".join(lines).encode() + b"\nAAA11 1.0 2.0##caf\xe9.\n")
    clips, kinds = collect(charades_sta.clips, folder)
    at = "charades_sta_train.txt:{}".format
    assert kinds == {
        "unknown-length": ["Charades_v1_train.csv:3"],
        "duplicate-id": ["Charades_v1_train.csv:4"],
        "malformed": ["Charades_v1_train.csv:5", at(12), at(13), at(14)],
        "bom": [at(1)],
        "end-before-start": [at(2), at(3)],
        "end-past-stream": [at(4)],
        "start-past-stream": [at(5)],
        "negative-start": [at(6)],
        "duplicate-line": [at(7)],
        "unknown-video": [at(9)],
        "empty-reference": [at(10)],
        "untrimmed-text": [at(11)],
        "blank-line": [at(15)],
        "bad-text": [at(17)],
    }
    by_line = {int(c.id.rpartition("/")[2]): c for c in clips if c.split == "train"}
    assert sorted(by_line) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16, 17]
    assert [n for n, c in sorted(by_line.items()) if not c.usable] == [2, 3, 5, 10]
    assert (by_line[2].start_s, by_line[2].end_s, by_line[2].duration_s) == (5.0, 4.0, 0.0)
    assert (by_line[4].end_s, by_line[4].duration_s) == (11.5, 5.0)
    assert (by_line[6].start_s, by_line[6].duration_s) == (-1.0, 2.0)
    assert by_line[8].stream_s is None
    assert by_line[9].stream_s is None
    assert by_line[11].references == ("spaces",)
    assert by_line[16].references == ("a sentence with ## inside.",)
    assert by_line[17].references == ("caf\ufffd.",)


def test_crlf_is_a_line_end(put, collect):
    put("Charades_v1_test.csv", HEADER.replace("\n", "\r\n") + "AAA11,S,R,x,10.0\r\n")
    clips, kinds = collect(charades_sta.clips, put("charades_sta_test.txt", "AAA11 0.0 6.9##a.\r\n"))
    assert clips[0].references == ("a.",)
    assert clips[0].stream_s == 10.0
    assert set(kinds) == {"missing-split"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds none of charades_sta_train.txt"),
        ({"charades_sta_test.txt": "AAA11 0.0 1.0##a.\n"}, r"Charades_v1_test.csv: no such file; it has the lengths"),
        ({"charades_sta_test.txt": "AAA11 0.0 1.0##a.\n", "Charades_v1_test.csv": "id,name\nA,b\n"}, "the columns id and length"),
        ({"charades_sta_test.txt": "AAA11 0.0 1.0##a.\n", "Charades_v1_test.csv": ""}, "the columns id and length"),
        ({"charades_sta_test.txt": "<html>\n</html>\n", "Charades_v1_test.csv": HEADER}, r"no line of that format .*html"),
        ({"charades_sta_test.txt": "", "Charades_v1_test.csv": HEADER}, "got an empty file"),
        ({"charades_sta_test.txt": b"\x1f\x8b\x08\x00broken", "Charades_v1_test.csv": HEADER}, "damaged gzip"),
    ],
)
def test_what_is_missing_or_of_another_format_is_one_clear_line(put, tmp_path, files, message):
    for name, content in files.items():
        put(name, content)
    with pytest.raises(CorpusError, match=message) as raised:
        list(charades_sta.clips(tmp_path, []))
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CorpusError, match="no such folder"):
        read("charades-sta", tmp_path / "nowhere")


def test_the_published_files(data):
    reading = read("charades-sta", data("annotations/charades_sta"))
    assert [sum(c.split == s for c in reading.clips) for s in ("train", "test")] == [12408, 3720]
    kinds = [p.kind for p in reading.problems]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"end-before-start": 4, "start-past-stream": 3, "end-past-stream": 2364}
    assert len(reading.usable) == 12404 + 3720
    assert {p.where for p in reading.problems if p.kind == "end-before-start"} == {
        f"charades_sta_train.txt:{n}" for n in (8252, 8440, 9623, 9624)
    }
    first = reading.clips[0]
    assert (first.id, first.start_s, first.end_s, first.references) == ("AO8RW/1", 0.0, 6.9, ("a person is putting a book on a shelf.",))
    pairs = list(streaming_pairs(reading.clips))
    assert [sum(b.split == s for _, b in pairs) for s in ("train", "test")] == [1496, 425]
    assert all(a.stream == b.stream and a.end_s <= b.start_s for a, b in pairs)
