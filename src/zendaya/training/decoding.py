"""The decoding task: teacher-forced text under the horizons of each example, and the length head (Algorithm 1, Sec. 3.1).

Shape suffixes as in decoder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from zendaya.data.features.store import FeatureStore
from zendaya.errors import ConfigError
from zendaya.nn.decoder import Intermediates
from zendaya.nn.model import Batch, Model
from zendaya.training import alignment

if TYPE_CHECKING:
    from zendaya.training.train import TrainConfig


@dataclass(frozen=True)
class StoredWindow:
    """A clip in a feature store, and its text as ids without the end."""

    split: str
    clip: str
    num_source: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TextExample:
    """One window to learn, alone (fix) or after the window before it (inf)."""

    window: StoredWindow
    before: StoredWindow | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Source tokens and text rows, of both windows."""
        windows = [window for window in (self.window, self.before) if window is not None]
        return sum(window.num_source for window in windows), sum(len(window.ids) + 1 for window in windows)


def read_windows(model: Model, store: FeatureStore, examples: Sequence[TextExample]) -> tuple[list[Tensor], list[Any] | None]:
    """The source of each window, and the window before it with its text, for models that read one."""
    sources = [store.get(example.window.clip, example.window.split).values_TE for example in examples]
    if not model.config.history:
        return sources, None
    before = [example.before for example in examples]
    return sources, [None if window is None else (store.get(window.clip, window.split).values_TE, window.ids) for window in before]


@dataclass
class DecodingBatch:
    """A batch, and the inputs and targets of its length head."""

    batch: Batch
    buffers_B: Tensor  # source tokens that the length head may read
    steps_B: Tensor


class DecodingTask:
    """Teacher-forced decoding as a task of the loop."""

    def __init__(
        self, model: Model, store: FeatureStore, examples: dict[str, Sequence[TextExample]], config: TrainConfig, rho: float
    ) -> None:
        """`rho` is mean F / mean N of the training split: the default stride of wait-k."""
        self.model, self.store, self.examples, self.config, self.rho = model, store, examples, config, rho
        self.schedule = config.schedule.for_run(rho)
        slots = config.alignment_slots if config.alignment is not None else 0
        self.module: nn.Module = _DecodingLosses(model, config.label_smoothing, slots=slots)
        self.weights = {"nll": 1.0} | ({"length": config.length_weight} if model.length is not None else {})
        if config.alignment is not None:
            self.weights |= {"ctc": config.alignment, "guide": config.alignment}

    def sizes(self, split: str) -> list[tuple[int, int]]:
        return [example.size for example in self.examples[split]]

    def counts(self, split: str, indices: list[int]) -> dict[str, int]:
        examples = self.examples[split]
        counts = {"nll": sum(len(examples[index].window.ids) + 1 for index in indices)}
        if self.config.alignment is not None and split == "train":
            counts |= {"ctc": counts["nll"], "guide": counts["nll"]}
        return counts | ({"length": len(indices)} if "length" in self.weights else {})

    def collate(self, split: str, indices: list[int], rng: np.random.Generator) -> DecodingBatch:
        examples = [self.examples[split][index] for index in indices]
        model, config, scale = self.model, self.config, self.config.scale_tokens
        schedules = [self.schedule.draw(rng, source=scale or example.window.num_source, stride=self.rho) for example in examples]
        sources, histories = read_windows(model, self.store, examples)
        if split == "train" and config.source_noise:
            sources = [
                source.masked_fill(torch.from_numpy(rng.random((source.shape[0], 1)) < config.source_noise), 0.0) for source in sources
            ]
        batch = model.batch(sources, [example.window.ids for example in examples], schedules, scale=scale, histories=histories)
        numbers = [source.shape[0] for source in sources]
        if model.config.length == "inf":
            numbers = [min(n, s.buffer(scale or n, model.config.max_steps)) for n, s in zip(numbers, schedules, strict=True)]
        steps_B = torch.tensor([model.paced(len(example.window.ids) + 1, example.window.num_source) for example in examples])
        device = batch.ids_BN.device
        return DecodingBatch(batch, torch.tensor(numbers, device=device), steps_B.to(device))

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class _DecodingLosses(nn.Module):
    """Sums of the losses of a batch."""

    def __init__(self, model: Model, label_smoothing: float, *, slots: int = 0) -> None:
        """`slots` is the number of CTC outputs per source token; 0 for no alignment."""
        super().__init__()
        self.model, self.label_smoothing, self.slots = model, label_smoothing, slots
        dim = model.config.decoder.dim
        self.source_norm = nn.LayerNorm(dim) if slots else None
        self.source_slots = nn.Linear(dim, slots * dim) if slots > 1 else None

    def forward(self, decoding_batch: DecodingBatch) -> dict[str, Tensor]:
        batch = decoding_batch.batch
        intermediates = Intermediates() if self.source_norm is not None and self.training else None
        sums = {"nll": self.model.loss(batch, label_smoothing=self.label_smoothing if self.training else 0.0, intermediates=intermediates)}
        if intermediates is not None:
            sums |= self._align(batch, intermediates)
        if self.model.length is not None:
            logits_BC = self.model.length_logits(batch.source_BFE, decoding_batch.buffers_B, batch.history)
            sums["length"] = functional.cross_entropy(logits_BC, decoding_batch.steps_B - 1, reduction="sum")
        return sums

    def _align(self, batch: Batch, intermediates: Intermediates) -> dict[str, Tensor]:
        """CTC over the source tokens, with the decoder's output weights, and attention to the places it finds."""
        assert self.source_norm is not None
        assert intermediates.memory_BFD is not None
        tokens_VD, memory_BFD = self.model.decoder.tokens.weight, intermediates.memory_BFD
        if self.source_slots is not None:
            memory_BFD = self.source_slots(memory_BFD).unflatten(2, (self.slots, -1)).flatten(1, 2)
        log_probs_BFV = functional.linear(self.source_norm(memory_BFD), tokens_VD).float().log_softmax(-1)
        lengths_B = (batch.targets_BN >= 0).sum(1) - 1  # without the end, which is not spoken
        text_BN = batch.targets_BN[:, :-1]
        text_BN = text_BN.masked_fill(torch.arange(text_BN.shape[1], device=text_BN.device) >= lengths_B[:, None], alignment.BLANK)
        said = (batch.source_lengths_B * self.slots, text_BN, lengths_B)
        prompt = len(self.model.config.framing.prompt) - 1
        rows = slice(prompt, prompt + text_BN.shape[1])
        guide = alignment.guide_loss(
            [weights_BNF[:, rows] for weights_BNF in intermediates.log_weights], batch.horizons_BN[:, rows],
            alignment.places(log_probs_BFV, *said).div(self.slots, rounding_mode="floor"),
        )  # fmt: skip
        return {"ctc": alignment.ctc_loss(log_probs_BFV, *said), "guide": guide}


def standardise(model: Model, store: FeatureStore, windows: Sequence[StoredWindow], *, most: int = 500) -> None:
    """Fold mean and scale of the training features into the source projection, so that its inputs begin at scale 1."""
    projection = model.decoder.source_projection
    if projection is None:
        return
    chosen = windows[:: max(1, len(windows) // most)]
    rows_TE = torch.cat([store.get(window.clip, window.split).values_TE for window in chosen]).double()
    mean_E = rows_TE.mean(0)
    size = float((rows_TE - mean_E).square().mean().sqrt())
    if not 0 < size < float("inf"):
        raise ConfigError(f"{store.path}: the training features are constant or not finite: standard deviation {size}; check the encoder")
    with torch.no_grad():
        projection.weight.div_(size)
        projection.bias.sub_((projection.weight.double() @ mean_E).float())
