from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from zendaya.records import Clip, Problem


@pytest.fixture(scope="session")
def data() -> Callable[[str], Path]:
    """The folder of a real published corpus, or a skip that says why."""
    root = Path(os.environ.get("ZENDAYA_DATA") or Path(__file__).parents[3] / "../shared/data")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            pytest.skip(f"the real published files are not here: {root / name} (set ZENDAYA_DATA to where they are)")
        return root / name

    return folder


@pytest.fixture
def put(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Write a file of a fixture corpus and give the corpus folder."""

    def write(name: str, content: str | bytes) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path

    return write


@pytest.fixture
def collect() -> Callable[..., tuple[list[Clip], dict[str, list[str]]]]:
    """Run a reader to its end: its clips, and where each kind of problem was met."""

    def run(reader: Callable[..., object], path: Path, **options: object) -> tuple[list[Clip], dict[str, list[str]]]:
        problems: list[Problem] = []
        clips = list(reader(path, problems, **options))  # type: ignore[call-overload]
        kinds: dict[str, list[str]] = {}
        for problem in problems:
            assert problem.detail
            assert "\n" not in problem.detail + problem.where
            kinds.setdefault(problem.kind, []).append(problem.where)
        return clips, kinds

    return run
