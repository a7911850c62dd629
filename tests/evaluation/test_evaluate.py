"""Evaluation: clips through the one runtime, traces, scores from them, and the command line from end to end."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from zendaya import DecodeOptions, EvalOptions, Model, PowerLaw, Tokenizer, WaitK, evaluate_corpus, score
from zendaya.cli import app
from zendaya.data.features.encode import encode_corpus
from zendaya.encoders.base import Tokens
from zendaya.errors import ConfigError, CorpusError, SourceError, StoreError, ZendayaError
from zendaya.evaluation.evaluate import evaluate, evaluate_streams
from zendaya.evaluation.metrics.latency import average_lagging
from zendaya.evaluation.metrics.results import one_line, read_traces, write_traces
from zendaya.nn.presets import preset
from zendaya.records import Clip, Trace
from zendaya.runtime.engine import engine_name, missing
from zendaya.runtime.policies import parse_policy
from zendaya.runtime.policies.local_agreement import LocalAgreement
from zendaya.schedule import Full

TEXTS = ["a man plays a guitar", "the dog runs in the park", "two women talk", "he is singing"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Tables on one line per row, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "200")


def make_model(**changes):
    decoder = {name: changes.pop(name) for name in ("source_dim", "source_vocab", "max_source") if name in changes}
    tokenizer = Tokenizer.train(TEXTS, 300)
    decoder = dataclasses.replace(preset("tiny").decoder, vocab_size=tokenizer.vocab_size, **decoder)
    return Model.from_preset("tiny", tokenizer=tokenizer, decoder=decoder, **{"max_steps": 12, **changes})


def make_clips(*lengths, dim=16):
    random = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        clip = Clip(corpus="c", id=f"{number}", split="test", stream=f"{number}", references=(TEXTS[number % 4],), end_s=length / 2)
        values = torch.from_numpy(random.standard_normal((length, dim)).astype(np.float32))
        yield clip, Tokens(values, np.arange(1, length + 1) / 2)


@pytest.fixture(scope="module")
def model():
    return make_model()


def test_a_trace_is_what_the_session_wrote(model):
    schedule = PowerLaw(0.5)
    (trace,) = evaluate(model, make_clips(17), schedule)
    ((clip, source),) = make_clips(17)
    session = model.open(schedule, window_tokens=17)
    events = [*session.push(source.values_TE), *session.finish()]
    assert trace.tokens == tuple(event.token for event in events)
    assert trace.text == " ".join("".join(event.text for event in events).split())
    assert (trace.clip, trace.references, trace.scale, trace.schedule) == (clip.id, clip.references, "segment", "gamma=0.5")
    assert (trace.window_tokens, trace.num_source_tokens) == (17, 17)
    assert trace.reference_steps == (len(model.tokenizer.encode(TEXTS[0])) + 1,)
    steps = trace.predicted_steps[0]
    expected = tuple(schedule.horizons(17, steps, num_steps=len(events)).tolist())
    assert trace.horizons == trace.effective_horizons == trace.delays == expected
    assert trace.arrived == expected  # the buffer of the length head is never more than the first horizon
    assert trace.delays_s == tuple(horizon / 2 for horizon in expected)


def test_the_scale_window_is_that_of_a_live_run(model):
    (trace,) = evaluate(model, make_clips(7), DecodeOptions(schedule=PowerLaw(1), window_tokens=10, steps=5), scale="window")
    assert (trace.window_tokens, trace.predicted_steps) == (10, (5,))
    assert trace.horizons[:5] == (2, 4, 6, 8, 10)[: len(trace.horizons)]
    assert trace.effective_horizons == tuple(min(horizon, 7) for horizon in trace.horizons)
    assert max(trace.arrived) <= 7
    (longer,) = evaluate(model, make_clips(25), DecodeOptions(schedule=PowerLaw(1), window_tokens=10), scale="window")
    assert set(longer.windows) == {0, 1, 2}
    assert longer.delays == tuple(10 * k + read for k, read in zip(longer.windows, longer.effective_horizons, strict=True))
    assert list(longer.delays) == sorted(longer.delays)
    assert len(longer.predicted_steps) == 3
    (default,) = evaluate(model, make_clips(7), PowerLaw(1), scale="window")
    assert default.window_tokens == model.config.window_tokens


def test_a_clip_too_long_is_cut_into_equal_windows(model):
    (trace,) = evaluate(model, make_clips(50), Full())
    assert model.config.decoder.max_source == 24
    assert (trace.window_tokens, set(trace.windows)) == (17, {0, 1, 2})
    assert {trace.tokens_of_window(k) for k in range(3)} == {17, 16}


def test_the_wait_of_a_whole_source_length_head_is_seen():
    fixed = make_model(length="fix")
    (trace,) = evaluate(fixed, make_clips(9), PowerLaw(1))
    assert set(trace.arrived) == {9}
    (found,) = score([trace], metrics=["bleu"])
    assert trace.delays[0] < found.latency_tokens.first_token == 9
    assert found.latency_s.first_token == 4.5


def test_workers_change_nothing(model):
    alone = evaluate(model, make_clips(5, 24, 9), PowerLaw(0.3))
    assert evaluate(model, make_clips(5, 24, 9), PowerLaw(0.3), workers=2) == alone


def test_a_model_in_training_is_decoded_without_dropout():
    model = make_model().train()
    traces = evaluate(model, make_clips(12), PowerLaw(0.3))
    assert model.training
    assert evaluate(model.eval(), make_clips(12), PowerLaw(0.3)) == traces


def test_bad_options_raise_config_errors(model):
    with pytest.raises(ConfigError, match="scale must be one of segment, window: got 'clip'"):
        evaluate(model, make_clips(3), Full(), scale="clip")
    with pytest.raises(ConfigError, match="scale segment sets the window to the clip's length"):
        evaluate(model, make_clips(3), DecodeOptions(schedule=Full(), window_tokens=3))
    with pytest.raises(ConfigError, match="workers must be at least 1: got 0"):
        evaluate(model, make_clips(3), Full(), workers=0)
    with pytest.raises(SourceError, match="clip '0': no source tokens"):
        evaluate(model, make_clips(0), Full())
    with pytest.raises(SourceError, match="clip '0': source tokens must have shape"):
        evaluate(model, make_clips(3, dim=5), Full())
    with pytest.raises(ZendayaError, match="nothing to score"):
        score([], metrics=["bleu"])


def by_hand(**changes):
    fields = {
        "clip": "0", "split": "test", "schedule": "gamma=1.0", "scale": "segment", "window_tokens": 4, "num_source_tokens": 4,
        "text": "a b",
        "references": ("a b",), "reference_steps": (3,), "predicted_steps": (3,), "tokens": (7, 8, 2), "windows": (0, 0, 0),
        "horizons": (2, 3, 4), "effective_horizons": (2, 3, 4), "arrived": (2, 3, 4), "arrivals_s": (0.5, 1.0, 1.5, 2.0),
    }  # fmt: skip
    return Trace(**{**fields, **changes})


def test_scores_by_hand():
    (found,) = score([by_hand()], metrics=["wer"])
    # AL = ((2 − 0) + (3 − 4/3) + (4 − 8/3)) / 3
    assert found.latency_tokens.average_lagging == pytest.approx(5 / 3)
    assert found.latency_tokens.average_proportion == pytest.approx(9 / 12)
    assert found.latency_s.average_lagging == pytest.approx(5 / 6)
    assert (found.latency_tokens.first_token, found.latency_s.first_token) == (2, 1.0)
    assert found.exposure == pytest.approx(9 / 12)
    assert (found.exposure_planned, found.exposure_limit) == (found.exposure, 0.5)
    assert (found.steps, found.predicted_steps, found.reference_steps, found.num_clips) == (3, 3, 3, 1)
    assert (found.quality[0].name, found.quality[0].value) == ("WER", 0.0)


def test_scores_of_several_windows_and_clips_by_hand():
    split = by_hand(
        clip="1", window_tokens=3, num_source_tokens=5, predicted_steps=(1, 1), tokens=(7, 2), windows=(0, 1), horizons=(3, 3),
        effective_horizons=(3, 2), arrived=(3, 5), arrivals_s=None, reference_steps=(2,),
    )  # fmt: skip
    assert split.delays == (3, 5)
    (found,) = score([by_hand(), split], metrics=["bleu"])
    assert found.latency_s is None  # one clip has no clock
    assert found.latency_tokens.average_lagging == pytest.approx((5 / 3 + average_lagging([3, 5], source=5, target=2)) / 2)
    assert found.exposure == pytest.approx((0.75 + 1.0) / 2)
    two = score([by_hand(), by_hand(schedule="wait-k=2,stride=1.0")], metrics=["bleu"])
    assert [(one.schedule, one.exposure_limit) for one in two] == [("gamma=1.0", 0.5), ("wait-k=2,stride=1.0", None)]
    (headed,) = score([by_hand(schedule="gamma=1,head=1"), by_hand(clip="1", schedule="gamma=1,head=1", window_tokens=2)], metrics=["bleu"])
    # The limit at W = 4 (η = 1/4) and at W = 2 (η = 1/2); planned: 3, 4 and 4 of 4 tokens, then 2, 2 and 2 of 2.
    assert headed.exposure_limit == pytest.approx(np.mean([0.25 * 0.75 + 0.75**2 / 2 + 0.25, 0.25 + 0.125 + 0.5]))
    assert headed.exposure_planned == pytest.approx((11 / 12 + 1) / 2)
    with pytest.raises(ZendayaError, match=r"clip '0' of split 'test' occurs twice under gamma=1\.0"):
        score([by_hand(), by_hand()], metrics=["bleu"])


# Steps of references, streams, and the time of computing.


def test_references_are_counted_as_the_run_learned_them(model):
    loud = [(dataclasses.replace(clip, references=(clip.references[0].upper() + "!",)), source) for clip, source in make_clips(9)]
    ((as_learned,), (raw,)) = (evaluate(model, loud, Full(), lower=lower) for lower in (True, False))
    assert as_learned.reference_steps == (len(model.tokenizer.encode(TEXTS[0])) + 1,)
    assert raw.reference_steps == (len(model.tokenizer.encode(TEXTS[0].upper() + "!")) + 1,)
    assert raw.reference_steps[0] > 2 * as_learned.reference_steps[0]  # spelled in bytes
    assert as_learned.references == raw.references == (TEXTS[0].upper() + "!",)


def consecutive(*lengths):
    """Clips of one stream, a second apart."""
    start_s = 0.0
    for clip, source in make_clips(*lengths):
        length_s = float(source.arrival_s[-1])
        yield dataclasses.replace(clip, stream="one", start_s=start_s, end_s=start_s + length_s), source
        start_s += length_s + 1


@pytest.mark.parametrize("schedule", [PowerLaw(0.5), LocalAgreement(3)], ids=str)
def test_a_stream_is_one_session_cut_at_the_ends_of_its_clips(schedule):
    model = make_model(history=True)
    clips = list(consecutive(5, 12, 7))
    traces = list(evaluate_streams(model, [clips], DecodeOptions(schedule=schedule, window_tokens=10), scale="window"))
    session = model.open(schedule, window_tokens=10)
    groups = []
    for number, (_, source) in enumerate(clips):
        events = list(session.push(source.values_TE))
        groups.append([*events, *(session.finish() if number == 2 else session.cut())])
    assert [trace.tokens for trace in traces] == [tuple(event.token for event in events) for events in groups]
    assert [set(trace.windows) for trace in traces] == [{0}, {0, 1}, {0}]
    assert [trace.num_source_tokens for trace in traces] == [5, 12, 7]
    assert sum(trace.decoder_rows for trace in traces) == session.cost.rows
    assert sum(trace.revised for trace in traces) == session.cost.revised
    alone = evaluate(model, clips, DecodeOptions(schedule=schedule, window_tokens=10), scale="window")
    assert (traces[0].tokens, traces[0].horizons) == (alone[0].tokens, alone[0].horizons)
    assert traces[1].tokens != alone[1].tokens  # it has a history
    for trace in traces:
        assert trace.emissions_s == trace.delays_s
        assert trace.computing_s is None


class Ticks:
    """A timer by which everything takes a quarter of a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.25
        return self.now


def test_computing_time_is_added_to_the_source_clock(model):
    (trace,) = evaluate(model, make_clips(6), DecodeOptions(schedule=PowerLaw(1), steps=3, max_steps=3), timer=Ticks())
    (free,) = evaluate(model, make_clips(6), DecodeOptions(schedule=PowerLaw(1), steps=3, max_steps=3))
    assert trace.tokens == free.tokens  # the text does not depend on it
    # Tokens come every 0.5 s. By this timer each costs 0.25 s to be taken in, and a step 0.25 s more: step 1 is licensed at 1 s.
    assert trace.delays_s == (1.0, 2.0, 3.0)
    assert trace.emissions_s == trace.computing_s == (1.25, 2.25, 3.25)
    (found,) = score([trace], metrics=["bleu"])
    assert found.latency_s.first_token == 1.0
    assert found.latency_computing_s.first_token == 1.25
    assert found.latency_computing_s.average_lagging == pytest.approx(
        average_lagging((1.25, 2.25, 3.25), source=3, target=trace.reference_steps[0])
    )
    assert score([free], metrics=["bleu"])[0].latency_computing_s is None
    with pytest.raises(ConfigError, match="measured with one worker: got 2"):
        evaluate(model, make_clips(6), PowerLaw(1), timer=Ticks(), workers=2)


def test_a_slow_machine_falls_behind(model):
    class Slow(Ticks):
        def __call__(self):
            self.now += 2.0
            return self.now

    (trace,) = evaluate(model, make_clips(6), DecodeOptions(schedule=PowerLaw(1), steps=3, max_steps=3), timer=Slow())
    # By this timer a token takes 2 s to be taken in, and one that licenses a step 4 s, the step being there after 2; the first is there
    # at 0.5 s.
    assert trace.emissions_s == (0.5 + 2 + 2, 0.5 + 2 + 4 + 2 + 2, 0.5 + 2 + 4 + 2 + 4 + 2 + 2)
    assert trace.delays_s == (1.0, 2.0, 3.0)


# A corpus, through the command line.


@pytest.fixture(scope="module")
def place(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("corpus")
    lines = [{"id": f"{n}", "split": "test", "media": f"{n}.npy", "end_s": 3 + n, "text": text} for n, text in enumerate(TEXTS)]
    (folder / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for n in range(3):  # that of the last is missing
        np.save(folder / f"{n}.npy", np.random.default_rng(n).standard_normal((3 * (3 + n), 16)).astype(np.float32))
    encode_corpus("manifest", folder / "my.jsonl", folder / "store", encoder="features,rate=3")
    model.save_pretrained(folder / "model")
    return folder


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code == 2:  # a mistake that typer finds
        raise ConfigError(" ".join(result.stderr.split()))
    return result


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    """Whatever is written without being told where."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


def words(place, *more):
    return ("evaluate", place / "model", "manifest", place / "my.jsonl", "--store", place / "store", *more)


def test_what_is_not_said_is_where_it_is_expected(place, monkeypatch):
    monkeypatch.delenv("ZENDAYA_DATA", raising=False)
    with pytest.raises(ConfigError, match=r"the corpus manifest needs its folder or file: give PATH$"):
        run("evaluate", place / "model", "manifest")
    with pytest.raises(ConfigError, match="give PATH, or set ZENDAYA_DATA"):
        run("evaluate", place / "model", "msvd")
    monkeypatch.setenv("ZENDAYA_DATA", str(place / "corpora"))
    with pytest.raises(ZendayaError, match=re.escape(str(place / "corpora" / "msvd"))):
        run("evaluate", place / "model", "msvd")
    result = run(*words(place, "--limit", 1))
    assert "evaluated/manifest-test: traces.jsonl and scores.json" in result.stderr
    assert sorted(path.name for path in Path("evaluated/manifest-test").iterdir()) == ["scores.json", "traces.jsonl"]
    with pytest.raises(ZendayaError, match="give another --out, or --force"):
        run(*words(place, "--limit", 1))


def test_the_command_evaluates_and_its_traces_score_the_same(place, tmp_path):
    result = run(*words(place, "--schedule", "0", "--schedule", "0.5", "--metrics", "wer,bleu", "--normalise", "basic", "--out", tmp_path))
    assert result.exit_code == 0
    assert "3 clips, scale segment; lag in source tokens and seconds" in result.stdout
    heads = ["schedule", "WER", "BLEU", "AL", "LAAL", "AP", "DAL", "first", "AL", "s"]
    assert result.stdout.splitlines()[2].split()[:10] == heads
    assert [line.split()[0] for line in result.stdout.splitlines()[3:5]] == ["gamma=0.0", "gamma=0.5"]
    assert "1 clips could not be encoded and are left out" in result.stdout
    record = json.loads((tmp_path / "scores.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scores.json", "traces.jsonl"]
    signature = record["signature"]
    assert len(signature["checkpoint_sha256"]) == len(signature["data_sha256"]) == len(signature["store_sha256"]) == 64
    assert (signature["split"], signature["scale"], signature["num_clips"], signature["num_left_out"]) == ("test", "segment", 3, 1)
    assert signature["store"]["encoder"] == "features dim=16 rate=3 window=0.333333s"
    offline, dial = record["scores"]
    assert offline["exposure"] == offline["exposure_limit"] == 1.0
    assert offline["latency_tokens"]["average_lagging"] == 12  # F is 9, 12 and 15
    assert offline["latency_s"]["first_token"] == pytest.approx(4.0)
    assert dial["latency_tokens"]["first_token"] < 12

    traces, _ = read_traces(tmp_path)
    assert len(traces) == 6
    rows = json.loads(json.dumps([dataclasses.asdict(one) for one in score(traces, metrics=["wer", "bleu"], normalise="basic")]))
    assert rows == [{name: value for name, value in one.items() if name != "signature"} for one in (offline, dial)]
    lines = [one["signature"] for one in (offline, dial)]
    assert lines == [line for line in result.stdout.splitlines() if line.startswith("zendaya:")]
    digests = [signature[name][:8] for name in ("tokenizer_sha256", "checkpoint_sha256", "data_sha256")]
    assert lines[1] == (
        f"zendaya:{signature['version']}|gamma=0.5|scale:segment|tok:{digests[0]}|seed:?|model:{digests[1]}|data:manifest,test,{digests[2]}"
        f"|enc:features dim=16 rate=3 window=0.333333s|clips:3|engine:{signature['engine']}|clock:simulated"
    )
    again = json.loads(run("score", tmp_path, "--json").stdout)  # the same metrics and signature, from beside the traces
    assert again["scores"] == record["scores"]
    assert again["signature"] == {**signature, "scored_by": signature["version"]}
    table = run("score", tmp_path / "traces.jsonl", "--metrics", "bleu-lc", "--out", tmp_path / "other")
    assert "BLEU-lc" in table.stdout
    assert json.loads((tmp_path / "other" / "scores.json").read_text())["scores"][0]["quality"][0]["name"] == "BLEU-lc"


def test_json_scale_and_limit(place):
    result = run(*words(place, "--scale", "window", "--window", 10, "--schedule", "wait-k=2", "--limit", 2, "--json"))
    record = json.loads(result.stdout)
    assert (record["signature"]["window"], record["signature"]["num_clips"], record["signature"]["limit"]) == (10, 2, 2)
    (one,) = record["scores"]
    assert (one["schedule"], one["scale"], one["exposure_limit"]) == ("wait-k=2,stride=1.0", "window", None)
    assert one["quality"][0]["name"] == "BLEU"


def test_policies_are_evaluated_with_their_cost(place, tmp_path):
    policies = ["full", "local-agreement=3", "alignatt=2,chunk=2", "edatt=0.4"]
    flags = [word for policy in policies for word in ("--schedule", policy)]
    result = run(*words(place, *flags, "--out", tmp_path))
    lines = result.stdout.splitlines()
    assert lines[2].split()[-3:] == ["rows", "revised", "NE"]
    full, *others = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert [one["schedule"] for one in others] == ["local-agreement=3", "alignatt=2,chunk=2", "edatt=0.4,last=2"]
    assert full["revised"] == full["normalised_erasure"] == 0
    for one, line in zip(others, lines[4:7], strict=True):
        assert one["decoder_rows"] > full["decoder_rows"] / full["steps"] * one["steps"]
        assert one["latency_tokens"]["average_lagging"] < full["latency_tokens"]["average_lagging"]
        assert one["exposure_limit"] is None
        assert line.split()[-3:] == [f"{one['decoder_rows']:.1f}", f"{one['revised']:.1f}", f"{one['normalised_erasure']:.2f}"]
    assert json.loads(run("score", tmp_path, "--json").stdout)["scores"] == [full, *others]
    traces = [trace for trace in read_traces(tmp_path)[0] if trace.schedule == "local-agreement=3"]
    assert others[0]["normalised_erasure"] == pytest.approx(sum(trace.revised / len(trace.tokens) for trace in traces) / len(traces))
    assert others[0]["normalised_erasure"] > 0
    trace = read_traces(tmp_path)[0][0]
    clips = [(trace.clip, torch.from_numpy(np.load(place / f"{trace.clip}.npy")))]
    session = Model.from_pretrained(place / "model").open(Full(), window_tokens=len(clips[0][1]))
    events = [*session.push(clips[0][1]), *session.finish()]
    assert (trace.decoder_rows, trace.revised, len(trace.tokens)) == (session.cost.rows, 0, len(events))


def test_a_translation_is_read_as_ids(tmp_path):
    lines = [{"id": f"{n}", "split": "test", "source": text, "text": text[::-1]} for n, text in enumerate(TEXTS)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = Tokenizer.train(TEXTS, 280)
    (tmp_path / "source.json").write_text(source.to_json())
    encode_corpus("manifest", tmp_path / "my.jsonl", tmp_path / "store", encoder=f"text:{tmp_path / 'source.json'}")
    make_model(source_dim=1, source_vocab=source.vocab_size).save_pretrained(tmp_path / "model")
    found = evaluate_corpus(
        tmp_path / "model", "manifest", tmp_path / "my.jsonl",
        EvalOptions(store=tmp_path / "store", schedules=[PowerLaw(0), WaitK(1)], metrics=["bleu"]),
    )  # fmt: skip
    assert [trace.references for trace in found.traces[:4]] == [(text[::-1],) for text in TEXTS]
    assert [trace.num_source_tokens for trace in found.traces[:4]] == [len(source.encode(text)) for text in TEXTS]
    assert all(one.latency_s is None for one in found.scores)
    assert found.scores[1].latency_tokens.first_token == 1
    make_model().save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"reads 16 features per token, .* holds 1 ids: they do not fit"):
        evaluate_corpus(tmp_path / "other", "manifest", tmp_path / "my.jsonl", EvalOptions(store=tmp_path / "store"))


def test_options_that_do_not_fit_are_refused_first(place, tmp_path):
    out = tmp_path / "out"
    for more, error, message in (
        (("--split", "dev"), CorpusError, "no clip with a source and a text in split 'dev': expected one of test"),
        (("--schedule", "-1"), ZendayaError, "gamma must be finite and at least 0"),
        (("--schedule", "1", "--schedule", "gamma=1"), ConfigError, "give each schedule once"),
        (("--metrics", "rouge"), ZendayaError, "unknown metric 'rouge'"),
        (("--metrics", ","), ZendayaError, "at least one metric"),
        (("--scale", "clip"), ConfigError, "--scale.*clip"),
        (("--window", 3), ConfigError, "scale segment sets"),
        (("--store", tmp_path), StoreError, "not a feature store"),
    ):
        with pytest.raises(error, match=message):
            run(*words(place, *more), "--out", out)
    assert not (out / "traces.jsonl").exists()
    make_model(source_dim=5).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"reads 5 features per token, .* holds 16 features: they do not fit"):
        evaluate_corpus(tmp_path / "model", "manifest", place / "my.jsonl", EvalOptions(store=place / "store"))
    (tmp_path / "my.jsonl").write_text((place / "my.jsonl").read_text().replace("guitar", "drum"))
    with pytest.raises(StoreError, match="encoded from other files than"):
        evaluate_corpus(place / "model", "manifest", tmp_path / "my.jsonl", EvalOptions(store=place / "store"))


def test_damaged_traces_are_refused(tmp_path):
    file = tmp_path / "traces.jsonl"
    good = dataclasses.asdict(by_hand())
    for data, message in (
        (None, "cannot be read"),
        ("", "holds no traces"),
        ("{", "traces.jsonl:1: not JSON"),
        ("[]", "not a trace of this version"),
        (json.dumps({**good, "window_tokens": "4"}), "window_tokens: expected int: got '4'"),
        (json.dumps({**good, "tokens": [1.5]}), "tokens.*: expected int: got 1.5"),
        (json.dumps({**good, "arrivals_s": "1"}), r"arrivals_s: expected array \| null: got '1'"),
        (json.dumps({**good, "schedule": "none"}), r"traces\.jsonl:1: schedule: not a schedule: 'none'; expected .*; evaluate again"),
        (json.dumps({**good, "schedule": "gamma=1e999"}), r"traces\.jsonl:1: schedule: gamma must be finite"),
        (json.dumps({**good, "schedule": "local-agreement=oops"}), r"traces\.jsonl:1: schedule: not a policy: 'local-agreement=oops'"),
        (json.dumps({**good, "decoder_rows": -1}), "contradicts itself: decoder_rows and revised must be at least 0"),
        (json.dumps({**good, "arrived": [1]}), "contradicts itself"),
        (json.dumps({**good, "effective_horizons": [2, 3, 5]}), "contradicts itself"),
        (json.dumps({**good, "arrivals_s": [1.0]}), "contradicts itself"),
        (json.dumps({**good, "arrivals_s": [0.5, 1.0, 1.5, float("nan")]}), "contradicts itself"),
        (json.dumps({**good, "emissions_s": [1.0]}), "contradicts itself"),
        (json.dumps(good) + "\n" + json.dumps({**good, "text": "a \ud800 b"}), r"traces\.jsonl:2: text holds a lone surrogate"),
        (json.dumps({**good, "references": ["a \udc00"]}), r"traces\.jsonl:1: references holds a lone surrogate"),
        (
            json.dumps({**good, "arrivals_s": [10**400] * 4}),
            r"traces\.jsonl:1: arrivals_s must lie below 2\*\*53: got a number of 1329 bits",
        ),
        (json.dumps({**good, "reference_steps": [10**400]}), r"traces\.jsonl:1: reference_steps must lie below 2\*\*53"),
        (json.dumps({**good, "predicted_steps": [10**9]}), r"traces\.jsonl:1: .* contradicts itself: predicted_steps and reference_steps"),
        (
            json.dumps({**good, "reference_steps": [3, 4]}),
            "contradicts itself: reference_steps must be empty or one per reference, 1, got 2",
        ),
        (json.dumps({**good, "arrived": [1, 3, 4]}), "contradicts itself: effective_horizons must not exceed arrived"),
        (json.dumps({**good, "arrived": [4, 3, 4]}), "contradicts itself: arrived must lie in 1 … 4 and never go back"),
        (json.dumps({**good, "horizons": [-1, 3, 4]}), "contradicts itself: horizons of window 0 must lie in 0 … 4 and never decrease"),
        (json.dumps({**good, "horizons": [2, 3, 5]}), "contradicts itself: horizons of window 0 must lie in 0 … 4"),
        (json.dumps({**good, "horizons": [3, 2, 4]}), "contradicts itself: horizons of window 0 must .* never decrease"),
        (
            json.dumps({**good, "effective_horizons": [2, 1, 4]}),
            "contradicts itself: effective_horizons of window 0 must .* never decrease",
        ),
        (json.dumps({**good, "horizons": [1, 3, 4]}), "contradicts itself: effective_horizons of window 0 must not exceed its horizons"),
        (json.dumps({**good, "arrivals_s": [0.5, 1.0, 0.9, 2.0]}), "contradicts itself: arrivals_s must be at least 0 and never go back"),
        (json.dumps({**good, "arrivals_s": [-0.5, 1.0, 1.5, 2.0]}), "contradicts itself: arrivals_s must be at least 0"),
        (json.dumps(good) + "\n" + json.dumps(good)[:200], "traces.jsonl:2: not JSON: the file is damaged"),
    ):
        if data is not None:
            file.write_text(data)
        with pytest.raises(ZendayaError, match=message):
            run("score", tmp_path)
    file.write_text(json.dumps(good))
    assert read_traces(file)[0] == [by_hand()]
    file.write_text(json.dumps({key: value for key, value in good.items() if key not in ("decoder_rows", "revised", "emissions_s")}))
    assert read_traces(file)[0] == [by_hand()]  # from before costs were counted


@pytest.mark.parametrize(
    "name", ["0", "0.5,floor", "full", "wait-k=2,stride=2", "custom=0,0,3,9", "local-agreement=3", "alignatt=2", "edatt=0.4"]
)
@pytest.mark.parametrize("changes", [{}, {"history": True}, {"end_means_wait": True}, {"length": "fix"}], ids=str)
def test_written_traces_are_read_back(name, changes, tmp_path):
    model, schedule = make_model(**changes), parse_policy(name)
    traces = evaluate(model, make_clips(1, 7, 50), schedule)
    write_traces(tmp_path, traces)
    assert read_traces(tmp_path)[0] == traces
    streamed = list(
        evaluate_streams(
            model, [list(consecutive(5, 25, 10, 1))], DecodeOptions(schedule=schedule, window_tokens=10), scale="window", timer=Ticks()
        )
    )
    write_traces(tmp_path, streamed)
    assert read_traces(tmp_path)[0] == streamed


# Nothing is overwritten, nothing is lost, and what does not fit is said.


def test_results_are_replaced_by_force_alone(place, tmp_path):
    run(*words(place, "--out", tmp_path))
    before = (tmp_path / "traces.jsonl").read_bytes(), (tmp_path / "scores.json").read_bytes()
    with pytest.raises(ZendayaError, match=r"already holds traces.jsonl and scores.json: give another --out, or --force"):
        run(*words(place, "--schedule", "1", "--out", tmp_path))
    with pytest.raises(ZendayaError, match=r"already holds scores.json: give another --out, or --force"):
        run("score", tmp_path, "--metrics", "wer", "--out", tmp_path)
    assert ((tmp_path / "traces.jsonl").read_bytes(), (tmp_path / "scores.json").read_bytes()) == before
    run("score", tmp_path, "--metrics", "wer", "--out", tmp_path, "--force")
    assert (tmp_path / "traces.jsonl").read_bytes() == before[0]
    assert json.loads((tmp_path / "scores.json").read_text())["scores"][0]["quality"][0]["name"] == "WER"
    run(*words(place, "--schedule", "1", "--out", tmp_path, "--force"))
    assert {trace.schedule for trace in read_traces(tmp_path)[0]} == {"gamma=1.0"}


def test_an_interrupted_evaluation_resumes(place, tmp_path, monkeypatch):
    options = {"store": place / "store", "schedules": [PowerLaw(0), PowerLaw(1)], "metrics": ["bleu"]}
    whole = evaluate_corpus(place / "model", "manifest", place / "my.jsonl", EvalOptions(out=tmp_path / "whole", **options))
    decoded = []

    def stop(progress):
        decoded.append((progress.stage, progress.done))
        if (progress.stage, progress.done) == ("gamma=1.0", 1):
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        evaluate_corpus(place / "model", "manifest", place / "my.jsonl", EvalOptions(out=out, **options), report=stop)
    assert [path.name for path in out.iterdir()] == ["traces.unfinished.jsonl"]
    file = out / "traces.unfinished.jsonl"
    assert len(file.read_text().splitlines()) == 1 + 3 + 1
    file.write_bytes(file.read_bytes() + b'{"clip": "1", "spl')  # killed in the middle of a line
    with pytest.raises(ZendayaError, match=r"holds an unfinished evaluation whose max_steps is None, not 3: resume that one, give another"):
        evaluate_corpus(place / "model", "manifest", place / "my.jsonl", EvalOptions(out=out, max_steps=3, **options))
    decoded.clear()
    again = evaluate_corpus(
        place / "model", "manifest", place / "my.jsonl", EvalOptions(out=out, **options),
        lambda one: decoded.append((one.stage, one.done)),
    )  # fmt: skip
    assert decoded == [("gamma=0.0", 3), ("gamma=1.0", 1), ("gamma=1.0", 2), ("gamma=1.0", 3)]
    assert again == whole
    assert sorted(path.name for path in out.iterdir()) == ["scores.json", "traces.jsonl"]
    for name in ("traces.jsonl", "scores.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_streaming_reads_consecutive_clips(tmp_path):
    lines = [
        {
            "id": f"{n}",
            "split": "test",
            "media": f"{n}.npy",
            "stream": "a" if n < 3 else "b",
            "start_s": 4 * n,
            "media_start_s": 4 * n,
            "end_s": 4 * n + 3,
            "text": text,
        }
        for n, text in enumerate(TEXTS)
    ]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for n in range(4):
        np.save(tmp_path / f"{n}.npy", np.random.default_rng(n).standard_normal((9, 16)).astype(np.float32))
    encode_corpus("manifest", tmp_path / "my.jsonl", tmp_path / "features", encoder="features,rate=3")
    model = make_model(history=True)
    model.save_pretrained(tmp_path / "model")
    command = ("evaluate", tmp_path / "model", "manifest", tmp_path / "my.jsonl", "--schedule", "0.5")  # the store beside the checkpoint
    record = json.loads(run(*command, "--streaming", "--computation-aware", "--out", tmp_path / "out", "--json").stdout)
    (row,) = record["scores"]
    assert "|gamma=0.5|scale:window,W=24,consecutive|" in row["signature"]
    assert row["signature"].endswith(f"|clips:4|engine:{engine_name(model)}|clock:computing")
    assert row["latency_computing_s"]["first_token"] > row["latency_s"]["first_token"]
    assert " ca " in run("score", tmp_path / "out").stdout
    traces, _ = read_traces(tmp_path / "out")
    assert [trace.clip for trace in traces] == ["0", "1", "2", "3"]
    session = model.open(PowerLaw(0.5))
    expected = []
    for n in range(3):
        events = list(session.push(np.load(tmp_path / f"{n}.npy")))
        expected.append([event.token for event in [*events, *(session.finish() if n == 2 else session.cut())]])
    assert [list(trace.tokens) for trace in traces[:3]] == expected
    offline = json.loads(run(*command, "--offline", "--json").stdout)
    assert offline["scores"][0]["scale"] == "segment"
    with pytest.raises(ConfigError, match="streaming needs scale window"):
        run(*command, "--streaming", "--scale", "segment")


def test_the_training_run_is_in_the_signature(place, tmp_path, model):
    model.save_pretrained(tmp_path / "run" / "best")
    (tmp_path / "run" / "recipe.json").write_text(json.dumps({"recipe": {"lower": True, "loop": {"seed": 7}}}))
    (tmp_path / "my.jsonl").write_text((place / "my.jsonl").read_text().upper().replace('"ID"', '"id"'))
    options = EvalOptions(store=place / "store", metrics=["bleu"])
    record = evaluate_corpus(tmp_path / "run" / "best", "manifest", place / "my.jsonl", options).record
    assert "|seed:7|" in record["scores"][0]["signature"]
    assert ",lower|" in record["scores"][0]["signature"]
    assert record["signature"]["seed"] == 7
    with pytest.raises(StoreError, match=r"no features beside the checkpoint: give the store"):
        evaluate_corpus(tmp_path / "run" / "best", "manifest", place / "my.jsonl")


def test_a_corpus_without_references_is_refused(place, tmp_path):
    lines = [{"id": f"{n}", "split": "test", "source": text, "references": []} for n, text in enumerate(TEXTS)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CorpusError, match="manifest: none of the 4 clips of split 'test' has a reference to score against"):
        run("evaluate", place / "model", "manifest", tmp_path / "my.jsonl", "--store", place / "store", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_truncated_traces_are_not_scored(place, tmp_path):
    run(*words(place, "--schedule", "0.5", "--metrics", "wer", "--out", tmp_path))
    lines = (tmp_path / "traces.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "traces.jsonl").write_bytes(b"".join(lines[:-1]))
    for command in (("score", tmp_path), ("compare", tmp_path, tmp_path)):
        with pytest.raises(ZendayaError, match=r"not the traces that .*scores\.json was made from"):
            run(*command)
    (tmp_path / "scores.json").unlink()
    assert json.loads(run("score", tmp_path, "--metrics", "wer", "--json").stdout)["scores"][0]["num_clips"] == 2


def test_a_missing_engine_is_refused_before_writing(place, tmp_path):
    with pytest.raises(ConfigError, match="int8"):
        run(*words(place, "--engine", "torch", "--precision", "int8", "--workers", "2", "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_discard_drops_another_unfinished_evaluation(place, tmp_path):
    def decode(**options):
        where = (place / "model", "manifest", place / "my.jsonl")
        chosen = EvalOptions(store=place / "store", schedules=[PowerLaw(0.5)], metrics=["bleu"], out=tmp_path, **options)
        return evaluate_corpus(*where, chosen)

    decode()
    traces = (tmp_path / "traces.jsonl").read_bytes()
    for name in ("traces.jsonl", "scores.json"):
        (tmp_path / name).unlink()
    (tmp_path / "traces.unfinished.jsonl").write_bytes(json.dumps({"version": "0.0.1"}).encode() + b"\n" + traces)
    with pytest.raises(ZendayaError, match="unfinished evaluation whose"):
        decode()
    decode(discard=True)
    assert (tmp_path / "traces.jsonl").read_bytes() == traces


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_both_engines_decode_the_same(place, tmp_path):
    found = {}
    for name, precision in (("torch", "float32"), ("native float32", "float32"), ("native int8", "int8")):
        more = ("--schedule", "0.5", "--schedule", "local-agreement=3", "--engine", name.split()[0], "--precision", precision)
        record = json.loads(run(*words(place, *more, "--metrics", "bleu", "--out", tmp_path / name, "--json")).stdout)
        assert record["signature"]["engine"] == name
        found[name] = [trace.tokens for trace in read_traces(tmp_path / name)[0]]
    assert found["torch"] == found["native float32"]
    assert all(found["native int8"])
    for wrong in (("--engine", "torch", "--precision", "int8"), ("--engine", "gpu"), ("--precision", "int4")):
        with pytest.raises(ConfigError, match=wrong[-1]):
            run(*words(place, *wrong))


# Mistakes that can be known beforehand cost nothing that is there.


def copied(place, folder, lines):
    """The corpus with other lines, encoded."""
    for n in range(4):
        np.save(folder / f"{n}.npy", np.random.default_rng(n).standard_normal((9, 16)).astype(np.float32))
    (folder / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    encode_corpus("manifest", folder / "my.jsonl", folder / "store", encoder="features,rate=3")
    return ("evaluate", place / "model", "manifest", folder / "my.jsonl", "--store", folder / "store", "--out", folder / "out")


def held(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("references", "message"),
    [
        (["a man", "a dog"], r"manifest, split 'test': the word error rate takes one reference per clip: got 2; use bleu or meteor"),
        (["[noise]"], r"manifest, split 'test': the word error rate needs a reference word: got none in 4 references after 'english'"),
    ],
)
def test_wer_refuses_references_before_replacing_scores(place, tmp_path, references, message):
    lines = [{"id": f"{n}", "split": "test", "media": f"{n}.npy", "end_s": 3, "references": references} for n in range(4)]
    command = copied(place, tmp_path, lines)
    run(*command, "--metrics", "bleu")
    before = held(tmp_path / "out")
    with pytest.raises(CorpusError, match=message):
        run(*command, "--schedule", "1", "--metrics", "wer", "--force")
    assert held(tmp_path / "out") == before


def test_a_failing_score_keeps_the_traces(place, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ZendayaError("no Java")

    monkeypatch.setattr("zendaya.evaluation.corpus.score", fail)
    with pytest.raises(ZendayaError) as caught:
        run(*words(place, "--metrics", "bleu,wer", "--out", tmp_path))
    assert str(caught.value) == (
        f"no Java; the traces are kept: score them with zendaya score {tmp_path} --metrics bleu,wer, or with other metrics"
    )
    assert list(held(tmp_path)) == ["traces.jsonl"]
    assert run("score", tmp_path, "--metrics", "bleu,wer").exit_code == 0


def test_clips_without_a_reference_are_counted(place, tmp_path):
    lines = [{"id": f"{n}", "split": "test", "media": f"{n}.npy", "end_s": 3, "references": TEXTS[: n % 2]} for n in range(4)]
    command = copied(place, tmp_path, lines)
    stdout = run(*command).stdout
    assert f"2 clips have no reference and are left out: see {tmp_path / 'my.jsonl'}" in stdout
    assert "could not be encoded" not in stdout
    signature = json.loads((tmp_path / "out" / "scores.json").read_text())["signature"]
    assert (signature["num_clips"], signature["num_left_out"], signature["num_without_reference"]) == (2, 0, 2)
    limited = json.loads(run(*command, "--limit", 1, "--force", "--json").stdout)["signature"]
    assert (limited["num_clips"], limited["num_without_reference"]) == (1, 1)  # what comes after the last is not looked at


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--steps", 0), "steps must lie in 1 … 12 for this model: got 0"),
        (("--steps", 100000000), "steps must lie in 1 … 12 for this model: got 100000000"),
        (("--max-steps", 0), "max_steps must lie in 1 … 12 for this model: got 0"),
        (("--scale", "window", "--window", 0), "window must lie in 1 … 24 source tokens for this model: got 0"),
        (("--scale", "window", "--window", 100000), "window must lie in 1 … 24 source tokens for this model: got 100000"),
        (("--schedule", "0", "--schedule", "learned"), "no gamma head"),
        (("--schedule", "alignatt=4,layer=9"), "the policy looks at layer 9"),
        (("--normalise", "klingon", "--metrics", "bleu"), "--normalise.*klingon"),
    ],
)
def test_impossible_sessions_are_refused_before_writing(place, tmp_path, more, message):
    with pytest.raises(ZendayaError, match=message):
        run(*words(place, *more, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_one_line_signature_tells_fixed_steps_apart(place):
    def line(*more):
        return json.loads(run(*words(place, *more, "--metrics", "bleu", "--force", "--json")).stdout)["scores"][0]["signature"]

    assert "|scale:segment|steps:3|max_steps:3|tok:" in line("--steps", 3, "--max-steps", 3)
    assert "|scale:segment|steps:6|tok:" in line("--steps", 6)
    assert "steps:" not in line()


def test_the_encoder_is_in_the_one_line_signature():
    (found,) = score([by_hand()], metrics=["bleu"])
    assert "|enc:?|clips:1|" in one_line(found, {})
    assert "|enc:whisper tiny.en,c4489780|" in one_line(
        found, {"store": {"encoder": "whisper tiny.en", "encoder_digest": "c448978094e7e1ef3b0b"}}
    )


def interrupted(place, out, **options):
    """An evaluation that ended after its first clip, and the clips that the same one has to start from."""

    def stop(progress):
        if progress.done:
            raise KeyboardInterrupt

    def decode(report=lambda _: None, **more):
        given = {"store": place / "store", "metrics": ["bleu"], "out": out, **options, **more}
        return evaluate_corpus(place / "model", "manifest", place / "my.jsonl", EvalOptions(**given), report)

    with pytest.raises(KeyboardInterrupt):
        decode(stop)
    return decode


def test_force_replaces_finished_and_resumes_unfinished(place, tmp_path):
    done = []
    interrupted(place, tmp_path)(lambda progress: done.append(progress.done), force=True)
    assert done == [1, 2, 3]
    interrupted(place, tmp_path, force=True)
    assert sorted(held(tmp_path)) == ["scores.json", "traces.jsonl", "traces.unfinished.jsonl"]
    done.clear()
    evaluate_corpus(
        place / "model", "manifest", place / "my.jsonl",
        EvalOptions(store=place / "store", metrics=["bleu"], max_steps=3, out=tmp_path, force=True),
        lambda progress: done.append(progress.done),
    )  # fmt: skip
    assert done == [0, 1, 2, 3]  # it was another
    assert sorted(held(tmp_path)) == ["scores.json", "traces.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff\xfe\n", r"traces\.unfinished\.jsonl:3: not UTF-8: the file is damaged; remove it, or evaluate with --force"),
        (b"{}\n", r"traces\.unfinished\.jsonl:3: not a trace of this version.* --force"),
    ],
)
def test_a_damaged_unfinished_file_is_replaced_by_force(place, tmp_path, line, message):
    decode = interrupted(place, tmp_path)
    file = tmp_path / "traces.unfinished.jsonl"
    file.write_bytes(file.read_bytes() + line)
    with pytest.raises(ZendayaError, match=message):
        decode()
    decode(force=True)
    assert sorted(held(tmp_path)) == ["scores.json", "traces.jsonl"]


def test_an_unfinished_file_that_is_not_text_is_refused(place, tmp_path):
    (tmp_path / "traces.unfinished.jsonl").write_bytes(b"\xff\xfe\n\xff\n")
    with pytest.raises(
        ZendayaError, match=r"traces\.unfinished\.jsonl:1: damaged: expected the signature of an evaluation; remove the file"
    ):
        run(*words(place, "--out", tmp_path))


def test_a_file_in_place_of_a_folder_is_refused(place, tmp_path):
    run(*words(place, "--out", tmp_path / "out"))
    message = r"my\.jsonl: is a file; expected a folder, existing or new, for {}; give another --out"
    with pytest.raises(ZendayaError, match=message.format(r"traces\.jsonl and scores\.json")):
        run(*words(place, "--out", place / "my.jsonl", "--force"))
    with pytest.raises(ZendayaError, match=message.format(r"scores\.json")):
        run("score", tmp_path / "out", "--out", place / "my.jsonl")
    with pytest.raises(ZendayaError, match=r"my\.jsonl: is a file; expected a folder"):
        run(*words(place, "--out", place / "my.jsonl" / "out"))


def test_an_unknown_corpus_is_named_without_a_folder(place):
    with pytest.raises(ZendayaError, match="no corpus is called 'nosuch'; expected one of"):
        run("evaluate", place / "model", "nosuch")


def test_metrics_are_taken_once(place, tmp_path):
    lines = run(*words(place, "--metrics", "bleu,wer,bleu", "--out", tmp_path)).stdout.splitlines()
    assert lines[2].split()[:4] == ["schedule", "BLEU", "WER", "AL"]
    found = evaluate_corpus(place / "model", "manifest", place / "my.jsonl", EvalOptions(store=place / "store", metrics=["bleu", "bleu"]))
    assert [one.name for one in found.scores[0].quality] == ["BLEU"]
    assert found.record["signature"]["metrics"] == ["bleu"]


def test_groups_of_different_sizes_say_theirs_by_row(tmp_path):
    traces = [by_hand(), by_hand(clip="1"), by_hand(schedule="wait-k=2,stride=1.0")]
    write_traces(tmp_path, traces)
    lines = run("score", tmp_path, "--metrics", "bleu").stdout.splitlines()
    assert lines[0] == "scale segment; lag in source tokens and seconds"
    assert [line.split()[:2] for line in lines[2:5]] == [["schedule", "clips"], ["gamma=1.0", "2"], ["wait-k=2,stride=1.0", "1"]]
    write_traces(tmp_path, [*traces, by_hand(scale="window")])
    lines = run("score", tmp_path, "--metrics", "bleu").stdout.splitlines()
    assert lines[0] == "clips and scale by row; lag in source tokens and seconds"
    assert [line.split()[:3] for line in lines[3:6]] == [
        ["gamma=1.0", "2", "segment"],
        ["wait-k=2,stride=1.0", "1", "segment"],
        ["gamma=1.0", "1", "window"],
    ]
