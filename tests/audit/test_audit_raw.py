"""The raw-input audit: it passes encoders that keep their word and catches those that do not."""

import dataclasses
import json
import os

import numpy as np
import pytest
import torch

from zendaya import Model, PowerLaw, WaitK
from zendaya.audit.raw import CHANGES, audit_encoder, audit_to_text
from zendaya.encoders._frames import FrameEncoder
from zendaya.encoders.base import Tokens, Traits
from zendaya.encoders.features import PCA, Precomputed
from zendaya.encoders.whisper import WhisperBlocks, WhisperFull, load_whisper
from zendaya.errors import ConfigError, SourceError
from zendaya.nn.presets import preset
from zendaya.runtime.policies.alignatt import AlignAtt
from zendaya.runtime.policies.edatt import EDAtt
from zendaya.runtime.policies.local_agreement import LocalAgreement
from zendaya.sources.media import Frame, read_audio, read_video


@pytest.fixture(scope="module")
def tiny_en():
    return load_whisper("tiny.en", block_s=0.5, pool=5)


@pytest.fixture(scope="module")
def voice():
    generator = np.random.default_rng(0)
    time = np.arange(3 * 16_000) / 16_000
    return (0.1 * np.sin(2 * np.pi * 200 * time) * np.sin(5 * time) + 0.02 * generator.standard_normal(time.size)).astype(np.float32)


class Means:
    """Means of 100 samples, with a fault of choice: an honest encoder, or one of those the audit exists for."""

    def __init__(self, fault="none"):
        self.fault = fault
        self.traits = Traits(name=fault, modality="audio", dim=1, tokens_per_s=160.0, look_back_s=0, look_ahead_s=0, live=True)

    def start(self):
        return {"kept": np.zeros(0, np.float32), "given": 0}

    def read(self, state, raw):
        state["kept"] = np.concatenate([state["kept"], raw])
        ahead = {"reads ahead": 1, "reads far ahead": 1600}.get(self.fault, 0)
        ready = max(0, (state["kept"].size - ahead) // 100)
        means = [state["kept"][100 * i : 100 * i + 100 + ahead].mean() for i in range(state["given"], ready)]
        if self.fault == "whole chunk" and raw.size:
            means = [mean + raw.max() for mean in means]
        if self.fault == "number":
            ready -= ready and int(raw[-1] > 0.05)
            means = means[: ready - state["given"]] if ready >= state["given"] else []
        arrival_s = 100 * np.arange(state["given"] + 1, state["given"] + 1 + len(means)) / 16_000
        state["given"] += len(means)
        if self.fault == "late error" and not np.isfinite(raw).all():
            raise SourceError("a bad sample, and what came with it is lost")
        return Tokens(torch.tensor(means, dtype=torch.float32).reshape(-1, 1), arrival_s)

    def finish(self, state):
        return Tokens.none(1)


class Nudged:
    """An encoder whose numbers change in the last bit with the length of the chunk."""

    def __init__(self, inner):
        self.inner, self.traits = inner, inner.traits

    def start(self):
        return self.inner.start()

    def read(self, state, raw):
        tokens = self.inner.read(state, raw)
        nudged = torch.nextafter(tokens.values_TE, torch.tensor(torch.inf)) if len(raw) % 2 else tokens.values_TE
        return Tokens(nudged, tokens.arrival_s)

    def finish(self, state):
        return self.inner.finish(state)


def test_an_honest_encoder_is_clean(voice):
    audit = audit_encoder(Means(), voice)
    assert audit.clean
    assert audit.num_compared > 500
    assert "no leak" in str(audit)


@pytest.mark.parametrize("fault", ["reads ahead", "reads far ahead", "whole chunk", "number", "late error"])
def test_every_fault_is_caught(voice, fault):
    audit = audit_encoder(Means(fault), voice)
    assert not audit.clean
    assert audit.leaks
    assert "LEAKS" in str(audit)


def test_one_bit_is_enough(voice):
    audit = audit_encoder(Nudged(Means()), voice)
    assert not audit.clean
    assert max(leak.difference for leak in audit.leaks) < 1e-7


def test_the_cut_may_be_given(voice):
    """At the very arrival of a token that reads one sample too many, the audit still sees it."""
    audit = audit_encoder(Means("reads ahead"), voice, cuts_s=[0.625])
    assert {leak.change for leak in audit.leaks} >= {"other", "noise", "silence", "nothing"}
    assert {leak.token for leak in audit.leaks} == {99}
    assert audit_encoder(Means(), voice, cuts_s=[0.625]).num_compared == 100 * len(CHANGES)


def test_whisper_in_blocks_is_clean(tiny_en, voice):
    audit = audit_encoder(tiny_en, voice)
    assert audit.clean, str(audit)
    assert audit.num_compared > 50


def test_whisper_in_blocks_leaks_if_its_delay_is_ignored(tiny_en, voice):
    """Block tokens paced by their rate alone would know up to a block of the future."""
    assert audit_encoder(tiny_en, voice, arrivals="own").leaks


def test_whisper_with_the_clips_own_maximum_would_be_caught(tiny_en, voice):
    class OwnMaximum(WhisperBlocks):
        def _log_mel(self, state):
            mel = super()._log_mel(state)
            loudest = state.heard.kept_S[: state.heard.total].max()  # of all that was heard, the block's future included
            return mel + 0.001 * float(loudest)

    blocks = OwnMaximum(tiny_en.encoder, "own maximum", block_s=0.5)
    assert audit_encoder(blocks, voice).leaks


def test_whisper_in_full_leaks_if_it_is_paced(tiny_en, voice):
    full = WhisperFull(tiny_en.encoder, "tiny.en")
    paced = audit_encoder(full, voice, arrivals="own", cuts_s=[1.5])
    assert not paced.clean
    assert max(leak.difference for leak in paced.leaks) > 0.1
    assert {leak.change for leak in paced.leaks} >= {"other", "noise", "silence", "nothing", "more"}
    # As it states its arrivals, no token comes before the end: there is nothing to leak, and that is said.
    stated = audit_encoder(full, voice, num_cuts=1)
    assert not stated.leaks
    assert not stated.clean
    assert "nothing compared" in str(stated)


class Brightness(FrameEncoder):
    def __init__(self, smooth=False):
        super().__init__("brightness", 1, 3.0)
        self.smooth = smooth

    def embed(self, pixels_HW3):
        return torch.tensor([float(pixels_HW3.mean())])

    def read(self, state, raw):
        tokens = super().read(state, raw)
        # A mean over the frames of a chunk: it reads those after its own.
        return Tokens(tokens.values_TE.mean(0).expand(len(tokens), 1), tokens.arrival_s) if self.smooth else tokens


def test_frames(voice):
    generator = np.random.default_rng(0)
    frames = [Frame(generator.integers(0, 256, (6, 8, 3), np.uint8), i / 3, i / 3 + 0.04) for i in range(20)]
    audit = audit_encoder(Brightness(), frames)
    assert audit.clean, str(audit)
    assert audit.num_compared > 100
    assert audit_encoder(Brightness(smooth=True), frames).leaks


def test_rows():
    rows = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
    assert audit_encoder(Precomputed(6, 3.0, window_s=1.0, pca=PCA.fit([rows], dim=4)), rows).clean
    with pytest.raises(ConfigError, match="reads audio: got an array of shape"):
        audit_encoder(Means(), rows)


def small_model(dim):
    config = preset("tiny")
    return Model.from_preset("tiny", decoder=dataclasses.replace(config.decoder, source_dim=dim))


def test_from_samples_to_text(tiny_en, voice):
    model = small_model(tiny_en.traits.dim)
    for schedule in (PowerLaw(1), WaitK(2, 0.5)):
        found = audit_to_text(tiny_en, voice, lambda schedule=schedule: model.open(schedule, max_steps=8), num_cuts=4)
        assert found.clean, str(found)
        assert found.num_compared > 20
        assert "to text" in str(found)


def test_from_frames_to_text():
    generator = np.random.default_rng(0)
    frames = [Frame(generator.integers(0, 256, (6, 8, 3), np.uint8), i / 3, i / 3 + 0.04) for i in range(40)]
    model = small_model(1)
    assert audit_to_text(Brightness(), frames, lambda: model.open(PowerLaw(1)), num_cuts=4).clean


@pytest.mark.parametrize("policy", [AlignAtt(2, chunk=3), EDAtt(0.3), LocalAgreement(4)], ids=str)
def test_policies_from_frames_to_text(policy):
    generator = np.random.default_rng(0)
    frames = [Frame(generator.integers(0, 256, (6, 8, 3), np.uint8), i / 3, i / 3 + 0.04) for i in range(40)]
    model = small_model(1)
    found = audit_to_text(Brightness(), frames, lambda: model.open(policy, max_steps=8), num_cuts=4)
    assert found.clean, str(found)
    assert found.num_compared > 20


def test_to_text_with_patience_and_a_dial_that_turns(voice):
    """The link is perfect here; it is the patience, shorter than the source's own pace, that runs out at moments of its own."""
    model = small_model(1)
    turns = [(0.2, PowerLaw(0.3)), (0.31, PowerLaw(1.5)), (0.4, WaitK(4, 0.5))]

    def open_session():
        return model.open(PowerLaw(0), window_tokens=20, patience_s=0.02)

    found = audit_to_text(Means(), voice[:9000], open_session, num_cuts=5, turns=turns)
    assert found.clean, str(found)
    assert found.num_compared > 100

    def peeking():
        """A session that does not let its patience run out where it knows that more is to come."""
        session = open_session()
        arrivals = session._context.input
        give_up_s = arrivals._give_up_s
        arrivals._give_up_s = lambda needed: give_up_s(needed) + (0.05 if len(arrivals.queue.items) > 1 else 0.0)
        return session

    assert audit_to_text(Means(), voice[:9000], peeking, num_cuts=5, turns=turns).leaks


def test_an_encoder_that_leaks_shows_in_the_text(tiny_en, voice):
    full = WhisperFull(tiny_en.encoder, "tiny.en", pool=5)
    model = small_model(full.traits.dim)
    # The text itself must change, not only a number: weights that listen.
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.cross_attention.out.weight.mul_(20)
    found = audit_to_text(full, voice, lambda: model.open(PowerLaw(1), steps=8), arrivals="own", cuts_s=[1.0, 2.0])
    assert not found.clean
    assert found.leaks[0].arrival_s <= 2.0
    honest = audit_to_text(tiny_en, voice, lambda: model.open(PowerLaw(1), steps=8), cuts_s=[1.0, 2.0])
    assert honest.clean, str(honest)


def test_an_event_too_many_is_a_leak_too(voice):
    model = small_model(1)
    assert audit_to_text(Means(), voice[:9000], lambda: model.open(WaitK(2, 1)), num_cuts=2).clean
    assert audit_to_text(Means("number"), voice[:9000], lambda: model.open(WaitK(2, 1)), num_cuts=4).leaks


def test_what_cannot_be_audited(voice):
    with pytest.raises(SourceError, match="at least two"):
        audit_encoder(Means(), voice[:1])
    with pytest.raises(SourceError, match="a bad sample"):
        audit_encoder(Means("late error"), np.full(1000, np.nan, np.float32))
    with pytest.raises(ConfigError, match="arrivals"):
        audit_encoder(Means(), voice, arrivals="late")


def test_real_speech_and_video(request, tiny_en):
    from pathlib import Path

    from zendaya.encoders.efficientnet import EfficientNetLite0

    data = Path(os.environ.get("ZENDAYA_DATA") or request.config.rootpath / "../shared/data")
    if not data.is_dir():
        pytest.skip(f"the real published files are not here: {data} (set ZENDAYA_DATA to where they are)")
    line = json.loads((data / "librispeech/manifest.jsonl").read_text().splitlines()[0])
    samples = np.concatenate([chunk.samples for chunk in read_audio(data / "librispeech" / line["audio"])])
    audit = audit_encoder(tiny_en, samples, num_cuts=4)
    print(audit)
    assert audit.clean
    model = small_model(tiny_en.traits.dim)
    audit = audit_to_text(tiny_en, samples, lambda: model.open(PowerLaw(0.5), max_steps=12), num_cuts=2)
    print(audit)
    assert audit.clean
    video = sorted((data / "msvd/sample_videos").glob("*.avi"))[0]
    encoder, frames = EfficientNetLite0(), list(read_video(video))[:12]
    audit = audit_encoder(encoder, frames, num_cuts=2)
    print(audit)
    assert audit.clean
    model = small_model(encoder.traits.dim)
    audit = audit_to_text(encoder, frames, lambda: model.open(PowerLaw(1), window_tokens=6), num_cuts=2)
    print(audit)
    assert audit.clean
