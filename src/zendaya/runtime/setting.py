"""The setting of a live stream as one text: a schedule or policy, then options of the decoder or of the encoder.

As `gamma=0.5;window_s=10;block_s=1`. Benchmarks play such settings, and a model's frontier holds them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, get_type_hints

from zendaya.encoders.base import Encoder
from zendaya.errors import ConfigError
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.policies import Policy, parse_policy
from zendaya.schedule import Schedule


@dataclass(frozen=True)
class LiveSetting:
    """A schedule or policy, with options of the decoder (`DecodeOptions`) and of the encoder."""

    schedule: Schedule | Policy
    decoder: dict[str, Any]
    encoder: dict[str, Any]
    """What is no option of the decoder is one of the encoder, which checks it when it is opened."""

    @staticmethod
    def parse(text: str) -> LiveSetting:
        """Read a setting from text.

        >>> print(LiveSetting.parse("0.5; window_s=10; block_s=0.5"))
        gamma=0.5;window_s=10.0;block_s=0.5
        """
        import msgspec

        first, *pairs = (part.strip() for part in text.split(";"))
        hints = get_type_hints(DecodeOptions, localns={"Schedule": Schedule, "Policy": Policy})
        decoder, encoder = dict[str, Any](), dict[str, Any]()
        for name, equals, value in (pair.partition("=") for pair in pairs):
            if not equals or name == "schedule":
                raise ConfigError(f"setting {text!r}: expected SCHEDULE;NAME=VALUE;…: got {name!r}")
            if name not in hints:
                encoder[name] = _plain(value)
                continue
            try:
                decoder[name] = msgspec.convert(value, hints[name], strict=False)
            except (msgspec.ValidationError, TypeError) as error:
                raise ConfigError(f"setting {text!r}: {name}: {error}") from None
        schedule = parse_policy(first)
        DecodeOptions(schedule=schedule, **decoder)  # checked before anything is loaded
        return LiveSetting(schedule, decoder, encoder)

    def options(self, **given: Any) -> DecodeOptions:
        """How the decoder runs: the options of the setting, each replaced by a given one that is not the default."""
        defaults = {field.name: field.default for field in dataclasses.fields(DecodeOptions)}
        chosen = {name: value for name, value in given.items() if value != defaults[name]}
        return DecodeOptions(schedule=self.schedule, **{**self.decoder, **chosen})

    def encoder_from(self, encoder: Encoder[Any, Any]) -> Encoder[Any, Any]:
        """The encoder under the setting."""
        return encoder.with_settings(**self.encoder) if self.encoder else encoder

    def __str__(self) -> str:
        given = sorted(self.decoder.items()) + sorted(self.encoder.items())
        return ";".join([str(self.schedule), *(f"{name}={value}" for name, value in given)])


def _plain(text: str) -> Any:
    """A number or truth value where the text is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
