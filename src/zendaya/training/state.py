"""The state of a run between two optimiser steps, in one file that is replaced atomically."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from zendaya.errors import CheckpointError, ConfigError
from zendaya.files import write_atomically
from zendaya.nn.checkpoint import RECIPE

STATE, HISTORY = "state.safetensors", "history.jsonl"
FORMAT = 1


@dataclass
class LoopState:
    """The position of a run. Random numbers depend on (seed, step) alone, so no generator state is saved."""

    epoch: int = 0  # finished epochs
    batch: int = 0  # finished optimiser steps of the current epoch
    step: int = 0  # finished optimiser steps
    best: float | None = None
    best_epoch: int = 0
    bad_epochs: int = 0  # validations since the best one
    finished: bool = False
    history_bytes: int = 0  # length of history.jsonl at this state; later lines are written again
    sums: dict[str, float] = field(default_factory=dict)  # sums of the current epoch, for its line of history
    seconds: float = 0.0  # time spent so far, over all restarts


def save(path: Path, module: nn.Module, optimiser: torch.optim.Optimizer, progress: LoopState) -> None:
    """Write trained parameters, their optimiser state and the position of the run."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(module):
        tensors[f"weight/{name}"] = parameter.detach().cpu().contiguous()
        for key, value in optimiser.state[parameter].items():
            tensors[f"optimiser/{key}/{name}"] = value.detach().cpu().contiguous()
    metadata = {"zendaya_state": str(FORMAT), "progress": json.dumps(asdict(progress))}
    metadata["sha256"] = _digest(tensors, metadata["progress"])
    try:
        write_atomically(path, safetensors.torch.save(tensors, metadata))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}; the state before it is intact") from None


def load(path: Path, module: nn.Module, optimiser: torch.optim.Optimizer) -> LoopState:
    """Restore a saved state: the run continues as if it had never stopped."""
    try:
        data = path.read_bytes()
        tensors = safetensors.torch.load(data)
        metadata: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (safetensors.SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole state of a run ({error}); start the run again") from None
    if metadata.get("zendaya_state") != str(FORMAT) or metadata.get("sha256") != _digest(tensors, metadata.get("progress", "")):
        raise CheckpointError(f"{path}: not a state of this version, or damaged; start the run again")
    expected = {f"weight/{name}": tuple(parameter.shape) for name, parameter in _trained(module)}
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith("weight/")}
    if expected != got:
        raise CheckpointError(f"{path}: the state of another model: {sorted(expected.items() ^ got.items())[0][0]} does not fit")
    trained = dict(_trained(module))
    with torch.no_grad():
        for full_name, tensor in tensors.items():
            kind, _, rest = full_name.partition("/")
            if kind == "weight":
                trained[rest].copy_(tensor)
            else:
                key, _, name = rest.partition("/")
                optimiser.state[trained[name]][key] = tensor.to(trained[name].device).clone()
    return LoopState(**json.loads(metadata["progress"]))


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _digest(tensors: dict[str, Tensor], progress: str) -> str:
    digest = hashlib.sha256(progress.encode())
    for name in sorted(tensors):
        digest.update(f"{name}\0{tensors[name].dtype}\0{tuple(tensors[name].shape)}\0".encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def begin(folder: Path, signature: dict[str, Any], resume: bool) -> None:
    """Make the folder of a new run; with `resume`, check that it holds the same run."""
    path = folder / RECIPE
    signature = json.loads(json.dumps(signature))
    if resume and path.exists():
        saved = json.loads(path.read_bytes())
        if different := _difference(saved, signature):
            raise ConfigError(f"{folder}: holds another run: {different}; resume with its own settings, or give another --out")
        return
    if not resume and ((folder / STATE).exists() or (folder / HISTORY).exists()):
        raise ConfigError(f"{folder}: already holds a run; go on with --resume, or give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(signature, indent=2).encode() + b"\n")


def _difference(saved: dict[str, Any], wanted: dict[str, Any], where: str = "") -> str | None:
    for key in sorted(saved.keys() | wanted.keys()):
        left, right = saved.get(key), wanted.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            if found := _difference(left, right, f"{where}{key}."):
                return found
        elif left != right:
            return f"{where}{key} was {left!r}, now {right!r}"
    return None
