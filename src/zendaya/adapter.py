"""Adapters: what a training changed of a published Whisper, small enough to ship, and merged into plain weights when loaded.

Every dense layer W of encoder and decoder becomes W + U·D, U (out, rank) and D (rank, in); norms and biases are changed as they are; the
embedding, which is the output projection too, stays. The length head is new and kept whole. All of it is one safetensors file in fp16.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zendaya.atomic import write_atomically
from zendaya.encoders.whisper import WhisperWeights
from zendaya.errors import CheckpointError, ConfigError
from zendaya.model import FORMAT, Model, ModelConfig, digest, read_checkpoint

if TYPE_CHECKING:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

ADAPTER = "adapter.safetensors"
"""The file's name in a folder a training wrote."""
_PARAMETRIZED = (".parametrizations.", ".original")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What an adapter was made for."""

    base: str
    """The published Whisper it changes."""
    base_digest: str
    rank: int
    block_s: float
    ceiling: float
    model: ModelConfig

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ConfigError(f"adapter config: rank must be a whole number, at least 1: got {self.rank!r}")


@dataclass(frozen=True)
class Adapter:
    """An adapter as it is kept: its config and its tensors, named by the weights they change."""

    config: AdapterConfig
    tensors: Mapping[str, Tensor]

    @property
    def digest(self) -> str:
        return digest(self.tensors, self._metadata())

    def _metadata(self) -> dict[str, str]:
        settings = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config) if field.name != "model"}
        config = json.dumps(self.config.model.to_dict())
        return {"format": "pt", "zendaya_format": str(FORMAT), "adapter": json.dumps(settings), "config": config}

    def save(self, path: Path) -> None:
        """Write one file, whole or not at all."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        metadata = {**self._metadata(), "sha256": self.digest}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, safetensors.torch.save(tensors, metadata))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from None

    @staticmethod
    def load(path: Path) -> Adapter:
        """The adapter in a file, its checksum verified."""
        tensors, metadata = read_checkpoint(path)
        if "adapter" not in metadata:
            raise CheckpointError(f"{path}: expected an adapter: got a whole checkpoint; load it with Model.from_pretrained")
        try:
            config = AdapterConfig(
                **json.loads(metadata["adapter"]), model=ModelConfig.from_dict(json.loads(metadata["config"]), str(path))
            )
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: not an adapter of this version: {error}") from None
        return Adapter(config, tensors)

    def merge(self, encoder: WhisperEncoder, model: Model) -> None:
        """Put it into the weights of its base; a tensor that has no place there, or a place that gets none, is refused."""
        expected = set(_names(encoder, "encoder.")) | set(_names(model.decoder, "decoder.")) | set(_whole(model.length, "length."))
        if odd := sorted(expected ^ self.tensors.keys()):
            raise CheckpointError(f"the adapter does not fit its base {self.config.base}: {odd[0]} is on one side only")
        with torch.no_grad():
            for module, prefix in ((encoder, "encoder."), (model.decoder, "decoder."), (model.length, "length.")):
                for name, weight in module.named_parameters() if module is not None else ():
                    self._change(prefix + name, weight)

    def _change(self, name: str, weight: Tensor) -> None:
        up, down, whole = (self.tensors.get(key) for key in (f"{name}.up", f"{name}.down", name))
        changed = whole.float() if whole is not None else up.float() @ down.float() if up is not None and down is not None else None
        if changed is None:
            return
        if changed.shape != weight.shape or not bool(torch.isfinite(changed).all()):
            raise CheckpointError(f"the adapter's {name} should be finite and {tuple(weight.shape)}: got {tuple(changed.shape)}")
        weight.copy_(changed if whole is not None else weight + changed)


def softened(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """A share of the way from the base to what was learned; `base` are its own norms and biases.

    Between the two lie better models than either: what was learned from little data is kept, and less of what the base knew is lost
    (Wortsman et al. 2022, WiSE-FT). The length head, which the base has not, stays whole.
    """
    soft = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".up"):
            soft[name] = (share * tensor.float()).half()
        elif name in base and not name.endswith(".down"):
            soft[name] = torch.lerp(base[name].float(), tensor.float(), share).half()
    return soft


class LowRank(nn.Module):
    """W ↦ W + U·D, zero at first."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.down = nn.Parameter(torch.empty(rank, inputs).uniform_(-1, 1, generator=generator) / math.sqrt(inputs))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def attach(module: nn.Module, rank: int, generator: torch.Generator) -> None:
    """Make a Whisper encoder or decoder trainable by adapters: its dense layers at low rank, norms and biases whole, nothing else."""
    module.requires_grad_(False)
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.LayerNorm):
            part.requires_grad_(True)
        elif isinstance(part, nn.Linear) and name.startswith("layers."):
            if part.bias is not None:
                part.bias.requires_grad_(True)
            parametrize.register_parametrization(part, "weight", LowRank(part.weight, rank, generator))


def trained(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The tensors a training changed, in fp16, under the names an adapter keeps them by."""
    return {
        prefix + name.replace(".parametrizations.weight.0.", ".weight."): parameter.detach().half()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def _names(module: nn.Module, prefix: str) -> Iterator[str]:
    """The names `trained` gives for a module that `attach` was called on."""
    for name, part in module.named_modules():
        if isinstance(part, nn.LayerNorm):
            yield from (f"{prefix}{name}.{kind}" for kind in ("weight", "bias"))
        elif isinstance(part, nn.Linear) and name.startswith("layers."):
            yield from (f"{prefix}{name}.weight.{kind}" for kind in ("up", "down"))
            if part.bias is not None:
                yield f"{prefix}{name}.bias"


def _whole(module: nn.Module | None, prefix: str) -> Iterator[str]:
    return (prefix + name for name, _ in module.named_parameters()) if module is not None else iter(())


def weights_digest(weights: WhisperWeights) -> str:
    """SHA-256 of a published Whisper's weights, by which an adapter knows its base."""
    return digest(weights.state, {})


def check_base(adapter: Adapter, weights: WhisperWeights, where: Any) -> None:
    """Refuse a base other than the one an adapter was trained on."""
    if (got := weights_digest(weights)) != adapter.config.base_digest:
        raise CheckpointError(
            f"{where}: made for {adapter.config.base} with weights sha256 {adapter.config.base_digest[:16]}…: got {got[:16]}…; "
            f"load it with the base it was trained on"
        )
