"""Who does the cells of a sweep: this process, several of this machine, or the workers of a Ray cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

from zendaya.errors import ConfigError, MissingExtraError
from zendaya.sweep.cells import Cell
from zendaya.sweep.work import Done, Tell, Told, do

TELL_S = 0.2
"""A worker tells how far it is no more often than this."""
POLL_S = 0.5
CONNECT_S = 10.0
STOP_S = 60.0
"""How long a worker that was asked to stop may take to save its run."""


class Crew(Protocol):
    """Workers by number, each with one cell at a time."""

    size: int

    def give(self, worker: int, cell: Cell) -> None: ...

    def take(self, tell: Tell) -> tuple[int, Done]:
        """The next worker that is done, and what became of its cell; what others tell meanwhile is passed on."""

    def stop(self) -> Iterator[tuple[int, Done]]:
        """Ask all to save what they have and stop; the outcomes of those that were done."""


@contextlib.contextmanager
def crew(processes: int, ray_address: str | None) -> Iterator[Crew]:
    """The workers that were asked for."""
    if processes < 1:
        raise ConfigError(f"processes must be at least 1: got {processes}")
    with _Ray(processes, ray_address) if ray_address is not None else _Processes(processes) if processes > 1 else _Here() as workers:
        yield workers


class _Here:
    """This process, which trains in its main thread and so is stopped by the trainer's own signals."""

    size = 1

    def __init__(self) -> None:
        self._cell: Cell | None = None

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def give(self, worker: int, cell: Cell) -> None:
        self._cell = cell

    def take(self, tell: Tell) -> tuple[int, Done]:
        assert self._cell is not None
        return 0, do(self._cell, tell)

    def stop(self) -> Iterator[tuple[int, Done]]:
        return iter(())


class _Processes:
    """Processes of this machine, each at the end of a pipe; one that dies fails its cell, and another takes its place."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._context = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks
        self._pipes: list[multiprocessing.connection.Connection[Any, Any]] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._busy: set[int] = set()
        for worker in range(size):
            self._start(worker)

    def _start(self, worker: int) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=False)  # daemons may have no children, which evaluation may
        process.start()
        theirs.close()
        self._pipes[worker : worker + 1] = [ours]
        self._processes[worker : worker + 1] = [process]

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + STOP_S
        for worker, process in enumerate(self._processes):
            if worker in self._busy:
                process.terminate()
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def give(self, worker: int, cell: Cell) -> None:
        with contextlib.suppress(OSError):  # one that is gone is found gone when its outcome is waited for
            self._pipes[worker].send(cell)
        self._busy.add(worker)

    def take(self, tell: Tell) -> tuple[int, Done]:
        while True:
            waiting = {self._pipes[worker]: worker for worker in self._busy}
            for pipe in multiprocessing.connection.wait(list(waiting)):
                worker = waiting[pipe]  # type: ignore[index]
                try:
                    message = self._pipes[worker].recv()
                except (EOFError, OSError):
                    return worker, self._lost(worker)
                if isinstance(message, Done):
                    self._busy.discard(worker)
                    return worker, message
                tell(message)

    def stop(self) -> Iterator[tuple[int, Done]]:
        for worker in self._busy:
            self._processes[worker].terminate()  # the trainer saves its run
        for worker in sorted(self._busy):
            pipe, deadline = self._pipes[worker], time.monotonic() + STOP_S
            with contextlib.suppress(EOFError, OSError):
                while pipe.poll(max(0.0, deadline - time.monotonic())):
                    if isinstance(message := pipe.recv(), Done):
                        self._busy.discard(worker)
                        yield worker, message
                        break

    def _lost(self, worker: int) -> Done:
        process = self._processes[worker]
        process.join()
        self._busy.discard(worker)
        self._pipes[worker].close()
        code = process.exitcode
        self._start(worker)
        return Done(
            status="failed", error=f"its worker ended by itself (exit code {code}), perhaps for want of memory; the sweep can be run again"
        )


def _serve(pipe: multiprocessing.connection.Connection[Any, Any]) -> None:
    """The life of a worker: cells from the pipe, outcomes into it, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the one that gave the work decides
    last = 0.0

    def tell(told: Told) -> None:
        nonlocal last
        if time.monotonic() - last > TELL_S:
            last = time.monotonic()
            pipe.send(told)

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        while True:
            pipe.send(do(pipe.recv(), tell))


class _RayWorker:
    """A worker on a Ray cluster; a second thread of the actor tells how far it is."""

    def __init__(self) -> None:
        self._told: Told | None = None

    def do(self, cell: Cell) -> Done:
        return do(cell, self._note)

    def told(self) -> Told | None:
        return self._told

    def _note(self, told: Told) -> None:
        self._told = told


def _check_address(address: str | None) -> None:
    """Refuse at once an address at which nobody listens: Ray would wait for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            raise ConfigError(f"no Ray cluster at {address}: {error.strerror or error}; give host:port, auto, or local") from None


class _Ray:
    """Workers of a Ray cluster: the one at an address, or a local one (`local`) started for the sweep; they see the sweep's folders."""

    def __init__(self, size: int, address: str | None) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise MissingExtraError("ray", "distributed", "a sweep on a Ray cluster") from None
        self._ray: Any = ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library does not report its users
        local: dict[str, Any] = {"include_dashboard": False, "num_cpus": size} if address == "local" else {}
        self._started = not ray.is_initialized()
        if self._started:
            _check_address(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
            except (ConnectionError, ValueError, RuntimeError, OSError) as error:
                first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise ConfigError(f"no Ray cluster at {address}: {first}; give host:port, auto, or local") from None
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        self.size = size if address == "local" else gpus or max(1, int(resources.get("CPU", 1)))
        # Two threads: the one that works, and the one that is asked how far it is. A worker whose machine goes is started anew elsewhere,
        # and its cell goes on from what it saved.
        self._actor = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_restarts=2, max_task_retries=2, max_concurrency=2)(_RayWorker)
        self._actors = [self._actor.remote() for _ in range(self.size)]
        self._running: dict[Any, int] = {}

    def __enter__(self) -> _Ray:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._started:
            self._ray.shutdown()

    def give(self, worker: int, cell: Cell) -> None:
        self._running[self._actors[worker].do.remote(cell)] = worker

    def take(self, tell: Tell) -> tuple[int, Done]:
        while True:
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=POLL_S)
            if ready:
                break
            asked = [self._actors[worker].told.remote() for worker in self._running.values()]
            answered, _ = self._ray.wait(asked, num_returns=len(asked), timeout=POLL_S)
            for answer in answered:
                with contextlib.suppress(self._ray.exceptions.RayError):  # a lost worker is found when its outcome is waited for
                    if (told := self._ray.get(answer)) is not None:
                        tell(told)
        worker = self._running.pop(ready[0])
        try:
            return worker, self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            self._actors[worker] = self._actor.remote()
            return worker, Done(status="failed", error=f"its Ray worker was lost: {str(error).strip().splitlines()[0]}")

    def stop(self) -> Iterator[tuple[int, Done]]:
        """A run on a cluster goes on from the last state it saved: its workers are ended with the crew."""
        return iter(())
