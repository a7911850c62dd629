"""Checkpoints: one safetensors file with config, tokenizer and checksum, written whole, read with suspicion, or fetched from the hub."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from huggingface_hub import ModelHubMixin, constants, hf_hub_download
from torch import Tensor, nn

from zendaya.errors import CheckpointError, ConfigError
from zendaya.files import write_atomically
from zendaya.nn.config import ModelConfig
from zendaya.nn.tokenizer import Tokenizer
from zendaya.records import read_record

WEIGHTS, CONFIG, TOKENIZER, CARD = "model.safetensors", "config.json", "tokenizer.json", "README.md"
RECIPE = "recipe.json"
"""The run record, which a training run writes into its folder; checkpoints lie in folders beside it."""
FORMAT = "1"
FILE_METADATA = {"format": "pt", "zendaya_format": FORMAT}
MAX_HEADER = 100_000_000
"""Longest header of a safetensors file, in bytes, as the format fixes it."""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

AnyModel = TypeVar("AnyModel", bound="PretrainedModel")


class PretrainedModel(
    nn.Module,
    ModelHubMixin,
    library_name="zendaya",
    license="apache-2.0",
    tags=["streaming", "simultaneous-translation", "captioning", "speech-recognition"],
):
    """A module made from a config and a tokenizer that saves itself to a folder or the hub, and loads itself from there."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None = None) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer

    def save_pretrained(
        self, save_directory: str | Path, *, config: Any = None, repo_id: str | None = None, push_to_hub: bool = False,
        model_card_kwargs: dict[str, Any] | None = None, **push_to_hub_kwargs: Any,
    ) -> str | None:  # fmt: skip
        """Write the model to a folder; an interrupted save leaves the old model or the new one.

        The weights file holds config, tokenizer and checksum too, and is replaced in one rename. The JSON files beside it are copies for
        people to read.
        """
        if config is not None:
            raise ConfigError("save_pretrained: a model is saved with its own config: leave out `config`")
        folder = Path(save_directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._save_pretrained(folder)
            if not (folder / CARD).exists():
                write_atomically(folder / CARD, str(self.generate_model_card(**(model_card_kwargs or {}))).encode())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
        if push_to_hub:
            return self.push_to_hub(repo_id or folder.name, model_card_kwargs=model_card_kwargs, **push_to_hub_kwargs)
        return None

    def _save_pretrained(self, save_directory: Path) -> None:
        metadata = {"config": json.dumps(self.config.to_dict())}
        if self.tokenizer is not None:
            metadata["tokenizer"] = self.tokenizer.to_json()

        def drop_copies() -> None:
            # Copies of another model must never stand beside the new weights, or a save cut short would be refused.
            for name in (CONFIG, TOKENIZER):
                (save_directory / name).unlink(missing_ok=True)

        write_checkpoint(save_directory / WEIGHTS, self.state_dict(), metadata, before_rename=drop_copies)
        write_atomically(save_directory / CONFIG, json.dumps(self.config.to_dict(), indent=2).encode() + b"\n")
        if self.tokenizer is not None:
            write_atomically(save_directory / TOKENIZER, metadata["tokenizer"].encode())

    @classmethod
    def from_pretrained(
        cls: type[AnyModel], pretrained_model_name_or_path: str | Path, *, map_location: str = "cpu", **hub: Any
    ) -> AnyModel:
        """The model in a folder, or of a hub id (`user/name`); `hub` are options of `huggingface_hub.hf_hub_download`."""
        known = [name for name in inspect.signature(hf_hub_download).parameters if name not in ("repo_id", "filename")]
        if unknown := sorted(hub.keys() - set(known)):  # a folder needs none of them, so a misspelt one would be ignored
            raise ConfigError(f"from_pretrained: no option {unknown[0]!r}; expected map_location or one of {', '.join(known)}")
        return cls._from_pretrained(model_id=str(pretrained_model_name_or_path), map_location=map_location, **hub)

    @classmethod
    def _from_pretrained(cls: type[AnyModel], *, model_id: str, map_location: str = "cpu", **hub: Any) -> AnyModel:
        folder = Path(model_id)
        try:
            found, is_folder = folder.exists(), folder.is_dir()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{model_id[:80]!r}: not a path: {getattr(error, 'strerror', None) or error}") from None
        if not is_folder:
            if found or folder.suffix in PICKLES or model_id.count("/") != 1 or model_id.startswith(("/", ".", "~")):
                raise CheckpointError(_not_a_folder(folder))
            folder = _download(model_id, **hub)
        return cls._load(folder).to(map_location)

    @classmethod
    def _load(cls: type[AnyModel], folder: Path) -> AnyModel:
        path = folder / WEIGHTS
        _require_weights(folder)
        tensors, metadata = read_checkpoint(path)
        config = read_config(ModelConfig, metadata["config"], path)
        tokenizer_json = metadata.get("tokenizer")
        _check_copy(folder / CONFIG, config.to_dict())
        _check_copy(folder / TOKENIZER, _parse(tokenizer_json, f"{path}: its tokenizer") if tokenizer_json else None)
        tokenizer = Tokenizer.from_json(tokenizer_json, str(path)) if tokenizer_json else None
        if (layers := sum(name.endswith(".around_cross.norm.weight") for name in tensors)) != config.decoder.layers:
            raise CheckpointError(f"{path}: its config says {config.decoder.layers} layers: got the tensors of {layers}")
        with torch.device("meta"):  # shapes alone: nothing is allocated, and no random number drawn
            model = cls(config, tokenizer).eval()
        check_tensors(path, model.state_dict(), tensors)
        model.load_state_dict(tensors, assign=True)
        return model


def check_tensors(path: str | Path, expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    """Refuse tensors that a model of this state has no place for: other names or shapes, mixed types, numbers that are not finite."""
    for name in sorted(expected.keys() | got.keys()):
        wanted, found = (tuple(tensors[name].shape) if name in tensors else "no tensor" for tensors in (expected, got))
        if wanted != found:
            raise CheckpointError(f"{path}: does not fit its config: {name}: expected {wanted}: got {found}")
    kinds = {tensor.dtype for tensor in got.values()}
    if len(kinds) > 1 or not all(kind.is_floating_point for kind in kinds):
        raise CheckpointError(f"{path}: expected weights of one floating-point type: got {', '.join(sorted(map(str, kinds)))}")
    if broken := [name for name, tensor in got.items() if not torch.isfinite(tensor).all()]:
        raise CheckpointError(f"{path}: {broken[0]}: expected finite numbers: got NaN or infinity; the training that made it had failed")


def write_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, before_rename: Callable[[], None] = lambda: None
) -> None:
    """Write tensors and metadata as one safetensors file with a checksum, whole or not at all."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {**FILE_METADATA, **metadata}
    data = safetensors.torch.save(plain, {**metadata, "sha256": digest(plain, metadata)})
    write_atomically(path, data, before_rename=before_rename)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file that `write_checkpoint` wrote, its checksum verified."""
    try:
        data = path.read_bytes()
        if data[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise CheckpointError(f"{path}: is a pickle under another name, which can run code when read: save it as safetensors")
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # of the same bytes: the file may be replaced meanwhile
        metadata = header.get("__metadata__", {})
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (safetensors.SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file ({error}): it is damaged or cut short; fetch or save it again"
        ) from None
    if metadata.get("zendaya_format") != FORMAT or "config" not in metadata or "sha256" not in metadata:
        raise CheckpointError(
            f"{path}: expected a checkpoint of this library, format {FORMAT}: got {metadata.get('zendaya_format', 'another file')}"
        )
    if digest(tensors, metadata) != metadata["sha256"]:
        raise CheckpointError(
            f"{path}: checksum does not match: the file was damaged or changed after it was saved; fetch or save it again"
        )
    return tensors, metadata


def stated_digest(path: Path) -> str:
    """The checksum that a file of `write_checkpoint` states in its header: the name of these weights; reading the file verifies it."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER)))
        return str(header["__metadata__"]["sha256"])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: expected a checkpoint of this library, with its checksum: got another file") from None


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over every name, type, shape and byte of the weights, and the metadata beside them."""
    digest = hashlib.sha256()
    for key in sorted(metadata.keys() - {"sha256"}):
        digest.update(f"{key}\0{metadata[key]}\0".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


AnyConfig = TypeVar("AnyConfig")


def read_config(kind: type[AnyConfig], text: object, path: Path) -> AnyConfig:
    """A config record in a checkpoint's metadata; what is wrong with it is wrong with the checkpoint."""
    try:
        return read_record(kind, text, f"{path}: config")
    except ConfigError as error:
        raise CheckpointError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None


# The run record.


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What the run record beside a checkpoint says of the model; None where it says nothing."""

    encoder: str | None = None
    """The encoder the model was trained with."""
    rho: float | None = None
    """The length ratio of the training corpus, source tokens per step: the default stride of wait-k."""
    seed: int | None = None
    lower: bool = False
    """The model writes lower-case text without punctuation."""
    max_gamma: float | None = None
    """The largest γ it was trained at, where its run names one, as `gamma=2` or `dial=3` do."""


def read_run_record(checkpoint: str | Path) -> RunRecord:
    """The record of the run that a checkpoint lies in; an empty one where it lies in no run."""
    folder = Path(checkpoint).expanduser()
    for path in (folder / RECIPE, folder.resolve().parent / RECIPE):
        try:
            record = json.loads(path.read_bytes())
            recipe, rho = record.get("recipe", {}), record.get("rho")
            gamma = re.match(r"(?:gamma|dial)=([\d.]+)", str(record.get("schedule")))
            return RunRecord(
                encoder=recipe.get("encoder"), rho=None if rho is None else float(rho), seed=recipe.get("loop", {}).get("seed"),
                lower=bool(recipe.get("lower", False)), max_gamma=None if gamma is None else float(gamma[1]),
            )  # fmt: skip
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return RunRecord()


def _require_weights(folder: Path) -> None:
    if (folder / WEIGHTS).is_file():
        return
    for pickle in sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES):
        raise CheckpointError(f"{folder}: holds a pickle ({pickle}), which can run code when read; only {WEIGHTS} is read: convert it")
    raise CheckpointError(f"{folder}: not a checkpoint: expected {WEIGHTS} in it")


def _parse(text: str | bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{what}: not JSON: it is damaged; save the model again") from None


def _check_copy(path: Path, inside: Any) -> None:
    """A readable copy beside the weights, if it is there, says what the weights file says."""
    try:
        copy = path.read_bytes()
    except FileNotFoundError:
        return
    if _parse(copy, str(path)) != inside:
        raise CheckpointError(
            f"{path}: does not match {WEIGHTS} beside it: two checkpoints were mixed, or it was edited; save the model again, or delete it"
        )


def _not_a_folder(path: Path) -> str:
    if path.suffix in PICKLES:
        return f"{path}: a pickle can run code when read; expected a folder with {WEIGHTS}: convert it"
    if path.exists():
        return f"{path}: expected a checkpoint folder with {WEIGHTS} in it: got a file"
    return f"{path}: no such folder; expected a checkpoint folder or a hub id (user/name)"


# The hub.


def _hub_has_an_address() -> bool:
    """Whether the hub's name can be looked up; behind a proxy, the proxy looks it up."""
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def _download(model_id: str, **options: Any) -> Path:
    """The folder of a hub id's weights in the local cache; they hold the whole model, so nothing else is fetched."""
    reachable = _hub_has_an_address()
    if not reachable:  # the hub's client would retry for half a minute
        options["local_files_only"] = True
    try:
        return Path(hf_hub_download(model_id, WEIGHTS, **options)).parent
    except Exception as error:  # the hub's errors have many roots: network, rights, names
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not reachable:
            first = "it cannot be reached, and the local cache does not hold it"
        raise CheckpointError(f"{model_id}: no such folder here, and not fetched from the hub: {first}") from None
