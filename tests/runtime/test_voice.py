"""The voice gate: nothing is written without speech, nothing of speech is lost, and chunks, clocks and the future change no event."""

import dataclasses
import importlib.resources
import itertools
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from zendaya import DecodeOptions, Model, Pipeline, PowerLaw
from zendaya.audit.raw import audit_pipeline
from zendaya.encoders.base import Encoder, Tokens, Traits
from zendaya.encoders.features import Precomputed
from zendaya.errors import ConfigError, SourceError
from zendaya.runtime.engine import engine_for
from zendaya.runtime.loading import load_live
from zendaya.runtime.token_rules import START_SHARE, START_TOKENS, LikelyEnd, SureStart, TokenRules
from zendaya.runtime.voice import AFTER, BEFORE, VoiceGate
from zendaya.sources.live import at_once, paced
from zendaya.sources.media import read_audio
from zendaya.sources.vad import FRAME, VoiceDetector

RATE = 16_000


def seconds(number):
    return np.arange(round(number * RATE)) / RATE


def coloured(number_s, gain):
    """Noise whose spectrum is shaped by a gain over frequency."""
    size = round(number_s * RATE)
    spectrum = np.fft.rfft(np.random.default_rng(0).standard_normal(size)) * gain(np.fft.rfftfreq(size, 1 / RATE))
    sound = np.fft.irfft(spectrum, size)
    return (0.05 * sound / sound.std()).astype(np.float32)


def hum(number_s, base):
    return sum(0.1 / k * np.sin(2 * np.pi * base * k * seconds(number_s)) for k in (1, 2, 3, 5, 7)).astype(np.float32)


def music(number_s):
    """Chords with an attack and a decay, two per second."""
    sound, beat = np.zeros(round(number_s * RATE)), RATE // 2
    for n, first in enumerate(range(0, sound.size, beat)):
        at = np.arange(min(2 * beat, sound.size - first)) / RATE
        tones = [220 * 2 ** (step / 12) for step in ((0, 4, 7), (-2, 2, 5), (-4, 0, 3), (-5, -1, 2))[n // 4 % 4]]
        chord = sum(np.sin(2 * np.pi * k * tone * at) / k**1.5 for tone in tones for k in (1, 2, 3, 4))
        sound[first : first + at.size] += np.exp(-2.5 * at) * np.minimum(1, at / 0.01) * chord
    return (0.05 * sound).astype(np.float32)


SOUNDS = {
    "digital silence": lambda: np.zeros(12 * RATE, np.float32),
    "pink noise": lambda: coloured(12, lambda f: 1 / np.sqrt(np.maximum(f, 20))),
    "room noise": lambda: coloured(12, lambda f: 1 / (1 + (f / 400) ** 2)),
    "hum at 50 Hz": lambda: hum(12, 50),
    "hum at 60 Hz": lambda: hum(12, 60),
    "music": lambda: music(12),
}


@pytest.fixture(scope="module")
def speech():
    path = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
    return np.concatenate([chunk.samples for chunk in read_audio(path)])


@pytest.fixture(scope="module")
def shipped():
    return opens(*load_live("tiny.en-dial"))


def opens(model, encoder):
    engine = engine_for(model)
    return lambda **options: Pipeline.open(model, encoder, DecodeOptions(**{"schedule": PowerLaw(0.5), **options}), engine=engine)


def chunked(samples, *sizes):
    sizes, first = itertools.cycle(sizes), 0
    while first < samples.size:
        size = next(sizes)
        yield samples[first : first + size]
        first += size


def run(pipeline, samples, *sizes):
    return list(pipeline.run(at_once(chunked(samples, *(sizes or (samples.size,))))))


def text(events):
    return "".join(event.text for event in events)


def silence(number_s):
    return np.zeros(round(number_s * RATE), np.float32)


# With the shipped model.


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUNDS)
def test_nothing_is_written_without_speech(shipped, name):
    assert run(shipped(), SOUNDS[name]()) == []


@pytest.mark.slow
def test_continuous_speech_is_written_as_without_a_gate(shipped, speech):
    assert run(shipped(), speech) == run(shipped(voice="off"), speech)


@pytest.mark.slow
def test_speech_after_silence_is_written_from_its_first_word(shipped, speech):
    alone = run(shipped(), speech)
    sound = np.concatenate([silence(20), speech, silence(15), speech])
    events = run(shipped(), sound)
    assert text(events) == 2 * text(alone)
    first, second = ([event for event in events if (event.window_start > 30 * 50) == late] for late in (False, True))
    for found, begin_s in ((first, 20.0), (second, 35 + speech.size / RATE)):
        assert begin_s - 0.5 < found[0].window_start / 50 < begin_s + 0.4  # from just before the first word
        assert all(begin_s < event.read_s < event.arrival_s + 0.02 for event in found)  # the last source token of the sound is not whole
        assert found[-1].last
    assert first[-1].arrival_s < 20 + speech.size / RATE + 2.1  # the end is written once the silence is known, not when speech resumes


@pytest.mark.slow
def test_a_stretch_is_written_as_a_recording_of_its_own(shipped, speech):
    events = run(shipped(), np.concatenate([silence(7.31), speech, silence(5)]))
    begin = events[0].window_start
    end = round((events[-1].arrival_s - 7.31) * RATE)
    piece = np.concatenate([silence(7.31), speech, silence(5)])[begin * 320 :][: end + round(7.31 * RATE) - begin * 320]
    alone = [event for event in run(shipped(voice="off"), piece) if event.window_index == 0]  # its second window is silence
    assert [(event.token, event.horizon) for event in events] == [(event.token, event.horizon) for event in alone]
    np.testing.assert_allclose([event.read_s - begin / 50 for event in events], [event.read_s for event in alone])


@pytest.mark.slow
def test_chunks_and_the_clock_change_no_event(shipped, speech):
    sound = np.concatenate([silence(3), speech[: 5 * RATE], silence(2.5), speech[: 3 * RATE], silence(0.2)])
    events = run(shipped(), sound)
    assert len({event.window_start for event in events}) == 2
    for sizes in ((160,), (7777, 1, 512), (1600,)):
        assert run(shipped(), sound, *sizes) == events
    begun, chunks = time.monotonic(), [(chunk, (n + 1) * 0.5) for n, chunk in enumerate(chunked(sound, RATE // 2))]
    live = list(shipped().run(paced(chunks, lambda: 1000 * (time.monotonic() - begun))))
    assert live == events


def test_windows_that_slide_do_not_end_at_pauses(shipped):
    with pytest.raises(ConfigError, match="the windows of this model overlap: give cut=fixed"):
        shipped(cut="pauses", window_s=4.0)


@pytest.mark.slow
def test_windows_at_pauses_go_with_the_gate(speech):
    model, encoder = load_live("tiny.en-dial")
    model.config = dataclasses.replace(model.config, overlap_tokens=0)
    following = opens(model, encoder.with_settings(revise_s=0.0, block_s=1.0))
    sound = np.concatenate([silence(6), speech, silence(4), speech])
    events = run(following(cut="pauses", window_s=4.0), sound)
    assert run(following(cut="pauses", window_s=4.0), sound, 1600) == events
    assert len({event.window_start for event in events}) > 4
    assert text(events).count("tried") == 2


@pytest.mark.slow
def test_the_guard_holds_back_what_the_gate_lets_through(shipped, monkeypatch):
    """The gate is open for everything: the model itself does not begin a text from noise, and after 1.5 s writes a word at most."""
    monkeypatch.setattr(VoiceDetector, "_probability", lambda *_: 1.0)
    for name in ("pink noise", "music", "hum at 50 Hz"):
        sound = SOUNDS[name]()
        assert text(run(shipped(), sound[: RATE * 14 // 10])) == ""
        assert len(text(run(shipped(), sound)).split()) <= 1


# Of the parts.


class Levels(Encoder):
    """The mean of each 20 ms of sound, in blocks of 5 tokens."""

    traits = Traits(
        name="levels", modality="audio", dim=16, tokens_per_s=50.0, look_back_s=0.0, look_ahead_s=0.08, live=True, block_tokens=5
    )

    def start(self):
        return {"heard": np.zeros(0, np.float32), "given": 0}

    def read(self, state, raw):
        state["heard"] = np.concatenate([state["heard"], raw])
        return self.give(state, state["heard"].size // 1600 * 5)

    def finish(self, state):
        return self.give(state, state["heard"].size // 320)

    def give(self, state, upto):
        rows = state["heard"][state["given"] * 320 : upto * 320].reshape(-1, 320)
        blocks = np.minimum((np.arange(state["given"], upto) // 5 + 1) * 1600, state["heard"].size) / RATE
        state["given"] = upto
        return Tokens(torch.from_numpy(rows).mean(1, keepdim=True).expand(-1, 16).clone(), blocks)


class Script:
    """A detector that hears speech where a sample is above 0."""

    def start(self):
        return {"waiting": np.zeros(0, np.float32)}

    def read(self, state, samples):
        state["waiting"] = np.concatenate([state["waiting"], samples])
        while state["waiting"].size >= FRAME:
            yield bool(state["waiting"][:FRAME].max() > 0)
            state["waiting"] = state["waiting"][FRAME:]


def stretches(sound, *sizes):
    """Where stretches begin (token and moment) and the samples that each lets through."""
    gate, found = VoiceGate(50.0, Script()), []
    for chunk in chunked(sound, *(sizes or (sound.size,))):
        for step in gate.read(chunk):
            if step.begins:
                found.append([gate.position, gate.known, 0])
            elif step.samples_S is not None:
                found[-1][2] += step.samples_S.size
    return found


def spoken(*runs):
    """Sound from (seconds, speech or not)."""
    return np.concatenate([np.full(round(length_s * RATE), float(speech), np.float32) for length_s, speech in runs])


def test_a_stretch_has_sound_before_and_after():
    ((position, known, size),) = stretches(spoken((3, False), (1, True), (9, False)))
    onset = 3 * RATE // FRAME * FRAME
    assert position == (onset - BEFORE) // 320
    assert known == onset + 3 * FRAME
    assert abs(position * 320 + size - (4 * RATE + AFTER)) <= FRAME


def test_short_pauses_do_not_end_a_stretch():
    assert len(stretches(spoken((1, True), (1.9, False), (1, True), (1.9, False), (1, True)))) == 1
    assert len(stretches(spoken((1, True), (2.2, False), (1, True)))) == 2


def test_a_click_does_not_begin_a_stretch():
    assert stretches(spoken((2, False), (0.03, True), (2, False))) == []


def test_a_lead_in_shorter_than_the_padding_is_kept():
    assert stretches(spoken((0.38, False), (1, True)))[0][0] == 0


def test_stretches_do_not_depend_on_chunks():
    sound = spoken((1.234, False), (1, True), (2.345, False), (0.7, True), (3, False), (0.5, True))
    for sizes in ((1,), (160,), (511, 513), (4096,)):
        assert stretches(sound, *sizes) == stretches(sound)


def test_hours_of_silence_need_no_memory():
    gate = VoiceGate(50.0, Script())
    for _ in range(300):
        assert list(gate.read(np.zeros(12 * RATE, np.float32))) == []
    assert gate._kept_S.size <= RATE
    assert len(gate._speech) < 50
    assert gate.heard == 3600 * RATE


def test_a_damaged_sample_in_silence_is_an_error():
    gate, sound = VoiceGate(50.0, Script()), np.zeros(5000, np.float32)
    list(gate.read(sound))
    sound[3000] = np.nan
    list(gate.read(sound))  # what came before counts
    for _ in range(2):
        with pytest.raises(SourceError, match=r"sample 8000 \(0.500 s\) is nan"):
            list(gate.read(sound[:100]))
    with pytest.raises(SourceError, match="one channel"):
        list(VoiceGate(50.0, Script()).read(np.zeros((2, 5), np.float32)))


def test_a_window_without_speech_writes_nothing():
    model = Model.from_preset("tiny", seed=1)
    rows, speech = np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32), np.arange(24) >= 18
    pipeline = Pipeline(model.open(PowerLaw(0.5), window_tokens=8))
    events = [*pipeline.push(rows, np.arange(24.0), speech_T=speech), *pipeline.finish()]
    assert {event.window_index for event in events} == {2}
    assert events[0].arrival_s >= 18
    assert events[0].window_start == 16


def test_speech_after_silence_has_no_history_and_its_own_place():
    model = Model.from_preset("tiny", seed=1)
    rows = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)

    def tokens(pipeline, onset):
        events = list(pipeline.push(rows, 1.0))
        if onset is not None:
            events += [*pipeline.session.begin_speech(onset, 9.0)]
        return [*events, *pipeline.push(rows, 9.0), *pipeline.finish()]

    fresh = tokens(Pipeline(model.open(PowerLaw(0.5), window_tokens=8)), 100)
    first, second = ([event for event in fresh if event.window_index == n] for n in (0, 1))
    assert [event.token for event in first] == [event.token for event in second]
    assert {event.window_start for event in second} == {100}
    joined = tokens(Pipeline(model.open(PowerLaw(0.5), window_tokens=8)), None)
    assert {event.window_start for event in joined} == {0, 8}


def test_only_sound_has_a_gate():
    model = Model.from_preset("tiny")
    assert Pipeline.open(model, Precomputed(16, 3.0), DecodeOptions(schedule=PowerLaw(1))).source.gate is None
    assert Pipeline.open(model, Levels(), DecodeOptions(schedule=PowerLaw(1))).source.gate is not None
    assert Pipeline.open(model, Levels(), DecodeOptions(schedule=PowerLaw(1), voice="off")).source.gate is None
    with pytest.raises(ConfigError, match="voice=gate needs sound"):
        Pipeline.open(model, Precomputed(16, 3.0), DecodeOptions(schedule=PowerLaw(1), voice="gate"))
    with pytest.raises(ConfigError, match="voice must be one of auto, gate, off"):
        DecodeOptions(schedule=PowerLaw(1), voice="on")


def test_a_text_begins_only_with_a_sure_token():
    rules = TokenRules([SureStart(end=3)])
    guess, sure = torch.zeros(100), torch.zeros(100)
    guess[7], sure[7] = 1.0, 5.0  # of 100 tokens: 2.7 % and 60 %
    assert float(guess.softmax(0).max()) < START_SHARE < float(sure.softmax(0).max())
    assert (rules.choose(guess, []), rules.choose(sure, []), rules.choose(guess, [5])) == (3, 7, 7)
    assert (rules.choose(guess, [], speech=START_TOKENS - 1), rules.choose(guess, [], speech=START_TOKENS)) == (3, 7)  # a name is a guess
    guess[3] = 4.0  # the end is likelier than any word, but not than all: without the rule the next best word would be written
    assert TokenRules([LikelyEnd(end=3)]).choose(guess, []) == 7
    assert TokenRules([SureStart(end=3), LikelyEnd(end=3)]).choose(guess, []) == 3


@pytest.mark.slow
def test_the_audit_passes_with_the_gate(speech):
    sound = np.concatenate([silence(1), speech[RATE // 4 : 3 * RATE], silence(2.2), speech[:RATE]])
    model = Model.from_preset("tiny", seed=1)
    options = DecodeOptions(schedule=PowerLaw(0.7), window_tokens=24, max_steps=5, engine="torch")
    found = audit_pipeline(lambda: Pipeline.open(model, Levels(), options), sound, num_cuts=4)
    assert found.clean, str(found)
    assert found.num_compared > 50
