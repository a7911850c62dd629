"""Where a speaker pauses, heard as the sound arrives: windows that end there cut no word.

Silero VAD gives the probability of speech of each 32 ms, from what was heard so far. Its weights are read from the safetensors file of
the package silero-vad; neither its code nor its TorchScript is run.

Shape suffixes: S samples, C channels, L frames of a spectrum, D state width.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as functional
from torch import Tensor

from zendaya.encoders import Samples, Tokens
from zendaya.errors import ConfigError, MissingExtraError, SourceError

SAMPLE_RATE = 16_000
FRAME = 512
"""Samples of one decision: 32 ms at 16 kHz, the size Silero VAD was trained on."""
CONTEXT = 64
"""Samples before a frame that are read with it."""
FRAME_S = FRAME / SAMPLE_RATE
SPEECH, SILENCE = 0.5, 0.35
"""Speech begins at the one probability and ends below the other, as Silero VAD's own iterator has it."""
PAUSE_S = 0.25
SHARE = 0.5


@dataclass
class VoiceState:
    """What was heard: the samples of the unfinished frame, the network's memory, and whether someone was speaking."""

    context_S: Tensor = field(default_factory=lambda: torch.zeros(CONTEXT))
    waiting_S: Tensor = field(default_factory=lambda: torch.zeros(0))
    memory: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.zeros(1, 128), torch.zeros(1, 128)))
    speaking: bool = False


class Voice:
    """Silero VAD: for each 32 ms, whether someone is speaking. It has no parameters to set and reads nothing ahead."""

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
        """Take samples; of each frame they complete, whether it is speech."""
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
        """The probability of speech in a frame read with its context; the memory moves past it."""
        weights = self._weights
        mirrored_S = torch.cat([read_S, read_S[-CONTEXT - 1 : -1].flip(0)])
        real_LC, imaginary_LC = functional.linear(mirrored_S.unfold(0, 256, 128), weights["stft_conv.weight"][:, 0]).chunk(2, 1)
        x_LC = (real_LC.square() + imaginary_LC.square()).sqrt()
        for name, stride in (("conv1", 1), ("conv2", 2), ("conv3", 2), ("conv4", 1)):
            # A convolution over so few frames is quicker as one product.
            around_LC = functional.pad(x_LC, (0, 0, 1, 1)).unfold(0, 3, stride).flatten(1)
            x_LC = functional.linear(around_LC, weights[f"{name}.weight"].flatten(1), weights[f"{name}.bias"]).relu()
        cell = (weights[f"lstm_cell.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        state.memory = torch.lstm_cell(x_LC, state.memory, *cell)
        logit = functional.linear(state.memory[0].relu(), weights["final_conv.weight"][:, :, 0], weights["final_conv.bias"])
        return float(logit.sigmoid())


class PauseWindows:
    """Source tokens cut where the speaker pauses: a window that holds its least share ends in the next pause, and at W without one.

    A cut is decided when the tokens around it arrive, from the sound up to that moment, whatever the chunks.
    """

    def __init__(
        self, window: int, tokens_per_s: float, *, pause_s: float = PAUSE_S, share: float = SHARE, voice: Voice | None = None
    ) -> None:
        if not FRAME_S <= pause_s <= 10:
            raise ConfigError(f"a pause must last {FRAME_S} … 10 s: got {pause_s!r}")
        if not 0 < share <= 1:
            raise ConfigError(f"the least share of a window must lie above 0 and up to 1: got {share!r}")
        self.window, self.tokens_per_s = window, tokens_per_s
        self._least, self._pause = max(1, round(share * window)), round(pause_s / FRAME_S)
        self._voice = voice or Voice()
        self._state = self._voice.start()
        self._speech = list[bool]()
        """Of each frame from `_first` on, whether it is speech."""
        self._first = 0
        self._begin = 0
        """The source token the current window begins with."""
        self._given = 0
        """Source tokens given on so far."""

    def hear(self, samples_S: Samples) -> None:
        """Take the sound, before or together with the tokens made of it."""
        self._speech += self._voice.read(self._state, samples_S)

    @property
    def cut_s(self) -> float:
        """Where the current window began: the last cut, on the clock of the source, unless W tokens have passed since."""
        return self._begin / self.tokens_per_s

    def cut(self, tokens: Tokens) -> int | None:
        """How many of the tokens come before the end of a window, decided as they arrive; None: all do. Give those after it again."""
        first, count = self._given, 0
        for arrival_s, together in itertools.groupby(tokens.arrival_s.tolist()):
            count += len(list(together))
            cut = self._first_cut(first + count, arrival_s)
            if cut is not None:
                return cut - first
        return None

    def _first_cut(self, newest: int, now_s: float) -> int | None:
        """The first cut among the tokens up to `newest`, the last of which have just arrived."""
        while self._given < newest:
            cut = self._cut(newest, now_s)
            if cut is not None:
                self._begin = self._given = cut
                return cut
            if newest < self._begin + self.window:
                break
            self._begin += self.window  # the session begins the next window by itself
        self._given = newest
        self._forget()
        return None

    def _cut(self, newest: int, now_s: float) -> int | None:
        """The token the longest pause ends the window before, of those still to come or just there; later ones win a tie."""
        earliest = max(self._begin + self._least, self._given)
        latest = min(newest, self._begin + self.window - 1)
        best: tuple[int, int] | None = None
        for start, stop in self._pauses(int(now_s / FRAME_S + 1e-6)):
            first, last = (round(frame * FRAME_S * self.tokens_per_s) for frame in (start, stop))
            low, high = max(earliest, first), min(latest, last)
            if low <= high and (best is None or stop - start >= best[0]):
                best = stop - start, min(max((first + last) // 2, low), high)
        return best[1] if best else None

    def _pauses(self, num_frames: int) -> Iterator[tuple[int, int]]:
        """The pauses that are long enough in the first frames, each from its first frame to the one after its last known."""
        start = None
        for place, speech in enumerate([*self._speech[: num_frames - self._first], True], start=self._first):
            if not speech and start is None:
                start = place
            if speech and start is not None:
                if place - start >= self._pause:
                    yield start, place
                start = None

    def _forget(self) -> None:
        """Only a pause that reaches the tokens still to come matters, and of that its last part."""
        before = int(self._given / self.tokens_per_s / FRAME_S) - 4 * self._pause
        if before > self._first:
            del self._speech[: before - self._first]
            self._first = before
