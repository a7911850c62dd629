"""The house: imports point down the list of rooms only, names say what a file holds, and importing does nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zendaya

SOURCE = Path(zendaya.__file__).parent
ROOMS = [
    "errors",
    "atomic",
    "schedule",
    "records",
    "arrivals",
    "text",
    "subtitles",
    "metrics",
    "corpora",
    "encoders",
    "decoder",
    "length",
    "model",
    "adapter",
    "encode",
    "pretrained",
    "engine",
    "policies",
    "stream",
    "scheduler",
    "simuleval",
    "live",
    "terminal",
    "training",
    "evaluate",
    "audit",
    "recipes",
    "sweep",
    "report",
    "bench",
    "peers",
    "serve",
    "demo",
    "cli",
    "__main__",
]
# Rooms that may import less than all that stands above them (and `errors`, which all may).
MAY_IMPORT = {
    "schedule": set(),
    "records": set(),
    "arrivals": {"atomic"},
    "text": {"records"},
    "subtitles": {"records"},
    "metrics": {"atomic", "schedule", "records"},
    "corpora": {"atomic", "records", "text", "schedule"},  # the schedule suggests γ in a corpus check
    "encoders": {"atomic", "records", "text"},
    "decoder": {"schedule", "text"},
    "length": {"schedule", "text"},
    "model": {"atomic", "decoder", "length", "schedule", "text"},
    "adapter": {"atomic", "encoders", "model"},
}
# Model.open is a convenience on the model that builds the runtime above it, when it is called.
UPWARD = {("model", "stream"), ("model", "policies"), ("model", "engine")}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "zendaya":
                names = [f"zendaya.{zendaya._HOMES.get(alias.name, alias.name)}" for alias in node.names]
        for name in names:
            if name.startswith("zendaya."):
                yield name.split(".")[1]


def files():
    return [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert room in ROOMS, f"{room} is not a room of the house: give it a place in the list"
    for other in imports(path):
        if other in ROOMS and other != room and (room, other) not in UPWARD:
            assert ROOMS.index(other) < ROOMS.index(room), f"{room} imports {other}, which stands above it"
            assert other == "errors" or other in MAY_IMPORT.get(room, {other}), f"{room} imports {other}"


def test_no_room_for_odds_and_ends():
    assert not {path.stem for path in files()} & {"utils", "util", "helpers", "common", "misc"}


def test_every_public_name_can_be_had():
    for name in zendaya.__all__:
        assert getattr(zendaya, name).__name__ == name
    assert set(dir(zendaya)) == set(zendaya.__all__)
    with pytest.raises(AttributeError):
        _ = zendaya.no_such_name


def test_the_schedule_costs_no_torch():
    rooms = "zendaya.metrics.latency, zendaya.metrics.results, zendaya.cli.evaluate"
    code = f"import sys, {rooms}; zendaya.PowerLaw(0.3).horizons(9, 9); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
