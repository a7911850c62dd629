"""The model: decoder, length head and gamma head as one network, with its tokenizer.

Shape suffixes as in decoder.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from zendaya.errors import ConfigError, SourceError
from zendaya.nn.checkpoint import PretrainedModel
from zendaya.nn.config import ModelConfig
from zendaya.nn.decoder import Decoder, History, Intermediates
from zendaya.nn.length import FixLength, InfLength, pool
from zendaya.nn.presets import preset
from zendaya.nn.tokenizer import Tokenizer
from zendaya.schedule import Schedule

if TYPE_CHECKING:
    from zendaya.runtime.engine import Engine
    from zendaya.runtime.options import Pace
    from zendaya.runtime.policies import Policy
    from zendaya.runtime.session import Session


@dataclass
class Batch:
    """Clips padded together for a teacher-forced pass; padding and neighbours never change a clip's rows."""

    ids_BN: Tensor
    targets_BN: Tensor
    """The id each step should write; −100 past a clip's end."""
    horizons_BN: Tensor
    source_BFE: Tensor
    source_lengths_B: Tensor
    history: History | None = None


AnyModel = TypeVar("AnyModel", bound="Model")


class Model(PretrainedModel):
    """A streaming decoder: writes text while its source is still arriving.

    >>> from zendaya import PowerLaw
    >>> model = Model.from_preset("tiny", seed=0)
    >>> session = model.open(PowerLaw(0.5))
    >>> events = [*session.push(torch.zeros(24, 16)), *session.finish()]
    >>> all(event.effective_horizon <= 24 for event in events)
    True
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(config, tokenizer)
        if tokenizer is not None and tokenizer.vocab_size > config.decoder.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} ids, more than the decoder's vocabulary of {config.decoder.vocab_size}"
            )
        self.decoder = Decoder(config.decoder)
        self.length = self._head(config.max_steps)
        self.gamma_head = self._head(2 * len(config.gammas)) if config.gammas else None
        self.alignment_heads: tuple[tuple[int, int], ...] = ()
        """Cross-attention heads, as (layer, head), that follow the source; Whisper publishes its own."""

    def _head(self, outputs: int) -> FixLength | InfLength | None:
        config = self.config
        features = config.decoder.dim if config.decoder.source_vocab else config.decoder.source_dim
        if config.length == "fix":
            return FixLength(features, config.length_hidden, outputs)
        return InfLength(features, config.decoder.dim, config.length_hidden, outputs) if config.length == "inf" else None

    @classmethod
    def from_preset(cls: type[AnyModel], name: str, *, tokenizer: Tokenizer | None = None, seed: int = 0, **changes: Any) -> AnyModel:
        """A new model of a preset's shape with random weights from `seed`; `changes` replace config fields."""
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

        `schedule` is one for all clips, or one per clip. `scale` is the schedule's source length: None takes each clip's own (the paper's
        protocol, `segment`), a number the window width W (strictly causal, `window`), where a step reads min(Ω, F). `steps` are the
        predicted lengths N̂; by default the true ones.
        """
        frame, prompt = self.config.framing, list(self.config.framing.prompt)
        texts = [[*target, frame.end] for target in targets]
        lengths = [source.shape[0] for source in sources]
        if not texts or len(texts) != len(lengths) or min(lengths) < 1:
            raise SourceError(
                f"a batch needs as many sources as targets, and no empty source: got {lengths} source tokens, {len(texts)} targets"
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
            history=None if histories is None else self.pack_history(histories),
        )

    def pack_history(self, histories: Sequence[tuple[Tensor, Sequence[int]] | None]) -> History:
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

    def loss(self, batch: Batch, *, label_smoothing: float = 0.0, intermediates: Intermediates | None = None) -> Tensor:
        """Sum of the cross-entropies of `forward`'s logits to the batch's targets, computed without all logits at once."""
        targets_BN = nn.functional.pad(batch.targets_BN, (len(self.config.framing.prompt) - 1, 0), value=-100)
        return self.decoder.loss(
            batch.ids_BN, batch.source_BFE, batch.horizons_BN, targets_BN, history=batch.history, label_smoothing=label_smoothing,
            intermediates=intermediates,
        )  # fmt: skip

    # Length.

    def length_logits(self, source_BTE: Tensor, lengths_B: Tensor, history: History | None = None) -> Tensor:
        """Length logits from the first `lengths` source tokens: the whole clip for fix, the buffer B for inf (method.md §3)."""
        if self.length is None:
            raise ConfigError("this model has no length head: give `steps`, or a schedule that needs no length, such as wait-k")
        return self._ask(self.length, source_BTE, lengths_B, history)

    def _ask(self, head: FixLength | InfLength, source_BTE: Tensor, lengths_B: Tensor, history: History | None) -> Tensor:
        """The outputs of a head that reads the first `lengths` source tokens and the window before."""
        source_BTE = self.decoder.source_features(source_BTE)
        if isinstance(head, InfLength):
            if history is None:
                history = self.pack_history([None] * source_BTE.shape[0])
            text_BHD = self.decoder.tokens(history.ids_BH)
            previous_BGE = self.decoder.source_features(history.source_BGE)
            outputs_BC: Tensor = head(source_BTE, lengths_B, previous_BGE, history.source_lengths_B, text_BHD, history.lengths_B)
        else:
            outputs_BC = head(pool(source_BTE, lengths_B))
        return outputs_BC

    def predict_steps(self, window_TE: Tensor, buffer: int, history: tuple[Tensor, Sequence[int]] | None = None) -> int:
        """N̂ of a window whose tokens `window_TE` have arrived; the head reads its first `buffer` tokens at most."""
        readable_TE = window_TE[:buffer]
        past = self.pack_history([history])
        logits_1C = self.length_logits(readable_TE[None], torch.tensor([readable_TE.shape[0]], device=window_TE.device), past)
        return int(logits_1C.argmax(-1)) + 1

    def steps_of(self, predicted: int, source: int) -> int:
        """N̂ of a schedule over `source` tokens from the predicted length; a model with `pace` predicts for W tokens, so it is scaled."""
        scaled = round(predicted * source / self.config.window_tokens) if self.config.pace else predicted
        return max(1, min(self.config.max_steps, scaled))

    def paced(self, steps: int, source: int) -> int:
        """The length to predict for `steps` steps in `source` tokens: the inverse of `steps_of`."""
        return max(1, min(self.config.max_steps, round(steps * self.config.window_tokens / source))) if self.config.pace else steps

    # Gamma per window.

    def gamma_costs(self, source_BTE: Tensor, lengths_B: Tensor, history: History | None = None) -> tuple[Tensor, Tensor]:
        """Expected costs of each of G gammas: the loss per step above their mean, and the lag as a share of the source."""
        if self.gamma_head is None:
            raise ConfigError("this model has no gamma head: train one with `zendaya learn-gamma`, or give one gamma")
        loss_BG, lag_BG = self._ask(self.gamma_head, source_BTE, lengths_B, history).chunk(2, -1)
        return loss_BG, lag_BG

    def settles_for(
        self, place: int, window_TE: Tensor, buffer: int, history: tuple[Tensor, Sequence[int]] | None = None, *, price: float | None = None
    ) -> bool:
        """Whether gammas[place] is expected to cost less than every smaller one, judged from a window's first `buffer` tokens."""
        readable_TE = window_TE[:buffer]
        lengths_B = torch.tensor([readable_TE.shape[0]], device=window_TE.device)
        loss_1G, lag_1G = self.gamma_costs(readable_TE[None], lengths_B, self.pack_history([history]))
        return bool(settled(loss_1G, lag_1G, place, self.config.lag_price if price is None else price)[0])

    # Live.

    def open(
        self, schedule: Schedule | Policy, *, window_tokens: int | None = None, steps: int | None = None, max_steps: int | None = None,
        patience_s: float = math.inf, pace: Pace | None = None, clock: Callable[[], float] | None = None, engine: Engine | None = None,
    ) -> Session:  # fmt: skip
        """A live decode, by a schedule or a policy: push source tokens as they arrive, take events as they are decided.

        `window_tokens` is W (default: the config's); `steps` fixes N̂ instead of the length head; `max_steps` ends a window's text sooner;
        `patience_s` is how long a late source is waited for, `pace` when it is due, `clock` tells how long computing took, `engine`
        computes, if not PyTorch (see `zendaya.runtime.engine.engine_for`).
        """
        from zendaya.runtime.options import DecodeOptions  # the one convenience that reaches down: the runtime is built on the model
        from zendaya.runtime.session import Session

        options = DecodeOptions(
            schedule=schedule, window_tokens=window_tokens, steps=steps, max_steps=max_steps, patience_s=patience_s, pace=pace
        )
        return Session(self, options, clock=clock, engine=engine)


def settled(loss_BG: Tensor, lag_BG: Tensor, place: int, price: float) -> Tensor:
    """Which windows settle for the γ at `place`: those where loss + price · lag is least there among it and the smaller ones."""
    return (loss_BG + price * lag_BG)[:, : place + 1].argmin(-1) == place


def _horizons(schedule: Schedule | Sequence[Schedule], scales: Sequence[int], steps: Sequence[int], num_steps: int) -> Tensor:
    """Ω of every clip for `num_steps` steps; past a clip's end it stays at its last value."""
    if not isinstance(schedule, Sequence):
        return torch.from_numpy(schedule.horizons(scales, steps, num_steps=num_steps))
    rows = [each.horizons(scale, n, num_steps=num_steps) for each, scale, n in zip(schedule, scales, steps, strict=True)]
    return torch.from_numpy(np.stack(rows))


def _pad(rows: list[Tensor], value: float) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
