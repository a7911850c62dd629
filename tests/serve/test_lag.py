"""The dial in seconds at a server: each entrance, by a small model with a frontier written by hand."""

import base64
import dataclasses

import httpx
import numpy as np
import pytest
from servers import Wire, of_session, rows, serving, texts
from test_speech import Realtime, configured

from zendaya import Client, Pipeline
from zendaya.cli.serve import _check_dial, serve
from zendaya.errors import ConfigError
from zendaya.runtime.setting import LiveSetting
from zendaya.serve.client import ServerError
from zendaya.serve.config import ServeConfig
from zendaya.sources.live import at_once

POINTS = (
    ("gamma=1.5;voice=off;block_s=0.6", 0.8, 14.0), ("gamma=1,head=2;voice=off;window_s=6;block_s=1.2", 1.4, 11.0),
    ("gamma=0.5;voice=off;block_s=1.2", 2.6, 8.0),
)  # fmt: skip
SHOWN = [
    {"lag_s": round(lag_s + 0.1, 6), "lag_p90_s": round((lag_s + 0.1) * 1.5, 6), "wer": wer + 1, "at_s": lag_s, "setting": setting}
    for setting, lag_s, wer in POINTS
]


@pytest.fixture(scope="module")
def measured(hearing, frontier_of):
    return dataclasses.replace(hearing, frontier=frontier_of(*POINTS))


@pytest.fixture(scope="module")
def running(measured):
    with serving(measured, voice="off") as one:
        yield one


@pytest.fixture(scope="module")
def pcm():
    return (np.random.default_rng(5).standard_normal(12 * 16_000) * 3000).astype("<i2")


def played(served, text, pcm):
    """What a pipeline without a server writes under a setting."""
    setting = LiveSetting.parse(text)
    pipeline = Pipeline.open(served.model, setting.encoder_from(served.encoder), setting.options())
    return of_session(pipeline.run(at_once([pcm.astype(np.float32) / np.float32(32768)])))


def send(wire, pcm):
    for first in range(0, pcm.size, 8000):
        wire.source(pcm[first : first + 8000].tobytes())


@pytest.mark.parametrize(("dial", "place"), [({"lag_s": 1.0}, 0), ({"lag_s": 1.4}, 1), ({"lag_s": 60}, 2), ({}, 0)])
def test_a_stream_runs_the_setting_of_its_lag(running, measured, pcm, dial, place):
    wire = Wire(running, {"type": "open", **dial})
    opened = wire.opened
    assert (opened["setting"], opened["lag_s"]) == (POINTS[place][0], SHOWN[place]["lag_s"])
    assert (opened["frontier"], opened["measured_on"]) == (SHOWN, "LibriSpeech test-clean")
    send(wire, pcm)
    assert texts(wire.end()) == played(measured, POINTS[place][0], pcm)


def test_gamma_is_as_before_beside_a_frontier(running, measured, pcm):
    wire = Wire(running, {"type": "open", "gamma": 0.3})
    assert (wire.opened["setting"], wire.opened["lag_s"], wire.opened["frontier"]) == ("gamma=0.3", None, SHOWN)
    send(wire, pcm)
    assert texts(wire.end()) == played(measured, "gamma=0.3;voice=off", pcm)


def test_the_address_may_carry_the_lag(running):
    assert Wire(running, {"type": "open"}, query="?lag_s=1.5").opened["setting"] == POINTS[1][0]
    assert Wire(running, {"type": "open", "gamma": 1}, query="?lag_s=1.5").opened["setting"] == "gamma=1.0"
    refused = Wire(running, {"type": "open"}, query="?lag_s=soon").opened
    assert (refused["field"], refused["message"]) == ("lag_s", "lag_s: expected a number: got 'soon'")


def test_a_lag_turns_the_schedule_and_keeps_the_block(running, measured, pcm):
    wire, same = Wire(running, {"type": "open", "lag_s": 1.0}), Wire(running, {"type": "open", "lag_s": 1.0})
    for one, turn in ((wire, {"lag_s": 2.0}), (same, {"policy": "gamma=1,head=2"})):
        send(one, pcm[:80000])
        one.say("turn", **turn)
        send(one, pcm[80000:])
    events = wire.end()
    assert [event["schedule"] for event in events if event["type"] == "turned"] == ["gamma=1,head=2"]
    assert texts(events) == texts(same.end())


@pytest.mark.parametrize(
    ("hello", "field", "words"),
    [
        ({"lag_s": 0.5}, "lag_s", "lag_s: this model reaches 0.8 … 2.6 s: got 0.5; ask for lag_s 0.8"),
        ({"lag_s": 1.0, "gamma": 0.5}, "lag_s", "lag_s: give one of gamma, policy and lag_s: got gamma and lag_s"),
        ({"lag_s": "1"}, "lag_s", "lag_s: expected a number in 0 … 3600: got '1'"),
        ({"lag_s": True}, "lag_s", "lag_s: expected a number"),
        ({"lag_s": 1.0, "source": "features"}, "lag_s", "lag_s: lag is measured from audio, not from features: give gamma"),
    ],
)
def test_a_lag_that_cannot_be_is_refused(running, hello, field, words):
    refused = Wire(running, {"type": "open", **hello}).opened
    assert (refused["type"], refused["field"]) == ("error", field)
    assert refused["message"].startswith(words)


def test_a_turn_out_of_reach_is_refused_and_the_stream_goes_on(running, measured, pcm):
    wire = Wire(running, {"type": "open", "lag_s": 1.0})
    send(wire, pcm[:80000])
    wire.say("turn", lag_s=0.1)
    send(wire, pcm[80000:])
    events = wire.end()
    (refused,) = (event for event in events if event["type"] == "refused")
    assert (refused["field"], "reaches 0.8 … 2.6 s" in refused["message"]) == ("lag_s", True)
    assert texts(events) == played(measured, POINTS[0][0], pcm)


def test_features_have_the_dial_of_a_model_without_frontier(running, tiny):
    opened = Wire(running, {"type": "open", "source": "features"}).opened
    assert (opened["setting"], opened["lag_s"], opened["frontier"], opened["measured_on"]) == ("gamma=0.5", None, None, None)
    with serving(tiny) as plain:
        wire = Wire(plain, {"type": "open"})
        assert (wire.opened["setting"], wire.opened["frontier"]) == ("gamma=0.5", None)
        wire.source(rows(0).tobytes())
        wire.say("turn", lag_s=1.0)
        assert "not from features" in next(event for event in wire.end() if event["type"] == "refused")["message"]


def test_a_model_that_was_not_measured_says_so(hearing):
    with serving(hearing) as plain:
        refused = Wire(plain, {"type": "open", "lag_s": 1.0}).opened
        assert refused["message"].startswith("lag_s: this model has no measured frontier: give gamma")


def test_the_dial_of_the_server_is_the_default(measured):
    with serving(measured, lag_s=1.5) as one:
        assert Wire(one, {"type": "open"}).opened["setting"] == POINTS[1][0]
        assert httpx.get(f"http://{one.host}/v1/models").json()["data"][0]["setting"] == POINTS[1][0]
    with serving(measured, gamma=0.2) as one:
        assert Wire(one, {"type": "open"}).opened["setting"] == "gamma=0.2"
        assert Wire(one, {"type": "open", "lag_s": 1.5}).opened["setting"] == POINTS[1][0]


def test_models_are_listed_with_their_frontier(running, tiny):
    (found,) = httpx.get(f"http://{running.host}/v1/models").json()["data"]
    assert (found["frontier"], found["measured_on"], found["setting"]) == (SHOWN, "LibriSpeech test-clean", POINTS[0][0])


def test_a_client_asks_for_seconds(running, measured, pcm):
    with Client(f"ws://{running.host}", lag_s=1.0) as client:
        assert client.opened["setting"] == POINTS[0][0]
        client.send(pcm[:80000])
        client.turn(lag_s=9.0)
        client.send(pcm[80000:])
        events = [caption.event for caption in client.finish()]
    assert [event.schedule for event in events if event.schedule] == ["gamma=0.5"]
    with pytest.raises(ServerError, match=r"this model reaches 0\.8 … 2\.6 s"):
        Client(f"ws://{running.host}", lag_s=0.1)
    with Client(f"ws://{running.host}") as client:
        with pytest.raises(ConfigError, match="turn: give gamma or lag_s, one of the two"):
            client.turn(0.5, lag_s=1.0)
        with pytest.raises(ConfigError, match="one of the two: got None and None"):
            client.turn()


# OpenAI's realtime.


def test_a_delay_is_seconds_or_a_name(running):
    one = Realtime(running)
    transcription = one.until("session.created")["session"]["audio"]["input"]["transcription"]
    assert (transcription["delay"], transcription["gamma"], transcription["lag_s"]) == (None, 1.5, SHOWN[0]["lag_s"])
    for delay, place in ((1.0, 0), (2, 1), (30, 2), ("minimal", 0), ("low", 0), ("medium", 1), ("high", 2), ("xhigh", 2)):
        one.tell("session.update", session=configured(16000, delay=delay))
        transcription = one.until("session.updated")["session"]["audio"]["input"]["transcription"]
        assert (transcription["delay"], transcription["lag_s"]) == (delay, SHOWN[place]["lag_s"])
    for delay, words in (
        (0.1, "this model reaches 0.8 … 2.6 s"),
        ("soon", "expected seconds, or one of minimal"),
        (True, "expected seconds"),
    ):
        one.tell("session.update", session=configured(16000, delay=delay))
        error = one.until("error")["error"]
        assert (error["param"], words in error["message"]) == ("session.audio.input.transcription.delay", True)
    one.tell("session.update", session={"gamma": 0.4})
    transcription = one.until("session.updated")["session"]["audio"]["input"]["transcription"]
    assert (transcription["delay"], transcription["gamma"], transcription["lag_s"]) == (None, 0.4, None)
    one.socket.close()


def test_an_item_runs_the_setting_of_its_delay(running, measured, pcm):
    one = Realtime(running)
    one.tell("session.update", session=configured(16000, delay=1.4))
    one.tell("input_audio_buffer.append", audio=base64.b64encode(pcm.tobytes()).decode())
    one.tell("input_audio_buffer.commit")
    done = one.until("conversation.item.input_audio_transcription.completed")
    wire = Wire(running, {"type": "open", "lag_s": 1.4})
    send(wire, pcm)
    assert words_of(done["transcript"]) == words_of("".join(text[0] for text in texts(wire.end())))
    one.socket.close()


def words_of(text):
    return "".join(text.split())


def test_seconds_need_a_measured_model(hearing):
    with serving(hearing) as plain:
        one = Realtime(plain)
        one.tell("session.update", session=configured(16000, delay=1.0))
        assert "no measured frontier" in one.until("error")["error"]["message"]
        one.socket.close()


# The command.


def test_a_server_takes_one_dial(measured, hearing):
    with pytest.raises(ConfigError, match="give --lag or --gamma, not both"):
        ServeConfig(lag_s=1.0, gamma=0.5)
    with pytest.raises(ConfigError, match=r"--lag: this model reaches 0.8 … 2.6 s: got 0.2; ask for --lag 0.8"):
        _check_dial(ServeConfig(lag_s=0.2), "small", measured)
    with pytest.raises(ConfigError, match="--lag: this model has no measured frontier"):
        _check_dial(ServeConfig(lag_s=1.0), "small", hearing)
    _check_dial(ServeConfig(lag_s=1.0), "small", measured)


def test_the_command_refuses_a_lag_before_it_listens():
    with pytest.raises(ConfigError, match=r"--lag: this model reaches 0\.\d … \d(\.\d)? s: got 0\.05"):
        serve(port=0, lag_s=0.05)
