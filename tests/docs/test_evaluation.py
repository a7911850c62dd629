"""The Python of docs/evaluation.md runs as printed, and prints what it says; its tables have every metric and option."""

import re
from pathlib import Path

from typer.testing import CliRunner

from zendaya.cli import app
from zendaya.evaluation.metrics.quality import METRICS

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_the_examples_print_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```\n\nwhich prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == PAGE.count("```python") == 3
    for code, printed in examples:
        exec(compile(code, "docs/evaluation.md", "exec"), {})
        assert capsys.readouterr().out == printed


def test_the_table_has_every_metric():
    table = PAGE.partition("| name | what |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)} == set(METRICS)


def test_the_commands_have_the_options_it_names():
    console = PAGE.partition("```sh\n")[2].partition("```")[0]
    for command in ("evaluate", "score", "compare"):
        help_text = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"]).stdout
        named = {option for line in console.splitlines() if f"zendaya {command} " in line for option in re.findall(r" (--[a-z-]+)", line)}
        assert named
        assert all(option in help_text for option in named), (command, named)
