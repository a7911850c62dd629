"""Adapters: what training changed of a published Whisper, small enough to ship, merged into plain weights when loaded.

Every dense layer W of encoder and decoder becomes W + U·D, U (out, rank) and D (rank, in). Norms and biases are replaced; the embedding,
which is the output projection too, stays. The length head is new and stored whole. An adapter is one safetensors file in fp16.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zendaya.errors import CheckpointError
from zendaya.nn.checkpoint import FILE_METADATA, check_tensors, digest, read_checkpoint, read_config, write_checkpoint
from zendaya.nn.config import MAX_WIDTH, ModelConfig
from zendaya.nn.model import Model
from zendaya.nn.whisper import WhisperWeights, load_encoder, whisper_decoder
from zendaya.records import check_record

if TYPE_CHECKING:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

ADAPTER = "adapter.safetensors"
"""The file name in the folder of a training run."""
LOOP_TOKENS = 8
"""The loop guard of adapters whose config sets none: Whisper is known to fall into loops, and people do not repeat a phrase this long."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What an adapter changes, and the model it makes."""

    base: str
    """The published Whisper it changes."""
    base_digest: str
    """SHA-256 of the base's weights."""
    rank: int
    block_s: float
    """Seconds of sound that the encoder hears at a time."""
    ceiling: float
    """The largest log-mel value, in place of each recording's own, which a stream does not know."""
    model: ModelConfig
    revise_s: float = 0.0
    """Seconds before a block that the encoder hears again with it."""

    def __post_init__(self) -> None:
        check_record(self, "adapter config", rank=(1, MAX_WIDTH), block_s=(0.02, 30), ceiling=(-100, 100), revise_s=(0, 30))


@dataclass(frozen=True)
class Adapter:
    """An adapter as it is stored: its config, and its tensors by the names of the weights they change."""

    config: AdapterConfig
    tensors: Mapping[str, Tensor]

    @property
    def digest(self) -> str:
        """SHA-256 of config and tensors."""
        return digest(self.tensors, {**FILE_METADATA, **self._metadata()})

    def _metadata(self) -> dict[str, str]:
        settings = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config) if field.name != "model"}
        if not self.config.revise_s:  # older files keep their digests
            del settings["revise_s"]
        return {"adapter": json.dumps(settings), "config": json.dumps(self.config.model.to_dict())}

    def save(self, path: Path) -> None:
        """Write one file, whole or not at all."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(path, self.tensors, self._metadata())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from None

    @staticmethod
    def load(path: Path) -> Adapter:
        """The adapter in a file, its checksum verified."""
        tensors, metadata = read_checkpoint(path)
        if "adapter" not in metadata:
            raise CheckpointError(f"{path}: expected an adapter: got a whole checkpoint; load it with Model.from_pretrained")
        settings, model = (read_config(dict, metadata[name], path) for name in ("adapter", "config"))
        return Adapter(read_config(AdapterConfig, {**settings, "model": model}, path), tensors)

    def build(self, weights: WhisperWeights, where: str | Path) -> tuple[WhisperEncoder, Model]:
        """The base's encoder and decoder with the adapter merged into their weights; a base or tensors that do not fit are refused."""
        config = self.config
        if (got := weights_digest(weights)) != config.base_digest:
            raise CheckpointError(
                f"{where}: made for {config.base} with weights sha256 {config.base_digest[:16]}…: got {got[:16]}…; "
                f"load it with the base it was trained on"
            )
        base = whisper_decoder(weights)
        if config.model.decoder != base.config.decoder:
            raise CheckpointError(f"{where}: its decoder is not its base's: expected {base.config.decoder}: got {config.model.decoder}")
        encoder = load_encoder(weights)
        settings = dataclasses.replace(config.model, loop_tokens=config.model.loop_tokens or LOOP_TOKENS)
        with torch.device("meta"):  # shapes alone, so that a config that claims too much allocates nothing
            model = Model(settings, base.tokenizer)
        heads = {name: tensor.float() for name, tensor in self.tensors.items() if not name.startswith(("encoder.", "decoder."))}
        check_tensors(where, {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("decoder.")}, heads)
        changed = {*_names(encoder, "encoder."), *_names(model.decoder, "decoder."), *heads}
        if odd := sorted(changed ^ self.tensors.keys()):
            raise CheckpointError(f"{where}: does not fit its base {config.base}: {odd[0]} is in one of the two only")
        model.load_state_dict({**{f"decoder.{name}": tensor for name, tensor in base.decoder.state_dict().items()}, **heads}, assign=True)
        model.alignment_heads = base.alignment_heads
        for module, prefix in ((encoder, "encoder."), (model.decoder, "decoder.")):
            for name, weight in module.named_parameters():
                self._change(prefix + name, weight)
        return encoder, model.eval()

    @torch.no_grad()
    def _change(self, name: str, weight: Tensor) -> None:
        if (whole := self.tensors.get(name)) is not None:
            got = tuple(whole.shape)
        elif f"{name}.up" in self.tensors:
            up, down = self.tensors[f"{name}.up"], self.tensors[f"{name}.down"]
            got = (*up.shape[:-1], *down.shape[1:]) if up.shape[-1:] == down.shape[:1] else (*up.shape, *down.shape)
        else:
            return
        changed = None if got != weight.shape else whole.float() if whole is not None else up.float() @ down.float()
        if changed is None or not bool(torch.isfinite(changed).all()):
            raise CheckpointError(f"adapter: {name}: expected finite numbers of shape {tuple(weight.shape)}: got shape {got}")
        weight.copy_(changed if whole is not None else weight + changed)


def interpolated(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """The adapter a share of the way from the base to what was learned; `base` are the base's own norms and biases.

    Models between the two are better than either: little of what the base knew is lost (Wortsman et al. 2022, WiSE-FT). The length head,
    which the base does not have, stays whole.
    """
    mixed = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".up"):
            mixed[name] = (share * tensor.float()).half()
        elif name in base and not name.endswith(".down"):
            mixed[name] = torch.lerp(base[name].float(), tensor.float(), share).half()
    return mixed


class LowRank(nn.Module):
    """The parametrization W ↦ W + U·D; U·D is zero at first."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.down = nn.Parameter(torch.empty(rank, inputs).uniform_(-1, 1, generator=generator) / math.sqrt(inputs))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def attach(module: nn.Module, rank: int, generator: torch.Generator) -> None:
    """Make a Whisper encoder or decoder trainable by adapters: dense layers at low rank, norms and biases whole, nothing else."""
    module.requires_grad_(False)
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.LayerNorm):
            part.requires_grad_(True)
        elif isinstance(part, nn.Linear) and name.startswith("layers."):
            if part.bias is not None:
                part.bias.requires_grad_(True)
            parametrize.register_parametrization(part, "weight", LowRank(part.weight, rank, generator))


def trained_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The tensors that training changes, in fp16, by the names an adapter stores them under."""
    return {
        prefix + name.replace(".parametrizations.weight.0.", ".weight."): parameter.detach().half()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def _names(module: nn.Module, prefix: str) -> Iterator[str]:
    """The names that `trained_tensors` gives for a module with adapters attached."""
    for name, part in module.named_modules():
        if isinstance(part, nn.LayerNorm):
            yield from (f"{prefix}{name}.{kind}" for kind in ("weight", "bias"))
        elif isinstance(part, nn.Linear) and name.startswith("layers."):
            yield from (f"{prefix}{name}.weight.{kind}" for kind in ("up", "down"))
            if part.bias is not None:
                yield f"{prefix}{name}.bias"


def weights_digest(weights: WhisperWeights) -> str:
    """SHA-256 of a published Whisper's weights, by which an adapter knows its base."""
    return digest(weights.state, {})
