"""The benchmarks run: a smoke run of each that is quick."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from zendaya import ZendayaError
from zendaya.bench import Plan, chosen, run
from zendaya.engine import missing

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
    assert measured["gamma"]["24"]["0.0"][0] > 0
    assert measured["live 2"]["lag_ms_95"] >= measured["live 2"]["lag_ms_50"] >= 0
    assert measured["training"]["median"] > 0 < measured["encoding"]["median"]
    assert "memory reads" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ZendayaError, match="steps"):
        Plan(preset="tiny", steps=1000, source=20)
    with pytest.raises(ZendayaError, match="training_tokens"):
        Plan(training_tokens=-1)
    with pytest.raises(ZendayaError, match="commas"):
        chosen("8;9", int)
