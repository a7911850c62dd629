"""Servers in this process, each on its own port, and a bare client."""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from zendaya import PowerLaw
from zendaya.runtime.engine import engine_for
from zendaya.serve.app import Listener, make_app
from zendaya.serve.config import ServeConfig, bind


class Running:
    """A server in a thread."""

    def __init__(self, served, engine=None, send_buffer=None, **settings):
        self.config = ServeConfig(port=0, **settings)
        self.app = make_app(self.config, served, engine=engine)
        self._start(send_buffer)

    def _start(self, send_buffer=None):
        self.listener = Listener(self.app, self.config)
        self._socket = bind(self.config.host, 0)
        if send_buffer is not None:  # connections inherit it
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port = self._socket.getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        wait_for(lambda: self.listener.started or not self._thread.is_alive())

    def _run(self):
        asyncio.run(self.listener.serve(sockets=[self._socket]))

    @property
    def server(self):
        return self.app.state.server

    @property
    def transports(self):
        return self.app.state.transports

    @property
    def sessions(self):
        return self.transports["websocket"].sessions

    @property
    def wyoming_port(self):
        return self.transports["wyoming"].socket.getsockname()[1]

    def call(self, function, *arguments):
        """Call a function in the server's event loop."""
        self.listener._loop.call_soon_threadsafe(function, *arguments)

    def stop(self):
        self.listener.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


def wait_for(condition, within_s=60.0):
    """Wait until a condition holds; its value."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def serving(served, **settings):
    running = Running(served, **settings)
    try:
        yield running
    finally:
        running.stop()


class Wire:
    """A bare client of /v1/stream, without reconnecting or acknowledging."""

    def __init__(self, running, hello=None, *, query="", **options):
        self.socket = connect(f"ws://{running.host}/v1/stream{query}", compression=None, max_size=None, **options).__enter__()
        self.socket.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.events, self.others, self.number = [], [], 0
        if hello is not None:
            self.tell(hello)
            self.opened = self.get()

    def tell(self, message):
        self.socket.send(message if isinstance(message, bytes | str) else json.dumps(message))

    def source(self, payload):
        self.number += 1
        self.tell(struct.pack("<Q", self.number) + payload)

    def say(self, kind, **what):
        self.number += 1
        self.tell({"type": kind, "seq": self.number, **what})

    def get(self):
        return json.loads(self.socket.recv(timeout=60))

    def until(self, *kinds):
        """Read messages up to one of these types; events and others are collected."""
        while True:
            message = self.get()
            (self.events if "seq" in message else self.others).append(message)
            if message["type"] in kinds:
                return message

    def cut(self):
        """Drop the connection without a close frame."""
        self.socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.socket.close()

    def end(self):
        """End the source and the session; all its events."""
        self.say("end")
        last = self.until("finished", "failed")
        self.tell({"type": "ack", "received": last["seq"]})
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.socket.recv(timeout=60)
        return self.events


def texts(events):
    """The fields of text events that must not depend on the clock."""
    fields = (
        "text",
        "token",
        "window_index",
        "step",
        "horizon",
        "effective_horizon",
        "predicted_steps",
        "skipped_steps",
        "window_start",
        "last",
    )
    return [tuple(event[name] for name in fields) for event in events if event["type"] == "text"]


def of_session(events):
    """The same fields of a session's own events."""
    fields = (
        "text",
        "token",
        "window_index",
        "step",
        "horizon",
        "effective_horizon",
        "predicted_steps",
        "skipped_steps",
        "window_start",
        "last",
    )
    return [tuple(getattr(event, name) for name in fields) for event in events if not event.schedule]


def rows(seed, count=60):
    """Feature rows for the tiny model."""
    return np.random.default_rng(seed).standard_normal((count, 16)).astype("<f4")


def alone(served, gamma, values):
    """What a session without a server writes."""
    session = served.model.open(PowerLaw(gamma), engine=engine_for(served.model))
    return of_session([*session.push(values), *session.finish()])
