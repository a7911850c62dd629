"""`zendaya serve --ray`: two replicas on a local Ray, one of them killed under load."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from servers import Wire, alone, of_session, rows, texts, wait_for
from websockets.exceptions import ConnectionClosed, InvalidStatus

from zendaya import Client, PowerLaw
from zendaya.cli import main
from zendaya.runtime.engine import engine_for

KEY = "a-key-of-32-letters_0123456789ab"
BEARER = {"Authorization": f"Bearer {KEY}"}
MISSING = [name for name in ("ray", "fastapi", "aiohttp") if importlib.util.find_spec(name) is None]
needs_ray = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install 'zendaya[distributed]'")


class Process:
    """`zendaya serve --ray local` as a process."""

    def __init__(self, folder, *options):
        code = "import sys; sys.argv[0] = 'zendaya'; from zendaya.cli import main; main()"
        command = [
            sys.executable,
            "-c",
            code,
            "serve",
            "--model",
            folder,
            "--encoder",
            "features",
            "--port",
            "0",
            "--ray",
            "local",
            *options,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            environment.pop(name, None)
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self._reader.start()
        while line := self.process.stdout.readline():
            if found := re.fullmatch(r"zendaya: captions of tiny at http://(127\.0\.0\.1:\d+)\n", line):
                break
        if not line:
            self._reader.join(10)
            self.process.wait(60)
            for stream in (self.process.stdout, self.process.stderr):
                stream.close()
            pytest.fail("".join(self.lines))
        self.host = found[1]
        self._listener = threading.Thread(target=self.process.stdout.read, daemon=True)
        self._listener.start()

    def all(self):
        """This process and all that came of it, each with its command."""
        parents, commands = {}, {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                commands[int(path.name)] = (path / "cmdline").read_bytes()

        def is_ours(pid):
            return pid == self.process.pid or (pid in parents and is_ours(parents[pid]))

        return {pid: command for pid, command in commands.items() if is_ours(pid)}

    def replicas(self):
        return [pid for pid, command in self.all().items() if command.startswith(b"ray::ServeReplica:zendaya-")]

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(90)
        finally:
            self.process.kill()
            self.process.wait()
            for thread, stream in ((self._reader, self.process.stderr), (self._listener, self.process.stdout)):
                thread.join(10)
                stream.close()


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny.model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ray(folder, tmp_path_factory):
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(KEY)
    one = Process(folder, "--replicas", "2:3", "--max-sessions", "16", "--api-key-file", key, "--drain", "1")
    yield one
    one.stop()


def figures(ray):
    text = httpx.get(f"http://{ray.host}/metrics", headers=BEARER, timeout=60).text
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")}


def by_replica(ray):
    found = figures(ray)
    return sorted(value for name, value in found.items() if name.startswith("zendaya_active_sessions") and 'replica="front"' not in name)


@needs_ray
def test_the_gateway_answers_like_a_server(ray):
    for path in ("/livez", "/readyz", "/metrics", "/v1/models", "/", "/page/main.js"):
        assert httpx.get(f"http://{ray.host}{path}", timeout=60).status_code == 401
        assert httpx.get(f"http://{ray.host}{path}", headers=BEARER, timeout=60).status_code == 200, path
    for path in ("/-/routes", "/-/healthz", "/drain"):
        assert httpx.get(f"http://{ray.host}{path}", headers=BEARER, timeout=60).status_code == 404
    with pytest.raises(InvalidStatus) as refused:
        Wire(ray, additional_headers={**BEARER, "Origin": "https://evil.example"})
    assert refused.value.response.status_code == 403


@needs_ray
def test_a_local_ray_needs_its_token(ray):
    """Ray listens on all addresses, and without a token would run anybody's code."""
    address = next(found[1] for command in ray.all().values() if (found := re.search(rb"--gcs-address=([\d.]+:\d+)", command))).decode()
    code = f"import ray; ray.init(address={address!r}, log_to_driver=False); print('in')"
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode != 0
    assert "in\n" not in done.stdout
    assert "InvalidAuthToken" in done.stderr


@needs_ray
def test_a_reconnect_finds_its_replica(ray, tiny):
    wires = [Wire(ray, {"type": "open", "gamma": 0.5}, additional_headers=BEARER) for _ in range(4)]
    assert sum(by_replica(ray)) == 4
    for n, wire in enumerate(wires):
        wire.source(rows(n)[:30].tobytes())
        wire.until("text")
        wire.cut()
        known = {"session": wire.opened["session"], "token": wire.opened["token"]}
        hello = {"type": "resume", **known, "received": wire.events[-1]["seq"]}
        other = Wire(ray, hello, query=f"?session={known['session']}", additional_headers=BEARER)
        assert other.opened["type"] == "opened"
        other.events, other.number = wire.events, 1
        other.source(rows(n)[30:].tobytes())
        assert texts(other.end()) == alone(tiny, 0.5, rows(n))
    assert sum(value for name, value in figures(ray).items() if name.startswith("zendaya_resumes_total")) == 4


@needs_ray
def test_a_replica_killed_under_load_loses_no_text(ray, tiny, capsys):
    """Ten live sessions on two replicas; one replica is killed, and Ray restarts it."""
    killed, problems, results = threading.Event(), [], [None] * 10

    def live(n):
        try:
            with Client(f"ws://{ray.host}", key=KEY, source="features", gamma=0.3 + 0.1 * n) as client:
                found = []
                for first in range(0, 300, 5):
                    client.send(rows(n, 300)[first : first + 5])
                    if first == 40:
                        client.turn(0.5)
                    if first == 150:
                        assert killed.wait(120)
                    if first == 200:
                        client.turn(1.0)
                    found += client.captions()
                    time.sleep(0.02)
                found += client.finish()
                results[n] = found, client.num_rebuilds
        except BaseException as error:
            problems.append(error)

    def expected(n):
        session, events = tiny.model.open(PowerLaw(0.3 + 0.1 * n), engine=engine_for(tiny.model)), []
        for first in range(0, 300, 5):
            events += session.push(rows(n, 300)[first : first + 5])
            if first in (40, 200):
                session.set_schedule(PowerLaw(0.5 if first == 40 else 1.0))
        return [*events, *session.finish()]

    threads = [threading.Thread(target=live, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(by_replica(ray)) == 10)
    assert min(by_replica(ray)) > 0  # Ray spreads simultaneous clients, though not evenly
    time.sleep(0.5)
    before = ray.replicas()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    killed.set()
    for thread in threads:
        thread.join(120)
    assert problems == []
    for n, (found, _) in enumerate(results):
        events = [caption.event for caption in found]
        assert of_session(events) == of_session(expected(n))
        assert [event.schedule for event in events if event.schedule] == ["gamma=0.5", "gamma=1.0"]
    assert {rebuilt for _, rebuilt in results} == {0, 1}
    lags = [caption.compute_lag_s for found, _ in results for caption in found if not caption.event.schedule]
    with capsys.disabled():
        print(f"\none of two replicas killed under 10 streams: {len(lags)} tokens, 0 lost, 0 doubled, longest lag {max(lags):.1f} s")
    wait_for(lambda: len(set(ray.replicas()) - set(before)) == 1, 180)
    wait_for(lambda: any('"replica_lost"' in line for line in ray.lines))
    assert httpx.get(f"http://{ray.host}/livez", headers=BEARER, timeout=60).status_code == 200


@needs_ray
def test_more_sessions_start_another_replica(ray):
    wires = []

    def more():
        with contextlib.suppress(InvalidStatus):  # the killed replica may not have restarted yet
            wires.append(Wire(ray, {"type": "open"}, additional_headers=BEARER))
        return len(wires) == 26  # of 32 seats: above the autoscaling target

    wait_for(more, 180)
    wait_for(lambda: len(ray.replicas()) == 3, 180)
    for wire in wires:
        wire.socket.close()
    wait_for(lambda: sum(by_replica(ray)) == 0)


@needs_ray
def test_sigterm_delivers_all_and_stops_ray(ray, tiny):
    wires = [Wire(ray, {"type": "open", "gamma": 0.5}, additional_headers=BEARER) for _ in range(4)]
    for n, wire in enumerate(wires):
        wire.source(rows(n, 40 + n).tobytes())
    pids = ray.replicas()
    ray.process.send_signal(signal.SIGTERM)
    for n, wire in enumerate(wires):
        last = wire.until("finished")
        assert last["reason"] == "draining"
        assert texts(wire.events) == alone(tiny, 0.5, rows(n, 40 + n))
        wire.tell({"type": "ack", "received": last["seq"]})
        with pytest.raises(ConnectionClosed) as closed:
            wire.until("more")
        assert closed.value.rcvd.code == 1012
    assert ray.process.wait(90) == 0
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    logged = [json.loads(line) for line in ray.lines if line.startswith("{")]
    assert {"start", "drain"} <= {line.get("event") for line in logged}
    assert KEY not in "".join(ray.lines)


@pytest.mark.filterwarnings("ignore")  # warnings of Ray Serve's own dependencies
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--replicas", "2"], "give --ray too"),
        (["--ray", "local", "--replicas", "0"], "--replicas: expected a number"),
        (["--ray", "local", "--replicas", "3:2"], "--replicas: expected a number"),
        (["--ray", "local", "--wyoming-port", "0"], "--wyoming-port is for a server without --ray"),
        (["--ray", "--wyoming-port", "0"], "--wyoming-port is for a server without --ray"),
        (["--wyoming-port", "0", "--ray"], "--wyoming-port is for a server without --ray"),
        (["--ray", "local", "--host", "0.0.0.0"], "--api-key-file"),
        pytest.param(["--ray", "127.0.0.1:1", "--encoder", "features"], "no Ray cluster at 127.0.0.1:1", marks=needs_ray),
    ],
)
def test_a_wrong_ray_option_is_one_line(folder, options, expected, capsys, monkeypatch):
    monkeypatch.setattr("zendaya.serve.monitoring.log_to", lambda: None)  # it would write to the captured stream
    monkeypatch.setattr(sys, "argv", ["zendaya", "serve", "--port", "0", "--model", str(folder), *options])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert expected in said
    assert len(said.strip().splitlines()) == 1
