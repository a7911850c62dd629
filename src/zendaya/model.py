"""The model: decoder, length head, tokenizer and config in one, saved and loaded.

Shape suffixes as in decoder.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from huggingface_hub import ModelHubMixin, constants, hf_hub_download
from torch import Tensor, nn

from zendaya.atomic import write_atomically
from zendaya.decoder import Decoder, DecoderConfig, History, Watched
from zendaya.errors import CheckpointError, ConfigError, SourceError
from zendaya.length import FixLength, InfLength, pool
from zendaya.schedule import Schedule
from zendaya.text import Framing, Tokenizer

if TYPE_CHECKING:
    from zendaya.engine import Engine
    from zendaya.policies import Policy
    from zendaya.stream import Pace, Session

WEIGHTS, CONFIG, TOKENIZER, CARD = "model.safetensors", "config.json", "tokenizer.json", "README.md"
FORMAT = 1
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything about a model but its weights and its tokenizer."""

    decoder: DecoderConfig
    window: int
    """W: source tokens of a window, the live scale of the schedule."""
    max_steps: int
    """N_max: the longest decode of a window, its end included."""
    length: Literal["none", "fix", "inf"] = "inf"
    length_hidden: int = 256
    history: bool = True
    """Whether a window is decoded after the text of the one before it (prefix forcing, Sec. 3.1)."""
    pauses: bool = False
    """Whether an end that is chosen before the whole window may be read is a pause: nothing is written, the schedule goes on, and the
    step is decided again with what it then may read. For models trained not to guess words they have not heard."""
    loop_tokens: int = 0
    """Above 0, a phrase that was written again and again for so many tokens, and at least three times, is not written once more, and a
    window that never came to its end leaves no history: a decoder that has fallen into a loop would stay in it for ever."""
    framing: Framing = dataclasses.field(default_factory=Framing)
    pace: bool = False
    """Whether N̂ is that of a whole window at the pace of the source, also where the source ends sooner; it scales with the window."""
    gammas: tuple[float, ...] = ()
    """Above none, the dial settings that a dial head, of the length head's kind, chooses from for each window, in rising order."""
    lag_price: float = 0.0
    """What a lag of the whole source may cost, in nats a step: solved for a budget when the dial head was trained."""

    def __post_init__(self) -> None:
        for name in ("window", "max_steps", "length_hidden"):
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"model config: {name} must be a whole number, at least 1: got {value!r}")
        loop: object = self.loop_tokens
        if not isinstance(loop, int) or isinstance(loop, bool) or loop < 0:
            raise ConfigError(f"model config: loop_tokens must be a whole number, at least 0: got {loop!r}")
        for name in ("history", "pauses", "pace"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"model config: {name} must be true or false: got {getattr(self, name)!r}")
        if not 1 <= self.window <= self.decoder.max_source:
            raise ConfigError(
                f"model config: window must lie in 1 … {self.decoder.max_source}, the decoder's max_source: got {self.window}"
            )
        rows = len(self.framing.prompt) + self.max_steps - 1 + (1 + self.max_steps if self.history else 0)
        if rows > self.decoder.max_rows:
            raise ConfigError(f"model config: max_steps={self.max_steps} needs {rows} text rows: the decoder has {self.decoder.max_rows}")
        if self.length not in ("none", "fix", "inf"):
            raise ConfigError(f"model config: length must be 'none', 'fix' or 'inf': got {self.length!r}")
        self._check_dial()
        frame = self.framing
        ids = (*frame.prompt, frame.end, frame.previous, *frame.suppress, *frame.suppress_first)
        if min(ids) < 0 or max(ids) >= self.decoder.vocab_size:
            raise ConfigError(f"model config: a framing id lies outside the vocabulary of {self.decoder.vocab_size}: got {ids}")

    def _check_dial(self) -> None:
        numbers = [*self.gammas, self.lag_price]
        if any(isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v < float("inf") for v in numbers):
            raise ConfigError(
                f"model config: gammas and lag_price must be finite numbers, at least 0: got {self.gammas}, {self.lag_price!r}"
            )
        if self.gammas and (len(self.gammas) < 2 or any(a >= b for a, b in itertools.pairwise(self.gammas))):
            raise ConfigError(f"model config: gammas must be two or more, each above the one before it: got {self.gammas}")
        if self.gammas and self.length == "none":
            raise ConfigError(
                "model config: a dial head is of the length head's kind, and this model has none: set length to 'fix' or 'inf'"
            )

    def to_dict(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        if not self.gammas:  # a model without these is written as before there were any
            del record["gammas"], record["lag_price"]
        for name in ("pace", "pauses", "loop_tokens"):
            if not record[name]:
                del record[name]
        return record

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = CONFIG) -> ModelConfig:
        """The config a dict describes; an unknown, missing or ill-typed field is a ConfigError."""
        try:
            fields = dict(data)
            fields["decoder"] = DecoderConfig(**fields["decoder"])
            fields["framing"] = Framing(**fields.get("framing", {}))
            fields["gammas"] = tuple(fields.get("gammas", ()))
            return cls(**fields)
        except (TypeError, KeyError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{where}: not a model config of this version: {error}") from None


@dataclass
class Batch:
    """Clips padded together for a teacher-forced pass; a clip's own rows never depend on its neighbours or on the padding."""

    ids_BN: Tensor
    targets_BN: Tensor
    """What each step should write, −100 past a clip's end."""
    horizons_BN: Tensor
    source_BFE: Tensor
    source_lengths_B: Tensor
    history: History | None = None


AnyModel = TypeVar("AnyModel", bound="Model")


class Model(
    nn.Module,
    ModelHubMixin,
    library_name="zendaya",
    license="apache-2.0",
    tags=["streaming", "simultaneous-translation", "captioning", "speech-recognition"],
):
    """A streaming decoder: writes text while its source is still arriving.

    >>> from zendaya import PowerLaw
    >>> model = Model.from_preset("tiny", seed=0)
    >>> session = model.open(PowerLaw(0.5))
    >>> events = [*session.push(torch.zeros(24, 16)), *session.finish()]
    >>> all(event.effective_horizon <= 24 for event in events)
    True
    """

    config: ModelConfig

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None = None) -> None:
        super().__init__()
        if tokenizer is not None and tokenizer.vocab_size > config.decoder.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} ids, more than the decoder's vocabulary of {config.decoder.vocab_size}"
            )
        self.config, self.tokenizer = config, tokenizer
        self.decoder = Decoder(config.decoder)
        self.length = self._head(config.max_steps)
        self.dial = self._head(2 * len(config.gammas)) if config.gammas else None
        self.alignment_heads: tuple[tuple[int, int], ...] = ()
        """Cross-attention heads, as (layer, head), that are known to follow the source: Whisper publishes its own."""

    def _head(self, outputs: int) -> FixLength | InfLength | None:
        config = self.config
        features = config.decoder.dim if config.decoder.source_vocab else config.decoder.source_dim
        if config.length == "fix":
            return FixLength(features, config.length_hidden, outputs)
        return InfLength(features, config.decoder.dim, config.length_hidden, outputs) if config.length == "inf" else None

    @classmethod
    def from_preset(cls: type[AnyModel], name: str, *, tokenizer: Tokenizer | None = None, seed: int = 0, **changes: Any) -> AnyModel:
        """A new model of a preset's shape, its weights drawn from `seed`; `changes` replace config fields."""
        config = dataclasses.replace(preset(name), **changes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config, tokenizer).eval()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    # Teacher-forced.

    def batch(
        self, sources: Sequence[Tensor], targets: Sequence[Sequence[int]], schedule: Schedule | Sequence[Schedule], *,
        scale: int | Sequence[int] | None = None, steps: Sequence[int] | None = None,
        histories: Sequence[tuple[Tensor, Sequence[int]] | None] | None = None,
    ) -> Batch:  # fmt: skip
        """Pad clips together: `targets` are ids without the end, which is added; `histories` are (source, ids) of the window before.

        `schedule` is one for all or one a clip. `scale` is the schedule's source length: None takes each clip's own (the paper's
        protocol, `segment`), a number the window width W (strictly causal, `window`), where a step reads min(Ω, F). `steps` stands
        for the predicted lengths N̂; the true ones if not given.
        """
        frame, prompt = self.config.framing, list(self.config.framing.prompt)
        texts = [[*target, frame.end] for target in targets]
        lengths = [source.shape[0] for source in sources]
        if not texts or len(texts) != len(lengths) or min(lengths) < 1:
            raise SourceError(
                f"a batch needs as many sources as targets, none of them empty: got {lengths} source tokens, {len(texts)} targets"
            )
        scales = lengths if scale is None else [scale] * len(texts) if isinstance(scale, int) else scale
        horizons_BN = _horizons(schedule, scales, [len(text) for text in texts] if steps is None else steps, max(map(len, texts)))
        horizons_BN = torch.minimum(horizons_BN, torch.tensor(lengths)[:, None])
        prompt_horizons = horizons_BN[:, :1].expand(-1, len(prompt) - 1)  # prompt rows read no more than step 1
        device = self.decoder.tokens.weight.device
        return Batch(
            ids_BN=_pad([torch.tensor(prompt + text[:-1]) for text in texts], 0).to(device),
            targets_BN=_pad([torch.tensor(text) for text in texts], -100).to(device),
            horizons_BN=torch.cat([prompt_horizons, horizons_BN], 1).to(device),
            source_BFE=_pad(list(sources), 0.0).to(self.decoder.tokens.weight),
            source_lengths_B=torch.tensor(lengths, device=device),
            history=None if histories is None else self._history(histories),
        )

    def _history(self, histories: Sequence[tuple[Tensor, Sequence[int]] | None]) -> History:
        device = self.decoder.tokens.weight.device
        present = [h if h is not None else (torch.zeros(0, self.config.decoder.source_dim), ()) for h in histories]
        rows = [torch.tensor([self.config.framing.previous, *ids]) if source.shape[0] else torch.zeros(0).long() for source, ids in present]
        return History(
            ids_BH=_pad(rows, 0).to(device),
            lengths_B=torch.tensor([row.shape[0] for row in rows], device=device),
            source_BGE=_pad([source for source, _ in present], 0.0).to(self.decoder.tokens.weight),
            source_lengths_B=torch.tensor([source.shape[0] for source, _ in present], device=device),
        )

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B, N, V): row j of a clip predicts its step j + 1."""
        logits_BNV: Tensor = self.decoder(batch.ids_BN, batch.source_BFE, batch.horizons_BN, history=batch.history)
        return logits_BNV[:, len(self.config.framing.prompt) - 1 :]

    def loss(self, batch: Batch, *, label_smoothing: float = 0.0, watched: Watched | None = None) -> Tensor:
        """Sum of the cross-entropies of the batch's targets: those of `forward`'s logits, without making them all."""
        targets_BN = nn.functional.pad(batch.targets_BN, (len(self.config.framing.prompt) - 1, 0), value=-100)
        return self.decoder.loss(
            batch.ids_BN, batch.source_BFE, batch.horizons_BN, targets_BN, history=batch.history, label_smoothing=label_smoothing,
            watched=watched,
        )  # fmt: skip

    # Length.

    def length_logits(self, source_BTE: Tensor, lengths_B: Tensor, history: History | None = None) -> Tensor:
        """Length logits from the first `lengths` source tokens: all of them for fix, the buffer B for inf (method.md §3)."""
        if self.length is None:
            raise ConfigError("this model has no length head: give the number of steps, or a schedule that needs none")
        return self._ask(self.length, source_BTE, lengths_B, history)

    def _ask(self, head: FixLength | InfLength, source_BTE: Tensor, lengths_B: Tensor, history: History | None) -> Tensor:
        """A head's outputs from the first `lengths` source tokens and the window before."""
        source_BTE = self.decoder.source_features(source_BTE)
        if isinstance(head, InfLength):
            if history is None:
                history = self._history([None] * source_BTE.shape[0])
            text_BHD = self.decoder.tokens(history.ids_BH)
            previous_BGE = self.decoder.source_features(history.source_BGE)
            outputs_BC: Tensor = head(source_BTE, lengths_B, previous_BGE, history.source_lengths_B, text_BHD, history.lengths_B)
        else:
            outputs_BC = head(pool(source_BTE, lengths_B))
        return outputs_BC

    def predict_steps(self, window_TE: Tensor, buffer: int, history: tuple[Tensor, Sequence[int]] | None = None) -> int:
        """N̂ of a window of which `window_TE` has arrived; the head reads no more than its first `buffer` tokens."""
        readable_TE = window_TE[:buffer]
        past = self._history([history])
        logits_1C = self.length_logits(readable_TE[None], torch.tensor([readable_TE.shape[0]], device=window_TE.device), past)
        return int(logits_1C.argmax(-1)) + 1

    def steps_of(self, predicted: int, source: int) -> int:
        """N̂ of a schedule over `source` tokens from what its head predicted: at a pace that is for a whole W, and another width holds
        more or less."""
        scaled = round(predicted * source / self.config.window) if self.config.pace else predicted
        return max(1, min(self.config.max_steps, scaled))

    def paced(self, steps: int, source: int) -> int:
        """What the head should predict for `steps` said in `source` tokens: the inverse of `steps_of`."""
        return max(1, min(self.config.max_steps, round(steps * self.config.window / source))) if self.config.pace else steps

    # The dial of a window.

    def gamma_costs(self, source_BTE: Tensor, lengths_B: Tensor, history: History | None = None) -> tuple[Tensor, Tensor]:
        """What the dial head expects of each of G gammas: the loss a step beyond their mean, and the lag as a share of the source."""
        if self.dial is None:
            raise ConfigError("this model has no dial head: train one with `zendaya learn-gamma`, or give one gamma")
        loss_BG, lag_BG = self._ask(self.dial, source_BTE, lengths_B, history).chunk(2, -1)
        return loss_BG, lag_BG

    def settles_for(
        self, place: int, window_TE: Tensor, buffer: int, history: tuple[Tensor, Sequence[int]] | None = None, *, price: float | None = None
    ) -> bool:
        """Whether, from a window's first `buffer` tokens, gammas[place] is expected to cost less than every smaller one."""
        readable_TE = window_TE[:buffer]
        lengths_B = torch.tensor([readable_TE.shape[0]], device=window_TE.device)
        loss_1G, lag_1G = self.gamma_costs(readable_TE[None], lengths_B, self._history([history]))
        return bool(settled(loss_1G, lag_1G, place, self.config.lag_price if price is None else price)[0])

    # Live.

    def open(
        self, schedule: Schedule | Policy, *, window: int | None = None, steps: int | None = None, max_steps: int | None = None,
        patience_s: float = math.inf, pace: Pace | None = None, clock: Callable[[], float] | None = None, engine: Engine | None = None,
    ) -> Session:  # fmt: skip
        """A live decode, by a schedule or a policy: push source tokens as they arrive, take events as they are decided.

        `window` is W (default: the config's); `steps` fixes N̂ instead of the length head; `max_steps` ends a window's text sooner;
        `patience_s` is how long a late source is waited for, `pace` when it is due, `clock` what tells how long computing took,
        `engine` what computes, if not PyTorch (see `zendaya.engine.engine_for`).
        """
        from zendaya.stream import Session  # a convenience that points up: the runtime is built on the model

        return Session(
            self, schedule, window=window, steps=steps, max_steps=max_steps, patience_s=patience_s, pace=pace, clock=clock, engine=engine
        )

    # Saved and loaded.

    def save_pretrained(
        self, save_directory: str | Path, *, config: Any = None, repo_id: str | None = None, push_to_hub: bool = False,
        model_card_kwargs: dict[str, Any] | None = None, **push_to_hub_kwargs: Any,
    ) -> str | None:  # fmt: skip
        """Write the model to a folder. The weights file holds config, tokenizer and checksum too and is replaced in one rename,
        so that an interrupted save leaves the old model or the new one; the JSON files beside it are copies to read."""
        if config is not None:
            raise ConfigError("a model is saved with its own config: got another one")
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
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        metadata = {"format": "pt", "zendaya_format": str(FORMAT), "config": json.dumps(self.config.to_dict())}
        if self.tokenizer is not None:
            metadata["tokenizer"] = self.tokenizer.to_json()
        metadata["sha256"] = digest(tensors, metadata)
        data = safetensors.torch.save(tensors, metadata)

        def drop_copies() -> None:
            # Copies of another model must never stand beside the new weights, or a save cut short would be refused.
            for name in (CONFIG, TOKENIZER):
                (save_directory / name).unlink(missing_ok=True)

        write_atomically(save_directory / WEIGHTS, data, before_rename=drop_copies)
        write_atomically(save_directory / CONFIG, json.dumps(self.config.to_dict(), indent=2).encode() + b"\n")
        if self.tokenizer is not None:
            write_atomically(save_directory / TOKENIZER, metadata["tokenizer"].encode())

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[AnyModel], pretrained_model_name_or_path: str | Path, *, force_download: bool = False, token: str | bool | None = None,
        cache_dir: str | Path | None = None, local_files_only: bool = False, revision: str | None = None, map_location: str = "cpu",
    ) -> AnyModel:  # fmt: skip
        """The model in a folder, or of a hub id (`user/name`)."""
        return cls._from_pretrained(
            model_id=str(pretrained_model_name_or_path), revision=revision, cache_dir=cache_dir, force_download=force_download,
            local_files_only=local_files_only, token=token, map_location=map_location,
        )  # fmt: skip

    @classmethod
    def _from_pretrained(  # type: ignore[override]
        cls: type[AnyModel], *, model_id: str, revision: str | None, cache_dir: str | Path | None, force_download: bool,
        local_files_only: bool, token: str | bool | None, map_location: str = "cpu",
    ) -> AnyModel:  # fmt: skip
        folder = Path(model_id)
        try:
            found, is_folder = folder.exists(), folder.is_dir()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{model_id[:80]!r}: not a path: {getattr(error, 'strerror', None) or error}") from None
        if not is_folder:
            if found or folder.suffix in PICKLES or model_id.count("/") != 1 or model_id.startswith(("/", ".", "~")):
                raise CheckpointError(_not_a_folder(folder))
            folder = _download(
                model_id, revision=revision, cache_dir=cache_dir, force_download=force_download,
                local_files_only=local_files_only, token=token,
            )  # fmt: skip
        return cls._load(folder).to(map_location)

    @classmethod
    def _load(cls: type[AnyModel], folder: Path) -> AnyModel:
        tensors, metadata = _read_weights(folder)
        path = folder / WEIGHTS
        try:
            config = ModelConfig.from_dict(_parse(metadata["config"], f"{path}: its config"), str(path))
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        tokenizer_json = metadata.get("tokenizer")
        _check_copy(folder / CONFIG, config.to_dict())
        _check_copy(folder / TOKENIZER, _parse(tokenizer_json, f"{path}: its tokenizer") if tokenizer_json else None)
        tokenizer = Tokenizer.from_json(tokenizer_json, str(path)) if tokenizer_json else None
        with torch.device("meta"):  # shapes alone: nothing is allocated, and no random number drawn
            model = cls(config, tokenizer).eval()
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name in sorted(expected.keys() | got.keys()):
            if expected.get(name) != got.get(name):
                raise CheckpointError(f"{path}: does not fit its config: {name} should be {expected.get(name)}: got {got.get(name)}")
        kinds = {tensor.dtype for tensor in tensors.values()}
        if len(kinds) > 1 or not next(iter(kinds)).is_floating_point:
            raise CheckpointError(f"{path}: expected weights of one floating-point type: got {', '.join(sorted(map(str, kinds)))}")
        if broken := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
            raise CheckpointError(f"{path}: {broken[0]} holds numbers that are not finite: the training that made it had failed")
        model.load_state_dict(tensors, assign=True)
        return model


def settled(loss_BG: Tensor, lag_BG: Tensor, place: int, price: float) -> Tensor:
    """Which windows settle for the γ at `place`, the smaller ones being still to be had: those where loss + price · lag is least there."""
    return (loss_BG + price * lag_BG)[:, : place + 1].argmin(-1) == place


def _horizons(schedule: Schedule | Sequence[Schedule], scales: Sequence[int], steps: Sequence[int], num_steps: int) -> Tensor:
    """Ω of every clip for `num_steps` steps; past a clip's own end it stays where it is."""
    if isinstance(schedule, Schedule):
        return torch.from_numpy(schedule.horizons(scales, steps, num_steps=num_steps))
    rows = [each.horizons(scale, n, num_steps=num_steps) for each, scale, n in zip(schedule, scales, steps, strict=True)]
    return torch.from_numpy(np.stack(rows))


def _pad(rows: list[Tensor], value: float) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


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


def _read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a folder's weights file, its checksum verified."""
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise CheckpointError(
                f"{folder}: holds a pickle ({pickles[0]}), which can run code when read; only {WEIGHTS} is read: convert it"
            )
        raise CheckpointError(f"{folder}: not a checkpoint: expected {WEIGHTS} in it")
    return read_checkpoint(path)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file this library wrote, its checksum verified."""
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
    if metadata.get("zendaya_format") != str(FORMAT) or "config" not in metadata or "sha256" not in metadata:
        raise CheckpointError(
            f"{path}: expected a checkpoint of this library, format {FORMAT}: got {metadata.get('zendaya_format', 'another file')}"
        )
    if digest(tensors, metadata) != metadata["sha256"]:
        raise CheckpointError(
            f"{path}: checksum does not match: the file was damaged or changed after it was saved; fetch or save it again"
        )
    return tensors, metadata


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


def _hub_has_an_address() -> bool:
    """Whether the hub's name can be looked up; through a proxy that is the proxy's business."""
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def _download(model_id: str, **options: Any) -> Path:
    """The folder of a hub id's weights in the local cache; they hold all there is, so nothing else is fetched."""
    reachable = _hub_has_an_address()
    if not reachable:  # the hub's client would ask again and again for half a minute
        options["local_files_only"] = True
    try:
        return Path(hf_hub_download(model_id, WEIGHTS, **options)).parent
    except Exception as error:  # the hub's errors have many roots: network, rights, names
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not reachable:
            first = "it cannot be reached, and the local cache does not hold it"
        raise CheckpointError(f"{model_id}: no such folder here, and not fetched from the hub: {first}") from None


def _paper(source_dim: int, window: int, max_steps: int) -> ModelConfig:
    """The paper's shape (Sec. 5.1, Table 1): ≈29 M parameters, 8k BPE."""
    rows = 2 * max_steps + 1
    decoder = DecoderConfig(vocab_size=8000, source_dim=source_dim, max_source=window, max_rows=rows)
    return ModelConfig(decoder=decoder, window=window, max_steps=max_steps)


def _small(dim: int, layers: int, heads: int, vocab_size: int, source_dim: int, window: int, max_steps: int) -> ModelConfig:
    """A shape for CPU: pre-norm, feed-forward of twice the width."""
    decoder = DecoderConfig(
        vocab_size=vocab_size, source_dim=source_dim, max_source=window, max_rows=2 * max_steps + 1, dim=dim, layers=layers,
        heads=heads, head_dim=dim // heads, ffn_dim=2 * dim, norm="pre",
    )  # fmt: skip
    return ModelConfig(decoder=decoder, window=window, max_steps=max_steps, length_hidden=dim)


def _whisper(dim: int, layers: int, heads: int) -> ModelConfig:
    """English-only Whisper's decoder: no length head and no history until it is trained for them."""
    framing = Framing(prompt=(50257, 50362), end=50256, previous=50360, suppress=(50257, 50360, 50362), suppress_first=(220, 50256))
    decoder = DecoderConfig.whisper(dim=dim, layers=layers, heads=heads, vocab_size=51864)
    return ModelConfig(decoder=decoder, window=1500, max_steps=224, length="none", history=False, framing=framing)


_PRESETS = {
    "charades-sta": lambda: _paper(512, 55, 20),
    "activitynet": lambda: _paper(500, 135, 40),
    "libriheavy": lambda: _paper(512, 100, 165),
    "tiny": lambda: _small(64, 2, 2, vocab_size=512, source_dim=16, window=24, max_steps=32),
    "small": lambda: _small(256, 4, 4, vocab_size=4000, source_dim=512, window=100, max_steps=100),
    "whisper-tiny.en": lambda: _whisper(384, 4, 6),
}


def presets() -> Iterator[str]:
    """Names of the shapes the library knows."""
    return iter(_PRESETS)


def preset(name: str) -> ModelConfig:
    """A named shape: the paper's three corpora, small ones for CPU, Whisper's decoder."""
    if name not in _PRESETS:
        raise ConfigError(f"no preset {name!r}; expected one of {', '.join(_PRESETS)}")
    return _PRESETS[name]()
