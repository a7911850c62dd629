"""The two files an evaluation leaves: `traces.jsonl`, a line a clip and schedule, and `scores.json`, made from it, with its signature."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import zendaya
from zendaya.atomic import write_atomically
from zendaya.errors import ScheduleError, ZendayaError
from zendaya.metrics.quality import METRICS, Normalise
from zendaya.metrics.scores import Scores, score, wanted_metrics
from zendaya.records import Scale, Trace
from zendaya.schedule import MAX_COUNT, MAX_CURVE, POLICIES, is_policy, parse_schedule

TRACES, SCORES, UNFINISHED = "traces.jsonl", "scores.json", "traces.unfinished.jsonl"

_LISTS = {"references": str, "reference_steps": int, "predicted_steps": int, "tokens": int, "windows": int, "horizons": int}
_LISTS |= {"effective_horizons": int, "arrived": int}
_COUNTS = ("decoder_rows", "revised")
_TIMES = ("arrivals_s", "emissions_s")
_SINGLE = {"clip": str, "split": str, "schedule": str, "scale": str, "window": int, "num_source_tokens": int, "text": str}
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_POLICY = re.compile(rf"({'|'.join(POLICIES)})=\d+(\.\d+)?(e-?\d+)?(,(last|chunk|layer)=\d+|,heads=\d+\.\d+(\+\d+\.\d+)*)*")
"""The printed form of a policy, which only `zendaya.policies`, built on the decoder, can make one of."""


def _to_bytes(traces: Iterable[Trace]) -> bytes:
    """The lines of a traces file."""
    return b"".join(json.dumps(asdict(trace), ensure_ascii=False).encode() + b"\n" for trace in traces)


def traces_digest(traces: Iterable[Trace]) -> str:
    """sha256 of the file that `write_traces` would make."""
    return hashlib.sha256(_to_bytes(traces)).hexdigest()


def read_traces(path: str | Path) -> tuple[list[Trace], str]:
    """The traces of a file, or of the one in a folder, and the sha256 of its bytes."""
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
        raise ZendayaError(f"{file}: no traces in it: expected the {TRACES} of zendaya evaluate")
    return traces, hashlib.sha256(data).hexdigest()


def _trace(line: str, where: str) -> Trace:
    """The trace of a line, every field of its type and the steps as many as they say."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ZendayaError(f"{where}: not JSON: the file is damaged or no {TRACES}; evaluate again") from None
    names = {field.name for field in fields(Trace)}
    if isinstance(record, dict):
        record |= {name: record.get(name) for name in (*_COUNTS, "emissions_s")}  # traces from before there were any
    if not isinstance(record, dict) or record.keys() != names:
        raise ZendayaError(f"{where}: not a trace of this version: expected an object of the fields {', '.join(sorted(names))}")
    for name, kind in _SINGLE.items():
        if type(record[name]) is not kind:
            raise ZendayaError(f"{where}: {name} must be a {kind.__name__}: got {record[name]!r}")
    for name, kind in _LISTS.items():
        if not isinstance(record[name], list) or any(type(value) is not kind for value in record[name]):
            raise ZendayaError(f"{where}: {name} must be a list of {kind.__name__}: got {record[name]!r}")
        record[name] = tuple(record[name])
    for name in _TIMES:
        values = [] if record[name] is None else record[name]
        if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
            raise ZendayaError(f"{where}: {name} must be null or a list of numbers: got {values!r}")
    for name in _COUNTS:
        if record[name] is not None and (type(record[name]) is not int or record[name] < 0):
            raise ZendayaError(f"{where}: {name} must be null or a count: got {record[name]!r}")
    for name, value in record.items():
        _check_values(name, value if isinstance(value, list | tuple) else [value], where)
    trace = Trace(**record | {name: None if record[name] is None else tuple(map(float, record[name])) for name in _TIMES})
    _check_schedule(trace.schedule, where)
    if what := next(_contradictions(trace), ""):
        raise ZendayaError(f"{where}: the trace of clip {trace.clip!r} contradicts itself: {what}; the file was changed; evaluate again")
    return trace


def _check_values(name: str, values: Iterable[object], where: str) -> None:
    """Refuse half a character, which no encoding has, and a whole number that is none of a decode."""
    for value in values:
        if isinstance(value, str) and _HALF_PAIR.search(value):
            raise ZendayaError(
                f"{where}: {name} holds half a surrogate pair: got {ascii(value)[:80]}; the file was changed; evaluate again"
            )
        if isinstance(value, int) and not -MAX_COUNT < value < MAX_COUNT:
            got = f"a number of {value.bit_length()} bits"
            raise ZendayaError(f"{where}: {name} must lie below 2**53: got {got}; the file was changed; evaluate again")


def _check_schedule(text: str, where: str) -> None:
    """Refuse what neither a schedule nor a policy prints."""
    if is_policy(text):
        if not _POLICY.fullmatch(text):
            expected = "expected one as local-agreement=10, alignatt=4,chunk=2 or edatt=0.4,last=2,chunk=1"
            raise ZendayaError(f"{where}: not a policy: {text!r}; {expected}; the file was changed; evaluate again")
        return
    try:
        parse_schedule(text)
    except ScheduleError as error:
        raise ZendayaError(f"{where}: schedule: {error}; the file was changed; evaluate again") from None


def _contradictions(trace: Trace) -> Iterator[str]:
    """What no decode can have given, each once all before it is ruled out."""
    steps, source = len(trace.tokens), trace.num_source_tokens
    if trace.scale not in get_args(Scale):
        yield f"scale must be one of {', '.join(get_args(Scale))}, got {trace.scale!r}"
    if trace.window < 1 or source < 1 or not trace.references or not steps:
        yield "it needs a window, a source, a reference and a step"
    for name in ("windows", "horizons", "effective_horizons", "arrived"):
        if len(values := getattr(trace, name)) != steps:
            yield f"{name} must be as many as tokens, {steps}, got {len(values)}"
    if len(trace.reference_steps) not in (0, len(trace.references)):
        yield f"reference_steps must be none or as many as references, {len(trace.references)}, got {len(trace.reference_steps)}"
    if not all(1 <= count <= MAX_CURVE for count in (*trace.predicted_steps, *trace.reference_steps)):
        yield f"predicted_steps and reference_steps must lie in 1 … {MAX_CURVE}"
    yield from _impossible_times(trace)
    if set(trace.windows) != set(range(len(trace.predicted_steps))) or _falls(trace.windows):
        yield f"windows must be numbered from 0 and never go back, as many as predicted_steps, {len(trace.predicted_steps)}"
    if max(trace.windows) * trace.window >= source:
        yield f"window {max(trace.windows)} of {trace.window} tokens lies beyond the source of {source}"
    if not all(1 <= count <= source for count in trace.arrived) or _falls(trace.arrived):
        yield f"arrived must lie in 1 … {source} and never go back"
    for k, steps_of_k in itertools.groupby(zip(trace.windows, trace.horizons, trace.effective_horizons, strict=True), lambda step: step[0]):
        _, horizons, read = zip(*steps_of_k, strict=True)
        if min(horizons) < 0 or max(horizons) > trace.window or _falls(horizons):
            yield f"horizons of window {k} must lie in 0 … {trace.window} and never decrease"
        if min(read) < 0 or max(read) > trace.window_tokens(k) or _falls(read):
            yield f"effective_horizons of window {k} must lie in 0 … {trace.window_tokens(k)} and never decrease"
        if any(effective > horizon for effective, horizon in zip(read, horizons, strict=True)):
            yield f"effective_horizons of window {k} must not exceed its horizons"
    if any(delay > count for delay, count in zip(trace.delays, trace.arrived, strict=True)):
        yield "effective_horizons must not exceed what had arrived"


def _impossible_times(trace: Trace) -> Iterator[str]:
    arrivals_s, emissions_s = trace.arrivals_s, trace.emissions_s
    if arrivals_s is not None and len(arrivals_s) != trace.num_source_tokens:
        yield f"arrivals_s must be null or as many as source tokens, {trace.num_source_tokens}, got {len(arrivals_s)}"
    if emissions_s is not None and (len(emissions_s) != len(trace.tokens) or arrivals_s is None):
        yield f"emissions_s must be null, or as many as tokens, {len(trace.tokens)}, with arrivals_s beside them"
    if not all(math.isfinite(time_s) for times in (arrivals_s, emissions_s) for time_s in times or ()):
        yield "arrivals_s and emissions_s must be finite"
    if arrivals_s and (arrivals_s[0] < 0 or _falls(arrivals_s)):
        yield "arrivals_s must be at least 0 and never go back"


def _falls(values: Sequence[float]) -> bool:
    """Whether a value is below the one before."""
    return any(after < before for before, after in itertools.pairwise(values))


def check_free(folder: Path, *, force: bool, names: Sequence[str] = (TRACES, SCORES)) -> None:
    """Refuse a folder whose results would be replaced, unless that is wanted, and a file in its place."""
    if file := next((path for path in (folder, *folder.parents) if path.is_file()), None):
        place = "" if file == folder else f", within which {folder} cannot be"
        raise ZendayaError(f"{file}: a file{place}: expected a folder for {' and '.join(names)}, or none yet; give another --out")
    held = [name for name in names if (folder / name).exists()]
    if held and not force:
        raise ZendayaError(f"{folder}: already holds {' and '.join(held)}: give another --out, or --force to replace them")


class Unfinished:
    """The traces of an evaluation that is not finished: a line each as they come, below the signature of what they are part of."""

    def __init__(self, folder: Path, signature: Mapping[str, Any], *, discard: bool = False) -> None:
        """Go on with those that are there; with `discard` begin anew where they are damaged or part of another evaluation."""
        self.traces: dict[tuple[str, str, str], Trace] = {}
        """Those of an evaluation that was interrupted, by schedule, split and clip."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / UNFINISHED
        wanted = json.loads(json.dumps(signature))
        head = json.dumps(wanted, ensure_ascii=False).encode() + b"\n"
        kept = b""
        if self._path.exists():
            lines = self._path.read_bytes().split(b"\n")
            whole = lines[1:-1]  # a last one that was cut is decoded again
            try:
                if whole and (other := self._difference(lines[0], wanted)):
                    raise ZendayaError(other)
                traces = [self._read(line, number) for number, line in enumerate(whole, start=2)]
                self.traces = {(trace.schedule, trace.split, trace.clip): trace for trace in traces}
                kept = b"".join(line + b"\n" for line in whole)
            except ZendayaError:
                if not discard:
                    raise
        write_atomically(self._path, head + kept)
        self._file = self._path.open("ab")

    def _read(self, line: bytes, number: int) -> Trace:
        where = f"{self._path}:{number}"
        try:
            return _trace(line.decode(), where)
        except UnicodeDecodeError:
            raise ZendayaError(f"{where}: not UTF-8: the file is damaged; remove it, or evaluate with --force") from None
        except ZendayaError as error:
            raise ZendayaError(f"{error}, after removing the file, or evaluate with --force") from None

    def _difference(self, line: bytes, wanted: Mapping[str, Any]) -> str:
        """Why what is there cannot be gone on with; empty if it can. A checkpoint is the same wherever it lies."""
        try:
            saved = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            return f"{self._path}:1: damaged: expected the signature of an evaluation; remove the file, or evaluate with --force"
        for key in sorted((saved.keys() | wanted.keys()) - {"checkpoint"}):
            if saved.get(key) != wanted.get(key):
                return (
                    f"{self._path.parent}: holds an unfinished evaluation whose {key} is {saved.get(key)!r}, not {wanted.get(key)!r}: "
                    f"go on with that, give another --out, or --force to begin anew"
                )
        return ""

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, trace: Trace) -> None:
        """Keep a trace, whatever happens next."""
        self._file.write(_to_bytes([trace]))
        self._file.flush()


def write_traces(folder: Path, traces: Iterable[Trace]) -> str:
    """Write a folder's traces, whole or not at all, and give their sha256; scores of other traces do not stay beside them."""
    data = _to_bytes(traces)
    write_atomically(folder / TRACES, data, before_rename=lambda: (folder / SCORES).unlink(missing_ok=True))
    (folder / UNFINISHED).unlink(missing_ok=True)
    return hashlib.sha256(data).hexdigest()


def write_scores(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a folder's scores, whole or not at all."""
    write_atomically(folder / SCORES, json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n")


def scores_record(scores: Sequence[Scores], signature: Mapping[str, Any], traces_sha256: str) -> dict[str, Any]:
    """What `scores.json` holds: what was evaluated, and each schedule's scores with a signature of its own."""
    rows = [{"signature": one_line(one, signature), **asdict(one)} for one in scores]
    return {"signature": {**signature, "traces_sha256": traces_sha256}, "scores": rows}


def one_line(scores: Scores, signature: Mapping[str, Any]) -> str:
    """All that a row of scores depends on, in one line, its metrics' own signatures aside; what is not known is a question mark."""

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
    """Scores of a traces file, and their record, signed as the evaluation was if its `scores.json` still stands beside the traces.

    Metrics and normalisation not given are those of that evaluation, or `bleu` and `english`.
    """
    traces, sha256 = read_traces(path)
    signature = signature_beside(path, sha256)
    norm: Normalise = normalise if normalise is not None else signature.get("normalise", "english")
    names = wanted_metrics(signature.get("metrics", ("bleu",)) if metrics is None else metrics, normalise=norm)
    scores = score(traces, metrics=names, normalise=norm)
    signature |= {"metrics": list(names), "normalise": norm, "scored_by": zendaya.__version__}
    return scores, scores_record(scores, signature, sha256)


def signature_beside(path: str | Path, sha256: str) -> dict[str, Any]:
    """The signature of the scores beside a traces file; where there are none nothing is known but the traces, and those of others are an
    error: the traces were cut or changed since."""
    file = Path(path).expanduser()
    folder = file if file.is_dir() else file.parent
    try:
        signature = json.loads((folder / SCORES).read_bytes())["signature"]
        known = set(signature["metrics"]) <= set(METRICS)
        if signature["traces_sha256"] != sha256:
            raise ZendayaError(
                f"{path}: not the traces that {folder / SCORES} was made from: they were cut or changed since; evaluate again, or remove "
                f"{SCORES} to score what is there"
            )
        return dict(signature) if known and signature["normalise"] in get_args(Normalise) else {}
    except ZendayaError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
