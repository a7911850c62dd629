"""Multi30k, task 1 (Elliott et al. 2016): image captions and their translations, one file per language, one sentence per line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zendaya.data.corpora.base import Corpus
from zendaya.data.published import clean, clean_references, found, lines, report, snippet
from zendaya.errors import CorpusError
from zendaya.records import Clip, Problem

NAME = "multi30k"
SPLITS = ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco", "test_2018_flickr")
WHERE = "https://github.com/multi30k/dataset (data/task1/raw)"

REQUIRED = ("train", "val", "test_2016_flickr")
"""The other test sets are published for some languages only."""


def files(path: Path, source: str = "en", target: str = "de") -> list[Path]:
    """The published files in the folder: for each split the source side, then the target side."""
    pairs: list[Path] = []
    for file in found(path, [f"{split}.{source}" for split in SPLITS], f"the Multi30k sentences in {source!r}", WHERE):
        side = file.name.removesuffix(".gz").removesuffix(f".{source}") + f".{target}"
        other = next((path / name for name in (side, f"{side}.gz") if (path / name).is_file()), None)
        if other is None:
            raise CorpusError(f"{path / side}: no such file, plain or .gz; it holds the translations of {file.name}: {WHERE}")
        pairs += [file, other]
    return pairs


def clips(path: Path, problems: list[Problem], source: str = "en", target: str = "de") -> Iterator[Clip]:
    """One clip per line, in file order: `source` is the sentence, its translation the one reference; there are no streams."""
    published = files(path, source, target)
    splits = [file.name.removesuffix(".gz").removesuffix(f".{source}") for file in published[::2]]
    for split in REQUIRED:
        if split not in splits:
            report(problems, "missing-split", f"{split}.{source}", "no such file")
    for split, file, other in zip(splits, published[::2], published[1::2], strict=True):
        # With different numbers of lines, it is unknown which line is missing.
        num_lines, num_others = (sum(1 for _ in lines(side, [])) for side in (file, other))
        if num_lines != num_others or not num_lines:
            numbers = f"{num_lines} lines, but {other.name} has {num_others}"
            raise CorpusError(f"{file}: {numbers}; expected equal numbers, at least 1: download both again")
        yield from _split_clips(split, file, other, problems)


def _split_clips(split: str, file: Path, other: Path, problems: list[Problem]) -> Iterator[Clip]:
    seen: set[tuple[str, str]] = set()
    for (where, text), (other_where, translation) in zip(lines(file, problems), lines(other, problems), strict=True):
        if (text, translation) in seen:
            report(problems, "duplicate-line", where, f"the same sentence and translation again: {snippet(text)}")
        seen.add((text, translation))
        sentence = clean(text, where, problems, "the source")
        if not sentence:
            report(problems, "empty-source", where, "the source is empty")
        identity, references = f"{split}/{where.rpartition(':')[2]}", clean_references([translation], other_where, problems)
        yield Clip(corpus=NAME, id=identity, split=split, stream=identity, references=references, source=sentence)


CORPUS = Corpus(
    name=NAME, task="translation of sentences, English to German", modality="text", metrics=("bleu",),
    needs="{train,val,test_2016_flickr,…}.{en,de,fr}, plain or .gz, in one folder", where=WHERE,
    licence="research use (the captions are Flickr30k's)", files=files, clips=clips,
)  # fmt: skip
