"""The Python of docs/method.md runs as printed, and prints what it says."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "method.md").read_text(encoding="utf-8")


def test_the_examples_print_what_the_page_says(capsys):
    examples = re.findall(r"```python\n(.*?)```\n\nwhich prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == PAGE.count("```python") > 0
    for code, printed in examples:
        exec(compile(code, "docs/method.md", "exec"), {})
        assert capsys.readouterr().out == printed
