"""A corpus evaluated: read, decoded, scored and written, in steps that can be interrupted and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open

import zendaya
from zendaya.data.corpora import registry as corpora
from zendaya.data.corpora.base import Reading
from zendaya.data.features.store import HEADER, FeatureStore
from zendaya.errors import CheckpointError, ConfigError, CorpusError, StoreError, ZendayaError
from zendaya.evaluation.evaluate import Source, evaluate_streams
from zendaya.evaluation.metrics.quality import Normalise, only_references, word_errors
from zendaya.evaluation.metrics.results import UnfinishedTraces, check_free, scores_record, write_scores, write_traces
from zendaya.evaluation.metrics.scores import Scores, score, wanted_metrics
from zendaya.evaluation.options import EvalOptions
from zendaya.nn.checkpoint import WEIGHTS, RunRecord, read_run_record
from zendaya.nn.model import Model
from zendaya.records import Clip, Progress, Trace
from zendaya.runtime.engine import engine_for, engine_name
from zendaya.runtime.loading import as_trained
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.policies import Policy
from zendaya.runtime.session import Session
from zendaya.schedule import Schedule

Report = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of an evaluation."""

    traces: tuple[Trace, ...]
    scores: tuple[Scores, ...]
    """One record per schedule."""
    num_left_out: int
    """Clips not decoded, because the store could not encode them."""
    num_without_reference: int
    """Clips not decoded, because they have no reference."""
    record: dict[str, Any]
    """The content of `scores.json`: the scores and their signature."""


@dataclass(frozen=True, kw_only=True)
class _Selection:
    """The clips to decode, with their stored features."""

    reading: Reading
    features: FeatureStore
    clips: list[Clip]
    num_left_out: int
    num_without_reference: int

    @property
    def streams(self) -> list[list[Clip]]:
        """Consecutive clips of one stream that do not overlap, together and in order of time."""
        wanted = {(clip.split, clip.id) for clip in self.clips}
        after = {(one.split, one.id): two for one, two in self.reading.pairs if {(one.split, one.id), (two.split, two.id)} <= wanted}
        later = {(clip.split, clip.id) for clip in after.values()}
        streams = []
        for clip in self.clips:
            if (clip.split, clip.id) not in later:
                stream = [clip]
                while following := after.get((stream[-1].split, stream[-1].id)):
                    stream.append(following)
                streams.append(stream)
        return streams

    def source(self, clip: Clip) -> Source:
        """The stored tokens of a clip; those of a text have no arrival times."""
        tokens = self.features.get(clip.id, clip.split)
        return tokens.values_TE if self.features.signature.ids else tokens


def evaluate_corpus(
    checkpoint: str | Path, corpus: str, path: str | Path, options: EvalOptions | None = None, report: Report = lambda _: None
) -> Evaluation:
    """Decode a split of a corpus from its stored features and score it; `options.out` gets traces.jsonl and scores.json.

    An interrupted evaluation resumes where it stopped. Finished results are replaced only by `force`; unfinished results of another
    evaluation by `force` or `discard`.
    """
    options = _resolved(options or EvalOptions(), checkpoint, corpus)
    if options.out is not None:
        check_free(Path(options.out), force=options.force)
    selection = _select(checkpoint, corpus, path, options)
    model, digest = _load(str(checkpoint))
    _check_fit(model, selection.features, str(checkpoint))
    _check_opens(model, options)
    run = read_run_record(checkpoint)
    signature = _signature(model, str(checkpoint), digest, run, selection, options)
    traces = _decode(model, selection, options, signature, lower=run.lower, report=report)
    return _score(traces, selection, options, signature)


def _resolved(options: EvalOptions, checkpoint: str | Path, corpus: str) -> EvalOptions:
    """The options with the defaults of the checkpoint and the corpus filled in."""
    schedules = [as_trained(one, checkpoint) for one in options.schedules]
    if len({str(one) for one in schedules}) < len(schedules):
        raise ConfigError(f"give each schedule once: got {', '.join(map(str, schedules))}")
    metrics = wanted_metrics(corpora.get(corpus).metrics if options.metrics is None else options.metrics, normalise=options.normalise)
    out = None if options.out is None else Path(options.out).expanduser()
    return dataclasses.replace(options, schedules=schedules, metrics=metrics, scale=options.schedule_scale, out=out)


def _select(checkpoint: str | Path, corpus: str, path: str | Path, options: EvalOptions) -> _Selection:
    """Read the corpus, open its feature store and choose the clips to decode."""
    reading = corpora.read(corpus, path)
    wanted, num_without_reference = _wanted(reading, options.split, options.limit)
    store = Path(checkpoint).expanduser().parent / "features" if options.store is None else Path(options.store).expanduser()
    if options.store is None and not store.is_dir():
        raise StoreError(f"{store}: no features beside the checkpoint: give the store that zendaya encode made (--store)")
    features = FeatureStore.open(store, corpus=corpus)
    if features.signature.data_digest != reading.digest:
        raise StoreError(f"{features.path}: encoded from other files than {path} holds now: give the same files, or encode again")
    clips = _encoded(wanted, features)
    if "wer" in (options.metrics or ()):
        _check_words(clips, corpus, options.split, options.normalise)
    if options.computation_aware and features.signature.ids:
        raise ConfigError(f"{corpus}: a text source has no clock in seconds: leave out --computation-aware")
    return _Selection(
        reading=reading, features=features, clips=clips, num_left_out=len(wanted) - len(clips), num_without_reference=num_without_reference
    )


def _wanted(reading: Reading, split: str, limit: int | None) -> tuple[list[Clip], int]:
    """The first usable clips of a split, and the number of clips passed over because they have no reference."""
    wanted, num_textless = list[Clip](), 0
    for clip in reading.clips:
        if clip.split == split and len(wanted) != limit:
            num_textless += not clip.references
            wanted += [clip] if clip.usable else []
    if not wanted and num_textless:
        raise CorpusError(f"{reading.corpus.name}: none of the {num_textless} clips of split {split!r} has a reference to score against")
    if not wanted:
        splits = ", ".join(sorted({clip.split for clip in reading.usable}))
        raise CorpusError(f"{reading.corpus.name}: no clip with a source and a text in split {split!r}: expected one of {splits}")
    return wanted, num_textless


def _encoded(wanted: Sequence[Clip], features: FeatureStore) -> list[Clip]:
    """The clips with stored tokens; the others could not be encoded."""
    failed = {entry.key for entry in features.entries if entry.num_tokens == 0}
    clips = [clip for clip in wanted if (clip.split, clip.id) not in failed]
    for clip in clips:
        features.find(clip.id, clip.split)
    if not clips:
        raise StoreError(f"{features.path}: none of the {len(wanted)} clips of split {wanted[0].split!r} could be encoded")
    return clips


def _check_words(clips: Sequence[Clip], corpus: str, split: str, normalise: Normalise) -> None:
    """Raise CorpusError for references that cannot be scored by WER."""
    references = [clip.references for clip in clips]
    try:
        texts = only_references([clip.id for clip in clips], references)
        word_errors(texts, texts, normalise=normalise)
    except ZendayaError as error:
        raise CorpusError(f"{corpus}, split {split!r}: {error}") from None


def _load(checkpoint: str) -> tuple[Model, str]:
    """The model, and the sha256 in its checkpoint."""
    before = _checkpoint_digest(checkpoint)
    model = Model.from_pretrained(checkpoint)
    digest = _checkpoint_digest(checkpoint)
    if before and before != digest:
        raise CheckpointError(f"{checkpoint}: another model was saved there while this one was read: run the evaluation again")
    return model, digest


def _checkpoint_digest(checkpoint: str) -> str:
    """The checksum in a weights file, which loading verifies; empty before the file is downloaded."""
    with contextlib.suppress(Exception):  # loading explains any error
        path = Path(checkpoint) / WEIGHTS if Path(checkpoint).is_dir() else try_to_load_from_cache(checkpoint, WEIGHTS)
        with safe_open(str(path), "pt") as file:
            return str((file.metadata() or {}).get("sha256", ""))
    return ""


def _check_fit(model: Model, features: FeatureStore, checkpoint: str) -> None:
    config, signature = model.config.decoder, features.signature
    reads = f"{config.source_dim} {'ids' if config.source_vocab else 'features'}"
    holds = f"{signature.dim} {'ids' if signature.ids else 'features'}"
    if reads != holds:
        raise ConfigError(f"{checkpoint} reads {reads} per token, {features.path} holds {holds}: they do not fit")


def _check_opens(model: Model, options: EvalOptions) -> None:
    """Open one session per schedule and drop it, so that an impossible option is refused before anything is written."""
    engine = engine_for(model, options.engine, precision=options.precision)
    for schedule in options.schedules:
        Session(model, _decode_options(options, schedule), engine=engine)


def _decode_options(options: EvalOptions, schedule: Schedule | Policy) -> DecodeOptions:
    names = ("window_tokens", "steps", "max_steps", "engine", "precision")
    return DecodeOptions(schedule=schedule, **{name: getattr(options, name) for name in names})


def _signature(model: Model, checkpoint: str, digest: str, run: RunRecord, selection: _Selection, options: EvalOptions) -> dict[str, Any]:
    """Model, data and decode options of an evaluation, as in `scores.json`."""
    features = selection.features
    return {
        "version": zendaya.__version__,
        "checkpoint": checkpoint,
        "checkpoint_sha256": digest,
        "seed": run.seed,
        "lower": run.lower,
        "tokenizer_sha256": "" if model.tokenizer is None else hashlib.sha256(model.tokenizer.to_json().encode()).hexdigest(),
        "corpus": selection.reading.corpus.name,
        "data_sha256": selection.reading.digest,
        "split": options.split,
        "limit": options.limit,
        "num_clips": len(selection.clips),
        "num_left_out": selection.num_left_out,
        "num_without_reference": selection.num_without_reference,
        "store": features.signature.to_dict(),
        "store_sha256": json.loads((features.path / HEADER).read_bytes())["sha256"],
        "schedules": [str(one) for one in options.schedules],
        "scale": options.scale,
        "window": (options.window_tokens or model.config.window_tokens) if options.scale == "window" else None,
        "streaming": options.streaming,
        "steps": options.steps,
        "max_steps": options.max_steps,
        "clock": "computing" if options.computation_aware else "simulated",
        "metrics": list(options.metrics or ()),
        "normalise": options.normalise,
        "engine": engine_name(model, options.engine, options.precision),
    }


def _decode(
    model: Model, selection: _Selection, options: EvalOptions, signature: dict[str, Any], *, lower: bool, report: Report
) -> list[Trace]:
    """Decode the clips with each schedule; every trace is saved at once, and those of an interrupted evaluation are not decoded again."""
    clips = selection.clips
    streams = selection.streams if options.streaming else [[clip] for clip in clips]
    found, timer = dict[tuple[str, str, str], Trace](), time.perf_counter if options.computation_aware else None
    with contextlib.ExitStack() as stack:
        saved = None
        if options.out is not None:
            saved = stack.enter_context(UnfinishedTraces(Path(options.out), signature, discard=options.force or options.discard))
            found |= saved.traces
        for schedule in options.schedules:
            rest = [stream for stream in streams if any((str(schedule), clip.split, clip.id) not in found for clip in stream)]
            done = len(clips) - sum(map(len, rest))
            report(Progress(done, len(clips), str(schedule)))
            sources = ([(clip, selection.source(clip)) for clip in stream] for stream in rest)
            for trace in evaluate_streams(
                model, sources, _decode_options(options, schedule), scale=options.schedule_scale, lower=lower, timer=timer,
                workers=options.workers,
            ):  # fmt: skip
                found[trace.schedule, trace.split, trace.clip] = trace
                done += 1
                if saved is not None:
                    saved.add(trace)
                report(Progress(done, len(clips), str(schedule)))
    return [found[str(schedule), clip.split, clip.id] for schedule in options.schedules for clip in clips]


def _score(traces: list[Trace], selection: _Selection, options: EvalOptions, signature: dict[str, Any]) -> Evaluation:
    """Score the traces and write both files; the traces first, so that a failing metric loses nothing."""
    out, metrics = None if options.out is None else Path(options.out), options.metrics or ()
    sha256 = write_traces(out, traces)
    try:
        scores = score(traces, metrics=metrics, normalise=options.normalise)
    except ZendayaError as error:
        if out is None:
            raise
        advice = f"score them with zendaya score {out} --metrics {','.join(metrics)}, or with other metrics"
        raise ZendayaError(f"{error}; the traces are kept: {advice}") from None
    record = scores_record(scores, signature, sha256)
    if out is not None:
        write_scores(out, record)
    return Evaluation(
        traces=tuple(traces), scores=scores, num_left_out=selection.num_left_out,
        num_without_reference=selection.num_without_reference, record=record,
    )  # fmt: skip
