"""Frozen encoders: raw input to source tokens, in chunks, each token with the moment it arrived.

One protocol. An encoder states what it is (`Traits`), makes a fresh state, reads chunks of raw input into it and gives the
tokens they complete. Encoding a whole recording is streaming it with a fresh state, so that the features a model is trained on
and the features it meets live are the same numbers, whatever the chunks.

Shape suffixes: T tokens, E features of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zendaya.errors import ConfigError, SourceError

Samples = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]

BLOCK_VALUES = 2**20
"""Values looked at in one go: a whole array at once would be held several times over."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What an encoder says of itself."""

    name: str
    """The encoder and every setting its numbers depend on: the same name, the same numbers."""
    dim: int
    tokens_per_s: float
    look_back_s: float
    """Receptive field: the furthest a token reads before the beginning of its own 1/tokens_per_s."""
    look_ahead_s: float
    """Receptive field: the furthest a token reads after the end of its own 1/tokens_per_s; it arrives that much later."""
    live: bool
    """Whether tokens come while the source does; if not, all of them arrive at the end of the recording."""
    ids: bool = False
    """Whether a token is an id, exact in float32 and to be looked up in a table, and not a vector to be rounded."""


@dataclass(frozen=True)
class Tokens:
    """Source tokens, and when each arrived: the end of the last raw sample or frame that was read to make it (method.md §4)."""

    values_TE: Tensor
    arrival_s: FloatArray

    def __post_init__(self) -> None:
        assert self.values_TE.ndim == 2, self.values_TE.shape
        assert self.arrival_s.shape == (len(self),), (self.arrival_s.shape, len(self))

    def __len__(self) -> int:
        return self.values_TE.shape[0]

    def __getitem__(self, which: slice) -> Tokens:
        return Tokens(self.values_TE[which], self.arrival_s[which])

    @staticmethod
    def none(dim: int) -> Tokens:
        """No tokens."""
        return Tokens(torch.zeros(0, dim), np.zeros(0))

    @staticmethod
    def join(parts: Iterable[Tokens], dim: int) -> Tokens:
        """The parts one after another."""
        kept = [part for part in parts if len(part)]
        if not kept:
            return Tokens.none(dim)
        return Tokens(torch.cat([part.values_TE for part in kept]), np.concatenate([part.arrival_s for part in kept]))


@dataclass(frozen=True)
class Frame:
    """One picture of a video: RGB bytes (height, width, 3), the moment it stands for, and when it has wholly been seen."""

    pixels: npt.NDArray[np.uint8]
    time_s: float
    end_s: float


State = TypeVar("State")
Raw = TypeVar("Raw", contravariant=True)


class Encoder(Protocol[Raw, State]):
    """Chunks of raw input and an explicit state in, tokens out.

    What the tokens are depends on the raw input alone, not on how it was cut into chunks. Bad input (a sample that is not a
    number, a frame of no pixels) is an error only once everything before it has been given out.
    """

    @property
    def traits(self) -> Traits: ...

    def start(self) -> State:
        """A fresh state: a stream of which nothing has been read."""

    def read(self, state: State, raw: Raw) -> Tokens:
        """Take the next chunk; the tokens it completes."""

    def finish(self, state: State) -> Tokens:
        """The source has ended: the tokens that waited for more of it. The state is spent."""


def stream(encoder: Encoder[Raw, State], chunks: Iterable[Raw]) -> Iterator[Tokens]:
    """Tokens while the chunks come, for a live source; an encoder that needs the whole recording is refused."""
    if not encoder.traits.live:
        raise ConfigError(
            f"{encoder.traits.name}: offline only: its tokens read the whole recording, so live it could give none until the end; "
            f"use a live encoder (for Whisper, block mode), or encode whole recordings"
        )
    return _run(encoder, chunks)


def encode(encoder: Encoder[Raw, State], chunks: Iterable[Raw], where: str = "the recording") -> Tokens:
    """All tokens of a whole recording: streaming with a fresh state."""
    tokens = Tokens.join(_run(encoder, chunks), encoder.traits.dim)
    if not len(tokens):
        raise SourceError(f"{where}: empty: {encoder.traits.name} found nothing to encode; expected at least one sample, frame or row")
    return tokens


def _run(encoder: Encoder[Raw, State], chunks: Iterable[Raw]) -> Iterator[Tokens]:
    state = encoder.start()
    for chunk in chunks:
        yield encoder.read(state, chunk)
    yield encoder.finish(state)


def readable_prefix(values: npt.NDArray[Any], largest: float) -> int:
    """How many leading entries (rows, if there are several axes) are finite and within ±`largest`."""
    width = math.prod(values.shape[1:])
    rows = values.reshape(values.shape[0], width)
    wide = np.result_type(values.dtype, np.float32)  # float16 would round `largest` to infinity
    step = max(1, BLOCK_VALUES // max(1, width))
    for first in range(0, rows.shape[0], step):
        good = np.ones(min(step, rows.shape[0] - first), np.bool_)
        for left in range(0, width, BLOCK_VALUES):  # one row may be longer than a block
            block = rows[first : first + step, left : left + BLOCK_VALUES].astype(wide, copy=False)
            good &= (np.abs(block) <= largest).all(1)  # False for NaN too
        if not good.all():
            return first + int(good.argmin())
    return values.shape[0]
