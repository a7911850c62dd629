"""The cost of a grid: steps, tokens and FLOPs from the configs, hours from a measured rate with its origin."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zendaya.encoders.base import Tokens
from zendaya.errors import ConfigError
from zendaya.evaluation.evaluate import evaluate
from zendaya.nn.model import Model
from zendaya.records import Clip
from zendaya.research.bench import torch_threads
from zendaya.research.sweep.grids import Arm, Grid
from zendaya.research.sweep.table import Record, Row
from zendaya.runtime.options import DecodeOptions
from zendaya.schedule import PowerLaw
from zendaya.training.decoding import DecodingTask, StoredWindow, TextExample
from zendaya.training.loop import TRAIN, VALID
from zendaya.training.train import TrainConfig

FILL = 0.85  # share of a batch that is not padding: 0.81 to 0.88, counted over batches of the small recipes
CALIBRATION_TOKENS = 1024  # most tokens of a calibration step on a CPU; on a GPU it is a whole micro-batch


@dataclass(frozen=True)
class Rate:
    """Speed of training and decoding a recipe, and its origin."""

    tokens_per_s: float  # source tokens and text rows per second of training
    decoded_per_s: float | None  # clips decoded per second; None where not measured
    where: str


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Expected cost of one training run and its decodes."""

    config: TrainConfig
    arm: Arm
    modes: tuple[str, ...]
    num_decodes: int
    steps: int | None
    """Without early stopping, with batches that are FILL full; None where the size of the corpus is unknown."""
    tokens: int | None
    flops: float | None
    train_h: float | None
    decode_h: float | None
    rate: Rate | None


def flops_per_example(config: TrainConfig, *, source: float, steps: float) -> float:
    """Floating-point operations of one training example: the matrix products of a forward pass, times three (backward costs two).

    The length head and element-wise operations are left out. The inf form includes the window before.
    """
    shape = config.model.decoder
    dim, inner = shape.dim, shape.heads * shape.head_dim
    rows, read = steps * _windows(config), source * _windows(config)
    projections = 2 * dim * inner
    self_attention = rows * (4 * projections + 4 * inner * rows)
    cross_attention = rows * 2 * projections + read * 2 * projections + 4 * inner * rows * source
    forward = shape.layers * (self_attention + cross_attention + rows * 4 * dim * shape.ffn_dim)
    forward += steps * 2 * dim * shape.vocab_size
    if shape.embed_source and not shape.source_vocab:
        forward += read * 2 * shape.source_dim * dim
    forward += shape.source_layers * read * (4 * projections + 4 * inner * source + 4 * dim * shape.ffn_dim)
    if config.alignment is not None:
        forward += source * config.alignment_slots * 2 * dim * shape.vocab_size
    return 3 * forward


def _windows(config: TrainConfig) -> int:
    """Windows per example: the inf form also reads the window before."""
    return 2 if config.form == "inf" else 1


def estimates(grid: Grid, rates: Mapping[str, Rate]) -> Iterator[Estimate]:
    """Expected cost of each training run of a grid, at the rate of its recipe."""
    for arm in grid.arms:
        for config in arm.configs():
            yield _estimate(arm, config, rates.get(config.name))


def _estimate(arm: Arm, config: TrainConfig, rate: Rate | None) -> Estimate:
    sizes = arm.sizes
    steps = tokens = flops = train_h = decode_h = None
    num_decodes = sum(len(decode.schedules) for decode in arm.decodes)
    if sizes is not None:
        examples = min(sizes.train_examples, arm.limit or sizes.train_examples)
        per_epoch = examples * (sizes.source_tokens + sizes.steps) * _windows(config)
        tokens = round(config.loop.epochs * per_epoch)
        steps = config.loop.epochs * math.ceil(per_epoch / (FILL * config.loop.batch_tokens * config.loop.accumulate))
        flops = config.loop.epochs * examples * flops_per_example(config, source=sizes.source_tokens, steps=sizes.steps)
        if rate is not None:
            train_h = tokens / rate.tokens_per_s / 3600
            clips = sum(len(decode.schedules) * min(sizes.decode_clips, decode.limit or sizes.decode_clips) for decode in arm.decodes)
            decode_h = clips / rate.decoded_per_s / 3600 if rate.decoded_per_s else None
    return Estimate(
        config=config, arm=arm, modes=tuple(dict.fromkeys(decode.mode for decode in arm.decodes)), num_decodes=num_decodes, steps=steps,
        tokens=tokens, flops=flops, train_h=train_h, decode_h=decode_h, rate=rate,
    )  # fmt: skip


# Rates.


def known_rates(grid: Grid, records: Mapping[str, Record], rows: list[Row]) -> dict[str, Rate]:
    """Rates of recipes that have run already, from their records."""
    rates = {}
    for name in {arm.recipe.name for arm in grid.arms}:
        runs = [one for one in records.values() if one.kind == "train" and one.status == "done" and one.recipe == name]
        timed = [(one.tokens, one.seconds) for one in runs if one.tokens and one.seconds > 0]
        if not timed:
            continue
        decodes = {row.cell: (row.n, row.seconds) for row in rows if row.recipe == name and row.seconds > 0}
        clips, seconds = (sum(values) for values in zip(*decodes.values(), strict=True)) if decodes else (0, 0.0)
        per_s = sum(tokens for tokens, _ in timed) / sum(seconds for _, seconds in timed)
        rates[name] = Rate(per_s, clips / seconds if seconds else None, f"measured in {len(timed)} runs of {name} in this folder")
    return rates


def given_rates(grid: Grid, tokens_per_s: float) -> dict[str, Rate]:
    """One given rate for all recipes."""
    if not 0 < tokens_per_s < math.inf:
        raise ConfigError(f"--tokens-per-s must be above 0: got {tokens_per_s}")
    return {arm.recipe.name: Rate(tokens_per_s, None, "given by --tokens-per-s") for arm in grid.arms}


def measured_rates(grid: Grid) -> dict[str, Rate]:
    """Rates of this machine: one short step and one decode per decoder shape; other recipes of that shape follow by FLOPs."""
    rates: dict[str, Rate] = {}
    speeds: dict[object, tuple[float, float]] = {}
    for arm in grid.arms:
        config, sizes = arm.recipe, arm.sizes
        if config.name in rates or sizes is None:
            continue
        shape = config.model.decoder
        like = (shape.dim, shape.layers, shape.heads, shape.head_dim, shape.ffn_dim, shape.source_layers, config.alignment is None)
        if like not in speeds:
            speeds[like] = _calibrate(config, source=round(sizes.source_tokens), steps=round(sizes.steps))
        flops_per_s, steps_per_s = speeds[like]
        per_example = flops_per_example(config, source=sizes.source_tokens, steps=sizes.steps)
        per_token = per_example / (sizes.source_tokens + sizes.steps) / _windows(config)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "1 core of this machine, CPU time"
        where = f"measured now, one step on {device}: {flops_per_s / 1e9:.1f} GFLOP/s"
        rates[config.name] = Rate(flops_per_s / per_token, steps_per_s / sizes.steps, where)
    return rates


class _Noise:
    """A store of random tokens."""

    def __init__(self, config: TrainConfig, source: int) -> None:
        rng, shape = np.random.default_rng(0), config.model.decoder
        values = rng.integers(0, shape.source_vocab, (source, 1)) if shape.source_vocab else rng.standard_normal((source, shape.source_dim))
        self.tokens = Tokens(torch.from_numpy(values.astype(np.float32)), np.arange(1, source + 1, dtype=np.float64))

    def get(self, clip: str, split: str) -> Tokens:
        return self.tokens


def _calibrate(config: TrainConfig, *, source: int, steps: int) -> tuple[float, float]:
    """Training FLOPs per second and decode steps per second at a recipe's shape, on random tokens."""
    source, steps = min(source, config.model.decoder.max_source), min(steps, config.model.max_steps - 1)
    cuda = torch.cuda.is_available()
    num = max(1, (config.loop.batch_tokens if cuda else min(config.loop.batch_tokens, CALIBRATION_TOKENS)) // (source + steps))
    window = StoredWindow("train", "noise", source, tuple(5 + number % 200 for number in range(max(1, steps - 1))))
    examples: dict[str, Sequence[TextExample]] = {TRAIN: [TextExample(window)] * num, VALID: [TextExample(window)]}
    config = dataclasses.replace(config, form="fix", scale="segment", schedule=PowerLaw(0.3))
    with torch_threads(1), torch.random.fork_rng():
        model = Model(config.model).to("cuda" if cuda else "cpu")
        store: Any = _Noise(config, source)
        task = DecodingTask(model, store, examples, config, rho=1.0)
        optimiser = torch.optim.AdamW(task.module.parameters(), lr=1e-4, fused=True)
        step_s = min(_step(task, optimiser, num) for _ in range(2))
        clip = Clip(corpus="noise", id="noise", split="train", stream="noise", references=("noise",))
        begun = _clock()
        (trace,) = evaluate(model.cpu(), [(clip, store.tokens)], DecodeOptions(schedule=PowerLaw(0.3), steps=steps))
        decode_s = _clock() - begun
    return num * flops_per_example(config, source=source, steps=steps) / step_s, len(trace.tokens) / decode_s


def _clock() -> float:
    """CPU time, which other work on the machine does not stretch; with a GPU, wall-clock time."""
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def _step(task: DecodingTask, optimiser: torch.optim.Optimizer, num: int) -> float:
    begun = _clock()
    task.module.train()
    lesson = task.collate(TRAIN, list(range(num)), np.random.default_rng(0))
    loss = sum(task.module(lesson).values())
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    optimiser.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return _clock() - begun
