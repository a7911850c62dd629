"""The Python of docs/features.md runs as printed, and prints what it says."""

import re
from pathlib import Path

from zendaya.encoders import registry

PAGE = (Path(__file__).parents[2] / "docs" / "features.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\nwhich prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/features.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_table_has_every_encoder_and_setting():
    table = PAGE.partition("| name | which |")[2].partition("\n\n")[0]
    rows = {row.split("|")[1].strip(" `"): set(re.findall(r"`(\w+)`", row.split("|")[3])) for row in table.splitlines()[2:]}
    specs = {name: registry.EncoderSpec(name, "", ()) for name in registry.names()}
    keys = {name: {registry.ROW_KEY} if spec.modality == "features" else set() for name, spec in specs.items()}
    assert rows == {name: set(spec.factory.settings) | keys[name] for name, spec in specs.items()}
