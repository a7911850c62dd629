"""Many streams at once: the ready steps of all live sessions in one call of the engine, each at its own step, horizon and schedule.

A session says which rows it wants and is given their logits (`Session.work`); here the wants of many are computed together, one of each
in a round, so that none waits for another's text. What a session writes is the same to the bit as alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from zendaya.engine import NativeEngine
from zendaya.errors import ConfigError, ZendayaError
from zendaya.records import Event
from zendaya.stream import Session, Wanted, Work, finite


@dataclass(frozen=True)
class Written:
    """What a session has come to: an event, or the error that it cannot go on from."""

    session: Session
    event: Event | None = None
    error: ZendayaError | None = None


@dataclass
class Round:
    """What came of a round: what was written, who failed, who waits for more of its source, and how many rows the engine computed in
    how much time."""

    written: list[Written] = field(default_factory=list)
    failed: list[Session] = field(default_factory=list)
    waiting: list[Session] = field(default_factory=list)
    rows: int = 0
    engine_s: float = 0.0


class Scheduler:
    """Sessions of one native engine that are decoded together; they join and leave at any time, and go on being pushed to as ever.

    A round computes at most `max_rows` rows (or one session's, where that alone wants more), in turn: memory is bounded, and who was
    left out comes first in the next. A session that a policy decides computes its own rows, each of which depends on the one before.

    >>> from zendaya import Model, PowerLaw
    >>> from zendaya.engine import engine_for, missing
    >>> model = Model.from_preset("tiny")
    >>> if missing() is None:
    ...     engine = engine_for(model, "native")
    ...     scheduler = Scheduler(engine)
    ...     for gamma in (0.3, 1.0):
    ...         session = scheduler.add(model.open(PowerLaw(gamma), engine=engine))
    ...         _ = session.push(torch.zeros(24, 16))
    ...     texts = [written.event.text for written in scheduler.run()]
    """

    def __init__(self, engine: NativeEngine, *, max_rows: int = 256) -> None:
        if max_rows < 1:
            raise ConfigError(f"a round computes at least 1 row: got max_rows={max_rows}")
        self.engine, self.max_rows = engine, max_rows
        self._sessions = deque[Session]()
        self._waiting = set[Session]()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> Session:
        """Decode this one too, from the next round on."""
        if session.engine is not self.engine:
            raise ConfigError("a scheduler decodes sessions of its own engine: open the session with it")
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

    def run(self) -> Iterator[Written]:
        """Rounds until every session waits for more of its source; what is written comes as it is."""
        while (now := self.round()).written or now.rows:
            yield from now.written

    def round(self) -> Round:
        """One round, in which each session that is ready gets the rows it wants next; one that cannot go on leaves with its error."""
        now, wanting = Round(), list[tuple[Session, Work, Wanted]]()
        with torch.inference_mode():
            for _ in range(len(self._sessions)):
                session = self._sessions[0]
                if session in self._waiting and not session.stirred:
                    now.waiting.append(session)
                    self._sessions.rotate(-1)
                    continue
                self._waiting.discard(session)
                now.written += [Written(session, mark) for mark in session.take_marks()]
                work, before = session.work(), len(now.written)
                wanted = self._go(session, now, partial(next, work))
                if wanted is not None and now.rows and now.rows + len(wanted.ids) > self.max_rows:
                    break  # it is first in the next round, and has done nothing in this one
                self._sessions.popleft()
                if wanted is not None:
                    wanting.append((session, work, wanted))
                    now.rows += len(wanted.ids)
                elif session not in now.failed:
                    self._sessions.append(session)
                    if len(now.written) == before:
                        self._waiting.add(session)
            if wanting:
                self._compute(wanting, now)
        return now

    def _compute(self, wanting: list[tuple[Session, Work, Wanted]], now: Round) -> None:
        """Read the source that the wanted rows may read, then the rows of all, and give each session its logits."""
        caches = [session.cache for session, _, _ in wanting]
        began_s = time.perf_counter()
        try:
            behind = [(session, wanted.horizon) for session, _, wanted in wanting if session.cache.num_source < wanted.horizon]
            self.engine.read_many([session.cache for session, _ in behind], [session.unread(horizon) for session, horizon in behind])
            logits_SV = self.engine.rows(caches, [wanted.ids for _, _, wanted in wanting], [wanted.horizon for _, _, wanted in wanting])
        except BaseException:  # say there was no memory: they have lost nothing, and want the same in the next round
            self._sessions.extendleft(session for session, _, _ in reversed(wanting))
            raise
        now.engine_s = time.perf_counter() - began_s
        for (session, work, wanted), logits_V, is_finite in zip(wanting, logits_SV, finite(logits_SV), strict=True):
            self._go(session, now, partial(_answer, session, work, wanted, logits_V, is_finite))
            work.close()  # what it wants next it says again in the next round: the dial may have been turned meanwhile
            if session not in now.failed:
                self._sessions.append(session)

    @staticmethod
    def _go(session: Session, now: Round, on: Callable[[], Wanted]) -> Wanted | None:
        """Let a session go on to what it wants next; the event or the error that it comes to instead is written down."""
        try:
            return on()
        except StopIteration as stop:
            if stop.value is None:
                now.waiting.append(session)
            else:
                now.written.append(Written(session, stop.value))
        except ZendayaError as error:
            now.written.append(Written(session, error=error))
            now.failed.append(session)
        return None


def _answer(session: Session, work: Work, wanted: Wanted, logits_V: Tensor, finite: bool) -> Wanted:
    session.computed(len(wanted.ids), wanted.horizon, finite=finite)
    return work.send(logits_V)
