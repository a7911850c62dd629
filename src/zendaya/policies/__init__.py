"""Rivals on the same decoder: what to write is decided while reading, from attention or from decoding again.

A schedule fixes beforehand how much each step reads; a `Policy` looks. The one Session runs both, and keeps windows, arrivals and
history, so that comparisons differ in policy alone. Wait-k with catch-up and full context are schedules, named here beside the rest.

A policy is asked each time `chunk` more source tokens of the window have arrived, and when the window is complete; so what it writes
depends on the arrivals alone, not on how they were pushed. It says one token at a time, which is written and never taken back.
While more source may come it holds back the end of the text; after that it holds back nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from zendaya.errors import ConfigError, ScheduleError
from zendaya.policies.agreement import LocalAgreement
from zendaya.policies.attention import AlignAtt, EDAtt
from zendaya.policies.policy import Cost, Heads, Policy, View
from zendaya.schedule import POLICIES, Full, Schedule, WaitK, parse_schedule

__all__ = ["AlignAtt", "Cost", "EDAtt", "Full", "Heads", "LocalAgreement", "Policy", "View", "WaitK", "parse_policy"]

_MAKE: dict[str, Callable[..., Policy]] = {
    "local-agreement": lambda first, **given: LocalAgreement(int(first), **given),
    "alignatt": lambda first, **given: AlignAtt(int(first), **given),
    "edatt": lambda first, **given: EDAtt(float(first), **given),
}
assert tuple(_MAKE) == POLICIES


def parse_policy(text: str) -> Schedule | Policy:
    """What its printed form names: `local-agreement=10`, `alignatt=4,chunk=2`, `edatt=0.4,last=2,layer=3`, `alignatt=4,heads=1.0+2.5`,
    or whatever `parse_schedule` knows.

    >>> parse_policy("alignatt=4,chunk=2").chunk, parse_policy("wait-k=3")
    (2, WaitK(k=3, stride=None))
    """
    name, _, rest = text.replace(" ", "").lower().partition("=")
    if name not in _MAKE:
        try:
            return parse_schedule(text)
        except ScheduleError as error:
            raise ScheduleError(f"{error}; or a policy: local-agreement=10, alignatt=4,chunk=2, edatt=0.4,last=2") from None
    first, *others = rest.split(",")
    kinds: dict[str, Callable[[str], Any]] = {"chunk": int, "last": int, "layer": int, "heads": _parse_heads}
    try:
        pairs = [other.split("=") for other in others]
        return _MAKE[name](first, **{key: kinds[key](value) for key, value in pairs})
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError):
        raise ScheduleError(
            f"not a policy: {text!r}; expected local-agreement=CHUNK, or alignatt=LAST or edatt=SHARE with any of ,last=N ,chunk=N "
            f",layer=N ,heads=LAYER.HEAD+LAYER.HEAD"
        ) from None


def _parse_heads(text: str) -> Heads:
    if not re.fullmatch(r"\d+\.\d+(\+\d+\.\d+)*", text):
        raise ValueError(text)
    return tuple((int(layer), int(head)) for layer, _, head in (pair.partition(".") for pair in text.split("+")))
