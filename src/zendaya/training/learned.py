"""A learned γ: a gamma head beside a whole-dial model, which chooses the γ of each window before the window is decoded.

The decoder is frozen. On every training window each γ of a grid is tried once, teacher-forced, with N̂ predicted as live. This gives
the loss (nats per step) and the lag of each γ. Lag is differentiable average lagging as a share of the source: unlike average
lagging, it does not jump where the whole source has been read. The head predicts both from what it may read. A window takes the γ
with the least loss + price · lag. The price is solved on the validation split for a budget of lag, so one head serves every budget.

Shape suffixes: W windows, B windows of a batch, G gammas of the grid, P places of the grid from whose buffer the head reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import zendaya
from zendaya.data.corpora import registry as corpora
from zendaya.data.corpora.base import Reading
from zendaya.data.features.store import FeatureStore
from zendaya.errors import CheckpointError, ConfigError
from zendaya.evaluation.metrics.latency import average_proportion, differentiable_average_lagging, length_adaptive_average_lagging
from zendaya.files import write_atomically
from zendaya.nn.checkpoint import RECIPE, WEIGHTS
from zendaya.nn.decoder import History
from zendaya.nn.length import InfLength
from zendaya.nn.model import Model, settled
from zendaya.records import Progress, listed, option
from zendaya.schedule import PowerLaw
from zendaya.training.buckets import plan
from zendaya.training.decoding import TextExample, read_windows
from zendaya.training.loop import BEST, TRAIN, VALID, LoopConfig, Report, TrainResult, run
from zendaya.training.prepare import make_examples, prepare_features
from zendaya.training.state import begin
from zendaya.training.train import TrainConfig

GAMMAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5)
LAGS = {"dal": differentiable_average_lagging, "laal": length_adaptive_average_lagging, "ap": average_proportion}
BUDGET_LAG = "dal"
GAMMA = "gamma.json"
LOOP = LoopConfig(epochs=40, batch_tokens=16384, learning_rate=1e-3, warmup_steps=20, weight_decay=0.1, patience=6)
PRICES = np.concatenate([[0.0], np.geomspace(1e-4, 1e4, 801)])
"""Prices tried for a budget, in nats per step for a lag of the whole source."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LearnConfig:
    """How a gamma head is trained: grid, budget and optimiser."""

    gammas: tuple[float, ...] = option(GAMMAS, "The grid to choose from, as 0.1,0.2,0.5,1.", parse=listed(float))
    budget: float | None = option(None, "Mean lag allowed over all steps written, as a share of the source.")
    like: float | None = option(None, "Instead: the lag of this fixed γ of the grid on the validation split.")
    loop: LoopConfig = LOOP
    texts: int | None = option(None, "At most this many texts per clip; they share its source.", min=1)

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.like is None):
            raise ConfigError("give either a budget (--budget) or the gamma whose lag is the budget (--like)")
        if self.budget is not None and not 0 < self.budget <= 1:
            raise ConfigError(f"budget must be a share of the source, above 0 and at most 1: got {self.budget}")
        if self.like is not None and self.like not in self.gammas:
            raise ConfigError(f"like must be a gamma of the grid {self.gammas}: got {self.like}")
        if self.texts is not None and self.texts < 1:
            raise ConfigError(f"texts per clip must be at least 1: got {self.texts}")


# Costs of each γ.


@dataclass(frozen=True)
class Costs:
    """Loss and lag of each γ on each window."""

    steps_W: IntArray  # N, the end included: the weight of a window
    loss_WG: FloatArray  # teacher-forced, in nats per step
    lags_WG: Mapping[str, FloatArray]  # as shares of the source, by measure

    @property
    def lag(self) -> FloatArray:
        """The lag measure of the budget."""
        return self.lags_WG[BUDGET_LAG]

    def mean(self, value_WG: FloatArray, places_W: IntArray | int) -> float:
        """The mean over steps of a cost, each window at its chosen place of the grid."""
        places_W = np.broadcast_to(places_W, self.steps_W.shape)
        return float(np.average(value_WG[np.arange(places_W.size), places_W], weights=self.steps_W))


def buffer(model: Model, gamma: float, num_source: int, scale: int | None) -> int:
    """Source tokens of a window that a head may read under γ: all for fix, B for inf."""
    if model.config.length == "fix":
        return num_source
    return min(num_source, PowerLaw(gamma).buffer(scale or num_source, model.config.max_steps))


@torch.inference_mode()
def measure(
    model: Model, store: FeatureStore, examples: Sequence[TextExample], gammas: Sequence[float], *, scale: int | None,
    batch_tokens: int = 8192, report: Report = lambda _: None,
) -> Costs:  # fmt: skip
    """Try every γ on every window, teacher-forced under the N̂ that the length head predicts from that γ's buffer."""
    sizes = [example.size for example in examples]
    loss_WG = np.zeros((len(examples), len(gammas)))
    lags_WG = {name: np.zeros_like(loss_WG) for name in LAGS}
    steps_W = np.array([len(example.window.ids) + 1 for example in examples])
    model.eval()
    done = 0
    for indices in plan(sizes, max(batch_tokens, max(map(sum, sizes))), np.random.default_rng(0)):
        chosen = [examples[index] for index in indices]
        sources, histories = read_windows(model, store, chosen)
        numbers = [source.shape[0] for source in sources]
        history = None if histories is None else model.pack_history(histories)
        for place, gamma in enumerate(gammas):
            schedule = PowerLaw(gamma)
            buffers = [buffer(model, gamma, number, scale) for number in numbers]
            logits_BC = model.length_logits(*_readable(model, sources, buffers), history)
            predicted = [model.steps_of(c + 1, scale or number) for c, number in zip(logits_BC.argmax(-1).tolist(), numbers, strict=True)]
            texts = [example.window.ids for example in chosen]
            batch = model.batch(sources, texts, schedule, scale=scale, steps=predicted, histories=histories)
            losses_BN = functional.cross_entropy(model(batch).transpose(1, 2), batch.targets_BN, reduction="none")  # 0 past a text's end
            loss_WG[indices, place] = (losses_BN.double().sum(1) / torch.from_numpy(steps_W[indices])).numpy()
            for index, number, expected in zip(indices, numbers, predicted, strict=True):
                horizons = schedule.horizons(scale or number, expected, num_steps=int(steps_W[index]))
                delays = np.minimum(horizons, number)
                for name, lag in LAGS.items():
                    # Average proportion is a share already.
                    share = lag(delays, source=number, target=delays.size)
                    lags_WG[name][index, place] = share if name == "ap" else share / number
        done += len(indices)
        report(Progress(done, len(examples), "trying every γ"))
    return Costs(steps_W, loss_WG, lags_WG)


def _readable(model: Model, sources: Sequence[Tensor], buffers: Sequence[int]) -> tuple[Tensor, Tensor]:
    weight = model.decoder.tokens.weight
    cut = [source[:count] for source, count in zip(sources, buffers, strict=True)]
    return nn.utils.rnn.pad_sequence(cut, batch_first=True).to(weight), torch.tensor(buffers, device=weight.device)


# Predictions of the head, and the choice that follows.


@dataclass(frozen=True)
class ExpectedCosts:
    """Costs that a gamma head predicts for each γ, from the buffer of each place of the grid."""

    loss_WPG: Tensor
    lag_WPG: Tensor

    def places(self, price: float) -> IntArray:
        """The place of the grid that each window chooses, as a Session does: from the largest γ down."""
        num_windows, num_places, _ = self.loss_WPG.shape
        places_W = np.zeros(num_windows, np.int64)
        for place in range(1, num_places):  # a larger γ comes first, so that it overrides
            takes_W = settled(self.loss_WPG[:, place], self.lag_WPG[:, place], place, price).numpy()
            places_W[takes_W] = place
        return places_W


@torch.inference_mode()
def expect(model: Model, store: FeatureStore, examples: Sequence[TextExample], *, scale: int | None, batch: int = 64) -> ExpectedCosts:
    """Predictions of the gamma head for every window, from every buffer it may read."""
    gammas = model.config.gammas
    losses, lags = [], []
    for first in range(0, len(examples), batch):
        sources, histories = read_windows(model, store, examples[first : first + batch])
        history = None if histories is None else model.pack_history(histories)
        answers = []
        for gamma in gammas if model.config.length == "inf" else gammas[:1]:
            buffers = [buffer(model, gamma, source.shape[0], scale) for source in sources]
            answers.append(model.gamma_costs(*_readable(model, sources, buffers), history))
        answers *= len(gammas) // len(answers)
        losses.append(torch.stack([loss_BG for loss_BG, _ in answers], 1))
        lags.append(torch.stack([lag_BG for _, lag_BG in answers], 1))
    return ExpectedCosts(torch.cat(losses).cpu(), torch.cat(lags).cpu())


def solve_price(expected: ExpectedCosts, costs: Costs, budget: float) -> float:
    """The least price at which these windows lag no more than the budget on average."""
    lags = []
    for price in PRICES.tolist():
        lags.append(costs.mean(costs.lag, expected.places(price)))
        if lags[-1] <= budget:
            return float(price)
    raise ConfigError(f"no choice of gamma meets the budget of {budget}: the least lag is {min(lags):.4f}; give a larger budget")


# Training.


@dataclass
class GammaBatch:
    """Input of the head for a batch of windows, and its targets."""

    read: tuple[Tensor, Tensor, History | None]  # arguments of `Model.gamma_costs`
    targets: tuple[Tensor, Tensor]  # loss_BG and lag_BG
    steps_B: Tensor


class GammaTask:
    """Regression of each γ's loss and lag as a task of the loop; a window counts by its steps."""

    def __init__(
        self, model: Model, store: FeatureStore, examples: Mapping[str, Sequence[TextExample]], costs: Mapping[str, Costs],
        scale: int | None,
    ) -> None:  # fmt: skip
        self.model, self.store, self.examples, self.scale = model, store, examples, scale
        self.steps = {split: each.steps_W for split, each in costs.items()}
        # Only differences between γ matter: a window that is hard at every γ carries no information.
        self.loss = {split: each.loss_WG - each.loss_WG.mean(1, keepdims=True) for split, each in costs.items()}
        self.lag = {split: each.lag for split, each in costs.items()}
        self.module: nn.Module = _GammaLosses(model)
        steps_W, loss_WG, lag_WG = self.steps[TRAIN], self.loss[TRAIN], self.lag[TRAIN]
        self.loss_G, self.lag_G = (np.average(value_WG, axis=0, weights=steps_W) for value_WG in (loss_WG, lag_WG))
        spread = max(float(np.average((loss_WG - self.loss_G) ** 2, axis=0, weights=steps_W).mean()), 1e-9)
        # Lag counts in nats, at the grid's exchange rate of the two. A loss of 1 is that of a head that predicts the mean.
        rate = float(np.ptp(self.loss_G) / max(np.ptp(self.lag_G), 1e-9))
        self.weights: Mapping[str, float] = {"loss": 1 / spread, "lag": max(rate, 1e-6) ** 2 / spread}

    def sizes(self, split: str) -> list[tuple[int, int]]:
        return [example.size for example in self.examples[split]]

    def counts(self, split: str, indices: list[int]) -> dict[str, int]:
        return dict.fromkeys(("loss", "lag"), int(self.steps[split][indices].sum()) * self.loss_G.size)

    def collate(self, split: str, indices: list[int], rng: np.random.Generator) -> GammaBatch:
        model = self.model
        sources, histories = read_windows(model, self.store, [self.examples[split][index] for index in indices])
        gammas = rng.choice(model.config.gammas[1:], len(indices))  # any buffer that the head may read
        buffers = [buffer(model, gamma, source.shape[0], self.scale) for gamma, source in zip(gammas.tolist(), sources, strict=True)]
        source_BTE, lengths_B = _readable(model, sources, buffers)
        history = None if histories is None else model.pack_history(histories)
        chosen = (torch.from_numpy(np.asarray(each[split][indices])) for each in (self.loss, self.lag, self.steps))
        loss_BG, lag_BG, steps_B = (each.to(source_BTE) for each in chosen)
        return GammaBatch((source_BTE, lengths_B, history), (loss_BG, lag_BG), steps_B)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    @torch.no_grad()
    def begin(self) -> None:
        """Initialise the head to predict the mean of the training windows, and scale its inputs to size 1."""
        head = self.model.gamma_head
        assert head is not None
        first, last = head.dense[0], head.dense[2]
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        seen: list[Tensor] = []
        watching = first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].double().cpu()))
        rng = np.random.default_rng(0)
        for start in range(0, len(self.examples[TRAIN]), 64):
            self.model.gamma_costs(*self.collate(TRAIN, list(range(start, min(start + 64, len(self.examples[TRAIN])))), rng).read)
        watching.remove()
        inputs_WE = torch.cat(seen)
        mean_E, size_E = inputs_WE.mean(0), inputs_WE.std(0, correction=0)
        size_E = torch.where(size_E > 1e-6, size_E, 1.0)
        weight = first.weight.double().cpu() / size_E
        first.bias.copy_(first.bias.double().cpu() - weight @ mean_E)
        first.weight.copy_(weight)
        if isinstance(head, InfLength):
            absent = (head.no_buffer, head.no_previous, head.no_text)
            for each, part_E in zip(absent, torch.split(mean_E, [one.numel() for one in absent]), strict=True):
                each.copy_(part_E)
        last.weight.zero_()
        last.bias.copy_(torch.from_numpy(np.concatenate([self.loss_G, self.lag_G])))


class _GammaLosses(nn.Module):
    """Sums of squared errors of a batch."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: GammaBatch) -> dict[str, Tensor]:
        pairs = zip(("loss", "lag"), self.model.gamma_costs(*batch.read), batch.targets, strict=True)
        return {name: ((said_BG - true_BG).square() * batch.steps_B[:, None]).sum() for name, said_BG, true_BG in pairs}


def with_gamma_head(model: Model, gammas: Sequence[float], seed: int) -> Model:
    """The same model with a new gamma head, the only part that is trained."""
    config = dataclasses.replace(model.config, gammas=tuple(gammas))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        learned = Model(config, model.tokenizer).eval()
    learned.load_state_dict({**learned.state_dict(), **model.state_dict()})
    learned.requires_grad_(False)
    assert learned.gamma_head is not None
    learned.gamma_head.requires_grad_(True)
    return learned


# A whole run.


@dataclass(frozen=True)
class TrainedRun:
    """A finished whole-dial run: recipe, model, corpus and features."""

    config: TrainConfig
    model: Model
    store: FeatureStore
    reading: Reading
    checkpoint_digest: str

    def examples(self, splits: tuple[str, str], *, limit: int | None = None, texts: int | None = None) -> dict[str, Sequence[TextExample]]:
        """Examples of two splits of the corpus, at most `texts` per clip."""
        assert self.model.tokenizer is not None
        config = dataclasses.replace(self.config, splits=splits)
        found, _ = make_examples(config, self.reading, self.store, self.model.tokenizer, None)
        per_clip = {split: groupby(examples, lambda example: example.window.clip) for split, examples in found.items()}
        return {split: [one for _, some in clips for one in islice(some, texts)][:limit] for split, clips in per_clip.items()}


def open_run(folder: str | Path, *, data: str | Path, store: str | Path | None = None) -> TrainedRun:
    """A training run with its best checkpoint and data."""
    path = Path(folder)
    config = recipe_of(path)
    reading = corpora.read(config.corpus, data)
    features = prepare_features(config, Path(data), Path(store) if store is not None else path / "features", reading.digest, None)
    model = Model.from_pretrained(path / BEST)
    if model.tokenizer is None:
        raise CheckpointError(f"{path / BEST}: the checkpoint has no tokenizer, which the corpus is read with")
    digest = hashlib.sha256((path / BEST / WEIGHTS).read_bytes()).hexdigest()
    return TrainedRun(dataclasses.replace(config, model=model.config), model, features, reading, digest)


def recipe_of(folder: Path) -> TrainConfig:
    """The recipe in a run's folder."""
    path = folder / RECIPE
    try:
        fields = json.loads(path.read_bytes())["recipe"]
    except FileNotFoundError:
        raise ConfigError(f"{folder}: not the folder of a training run: it holds no {RECIPE}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f'{path}: not the recipe of a training run: expected an object with "recipe"') from None
    return TrainConfig.from_dict(fields, str(path))


def learn_gamma(
    run_folder: str | Path, config: LearnConfig, *, data: str | Path, out: str | Path, store: str | Path | None = None,
    resume: bool = False, limit: int | None = None, report: Report = lambda _: None,
) -> TrainResult:  # fmt: skip
    """Train a gamma head on a whole-dial run, and price it for a budget: `out`/best is the model, `out`/gamma.json its results."""
    trained = open_run(run_folder, data=data, store=store)
    _check(trained, config)
    folder = Path(out)
    examples = trained.examples(trained.config.splits, limit=limit, texts=config.texts)
    signature = {
        "version": zendaya.__version__, "recipe": {**trained.config.to_dict(), "loop": dataclasses.asdict(config.loop)},
        "gammas": config.gammas, "budget": config.budget, "like": config.like, "lag": BUDGET_LAG, "texts": config.texts, "limit": limit,
        "checkpoint_digest": trained.checkpoint_digest, "data_digest": trained.reading.digest,
        "examples": {split: len(each) for split, each in examples.items()},
    }  # fmt: skip
    begin(folder, signature, resume)
    costs = {split: cached_costs(folder / f"costs-{split}.npz", trained, each, config.gammas, report) for split, each in examples.items()}
    budget = costs[VALID].mean(costs[VALID].lag, config.gammas.index(config.like)) if config.like is not None else config.budget
    assert budget is not None
    least = costs[VALID].mean(costs[VALID].lag, len(config.gammas) - 1)
    if budget < least:
        raise ConfigError(f"the largest gamma of the grid, {config.gammas[-1]}, lags {least:.3f} of the source: the budget is {budget:.3f}")
    task = GammaTask(
        with_gamma_head(trained.model, config.gammas, config.loop.seed), trained.store, examples, costs, trained.config.scale_tokens
    )
    task.begin()
    result = run(task, config.loop, folder, resume=resume, report=report)
    if not result.interrupted:
        _finish(folder, trained, examples[VALID], costs[VALID], task, budget, signature)
    return result


def _check(trained: TrainedRun, config: LearnConfig) -> None:
    schedule, name = trained.config.schedule, trained.config.name
    if not schedule.sampled:
        raise ConfigError(f"{name} was trained under {schedule} alone: a learned gamma needs a run trained with --schedule dial")
    if config.gammas[-1] > schedule.top:
        raise ConfigError(f"{name} was trained up to gamma {schedule.top:g}: the grid goes to {config.gammas[-1]:g}")
    dataclasses.replace(trained.model.config, gammas=config.gammas)  # checks the grid


def cached_costs(path: Path, trained: TrainedRun, examples: Sequence[TextExample], gammas: Sequence[float], report: Report) -> Costs:
    """Costs from a file, if of the same model, windows and grid; else measured, and written to it."""
    key = json.dumps([
        trained.checkpoint_digest, trained.store.signature.to_dict(), list(gammas), trained.config.scale_tokens,
        [dataclasses.astuple(example) for example in examples],
    ])  # fmt: skip
    digest = hashlib.sha256(key.encode()).hexdigest()
    if path.exists():
        with np.load(path, allow_pickle=False) as held:
            if str(held["digest"]) == digest:
                return Costs(held["steps_W"], held["loss_WG"], {name: held[name] for name in LAGS})
    costs = measure(trained.model, trained.store, examples, gammas, scale=trained.config.scale_tokens, report=report)
    data = io.BytesIO()
    arrays: dict[str, Any] = {"digest": np.array(digest), "steps_W": costs.steps_W, "loss_WG": costs.loss_WG, **costs.lags_WG}
    np.savez(data, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data.getvalue())
    return costs


@torch.no_grad()
def _finish(
    folder: Path, trained: TrainedRun, examples: Sequence[TextExample], costs: Costs, task: GammaTask, budget: float,
    signature: dict[str, Any],
) -> None:  # fmt: skip
    """Set the level and the price of the head on the validation split, and save it with its results."""
    model = Model.from_pretrained(folder / BEST)
    assert model.gamma_head is not None
    expected = expect(model, trained.store, examples, scale=trained.config.scale_tokens)
    weights_W = torch.from_numpy(costs.steps_W / costs.steps_W.sum())
    truth_WC = torch.from_numpy(np.concatenate([task.loss[VALID], costs.lag], 1))
    said_WC = torch.cat([expected.loss_WPG, expected.lag_WPG], -1)[:, 1:].double().mean(1)
    last = model.gamma_head.dense[2]
    assert isinstance(last, nn.Linear)
    last.bias.copy_(last.bias.double() + weights_W @ (truth_WC - said_WC))
    expected = expect(model, trained.store, examples, scale=trained.config.scale_tokens)
    price = solve_price(expected, costs, budget)
    model.config = dataclasses.replace(model.config, lag_price=price)
    model.save_pretrained(folder / BEST)
    places_W = expected.places(price)
    gammas = model.config.gammas
    share_G = np.bincount(places_W, weights=costs.steps_W, minlength=len(gammas)) / costs.steps_W.sum()

    def at(places: IntArray | int) -> dict[str, float]:
        return {"nll": costs.mean(costs.loss_WG, places), **{name: costs.mean(lag_WG, places) for name, lag_WG in costs.lags_WG.items()}}

    record = {
        **{key: value for key, value in signature.items() if key != "recipe"}, "seed": signature["recipe"]["loop"]["seed"],
        "budget": budget, "price": price, "valid": at(places_W), "chosen": dict(zip(map(str, gammas), share_G.tolist(), strict=True)),
        "fixed": {str(gamma): at(place) for place, gamma in enumerate(gammas)},
    }  # fmt: skip
    write_atomically(folder / GAMMA, json.dumps(record, indent=2).encode() + b"\n")
