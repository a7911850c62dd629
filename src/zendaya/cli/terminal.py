"""A live terminal: captions that grow, a status line below them, and keys without Enter."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from zendaya.records import Event
    from zendaya.runtime.frontier import Frontier, FrontierPoint
    from zendaya.runtime.pipeline import Pipeline
    from zendaya.sources.live import Arrival

GAMMAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0)
"""Where the keys turn the dial to."""
REDRAW_S = 0.1
RECENT = 50
"""Steps the shown lag is the mean of."""
_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)
"""Escape sequences of arrow and function keys, which hold the brackets that turn the dial."""
_BEGUN = re.compile(r"\x1b(\[[0-?]*[ -/]*|O)?$")


def turned(gamma: float, key: str) -> float:
    """The next setting of the dial: `]` up, `[` down.

    >>> turned(0.5, "]"), turned(0.45, "["), turned(0.0, "[")
    (0.7, 0.4, 0.0)
    """
    if key == "]":
        return next((value for value in GAMMAS if value > gamma), gamma)
    return next((value for value in reversed(GAMMAS) if value < gamma), gamma)


class LagKeys:
    """The dial in seconds: `[` fewer of them, `]` more, along a model's frontier."""

    def __init__(self, frontier: Frontier, point: FrontierPoint) -> None:
        self._frontier, self._point = frontier, point

    def turn(self, key: str, pipeline: Pipeline) -> None:
        """Go on under the schedule of the next setting; the encoder and its block stay as they were opened."""
        point = self._frontier.beside(self._point, 1 if key == "]" else -1)
        if point != self._point:
            pipeline.turn(point.live.schedule)
            self._point = point

    def __str__(self) -> str:
        return f"about {self._point.seconds}"


@contextlib.contextmanager
def keys(stdin: TextIO) -> Iterator[Callable[[], str]]:
    """A function that gives the keys pressed since it was last asked; always "" where stdin is not our terminal.

    The terminal is restored on return, error, Ctrl-C, TERM and HUP, and while the process is stopped by Ctrl-Z.
    """
    if not _is_ours(stdin):
        yield lambda: ""
        return
    import termios
    import tty

    descriptor = stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def restore() -> None:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # stops here, until the shell lets it go on
        signal.signal(signal.SIGTSTP, stop)
        tty.setcbreak(descriptor, termios.TCSADRAIN)

    handlers = dict[signal.Signals, object]()
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGTERM, leave), (signal.SIGHUP, leave), (signal.SIGTSTP, stop)):
                handlers[number] = signal.signal(number, handler)
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        pressed = ""

        def ask() -> str:
            nonlocal pressed
            with contextlib.suppress(OSError):
                while select.select([descriptor], [], [], 0)[0] and (data := os.read(descriptor, 1024)):
                    pressed += data.decode(errors="replace")
            begun = _BEGUN.search(pressed)  # the rest of it is still to come
            whole, pressed = (pressed[: begun.start()], begun[0]) if begun else (pressed, "")
            return _SEQUENCE.sub("", whole)

        yield ask
    finally:
        restore()
        for number, previous in handlers.items():
            signal.signal(number, previous)  # type: ignore[arg-type]


def _is_ours(stdin: TextIO) -> bool:
    """Whether this is a terminal, and we are what runs in it: a job in the background must not touch it."""
    try:
        return stdin.isatty() and os.tcgetpgrp(stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # closed, not a file, or a system without terminals
        return False


class Screen:
    """Captions on one stream, as plain text or, on a terminal, wrapped between words; a status line on another, if that is a terminal."""

    def __init__(self, out: TextIO, status: TextIO, *, plain: bool = False) -> None:
        self._out, self._err = out, status
        self._wraps = out.isatty() and not plain
        self.watched = status.isatty()
        self._column, self._word, self._space, self._drawn_s = 0, "", False, -1.0
        self._begun, self._shown = False, ""
        for one in (out, status):
            if hasattr(one, "reconfigure"):
                one.reconfigure(errors="replace")  # a model may write what a terminal cannot show

    def write(self, text: str) -> None:
        """More of the text of a line; spaces at its beginning are left out."""
        for piece in re.findall(r"\s+|\S+", text):
            if piece.isspace():
                self._space, self._word = self._begun, ""
            else:
                self._put(piece)
        self._out.flush()

    def end_line(self) -> None:
        """The next text begins a new line, if there is any on this one."""
        if self._begun:
            self._break()
            self._out.flush()
        self._begun, self._space = False, False

    def print(self, line: str) -> None:
        """A whole line of its own, where the status was."""
        if self._shown:
            self._err.write("\r\x1b[K")
            self._err.flush()
            self._shown = " "
        self._out.write(f"{line}\n")
        self._out.flush()

    def show(self, line: Callable[[], str]) -> None:
        """Draw the status line, where someone watches, and not more often than anyone can read."""
        now_s = time.monotonic()
        if not self.watched or now_s - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now_s
        text = line()
        if text == self._shown:
            return
        self._shown = text
        width = _width(self._err) - 1
        text = set_cell_size(text, width).rstrip() if cell_len(text) > width else text
        if self._wraps:  # below the captions, and back to where they go on
            right = f"\x1b[{self._column}C" if self._column else ""
            self._err.write(f"\n\r\x1b[K{text}\x1b[A\r{right}")
        else:
            self._err.write(f"\r\x1b[K{text}")
        self._err.flush()

    def close(self) -> None:
        """End the line, and take the status away."""
        self.end_line()
        if self._shown:
            self._err.write("\r\x1b[J")
            self._err.flush()
            self._shown = ""

    def _put(self, piece: str) -> None:
        space = " " if self._space else ""
        self._space, self._begun = False, True
        if not self._wraps:
            self._out.write(space + piece)
            return
        piece = "".join(letter for letter in piece if letter.isprintable())  # no control of the terminal by a model
        width = _width(self._out) - 1
        if self._column + len(space) + cell_len(piece) > width and self._column:
            if self._word and cell_len(self._word) < self._column:  # a word goes on: it moves down as a whole
                back = cell_len(self._word)
                self._out.write(f"\x1b[{back}D\x1b[K")
                piece, self._word = self._word + piece, ""
            self._break()
            space = ""
        for letter in space + piece:
            if self._column + cell_len(letter) > width:
                self._break()
                self._word = ""
            self._out.write(letter)
            self._column += cell_len(letter)
        self._word += piece

    def _break(self) -> None:
        self._out.write("\n\x1b[J" if self._wraps and self._shown else "\n")
        self._column, self._word = 0, ""
        if self._wraps and self._shown:
            self._shown = " "  # it stood where the captions go on now


def _width(stream: TextIO) -> int:
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns or 80)
    except (OSError, ValueError):
        return 80


class Status:
    """The status line: the dial, the lag and its parts, exposure, and the part of the window that is read."""

    def __init__(self, window: int, tokens_per_s: float) -> None:
        self._window, self._rate = window, tokens_per_s
        self._lags_s = deque[tuple[float, float]](maxlen=RECENT)
        self._read, self._steps = 0, 0
        self._last: Event | None = None

    def add(self, event: Event) -> None:
        """Count the next event; the mark of a turned dial wrote nothing."""
        if event.token >= 0:
            self._lags_s.append((event.policy_lag_s, event.compute_lag_s))
            self._read, self._steps, self._last = self._read + event.effective_horizon, self._steps + 1, event

    def line(self, dial: str, *, keys: bool = False) -> str:
        """The line, under a schedule or at a lag; brackets around it where those keys turn it."""
        head = f"γ {dial.removeprefix('gamma=')}" if dial.startswith("gamma=") else dial
        head = f"[ {head} ]" if keys else head
        if self._last is None:
            return f"{head} │ listening{', q ends' if keys else ''}"
        policy_s, compute_s = (sum(each) / len(each) for each in zip(*self._lags_s, strict=True))
        event, exposure = self._last, self._read / self._steps / self._window
        return (
            f"{head} │ lag {policy_s + compute_s:.1f} s: policy {policy_s:.1f}, compute {compute_s:.2f} │ exposure {exposure:.0%} │ "
            f"window {event.window_index + 1}: {event.effective_horizon / self._rate:.1f}/{self._window / self._rate:.0f} s"
        )


def caption(
    source: Iterable[Arrival], pipeline: Pipeline, screen: Screen, *, stdin: TextIO | None = None,
    each: Callable[[Event], None] = lambda event: None, as_json: bool = False, lags: LagKeys | None = None,
) -> None:  # fmt: skip
    """Run a source through a pipeline onto a screen: [ and ] turn the dial, q ends the source there; `each` sees every event.

    With `lags` the dial is in seconds.
    """
    session = pipeline.session
    assert session.tokens_per_s is not None
    status, ended = Status(session.window_tokens, session.tokens_per_s), False
    with contextlib.ExitStack() as stack:
        stack.callback(screen.close)
        ask = stack.enter_context(keys(stdin)) if stdin is not None else lambda: ""
        turns = stdin is not None and stdin.isatty() and (lags is not None or session.schedule.gamma_or_none is not None)

        def between() -> None:
            nonlocal ended
            for key in ask():
                ended = ended or key in "qQ"
                schedule = session.schedule
                if key in "[]" and lags is not None:
                    lags.turn(key, pipeline)
                elif key in "[]" and not schedule.decides_while_reading and (gamma := schedule.gamma_or_none) is not None:
                    pipeline.turn(schedule.with_gamma(turned(gamma, key)))
            screen.show(lambda: status.line(str(session.schedule if lags is None else lags), keys=turns))

        pipeline.between = between
        for event in pipeline.run(itertools.takewhile(lambda _: not ended, source)):
            with uninterrupted():
                status.add(event)
                each(event)
                if as_json:
                    screen.print(json.dumps(dataclasses.asdict(event), ensure_ascii=False))
                else:
                    screen.write(event.text)
                    if event.last:
                        screen.end_line()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C in here counts when this is done: what a reader saw is also in the files."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
