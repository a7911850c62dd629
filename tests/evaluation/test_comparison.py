"""Comparison of two decodes: the table, the record, and traces that cannot be compared."""

import dataclasses
import json
import random
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from zendaya.cli import app
from zendaya.errors import ConfigError, ZendayaError
from zendaya.evaluation.metrics.comparison import compare_traces
from zendaya.evaluation.metrics.quality import quality
from zendaya.evaluation.metrics.results import write_traces
from zendaya.evaluation.metrics.significance import paired_bootstrap, statistics
from zendaya.records import Trace

WORDS = ["a", "man", "dog", "runs", "plays", "the", "guitar", "is", "in", "park"]


def decode(seed, *, schedule="gamma=1.0", num_clips=20, better=0.0):
    """Traces whose texts are random, and right for a fraction of the clips."""
    draw, texts = random.Random(seed), random.Random(0)
    for n in range(num_clips):
        reference = " ".join(texts.choices(WORDS, k=6))
        text = reference if draw.random() < better else " ".join(draw.choices(WORDS, k=6))
        yield Trace(
            clip=f"{n}", split="test", schedule=schedule, scale="segment", window_tokens=4, num_source_tokens=4, text=text,
            references=(reference,), reference_steps=(3,), predicted_steps=(3,), tokens=(7, 8, 2), windows=(0, 0, 0), horizons=(2, 3, 4),
            effective_horizons=(2, 3, 4), arrived=(2, 3, 4),
        )  # fmt: skip


@pytest.fixture
def folders(tmp_path):
    for name, better in (("a", 0.9), ("b", 0.1)):
        (tmp_path / name).mkdir()
        write_traces(tmp_path / name, decode(1, better=better))
    return tmp_path


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code == 2:  # a mistake that typer finds
        raise ConfigError(" ".join(result.stderr.split()))
    return result.stdout


def test_difference_is_that_of_the_paired_bootstrap(folders):
    found = compare_traces(folders / "a", folders / "b" / "traces.jsonl", metrics=["bleu", "wer"], normalise="basic", resamples=200, seed=3)
    a, b = list(decode(1, better=0.9)), list(decode(1, better=0.1))
    for one, name in zip(found.metrics, ("bleu", "wer"), strict=True):
        sides = [([trace.text for trace in traces], [trace.references for trace in traces]) for traces in (a, b)]
        assert (one.a, one.b) == pytest.approx([quality(name, *side, normalise="basic").value for side in sides])
        stats = [statistics(name, *side, normalise="basic") for side in sides]
        assert one.difference == paired_bootstrap(*stats, resamples=200, seed=3)
        assert one.difference.excludes_zero
        assert (one.difference.value > 0) is one.higher_is_better
    assert found.record["metrics"][0]["difference"]["low"] == found.metrics[0].difference.low
    assert len(found.record["signature"]["traces_sha256"]) == 2


def test_the_order_of_clips_does_not_matter(folders):
    (folders / "c").mkdir()
    write_traces(folders / "c", reversed(list(decode(1, better=0.1))))
    straight, turned = (compare_traces(folders / "a", folders / name, metrics=["bleu"]) for name in ("b", "c"))
    assert straight.metrics == turned.metrics


def test_the_command_prints_a_table_and_one_object(folders):
    lines = run("compare", folders / "a", folders / "b", "--metric", "bleu,wer", "--resamples", 100).splitlines()
    assert lines[0] == f"A  gamma=1.0, {folders / 'a'}"
    assert lines[2] == "20 clips, paired bootstrap of 100 resamples, seed 0"
    assert lines[4].split()[:4] == ["A", "B", "A", "−"]
    assert [line.split()[0] for line in lines[5:7]] == ["BLEU", "WER"]
    assert lines[5].rstrip().endswith("0.020")  # 2 of 101
    assert "lower is better" in lines[-1]
    lines = run("compare", folders / "a", folders / "b", "--metric", "bleu,bleu", "--resamples", 100).splitlines()
    assert [line.split()[0] for line in lines[5:] if line.startswith("BLEU ")] == ["BLEU"]
    record = json.loads(run("compare", folders / "a", folders / "b", "--json"))
    assert (record["num_clips"], record["metrics"][0]["name"]) == (20, "BLEU")


def test_two_schedules_of_one_file(folders):
    write_traces(folders, [*decode(1, better=0.5), *decode(2, schedule="wait-k=2,stride=1.0"), *decode(3, schedule="local-agreement=3")])
    found = compare_traces(folders, folders, metrics=["bleu"], a_schedule="1", b_schedule="wait-k=2,stride=1")
    assert found.a.startswith("gamma=1.0, ")
    assert found.b.startswith("wait-k=2,stride=1.0, ")
    assert compare_traces(folders, folders, a_schedule="local-agreement=3", b_schedule="1").a.startswith("local-agreement=3")
    with pytest.raises(ZendayaError, match=r"holds 3 schedules: choose one with --a-schedule: gamma=1.0; wait-k=2,stride=1.0; local"):
        compare_traces(folders, folders)
    with pytest.raises(ZendayaError, match=r"holds no decode under gamma=0.5: --b-schedule must be one of"):
        compare_traces(folders, folders, a_schedule="1", b_schedule="0.5")
    with pytest.raises(ZendayaError, match=r"A and B are the same decode, gamma=1.0"):
        compare_traces(folders, folders, a_schedule="1", b_schedule="1")


def test_an_impossible_comparison_is_one_line(folders):
    def refused(message, **options):
        with pytest.raises(ZendayaError, match=message) as caught:
            compare_traces(folders / "a", folders / "b", **options)
        assert "\n" not in str(caught.value)

    refused("unknown metric 'rouge'", metrics=["rouge"])
    for words in (["score", folders / "a"], ["compare", folders / "a", folders / "b"]):
        with pytest.raises(ZendayaError, match="Invalid value for '--normalise'"):
            run(*words, "--metrics", "bleu", "--normalise", "klingon")
    refused("resamples must be at least 1: got 0", resamples=0)
    write_traces(folders / "b", decode(2, num_clips=19))
    refused(r"not of the same clips: 20 and 19 clips, 1 of them in one file only, such as '19' of split 'test'")
    write_traces(folders / "b", [dataclasses.replace(trace, references=("x",)) for trace in decode(2)])
    refused("different references for clip '0': they are not of the same data")
    write_traces(folders / "b", [*decode(2), *decode(2)])
    refused("a clip occurs twice under gamma=1.0")
    write_traces(folders / "b", decode(2))
    for name, digest in (("a", "1"), ("b", "2")):
        sha256 = write_traces(folders / name, decode(ord(name)))
        signature = {"traces_sha256": sha256, "metrics": ["bleu"], "normalise": "english", "corpus": "msvd", "data_sha256": digest}
        (folders / name / "scores.json").write_text(json.dumps({"signature": signature}))
    refused("are not of the same data: data_sha256 is '1' and '2'")


def test_a_truncated_file_is_one_line_and_exit_code_2(folders):
    path = folders / "a" / "traces.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    for words in (["score", folders / "a"], ["compare", folders / "a", folders / "b"], ["score", folders / "b", "--metrics", "rouge"]):
        ended = subprocess.run([sys.executable, "-m", "zendaya", *map(str, words)], capture_output=True, text=True, check=False)
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert ended.stderr.startswith("zendaya: ")
        assert ended.stderr.count("\n") == 1
