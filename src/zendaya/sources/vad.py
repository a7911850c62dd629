"""Voice activity detection while the sound arrives.

Silero VAD gives the probability of speech for each 32 ms. Only the weights of the package silero-vad are used; none of its code runs.

Shape suffixes: S samples, C channels, L frames of a spectrum, D state width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as functional
from torch import Tensor

from zendaya.errors import MissingExtraError, SourceError
from zendaya.sources.media import SAMPLE_RATE, Samples

FRAME = 512
"""Samples per decision: 32 ms at 16 kHz, the size Silero VAD was trained on."""
CONTEXT = 64
"""Samples before a frame that the network reads with it."""
FRAME_S = FRAME / SAMPLE_RATE
SPEECH, SILENCE = 0.5, 0.35
"""Probabilities at which speech begins and below which it ends, as in Silero VAD's own iterator."""
PAUSE_S = 0.25
SHARE = 0.5


@dataclass
class VoiceState:
    """State of a stream: the samples of the unfinished frame, the network's memory, and whether there was speech."""

    context_S: Tensor = field(default_factory=lambda: torch.zeros(CONTEXT))
    waiting_S: Tensor = field(default_factory=lambda: torch.zeros(0))
    memory: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.zeros(1, 128), torch.zeros(1, 128)))
    speaking: bool = False


class VoiceDetector:
    """Silero VAD: speech or not, for each 32 ms, without look-ahead."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("silero_vad")
        if found is None or found.origin is None:
            raise MissingExtraError("silero-vad", "audio", "cutting windows at pauses")
        path = Path(found.origin).parent / "data" / "silero_vad_16k.safetensors"
        try:
            self._weights = safetensors.torch.load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise SourceError(f"{path}: cannot be read ({error}): install silero-vad 6.2 or newer again") from None

    def start(self) -> VoiceState:
        return VoiceState()

    def read(self, state: VoiceState, samples_S: Samples) -> Iterator[bool]:
        """Read samples; yield for each completed frame whether it is speech."""
        heard_S = torch.cat([state.waiting_S, torch.from_numpy(np.asarray(samples_S, np.float32))])
        whole = heard_S.numel() // FRAME * FRAME
        state.waiting_S = heard_S[whole:].clone()
        for frame_S in heard_S[:whole].reshape(-1, FRAME):
            probability = self._probability(state, torch.cat([state.context_S, frame_S]))
            state.context_S = frame_S[-CONTEXT:].clone()
            state.speaking = probability >= (SILENCE if state.speaking else SPEECH)
            yield state.speaking

    @torch.inference_mode()
    def _probability(self, state: VoiceState, read_S: Tensor) -> float:
        """The probability of speech in a frame with its context; updates the memory."""
        weights = self._weights
        mirrored_S = torch.cat([read_S, read_S[-CONTEXT - 1 : -1].flip(0)])
        real_LC, imaginary_LC = functional.linear(mirrored_S.unfold(0, 256, 128), weights["stft_conv.weight"][:, 0]).chunk(2, 1)
        x_LC = (real_LC.square() + imaginary_LC.square()).sqrt()
        for name, stride in (("conv1", 1), ("conv2", 2), ("conv3", 2), ("conv4", 1)):
            # A convolution over so few frames is faster as one matrix product.
            around_LC = functional.pad(x_LC, (0, 0, 1, 1)).unfold(0, 3, stride).flatten(1)
            x_LC = functional.linear(around_LC, weights[f"{name}.weight"].flatten(1), weights[f"{name}.bias"]).relu()
        cell = (weights[f"lstm_cell.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        state.memory = torch.lstm_cell(x_LC, state.memory, *cell)
        logit = functional.linear(state.memory[0].relu(), weights["final_conv.weight"][:, :, 0], weights["final_conv.bias"])
        return float(logit.sigmoid())
