"""The audit from raw input (method.md §7): when all input after a moment is replaced, tokens and text up to it stay equal to the bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from zendaya.encoders.base import Encoder, FloatArray, Tokens
from zendaya.encoders.registry import EncoderSpec
from zendaya.errors import ConfigError, SourceError
from zendaya.records import Event
from zendaya.runtime.pipeline import Pipeline
from zendaya.runtime.replay import replay
from zendaya.runtime.session import Session
from zendaya.schedule import Schedule
from zendaya.sources.media import SAMPLE_RATE, Frame, read_audio, read_video

CHANGES = ("other", "noise", "silence", "nothing", "more", "broken")
"""Replacements of the input after t: altered, random, zero, absent, longer, unreadable (NaN, a frame without pixels)."""
Raw = npt.NDArray[np.floating[Any]] | Sequence[Frame]


def open_raw(spec: EncoderSpec, path: Path, seconds: float) -> tuple[Encoder[Any, Any], Raw]:
    """Open an encoder, and read the first seconds of a recording or video as its raw input."""
    if not spec.reads_media:
        raise ConfigError(f"encoder {spec.name} reads {spec.modality}: expected one that reads audio or video, as whisper")
    encoder = spec.open()
    if spec.modality == "audio":
        chunks = itertools.takewhile(lambda chunk: chunk.start_s < seconds, read_audio(path))
        return encoder, np.concatenate([chunk.samples for chunk in chunks])
    return encoder, list(itertools.takewhile(lambda frame: frame.time_s < seconds, read_video(path, fps=encoder.traits.tokens_per_s)))


@dataclass(frozen=True)
class RawLeak:
    """A token or event that changed, appeared or vanished when input after its arrival was replaced."""

    cut_s: float
    change: str
    token: int
    """Index of the source token or event, from 0."""
    arrival_s: float
    difference: float
    """Largest change of a feature; infinite if the token appeared or vanished, or for an event."""


@dataclass(frozen=True)
class RawAudit:
    """The result of a raw audit."""

    encoder: str
    num_cuts: int
    num_compared: int
    """Tokens compared, over all cuts and changes."""
    leaks: tuple[RawLeak, ...]
    """The first leak per cut and change."""
    hint: str = ""
    """What to try where nothing could be compared."""

    @property
    def clean(self) -> bool:
        """No leak, and something was compared: an audit without tokens proves nothing."""
        return not self.leaks and self.num_compared > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite difference becomes None."""
        record = {**dataclasses.asdict(self), "clean": self.clean}
        del record["hint"]
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
            return f"{self.encoder}: nothing compared: nothing is given before the end of the input{self.hint}"
        return f"{self.encoder}: no leak in {self.num_compared} token comparisons at {self.num_cuts} moments"


def audit_encoder(
    encoder: Encoder[Any, Any], raw: Raw, *, cuts_s: Sequence[float] | None = None, num_cuts: int = 6, seed: int = 0,
    arrivals: Literal["stated", "own"] = "stated",
) -> RawAudit:  # fmt: skip
    """Audit an encoder on samples (at 16 kHz), feature rows or frames, at random moments and at arrivals themselves.

    With `own`, each token counts as arrived at the end of its own 1/rate, which exposes an encoder that looks ahead.
    """
    trials = _Trials(encoder, raw, arrivals, cuts_s, num_cuts, seed)
    leaks, compared = [], 0
    for cut_s, change, got in trials:
        expected = int(np.searchsorted(trials.reference.arrival_s, cut_s, side="right"))
        compared += expected
        leaks.append(_compare(trials.reference, got, expected, cut_s, change, count=arrivals == "stated"))
    return RawAudit(encoder.traits.name, len(trials.cuts_s), compared, tuple(leak for leak in leaks if leak is not None))


def audit_to_text(
    encoder: Encoder[Any, Any], raw: Raw, open_session: Callable[[], Session], *, cuts_s: Sequence[float] | None = None, num_cuts: int = 6,
    seed: int = 0, arrivals: Literal["stated", "own"] = "stated", turns: Sequence[tuple[float, Schedule]] = (),
) -> RawAudit:  # fmt: skip
    """Audit the whole path: raw input, encoder, live session, and the events written by each moment.

    `open_session` opens a session without a clock, as `lambda: model.open(PowerLaw(0.5))`; its schedule changes at the moments of `turns`.
    """
    if encoder.traits.revise_tokens:
        raise ConfigError(f"audit: {encoder.traits.name} gives tokens again: audit the whole pipeline, by audit_pipeline")
    trials = _Trials(encoder, raw, arrivals, cuts_s, num_cuts, seed)

    def written(tokens: Tokens, until_s: float) -> list[Event]:
        end_s = float(trials.ends_s[-1])
        return list(replay(open_session(), tokens.values_TE, tokens.arrival_s, turns=turns, end_s=end_s, until_s=until_s))

    reference = written(trials.reference, np.inf)
    leaks, compared = [], 0
    for cut_s, change, got in trials:
        expected = [event for event in reference if event.arrival_s <= cut_s]
        found = written(got, cut_s)
        compared += len(expected)
        if found != expected and not (change == "broken" and arrivals == "own" and found == expected[: len(found)]):
            leaks.append(_event_leak(expected, found, cut_s, change))
    return RawAudit(f"{encoder.traits.name} to text", len(trials.cuts_s), compared, tuple(leaks))


def audit_pipeline(open_pipeline: Callable[[], Pipeline], raw: Raw, *, num_cuts: int = 6, seed: int = 0) -> RawAudit:
    """Audit a whole pipeline, its voice gate included: raw input goes in, events come out. It has no clock, as in `audit_to_text`."""
    source, generator = open_pipeline().source, np.random.default_rng(seed)
    assert source is not None
    ends_s, longest, replaced = _pieces(source.encoder, raw)

    def written(given: Any, until_s: float) -> Iterator[Event]:
        pipeline, first = open_pipeline(), 0
        while first < len(given):
            count = int(generator.integers(1, longest + 1))
            try:
                yield from pipeline.read(given[first : first + count])
            except SourceError:  # of input that was broken on purpose
                return
            first += count
        if until_s == np.inf:
            yield from pipeline.end()

    reference = list(written(raw, np.inf))
    early_s = [event.arrival_s for event in reference if event.arrival_s < ends_s[-1]]
    sharp_s = generator.choice(early_s, min(len(early_s), num_cuts - num_cuts // 2), replace=False).tolist() if early_s else []
    leaks, compared = [], 0
    cuts_s = sorted([*sharp_s, *generator.uniform(0, ends_s[-1], num_cuts - len(sharp_s)).tolist()])
    for cut_s, change in itertools.product(cuts_s, CHANGES):
        kept = int(np.searchsorted(ends_s, cut_s, side="right"))
        expected = [event for event in reference if event.arrival_s <= cut_s]
        events = written(replaced(kept, change, generator), cut_s)
        found = list(itertools.takewhile(functools.partial(_is_by, cut_s), events))
        compared += len(expected)
        if found != expected:
            leaks.append(_event_leak(expected, found, cut_s, change))
    gated = " (no speech was found: give a recording of speech, or --voice off)" if source.gate is not None and not reference else ""
    return RawAudit(f"{source.encoder.traits.name} in a pipeline", len(cuts_s), compared, tuple(leaks), gated)


def _is_by(until_s: float, event: Event) -> bool:
    return event.arrival_s <= until_s


def _event_leak(expected: Sequence[Event], found: Sequence[Event], cut_s: float, change: str) -> RawLeak:
    """The first event that differs."""
    same = [ours == theirs for ours, theirs in zip(expected, found, strict=False)]
    first = same.index(False) if False in same else len(same)
    return RawLeak(cut_s, change, first, (expected if first < len(expected) else found)[first].arrival_s, np.inf)


class _Trials:
    """Every cut with every change: the encoder's tokens for the altered input and for the true one."""

    def __init__(
        self, encoder: Encoder[Any, Any], raw: Raw, arrivals: str, cuts_s: Sequence[float] | None, num_cuts: int, seed: int
    ) -> None:
        if arrivals not in ("stated", "own"):
            raise ConfigError(f"audit: arrivals must be 'stated' or 'own': got {arrivals!r}")
        self.encoder, self.own, self.generator = encoder, arrivals == "own", np.random.default_rng(seed)
        self.ends_s, self.longest, self.replaced = _pieces(encoder, raw)
        if self.ends_s.size < 2:
            raise SourceError(f"audit: expected at least two samples, rows or frames of input: got {self.ends_s.size}")
        self.reference = self._encode(raw, until_s=np.inf, finish=True)
        self.cuts_s = sorted(self._draw(num_cuts) if cuts_s is None else map(float, cuts_s))

    def _blocks(self, state: Any, raw: Any) -> Iterator[Tokens]:
        """The tokens that a chunk completes; only an encoder that revises them gives its blocks one by one."""
        return self.encoder.blocks(state, raw) if self.encoder.traits.revise_tokens else iter([self.encoder.read(state, raw)])

    def _draw(self, num_cuts: int) -> list[float]:
        early_s = self.reference.arrival_s[self.reference.arrival_s < self.ends_s[-1]]
        # An arrival is the sharpest cut: one sample more, and the token may differ.
        num_sharp = min(num_cuts - num_cuts // 2, early_s.size)
        sharp_s = self.generator.choice(early_s, num_sharp, replace=False) if num_sharp else early_s[:0]
        return [*self.generator.uniform(0, self.ends_s[-1], num_cuts - num_sharp).tolist(), *sharp_s.tolist()]

    def __iter__(self) -> Iterator[tuple[float, str, Tokens]]:
        for cut_s in self.cuts_s:
            kept = int(np.searchsorted(self.ends_s, cut_s, side="right"))
            for change in CHANGES:
                altered, until_s = self.replaced(kept, change, self.generator), np.inf if self.own else cut_s
                # The end of the input is input too: tokens given because of it did not arrive by t.
                yield cut_s, change, self._encode(altered, until_s=until_s, finish=self.own, broken=change == "broken")

    def _encode(self, raw: Any, *, until_s: float, finish: bool, broken: bool = False) -> Tokens:
        """Tokens of input read in random chunks, up to the first that arrives after `until_s`; broken input may end in an error."""
        parts, state, first = list[Tokens](), self.encoder.start(), 0
        try:
            while first < len(raw) and not (parts and len(parts[-1]) and parts[-1].arrival_s[-1] > until_s):
                count = int(self.generator.integers(1, self.longest + 1))
                parts += self._blocks(state, raw[first : first + count])
                first += count
            if finish:
                parts.append(self.encoder.finish(state))
        except SourceError:
            if not broken:
                raise
        # What was given is compared, not what became of it: a token that is revised later was read as it was.
        own = [dataclasses.replace(part, revised=part.revised if self.own else 0) for part in parts]
        tokens = Tokens.join(own, self.encoder.traits.dim)
        return Tokens(tokens.values_TE, np.arange(1, len(tokens) + 1) / self.encoder.traits.tokens_per_s) if self.own else tokens


def _compare(reference: Tokens, got: Tokens, expected: int, cut_s: float, change: str, *, count: bool) -> RawLeak | None:
    common = min(expected, len(got))
    ours, theirs = reference.values_TE[:common].contiguous(), got.values_TE[:common].contiguous()
    same_T = (ours.view(torch.int32) == theirs.view(torch.int32)).all(1).numpy() & (reference.arrival_s[:common] == got.arrival_s[:common])
    if not same_T.all():
        token = int(np.flatnonzero(~same_T)[0])
        difference = float((ours - theirs).abs()[~torch.from_numpy(same_T)].max())
        return RawLeak(cut_s, change, token, float(reference.arrival_s[token]), difference)
    if change == "broken" and not count:
        return None  # an encoder that waits for the end may refuse a damaged recording
    if common < expected:
        return RawLeak(cut_s, change, common, float(reference.arrival_s[common]), np.inf)
    if count and np.searchsorted(got.arrival_s, cut_s, side="right") > expected:
        return RawLeak(cut_s, change, expected, float(got.arrival_s[expected]), np.inf)
    return None


def _pieces(encoder: Encoder[Any, Any], raw: Any) -> tuple[FloatArray, int, Callable[[int, str, np.random.Generator], Any]]:
    """When each piece of the input ends, its longest chunk, and a function that replaces all pieces from an index on."""
    modality = encoder.traits.modality
    if isinstance(raw, np.ndarray) and raw.ndim != {"audio": 1, "features": 2}.get(modality):
        raise ConfigError(f"audit: {encoder.traits.name} reads {modality}: got an array of shape {raw.shape}")
    if modality == "text":
        raise ConfigError(f"audit: {encoder.traits.name} reads text: expected an encoder of audio, video or features")
    if modality == "video":
        return np.array([frame.end_s for frame in raw]), 3, functools.partial(_replace_frames, raw)
    if modality == "audio":
        return np.arange(1, len(raw) + 1) / SAMPLE_RATE, SAMPLE_RATE, functools.partial(_replace_array, raw, 2 * SAMPLE_RATE)
    return encoder.row_arrivals(0, len(raw)), 7, functools.partial(_replace_array, raw, 5)


def _replace_array(raw: Any, extra: int, kept: int, change: str, generator: np.random.Generator) -> Any:
    rest, scale = raw[kept:], float(np.abs(raw).max()) or 1.0

    def noise(count: int) -> Any:
        return generator.uniform(-scale, scale, (count, *raw.shape[1:])).astype(raw.dtype)

    made: dict[str, Callable[[], Any]] = {
        "other": lambda: rest[::-1] * raw.dtype.type(-0.5),
        "noise": lambda: noise(len(rest)),
        "silence": lambda: np.zeros_like(rest),
        "nothing": lambda: rest[:0],
        "more": lambda: np.concatenate([rest, noise(extra)]),
        "broken": lambda: np.full_like(rest, np.nan),
    }
    return np.concatenate([raw[:kept], made[change]()])


def _replace_frames(raw: Sequence[Frame], kept: int, change: str, generator: np.random.Generator) -> Sequence[Frame]:
    def noise(pixels: Any) -> Any:
        return generator.integers(0, 256, pixels.shape, np.uint8)

    last, rest = raw[-1], raw[kept:]
    if change == "more":
        later = [Frame(noise(last.pixels), last.time_s + i + 1, last.end_s + i + 1) for i in range(3)]
        return [*raw, *later]
    made: dict[str, Callable[[Any], Any]] = {
        "other": lambda pixels: 255 - pixels, "noise": noise, "silence": np.zeros_like, "broken": lambda pixels: pixels[:0],
    }  # fmt: skip
    changed = [] if change == "nothing" else [dataclasses.replace(frame, pixels=made[change](frame.pixels)) for frame in rest]
    return [*raw[:kept], *changed]
