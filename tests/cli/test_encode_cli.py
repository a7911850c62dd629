"""The words of `zendaya encode`."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from zendaya.cli import encode as encode_command
from zendaya.data.features.store import FeatureStore
from zendaya.encoders import registry
from zendaya.errors import SourceError, StoreError

main = typer.Typer()
main.command("encode")(encode_command.encode)


@main.command()
def other() -> None:
    """A second word, so that the app is a group as in the real command line."""


def run(*words):
    result = CliRunner().invoke(main, ["encode", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def corpus(tmp_path):
    lines = [{"id": f"{n}", "media": f"{n}.npy", "end_s": 3.0, "text": "words"} for n in range(4)]
    lines[0]["text"] = " words "
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for n in range(3):
        np.save(tmp_path / f"{n}.npy", np.full((9, 4), n, np.float32))
    return tmp_path / "my.jsonl"


def test_it_encodes_and_says_what_it_did(corpus, tmp_path):
    words = ("manifest", corpus, "--encoder", "features,rate=3", "--out", tmp_path / "s")
    result = run(*words)
    assert result.exit_code == 0
    assert f"{tmp_path / 's'}: 3 of 4 clips: 27 tokens, " in result.stdout
    assert "encoder  features dim=4 rate=3 window=0.333333s, 4 features in fp16" in result.stdout
    assert f"unreadable × 1: see {tmp_path / 's' / 'problems.jsonl'}" in result.stdout
    # The text with white space around it; the media that is missing is the job's own business.
    assert f"the published files have 1 problems: see zendaya corpora check manifest {corpus}" in result.stdout
    assert "4 of them before this run" in run(*words).stdout
    assert len(FeatureStore.open(tmp_path / "s")) == 3


def test_json_is_one_object_on_stdout(corpus, tmp_path):
    result = run("manifest", corpus, "--encoder", "features", "--out", tmp_path / "s", "--dtype", "int8", "--limit", 2, "--json")
    found = json.loads(result.stdout)
    assert (found["num_clips"], found["num_encoded"], found["signature"]["dtype"]) == (2, 2, "int8")


def test_a_store_is_verified_on_request_and_when_complete(corpus, tmp_path):
    words = ("manifest", corpus, "--encoder", "features,rate=3", "--out", tmp_path / "s")
    line = "verified  all of the store matches its checksums"
    assert line not in run(*words, "--limit", 2).stdout
    assert line in run(*words, "--verify").stdout
    assert line in run(*words).stdout
    assert json.loads(run(*words, "--json").stdout)["verified"] is True
    shard = tmp_path / "s" / "tokens-00000.bin"
    shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
    with pytest.raises(StoreError, match=r"tokens-00000\.bin: checksum does not match at clip '0'"):
        run(*words)


def test_mistakes_are_our_errors(corpus, tmp_path):
    refused = run("manifest", corpus, "--encoder", "features", "--out", tmp_path / "s", "--dtype", "fp64")
    assert (refused.exit_code, "fp64" in refused.output) == (2, True)
    with pytest.raises(SourceError, match="no such media folder"):
        run("manifest", corpus, "--encoder", "features", "--out", tmp_path / "s", "--media", tmp_path / "none")
    assert not (tmp_path / "s").exists()


def test_the_help_names_every_encoder_and_costs_no_torch():
    assert ", ".join(registry.names()) in " ".join(run("--help").stdout.replace("│", " ").split())
    code = "import sys, zendaya.cli.encode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The command as it is run, with an encoder that takes its time.
COMMAND = """
import sys, time
from zendaya import cli
from zendaya.data.features.clips import FeatureClips
real = FeatureClips.encode

def slow(self, clip):
    time.sleep(0.2)
    return real(self, clip)

FeatureClips.encode = slow
cli.main()
"""


def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(corpus, tmp_path):
    words = [sys.executable, "-c", COMMAND, "encode", "manifest", corpus, "--encoder", "features,rate=3", "--out", tmp_path / "s"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "s" / "index.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (130, "")
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("zendaya: stopped: ")
    assert last.endswith(f"of 4 clips are in {tmp_path / 's'}; run the same command again to go on")
    kept = int(last.split()[2])
    assert 0 < kept < 4
    again = subprocess.run([*words, "--json"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["num_resumed"] == kept


def test_nothing_encoded_is_exit_code_2_and_one_line(corpus, tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.npy").unlink()
    words = [sys.executable, "-c", COMMAND, "encode", "manifest", corpus, "--encoder", "features,dim=4", "--out", tmp_path / "s"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        result.stderr.strip().splitlines()[-1].startswith("zendaya: none of the 4 clips could be encoded; the first: 0.npy: no such file")
    )
    assert len(Path(tmp_path / "s" / "problems.jsonl").read_text().splitlines()) == 4
