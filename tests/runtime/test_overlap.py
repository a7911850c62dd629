"""Windows that overlap and tokens that are revised (method.md §10): each word once, the same text however it was pushed."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from sliding import BLOCK, OVERLAP, RATE, WINDOW, open_session, parts, play, push, sliding_model

from zendaya import PowerLaw
from zendaya.encoders.base import Tokens
from zendaya.encoders.whisper import WhisperBlocks
from zendaya.errors import ConfigError, SourceError
from zendaya.evaluation.metrics.quality import word_error_rate
from zendaya.evaluation.metrics.speech import written_words
from zendaya.nn.config import ModelConfig
from zendaya.nn.decoder import AttentionTap
from zendaya.nn.whisper import load_encoder, load_weights, whisper_decoder
from zendaya.runtime.batcher import Batcher
from zendaya.runtime.engine import engine_for, missing
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.overlap import EDGE_TOKENS, first_kept, prefix_rows
from zendaya.runtime.pipeline import Pipeline
from zendaya.runtime.policies.alignatt import AlignAtt
from zendaya.runtime.policies.local_agreement import LocalAgreement
from zendaya.runtime.token_rules import TokenRules
from zendaya.sources.media import read_audio

ENGINES = ["torch", pytest.param("native", marks=pytest.mark.skipif(missing() is not None, reason=f"no native engine: {missing()}"))]
SCHEDULES = [PowerLaw(0.7), PowerLaw(1, head=WINDOW, hold=6), AlignAtt(30), LocalAgreement()]


@pytest.fixture(autouse=True)
def attentive(request, monkeypatch):
    """Random weights look anywhere; words are heard in order, a second before the newest source that their step read."""
    if "data" not in request.fixturenames:
        monkeypatch.setattr(AttentionTap, "most_attended", lambda tap: max(0, tap.mean().shape[0] - 10))


@pytest.fixture(scope="module")
def model():
    return sliding_model()


def test_a_word_is_kept_or_dropped_whole():
    assert first_kept([True, False, True], [9, 12, 13], begin=11) == 0  # it lies where its last token does
    assert first_kept([True, False, True], [9, 10, 13], begin=11) == 2
    assert first_kept([False, True], [20, 30], begin=11) == 0
    assert first_kept([True, True], [1, 2], begin=11) == 2
    assert first_kept([], [], begin=11) == 0


def test_a_prefix_row_reads_as_far_as_its_step_did():
    found = prefix_rows([1, 2], [5, 6, 7, 8], [3, 3, 9, 9])
    assert [(request.ids, request.horizon) for request in found] == [([1, 2, 5], 3), ([6, 7], 9)]
    assert prefix_rows([1, 2], [], []) == []


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_windows_slide_and_take_over_their_words(model, schedule):
    given = parts()
    session = open_session(model, schedule)
    windows, events = {0: []}, []
    for part in given:
        for event in push(session, part):
            events.append(event)
            assert event.arrival_s == part.arrival_s[0]
            windows.setdefault(event.window_index, []).append(event)
    events += session.finish()
    restarts = [part.restart for part in given if part.restart is not None]
    assert len(restarts) >= 4
    assert events[-1].window_index == len(restarts)
    assert {event.window_start for event in events} <= {0, *restarts}
    firsts = {index: found[0] for index, found in windows.items() if found}
    assert max(event.step for event in firsts.values()) > 3, "no window took over words"
    for before, event in itertools.pairwise(events):
        if event.window_index == before.window_index:
            assert event.step == before.step + 1  # none lost or written twice
        assert event.window_start + event.effective_horizon >= before.window_start + before.effective_horizon
    assert not any(event.token == model.config.framing.end for event in events if event.arrival_s < given[-1].arrival_s[0])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_text_depends_on_arrivals_not_on_draws(model, schedule):
    given = parts()
    expected = play(open_session(model, schedule), given)
    session = open_session(model, schedule)
    for part in given:
        push(session, part)  # queued; nothing is drawn
    assert list(session.finish()) == expected
    session, events = open_session(model, schedule), []
    for index, part in enumerate(given):
        drawn = push(session, part)
        events += drawn if index % 3 == 0 else ()
    assert [*events, *session.finish()] == expected


@pytest.mark.parametrize("backend", ENGINES)
def test_alone_and_in_company_are_equal(model, backend):
    engine = engine_for(model, backend)
    streams = [parts(seed=seed, total=260) for seed in range(2)]
    expected = [play(open_session(model, schedule, engine=engine), given) for schedule in SCHEDULES for given in streams]
    batcher = Batcher(engine, max_rows=24)
    sessions = [batcher.add(open_session(model, schedule, engine=engine)) for schedule in SCHEDULES for _ in streams]
    found = {session: [] for session in sessions}
    for at in range(max(map(len, streams))):
        for session, given in zip(sessions, streams * len(SCHEDULES), strict=True):
            if at < len(given):
                push(session, given[at])
        for outcome in batcher.run():
            assert outcome.error is None, outcome.error
            found[outcome.session].append(outcome.event)
    for session in sessions:
        session.finish()
    for outcome in batcher.run():
        found[outcome.session].append(outcome.event)
    assert list(found.values()) == expected


def test_a_step_reads_the_newest_versions(model):
    """Tokens that were all replaced before a step reads them leave no trace of their first versions."""
    values = torch.randn(40, 16, generator=torch.Generator().manual_seed(5))
    wrong = torch.full((20, 16), 3.0)
    plain = [Tokens(values[:20], np.full(20, 1.0)), Tokens(values[20:], np.full(20, 2.0))]
    revised = [Tokens(wrong, np.full(20, 1.0)), Tokens(values, np.full(40, 2.0), revised=20)]
    schedule = PowerLaw(0, head=WINDOW)  # every step reads all of the window, so all are written at the end
    first, second = (play(open_session(model, schedule), given) for given in (plain, revised))
    assert first == second
    assert len(first) > 3
    early = PowerLaw(1)
    first, second = (play(open_session(model, early), given) for given in (plain, revised))
    assert [event for event in first if event.arrival_s < 2] != [event for event in second if event.arrival_s < 2]


def test_revisions_reach_back_into_their_own_window_only():
    """In disjoint windows a revision of tokens before the window is left out."""
    model = sliding_model()
    model.config = ModelConfig(**{**vars(model.config), "overlap_tokens": 0})
    values = torch.randn(WINDOW + 16, 16, generator=torch.Generator().manual_seed(5))
    times = np.full(WINDOW, 1.0)
    later = Tokens(torch.cat([torch.zeros(8, 16), values[WINDOW:]]), np.full(24, 2.0), revised=8)
    revised = play(open_session(model, PowerLaw(1)), [Tokens(values[:WINDOW], times), later])
    plain = play(open_session(model, PowerLaw(1)), [Tokens(values[:WINDOW], times), Tokens(values[WINDOW:], np.full(16, 2.0))])
    assert revised == plain
    with pytest.raises(SourceError, match="overlap_tokens"):
        open_session(model, PowerLaw(1)).push(values[:20], 1.0, revised=4, restart=10)


def test_no_step_is_written_on_the_edge_of_a_full_window(model):
    session = open_session(model, PowerLaw(0.3))
    play(session, parts())
    session = open_session(model, PowerLaw(0.3))
    for part in parts():
        for event in push(session, part):
            full = WINDOW - (WINDOW - session._window.overlap.tokens) % BLOCK
            place = session._window.heard[-1].place - event.window_start
            assert place < full - EDGE_TOKENS
            assert event.spoken_s == pytest.approx((event.window_start + place + 1) / RATE)


@pytest.mark.parametrize("steps", [40, None])
@pytest.mark.parametrize("gamma", [0.0, 0.05])
def test_a_late_step_is_written_before_its_window_slides(model, monkeypatch, gamma, steps):
    """A window that overlaps may slide before W tokens are in it: a step that asks for all of them is not lost."""
    session, given = open_session(model, PowerLaw(gamma), steps=steps), parts()
    monkeypatch.setattr(AttentionTap, "most_attended", lambda tap: min(2 * len(session._window.written), tap.mean().shape[0] - 1))
    fulls, found = {0: WINDOW}, {}
    for part in given:
        for event in push(session, part):
            found.setdefault(event.window_index, []).append(event)
        fulls[session._window.index] = WINDOW - (WINDOW - session._window.overlap.tokens) % BLOCK
    last = max(fulls)
    assert min(fulls.values()) < WINDOW
    assert set(range(last)) <= found.keys()
    for index in range(last):
        assert found[index][-1].horizon == fulls[index]
        assert 2 * found[index][-1].step >= fulls[index] - EDGE_TOKENS - 2  # up to the edge, beyond which the next one writes


def test_a_hold_of_the_whole_window_needs_no_length(model):
    held, given = PowerLaw(1, head=WINDOW, hold=6), parts()
    assert model.length is not None
    fixed = play(open_session(model, held, steps=model.config.max_steps), given)
    assert play(open_session(model, held, steps=None), given) == fixed
    session = open_session(model, held, steps=None)
    events = [event for part in given[:6] for event in push(session, part)]
    session.set_schedule(PowerLaw(1))
    events += [event for part in given[6:] for event in push(session, part)]
    steps = [event.predicted_steps for event in events if not event.schedule and event.window_index == 0]
    assert steps[0] == model.config.max_steps
    assert steps[-1] < model.config.max_steps  # from the length head, within the window


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_cut_completes_a_window_that_slides(model, schedule):
    given, session = parts(total=80), open_session(model, schedule)
    events = [event for part in given for event in push(session, part)]
    events += session.cut(8.0)
    assert events[-1].last
    assert session.place[0] == 1
    # What slides after a cut begins behind it: the words before were written.
    events = list(session.push(torch.randn(30, 16), 9.0, revised=22, restart=58))
    assert session._window.start == 80
    assert session._window.arrived == 8
    assert not session._window.written or events


def test_without_slides_full_windows_follow_each_other(model):
    values = torch.randn(2 * WINDOW + 10, 16, generator=torch.Generator().manual_seed(1))
    session = open_session(model, PowerLaw(1))
    events = [*session.push(values, np.arange(len(values)) / RATE), *session.finish()]
    assert sorted({event.window_start for event in events}) == [0, WINDOW, 2 * WINDOW]
    assert [event.window_index for event in events if event.last] == [0, 1, 2]


def test_bad_input_is_refused(model):
    session = open_session(model, PowerLaw(1))
    with pytest.raises(SourceError, match="0 … 4"):
        session.push(torch.zeros(4, 16), 1.0, revised=5)
    with pytest.raises(SourceError, match="arrive together"):
        session.push(torch.zeros(4, 16), [1.0, 1.0, 2.0, 2.0], revised=2)
    with pytest.raises(SourceError, match="slides with fewer"):
        session.push(torch.zeros(WINDOW + 1, 16), 1.0, revised=2, restart=5)
    with pytest.raises(ConfigError, match="at most half"):
        sliding_model().config.__class__(**{**vars(model.config), "overlap_tokens": WINDOW})
    with pytest.raises(ConfigError, match="never whole"):
        ModelConfig(**{**vars(model.config), "length": "fix"})
    assert model.config.to_dict()["overlap_tokens"] == OVERLAP
    assert "overlap_tokens" not in ModelConfig(**{**vars(model.config), "overlap_tokens": 0}).to_dict()


def test_a_text_that_lost_its_way_begins_anew(model, monkeypatch):
    monkeypatch.setattr("zendaya.runtime.writers.STALL_TOKENS", 20)
    end = model.config.framing.end
    monkeypatch.setattr(TokenRules, "choose", lambda rules, logits_V, text, **_: end if len(text) >= 3 else 5)
    given = parts(total=200)
    session = open_session(model, PowerLaw(1, head=WINDOW, hold=6))
    events = [event for part in given for event in push(session, part)]
    starts = sorted({event.window_start for event in events})
    assert len(events) > 6  # it did not stop after the three tokens of a window
    own = [start for start in starts if start and start not in {part.restart for part in given}]
    assert own, "no window began anew"
    for before, event in itertools.pairwise(events):
        assert event.window_start + event.effective_horizon >= before.window_start + before.effective_horizon
        if event.window_start in own and before.window_start < event.window_start:
            assert event.step == 1  # without the words of the one before
    quiet, silent = open_session(model, PowerLaw(1, head=WINDOW, hold=6)), 0
    for part in given:
        speech_T = np.arange(len(part.values_TE)) < part.revised + 1
        silent += len(list(quiet.push(part.values_TE, part.arrival_s, revised=part.revised, restart=part.restart, speech_T=speech_T)))
    assert silent < len(events)  # silence is nothing that was left behind


def look_back(monkeypatch, by):
    """Let the alignment heads look at one source token, so many before the newest, or at the first."""

    def mean(tap):
        attention_F = torch.zeros_like(tap.weights_F[0])
        attention_F[max(0, len(attention_F) - by()) :][:1] = 1.0
        return attention_F

    monkeypatch.setattr(AttentionTap, "mean", mean)


@pytest.mark.parametrize("schedule", [PowerLaw(1, head=WINDOW, hold=6), PowerLaw(1, head=16, hold=6), PowerLaw(0.7)])
def test_a_word_heard_long_before_is_not_written_again(model, monkeypatch, schedule):
    written = []

    def choose(rules, logits_V, text, **_):
        written.append(len(text))
        assert len(written) < 1000, "a step is tried for ever"
        return 5

    monkeypatch.setattr("zendaya.runtime.writers.REWIND_TOKENS", 5)
    monkeypatch.setattr(TokenRules, "choose", choose)
    given = parts(total=110)
    unguarded = open_session(model, schedule)
    freely = len([event for part in given for event in push(unguarded, part)])
    look_back(monkeypatch, lambda: 10 if written[-1] < 5 else 200)
    session = open_session(model, schedule)
    events = [event for part in given for event in push(session, part)]
    assert 0 < len(events) < freely
    ended = list(session.finish())
    assert [event.token for event in ended] == [model.config.framing.end]  # nothing but what was written before is left


def test_another_word_that_looks_back_is_written(model, monkeypatch):
    """Alignment heads may look at a pause: only a word that was heard there before would be written twice."""
    monkeypatch.setattr("zendaya.runtime.writers.REWIND_TOKENS", 5)
    monkeypatch.setattr(TokenRules, "choose", lambda rules, logits_V, text, **_: 5 + len(text) % 2 if len(text) < 5 else 7)
    look_back(monkeypatch, lambda: 10 if len(session._window.written) < 5 else 200)
    session = open_session(model, PowerLaw(1, head=WINDOW, hold=6))
    events = [event for part in parts(total=110) for event in push(session, part)]
    assert 7 in [event.token for event in events]


@pytest.mark.slow
def test_real_speech_is_written_once(data, monkeypatch):
    """The published tiny.en, not made for it, over windows of 15 s: no phrase is written again where a window slides."""
    monkeypatch.setattr("zendaya.runtime.writers.STALL_TOKENS", 10_000)  # it often lags behind, and would begin anew
    weights = load_weights("tiny.en")
    model = whisper_decoder(weights)
    model.config = dataclasses.replace(model.config, history=False, overlap_tokens=300, end_means_wait=True, loop_tokens=8)
    lines = map(json.loads, (data / "librispeech_clean/manifest.jsonl").read_text(encoding="utf-8").splitlines())
    said = list(itertools.islice((line for line in lines if line["split"] == "valid"), 5))
    sound = np.concatenate([chunk.samples for line in said for chunk in read_audio(data / "librispeech_clean" / line["audio"])])
    encoder = WhisperBlocks(load_encoder(weights), "tiny.en", block_s=0.5, revise_s=2.0)
    schedule = PowerLaw(1, head=1500, hold=25)
    pipeline = Pipeline.open(model, encoder, DecodeOptions(schedule=schedule, window_s=15.0, steps=50))
    events = [event for chunk in np.array_split(sound, 100) for event in pipeline.read(chunk)]
    firsts = [event for before, event in itertools.pairwise(events) if event.window_index != before.window_index]
    assert len(firsts) >= 2
    assert any(event.step > 3 for event in firsts)
    words = [word.text.lower().strip(".,") for word in written_words(events)]
    spoken = " ".join(line["text"] for line in said).lower().split()
    phrases = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    assert len(phrases) == len(set(phrases)), words
    assert 0.7 < len(words) / len(spoken) < 1.1
    assert word_error_rate([" ".join(words)], [" ".join(spoken)]).value < 40
