"""The live runtime: source tokens go in as they arrive, append-only events come out (Algorithm 2, method.md §4–5).

Time is what the arrivals say it is. A step is written at the arrival that licenses it, or when the patience for it is over, whatever
the computing takes; so the text depends on the arrivals alone, live and replayed, and the clock only tells how late the machine was.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zendaya.decoder import Gaze
from zendaya.engine import Engine, EngineCache
from zendaya.errors import ConfigError, SourceError
from zendaya.policies import Cost, Policy
from zendaya.policies.view import WindowView, check_policy
from zendaya.records import Event
from zendaya.schedule import Learned, PowerLaw, Schedule

if TYPE_CHECKING:
    from zendaya.model import Model

SourceTokens = Tensor | npt.NDArray[np.floating[Any]] | Sequence[Sequence[float]]
Times = float | Sequence[float] | npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Pace:
    """When source tokens are due: at a steady rate, and together in blocks where the encoder gives them so."""

    tokens_per_s: float
    block: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.tokens_per_s < math.inf or self.block < 1:
            raise ConfigError(f"a pace is a finite rate above 0, in blocks of at least 1: got {self.tokens_per_s} and {self.block}")

    def between_s(self, first: int, last: int) -> float:
        """Seconds from the arrival of one token of the stream, counted from 0, to that of a later one."""
        return (last // self.block - first // self.block) * self.block / self.tokens_per_s


@dataclass
class _Item:
    """Something that happens to a stream: tokens arrive, the window is cut, time passes, the source ends."""

    kind: Literal["tokens", "cut", "time", "end"]
    time_s: float
    tokens_TE: Tensor | None = None


@dataclass(frozen=True)
class Wanted:
    """Rows that a session wants computed before it can go on: their ids, how much of the window they read, whether one is a step."""

    ids: Sequence[int]
    horizon: int
    is_step: bool


Work = Generator[Wanted, Tensor, Event | None]
"""A session on its way to its next event: it says which rows it wants, and is given the logits of the last of them."""


class Session:
    """One stream being decoded, window after window; it holds the window, what has arrived beyond it, and one sentence of history.

    A step is decoded once its horizon Ω has arrived. It is waited for up to `patience_s`, then decoded from what has arrived (Ω^eff);
    at the end of the stream, or of a window that was cut, nothing is waited for. Patience counts from when the step was reached or,
    where a `pace` is given, from when its last token is due, counted from the arrival of the window's first: tokens that are on
    time cost no patience. What is written depends on the arrivals alone, not on how they were cut into pushes.

    In place of a schedule a policy may decide what is written when; `cost` tells what either has made the decoder do. An `engine` for
    the model computes its rows (see `zendaya.engine`); without one, its decoder does.
    """

    def __init__(
        self, model: Model, schedule: Schedule | Policy, *, window: int | None = None, steps: int | None = None,
        max_steps: int | None = None, patience_s: float = math.inf, pace: Pace | None = None, clock: Callable[[], float] | None = None,
        engine: Engine | None = None,
    ) -> None:  # fmt: skip
        config = model.config
        self.model = model
        self.engine: Engine = model.decoder if engine is None else engine
        if self.engine.config != config.decoder:
            raise ConfigError("the engine was made for a decoder of another shape: make one for this model with engine_for")
        self.window = config.window if window is None else window
        if not 1 <= self.window <= config.decoder.max_source:
            raise ConfigError(f"window must lie in 1 … {config.decoder.max_source} source tokens for this model: got {window}")
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None and not 1 <= value <= config.max_steps:
                raise ConfigError(f"{name} must lie in 1 … {config.max_steps} for this model: got {value}")
        if not patience_s >= 0:
            raise ConfigError(f"patience_s must be at least 0 (0 never waits, inf always does): got {patience_s}")
        self._fixed_steps, self._max_steps = steps, max_steps or config.max_steps
        self.schedule = self._checked(schedule)
        if isinstance(schedule, Policy) and patience_s < math.inf:
            raise ConfigError(f"patience is for what a schedule waits for: {schedule} decides itself; got patience_s={patience_s}")
        self.patience_s, self.pace, self.clock = patience_s, pace, clock
        self.cost = Cost()
        self._queue = deque[_Item]()
        self._marks = deque[Event]()
        self._seen_s = self._pushed_s = self._now_s = -math.inf
        self._finished = self._ended = False
        self._deadline_s: float | None = None
        self._window_index, self._first, self._cut_at = 0, 0, 0
        self._previous: tuple[Tensor, list[int]] | None = None
        self._gamma: float | None = None
        self._cache: EngineCache = self.engine.start()
        self._begin_window()

    # What comes in.

    def push(self, tokens: SourceTokens, arrival_s: Times | None = None) -> Iterator[Event]:
        """Take source tokens (T, E) that have arrived; the events they allow are decoded as the iterator is drawn.

        `arrival_s` is when they arrived, one time for all or one for each; not given, it is the clock's, or without one the last time.
        """
        self._check_open()
        dim, like = self.model.config.decoder.source_dim, self._window_TE
        arrived_TE = torch.as_tensor(tokens).to(like.device, like.dtype, copy=True)  # the caller may use its buffer again
        if arrived_TE.ndim != 2 or arrived_TE.shape[1] != dim:
            raise SourceError(f"source tokens must have shape (any, {dim}): got {tuple(arrived_TE.shape)}")
        for time_s, first, last in self._groups(arrived_TE.shape[0], arrival_s):
            self._queue.append(_Item("tokens", time_s, arrived_TE[first:last]))
        return self._decode()

    def cut(self, now_s: float | None = None) -> Iterator[Event]:
        """End the window with the tokens pushed so far, because a pause was heard; the next ones begin a new window, and a new block."""
        self._check_open()
        self._queue.append(_Item("cut", self._moment(now_s)))
        return self._decode()

    def advance(self, now_s: float | None = None) -> Iterator[Event]:
        """Let time pass without arrivals: what was waited for beyond its patience is decoded from what there is."""
        if not self._finished:
            self._queue.append(_Item("time", self._moment(now_s)))
        return self._decode()

    def finish(self, now_s: float | None = None) -> Iterator[Event]:
        """The source has ended: nothing is waited for any more."""
        if not self._finished:
            self._queue.append(_Item("end", self._moment(now_s)))
            self._finished = True
        return self._decode()

    def set_schedule(self, schedule: Schedule) -> None:
        """Turn the dial, from the next step on; an event without text marks it.

        Within the window N̂ stays, and a horizon is at least that of the step before, so that horizons still never decrease
        (Corollary 1, along the path taken). A learned γ begins with the next window.
        """
        if isinstance(self.schedule, Policy) or isinstance(schedule, Policy):
            raise ConfigError(f"a dial turns from schedule to schedule, not from {self.schedule} to {schedule}: open a new session")
        self.schedule = self._checked(schedule)
        now_s = self._now_s if self._now_s > -math.inf else 0.0  # of the stream, whatever a clock says
        if self._horizons and not isinstance(schedule, Learned):
            place = len(self._written) + self._pauses
            curve = schedule.horizons(self.window, self._steps, num_steps=self._max_steps)
            self._horizons[place:] = np.maximum(curve[place:], self._floor).tolist()
            self._gamma = None
        self._marks.append(
            Event(
                window=self._window_index, step=len(self._written) + 1, token=-1, text="", horizon=self._floor,
                effective_horizon=min(self._floor, self._arrived), predicted_steps=self._steps, last=False, window_start=self._first,
                pauses=self._pauses, arrival_s=now_s, emission_s=now_s if self.clock is None else self.clock(), schedule=str(schedule),
            )
        )  # fmt: skip

    @property
    def place(self) -> tuple[int, int, int]:
        """Where the text is: the window, the step that is next, and the pauses before it; of a mark, the place it was made at."""
        return self._window_index, len(self._written) + 1, self._pauses

    @property
    def deadline_s(self) -> float | None:
        """When `advance` would write something, if nothing arrives before; None while nothing waits on the clock."""
        return self._deadline_s

    def _checked(self, schedule: Schedule | Policy) -> Schedule | Policy:
        if isinstance(schedule, Policy):
            check_policy(schedule, self.model)
            return schedule
        if self._fixed_steps is None and self.model.length is None and schedule.needs_length:
            raise ConfigError(f"the schedule {schedule} needs a predicted length, and this model has no length head: give steps")
        if isinstance(schedule, Learned) and self.model.dial is None:
            raise ConfigError("this model has no dial head to choose a gamma: train one with `zendaya learn-gamma`, or give one gamma")
        return schedule

    def _check_open(self) -> None:
        if self._finished:
            raise SourceError("the stream was finished: open a new session for more source")

    def _moment(self, now_s: float | None) -> float:
        """A time that is given or the clock's; what comes after it counts as no earlier."""
        if now_s is None:
            now_s = self.clock() if self.clock is not None else self._seen_s if self._seen_s > -math.inf else 0.0
        if not math.isfinite(now_s):
            raise SourceError(f"a time must be finite: got {now_s}")
        self._seen_s = max(self._seen_s, now_s)
        return self._seen_s

    def _groups(self, count: int, arrival_s: Times | None) -> Iterator[tuple[float, int, int]]:
        """The arrivals of `count` tokens, those of one moment together: the moment, and the first and past the last of them."""
        if arrival_s is None:
            arrival_s = self._moment(None)
        if count and isinstance(arrival_s, float) and math.isfinite(arrival_s) and arrival_s >= self._pushed_s:
            # The rest, without arrays: what a live push costs.
            self._pushed_s, self._seen_s = arrival_s, max(arrival_s, self._seen_s)
            return iter([(self._seen_s, 0, count)])
        times_T = np.asarray(arrival_s, np.float64)
        if times_T.ndim > 1 or (times_T.ndim == 1 and times_T.shape[0] != count):
            raise SourceError(f"arrival_s must be one time, or one for each of {count} tokens: got shape {times_T.shape}")
        times_T = np.broadcast_to(times_T, (count,))
        if count == 0:
            return iter(())
        if not np.isfinite(times_T).all() or (np.diff(times_T) < 0).any() or times_T[0] < self._pushed_s:
            after = f", after {self._pushed_s:g} s" if self._pushed_s > -math.inf else ""
            raise SourceError(f"arrival times must be finite and never go back: got {times_T[0]:g} … {times_T[-1]:g} s{after}")
        self._pushed_s = float(times_T[-1])
        times_T = np.maximum(times_T, self._seen_s)  # what is handed over after a moment was said to have passed counts from then on
        self._seen_s = float(times_T[-1])
        edges = [0, *(np.flatnonzero(np.diff(times_T)) + 1).tolist(), count]
        return iter([(float(times_T[first]), first, last) for first, last in itertools.pairwise(edges)])

    # The window.

    def _begin_window(self) -> None:
        config = self.model.config
        weight = self.model.decoder.tokens.weight
        self._window_TE = weight.new_zeros(self.window, config.decoder.source_dim)
        self._arrived, self._complete, self._closed = 0, False, False
        self._first_s = self._reached_s = self._now_s
        self._written = list[int]()
        self._steps, self._horizons, self._pauses = 0, list[int](), 0
        self._floor = self._resume = 0
        self._gamma = None
        self._place = len(config.gammas) - 1
        self._add_text = self.model.tokenizer.stream() if self.model.tokenizer is not None else lambda token: f"⟨{token}⟩"
        if isinstance(self.schedule, Policy):
            self._steps, self._asked = self._max_steps, min(self.schedule.chunk, self.window)
            self._state = self.schedule.start()
            self._view = WindowView(
                self.model, self._cache, self._written, self._run, self._choose, max_steps=self._max_steps, cost=self.cost
            )

    def _window_tokens(self) -> Tensor:
        """Tokens of the current window that have arrived: A_k of them."""
        return self._window_TE[: self._arrived]

    def _decode(self) -> Iterator[Event]:
        while True:
            yield from self.take_marks()
            with torch.inference_mode():
                event = self._compute(self.work())
            if event is None:
                return
            yield event

    def take_marks(self) -> list[Event]:
        """The events without text that mark a turn of the dial, once."""
        marks = list(self._marks)
        self._marks.clear()
        return marks

    @property
    def stirred(self) -> bool:
        """Whether anything has happened that a session which had to wait has not looked at yet."""
        return bool(self._queue or self._marks)

    @property
    def cache(self) -> Any:
        """The engine's state of this stream."""
        return self._cache

    def work(self) -> Work:
        """The way to the next event, None if it must wait for more; whoever draws it computes the rows it wants, alone or with others'."""
        if self._closed and not (yield from self._next_window()):
            return None
        if isinstance(self.schedule, Policy):
            return self._write_decided()
        return (yield from self._write_step())

    def _compute(self, work: Work) -> Event | None:
        """Go the whole way, computing what is wanted at once."""
        try:
            wanted = next(work)
            while True:
                wanted = work.send(self._logits(wanted.horizon) if wanted.is_step else self._run(wanted.ids, wanted.horizon))
        except StopIteration as done:
            return done.value

    def _wait(self, needed: int, *, patient: bool = True) -> bool:
        """Take arrivals until so many tokens of the window are there, or will not come, or have been waited for; False: not yet."""
        self._deadline_s = None
        while self._arrived < needed and not self._complete:
            deadline_s = self._give_up_s(needed) if patient else math.inf
            if not self._queue:
                self._deadline_s = deadline_s if deadline_s < math.inf else None
                return False
            if deadline_s < self._queue[0].time_s:
                self._now_s = max(self._now_s, deadline_s)
                return True
            self._take(self._queue[0], needed)
        return True

    def _give_up_s(self, needed: int) -> float:
        """When the patience for the window's first `needed` tokens is over."""
        due_s = self._reached_s
        if self.pace is not None:
            first = self._first - self._cut_at
            due_s = max(due_s, self._first_s + self.pace.between_s(first, first + min(needed, self.window) - 1))
        return due_s + self.patience_s

    def _take(self, item: _Item, needed: int) -> None:
        """Let the next thing happen; of tokens, no more than are needed."""
        self._now_s = max(self._now_s, item.time_s)
        if item.tokens_TE is None:
            self._queue.popleft()
            self._ended = self._ended or item.kind == "end"
            if item.kind == "cut":
                self._cut_at = self._first + self._arrived
            self._complete = self._complete or item.kind == "end" or (item.kind == "cut" and self._arrived > 0)
            return
        if self._arrived == 0:
            self._first_s = self._reached_s = self._now_s
        count = min(needed - self._arrived, item.tokens_TE.shape[0])
        self._window_TE[self._arrived : self._arrived + count] = item.tokens_TE[:count]
        item.tokens_TE = item.tokens_TE[count:]
        if item.tokens_TE.shape[0] == 0:
            self._queue.popleft()
        self._arrived += count
        self._complete = self._arrived == self.window

    def _write_step(self) -> Work:
        """The next step of the window, or None while it must wait."""
        if not self._wait(1, patient=False) or self._arrived == 0 or (not self._horizons and not self._predict()):
            return None
        step, num_rows = len(self._written) + 1, self._cache.num_rows
        while True:
            if self._resume:
                # After a pause there is nothing new to say before more has come.
                if not self._wait(self._resume, patient=False):
                    return None
                self._resume, self._reached_s = 0, self._now_s
            place = step + self._pauses
            horizon = self._horizons[place - 1] if place <= len(self._horizons) else self.window
            if not self._wait(horizon):
                return None
            effective = min(horizon, self._arrived)
            token = self._choose((yield Wanted(self._next_ids(), effective, is_step=True)), self._written)
            whole = effective == self.window or (self._complete and horizon > self._arrived)
            if whole or not self.model.config.pauses or token != self.model.config.framing.end:
                break
            # Nothing more to say yet: the row is written again when the schedule, or what has arrived, lets it read more.
            self._cache.num_rows = num_rows
            self._resume, self._floor = effective + 1, max(self._floor, effective + 1)
            if horizon <= self._arrived:
                self._pauses += 1 + sum(h == horizon for h in self._horizons[place:])
        return self._write(token, horizon, effective)

    def _write_decided(self) -> Event | None:
        """The next token that the policy lets be written, or None while it must wait: it is asked a chunk at a time, however much has
        come."""
        assert isinstance(self.schedule, Policy)
        while True:
            if not self._wait(self._asked, patient=False) or self._arrived == 0:
                return None
            self._view.arrived, self._view.complete = self._arrived, self._complete
            token = self.schedule.decide(self._view, self._state)
            if token is not None:
                return self._write(token, self._arrived, self._arrived)
            assert not self._complete, f"{self.schedule} waits for more of a window that is complete"
            self._asked = min(self._arrived + self.schedule.chunk, self.window)

    def _write(self, token: int, horizon: int, effective: int) -> Event:
        self._written.append(token)
        step = len(self._written)
        self._closed = token == self.model.config.framing.end or step == self._max_steps
        self._floor, self._reached_s = horizon, self._now_s
        return Event(
            window=self._window_index, step=step, token=token, text=self._add_text(token), horizon=horizon,
            effective_horizon=effective, predicted_steps=self._steps, last=self._closed,
            gamma=self._gamma, pauses=self._pauses, window_start=self._first,
            arrival_s=self._now_s, emission_s=self._now_s if self.clock is None else self.clock(),
        )  # fmt: skip

    def _predict(self) -> bool:
        """Fix the window's schedule: its γ, if that is learned, and N̂_k, from what their heads may read, once that has arrived."""
        config = self.model.config
        schedule = self._settle()
        if schedule is None:
            return False
        buffer = self._buffer(schedule)
        unneeded = not schedule.needs_length and int(schedule.at(1, source=self.window, steps=config.max_steps)) < buffer
        if self._fixed_steps is not None or self.model.length is None or unneeded:  # what needs no length does not wait for one
            self._steps = self._fixed_steps or config.max_steps
        else:
            if not self._wait(buffer):
                return False
            predicted = self.model.predict_steps(self._window_tokens(), buffer, self._previous)
            self._steps = self.model.steps_of(predicted, self.window)
        self._horizons = schedule.horizons(self.window, self._steps, num_steps=self._max_steps).tolist()
        return True

    def _buffer(self, schedule: Schedule) -> int:
        """Tokens a head reads: fix pools the whole segment and so waits for it; inf reads the first B, at most what step 1 may."""
        config = self.model.config
        return self.window if config.length == "fix" else schedule.buffer(self.window, config.max_steps)

    def _settle(self) -> Schedule | None:
        """The window's schedule, or None while the dial head must wait.

        γ is tried from the largest down, each from the buffer that its own step 1 may read: whichever is taken, nothing beyond that
        was read to choose it. The smallest is what is left.
        """
        assert isinstance(self.schedule, Schedule)
        if not isinstance(self.schedule, Learned):
            return self.schedule
        gammas = self.model.config.gammas
        while self._gamma is None:
            schedule = PowerLaw(gammas[self._place])
            buffer = self._buffer(schedule)
            if self._place and not self._wait(buffer):
                return None
            if not self._place or self.model.settles_for(
                self._place, self._window_tokens(), buffer, self._previous, price=self.schedule.price
            ):
                self._gamma = gammas[self._place]
            else:
                self._place -= 1
        return PowerLaw(self._gamma)

    def _logits(self, horizon: int) -> Tensor:
        """Logits of the next step, which reads the window's first `horizon` tokens."""
        return self._run(self._next_ids(), horizon)

    def _next_ids(self) -> Sequence[int]:
        """The rows before the next step: its last token, or at a window's beginning the prompt."""
        return self._written[-1:] or self.model.config.framing.prompt

    def _run(self, ids: Sequence[int], horizon: int, gaze: Gaze | None = None) -> Tensor:
        """Rows of text through the decoder, reading the window's first `horizon` tokens: the logits of the last."""
        unread_TE = self.unread(horizon)
        if unread_TE.shape[0]:
            self.engine.read(self._cache, unread_TE[None])
        logits_1V = self.engine.prefill(self._cache, self._ids([ids]), horizon, gaze=gaze)
        self.computed(len(ids), horizon, finite=all(finite(logits_1V)))
        return logits_1V[0]

    def unread(self, horizon: int) -> Tensor:
        """Of the window's first `horizon` tokens, those (T, E) that its cache has not read."""
        return self._window_TE[self._cache.num_source : horizon]

    def computed(self, rows: int, horizon: int, *, finite: bool) -> None:
        """Count rows that were computed; that their logits are not finite is a SourceError."""
        self.cost.rows += rows
        self.cost.passes += 1
        if not finite:
            raise SourceError(
                f"window {self._window_index}: a source token among the first {horizon} is not finite or no known id; check the encoder"
            )

    def _ids(self, ids: Sequence[Any]) -> Tensor:
        return torch.tensor(ids, device=self._window_TE.device)

    def _choose(self, logits_V: Tensor, text: Sequence[int]) -> int:
        """Greedy choice among the tokens that may follow a window's text; where the end is a pause too, it must be likelier than all words
        together."""
        framing = self.model.config.framing
        banned = {*framing.suppress} if text else {*framing.suppress, *framing.suppress_first}
        if self.model.config.loop_tokens:
            banned |= {*going_round(text, self.model.config.loop_tokens)}
        best = int(logits_V.numpy().argmax() if logits_V.is_cpu else logits_V.argmax())  # NumPy's is four times as fast
        if best not in banned and not (self.model.config.pauses and best == framing.end):
            return best
        logits_V = logits_V.clone()
        logits_V[list(banned)] = -torch.inf
        if self.model.config.pauses and float(logits_V.softmax(-1)[framing.end]) < 0.5:
            logits_V[framing.end] = -torch.inf
        return int(logits_V.argmax())

    def _next_window(self) -> Generator[Wanted, Tensor, bool]:
        """Move on once the whole window has arrived; its text becomes history, read from its own source (method.md §4)."""
        if not self._wait(self.window, patient=False):
            return False
        window_TE = self._window_tokens()
        framing = self.model.config.framing
        lost = self.model.config.loop_tokens > 0 and self._written[-1:] != [framing.end]
        if lost:
            self._previous = None
        if self.model.config.history and not lost:
            if not bool(torch.isfinite(window_TE).all()):
                raise SourceError(f"window {self._window_index}: it holds a source token that is not finite; check the encoder")
            text = [token for token in self._written if token != framing.end]
            self._previous = (window_TE, text)
            self._cache.forget_text()
            yield Wanted([framing.previous, *text], window_TE.shape[0], is_step=False)
            self._cache.forget_source()
        else:
            self._cache = self.engine.start()
        self._first += self._arrived
        self._window_index += 1
        self._begin_window()
        return True


def finite(logits_SV: Tensor) -> list[bool]:
    """Whether all logits of each stream are finite: where their sum is, they are, and it is cheaper to tell."""
    found = logits_SV.sum(-1).isfinite().tolist()
    return found if all(found) else logits_SV.isfinite().all(-1).tolist()


LONGEST_PHRASE = 12
"""Tokens of the longest phrase whose repetition is taken for a loop: a clause."""


def going_round(written: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens that would go on with a phrase that has been repeated for that many tokens, and at least three times, up to the last.

    >>> going_round([5, 7, 7, 7, 7], 4), going_round([7, 7, 7], 4), going_round([1, 2, 3, 1, 2, 3, 1, 2, 3], 4)
    ([7], [], [1])
    """
    found = []
    for period in range(1, LONGEST_PHRASE + 1):
        stretch = max(num_tokens, 3 * period)
        tail = written[-stretch:]
        if len(tail) == stretch and tail[period:] == tail[:-period]:
            found.append(tail[-period])
    return found


def replay(
    session: Session, tokens: SourceTokens, arrival_s: Times, *, turns: Iterable[tuple[float | Event, Schedule]] = (),
    cuts: Iterable[int] = (), end_s: float | None = None, until_s: float = math.inf,
) -> Iterator[Event]:  # fmt: skip
    """Drive a session by recorded or generated arrivals, faster than real time: the events a live run with these arrivals gives.

    `turns` are the moments at which the dial was turned and to what; of a live run, in place of a moment, the event that marked the turn,
    since what was due by then may not have been written yet. `cuts` are the counts of tokens after which a window was cut, `end_s`
    when the source was known to have ended (default: with the last arrival). With `until_s`, what had been written by then.

    >>> from zendaya import Model, PowerLaw
    >>> model = Model.from_preset("tiny")
    >>> events = list(replay(model.open(PowerLaw(1)), np.zeros((24, 16)), np.arange(24) / 3, turns=[(4.0, PowerLaw(0.3))]))
    >>> [(event.schedule, event.arrival_s) for event in events if event.schedule]
    [('gamma=0.3', 4.0)]
    """
    turns = list(turns)
    times_T = np.broadcast_to(np.asarray(arrival_s, np.float64), (len(tokens),))
    count = int(np.searchsorted(times_T, until_s, side="right"))
    marked = deque([(turn, schedule) for turn, schedule in turns if isinstance(turn, Event)])
    changes: list[tuple[int, int, float, Schedule | None]] = [
        (int(np.searchsorted(times_T, turn, side="right")), 1, turn, schedule)
        for turn, schedule in turns
        if not isinstance(turn, Event) and turn <= until_s
    ]
    changes += [(at, 0, float(times_T[at - 1]), None) for at in cuts if 0 < at <= count]

    def drawn(events: Iterator[Event]) -> Iterator[Event]:
        while True:
            while marked and session.place == (marked[0][0].window, marked[0][0].step, marked[0][0].pauses):
                session.set_schedule(marked.popleft()[1])
            event = next(events, None)
            if event is None:
                return
            yield event

    first = 0
    for at, _, at_s, schedule in sorted(changes, key=lambda change: change[:3]):
        yield from drawn(session.push(tokens[first:at], times_T[first:at]))
        first = at
        if schedule is None:
            yield from drawn(session.cut(at_s))
        else:
            yield from drawn(session.advance(at_s))
            session.set_schedule(schedule)
    yield from drawn(session.push(tokens[first:count], times_T[first:count]))
    # A deadline has passed once the clock is past it.
    yield from drawn(session.finish(end_s) if until_s == math.inf else session.advance(math.nextafter(until_s, math.inf)))
