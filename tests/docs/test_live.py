"""The Python of docs/live.md runs as printed, and prints what it says; its tables have every option and key."""

import inspect
import re
from pathlib import Path

from zendaya.cli.stream import stream

PAGE = (Path(__file__).parents[2] / "docs" / "live.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(capsys):
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\nwhich prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/live.md", "exec"), {})
    assert capsys.readouterr().out.rstrip() == printed.rstrip()


def test_every_option_is_named():
    parameters = inspect.signature(stream).parameters.values()
    options = [option.annotation.__metadata__[0] for option in parameters if option.name != "source"]
    names = [name for option in options for names in (option.default, *option.param_decls) for name in str(names).split("/")]
    names = [name for name in names if name.startswith("--")]
    assert len(names) > 15
    for name in names:
        assert name in PAGE, name
