"""The Python of docs/engine.md runs as printed."""

import re
from pathlib import Path

from zendaya.runtime.engine import describe, missing

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")


def test_the_examples_run(capsys):
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 2
    names: dict[str, object] = {}
    for code in examples:
        exec(compile(code, "docs/engine.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == describe()
    assert len(printed) > 10 or missing()
