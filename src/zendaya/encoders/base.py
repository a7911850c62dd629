"""Frozen encoders: raw input to source tokens, in chunks, each token with its arrival time.

A whole recording is encoded by streaming it with a fresh state, so training and live decoding see the same numbers, for any chunks.

Shape suffixes: T tokens, E features of a token.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from zendaya.errors import ConfigError, SourceError

FloatArray = npt.NDArray[np.float64]
Modality = Literal["audio", "video", "features", "text"]
"""Raw input of an encoder: samples at 16 kHz, frames, feature rows, or text."""

BLOCK_VALUES = 2**20
"""Values checked at a time: checking a whole array at once would copy it several times."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of an encoder that its callers rely on."""

    name: str
    """The encoder and every setting its numbers depend on: the same name, the same numbers."""
    modality: Modality
    dim: int
    tokens_per_s: float
    look_back_s: float
    """Receptive field: how far a token reads before the start of its own 1/tokens_per_s."""
    look_ahead_s: float
    """Receptive field: how far a token reads past the end of its own 1/tokens_per_s; it arrives that much later."""
    live: bool
    """Whether tokens arrive while the source does; if not, all arrive at the end of the recording."""
    ids: bool = False
    """Whether a token is an id for an embedding table, exact in float32, instead of a feature vector."""
    block_tokens: int = 1
    """Source tokens that arrive together."""
    revise_tokens: int = 0
    """Most source tokens that are given again with a block, encoded from more context."""

    def __post_init__(self) -> None:
        if self.modality not in get_args(Modality):
            raise ConfigError(f"{self.name}: modality must be one of {', '.join(get_args(Modality))}: got {self.modality!r}")
        if self.dim < 1 or self.block_tokens < 1 or self.revise_tokens < 0 or not 0 < self.tokens_per_s < math.inf:
            got = f"{self.dim}, {self.block_tokens} and {self.tokens_per_s}"
            raise ConfigError(f"{self.name}: dim, block_tokens and tokens_per_s must be above 0: got {got}")


@dataclass(frozen=True)
class Tokens:
    """Source tokens and their arrival times: the end of the last raw sample or frame each token reads (method.md §4)."""

    values_TE: Tensor
    arrival_s: FloatArray
    revised: int = 0
    """The first `revised` of them replace the last ones given before in this stream; the others are new."""
    restart: int | None = None
    """The source token of the stream with which they begin a new span: all tokens before it are dropped. None: the span goes on."""

    def __post_init__(self) -> None:
        assert self.values_TE.ndim == 2, self.values_TE.shape
        assert self.arrival_s.shape == (len(self),), (self.arrival_s.shape, len(self))
        assert 0 <= self.revised <= len(self), (self.revised, len(self))

    def __len__(self) -> int:
        return self.values_TE.shape[0]

    def __getitem__(self, which: slice) -> Tokens:
        assert not self.revised, "tokens that revise others are taken whole"
        return Tokens(self.values_TE[which], self.arrival_s[which])

    @staticmethod
    def none(dim: int) -> Tokens:
        """No tokens."""
        return Tokens(torch.zeros(0, dim), np.zeros(0))

    @staticmethod
    def join(parts: Iterable[Tokens], dim: int) -> Tokens:
        """The parts one after another, their revisions applied; what they revise of tokens before them is still to be applied.

        Where a span begins is lost: a live caller takes the parts one by one.
        """
        kept, revised = list[Tokens](), 0
        for part in parts:
            withdrawn = part.revised
            while withdrawn and kept:
                last = kept.pop()
                if len(last) > withdrawn:
                    kept.append(Tokens(last.values_TE[:-withdrawn], last.arrival_s[:-withdrawn]))
                withdrawn -= min(withdrawn, len(last))
            revised += withdrawn
            kept += [part] if len(part) else []
        if not kept:
            return Tokens.none(dim)
        return Tokens(torch.cat([part.values_TE for part in kept]), np.concatenate([part.arrival_s for part in kept]), revised)


State = TypeVar("State")
Raw = TypeVar("Raw", contravariant=True)


class Encoder(ABC, Generic[Raw, State]):
    """Base class of encoders: raw input and an explicit state in, tokens out. A subclass has `traits`, `start`, `read` and `finish`.

    Tokens depend on the raw input alone, not on its chunks. Bad input is an error only after every token before it was returned.
    """

    traits: Traits

    @abstractmethod
    def start(self) -> State:
        """A fresh state: a stream of which nothing has been read."""

    @abstractmethod
    def read(self, state: State, raw: Raw) -> Tokens:
        """Read the next chunk; return the tokens it completes."""

    @abstractmethod
    def finish(self, state: State) -> Tokens:
        """End the source; return the tokens that waited for more of it. The state cannot be used again."""

    def blocks(self, state: State, raw: Raw) -> Iterator[Tokens]:
        """Read the next chunk like `read`, but yield the tokens block by block; `begin_span` may be called between two blocks."""
        yield self.read(state, raw)

    def last_blocks(self, state: State) -> Iterator[Tokens]:
        """End the source like `finish`, but yield the tokens block by block."""
        yield self.finish(state)

    def begin_span(self, state: State, *, at_s: float) -> bool:
        """Restart the context at a moment inside the last block; if True, `blocks` yields the block's later tokens again."""
        return False

    def context_start_s(self, state: State) -> float:
        """Where in the source the context of the next token begins: it grows when older context is dropped."""
        return 0.0

    def with_settings(self, **settings: Any) -> Encoder[Raw, State]:
        """The same weights under other settings, such as the length of a block."""
        raise ConfigError(f"{self.traits.name}: it has no settings to change: got {', '.join(settings)}")

    def row_arrivals(self, first: int, count: int) -> FloatArray:
        """When feature rows first … first+count−1 are complete, in seconds; only an encoder of modality `features` is asked."""
        return (np.arange(first, first + count) + 1) / self.traits.tokens_per_s + self.traits.look_ahead_s

    def digest(self) -> str:
        """sha256 of the weights the tokens depend on; empty if there are none."""
        return ""


@dataclass(frozen=True, kw_only=True)
class EncoderFactory:
    """How the registry opens an encoder by name; the file of each encoder ends in one, `ENCODER`."""

    modality: Modality
    open: Callable[..., Encoder[Any, Any]]
    """Called as `open(which, **settings)`, or `open(**settings)` if nothing follows the name."""
    which: str = ""
    """What may follow the name and a colon, in words; empty: nothing. For modality `features` it is where the rows are stored."""
    settings: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)
    """Settings by name, each with the type that reads it from text."""


def weights_digest(module: nn.Module) -> str:
    """sha256 over every name, type, shape and byte of a network's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stream(encoder: Encoder[Raw, State], chunks: Iterable[Raw]) -> Iterator[Tokens]:
    """Tokens as chunks arrive; an encoder that needs the whole recording is refused."""
    if not encoder.traits.live:
        advice = "use a live encoder (Whisper in block mode), or encode whole recordings"
        raise ConfigError(f"{encoder.traits.name}: offline only: its tokens read the whole recording; {advice}")
    return _run(encoder, chunks)


def encode(encoder: Encoder[Raw, State], chunks: Iterable[Raw], where: str = "the recording") -> Tokens:
    """All tokens of a whole recording: streaming with a fresh state."""
    tokens = Tokens.join(_run(encoder, chunks), encoder.traits.dim)
    if not len(tokens):
        raise SourceError(f"{where}: empty: {encoder.traits.name} got nothing to encode; expected at least one sample, frame or row")
    return tokens


def _run(encoder: Encoder[Raw, State], chunks: Iterable[Raw]) -> Iterator[Tokens]:
    state = encoder.start()
    for chunk in chunks:
        yield encoder.read(state, chunk)
    yield encoder.finish(state)


def readable_prefix(values: npt.NDArray[Any], largest: float) -> int:
    """Number of leading entries (rows, if there are several axes) that are finite and below `largest` in magnitude, as float32."""
    width = math.prod(values.shape[1:])
    rows = values.reshape(values.shape[0], width)
    step = max(1, BLOCK_VALUES // max(1, width))
    for first in range(0, rows.shape[0], step):
        good = np.ones(min(step, rows.shape[0] - first), np.bool_)
        for left in range(0, width, BLOCK_VALUES):  # one row may be longer than a block
            with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite
                block = rows[first : first + step, left : left + BLOCK_VALUES].astype(np.float32, copy=False)
            good &= (np.abs(block) < np.float32(largest)).all(1)  # False for NaN too
        if not good.all():
            return first + int(good.argmin())
    return values.shape[0]
