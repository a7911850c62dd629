"""A server in operation: health, metrics, logs, signals, and clients that freeze, die or do not read."""

import asyncio
import base64
import contextlib
import gc
import io
import json
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading

import httpx
import numpy as np
import pytest
from servers import Wire, alone, of_session, rows, serving, texts, wait_for
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from zendaya import Client
from zendaya.serve.intake import Served
from zendaya.serve.monitoring import JsonFormatter, log_to

KEY = "a-key-of-32-letters_0123456789ab"


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny.model.save_pretrained(path)
    return path


class Process:
    """`zendaya serve` as a process."""

    def __init__(self, folder, *options):
        code = "import sys; sys.argv[0] = 'zendaya'; from zendaya.cli import main; main()"
        command = [sys.executable, "-c", code, "serve", "--model", folder, "--encoder", "features", "--port", "0", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        line = self.process.stdout.readline()
        found = re.fullmatch(r"zendaya: captions of tiny at http://(127\.0\.0\.1:\d+)\n", line)
        assert found, line + (self.process.stderr.read() if not line else "")
        self.host = found[1]
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def ended(self):
        status = self.process.wait(120)
        self._reader.join(10)
        self.process.stdout.close()
        self.process.stderr.close()
        return status

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.ended()


@contextlib.contextmanager
def process(folder, *options):
    one = Process(folder, *options)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.kill()


def test_sigterm_drains_and_refuses_new_clients(tiny, folder, tmp_path):
    (tmp_path / "key").write_text(KEY)
    with process(folder, "--api-key-file", tmp_path / "key", "--drain", "60") as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        clients = [Client(f"ws://{server.host}", key=KEY, source="features", gamma=0.2 * n) for n in range(4)]
        wire = Wire(server, {"type": "open", "gamma": 0.5}, additional_headers=headers)
        wire.source(rows(9)[:30].tobytes())
        for n, client in enumerate(clients):
            client.send(rows(n)[:20])
        assert httpx.get(f"http://{server.host}/readyz", headers=headers, timeout=60).text == "ok"
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"http://{server.host}/readyz", headers=headers, timeout=60).status_code == 503)
        with pytest.raises(InvalidStatus) as refused:
            Wire(server, additional_headers=headers)
        assert refused.value.response.status_code == 503
        wire.cut()  # a draining server still resumes its sessions
        known = {"session": wire.opened["session"], "token": wire.opened["token"]}
        wire = Wire(server, {"type": "resume", **known, "received": 0}, query=f"?session={known['session']}", additional_headers=headers)
        wire.number = wire.opened["received"]
        while wire.number < 2:
            wire.source(rows(9)[30 * wire.number : 30 * wire.number + 30].tobytes())
        assert texts(wire.end()) == alone(tiny, 0.5, rows(9))
        for n, client in enumerate(clients):
            client.send(rows(n)[20:])
        for n, client in enumerate(clients):
            assert of_session([caption.event for caption in client.finish()]) == alone(tiny, 0.2 * n, rows(n))
            client.close()
        assert server.ended() == 0
    logged = [json.loads(line) for line in server.lines]
    assert {"session_open", "session_end", "resume", "drain", "request"} <= {line["event"] for line in logged if "event" in line}
    whole = "".join(server.lines)
    assert KEY not in whole
    assert "⟨" not in whole  # text is not logged
    assert all(set(line) >= {"time", "level", "message"} for line in logged)


def test_after_draining_streams_end_with_all_text(tiny, folder):
    with process(folder, "--drain", "0.2") as server:
        wires = [Wire(server, {"type": "open", "gamma": 0.5}) for _ in range(3)]
        gone = Wire(server, {"type": "open"})
        for n, wire in enumerate(wires):
            wire.source(rows(n, 30 + n).tobytes())
        gone.cut()
        server.process.send_signal(signal.SIGTERM)
        for n, wire in enumerate(wires):
            last = wire.until("finished")
            assert last["reason"] == "draining"
            assert texts(wire.events) == alone(tiny, 0.5, rows(n, 30 + n))
            wire.tell({"type": "ack", "received": last["seq"]})
            with pytest.raises(ConnectionClosed) as closed:
                wire.until("more")
            assert closed.value.rcvd.code == 1012
        assert server.ended() == 0


def test_a_killed_client_leaves_others_alone(tiny):
    with serving(tiny, orphan_s=0.5) as running:
        other = Wire(running, {"type": "open", "gamma": 0.5})
        other.source(rows(1)[:30].tobytes())
        code = f"""
import numpy, zendaya, time
client = zendaya.Client("ws://{running.host}", source="features")
client.send(numpy.zeros((40, 16), "f4"))
print("sent", flush=True)
time.sleep(600)
"""
        client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert client.stdout.readline() == "sent\n"
        wait_for(lambda: len(running.sessions) == 2)
        client.kill()
        client.wait()
        client.stdout.close()
        wait_for(lambda: len(running.sessions) == len(running.server.seats) == 1)
        other.source(rows(1)[30:].tobytes())
        assert texts(other.end()) == alone(tiny, 0.5, rows(1))
        wait_for(lambda: not len(running.server.hub))


def upgraded(running, path="/v1/stream"):
    """A raw WebSocket that answers nothing."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(60)
    raw.connect(("127.0.0.1", running.port))
    key = base64.b64encode(bytes(16)).decode()
    raw.sendall(
        f"GET {path} HTTP/1.1\r\nHost: {running.host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += raw.recv(1)
    assert answer.startswith(b"HTTP/1.1 101")
    return raw


def frame(payload, opcode=2, *, masked=True):
    size, bit = len(payload), 0x80 * masked
    length = bytes([size | bit]) if size < 126 else bytes([127 | bit]) + struct.pack(">Q", size)
    return bytes([0x80 | opcode]) + length + (bytes(4) if masked else b"") + payload


HELLO = {"type": "open", "session": "frozen", "token": "0123456789abcdef", "gamma": 0.5}


def test_a_client_without_pongs_is_dropped_and_may_resume(tiny):
    with serving(tiny, ping_s=0.2) as running:
        raw = upgraded(running)
        raw.sendall(frame(json.dumps(HELLO).encode(), 1) + frame(struct.pack("<Q", 1) + rows(1).tobytes()))
        wait_for(lambda: [session.connection is None for session in running.sessions.values()] == [True])
        wire = Wire(running, HELLO, query="?session=frozen")
        wire.number = 1
        assert texts(wire.end()) == alone(tiny, 0.5, rows(1))
        raw.close()


def test_a_client_that_does_not_read_is_disconnected(tiny):
    with serving(tiny, slow_s=0.5, ping_s=60, send_buffer=4096) as running:
        raw = upgraded(running)
        raw.sendall(frame(json.dumps(HELLO).encode(), 1))
        count = 0
        values = rows(1, 240)

        def frozen():
            nonlocal count
            session = running.sessions.get("frozen")
            if session is not None and session.connection is None:
                return True
            if session is not None and session.taken == count and count < 4:
                count += 1
                raw.sendall(frame(struct.pack("<Q", count) + values.tobytes()))
            return False

        other = Wire(running, {"type": "open", "gamma": 0.5})
        wait_for(frozen)
        other.source(rows(2).tobytes())
        assert texts(other.end()) == alone(tiny, 0.5, rows(2))
        wire = Wire(running, HELLO, query="?session=frozen")  # all events are still there
        wire.number = count
        events = wire.end()
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert texts(events) == alone(tiny, 0.5, np.tile(values, (count, 1)))
        wait_for(lambda: not running.listener.server_state.connections, 60)
        raw.close()


def test_an_unmasked_frame_ends_only_the_connection(tiny):
    with serving(tiny) as running:
        raw = upgraded(running)
        raw.sendall(frame(json.dumps(HELLO).encode(), 1))
        wait_for(lambda: "frozen" in running.sessions and running.sessions["frozen"].opened)
        raw.sendall(frame(b"x" * 20, masked=False))
        wait_for(lambda: running.sessions["frozen"].connection is None)
        wire = Wire(running, HELLO, query="?session=frozen")
        wire.source(rows(1).tobytes())
        assert texts(wire.end()) == alone(tiny, 0.5, rows(1))
        raw.close()


def test_pings_and_health_are_answered_while_computing(tiny, monkeypatch):
    with serving(tiny) as running:
        going_on, original = threading.Event(), running.server.hub._batcher.round

        def slow():
            assert going_on.wait(60)
            return original()

        monkeypatch.setattr(running.server.hub._batcher, "round", slow)
        wire = Wire(running, {"type": "open", "gamma": 0.5})
        wire.source(rows(1).tobytes())
        wire.tell({"type": "ping", "id": "1"})
        wire.until("pong")
        assert wire.socket.ping().wait(60)
        assert httpx.get(f"http://{running.host}/livez", timeout=60).text == "ok"
        assert not any(event["type"] == "text" for event in wire.events)
        going_on.set()
        assert texts(wire.end()) == alone(tiny, 0.5, rows(1))


def test_each_message_is_sent_at_once(tiny):
    with serving(tiny) as running:
        wire = Wire(running, {"type": "open"})
        (connection,) = running.listener.server_state.connections
        own = connection.transport.get_extra_info("socket")
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # otherwise 40 ms per event while the client is silent
        wire.end()


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/realtime"])
def test_a_client_gone_before_accept_holds_no_seat(tiny, monkeypatch, path):
    async def gone(self, *arguments, **options):
        raise RuntimeError("the client has gone")

    served = Served("hears", tiny.model)
    monkeypatch.setattr(Served, "kinds", ("audio", "features"))
    with serving(served) as running:
        monkeypatch.setattr(WebSocket, "accept", gone)
        with pytest.raises(InvalidStatus):
            connect(f"ws://{running.host}{path}").__enter__()
        assert not running.server.seats


def test_a_bug_in_the_model_does_not_end_the_server(tiny, monkeypatch, caplog):
    with serving(tiny) as running:
        original = running.server.hub._batcher.round
        monkeypatch.setattr(running.server.hub._batcher, "round", lambda: 1 / 0)
        wire = Wire(running, {"type": "open", "gamma": 0.5})
        wire.source(rows(1).tobytes())
        failed = wire.until("failed")
        assert (failed["code"], failed["message"]) == ("internal", "internal server error")
        monkeypatch.setattr(running.server.hub._batcher, "round", original)
        wire = Wire(running, {"type": "open", "gamma": 0.5})
        wire.source(rows(1).tobytes())
        assert texts(wire.end()) == alone(tiny, 0.5, rows(1))
        assert "a bug in the hub" in caplog.text


def test_notes_before_a_bug_are_delivered(tiny, monkeypatch):
    with serving(tiny) as running:
        hub, going_on, rounds = running.server.hub, threading.Event(), []

        def fails_then(original=hub._batcher.round):
            rounds.append(len(rounds))
            assert going_on.wait(60)
            return original() if rounds == [0] else 1 / 0

        monkeypatch.setattr(hub._batcher, "round", fails_then)
        wire = Wire(running, {"type": "open", "gamma": 0.5})
        wire.source(rows(1).tobytes())
        wait_for(lambda: rounds)
        other = Wire(running)
        other.tell({"type": "open"})
        wait_for(lambda: hub._to_feed)  # opened in the round that fails
        going_on.set()
        assert wire.until("failed")["code"] == "internal"
        assert json.loads(other.socket.recv(timeout=10))["type"] == "opened"
        other.end()


def test_metrics_count_what_happened(tiny):
    with serving(tiny) as running:

        def figures():
            text = httpx.get(f"http://{running.host}/metrics", timeout=60).text
            return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")}

        wire = Wire(running, {"type": "open", "gamma": 0.5})
        wire.source(rows(1).tobytes())
        wire.until("text")
        assert figures()["zendaya_active_sessions"] == 1
        events = wire.end()
        wait_for(lambda: figures()["zendaya_active_sessions"] == 0)
        found, count = figures(), sum(event["type"] == "text" for event in events)
        assert found["zendaya_tokens_total"] == count
        assert found["zendaya_source_seconds_total"] == pytest.approx(20)
        assert found["zendaya_queue_depth"] == 0
        assert found["zendaya_first_token_seconds_count"] == 1
        assert found['zendaya_lag_seconds_count{kind="policy"}'] == found['zendaya_lag_seconds_count{kind="compute"}'] == count
        assert found["zendaya_step_seconds_count"] >= 1
        assert found["zendaya_resumes_total"] == 0


def test_health_reports_dead_threads_and_full_seats(tiny, monkeypatch):
    with serving(tiny, max_sessions=1) as running:
        wire = Wire(running, {"type": "open"})
        answer = httpx.get(f"http://{running.host}/readyz", timeout=60)
        assert (answer.status_code, answer.text, answer.headers["Retry-After"]) == (503, "full", "5")
        wire.end()
        wait_for(lambda: httpx.get(f"http://{running.host}/readyz", timeout=60).status_code == 200)
        monkeypatch.setattr(type(running.server.hub), "alive", False)
        assert httpx.get(f"http://{running.host}/livez", timeout=60).status_code == 503


def test_a_log_line_has_only_listed_fields():
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info("hello", extra={"event": "x", "session": "s", "token": "secret", "text": "said"})
    try:
        raise ValueError("what was said")
    except ValueError:
        logger.exception("a bug")
    first, second = map(json.loads, text.getvalue().splitlines())
    assert first.keys() == {"time", "level", "message", "event", "session"}
    assert (second["error"], "what was said" in text.getvalue()) == ("ValueError", False)


def _raise(said):
    raise ValueError(said)


async def _fail(said):
    """Make a callback fail, and a task that is never awaited."""

    async def failing():
        _raise(said)

    asyncio.get_running_loop().call_soon(_raise, said)
    task = asyncio.create_task(failing())
    await asyncio.wait((task,))
    del task
    gc.collect()


def test_logs_go_to_the_given_stream():
    names = ("zendaya.serve", "uvicorn.error", "asyncio")
    before = [(logging.getLogger(name), list(logging.getLogger(name).handlers)) for name in names]
    try:
        text = io.StringIO()
        log_to(text)
        logging.getLogger("zendaya.serve").info("started", extra={"event": "start"})
        assert json.loads(text.getvalue())["event"] == "start"
        asyncio.run(_fail("what was said"))
        lines = [json.loads(line) for line in text.getvalue().splitlines()[1:]]
        assert [line["message"] for line in lines] == ["Exception in callback _raise", "Task exception was never retrieved"]
        assert [line["error"] for line in lines] == ["ValueError", "ValueError"]
        assert "said" not in text.getvalue()
    finally:
        for logger, handlers in before:
            logger.handlers, logger.propagate = handlers, True
            logger.setLevel(logging.NOTSET)


def test_the_client_imports_no_server():
    code = "import sys, zendaya.serve.client; sys.exit('torch' in sys.modules or 'starlette' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
