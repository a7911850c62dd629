from __future__ import annotations

import hashlib
import json
import math

import pytest

from zendaya.data.check import Spread, check
from zendaya.data.corpora import registry as corpora
from zendaya.errors import ConfigError, CorpusError, ScheduleError


def manifest(put, *records, name="my.jsonl"):
    put("talk.wav", "x")
    lines = [{"id": str(n), "media": "talk.wav", "text": "x"} | record for n, record in enumerate(records)]
    return put(name, "".join(json.dumps(line) + "\n" for line in lines)) / name


def test_counts_and_geometry(put):
    # A single letter is one id of any byte-level BPE, so "x" takes one token and the [EOS] step.
    path = manifest(
        put,
        {"start_s": 0, "end_s": 4},
        {"start_s": 4, "end_s": 10, "references": ["x", "x"]},
        {"start_s": 9, "end_s": 12},
        {"start_s": 2, "end_s": 1},
        {"start_s": 0, "end_s": 2, "split": "test", "num_source_tokens": 50},
    )
    result = check("manifest", path, rate=2)
    assert list(result.splits) == ["train", "test"]
    train = result.splits["train"]
    assert (train.num_clips, train.num_usable, train.num_streams, train.num_references) == (4, 3, 1, 5)
    assert (train.num_pairs, train.num_overlapping) == (1, 1)
    assert train.hours == pytest.approx(13 / 3600)
    assert train.geometry is not None
    assert train.geometry.source_tokens.mean == pytest.approx((8 + 12 + 6) / 3)
    assert train.geometry.steps == Spread(2.0, 2.0, 2.0)
    assert train.geometry.rho.mean == pytest.approx(26 / 6)
    assert result.splits["test"].geometry is not None
    assert result.splits["test"].geometry.source_tokens.mean == 50
    assert (result.total.num_clips, result.total.num_usable, result.total.num_pairs) == (5, 4, 1)
    assert result.source_tokens_from == "as published, or 2 tokens per second"
    assert result.regime == "source-dense"
    assert result.first_tokens == 2
    assert result.gamma == pytest.approx(math.log(19 / 2) / math.log(2))
    assert result.problem_counts == {"end-before-start": 1, "duplicate-reference": 1, "shared-stream": 1}


def test_the_token_rate_and_the_budget_can_be_said(put):
    path = manifest(put, {"end_s": 10, "text": "some words to write"})
    assert check("manifest", path).total.geometry.source_tokens.mean == 30
    result = check("manifest", path, rate=10, first_tokens=25)
    steps = round(result.total.geometry.steps.mean)
    assert (result.first_tokens, result.gamma) == (25, pytest.approx(math.log(100 / 25) / math.log(steps)))
    with pytest.raises(ScheduleError, match="cannot exceed"):
        check("manifest", path, first_tokens=31)
    for rate in (0, -1, math.inf, math.nan):
        with pytest.raises(CorpusError, match="token rate"):
            check("manifest", path, rate=rate)


def test_slow_sources_are_text_dense(put):
    # 260 ids are the bytes and the special ids, so that each letter is a token: F = 3, N = 11.
    result = check("manifest", manifest(put, {"end_s": 1, "text": "0123456789"}), vocab_size=260)
    assert result.total.geometry.rho.mean == pytest.approx(3 / 11)
    assert result.regime == "text-dense"
    assert check("manifest", manifest(put, {"end_s": 4, "text": "0123456789"}), vocab_size=260).regime == "source-dense"


def test_a_corpus_with_nothing_usable_is_still_counted(put):
    result = check("manifest", manifest(put, {"end_s": 0}))
    assert (result.total.num_clips, result.total.num_usable, result.total.geometry) == (1, 0, None)
    assert (result.regime, result.gamma) == ("unknown", None)


def test_an_unknown_name_is_one_clear_line():
    with pytest.raises(ConfigError, match="no corpus is called 'charade'; expected one of activitynet, "):
        corpora.read("charade", "anywhere")


def test_the_digest_is_what_sha256sum_says(put, tmp_path):
    put("train.en", "a\n")
    put("train.de", "b\n")
    put("train.fr", "not read\n")
    listing = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in (("train.de", b"b\n"), ("train.en", b"a\n")))
    assert corpora.digest("multi30k", tmp_path) == hashlib.sha256(listing.encode()).hexdigest()
    assert corpora.read("multi30k", tmp_path).digest == corpora.digest("multi30k", tmp_path)
    before = corpora.digest("multi30k", tmp_path)
    put("train.fr", "still not read\n")
    assert corpora.digest("multi30k", tmp_path) == before
    put("train.de", "c\n")
    assert corpora.digest("multi30k", tmp_path) != before


def test_the_digest_does_not_depend_on_the_folder(put, tmp_path):
    for folder in ("one", "two"):
        put(f"{folder}/train.json", '{"v": {"duration": 2, "timestamps": [[0, 1]], "sentences": ["a"]}}')
    assert corpora.digest("activitynet", tmp_path / "one") == corpora.digest("activitynet", tmp_path / "two")


def test_the_geometry_of_published_corpora(data):
    charades = check("charades-sta", data("annotations/charades_sta"))
    assert charades.splits["train"].geometry is not None
    # The paper's caps are F = 55 and N = 20 (Table 1): nearly all clips lie below them.
    assert charades.splits["train"].geometry.source_tokens.p95 < 55
    assert charades.splits["train"].geometry.steps.p95 < 20
    assert charades.regime == "source-dense"
    assert charades.gamma > 1
    assert (charades.splits["train"].num_pairs, charades.splits["train"].num_overlapping) == (1496, 5572)
    speech = check("librispeech-long30", data("librispeech"))
    assert speech.regime == "text-dense"
    assert speech.gamma == pytest.approx(0.51, abs=0.02)
    msvd = check("msvd", data("msvd"))
    assert msvd.total.geometry.source_tokens.mean == pytest.approx(56118 / 1970)
    assert msvd.splits["train"].geometry.rho.mean == pytest.approx(3.4, abs=0.1)
