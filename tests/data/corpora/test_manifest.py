from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zendaya.data.corpora import manifest
from zendaya.data.corpora.registry import read
from zendaya.errors import CorpusError
from zendaya.records import Clip

DOCS = Path(__file__).parents[3] / "docs" / "corpora.md"


def jsonl(*records):
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)


def test_a_line_is_a_clip(put, collect):
    put("talk.wav", "x")
    records = [
        {"id": "a", "media": "talk.wav", "end_s": 3.5, "text": "hello"},
        {
            "id": "b",
            "media": "talk.wav",
            "start_s": 3.5,
            "end_s": 9,
            "references": ["one", "two"],
            "split": "test",
            "stream_s": 60,
            "group": "ann",
        },
        {"id": "c", "source": "a dog", "text": "ein Hund"},
        {
            "id": "d",
            "media": "talk.wav",
            "stream": "tour",
            "start_s": 10,
            "end_s": 11,
            "media_start_s": 10,
            "text": "x",
            "num_source_tokens": 4,
            "feature_row": 2,
        },
    ]
    clips, kinds = collect(manifest.clips, put("my.jsonl", jsonl(*records)) / "my.jsonl")
    assert kinds == {}
    assert clips == [
        Clip(corpus="manifest", id="a", split="train", stream="talk.wav", references=("hello",), end_s=3.5, media="talk.wav"),
        Clip(
            corpus="manifest",
            id="b",
            split="test",
            stream="talk.wav",
            references=("one", "two"),
            start_s=3.5,
            end_s=9.0,
            media="talk.wav",
            stream_s=60.0,
            group="ann",
        ),
        Clip(corpus="manifest", id="c", split="train", stream="c", references=("ein Hund",), source="a dog"),
        Clip(
            corpus="manifest",
            id="d",
            split="train",
            stream="tour",
            references=("x",),
            start_s=10.0,
            end_s=11.0,
            media="talk.wav",
            media_start_s=10.0,
            num_source_tokens=4,
            feature_row=2,
        ),
    ]


def test_each_oddity_is_reported_and_handled_as_stated(put, collect):
    put("talk.wav", "x")
    good = {"id": "a", "media": "talk.wav", "end_s": 3.5, "text": "hello"}
    records = [
        good,
        good,
        good | {"split": "test"},
        good | {"id": "b", "media": "none.wav"},
        good | {"id": "c", "lenght": 3},
        good | {"id": "d", "end_s": 0},
        good | {"id": "e", "stream_s": 3},
        good | {"id": "f", "text": " "},
        {k: v for k, v in good.items() if k != "id"},
        {k: v for k, v in good.items() if k != "end_s"} | {"id": "g"},
        {k: v for k, v in good.items() if k != "text"} | {"id": "h"},
        {"id": "i", "text": "x"},
        good | {"id": "j", "references": "not a list"},
        good | {"id": "k", "stream": "other"},
        good | {"id": "l", "end_s": True},
        good | {"id": "m", "num_source_tokens": 1.5},
        good | {"id": "n\n"},
        '{"id": "o", "media": "talk.wav", "end_s": Infinity, "text": "x"}',
        '{"id": "p", "media": "talk.wav", "end_s": 1' + "0" * 400 + ', "text": "x"}',
        "",
        {"id": "q", "source": "", "text": "x"},
    ]
    clips, kinds = collect(manifest.clips, put("my.jsonl", jsonl(*records)) / "my.jsonl")
    at = "my.jsonl:{}".format
    assert kinds == {
        "duplicate-id": [at(2)],
        "missing-media": [at(4)],
        "unknown-field": [at(5)],
        "end-before-start": [at(6)],
        "end-past-stream": [at(7)],
        "empty-reference": [at(8)],
        "malformed": [at(n) for n in range(9, 20)],
        "blank-line": [at(20)],
        "empty-source": [at(21)],
    }
    assert [(c.split, c.id, c.usable) for c in clips] == [
        ("train", "a", True),
        ("test", "a", True),
        *(("train", name, name not in "dfq") for name in "bcdefq"),
    ]


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", '{"id": 1}\n'])
def test_another_format_is_one_clear_line(put, content):
    with pytest.raises(CorpusError, match="expected a JSON object per line"):
        list(manifest.clips(put("my.jsonl", content) / "my.jsonl", []))


def test_a_manifest_that_is_not_there(tmp_path):
    with pytest.raises(CorpusError, match="no such file"):
        read("manifest", tmp_path / "my.jsonl")


names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8)
texts = st.lists(names, min_size=1, max_size=3).map(" ".join)
seconds = st.floats(-1e6, 1e6)


@settings(max_examples=50)
@given(
    st.lists(
        st.builds(
            Clip,
            corpus=st.just("manifest"),
            id=names,
            split=names,
            stream=names,
            references=st.lists(texts, max_size=3).map(tuple),
            start_s=seconds,
            end_s=seconds,
            media=names,
            media_start_s=seconds,
            stream_s=st.none() | seconds,
            source=st.just("") | texts,
            group=st.just("") | names,
            num_source_tokens=st.none() | st.integers(0, 1 << 50),
            feature_row=st.none() | st.integers(0, 1 << 50),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda clip: (clip.split, clip.id),
    )
)
def test_what_is_written_is_read_back(tmp_path_factory, clips):
    path = tmp_path_factory.getbasetemp() / "my.jsonl"
    manifest.write(clips, path)
    assert list(manifest.clips(path, [])) == clips


def test_a_joined_clip_is_not_written(tmp_path):
    part = Clip(corpus="x", id="a", split="s", stream="s", references=("x",))
    with pytest.raises(CorpusError, match="write its parts instead"):
        manifest.write([Clip(corpus="x", id="b", split="s", stream="s", references=("x",), parts=(part,))], tmp_path / "my.jsonl")


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch, capsys):
    text = DOCS.read_text(encoding="utf-8")
    (example,) = re.findall(r"```jsonl\n(.*?)```", text, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"which prints\n\n```\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("talks.jsonl").write_text(example, encoding="utf-8")
    for line in example.splitlines():
        Path(json.loads(line)["media"]).touch()
    exec(compile(code, str(DOCS), "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_documentation_states_every_kind_and_field():
    from zendaya.data.published import KINDS

    text = DOCS.read_text(encoding="utf-8")
    for kind, done in KINDS.items():
        assert f"| `{kind}` |" in text, kind
        assert done in text, kind
    for field in manifest.FIELDS:
        assert f"`{field}`" in text, field
