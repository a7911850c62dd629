"""Writers: what decides when the next token of a window is written, a schedule fixed beforehand or a policy that looks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from zendaya.nn.decoder import AttentionTap
from zendaya.nn.model import Model
from zendaya.runtime.overlap import EDGE_TOKENS, REWIND_TOKENS, STALL_TOKENS, STALL_WORDS, same_word, word_starts
from zendaya.runtime.policies._view import WindowView
from zendaya.runtime.policies.base import Policy, chosen_heads
from zendaya.runtime.rows import DecoderRows, RowRequest
from zendaya.runtime.token_rules import TokenRules
from zendaya.runtime.window import Window, WindowInput
from zendaya.schedule import IntArray, Learned, PowerLaw, Schedule


class Choice(NamedTuple):
    """A token to write, the horizon that licensed it, the source tokens it read, and where a window slides, which it attended to most."""

    token: int
    horizon: int
    effective_horizon: int
    place: int = 0


Work = Generator[RowRequest, Tensor, Choice | None]
"""The way to the next choice, or to None while it must wait: it asks for rows and is sent the logits of the last of them."""


@dataclass(kw_only=True)
class WriterContext:
    """What the writers of one stream share."""

    model: Model
    input: WindowInput
    rows: DecoderRows
    rules: TokenRules
    fixed_steps: int | None
    max_steps: int
    previous: tuple[Tensor, list[int]] | None = None
    """Source and text of the window before, where the model reads them."""

    @property
    def window(self) -> Window:
        """The current window."""
        return self.input.window

    def at_edge(self, place: int) -> bool:
        """Whether a source token is among the last that a window will hold, so that its right context comes with the next one."""
        return self.window.slides and not self.window.complete and place >= self.full - EDGE_TOKENS

    def rewinds(self, token: int, tap: AttentionTap | None) -> bool:
        """Whether a word that is to be written was heard well before the last one, where the same word was: it would be written twice."""
        window, tokenizer = self.window, self.model.tokenizer
        late = window.last_place - REWIND_TOKENS
        if tap is None or not window.slides or late <= 0 or not word_starts([token], tokenizer)[0]:
            return False
        attention_F = tap.mean()
        place = int(attention_F.argmax())
        if place >= late or float(attention_F[late:].sum()) > 0.5:  # one token may stand out although most of the attention is elsewhere
            return False
        heard = zip(window.written, window.heard, strict=True)
        near = [other for other, at in heard if abs(at.place - window.start - place) <= EDGE_TOKENS]
        return any(same_word(token, other, tokenizer) for other in near)

    def choose_after(self, logits_V: Tensor, text: Sequence[int], horizon: int) -> int:
        """The next token of a text, as the rules have it."""
        return self.rules.choose(logits_V, text, speech=0 if text else int(self.window.speech_T[: max(0, horizon)].sum()))

    def choose(self, logits_V: Tensor, horizon: int) -> int:
        """The next token; a window that began anew and leaves speech behind again writes the likeliest word, however unsure."""
        end = self.model.config.framing.end
        token = self.choose_after(logits_V, self.window.written, horizon)
        if token != end or not self.window.anew or not self._behind(horizon):
            return token
        words_V = logits_V.clone()
        words_V[end] = -torch.inf
        return self.rules.choose(words_V, self.window.written or [end])

    def stalled(self, horizon: int) -> bool:
        """Whether there was much speech after the last word, up to a horizon, of which nothing was written: the text has lost its way."""
        return len(self.window.written) >= STALL_WORDS and self._behind(horizon)

    def _behind(self, horizon: int) -> bool:
        window = self.window
        return window.slides and int(window.speech_T[window.last_place + 1 : max(0, horizon)].sum()) > STALL_TOKENS

    @property
    def full(self) -> int:
        """Source tokens that the window will hold at most: one that slides does so before a block that has no room in it."""
        window = self.window
        whole = not window.slides or window.complete
        return window.width if whole else window.width - (window.width - window.overlap.tokens) % self.input.block

    def next_ids(self) -> Sequence[int]:
        """The rows before the next step: the last token written, or the prompt at a window's beginning."""
        return self.window.written[-1:] or self.model.config.framing.prompt


class Writer(Protocol):
    """Decides the tokens of one window."""

    steps: int
    """N̂ of the window; 0 while it is not known."""
    skipped: int
    """Steps of the schedule that passed without a token."""
    floor: int
    """The least horizon of the next step: horizons never decrease."""
    tried: int
    """The largest horizon of a row that was run, written or withdrawn: where the window slides, the next step reads at least as far."""
    gamma: float | None
    """γ where the model chose it."""

    def next(self) -> Work:
        """The next token, or None while it must wait."""

    def turn(self, schedule: Schedule) -> None:
        """Follow another schedule from the next step on."""


class ScheduleWriter:
    """Writes a step once its horizon has arrived, or its patience is over.

    Under a hold a step has a range of horizons (method.md §9): it is first tried at the least, and tried again at the end of each
    block up to the largest while its alignment heads look at the newest source tokens.
    """

    def __init__(self, context: WriterContext, schedule: Schedule) -> None:
        self.context, self.schedule = context, schedule
        self.steps, self.skipped, self.floor, self.tried = 0, 0, context.window.overlap.floor, 0
        self.gamma: float | None = None
        self._horizons, self._least = list[int](), list[int]()  # the largest and the least of each step; the same without a hold
        self._held = 0  # the horizon at which a held step is tried next
        self._resume = 0  # tokens that must have arrived before a step that was put off is tried again
        self._paced = True  # whether N̂ is the length head's
        self._gamma_index = len(context.model.config.gammas) - 1

    def next(self) -> Work:
        context, arrivals, window = self.context, self.context.input, self.context.window
        if not arrivals.wait(1, patient=False) or window.arrived == 0 or (not self._horizons and not self._predict()):
            return None
        config, num_rows, step = context.model.config, context.rows.cache.num_rows, len(window.written) + 1
        while True:
            if self._resume:
                # After a step was put off there is nothing new to say before more has come.
                if not arrivals.wait(self._resume, patient=False):
                    return None
                self._resume, arrivals.reached_s = 0, arrivals.now_s
            place = step + self.skipped
            most, least = (curve[place - 1] if place <= len(curve) else window.width for curve in (self._horizons, self._least))
            most = max(most, window.overlap.floor)
            horizon = min(most, max(self._held, least, self.floor))
            horizon = horizon if self._held else min(horizon, context.full)  # a step is tried before its window slides
            if not arrivals.wait(horizon):
                return None
            effective = min(horizon, window.arrived)
            ended = window.complete and effective == window.arrived
            free = horizon < most and effective == horizon and not ended  # to be held
            lost = context.stalled(effective - self.schedule.hold)
            tap = AttentionTap(chosen_heads(context.model, None, ())) if horizon < most or window.slides else None
            if tap is not None and free and not lost:
                tap.unless = self._looks_ahead
            logits_V = yield RowRequest(context.next_ids(), effective, is_step=True, tap=tap)
            self.tried = max(self.tried, effective)
            if tap is not None and tap.needless():
                self._hold(horizon, most, num_rows)
                continue
            token = context.choose(logits_V, effective - self.schedule.hold)
            whole = window.complete and (effective == window.width or horizon > window.arrived)
            waits = (config.end_means_wait or window.slides) and token == config.framing.end
            seen = tap.most_attended() if tap is not None and window.slides else 0
            again = not waits and context.rewinds(token, tap)
            if ended and again:
                token, waits, again = config.framing.end, True, False  # what follows was written before
            if (waits or again) and not ended and lost:
                context.rows.cache.num_rows = num_rows
                window.begin_anew()
                return None
            if free and (waits or again or (lost and self._looks_ahead(tap))):
                self._hold(horizon, most, num_rows)
            elif not waits and (context.at_edge(seen) or (again and horizon >= context.full)):
                context.rows.cache.num_rows, self._resume = num_rows, window.width + 1
                context.rows.cost.withdrawn += 1
            elif whole or not (waits or again):
                self.floor, self._held = horizon, 0
                return Choice(token, horizon, effective, seen)
            else:
                self._put_off(place, horizon, effective, num_rows)

    def _hold(self, horizon: int, most: int, num_rows: int) -> None:
        """Withdraw the row; the step is tried again at the end of the next block."""
        self.context.rows.cache.num_rows, self._held = num_rows, self.context.input.next_try(horizon, most)
        self.context.rows.cost.withdrawn += 1

    def _looks_ahead(self, tap: AttentionTap | None) -> bool:
        """Whether the most attended source token is among the newest that a hold waits behind."""
        assert tap is not None
        attention_F = tap.mean()
        return int(attention_F.argmax()) >= attention_F.shape[0] - self.schedule.hold

    def _put_off(self, place: int, horizon: int, effective: int, num_rows: int) -> None:
        """Nothing to say yet: the row is withdrawn, and written again when it may read more."""
        self.context.rows.cache.num_rows, self._held = num_rows, 0
        more = self.context.input.next_try(effective, self.context.window.width) if self.schedule.hold else effective + 1
        self._resume, self.floor = max(more, effective + 1), max(self.floor, min(more, self.context.window.width))
        if horizon <= self.context.window.arrived:
            self.skipped += 1 + sum(h == horizon for h in self._horizons[place:])

    def turn(self, schedule: Schedule) -> None:
        """Within the window a predicted N̂ stays, and horizons never fall below the last one (Corollary 1, along the path taken)."""
        self.schedule = schedule
        if not self._paced and self.context.fixed_steps is None and self.context.model.length is not None:
            self._horizons, self._least = [], []  # nobody has asked for N̂ yet
        elif self._horizons and not schedule.learned:
            place = len(self.context.window.written) + self.skipped
            for curve, tail in zip((self._horizons, self._least), self._curves(schedule), strict=True):
                curve[place:] = np.maximum(tail[place:], self.floor).tolist()
            self.gamma = None

    def _predict(self) -> bool:
        """Fix the window's schedule, its γ where that is learned and N̂, from what their heads may read, once that has arrived."""
        context, window = self.context, self.context.window
        model, config = context.model, context.model.config
        schedule = self._settle()
        if schedule is None:
            return False
        buffer = self._buffer(schedule)
        first = int(schedule.at(1, source=window.width, steps=config.max_steps))
        # Under a hold that may last for the whole window N̂ says only when a step is first tried, so the fastest pace will do.
        unneeded = first < buffer if not schedule.needs_length else schedule.hold > 0 and first == window.width
        self._paced = context.fixed_steps is None and model.length is not None and not unneeded
        if not self._paced:  # a schedule without N̂ does not wait for one
            self.steps = context.fixed_steps or config.max_steps
        else:
            if not context.input.wait(buffer):
                return False
            predicted = model.predict_steps(window.arrived_TE, buffer, context.previous)
            self.steps = model.steps_of(predicted, window.width)
        self._horizons, self._least = (curve.tolist() for curve in self._curves(schedule))
        return True

    def _curves(self, schedule: Schedule) -> tuple[IntArray, IntArray]:
        """The largest and the least horizon of each step."""
        width, count = self.context.window.width, self.context.max_steps
        return schedule.horizons(width, self.steps, num_steps=count), schedule.least_horizons(width, self.steps, num_steps=count)

    def _buffer(self, schedule: Schedule) -> int:
        """Tokens that a head reads: fix pools the whole window and waits for it; inf reads the first B, at most what step 1 may."""
        config, width = self.context.model.config, self.context.window.width
        return width if config.length == "fix" else min(self.context.full, schedule.buffer(width, config.max_steps))

    def _settle(self) -> Schedule | None:
        """The window's schedule, or None while the gamma head must wait.

        Each γ is tried from the largest down, from the buffer that its own step 1 may read: the choice reads nothing beyond it.
        """
        if not self.schedule.learned:
            return self.schedule
        context, gammas = self.context, self.context.model.config.gammas
        price = cast("Learned", self.schedule).price
        while self.gamma is None:
            buffer, at = self._buffer(PowerLaw(gammas[self._gamma_index])), self._gamma_index
            if at and not context.input.wait(buffer):
                return None
            if not at or context.model.settles_for(at, context.window.arrived_TE, buffer, context.previous, price=price):
                self.gamma = gammas[at]
            else:
                self._gamma_index -= 1
        return PowerLaw(self.gamma)


class PolicyWriter:
    """Asks a policy each time a chunk of source has arrived, and writes what it says."""

    gamma: float | None = None
    skipped = tried = 0  # each row of a new window reads all that has arrived

    def __init__(self, context: WriterContext, policy: Policy) -> None:
        self.context, self.policy = context, policy
        self.steps, self.floor = context.max_steps, context.window.overlap.floor
        self._chunk = policy.chunk or context.input.block
        self._asked_at = min(max(self._chunk, context.window.arrived), context.window.width)
        self._state: Any = policy.start()
        self._view = WindowView(context.model, context.rows, self._choose, max_steps=context.max_steps)
        self._withheld: int | None = None  # a token that waits for the window to slide

    def next(self) -> Work:
        window = self.context.window
        while True:
            if not self.context.input.wait(self._asked_at, patient=False) or window.arrived == 0:
                return None
            self._view.arrived, self._view.complete = window.arrived, window.complete
            token, self._withheld = self._withheld, None
            if token is None:
                token = self.policy.decide(self._view, self._state)
            place = self._view.places[len(window.written)] if token is not None and window.slides else 0
            if token is not None and self.context.at_edge(place):
                self._withheld, self._asked_at = token, window.width + 1
            elif token is not None and not (window.slides and not window.complete and token == self._view.end):
                self.floor = window.arrived
                return Choice(token, window.arrived, window.arrived, place)
            else:
                assert not window.complete, f"{self.policy} waits for more of a window that is complete"
                self._asked_at = min(window.arrived + self._chunk, window.width + window.slides)
        yield  # a generator like the other writer's: a policy computes its own rows, each of which depends on the one before

    def _choose(self, logits_V: Tensor, text: Sequence[int]) -> int:
        return self.context.choose_after(logits_V, text, self.context.window.arrived)

    def turn(self, schedule: Schedule) -> None:
        raise AssertionError("a session refuses to turn a policy")
