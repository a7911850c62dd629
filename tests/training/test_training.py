"""Training as a whole: what is learned, what is masked, and that a stopped run leaves no trace."""

import dataclasses
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

import zendaya
from zendaya.audit import audit
from zendaya.data.features.encode import encode_corpus
from zendaya.data.features.options import EncodeOptions
from zendaya.data.features.store import FeatureStore
from zendaya.errors import CheckpointError, ConfigError, StoreError
from zendaya.nn.config import DecoderConfig, ModelConfig
from zendaya.nn.model import Model
from zendaya.nn.tokenizer import learned_text
from zendaya.research import recipes
from zendaya.schedule import PowerLaw, WaitK, parse_schedule
from zendaya.training import state as saved_state
from zendaya.training.buckets import plan
from zendaya.training.loop import LoopConfig, learning_rate, run
from zendaya.training.schedule_sampler import ScheduleSampler, parse_training_schedule
from zendaya.training.train import TrainConfig, train

WORDS = ("a man", "a dog", "runs", "sings", "in the rain", "at home", "slowly", "again")


def tiny_model(**changes):
    decoder = DecoderConfig(
        vocab_size=320,
        source_dim=6,
        max_source=16,
        max_rows=61,
        dim=64,
        layers=2,
        heads=2,
        head_dim=32,
        ffn_dim=128,
        norm="pre",
        dropout=0.0,
    )
    return ModelConfig(
        **{"decoder": decoder, "window_tokens": 16, "max_steps": 30, "length": "fix", "length_hidden": 64, "history": False} | changes
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Sixteen clips of two streams in each split: random features, and a text each that only they tell."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    lines = []
    for split in ("train", "valid"):
        for number in range(16):
            name, length = f"{split}{number}", int(rng.integers(5, 17))
            np.save(folder / f"{name}.npy", rng.standard_normal((length, 6)).astype(np.float32))
            text = " ".join(rng.choice(WORDS, 4))
            start = 10.0 * (number % 8)
            lines.append({
                "id": name, "split": split, "stream": f"{split}-{number // 8}", "media": f"{name}.npy", "start_s": start,
                "end_s": start + length / 3, "media_start_s": start, "text": text,
            })  # fmt: skip
    (folder / "clips.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "clips.jsonl"


@pytest.fixture
def recipe():
    """A recipe for that corpus; `change(loop=…, schedule=…)` gives another."""

    def make(schedule=None, form="fix", loop=None, **changes):
        settings = {"epochs": 2, "batch_tokens": 120, "learning_rate": 3e-3, "warmup_steps": 5, "log_every": 1}
        config = TrainConfig(
            name="toy", corpus="manifest", folder="", encoder="features,rate=3", model=tiny_model(), schedule=PowerLaw(0.5), form=form,
            scale="window" if form == "inf" else "segment", vocab_size=320, loop=LoopConfig(**settings | (loop or {})), **changes,
        )  # fmt: skip
        return config if schedule is None else config.with_schedule(schedule)

    return make


def with_dropout(config, dropout):
    decoder = dataclasses.replace(config.model.decoder, dropout=dropout)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, decoder=decoder))


KINDS = {
    "fix": ("fix", PowerLaw(0.5)),
    "inf": ("inf", PowerLaw(0.5)),
    "causal": ("causal", PowerLaw(0.5)),
    "wait-k": ("fix", WaitK(3)),
    "offline": ("fix", PowerLaw(0.0)),
    "dial": ("fix", ScheduleSampler(wait_k=0.2)),
    "inf dial": ("inf", ScheduleSampler()),
}


def history(folder, kind="epoch"):
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def weights(folder):
    return Model.from_pretrained(folder).state_dict()


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def overfitted(corpus, tmp_path_factory):
    """A run of a kind to the end of what sixteen clips can teach."""
    runs = {}

    def run(kind):
        if kind not in runs:
            form, schedule = KINDS[kind]
            out = tmp_path_factory.mktemp("runs") / kind.replace(" ", "-")
            config = _recipe(form, schedule)
            train(config, data=corpus, out=out)
            runs[kind] = out
        return runs[kind]

    return run


def _recipe(form, schedule):
    settings = LoopConfig(epochs=40, batch_tokens=60, learning_rate=5e-3, warmup_steps=10, patience=40, weight_decay=0.0, log_every=1000)
    return TrainConfig(
        name="overfit", corpus="manifest", folder="", encoder="features,rate=3", model=tiny_model(), schedule=schedule, form=form,
        scale="window" if form == "inf" else "segment", vocab_size=320, loop=settings,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["fix", "causal", "inf", "wait-k"])
def test_sixteen_clips_are_learned_by_heart(overfitted, kind):
    first, *_, last = history(overfitted(kind))
    assert first["train_nll"] > 1.0
    assert last["train_nll"] < 0.05


@pytest.mark.parametrize("kind", ["fix", "inf", "wait-k"])
def test_what_was_learned_by_heart_is_written_again(overfitted, corpus, kind):
    out = overfitted(kind)
    model = Model.from_pretrained(out / "last")
    signature = json.loads((out / "recipe.json").read_text())
    schedule, store = parse_schedule(signature["schedule"]), FeatureStore.open(out / "features")
    texts = {line["id"]: line for line in map(json.loads, corpus.read_text().splitlines())}
    right = total = 0
    for name in ("train0", "train8"):  # the first of their streams: no history
        source_FE, text = store.get(name, "train").values_TE, texts[name]["text"]
        window = 16 if kind == "inf" else source_FE.shape[0]
        steps = len(model.tokenizer.encode(text)) + 1
        session = model.open(schedule, window_tokens=window, steps=steps)
        events = [*session.push(source_FE), *session.finish()]
        written = "".join(event.text for event in events).replace("[EOS]", "")
        right += written == text
        total += 1
    assert right == total


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_checkpoint_passes_the_audit(overfitted, kind):
    model = Model.from_pretrained(overfitted(kind) / "best")
    schedules = [PowerLaw(0.0), PowerLaw(0.3), PowerLaw(1.5), PowerLaw(1, head=2), WaitK(3, 0.5)] if "dial" in kind else [KINDS[kind][1]]
    for schedule in schedules:
        if model.length is None and schedule.needs_length:
            continue
        report = audit(model, schedule, cuts=1, max_steps=12)
        assert report.passed, report.first


# The loss, against the obvious.


def reference(model, source_FE, ids, schedule_at, past):
    """Negative log-likelihood of a text, one step at a time, each on the source it may read and nothing else."""
    decoder, frame = model.decoder, model.config.framing
    total = 0.0
    for step, target in enumerate([*ids, frame.end], start=1):
        cache = decoder.start()
        if past is not None:
            previous_GE, previous_ids = past
            decoder.read(cache, previous_GE[None])
            decoder.prefill(cache, torch.tensor([[frame.previous, *previous_ids]]), previous_GE.shape[0])
            cache.forget_source()
        logits = None
        for row in range(1, step + 1):  # rows before this one keep the horizons they had
            horizon = schedule_at(row)
            decoder.read(cache, source_FE[None, cache.num_source : horizon])
            token = frame.prompt[0] if row == 1 else ids[row - 2]
            logits = (
                decoder.prefill(cache, torch.tensor([[token]]), horizon)
                if row == 1
                else decoder.step(cache, torch.tensor([token]), horizon)
            )
        total -= float(torch.log_softmax(logits[0].double(), -1)[target])
    return total


def ceiling(number):
    return -(-number.numerator // number.denominator)


@pytest.mark.parametrize("form", ["fix", "inf"])
@pytest.mark.parametrize("schedule", [PowerLaw(1), PowerLaw(2), PowerLaw(0), PowerLaw(1, head=2), WaitK(2, 0.75)], ids=str)
def test_loss_and_horizons_are_those_of_a_slow_reference(form, schedule, corpus, tmp_path, recipe):
    from zendaya.data.corpora import registry as corpora
    from zendaya.training.decoding import DecodingTask
    from zendaya.training.prepare import make_examples, prepare_features, train_tokenizer

    config = recipe(schedule=schedule, form=form)
    reading = corpora.read("manifest", corpus)
    store = prepare_features(config, corpus, tmp_path / "features", reading.digest, None)
    tokenizer = train_tokenizer(config, reading.usable)
    examples, _ = make_examples(config, reading, store, tokenizer, None)
    model = Model(config.model, tokenizer).eval()
    width = 16 if form == "inf" else None
    task = DecodingTask(model, store, examples, config, rho=0.75)
    indices = [0, 3, 9]
    assert (form == "inf") == any(examples["train"][index].before is not None for index in indices)
    with torch.no_grad():
        sums = task.module(task.collate("train", indices, np.random.default_rng(0)))
        expected = length = 0.0
        for example in (examples["train"][index] for index in indices):
            source_FE = store.get(example.window.clip, "train").values_TE
            source, steps = width or source_FE.shape[0], len(example.window.ids) + 1

            def at(step, source=source, steps=steps, arrived=source_FE.shape[0]):
                if isinstance(schedule, WaitK):
                    return min(source, 2 + math.ceil(Fraction(3, 4) * (step - 1)), arrived)
                return min(schedule.head + ceiling(source * Fraction(step, steps) ** int(schedule.gamma)), source, arrived)

            past = None
            if example.before is not None:
                past = (store.get(example.before.clip, "train").values_TE, example.before.ids)
            expected += reference(model, source_FE, list(example.window.ids), at, past)
            if model.length is not None:
                first = schedule.head + ceiling(16 * Fraction(1, 30) ** int(schedule.gamma))
                buffer = source_FE.shape[0] if form == "fix" else min(source_FE.shape[0], first)
                history = model.pack_history([past])
                logits = model.length_logits(source_FE[None], torch.tensor([buffer]), history)
                length -= float(torch.log_softmax(logits[0], -1)[steps - 1])
    assert float(sums["nll"]) == pytest.approx(expected, rel=1e-5)
    assert task.counts("train", indices)["nll"] == sum(len(examples["train"][index].window.ids) + 1 for index in indices)
    assert ("length" in sums) == (not isinstance(schedule, WaitK))
    if "length" in sums:
        assert float(sums["length"]) == pytest.approx(length, rel=1e-5)


def test_a_pace_head_serves_clips_of_any_length(corpus, tmp_path, recipe):
    from zendaya.data.corpora import registry as corpora
    from zendaya.training.decoding import DecodingTask
    from zendaya.training.prepare import make_examples, prepare_features, train_tokenizer

    config = recipe(schedule=PowerLaw(1), form="causal")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, pace=True, window_tokens=8))
    reading = corpora.read("manifest", corpus)
    store = prepare_features(config, corpus, tmp_path / "features", reading.digest, None)
    tokenizer = train_tokenizer(config, reading.usable)
    examples, _ = make_examples(config, reading, store, tokenizer, None)
    model = Model(config.model, tokenizer).eval()
    task = DecodingTask(model, store, examples, config, rho=0.75)
    chosen = [examples["train"][index].window for index in range(8)]
    lesson = task.collate("train", list(range(8)), np.random.default_rng(0))
    assert len({window.num_source for window in chosen}) > 3
    assert lesson.steps_B.tolist() == [min(30, max(1, round(8 * (len(w.ids) + 1) / w.num_source))) for w in chosen]
    model.predict_steps = lambda *_: 6  # six steps in eight source tokens
    for num_source, steps in ((4, 3), (8, 6), (16, 12)):
        session = model.open(PowerLaw(1), window_tokens=num_source, max_steps=1)
        (event,) = [*session.push(torch.zeros(num_source, 6)), *session.finish()]
        assert event.predicted_steps == steps
        assert model.paced(steps, num_source) == 6


# Stopped, killed, resumed.


def test_a_run_is_a_function_of_its_seed(corpus, tmp_path, recipe):
    config = with_dropout(recipe(schedule=ScheduleSampler(), loop={"accumulate": 2, "batch_tokens": 200}), 0.2)
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        loop = dataclasses.replace(config.loop, seed=seed)
        train(dataclasses.replace(config, loop=loop), data=corpus, store=tmp_path / "features", out=tmp_path / name)
    assert equal(weights(tmp_path / "one/last"), weights(tmp_path / "again/last"))
    assert not equal(weights(tmp_path / "one/last"), weights(tmp_path / "other/last"))


def test_killed_at_any_moment_a_run_resumes_to_the_same_bits(corpus, tmp_path, recipe):
    config = with_dropout(recipe(schedule=ScheduleSampler(), form="inf", loop={"save_every_s": 0.0, "epochs": 4}), 0.2)
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(config.to_dict()))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config, data=corpus, store=tmp_path / "features", out=whole)
    command = [sys.executable, "-m", "zendaya", "train", str(path), "--data", str(corpus), "--store", str(tmp_path / "features"), "--out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def steps():
        try:
            return (cut / "history.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    for number, how in enumerate((signal.SIGKILL, signal.SIGINT)):
        process = subprocess.Popen(
            [*command, str(cut), *(["--resume"] if number else [])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        before = steps()
        while steps() < before + 3 and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(how)
        _, complaint = process.communicate()
        assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), complaint
        if how == signal.SIGINT:
            assert complaint.startswith("zendaya: stopped after step")
            assert complaint.count("\n") == 1
    done = subprocess.run([*command, str(cut), "--resume", "--json"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == history(whole)[-1]["step"]
    assert equal(weights(whole / "last"), weights(cut / "last"))
    assert equal(weights(whole / "best"), weights(cut / "best"))

    def facts(folder):
        return [{k: v for k, v in line.items() if k != "seconds"} for kind in ("step", "epoch") for line in history(folder, kind)]

    assert facts(whole) == facts(cut)  # nothing twice, nothing missing


def test_a_full_disk_leaves_the_state_before_it(corpus, tmp_path, recipe, monkeypatch):
    config = recipe(loop={"epochs": 1})
    result = train(config, data=corpus, out=tmp_path / "run")
    before = (tmp_path / "run/state.safetensors").read_bytes()
    module = torch.nn.Linear(2, 2)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("zendaya.files.os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device; the state before it is intact"):
        saved_state.save(tmp_path / "run/state.safetensors", module, torch.optim.AdamW(module.parameters()), saved_state.LoopState())
    monkeypatch.undo()
    assert (tmp_path / "run/state.safetensors").read_bytes() == before
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []
    again = train(config, data=corpus, out=tmp_path / "run", resume=True)
    assert again.steps == result.steps


def test_a_damaged_state_is_refused(corpus, tmp_path, recipe):
    config = recipe(loop={"epochs": 1})
    train(config, data=corpus, out=tmp_path / "run")
    path = tmp_path / "run/state.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"state\.safetensors: not a state of this version, or damaged"):
        train(config, data=corpus, out=tmp_path / "run", resume=True)
    path.write_bytes(data[:100])
    with pytest.raises(CheckpointError, match="not a whole state of a run"):
        train(config, data=corpus, out=tmp_path / "run", resume=True)


def test_another_run_is_neither_overwritten_nor_resumed(corpus, tmp_path, recipe):
    config = recipe(loop={"epochs": 1})
    train(config, data=corpus, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run; go on with --resume"):
        train(config, data=corpus, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"holds another run: recipe\.loop\.epochs was 1, now 2"):
        train(recipe(loop={"epochs": 2}), data=corpus, out=tmp_path / "run", resume=True)


def test_two_processes_learn_what_one_does(corpus, tmp_path, recipe):
    config = with_dropout(recipe(schedule=ScheduleSampler(), loop={"accumulate": 2, "batch_tokens": 60, "epochs": 2}), 0.1)
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "zendaya", "train", str(path)]
    done = subprocess.run(
        [*command, "--data", str(corpus), "--store", str(tmp_path / "features"), "--out", str(tmp_path / "two")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr  # the features were not there: the first process encoded them
    train(config, data=corpus, store=tmp_path / "features", out=tmp_path / "one")
    one, two = history(tmp_path / "one", "step"), history(tmp_path / "two", "step")
    assert len(one) == len(two) > 4
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-4)
    assert history(tmp_path / "two")[-1]["valid_loss"] == pytest.approx(history(tmp_path / "one")[-1]["valid_loss"], rel=1e-4)


def test_early_stopping_keeps_the_best(corpus, tmp_path, recipe):
    config = recipe(loop={"epochs": 40, "patience": 2, "learning_rate": 2e-2})  # other texts than those of valid: it gets worse soon
    result = train(config, data=corpus, out=tmp_path / "run")
    epochs = history(tmp_path / "run")
    assert result.epochs == len(epochs) == result.best_epoch + 2 < 40
    assert min(epochs, key=lambda line: line["valid_loss"])["epoch"] == result.best_epoch
    assert not equal(weights(tmp_path / "run/best"), weights(tmp_path / "run/last"))
    assert list((tmp_path / "run/tensorboard").iterdir())


def test_mixed_precision_learns_too(corpus, tmp_path, recipe):
    for precision in ("32-true", "bf16-mixed"):
        train(recipe(loop={"epochs": 3, "precision": precision}), data=corpus, store=tmp_path / "features", out=tmp_path / precision)
    full, mixed = (history(tmp_path / precision)[-1]["train_loss"] for precision in ("32-true", "bf16-mixed"))
    assert mixed == pytest.approx(full, rel=0.05)
    assert mixed != full
    assert {tensor.dtype for tensor in weights(tmp_path / "bf16-mixed/last").values()} == {torch.float32}


class _Ids(torch.nn.Module):
    """A module that remembers which ids it was given."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.ones(4, 4)), []

    def forward(self, batch):
        self.seen.append(batch["ids"].tolist())
        return {"nll": (batch["ids"][:, None] @ torch.ones(1, 4) @ self.weight).square().sum() * 1e-9}


class _IdTask:
    def __init__(self):
        self.module, self.weights = _Ids(), {"nll": 1.0}

    def sizes(self, split):
        return [(2, 2)] * 2

    def counts(self, split, indices):
        return {"nll": 1}

    def collate(self, split, indices, rng):
        return {"ids": torch.tensor([1001.0, 2003.0, 777.0])}

    def save(self, folder):
        folder.mkdir(exist_ok=True)


def test_ids_keep_their_value_in_mixed_precision(tmp_path):
    task = _IdTask()
    run(task, LoopConfig(epochs=1, batch_tokens=8, precision="bf16-mixed"), tmp_path)
    assert task.module.seen
    assert all(ids == [1001.0, 2003.0, 777.0] for ids in task.module.seen)


def test_a_store_of_other_features_is_refused(corpus, tmp_path, recipe):
    train(recipe(loop={"epochs": 1}), data=corpus, store=tmp_path / "features", out=tmp_path / "one")
    other = dataclasses.replace(recipe(loop={"epochs": 1}), encoder="features,rate=6")
    with pytest.raises(ConfigError, match=r"features of encoder 'features dim=6 rate=3 .*the recipe's encoder \(features,rate=6\) is"):
        train(other, data=corpus, store=tmp_path / "features", out=tmp_path / "two")
    encode_corpus("manifest", corpus, tmp_path / "few", encoder="features,rate=3", options=EncodeOptions(limit=20))
    with pytest.raises(StoreError, match="holds 20 of the 32 clips of train and valid"):
        train(recipe(loop={"epochs": 1}), data=corpus, store=tmp_path / "few", out=tmp_path / "three")


# Settings.


def test_a_recipe_survives_its_file(recipe, tmp_path):
    for name in set(recipes.recipes()) - {"adapt-tiny.en"}:
        dials = ("dial", "dial=2+wait-k=0.3", "dial,offline=0.5", "dial+wait-k+head=0.1")
        for schedule in (None, *dials, "wait-k=7", "wait-k=7,stride=1", "gamma=0.3,floor,head=2"):
            config = recipes.configured(name, schedule=schedule)
            assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_papers_recipes_have_the_papers_size():
    for name in ("charades-sta", "activitynet", "libriheavy"):
        for form in (name, f"{name}-inf"):
            config = recipes.recipe(form)
            assert Model(config.model).num_parameters == pytest.approx(29e6, rel=0.05)
            assert (config.loop.learning_rate, config.loop.epochs, config.model.decoder.dropout) == (2e-4, 40, 0.1)
            assert config.vocab_size == 8000
            assert (config.model.length, config.model.history) == (("inf", True) if form.endswith("inf") else ("fix", False))
        assert recipes.configured(name, schedule="wait-k=10").model.length == "none"


def test_wait_k_takes_the_stride_of_the_corpus(corpus, tmp_path, recipe):
    train(recipe(schedule=WaitK(3), loop={"epochs": 1}), data=corpus, out=tmp_path / "run")
    signature = json.loads((tmp_path / "run/recipe.json").read_text())
    assert signature["schedule"] == f"wait-k=3,stride={signature['rho']}"
    assert signature["data_digest"]
    assert signature["version"] == zendaya.__version__
    found = zendaya.evaluate_corpus(
        tmp_path / "run/best", "manifest", corpus,
        zendaya.EvalOptions(split="valid", schedules=[WaitK(3), WaitK(3, 1.0)], metrics=["bleu"]),
    )  # fmt: skip
    assert [one.schedule for one in found.scores] == [signature["schedule"], "wait-k=3,stride=1.0"]
    train(recipe(schedule=WaitK(3, 1.0), loop={"epochs": 1}), data=corpus, store=tmp_path / "run/features", out=tmp_path / "said")
    assert json.loads((tmp_path / "said/recipe.json").read_text())["schedule"] == "wait-k=3,stride=1.0"


def test_batches_that_no_step_can_share_are_refused():
    with pytest.raises(ConfigError, match="3 batches of one example each are not a multiple of the 2 micro-batches"):
        plan([(10, 5)] * 3, 15, np.random.default_rng(0), multiple=2)


def test_an_adaptation_is_read_back_from_its_run(tmp_path):
    config = recipes.recipe("adapt-tiny.en")
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": dataclasses.asdict(config), "limit": None}))
    assert recipes.recipe(str(tmp_path / "recipe.json")) == config
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {**dataclasses.asdict(config), "loop": {"epochs": "many"}}}))
    with pytest.raises(ConfigError, match=r"recipe\.json"):
        recipes.recipe(str(tmp_path / "recipe.json"))


def test_the_dial_is_drawn_as_it_says():
    rng = np.random.default_rng(0)
    drawn = [ScheduleSampler(wait_k=0.2).draw(rng, source=40, stride=2.5) for _ in range(4000)]
    gammas = [schedule.gamma for schedule in drawn if isinstance(schedule, PowerLaw)]
    ks = [schedule.k for schedule in drawn if isinstance(schedule, WaitK)]
    assert np.mean([gamma == 0 for gamma in gammas]) * len(gammas) / 4000 == pytest.approx(0.2, abs=0.03)
    assert len(ks) / 4000 == pytest.approx(0.2, abs=0.03)
    assert set(np.round(np.array(gammas) * 20)) == set(range(31))
    assert (min(ks), max(ks)) == (1, 20)
    assert {schedule.stride for schedule in drawn if isinstance(schedule, WaitK)} == {2.5}
    assert not any(getattr(schedule, "head", 0) for schedule in drawn)


def test_a_head_start_is_drawn_only_where_it_is_asked_for():
    sampler = parse_training_schedule("dial+wait-k+head")
    assert sampler == ScheduleSampler(wait_k=0.2, head=0.2)
    rng = np.random.default_rng(0)
    drawn = [sampler.draw(rng, source=40, stride=2.5) for _ in range(4000)]
    with_head = [schedule for schedule in drawn if getattr(schedule, "head", 0)]
    assert len(with_head) / 4000 == pytest.approx(0.2, abs=0.03)
    assert {schedule.head for schedule in with_head} == set(range(1, 11))  # up to a quarter of the source
    assert {round(schedule.gamma * 20) for schedule in with_head} == set(range(1, 31))
    assert sampler.draw(np.random.default_rng(0), source=1, stride=1.0) is not None
    # Without a head, the draws are those of before: one number for the kind, one for γ or k.
    ours, theirs = np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(500):
        kind = theirs.random()
        number = None if kind < 0.2 else int(theirs.integers(1, 21 if kind < 0.4 else 31))
        expected = PowerLaw(0.0) if number is None else WaitK(number, 2.5) if kind < 0.4 else PowerLaw(number / 20)
        assert ScheduleSampler(wait_k=0.2).draw(ours, source=40, stride=2.5) == expected


@pytest.mark.parametrize("text", ["dial=0.5", "dial+wait-k=0.9", "dial=1..5", "dial+head=0.8", "dial+head=x", "dial+head+wait-k"])
def test_a_dial_that_is_none_is_refused(text):
    with pytest.raises(zendaya.ZendayaError):
        parse_training_schedule(text)


@pytest.mark.parametrize(
    ("field", "value"), [("epochs", 0), ("learning_rate", -1.0), ("precision", "8-bit"), ("accumulate", 1.5), ("clip", 0.0)]
)
def test_a_setting_out_of_range_is_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        LoopConfig(**{field: value})


def test_the_learning_rate_warms_up_and_decays_to_its_end():
    config = LoopConfig(learning_rate=1.0, final_learning_rate=0.1, warmup_steps=4)
    assert [learning_rate(config, step, 0.0) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(config, 100, 1.0) == pytest.approx(0.1)


def test_lower_case_recipes_learn_text_without_punctuation():
    assert learned_text(" A man's dog,  runs. ", lower=True) == "a man's dog runs"
    assert learned_text(" A man's dog,  runs. ", lower=False) == "A man's dog, runs."


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonesuch"], "no recipe 'nonesuch'; expected one of charades-sta"),
        (["msvd", "--gamma", "1", "--schedule", "dial"], "give a schedule or gamma, one of the two"),
        (["msvd", "--head", "2"], "a head start goes with gamma"),
        (["msvd", "--schedule", "dail"], "not a schedule: 'dail'"),
        (["msvd", "--data", "nowhere"], "nowhere"),
        (["nowhere.json"], "nowhere.json"),
    ],
)
def test_a_mistake_is_one_line(arguments, complaint, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "ZENDAYA_DATA"}
    done = subprocess.run(
        [sys.executable, "-m", "zendaya", "train", *arguments, "--out", "run"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.startswith("zendaya: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
