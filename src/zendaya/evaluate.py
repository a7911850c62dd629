"""Evaluation: clips replayed through the one runtime as their source arrives, to traces, to scores."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor

import zendaya
from zendaya import corpora
from zendaya.encoders import Tokens
from zendaya.encoders.store import HEADER, FeatureStore
from zendaya.engine import Backend, Engine, Precision, engine_for, engine_name, is_native
from zendaya.errors import CheckpointError, ConfigError, CorpusError, SourceError, StoreError, ZendayaError
from zendaya.metrics.quality import Normalise, only_references, word_errors
from zendaya.metrics.results import Unfinished, check_free, scores_record, traces_digest, write_scores, write_traces
from zendaya.metrics.scores import Scores, score, wanted_metrics
from zendaya.model import WEIGHTS, Model
from zendaya.policies import Policy
from zendaya.pretrained import as_trained
from zendaya.records import Clip, Event, Scale, Trace
from zendaya.schedule import PowerLaw, Schedule
from zendaya.stream import Session
from zendaya.text import learned_text
from zendaya.training.state import RECIPE

LEAD = 4
"""Clips a worker may be ahead of the one that is waited for; their sources are held in memory."""

Source = Tokens | Tensor
"""The source tokens (F, E) of a clip, with their arrival times or without."""


_Job = tuple[Clip, npt.NDArray[Any], tuple[float, ...] | None]
"""A clip with its source and when each token of that arrived."""


class _Computing:
    """A clock of the source on which computing takes the time it takes: work begins when its source is there and what was begun is done."""

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer, self._from_s, self._began = timer, -math.inf, timer()

    def begin(self, at_s: float) -> None:
        """Turn to what has arrived at that moment."""
        self._from_s, self._began = max(at_s, self._from_s), self._timer()

    def end(self) -> None:
        """All of it is done."""
        self._from_s = self()

    def __call__(self) -> float:
        return self._from_s + self._timer() - self._began


@dataclass(frozen=True, kw_only=True)
class _Replay:
    """How clips are decoded; it goes to the workers."""

    schedule: Schedule | Policy
    scale: Scale
    window: int | None
    steps: int | None
    max_steps: int | None
    lower: bool
    timer: Callable[[], float] | None
    backend: Backend
    precision: Precision

    def engine(self, model: Model) -> Engine:
        """What computes in this process, on one thread."""
        return engine_for(model, self.backend, precision=self.precision, threads=1 if is_native(model, self.backend) else None)

    def run(self, model: Model, engine: Engine, stream: Sequence[_Job]) -> list[Trace]:
        """Push the source of consecutive clips token by token through one session, a cut between them, and note what had arrived at
        each step."""
        for clip, values_TE, _ in stream:
            if values_TE.shape[0] == 0:
                raise SourceError(f"clip {clip.id!r}: no source tokens")
        width = self._width(model, stream[0][1].shape[0])
        clock = None if self.timer is None else _Computing(self.timer)
        session = model.open(self.schedule, window=width, steps=self.steps, max_steps=self.max_steps, clock=clock, engine=engine)
        traces, begin_s = [], 0.0
        for number, (clip, values_TE, arrivals_s) in enumerate(stream):
            if number and arrivals_s is not None:
                begin_s = max(begin_s, clip.start_s - stream[0][0].start_s)
            try:
                traces.append(self._clip(model, session, clock, clip, values_TE, arrivals_s, begin_s, last=number + 1 == len(stream)))
            except SourceError as error:
                raise SourceError(f"clip {clip.id!r}: {error}") from None
            begin_s += arrivals_s[-1] if arrivals_s else 0.0
        return traces

    def _clip(
        self, model: Model, session: Session, clock: _Computing | None, clip: Clip, values_TE: npt.NDArray[Any],
        arrivals_s: tuple[float, ...] | None, begin_s: float, *, last: bool,
    ) -> Trace:  # fmt: skip
        events, arrived = list[Event](), list[int]()
        source_TE, num_source, before = torch.from_numpy(values_TE), len(values_TE), dataclasses.replace(session.cost)

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
            draw(partial(session.push, source_TE[count - 1 : count]), count)
        draw(session.finish if last else session.cut, num_source)
        texts, predicted = dict[int, str](), dict[int, int]()
        for event in events:
            texts[event.window] = texts.get(event.window, "") + event.text
            predicted[event.window] = event.predicted_steps
        first, tokenizer = min(predicted), model.tokenizer
        counted = [learned_text(text, self.lower) for text in clip.references]
        trace = Trace(
            clip=clip.id, split=clip.split, schedule=str(self.schedule), scale=self.scale, window=session.window,
            num_source_tokens=num_source, text=" ".join(" ".join(texts.values()).split()), references=clip.references,
            reference_steps=tuple(len(tokenizer.encode(text)) + 1 for text in counted) if tokenizer is not None else (),
            predicted_steps=tuple(predicted.values()), tokens=tuple(event.token for event in events),
            windows=tuple(event.window - first for event in events), horizons=tuple(event.horizon for event in events),
            effective_horizons=tuple(event.effective_horizon for event in events), arrived=tuple(arrived), arrivals_s=arrivals_s,
            decoder_rows=session.cost.rows - before.rows, revised=session.cost.revised - before.revised,
        )  # fmt: skip
        emissions_s = trace.delays_s if clock is None or arrivals_s is None else tuple(event.emission_s - begin_s for event in events)
        return dataclasses.replace(trace, emissions_s=emissions_s)

    def _width(self, model: Model, num_source: int) -> int | None:
        """The window of a clip; one that the decoder cannot hold is cut into windows as equal as can be."""
        if self.scale == "window":
            return self.window
        num_windows = -(-num_source // model.config.decoder.max_source)
        return -(-num_source // num_windows)


def evaluate(
    model: Model, clips: Iterable[tuple[Clip, Source]], schedule: Schedule | Policy, *, scale: Scale = "segment", window: int | None = None,
    steps: int | None = None, max_steps: int | None = None, lower: bool = False, timer: Callable[[], float] | None = None, workers: int = 1,
    backend: Backend = "auto", precision: Precision = "float32",
) -> list[Trace]:  # fmt: skip
    """Decode clips one by one as their source arrives, each in a session of its own; a trace a clip, in their order.

    Scale `segment` is the paper's protocol: a session's window is the clip's own F (a clip longer than the decoder's max_source is
    decoded in several windows); scale `window` is strictly causal, its W `window` or the model's. `steps` fixes N̂ instead of the
    length head, `max_steps` ends a text sooner. `lower` counts the steps of references as a run with that setting learned them.
    `timer`, say time.perf_counter, puts the time that decoding takes into the emissions. Each of `workers` processes has one thread, so
    their number changes nothing but the time. `backend` and `precision` are those of `zendaya.engine.engine_for`.
    """
    return list(
        evaluate_streams(
            model, ([one] for one in clips), schedule, scale=scale, window=window, steps=steps, max_steps=max_steps, lower=lower,
            timer=timer, workers=workers, backend=backend, precision=precision,
        )
    )  # fmt: skip


def evaluate_streams(
    model: Model, streams: Iterable[Sequence[tuple[Clip, Source]]], schedule: Schedule | Policy, *, scale: Scale, window: int | None = None,
    steps: int | None = None, max_steps: int | None = None, lower: bool = False, timer: Callable[[], float] | None = None, workers: int = 1,
    backend: Backend = "auto", precision: Precision = "float32",
) -> Iterator[Trace]:  # fmt: skip
    """Decode the consecutive clips of each stream in one session, so that each has the one before for its history; else as `evaluate`."""
    _check_options(scale, window, workers, timed=timer is not None)
    replay = _Replay(
        schedule=schedule, scale=scale, window=window, steps=steps, max_steps=max_steps, lower=lower, timer=timer, backend=backend,
        precision=precision,
    )  # fmt: skip
    jobs = ([(clip, *_arrays(source)) for clip, source in stream] for stream in streams)
    training = model.training
    model.eval()  # a model that is being trained drops features at random
    try:
        for traces in _in_processes(model, replay, jobs, workers) if workers > 1 else _here(model, replay, jobs):
            yield from traces
    finally:
        model.train(training)


def _arrays(source: Source) -> tuple[npt.NDArray[Any], tuple[float, ...] | None]:
    """A source as it goes to a worker: a tensor would go through shared memory, a file a clip."""
    values_TE = source.values_TE if isinstance(source, Tokens) else source
    arrivals_s = tuple(np.asarray(source.arrival_s, np.float64).tolist()) if isinstance(source, Tokens) else None
    return values_TE.detach().cpu().float().numpy(), arrivals_s


def _here(model: Model, replay: _Replay, jobs: Iterable[Sequence[_Job]]) -> Iterator[list[Trace]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers: sums on two threads are rounded otherwise than on one
    try:
        engine = replay.engine(model)
        for job in jobs:
            yield replay.run(model, engine, job)
    finally:
        torch.set_num_threads(before)


_worker: Callable[[Sequence[_Job]], list[Trace]]
"""What a worker process does with each job; its tasks have no other way to find its model and engine."""


def _begin_worker(model: Model, replay: _Replay) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the one that gave the work decides
    torch.set_num_threads(1)
    _worker = partial(replay.run, model, replay.engine(model))


def _work(job: Sequence[_Job]) -> list[Trace]:
    return _worker(job)


def _in_processes(model: Model, replay: _Replay, jobs: Iterable[Sequence[_Job]], workers: int) -> Iterator[list[Trace]]:
    context = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks
    with ProcessPoolExecutor(workers, context, _begin_worker, (model, replay)) as pool:
        waiting = deque[Future[list[Trace]]]()
        try:
            for job in jobs:
                waiting.append(pool.submit(_work, job))
                if len(waiting) >= LEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise ZendayaError("a worker ended by itself, perhaps for want of memory: run it again with fewer workers") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _check_options(scale: str, window: int | None, workers: int, *, timed: bool) -> None:
    if scale not in get_args(Scale):
        raise ConfigError(f"scale must be one of {', '.join(get_args(Scale))}: got {scale!r}")
    if scale == "segment" and window is not None:
        raise ConfigError(f"scale segment takes each clip's own length for its window: got window {window}; leave it out, or scale window")
    if workers < 1:
        raise ConfigError(f"workers must be at least 1: got {workers}")
    if timed and workers > 1:
        raise ConfigError(f"the time that decoding takes is measured with one worker: got {workers}")


# A whole corpus.


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found."""

    traces: tuple[Trace, ...]
    scores: tuple[Scores, ...]
    """A record a schedule."""
    num_left_out: int
    """Clips that the store could not encode, and so has no tokens of."""
    num_without_reference: int
    """Clips that have no reference to be scored against, and so were not decoded."""
    record: dict[str, Any]
    """What `scores.json` holds: the scores and their signature."""


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is."""

    done: int
    total: int
    schedule: str


def evaluate_corpus(
    checkpoint: str | Path, corpus: str, path: str | Path, *, store: str | Path | None = None, split: str = "test",
    schedules: Sequence[Schedule | Policy] = (PowerLaw(0.0),), scale: Scale = "segment", streaming: bool = False, window: int | None = None,
    steps: int | None = None, max_steps: int | None = None, metrics: Sequence[str] | None = None, normalise: Normalise = "english",
    computation_aware: bool = False, limit: int | None = None, workers: int = 1, backend: Backend = "auto",
    precision: Precision = "float32", out: str | Path | None = None, force: bool = False, discard: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> Evaluation:  # fmt: skip
    """Decode a split of a corpus from its stored features and score it; `out` gets traces.jsonl and scores.json.

    `streaming` decodes the consecutive clips of a stream in one session, at scale `window`, with arrivals and history as live; without it
    each clip has a session of its own. `computation_aware` times the decoding. `metrics` not given are those of the corpus's task: WER for
    transcription, BLEU for translation, BLEU without case, METEOR and CIDEr for captioning. `store` not given is the features/ of the
    checkpoint's run. `limit` takes the first clips only. `backend` and `precision` are those of `zendaya.engine.engine_for`. An evaluation
    that was interrupted goes on where it stopped; one that is finished is replaced by `force` alone, and an unfinished one that was of
    something else by `force` or `discard`.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 clip: got {limit}")
    schedules = [as_trained(one, checkpoint) for one in schedules]
    if not schedules or len({str(one) for one in schedules}) < len(schedules):
        raise ConfigError(f"give at least one schedule, each once: got {', '.join(map(str, schedules)) or 'none'}")
    _check_options(scale, window, workers, timed=computation_aware)
    if streaming and scale != "window":
        raise ConfigError(f"a stream is decoded at scale window, which knows no segment's length beforehand: got scale {scale!r}")
    names = wanted_metrics(_default_metrics(corpus) if metrics is None else metrics, normalise=normalise)
    folder = None if out is None else Path(out).expanduser()
    if folder is not None:
        check_free(folder, force=force)
    reading = corpora.read(corpus, path)
    wanted, num_without_reference = _wanted(reading, split, limit)
    features = FeatureStore.open(_store(checkpoint) if store is None else Path(store).expanduser(), corpus=corpus)
    if features.signature.data_digest != reading.digest:
        raise StoreError(f"{features.path}: encoded from other files than {path} holds now: give the same ones, or encode again")
    clips = _encoded(wanted, features)
    num_left_out = len(wanted) - len(clips)
    if "wer" in names:
        _check_words(clips, corpus, split, normalise)
    if computation_aware and features.signature.ids:
        raise ConfigError(f"{corpus}: a text has no clock that the time of decoding could be put on: leave out computation_aware")
    model, digest = _load(str(checkpoint))
    _check_fit(model, features, str(checkpoint), str(features.path))
    _check_opens(model, engine_for(model, backend, precision=precision), schedules, window=window, steps=steps, max_steps=max_steps)
    run = _run_of(checkpoint)
    signature: dict[str, Any] = {
        "version": zendaya.__version__, "checkpoint": str(checkpoint), "checkpoint_sha256": digest, "seed": run.seed, "lower": run.lower,
        "tokenizer_sha256": "" if model.tokenizer is None else hashlib.sha256(model.tokenizer.to_json().encode()).hexdigest(),
        "corpus": corpus, "data_sha256": reading.digest, "split": split, "limit": limit, "num_clips": len(clips),
        "num_left_out": num_left_out, "num_without_reference": num_without_reference, "store": features.signature.to_dict(),
        "store_sha256": json.loads((features.path / HEADER).read_bytes())["sha256"], "schedules": [str(one) for one in schedules],
        "scale": scale, "window": (window or model.config.window) if scale == "window" else None, "streaming": streaming, "steps": steps,
        "max_steps": max_steps, "clock": "computing" if computation_aware else "simulated", "metrics": list(names), "normalise": normalise,
        "engine": engine_name(model, backend, precision),
    }  # fmt: skip
    streams = _streams(reading, clips) if streaming else [[clip] for clip in clips]
    found = dict[tuple[str, str, str], Trace]()
    with contextlib.ExitStack() as stack:
        kept = None if folder is None else stack.enter_context(Unfinished(folder, signature, discard=force or discard))
        found |= {} if kept is None else kept.traces
        for schedule in schedules:
            rest = [stream for stream in streams if any((str(schedule), clip.split, clip.id) not in found for clip in stream)]
            done = len(clips) - sum(map(len, rest))
            sources = ([(clip, _source(features, clip)) for clip in stream] for stream in rest)
            if report is not None:
                report(Progress(done, len(clips), str(schedule)))
            for trace in evaluate_streams(
                model, sources, schedule, scale=scale, window=window, steps=steps,
                max_steps=max_steps, lower=run.lower, timer=time.perf_counter if computation_aware else None, workers=workers,
                backend=backend, precision=precision,
            ):  # fmt: skip
                found[trace.schedule, trace.split, trace.clip] = trace
                done += 1
                if kept is not None:
                    kept.add(trace)
                if report is not None:
                    report(Progress(done, len(clips), str(schedule)))
    traces = [found[str(schedule), clip.split, clip.id] for schedule in schedules for clip in clips]
    sha256 = traces_digest(traces) if folder is None else write_traces(folder, traces)  # before a score can fail
    try:
        scores = score(traces, metrics=names, normalise=normalise)
    except ZendayaError as error:
        if folder is None:
            raise
        raise ZendayaError(
            f"{error}; the traces are kept: zendaya score {folder} --metrics {','.join(names)} scores them, as do other metrics"
        ) from None
    record = scores_record(scores, signature, sha256)
    if folder is not None:
        write_scores(folder, record)
    return Evaluation(
        traces=tuple(traces), scores=scores, num_left_out=num_left_out, num_without_reference=num_without_reference, record=record
    )


@dataclass(frozen=True)
class _Run:
    """What a checkpoint's run says of it, where the checkpoint lies in the folder of one."""

    seed: int | None
    lower: bool


def _run_of(checkpoint: str | Path) -> _Run:
    try:
        recipe = json.loads((Path(checkpoint).expanduser().resolve().parent / RECIPE).read_bytes())["recipe"]
        return _Run(recipe["loop"]["seed"], bool(recipe.get("lower", False)))
    except (OSError, ValueError, KeyError, TypeError):
        return _Run(None, False)


def _store(checkpoint: str | Path) -> Path:
    """The features of the checkpoint's run."""
    store = Path(checkpoint).expanduser().parent / "features"
    if not store.is_dir():
        raise StoreError(f"{store}: there are no features beside the checkpoint: give the store that zendaya encode made (--store)")
    return store


def _streams(reading: corpora.Reading, clips: Sequence[Clip]) -> list[list[Clip]]:
    """Clips that follow each other in one stream without overlap, together and in the order of time."""
    wanted = {(clip.split, clip.id) for clip in clips}
    after = {(one.split, one.id): two for one, two in reading.pairs if {(one.split, one.id), (two.split, two.id)} <= wanted}
    later = {(clip.split, clip.id) for clip in after.values()}
    streams = []
    for clip in clips:
        if (clip.split, clip.id) not in later:
            stream = [clip]
            while following := after.get((stream[-1].split, stream[-1].id)):
                stream.append(following)
            streams.append(stream)
    return streams


def _source(features: FeatureStore, clip: Clip) -> Source:
    """The stored tokens of a clip; the clock of a text counts words, not seconds, and is left out."""
    tokens = features.get(clip.id, clip.split)
    return tokens.values_TE if features.signature.ids else tokens


def _default_metrics(corpus: str) -> tuple[str, ...]:
    task = corpora.get(corpus).task
    return ("wer",) if task.startswith("transcription") else ("bleu-lc", "meteor", "cider") if task.startswith("captioning") else ("bleu",)


def _wanted(reading: corpora.Reading, split: str, limit: int | None) -> tuple[list[Clip], int]:
    """The first clips of a split that have a source and a text, and how many there are among them that have no text."""
    wanted, num_textless = list[Clip](), 0
    for clip in reading.clips:
        if clip.split == split and len(wanted) != limit:
            num_textless += not clip.references
            wanted += [clip] if clip.usable else []
    if not wanted and num_textless:
        raise CorpusError(
            f"{reading.corpus.name}: none of the {num_textless} clips of split {split!r} has a reference to be scored against"
        )
    if not wanted:
        splits = ", ".join(sorted({clip.split for clip in reading.usable}))
        raise CorpusError(f"{reading.corpus.name}: no clip with a source and a text in split {split!r}; its splits are {splits}")
    return wanted, num_textless


def _check_words(clips: Sequence[Clip], corpus: str, split: str, normalise: Normalise) -> None:
    """Refuse references that a word error rate cannot take."""
    references = [clip.references for clip in clips]
    try:
        texts = only_references([clip.id for clip in clips], references)
        word_errors(texts, texts, normalise=normalise)
    except ZendayaError as error:
        raise CorpusError(f"{corpus}, split {split!r}: {error}") from None


def _encoded(wanted: Sequence[Clip], features: FeatureStore) -> list[Clip]:
    """Those that the store has tokens of; the others could not be encoded."""
    failed = {entry.key for entry in features.entries if entry.num_tokens == 0}
    clips = [clip for clip in wanted if (clip.split, clip.id) not in failed]
    for clip in clips:
        features.find(clip.id, clip.split)
    if not clips:
        raise StoreError(f"{features.path}: none of the {len(wanted)} clips of split {wanted[0].split!r} could be encoded")
    return clips


def _load(checkpoint: str) -> tuple[Model, str]:
    """The model, and the sha256 its checkpoint carries."""
    before = _checkpoint_digest(checkpoint)
    model = Model.from_pretrained(checkpoint)
    digest = _checkpoint_digest(checkpoint)
    if before and before != digest:
        raise CheckpointError(f"{checkpoint}: another model was saved there while it was read: run it again")
    return model, digest


def _checkpoint_digest(checkpoint: str) -> str:
    """The checksum in a weights file, which loading verifies; empty where there is none to read yet."""
    with contextlib.suppress(Exception):  # whatever is wrong with it, loading says in words
        path = Path(checkpoint) / WEIGHTS if Path(checkpoint).is_dir() else try_to_load_from_cache(checkpoint, WEIGHTS)
        with safe_open(str(path), "pt") as file:
            return str((file.metadata() or {}).get("sha256", ""))
    return ""


def _check_opens(
    model: Model, engine: Engine, schedules: Sequence[Schedule | Policy], *, window: int | None, steps: int | None, max_steps: int | None
) -> None:
    """Open a session a schedule and drop it: what cannot be had is said before anything is written."""
    for schedule in schedules:
        model.open(schedule, window=window, steps=steps, max_steps=max_steps, engine=engine)


def _check_fit(model: Model, features: FeatureStore, checkpoint: str, store: str) -> None:
    config, signature = model.config.decoder, features.signature
    if bool(config.source_vocab) != signature.ids:
        reads, holds = ("ids", "features") if config.source_vocab else ("features", "ids")
        raise ConfigError(f"{checkpoint} reads {reads}, {store} holds {holds}: they do not fit")
    if config.source_dim != signature.dim:
        raise ConfigError(f"{checkpoint} reads {config.source_dim} features a token, {store} holds {signature.dim}: they do not fit")
