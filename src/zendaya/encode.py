"""Encoding a corpus: clips through a frozen encoder into a feature store, by one process, several, or a Ray cluster.

The order of the store is that of the corpus whoever encodes, and every number is made on one thread: the same clips give the same
bytes, stopped and resumed or not, by one worker or many.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from zendaya import corpora
from zendaya.encoders.clips import ClipEncoder, Spec
from zendaya.encoders.store import PROBLEMS, SHARD_BYTES, Dtype, Entry, FeatureStore, Signature, StoreWriter, pack
from zendaya.errors import ConfigError, CorpusError, MissingExtraError, SourceError, StoreError, ZendayaError
from zendaya.records import Clip

BATCH = 8
"""Clips of one recording that go to a worker together, so that it is decoded once for them."""
LEAD = 4
"""Batches a worker may be ahead of the clip that is waited for; their tokens are held in memory."""

NO_MEMORY = "memory"
"""The kind of a clip there was not enough memory for."""

Make = Callable[[], ClipEncoder]
"""What builds the encoder anew in each worker; it must pickle."""


@dataclass(frozen=True)
class Progress:
    """How far a job is."""

    done: int
    total: int
    failed: int
    resumed: int
    """Clips that were there before this run."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a job left behind."""

    store: str
    num_clips: int
    num_encoded: int
    num_failed: int
    num_resumed: int
    """Clips that were there before this run."""
    num_tokens: int
    num_bytes: int
    problems: dict[str, int]
    """How many of each kind; the clips and reasons are in the store's problems.jsonl."""
    corpus_problems: int
    """Problems of the published files; `zendaya corpora check` names them."""
    seconds: float
    verified: bool
    """Whether the store was read again and compared with its checksums."""
    signature: dict[str, Any]


def encode_corpus(
    corpus: str, path: str | Path, out: str | Path, *, encoder: str, media: str | Path | None = None, split: str | None = None,
    dtype: Dtype | None = None, limit: int | None = None, workers: int | str = 1, ray_address: str | None = None, retry: bool = False,
    verify: bool = False, report: Callable[[Progress], None] | None = None,
) -> Summary:  # fmt: skip
    """Encode a corpus into a store, or go on where the same call was stopped.

    `encoder` is a name with settings (`encoders.clips.Spec`), `media` the folder the clips' files lie in (that of the corpus if not
    given), `workers` a number of processes, `ray`, or `ray:N` for N workers; `retry` encodes again from the first clip that failed;
    `verify` compares the store with its checksums afterwards, as is always done where nothing was left to encode.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 clip: got {limit}")
    spec = Spec.parse(encoder)
    reading = corpora.read(corpus, path)
    clips = [clip for clip in reading.clips if split is None or clip.split == split]
    if not clips:
        splits = sorted({clip.split for clip in reading.clips})
        raise CorpusError(f"{corpus}: no clip in split {split!r}; its splits are {', '.join(splits)}")
    clips = clips[:limit]
    _check_kind(spec, corpus, clips)
    given = Path(path).expanduser()
    folder = (Path(media).expanduser() if media is not None else given if given.is_dir() else given.parent).resolve()
    if not folder.is_dir():
        raise SourceError(f"{folder}: no such media folder; give the one that holds {clips[0].media or 'the files of the corpus'!r}")
    first = spec.open(folder, clips)
    if spec.name == "features" and "dim" not in dict(spec.settings):  # workers see a few clips each, and must agree
        spec = Spec(spec.name, spec.which, (*spec.settings, ("dim", first.encoder.input_dim)))  # type: ignore[attr-defined]
    signature = Signature.of(
        first.traits, encoder_digest=first.digest(), corpus=corpus, data_digest=reading.digest, split=split or "",
        dtype=dtype or ("fp32" if first.traits.ids else "fp16"),
    )  # fmt: skip
    # Media that are missing are missed by the job itself, which knows where they should lie.
    num_odd = sum(problem.kind != "missing-media" for problem in reading.problems)
    return encode_clips(
        clips, partial(spec.open, folder), out, signature, first=first, folder=folder, workers=workers, ray_address=ray_address,
        retry=retry, verify=verify, report=report, corpus_problems=num_odd,
    )  # fmt: skip


def _check_kind(spec: Spec, corpus: str, clips: Sequence[Clip]) -> None:
    if spec.name == "text" and not any(clip.source for clip in clips):
        raise ConfigError(f"{corpus}: its clips are no text: encoder text reads sentences; take whisper, efficientnet, clip or features")
    if spec.name != "text" and not any(clip.media or clip.parts for clip in clips):
        raise ConfigError(f"{corpus}: its clips are text: encoder {spec.name} reads recordings, videos or features; take text:TOKENIZER")


def encode_clips(
    clips: Sequence[Clip], make: Make, out: str | Path, signature: Signature, *, first: ClipEncoder | None = None,
    folder: Path | None = None, workers: int | str = 1, ray_address: str | None = None, retry: bool = False,
    verify: bool = False, report: Callable[[Progress], None] | None = None, corpus_problems: int = 0, shard_bytes: int = SHARD_BYTES,
) -> Summary:  # fmt: skip
    """Encode clips, in their order, into the store at `out`; `first` is an encoder that `make` has built already."""
    begun = time.perf_counter()
    crew = _crew_size(workers, ray_address)
    keys = [(clip.split, clip.id) for clip in clips]
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise CorpusError(f"{signature.corpus}: clip {twice[0][1]!r} is there twice in split {twice[0][0]!r}; its ids must differ")
    with StoreWriter(out, signature, shard_bytes=shard_bytes) as writer:
        if retry:
            writer.cut(next((n for n, entry in enumerate(writer.entries) if entry.num_tokens == 0), len(writer.entries)))
        resumed = _check_prefix(writer, keys)
        failed = sum(entry.num_tokens == 0 for entry in writer.entries)
        if report is not None:
            report(Progress(resumed, len(clips), failed, resumed))
        try:
            if resumed < len(clips):
                batches = list(_batches(clips[resumed:]))
                with contextlib.closing(_run(batches, make, first, signature.dtype, crew, ray_address)) as results:
                    for batch, outcomes in zip(batches, results, strict=True):
                        for clip, outcome in zip(batch, outcomes, strict=True):
                            _store(writer, clip, outcome, folder)
                            failed += not outcome.num_tokens
                            if report is not None:
                                report(Progress(writer.num_entries, len(clips), failed, resumed))
        except BaseException as error:
            if not isinstance(error, StoreError):  # the store itself has failed: it has seen to what can be kept
                writer.stop()
            raise
        entries = writer.entries
        if failed == len(entries):
            writer.discard()
            raise SourceError(
                f"none of the {len(entries)} clips could be encoded; the first: {entries[0].reason}; all are in {Path(out) / PROBLEMS}"
            )
        writer.finish()
        verified = verify or resumed == len(clips)  # a run that has done nothing vouches for what is there
        if verified:
            FeatureStore.open(out).verify()
    return _summary(out, entries, resumed, signature, corpus_problems, time.perf_counter() - begun, verified)


def _summary(
    out: str | Path, entries: list[Entry], resumed: int, signature: Signature, corpus_problems: int, seconds: float, verified: bool
) -> Summary:
    num_failed = sum(entry.num_tokens == 0 for entry in entries)
    return Summary(
        store=str(out), num_clips=len(entries), num_encoded=len(entries) - num_failed, num_failed=num_failed, num_resumed=resumed,
        num_tokens=sum(entry.num_tokens for entry in entries), num_bytes=sum(path.stat().st_size for path in Path(out).iterdir()),
        problems=dict(sorted(Counter(entry.kind for entry in entries if entry.kind).items())), corpus_problems=corpus_problems,
        seconds=round(seconds, 3), verified=verified, signature=signature.to_dict(),
    )  # fmt: skip


def _check_prefix(writer: StoreWriter, keys: Sequence[tuple[str, str]]) -> int:
    """How many of the clips the store has; they must be the first of those asked for."""
    have = [entry.key for entry in writer.entries]
    if len(have) > len(keys):
        raise StoreError(f"{writer.path}: holds {len(have)} clips already, more than the {len(keys)} asked for; encode to another folder")
    for number, (old, new) in enumerate(zip(have, keys, strict=False)):
        if old != new:
            raise StoreError(
                f"{writer.path}: clip {number + 1} is {old[1]!r} of split {old[0]!r}: expected {new[1]!r} of {new[0]!r}; "
                f"encode to another folder"
            )
    return len(have)


# One clip.


@dataclass(frozen=True)
class Outcome:
    """What became of a clip: its record for the store, or why there is none."""

    num_tokens: int
    record: bytes
    kind: str
    reason: str


def _store(writer: StoreWriter, clip: Clip, outcome: Outcome, folder: Path | None) -> None:
    # Where the media lie on this machine is no part of the store.
    reason = outcome.reason if folder is None else outcome.reason.replace(f"{folder}{os.sep}", "")
    if outcome.num_tokens:
        writer.add(clip.id, clip.split, outcome.num_tokens, outcome.record, kind=outcome.kind, reason=reason)
    else:
        writer.fail(clip.id, clip.split, outcome.kind, reason)


def _encode_one(encoder: ClipEncoder, clip: Clip, dtype: Dtype) -> Outcome:
    if (not clip.source and clip.duration_s <= 0) or clip.num_source_tokens == 0:
        return _failed(clip, "empty", f"clip {clip.id}: nothing to read from {clip.start_s} to {clip.end_s} s")
    try:
        encoded = encoder.encode(clip)
        return Outcome(len(encoded.tokens), pack(encoded.tokens, dtype), encoded.kind, encoded.reason)
    except SourceError as error:
        return _failed(clip, "unreadable", " ".join(str(error).split()))
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _failed(clip, NO_MEMORY, "not enough memory for this clip")


def _failed(clip: Clip, kind: str, reason: str) -> Outcome:
    """The outcome of a clip without tokens; its reason names its media."""
    media = clip.media or next((part.media for part in clip.parts), "")
    named = not media or re.search(rf"(?<!\w){re.escape(media)}(?!\w)", reason)
    return Outcome(0, b"", kind, reason if named else f"{media}: {reason}")


def _is_out_of_memory(error: Exception) -> bool:
    # Torch has a class of its own for devices, and for the processor's memory only words.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


class _Hand:
    """What every worker has: an encoder, built when it is first needed."""

    def __init__(self, make: Make, dtype: Dtype, encoder: ClipEncoder | None = None) -> None:
        self._make, self._dtype, self._encoder = make, dtype, encoder

    def encode(self, batch: Sequence[Clip]) -> list[Outcome]:
        outcomes = list[Outcome]()
        for clip in batch:
            self._encoder = self._encoder if self._encoder is not None else self._make()
            outcomes.append(_encode_one(self._encoder, clip, self._dtype))
            if outcomes[-1].kind == NO_MEMORY:
                self._encoder = None  # it was torn from the midst of a recording, which would seem to end there for the next clip
        return outcomes


def _batches(clips: Iterable[Clip]) -> Iterator[list[Clip]]:
    """Clips in order, consecutive ones of the same media together."""
    batch = list[Clip]()
    for clip in clips:
        if batch and (len(batch) == BATCH or clip.media != batch[0].media or not clip.media):
            yield batch
            batch = []
        batch.append(clip)
    if batch:
        yield batch


# Who encodes.


def _crew_size(workers: int | str, ray_address: str | None) -> tuple[bool, int]:
    """Whether Ray is asked for, and how many workers; 0 for as many as the cluster has processors."""
    kind, _, number = str(workers).partition(":")
    ray = kind == "ray"
    text = number if ray else kind
    if (
        (text and not text.isdecimal())
        or (not ray and (number or int(text or 0) < 1))
        or (ray and ":" in str(workers) and not int(text or 0))
    ):
        raise ConfigError(f"workers must be a number of processes from 1, ray, or ray:N: got {workers!r}")
    if ray_address is not None and not ray:
        raise ConfigError(f"a Ray address goes with workers ray: got workers {workers!r}")
    return ray, int(text or 0)


def _run(
    batches: Sequence[list[Clip]], make: Make, first: ClipEncoder | None, dtype: Dtype, crew: tuple[bool, int], ray_address: str | None
) -> Generator[list[Outcome], None, None]:
    """The outcomes of the batches, in their order."""
    ray, number = crew
    if ray:
        with _RayCrew(make, dtype, number, ray_address) as remote:
            yield from _in_order(batches, remote)
    elif number > 1:
        with _Processes(make, dtype, min(number, len(batches))) as processes:
            yield from _in_order(batches, processes)
    else:
        with _one_thread():
            hand = _Hand(make, dtype, first)
            for batch in batches:
                yield hand.encode(batch)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums on two threads are rounded otherwise than on one: every worker has one, and the numbers are the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a worker, in words: exceptions do not all pickle."""

    ours: bool
    message: str


def _failure(error: Exception) -> _Failure:
    ours = isinstance(error, ZendayaError)
    return _Failure(ours, str(error) if ours else traceback.format_exc())


class _Crew(Protocol):
    """Workers by number, each with one batch at a time."""

    size: int

    def give(self, worker: int, batch: list[Clip]) -> None: ...

    def take(self) -> tuple[int, list[Outcome] | _Failure]:
        """The next worker that is done, and what it made."""


def _in_order(batches: Sequence[list[Clip]], crew: _Crew) -> Iterator[list[Outcome]]:
    idle, busy = list(range(crew.size)), dict[int, int]()
    done = dict[int, list[Outcome]]()
    given = 0
    for wanted in range(len(batches)):
        while wanted not in done:
            while idle and given < len(batches) and given - wanted < LEAD * crew.size:
                worker = idle.pop()
                crew.give(worker, batches[given])
                busy[worker], given = given, given + 1
            worker, outcomes = crew.take()
            if isinstance(outcomes, _Failure):
                raise ZendayaError(outcomes.message) if outcomes.ours else RuntimeError(f"a worker failed:\n{outcomes.message}")
            done[busy.pop(worker)] = outcomes
            idle.append(worker)
        yield done.pop(wanted)


class _Processes:
    """Workers that are processes of this machine, each at the end of a pipe; they end when it does."""

    def __init__(self, make: Make, dtype: Dtype, size: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks
        self.size = size
        self._pipes: list[multiprocessing.connection.Connection[Any, Any]] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, dtype), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.terminate()
        for process in self._processes:
            process.join()

    def give(self, worker: int, batch: list[Clip]) -> None:
        try:
            self._pipes[worker].send(batch)
        except OSError:
            raise self._lost(worker) from None

    def take(self) -> tuple[int, list[Outcome] | _Failure]:
        ready = multiprocessing.connection.wait(self._pipes)[0]
        worker = next(number for number, pipe in enumerate(self._pipes) if pipe is ready)
        try:
            return worker, self._pipes[worker].recv()
        except (EOFError, OSError):
            raise self._lost(worker) from None

    def _lost(self, worker: int) -> ZendayaError:
        self._processes[worker].join()
        code = self._processes[worker].exitcode
        return ZendayaError(
            f"a worker ended by itself (exit code {code}), perhaps for want of memory: what is done is kept; run the same command again, "
            f"with fewer workers"
        )


def _serve(pipe: multiprocessing.connection.Connection[Any, Any], make: Make, dtype: Dtype) -> None:
    """The life of a worker: batches from the pipe, outcomes into it, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the one that gave the work decides
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        hand = _Hand(make, dtype)
        while True:
            batch = pipe.recv()
            try:
                outcomes: list[Outcome] | _Failure = hand.encode(batch)
            except Exception as error:
                outcomes = _failure(error)
            pipe.send(outcomes)


class _RayWorker:
    """A worker on a Ray cluster: an actor that holds its encoder."""

    def __init__(self, make: Make, dtype: Dtype) -> None:
        self._hand = _Hand(make, dtype)

    def encode(self, batch: list[Clip]) -> list[Outcome] | _Failure:
        torch.set_num_threads(1)
        try:
            return self._hand.encode(batch)
        except Exception as error:
            return _failure(error)


class _RayCrew:
    """Workers of a Ray cluster: the one this process is connected to, the one at an address, or a local one started for the job."""

    def __init__(self, make: Make, dtype: Dtype, size: int, address: str | None) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise MissingExtraError("ray", "distributed", "encoding on a Ray cluster") from None
        self._ray: Any = ray
        self._started = not ray.is_initialized()
        if self._started:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a library does not report its users
            local: dict[str, Any] = {} if address is not None else {"include_dashboard": False, **({"num_cpus": size} if size else {})}
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
            except (ConnectionError, ValueError, RuntimeError, OSError) as error:
                first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise ConfigError(f"no Ray cluster at {address or 'this machine'}: {first}") from None
        self.size = size or max(1, int(ray.cluster_resources().get("CPU", 1)))
        # An actor whose machine goes is started anew elsewhere, and its batch encoded again.
        actor = ray.remote(num_cpus=1, max_restarts=2, max_task_retries=2)(_RayWorker)
        self._actors = [actor.remote(make, dtype) for _ in range(self.size)]
        self._running: dict[Any, int] = {}

    def __enter__(self) -> _RayCrew:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._started:
            self._ray.shutdown()

    def give(self, worker: int, batch: list[Clip]) -> None:
        self._running[self._actors[worker].encode.remote(batch)] = worker

    def take(self) -> tuple[int, list[Outcome] | _Failure]:
        (ready, *_), _ = self._ray.wait(list(self._running), num_returns=1)
        worker = self._running.pop(ready)
        try:
            return worker, self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            raise ZendayaError(
                f"a Ray worker was lost ({str(error).strip().splitlines()[0]}): what is done is kept; run the same command again"
            ) from None
