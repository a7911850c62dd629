"""The live session: source tokens go in as they arrive, append-only events come out (Algorithm 2, METHOD §4–5).

Time is what the arrivals say. A step is written at the arrival that licenses it, or when its patience is over, however long
computing takes. So the text depends on the arrivals alone, live and replayed; the clock only tells how late the machine was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zendaya.errors import ConfigError, SourceError
from zendaya.records import Event
from zendaya.runtime.arrival_queue import ArrivalQueue, Flags, StreamItem, Times
from zendaya.runtime.engine import Engine, TorchEngine
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.overlap import first_kept, prefix_rows, word_starts
from zendaya.runtime.policies.base import Cost, Policy
from zendaya.runtime.rows import DecoderRows, RowRequest
from zendaya.runtime.token_rules import TokenRules
from zendaya.runtime.window import HeardAt, Overlap, Window, WindowInput
from zendaya.runtime.writers import Choice, PolicyWriter, ScheduleWriter, Writer, WriterContext
from zendaya.schedule import Schedule

if TYPE_CHECKING:
    from zendaya.nn.model import Model

SourceTokens = Tensor | npt.NDArray[np.floating[Any]] | Sequence[Sequence[float]]
SessionWork = Generator[RowRequest, Tensor, Event | None]
"""A session on its way to its next event: it asks for rows and is sent the logits of the last of them."""


class Session:
    """One stream being decoded, window after window.

    A step is decoded once its horizon Ω has arrived, or its patience is over (Ω^eff: what has arrived). At the end of the stream,
    or of a window that was cut, nothing is waited for. The text depends on the arrivals alone, not on how they were pushed.
    `cost` counts what the decoder computed. An `engine` for the model runs its rows; PyTorch does without one.
    """

    def __init__(
        self, model: Model, options: DecodeOptions, *, clock: Callable[[], float] | None = None, engine: Engine | None = None
    ) -> None:
        config = model.config
        engine = TorchEngine(model.decoder) if engine is None else engine
        if engine.config != config.decoder:
            raise ConfigError("the engine was made for a decoder of another shape: make one for this model with engine_for")
        self.window_tokens = config.window_tokens if options.window_tokens is None else options.window_tokens
        """W."""
        if not 1 <= self.window_tokens <= config.decoder.max_source:
            raise ConfigError(
                f"window must lie in 1 … {config.decoder.max_source} source tokens for this model: got {options.window_tokens}"
            )
        for name, value in (("steps", options.steps), ("max_steps", options.max_steps)):
            if value is not None and not 1 <= value <= config.max_steps:
                raise ConfigError(f"{name} must lie in 1 … {config.max_steps} for this model: got {value}")
        if options.schedule.decides_while_reading and options.patience_s < np.inf:
            raise ConfigError(
                f"patience is for schedules; the policy {options.schedule} decides itself: got patience_s={options.patience_s}"
            )
        self.model, self.clock = model, clock
        self.tokens_per_s = None if options.pace is None else options.pace.tokens_per_s
        """Rate of the source; with it, events tell where they stand in it."""
        self._queue = ArrivalQueue(clock)
        self.rows = DecoderRows(engine)
        self._context = WriterContext(
            model=model, input=WindowInput(self._queue, options.patience_s, options.pace, self.rows.withdraw), rows=self.rows,
            rules=TokenRules.of(config, speech_only=options.voice == "gate"),
            fixed_steps=options.steps, max_steps=options.max_steps or config.max_steps,
        )  # fmt: skip
        self.schedule = self._checked(options.schedule)
        self._marks = deque[Event]()
        self._prefix = deque[RowRequest]()
        """Rows of the words that a window took over, which are still to be run in it."""
        self._begin_window(0, 0)

    # Input.

    def push(
        self, tokens: SourceTokens, arrival_s: Times | None = None, *, speech_T: Flags | None = None, revised: int = 0,
        restart: int | None = None,
    ) -> Iterator[Event]:  # fmt: skip
        """Take source tokens (T, E) that have arrived; the events they allow are decoded as the iterator is drawn.

        `arrival_s` is one time for all tokens or one per token; without it, the clock's, or the last time where there is no clock.
        `speech_T` says which of them hold speech, where that is known: a window without any writes nothing. The first `revised` replace
        the last ones before them. With `restart` they begin a new window at that token of the stream, which overlaps the one before.
        """
        dim, like = self.model.config.decoder.source_dim, self._window.tokens_TE
        arrived_TE = torch.as_tensor(tokens).to(like.device, like.dtype, copy=True)  # the caller may use its buffer again
        if arrived_TE.ndim != 2 or arrived_TE.shape[1] != dim:
            raise SourceError(f"source tokens must have shape (any, {dim}): got {tuple(arrived_TE.shape)}")
        if restart is not None and not self.model.config.overlap_tokens:
            raise SourceError("a window slides only where the model has overlap_tokens: got a restart; give the encoder overlap_s=0")
        if restart is not None and arrived_TE.shape[0] > self.window_tokens:
            raise SourceError(f"a window of {self.window_tokens} source tokens slides with fewer: got {arrived_TE.shape[0]}")
        if revised or restart is not None:
            kind: Literal["tokens", "slide"] = "tokens" if restart is None else "slide"
            self._queue.push_again(StreamItem(kind, 0.0, arrived_TE, speech_T, restart or 0, revised), arrival_s)
        else:
            self._queue.push(arrived_TE, arrival_s, speech_T)
        return self._decode()

    def cut(self, now_s: float | None = None) -> Iterator[Event]:
        """End the window with the tokens pushed so far, because a pause was heard; the next ones begin a new window and block."""
        self._queue.cut(now_s)
        return self._decode()

    def begin_speech(self, position: int, now_s: float | None = None) -> Iterator[Event]:
        """Speech begins after silence that was left out: a new window, without history, from that token of the stream on."""
        self._queue.begin_speech(position, now_s)
        return self._decode()

    def advance(self, now_s: float | None = None) -> Iterator[Event]:
        """Let time pass without arrivals: steps whose patience is over are decoded from what has arrived."""
        self._queue.advance(now_s)
        return self._decode()

    def finish(self, now_s: float | None = None) -> Iterator[Event]:
        """The source has ended: nothing is waited for any more."""
        self._queue.finish(now_s)
        return self._decode()

    def set_schedule(self, schedule: Schedule | Policy) -> None:
        """Turn the dial, from the next step on; an event without text marks it. A learned γ begins with the next window."""
        if self.schedule.decides_while_reading or schedule.decides_while_reading:
            raise ConfigError(f"a dial turns from schedule to schedule, not from {self.schedule} to {schedule}: open a new session")
        self._checked(schedule)
        self.schedule = schedule
        writer, arrivals = self._writer, self._context.input
        writer.turn(schedule)
        now_s = arrivals.now_s if arrivals.now_s > -np.inf else 0.0  # of the stream, whatever a clock says
        mark = Choice(-1, writer.floor, min(writer.floor, self._window.arrived))
        self._marks.append(self._event(mark, "", len(self._window.written) + 1, now_s, schedule=str(schedule)))

    def _checked(self, schedule: Schedule | Policy) -> Schedule | Policy:
        if schedule.decides_while_reading:
            schedule.check(self.model)
            return schedule
        if self._context.fixed_steps is None and self.model.length is None and schedule.needs_length:
            raise ConfigError(f"the schedule {schedule} needs a predicted length, and this model has no length head: give steps")
        if schedule.learned and self.model.gamma_head is None:
            raise ConfigError("this model has no gamma head to choose a gamma: train one with `zendaya learn-gamma`, or give one gamma")
        return schedule

    # State that callers may look at.

    @property
    def engine(self) -> Engine:
        """What runs the decoder's rows."""
        return self.rows.engine

    @property
    def cost(self) -> Cost:
        """What the decoder has computed so far."""
        return self.rows.cost

    @property
    def place(self) -> tuple[int, int, int]:
        """Where the text is: the window, the next step, and the steps skipped before it."""
        return self._window.index, len(self._window.written) + 1, self._writer.skipped

    @property
    def deadline_s(self) -> float | None:
        """When `advance` would write something if nothing arrives before; None while nothing waits on the clock."""
        return self._context.input.deadline_s

    @property
    def has_pending_input(self) -> bool:
        """Whether anything has happened that a waiting session has not looked at."""
        return bool(self._queue.items or self._marks)

    @property
    def _window(self) -> Window:
        return self._context.window

    # Decoding.

    def take_marks(self) -> list[Event]:
        """The events without text that mark a turn of the dial, once."""
        marks = list(self._marks)
        self._marks.clear()
        return marks

    def work(self) -> SessionWork:
        """The way to the next event, None if it must wait; the caller computes the rows it asks for, alone or with others'."""
        while True:
            if self._window.slide is not None:
                self._slide(self._window, self._window.slide)
            while self._prefix:
                yield self._prefix[0]
                self._prefix.popleft()
            if not self._window.closed and self._heard():
                choice = yield from self._writer.next()
                if choice is not None:
                    return self._write(choice)
            elif self._window.closed and (yield from self._next_window()):
                continue
            if self._window.slide is None:
                return None

    def _heard(self) -> bool:
        """Whether the window holds speech; one that is complete without any is closed: there is nothing to write about."""
        window, context = self._window, self._context
        if not window.has_speech and context.input.wait_for_speech():
            if window.has_speech and window.after_silence:
                context.previous = None
                self.rows.restart()
            window.closed = not window.has_speech and window.arrived > 0
        return window.has_speech

    def _decode(self) -> Iterator[Event]:
        while True:
            yield from self.take_marks()
            with torch.inference_mode():
                event = self._compute(self.work())
            if event is None:
                return
            yield event

    def _compute(self, work: SessionWork) -> Event | None:
        """Go the whole way, computing at once what is asked for."""
        try:
            request = next(work)
            while True:
                request = work.send(self.rows.compute(request))
        except StopIteration as done:
            return done.value

    def _write(self, choice: Choice) -> Event:
        window, arrivals = self._window, self._context.input
        window.written.append(choice.token)
        window.heard += [HeardAt(window.start + choice.place, window.start + choice.effective_horizon)] if window.slides else []
        step = len(window.written)
        window.closed = choice.token == self.model.config.framing.end or step == self._context.max_steps
        arrivals.reached_s = arrivals.now_s
        return self._event(choice, window.add_text(choice.token), step, arrivals.now_s)

    def _event(self, choice: Choice, text: str, step: int, now_s: float, schedule: str = "") -> Event:
        window, writer = self._window, self._writer
        read_s = spoken_s = 0.0
        if self.tokens_per_s is not None:
            paced = window.width * min(1.0, (step + writer.skipped) / max(1, writer.steps))
            place = choice.place + 1 if window.slides else paced
            read_s = (window.start + choice.effective_horizon) / self.tokens_per_s
            spoken_s = (window.start + min(place, choice.effective_horizon)) / self.tokens_per_s
        return Event(
            window_index=window.index, step=step, token=choice.token, text=text, horizon=choice.horizon,
            effective_horizon=choice.effective_horizon, predicted_steps=writer.steps, last=window.closed and not schedule,
            gamma=None if schedule else writer.gamma, skipped_steps=writer.skipped, window_start=window.start, arrival_s=now_s,
            emission_s=now_s if self.clock is None else self.clock(), schedule=schedule, read_s=read_s, spoken_s=spoken_s,
        )  # fmt: skip

    # Windows.

    def _begin_window(self, index: int, start: int) -> None:
        tokenizer = self.model.tokenizer
        self._enter(self._new_window(index, start, tokenizer.stream() if tokenizer is not None else lambda token: f"⟨{token}⟩"))

    def _new_window(self, index: int, start: int, add_text: Callable[[int], str], width: int | None = None) -> Window:
        config = self.model.config
        tokens_TE = self.model.decoder.tokens.weight.new_zeros(width or self.window_tokens, config.decoder.source_dim)
        return Window(index, start, tokens_TE, add_text, slides=config.overlap_tokens > 0)

    def _enter(self, window: Window) -> None:
        """Write this window from now on."""
        self.rows.window = window
        self._context.input.begin(window)
        if self.schedule.decides_while_reading:
            self._writer: Writer = PolicyWriter(self._context, self.schedule)
        else:
            self._writer = ScheduleWriter(self._context, self.schedule)

    def _next_window(self) -> Generator[RowRequest, Tensor, bool]:
        """Move on once the whole window has arrived; its text becomes history, read from its own source (METHOD §4)."""
        window, context = self._window, self._context
        if not context.input.wait(window.width + window.slides, patient=False):
            return False
        config, framing = self.model.config, self.model.config.framing
        # Silence leaves no history, and neither does a text that never ended.
        lost = not window.has_speech or (config.loop_tokens > 0 and window.written[-1:] != [framing.end])
        if lost:
            context.previous = None
        if config.history and not lost and not window.slides:
            if not bool(torch.isfinite(window.arrived_TE).all()):
                raise SourceError(f"window {window.index}: it holds a source token that is not finite; check the encoder")
            text = [token for token in window.written if token != framing.end]
            context.previous = (window.arrived_TE, text)
            self.rows.cache.forget_text()
            yield RowRequest([framing.previous, *text], window.arrived, is_step=False)
            self.rows.cache.forget_source()
        else:
            self.rows.restart()
        self._begin_window(window.index + 1, window.start + window.arrived)
        return True

    def _slide(self, before: Window, item: StreamItem) -> None:
        """Go over into a window that overlaps the one before and takes over the words heard in it.

        They are not written again. Their rows read no further than their steps did, and the next step at least as far (METHOD §10).
        """
        assert item.tokens_TE is not None
        begin = max(item.position, before.start)  # what was cut off stays so
        # A window that begins in the one before, because its text had lost its way, ends where that one ends.
        width = before.start + before.width - begin if item.own else self.window_tokens
        window = self._new_window(before.index + 1, begin, before.add_text, width)
        window.fill(item.tokens_TE[begin - item.position :], None if item.speech_T is None else item.speech_T[begin - item.position :])
        window.speech_T[0] |= before.has_speech
        starts = word_starts(before.written, self.model.tokenizer)
        kept = first_kept(starts, [heard.place for heard in before.heard], begin)
        window.written, window.heard = before.written[kept:], before.heard[kept:]
        horizons = [min(window.arrived, max(0, heard.horizon - begin)) for heard in window.heard]
        # A step that was held has been decided upon from what it read then.
        tried = before.start + self._writer.tried - begin if self._writer.tried else 0
        window.overlap = Overlap(item.own, window.arrived, min(window.arrived, max([*horizons, tried, 0])))
        window.closed = len(window.written) >= self._context.max_steps
        self.rows.restart()
        self._enter(window)
        # A policy runs the rows itself, each time it looks.
        rows = [] if self.schedule.decides_while_reading else prefix_rows(self.model.config.framing.prompt, window.written, horizons)
        self._prefix = deque(rows)
