"""The Python of docs/policies.md runs as printed, and prints what it says; its table has every policy."""

import re
from pathlib import Path

from zendaya import plugins
from zendaya.runtime.policies import parse_policy

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


def test_the_examples_print_what_the_page_says(capsys):
    examples = re.findall(r"```python\n(.*?)```\n\nwhich prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == PAGE.count("```python") == 2
    for code, printed in examples:
        exec(compile(code, "docs/policies.md", "exec"), {})
        assert capsys.readouterr().out == printed


def test_the_table_names_what_can_be_read():
    rows = re.findall(r"^\| `([^`]+)` \| `(\w+)` \|", PAGE, re.MULTILINE)
    policies = [parse_policy(text) for text, _ in rows]
    assert [type(policy).__name__ for policy in policies] == [name for _, name in rows]
    assert sum(policy.decides_while_reading for policy in policies) == len(plugins.available("policies"))
