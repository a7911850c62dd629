"""The gateway: each session stays with its replica, and the gateway refuses what a server refuses."""

import json
import struct

import httpx
import pytest
from servers import Running, Wire, alone, of_session, rows, serving, texts, wait_for
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from zendaya import Client
from zendaya.serve.config import ServeConfig
from zendaya.serve.fields import FieldError
from zendaya.serve.intake import Served

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'zendaya[distributed]'")
from zendaya.serve.gateway.front import Lease, drain_route, make_front, merge_metrics

KEY = "a-key-of-32-letters_0123456789ab"
INNER = "another-key-of-32-letters_012345"


class Pool:
    """Servers in this process as replicas; the least loaded gets the next seat."""

    def __init__(self, replicas):
        self.replicas = dict(replicas)
        self.held = dict.fromkeys(replicas, 0)

    @property
    def running(self):
        return len(self.replicas)

    async def lease(self):
        name = min(self.replicas, key=lambda name: self.held[name], default=None)
        if name is None or self.held[name] >= self.replicas[name].config.max_sessions:
            return None
        self.held[name] += 1
        return Lease(name, self.replicas[name].host, lambda: self.held.update({name: self.held[name] - 1}))

    async def any(self):
        return next(((name, replica.host) for name, replica in self.replicas.items()), None)


class Fronted(Running):
    """A gateway and its replicas, in threads."""

    def __init__(self, served, count=2, **settings):
        inner = {name: value for name, value in settings.items() if name not in ("key", "origins")}
        self.pool = Pool({f"r{n}": Running(served, key=INNER, **inner) for n in range(count)})
        for replica in self.pool.replicas.values():
            replica.app.router.routes.append(drain_route())
        self.all = list(self.pool.replicas.values())
        self.config = ServeConfig(port=0, **settings)
        self.app = make_front(self.config, self.pool, INNER)
        self._start()

    @property
    def front(self):
        return self.app.state.server

    def kill(self, name):
        """Kill a replica without notice."""
        replica = self.pool.replicas.pop(name)
        for server in replica.listener.servers:
            replica.call(server.close)

        def cut():
            for connection in list(replica.listener.server_state.connections):
                connection.transport.abort()
            for session in list(replica.sessions.values()):
                replica.transports["websocket"].forget(session)

        replica.call(cut)

    def stop(self):
        super().stop()
        for replica in self.all:
            replica.stop()


@pytest.fixture
def fronted(tiny):
    one = Fronted(tiny)
    yield one
    one.stop()


def held(fronted):
    return [len(replica.server.seats) for replica in fronted.all]


def test_a_session_writes_what_one_server_writes(fronted, tiny):
    wires = [Wire(fronted, {"type": "open", "gamma": 0.5}) for _ in range(4)]
    for n, wire in enumerate(wires):
        for first in range(0, 60, 7):
            wire.source(rows(n)[first : first + 7].tobytes())
    assert held(fronted) == [2, 2]
    assert [texts(wire.end()) for wire in wires] == [alone(tiny, 0.5, rows(n)) for n in range(4)]
    wait_for(lambda: not fronted.front.seats and not fronted.front.places and held(fronted) == [0, 0])
    assert fronted.pool.held == {"r0": 0, "r1": 0}


@pytest.mark.parametrize("named", [True, False])
def test_a_reconnect_reaches_the_same_replica(fronted, tiny, named):
    hello = {"type": "open", "gamma": 0.5, **({"session": "mine", "token": "0123456789abcdef"} if named else {})}
    others = [Wire(fronted, {"type": "open"}) for _ in range(3)]
    wire = Wire(fronted, hello, query="?session=mine" if named else "")
    assert held(fronted) == [2, 2]
    for first in range(0, 60, 10):
        wire.source(rows(1)[first : first + 10].tobytes())
        wire.cut()
        known = {"session": wire.opened["session"], "token": wire.opened["token"]}
        received = wire.events[-1]["seq"] if wire.events else 0
        other = Wire(fronted, {"type": "resume", **known, "received": received}, query=f"?session={known['session']}")
        assert other.opened["type"] == "opened"
        other.events, other.number = wire.events, other.opened["received"]
        while other.number < first // 10 + 1:
            other.source(rows(1)[10 * other.number : 10 * other.number + 10].tobytes())
        wire = other
    assert texts(wire.end()) == alone(tiny, 0.5, rows(1))
    assert [event["seq"] for event in wire.events] == list(range(1, len(wire.events) + 1))
    for other in others:
        other.end()
    wait_for(lambda: not fronted.front.seats and not fronted.front.places)


def test_a_wrong_token_does_not_disturb_the_session(fronted, tiny):
    wire = Wire(fronted, {"type": "open", "gamma": 0.5}, query="?session=x")
    name = wire.opened["session"]
    for hello in ({"type": "resume", "session": name, "token": "f" * 32, "received": 0}, {"type": "dance"}, b"x"):
        other = Wire(fronted, hello, query=f"?session={name}")
        assert other.opened["type"] == "error"
        with pytest.raises(ConnectionClosed):
            other.get()
    assert fronted.front.places[name] in fronted.front.seats
    wire.source(rows(1).tobytes())
    assert texts(wire.end()) == alone(tiny, 0.5, rows(1))
    wait_for(lambda: not fronted.front.seats and not fronted.front.places)


def test_a_lost_replica_costs_its_clients_nothing(fronted, tiny):
    clients = [Client(f"ws://{fronted.host}", source="features", gamma=0.3) for _ in range(8)]
    found = [[] for _ in clients]
    for first in range(0, 60, 6):
        for n, client in enumerate(clients):
            client.send(rows(n)[first : first + 6])
            found[n] += client.captions()
        if first == 24:
            assert held(fronted) == [4, 4]
            fronted.kill("r0")
    for n, client in enumerate(clients):
        found[n] += client.finish()
        client.close()
        assert of_session([caption.event for caption in found[n]]) == alone(tiny, 0.3, rows(n))
    assert sum(client.num_rebuilds for client in clients) == 4
    wait_for(lambda: not fronted.front.seats)
    assert list(fronted.front.replicas) == ["r1"]


def test_closing_goes_both_ways(fronted):
    for code, kept in ((1000, False), (3000, True)):
        wire = Wire(fronted, {"type": "open"}, query="?session=a")
        wire.socket.close(code)
        name = wire.opened["session"]
        wait_for(lambda name=name, kept=kept: [name in replica.sessions for replica in fronted.all].count(True) == kept)
        wait_for(lambda name=name, kept=kept: (name in fronted.front.places) == kept)
    wire = Wire(fronted, {"type": "open"})
    wire.tell(struct.pack("<Q", 1) + bytes(2**20))
    with pytest.raises(ConnectionClosed) as closed:
        wire.get()
    assert closed.value.rcvd.code == 1009
    wire = Wire(fronted, {"type": "dance"})
    with pytest.raises(ConnectionClosed) as closed:
        wire.get()
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4400, "bad_field")


def test_full_replicas_refuse_new_clients(tiny):
    fronted = Fronted(tiny, max_sessions=1, orphan_s=0.5)
    try:
        wires = [Wire(fronted, {"type": "open"}) for _ in range(2)]
        for path in ("/v1/stream", "/v1/realtime"):
            with pytest.raises(InvalidStatus) as refused:
                connect(f"ws://{fronted.host}{path}").__enter__()
            assert refused.value.response.status_code == 503
            assert refused.value.response.headers["Retry-After"] == "5"
            assert json.loads(refused.value.response.body)["error"]["code"] == "full"
        assert httpx.get(f"http://{fronted.host}/readyz", timeout=60).text == "full"
        wires[0].end()
        wait_for(lambda: httpx.get(f"http://{fronted.host}/readyz", timeout=60).status_code == 200)
        wires[1].cut()  # its seat is held for a time
        wait_for(lambda: not fronted.front.seats and held(fronted) == [0, 0])
    finally:
        fronted.stop()


def test_requests_are_answered_as_by_a_server(fronted, tiny):
    with serving(tiny) as single, httpx.Client(timeout=60) as http:
        for method, path in (
            ("GET", "/"), ("HEAD", "/"), ("GET", "/page/main.js"), ("GET", "/page/none"), ("GET", "/page/..%2fapp.py"),
            ("GET", "/v1/models"),
            ("POST", "/v1/models"), ("GET", "/no"), ("POST", "/drain"), ("POST", "/reset"), ("GET", "/output"), ("GET", "/livez"),
            ("POST", "/v1/audio/transcriptions"), ("PUT", "/input"),
        ):  # fmt: skip
            one, other = (http.request(method, f"http://{where.host}{path}", content=b"{}") for where in (single, fronted))
            assert (one.status_code, one.content) == (other.status_code, other.content), path
            same = [{name: value for name, value in each.headers.items() if name not in ("date",)} for each in (one, other)]
            assert same[0] == same[1], path
    assert {getattr(route, "path", "") for route in fronted.app.routes} == {getattr(route, "path", "") for route in single.app.routes}


def test_metrics_have_a_replica_label(fronted):
    wires = [Wire(fronted, {"type": "open", "gamma": 0.5}) for _ in range(3)]
    text = httpx.get(f"http://{fronted.host}/metrics", timeout=60).text
    assert text.count("# TYPE zendaya_active_sessions gauge") == 1
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert {name: lines[f'zendaya_active_sessions{{replica="{name}"}}'] for name in ("r0", "r1", "front")} == {
        "r0": "2.0", "r1": "1.0", "front": "0.0",
    }  # fmt: skip
    for wire in wires:
        wire.end()
    assert merge_metrics([]) == b""


def test_the_guard_stands_before_the_replicas(tiny):
    fronted = Fronted(tiny, key=KEY, origins=("https://captions.example.org",))
    try:
        for path in ("/v1/stream", "/v1/realtime"):
            for headers, status in (
                ({}, 401), ({"Authorization": f"Bearer {INNER}"}, 401), ({"Authorization": f"Bearer {KEY}", "Origin": "https://evil"}, 403),
            ):  # fmt: skip
                with pytest.raises(InvalidStatus) as refused:
                    connect(f"ws://{fronted.host}{path}", additional_headers=headers).__enter__()
                assert refused.value.response.status_code == status
        for path in ("/", "/metrics", "/livez", "/-/routes", "/-/healthz", "/drain"):
            assert httpx.get(f"http://{fronted.host}{path}", timeout=60).status_code == 401
        own = {"Authorization": f"Bearer {KEY}", "Origin": "https://captions.example.org"}
        wire = Wire(fronted, {"type": "open"}, additional_headers=own)
        assert wire.opened["type"] == "opened"
        assert "permessage-deflate" not in str(wire.socket.response.headers)
        wire.end()
        with httpx.Client(base_url=f"http://{fronted.host}", timeout=60) as browser:
            assert browser.get("/", auth=("x", KEY)).headers["Set-Cookie"].startswith("zendaya-")
            assert browser.get("/v1/models").status_code == 200
        for replica in fronted.all:  # replicas cannot be reached without it
            assert httpx.get(f"http://{replica.host}/livez", headers={"Authorization": f"Bearer {KEY}"}, timeout=60).status_code == 401
    finally:
        fronted.stop()


def test_a_draining_gateway_delivers_all_text(tiny):
    fronted = Fronted(tiny)
    try:
        wires = [Wire(fronted, {"type": "open", "gamma": 0.5}) for _ in range(4)]
        gone = Wire(fronted, {"type": "open"})
        for n, wire in enumerate(wires):
            wire.source(rows(n, 30 + n).tobytes())
        gone.cut()
        fronted.call(fronted.listener.begin_drain, 0.3)
        wait_for(lambda: fronted.front.draining)
        with pytest.raises(InvalidStatus) as refused:
            Wire(fronted)
        assert json.loads(refused.value.response.body)["error"]["code"] == "draining"
        for n, wire in enumerate(wires):
            last = wire.until("finished")
            assert last["reason"] == "draining"
            assert texts(wire.events) == alone(tiny, 0.5, rows(n, 30 + n))
            wire.tell({"type": "ack", "received": last["seq"]})
            with pytest.raises(ConnectionClosed) as closed:
                wire.until("more")
            assert closed.value.rcvd.code == 1012
        wait_for(lambda: fronted.listener.should_exit)
    finally:
        fronted.stop()


def test_an_evaluation_stays_with_its_replica(fronted, monkeypatch):
    with httpx.Client(base_url=f"http://{fronted.host}", timeout=60) as http:
        assert http.post("/reset").status_code == 200
        name = fronted.front.evaluation[0]
        for _ in range(3):
            assert http.get("/output").json()["is_empty"] is True
        assert fronted.front.evaluation[0] == name
        fronted.kill(name)
        wait_for(lambda: http.get("/output").status_code == 503)
        answer = http.get("/output")
        assert (answer.json()["error"]["code"], answer.headers["Retry-After"]) == ("lost", "5")
        assert http.post("/reset").status_code == 200
        assert http.get("/output").status_code == 200
        assert fronted.front.evaluation[0] != name


def test_a_disconnect_cancels_the_forwarded_request(tiny, monkeypatch):
    served, ended = Served("hears", tiny.model), []
    monkeypatch.setattr(Served, "kinds", ("audio", "features"))

    async def slow(request, *rest):
        while (await request.receive())["type"] != "http.disconnect":
            pass
        ended.append(1)
        raise FieldError("file", "file: nobody waits for it")

    monkeypatch.setattr("zendaya.serve.transports.openai_files._form", slow)
    fronted = Fronted(served)
    try:
        with httpx.Client(timeout=0.5) as http, pytest.raises(httpx.ReadTimeout):
            http.post(f"http://{fronted.host}/v1/audio/transcriptions", files={"file": b"x" * 100_000})
        wait_for(lambda: ended and not fronted.front.seats and held(fronted) == [0, 0])
    finally:
        fronted.stop()
