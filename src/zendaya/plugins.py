"""Extensions by name: encoders, policies, corpora and transports, listed without importing any of them.

A built-in is one file in its room's folder: `encoders/whisper.py` is the encoder `whisper`, and its object is called `ENCODER`.
Another package adds one by an entry point of the group `zendaya.encoders` (`zendaya.policies` …) that names the same kind of object.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, get_args

from zendaya.errors import ConfigError

Group = Literal["encoders", "policies", "corpora", "transports"]

_ROOT = Path(__file__).parent
_HOMES: dict[Group, tuple[str, str]] = {
    "encoders": ("encoders", "ENCODER"),
    "policies": ("runtime/policies", "POLICY"),
    "corpora": ("data/corpora", "CORPUS"),
    "transports": ("serve/transports", "TRANSPORT"),
}
_SINGULAR: dict[Group, str] = {"encoders": "encoder", "policies": "policy", "corpora": "corpus", "transports": "transport"}
_SHARED = ("base", "registry")
"""Files of a folder that are no extensions; nor are those whose name begins with an underscore."""


@lru_cache
def _found(group: Group) -> dict[str, str | EntryPoint]:
    folder, attribute = _HOMES[group]
    built_in = {
        path.stem.replace("_", "-"): f"zendaya.{folder.replace('/', '.')}.{path.stem}:{attribute}"
        for path in sorted((_ROOT / folder).glob("*.py"))
        if path.stem not in _SHARED and not path.stem.startswith("_")
    }
    others = {point.name: point for point in entry_points(group=f"zendaya.{group}")}
    return {**others, **built_in}  # a package cannot replace a built-in


def available(group: Group) -> tuple[str, ...]:
    """Names of the extensions of a group, built-ins first."""
    assert group in get_args(Group), group
    return tuple(sorted(_found(group), key=lambda name: (not isinstance(_found(group)[name], str), name)))


def load(group: Group, name: str) -> Any:
    """Import the object of an extension."""
    found = _found(group).get(name)
    if found is None:
        raise ConfigError(f"no {_SINGULAR[group]} is called {name!r}; expected one of {', '.join(available(group))}")
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        return getattr(import_module(module), attribute)
    try:
        return found.load()
    except Exception as error:  # the package is somebody else's
        raise ConfigError(f"{_SINGULAR[group]} {name!r} ({found.value}) cannot be imported: {type(error).__name__}: {error}") from error
