"""The native engine: C for CPUs, called through ctypes, which releases the interpreter's lock during a call.

native/engine.h states which calls may run at the same time and who owns memory. This file keeps to it: a cache holds its engine, so
that streams are freed before their model; a stream is reused or freed only after its cache is gone; nothing is freed at interpreter
exit, where another thread may still be in a call. One cache serves one thread at a time; an engine serves any number of threads.

Shape suffixes as in decoder.py; S streams per call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zendaya.errors import ConfigError, SourceError
from zendaya.nn.config import DecoderConfig
from zendaya.nn.decoder import AttentionTap, Decoder, Taps
from zendaya.runtime.options import Precision

LIBRARY = "zendaya.runtime.engine._native"
ABI = 6
"""Version of the library's interface; as in engine.h."""
READ_TOKENS = 256
"""Source tokens per call of the library, which bounds its memory; any chunking gives the same bits."""
MAX_SPARE_STREAMS = 64
"""Streams whose memory is kept for reuse."""
MAX_THREADS = 256
MAX_CALL_ROWS = 1 << 16
OK, NO_MEMORY, BAD_ARGUMENT, BAD_STREAM, INTERNAL = 0, -1, -2, -6, -10
"""Error codes of engine.h that are handled by name."""


class _Shape(ctypes.Structure):
    """`zd_shape`."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "vocab_size", "source_dim", "max_source", "max_rows", "dim", "layers", "heads", "head_dim", "ffn_dim",
            "relu", "pre_norm", "embed_source", "source_vocab", "source_layers",
        )
    ]  # fmt: skip

    @classmethod
    def of(cls, config: DecoderConfig) -> _Shape:
        return cls(
            config.vocab_size, config.source_dim, config.max_source, config.max_rows, config.dim, config.layers, config.heads,
            config.head_dim, config.ffn_dim, config.activation == "relu", config.norm == "pre", config.embed_source,
            config.source_vocab, config.source_layers,
        )  # fmt: skip


class _Weight(ctypes.Structure):
    """`zd_weight`: one entry of the library's weight list."""

    _fields_ = [("name", ctypes.c_char * 96), ("rows", ctypes.c_int64), ("columns", ctypes.c_int64)]


class _Tensor(ctypes.Structure):
    """`zd_tensor`: one tensor that the library copies."""

    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_int64)]


def _path() -> str | None:
    """Path of the built library, or None."""
    found = importlib.util.find_spec(LIBRARY)
    return None if found is None else found.origin


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    path = _path()
    if path is None:
        return "the native engine was not built when the package was installed: install a C compiler (gcc or clang), then the package again"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return f"the native engine was built but cannot be loaded: {error}"
    abi = library.zd_abi() if hasattr(library, "zd_abi") else "older"
    if abi != ABI:
        return f"the native engine was built by another version of the package (interface {abi}, expected {ABI}): install the package again"
    pointer, number, text, shape = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Shape)
    for name, result, arguments in (
        ("zd_error_text", text, [number]),
        ("zd_kernel_name", text, [number]),
        ("zd_num_weights", number, [shape]),
        ("zd_weight_at", number, [shape, number, ctypes.POINTER(_Weight)]),
        ("zd_model_new", number, [shape, ctypes.POINTER(_Tensor), number, number, number, text, ctypes.POINTER(pointer)]),
        ("zd_model_free", None, [pointer]),
        ("zd_stream_new", pointer, [pointer]),
        ("zd_stream_clone", pointer, [pointer]),
        ("zd_stream_free", None, [pointer]),
        ("zd_stream_num_rows", number, [pointer]),
        ("zd_stream_num_source", number, [pointer]),
        ("zd_stream_num_bytes", ctypes.c_int64, [pointer]),
        ("zd_stream_truncate", number, [pointer, number]),
        ("zd_stream_clear_source", number, [pointer]),
        ("zd_stream_keep_source", number, [pointer, number]),
        ("zd_stream_reset", number, [pointer]),
        ("zd_read", number, [pointer, number, pointer, pointer, pointer]),
        ("zd_rows", number, [pointer, number, pointer, pointer, pointer, pointer, pointer, pointer, pointer]),
        ("zd_logits", number, [pointer, number, pointer, pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def missing() -> str | None:
    """Why the native engine is not available; None if it is."""
    library = _library()
    return library if isinstance(library, str) else None


def _loaded() -> ctypes.CDLL:
    library = _library()
    if isinstance(library, str):
        raise ConfigError(f"{library}; or use the 'torch' engine")
    return library


class NativeCache:
    """The state of an incremental decode of `batch` streams in the native engine; the engine reuses its memory when it is dropped."""

    def __init__(self, engine: NativeEngine, streams: list[int]) -> None:
        self.batch = len(streams)
        self._engine, self._streams = engine, streams
        weakref.finalize(self, engine._give_back, streams).atexit = False

    @property
    def num_source(self) -> int:
        return int(self._engine._library.zd_stream_num_source(self._streams[0]))

    @property
    def num_rows(self) -> int:
        return int(self._engine._library.zd_stream_num_rows(self._streams[0]))

    @num_rows.setter
    def num_rows(self, rows: int) -> None:
        for stream in self._streams:
            if self._engine._library.zd_stream_truncate(stream, rows):
                raise SourceError(f"a cache of {self.num_rows} text rows can keep 0 … {self.num_rows} of them: got {rows}")

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values, which grows with the tokens read and written."""
        return sum(int(self._engine._library.zd_stream_num_bytes(stream)) for stream in self._streams)

    def clone(self) -> NativeCache:
        """An independent copy."""
        engine = self._engine
        return NativeCache(engine, [_allocated(engine._library.zd_stream_clone(stream)) for stream in self._streams])

    def forget_source(self) -> None:
        """Drop the source and keep the text rows: the next tokens read are those of a new window."""
        for stream in self._streams:
            _check(self._engine._library, self._engine._library.zd_stream_clear_source(stream))

    def keep_source(self, count: int) -> None:
        """Withdraw the source tokens after the first `count`; after an unreadable token, all of them. Text rows stay."""
        for stream in self._streams:
            _check(self._engine._library, self._engine._library.zd_stream_keep_source(stream, max(0, count)))

    def forget_text(self) -> None:
        """Drop the text rows and keep the source."""
        self.num_rows = 0


class NativeEngine:
    """A decoder's weights, packed for this processor, and the threads that compute with them.

    The weights are copied: later changes to the decoder have no effect. In int8, matrices have a scale per row, activations are
    quantised per token, and keys and values have a scale per position. A stream's bits do not depend on the other streams in a call
    or on the number of threads.
    """

    def __init__(
        self, decoder: Decoder, *, precision: Precision = "float32", threads: int | None = None, kernels: str | None = None
    ) -> None:  # fmt: skip
        self._library = _loaded()
        self.config, self.precision = decoder.config, precision
        self.threads = _usable_threads() if threads is None else threads
        if precision not in ("float32", "int8"):
            raise ConfigError(f"precision must be 'float32' or 'int8': got {precision!r}")
        if not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"threads must be 1 … {MAX_THREADS}: got {threads}")
        if kernels is not None and kernels not in self.kernels():
            raise ConfigError(f"this processor runs the kernels {', '.join(self.kernels())}: got {kernels!r}")
        shape, model = _Shape.of(self.config), ctypes.c_void_p()
        weights = _weights(self._library, shape, decoder)
        tensors = (_Tensor * len(weights))(*(_Tensor(name.encode(), tensor.data_ptr(), tensor.numel()) for name, tensor in weights))
        _check(
            self._library,
            self._library.zd_model_new(
                shape, tensors, len(weights), precision == "int8", self.threads, kernels.encode() if kernels else None, ctypes.byref(model)
            ),
        )
        self._model = _allocated(model.value)
        self._spare: list[int] = []
        self._logits: list[tuple[npt.NDArray[np.float32], weakref.ref[npt.NDArray[np.float32]]]] = []
        weakref.finalize(self, _free, self._library, self._model, self._spare).atexit = False

    @staticmethod
    def kernels() -> list[str]:
        """The kernels that this processor can run, best first."""
        return [name.decode() for name in iter(map(_loaded().zd_kernel_name, itertools.count()).__next__, None)]

    def start(self, batch: int = 1) -> NativeCache:
        """A fresh cache: nothing read, nothing written."""
        return NativeCache(self, [self._stream() for _ in range(batch)])

    def _stream(self) -> int:
        try:
            return self._spare.pop()
        except IndexError:
            return _allocated(self._library.zd_stream_new(self._model))

    def _streams_of(self, *caches: NativeCache) -> list[int]:
        """The streams of caches that this engine started."""
        for cache in caches:
            if getattr(cache, "_engine", None) is not self:
                raise SourceError("a cache works only with the engine that started it: got a cache of another engine")
        return [stream for cache in caches for stream in cache._streams]

    def _give_back(self, streams: list[int]) -> None:
        """Take back the streams of a dropped cache; runs in any thread, and list operations are atomic."""
        for stream in streams:
            if len(self._spare) < MAX_SPARE_STREAMS:
                self._library.zd_stream_reset(stream)
                self._spare.append(stream)
            else:
                self._library.zd_stream_free(stream)

    def read(self, cache: NativeCache, source_BTE: Tensor) -> None:
        """Read source tokens: each is projected once, into the cache; any chunking gives the same bits."""
        if source_BTE.ndim != 3 or source_BTE.shape[0] != cache.batch:
            raise SourceError(
                f"source tokens must have shape ({cache.batch}, any, {self.config.source_dim}): got {tuple(source_BTE.shape)}"
            )
        self._read(self._streams_of(cache), list(source_BTE))

    def read_many(self, caches: Sequence[NativeCache], tokens: Sequence[Tensor]) -> None:
        """Read source tokens (T, E) of many streams in one call, any number per stream."""
        self._read(self._one_each(caches), tokens)

    def _read(self, streams: Sequence[int], tokens: Sequence[Tensor]) -> None:
        for stream, source_TE in zip(streams, tokens, strict=True):
            if source_TE.ndim != 2 or source_TE.shape[1] != self.config.source_dim:
                raise SourceError(f"source tokens must have shape (any, {self.config.source_dim}): got {tuple(source_TE.shape)}")
            total = int(self._library.zd_stream_num_source(stream)) + source_TE.shape[0]
            if total > self.config.max_source:
                raise SourceError(f"a window holds at most {self.config.max_source} source tokens: got {total}")
        waiting = [(stream, source_TE) for stream, source_TE in zip(streams, tokens, strict=True) if source_TE.shape[0]]
        while waiting:
            pieces, left, room = [], [], READ_TOKENS
            for stream, rest in waiting:
                if rest.shape[0] <= room:
                    pieces.append((stream, rest))
                else:
                    pieces += [(stream, rest[:room])] if room else []
                    left.append((stream, rest[room:]))
                room -= min(room, rest.shape[0])
            handles, counts = _pointers([stream for stream, _ in pieces]), _numbers([len(piece) for _, piece in pieces])
            source = torch.cat([piece for _, piece in pieces]).detach().to("cpu", torch.float32).contiguous()
            result = self._library.zd_read(self._model, len(pieces), _address(handles), _address(counts), source.data_ptr())
            _check(self._library, result)
            waiting = left

    def prefill(self, cache: NativeCache, ids_BN: Tensor, horizon: int, *, tap: AttentionTap | None = None) -> Tensor:
        """Write given rows, all reading `[:horizon]`; returns the logits of the last. A `tap` gets its cross-attention."""
        return self._write(self._streams_of(cache), ids_BN.tolist(), [int(horizon)] * cache.batch, [tap] if tap else ())

    def step(self, cache: NativeCache, ids_B: Tensor, horizons: int | Sequence[int], *, tap: AttentionTap | None = None) -> Tensor:
        """One decode step: a row with the last token, reading `[:Ω]` of each stream's source; logits (B, V)."""
        per_stream = [int(h) for h in horizons] if isinstance(horizons, Sequence) else [int(horizons)] * cache.batch
        return self._write(self._streams_of(cache), ids_B[:, None].tolist(), per_stream, [tap] if tap else ())

    def rows(self, caches: Sequence[NativeCache], ids: Sequence[Sequence[int]], horizons: Sequence[int], taps: Taps = ()) -> Tensor:
        """Rows of many streams in one call, any number per stream, each reading its own horizon: logits (S, V) of the last rows."""
        return self._write(self._one_each(caches), ids, horizons, taps)

    def _one_each(self, caches: Sequence[NativeCache]) -> list[int]:
        streams = self._streams_of(*caches)
        if len(streams) != len(caches):
            raise SourceError(
                f"a call for many streams takes caches of one stream each: got {len(streams)} streams in {len(caches)} caches"
            )
        return streams

    def _write(self, streams: Sequence[int], ids: Sequence[Sequence[int]], horizons: Sequence[int], taps: Taps) -> Tensor:
        if not len(streams) == len(ids) == len(horizons) == len(taps or streams) or not streams:
            raise SourceError(
                f"{len(streams)} streams need ids, a horizon and a tap each (or no tap): got {len(ids)}, {len(horizons)} and {len(taps)}"
            )
        size = (self.config.layers, self.config.heads)
        tapped = [(n, tap, np.zeros((*size, max(0, horizons[n])), np.float32)) for n, tap in enumerate(taps) if tap is not None]
        logits_SV = self._logits_buffer(len(streams))
        choosy = any(tap.unless for _, tap, _ in tapped)
        last_SD = np.empty((len(streams), self.config.dim), np.float32) if choosy else None
        handles = _pointers(streams)
        try:
            counts, flat, reads = _numbers([len(rows) for rows in ids]), _numbers([i for rows in ids for i in rows]), _numbers(horizons)
        except OverflowError:
            self._refuse(BAD_ARGUMENT, streams, ids, horizons)
        addresses = _pointers([0] * len(streams))
        for n, _, weights_LHF in tapped:
            addresses[n] = _address(weights_LHF)
        result = self._library.zd_rows(
            self._model, len(streams), _address(handles), _address(counts), _address(flat), _address(reads), _address(logits_SV),
            _address(addresses) if tapped else None, None if last_SD is None else _address(last_SD),
        )  # fmt: skip
        if result not in (OK, NO_MEMORY, INTERNAL):
            self._refuse(result, streams, ids, horizons)
        _check(self._library, result)
        for _, tap, weights_LHF in tapped:
            tap.weights_F = [torch.from_numpy(weights_LHF[layer, head]) for layer, head in sorted(tap.heads, key=lambda place: place[0])]
        if last_SD is not None:
            self._finish(logits_SV, last_SD, {n for n, tap, _ in tapped if tap.needless()})
        return torch.from_numpy(logits_SV)

    def _finish(self, logits_SV: npt.NDArray[np.float32], last_SD: npt.NDArray[np.float32], needless: set[int]) -> None:
        """The logits of the last rows but those not needed, which get zeros, or NaN if the row is not finite."""
        wanted = [n for n in range(len(last_SD)) if n not in needless]
        for n in needless:
            logits_SV[n] = 0.0 if np.isfinite(last_SD[n]).all() else np.nan
        if wanted:
            to_WV = logits_SV if not needless else np.empty((len(wanted), logits_SV.shape[1]), np.float32)
            rows_WD = last_SD if not needless else last_SD[wanted]
            _check(self._library, self._library.zd_logits(self._model, len(wanted), _address(rows_WD), _address(to_WV)))
            if needless:
                logits_SV[wanted] = to_WV

    def _logits_buffer(self, rows: int) -> npt.NDArray[np.float32]:
        """Memory for logits (S, V): that of an earlier call if its logits are gone, because fresh pages cost more than the logits."""
        kept, given = self._logits.pop() if self._logits else (None, None)
        if kept is None or len(kept) < rows or (given is not None and given() is not None):
            kept = np.empty((rows, self.config.vocab_size), np.float32)
        logits_SV = kept[:rows]
        self._logits.append((kept, weakref.ref(logits_SV)))
        return logits_SV

    def _refuse(self, code: int, streams: Sequence[int], ids: Sequence[Sequence[int]], horizons: Sequence[int]) -> NoReturn:
        """Raise the error of rows that the library refused, with the numbers that are wrong."""
        if code == BAD_STREAM:
            raise SourceError("a call writes each stream once: the same stream was given twice")
        for stream, rows, horizon in zip(streams, ids, horizons, strict=True):
            arrived, written = self._library.zd_stream_num_source(stream), self._library.zd_stream_num_rows(stream)
            if not 0 <= horizon <= arrived:
                raise SourceError(f"a step may read at most the {arrived} source tokens that have arrived: got horizons {list(horizons)}")
            if not rows or min(rows) < 0 or max(rows) >= self.config.vocab_size:
                raise SourceError(f"a stream needs one or more token ids below {self.config.vocab_size}: got {list(rows)[:8]}")
            if written + len(rows) > self.config.max_rows:
                raise SourceError(f"the text is longer than the decoder's {self.config.max_rows} rows: got {written + len(rows)}")
        raise SourceError(f"a call takes at most {MAX_CALL_ROWS} rows: got {sum(map(len, ids))}")


def _weights(library: ctypes.CDLL, shape: _Shape, decoder: Decoder) -> list[tuple[str, Tensor]]:
    """The decoder's tensors by name, in the order of the library's weight list, whose names and shapes must be the decoder's."""
    expected: dict[str, tuple[int, ...]] = {}
    for i in range(library.zd_num_weights(shape)):
        weight = _Weight()
        _check(library, library.zd_weight_at(shape, i, weight))
        expected[weight.name.decode()] = (weight.rows, weight.columns) if weight.columns else (weight.rows,)
    tensors = decoder.state_dict()
    for name in [*expected, *tensors]:
        listed, got = expected.get(name), tuple(tensors[name].shape) if name in tensors else None
        if listed != got:
            raise ConfigError(
                f"the decoder's weights are not those of the native engine: {name}: expected {listed or 'no such tensor'}: "
                f"got {got or 'no such tensor'}; install the package again, or use the 'torch' engine"
            )
    return [(name, tensors[name].detach().to("cpu", torch.float32).contiguous()) for name in expected]


def _usable_threads() -> int:
    """Number of processors that this process may use."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _numbers(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def _pointers(values: Sequence[int]) -> npt.NDArray[np.uintp]:
    return np.array(values, np.uintp)


def _address(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


def _allocated(pointer: int | None) -> int:
    if not pointer:
        raise MemoryError("the native engine found no memory for a stream")
    return pointer


def _check(library: ctypes.CDLL, code: int) -> None:
    """Raise the error of a call of the library, if it returned one."""
    if code == OK:
        return
    text = f"the native engine refused a call: {library.zd_error_text(code).decode()} (error {code})"
    if code == NO_MEMORY:
        raise MemoryError(text)
    if code == INTERNAL:
        raise RuntimeError(text)
    raise ConfigError(text)


def _free(library: ctypes.CDLL, model: int, spare: list[int]) -> None:
    for stream in spare:
        library.zd_stream_free(stream)
    spare.clear()
    library.zd_model_free(model)
