"""The benchmarks run: a smoke run of each that is quick."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from zendaya import ZendayaError
from zendaya.cli.bench import bench
from zendaya.nn.decoder import Decoder
from zendaya.nn.presets import preset
from zendaya.research.bench import Plan, run, torch_threads
from zendaya.research.peers import CachedStep
from zendaya.runtime.engine import missing

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_training_beside_its_rivals(tmp_path, monkeypatch, capsys):
    specification = importlib.util.spec_from_file_location("benchmark_train", BENCHMARKS / "train.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "benchmark_train", module)
    specification.loader.exec_module(module)
    module.main(["--quick", "--data", str(tmp_path), "--json", str(tmp_path / "train.json")])
    measured = json.loads((tmp_path / "train.json").read_text(encoding="utf-8"))
    assert {"nn.TransformerDecoder", "T5"} <= measured["fixed"]["tiny"]["ratios"].keys()
    assert all(ratio > 0 for ratio in measured["fixed"]["tiny"]["ratios"].values())
    assert all(result["peak_mib"] > 0 for result in measured["fixed"]["tiny"]["results"].values())
    assert "msvd is skipped" in capsys.readouterr().out


def test_first_text_and_its_parts(monkeypatch, capsys):
    specification = importlib.util.spec_from_file_location("benchmark_first_text", BENCHMARKS / "first_text.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "benchmark_first_text", module)
    specification.loader.exec_module(module)
    module.main(["--minutes", "0.2", "--warm-up", "1", "--clock", "cpu", "--json"])
    measured = json.loads(capsys.readouterr().out)
    parts = measured["ms_10_50_90"]
    assert measured["blocks"] > 0
    assert parts["total"][1] >= parts["encoder"][1] > 0 < parts["decoder"][1]


def test_the_bootstrap_beside_sacrebleus(monkeypatch, capsys):
    specification = importlib.util.spec_from_file_location("benchmark_bootstrap", BENCHMARKS / "bootstrap.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.main(["--clips", "200", "--resamples", "100", "--json"])
    measured = json.loads(capsys.readouterr().out)
    assert abs(measured["ours"][0] - measured["sacrebleu"][0]) < 1e-6
    assert measured["ours"][1] <= measured["ours"][0] <= measured["ours"][2]


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_the_engine_by_itself(tmp_path, capsys):
    plan = Plan(
        preset="tiny", source=20, steps=16, rounds=1, threads=1, streams=(3,), live=(2,), live_s=0.5, gammas=(0.0, 1.0), sources=(24,),
        training_tokens=100, encoder_s=2.0,
    )  # fmt: skip
    measured = run(plan)
    assert json.loads(json.dumps(measured))["equal 1"].keys() == {"zendaya int8", "zendaya float32", "zendaya torch"}
    assert measured["ragged 3"]["tokens_per_s"] > 0
    assert measured["gamma"]["24"]["0.0"]["ms"] > 0
    assert measured["ragged 3"]["spread"][0] <= measured["ragged 3"]["tokens_per_s"] <= measured["ragged 3"]["spread"][1]
    assert measured["live 2"]["lag_ms_95"] >= measured["live 2"]["lag_ms_50"] >= 0
    assert measured["training"]["median"] > 0 < measured["encoding"]["median"]
    assert "memory reads" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ZendayaError, match="steps"):
        Plan(preset="tiny", steps=1000, source=20)
    with pytest.raises(ZendayaError, match="training_tokens"):
        Plan(training_tokens=-1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"live_s": 0.0}, "live_s"),
        ({"live_s": float("nan")}, "live_s"),
        ({"live_s": float("inf")}, "live_s"),
        ({"encoder_s": float("nan")}, "encoder_s"),
        ({"sources": (100, 0)}, "sources"),
        ({"gammas": (0.3, -1.0)}, "gamma"),
        ({"gammas": (float("nan"),)}, "gamma"),
        ({"live": (0,)}, "streams"),
    ],
)
def test_a_plan_is_checked_before_anything_is_measured(options, words):
    with pytest.raises(ZendayaError, match=words):
        Plan(**options)


def test_a_contender_leaves_torchs_threads_as_they_were():
    before, seen = torch.get_num_threads(), []
    torch_threads(before + 1)(lambda steps: seen.append(torch.get_num_threads()))(5)
    assert (seen, torch.get_num_threads()) == ([before + 1], before)


def test_the_figures_are_kept_or_refused_beforehand(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr("zendaya.cli.bench.run", lambda plan, peers: runs.append(plan) or {"figure": 1})
    there = tmp_path / "figures.json"
    with pytest.raises(ZendayaError, match="folder"):
        bench(file=tmp_path / "nowhere" / "figures.json")
    with pytest.raises(ZendayaError, match="cannot be written"):
        bench(file=tmp_path)
    there.write_text("old", encoding="utf-8")
    with pytest.raises(ZendayaError, match="--force"):
        bench(file=there)
    assert not runs
    assert there.read_text(encoding="utf-8") == "old"
    bench(file=there, force=True)
    assert json.loads(there.read_text(encoding="utf-8")) == {"figure": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_the_ragged_line_is_put_beside_the_better_int8_peer():
    plan = Plan(
        preset="tiny", source=20, steps=16, rounds=2, threads=1, streams=(3,), live=(), sources=(), training_tokens=0, encoder_s=0.0
    )  # fmt: skip

    def peers(plan, batch):
        return {"slow int8": lambda steps: time.sleep(0.004 * steps), "fast int8": lambda steps: time.sleep(0.001 * steps)}

    said = []
    measured = run(plan, peers=peers, say=said.append)
    assert measured["ragged 3"]["rival"] == "fast int8"
    expected = measured["ragged 3"]["tokens_per_s"] / measured["equal 3"]["fast int8"]["tokens_per_s"]
    assert measured["ragged 3"]["ratio"] == pytest.approx(expected)
    assert any("ragged" in line and "× the tokens of fast int8" in line for line in said)


def test_the_exported_step_gives_the_logits_of_the_decoder():
    """What ONNX Runtime is given is this library's decoder, step by step."""
    shape = preset("tiny").decoder
    torch.manual_seed(0)
    decoder, source_BTE = Decoder(shape).eval(), torch.randn(2, 20, shape.source_dim)
    with torch.inference_mode():
        cache = decoder.start(2)
        decoder.read(cache, source_BTE)
        grown = [torch.zeros(2, shape.heads, 0, shape.head_dim)] * (2 * shape.layers)
        for row, ids in enumerate([1, 5, 9]):
            ids_B = torch.full((2,), ids)
            expected = decoder.step(cache, ids_B, 20)
            cross = [part[:, :, :20] for pair in cache.cross for part in pair]
            logits, *grown = CachedStep(decoder)(ids_B[:, None], torch.tensor([row]), *grown, *cross)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
