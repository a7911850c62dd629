"""A server in this process, on a port of its own, for each test that asks for one."""

import asyncio
import contextlib
import threading
import time

import pytest

from zendaya import Model
from zendaya.serve.app import make_app
from zendaya.serve.config import ServeConfig
from zendaya.serve.run import Listener, bind
from zendaya.serve.served import Served


class Running:
    """A server that runs in a thread."""

    def __init__(self, served, engine=None, **settings):
        self.config = ServeConfig(port=0, **settings)
        self.app = make_app(self.config, served, engine=engine)
        self.listener = Listener(self.app, self.config)
        self._socket = bind(self.config.host, 0)
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
    def sessions(self):
        return self.app.state.native.sessions

    def call(self, function, *arguments):
        """Call something in the loop of the server."""
        self.listener._loop.call_soon_threadsafe(function, *arguments)

    def stop(self):
        self.listener.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


def wait_for(condition, within_s=60.0):
    """Wait until something is so."""
    end = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def serving(served, **settings):
    running = Running(served, **settings)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def tiny():
    return Served("tiny", Model.from_preset("tiny", seed=3))
