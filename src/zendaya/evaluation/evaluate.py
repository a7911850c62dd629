"""Evaluation: clips replayed through the one runtime as their source arrives, to traces, to scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zendaya.encoders.base import Tokens
from zendaya.errors import SourceError
from zendaya.evaluation.options import check_replay
from zendaya.nn.model import Model
from zendaya.nn.tokenizer import learned_text
from zendaya.parallel import Executor, Workers
from zendaya.records import Clip, Event, Scale, Trace
from zendaya.runtime.engine import Engine, engine_for, is_native
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.pipeline import Pipeline
from zendaya.runtime.policies.base import Cost, Policy
from zendaya.runtime.session import Session
from zendaya.schedule import Schedule

Source = Tokens | Tensor
"""The source tokens (F, E) of a clip, with their arrival times or without."""
_Job = tuple[Clip, npt.NDArray[Any], tuple[float, ...] | None]
"""A clip, its source tokens and their arrival times."""


class ComputationClock:
    """The computation-aware clock: work begins when its source has arrived and earlier work is done; its time is measured."""

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer, self._from_s, self._began = timer, -math.inf, timer()

    def begin(self, at_s: float) -> None:
        """Begin the work on a source that arrived at that time."""
        self._from_s, self._began = max(at_s, self._from_s), self._timer()

    def end(self) -> None:
        """End that work."""
        self._from_s = self()

    def __call__(self) -> float:
        return self._from_s + self._timer() - self._began


@dataclass(frozen=True, kw_only=True)
class ClipDecoder:
    """How clips are decoded to traces; it is sent to the workers."""

    options: DecodeOptions
    scale: Scale
    lower: bool
    timer: Callable[[], float] | None

    def run(self, model: Model, engine: Engine, stream: Sequence[_Job]) -> list[Trace]:
        """Push the source of consecutive clips token by token through one session, with a cut between clips."""
        for clip, values_TE, _ in stream:
            if values_TE.shape[0] == 0:
                raise SourceError(f"clip {clip.id!r}: no source tokens")
        options = dataclasses.replace(self.options, window_tokens=self._width(model, stream[0][1].shape[0]))
        clock = None if self.timer is None else ComputationClock(self.timer)
        pipeline = Pipeline(Session(model, options, clock=clock, engine=engine))
        traces, begin_s = [], 0.0
        for number, (clip, values_TE, arrivals_s) in enumerate(stream):
            if number and arrivals_s is not None:
                begin_s = max(begin_s, clip.start_s - stream[0][0].start_s)
            try:
                traces.append(self._clip(pipeline, clock, (clip, values_TE, arrivals_s), begin_s, last=number + 1 == len(stream)))
            except SourceError as error:
                raise SourceError(f"clip {clip.id!r}: {error}") from None
            begin_s += arrivals_s[-1] if arrivals_s else 0.0
        return traces

    def _clip(self, pipeline: Pipeline, clock: ComputationClock | None, job: _Job, begin_s: float, *, last: bool) -> Trace:
        _, values_TE, arrivals_s = job
        events, arrived = list[Event](), list[int]()
        source_TE, num_source, before = torch.from_numpy(values_TE), len(values_TE), dataclasses.replace(pipeline.session.cost)

        def draw(put: Callable[[float], Iterator[Event]], count: int) -> None:
            at_s = begin_s + (arrivals_s[count - 1] if arrivals_s is not None else 0.0)
            if clock is not None:
                clock.begin(at_s)
            for event in put(at_s):
                events.append(event)
                arrived.append(count)
            if clock is not None:
                clock.end()

        for count in range(1, num_source + 1):
            draw(partial(pipeline.push, source_TE[count - 1 : count]), count)
        draw(pipeline.finish if last else pipeline.cut, num_source)
        trace = self._trace(pipeline.session, job, events, arrived, before)
        emissions_s = trace.delays_s if clock is None or arrivals_s is None else tuple(event.emission_s - begin_s for event in events)
        return dataclasses.replace(trace, emissions_s=emissions_s)

    def _trace(self, session: Session, job: _Job, events: list[Event], arrived: list[int], before: Cost) -> Trace:
        clip, values_TE, arrivals_s = job
        texts, predicted = dict[int, str](), dict[int, int]()
        for event in events:
            texts[event.window_index] = texts.get(event.window_index, "") + event.text
            predicted[event.window_index] = event.predicted_steps
        first, tokenizer = min(predicted), session.model.tokenizer
        counted = [learned_text(text, self.lower) for text in clip.references]
        return Trace(
            clip=clip.id, split=clip.split, schedule=str(self.options.schedule), scale=self.scale, window_tokens=session.window_tokens,
            num_source_tokens=len(values_TE), text=" ".join(" ".join(texts.values()).split()), references=clip.references,
            reference_steps=tuple(len(tokenizer.encode(text)) + 1 for text in counted) if tokenizer is not None else (),
            predicted_steps=tuple(predicted.values()), tokens=tuple(event.token for event in events),
            windows=tuple(event.window_index - first for event in events), horizons=tuple(event.horizon for event in events),
            effective_horizons=tuple(event.effective_horizon for event in events), arrived=tuple(arrived), arrivals_s=arrivals_s,
            decoder_rows=session.cost.rows - before.rows, revised=session.cost.revised - before.revised,
        )  # fmt: skip

    def _width(self, model: Model, num_source: int) -> int | None:
        """The window of a clip; a clip longer than the decoder's max_source is cut into windows as equal as possible."""
        if self.scale == "window":
            return self.options.window_tokens
        num_windows = -(-num_source // model.config.decoder.max_source)
        return -(-num_source // num_windows)


def evaluate(
    model: Model, clips: Iterable[tuple[Clip, Source]], options: Schedule | Policy | DecodeOptions, *, scale: Scale = "segment",
    lower: bool = False, timer: Callable[[], float] | None = None, workers: int = 1,
) -> list[Trace]:  # fmt: skip
    """Decode clips one by one as their source arrives, each in a session of its own; one trace per clip, in order.

    Scale `segment` is the paper's protocol: a session's window is the clip's own F (a clip longer than the decoder's max_source is
    decoded in several windows); scale `window` is strictly causal, its W `window_tokens` or the model's. `lower` counts the steps of
    references as a run with that setting learned them. `timer`, for example time.perf_counter, adds the decoding time to the
    emissions. Each of `workers` processes has one thread, so their number changes nothing but the time.
    """
    return list(evaluate_streams(model, ([one] for one in clips), options, scale=scale, lower=lower, timer=timer, workers=workers))


def evaluate_streams(
    model: Model, streams: Iterable[Sequence[tuple[Clip, Source]]], options: Schedule | Policy | DecodeOptions, *, scale: Scale,
    lower: bool = False, timer: Callable[[], float] | None = None, workers: int = 1,
) -> Iterator[Trace]:  # fmt: skip
    """Decode the consecutive clips of each stream in one session, so that each has the one before as history; else as `evaluate`."""
    options = options if isinstance(options, DecodeOptions) else DecodeOptions(schedule=options)
    check_replay(scale, options.window_tokens, workers, timed=timer is not None)
    decoder = ClipDecoder(options=options, scale=scale, lower=lower, timer=timer)
    jobs = ([(clip, *_arrays(source)) for clip, source in stream] for stream in streams)
    training = model.training
    model.eval()  # a model that is being trained drops features at random
    try:
        with Executor(partial(_setup, model, decoder), Workers(workers)) as executor:
            for traces in executor.map(jobs):
                yield from traces
    finally:
        model.train(training)


def _arrays(source: Source) -> tuple[npt.NDArray[Any], tuple[float, ...] | None]:
    """A source as arrays, for a worker: tensors would go through shared memory, one file per clip."""
    values_TE = source.values_TE if isinstance(source, Tokens) else source
    arrivals_s = tuple(np.asarray(source.arrival_s, np.float64).tolist()) if isinstance(source, Tokens) else None
    return values_TE.detach().cpu().float().numpy(), arrivals_s


def _setup(model: Model, decoder: ClipDecoder) -> Callable[[Sequence[_Job], object], list[Trace]]:
    """The work of one worker, with a model and an engine of its own."""
    backend, precision = decoder.options.engine, decoder.options.precision
    engine = engine_for(model, backend, precision=precision, threads=1 if is_native(model, backend) else None)
    return lambda stream, _: decoder.run(model, engine, stream)
