"""The policy protocol: what a policy sees of its window, what it decides, and what that costs."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from zendaya.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

    from zendaya.nn.model import Model

Heads = tuple[tuple[int, int], ...]
"""Heads of the cross-attention, as (layer, head) from 0."""
Floats = npt.NDArray[np.floating[Any]]


@dataclass
class Cost:
    """Work that a session's decoder has done so far."""

    rows: int = 0
    """Text rows run: one per step, and one per token of a prompt, a history or written text that is read again."""
    passes: int = 0
    """Calls of the decoder; one call may run many rows."""
    withdrawn: int = 0
    """Rows withdrawn because their step was held."""
    revised: int = 0
    """Tokens decoded but not written that the next decode changed, ends of text left out."""


class PolicyView(Protocol):
    """A window as its policy sees it: every decode reads all the source that has arrived and follows the text that is written."""

    @property
    def arrived(self) -> int:
        """Source tokens of the window that have arrived: a multiple of the policy's chunk until the window is complete."""

    @property
    def complete(self) -> bool:
        """Whether no more source will come: W tokens have arrived, the window was cut, or the stream has ended."""

    @property
    def end(self) -> int:
        """The id that ends a window's text."""

    def attend(self, layer: int | None, heads: Heads) -> tuple[int, Floats]:
        """The next token, chosen greedily, and its attention to each source token, averaged over heads (see `AttentionPolicy`)."""

    def hypothesis(self) -> list[int]:
        """The whole rest of the text, chosen greedily, up to its end or the window's last step."""


class Policy(ABC):
    """Decides at every chunk of source which tokens may be written; it is frozen, and keeps a window's state in an object of its own."""

    decides_while_reading: ClassVar[Literal[True]] = True
    learned: ClassVar[bool] = False
    needs_length: ClassVar[bool] = False
    exposure_limit: ClassVar[None] = None
    gamma_or_none: ClassVar[None] = None
    k_or_none: ClassVar[None] = None
    form: ClassVar[str]
    """The printed form, for error messages: `name=VALUE[,option=VALUE]`."""

    chunk: int | None
    """Source tokens between two decisions, or None: a block of the encoder. The last chunk of a window may be shorter."""

    @abstractmethod
    def start(self) -> Any:
        """A fresh state, for a window of which nothing was read."""

    @abstractmethod
    def decide(self, view: PolicyView, state: Any) -> int | None:
        """The token to write now, or None to wait for the next chunk; for a complete window, always a token."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """The policy whose printed form is `text`; a ValueError, KeyError or TypeError if there is none."""

    @abstractmethod
    def __str__(self) -> str:
        """The printed form: the policy's file or entry point name, then `=` and its parameters."""

    def check(self, model: Model) -> None:  # noqa: B027 - most policies look at nothing a model may lack
        """Refuse a model that lacks what the policy looks at."""

    def for_run(self, rho: float | Fraction | None) -> Self:
        """The policy for a checkpoint whose training corpus has the length ratio `rho`; None: not known."""
        return self


def parse_heads(text: str) -> Heads:
    """Heads from their printed form.

    >>> parse_heads("1.0+2.5")
    ((1, 0), (2, 5))
    """
    if not re.fullmatch(r"\d+\.\d+(\+\d+\.\d+)*", text):
        raise ValueError(text)
    return tuple((int(layer), int(head)) for layer, _, head in (pair.partition(".") for pair in text.split("+")))


@dataclass(frozen=True, kw_only=True)
class AttentionPolicy(Policy):
    """A policy that looks at cross-attention, averaged over the `heads` given.

    Without heads, the mean is over all heads of the `layer` given, else over the model's alignment heads (Whisper publishes its own),
    else over all heads of the layer two thirds of the way up.
    """

    kinds: ClassVar[dict[str, Callable[[str], Any]]] = {"chunk": int, "layer": int, "heads": parse_heads}

    chunk: int | None = None
    layer: int | None = None
    """From 0."""
    heads: Heads = ()

    def __post_init__(self) -> None:
        check_count(1, chunk=1 if self.chunk is None else self.chunk)
        check_count(0, layer=self.layer or 0, head=min((0, *(place for head in self.heads for place in head))))

    def start(self) -> None:
        """It has no state."""

    def decide(self, view: PolicyView, state: None) -> int | None:
        token, attention = view.attend(self.layer, self.heads)
        return None if not view.complete and (token == view.end or self.looks_ahead(attention)) else token

    @abstractmethod
    def looks_ahead(self, attention: Floats) -> bool:
        """Whether a token with this attention leans on source so new that more of it might change the token."""

    def check(self, model: Model) -> None:
        chosen_heads(model, self.layer, self.heads)

    def _options(self) -> str:
        """Chunk, layer and heads as they are printed."""
        heads = "+".join(f"{layer}.{head}" for layer, head in self.heads)
        chunk = "" if self.chunk is None else f",chunk={self.chunk}"
        return chunk + (f",layer={self.layer}" if self.layer is not None else "") + (f",heads={heads}" if heads else "")


def chosen_heads(model: Model, layer: int | None, heads: Heads) -> Heads:
    """The heads that an `AttentionPolicy` averages over; a ConfigError if the decoder lacks one."""
    config = model.config.decoder
    if not heads and layer is None:
        heads = model.alignment_heads
    if not heads:
        layer = -(-2 * config.layers // 3) - 1 if layer is None else layer
        heads = tuple((layer, head) for head in range(config.heads))
    for place in heads:
        if place[0] >= config.layers or place[1] >= config.heads:
            raise ConfigError(
                f"the policy looks at layer {place[0]}, head {place[1]}: expected layers 0 … {config.layers - 1} and heads 0 … "
                f"{config.heads - 1}, which this decoder has; give other layer= or heads="
            )
    return heads


def check_count(least: int, **counts: object) -> None:
    """Refuse a parameter that is no whole number of at least `least`."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"a policy's {name} must be a whole number, at least {least}: got {value!r}")


def parse_options(text: str, **kinds: Callable[[str], Any]) -> tuple[str, dict[str, Any]]:
    """The first value of a printed form `name=first,key=value,…`, and its options, each read by its kind.

    >>> parse_options("alignatt=4,chunk=2", chunk=int)
    ('4', {'chunk': 2})
    """
    first, *others = text.partition("=")[2].split(",")
    return first, {key: kinds[key](value) for key, value in (other.split("=") for other in others)}


def num_shared(one: list[int], other: list[int], end: int) -> int:
    """Length of the longest common prefix of two texts, their end not counted.

    >>> num_shared([5, 6, 7, 2], [5, 6, 8], end=2), num_shared([5, 2], [5, 2], end=2)
    (2, 1)
    """
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count] != end:
        count += 1
    return count
