"""The server under load, faults and malformed input: losses and duplicates (there must be none), and lag.

python benchmarks/serve.py load [--streams 32] [--minutes 10] [--gamma 0.5]     # live streams in real time
python benchmarks/serve.py cuts [--cuts 200]                                     # a link that stalls, swallows, re-chunks and cuts
python benchmarks/serve.py aborts [--cycles 1000]                                # clients that abort at every stage
python benchmarks/serve.py fuzz [--messages 100000] [--realtime]                 # malformed frames and messages

Each starts a server of its own: `load` as another process with the shipped speech model and the demo's recording; the others
in this process, with a small random model. `--json` prints the figures as one object. Sources, cuts and malformed messages follow `--seed`;
another machine gives other lags. Exit code 1 if anything was lost, doubled, left behind or answered with an internal server error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import importlib.resources
import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zendaya.serve.client import Caption, Client

HEAD = struct.Struct("<Q")
BLOCK_S = 0.5
"""Seconds per block of the speech model's encoder."""
DEAF_S = 0.2
"""Longest time for which the server's messages are swallowed before a cut."""


# A link with faults.


@dataclass
class Faults:
    """The faults that a proxy makes."""

    seed: int = 0
    cuts: int = 20
    """Connections to cut."""
    bytes: tuple[int, int] = (2_000, 40_000)
    """Range of client bytes after which a connection is cut."""
    stall_s: float = 0.02
    done: int = 0
    deaf: int = 0


class Proxy:
    """A TCP proxy in a thread that re-chunks, stalls and cuts connections.

    Before a cut it may swallow the server's messages, so that the client repeats source that the server has.
    """

    def __init__(self, port: int, faults: Faults) -> None:
        self._target, self.faults = port, faults
        self._random = random.Random(faults.seed)
        self._loop = asyncio.new_event_loop()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._server.close()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._connected, sock=self._listening))
        self._loop.run_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        faults, choose = self.faults, self._random
        cut_at = choose.randint(*faults.bytes) if faults.done < faults.cuts else None
        deaf_at = choose.randint(0, cut_at) if cut_at is not None and choose.random() < 0.5 else None
        passed = 0

        deafened = asyncio.Event()

        async def upward() -> None:
            nonlocal passed
            while data := await reader.read(choose.choice([1, 7, 100, 4096, 65536])):
                passed += len(data)
                if choose.random() < 0.02:
                    await asyncio.sleep(choose.random() * faults.stall_s)
                back.write(data)
                await back.drain()
                if deaf_at is not None and passed >= deaf_at:
                    deafened.set()
                if cut_at is not None and passed >= cut_at:
                    return

        async def deaf_for_a_time() -> None:
            await deafened.wait()
            await asyncio.sleep(DEAF_S)

        async def downward() -> None:
            while data := await there.read(choose.choice([1, 13, 500, 65536])):
                if deaf_at is None or passed < deaf_at:
                    writer.write(data)
                    await writer.drain()

        tasks = [asyncio.ensure_future(upward()), asyncio.ensure_future(downward()), asyncio.ensure_future(deaf_for_a_time())]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if cut_at is not None and (passed >= cut_at or deafened.is_set()):
            faults.done += 1
            faults.deaf += deaf_at is not None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in (writer, back):
            end.transport.abort()


def told(captions: list[Caption]) -> list[tuple[int, int, int, str]]:
    """Text with its places: equal for two runs if nothing was lost or doubled."""
    return [(one.event.window_index, one.event.step, one.event.token, one.event.text) for one in captions if not one.event.schedule]


def through(port: int, messages: list[Any], **options: Any) -> tuple[list[Caption], int]:
    """Send a source by our client; its text, and the number of reconnects."""
    with Client(f"ws://127.0.0.1:{port}", **options) as client:
        found = list[Caption]()
        for n, message in enumerate(messages):
            client.send(message)
            if n == len(messages) // 2:
                client.turn(0.3)
            found += client.captions()
        found += client.finish()
        return found, client.num_resumes


def cuts(port: int, sources: list[list[Any]], faults: Faults, **options: Any) -> dict[str, Any]:
    """Send sources over a faulty link until there were enough cuts, and compare with a good link."""
    different = resumes = streams = 0
    with Proxy(port, faults) as proxy:
        while faults.done < faults.cuts:
            messages = sources[streams % len(sources)]
            expected, _ = through(port, messages, **options)
            found, count = through(proxy.port, messages, **options)
            different += told(found) != told(expected)
            resumes, streams = resumes + count, streams + 1
    return {"streams": streams, "cuts": faults.done, "deaf": faults.deaf, "resumes": resumes, "different": different}


# Clients that come and go.


def aborts(port: int, cycles: int, seed: int = 0) -> dict[str, int]:
    """Connect, and abort at some stage."""
    choose, refused = random.Random(seed), 0
    hello = b'{"type": "open"}'
    upgrade = (
        f"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()
    for _ in range(cycles):
        raw = socket.create_connection(("127.0.0.1", port), timeout=60)
        stage = choose.randrange(6)
        with contextlib.suppress(OSError):
            raw.sendall(upgrade[: choose.randrange(len(upgrade))] if stage == 1 else upgrade if stage > 1 else b"")
            if stage > 2:
                refused += not raw.recv(4096).startswith(b"HTTP/1.1 101")
                raw.sendall(frame(hello, 1))
            if stage > 3:
                raw.sendall(frame(HEAD.pack(1) + bytes(64 * 20)))
            if stage > 4:
                raw.recv(4096)
                raw.sendall(frame(struct.pack(">H", 1000), 8))
                raw.recv(4096)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
    return {"cycles": cycles, "refused": refused}


def frame(payload: bytes, opcode: int = 2) -> bytes:
    """A WebSocket frame, masked with zeros."""
    size = len(payload)
    length = bytes([size | 0x80]) if size < 126 else bytes([127 | 0x80]) + struct.pack(">Q", size)
    return bytes([0x80 | opcode]) + length + bytes(4) + payload


# Nonsense.


JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 10**300, -0.5, 0.3, 1e300, "", "x", "é\u202e\0", "\ud800", "x" * 5000, [], [[]], {},
    {"a": 1}, "../../etc/passwd", "<img onerror=alert(1)>", ["open"], "open", "audio", "gamma=0.3", "wait-k=3", "custom=" + "9," * 60,
]  # fmt: skip
TEMPLATES: dict[str, list[dict[str, Any]]] = {
    "stream": [
        {"type": "turn", "seq": 1, "gamma": 0.5}, {"type": "turn", "seq": 1, "policy": "full"}, {"type": "flush", "seq": 1},
        {"type": "ack", "received": 0}, {"type": "ping", "id": "x"}, {"type": "open"}, {"type": "resume", "received": 0},
        {"type": "at", "ago_s": 0.5}, {"type": "end", "seq": 1}, {"type": "open", "live": True},
    ],
    "realtime": [
        {"type": "session.update", "session": {"type": "transcription", "audio": {"input": {"transcription": {"delay": "low"}}}}},
        {"type": "transcription_session.update", "session": {"input_audio_format": "pcm16"}},
        {"type": "input_audio_buffer.append", "audio": "AAAA"}, {"type": "input_audio_buffer.commit"}, {"type": "input_audio_buffer.clear"},
    ],
}  # fmt: skip


TEXTS = ["", "{", "[]", "null", '"x"', "{}" * 9, "[" * 3000, '{"type":"turn","seq":1,"gamma":NaN}', "\0", "é" * 300, "9" * 5000]


def mutated(choose: random.Random, value: Any) -> Any:
    """A message with one random change."""
    if isinstance(value, dict) and value and choose.random() < 0.8:
        name = choose.choice(list(value))
        kind = choose.random()
        if kind < 0.15:
            return {key: one for key, one in value.items() if key != name}
        if kind < 0.25:
            return {**value, choose.choice(["gamma", "extra", "type", "seq", "session", "\ud800"]): choose.choice(JUNK)}
        return {**value, name: mutated(choose, value[name])}
    return choose.choice(JUNK)


def nonsense(choose: random.Random, route: str, number: int, dim: int) -> str | bytes:
    """A probably malformed message; `number` is the next valid number."""
    kind = choose.random()
    if kind < 0.25:
        rows = np.full((choose.randint(0, 4), dim), choose.choice([0.0, np.nan, np.inf, 1e38, 1.0]), "<f4").tobytes()
        return HEAD.pack(choose.choice([number, number, number, 0, number + 1, 2**64 - 1])) + rows[: choose.choice([None, -1, 3])]
    if kind < 0.35:
        return choose.randbytes(choose.choice([0, 1, 7, 8, 9, 200, 5000]))
    if kind < 0.45:
        return choose.choice(
            ["", "{", "[]", "null", '"x"', "{}" * 9, "[" * 3000, '{"type":"turn","seq":1,"gamma":NaN}', "\0", "é" * 300, "9" * 5000]
        )
    message = mutated(choose, choose.choice(TEMPLATES[route]))
    if isinstance(message, dict) and isinstance(message.get("seq"), int) and choose.random() < 0.7:
        message["seq"] = number
    return json.dumps(message)


@dataclass
class Fuzzed:
    """Outcome of the fuzzing."""

    messages: int = 0
    errors: int = 0
    """Errors that named a field."""
    closed: int = 0
    """Connections that the server closed with a code."""
    wrong: list[str] = field(default_factory=list)
    """Unexpected outcomes."""


def fuzz(port: int, messages: int, *, route: str, dim: int = 16, seed: int = 0) -> Fuzzed:
    """Send malformed messages; after each one the session must answer, or close with a code."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    choose, found = random.Random(seed), Fuzzed()
    path = "/v1/stream" if route == "stream" else "/v1/realtime?intent=transcription"
    while found.messages < messages:
        with connect(f"ws://127.0.0.1:{port}{path}", compression=None, max_size=None) as line:
            line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                taken = 0
                if route == "stream":
                    line.send(json.dumps({"type": "open", "gamma": 1}) if choose.random() < 0.9 else nonsense(choose, route, 1, dim))
                    found.messages += 1
                    if json.loads(line.recv(timeout=60))["type"] != "opened":
                        found.errors += 1
                        line.recv(timeout=60)
                else:
                    line.recv(timeout=60)
                for _ in range(choose.randint(1, 200)):
                    line.send(nonsense(choose, route, taken + 1, dim))
                    found.messages += 1
                    # A message that is always answered; the answer says which numbers were accepted.
                    line.send('{"type": "ack"}' if route == "stream" else '{"type": "session.update", "session": 7, "event_id": "sure"}')
                    taken = max(taken, _answers(line, route, found))
                    if route == "stream" and choose.random() < 0.3:
                        line.send(HEAD.pack(0))  # the answer names the expected number
                        taken = _expected(line, found) - 1
            except ConnectionClosed as closed:
                found.closed += 1
                if closed.rcvd is None or closed.rcvd.code in (1011, 1006):
                    found.wrong.append(f"closed with {closed.rcvd}")
    return found


def _note(message: dict[str, Any], found: Fuzzed) -> None:
    error = message.get("error", message)
    if message["type"] in ("error", "refused", "failed"):
        found.errors += 1
        name = error.get("field", error.get("param"))
        if error.get("code") == "internal" or not error.get("code") or (message["type"] != "failed" and not name):
            found.wrong.append(json.dumps(message)[:300])


def _answers(line: Any, route: str, found: Fuzzed) -> int:
    """Read answers up to that of the last probe; the last accepted number."""
    taken = 0
    while True:
        message = json.loads(line.recv(timeout=60))
        _note(message, found)
        taken = max(taken, message["received"] if message["type"] == "ack" else 0)
        if route == "stream" and message["type"] == "error" and message["field"] == "received" and "nothing" in message["message"]:
            return taken
        if route == "realtime" and message["type"] == "error" and message["error"]["event_id"] == "sure":
            return taken


def _expected(line: Any, found: Fuzzed) -> int:
    while True:
        message = json.loads(line.recv(timeout=60))
        _note(message, found)
        if message["type"] == "error" and message["code"] == "out_of_order":
            return int(re.search(r"expected (\d+)", message["message"])[1])  # type: ignore[index]


# Load.


@dataclass
class Streamed:
    """One live stream: its captions and reconnects."""

    captions: list[Caption]
    resumes: int


def live(
    port: int, samples: Any, gamma: float, seated: threading.Barrier, ending: threading.Event, *, after_s: float, chunk_s: float = 0.1
) -> Streamed:  # fmt: skip
    """Send a recording in real time, once all streams are connected; the first to end sets `ending`."""
    size = round(16_000 * chunk_s)
    with Client(f"ws://127.0.0.1:{port}", gamma=gamma, keep=0) as client:  # a lost session is a failure here
        seated.wait()
        begun, found = time.monotonic() + after_s, list[Caption]()
        for first in range(0, len(samples), size):
            time.sleep(max(0.0, begun + first / 16_000 + chunk_s - time.monotonic()))
            client.send(samples[first : first + size])
            found += client.captions()
        ending.set()
        found += client.finish()
        return Streamed(found, client.num_resumes)


Place = tuple[int, int, int, str]
"""Window, step, id and text of a token."""


def gaps(places: list[Place]) -> int:
    """Number of missing steps before the last one.

    >>> gaps([(0, 1, 5, "a"), (0, 3, 5, "a"), (2, 1, 5, "a")])
    2
    """
    missing, window, step = 0, 0, 0
    for at, number, *_ in places:
        if at > window:
            missing, window, step = missing + at - window - 1, at, 0
        missing, step = missing + max(0, number - step - 1), number
    return missing


def knock(port: int, until: threading.Event) -> dict[str, int]:
    """Connect beyond the number of seats, again and again; counts of refusals and other answers."""
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    answers = {"refused": 0, "answered_otherwise": 0}
    while not until.wait(1.0):
        try:
            connect(f"ws://127.0.0.1:{port}/v1/stream", compression=None).close()
            answers["answered_otherwise"] += not until.is_set()  # otherwise a seat has just become free
        except InvalidStatus as refused:
            told_so = refused.response.status_code == 503 and "Retry-After" in refused.response.headers
            answers["refused" if told_so else "answered_otherwise"] += 1
    return answers


def load(port: int, sources: list[Any], gammas: list[float], expected: Callable[[int], list[Place]] | None) -> dict[str, Any]:
    """Run a live stream per seat, each with its own γ, and one client more that retries; compare with the streams alone, if known."""
    results: list[Streamed | BaseException | None] = [None] * len(sources)
    seated, ending, knocked = threading.Barrier(len(sources) + 1), threading.Event(), dict[str, int]()

    def one(n: int) -> None:
        try:
            # Each starts at another place within a block, as speakers do.
            results[n] = live(port, sources[n], gammas[n % len(gammas)], seated, ending, after_s=BLOCK_S * n / len(sources))
        except BaseException as error:
            results[n] = error
            seated.abort()

    def more() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            seated.wait()
            knocked.update(knock(port, ending))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(sources))] + [threading.Thread(target=more)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = {n: result for n, result in enumerate(results) if isinstance(result, Streamed)}
    places = {n: told(result.captions) for n, result in done.items()}
    lags = [caption.compute_lag_s for result in done.values() for caption in result.captions]
    waits = [caption.policy_lag_s for result in done.values() for caption in result.captions]
    wanted = {n: expected(n) for n in places} if expected is not None else {}
    lost = sum(len({*wanted[n]} - {*places[n]}) if wanted else gaps(places[n]) for n in places)
    return {
        "streams": len(sources), "seconds": round(len(sources[0]) / 16_000, 1),
        "failed": [str(result) for result in results if not isinstance(result, Streamed)], "tokens": len(lags), "lost": lost,
        "doubled": sum(len(found) - len({place[:2] for place in found}) for found in places.values()),
        "different": sum(places[n] != wanted[n] for n in wanted), "resumes": sum(result.resumes for result in done.values()), **knocked,
        "compute_lag_s_50_95_99": [round(float(q), 3) for q in np.percentile(lags, [50, 95, 99])] if lags else None,
        "policy_lag_s_mean": round(float(np.mean(waits)), 2) if waits else None,
    }  # fmt: skip


# Servers, and the command.


@contextlib.contextmanager
def child(*options: str) -> Iterator[int]:
    """`zendaya serve` as another process: its port."""
    process = subprocess.Popen([sys.executable, "-m", "zendaya", "serve", "--port", "0", *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(re.search(r":(\d+)$", process.stdout.readline().strip())[1])  # type: ignore[index]
    finally:
        process.terminate()
        process.wait(120)
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def here(**settings: Any) -> Iterator[Any]:
    """A server of the tiny preset in a thread: its listener and port."""
    from zendaya import Model
    from zendaya.serve.app import Listener, make_app
    from zendaya.serve.config import ServeConfig, bind
    from zendaya.serve.intake import Served

    config = ServeConfig(port=0, **settings)
    listener = Listener(make_app(config, Served("tiny", Model.from_preset("tiny", seed=3))), config)
    listening = bind("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve(sockets=[listening])), daemon=True)
    thread.start()
    while not listener.started:
        time.sleep(0.01)
    try:
        yield listener, listening.getsockname()[1]
    finally:
        listener.should_exit = True
        thread.join(30)


def sources(count: int, seed: int) -> list[list[Any]]:
    """Rows of features in messages."""
    made = []
    for n in range(count):
        rows = np.random.default_rng(seed + n).standard_normal((400, 16)).astype("<f4")
        made.append([rows[first : first + 5] for first in range(0, 400, 5)])
    return made


def held_idle(listener: Any) -> dict[str, int]:
    """Tasks and open files of an idle server in this process."""
    return {"loop_tasks": len(asyncio.all_tasks(listener._loop)), "files": len(list(Path("/dev/fd").iterdir()))}


def left(listener: Any, within_s: float, before: dict[str, int] | None = None) -> dict[str, int]:
    """What a server still holds after all clients have gone, beyond `held_idle`."""
    app, end = listener.app, time.monotonic() + within_s

    def held() -> dict[str, int]:
        server = app.state.server
        return {
            "seats": len(server.seats), "sessions": len(app.state.transports["websocket"].sessions), "streams": len(server.hub),
            "connections": len(listener.server_state.connections), "tasks": len(listener.server_state.tasks),
            **({name: max(0, count - before[name]) for name, count in held_idle(listener).items()} if before else {}),
        }  # fmt: skip

    while any(held().values()) and time.monotonic() < end:
        time.sleep(0.05)
    return held()


def run_load(options: argparse.Namespace) -> dict[str, Any]:
    """Live speech: the demo's recording in a loop, each stream from another moment."""
    from zendaya.sources.media import read_audio

    recording = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
    once = np.concatenate([chunk.samples for chunk in read_audio(recording)])
    pcm = np.clip(np.rint(once * 32768), -32768, 32767).astype("<i2")
    heard = [np.resize(np.roll(pcm, -n * 7919), round(options.minutes * 60 * 16_000)) for n in range(options.streams)]
    gammas = [0.1, 0.3, 0.5, 0.7, 1.0] if options.gamma is None else [options.gamma]
    with child("--max-sessions", str(options.streams)) as port:
        return load(port, heard, gammas, None if options.unchecked else alone(heard, gammas))


def alone(heard: list[Any], gammas: list[float]) -> Callable[[int], list[Place]]:
    """The text of each stream alone, in this process."""
    from zendaya import DecodeOptions, Pipeline, PowerLaw
    from zendaya.runtime.engine import engine_for
    from zendaya.runtime.loading import load_live
    from zendaya.sources.live import at_once

    @functools.cache
    def loaded() -> tuple[Any, Any, Any]:
        model, encoder = load_live("tiny.en-dial")
        return model, encoder, engine_for(model)

    def written(n: int) -> list[Place]:
        model, encoder, engine = loaded()
        samples = heard[n].astype(np.float32) / np.float32(32768)
        options = DecodeOptions(schedule=PowerLaw(gammas[n % len(gammas)]))
        events = Pipeline.open(model, encoder, options, engine=engine).run(at_once([samples]))
        return [(event.window_index, event.step, event.token, event.text) for event in events]

    return written


def run_realtime(options: argparse.Namespace) -> dict[str, Any]:
    """Malformed events to the realtime socket of the speech model."""
    with child() as port:
        fuzzed = fuzz(port, options.messages, route="realtime", seed=options.seed)
        return {**dataclasses.asdict(fuzzed), "wrong": fuzzed.wrong[:10], "num_wrong": len(fuzzed.wrong)}


def run_here(options: argparse.Namespace) -> dict[str, Any]:
    """Cuts, aborts or fuzzing on a server in this process, and what is left behind."""
    with here(orphan_s=2.0, ping_s=5.0) as (listener, port):
        before = held_idle(listener)
        if options.what == "cuts":
            found = cuts(port, sources(4, options.seed), Faults(options.seed, options.cuts), source="features", gamma=0.7)
        elif options.what == "aborts":
            found = aborts(port, options.cycles, options.seed)
        else:
            fuzzed = fuzz(port, options.messages, route="stream", seed=options.seed)
            found = {**dataclasses.asdict(fuzzed), "wrong": fuzzed.wrong[:10], "num_wrong": len(fuzzed.wrong)}
        return {**found, "left": left(listener, 60.0, before)}


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["load", "cuts", "aborts", "fuzz"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--gamma", type=float, help="one dial for all; five of them if not given")
    parser.add_argument("--unchecked", action="store_true", help="do not decode each stream again alone, to compare")
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--realtime", action="store_true", help="with fuzz: OpenAI's socket instead of ours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    chosen = run_load if options.what == "load" else run_realtime if options.what == "fuzz" and options.realtime else run_here
    found = chosen(options)
    print(json.dumps(found) if options.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    bad = [found.get(name) for name in ("failed", "lost", "doubled", "different", "wrong", "answered_otherwise")]
    if any(bad) or any(found.get("left", {}).values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
