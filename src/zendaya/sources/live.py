"""Live sources: chunks of raw input as they arrive, from a file at once or at its own speed, from a pipe or a microphone."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

TICK_S = 0.05
"""Longest time between two arrivals: keys, deadlines and the status line are looked at that often."""
MAX_CHUNKS = 600
"""Chunks that a reading thread may be ahead; beyond it a pipe is not read further, and a microphone loses sound."""
Deadline = Callable[[], float | None]
"""When the next decision is due, in seconds of the source."""


@dataclass(frozen=True)
class Arrival:
    """A chunk of raw input, or None where only time has passed; without `now_s` its tokens arrive when the encoder says."""

    raw: Any
    now_s: float | None = None


class Clock:
    """Seconds since the source began; 0 before."""

    def __init__(self) -> None:
        self._origin_s = math.inf

    def begin(self, already_s: float = 0.0) -> None:
        """The source began so long ago; a second call changes nothing."""
        if math.isinf(self._origin_s):
            self.reach(already_s)

    def reach(self, already_s: float) -> None:
        """The source began at least so long ago."""
        self._origin_s = min(self._origin_s, time.monotonic() - already_s)

    def __call__(self) -> float:
        return max(0.0, time.monotonic() - self._origin_s)


def at_once(chunks: Iterable[Any]) -> Iterator[Arrival]:
    """Chunks as fast as they can be read, on the clock of the source."""
    return (Arrival(raw) for raw in chunks)


def paced(chunks: Iterable[tuple[Any, float]], clock: Callable[[], float], deadline_s: Deadline = lambda: None) -> Iterator[Arrival]:
    """Chunks of a recording in real time, each with the moment it ends, and time that passes between them.

    No moment past what has been heard is given out, so the text is that of `at_once`.
    """
    heard_s = 0.0
    for raw, end_s in chunks:
        while (now_s := clock()) < end_s:
            yield Arrival(None, min(now_s, heard_s))
            due_s = deadline_s()
            time.sleep(max(0.0, min(end_s - now_s, TICK_S, TICK_S if due_s is None else max(0.001, due_s - now_s))))
        yield Arrival(raw)
        heard_s = end_s


def listened(chunks: Iterable[Any], clock: Callable[[], float], deadline_s: Deadline = lambda: None) -> Generator[Arrival, None, None]:
    """Chunks read in a thread and stamped as they come, and time that passes while none waits. Closing it ends the thread."""
    ready = threading.Condition()
    waiting = deque[Arrival]()
    failed = list[BaseException]()
    ended = stopped = False

    def read() -> None:
        nonlocal ended
        try:
            for raw in chunks:
                with ready:
                    ready.wait_for(lambda: stopped or len(waiting) < MAX_CHUNKS)
                    if stopped:
                        break
                    waiting.append(Arrival(raw, clock()))
                    ready.notify_all()
        except BaseException as error:
            failed.append(error)
        finally:
            if isinstance(chunks, Generator):
                with contextlib.suppress(Exception):
                    chunks.close()
            with ready:
                ended = True
                ready.notify_all()

    thread = threading.Thread(target=read, name="zendaya-source", daemon=True)  # a read that never returns must not hold up the end
    thread.start()
    try:
        while True:
            with ready:
                due_s = deadline_s()
                ready.wait_for(lambda: waiting or ended, TICK_S if due_s is None else min(TICK_S, max(0.0, due_s - clock())))
                # Under the lock: a chunk that is not here now gets a later stamp than this moment.
                arrival = waiting.popleft() if waiting else None if ended else Arrival(None, clock())
                ready.notify_all()
            if arrival is None:
                break
            yield arrival
        if failed:
            raise failed[0]
    finally:
        with ready:
            stopped = True
            ready.notify_all()
        thread.join(0.5)
