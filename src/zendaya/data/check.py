"""The check of a corpus: counts, the geometry F, N and ρ = F/N that sets the dial, and every problem found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from zendaya.data.corpora.base import consecutive, overlap
from zendaya.data.corpora.registry import read
from zendaya.errors import CorpusError
from zendaya.nn.tokenizer import Tokenizer
from zendaya.records import Clip, Problem
from zendaya.schedule import PowerLaw

TOKEN_RATE = 3.0
"""Source tokens per second where F is not published: the paper's rate for video and speech (Table 1)."""
VOCAB_SIZE = 8000
"""Of the BPE that counts decode steps, trained on the corpus itself (Sec. 5)."""
LEAN_SHARE = 0.1
"""Default first-token budget B as a share of F: the paper's B ≈ 10 of F ≈ 100 (Sec. 3)."""


@dataclass(frozen=True)
class Spread:
    """The mean and the 5th and 95th percentiles of a quantity."""

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
    """N: the target tokens of a reference and the [EOS] step; the mean over the references of a clip."""
    rho: Spread
    """F/N per clip."""


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
    """The content of `zendaya corpora check`."""

    corpus: str
    path: str
    digest: str
    splits: dict[str, SplitCheck]
    total: SplitCheck
    source_tokens_from: str
    steps_from: str
    regime: str
    """source-dense if the mean ρ is above 1, text-dense if below."""
    first_tokens: int | None
    """B, the first-token budget."""
    gamma: float | None
    """γ* = ln(F/B)/ln N at the mean F and N (Eq. 4)."""
    problem_counts: dict[str, int]
    problems: tuple[Problem, ...]


def check(name: str, path: str | Path, *, rate: float = TOKEN_RATE, first_tokens: int | None = None, vocab_size: int = VOCAB_SIZE) -> Check:
    """Read a corpus and measure it; `rate` is in source tokens per second, `first_tokens` the budget B instead of a tenth of F."""
    if not 0 < rate < math.inf:
        raise CorpusError(f"the token rate must be above 0 tokens per second: got {rate}")
    reading = read(name, path)
    training = [clip for clip in reading.usable if clip.split == "train"]
    chosen, bpe = (
        training or reading.usable,
        f"BPE of at most {vocab_size} ids trained on {'the train split' if training else 'all splits'}",
    )
    target = _counter(Tokenizer.train([text for clip in chosen for text in clip.references], vocab_size))
    source = _counter(Tokenizer.train([clip.source for clip in chosen if clip.source], vocab_size))
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
        corpus=name, path=str(path), digest=reading.digest, splits=splits, total=total, first_tokens=budget, gamma=gamma,
        source_tokens_from=_source_tokens_from(reading.usable, rate, bpe), steps_from=f"{bpe}, and the [EOS] step",
        regime=_regime(total.geometry), problems=reading.problems,
        problem_counts=dict(Counter(problem.kind for problem in reading.problems).most_common()),
    )  # fmt: skip


def _counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Number of tokens of a text; captions repeat, so each is encoded once."""
    return cache(lambda text: len(tokenizer.encode(text)))


def _source_tokens(clip: Clip, rate: float, count: Callable[[str], int]) -> int:
    if clip.num_source_tokens is not None:
        return clip.num_source_tokens
    return count(clip.source) if clip.source else max(1, round(clip.duration_s * rate))


def _source_tokens_from(clips: Sequence[Clip], rate: float, bpe: str) -> str:
    ways = {"published" if clip.num_source_tokens is not None else "text" if clip.source else "seconds" for clip in clips}
    words = {"published": "as published", "seconds": f"{rate:g} tokens per second", "text": bpe}
    return ", or ".join(words[way] for way in words if way in ways) or "no usable clip"


def _split_check(clips: Sequence[Clip], lengths: Sequence[tuple[int, float] | None]) -> SplitCheck:
    """The counts of some clips; `lengths` are F and N of each, None if it is not usable."""
    pairs = list(consecutive(clips))
    num_overlapping = sum(overlap(*pair) for pair in pairs)
    usable = [pair for pair in lengths if pair is not None]
    source_tokens, steps, rho = [f for f, _ in usable], [n for _, n in usable], [f / n for f, n in usable]
    return SplitCheck(
        num_clips=len(clips),
        num_usable=len(usable),
        num_streams=len({(clip.split, clip.stream) for clip in clips}),
        num_references=sum(len(clip.references) for clip in clips),
        hours=sum(clip.duration_s for clip in clips) / 3600,
        num_pairs=len(pairs) - num_overlapping,
        num_overlapping=num_overlapping,
        geometry=Geometry(source_tokens=Spread.of(source_tokens), steps=Spread.of(steps), rho=Spread.of(rho)) if usable else None,
    )


def _regime(geometry: Geometry | None) -> str:
    rho = math.nan if geometry is None else geometry.rho.mean
    return "source-dense" if rho > 1 else "text-dense" if rho < 1 else "balanced" if rho == 1 else "unknown"


def _dial(geometry: Geometry | None, first_tokens: int | None) -> tuple[int | None, float | None]:
    if geometry is None:
        return first_tokens, None
    source, steps = max(1, round(geometry.source_tokens.mean)), round(geometry.steps.mean)
    first = max(1, round(LEAN_SHARE * source)) if first_tokens is None else first_tokens
    return first, float(PowerLaw.for_budget(first, source, steps).gamma) if steps > 1 else None
