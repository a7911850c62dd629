"""Files of an evaluation: `traces.jsonl`, one line per clip and schedule, and `scores.json`, made from it, with its signature."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import zendaya
from zendaya.errors import ZendayaError
from zendaya.evaluation.metrics.quality import METRICS, Normalise
from zendaya.evaluation.metrics.scores import Scores, score, wanted_metrics
from zendaya.files import write_atomically
from zendaya.records import Trace, read_record
from zendaya.runtime.policies import parse_policy
from zendaya.schedule import MAX_COUNT, MAX_CURVE

TRACES, SCORES, UNFINISHED = "traces.jsonl", "scores.json", "traces.unfinished.jsonl"
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def _to_bytes(traces: Iterable[Trace]) -> bytes:
    """The bytes of a traces file."""
    return b"".join(json.dumps(asdict(trace), ensure_ascii=False).encode() + b"\n" for trace in traces)


def read_traces(path: str | Path) -> tuple[list[Trace], str]:
    """The traces of a file, or of the one in a folder, and the SHA-256 of its bytes."""
    file = Path(path).expanduser()
    file = file / TRACES if file.is_dir() else file
    try:
        data = file.read_bytes()
        lines = data.decode().split("\n")
    except OSError as error:
        raise ZendayaError(f"{file}: cannot be read: {error.strerror or error}; expected the {TRACES} of zendaya evaluate") from None
    except UnicodeDecodeError:
        raise ZendayaError(f"{file}: not UTF-8: expected the {TRACES} of zendaya evaluate") from None
    traces = [_trace(line, f"{file}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not traces:
        raise ZendayaError(f"{file}: holds no traces: expected the {TRACES} of zendaya evaluate")
    return traces, hashlib.sha256(data).hexdigest()


def _trace(line: str, where: str) -> Trace:
    """The trace of a line, with fields of the right types and lists of the right lengths."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ZendayaError(f"{where}: not JSON: the file is damaged or not a {TRACES}; evaluate again") from None
    names = {field.name for field in fields(Trace)}
    if isinstance(record, dict):
        record = dict.fromkeys(("decoder_rows", "revised", "emissions_s")) | record  # older traces have none
    if not isinstance(record, dict) or record.keys() != names:
        raise ZendayaError(f"{where}: not a trace of this version: expected an object of the fields {', '.join(sorted(names))}")
    for name, value in record.items():
        _check_values(name, value if isinstance(value, list) else [value], where)
    trace = read_record(Trace, record, where)
    try:
        parse_policy(trace.schedule)
    except ZendayaError as error:
        raise ZendayaError(f"{where}: schedule: {error}; the file was changed; evaluate again") from None
    if what := next(_contradictions(trace), ""):
        raise ZendayaError(f"{where}: the trace of clip {trace.clip!r} contradicts itself: {what}; the file was changed; evaluate again")
    return trace


def _check_values(name: str, values: Iterable[object], where: str) -> None:
    """Refuse a lone surrogate, which no encoding has, and an integer too large for a decode."""
    for value in values:
        if isinstance(value, str) and _HALF_PAIR.search(value):
            raise ZendayaError(f"{where}: {name} holds a lone surrogate: got {ascii(value)[:80]}; the file was changed; evaluate again")
        if isinstance(value, int) and not -MAX_COUNT < value < MAX_COUNT:
            got = f"a number of {value.bit_length()} bits"
            raise ZendayaError(f"{where}: {name} must lie below 2**53: got {got}; the file was changed; evaluate again")


def _contradictions(trace: Trace) -> Iterator[str]:
    """Properties that no decode can have; each check relies on those before it."""
    steps, source = len(trace.tokens), trace.num_source_tokens
    if min(trace.decoder_rows or 0, trace.revised or 0) < 0:
        yield "decoder_rows and revised must be at least 0"
    if trace.window_tokens < 1 or source < 1 or not trace.references or not steps:
        yield "it must have a window, a source, a reference and a step, at least one each"
    for name in ("windows", "horizons", "effective_horizons", "arrived"):
        if len(values := getattr(trace, name)) != steps:
            yield f"{name} must have one value per token, {steps}, got {len(values)}"
    if len(trace.reference_steps) not in (0, len(trace.references)):
        yield f"reference_steps must be empty or one per reference, {len(trace.references)}, got {len(trace.reference_steps)}"
    if not all(1 <= count <= MAX_CURVE for count in (*trace.predicted_steps, *trace.reference_steps)):
        yield f"predicted_steps and reference_steps must lie in 1 … {MAX_CURVE}"
    yield from _impossible_times(trace)
    if set(trace.windows) != set(range(len(trace.predicted_steps))) or _falls(trace.windows):
        yield f"windows must be numbered from 0 without going back, one per predicted_steps value, {len(trace.predicted_steps)}"
    if max(trace.windows) * trace.window_tokens >= source:
        yield f"window {max(trace.windows)} of {trace.window_tokens} tokens lies beyond the source of {source}"
    if not all(1 <= count <= source for count in trace.arrived) or _falls(trace.arrived):
        yield f"arrived must lie in 1 … {source} and never go back"
    for k, steps_of_k in itertools.groupby(zip(trace.windows, trace.horizons, trace.effective_horizons, strict=True), lambda step: step[0]):
        _, horizons, read = zip(*steps_of_k, strict=True)
        if min(horizons) < 0 or max(horizons) > trace.window_tokens or _falls(horizons):
            yield f"horizons of window {k} must lie in 0 … {trace.window_tokens} and never decrease"
        if min(read) < 0 or max(read) > trace.tokens_of_window(k) or _falls(read):
            yield f"effective_horizons of window {k} must lie in 0 … {trace.tokens_of_window(k)} and never decrease"
        if any(effective > horizon for effective, horizon in zip(read, horizons, strict=True)):
            yield f"effective_horizons of window {k} must not exceed its horizons"
    if any(delay > count for delay, count in zip(trace.delays, trace.arrived, strict=True)):
        yield "effective_horizons must not exceed arrived"


def _impossible_times(trace: Trace) -> Iterator[str]:
    arrivals_s, emissions_s = trace.arrivals_s, trace.emissions_s
    if arrivals_s is not None and len(arrivals_s) != trace.num_source_tokens:
        yield f"arrivals_s must be null or one per source token, {trace.num_source_tokens}, got {len(arrivals_s)}"
    if emissions_s is not None and (len(emissions_s) != len(trace.tokens) or arrivals_s is None):
        yield f"emissions_s must be null or one per token, {len(trace.tokens)}, and then needs arrivals_s"
    if not all(math.isfinite(time_s) for times in (arrivals_s, emissions_s) for time_s in times or ()):
        yield "arrivals_s and emissions_s must be finite"
    if arrivals_s and (arrivals_s[0] < 0 or _falls(arrivals_s)):
        yield "arrivals_s must be at least 0 and never go back"


def _falls(values: Sequence[float]) -> bool:
    """Whether a value is below the one before it."""
    return any(after < before for before, after in itertools.pairwise(values))


def check_free(folder: Path, *, force: bool, names: Sequence[str] = (TRACES, SCORES)) -> None:
    """Refuse a folder whose results would be overwritten without `force`, and a path that is a file."""
    if file := next((path for path in (folder, *folder.parents) if path.is_file()), None):
        raise ZendayaError(f"{file}: is a file; expected a folder, existing or new, for {' and '.join(names)}; give another --out")
    held = [name for name in names if (folder / name).exists()]
    if held and not force:
        raise ZendayaError(f"{folder}: already holds {' and '.join(held)}: give another --out, or --force to replace them")


class UnfinishedTraces(AbstractContextManager["UnfinishedTraces"]):
    """Traces of an evaluation in progress: a line with the evaluation's signature, then one line per trace."""

    def __init__(self, folder: Path, signature: Mapping[str, Any], *, discard: bool = False) -> None:
        """Resume from the file that is there; with `discard`, start over if it is damaged or of another evaluation."""
        self.traces: dict[tuple[str, str, str], Trace] = {}
        """Traces of the interrupted evaluation, by schedule, split and clip."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / UNFINISHED
        head, kept = json.dumps(signature, ensure_ascii=False).encode() + b"\n", b""
        if self._path.exists():
            lines = self._path.read_bytes().split(b"\n")
            whole = lines[1:-1]  # a last line that was cut off is decoded again
            try:
                if whole:
                    self._check_same(lines[0], json.loads(head))
                traces = [self._read(line, number) for number, line in enumerate(whole, start=2)]
                self.traces = {(trace.schedule, trace.split, trace.clip): trace for trace in traces}
                kept = b"".join(line + b"\n" for line in whole)
            except ZendayaError:
                if not discard:
                    raise
        write_atomically(self._path, head + kept)
        self._file = self._path.open("ab")

    def _read(self, line: bytes, number: int) -> Trace:
        try:
            return _trace(line.decode(), f"{self._path}:{number}")
        except UnicodeDecodeError:
            raise ZendayaError(f"{self._path}:{number}: not UTF-8: the file is damaged; remove it, or evaluate with --force") from None
        except ZendayaError as error:
            raise ZendayaError(f"{error}, after removing the file, or evaluate with --force") from None

    def _check_same(self, line: bytes, wanted: Mapping[str, Any]) -> None:
        """Refuse to resume another evaluation; the checkpoint's path may differ."""
        try:
            saved = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            damaged = f"{self._path}:1: damaged: expected the signature of an evaluation"
            raise ZendayaError(f"{damaged}; remove the file, or evaluate with --force") from None
        for key in sorted((saved.keys() | wanted.keys()) - {"checkpoint"}):
            if saved.get(key) != wanted.get(key):
                other = f"holds an unfinished evaluation whose {key} is {saved.get(key)!r}, not {wanted.get(key)!r}"
                raise ZendayaError(f"{self._path.parent}: {other}: resume that one, give another --out, or --force to start over")

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, trace: Trace) -> None:
        """Write a trace to disk at once."""
        self._file.write(_to_bytes([trace]))
        self._file.flush()


def write_traces(folder: Path | None, traces: Iterable[Trace]) -> str:
    """Write a folder's traces atomically, remove scores of other traces, and give the SHA-256; without a folder, only that."""
    data = _to_bytes(traces)
    if folder is not None:
        scores = folder / SCORES
        write_atomically(folder / TRACES, data, before_rename=lambda: scores.unlink(missing_ok=True))
        (folder / UNFINISHED).unlink(missing_ok=True)
    return hashlib.sha256(data).hexdigest()


def write_scores(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a folder's scores atomically."""
    write_atomically(folder / SCORES, json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n")


def scores_record(scores: Sequence[Scores], signature: Mapping[str, Any], traces_sha256: str) -> dict[str, Any]:
    """The content of `scores.json`: the evaluation's signature, and the scores of each schedule with their own."""
    rows = [{"signature": one_line(one, signature), **asdict(one)} for one in scores]
    return {"signature": {**signature, "traces_sha256": traces_sha256}, "scores": rows}


def one_line(scores: Scores, signature: Mapping[str, Any]) -> str:
    """The signature of a row of scores in one line, without the metrics' own; an unknown part is a question mark."""

    def known(key: str, digits: int | None = None) -> str:
        value = signature.get(key)
        return "?" if value in (None, "") else str(value)[:digits]

    width = "" if signature.get("window") is None else f",W={signature['window']}"
    history = ",consecutive" if signature.get("streaming") else ""
    lengths = "".join(f"|{name}:{signature[name]}" for name in ("steps", "max_steps") if signature.get(name) is not None)
    store = signature.get("store")
    encoder = [store.get("encoder") or "?", (store.get("encoder_digest") or "")[:8]] if isinstance(store, dict) else ["?"]
    tokens = f"{known('tokenizer_sha256', 8)}{',lower' if signature.get('lower') else ''}"
    return (
        f"zendaya:{known('version')}|{scores.schedule}|scale:{scores.scale}{width}{history}{lengths}|tok:{tokens}|seed:{known('seed')}"
        f"|model:{known('checkpoint_sha256', 8)}|data:{known('corpus')},{known('split')},{known('data_sha256', 8)}"
        f"|enc:{','.join(filter(None, encoder))}|clips:{scores.num_clips}|engine:{known('engine')}|clock:{known('clock')}"
    )


def rescore(
    path: str | Path, *, metrics: Sequence[str] | None = None, normalise: Normalise | None = None
) -> tuple[tuple[Scores, ...], dict[str, Any]]:
    """Scores of a traces file and their record, with the signature of the `scores.json` beside it, if there is one.

    Metrics and normalisation default to those of that evaluation, else `bleu` and `english`.
    """
    traces, sha256 = read_traces(path)
    signature = signature_beside(path, sha256)
    norm: Normalise = normalise if normalise is not None else signature.get("normalise", "english")
    names = wanted_metrics(signature.get("metrics", ("bleu",)) if metrics is None else metrics, normalise=norm)
    scores = score(traces, metrics=names, normalise=norm)
    signature |= {"metrics": list(names), "normalise": norm, "scored_by": zendaya.__version__}
    return scores, scores_record(scores, signature, sha256)


def signature_beside(path: str | Path, sha256: str) -> dict[str, Any]:
    """The signature of the scores beside a traces file, {} without any; scores of other traces are an error."""
    file = Path(path).expanduser()
    folder = file if file.is_dir() else file.parent
    try:
        signature = json.loads((folder / SCORES).read_bytes())["signature"]
        known = set(signature["metrics"]) <= set(METRICS)
        if signature["traces_sha256"] != sha256:
            changed = f"not the traces that {folder / SCORES} was made from: they were changed since"
            raise ZendayaError(f"{path}: {changed}; evaluate again, or remove {SCORES} to score them as they are")
        return dict(signature) if known and signature["normalise"] in get_args(Normalise) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
