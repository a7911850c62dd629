"""Windows at pauses: the detector is Silero's, a cut is decided from what was heard, and lies in a pause where there is one."""

import importlib.resources
import importlib.util
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zendaya.encoders.base import Tokens
from zendaya.errors import ConfigError, MissingExtraError
from zendaya.runtime.pauses import PauseWindows
from zendaya.sources import vad
from zendaya.sources.media import read_audio
from zendaya.sources.vad import FRAME, FRAME_S, VoiceDetector

RATE = 50.0
BLOCK, AHEAD = 100, 200
"""As the shipped encoder: tokens come in blocks of 100, each known 200 samples after its end."""


@pytest.fixture(scope="module")
def speech():
    path = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
    return np.concatenate([chunk.samples for chunk in read_audio(path)])


@pytest.fixture(scope="module")
def voice():
    return VoiceDetector()


def windows_of(samples, voice, *, chunk=1600, window_tokens=150, **settings):
    """Feed sound in chunks and tokens when the encoder would give them: the cuts, and the sample by which each was decided."""
    pauses = PauseWindows(window_tokens, RATE, voice=voice, **settings)
    cuts, given, heard = [], 0, 0
    for first in range(0, samples.size, chunk):
        piece = samples[first : first + chunk]
        pauses.hear(piece)
        heard += piece.size
        while (given + BLOCK) * 320 + AHEAD <= heard:
            decided = (given + BLOCK) * 320 + AHEAD
            rest = Tokens(torch.zeros(BLOCK, 1), np.full(BLOCK, decided / 16_000))
            while (at := pauses.cut(rest)) is not None:
                given, rest = given + at, rest[at:]
                assert pauses.cut_s == given / RATE
                cuts.append((given, decided))
            given += len(rest)
    return cuts


def test_the_network_is_silero_vad_given_the_same_weights(speech, voice):
    folder = Path(importlib.util.find_spec("silero_vad").origin).parent / "data"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, which is why it is not used
        theirs = torch.jit.load(str(folder / "silero_vad.jit"))
    state = theirs._model.state_dict()
    names = {"stft_conv.weight": "stft.forward_basis_buffer"}
    names |= {f"conv{n + 1}.{part}": f"encoder.{n}.reparam_conv.{part}" for n in range(4) for part in ("weight", "bias")}
    names |= {f"lstm_cell.{part}_{which}": f"decoder.rnn.{part}_{which}" for part in ("weight", "bias") for which in ("ih", "hh")}
    names |= {f"final_conv.{part}": f"decoder.decoder.2.{part}" for part in ("weight", "bias")}
    ours = VoiceDetector({name: state[other].detach().numpy() for name, other in names.items()})
    heard, context = ours.start(), np.zeros(64, np.float32)
    for frame in speech[: 100 * FRAME].reshape(-1, FRAME):
        got = ours._probability(heard, np.concatenate([context, frame]))
        context = frame[-64:]
        assert got == pytest.approx(theirs(torch.from_numpy(frame), 16_000).item(), abs=1e-4)


def test_speech_is_told_from_silence(speech, voice):
    flags = list(voice.read(voice.start(), speech))
    assert 0.3 < np.mean(flags) < 0.7  # a slow voice with pauses of about 0.7 s
    assert not any(voice.read(voice.start(), np.zeros(32_000, np.float32)))


def test_windows_end_in_pauses_and_not_in_words(speech, voice):
    flags = list(voice.read(voice.start(), speech))
    cuts = windows_of(speech, voice, window_tokens=200)
    assert len(cuts) >= 2
    begin = 0
    for place, _ in cuts:
        assert 100 <= place - begin < 200  # at least half of W
        begin = place
        frame = int(place / RATE / FRAME_S)
        assert not any(flags[frame - 2 : frame + 2])


def test_any_chunking_gives_the_same_cuts(speech, voice):
    whole = windows_of(speech, voice, chunk=speech.size)
    assert whole
    for chunk in (160, 1600, 7777):
        assert windows_of(speech, voice, chunk=chunk) == whole


@pytest.fixture(scope="module")
def cuts(speech, voice):
    return windows_of(speech, voice)  # in chunks of 0.1 s


@settings(max_examples=12)
@given(at=st.integers(20_000, 140_000), seed=st.integers(0, 99), loud=st.floats(0, 1))
def test_no_cut_depends_on_sound_after_it_was_decided(speech, voice, cuts, at, seed, loud):
    changed = speech.copy()
    changed[at:] = np.random.default_rng(seed).normal(0, loud, speech.size - at)
    found = windows_of(changed, voice, chunk=speech.size)  # all of it is there, and only what had arrived may count
    assert [cut for cut in found if cut[1] <= at] == [cut for cut in cuts if cut[1] <= at]


def test_the_future_would_have_changed_the_cuts(speech, voice):
    """The test above can fail: other sound does give other cuts."""
    changed = speech.copy()
    changed[40_000:] = np.random.default_rng(0).normal(0, 0.001, speech.size - 40_000)
    assert windows_of(changed, voice) != windows_of(speech, voice)


class Script:
    """A voice that speaks as it is told, a flag a frame."""

    def __init__(self, flags):
        self.flags = flags

    def start(self):
        return iter(self.flags)

    def read(self, state, samples):
        return [next(state) for _ in range(samples.size // FRAME)]


def scripted(flags, **settings):
    samples = np.zeros(len(flags) * FRAME, np.float32)
    return [place for place, _ in windows_of(samples, Script(flags), chunk=FRAME, **settings)]


def frames(*runs):
    return [speech for length_s, speech in runs for _ in range(round(length_s / FRAME_S))]


def test_without_a_pause_nothing_is_cut():
    assert scripted(frames((20.0, True))) == []


def test_the_middle_of_the_longest_pause_of_a_block_is_taken():
    flags = frames((2.2, True), (0.256, False), (0.4, True), (0.6, False), (9.0, True))
    (place,) = scripted(flags, window_tokens=200)
    assert place / RATE == pytest.approx(2.2 + 0.256 + 0.4 + 0.3, abs=0.05)


def test_a_short_silence_is_no_pause():
    assert scripted(frames((2.5, True), (0.192, False), (9.0, True)), window_tokens=200) == []
    assert scripted(frames((2.5, True), (0.192, False), (9.0, True)), window_tokens=200, pause_s=0.16) != []


def test_a_pause_too_early_in_the_window_is_passed_over():
    assert scripted(frames((1.0, True), (0.5, False), (9.0, True)), window_tokens=200) == []


def test_a_pause_across_two_blocks_is_cut_in_the_second():
    (place,) = scripted(frames((3.9, True), (0.3, False), (9.0, True)), window_tokens=300)
    assert 200 <= place <= 211


def test_an_endless_silence_needs_no_memory():
    pauses = PauseWindows(150, RATE, voice=Script([False] * 40_000))
    for block in range(1, 200):
        pauses.hear(np.zeros(32_000, np.float32))
        while pauses.cut(Tokens(torch.zeros(BLOCK, 1), np.full(BLOCK, block * 2.0))[pauses._given - (block - 1) * BLOCK :]) is not None:
            pass
    assert len(pauses._speech) < 300


def test_cuts_do_not_depend_on_blocks_per_call(speech, voice):
    one, other = (PauseWindows(150, RATE, voice=voice) for _ in range(2))
    one.hear(speech)
    other.hear(speech)
    blocks = [Tokens(torch.full((BLOCK, 1), float(n)), np.full(BLOCK, 2.0 * (n + 1) + 0.0125)) for n in range(4)]

    def pieces(pauses, tokens):
        while (at := pauses.cut(tokens)) is not None:
            yield at
            tokens = tokens[at:]
        yield len(tokens)

    together = list(pieces(one, Tokens.join(blocks, 1)))
    apart, held = [], 0
    for block in blocks:
        first, *rest = pieces(other, block)
        held += first
        for size in rest:
            apart.append(held)
            held = size
    assert [*apart, held] == together
    assert len(together) > 2


def test_bad_settings_and_a_missing_package_are_one_line(monkeypatch):
    for bad in ({"pause_s": 0.0}, {"pause_s": 11.0}, {"share": 0.0}, {"share": 1.5}):
        with pytest.raises(ConfigError):
            PauseWindows(150, RATE, voice=Script([]), **bad)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    vad._published.cache_clear()
    with pytest.raises(MissingExtraError, match=r"zendaya\[audio\]"):
        VoiceDetector()
