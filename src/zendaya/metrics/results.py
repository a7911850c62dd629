"""The two files an evaluation leaves: `traces.jsonl`, a line a clip and schedule, and `scores.json`, made from it, with its signature."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import zendaya
from zendaya.atomic import write_atomically
from zendaya.errors import ZendayaError
from zendaya.metrics.quality import METRICS, Normalise, check_metrics
from zendaya.metrics.scores import Scores, score
from zendaya.records import Scale, Trace
from zendaya.schedule import is_policy, parse_schedule

TRACES, SCORES, UNFINISHED = "traces.jsonl", "scores.json", "traces.unfinished.jsonl"

_LISTS = {"references": str, "reference_steps": int, "predicted_steps": int, "tokens": int, "windows": int, "horizons": int}
_LISTS |= {"effective_horizons": int, "arrived": int}
_COUNTS = ("decoder_rows", "revised")
_TIMES = ("arrivals_s", "emissions_s")
_SINGLE = {"clip": str, "split": str, "schedule": str, "scale": str, "window": int, "num_source_tokens": int, "text": str}


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
        if record[name] is not None:
            if not isinstance(record[name], list) or any(type(value) not in (int, float) for value in record[name]):
                raise ZendayaError(f"{where}: {name} must be null or a list of numbers: got {record[name]!r}")
            record[name] = tuple(map(float, record[name]))
    for name in _COUNTS:
        if record[name] is not None and (type(record[name]) is not int or record[name] < 0):
            raise ZendayaError(f"{where}: {name} must be null or a count: got {record[name]!r}")
    trace = Trace(**record)
    if not is_policy(trace.schedule):
        parse_schedule(trace.schedule)
    if not _consistent(trace):
        raise ZendayaError(f"{where}: the trace of clip {trace.clip!r} contradicts itself: the file was changed; evaluate again")
    return trace


def _consistent(trace: Trace) -> bool:
    steps, source = len(trace.tokens), trace.num_source_tokens
    per_step = (trace.windows, trace.horizons, trace.effective_horizons, trace.arrived)
    return (
        trace.scale in get_args(Scale)
        and steps > 0
        and all(len(values) == steps for values in per_step)
        and trace.window >= 1
        and source >= 1
        and bool(trace.references)
        and (trace.arrivals_s is None or len(trace.arrivals_s) == source)
        and (trace.emissions_s is None or (len(trace.emissions_s) == steps and trace.arrivals_s is not None))
        and all(math.isfinite(time_s) for times in (trace.arrivals_s, trace.emissions_s) for time_s in times or ())
        and set(trace.windows) == set(range(len(trace.predicted_steps)))
        and all(count >= 1 for count in (*trace.predicted_steps, *trace.reference_steps))
        and all(1 <= count <= source for count in trace.arrived)
        and max(trace.windows) * trace.window < source
        and all(0 <= read <= trace.window_tokens(k) for k, read in zip(trace.windows, trace.effective_horizons, strict=True))
    )


def check_free(folder: Path, *, force: bool, names: Sequence[str] = (TRACES, SCORES)) -> None:
    """Refuse a folder whose results would be replaced, unless that is wanted."""
    held = [name for name in names if (folder / name).exists()]
    if held and not force:
        raise ZendayaError(f"{folder}: already holds {' and '.join(held)}: give another --out, or --force to replace them")


class Unfinished:
    """The traces of an evaluation that is not finished: a line each as they come, below the signature of what they are part of."""

    def __init__(self, folder: Path, signature: Mapping[str, Any], *, force: bool, discard: bool = False) -> None:
        """With `force` begin anew; with `discard`, where those that are there are part of another evaluation."""
        self.traces: dict[tuple[str, str, str], Trace] = {}
        """Those of an evaluation that was interrupted, by schedule, split and clip."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / UNFINISHED
        wanted = json.loads(json.dumps(signature))
        head = json.dumps(wanted, ensure_ascii=False).encode() + b"\n"
        kept = b""
        if self._path.exists() and not force:
            lines = self._path.read_bytes().splitlines(keepends=True)
            whole = [line for line in lines[1:] if line.endswith(b"\n")]  # a last one that was cut is decoded again
            other = self._difference(lines[0], wanted) if whole else ""
            if other and not discard:
                raise ZendayaError(other)
            if whole and not other:
                for number, line in enumerate(whole, start=2):
                    trace = _trace(line.decode(), f"{self._path}:{number}")
                    self.traces[trace.schedule, trace.split, trace.clip] = trace
                kept = b"".join(whole)
        write_atomically(self._path, head + kept)
        self._file = self._path.open("ab")

    def _difference(self, line: bytes, wanted: Mapping[str, Any]) -> str:
        """Why what is there cannot be gone on with; empty if it can. A checkpoint is the same wherever it lies."""
        try:
            saved = dict(json.loads(line))
        except (ValueError, TypeError):
            return f"{self._path}: damaged: remove it, or evaluate with --force"
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
    tokens = f"{known('tokenizer_sha256', 8)}{',lower' if signature.get('lower') else ''}"
    return (
        f"zendaya:{known('version')}|{scores.schedule}|scale:{scores.scale}{width}{history}|tok:{tokens}|seed:{known('seed')}"
        f"|model:{known('checkpoint_sha256', 8)}|data:{known('corpus')},{known('split')},{known('data_sha256', 8)}|clips:{scores.num_clips}"
        f"|engine:{known('engine')}|clock:{known('clock')}"
    )


def rescore(
    path: str | Path, *, metrics: Sequence[str] | None = None, normalise: Normalise | None = None
) -> tuple[tuple[Scores, ...], dict[str, Any]]:
    """Scores of a traces file, and their record, signed as the evaluation was if its `scores.json` still stands beside the traces.

    Metrics and normalisation not given are those of that evaluation, or `bleu` and `english`.
    """
    traces, sha256 = read_traces(path)
    signature = signature_beside(path, sha256)
    names = tuple(metrics) if metrics is not None else tuple(signature.get("metrics", ("bleu",)))
    norm: Normalise = normalise if normalise is not None else signature.get("normalise", "english")
    check_metrics(names, normalise=norm)
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
