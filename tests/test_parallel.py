"""The executor: the same results in this process, in worker processes and on Ray; errors, lost workers and interruption."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zendaya.errors import ConfigError, MissingExtraError, SourceError, WorkerError
from zendaya.parallel import LOOK_AHEAD, Executor, Workers


def _double(job, report):
    report(f"doing {job}")
    if job == "wait":
        time.sleep(60)
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "source":
        raise SourceError("clip 7: no samples")
    if job == "extra":
        raise MissingExtraError("ray", "distributed", "this test")
    if job == "bug":
        raise ValueError("a bug")
    if isinstance(job, float):
        time.sleep(job)
    return job * 2


def double():
    return _double


def _threads(job, report):
    import torch

    return torch.get_num_threads()


def threads():
    return _threads


@pytest.mark.parametrize("number", [1, 2])
def test_results_come_in_the_order_of_the_jobs(number):
    jobs = [0.3, 0.0, 0.1, 0.2, 0.0]
    with Executor(double, Workers(number)) as executor:
        assert list(executor.map(jobs)) == [job * 2 for job in jobs]
        assert list(executor.map([])) == []
        assert list(executor.map(iter([1, 1, 1]))) == [2, 2, 2]


def test_jobs_are_read_only_as_far_as_the_look_ahead():
    read = []

    def jobs():
        for number in range(100):
            read.append(number)
            yield number

    for number in (1, 2):
        read.clear()
        with Executor(double, Workers(number)) as executor:
            results = executor.map(jobs())
            assert [next(results) for _ in range(3)] == [0, 2, 4]
            assert len(read) <= 3 + LOOK_AHEAD * number


@pytest.mark.parametrize("number", [1, 2])
def test_every_job_has_one_thread_of_torch(number):
    import torch

    before = torch.get_num_threads()
    with Executor(threads, Workers(number)) as executor:
        assert list(executor.map(range(4))) == [1] * 4
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        ("source", SourceError, "^clip 7: no samples$"),
        ("extra", MissingExtraError, "this test needs the package 'ray'"),
        ("die", WorkerError, r"ended unexpectedly \(exit code -9\), perhaps out of memory"),
        ("bug", RuntimeError, r"a worker failed:\n(.|\n)*a bug"),
    ],
)
def test_an_error_in_a_worker_is_raised(job, error, message):
    with Executor(double, Workers(2)) as executor, pytest.raises(error, match=message):
        list(executor.map([1, job, 2]))


def test_an_error_in_this_process_is_the_same_object():
    with Executor(double, Workers()) as executor, pytest.raises(ValueError, match=r"^a bug$"):
        list(executor.map(["bug"]))


def test_a_lost_worker_is_replaced():
    messages = []
    with Executor(double, Workers(2)) as executor:
        executor.submit("die")
        lost = executor.wait(messages.append)
        assert isinstance(lost.error, WorkerError)
        assert (lost.job, executor.num_idle, executor.running) == ("die", 2, [])
        assert list(executor.map(["a", "b", "c"])) == ["aa", "bb", "cc"]
    assert messages == ["doing die"]


def test_workers_end_with_the_executor():
    begun = time.monotonic()
    with Executor(double, Workers(2)) as executor:
        executor.submit("wait")
        processes = executor._backend._processes
    assert time.monotonic() - begun < 30
    assert not any(process.is_alive() for process in processes)


def test_a_local_ray_cluster_gives_the_same_results():
    pytest.importorskip("ray", reason="ray is not installed: pip install 'zendaya[distributed]'")
    code = (  # in a process of its own: Ray leaves threads and sockets behind
        "import sys; sys.path.insert(0, sys.argv[1]); import test_parallel as t; from zendaya.parallel import *\n"
        "with Executor(t.double, Workers.parse('ray:2')) as e:\n"
        "    print(list(e.map([0.2, 0.0, 1])))\n"
        "    e.submit('source'); print(repr(e.wait().error))\n"
        "    e.submit(1.5); m = []; e.wait(m.append); print(m[0])\n"
    )
    folder = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    ran = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert ran.stdout.splitlines()[-3:] == ["[0.4, 0.0, 2]", "SourceError('clip 7: no samples')", "doing 1.5"], ran.stdout + ran.stderr


@pytest.mark.parametrize("text", ["0", "-1", "two", "ray:0", "ray:", "2:3", "", "ray:x"])
def test_workers_that_cannot_be_are_refused(text):
    with pytest.raises(ConfigError, match="workers must be a number of processes from 1, ray, or ray:N"):
        Workers.parse(text)
    with pytest.raises(ConfigError, match="goes with workers ray"):
        Workers.parse(2, "auto")


def test_workers_are_parsed():
    assert Workers.parse(3) == Workers(3)
    assert Workers.parse("ray") == Workers(0, ray=True)
    assert Workers.parse("ray:4", "auto") == Workers(4, ray=True, address="auto")
    assert Workers.parse("1").in_this_process
