"""`/v1/stream`: each stream writes the same as alone; cut anywhere, it resumes with nothing lost or doubled."""

import io
import itertools
import json
import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from servers import Wire, of_session, serving, texts, wait_for
from websockets.exceptions import ConnectionClosed, InvalidStatus

from zendaya import Client, Model, PowerLaw, ZendayaError
from zendaya.encoders._frames import FrameEncoder
from zendaya.runtime.engine import engine_for, missing
from zendaya.runtime.policies import parse_policy
from zendaya.serve.intake import Served, load_served

POLICIES = ["0", "0.3", "1", "gamma=2,floor", "gamma=1,head=3", "wait-k=3,stride=0.7", "full", "local-agreement=8"]


def rows(seed, count=60):
    return np.random.default_rng(seed).standard_normal((count, 16)).astype("<f4")


def pieces(values, seed):
    """Rows in messages of random sizes."""
    generator, first = random.Random(seed), 0
    while first < len(values):
        size = generator.randint(1, 9)
        yield values[first : first + size].tobytes()
        first += size


def alone(served, policy, values, engine=None):
    session = served.model.open(parse_policy(policy), engine=engine)
    return of_session([*session.push(values), *session.finish()])


@pytest.fixture(scope="module")
def running(tiny):
    with serving(tiny) as one:
        yield one


def test_a_stream_writes_what_a_session_writes(running, tiny):
    wire = Wire(running, {"type": "open", "gamma": 0.5})
    assert {name: wire.opened[name] for name in ("model", "source", "window_tokens", "dim", "schedule", "received")} == {
        "model": "tiny", "source": "features", "window_tokens": 24, "dim": 16, "schedule": "gamma=0.5", "received": 0,
    }  # fmt: skip
    for payload in pieces(rows(1), 1):
        wire.source(payload)
    events = wire.end()
    assert texts(events) == alone(tiny, "0.5", rows(1))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [message["received"] for message in wire.others][-1] == wire.number
    written = [event for event in events if event["type"] == "text"]
    for event in written:
        assert 0 < event["effective_horizon"] <= event["horizon"] <= 24
        assert event["arrival_s"] <= event["emission_s"]
        assert event["policy_lag_s"] == pytest.approx(max(0.0, event["arrival_s"] - event["spoken_s"]))
        assert event["compute_lag_s"] == pytest.approx(event["emission_s"] - event["arrival_s"])
        assert event["spoken_s"] <= event["read_s"]
    assert written[-1]["exposure"] == pytest.approx(np.mean([event["effective_horizon"] / 24 for event in written]))
    assert events[-1] == {"type": "finished", "seq": len(events), "reason": "end", "source_s": 20.0}
    wait_for(lambda: not running.server.seats and not running.sessions and not len(running.server.hub))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_sixteen_policies_together_write_as_alone(tiny, backend):
    if backend == "native" and missing() is not None:
        pytest.skip(missing())
    engine = engine_for(tiny.model, backend)
    with serving(tiny, engine=engine) as running:
        wires = [Wire(running, {"type": "open", "policy": POLICIES[n % len(POLICIES)]}) for n in range(16)]
        waiting = [list(pieces(rows(n, 40 + n), n)) for n in range(16)]
        while any(waiting):
            for wire, left in zip(wires, waiting, strict=True):
                if left:
                    wire.source(left.pop(0))
        for n, wire in enumerate(wires):
            assert texts(wire.end()) == alone(tiny, POLICIES[n % len(POLICIES)], rows(n, 40 + n), engine)


def test_a_turn_takes_effect_in_message_order(running, tiny):
    def turned():
        wire = Wire(running, {"type": "open", "gamma": 1})
        for n, payload in enumerate(pieces(rows(2), 2)):
            wire.source(payload)
            if n == 2:
                wire.say("turn", gamma=0.1)
            if n == 6:
                wire.say("turn", policy="wait-k=3")
        return wire.end()

    session, expected = tiny.model.open(PowerLaw(1)), []
    for n, payload in enumerate(pieces(rows(2), 2)):
        expected += session.push(np.frombuffer(payload, "<f4").reshape(-1, 16).copy())
        if n in (2, 6):
            session.set_schedule(parse_policy("0.1" if n == 2 else "wait-k=3"))
    expected += session.finish()
    events = turned()
    assert texts(events) == of_session(expected)
    assert [event["schedule"] for event in events if event["type"] == "turned"] == ["gamma=0.1", "wait-k=3,stride=1.0"]
    assert [event["type"] for event in events] == [event["type"] for event in turned()]


def test_a_flush_begins_a_new_window(running, tiny):
    wire = Wire(running, {"type": "open", "gamma": 0.3})
    wire.source(rows(3, 10).tobytes())
    wire.say("flush")
    flushed = wire.until("flushed")
    assert flushed["of"] == 2
    assert texts(wire.events)[-1][-1] is True  # the window has ended
    wire.source(rows(4, 10).tobytes())
    session = tiny.model.open(PowerLaw(0.3))
    expected = [*session.push(rows(3, 10)), *session.cut(), *session.push(rows(4, 10)), *session.finish()]
    assert texts(wire.end()) == of_session(expected)


def resumed(running, wire, hello=None):
    """Resume the session of a cut wire on another one."""
    received = wire.events[-1]["seq"] if wire.events else 0
    name, token = wire.opened["session"], wire.opened["token"]
    hello = hello or {"type": "resume", "session": name, "token": token, "received": received}
    other = Wire(running, hello, query=f"?session={name}")
    assert other.opened["type"] == "opened"
    other.events, other.number = wire.events, wire.number
    return other


@pytest.mark.parametrize("seed", range(4))
def test_a_session_cut_anywhere_writes_the_same_text(running, tiny, seed):
    generator = random.Random(seed)
    wire = Wire(running, {"type": "open", "gamma": 0.7})
    messages = list(pieces(rows(5, 90), seed))
    before = running.server.gauges.resumes._value.get()
    cuts = 0
    while wire.number < len(messages):
        wire.source(messages[wire.number])
        if generator.random() < 0.3:
            for _ in range(generator.randint(0, 12)):  # some events were received, some are on their way
                try:
                    message = json.loads(wire.socket.recv(timeout=0.05))
                except TimeoutError:
                    break
                wire.events += [message] if "seq" in message else []
            if generator.random() < 0.5 and wire.events:
                wire.tell({"type": "ack", "received": wire.events[-1]["seq"]})
            wire.cut()
            wire = resumed(running, wire)
            cuts += 1
            wire.number = wire.opened["received"]  # again from the last acknowledged message
    assert texts(wire.end()) == alone(tiny, "0.7", rows(5, 90))
    assert [event["seq"] for event in wire.events] == list(range(1, len(wire.events) + 1))
    assert running.server.gauges.resumes._value.get() - before == cuts > 0


def test_a_repeated_open_resumes(running, tiny):
    hello = {"type": "open", "session": "mine", "token": "0123456789abcdef", "gamma": 0.5}
    wire = Wire(running, hello)
    wire.source(rows(6, 30).tobytes())
    wire.cut()
    again = resumed(running, wire, hello)
    again.number = again.opened["received"]
    while again.number < 1:
        again.source(rows(6, 30).tobytes())
    assert texts(again.end()) == alone(tiny, "0.5", rows(6, 30))


def refused(running, hello, query=""):
    """The error that answers a hello, and the close code."""
    wire = Wire(running, hello, query=query)
    with pytest.raises(ConnectionClosed) as closed:
        wire.get()
    assert wire.opened["type"] == "error"
    assert str(wire.opened["message"]).startswith(f"{wire.opened['field']}: ")
    return wire.opened["code"], wire.opened["field"], closed.value.rcvd.code


HELLO = {"type": "open", "session": "other", "token": "0123456789abcdef"}


@pytest.mark.parametrize(
    ("hello", "expected"),
    [
        ("not json", ("bad_json", "message", 4400)),
        ("[]", ("bad_json", "message", 4400)),
        ("[" * 100_000, ("bad_json", "message", 4400)),
        ('{"type": "open", "gamma": NaN}', ("bad_json", "message", 4400)),
        (b"\x01" * 30, ("bad_field", "type", 4400)),
        ({}, ("bad_field", "type", 4400)),
        ({**HELLO, "gamma": -0.1}, ("bad_field", "gamma", 4400)),
        ({**HELLO, "gamma": 10**400}, ("bad_field", "gamma", 4400)),
        ({**HELLO, "gamma": True}, ("bad_field", "gamma", 4400)),
        ({**HELLO, "gamma": 1, "policy": "full"}, ("bad_field", "policy", 4400)),
        ({**HELLO, "policy": "wait-k=x"}, ("bad_field", "policy", 4400)),
        ({**HELLO, "policy": "gamma=1e9"}, ("bad_field", "policy", 4400)),
        ({**HELLO, "policy": "gamma=1,head=-3"}, ("bad_field", "policy", 4400)),
        ({**HELLO, "policy": "custom=" + "1," * 500}, ("bad_field", "policy", 4400)),
        ({**HELLO, "policy": "alignatt=4,heads=9.9"}, ("bad_open", "open", 4400)),
        ({**HELLO, "source": "audio"}, ("bad_field", "source", 4400)),
        ({**HELLO, "source": {}}, ("bad_field", "source", 4400)),
        ({**HELLO, "rate": 0}, ("bad_field", "rate", 4400)),
        ({**HELLO, "rate": 5000}, ("bad_field", "rate", 4400)),
        ({**HELLO, "window_s": 900}, ("bad_open", "open", 4400)),
        ({**HELLO, "patience_s": -1}, ("bad_field", "patience_s", 4400)),
        ({**HELLO, "live": 1}, ("bad_field", "live", 4400)),
        ({**HELLO, "session": "../../etc/passwd"}, ("bad_field", "session", 4400)),
        ({**HELLO, "token": "short"}, ("bad_field", "token", 4400)),
        ({**HELLO, "gama": 1}, ("unknown_field", "gama", 4400)),
        ({"type": "resume", "session": "nobody", "token": "0123456789abcdef", "received": 0}, ("unknown_session", "session", 4404)),
        ({"type": "resume", "session": "nobody"}, ("bad_field", "token", 4400)),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_malformed_hello_is_refused_by_field(running, hello, expected):
    assert refused(running, hello) == expected
    wait_for(lambda: not running.server.seats and not running.sessions)


def test_only_the_token_resumes_a_session(running):
    wire = Wire(running, {"type": "open"})
    name, query = wire.opened["session"], f"?session={wire.opened['session']}"
    wrong = {"type": "resume", "session": name, "token": "f" * 32, "received": 0}
    assert refused(running, wrong, query) == ("wrong_token", "token", 4403)
    assert refused(running, {**wrong, "token": wire.opened["token"], "received": 7}, query) == ("bad_field", "received", 4400)
    wire.source(rows(1).tobytes())  # the session is unharmed
    other = resumed(running, wire)
    with pytest.raises(ConnectionClosed) as closed:
        wire.until("closing")
    assert closed.value.rcvd.code == 4409
    assert other.end()[-1]["type"] == "finished"


BAD = [
    (b"1234567", None, "seq", "bad_number"),
    (struct.pack("<Q", 9) + bytes(64), None, "seq", "out_of_order"),
    (struct.pack("<Q", 0) + bytes(64), None, "seq", "out_of_order"),
    ("{", None, "message", "bad_json"),
    ('{"type": "dance"}', None, "type", "bad_field"),
    ('{"type": "turn", "seq": -1}', None, "seq", "bad_field"),
    ('{"type": "turn", "seq": 1.5}', None, "seq", "bad_field"),
    ('{"type": "ack", "received": 99999}', None, "received", "bad_field"),
    ('{"type": "ack"}', None, "received", "bad_field"),
    ('{"type": "ping", "id": 7}', None, "id", "bad_field"),
    (r'{"type": "ping", "id": "\ud800"}', None, "message", "bad_json"),
    (r'{"type": "flush", "seq": 1, "\uDFFF": 1}', None, "message", "bad_json"),
    (bytes(63), 1, "features", "bad_shape"),
    (np.full(16, np.nan, "<f4").tobytes(), 1, "features", "not_finite"),
    (np.full(16, np.inf, "<f4").tobytes(), 1, "features", "not_finite"),
    ({"type": "turn", "gamma": 99}, 1, "gamma", "bad_field"),
    ({"type": "turn"}, 1, "gamma", "bad_field"),
    ({"type": "turn", "policy": "local-agreement=8"}, 1, "gamma", "bad_field"),
    ({"type": "flush", "now": 1}, 1, "now", "unknown_field"),
]


@pytest.mark.parametrize(("message", "number", "field", "code"), BAD, ids=lambda value: repr(value)[:40])
def test_a_bad_message_does_not_end_the_session(running, tiny, message, number, field, code):
    wire = Wire(running, {"type": "open", "gamma": 0.5})
    if number is None:
        wire.tell(message)
        error = wire.until("error")
    else:
        if isinstance(message, dict):
            wire.say(message["type"], **{name: value for name, value in message.items() if name != "type"})
        else:
            wire.source(message)
        error = wire.until("refused")
        assert error["of"] == number
    assert (error["field"], error["code"]) == (field, code)
    assert error["message"].startswith(f"{field}: ")
    wire.source(rows(1).tobytes())
    assert texts(wire.end()) == alone(tiny, "0.5", rows(1))


def test_messages_after_the_end_are_refused(running):
    wire = Wire(running, {"type": "open"})
    wire.say("end")
    wire.source(rows(1).tobytes())
    wire.say("flush")
    last = wire.until("finished")
    assert [event["of"] for event in wire.events if event["type"] == "refused"] in ([2, 3], [2], [])  # the end may come first
    wire.tell({"type": "ack", "received": last["seq"]})
    wait_for(lambda: not running.sessions)


def test_too_long_a_message_ends_only_the_connection(running, tiny):
    wire = Wire(running, {"type": "open", "gamma": 0.5})
    wire.tell(struct.pack("<Q", 1) + bytes(2**20))
    with pytest.raises(ConnectionClosed) as closed:
        wire.get()
    assert closed.value.rcvd.code == 1009
    wire = resumed(running, wire)
    wire.source(rows(1).tobytes())
    assert texts(wire.end()) == alone(tiny, "0.5", rows(1))


def test_too_much_unread_source_ends_the_connection(tiny):
    with serving(tiny, max_unread=2000) as running:
        wire = Wire(running, {"type": "open"})
        wire.source(rows(1, 60).tobytes())
        assert wire.until("error")["code"] == "overrun"
        with pytest.raises(ConnectionClosed) as closed:
            wire.get()
        assert closed.value.rcvd.code == 4413


def test_a_client_without_hello_is_closed(tiny):
    with serving(tiny, hello_s=0.1) as running:
        wire = Wire(running)
        assert wire.get()["code"] == "no_hello"
        wait_for(lambda: not running.server.seats)


def test_an_idle_client_loses_its_seat(tiny):
    with serving(tiny, idle_s=0.5, slow_s=0.3, orphan_s=0.2) as running:
        silent, wire = (Wire(running, {"type": "open", "gamma": 0.5}) for _ in range(2))
        client = Client(f"ws://{running.host}", source="features")
        for first in range(0, 60, 6):  # a client that sends is not idle, however slow
            wire.source(rows(1)[first : first + 6].tobytes())
            if first < 24:
                silent.tell({"type": "ping", "id": "here"})  # a ping does not count
            time.sleep(0.12)
        last = silent.until("finished")
        assert last["reason"] == "idle"
        with pytest.raises(ConnectionClosed) as closed:
            silent.until("more")
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1000, "finished")
        assert list(client.captions()) == []
        wait_for(lambda: client.reason == "idle")
        wait_for(lambda: client._outbox.closed)
        with pytest.raises(ZendayaError, match=r"the session has ended \(idle\)"):
            client.send(rows(1))
        assert texts(wire.end()) == alone(tiny, "0.5", rows(1))
        wait_for(lambda: not running.server.seats)


def test_an_orphaned_session_expires(tiny):
    with serving(tiny, orphan_s=0.3) as running:
        wire = Wire(running, {"type": "open"})
        wire.source(rows(1).tobytes())
        wire.cut()
        wait_for(lambda: [session.connection for session in running.sessions.values()] == [None])
        wait_for(lambda: not running.sessions and not running.server.seats and not len(running.server.hub))
        name, token = wire.opened["session"], wire.opened["token"]
        assert refused(running, {"type": "resume", "session": name, "token": token, "received": 0})[0] == "unknown_session"


def test_kept_events_are_bounded(tiny):
    with serving(tiny, max_events=10) as running:
        wire = Wire(running, {"type": "open", "gamma": 0.5})
        wire.source(rows(1).tobytes())
        wire.say("flush")
        wire.until("flushed")  # all events were sent and read
        session = running.sessions[wire.opened["session"]]
        assert len(session.log.events) <= 10 < session.log.number
        wire.cut()
        hello = {"type": "resume", "session": session.id, "token": session.token, "received": 3}
        assert refused(running, hello, f"?session={session.id}") == ("events_gone", "received", 4410)
        wire = resumed(running, wire)
        assert texts(wire.end()) == alone(tiny, "0.5", rows(1))


def test_a_client_that_never_acknowledges_is_closed(tiny):
    with serving(tiny, slow_s=0.2, orphan_s=0.2) as running:
        wire = Wire(running, {"type": "open"})
        wire.source(rows(1).tobytes())
        wire.say("end")
        with pytest.raises(ConnectionClosed) as closed:
            wire.until("more")
        assert (wire.events[-1]["type"], closed.value.rcvd.code) == ("finished", 1000)
        wait_for(lambda: not running.sessions and not running.server.seats)


def test_a_full_server_still_resumes_its_sessions(tiny):
    with serving(tiny, max_sessions=2) as running:
        wires = [Wire(running, {"type": "open", "gamma": 0.5}) for _ in range(2)]
        with pytest.raises(InvalidStatus) as status:
            Wire(running)
        assert (status.value.response.status_code, status.value.response.headers["Retry-After"]) == (503, "5")
        assert json.loads(status.value.response.body)["error"]["code"] == "full"
        wires[0].cut()
        wires[0] = resumed(running, wires[0])
        for n, wire in enumerate(wires):
            wire.source(rows(n).tobytes())
        assert [texts(wire.end()) for wire in wires] == [alone(tiny, "0.5", rows(n)) for n in range(2)]
        wait_for(lambda: not running.server.full)
        assert Wire(running, {"type": "open"}).opened["type"] == "opened"


def test_resuming_without_the_address_takes_no_second_seat(tiny):
    with serving(tiny, max_sessions=2) as running:
        wire = Wire(running, {"type": "open", "gamma": 0.5})
        wire.cut()
        known = {"session": wire.opened["session"], "token": wire.opened["token"]}
        wire = Wire(running, {"type": "resume", **known, "received": 0})
        assert len(running.server.seats) == 1
        wire.source(rows(1).tobytes())
        assert texts(wire.end()) == alone(tiny, "0.5", rows(1))
        wait_for(lambda: not running.server.seats)


def test_patience_writes_from_what_has_arrived(running):
    wire = Wire(running, {"type": "open", "gamma": 0.2, "patience_s": 0.2, "rate": 100})
    wire.source(rows(1, 3).tobytes())
    event = wire.until("text")
    assert event["effective_horizon"] < event["horizon"]
    wire.end()


def test_too_long_a_session_is_ended_and_written(tiny):
    with serving(tiny, max_source_s=10) as running:
        wire = Wire(running, {"type": "open", "gamma": 0.5})
        wire.source(rows(1, 33).tobytes())  # 11 s
        wire.source(rows(2, 3).tobytes())
        last = wire.until("finished")
        assert last["reason"] == "too_long"
        assert [event for event in wire.events if event["type"] == "refused"] == []
        assert [message["received"] for message in wire.others] == [1]  # the client keeps the second, for another session
        assert texts(wire.events) == alone(tiny, "0.5", rows(1, 33))


@pytest.mark.parametrize("reason", ["draining", "idle"])
def test_messages_after_a_server_end_are_not_accepted(running, tiny, reason):
    wire = Wire(running, {"type": "open", "gamma": 0.5})
    wire.source(rows(1).tobytes())
    assert wire.until("ack")["received"] == 1
    session = running.sessions[wire.opened["session"]]
    running.call(session.end, reason)
    wait_for(lambda: session.over)
    for moment in ("written out", "finished"):
        if moment == "finished" and not any(event["type"] == "finished" for event in wire.events):
            wire.until("finished")
        wire.source(rows(2).tobytes())
        wire.say("turn", gamma=1)
        wire.say("end")
        wire.tell({"type": "ping", "id": "here"})
        wire.until("pong")
    assert wire.events[-1]["reason"] == reason
    assert [message for message in wire.others if message["type"] != "pong"] == [{"type": "ack", "received": 1}]
    assert texts(wire.events) == alone(tiny, "0.5", rows(1))
    assert not any(event["type"] == "refused" for event in wire.events)
    wire.socket.close()


def test_the_client_reports_bytes_left_unread(tiny):
    with serving(tiny, max_source_s=10) as running, Client(f"ws://{running.host}", source="features", gamma=0.5) as client:
        client.send(rows(1, 33))  # 11 s
        client.send(rows(2, 3))
        wait_for(lambda: not client._thread.is_alive())
        found = []
        with pytest.raises(ZendayaError, match=r"\(too_long\) without the last 192 bytes"):
            found.extend(client.captions())
        assert (client.reason, client.buffered) == ("too_long", 192)
        with pytest.raises(ZendayaError, match="too_long"):
            client.send(rows(2, 3))


def test_a_ping_is_answered_at_once(running):
    wire = Wire(running, {"type": "open"})
    for name in ("here", "\N{GRINNING FACE}"):  # in JSON a surrogate pair
        wire.tell({"type": "ping", "id": name})
        assert wire.until("pong")["id"] == name
    wire.end()


class Seen(FrameEncoder):
    """The mean colours of a picture, padded with zeros."""

    def __init__(self):
        super().__init__("seen", 16, 3.0)

    def embed(self, pixels_HW3):
        return torch.from_numpy(np.resize(pixels_HW3.mean((0, 1)) / 64 - 2, 16)).float()


def picture(seed, form="PNG"):
    data, pixels = io.BytesIO(), np.random.default_rng(seed).integers(0, 255, (8, 9, 3), np.uint8)
    Image.fromarray(pixels).save(data, form)
    return data.getvalue(), pixels


def test_broken_pictures_are_skipped():
    served = Served("seeing", Model.from_preset("tiny", seed=3), Seen())
    with serving(served) as running:
        wire = Wire(running, {"type": "open", "gamma": 0.5, "source": "frames"})
        for seed in range(30):
            wire.source(picture(seed)[0])
            if seed == 10:
                wire.source(picture(seed)[0][:100])
            if seed == 20:
                wire.source(b"GIF89a")
        events = wire.end()
        tokens = torch.stack([served.encoder.embed(picture(seed)[1]) for seed in range(30)])
        assert texts(events) == alone(served, "0.5", tokens)
        errors = [(event["of"], event["field"], event["code"]) for event in events if event["type"] == "refused"]
        assert sorted(errors) == [(12, "frames", "bad_source"), (23, "picture", "bad_picture")]


def test_the_client_sends_turns_and_closes(running, tiny):
    url = f"ws://{running.host}"
    with Client(url, source="features", gamma=0.5) as client:
        found = []
        for n in range(0, 60, 7):
            client.send(rows(7)[n : n + 7])
            found += client.captions()
        found += client.finish()
        assert of_session([caption.event for caption in found]) == alone(tiny, "0.5", rows(7))
        assert found[-1].exposure > 0
        assert list(client.captions()) == []
    with Client(url, source="features", policy="wait-k=3") as client:
        client.send(rows(7)[:9].tobytes())
        client.turn(0.3)
        client.flush()
        marks = [caption.event.schedule for caption in client.finish() if caption.event.schedule]
        assert marks == ["gamma=0.3"]
    with Client(url, source="features") as client:
        client.send(rows(7))
    wait_for(lambda: not running.server.seats)
    for wrong in ({"gamma": -1}, {"policy": "x"}, {"source": "audio"}):
        with pytest.raises(ZendayaError, match=rf"^{next(iter(wrong))}: "):
            Client(url, **{"source": "features", **wrong})
    with pytest.raises(ZendayaError, match="no server answers"):
        Client("ws://127.0.0.1:1")
    with pytest.raises(ZendayaError, match="as ws://"):
        Client("http://127.0.0.1")
    client = Client(url, source="features")
    client.send(bytes(7))
    with pytest.raises(ZendayaError, match="features: expected rows"):
        list(client.finish())
    client.close()
    with pytest.raises(ZendayaError, match="features: expected rows"):
        client.send(rows(1))
    wait_for(lambda: not running.server.seats)


def test_repeated_connects_leave_nothing_behind(running):
    before = open_files()
    for n in range(40):
        wire = Wire(running, {"type": "open"} if n % 3 else None)
        if n % 3 == 1:
            wire.source(rows(n).tobytes())
        wire.socket.close()
    wait_for(lambda: not running.server.seats and not running.sessions and not len(running.server.hub))
    wait_for(lambda: open_files() <= before + 1)
    assert running.server.hub.alive
    assert running.server.gauges.queue._value.get() == 0


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_streams_clock_starts_with_its_source(running):
    wire = Wire(running, {"type": "open", "gamma": 1})
    time.sleep(0.3)  # no message was sent yet
    wire.source(rows(1, 3).tobytes())
    events = wire.end()
    first = next(event for event in events if event["type"] == "text")
    assert first["arrival_s"] == pytest.approx(1.0, abs=0.25)  # the three rows lasted a second, until now


@pytest.mark.parametrize("live", [False, True])
def test_live_source_never_arrives_before_it_was_spoken(running, live):
    wire = Wire(running, {"type": "open", "gamma": 1, "live": live})
    wire.tell({"type": "at", "ago_s": 3})
    wire.source(rows(1, 3).tobytes())  # one second, which ended 3 s ago
    wire.tell({"type": "at", "ago_s": 0})
    for _ in range(6):
        wire.source(rows(1, 3).tobytes())  # seven seconds, of which only four can have passed
    texts = [event for event in wire.end() if event["type"] == "text"]
    assert max(event["read_s"] for event in texts) > 5
    assert texts[0]["arrival_s"] == pytest.approx(1.0, abs=0.25)
    assert all(event["read_s"] <= event["arrival_s"] <= event["emission_s"] for event in texts) == live


def test_event_numbers_are_consecutive(running):
    wire = Wire(running, {"type": "open"})
    for payload in itertools.islice(pieces(rows(1), 1), 3):
        wire.source(payload)
    wire.number = 1
    wire.source(rows(9, 1).tobytes())  # number 2 again: it was accepted, and is skipped
    wire.number = 3
    assert all(event["type"] != "error" for event in wire.end())
    assert wire.others[-1]["received"] == 4


def test_wait_k_has_the_stride_of_the_training_run(tmp_path):
    Model.from_preset("tiny", seed=3).save_pretrained(tmp_path / "best")
    (tmp_path / "recipe.json").write_text(json.dumps({"rho": 2.5}))
    served = load_served(str(tmp_path / "best"), "features")
    assert [str(served.as_trained(parse_policy(text))) for text in ("wait-k=3", "wait-k=3,stride=1", "0.5")] == [
        "wait-k=3,stride=2.5",
        "wait-k=3,stride=1.0",
        "gamma=0.5",
    ]


def test_a_lost_session_is_rebuilt_without_duplicates(tiny):
    values = rows(8, 90)
    session, expected = tiny.model.open(PowerLaw(0.7)), []
    for first in range(0, 90, 6):
        expected += session.push(values[first : first + 6])
        if first == 30:
            session.set_schedule(PowerLaw(0.2))
        if first == 60:
            expected += session.cut()
    expected += session.finish()
    with serving(tiny, max_unread=2000) as running:  # of 5760 bytes: a rebuild waits for acknowledgements too
        with Client(f"ws://{running.host}", source="features", gamma=0.7) as client:
            found, begun = [], time.monotonic()
            for first in range(0, 90, 6):
                client.send(values[first : first + 6])
                if first == 30:
                    client.turn(0.2)
                if first == 60:
                    client.flush()
                if first in (12, 36, 66, 84):
                    lose(running)
                if first == 66:
                    time.sleep(1.2)
                found += client.captions()
            found += client.finish()
            took_s = time.monotonic() - begun
            assert client.num_rebuilds == 4
            assert client.buffered == 0
        assert of_session([caption.event for caption in found]) == of_session(expected)
        assert [caption.event.schedule for caption in found if caption.event.schedule] == ["gamma=0.2"]
        times = [caption.event.arrival_s for caption in found]
        assert times == pytest.approx(sorted(times), abs=0.3)
        assert times[-1] <= 2.0 + took_s  # repeated source keeps its first times: 6 rows lasted 2 s
        assert found[-1].event.emission_s >= 2.0 + 1.2
        wait_for(lambda: not running.server.seats)


def lose(running):
    """Let the server lose its sessions and their connections."""

    def forget():
        for session in list(running.sessions.values()):
            running.transports["websocket"].forget(session)
        for connection in list(running.listener.server_state.connections):
            connection.transport.abort()

    running.call(forget)
    wait_for(lambda: not running.sessions)


def test_a_rebuild_fails_if_source_or_text_is_missing(tiny):
    with serving(tiny) as running:
        with Client(f"ws://{running.host}", source="features", keep=1000) as client:
            client.send(rows(1))
            lose(running)
            with pytest.raises(ZendayaError, match="more than 1000 bytes were sent"):
                list(client.finish())
        with Client(f"ws://{running.host}", source="features", gamma=0.5) as client:
            client.send(rows(1))
            wait_for(lambda: client._inbox.delivered.count > 3)
            client._inbox.delivered.digest.update(b"another")
            lose(running)
            with pytest.raises(ZendayaError, match="writes another text"):
                list(client.finish())


@pytest.mark.parametrize("ago_s", [-1, 1e9, "x", True])
def test_a_message_age_out_of_bounds_is_refused(running, ago_s):
    wire = Wire(running, {"type": "open"})
    wire.tell({"type": "at", "ago_s": ago_s})
    assert wire.until("error")["field"] == "ago_s"
    wire.end()
