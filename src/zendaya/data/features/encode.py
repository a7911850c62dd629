"""Encoding a corpus: clips through a frozen encoder into a feature store, by one process, several, or a Ray cluster.

The same clips give the same bytes, resumed or not, with any number of workers: the store is in corpus order, and every worker has one
thread.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from zendaya.data.corpora import registry as corpora
from zendaya.data.features.clips import ClipEncoder, complete_spec, open_clip_encoder
from zendaya.data.features.options import Dtype, EncodeOptions
from zendaya.data.features.store import PROBLEMS, FeatureStore, Signature, StoreWriter, pack
from zendaya.encoders.registry import EncoderSpec
from zendaya.errors import ConfigError, CorpusError, SourceError, StoreError
from zendaya.parallel import Executor, Work, Workers
from zendaya.records import Clip, Progress

BATCH = 8
"""Clips of one recording that go to a worker together, so that the recording is decoded once for them."""
NO_MEMORY = "memory"
"""Kind of problem: not enough memory for a clip."""
DEFAULTS = EncodeOptions()
Report = Callable[[Progress], None]
Make = Callable[[], ClipEncoder]
"""Opens the encoder in each worker; it must pickle, unless there is one worker in this process."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Counts of a finished run."""

    store: str
    num_clips: int
    num_encoded: int
    num_failed: int
    num_resumed: int
    """Clips that were in the store before this run."""
    num_tokens: int
    num_bytes: int
    problems: dict[str, int]
    """Number per kind; the clips and reasons are in the store's problems.jsonl."""
    corpus_problems: int = 0
    """Problems of the published files; `zendaya corpora check` lists them."""
    seconds: float
    verified: bool
    """Whether the store was compared with its checksums."""
    signature: dict[str, Any]


def encode_corpus(
    corpus: str, path: str | Path, out: str | Path, *, encoder: str, options: EncodeOptions = DEFAULTS,
    report: Report | None = None,
) -> Summary:  # fmt: skip
    """Encode a corpus into a store by an encoder, as `whisper:tiny.en,block_s=1`; continue if the same call was stopped."""
    spec, workers = EncoderSpec.parse(encoder), Workers.parse(options.workers, options.ray)
    reading = corpora.read(corpus, path)
    clips = [clip for clip in reading.clips if options.split is None or clip.split == options.split]
    if not clips:
        splits = sorted({clip.split for clip in reading.clips})
        raise CorpusError(f"{corpus}: no clip in split {options.split!r}; its splits are {', '.join(splits)}")
    clips = clips[: options.limit]
    _check_modality(spec, corpus, clips)
    place = Path(path).expanduser()
    folder = (Path(options.media).expanduser() if options.media is not None else place if place.is_dir() else place.parent).resolve()
    if not folder.is_dir():
        example = clips[0].media or "the files of the corpus"
        raise SourceError(f"{folder}: no such media folder; give the one that holds {example!r} with --media")
    spec = complete_spec(spec, folder, lambda: clips)
    first = open_clip_encoder(spec, folder)
    signature = Signature.of(
        first.traits, encoder_digest=first.digest(), corpus=corpus, data_digest=reading.digest, split=options.split or "",
        dtype=options.dtype or ("fp32" if first.traits.ids else "fp16"),
    )  # fmt: skip
    make: Make = partial(open_clip_encoder, spec, folder)
    if workers.in_this_process:
        make = _reuse(first, make)
    summary = encode_clips(clips, make, out, signature, options, folder=folder, report=report or (lambda _: None))
    # Missing media are reported by the job itself, which knows their place.
    return replace(summary, corpus_problems=sum(problem.kind != "missing-media" for problem in reading.problems))


def _reuse(first: ClipEncoder, make: Make) -> Make:
    """Give out the encoder that is open already, then new ones."""
    opened = [first]
    return lambda: opened.pop() if opened else make()


def _check_modality(spec: EncoderSpec, corpus: str, clips: Sequence[Clip]) -> None:
    if spec.modality == "text" and not any(clip.source for clip in clips):
        raise ConfigError(f"{corpus}: its clips are no text: encoder {spec.name} reads sentences; use --encoder whisper")
    if spec.modality != "text" and not any(clip.media or clip.parts for clip in clips):
        raise ConfigError(f"{corpus}: its clips are text: encoder {spec.name} reads {spec.modality}; use --encoder text:TOKENIZER")


def encode_clips(
    clips: Sequence[Clip], make: Make, out: str | Path, signature: Signature, options: EncodeOptions = DEFAULTS, *,
    folder: Path | None = None, report: Report = lambda _: None,
) -> Summary:  # fmt: skip
    """Encode clips, in their order, into the store at `out`; `folder` is cut from the reasons of failed clips."""
    begun_s, workers = time.perf_counter(), Workers.parse(options.workers, options.ray)
    keys = [(clip.split, clip.id) for clip in clips]
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise CorpusError(f"{signature.corpus}: clip {twice[0][1]!r} occurs twice in split {twice[0][0]!r}; ids must differ")
    with StoreWriter(out, signature, shard_bytes=options.shard_bytes) as writer:
        if options.retry:
            writer.cut(next((n for n, entry in enumerate(writer.entries) if entry.num_tokens == 0), len(writer.entries)))
        resumed = _check_prefix(writer, keys)
        try:
            _encode_rest(writer, clips, make, workers, folder, report)
        except BaseException as error:
            if not isinstance(error, StoreError):  # after a StoreError, the writer has saved all it can
                writer.stop()
            raise
        entries = writer.entries
        if not any(entry.num_tokens for entry in entries):
            writer.discard()
            first = f"the first: {entries[0].reason}; all are in {Path(out) / PROBLEMS}"
            raise SourceError(f"none of the {len(entries)} clips could be encoded; {first}")
        writer.finish()
        verified = options.verify or resumed == len(clips)  # a run with nothing to do checks the store that is there
        if verified:
            FeatureStore.open(out).verify()
    num_failed = sum(entry.num_tokens == 0 for entry in entries)
    return Summary(
        store=str(out), num_clips=len(entries), num_encoded=len(entries) - num_failed, num_failed=num_failed, num_resumed=resumed,
        num_tokens=sum(entry.num_tokens for entry in entries), num_bytes=sum(path.stat().st_size for path in Path(out).iterdir()),
        problems=dict(sorted(Counter(entry.kind for entry in entries if entry.kind).items())),
        seconds=round(time.perf_counter() - begun_s, 3), verified=verified, signature=signature.to_dict(),
    )  # fmt: skip


def _encode_rest(writer: StoreWriter, clips: Sequence[Clip], make: Make, workers: Workers, folder: Path | None, report: Report) -> None:
    """Encode the clips that the store does not have."""
    failed = sum(entry.num_tokens == 0 for entry in writer.entries)
    report(_progress(writer.num_entries, len(clips), failed))
    batches = list(_batches(clips[writer.num_entries :]))
    if not batches:
        return
    if not workers.ray:
        workers = replace(workers, number=min(workers.number, len(batches)))
    setup = partial(_clip_work, make, writer.signature.dtype)
    with Executor(setup, workers, purpose="encoding on a Ray cluster") as executor:
        for batch, outcomes in zip(batches, executor.map(batches), strict=True):
            for clip, outcome in zip(batch, outcomes, strict=True):
                # The store does not say where media are on this machine.
                reason = outcome.reason if folder is None else outcome.reason.replace(f"{folder}{os.sep}", "")
                if outcome.num_tokens:
                    writer.add(clip.id, clip.split, outcome.num_tokens, outcome.record, kind=outcome.kind, reason=reason)
                else:
                    writer.fail(clip.id, clip.split, outcome.kind, reason)
                failed += not outcome.num_tokens
                report(_progress(writer.num_entries, len(clips), failed))


def _progress(done: int, total: int, failed: int) -> Progress:
    return Progress(done, total, "encoding", f"encoding, {failed} failed" if failed else "")


def _check_prefix(writer: StoreWriter, keys: Sequence[tuple[str, str]]) -> int:
    """Number of clips the store has; they must be the first of the clips to encode."""
    have = [entry.key for entry in writer.entries]
    if len(have) > len(keys):
        raise StoreError(f"{writer.path}: holds {len(have)} clips already, more than the {len(keys)} to encode; encode to another folder")
    for number, (old, new) in enumerate(zip(have, keys, strict=False)):
        if old != new:
            got = f"clip {number + 1} is {old[1]!r} of split {old[0]!r}: expected {new[1]!r} of {new[0]!r}"
            raise StoreError(f"{writer.path}: {got}; encode to another folder")
    return len(have)


@dataclass(frozen=True)
class ClipOutcome:
    """The record of a clip for the store, or the reason why there is none."""

    num_tokens: int
    record: bytes
    kind: str
    reason: str


def _encode_one(encoder: ClipEncoder, clip: Clip, dtype: Dtype) -> ClipOutcome:
    if (not clip.source and clip.duration_s <= 0) or clip.num_source_tokens == 0:
        return _failed(clip, "empty", f"clip {clip.id}: nothing to read from {clip.start_s} to {clip.end_s} s")
    try:
        encoded = encoder.encode(clip)
        return ClipOutcome(len(encoded.tokens), pack(encoded.tokens, dtype), encoded.kind, encoded.reason)
    except SourceError as error:
        return _failed(clip, "unreadable", " ".join(str(error).split()))
    except (MemoryError, RuntimeError) as error:
        # Torch has an error class for device memory; for main memory there is only the message.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        return _failed(clip, NO_MEMORY, "not enough memory for this clip")


def _failed(clip: Clip, kind: str, reason: str) -> ClipOutcome:
    """The outcome of a clip without tokens; the reason names its media."""
    media = clip.media or next((part.media for part in clip.parts), "")
    named = not media or re.search(rf"(?<!\w){re.escape(media)}(?!\w)", reason)
    return ClipOutcome(0, b"", kind, reason if named else f"{media}: {reason}")


def _clip_work(make: Make, dtype: Dtype) -> Work[list[Clip], list[ClipOutcome]]:
    """The work of one worker: batches of clips to outcomes, by an encoder that is opened when first needed."""
    encoder: ClipEncoder | None = None

    def encode(batch: list[Clip], _: object) -> list[ClipOutcome]:
        nonlocal encoder
        outcomes = list[ClipOutcome]()
        for clip in batch:
            encoder = make() if encoder is None else encoder
            outcomes.append(_encode_one(encoder, clip, dtype))
            if outcomes[-1].kind == NO_MEMORY:
                encoder = None  # it stopped inside a recording, which would seem to end there for the next clip
        return outcomes

    return encode


def _batches(clips: Iterable[Clip]) -> Iterator[list[Clip]]:
    """Clips in order, consecutive ones of the same media together."""
    for media, group in groupby(clips, key=lambda clip: clip.media):
        members, size = list(group), BATCH if media else 1
        yield from (members[first : first + size] for first in range(0, len(members), size))
