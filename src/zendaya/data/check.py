"""What a corpus holds: counts, the geometry F, N and ρ = F/N that the dial is chosen from, and every problem found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zendaya.data.corpora.registry import read
from zendaya.data.pairs import consecutive, overlap
from zendaya.errors import CorpusError
from zendaya.nn.tokenizer import Tokenizer
from zendaya.records import Clip, Problem
from zendaya.schedule import PowerLaw

TOKEN_RATE = 3.0
"""Source tokens a second where F is not published: the paper's rate for video and speech (Table 1)."""

VOCAB_SIZE = 8000
"""Of the BPE that counts decode steps, trained on the corpus itself (Sec. 5)."""

LEAN_SHARE = 0.1
"""A lean first-token budget B as a share of F: the paper's B ≈ 10 of F ≈ 100 (Sec. 3)."""


@dataclass(frozen=True)
class Spread:
    """The mean of a quantity and where 90 % of it lies."""

    mean: float
    p5: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        p5, p95 = np.percentile(values, [5, 95])
        return cls(float(np.mean(values)), float(p5), float(p95))

    def __str__(self) -> str:
        return f"{self.mean:.2f} (5-95 %: {self.p5:.2f}-{self.p95:.2f})"


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Lengths of the usable clips."""

    source_tokens: Spread
    """F."""
    steps: Spread
    """N: the target tokens of a reference and the [EOS] step; the mean over references where there are several."""
    rho: Spread
    """F/N clip by clip."""


@dataclass(frozen=True, kw_only=True)
class SplitCheck:
    """Counts of one split."""

    num_clips: int
    num_usable: int
    num_streams: int
    num_references: int
    hours: float
    num_pairs: int
    """Streaming pairs: consecutive, from one stream, not overlapping."""
    num_overlapping: int
    """Consecutive pairs left out because they overlap."""
    geometry: Geometry | None
    """None where no clip is usable."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """All that `zendaya corpora check` says."""

    corpus: str
    path: str
    digest: str
    splits: dict[str, SplitCheck]
    total: SplitCheck
    source_tokens_from: str
    steps_from: str
    regime: str
    """source-dense where the mean ρ is above 1, text-dense below."""
    first_tokens: int | None
    """B, the lean first-token budget."""
    gamma: float | None
    """γ* = ln(F/B)/ln N at the mean F and N (Eq. 4)."""
    problem_counts: dict[str, int]
    problems: tuple[Problem, ...]


def check(name: str, path: str | Path, *, rate: float = TOKEN_RATE, first_tokens: int | None = None, vocab_size: int = VOCAB_SIZE) -> Check:
    """Read a corpus and measure it; `rate` is in source tokens a second, `first_tokens` the budget B instead of a tenth of F."""
    if not 0 < rate < math.inf:
        raise CorpusError(f"the token rate must be above 0 tokens a second: got {rate}")
    reading = read(name, path)
    usable = reading.usable
    training = [clip for clip in usable if clip.split == "train"]
    trained_on = "the train split" if training else "all splits"
    texts = [text for clip in training or usable for text in clip.references]
    target = _Counter(Tokenizer.train(texts, vocab_size))
    source = _Counter(Tokenizer.train([clip.source for clip in training or usable if clip.source], vocab_size))
    lengths = [
        (_source_tokens(clip, rate, source), float(np.mean([target(text) + 1 for text in clip.references]))) if clip.usable else None
        for clip in reading.clips
    ]
    total = _split_check(reading.clips, lengths)
    splits: dict[str, SplitCheck] = {}
    for split in dict.fromkeys(clip.split for clip in reading.clips):
        members = [index for index, clip in enumerate(reading.clips) if clip.split == split]
        splits[split] = _split_check([reading.clips[index] for index in members], [lengths[index] for index in members])
    budget, gamma = _dial(total.geometry, first_tokens)
    return Check(
        corpus=name,
        path=str(path),
        digest=reading.digest,
        splits=splits,
        total=total,
        source_tokens_from=_source_tokens_from(usable, rate, vocab_size, trained_on),
        steps_from=f"BPE of at most {vocab_size} ids trained on {trained_on}, and the [EOS] step",
        regime=_regime(total.geometry),
        first_tokens=budget,
        gamma=gamma,
        problem_counts=dict(Counter(problem.kind for problem in reading.problems).most_common()),
        problems=reading.problems,
    )


class _Counter:
    """Number of tokens of a text; captions repeat, so each is encoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = len(self._tokenizer.encode(text))
        return self._known[text]


def _source_tokens(clip: Clip, rate: float, count: _Counter) -> int:
    if clip.num_source_tokens is not None:
        return clip.num_source_tokens
    return count(clip.source) if clip.source else max(1, round(clip.duration_s * rate))


def _source_tokens_from(clips: Sequence[Clip], rate: float, vocab_size: int, trained_on: str) -> str:
    ways = {"published" if clip.num_source_tokens is not None else "text" if clip.source else "seconds" for clip in clips}
    words = {
        "published": "as published",
        "seconds": f"{rate:g} tokens a second",
        "text": f"BPE of at most {vocab_size} ids trained on {trained_on}",
    }
    return ", or ".join(words[way] for way in words if way in ways) or "no usable clip"


def _split_check(clips: Sequence[Clip], lengths: Sequence[tuple[int, float] | None]) -> SplitCheck:
    """The counts of some clips; `lengths` are F and N of each, None where it is not usable."""
    pairs = list(consecutive(clips))
    num_overlapping = sum(overlap(*pair) for pair in pairs)
    usable = [pair for pair in lengths if pair is not None]
    return SplitCheck(
        num_clips=len(clips),
        num_usable=len(usable),
        num_streams=len({(clip.split, clip.stream) for clip in clips}),
        num_references=sum(len(clip.references) for clip in clips),
        hours=sum(clip.duration_s for clip in clips) / 3600,
        num_pairs=len(pairs) - num_overlapping,
        num_overlapping=num_overlapping,
        geometry=Geometry(
            source_tokens=Spread.of([f for f, _ in usable]),
            steps=Spread.of([n for _, n in usable]),
            rho=Spread.of([f / n for f, n in usable]),
        )
        if usable
        else None,
    )


def _regime(geometry: Geometry | None) -> str:
    if geometry is None:
        return "unknown"
    rho = geometry.rho.mean
    return "source-dense" if rho > 1 else "text-dense" if rho < 1 else "balanced"


def _dial(geometry: Geometry | None, first_tokens: int | None) -> tuple[int | None, float | None]:
    if geometry is None:
        return first_tokens, None
    source, steps = max(1, round(geometry.source_tokens.mean)), round(geometry.steps.mean)
    first = max(1, round(LEAN_SHARE * source)) if first_tokens is None else first_tokens
    return first, float(PowerLaw.for_budget(first, source, steps).gamma) if steps > 1 else None
