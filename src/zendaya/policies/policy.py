"""What a policy is, what it sees, and what it costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zendaya.errors import ConfigError

Heads = tuple[tuple[int, int], ...]
"""Heads of the cross-attention, as (layer, head) from 0."""
Floats = npt.NDArray[np.floating[Any]]


@dataclass
class Cost:
    """What a session has made its decoder do so far."""

    rows: int = 0
    """Text rows run: a step is one, and so is each token of a prompt, a history or a committed text that is read again."""
    passes: int = 0
    """Calls of the decoder: one may run many rows."""
    revised: int = 0
    """Tokens decoded but not written that the next decode did not repeat, ends of text left out: what readers were spared."""


class View(Protocol):
    """What a policy sees of its window; all that is decoded for it reads the source that has arrived, after the text that is written."""

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
        """The next token, chosen greedily, and how much its row gives to each source token: a mean over heads, see `Looking`."""

    def hypothesis(self) -> list[int]:
        """The whole rest of the text, chosen greedily, to its end or as far as a window's text may go."""


class Policy(ABC):
    """Says at every chunk of source which tokens may be written; it is frozen, what changes within a window is its state."""

    chunk: int
    """Source tokens between two decisions; the last chunk of a window may be shorter."""

    @abstractmethod
    def start(self) -> Any:
        """A fresh state: a window of which nothing was seen."""

    @abstractmethod
    def decide(self, view: View, state: Any) -> int | None:
        """The token to write now, or None to wait for the next chunk; of a complete window, always a token."""


def check_count(least: int, **counts: object) -> None:
    """Refuse a parameter that is no whole number of at least `least`."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"a policy's {name} must be a whole number, at least {least}: got {value!r}")
