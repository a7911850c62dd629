"""A package of one file adds an encoder, a policy, a corpus and a transport by entry points, and every command uses them."""

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

from zendaya import LoopConfig, ModelConfig, PowerLaw, TrainConfig
from zendaya.nn.decoder import DecoderConfig

av = pytest.importorskip("av")
pytest.importorskip("starlette")
Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.integration

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "zendaya-pose"
version = "1.0"

[project.entry-points."zendaya.encoders"]
pose = "zendaya_pose:ENCODER"
[project.entry-points."zendaya.policies"]
steady = "zendaya_pose:Steady"
[project.entry-points."zendaya.corpora"]
gestures = "zendaya_pose:CORPUS"
[project.entry-points."zendaya.transports"]
pose = "zendaya_pose:PoseTransport"

[tool.setuptools]
py-modules = ["zendaya_pose"]
"""

PACKAGE = '''
"""Captions of gestures: a pose encoder, a policy, a corpus and a transport for zendaya."""

import base64
import json
from dataclasses import dataclass

import numpy as np
import torch
from starlette.responses import JSONResponse
from starlette.routing import Route

from zendaya.data.corpora.base import Corpus
from zendaya.encoders.base import Encoder, EncoderFactory, Tokens, Traits
from zendaya.records import Clip
from zendaya.runtime.policies.base import Policy, check_count, parse_options
from zendaya.serve.transports.base import Transport


class PoseEncoder(Encoder):
    """Centre and spread of the bright pixels of each frame: four numbers per token."""

    def __init__(self, *, fps: float = 4.0):
        self.traits = Traits(
            name=f"pose fps={fps:g}", modality="video", dim=4, tokens_per_s=fps, look_back_s=0.0, look_ahead_s=0.0, live=True
        )

    def start(self):
        return None

    def read(self, state, raw):
        values = [self._pose(frame.pixels) for frame in raw]
        return Tokens(torch.tensor(values, dtype=torch.float32).reshape(-1, 4), np.array([frame.end_s for frame in raw]))

    def finish(self, state):
        return Tokens.none(4)

    def _pose(self, pixels):
        rows, columns = np.nonzero(pixels.mean(2) > 100)
        return [float(part) for axis in (rows, columns) for part in ((axis.mean() / 16, axis.std() / 16) if axis.size else (0, 0))]


ENCODER = EncoderFactory(modality="video", open=PoseEncoder, settings={"fps": float})


@dataclass(frozen=True)
class Steady(Policy):
    """Writes one token per chunk of source."""

    form = "steady=CHUNK"

    chunk: int

    def __post_init__(self):
        check_count(1, chunk=self.chunk)

    def start(self):
        return {"read": 0}

    def decide(self, view, state):
        if not view.complete and state["read"] == view.arrived:
            return None
        state["read"] = view.arrived
        token, _ = view.attend(None, ())
        return None if token == view.end and not view.complete else token

    @classmethod
    def parse(cls, text):
        chunk, _ = parse_options(text)
        return cls(int(chunk))

    def __str__(self):
        return f"steady={self.chunk}"


def clips(path, problems):
    for line in (path / "gestures.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield Clip(
            corpus="gestures", id=row["id"], split=row["split"], stream=row["id"], references=(row["text"],), end_s=row["seconds"],
            media=row["video"],
        )


CORPUS = Corpus(
    name="gestures", task="captioning of gestures", modality="video", metrics=("bleu",), needs="gestures.jsonl", where="made here",
    licence="none", files=lambda path: [path / "gestures.jsonl"], clips=clips,
)


class PoseTransport(Transport):
    """POST /v1/pose takes a JSON list of pictures, base64, and answers with their caption."""

    def routes(self, server):
        async def caption(request):
            pictures = await request.json()
            async with server.stream("frames") as feed:
                for picture in pictures:
                    await feed.send(base64.b64decode(picture))
                feed.stream.end()
                texts = [event.text async for event in feed.events()]
            return JSONResponse({"caption": "".join(texts)})

        return [Route("/v1/pose", caption, methods=["POST"])]
'''

MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


def pictures(move, count=8, seed=0):
    """A bright square that moves over a dark ground."""
    row, column = 12 + seed % 3, 12 - seed % 3
    for number in range(count):
        pixels = np.zeros((32, 32, 3), np.uint8)
        top, left = (place + number * step for place, step in zip((row, column), MOVES[move], strict=True))
        pixels[top : top + 8, left : left + 8] = 255
        yield pixels


def film(path, frames):
    with av.open(str(path), "w") as out:
        video = out.add_stream("mpeg4", rate=4)
        video.width, video.height, video.pix_fmt = 32, 32, "yuv420p"
        for pixels in frames:
            out.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(video.encode(None))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twenty-four videos of two seconds with a caption each."""
    folder = tmp_path_factory.mktemp("gestures")
    rows = []
    for number in range(24):
        split, move = ("train", "train", "train", "train", "valid", "test")[number // 4], list(MOVES)[number % 4]
        film(folder / f"{number}.mp4", pictures(move, seed=number))
        rows.append({"id": str(number), "split": split, "video": f"{number}.mp4", "seconds": 2.0, "text": f"it moves {move}"})
    (folder / "gestures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of a process in which the package is installed."""
    source, site = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "zendaya_pose.py").write_text(PACKAGE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", site, source]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def zendaya(environment):
    """Run a command in that environment; its standard output."""

    def run(*words):
        command = [sys.executable, "-m", "zendaya", *map(str, words)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


@pytest.fixture(scope="module")
def run(zendaya, data, tmp_path_factory):
    """A training run on the package's corpus with its encoder."""
    folder = tmp_path_factory.mktemp("run")
    encoded = json.loads(zendaya("encode", "gestures", data, "--encoder", "pose,fps=4", "--out", folder / "store", "--json"))
    assert (encoded["num_encoded"], encoded["num_failed"]) == (24, 0)
    decoder = DecoderConfig(
        vocab_size=300, source_dim=4, max_source=8, max_rows=41, dim=32, layers=2, heads=2, head_dim=16, ffn_dim=64, dropout=0.0
    )
    config = TrainConfig(
        name="gestures", corpus="gestures", folder="", encoder="pose,fps=4", vocab_size=300, schedule=PowerLaw(0.5), form="causal",
        model=ModelConfig(decoder=decoder, window_tokens=8, max_steps=20, length_hidden=32, history=False),
        loop=LoopConfig(epochs=40, batch_tokens=400, learning_rate=3e-3, warmup_steps=5),
    )  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(config.to_dict()))
    result = json.loads(
        zendaya("train", folder / "recipe.json", "--data", data, "--store", folder / "store", "--out", folder / "run", "--json")
    )
    assert result["epochs"] > 0
    return folder


def test_evaluate_uses_corpus_encoder_and_policy(zendaya, data, run):
    words = ("--store", run / "store", "--metrics", "bleu", "--out", run / "scores", "--schedule", "steady=2", "--schedule", "0.5")
    record = json.loads(zendaya("evaluate", run / "run" / "best", "gestures", data, *words, "--json"))
    assert [row["schedule"] for row in record["scores"]] == ["steady=2", "gamma=0.5"]
    assert "steady=2" in zendaya("score", run / "scores")


def test_stream_uses_encoder_and_policy(zendaya, data, run):
    events = zendaya("stream", data / "20.mp4", "--model", run / "run" / "best", "--policy", "steady=2", "--fast", "--json")
    events = [json.loads(line) for line in events.splitlines()]
    assert events[0]["horizon"] == 2
    assert "".join(event["text"] for event in events).strip()


def test_audit_raw_finds_no_leak_in_encoder_and_policy(zendaya, data, run):
    for schedule in ("0.5", "steady=2"):
        found = zendaya("audit-raw", "pose", data / "20.mp4", "--model", run / "run" / "best", "--schedule", schedule, "--json")
        assert [json.loads(line)["leaks"] for line in found.splitlines()] == [[], []]


def test_serve_mounts_the_transport(environment, run):
    command = [sys.executable, "-m", "zendaya", "serve", "--model", str(run / "run" / "best"), "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            address = re.search(r"http://\S+", server.stdout.readline())[0]
            body = json.dumps([png(pixels) for pixels in pictures("left")]).encode()
            request = urllib.request.Request(f"{address}/v1/pose", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["caption"].strip()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def png(pixels):
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()
