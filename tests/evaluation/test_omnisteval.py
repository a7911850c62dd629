"""OmniSTEval agrees with our latency, per clip and on one long recording that it segments itself."""

import json
import random
import subprocess
import sys

import pytest

from zendaya.evaluation import simuleval as ours
from zendaya.records import Trace

pytest.importorskip("omnisteval", reason="OmniSTEval is not installed")

CLIPS_S, GAP_S = (3.0, 4.5, 2.0), 1.0
TEXTS = ["Ever tried ever failed", "no matter try again fail again", "the sun shone having alternative"]


class Pieces:
    """A tokenizer whose tokens are their own texts."""

    def stream(self):
        return lambda token: token


def decodes(seed):
    """Clips of one recording written like their references, one with a word more, one with a word less, some late."""
    draw = random.Random(seed)
    for number, (length_s, text) in enumerate(zip(CLIPS_S, TEXTS, strict=True)):
        written = [f" {word}" for word in text.split()]
        written = [*written, " indeed"] if number == 0 else written[:-1] if number == 1 else written
        arrivals = tuple(length_s * (n + 1) / 10 for n in range(10))
        arrived = tuple(sorted(draw.randint(1, 10) for _ in written))
        late = sorted(draw.uniform(0, 0.4) for _ in written)
        yield Trace(
            clip=f"{number}", split="test", schedule="gamma=1.0", scale="window", window_tokens=10, num_source_tokens=10, text="",
            references=(text,), reference_steps=(), predicted_steps=(4,), tokens=tuple(written), windows=(0,) * len(written),
            horizons=arrived, effective_horizons=arrived, arrived=arrived, arrivals_s=arrivals,
            emissions_s=tuple(arrivals[n - 1] + wait for n, wait in zip(arrived, late, strict=True)),
        )  # fmt: skip


def omnisteval(folder, *words):
    """The scores of a run of the command."""
    code = "import sys; from omnisteval.cli import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, words), "--output_folder", str(folder)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    rows = [line.split("\t") for line in (folder / "scores.tsv").read_text().splitlines()[1:]]
    return {name: float(value) for name, value in rows if value not in ("YES", "NO", "N/A")}


def computing(instance):
    """An instance with computation-aware delays."""
    return ours.Instance(**{**vars(instance), "delays": instance.elapsed})


@pytest.mark.parametrize("seed", range(3))
def test_omnisteval_gives_our_latency(seed, tmp_path):
    clips = [ours.from_trace(trace, Pieces(), index=n, source=f"{n}.wav") for n, trace in enumerate(decodes(seed))]
    (tmp_path / "references.txt").write_text("\n".join(TEXTS) + "\n")
    texts = ("--word_level", "--ref_sentences_file", tmp_path / "references.txt")
    found = omnisteval(tmp_path / "short", "shortform", *texts, "--hypothesis_file", ours.write_instances(tmp_path / "clips", clips))
    mine, late = ours.latency(clips), ours.latency(map(computing, clips))
    for name in mine:
        assert found[f"{name} (CU)"] == pytest.approx(mine[name], abs=1e-3)
        assert found[f"{name} (CA)"] == pytest.approx(late[name], abs=1e-3)

    starts_s = [sum(CLIPS_S[:n]) + GAP_S * n for n in range(3)]
    whole = ours.Instance(
        index=0, prediction=" ".join(one.prediction for one in clips), reference=" ".join(TEXTS), source="talk.wav",
        delays=tuple(1000 * start + delay for one, start in zip(clips, starts_s, strict=True) for delay in one.delays),
        elapsed=tuple(1000 * start + delay for one, start in zip(clips, starts_s, strict=True) for delay in one.elapsed),
        prediction_length=sum(one.prediction_length for one in clips), source_length=1000 * (starts_s[-1] + CLIPS_S[-1]),
    )  # fmt: skip
    segments = [{"wav": "talk.wav", "offset": at, "duration": length} for at, length in zip(starts_s, CLIPS_S, strict=True)]
    (tmp_path / "segments.json").write_text(json.dumps(segments))
    recording = ours.write_instances(tmp_path / "recording", [whole])
    words = ("longform", *texts, "--speech_segmentation", tmp_path / "segments.json", "--hypothesis_file", recording)
    again = omnisteval(tmp_path / "long", *words)
    for name in mine:
        assert again[f"Long{name} (CU)"] == pytest.approx(mine[name], abs=1e-3)
        assert again[f"Long{name} (CA)"] == pytest.approx(late[name], abs=1e-3)
