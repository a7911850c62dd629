"""The command as a user runs it: a process, its two outputs and its exit code."""

import importlib.resources
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zendaya import Model
from zendaya.runtime.engine import missing

ZENDAYA = Path(sys.executable).parent / "zendaya"


def run(*arguments, timeout=600):
    # One thread: the suite already runs a worker a core.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(ZENDAYA), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)


def test_the_dial_is_drawn():
    result = run("dial", "--gamma", "0.3", "--source", "100", "--steps", "165")
    assert result.returncode == 0
    assert result.stderr == ""
    for expected in ("●", "○", "0.7767", "0.7692", "28.79", "wait-k=28", "22"):
        assert expected in result.stdout


def test_the_dial_as_json():
    record = json.loads(run("dial", "--gamma", "0.3", "--json").stdout)
    assert record["horizons"][0] == record["first_token"] == record["buffer"] == 22
    assert len(record["horizons"]) == 165
    assert record["horizons"][-1] == 100
    assert record["exposure"] == pytest.approx(sum(record["horizons"]) / 16500)
    assert abs(record["wait_k"]["average_lagging"] - record["average_lagging"]) < 1


def test_a_budget_is_solved_for():
    record = json.loads(run("dial", "--budget", "10", "--json").stdout)
    assert record["gamma"] == pytest.approx(0.451, abs=5e-4)
    assert record["first_token"] == 10


def test_a_head_start_shows_its_closed_form():
    shown = run("dial", "--gamma", "1", "--head", "2", "--source", "10", "--steps", "5").stdout
    assert re.search(r"limit ηx \+ x\^\(1\+γ\)/\(1\+γ\) \+ 1 − x +0\.6800", shown)
    assert "gamma=1,head=2" in shown
    assert "1/(1+γ)  " not in shown
    record = json.loads(run("dial", "--budget", "10", "--head", "4", "--json").stdout)
    assert (record["head"], record["first_token"]) == (4, 10)
    assert record["gamma"] == pytest.approx(math.log(100 / 6) / math.log(165))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_dial_is_plotted(tmp_path, suffix):
    result = run("dial", "--gamma", "1", "--plot", tmp_path / f"dial.{suffix}")
    assert result.returncode == 0, result.stderr
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert (tmp_path / f"dial.{suffix}").read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [f"dial.{suffix}"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["dial", "--gamma", "-1"],
        ["dial", "--gamma", "nan"],
        ["dial", "--gamma", "inf"],
        ["dial", "--gamma", "much"],
        ["dial", "--gamma", "0.3", "--source", "0"],
        ["dial", "--gamma", "0.3", "--steps", "-5"],
        ["dial", "--gamma", "0.3", "--rounding", "up"],
        ["dial", "--gamma", "0.3", "--budget", "10"],
        ["dial", "--budget", "1000"],
        ["dial", "--budget", "5", "--head", "5"],
        ["dial", "--gamma", "1", "--head", "-1"],
        ["dial", "--gamma", "1", "--head", "1.5"],
        ["dial", "--gamma", "0.3", "--plot", "picture.txt"],
        ["dial", "--gamma", "0.3", "--plot", "/no/such/folder/dial.png"],
        ["dial"],
        ["audit"],
        ["audit", "no-such-folder"],
        ["audit", "--random", "--preset", "huge"],
        ["audit", "--random", "--preset", "tiny", "--schedule", "custom=3,1"],
        ["audit", "--random", "--preset", "tiny", "--schedule", "gamma=-2"],
        ["audit", "--random", "--scale", "clip"],
        ["audit", "--random", "--plant", "tulips"],
        ["audit", "--random", "--cuts", "0"],
        ["audit", "--random", "--preset", "tiny", "--engine", "gpu"],
        ["audit", "--random", "--plant", "all", "--engine", "native"],
        ["audit", "--random", "--seed", "99999999999999999999999"],
        ["audit", "--random", "--plant", "all", "--schedule", "0.3"],
        ["dial", "--gamma", "0.3", "--steps", "4503599627370496"],
        ["audit-raw", "whisper:tiny.en", "/no/such.wav"],
        ["audit-raw", "features", "x.npy"],
        ["audit-raw", "ears", "x.wav"],
        ["corpora", "check", "nothing", "."],
        ["corpora", "check", "msvd", "/no/such/folder"],
        ["encode", "msvd", "/no/such/folder", "--encoder", "features", "--out", "never"],
        ["turn"],
        ["dial", "--volume", "11"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_exit_code_two(arguments):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("zendaya: ")
    assert result.stderr.count("\n") == 1


def test_a_broken_checkpoint_is_one_line_and_exit_code_two(tmp_path):
    Model.from_preset("tiny").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run("audit", tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "model.safetensors" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_saved_model_is_audited(tmp_path):
    Model.from_preset("tiny", seed=3).save_pretrained(tmp_path)
    result = run("audit", tmp_path, "--schedule", "0.5", "--schedule", "wait-k=3,stride=0.7", "--cuts", "2", "--json")
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["schedule"] for record in records] == ["gamma=0.5", "wait-k=3,stride=0.7"]
    assert all(record["passed"] and record["probes"] > 20 for record in records)


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_the_native_engine_is_audited():
    words = ("audit", "--random", "--preset", "tiny", "--schedule", "0.5", "--cuts", "1", "--json")
    (line,) = run(*words, "--engine", "native", "--precision", "int8").stdout.splitlines()
    record = json.loads(line)
    assert (record["engine"], record["passed"]) == ("native int8", True)


def test_a_leak_is_exit_code_one_and_says_where():
    result = run("audit", "--random", "--plant", "softmax", "--cuts", "2")
    assert result.returncode == 1
    assert "LEAK" in result.stdout
    assert "step 1 depends on source token 5" in result.stdout


def test_the_segment_protocol_is_found_to_know_its_length():
    result = run("audit", "--random", "--preset", "tiny", "--schedule", "0.5", "--scale", "segment", "--cuts", "2")
    assert result.returncode == 1
    assert "future information" in result.stdout


def tone(path, seconds=4):
    import numpy as np
    import soundfile

    time = np.arange(int(16_000 * seconds)) / 16_000
    soundfile.write(path, 0.1 * np.sin(2 * np.pi * 220 * time) * np.sin(3 * time), 16_000)
    return path


def test_raw_input_is_audited_to_the_text(tmp_path):
    sound = tone(tmp_path / "tone.wav")
    command = ("audit-raw", "whisper:tiny.en,block_s=0.5,pool=5", sound, "--cuts", "2")
    result = run(*command, "--voice", "off", "--window", "1", "--json")
    assert result.returncode == 0, result.stderr
    encoder, text = (json.loads(line) for line in result.stdout.splitlines())
    assert encoder["clean"]
    assert text["clean"]
    assert text["num_compared"] > 0
    assert text["encoder"].endswith("in a pipeline")
    gated = run(*command[:-1], "1").stdout.splitlines()[-1]  # a tone is no speech
    assert gated.startswith("none ")
    assert gated.endswith("(no speech was found: give a recording of speech, or --voice off)")
    leaky = run("audit-raw", "whisper:tiny.en,mode=full,pool=5", sound, "--cuts", "1", "--arrivals", "own")
    assert leaky.returncode == 1
    assert leaky.stdout.count("LEAK ") == 2
    refused = run("audit-raw", "whisper:tiny.en,mode=full,pool=5", sound, "--cuts", "1", "--arrivals", "own", "--cut", "pauses")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "need a live encoder and --arrivals stated" in refused.stderr


@pytest.mark.slow
def test_speech_is_audited_through_gate_and_windows():
    speech = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
    words = ("--seconds", "6", "--cuts", "3", "--json")
    result = run("audit-raw", "whisper:tiny.en,block_s=0.5", speech, "--model", "tiny.en-dial", *words)
    assert result.returncode == 0, result.stderr
    text = json.loads(result.stdout.splitlines()[1])
    assert text["clean"]
    assert text["num_compared"] > 20


def test_a_corpus_is_checked_and_encoded(tmp_path):
    tone(tmp_path / "tone.wav")
    clip = {"id": "a", "media": "tone.wav", "start_s": 0, "end_s": 2, "text": "a tone", "split": "train"}
    (tmp_path / "my.jsonl").write_text(json.dumps(clip) + "\n" + json.dumps({**clip, "id": "b", "media": "gone.wav"}) + "\n")
    checked = run("corpora", "check", "manifest", tmp_path / "my.jsonl", "--json")
    assert json.loads(checked.stdout)["total"]["num_clips"] == 2
    command = ("encode", "manifest", tmp_path / "my.jsonl", "--encoder", "whisper:tiny.en,pool=15", "--out", tmp_path / "store", "--json")
    first, again = run(*command), run(*command)
    assert first.returncode == again.returncode == 0, first.stderr
    assert json.loads(first.stdout)["num_encoded"] == 1
    assert json.loads(again.stdout)["num_resumed"] == 2
    assert "gone.wav" in (tmp_path / "store" / "problems.jsonl").read_text()


def test_presets_version_and_help():
    assert "libriheavy" in run("presets").stdout
    assert run("--version").stdout.strip() == "0.1.0"
    assert run("--help").returncode == 0
    assert run().returncode == 2


def test_a_reader_that_goes_away_is_no_error():
    command = f"{ZENDAYA} dial --gamma 0.3 --json | head -c 5"
    result = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=300, check=False)
    assert result.stderr == ""


def test_a_full_disk_is_one_line():
    result = subprocess.run(
        ["bash", "-c", f"{ZENDAYA} dial --gamma 0.3 > /dev/full"], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "No space left" in result.stderr


def test_the_demo_runs():
    result = run("demo")
    assert result.returncode == 0, result.stderr
    assert "no leak" in result.stdout
    assert "a leak planted on purpose is found" in result.stdout


def test_the_demo_page_captions_the_sample_and_ends_in_a_pipe():
    result = run("demo", "--page")
    assert result.returncode == 0, result.stderr
    assert "Fail better." in result.stdout
    assert re.search(r"^The page: http://127\.0\.0\.1:\d+$", result.stdout, re.MULTILINE)
    assert "Traceback" not in result.stderr
