"""The training loop: optimises any task, logs, validates, stops early, and resumes to the same bits.

A run is a function of its task, config and seed. Every random number (batch order, sampled schedules, dropout) comes from a generator
seeded by the seed and the position in the run. So a killed run resumes to the same bits, and processes that share the micro-batches
of a step compute the same as one process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from zendaya.errors import ConfigError, MissingExtraError, ZendayaError
from zendaya.records import Progress
from zendaya.training import state
from zendaya.training.buckets import plan
from zendaya.training.state import HISTORY, STATE, LoopState

if TYPE_CHECKING:
    from lightning_fabric import Fabric

BEST, LAST, TENSORBOARD = "best", "last", "tensorboard"
TRAIN, VALID = "train", "valid"
Report = Callable[[Progress], None]
_ORDER, _DRAW, _VALID = range(3)  # purpose of a random generator; part of its seed


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How a task is optimised; defaults are those of the paper where it states them (Sec. 5.1)."""

    epochs: int = 40
    batch_tokens: int = 8192  # padded source tokens and text rows of a micro-batch
    accumulate: int = 1  # micro-batches per optimiser step, over all processes together
    short_first: int = 0  # number of first epochs whose batches go from short examples to long ones
    learning_rate: float = 2e-4
    final_learning_rate: float = 0.0
    warmup_steps: int = 500
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0  # largest norm of the gradient
    patience: int = 5  # epochs without a better validation loss before the run ends
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    """auto: bf16-mixed on a GPU that supports it, else 32-true."""
    seed: int = 0
    save_every_s: float = 120.0  # seconds between saved states within an epoch; the end of an epoch always saves
    log_every: int = 50  # optimiser steps between lines of history within an epoch

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_tokens", "accumulate", "patience", "log_every"):
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"training config: {name} must be a whole number, at least 1: got {value!r}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"training config: {name} must be above 0: got {getattr(self, name)!r}")
        if not 0 <= self.final_learning_rate <= self.learning_rate:
            raise ConfigError(f"training config: final_learning_rate must lie in 0 … {self.learning_rate}: got {self.final_learning_rate}")
        if self.warmup_steps < 0 or self.weight_decay < 0 or self.save_every_s < 0:
            raise ConfigError(f"training config: warmup_steps, weight_decay and save_every_s must be at least 0: got {self}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"training config: seed must be a whole number from 0, below 2^63: got {self.seed!r}")
        if self.precision not in ("auto", "32-true", "bf16-mixed"):
            raise ConfigError(f"training config: precision must be auto, 32-true or bf16-mixed: got {self.precision!r}")


class Task(Protocol):
    """A training objective: examples by index, and sums whose weighted means are the loss."""

    module: nn.Module  # `module(batch)` gives named sums; its parameters with `requires_grad` are trained

    @property
    def weights(self) -> Mapping[str, float]:
        """loss = Σ weights[k] · sums[k] / counts[k], over the whole of an optimiser step."""

    def sizes(self, split: str) -> list[tuple[int, int]]:
        """Source tokens and text rows of each example of `train` or `valid`."""

    def counts(self, split: str, indices: list[int]) -> dict[str, int]:
        """Number of terms of each sum."""

    def collate(self, split: str, indices: list[int], rng: np.random.Generator) -> Any:
        """A batch for the module; all randomness is from `rng`."""

    def save(self, folder: Path) -> None:
        """Write the checkpoint that users load."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run."""

    folder: Path
    epochs: int
    steps: int
    tokens: int  # source tokens and text rows of the finished epochs, without padding
    best_loss: float
    best_epoch: int
    seconds: float
    interrupted: bool  # whether it was stopped by a signal; the same call with `resume` continues it


def learning_rate(config: LoopConfig, step: int, progress: float) -> float:
    """Linear warm-up, then a cosine over the finished share of the run.

    >>> config = LoopConfig(learning_rate=1.0, warmup_steps=10)
    >>> [round(learning_rate(config, step, share), 2) for step, share in ((0, 0.0), (4, 0.0), (50, 0.5), (99, 1.0))]
    [0.1, 0.5, 0.5, 0.0]
    """
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    rate = config.final_learning_rate + (config.learning_rate - config.final_learning_rate) * cosine
    return rate * min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else rate


def run(task: Task, config: LoopConfig, out: Path, *, resume: bool = False, report: Report = lambda _: None) -> TrainResult:
    """Train until the last epoch, the end of patience, or a signal to stop; `out` gets checkpoints, history and state."""
    fabric = _fabric(config)
    loop = _Loop(task, config, out, fabric, report)
    if resume:
        loop.restore()
    with _stop_on_signals() as stopped:
        return loop.go(stopped)


class _Sealed(nn.Module):
    """The task's module on a batch that Fabric does not convert: in mixed precision it would round all floats, even stored source ids."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, sealed: Callable[[], Any]) -> Any:
        return self.module(sealed())


class _Loop:
    def __init__(self, task: Task, config: LoopConfig, out: Path, fabric: Fabric, report: Report) -> None:
        self.task, self.config, self.out, self.fabric, self.report = task, config, out, fabric, report
        if config.accumulate % fabric.world_size:
            raise ConfigError(f"accumulate must be a multiple of the number of processes, {fabric.world_size}: got {config.accumulate}")
        trained = [parameter for parameter in task.module.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim > 1]
        others = [parameter for parameter in trained if parameter.ndim <= 1]  # biases and norms have no weight decay
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimiser = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fabric.device.type in ("cpu", "cuda"))
        self.module, self.optimiser = fabric.setup(_Sealed(task.module), optimiser)
        self._plain = optimiser
        self.progress = LoopState()
        self.board: Any = None
        self.valid_batches = plan(task.sizes(VALID), config.batch_tokens, np.random.default_rng((config.seed, _VALID, 0)))

    def restore(self) -> None:
        """Return to the last saved state; a run killed before its first save begins again."""
        if (self.out / STATE).exists():
            self.progress = state.load(self.out / STATE, self.task.module, self._plain)
        if self.fabric.is_global_zero and (self.out / HISTORY).exists():
            os.truncate(self.out / HISTORY, self.progress.history_bytes)

    def go(self, stopped: threading.Event) -> TrainResult:
        progress, config = self.progress, self.config
        begun, saved_at = time.monotonic() - progress.seconds, time.monotonic()
        if self.fabric.is_global_zero:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.out / TENSORBOARD), purge_step=progress.step + 1 if progress.step else None)
        interrupted = False
        while not progress.finished and not interrupted:
            order, short_first = np.random.default_rng((config.seed, _ORDER, progress.epoch)), progress.epoch < config.short_first
            micro = plan(self.task.sizes(TRAIN), config.batch_tokens, order, multiple=config.accumulate, short_first=short_first)
            groups = [micro[first : first + config.accumulate] for first in range(0, len(micro), config.accumulate)]
            while progress.batch < len(groups):
                loss = self._step(groups[progress.batch], (progress.epoch + progress.batch / len(groups)) / config.epochs)
                progress.batch += 1
                progress.step += 1
                progress.seconds = time.monotonic() - begun
                best = "" if progress.best is None else f", best {progress.best:.3f}"
                detail = f"epoch {progress.epoch + 1}/{config.epochs}, loss {loss:.3f}{best}"
                self.report(Progress(progress.step, len(groups) * config.epochs, "training", detail))
                interrupted = self._any(stopped.is_set())
                if interrupted:
                    break
                if progress.batch < len(groups) and self._any(time.monotonic() - saved_at > config.save_every_s):
                    self._save()
                    saved_at = time.monotonic()
            if interrupted and progress.batch < len(groups):
                break
            self._end_epoch(len(groups))
            saved_at = time.monotonic()
        if interrupted and not progress.finished:
            self._save()
        if self.board is not None:
            self.board.close()
        assert progress.best is not None or interrupted
        return TrainResult(
            folder=self.out, epochs=progress.epoch, steps=progress.step, tokens=progress.epoch * sum(map(sum, self.task.sizes(TRAIN))),
            best_loss=math.inf if progress.best is None else progress.best, best_epoch=progress.best_epoch,
            seconds=progress.seconds, interrupted=interrupted and not progress.finished,
        )  # fmt: skip

    def _step(self, micro: list[list[int]], share: float) -> float:
        """One optimiser step over its micro-batches; this process takes every world_size-th of them."""
        config, progress, fabric = self.config, self.progress, self.fabric
        rate = learning_rate(config, progress.step, share)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        counts = _total(self.task.counts(TRAIN, indices) for indices in micro)
        mine = range(fabric.global_rank, len(micro), fabric.world_size)
        self.module.train()
        sums: dict[str, float] = {}
        for place in mine:
            batch = self.task.collate(TRAIN, micro[place], np.random.default_rng((config.seed, _DRAW, progress.step, place)))
            dropout_seed = np.random.SeedSequence((config.seed, progress.step, place)).generate_state(1, np.uint64)[0]
            torch.manual_seed(int(dropout_seed >> np.uint64(1)))
            with fabric.no_backward_sync(self.module, enabled=place != mine[-1]):
                parts: dict[str, Tensor] = self.module(lambda batch=batch: batch)
                loss = sum(((self.task.weights[k] / counts[k]) * v for k, v in parts.items()), torch.zeros((), device=fabric.device))
                fabric.backward(loss * fabric.world_size)  # processes average their gradients; the loss is a sum over them
            for key, part in parts.items():
                sums[key] = sums.get(key, 0.0) + float(part.detach())
        norm = fabric.clip_gradients(self.module, self.optimiser, max_norm=config.clip, error_if_nonfinite=False)
        assert norm is not None
        if not math.isfinite(float(norm)):
            advice = f"lower the learning rate, or check the features ({self.out / STATE} holds the last good state)"
            raise ZendayaError(f"training failed at step {progress.step + 1}: the gradient is not finite; {advice}")
        self.optimiser.step()
        self.optimiser.zero_grad()
        sums = self._reduce(sums)
        means = {key: sums[key] / counts[key] for key in sums}
        loss_value = sum(self.task.weights[key] * mean for key, mean in means.items())
        for key, value in (*sums.items(), *((f"count/{key}", count) for key, count in counts.items())):
            progress.sums[key] = progress.sums.get(key, 0.0) + value
        if (progress.step + 1) % config.log_every == 0:
            self._log("step", {"loss": loss_value, **means, "learning_rate": rate, "grad_norm": float(norm)}, step=progress.step + 1)
        return loss_value

    def _end_epoch(self, num_steps: int) -> None:
        progress, config = self.progress, self.config
        train = {key: value / progress.sums[f"count/{key}"] for key, value in progress.sums.items() if not key.startswith("count/")}
        valid = self.validate()
        loss = sum(self.task.weights[key] * mean for key, mean in valid.items())
        progress.epoch += 1
        progress.batch, progress.sums = 0, {}
        progress.bad_epochs += 1
        better = progress.best is None or loss < progress.best
        if better:
            progress.best, progress.best_epoch, progress.bad_epochs = loss, progress.epoch, 0
        progress.finished = progress.epoch >= config.epochs or progress.bad_epochs >= config.patience
        if self.fabric.is_global_zero and better:
            self.task.save(self.out / BEST)
        train_loss = sum(self.task.weights[key] * mean for key, mean in train.items())
        record = {"train_loss": train_loss, "valid_loss": loss, "best": better, "steps": num_steps}
        self._log("epoch", {**record, **{f"train_{k}": v for k, v in train.items()}, **{f"valid_{k}": v for k, v in valid.items()}})
        self._save()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Means over the validation split, with the same random numbers each time."""
        self.module.eval()
        sums: dict[str, float] = {}
        batches = self.valid_batches
        for place in range(self.fabric.global_rank, len(batches), self.fabric.world_size):
            batch = self.task.collate(VALID, batches[place], np.random.default_rng((self.config.seed, _VALID, 1, place)))
            for key, value in self.task.module(batch).items():
                sums[key] = sums.get(key, 0.0) + float(value)
        counts = _total(self.task.counts(VALID, indices) for indices in batches)
        sums = self._reduce({key: sums.get(key, 0.0) for key in self.task.weights})
        return {key: sums[key] / counts[key] for key in sums if counts.get(key)}

    def _reduce(self, sums: dict[str, float]) -> dict[str, float]:
        if self.fabric.world_size == 1:
            return sums
        keys = sorted(self.task.weights)
        total = self.fabric.all_reduce(torch.tensor([sums.get(key, 0.0) for key in keys], dtype=torch.float64), reduce_op="sum")
        assert isinstance(total, Tensor)
        return dict(zip(keys, total.tolist(), strict=True))

    def _any(self, here: bool) -> bool:
        """Whether it holds in any process: all must stop, or save, after the same step."""
        if self.fabric.world_size == 1:
            return here
        total = self.fabric.all_reduce(torch.tensor(float(here)), reduce_op="sum")
        assert isinstance(total, Tensor)
        return bool(total > 0)

    def _log(self, kind: str, values: Mapping[str, Any], step: int | None = None) -> None:
        if not self.fabric.is_global_zero:
            return
        step = self.progress.step if step is None else step
        record = {"kind": kind, "step": step, "epoch": self.progress.epoch, "seconds": round(self.progress.seconds, 1), **values}
        with (self.out / HISTORY).open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())  # the saved state counts its bytes
            self.progress.history_bytes = file.tell()
        for key, value in values.items():
            if isinstance(value, float):
                self.board.add_scalar(f"{kind}/{key}", value, step)

    def _save(self) -> None:
        if self.fabric.is_global_zero:
            state.save(self.out / STATE, self.task.module, self._plain, self.progress)
            self.task.save(self.out / LAST)
        self.fabric.barrier()


def _fabric(config: LoopConfig) -> Fabric:
    """One process, or those that torchrun started, on the available device."""
    try:
        from lightning_fabric import Fabric
    except ModuleNotFoundError:
        raise MissingExtraError("lightning-fabric", "train", "training") from None
    precision = config.precision
    if precision == "auto":
        precision = "bf16-mixed" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "32-true"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // local
    strategy = "ddp" if local * nodes > 1 else "auto"
    fabric = Fabric(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=local, num_nodes=nodes, strategy=strategy, precision=precision
    )
    fabric.launch()
    return fabric


def _total(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return total


@contextlib.contextmanager
def handling(handler: Callable[[int, Any], object], *numbers: signal.Signals) -> Iterator[None]:
    """A handler of signals, for the duration; only the main thread can set one, so elsewhere nothing changes."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if main}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM make the loop save and stop after its step; a second Ctrl-C stops at once."""
    stopped = threading.Event()

    def ask(number: int, frame: object) -> None:
        if stopped.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped.set()

    with handling(ask, signal.SIGINT, signal.SIGTERM):
        yield stopped
