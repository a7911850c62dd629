"""A learned γ: the head learns what there is to learn, the runtime follows it, and the theorem is kept."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from zendaya import Learned, Model, PowerLaw, ZendayaError
from zendaya.audit import audit
from zendaya.cli import app
from zendaya.errors import ConfigError
from zendaya.evaluation.metrics.latency import differentiable_average_lagging
from zendaya.nn.config import DecoderConfig, ModelConfig
from zendaya.nn.presets import preset
from zendaya.records import read_record
from zendaya.schedule import parse_schedule
from zendaya.training.decoding import StoredWindow, TextExample
from zendaya.training.learned import (
    Costs,
    GammaTask,
    LearnConfig,
    buffer,
    expect,
    learn_gamma,
    measure,
    solve_price,
    with_gamma_head,
)  # fmt: skip
from zendaya.training.loop import LoopConfig, run
from zendaya.training.schedule_sampler import ScheduleSampler
from zendaya.training.train import TrainConfig, train

GAMMAS = (0.3, 0.6, 1.0)


def stream(count, seed=0):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def chooser(**changes):
    """A model of random weights that takes one γ here, another there."""
    model = Model.from_preset("tiny", gammas=GAMMAS, seed=3, **changes)
    torch.nn.init.normal_(model.gamma_head.dense[0].weight, std=1.0, generator=torch.Generator().manual_seed(0))
    torch.nn.init.zeros_(model.gamma_head.dense[2].bias)
    return model


def events_of(session, tokens, pieces=()):
    events, at = [], 0
    for piece in [*pieces, len(tokens)]:
        events += session.push(tokens[at : at + piece])
        at = min(len(tokens), at + piece)
    return [*events, *session.finish()]


# The runtime.


@pytest.mark.parametrize("length", ["fix", "inf"])
def test_the_horizons_of_a_window_are_those_of_its_gamma(length):
    events = events_of(chooser(length=length, history=length == "inf").open(Learned()), stream(24 * 30))
    for window in range(30):
        mine = [event for event in events if event.window_index == window]
        assert len({event.gamma for event in mine}) == 1
        schedule = PowerLaw(mine[0].gamma)
        assert [event.horizon for event in mine] == schedule.horizons(24, mine[0].predicted_steps, num_steps=len(mine)).tolist()
    assert len({event.gamma for event in events}) > 1


@pytest.mark.parametrize("seed", range(8))
def test_any_chunking_gives_the_same_choices(seed):
    model, draw = chooser(), np.random.default_rng(seed)
    tokens = stream(int(draw.integers(1, 120)), seed)
    assert events_of(model.open(Learned()), tokens, draw.integers(0, 20, 15).tolist()) == events_of(model.open(Learned()), tokens)


def test_gamma_is_chosen_once_its_buffer_has_arrived():
    model = chooser()
    for seed in range(20):
        session = model.open(Learned())
        for arrived, token in enumerate(stream(24, seed), start=1):
            first = next(iter(session.push(token[None])), None)
            if first is not None:
                assert arrived == first.horizon
                assert PowerLaw(first.gamma).buffer(24, 32) <= first.horizon
                break


def test_a_price_turns_the_dial_from_one_end_to_the_other():
    model = chooser()
    with torch.no_grad():
        model.gamma_head.dense[2].weight.zero_()
        model.gamma_head.dense[2].bias.copy_(torch.tensor([-0.1, 0.0, 0.3, 0.9, 0.7, 0.5]))  # what a γ loses, and how far it lags
    gamma = {price: events_of(model.open(Learned(price)), stream(24))[0].gamma for price in (0.0, 0.4, 0.6, 1.4, 1.6, 100.0)}
    assert gamma == {0.0: 0.3, 0.4: 0.3, 0.6: 0.6, 1.4: 0.6, 1.6: 1.0, 100.0: 1.0}
    model.config = dataclasses.replace(model.config, lag_price=1.6)
    assert events_of(model.open(Learned()), stream(24))[0].gamma == 1.0
    assert events_of(model.open(PowerLaw(0.5)), stream(24))[0].gamma is None


@pytest.mark.parametrize("length", ["fix", "inf"])
def test_the_theorem_is_kept(length):
    report = audit(chooser(length=length, history=length == "inf"), Learned(), cuts=2)
    assert report.passed, report.first
    assert report.steps_tested["gamma head"] == 8 * 2
    assert report.steps_tested["schedule"] == 3 * 32


def test_a_model_without_a_dial_head_says_so():
    model = Model.from_preset("tiny")
    for use in (
        lambda: model.open(Learned()),
        lambda: audit(model, Learned()),
        lambda: model.gamma_costs(stream(3)[None], torch.tensor([3])),
    ):
        with pytest.raises(ConfigError, match="no gamma head"):
            use()


def test_a_learned_schedule_has_a_name_and_no_horizons():
    assert parse_schedule("learned") == Learned()
    assert parse_schedule(str(Learned(0.25))) == Learned(0.25)
    for text in ("learned=-1", "learned=x", "learned=nan", "learned=1,2"):
        with pytest.raises(ZendayaError):
            parse_schedule(text)
    with pytest.raises(ZendayaError, match="before a window's gamma is chosen"):
        Learned().horizons(10, 10)


# Saved and loaded.


def test_a_dial_head_is_saved_and_loaded(tmp_path):
    model = chooser(lag_price=0.7)
    model.save_pretrained(tmp_path)
    again = Model.from_pretrained(tmp_path)
    assert again.config == model.config
    assert events_of(again.open(Learned()), stream(60)) == events_of(model.open(Learned()), stream(60))


def test_models_of_before_load_as_they_were(tmp_path):
    model = Model.from_preset("tiny", seed=4)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields.keys() == {"decoder", "window_tokens", "max_steps", "length", "length_hidden", "history", "framing"}
    assert not [name for name in model.state_dict() if name.startswith("gamma_head")]
    assert Model.from_pretrained(tmp_path).config.gammas == ()


def test_a_new_head_changes_nothing_else_in_a_model():
    model = Model.from_preset("tiny", seed=4)
    learned = with_gamma_head(model, GAMMAS, seed=1)
    assert events_of(learned.open(PowerLaw(0.6)), stream(60)) == events_of(model.open(PowerLaw(0.6)), stream(60))
    assert {name.split(".")[0] for name, parameter in learned.named_parameters() if parameter.requires_grad} == {"gamma_head"}


@pytest.mark.parametrize(
    "changes",
    [
        {"gammas": (0.5,)}, {"gammas": (0.5, 0.3)}, {"gammas": (0.5, 0.5)}, {"gammas": (-0.1, 0.5)}, {"gammas": (0.1, float("inf"))},
        {"gammas": ("0.1", "0.2")}, {"gammas": GAMMAS, "lag_price": -1.0}, {"gammas": GAMMAS, "lag_price": float("nan")},
        {"gammas": GAMMAS, "length": "none", "history": False},
    ],
)  # fmt: skip
def test_a_dial_that_cannot_be_is_refused(changes):
    with pytest.raises(ConfigError, match="model config"):
        Model.from_preset("tiny", **changes)
    with pytest.raises(ConfigError):
        read_record(ModelConfig, {**preset("tiny").to_dict(), **changes, "gammas": 3}, "x")


# Learning.


class Sources:
    """A store of windows in memory, whose first token says whether they are easy."""

    def __init__(self, count, length, seed=0):
        rng = torch.Generator().manual_seed(seed)
        self.easy = torch.rand(count, generator=rng) < 0.5
        self.values = [torch.randn(length, 16, generator=rng) for _ in range(count)]
        for value_TE, easy in zip(self.values, self.easy, strict=True):
            value_TE[0] = 8.0 if easy else -8.0

    def get(self, clip, split):
        return SimpleNamespace(values_TE=self.values[int(clip)])

    def examples(self, steps=9):
        return [
            TextExample(StoredWindow("train", str(number), value.shape[0], (5,) * (steps - 1))) for number, value in enumerate(self.values)
        ]

    def costs(self):
        """Easy windows lose nothing to a large γ, hard ones much; all lag alike."""
        easy_W1 = self.easy.numpy()[:, None]
        loss_WG = np.where(easy_W1, [2.0, 2.01, 2.02], [2.0, 2.3, 2.9])
        return Costs(np.full(len(self.values), 9), loss_WG, {"dal": np.broadcast_to([0.8, 0.6, 0.4], loss_WG.shape)})


@pytest.mark.parametrize("length", ["fix", "inf"])
def test_an_obvious_rule_is_learned_and_kept_to_live(length, tmp_path):
    model = with_gamma_head(Model.from_preset("tiny", length=length, history=length == "inf"), GAMMAS, seed=0)
    sources = Sources(240, 24)
    examples, costs = sources.examples(), sources.costs()
    task = GammaTask(model, sources, {"train": examples[:160], "valid": examples[160:]}, {
        "train": dataclasses.replace(costs, steps_W=costs.steps_W[:160], loss_WG=costs.loss_WG[:160], lags_WG={"dal": costs.lag[:160]}),
        "valid": dataclasses.replace(costs, steps_W=costs.steps_W[160:], loss_WG=costs.loss_WG[160:], lags_WG={"dal": costs.lag[160:]}),
    }, 24)  # fmt: skip
    task.begin()
    blind = expect(model, sources, examples, scale=24)
    assert np.ptp(blind.loss_WPG.numpy(), axis=0).max() < 1e-5  # it begins as one that knows no window
    result = run(task, LoopConfig(epochs=25, batch_tokens=1200, learning_rate=3e-3, warmup_steps=5, weight_decay=0.01), tmp_path)
    assert result.best_loss < 0.3
    expected = expect(model, sources, examples, scale=24)
    assert costs.mean(costs.lag, expected.places(solve_price(expected, costs, 0.65))) <= 0.65
    price = 0.5  # a step of the dial is worth 0.1: easy windows lose 0.01 by it, hard ones 0.3
    places_W = expected.places(price)
    assert (places_W[sources.easy.numpy()] == 2).mean() > 0.9
    assert (places_W[~sources.easy.numpy()] == 0).mean() > 0.9
    mixture = np.interp(costs.mean(costs.lag, places_W), *(np.average(value, axis=0)[::-1] for value in (costs.lag, costs.loss_WG)))
    assert costs.mean(costs.loss_WG, places_W) < mixture - 0.05
    for number in range(0, 240, 12):  # what was counted on is what the runtime does
        first = next(iter(events_of(model.open(Learned(price)), sources.values[number])))
        assert first.gamma == GAMMAS[places_W[number]]


def test_what_a_gamma_costs_is_what_its_decode_would():
    model, sources = Model.from_preset("tiny", seed=2), Sources(5, 20)
    examples = sources.examples()
    examples[3] = dataclasses.replace(examples[3], before=StoredWindow("train", "1", 20, (7, 8, 9)))
    costs = measure(model, sources, examples, GAMMAS, scale=24, batch_tokens=60)
    for number in (0, 3):
        source_TE, example = sources.values[number], examples[number]
        past = None if example.before is None else (sources.values[1], example.before.ids)
        for place, gamma in enumerate(GAMMAS):
            schedule = PowerLaw(gamma)
            with torch.inference_mode():
                steps = model.predict_steps(source_TE, schedule.buffer(24, 32), past)
                batch = model.batch([source_TE], [example.window.ids], schedule, scale=24, steps=[steps], histories=[past])
                loss = torch.nn.functional.cross_entropy(model(batch)[0], batch.targets_BN[0])
            delays = np.minimum(schedule.horizons(24, steps, num_steps=9), 20)
            assert costs.loss_WG[number, place] == pytest.approx(float(loss), rel=1e-5)
            assert costs.lag[number, place] == pytest.approx(differentiable_average_lagging(delays, source=20, target=9) / 20)


def test_a_head_reads_no_more_than_step_one_may():
    model = chooser()
    assert [buffer(model, gamma, 24, 24) for gamma in GAMMAS] == [int(PowerLaw(gamma).at(1, source=24, steps=32)) for gamma in GAMMAS]
    assert buffer(model, 0.3, 2, 24) == 2
    assert buffer(chooser(length="fix", history=False), 1.0, 17, None) == 17


def test_a_budget_that_cannot_be_met_is_refused():
    sources = Sources(10, 24)
    expected = expect(chooser(), sources, sources.examples(), scale=24)
    with pytest.raises(ConfigError, match="meets the budget"):
        solve_price(expected, sources.costs(), 0.3)
    for settings in ({}, {"budget": 0.5, "like": 0.5}, {"budget": 0.0}, {"budget": 2.0}, {"like": 0.55}, {"budget": 0.5, "texts": 0}):
        with pytest.raises(ConfigError):
            LearnConfig(**settings)


# A whole run.


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A small corpus, and a whole-dial run on it in each form."""
    folder = tmp_path_factory.mktemp("toy")
    rng = np.random.default_rng(0)
    lines = []
    for split in ("train", "valid"):
        for number in range(12):
            name, length = f"{split}{number}", int(rng.integers(5, 17))
            np.save(folder / f"{name}.npy", rng.standard_normal((length, 6)).astype(np.float32))
            start = 10.0 * (number % 6)
            lines.append({
                "id": name, "split": split, "stream": f"{split}-{number // 6}", "media": f"{name}.npy", "start_s": start,
                "end_s": start + length / 3, "media_start_s": start, "text": " ".join(rng.choice(["a man", "runs", "sings", "at home"], 4)),
            })  # fmt: skip
    data = folder / "clips.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    decoder = DecoderConfig(
        vocab_size=300, source_dim=6, max_source=16, max_rows=61, dim=32, layers=1, heads=1, head_dim=32, ffn_dim=64, norm="pre",
        dropout=0.0,
    )  # fmt: skip
    for form, schedule in (("fix", ScheduleSampler()), ("inf", ScheduleSampler()), ("single", PowerLaw(0.5))):
        kind = "inf" if form == "inf" else "fix"
        config = TrainConfig(
            name="toy", corpus="manifest", folder="", encoder="features,rate=3", schedule=schedule, form=kind, vocab_size=300,
            scale="window" if kind == "inf" else "segment", loop=LoopConfig(epochs=1, batch_tokens=200, learning_rate=3e-3),
            model=ModelConfig(decoder=decoder, window_tokens=16, max_steps=30, length=kind, length_hidden=32, history=kind == "inf"),
        )  # fmt: skip
        train(config.with_schedule(schedule), data=data, out=folder / form, store=folder / "store")
    return folder


LEARN = LearnConfig(gammas=(0.2, 0.5, 1.0), like=0.5, loop=LoopConfig(epochs=2, batch_tokens=400, warmup_steps=2))


@pytest.mark.parametrize("form", ["fix", "inf"])
def test_a_run_from_corpus_to_a_priced_model(form, toy, tmp_path):
    options = {"data": toy / "clips.jsonl", "store": toy / "store", "out": tmp_path / "out"}
    learn_gamma(toy / form, LEARN, **options)
    record = json.loads((tmp_path / "out" / "gamma.json").read_text())
    assert record["valid"]["dal"] <= record["budget"] == pytest.approx(record["fixed"]["0.5"]["dal"])
    assert sum(record["chosen"].values()) == pytest.approx(1)
    model = Model.from_pretrained(tmp_path / "out" / "best")
    assert (model.config.gammas, model.config.lag_price) == ((0.2, 0.5, 1.0), record["price"])
    assert events_of(model.open(Learned()), torch.randn(30, 6))[0].gamma in model.config.gammas
    report = audit(model, Learned(), cuts=1)
    assert report.passed, report.first
    with pytest.raises(ConfigError, match="already holds a run"):
        learn_gamma(toy / form, LEARN, **options)
    with pytest.raises(ConfigError, match="another run"):
        learn_gamma(toy / form, dataclasses.replace(LEARN, like=1.0), resume=True, **options)
    learn_gamma(toy / form, LEARN, resume=True, **options)  # finished already: the same again
    assert json.loads((tmp_path / "out" / "gamma.json").read_text())["price"] == pytest.approx(record["price"], rel=0.05)


def test_runs_that_cannot_be_learned_from_are_refused(toy, tmp_path):
    options = {"data": toy / "clips.jsonl", "store": toy / "store", "out": tmp_path / "out"}
    for run_folder, config, message in (
        (toy / "single", LEARN, "trained under gamma=0.5 alone"),
        (tmp_path, LEARN, "not the folder of a training run"),
        (toy / "fix", dataclasses.replace(LEARN, gammas=(0.5, 2.0)), "trained up to gamma 1.5"),
        (toy / "fix", dataclasses.replace(LEARN, gammas=(1.0, 0.5)), "in rising order"),
        (toy / "fix", dataclasses.replace(LEARN, like=None, budget=0.01), "the budget is 0.010"),
    ):
        with pytest.raises(ConfigError, match=message):
            learn_gamma(run_folder, config, **options)


def test_the_command_line_learns_and_evaluates(toy, tmp_path):
    def words(*arguments):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    where = ("--data", toy / "clips.jsonl", "--store", toy / "store", "--out", tmp_path / "out")
    said = words("learn-gamma", toy / "inf", "--like", 0.5, "--gammas", "0.2,0.5,1", "--epochs", 1, *where)
    assert "budget" in said
    assert "fixed γ = 0.5" in said
    scored = words(
        "evaluate", tmp_path / "out" / "best", "manifest", toy / "clips.jsonl", "--store", toy / "store", "--split", "valid",
        "--scale", "window", "--schedule", "learned", "--schedule", "0.5", "--metrics", "wer", "--normalise", "basic",
        "--limit", 3, "--out", tmp_path / "scored", "--json",
    )  # fmt: skip
    learned, fixed = json.loads(scored)["scores"]
    assert (learned["schedule"], fixed["schedule"]) == ("learned", "gamma=0.5")
    assert 0 < learned["exposure_planned"] <= 1
    for wrong in (("--gammas", "a,b", "--like", 0.5), (), ("--budget", 0.4, "--like", 0.5)):
        with pytest.raises(ConfigError):
            words("learn-gamma", toy / "inf", *wrong, *where)
