"""Settings of live runs as text, and the edges of a stream."""

import numpy as np
import pytest

from zendaya.encoders.features import Precomputed
from zendaya.encoders.whisper import WhisperBlocks
from zendaya.errors import ConfigError, ScheduleError
from zendaya.evaluation.live import state_drops, whole_pieces
from zendaya.runtime.pipeline import SourceEncoder
from zendaya.runtime.setting import LiveSetting


def test_what_is_no_option_of_the_decoder_is_the_encoders():
    setting = LiveSetting.parse("alignatt=25,chunk=100; window_s=10; cut=pauses; block_s=0.5; smooth=true")
    assert setting.decoder == {"window_s": 10.0, "cut": "pauses"}
    assert setting.encoder == {"block_s": 0.5, "smooth": True}
    assert str(setting) == "alignatt=25,chunk=100;cut=pauses;window_s=10.0;block_s=0.5;smooth=True"
    assert str(LiveSetting.parse("0.5")) == "gamma=0.5"
    assert LiveSetting.parse("wait-k=100,stride=14;patience_s=inf").schedule.k == 100


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gamma=0.5;window_s=x", "window_s: Expected `float"),
        ("gamma=0.5;window_s=-1", "above 0"),
        ("gamma=0.5;window_s", "NAME=VALUE"),
        ("gamma=0.5;cut=anywhere", "cut"),
        ("gamma=0.5;schedule=full", "NAME=VALUE"),
    ],
)
def test_a_bad_setting_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        LiveSetting.parse(text)


def test_a_bad_schedule_is_refused():
    with pytest.raises(ScheduleError, match="not a schedule"):
        LiveSetting.parse("fast;window_s=10")


def test_an_encoder_changes_its_own_settings(random_whisper):
    encoder = WhisperBlocks(random_whisper, "random", block_s=1.0, ceiling=1.5)
    other = encoder.with_settings(block_s=0.5)
    assert (other.block, other.floor, other.encoder) == (25, encoder.floor, encoder.encoder)
    with pytest.raises(ConfigError, match="no setting blocks; expected one of block_s"):
        encoder.with_settings(blocks=1)
    with pytest.raises(ConfigError, match="no settings to change"):
        Precomputed(16, 3.0).with_settings(block_s=1)


def test_edges_are_where_the_encoder_drops_its_context(random_whisper):
    source, edges = SourceEncoder(WhisperBlocks(random_whisper, "random", block_s=0.5)), set()
    for _ in range(50):
        list(source.read(np.zeros(1600, np.float32)))
        edges |= state_drops(None, source)
    assert edges == {2.0, 4.0}  # its span is 2 s


def test_a_slide_is_an_edge_where_and_when_it_happens(long_whisper, voice):
    source, edges, restarts = SourceEncoder(WhisperBlocks(long_whisper, "random", block_s=0.5, overlap_s=1.6)), set(), []
    for chunk in np.array_split(np.tile(voice, 2), 100):
        restarts += [span.tokens for span in source.read(chunk) if span.tokens.restart is not None]
        edges |= state_drops(None, source)
    assert restarts
    assert edges == {at_s for tokens in restarts for at_s in (tokens.restart / 50, float(tokens.arrival_s[0]))}


def test_a_long_recording_is_cut_where_it_is_quiet():
    sound = np.ones(70 * 16_000, np.float32)
    sound[27 * 16_000 : 27 * 16_000 + 1600] = 0.0
    pieces = list(whole_pieces(sound))
    assert [piece.size / 16_000 for piece in pieces[:1]] == [27.05]
    assert max(piece.size for piece in pieces) <= 30 * 16_000
    assert np.array_equal(np.concatenate(pieces), sound)
    assert len(list(whole_pieces(sound[: 30 * 16_000]))) == 1
