"""The Python of docs/training.md runs as printed, and prints what it says; its table has every recipe."""

import re
from pathlib import Path

from zendaya.research.recipes import recipes

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\nwhich prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/training.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_table_has_every_recipe():
    table = PAGE.partition("| recipe | form |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([a-z0-9.-]+)`", table)) - {"-inf", "-causal"}
    named |= {f"{name}-inf" for name in ("charades-sta", "activitynet", "libriheavy")}
    assert named | {f"{name}-causal" for name in ("msvd", "librispeech", "multi30k")} == set(recipes())
