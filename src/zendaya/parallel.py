"""One executor for parallel work in this process, worker processes or Ray; results are the same bits with any number of workers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zendaya.errors import ConfigError, MissingExtraError, WorkerError, ZendayaError

LOOK_AHEAD = 4
"""Jobs per worker that `Executor.map` may start ahead of the result it waits for; their results are held in memory."""
REPORT_S = 0.2
"""Shortest time between two progress messages of a worker process."""
POLL_S = 0.5
"""How often Ray workers are asked for their progress."""
CONNECT_S = 10.0
STOP_S = 60.0
"""How long a worker that was asked to stop may take to save its work."""

Job = TypeVar("Job")
Result = TypeVar("Result")
Report = Callable[[Any], None]
"""Receives the progress messages of jobs."""
Work = Callable[[Job, Report], Result]
Setup = Callable[[], Work[Job, Result]]
"""Builds the work function, once per worker, at its first job; it is pickled, the work function is not."""


@dataclass(frozen=True)
class Workers:
    """How many workers there are, and where."""

    number: int = 1
    """0, with Ray alone: one per GPU of the cluster if `gpus` is set and it has any, else one per processor."""
    ray: bool = False
    address: str | None = None
    """Of a Ray cluster; None or `local`: one started on this machine, unless this process is connected to one already."""
    gpus: bool = False
    """Whether each Ray worker takes a GPU where the cluster has any."""

    def __post_init__(self) -> None:
        if self.number < (0 if self.ray else 1):
            raise ConfigError(f"workers must be at least 1: got {self.number}")
        if self.address is not None and not self.ray:
            raise ConfigError(f"a Ray address goes with workers ray: got workers {self.number}")

    @classmethod
    def parse(cls, text: int | str, address: str | None = None) -> Workers:
        """A number of processes, `ray`, or `ray:N`.

        >>> Workers.parse("ray:4").number
        4
        """
        kind, colon, number = str(text).partition(":")
        ray = kind == "ray"
        digits = number if ray else kind
        if (digits or colon or not ray) and not (digits.isdecimal() and int(digits) and (ray or not colon)):
            raise ConfigError(f"workers must be a number of processes from 1, ray, or ray:N: got {text!r}")
        return cls(int(digits or 0), ray=ray, address=address)

    @property
    def in_this_process(self) -> bool:
        return not self.ray and self.number == 1


@dataclass(frozen=True)
class Finished(Generic[Job, Result]):
    """A job that is over, with its result or the error that ended it; a lost worker is a WorkerError."""

    job: Job
    worker: int
    result: Result | None = None
    error: Exception | None = None


class Executor(Generic[Job, Result]):
    """A context manager of workers with one job each at a time; `map` keeps the order of jobs, `submit` and `wait` do not."""

    def __init__(self, setup: Setup[Job, Result], workers: Workers, *, purpose: str = "parallel work") -> None:
        self._backend: _Backend
        if workers.ray:
            self._backend = _Ray(setup, workers, purpose)
        else:
            self._backend = _ThisProcess(setup) if workers.in_this_process else _Processes(setup, workers.number)
        self._idle = list(range(self._backend.size))[::-1]
        self._busy: dict[int, Job] = {}

    def __enter__(self) -> Executor[Job, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.close()

    @property
    def num_idle(self) -> int:
        """Number of workers without a job."""
        return len(self._idle)

    @property
    def running(self) -> list[Job]:
        """Jobs submitted and not finished."""
        return list(self._busy.values())

    def submit(self, job: Job) -> int:
        """Give a job to an idle worker; its number."""
        worker = self._idle.pop()
        self._busy[worker] = job
        self._backend.give(worker, job)
        return worker

    def wait(self, report: Report = lambda _: None) -> Finished[Job, Result]:
        """The next job that is over; progress messages that come meanwhile go to `report`."""
        return self._finished(*self._backend.take(report))

    def stop(self) -> Iterator[Finished[Job, Result]]:
        """Ask all workers to save their work and stop; the jobs that still gave a result."""
        return itertools.starmap(self._finished, self._backend.stop())

    def map(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Results in the order of the jobs, which are read as workers need them; the first error is raised."""
        rest, end = iter(jobs), object()
        numbers, done, num_started = dict[int, int](), dict[int, Any](), 0
        for wanted in itertools.count():
            while True:
                while self._idle and num_started - wanted < LOOK_AHEAD * self._backend.size and (job := next(rest, end)) is not end:
                    numbers[self.submit(job)] = num_started  # type: ignore[arg-type]
                    num_started += 1
                if wanted in done:
                    break
                if not self._busy:
                    return
                finished = self.wait()
                if finished.error is not None:
                    raise finished.error
                done[numbers.pop(finished.worker)] = finished.result
            yield done.pop(wanted)

    def _finished(self, worker: int, outcome: _Outcome) -> Finished[Job, Result]:
        self._idle.append(worker)
        return Finished(self._busy.pop(worker), worker, *outcome)


_Outcome = tuple[Any, Exception | None]
"""The result of a job, or the error that ended it."""


class _Worker:
    """Builds its work function once, and does one job after another with it."""

    def __init__(self, setup: Setup[Any, Any]) -> None:
        self._setup = functools.cache(setup)

    def do(self, job: Any, report: Report) -> Any:
        import torch

        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums over several threads are rounded differently
        try:
            return self._setup()(job, report)
        finally:
            torch.set_num_threads(num_threads)

    def answer(self, job: Any, report: Report) -> _Outcome:
        """The outcome of a job in a form that pickles; other errors than ours go as text, since not all of them do."""
        try:
            return self.do(job, report), None
        except ZendayaError as error:
            return None, error
        except Exception:
            return None, RuntimeError(f"a worker failed:\n{traceback.format_exc()}")


class _Backend(ABC):
    """Workers by number from 0, each with one job at a time."""

    size: int

    @abstractmethod
    def give(self, worker: int, job: Any) -> None: ...

    @abstractmethod
    def take(self, report: Report) -> tuple[int, _Outcome]:
        """The next worker that is done, and the outcome of its job."""

    def stop(self) -> Iterator[tuple[int, _Outcome]]:
        """Save and stop what runs; a run on a Ray cluster goes on from the last state it saved."""
        return iter(())

    def close(self) -> None:  # noqa: B027
        """End the workers."""


class _ThisProcess(_Backend):
    """This process, in the thread that waits; signals and errors of a job are those of the caller."""

    size = 1

    def __init__(self, setup: Setup[Any, Any]) -> None:
        self._worker, self._job = _Worker(setup), None

    def give(self, worker: int, job: Any) -> None:
        self._job = job

    def take(self, report: Report) -> tuple[int, _Outcome]:
        try:
            return 0, (self._worker.do(self._job, report), None)
        except Exception as error:
            return 0, (None, error)


class _Processes(_Backend):
    """Processes of this machine, each at the end of a pipe; one that dies is replaced."""

    def __init__(self, setup: Setup[Any, Any], size: int) -> None:
        self.size, self._setup = size, setup
        self._context = multiprocessing.get_context("spawn")  # a fork would share PyTorch's threads and locks
        self._pipes: list[multiprocessing.connection.Connection[Any, Any]] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._busy: set[int] = set()
        try:
            for worker in range(size):
                self._start(worker)
        except BaseException:
            self.close()
            raise

    def _start(self, worker: int) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._setup), daemon=False)  # a daemon may have no children
        process.start()
        theirs.close()
        self._pipes[worker : worker + 1] = [ours]
        self._processes[worker : worker + 1] = [process]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.terminate()  # a trainer saves its run
        deadline = time.monotonic() + STOP_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def give(self, worker: int, job: Any) -> None:
        with contextlib.suppress(OSError):  # a lost worker is found when its outcome is waited for
            self._pipes[worker].send(job)
        self._busy.add(worker)

    def take(self, report: Report) -> tuple[int, _Outcome]:
        while True:
            waiting = {self._pipes[worker]: worker for worker in self._busy}
            for pipe in multiprocessing.connection.wait(list(waiting)):
                worker = waiting[pipe]  # type: ignore[index]
                try:
                    is_outcome, message = self._pipes[worker].recv()
                except (EOFError, OSError):
                    return worker, (None, self._replace(worker))
                if is_outcome:
                    self._busy.discard(worker)
                    return worker, message
                report(message)

    def stop(self) -> Iterator[tuple[int, _Outcome]]:
        for worker in self._busy:
            self._processes[worker].terminate()
        for worker in sorted(self._busy):
            pipe, deadline = self._pipes[worker], time.monotonic() + STOP_S
            with contextlib.suppress(EOFError, OSError):
                while pipe.poll(max(0.0, deadline - time.monotonic())):
                    is_outcome, message = pipe.recv()
                    if is_outcome:
                        self._busy.discard(worker)
                        yield worker, message
                        break

    def _replace(self, worker: int) -> WorkerError:
        self._processes[worker].join()
        code = self._processes[worker].exitcode
        self._busy.discard(worker)
        self._pipes[worker].close()
        self._start(worker)
        why = f"a worker process ended unexpectedly (exit code {code}), perhaps out of memory"
        return WorkerError(f"{why}: finished work is kept; run the same command again, with fewer workers")


def _serve(pipe: multiprocessing.connection.Connection[Any, Any], setup: Setup[Any, Any]) -> None:
    """The loop of a worker process: jobs from the pipe, outcomes into it, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    worker, last_s = _Worker(setup), 0.0

    def report(message: Any) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > REPORT_S:
            last_s = time.monotonic()
            pipe.send((False, message))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        while True:
            pipe.send((True, worker.answer(pipe.recv(), report)))


@contextlib.contextmanager
def ray_cluster(address: str | None, *, purpose: str, **options: Any) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at an address; `options` are for a cluster that is started on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library does not report its users
    try:
        import ray
    except ModuleNotFoundError:
        raise MissingExtraError("ray", "distributed", purpose) from None
    started = not ray.is_initialized()
    if started:
        local = {"include_dashboard": False, **options} if address in (None, "local") else {}
        try:
            host, _, port = (address or "").removeprefix("ray://").rpartition(":")
            if host and port.isdecimal():
                socket.create_connection((host, int(port)), timeout=CONNECT_S).close()  # Ray would wait for minutes
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            reason = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"no Ray cluster at {address or 'this machine'}: {reason}; give host:port, auto, or local") from None
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


class _RayWorker:
    """A worker on a Ray cluster; a second thread of the actor is asked for the last progress message."""

    def __init__(self, setup: Setup[Any, Any]) -> None:
        self._worker, self._message = _Worker(setup), None

    def answer(self, job: Any) -> _Outcome:
        self._message = None
        return self._worker.answer(job, lambda message: setattr(self, "_message", message))

    def message(self) -> Any:
        return self._message


class _Ray(_Backend):
    """Actors of a Ray cluster. One whose machine is lost is started again elsewhere, and does its job again."""

    def __init__(self, setup: Setup[Any, Any], workers: Workers, purpose: str) -> None:
        self._stack = contextlib.ExitStack()
        options = {"num_cpus": workers.number} if workers.number else {}
        self._ray = self._stack.enter_context(ray_cluster(workers.address, purpose=purpose, **options))
        resources = self._ray.cluster_resources()
        gpus = int(resources.get("GPU", 0)) if workers.gpus else 0
        self.size = workers.number or gpus or max(1, int(resources.get("CPU", 1)))
        limits = {"num_cpus": 1, "num_gpus": 1 if gpus else 0, "max_restarts": 2, "max_task_retries": 2, "max_concurrency": 2}
        self._actor, self._setup = self._ray.remote(**limits)(_RayWorker), setup
        self._actors = [self._actor.remote(setup) for _ in range(self.size)]
        self._running: dict[Any, int] = {}

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._stack.close()

    def give(self, worker: int, job: Any) -> None:
        self._running[self._actors[worker].answer.remote(job)] = worker

    def take(self, report: Report) -> tuple[int, _Outcome]:
        while True:
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=POLL_S)
            if ready:
                break
            asked = [self._actors[worker].message.remote() for worker in self._running.values()]
            answered, _ = self._ray.wait(asked, num_returns=len(asked), timeout=POLL_S)
            for answer in answered:
                with contextlib.suppress(self._ray.exceptions.RayError):  # a lost worker is found when its outcome is waited for
                    if (message := self._ray.get(answer)) is not None:
                        report(message)
        worker = self._running.pop(ready[0])
        try:
            return worker, self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            self._actors[worker] = self._actor.remote(self._setup)
            why = f"a Ray worker was lost ({str(error).strip().splitlines()[0]})"
            return worker, (None, WorkerError(f"{why}: finished work is kept; run the same command again"))
