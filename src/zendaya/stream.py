"""The live runtime: source tokens go in as they arrive, append-only events come out (Algorithm 2, method.md §4–5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zendaya.decoder import Cache
from zendaya.errors import ConfigError, SourceError
from zendaya.records import Event
from zendaya.schedule import Learned, PowerLaw, Schedule

if TYPE_CHECKING:
    from zendaya.model import Model

SourceTokens = Tensor | npt.NDArray[np.floating[Any]] | Sequence[Sequence[float]]


class Session:
    """One stream being decoded, window after window; it holds at most two windows of source and one sentence of history.

    A step is decoded once its horizon has arrived; after `finish` it is decoded from what there is. What is written
    depends on the arrivals alone, not on how they were cut into pushes.
    """

    def __init__(
        self, model: Model, schedule: Schedule, *, window: int | None = None, steps: int | None = None, max_steps: int | None = None
    ) -> None:
        config = model.config
        self.model, self.schedule = model, schedule
        self.window = config.window if window is None else window
        if not 1 <= self.window <= config.decoder.max_source:
            raise ConfigError(f"window must lie in 1 … {config.decoder.max_source} source tokens for this model: got {window}")
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None and not 1 <= value <= config.max_steps:
                raise ConfigError(f"{name} must lie in 1 … {config.max_steps} for this model: got {value}")
        if steps is None and model.length is None and schedule.needs_length:
            raise ConfigError(f"the schedule {schedule} needs a predicted length, and this model has no length head: give steps")
        if isinstance(schedule, Learned) and model.dial is None:
            raise ConfigError("this model has no dial head to choose a gamma: train one with `zendaya learn-gamma`, or give one gamma")
        self._fixed_steps, self._max_steps = steps, max_steps or config.max_steps
        weight = model.decoder.tokens.weight
        self._tokens_TE = weight.new_zeros(0, config.decoder.source_dim)
        self._ended = False
        self._window_index = 0
        self._previous: tuple[Tensor, list[int]] | None = None
        self._cache: Cache = model.decoder.start()
        self._begin_window()

    def push(self, tokens: SourceTokens) -> Iterator[Event]:
        """Take source tokens (T, E) that have just arrived; the events they allow are decoded as the iterator is drawn."""
        if self._ended:
            raise SourceError("the stream was finished: open a new session for more source")
        dim = self._tokens_TE.shape[1]
        arrived_TE = torch.as_tensor(tokens).to(self._tokens_TE)
        if arrived_TE.ndim != 2 or arrived_TE.shape[1] != dim:
            raise SourceError(f"source tokens must have shape (any, {dim}): got {tuple(arrived_TE.shape)}")
        self._tokens_TE = torch.cat([self._tokens_TE, arrived_TE])
        return self._decode()

    def finish(self) -> Iterator[Event]:
        """The source has ended: nothing is waited for any more."""
        self._ended = True
        return self._decode()

    def _begin_window(self) -> None:
        self._written = list[int]()
        self._closed = False
        self._steps, self._horizons, self._pauses = 0, list[int](), 0
        self._gamma: float | None = None
        self._place = len(self.model.config.gammas) - 1
        self._add_text = self.model.tokenizer.stream() if self.model.tokenizer is not None else lambda token: f"⟨{token}⟩"

    def _decode(self) -> Iterator[Event]:
        while True:
            with torch.inference_mode():
                event = None if self._closed and not self._next_window() else self._write_step()
            if event is None:
                return
            yield event

    def _has(self, needed: int) -> bool:
        """Whether that many tokens of the window have arrived, or never will."""
        return self._ended or self._tokens_TE.shape[0] >= needed

    def _window_tokens(self) -> Tensor:
        """Tokens of the current window that have arrived: A_k of them."""
        return self._tokens_TE[: self.window]

    def _write_step(self) -> Event | None:
        """The next step of the window, or None while it must wait."""
        arrived = self._window_tokens().shape[0]
        if arrived == 0 or (not self._horizons and not self._predict()):
            return None
        step = len(self._written) + 1
        num_rows = self._cache.num_rows
        while True:
            place = step + self._pauses
            horizon = self._horizons[place - 1] if place <= len(self._horizons) else self.window
            if not self._has(horizon):
                return None
            effective = min(horizon, arrived)
            token = self._choose(self._logits(effective), step)
            early = effective < self.window and horizon <= arrived
            if not (self.model.config.pauses and token == self.model.config.framing.end and early):
                break
            # Nothing more to say yet: the row is written again when the schedule lets it read more.
            self._cache.num_rows = num_rows
            self._pauses += 1 + sum(h == horizon for h in self._horizons[place:])
        self._closed = token == self.model.config.framing.end or step == self._max_steps
        self._written.append(token)
        return Event(
            window=self._window_index, step=step, token=token, text=self._add_text(token), horizon=horizon,
            effective_horizon=effective, predicted_steps=self._steps, last=self._closed,
            gamma=self._gamma, pauses=self._pauses,
        )  # fmt: skip

    def _predict(self) -> bool:
        """Fix the window's schedule: its γ, if that is learned, and N̂_k, from what their heads may read, once that has arrived."""
        config = self.model.config
        schedule = self._settle()
        if schedule is None:
            return False
        if self._fixed_steps is not None or self.model.length is None:
            self._steps = self._fixed_steps or config.max_steps
        else:
            buffer = self._buffer(schedule)
            if not self._has(buffer):
                return False
            predicted = self.model.predict_steps(self._window_tokens(), buffer, self._previous)
            # A head that counts for whole windows counts for the config's; another width holds more or less at the same pace.
            scaled = round(predicted * self.window / config.window) if config.pace else predicted
            self._steps = max(1, min(config.max_steps, scaled))
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
        if not isinstance(self.schedule, Learned):
            return self.schedule
        gammas = self.model.config.gammas
        while self._gamma is None:
            schedule = PowerLaw(gammas[self._place])
            buffer = self._buffer(schedule)
            if self._place and not self._has(buffer):
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
        decoder = self.model.decoder
        if horizon > self._cache.num_source:
            decoder.read(self._cache, self._tokens_TE[None, self._cache.num_source : horizon])
        if not self._written:
            logits_1V = decoder.prefill(self._cache, self._ids([self.model.config.framing.prompt]), horizon)
        else:
            logits_1V = decoder.step(self._cache, self._ids(self._written[-1:]), horizon)
        if not bool(torch.isfinite(logits_1V).all()):
            raise SourceError(
                f"window {self._window_index}: a source token among the first {horizon} is not finite or no known id; check the encoder"
            )
        return logits_1V[0]

    def _ids(self, ids: Sequence[Any]) -> Tensor:
        return torch.tensor(ids, device=self._tokens_TE.device)

    def _choose(self, logits_V: Tensor, step: int) -> int:
        """Greedy choice among the tokens that may be written; where the end is a pause too, it must be likelier than all words together."""
        framing = self.model.config.framing
        banned = [*framing.suppress, *framing.suppress_first] if step == 1 else [*framing.suppress]
        logits_V = logits_V.clone()
        logits_V[banned] = -torch.inf
        if self.model.config.pauses and float(logits_V.softmax(-1)[framing.end]) < 0.5:
            logits_V[framing.end] = -torch.inf
        return int(logits_V.argmax())

    def _next_window(self) -> bool:
        """Move on once the whole window has arrived; its text becomes history, read from its own source (method.md §4)."""
        if not self._has(self.window):
            return False
        window_TE = self._window_tokens()
        decoder, framing = self.model.decoder, self.model.config.framing
        if self.model.config.history:
            if not bool(torch.isfinite(window_TE).all()):
                raise SourceError(f"window {self._window_index}: it holds a source token that is not finite; check the encoder")
            text = [token for token in self._written if token != framing.end]
            self._previous = (window_TE, text)
            decoder.read(self._cache, window_TE[None, self._cache.num_source :])
            self._cache.forget_text()
            decoder.prefill(self._cache, self._ids([[framing.previous, *text]]), window_TE.shape[0])
            self._cache.forget_source()
        else:
            self._cache = decoder.start()
        self._tokens_TE = self._tokens_TE[self.window :].clone()
        self._window_index += 1
        self._begin_window()
        return True
