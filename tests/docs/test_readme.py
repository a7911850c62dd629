"""The README's Python runs as printed, and says what is so."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:40])
def test_the_python_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    if "print" in block:
        assert "read" in capsys.readouterr().out


def test_the_commands_and_rooms_it_names_are_there():
    root = Path(__file__).parents[2]
    for target in ("demo", "test"):
        assert re.search(rf"^{target}:", (root / "Makefile").read_text(), re.MULTILINE)
    for name in re.findall(r"pytest (\S+?)`", README):
        assert (root / name).exists()
    for row in re.findall(r"^\| (`[a-z`, ./_]+`) \|", README, re.MULTILINE):
        for room in re.findall(r"`([a-z_./]+)`", row):
            assert (root / "src" / "zendaya" / room).exists(), room


def test_the_figures_in_its_comments_are_what_the_code_gives():
    from zendaya import PowerLaw

    schedule = PowerLaw(0.3)
    assert f"# {schedule.exposure(100, 165)};" in README
    assert f"# {schedule.buffer(100, 165)} tokens" in README
    assert f"γ = {PowerLaw.for_budget(10, 100, 165).gamma:.3f}" in README
