"""Policies: what to write is decided while reading, from attention or from decoding again.

A schedule fixes beforehand how much each step reads; a `Policy` decides as source arrives. One Session runs both and keeps windows,
arrivals and history, so comparisons differ in policy alone.

A policy is asked each time `chunk` more source tokens of the window have arrived, and when the window is complete. So its text depends
on the arrivals, not on how they were pushed. Each token it gives is written and never taken back.

Each policy is one file here that names its class `POLICY`, or an entry point of the group `zendaya.policies`.
"""

from __future__ import annotations

from zendaya import plugins
from zendaya.errors import ConfigError, ScheduleError
from zendaya.runtime.policies.base import AttentionPolicy, Cost, Policy, PolicyView
from zendaya.schedule import Schedule, parse_schedule

__all__ = ["AttentionPolicy", "Cost", "Policy", "PolicyView", "parse_policy"]


def parse_policy(text: str) -> Schedule | Policy:
    """The policy or schedule of a printed form: `local-agreement=10`, `alignatt=4,heads=1.0+2.5`, or one that `parse_schedule` reads.

    >>> parse_policy("alignatt=4,chunk=2").chunk, parse_policy("wait-k=3")
    (2, WaitK(k=3, stride=None))
    """
    compact = text.replace(" ", "").lower()
    name, known = compact.partition("=")[0], plugins.available("policies")
    try:
        return parse_schedule(text)
    except ScheduleError as error:
        if name not in known:
            raise ScheduleError(f"{error}; or a policy: {', '.join(f'{each}=…' for each in known)}") from None
    policy: type[Policy] = plugins.load("policies", name)
    try:
        return policy.parse(compact)
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError):
        raise ScheduleError(f"not a policy: {text!r}; expected {policy.form}") from None
