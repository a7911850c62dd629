"""The batcher: the ready steps of many live sessions in one call of the engine, each at its own step, horizon and schedule.

A session asks for rows and is given their logits (`Session.work`). Each round computes one request per session, so that no session
waits for another's text. What a session writes is the same to the bit as alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from zendaya.errors import ConfigError, ZendayaError
from zendaya.records import Event
from zendaya.runtime.engine import Engine
from zendaya.runtime.rows import RowRequest, finite_rows
from zendaya.runtime.session import Session, SessionWork

LOG = logging.getLogger("zendaya.runtime")
TRIES = 3
"""Rounds in which a session's rows may fail for want of memory before the session fails."""


@dataclass(frozen=True)
class Outcome:
    """What a session has come to: an event, or the error that ends it."""

    session: Session
    event: Event | None = None
    error: Exception | None = None


@dataclass
class Round:
    """What came of one round: outcomes, failed sessions, sessions that wait for more source, rows computed and the time they took."""

    outcomes: list[Outcome] = field(default_factory=list)
    failed: list[Session] = field(default_factory=list)
    waiting: list[Session] = field(default_factory=list)
    rows: int = 0
    engine_s: float = 0.0


@dataclass(frozen=True)
class _Job:
    session: Session
    work: SessionWork
    request: RowRequest


class Batcher:
    """Sessions of one engine that are decoded together; they join and leave at any time.

    A round computes at most `max_rows` rows, or one session's where that alone asks for more; sessions left out come first in the
    next round. A session under a policy computes its own rows, each of which depends on the one before. An error of one session,
    whatever its kind, ends that session alone.

    >>> from zendaya import Model, PowerLaw
    >>> from zendaya.runtime.engine import engine_for
    >>> model = Model.from_preset("tiny")
    >>> engine = engine_for(model)
    >>> batcher = Batcher(engine)
    >>> for gamma in (0.3, 1.0):
    ...     session = batcher.add(model.open(PowerLaw(gamma), engine=engine))
    ...     _ = session.push(torch.zeros(24, 16))
    >>> texts = [outcome.event.text for outcome in batcher.run()]
    """

    def __init__(self, engine: Engine, *, max_rows: int = 256) -> None:
        if max_rows < 1:
            raise ConfigError(f"a round computes at least 1 row: got max_rows={max_rows}")
        self.engine, self.max_rows = engine, max_rows
        self._sessions = deque[Session]()
        self._waiting = set[Session]()
        self._tries = dict[Session, int]()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> Session:
        """Decode this session too, from the next round on."""
        if session.engine is not self.engine:
            raise ConfigError("a batcher decodes sessions of its own engine: open the session with it")
        if session in self._sessions:
            raise ConfigError("this session has joined already")
        self._sessions.append(session)
        return session

    def remove(self, session: Session) -> None:
        """Let a session go, as it is."""
        if session not in self._sessions:
            raise ConfigError("this session has not joined, or has left")
        self._sessions.remove(session)
        self._waiting.discard(session)
        self._tries.pop(session, None)

    def run(self) -> Iterator[Outcome]:
        """Rounds until every session waits for more source; outcomes come as they are made."""
        while (now := self.round()).outcomes or now.rows:
            yield from now.outcomes

    def round(self) -> Round:
        """One round: each ready session gets the rows it asks for next; one that fails leaves with its error."""
        now, jobs = Round(), list[_Job]()
        with torch.inference_mode():
            for _ in range(len(self._sessions)):
                session = self._sessions[0]
                if session in self._waiting and not session.has_pending_input:
                    now.waiting.append(session)
                    self._sessions.rotate(-1)
                    continue
                self._waiting.discard(session)
                now.outcomes += [Outcome(session, mark) for mark in session.take_marks()]
                work, before = session.work(), len(now.outcomes)
                request = self._advance(session, now, partial(next, work))
                if request is not None and now.rows and now.rows + len(request.ids) > self.max_rows:
                    break  # it is first in the next round, and has done nothing in this one
                self._sessions.popleft()
                if request is not None:
                    jobs.append(_Job(session, work, request))
                    now.rows += len(request.ids)
                elif session not in now.failed:
                    self._sessions.append(session)
                    if len(now.outcomes) == before:
                        self._waiting.add(session)
            if jobs:
                self._compute(jobs, now)
        return now

    def _compute(self, jobs: list[_Job], now: Round) -> None:
        """Compute the rows of all jobs in one call; if that fails, job by job, so that only the guilty session fails."""
        began_s, rows_before = time.perf_counter(), [job.session.rows.cache.num_rows for job in jobs]
        try:
            logits = self._logits(jobs)
        except Exception as error:
            if not isinstance(error, MemoryError | ZendayaError):
                LOG.exception("an engine call failed: its streams are computed one by one", extra={"event": "bug"})
            for job, num_rows in zip(jobs, rows_before, strict=True):
                job.session.rows.cache.num_rows = num_rows
            self._compute_apart(jobs, now)
        else:
            for job, logits_V, finite in zip(jobs, logits, finite_rows(logits), strict=True):
                self._answer(job, logits_V, finite, now)
        now.engine_s = time.perf_counter() - began_s

    def _compute_apart(self, jobs: list[_Job], now: Round) -> None:
        for job in jobs:
            try:
                logits_1V = self._logits([job])
            except MemoryError as error:  # it has lost nothing, and asks for the same in the next round
                self._tries[job.session] = self._tries.get(job.session, 0) + 1
                if self._tries[job.session] < TRIES:
                    job.work.close()
                    self._sessions.append(job.session)
                else:
                    self._fail(job.session, error, now)
            except Exception as error:
                self._fail(job.session, error, now)
            else:
                self._answer(job, logits_1V[0], all(finite_rows(logits_1V)), now)

    def _logits(self, jobs: list[_Job]) -> Tensor:
        """The logits (S, V) of the rows asked for, after the source that they may read was read."""
        behind = [job for job in jobs if job.session.rows.cache.num_source < job.request.horizon]
        self.engine.read_many([job.session.rows.cache for job in behind], [job.session.rows.unread(job.request.horizon) for job in behind])
        requests = [job.request for job in jobs]
        return self.engine.rows(
            [job.session.rows.cache for job in jobs], [request.ids for request in requests], [request.horizon for request in requests],
            [request.tap for request in requests],
        )  # fmt: skip

    def _answer(self, job: _Job, logits_V: Tensor, finite: bool, now: Round) -> None:
        session, request = job.session, job.request
        self._tries.pop(session, None)

        def send() -> RowRequest:
            session.rows.count(len(request.ids), request.horizon, finite=finite)
            return job.work.send(logits_V)

        self._advance(session, now, send)
        job.work.close()  # it asks again in the next round: the dial may have been turned meanwhile
        if session not in now.failed:
            self._sessions.append(session)

    def _advance(self, session: Session, now: Round, on: Callable[[], RowRequest]) -> RowRequest | None:
        """Let a session go on to its next request; an event or an error that it comes to instead is an outcome."""
        try:
            return on()
        except StopIteration as stop:
            if stop.value is None:
                now.waiting.append(session)
            else:
                now.outcomes.append(Outcome(session, stop.value))
        except Exception as error:
            self._fail(session, error, now)
        return None

    def _fail(self, session: Session, error: Exception, now: Round) -> None:
        if not isinstance(error, ZendayaError):
            LOG.error("a session failed", exc_info=error, extra={"event": "bug"})
        self._tries.pop(session, None)
        now.outcomes.append(Outcome(session, error=error))
        now.failed.append(session)
