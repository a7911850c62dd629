"""The Python of docs/sweeps.md runs as printed, and prints what it says; its table has every grid."""

import re
from pathlib import Path

from zendaya.research.sweep.grids import grids

PAGE = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\nwhich prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/sweeps.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_table_has_every_grid():
    table = PAGE.partition("| grid | what |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z0-9-]+)`", table)) == set(grids())
