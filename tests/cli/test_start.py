"""Starting the command: completion, the list of commands, and mistakes that cost no heavy import."""

import os
import subprocess
import sys

import pytest

from zendaya.cli import COMMANDS, _load

CODE = "import sys; sys.argv[0] = 'zendaya'; from zendaya.cli import main\ntry:\n    main()\nfinally:\n    print('torch' in sys.modules)"


def run(*words, **environment):
    command = [sys.executable, "-c", CODE, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.mark.parametrize(("words", "expected"), [("zendaya ev", "evaluate"), ("zendaya audit --sca", "--scale")])
def test_the_shell_completes_commands_and_options(words, expected):
    place = str(len(words.split()) - 1)
    found = run(_ZENDAYA_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=place)
    assert expected in found.stdout.splitlines()


def test_help_and_its_list_import_nothing_heavy():
    found = run("--help")
    assert all(f"  {name} " in found.stdout for name in COMMANDS)
    assert found.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_each_command_does(name):
    line, command = COMMANDS[name][1], _load(name)
    assert len(line) <= 110
    assert command.help


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "model", "multi30k", "/no/such"), ("encode", "msvd", "/no/such", "--encoder", "features", "--out", "never"),
        ("train", "multi30k", "--data", "/no/such"), ("train", "/no/such.json"), ("serve", "--api-key-file", "/no/such"),
        ("stream", "/no/such.wav"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_path_is_told_before_torch_is_imported(words):
    found = run(*words)
    assert found.stderr.startswith("zendaya: ")
    assert found.stderr.count("\n") == 1
    assert "/no/such" in found.stderr
    assert (found.returncode, found.stdout.strip()) == (2, "False")


@pytest.mark.integration
def test_recipes_print_whole_names_at_80_columns():
    lines = run("recipes", COLUMNS="80").stdout.splitlines()
    assert any(line.startswith("librispeech-long30 ") for line in lines)
    assert any("whisper:openai/whisper-base.en,block_s=1,pool=15" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
