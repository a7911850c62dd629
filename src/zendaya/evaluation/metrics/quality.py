"""Quality metrics of texts against references, in percent, each with the signature of its implementation. No torch."""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from zendaya.errors import MissingExtraError, ZendayaError
from zendaya.evaluation.metrics import captions
from zendaya.evaluation.metrics.captions import References, Texts

Counts = npt.NDArray[np.int64]
Normalise = Literal["english", "basic", "none"]


@dataclass(frozen=True)
class Quality:
    """One score of a corpus."""

    name: str
    value: float
    """In percent."""
    signature: str
    """The implementation, its version and its settings."""


def word_error_rate(hypotheses: Texts, references: Texts, *, normalise: Normalise = "english") -> Quality:
    """WER = (substitutions + deletions + insertions) / reference words, over the whole corpus.

    `english` is Whisper's English normalisation without its map of British spellings; `basic` is lower case without punctuation.

    >>> word_error_rate(["It is 21 dogs."], ["it's twenty-one dogs"]).value
    0.0
    """
    counts_C2, signature = word_errors(hypotheses, references, normalise=normalise)
    errors, num_words = counts_C2.sum(0).tolist()
    return Quality("WER", 100 * errors / num_words, signature)


def word_errors(hypotheses: Texts, references: Texts, *, normalise: Normalise = "english") -> tuple[Counts, str]:
    """Word errors and reference words per clip (C, 2), and the signature."""
    _check_pairs(hypotheses, references)
    try:
        import jiwer
    except ModuleNotFoundError:
        raise MissingExtraError("jiwer", "eval", "the word error rate") from None
    normaliser, made_by = _normaliser(normalise)
    written, wanted = [normaliser(text) for text in hypotheses], [normaliser(text) for text in references]
    counts = []
    for hypothesis, reference in zip(written, wanted, strict=True):
        found = jiwer.process_words(reference, hypothesis)
        counts.append([found.substitutions + found.deletions + found.insertions, found.hits + found.substitutions + found.deletions])
    counts_C2 = np.array(counts, np.int64)
    if counts_C2[:, 1].sum() == 0:
        raise ZendayaError(f"the word error rate needs a reference word: got none in {len(references)} references after {normalise!r}")
    return counts_C2, f"wer|norm:{made_by}|jiwer:{version('jiwer')}"


def _normaliser(name: str) -> tuple[Callable[[str], str], str]:
    """The normalising function, and its name in signatures."""
    if name == "none":
        return str.strip, name
    if name == "basic":
        return _basic, name
    if name != "english":
        raise ZendayaError(f"normalise must be one of {', '.join(get_args(Normalise))}: got {name!r}")
    try:
        from transformers.models.whisper.english_normalizer import EnglishTextNormalizer
    except ModuleNotFoundError:
        raise MissingExtraError("transformers", "eval", "Whisper's English normalisation") from None
    whisper = EnglishTextNormalizer({})

    def english(text: str) -> str:
        try:
            return str(whisper(text)).strip()
        except ValueError as error:
            raise ZendayaError(f"Whisper's normalisation fails on {text[:60]!r} ({error}); use normalise='basic'") from None

    return english, f"whisper-english,spellings:none,transformers:{version('transformers')}"


def _basic(text: str) -> str:
    """Lower case; letters, marks and digits only, and an apostrophe between two of them."""
    text = unicodedata.normalize("NFC", text).lower().replace("’", "'")
    kept = [unicodedata.category(character)[0] in "LMN" for character in text]
    around = [False, *kept, False]
    inside = [character == "'" and around[n] and around[n + 2] for n, character in enumerate(text)]
    words = "".join(character if kept[n] or inside[n] else " " for n, character in enumerate(text))
    return " ".join(words.split())


def bleu(hypotheses: Texts, references_per_clip: References, *, lowercase: bool = False) -> Quality:
    """Corpus BLEU-4 by sacreBLEU (13a tokens, exponential smoothing); clips may have different numbers of references.

    >>> bleu(["a man plays a guitar"], [["a man plays a guitar", "a person plays"]]).value
    100.0
    """
    check_references(hypotheses, references_per_clip)
    scorer = _sacrebleu(lowercase)
    most = max(len(references) for references in references_per_clip)
    streams = [[references[n] if n < len(references) else None for references in references_per_clip] for n in range(most)]
    value = min(100.0, scorer.corpus_score(list(hypotheses), streams).score)  # a perfect score sums to 100.00000000000004
    return Quality("BLEU-lc" if lowercase else "BLEU", value, f"bleu|{scorer.get_signature()}")


def bleu_counts(hypotheses: Texts, references_per_clip: References, *, lowercase: bool = False) -> tuple[Counts, str]:
    """Statistics (C, 10) and signature: words written and of the reference nearest in length, n-grams matched and written, n = 1 … 4."""
    check_references(hypotheses, references_per_clip)
    scorer = _sacrebleu(lowercase, effective_order=True)  # sacreBLEU advises it for single clips; the counts are the same
    found = [scorer.sentence_score(text, list(references)) for text, references in zip(hypotheses, references_per_clip, strict=True)]
    fewest, most = min(references_per_clip, key=len), max(references_per_clip, key=len)  # the signature depends on their numbers
    signature = bleu(["", ""], [fewest, most], lowercase=lowercase).signature
    return np.array([[one.sys_len, one.ref_len, *one.counts, *one.totals] for one in found], np.int64), signature


def _sacrebleu(lowercase: bool, *, effective_order: bool = False) -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError:
        raise MissingExtraError("sacrebleu", "eval", "BLEU") from None
    return BLEU(lowercase=lowercase, effective_order=effective_order)


def meteor(hypotheses: Texts, references_per_clip: References) -> Quality:
    """METEOR 1.5 as coco-caption runs it, from pooled statistics; NLTK's METEOR where there is no Java."""
    if not captions.java_is_here():
        return meteor_nltk(hypotheses, references_per_clip)
    check_references(hypotheses, references_per_clip)
    value, _, signature = captions.meteor_1_5(hypotheses, references_per_clip)
    return Quality("METEOR", 100 * value, signature)


def meteor_nltk(hypotheses: Texts, references_per_clip: References) -> Quality:
    """NLTK's METEOR (the 2005 version: exact, Porter stem, WordNet) for the best reference of each clip, mean over clips."""
    check_references(hypotheses, references_per_clip)
    scores, signature = captions.meteor_nltk(hypotheses, references_per_clip)
    return Quality("METEOR-nltk", 100 * float(np.mean(scores)), signature)


def cider(hypotheses: Texts, references_per_clip: References) -> Quality:
    """CIDEr as in coco-caption (CIDEr-D, Vedantam et al. 2015), mean over clips; these references weigh the n-grams.

    An n-gram in the references of every clip has weight 0, so a single clip always scores 0.
    """
    check_references(hypotheses, references_per_clip)
    scores, signature = captions.cider(hypotheses, references_per_clip)
    return Quality("CIDEr", 100 * float(np.mean(scores)), signature)


METRICS = ("wer", "bleu", "bleu-lc", "meteor", "meteor-nltk", "cider")
"""Names of the metrics on the command line; `bleu-lc` is case-insensitive BLEU, the usual one for captions."""
_PACKAGES = {"wer": "jiwer", "meteor-nltk": "nltk", "cider": "pycocoevalcap"}


def check_metrics(names: Sequence[str], *, normalise: Normalise = "english") -> None:
    """Refuse, before anything is decoded, an unknown metric or one whose package, Java or WordNet is missing."""
    if not names:
        raise ZendayaError(f"give at least one metric of {', '.join(METRICS)}")
    for name in names:
        if name not in METRICS:
            raise ZendayaError(f"unknown metric {name!r}; expected one of {', '.join(METRICS)}")
        if name == "meteor":
            captions.check_meteor()
            continue
        package = _PACKAGES.get(name, "sacrebleu")
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "eval", f"the metric {name}")
        if name == "wer":
            _normaliser(normalise)
        if name == "cider":
            captions.java()
        if name == "meteor-nltk":
            captions.find_wordnet()


def quality(name: str, hypotheses: Texts, references_per_clip: References, *, normalise: Normalise = "english") -> Quality:
    """The score of a metric by name."""
    check_metrics([name], normalise=normalise)
    if name == "wer":
        return word_error_rate(hypotheses, only_references(hypotheses, references_per_clip), normalise=normalise)
    if name in ("bleu", "bleu-lc"):
        return bleu(hypotheses, references_per_clip, lowercase=name == "bleu-lc")
    return {"meteor": meteor, "meteor-nltk": meteor_nltk, "cider": cider}[name](hypotheses, references_per_clip)


def only_references(hypotheses: Texts, references_per_clip: References) -> list[str]:
    """The only reference of each clip; more than one is an error, because WER takes one."""
    check_references(hypotheses, references_per_clip)
    if (most := max(map(len, references_per_clip))) > 1:
        raise ZendayaError(f"the word error rate takes one reference per clip: got {most}; use bleu or meteor")
    return [references[0] for references in references_per_clip]


def _check_pairs(hypotheses: Texts, references: Sequence[object]) -> None:
    if not hypotheses or len(hypotheses) != len(references):
        raise ZendayaError(f"a score needs as many hypotheses as references, at least one: got {len(hypotheses)} and {len(references)}")


def check_references(hypotheses: Texts, references_per_clip: References) -> None:
    """Refuse a clip without a hypothesis or without a reference."""
    _check_pairs(hypotheses, references_per_clip)
    for number, references in enumerate(references_per_clip):
        if isinstance(references, str) or not references:
            raise ZendayaError(f"every clip needs a list of at least one reference: got {references!r} for clip {number}")
