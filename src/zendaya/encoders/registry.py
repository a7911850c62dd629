"""Encoders by name: `whisper:tiny.en,block_s=0.5` is the encoder of encoders/whisper.py, opened with a setting."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from zendaya import plugins
from zendaya.encoders.base import Encoder, EncoderFactory, Modality
from zendaya.errors import ConfigError

ROW_KEY = "key"
"""Setting of every encoder of feature rows: how the rows of a clip are named in their file or folder."""


def names() -> tuple[str, ...]:
    """The names of all encoders, installed plugins included."""
    return plugins.available("encoders")


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder as commands and recipes write it: NAME[:WHICH][,SETTING=VALUE…]."""

    name: str
    which: str
    settings: tuple[tuple[str, Any], ...]

    @staticmethod
    def parse(text: str) -> EncoderSpec:
        """Read a spec.

        >>> EncoderSpec.parse("whisper:tiny.en,pool=15")
        EncoderSpec(name='whisper', which='tiny.en', settings=(('pool', 15),))
        """
        head, *given = re.split(r",(?=\w+=)", text)
        name, _, which = head.partition(":")
        spec = EncoderSpec(name, which, ())
        if which and not spec.factory.which:
            raise ConfigError(f"encoder {name}: expected nothing after its name but settings: got {which!r}")
        return replace(spec, settings=tuple(spec._setting(*pair.split("=", 1)) for pair in given))

    @property
    def factory(self) -> EncoderFactory:
        factory: EncoderFactory = plugins.load("encoders", self.name)
        return factory

    @property
    def modality(self) -> Modality:
        return self.factory.modality

    @property
    def reads_media(self) -> bool:
        """Whether it reads recordings or videos, and so can be used live."""
        return self.modality in ("audio", "video")

    def given(self, name: str) -> Any:
        """The value of a setting; None if the spec does not give it."""
        return dict(self.settings).get(name)

    def with_setting(self, name: str, value: Any) -> EncoderSpec:
        """The same spec with one setting more."""
        return replace(self, settings=(*self.settings, (name, value)))

    def open(self) -> Encoder[Any, Any]:
        """Open the encoder; one of feature rows gets no `which`, because clips say where their rows are."""
        settings = {name: value for name, value in self.settings if name != ROW_KEY}
        which = (self.which,) if self.which and self.modality != "features" else ()
        return self.factory.open(*which, **settings)

    def _setting(self, name: str, value: str) -> tuple[str, Any]:
        known: dict[str, Callable[[str], Any]] = dict(self.factory.settings)
        if self.modality == "features":
            known[ROW_KEY] = str
        if name not in known:
            raise ConfigError(f"encoder {self.name}: no setting {name!r}; expected one of {', '.join(known) or 'none'}")
        try:
            return name, known[name](value)
        except ValueError:
            kind = {int: "a whole number", float: "a number"}.get(known[name], "valid")  # type: ignore[call-overload]
            raise ConfigError(f"encoder {self.name}: {name} must be {kind}: got {value!r}") from None
