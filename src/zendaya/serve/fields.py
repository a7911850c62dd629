"""What clients send, read field by field: a wrong one is an error that names it, and never an exception of another kind."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any

from zendaya.errors import ZendayaError
from zendaya.policies import Policy, parse_policy
from zendaya.schedule import PowerLaw, Schedule

MAX_GAMMA = 10.0
"""Largest dial taken from outside: at 10 a window is read in its last steps, and what lies beyond says nothing new."""
MAX_POLICY = 200
"""Characters of a policy's name."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half a character, as JSON may write it: without the other half it could be read, and never be said again."""

Message = dict[str, Any]


class FieldError(ZendayaError, ValueError):
    """Something a client sent that cannot be: which field it is, and a word for programs."""

    def __init__(self, field: str, message: str, code: str = "bad_field") -> None:
        super().__init__(message)
        self.field, self.code = field, code


def parse(text: str | bytes, where: str = "message") -> Message:
    """A JSON object."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        found = json.loads(text, parse_constant=_refuse)
        if SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FieldError(where, f"{where}: not JSON: {str(error).splitlines()[0][:120]}", "bad_json") from None
    if not isinstance(found, dict):
        raise FieldError(where, f"{where}: expected a JSON object: got {_kind(found)}", "bad_json")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def string(message: Mapping[str, Any], field: str, default: str | None = None, *, within: str = "", longest: int = 256) -> str:
    """A text; `within` is the way to the object that holds the field, for the error."""
    value = message.get(field, default)
    if not isinstance(value, str) or len(value) > longest:
        raise FieldError(within + field, f"{within}{field}: expected a text of at most {longest} characters: got {_kind(value)}")
    return value


def choice(message: Mapping[str, Any], field: str, among: tuple[str, ...], default: str | None = None, *, within: str = "") -> str:
    """One of a few words."""
    value = message.get(field, default)
    if not isinstance(value, str) or value not in among:
        raise FieldError(within + field, f"{within}{field}: expected one of {', '.join(among)}: got {_kind(value)}")
    return value


def number(
    message: Mapping[str, Any], field: str, low: float, high: float, default: float | None = None, *, within: str = ""
) -> float:  # fmt: skip
    """A number between two others."""
    value = message.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise FieldError(within + field, f"{within}{field}: expected a number in {low:g} … {high:g}: got {_kind(value)}")
    return float(value)


def whole(message: Mapping[str, Any], field: str, low: int, high: int = 2**53, default: int | None = None, *, within: str = "") -> int:
    """A whole number between two others."""
    value = message.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FieldError(within + field, f"{within}{field}: expected a whole number in {low} … {high}: got {_kind(value)}")
    return value


def flag(message: Mapping[str, Any], field: str, *, default: bool) -> bool:
    """True or false."""
    value = message.get(field, default)
    if not isinstance(value, bool):
        raise FieldError(field, f"{field}: expected true or false: got {_kind(value)}")
    return value


def mapping(message: Mapping[str, Any], field: str, *, within: str = "") -> Message:
    """An object; not there, it is empty."""
    value = message.get(field, {})
    if not isinstance(value, dict):
        raise FieldError(within + field, f"{within}{field}: expected an object: got {_kind(value)}")
    return value


def pattern(message: Mapping[str, Any], field: str, form: str, what: str, default: str | None = None) -> str:
    """A text of a form."""
    value = message.get(field, default)
    if not isinstance(value, str) or not re.fullmatch(form, value, re.ASCII):
        raise FieldError(field, f"{field}: expected {what}: got {_kind(value)}")
    return value


def known(message: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    """Refuse fields that nobody reads: a misspelt option must not pass for one that was taken."""
    for field in message:
        if field not in fields:
            raise FieldError(field[:64], f"{field[:64]}: no such field here: expected {', '.join(fields)}", "unknown_field")


def sayable(message: Mapping[str, str]) -> None:
    """Refuse texts with half a character, which a form may hold in a charset of its own."""
    for field, value in message.items():
        try:
            (field + value).encode()
        except UnicodeEncodeError:
            raise FieldError(ascii(field)[1:-1][:64], f"{ascii(field)[1:-1][:64]}: not Unicode: send it in UTF-8") from None


def pcm(message: Mapping[str, Any], field: str, *, longest: int) -> bytes:
    """Samples in base64, of two bytes each."""
    value = message.get(field)
    if not isinstance(value, str):
        raise FieldError(field, f"{field}: expected samples in base64: got {_kind(value)}")
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise FieldError(field, f"{field}: not base64: send whole samples of two bytes, in standard base64", "bad_base64") from None
    if len(data) % 2 or len(data) > longest:
        raise FieldError(field, f"{field}: expected an even number of bytes, at most {longest}: got {len(data)}", "bad_samples")
    return data


def dial(message: Mapping[str, Any], default: float | None = None) -> Schedule | Policy | None:
    """The schedule or policy that `gamma` or `policy` names; `default` is the dial where neither is there."""
    if "gamma" in message and "policy" in message:
        raise FieldError("policy", "policy: give gamma or policy, one of the two")
    if "policy" in message:
        text = string(message, "policy", longest=MAX_POLICY)
        try:
            found = parse_policy(text)
        except ZendayaError as error:
            raise FieldError("policy", f"policy: {error}") from None
        if isinstance(found, PowerLaw):
            gamma(float(found.gamma), "policy")
        return found
    if "gamma" in message:
        return PowerLaw(gamma(message["gamma"]))
    return None if default is None else PowerLaw(default)


def gamma(value: Any, field: str = "gamma") -> float:
    """A setting of the dial."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_GAMMA:
        raise FieldError(field, f"{field}: the dial is a number in 0 … {MAX_GAMMA:g}: got {_kind(value)}")
    return float(value)


def _kind(value: Any) -> str:
    """What was got, in a few letters; a text may be anything, and is not said again at length."""
    if value is None:
        return "nothing"
    if isinstance(value, bool | int | float):
        return str(value)[:40]
    if isinstance(value, str):
        return repr(value[:40]) + (" …" if len(value) > 40 else "")
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__
