"""Readers for the fields of clients' messages: a malformed field is a FieldError that names it, never another exception."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

from zendaya.errors import ZendayaError
from zendaya.runtime.frontier import MAX_LAG_S
from zendaya.runtime.policies import Policy, parse_policy
from zendaya.schedule import MAX_GAMMA, PowerLaw, Schedule

MAX_POLICY = 200  # characters per policy name
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a surrogate pair as JSON escapes it: without the other half it can be read but never be encoded again."""
DELAYS = {"minimal": 1.0, "low": 0.7, "medium": 0.5, "high": 0.3, "xhigh": 0.1}
"""γ per OpenAI delay setting, for models without a measured frontier; others map the names onto it."""

Message = dict[str, Any]


class FieldError(ZendayaError, ValueError):
    """A malformed field of a client's message: its name, and an error code for programs."""

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
        raise FieldError(where, f"{where}: expected JSON: {str(error).splitlines()[0][:120]}", "bad_json") from None
    if not isinstance(found, dict):
        raise FieldError(where, f"{where}: expected a JSON object: got {_shown(found)}", "bad_json")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def _checked(value: Any, valid: bool, field: str, expected: str) -> Any:
    if not valid:
        raise FieldError(field, f"{field}: expected {expected}: got {_shown(value)}")
    return value


def string(message: Mapping[str, Any], field: str, default: str | None = None, *, within: str = "", longest: int = 256) -> str:
    """A string; `within` is the path of the object that holds the field, for the error."""
    value = message.get(field, default)
    valid = isinstance(value, str) and len(value) <= longest
    return _checked(value, valid, within + field, f"a string of at most {longest} characters")


def choice(message: Mapping[str, Any], field: str, among: tuple[str, ...], default: str | None = None, *, within: str = "") -> str:
    """One of a few strings."""
    value = message.get(field, default)
    return _checked(value, isinstance(value, str) and value in among, within + field, f"one of {', '.join(among)}")


def number(message: Mapping[str, Any], field: str, low: float, high: float) -> float:
    """A number within bounds."""
    value = message.get(field)
    valid = not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high
    return float(_checked(value, valid, field, f"a number in {low:g} … {high:g}"))


def from_text(text: str, field: str) -> float:
    """A number in a form or a query."""
    try:
        return float(text)
    except ValueError:
        raise FieldError(field, f"{field}: expected a number: got {text[:40]!r}") from None


def gamma(value: Any, field: str = "gamma") -> float:
    """A value of γ."""
    return number({field: value}, field, 0, MAX_GAMMA)


def integer(message: Mapping[str, Any], field: str, low: int, high: int = 2**53, default: int | None = None) -> int:
    """An integer within bounds."""
    value = message.get(field, default)
    valid = not isinstance(value, bool) and isinstance(value, int) and low <= value <= high
    return _checked(value, valid, field, f"an integer in {low} … {high}")


def flag(message: Mapping[str, Any], field: str) -> bool:
    """A boolean, by default false."""
    value = message.get(field, False)
    return _checked(value, isinstance(value, bool), field, "true or false")


def mapping(message: Mapping[str, Any], field: str, *, within: str = "") -> Message:
    """An object; empty if it is missing."""
    value = message.get(field, {})
    return _checked(value, isinstance(value, dict), within + field, "an object")


def pattern(message: Mapping[str, Any], field: str, form: str, expected: str, default: str | None = None) -> str:
    """A string that a regular expression matches; `expected` describes it in the error."""
    value = message.get(field, default)
    return _checked(value, isinstance(value, str) and re.fullmatch(form, value, re.ASCII) is not None, field, expected)


def known(message: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    """Refuse unknown fields: a misspelt option must not be ignored silently."""
    for field in message:
        if field not in fields:
            raise FieldError(field[:64], f"{field[:64]}: unknown field: expected {', '.join(fields)}", "unknown_field")


def encodable(message: Mapping[str, str]) -> None:
    """Refuse strings with half a surrogate pair, which a form in another charset may hold."""
    for field, value in message.items():
        try:
            (field + value).encode()
        except UnicodeEncodeError:
            raise FieldError(ascii(field)[1:-1][:64], f"{ascii(field)[1:-1][:64]}: expected Unicode: send it in UTF-8") from None


def pcm(message: Mapping[str, Any], field: str, *, longest: int) -> bytes:
    """s16le samples in base64."""
    value = message.get(field)
    encoded = _checked(value, isinstance(value, str), field, "samples in base64")
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise FieldError(field, f"{field}: expected standard base64 of whole two-byte samples", "bad_base64") from None
    if len(data) % 2 or len(data) > longest:
        raise FieldError(field, f"{field}: expected an even number of bytes, at most {longest}: got {len(data)}", "bad_samples")
    return data


def lag_s(message: Mapping[str, Any]) -> float | None:
    """The lag in the field `lag_s`; None without it."""
    return number(message, "lag_s", 0, MAX_LAG_S) if "lag_s" in message else None


def dial(message: Mapping[str, Any]) -> Schedule | Policy | None:
    """The schedule or policy in the fields `gamma` or `policy`; None without either. None of these goes with `lag_s`."""
    if len(given := [name for name in ("gamma", "policy", "lag_s") if name in message]) > 1:
        raise FieldError(given[1], f"{given[1]}: give one of gamma, policy and lag_s: got {' and '.join(given)}")
    if "policy" in message:
        text = string(message, "policy", longest=MAX_POLICY)
        try:
            found = parse_policy(text)
        except ZendayaError as error:
            raise FieldError("policy", f"policy: {error}") from None
        if found.gamma_or_none is not None:
            gamma(float(found.gamma_or_none), "policy")
        return found
    return PowerLaw(gamma(message["gamma"])) if "gamma" in message else None


def _shown(value: Any) -> str:
    """A value for an error message, cut short: a client may send anything."""
    if value is None:
        return "nothing"
    if isinstance(value, bool | int | float):
        return str(value)[:40]
    if isinstance(value, str):
        return repr(value[:40]) + (" …" if len(value) > 40 else "")
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__
