from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from zendaya.cli import corpora as corpora_command
from zendaya.data.corpora.registry import get, names
from zendaya.errors import ZendayaError

main = typer.Typer()
main.add_typer(corpora_command.corpora, name="corpora")


@main.command()
def other() -> None:
    """A second word, so that the app is a group as in the real command line."""


def run(*words):
    result = CliRunner().invoke(main, ["corpora", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def manifest(tmp_path):
    (tmp_path / "talk.wav").touch()
    lines = [{"id": str(n), "media": "talk.wav", "start_s": n, "end_s": n + 1, "text": f" word {n}"} for n in range(5)]
    path = tmp_path / "my.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"id": "\x1b[31m"}]))
    return path


def test_the_list_says_what_each_needs_and_where_to_get_it():
    result = run()
    assert result.exit_code == 0
    for corpus in map(get, names()):
        assert f"{corpus.name}: {corpus.task}" in result.stdout
        assert corpus.needs in result.stdout
        assert corpus.where in result.stdout


def test_check_prints_counts_geometry_dial_and_problems(manifest):
    result = run("check", "manifest", manifest, "--vocab-size", 260)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "split clips usable streams references hours pairs overlapping" in lines
    assert "train 5 5 1 5 0.00 4 0" in lines
    assert "F source tokens: 3 tokens per second" in lines
    assert any(line.startswith("train: F 3.00 (5-95 %: 3.00-3.00), N ") for line in lines)
    assert "regime text-dense" in lines
    assert any(line.startswith("γ ") and "about 1 source token" in line for line in lines)
    assert "6 problems" in lines
    assert "untrimmed-text × 5: white space at both ends is removed" in lines
    assert "… and 2 more (--all)" in lines
    assert "malformed × 1: no clip" in lines
    assert "\x1b" not in result.stdout


def test_all_prints_every_problem(manifest):
    result = run("check", "manifest", manifest, "--all")
    assert "more (--all)" not in result.stdout
    assert sum("my.jsonl:" in line for line in result.stdout.splitlines()) == 6


def test_json_carries_everything(manifest):
    result = run("check", "manifest", manifest, "--json", "--rate", "10", "--first-tokens", "2")
    found = json.loads(result.stdout)
    assert found["splits"]["train"]["num_clips"] == 5
    assert found["splits"]["train"]["geometry"]["source_tokens"] == {"mean": 10.0, "p5": 10.0, "p95": 10.0}
    assert found["first_tokens"] == 2
    assert found["problem_counts"] == {"untrimmed-text": 5, "malformed": 1}
    assert [problem["kind"] for problem in found["problems"]].count("untrimmed-text") == 5
    assert len(found["digest"]) == 64


def test_a_clean_corpus_says_so(tmp_path):
    (tmp_path / "my.jsonl").write_text('{"id": "a", "source": "one", "text": "two"}\n')
    assert "no problems found" in run("check", "manifest", tmp_path / "my.jsonl").stdout


def test_a_mistake_is_one_of_our_errors_in_one_line(tmp_path):
    for words in (("check", "nothing", tmp_path), ("check", "msvd", tmp_path), ("check", "manifest", tmp_path / "none.jsonl")):
        with pytest.raises(ZendayaError) as raised:
            run(*words)
        assert "\n" not in str(raised.value)


def test_a_mistake_ends_in_one_line_and_exit_code_2(tmp_path):
    code = "from zendaya import cli; cli.main()"
    words = [sys.executable, "-c", code, "corpora", "check", "charades-sta", str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "holds none of charades_sta_train.txt" in result.stderr
