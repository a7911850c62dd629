"""`read_record`: what it accepts, what it refuses, and how it says so."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import pytest

from zendaya.errors import ConfigError, ScheduleError
from zendaya.records import Clip, read_record
from zendaya.schedule import PowerLaw, parse_schedule


@dataclass(frozen=True, kw_only=True)
class Inner:
    rank: int
    kind: Literal["fix", "inf"] = "inf"
    name: str | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank must be at least 1: got {self.rank}")


@runtime_checkable
class Dial(Protocol):
    @property
    def needs_length(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    pair: tuple[float, float] = (0.9, 0.98)
    parts: tuple[Inner, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict)
    schedule: Dial = field(default_factory=lambda: PowerLaw(0.5))


PARSERS: dict[Any, Any] = {Dial: parse_schedule}


def read(data: object) -> Outer:
    return read_record(Outer, data, "a.json", parsers=PARSERS)


def test_reads_nested_records_tuples_and_literals() -> None:
    expected = Outer(inner=Inner(rank=2, kind="fix", name="n"), pair=(1.0, 2.0), parts=(Inner(rank=1),), schedule=PowerLaw(0.3))
    data = {"inner": {"rank": 2, "kind": "fix", "name": "n"}, "pair": [1, 2], "parts": [{"rank": 1}], "schedule": "gamma=0.3"}
    assert read(data) == expected
    assert read({**data, "schedule": PowerLaw(0.3)}) == expected
    text = '{"inner": {"rank": 2, "kind": "fix", "name": "n"}, "pair": [1, 2], "parts": [{"rank": 1}], "schedule": "gamma=0.3"}'
    assert read(text) == read(text.encode()) == expected


def test_reads_records_that_hold_themselves() -> None:
    data = {"corpus": "c", "id": "1", "split": "s", "stream": "v", "references": ["a"]}
    part = Clip(corpus="c", id="1", split="s", stream="v", references=("a",))
    whole = Clip(corpus="c", id="1", split="s", stream="v", references=("a",), parts=(part,))
    assert read_record(Clip, {**data, "parts": [data]}, "x") == whole


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inner": {"rank": "2"}}, "a.json: inner.rank: expected int: got '2'"),
        ({"inner": {"rank": True}}, "a.json: inner.rank: expected int: got True"),
        ({"inner": {"rank": 2, "name": 3}}, "a.json: inner.name: expected str | null: got 3"),
        ({"inner": {"rank": 2, "kind": "fox"}}, "a.json: inner.kind: expected 'fix' or 'inf': got 'fox'"),
        ({"inner": {"rank": 2}, "parts": [{"rank": 1}, {"rank": 1, "kind": 7}]}, "a.json: parts[1].kind: expected str: got 7"),
        ({"inner": {}}, "a.json: inner: expected a field rank, which is missing"),
        ({}, "a.json: expected a field inner, which is missing"),
        ([1], "a.json: expected object: got [1]"),
        ({"inner": {"rank": 2}, "pair": [1, 2, 3]}, "a.json: pair: expected array of length 2: got [1, 2, 3]"),
        ({"inner": {"rank": 2}, "named": {"x": {"rank": None}}}, "a.json: named[...].rank: expected int: got null"),
        ({"inner": {"rank": 2, "rnak": 2}}, "a.json: unknown field inner.rnak: expected rank, kind, name"),
        ({"inner": {"rank": 2}, "parts": [{"rank": 1, "b": 0}]}, "a.json: unknown field parts.0.b: expected rank, kind, name"),
        ({"inner": {"rank": 2}, "named": {"x": {"rank": 1, "b": 0}}}, "a.json: unknown field named.x.b: expected rank, kind, name"),
        ({"inner": {"rank": 0}}, "rank must be at least 1: got 0"),
        ("{", "a.json: expected JSON: Input data was truncated"),
    ],
)  # fmt: skip
def test_errors_name_the_file_the_field_and_both_values(data: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(data)
    assert str(caught.value) == message


def test_errors_of_parsers_pass_unchanged() -> None:
    with pytest.raises(ScheduleError):
        read({"inner": {"rank": 1}, "schedule": "gamma=-1"})


def test_import_needs_neither_torch_nor_msgspec() -> None:
    code = "import sys, zendaya.records; sys.exit('torch' in sys.modules or 'msgspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
