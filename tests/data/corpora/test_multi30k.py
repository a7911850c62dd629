from __future__ import annotations

import gzip
from collections import Counter

import pytest

from zendaya.data.check import check
from zendaya.data.corpora import multi30k
from zendaya.data.corpora.registry import read
from zendaya.errors import CorpusError


def test_a_line_is_a_source_and_its_translation(put, collect):
    put("train.en", "A dog.\nTwo\u2028dogs.\n")
    put("train.de.gz", gzip.compress(b"Ein Hund.\nZwei Hunde."))
    folder = put("train.fr", "Un chien.\nDeux chiens.\n")
    clips, kinds = collect(multi30k.clips, folder)
    assert [(c.id, c.split, c.stream, c.source, c.references, c.usable) for c in clips] == [
        ("train/1", "train", "train/1", "A dog.", ("Ein Hund.",), True),
        ("train/2", "train", "train/2", "Two dogs.", ("Zwei Hunde.",), True),
    ]
    assert kinds == {"missing-split": ["val.en", "test_2016_flickr.en"], "line-break": ["train.en:2"]}
    assert collect(multi30k.clips, folder, target="fr")[0][0].references == ("Un chien.",)
    assert collect(multi30k.clips, folder, source="de", target="en")[0][0].source == "Ein Hund."


def test_each_oddity_is_reported_and_handled_as_stated(put, collect):
    for split in ("val", "test_2016_flickr"):
        put(f"{split}.en", "a\n")
        put(f"{split}.de", "b\n")
    put("train.en", b"\xef\xbb\xbfA dog.\nA cat.\n\n A man.\nA dog.\nA cat.\n\xff\n")
    folder = put("train.de", "Ein Hund.\n\nNichts.\nEin Mann.\t\nEin Rüde.\n\nx\n")
    clips, kinds = collect(multi30k.clips, folder)
    assert kinds == {
        "bom": ["train.en:1"],
        "empty-reference": ["train.de:2", "train.de:6"],
        "empty-source": ["train.en:3"],
        "untrimmed-text": ["train.en:4", "train.de:4"],
        "duplicate-line": ["train.en:6"],
        "bad-text": ["train.en:7"],
    }
    train = [c for c in clips if c.split == "train"]
    assert [c.usable for c in train] == [True, False, False, True, True, False, True]
    assert (train[3].source, train[3].references) == ("A man.", ("Ein Mann.",))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds none of train.en"),
        ({"train.en": "a\n"}, "train.de: no such file, plain or .gz"),
        ({"train.en": "a\nb\n", "train.de": "a\n"}, "2 lines, but train.de has 1"),
        ({"train.en": "", "train.de": ""}, "0 lines"),
    ],
)
def test_missing_or_mismatched_files_give_one_clear_line(put, tmp_path, files, message):
    for name, content in files.items():
        put(name, content)
    with pytest.raises(CorpusError, match=message):
        list(multi30k.clips(tmp_path, []))


@pytest.mark.parametrize(("name", "untrimmed", "duplicates"), [("multi30k", 40, 3), ("multi30k-en-fr", 47, 5)])
def test_the_published_files(data, name, untrimmed, duplicates):
    reading = read(name, data("multi30k"))
    assert Counter(c.split for c in reading.clips) == {"train": 29000, "val": 1014, "test_2016_flickr": 1000, "test_2017_flickr": 1000}
    assert Counter(p.kind for p in reading.problems) == {"untrimmed-text": untrimmed, "duplicate-line": duplicates}
    assert len(reading.usable) == 32014
    assert not reading.pairs


def test_the_lengths_of_the_published_files(data):
    result = check("multi30k", data("multi30k"), vocab_size=4000)
    geometry = result.splits["train"].geometry
    assert geometry is not None
    # Measured with the library's own byte-level BPE: no published number counts tokens the same way.
    assert geometry.source_tokens.mean == pytest.approx(14.33, abs=0.01)
    assert geometry.steps.mean == pytest.approx(15.37 + 1, abs=0.01)
    assert result.source_tokens_from == "BPE of at most 4000 ids trained on the train split"
    assert result.regime == "text-dense"
