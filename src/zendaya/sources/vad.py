"""Voice activity detection while the sound arrives.

Silero VAD gives the probability of speech for each 32 ms, from the sound so far. Only its weights are used, from the safetensors file of
the package silero-vad: neither its code nor its TorchScript runs. It runs in NumPy, one frame at a time: the same bits for any chunks,
in half of PyTorch's time for matrices so small.

Shape suffixes: S samples, C channels, L frames of a spectrum, D state width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from zendaya.errors import MissingExtraError, SourceError
from zendaya.sources.media import SAMPLE_RATE, Samples

FRAME = 512
"""Samples per decision: 32 ms at 16 kHz, the size Silero VAD was trained on."""
CONTEXT = 64
"""Samples before a frame that the network reads with it."""
FRAME_S = FRAME / SAMPLE_RATE
SPECTRUM, HOP, WIDTH = 256, 128, 128
"""Samples of a frame of the spectrum and between two of them; width of the memory."""
SPEECH, SILENCE = 0.5, 0.35
"""Probabilities at which speech begins and below which it ends, as in Silero VAD's own iterator."""
PAUSE_S = 0.25
SHARE = 0.5


FloatArray = npt.NDArray[np.float32]


def _zeros(size: int) -> FloatArray:
    return np.zeros(size, np.float32)


@dataclass
class VoiceState:
    """State of a stream: the samples of the unfinished frame, the network's memory, and whether there was speech."""

    context_S: Samples = field(default_factory=lambda: _zeros(CONTEXT))
    waiting_S: Samples = field(default_factory=lambda: _zeros(0))
    memory: tuple[FloatArray, FloatArray] = field(default_factory=lambda: (_zeros(WIDTH), _zeros(WIDTH)))
    speaking: bool = False


class VoiceDetector:
    """Silero VAD: speech or not, for each 32 ms, without look-ahead."""

    def __init__(self, weights: Mapping[str, FloatArray] | None = None) -> None:
        weights = _published() if weights is None else weights
        self._spectrum_SC = np.ascontiguousarray(weights["stft_conv.weight"][:, 0].T)
        # A convolution over so few frames is one matrix product with the rows around each.
        self._convolutions = [
            (np.ascontiguousarray(weights[f"{name}.weight"].transpose(2, 1, 0).reshape(-1, width)), weights[f"{name}.bias"], rows)
            for name, width, rows in (
                ("conv1", 128, _around(4, 1)), ("conv2", 64, _around(4, 2)), ("conv3", 64, _around(2, 2)), ("conv4", 128, _around(1, 1))
            )
        ]  # fmt: skip
        cell = np.concatenate([weights["lstm_cell.weight_ih"], weights["lstm_cell.weight_hh"]], 1)
        self._cell_DC = np.ascontiguousarray(cell.T)
        self._cell_bias_C = weights["lstm_cell.bias_ih"] + weights["lstm_cell.bias_hh"]
        self._final_D, self._final_bias = weights["final_conv.weight"].reshape(-1), float(weights["final_conv.bias"][0])

    def start(self) -> VoiceState:
        return VoiceState()

    def read(self, state: VoiceState, samples_S: Samples) -> Iterator[bool]:
        """Read samples; yield for each completed frame whether it is speech."""
        heard_S = np.concatenate([state.waiting_S, np.asarray(samples_S, np.float32)])
        whole = heard_S.size // FRAME * FRAME
        state.waiting_S = heard_S[whole:].copy()
        for frame_S in heard_S[:whole].reshape(-1, FRAME):
            probability = self._probability(state, np.concatenate([state.context_S, frame_S]))
            state.context_S = frame_S[-CONTEXT:].copy()
            state.speaking = probability >= (SILENCE if state.speaking else SPEECH)
            yield state.speaking

    @np.errstate(over="ignore")  # of a sound far beyond full scale a gate is shut or open, all the same
    def _probability(self, state: VoiceState, read_S: Samples) -> float:
        """The probability of speech in a frame with its context; updates the memory."""
        mirrored_S = np.concatenate([read_S, read_S[-CONTEXT - 1 : -1][::-1]])
        real_imaginary_LC = mirrored_S[_PLACES] @ self._spectrum_SC
        half = real_imaginary_LC.shape[1] // 2
        x_LC = np.sqrt(real_imaginary_LC[:, :half] ** 2 + real_imaginary_LC[:, half:] ** 2)
        for weight, bias_C, rows in self._convolutions:
            padded_LC = np.zeros((x_LC.shape[0] + 2, x_LC.shape[1]), np.float32)
            padded_LC[1:-1] = x_LC
            x_LC = np.maximum(padded_LC[rows].reshape(rows.shape[0], -1) @ weight + bias_C, 0)
        hidden_D, cell_D = state.memory
        enter_D, keep_D, new_D, show_D = (np.concatenate([x_LC[0], hidden_D]) @ self._cell_DC + self._cell_bias_C).reshape(4, -1)
        cell_D = _sigmoid(keep_D) * cell_D + _sigmoid(enter_D) * np.tanh(new_D)
        hidden_D = _sigmoid(show_D) * np.tanh(cell_D)
        state.memory = hidden_D, cell_D
        return float(_sigmoid(np.maximum(hidden_D, 0) @ self._final_D + self._final_bias))


_PLACES = np.arange(0, FRAME + 2 * CONTEXT - SPECTRUM + 1, HOP)[:, None] + np.arange(SPECTRUM)


def _around(length: int, stride: int) -> npt.NDArray[np.intp]:
    """The rows that each output of a convolution of kernel 3 reads, of an input padded by a row at both ends."""
    return np.arange(0, length, stride)[:, None] + np.arange(3)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


@cache
def _published() -> Mapping[str, FloatArray]:
    """The weights of the installed package."""
    found = importlib.util.find_spec("silero_vad")
    if found is None or found.origin is None:
        raise MissingExtraError("silero-vad", "audio", "telling speech from silence (without it: voice off)")
    path = Path(found.origin).parent / "data" / "silero_vad_16k.safetensors"
    try:
        return safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise SourceError(f"{path}: cannot be read ({error}): install silero-vad 6.2 or newer again") from None
