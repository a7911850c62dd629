"""Evaluation: clips replayed through the one runtime as their source arrives, to traces, to scores."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
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
from zendaya.errors import CheckpointError, ConfigError, CorpusError, SourceError, StoreError, ZendayaError
from zendaya.metrics.quality import Normalise, check_metrics
from zendaya.metrics.results import scores_record, traces_digest, write_scores, write_traces
from zendaya.metrics.scores import Scores, score
from zendaya.model import WEIGHTS, Model
from zendaya.policies import Policy
from zendaya.records import Clip, Scale, Trace
from zendaya.schedule import PowerLaw, Schedule

LEAD = 4
"""Clips a worker may be ahead of the one that is waited for; their sources are held in memory."""

Source = Tokens | Tensor
"""The source tokens (F, E) of a clip, with their arrival times or without."""


@dataclass(frozen=True, kw_only=True)
class _Replay:
    """How clips are decoded; it goes to the workers."""

    schedule: Schedule | Policy
    scale: Scale
    window: int | None
    steps: int | None
    max_steps: int | None

    def run(self, model: Model, clip: Clip, values_TE: npt.NDArray[Any], arrivals_s: tuple[float, ...] | None) -> Trace:
        """Push the clip's source token by token and note what had arrived at each step."""
        num_source = values_TE.shape[0]
        if num_source == 0:
            raise SourceError(f"clip {clip.id!r}: no source tokens")
        session = model.open(self.schedule, window=self._width(model, num_source), steps=self.steps, max_steps=self.max_steps)
        source_TE = torch.from_numpy(values_TE)
        events, arrived = [], []
        try:
            for count in range(1, num_source + 1):
                for event in session.push(source_TE[count - 1 : count]):
                    events.append(event)
                    arrived.append(count)
            for event in session.finish():
                events.append(event)
                arrived.append(num_source)
        except SourceError as error:
            raise SourceError(f"clip {clip.id!r}: {error}") from None
        texts, predicted = dict[int, str](), dict[int, int]()
        for event in events:
            texts[event.window] = texts.get(event.window, "") + event.text
            predicted[event.window] = event.predicted_steps
        tokenizer = model.tokenizer
        return Trace(
            clip=clip.id, split=clip.split, schedule=str(self.schedule), scale=self.scale, window=session.window,
            num_source_tokens=num_source, text=" ".join(" ".join(texts.values()).split()), references=clip.references,
            reference_steps=tuple(len(tokenizer.encode(text)) + 1 for text in clip.references) if tokenizer is not None else (),
            predicted_steps=tuple(predicted.values()), tokens=tuple(event.token for event in events),
            windows=tuple(event.window for event in events), horizons=tuple(event.horizon for event in events),
            effective_horizons=tuple(event.effective_horizon for event in events), arrived=tuple(arrived), arrivals_s=arrivals_s,
            decoder_rows=session.cost.rows, revised=session.cost.revised,
        )  # fmt: skip

    def _width(self, model: Model, num_source: int) -> int | None:
        """The window of a clip; one that the decoder cannot hold is cut into windows as equal as can be."""
        if self.scale == "window":
            return self.window
        num_windows = -(-num_source // model.config.decoder.max_source)
        return -(-num_source // num_windows)


def evaluate(
    model: Model, clips: Iterable[tuple[Clip, Source]], schedule: Schedule | Policy, *, scale: Scale = "segment", window: int | None = None,
    steps: int | None = None, max_steps: int | None = None, workers: int = 1, report: Callable[[int], None] | None = None,
) -> list[Trace]:  # fmt: skip
    """Decode clips one by one as their source arrives; what was written and read, a trace a clip, in their order.

    Scale `segment` is the paper's protocol: a session's window is the clip's own F (a clip longer than the decoder's max_source is
    decoded in several windows); scale `window` is strictly causal, its W `window` or the model's. `steps` fixes N̂ instead of the
    length head, `max_steps` ends a text sooner. Each of `workers` processes has one thread, so their number changes nothing but the
    time. `report` is told how many clips are done.
    """
    if scale not in get_args(Scale):
        raise ConfigError(f"scale must be one of {', '.join(get_args(Scale))}: got {scale!r}")
    if scale == "segment" and window is not None:
        raise ConfigError(f"scale segment takes each clip's own length for its window: got window {window}; leave it out, or scale window")
    if workers < 1:
        raise ConfigError(f"workers must be at least 1: got {workers}")
    replay = _Replay(schedule=schedule, scale=scale, window=window, steps=steps, max_steps=max_steps)
    jobs = ((clip, *_arrays(source)) for clip, source in clips)
    traces = []
    training = model.training
    model.eval()  # a model that is being trained drops features at random
    try:
        for trace in _in_processes(model, replay, jobs, workers) if workers > 1 else _here(model, replay, jobs):
            traces.append(trace)
            if report is not None:
                report(len(traces))
    finally:
        model.train(training)
    return traces


_Job = tuple[Clip, npt.NDArray[Any], tuple[float, ...] | None]


def _arrays(source: Source) -> tuple[npt.NDArray[Any], tuple[float, ...] | None]:
    """A source as it goes to a worker: a tensor would go through shared memory, a file a clip."""
    values_TE = source.values_TE if isinstance(source, Tokens) else source
    arrivals_s = tuple(np.asarray(source.arrival_s, np.float64).tolist()) if isinstance(source, Tokens) else None
    return values_TE.detach().cpu().float().numpy(), arrivals_s


def _here(model: Model, replay: _Replay, jobs: Iterable[_Job]) -> Iterator[Trace]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers: sums on two threads are rounded otherwise than on one
    try:
        for job in jobs:
            yield replay.run(model, *job)
    finally:
        torch.set_num_threads(before)


_worker_model: Model
"""The model of a worker process, whose tasks have no other way to find it."""


def _begin_worker(model: Model) -> None:
    global _worker_model
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the one that gave the work decides
    torch.set_num_threads(1)
    _worker_model = model


def _work(replay: _Replay, job: _Job) -> Trace:
    return replay.run(_worker_model, *job)


def _in_processes(model: Model, replay: _Replay, jobs: Iterable[_Job], workers: int) -> Iterator[Trace]:
    context = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks
    with ProcessPoolExecutor(workers, context, _begin_worker, (model,)) as pool:
        waiting = deque[Future[Trace]]()
        try:
            for job in jobs:
                waiting.append(pool.submit(_work, replay, job))
                if len(waiting) >= LEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise ZendayaError("a worker ended by itself, perhaps for want of memory: run it again with fewer workers") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


# A whole corpus.


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found."""

    traces: tuple[Trace, ...]
    scores: tuple[Scores, ...]
    """A record a schedule."""
    num_left_out: int
    """Clips that the store could not encode, and so has no tokens of."""
    record: dict[str, Any]
    """What `scores.json` holds: the scores and their signature."""


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is."""

    done: int
    total: int
    schedule: str


def evaluate_corpus(
    checkpoint: str | Path, corpus: str, path: str | Path, *, store: str | Path, split: str = "test",
    schedules: Sequence[Schedule | Policy] = (PowerLaw(0.0),), scale: Scale = "segment", window: int | None = None,
    steps: int | None = None, max_steps: int | None = None, metrics: Sequence[str] | None = None, normalise: Normalise = "english",
    limit: int | None = None, workers: int = 1, out: str | Path | None = None, report: Callable[[Progress], None] | None = None,
) -> Evaluation:  # fmt: skip
    """Decode a split of a corpus from its stored features and score it; `out` gets traces.jsonl and scores.json after each schedule.

    `metrics` not given are those of the corpus's task: WER for transcription, BLEU for translation, BLEU without case and METEOR for
    captioning. `limit` takes the first clips only.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 clip: got {limit}")
    if not schedules or len({str(one) for one in schedules}) < len(schedules):
        raise ConfigError(f"give at least one schedule, each once: got {', '.join(map(str, schedules)) or 'none'}")
    names = _default_metrics(corpus) if metrics is None else tuple(metrics)
    check_metrics(names, normalise=normalise)
    reading = corpora.read(corpus, path)
    features = FeatureStore.open(Path(store).expanduser(), corpus=corpus)
    if features.signature.data_digest != reading.digest:
        raise StoreError(f"{store}: encoded from other files than {path} holds now: give the same ones, or encode again")
    clips, num_left_out = _clips(reading, features, split, limit)
    model, digest = _load(str(checkpoint))
    _check_fit(model, features, str(checkpoint), str(store))
    folder = None if out is None else Path(out).expanduser()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    signature: dict[str, Any] = {
        "version": zendaya.__version__, "checkpoint": str(checkpoint), "checkpoint_sha256": digest, "corpus": corpus,
        "data_sha256": reading.digest, "split": split, "limit": limit, "num_clips": len(clips), "num_left_out": num_left_out,
        "store": features.signature.to_dict(), "store_sha256": json.loads((features.path / HEADER).read_bytes())["sha256"],
        "scale": scale, "window": (window or model.config.window) if scale == "window" else None, "steps": steps, "max_steps": max_steps,
        "clock": "simulated", "metrics": list(names), "normalise": normalise,
    }  # fmt: skip
    traces, scores = list[Trace](), list[Scores]()
    record: dict[str, Any] = {}
    for schedule in schedules:
        told = partial(_tell, report, len(clips), str(schedule)) if report is not None else None
        sources = ((clip, _source(features, clip)) for clip in clips)
        found = evaluate(
            model, sources, schedule, scale=scale, window=window, steps=steps, max_steps=max_steps, workers=workers, report=told
        )
        traces += found
        sha256 = traces_digest(traces) if folder is None else write_traces(folder, traces)  # before a score can fail
        scores += score(found, metrics=names, normalise=normalise)
        record = scores_record(scores, signature, sha256)
        if folder is not None:
            write_scores(folder, record)
    return Evaluation(traces=tuple(traces), scores=tuple(scores), num_left_out=num_left_out, record=record)


def _tell(report: Callable[[Progress], None], total: int, schedule: str, done: int) -> None:
    report(Progress(done, total, schedule))


def _source(features: FeatureStore, clip: Clip) -> Source:
    """The stored tokens of a clip; the clock of a text counts words, not seconds, and is left out."""
    tokens = features.get(clip.id, clip.split)
    return tokens.values_TE if features.signature.ids else tokens


def _default_metrics(corpus: str) -> tuple[str, ...]:
    task = corpora.get(corpus).task
    return ("wer",) if task.startswith("transcription") else ("bleu-lc", "meteor") if task.startswith("captioning") else ("bleu",)


def _clips(reading: corpora.Reading, features: FeatureStore, split: str, limit: int | None) -> tuple[list[Clip], int]:
    """The clips to decode, and how many have no tokens because they could not be encoded."""
    wanted = [clip for clip in reading.usable if clip.split == split][:limit]
    if not wanted:
        splits = ", ".join(sorted({clip.split for clip in reading.usable}))
        raise CorpusError(f"{reading.corpus.name}: no clip with a source and a text in split {split!r}; its splits are {splits}")
    failed = {entry.key for entry in features.entries if entry.num_tokens == 0}
    clips = [clip for clip in wanted if (clip.split, clip.id) not in failed]
    for clip in clips:
        features.find(clip.id, clip.split)
    if not clips:
        raise StoreError(f"{features.path}: none of the {len(wanted)} clips of split {split!r} could be encoded")
    return clips, len(wanted) - len(clips)


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


def _check_fit(model: Model, features: FeatureStore, checkpoint: str, store: str) -> None:
    config, signature = model.config.decoder, features.signature
    if bool(config.source_vocab) != signature.ids:
        reads, holds = ("ids", "features") if config.source_vocab else ("features", "ids")
        raise ConfigError(f"{checkpoint} reads {reads}, {store} holds {holds}: they do not fit")
    if config.source_dim != signature.dim:
        raise ConfigError(f"{checkpoint} reads {config.source_dim} features a token, {store} holds {signature.dim}: they do not fit")
