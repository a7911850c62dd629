"""The audit from raw input on: no token, and no text, depends on samples or frames that had not arrived (method.md §7).

Everything after a moment t is replaced, by anything, nothing, or more; every token that arrived by t, and every event written
from those that had, must be the same, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from zendaya.encoders import Encoder, Frame, Tokens
from zendaya.errors import ConfigError, SourceError
from zendaya.records import Event
from zendaya.schedule import Schedule
from zendaya.stream import Session, replay

CHANGES = ("other", "noise", "silence", "nothing", "more", "broken")
"""What the input after t becomes: itself altered, random, zero, absent, longer, unreadable (NaN, a frame of no pixels)."""
SAMPLE_RATE = 16_000

Raw = npt.NDArray[np.floating[Any]] | Sequence[Frame]


@dataclass(frozen=True)
class RawLeak:
    """A token or a written event that changed, came or went when input after its moment did."""

    cut_s: float
    change: str
    token: int
    """Which source token, or which event, from 0."""
    arrival_s: float
    difference: float
    """Largest change of a feature; infinite if the token came or went, or if it is an event that changed."""


@dataclass(frozen=True)
class RawAudit:
    """What an audit found."""

    encoder: str
    num_cuts: int
    num_compared: int
    """Tokens compared, over all cuts and changes."""
    leaks: tuple[RawLeak, ...]
    """The first leak of each cut and change."""

    @property
    def clean(self) -> bool:
        """No leak, and something was compared: an audit that saw no tokens proves nothing."""
        return not self.leaks and self.num_compared > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an infinite difference is None, as JSON has it."""
        record = {**dataclasses.asdict(self), "clean": self.clean}
        for leak in record["leaks"]:
            leak["difference"] = leak["difference"] if np.isfinite(leak["difference"]) else None
        return record

    def __str__(self) -> str:
        if self.leaks:
            worst = max(self.leaks, key=lambda leak: leak.difference)
            return (
                f"{self.encoder}: LEAKS in {len(self.leaks)} of {self.num_cuts * len(CHANGES)} trials: token {worst.token}, arrived at "
                f"{worst.arrival_s:.3f} s, changed by {worst.difference:.3g} when what follows {worst.cut_s:.3f} s became {worst.change!r}"
            )
        if not self.num_compared:
            return f"{self.encoder}: nothing compared: no token arrives before the end of the input"
        return f"{self.encoder}: no leak in {self.num_compared} token comparisons at {self.num_cuts} moments"


def audit_encoder(
    encoder: Encoder[Any, Any], raw: Raw, *, cuts_s: Sequence[float] | None = None, num_cuts: int = 6, seed: int = 0,
    arrivals: Literal["stated", "own"] = "stated",
) -> RawAudit:  # fmt: skip
    """Audit an encoder on samples (at 16 kHz), feature rows or frames, at moments drawn at random and at arrivals themselves.

    With `own`, each token is taken to have arrived at the end of its own place in time, whatever the encoder states: what a
    replay of stored features does if it paces them by their rate. An encoder that looks ahead is caught by it.
    """
    trials = _Trials(encoder, raw, arrivals, cuts_s, num_cuts, seed)
    leaks, compared = [], 0
    for cut_s, change, got in trials:
        expected = int(np.searchsorted(trials.reference.arrival_s, cut_s, side="right"))
        compared += expected
        if (leak := _compare(trials.reference, got, expected, cut_s, change, count=arrivals == "stated")) is not None:
            leaks.append(leak)
    return RawAudit(encoder.traits.name, len(trials.cuts_s), compared, tuple(leaks))


def audit_to_text(
    encoder: Encoder[Any, Any], raw: Raw, open_session: Callable[[], Session], *, cuts_s: Sequence[float] | None = None, num_cuts: int = 6,
    seed: int = 0, arrivals: Literal["stated", "own"] = "stated", turns: Sequence[tuple[float, Schedule]] = (),
) -> RawAudit:  # fmt: skip
    """Audit all the way: raw input, encoder, live session, the events it had written by each moment.

    `open_session` opens the session to audit, as in `lambda: model.open(PowerLaw(0.5))`; it has no clock of its own, so that what is
    compared is what the arrivals decide. Tokens are pushed as they arrive, and the dial is turned at the moments of `turns`.
    """
    trials = _Trials(encoder, raw, arrivals, cuts_s, num_cuts, seed)

    def written(tokens: Tokens, until_s: float) -> list[Event]:
        played = replay(open_session(), tokens.values_TE, tokens.arrival_s, turns=turns, end_s=float(trials.ends_s[-1]), until_s=until_s)
        return list(played)

    reference = written(trials.reference, np.inf)
    leaks, compared = [], 0
    for cut_s, change, got in trials:
        expected = [event for event in reference if event.arrival_s <= cut_s]
        found = written(got, cut_s)
        compared += len(expected)
        if found != expected and not (change == "broken" and arrivals == "own" and found == expected[: len(found)]):
            same = [ours == theirs for ours, theirs in zip(expected, found, strict=False)]
            first = same.index(False) if False in same else len(same)
            moment_s = (expected if first < len(expected) else found)[first].arrival_s
            leaks.append(RawLeak(cut_s, change, first, moment_s, np.inf))
    return RawAudit(f"{encoder.traits.name} to text", len(trials.cuts_s), compared, tuple(leaks))


class _Trials:
    """Every cut with every change: what the encoder gives for the altered input, beside what it gave for the true one."""

    def __init__(
        self, encoder: Encoder[Any, Any], raw: Raw, arrivals: str, cuts_s: Sequence[float] | None, num_cuts: int, seed: int
    ) -> None:
        if arrivals not in ("stated", "own"):
            raise ConfigError(f"audit: arrivals must be 'stated' or 'own': got {arrivals!r}")
        self.encoder, self.raw, self.kind = encoder, raw, _kind(encoder, raw)
        self.generator = np.random.default_rng(seed)
        self.claim: Callable[[Tokens], Tokens] = _own(encoder) if arrivals == "own" else lambda tokens: tokens
        # The end of the input is itself input: what the encoder gives on hearing of it did not arrive by t.
        self.finish = arrivals == "own"
        self.ends_s = self.kind.ends_s(raw)
        if self.ends_s.size < 2:
            raise SourceError(f"audit: expected at least two samples, rows or frames of input: got {self.ends_s.size}")
        chunks = self.kind.chunks(raw, self.generator)
        self.reference = self.claim(_gather(encoder, chunks, until_s=np.inf, finish=True, broken=False))
        self.cuts_s = sorted(self._draw(num_cuts) if cuts_s is None else map(float, cuts_s))

    def _draw(self, num_cuts: int) -> list[float]:
        early_s = self.reference.arrival_s[self.reference.arrival_s < self.ends_s[-1]]
        # An arrival itself is the sharpest moment: one sample more and the token may differ.
        num_sharp = min(num_cuts - num_cuts // 2, early_s.size)
        sharp_s = self.generator.choice(early_s, num_sharp, replace=False) if num_sharp else early_s[:0]
        return [*self.generator.uniform(0, self.ends_s[-1], num_cuts - num_sharp).tolist(), *sharp_s.tolist()]

    def __iter__(self) -> Iterator[tuple[float, str, Tokens]]:
        for cut_s in self.cuts_s:
            kept = int(np.searchsorted(self.ends_s, cut_s, side="right"))
            for change in CHANGES:
                altered = self.kind.join(self.raw[:kept], self.kind.change(self.raw, kept, change, self.generator))
                chunks = self.kind.chunks(altered, self.generator)
                until_s = np.inf if self.finish else cut_s
                yield (
                    cut_s,
                    change,
                    self.claim(_gather(self.encoder, chunks, until_s=until_s, finish=self.finish, broken=change == "broken")),
                )


def _own(encoder: Encoder[Any, Any]) -> Callable[[Tokens], Tokens]:
    """Tokens as if each had arrived at the end of its own place in time."""
    return lambda tokens: Tokens(tokens.values_TE, np.arange(1, len(tokens) + 1) / encoder.traits.tokens_per_s)


def _gather(encoder: Encoder[Any, Any], chunks: Iterator[Any], *, until_s: float, finish: bool, broken: bool) -> Tokens:
    """Tokens in order, up to the first chunk that gives one that arrives later than asked; broken input may end in an error."""
    parts, state = list[Tokens](), encoder.start()
    try:
        for chunk in chunks:
            parts.append(encoder.read(state, chunk))
            if len(parts[-1]) and parts[-1].arrival_s[-1] > until_s:
                break
        if finish:
            parts.append(encoder.finish(state))
    except SourceError:
        if not broken:
            raise
    return Tokens.join(parts, encoder.traits.dim)


def _compare(reference: Tokens, got: Tokens, expected: int, cut_s: float, change: str, *, count: bool) -> RawLeak | None:
    common = min(expected, len(got))
    ours, theirs = reference.values_TE[:common].contiguous(), got.values_TE[:common].contiguous()
    same_T = (ours.view(torch.int32) == theirs.view(torch.int32)).all(1).numpy() & (reference.arrival_s[:common] == got.arrival_s[:common])
    if not same_T.all():
        token = int(np.flatnonzero(~same_T)[0])
        difference = float((ours - theirs).abs()[~torch.from_numpy(same_T)].max())
        return RawLeak(cut_s, change, token, float(reference.arrival_s[token]), difference)
    if change == "broken" and not count:
        return None  # an encoder that waits for the end may refuse the whole of a damaged recording
    if common < expected:
        return RawLeak(cut_s, change, common, float(reference.arrival_s[common]), np.inf)
    if count and np.searchsorted(got.arrival_s, cut_s, side="right") > expected:
        return RawLeak(cut_s, change, expected, float(got.arrival_s[expected]), np.inf)
    return None


# The kinds of raw input: when each piece of it ends, and what else it could have been.


@dataclass(frozen=True)
class _Arrays:
    """Samples, or rows of features."""

    ends: Callable[[int], npt.NDArray[np.float64]]
    longest: int
    """Longest chunk."""
    extra: int
    """How much is added by `more`."""

    def ends_s(self, raw: Any) -> npt.NDArray[np.float64]:
        return self.ends(len(raw))

    def chunks(self, raw: Any, generator: np.random.Generator) -> Iterator[Any]:
        return _cut(raw, self.longest, generator)

    def join(self, before: Any, after: Any) -> Any:
        return np.concatenate([before, after])

    def change(self, raw: Any, kept: int, change: str, generator: np.random.Generator) -> Any:
        rest = raw[kept:]
        scale = float(np.abs(raw).max()) or 1.0

        def noise(count: int) -> Any:
            return generator.uniform(-scale, scale, (count, *raw.shape[1:])).astype(raw.dtype)

        made: dict[str, Callable[[], Any]] = {
            "other": lambda: rest[::-1] * raw.dtype.type(-0.5),
            "noise": lambda: noise(len(rest)),
            "silence": lambda: np.zeros_like(rest),
            "nothing": lambda: rest[:0],
            "more": lambda: np.concatenate([rest, noise(self.extra)]),
            "broken": lambda: np.full_like(rest, np.nan),
        }
        return made[change]()


class _Frames:
    """Pictures."""

    def ends_s(self, raw: Sequence[Frame]) -> npt.NDArray[np.float64]:
        return np.array([frame.end_s for frame in raw])

    def chunks(self, raw: Sequence[Frame], generator: np.random.Generator) -> Iterator[Any]:
        return _cut(raw, 3, generator)

    def join(self, before: Sequence[Frame], after: Sequence[Frame]) -> Sequence[Frame]:
        return [*before, *after]

    def change(self, raw: Sequence[Frame], kept: int, change: str, generator: np.random.Generator) -> Sequence[Frame]:
        rest = raw[kept:]

        def noise(frame: Frame) -> Frame:
            return dataclasses.replace(frame, pixels=generator.integers(0, 256, frame.pixels.shape, np.uint8))

        last = raw[-1]
        later = [dataclasses.replace(last, time_s=last.time_s + i + 1, end_s=last.end_s + i + 1) for i in range(3)]
        made: dict[str, Callable[[], Sequence[Frame]]] = {
            "other": lambda: [dataclasses.replace(frame, pixels=255 - frame.pixels) for frame in rest],
            "noise": lambda: [noise(frame) for frame in rest],
            "silence": lambda: [dataclasses.replace(frame, pixels=np.zeros_like(frame.pixels)) for frame in rest],
            "nothing": list,
            "more": lambda: [*rest, *map(noise, later)],
            "broken": lambda: [dataclasses.replace(frame, pixels=frame.pixels[:0]) for frame in rest],
        }
        return made[change]()


def _cut(raw: Any, longest: int, generator: np.random.Generator) -> Iterator[Any]:
    """The input in chunks of random length: what comes out must not depend on it."""
    first = 0
    while first < len(raw):
        count = int(generator.integers(1, longest + 1))
        yield raw[first : first + count]
        first += count


def _kind(encoder: Encoder[Any, Any], raw: Raw) -> Any:
    if not isinstance(raw, np.ndarray):
        return _Frames()
    if raw.ndim == 1:
        return _Arrays(lambda count: np.arange(1, count + 1) / SAMPLE_RATE, longest=SAMPLE_RATE, extra=2 * SAMPLE_RATE)
    arrivals = getattr(encoder, "arrivals", None)
    if raw.ndim != 2 or arrivals is None:
        raise ConfigError(
            f"audit: expected samples (any,), frames, or rows for an encoder that times rows: got an array of shape {raw.shape}"
        )
    return _Arrays(lambda count: arrivals(0, count), longest=7, extra=5)
