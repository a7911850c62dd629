"""Provisional tokens and windows that slide pass the audit, from samples to text; a leak planted in each part is caught."""

import dataclasses
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from zendaya import Model, PowerLaw
from zendaya.audit.leaks import _Loud
from zendaya.audit.overlap import audit_overlap
from zendaya.audit.raw import audit_encoder, audit_pipeline, audit_to_text
from zendaya.encoders.whisper import TOKEN, WhisperBlocks
from zendaya.errors import ConfigError
from zendaya.nn.decoder import AttentionTap
from zendaya.nn.presets import preset
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.pipeline import Pipeline, SourceEncoder, resolve
from zendaya.runtime.session import Session
from zendaya.runtime.voice import VoiceGate
from zendaya.runtime.window import Overlap

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from sliding import open_session, parts, sliding_model

SETTINGS = {"block_s": 0.5, "revise_s": 1.0, "span_s": 4.0, "overlap_s": 1.6}


@pytest.fixture(scope="module")
def sound(voice):
    """9 s of a voice, in which a span of 4 s slides three times, and a silence after which speech begins again."""
    return np.concatenate([voice, voice[::-1][: 3 * 16_000], np.zeros(40_000, np.float32), voice[:16_000]])


def test_an_encoder_that_revises_and_slides_is_clean(long_whisper, sound):
    encoder = WhisperBlocks(long_whisper, "random", **SETTINGS)
    audit = audit_encoder(encoder, sound, num_cuts=4)
    assert audit.clean, str(audit)
    assert audit.num_compared > 1000
    with pytest.raises(ConfigError, match="audit_pipeline"):
        audit_to_text(encoder, sound, lambda: None)


def test_a_revision_that_hears_the_future_is_caught(long_whisper, sound):
    class Foreseeing(WhisperBlocks):
        def _encode_block(self, state):
            revised = 0 if state.tail_TD is None else state.tail_TD.shape[0]
            values_TD = super()._encode_block(state).clone()
            values_TD[:revised] += 1e-3 * float(state.heard.kept_S[-1])  # a sample after the block, if it is here already
            return values_TD

    audit = audit_encoder(Foreseeing(long_whisper, "foreseeing", block_s=0.5, revise_s=1.0), sound, num_cuts=4)
    assert audit.leaks


def test_a_span_that_begins_by_the_future_is_caught(long_whisper, sound):
    class Foreseeing(WhisperBlocks):
        def _slide(self, state):
            super()._slide(state)
            later = int(state.heard.kept_S[-1] > 0)  # not heard when the block before it ended
            state.span_start, state.again = state.span_start + later * TOKEN, state.again - later

    audit = audit_encoder(Foreseeing(long_whisper, "foreseeing", block_s=0.5, span_s=4.0, overlap_s=1.6), sound, num_cuts=6)
    assert audit.leaks


def test_from_samples_to_text_with_gate_hold_and_slides(long_whisper, sound):
    decoder = dataclasses.replace(preset("tiny").decoder, source_dim=32, max_source=200)
    model = Model.from_preset("tiny", decoder=decoder, window_tokens=200, overlap_tokens=80, history=False, max_steps=60)
    with torch.no_grad():  # sure of its words, as a trained model is: a text does not begin with a guess
        model.decoder.tokens.weight.mul_(40)
    encoder = WhisperBlocks(long_whisper, "random", block_s=0.5, revise_s=1.0)
    schedule, slides = PowerLaw(0.7, head=20, hold=5), []
    options = resolve(DecodeOptions(schedule=schedule, steps=60, engine="torch", voice="gate"), model, encoder)

    class Watched(Session):
        def _slide(self, before, item):
            super()._slide(before, item)
            slides.append(len(self._window.written))

    def open_pipeline():
        half = SourceEncoder.of(encoder, options, model)
        return Pipeline(Watched(model, options), SourceEncoder(half.encoder, gate=VoiceGate(50.0, _Loud())))

    audit = audit_pipeline(open_pipeline, sound, num_cuts=2)
    assert audit.clean, str(audit)
    assert audit.num_compared > 50
    assert any(slides), "no window took over words"


@pytest.fixture
def attentive(monkeypatch):
    monkeypatch.setattr(AttentionTap, "most_attended", lambda tap: max(0, tap.mean().shape[0] - 10))


class _OpenPrefix(Session):
    """The rows of words taken over read all that their window holds."""

    def _slide(self, before, item):
        super()._slide(before, item)
        self._prefix = deque(dataclasses.replace(request, horizon=self._window.arrived) for request in self._prefix)


class _LowStep(Session):
    """The step after words taken over reads less than they did."""

    def _slide(self, before, item):
        super()._slide(before, item)
        self._window.overlap = Overlap(tokens=self._window.overlap.tokens)
        self._writer.floor = 0


@pytest.mark.parametrize("schedule", [PowerLaw(0.7), PowerLaw(1, head=120, hold=6)], ids=str)
def test_overlap_reads_no_further_than_its_horizon(attentive, schedule):
    model = sliding_model()
    audit = audit_overlap(lambda: open_session(model, schedule), parts(total=260))
    assert audit.clean, audit.violations[:3]


@pytest.mark.parametrize("leaky", [_OpenPrefix, _LowStep])
def test_a_leak_through_overlap_is_caught(attentive, leaky):
    model = sliding_model()

    def opened():
        session = open_session(model, PowerLaw(1.5))
        session.__class__ = leaky
        return session

    found = audit_overlap(opened, parts(total=260))
    assert found.violations
    assert "beyond its horizon" in str(found.violations[0])
