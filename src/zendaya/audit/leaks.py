"""Leaks planted on purpose, to show that the audit finds them: each is a model or a schedule that cheats in one way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from zendaya.audit import AuditReport, audit
from zendaya.audit.probe import Violation
from zendaya.audit.raw import CHANGES, audit_pipeline
from zendaya.encoders.base import Encoder, Tokens, Traits
from zendaya.nn.cache import Cache
from zendaya.nn.decoder import Attention, AttentionTap, Decoder, History
from zendaya.nn.model import Batch, Model
from zendaya.runtime.arrival_queue import Flags
from zendaya.runtime.engine import Engine
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.pipeline import Pipeline, SourceEncoder, resolve
from zendaya.runtime.policies.base import Policy
from zendaya.runtime.session import Session
from zendaya.runtime.voice import GateStep, VoiceGate
from zendaya.runtime.window import Window
from zendaya.runtime.writers import ScheduleWriter
from zendaya.schedule import IntArray, Ints, Learned, PowerLaw, Schedule
from zendaya.sources.media import SAMPLE_RATE, Samples
from zendaya.sources.vad import FRAME, VoiceDetector, VoiceState


class _OpenHistory(Decoder):
    """History rows read the current window too."""

    def _visible(self, horizons_BN: Tensor, num_source: int, history: History | None) -> Tensor:
        visible_BNM = super()._visible(horizons_BN, num_source, history)
        if history is not None:
            visible_BNM[:, : history.ids_BH.shape[1], history.source_BGE.shape[1] :] = True
        return visible_BNM


class _MaskAfterSoftmax(Decoder):
    """Attention beyond the horizon is zeroed after the softmax, whose sum already includes it."""

    def _cross(self, attention: Attention, x_BND: Tensor, k_BAMK: Tensor, v_BAMK: Tensor, mask_B1NM: Tensor) -> Tensor:
        q_BANK = attention._split(attention.query(x_BND))
        weights_BANM = torch.softmax(q_BANK @ k_BAMK.transpose(-1, -2) * k_BAMK.shape[-1] ** -0.5, -1)
        return attention._join((weights_BANM * mask_B1NM.exp()) @ v_BAMK)


class _BidirectionalSource(Decoder):
    """A source layer in which a token also attends to later ones."""

    def _attend_source(self, attention: Attention, x_BFD: Tensor) -> Tensor:
        return attention.forward(x_BFD, *attention.keys_values(x_BFD))


class _UnslicedCache(Decoder):
    """Incremental decoding reads the whole cache, not only the tokens within the horizon."""

    def _write_rows(self, cache: Cache, ids_BN: Tensor, horizons: list[int], tap: AttentionTap | None = None) -> Tensor:
        return super()._write_rows(cache, ids_BN, [cache.num_source] * len(horizons), tap)


class _WholeWindowLength(Model):
    """The length head pools the whole window, not only its buffer."""

    def predict_steps(self, window_TE: Tensor, buffer: int, history: Any = None) -> int:
        return super().predict_steps(window_TE, window_TE.shape[0], history)


class _WholeWindowGamma(Model):
    """The gamma head pools the whole window, not only the buffer of the γ it would choose."""

    def settles_for(self, place: int, window_TE: Tensor, buffer: int, history: Any = None, *, price: float | None = None) -> bool:
        return super().settles_for(place, window_TE, window_TE.shape[0], history, price=price)


class _PaddedHorizons(Model):
    """Horizons are clamped to the padded length, so a short clip reads padding up to the length of the longest clip."""

    def batch(self, sources: Any, targets: Any, schedule: Any, *, scale: Any = None, steps: Any = None, histories: Any = None) -> Batch:
        batch = super().batch(sources, targets, schedule, scale=scale, histories=histories)
        longest = max(source.shape[0] for source in sources)
        true_steps = [len(target) + 1 for target in targets]
        horizons_BN = torch.from_numpy(schedule.horizons([scale or longest] * len(targets), true_steps)).clamp_(max=longest)
        batch.horizons_BN[:, -horizons_BN.shape[1] :] = horizons_BN
        return batch


class _NoHead(Model):
    """The mask of training forgets the head start: it opens less than decoding reads."""

    times = 0

    def batch(self, sources: Any, targets: Any, schedule: Any, **options: Any) -> Batch:
        return super().batch(sources, targets, dataclasses.replace(schedule, head=self.times * schedule.head), **options)


class _TwiceHead(_NoHead):
    """The mask of training counts the head start twice."""

    times = 2


class _PeekingWriter(ScheduleWriter):
    """A step is held by a source token that it may not read yet."""

    def _looks_ahead(self, tap: AttentionTap | None) -> bool:
        waiting = [item.tokens_TE for item in self.context.input.queue.items if item.tokens_TE is not None]
        return super()._looks_ahead(tap) if not waiting else bool(waiting[0][0].sum() > 0)


class _PeekingSession(Session):
    """A session whose steps are held by what they may not read."""

    def _enter(self, window: Window) -> None:
        super()._enter(window)
        self._writer.__class__ = _PeekingWriter


class _PeekingHold(Model):
    """A hold that looks at the next source token before it decides."""

    def open(self, schedule: Schedule | Policy, *, engine: Engine | None = None, **options: Any) -> Session:
        return _PeekingSession(self, DecodeOptions(schedule=schedule, **options), engine=engine)


@dataclass(frozen=True)
class _Decreasing(Schedule):
    """A schedule that reads much first and less later."""

    def at(self, step: Ints, *, source: Ints, steps: Ints) -> IntArray:
        step_array, source_array, steps_array = np.broadcast_arrays(*(np.asarray(v, np.int64) for v in (step, source, steps)))
        return np.maximum(1, source_array - source_array * step_array // (steps_array + 1))

    def __str__(self) -> str:
        return "decreasing"


@dataclass(frozen=True)
class Leak:
    """A planted leak: its name, and how it is put into a model."""

    what: str
    decoder: type[Decoder] = Decoder
    model: type[Model] = Model
    schedule: Schedule = field(default_factory=lambda: PowerLaw(0.5))
    scale: Literal["window", "segment"] = "window"
    source_layers: int = 0
    gammas: tuple[float, ...] = ()

    def plant(self, model: Model) -> Model:
        """A model of the same config, with random weights, that leaks."""
        decoder = dataclasses.replace(model.config.decoder, source_layers=self.source_layers)
        config = dataclasses.replace(model.config, decoder=decoder, gammas=self.gammas)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            leaky = self.model(config, model.tokenizer).eval()
        leaky.decoder.__class__ = self.decoder
        return leaky

    def audit(self, model: Model, *, seed: int = 0, cuts: int = 3) -> AuditReport:
        """The audit of the leaky model, which must not pass."""
        return audit(self.plant(model), self.schedule, scale=self.scale, seed=seed, cuts=cuts)


class _Blocks(Encoder[Samples, list[Samples]]):
    """A toy encoder of sound: the loudness of the parts of each 0.1 s."""

    def __init__(self, dim: int) -> None:
        self.traits = Traits(name="loudness", modality="audio", dim=dim, tokens_per_s=10.0, look_back_s=0.0, look_ahead_s=0.0, live=True)

    def start(self) -> list[Samples]:
        return []

    def read(self, state: list[Samples], raw: Samples) -> Tokens:
        before, size = sum(piece.size for piece in state), SAMPLE_RATE // 10
        state.append(raw)
        heard_S = np.concatenate(state)
        new = range(before // size, heard_S.size // size)
        parts_TES = np.abs(heard_S[new.start * size : new.stop * size]).reshape(len(new), self.traits.dim, size // self.traits.dim)
        return Tokens(torch.from_numpy(parts_TES.mean(-1)), np.array([(n + 1) / 10 for n in new]))

    def finish(self, state: list[Samples]) -> Tokens:
        return Tokens.none(self.traits.dim)


class _Loud(VoiceDetector):
    """A toy detector: whatever is loud is speech."""

    def __init__(self) -> None:
        pass

    def _probability(self, state: VoiceState, read_S: Samples) -> float:
        return float(np.abs(read_S[-FRAME:]).mean() > 0.01)


class _EarlyOnset(VoiceGate):
    """Speech counts as found half a second before it was."""

    def _decide(self, speech: bool) -> Iterator[GateStep]:
        for step in super()._decide(speech):
            self.known -= SAMPLE_RATE // 2 if step.begins else 0
            yield step

    def speech_of(self, first: int, count: int) -> Flags:
        return np.ones(count, np.bool_)


@dataclass(frozen=True)
class VoiceLeak(Leak):
    """A leak in the voice gate, from raw sound to text."""

    gate: type[VoiceGate] = VoiceGate

    def audit(self, model: Model, *, seed: int = 0, cuts: int = 3) -> AuditReport:
        """The audit of a pipeline behind the leaky gate, on bursts of noise between silences."""
        encoder = _Blocks(model.config.decoder.source_dim)
        options = resolve(DecodeOptions(schedule=self.schedule, window_tokens=8, max_steps=4, engine="torch", voice="gate"), model, encoder)

        def open_pipeline() -> Pipeline:
            return Pipeline(Session(model, options), SourceEncoder(encoder, gate=self.gate(encoder.traits.tokens_per_s, _Loud())))

        noise_S = np.random.default_rng(seed).uniform(-0.2, 0.2, 5 * SAMPLE_RATE).astype(np.float32)
        noise_S[:SAMPLE_RATE], noise_S[2 * SAMPLE_RATE : -SAMPLE_RATE // 2] = 0, 0
        found = audit_pipeline(open_pipeline, noise_S, num_cuts=4 * cuts, seed=seed)
        report = AuditReport(str(self.schedule), seed, self.scale, 8, model.config.max_steps, {"voice gate": found.num_compared})
        report.probes = found.num_cuts * len(CHANGES)
        report.violations += [
            Violation("voice gate", leak.change, leak.token + 1, int(leak.cut_s * encoder.traits.tokens_per_s) + 1, math.nan)
            for leak in found.leaks
        ]
        return report


LEAKS: dict[str, Leak] = {
    "history": Leak("history rows open on the current window", decoder=_OpenHistory),
    "decreasing": Leak("a schedule that decreases", schedule=_Decreasing()),
    "softmax": Leak("a mask applied after the softmax without renormalising", decoder=_MaskAfterSoftmax),
    "length": Leak("a length head that pools the whole window", model=_WholeWindowLength),
    "dial": Leak("a gamma head that pools the whole window", model=_WholeWindowGamma, schedule=Learned(price=0.0), gammas=(0.3, 0.6, 1.0)),
    "segment": Leak("the segment's own length in a live schedule", scale="segment"),
    "bidirectional": Leak("a bidirectional source layer", decoder=_BidirectionalSource, source_layers=1),
    "padding": Leak("leakage between batch neighbours through padding", model=_PaddedHorizons),
    "head": Leak("a mask that counts the head start twice", model=_TwiceHead, schedule=PowerLaw(0.5, head=3)),
    "no-head": Leak("a mask that forgets the head start", model=_NoHead, schedule=PowerLaw(0.5, head=3)),
    "hold": Leak("a hold that looks at the next source token", model=_PeekingHold, schedule=PowerLaw(1, head=16, hold=4)),
    "voice": VoiceLeak("an onset of speech that is known half a second early", gate=_EarlyOnset),
    "cache": Leak("an incremental step that reads all that is cached", decoder=_UnslicedCache),
}
