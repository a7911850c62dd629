"""docs/architecture.md and CONTRIBUTING.md name files that exist, and the order of imports that is checked."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_table_names_files_that_exist():
    table = PAGE.partition("## Rooms")[2].partition("## Where")[0]
    cells = "".join(row.split("|")[1] for row in table.splitlines()[4:] if "|" in row)
    named = re.findall(r"`([a-z0-9_/.]+)`", cells)
    assert len(named) > 50
    assert [name for name in named if not (ROOT / "src" / "zendaya" / name).exists()] == []


def test_every_room_has_a_row():
    rooms = {path.name for path in (ROOT / "src" / "zendaya").iterdir() if (path / "__init__.py").is_file()}
    assert rooms == set(re.findall(r"^\| \*\*`(\w+)/`\*\*", PAGE, re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_linked_files_exist(page):
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_named_tests_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = [
        found for page in pages for found in re.findall(r'`pytest (tests/\S+?)(?: -k "?([a-z_ ]+)"?)?`', page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 30
    for path, words in named:
        tests = re.findall(r"def (test_\w+)", (ROOT / path).read_text(encoding="utf-8"))
        for word in filter(None, words.split(" or ")):
            assert any(word in test for test in tests), (path, word)
