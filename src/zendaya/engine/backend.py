"""The native back end: C for CPUs, called through ctypes, which lets go of the interpreter's lock meanwhile.

Shape suffixes as in decoder.py; S streams of a call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zendaya.decoder import Decoder, DecoderConfig, Gaze
from zendaya.errors import ConfigError, SourceError

Precision = Literal["float32", "int8"]
LIBRARY = "zendaya.engine._native"
READ = 256
"""Source tokens projected in one call: what room a call takes is bounded, and any chunking gives the same bits."""
SPARE = 64
"""Streams whose memory is kept for the next ones."""
MOST_THREADS = 256
MOST_INPUTS = 1 << 16
"""Products of so many bytes still fit in 32 bits."""
NO_MEMORY, BAD_CALL = -1, -2
MOST_ROWS = 1 << 16
"""Of a call."""
ABI = 2
"""Which version of the library's functions is called here; as in engine.h."""


class _Shape(ctypes.Structure):
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


def _path() -> str | None:
    """Where the library was built, if it was."""
    found = importlib.util.find_spec(LIBRARY)
    return None if found is None else found.origin


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    path = _path()
    if path is None:
        return "the native engine was not built when the package was installed: install a C compiler (gcc or clang), then the package again"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return f"the native engine was built but cannot be loaded: {error}"
    pointer, number = ctypes.c_void_p, ctypes.c_int
    abi = library.zendaya_abi() if hasattr(library, "zendaya_abi") else 1
    if abi != ABI:
        return (
            f"the native engine was built by another version of the package (its interface is {abi}, not {ABI}): install the package again"
        )
    for name, result, arguments in (
        ("kernels", ctypes.c_char_p, [number]),
        ("model_new", pointer, [ctypes.POINTER(_Shape), pointer, pointer, number, number, number, ctypes.c_char_p]),
        ("model_free", None, [pointer]),
        ("stream_new", pointer, [pointer]),
        ("stream_clone", pointer, [pointer, pointer]),
        ("stream_free", None, [pointer]),
        ("stream_rows", number, [pointer]),
        ("stream_source", number, [pointer]),
        ("stream_bytes", ctypes.c_int64, [pointer, pointer]),
        ("stream_keep", number, [pointer, number]),
        ("stream_forget_source", None, [pointer]),
        ("read", number, [pointer, number, pointer, pointer, pointer]),
        ("rows", number, [pointer, number, pointer, pointer, pointer, pointer, pointer, pointer]),
    ):
        function = getattr(library, f"zendaya_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def missing() -> str | None:
    """Why the native back end cannot be had; None where it can."""
    library = _library()
    return library if isinstance(library, str) else None


def _loaded() -> ctypes.CDLL:
    library = _library()
    if isinstance(library, str):
        raise ConfigError(f"{library}; or take the 'torch' engine")
    return library


class NativeCache:
    """The state of an incremental decode of `batch` streams in the native engine; its memory goes to the next one when it is dropped."""

    def __init__(self, engine: NativeEngine, streams: list[int]) -> None:
        self.batch = len(streams)
        self._engine, self._streams = engine, streams
        weakref.finalize(self, engine._give_back, streams)

    @property
    def num_source(self) -> int:
        return int(self._engine._library.zendaya_stream_source(self._streams[0]))

    @property
    def num_rows(self) -> int:
        return int(self._engine._library.zendaya_stream_rows(self._streams[0]))

    @num_rows.setter
    def num_rows(self, rows: int) -> None:
        for stream in self._streams:
            if self._engine._library.zendaya_stream_keep(stream, rows):
                raise SourceError(f"of {self.num_rows} rows of text, 0 … {self.num_rows} can be kept: got {rows}")

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values, which follows what was read and written."""
        engine = self._engine
        return sum(int(engine._library.zendaya_stream_bytes(engine._model, stream)) for stream in self._streams)

    def clone(self) -> NativeCache:
        """An independent copy."""
        engine = self._engine
        return NativeCache(engine, [_found(engine._library.zendaya_stream_clone(engine._model, stream)) for stream in self._streams])

    def forget_source(self) -> None:
        """Drop the source and keep the text rows: the next tokens read are those of a new window."""
        for stream in self._streams:
            self._engine._library.zendaya_stream_forget_source(stream)

    def forget_text(self) -> None:
        """Drop the text rows and keep the source."""
        self.num_rows = 0


class NativeEngine:
    """A decoder's weights, packed for this processor, and the threads that compute with them.

    The weights are copied: what the decoder learns later, this engine does not know. In int8 every matrix is bytes with a scale a row,
    activations are quantised token by token, and keys and values are bytes with a scale each. What a stream gets is the same to the bit
    whatever streams are computed with it, with any number of threads.
    """

    def __init__(
        self, decoder: Decoder, *, precision: Precision = "float32", threads: int | None = None, kernels: str | None = None
    ) -> None:  # fmt: skip
        self._library = _loaded()
        self.config, self.precision = decoder.config, precision
        self.threads = _usable_threads() if threads is None else threads
        if precision not in ("float32", "int8"):
            raise ConfigError(f"precision must be 'float32' or 'int8': got {precision!r}")
        if not 1 <= self.threads <= MOST_THREADS:
            raise ConfigError(f"threads must lie in 1 … {MOST_THREADS}: got {threads}")
        if kernels is not None and kernels not in self.kernels():
            raise ConfigError(f"this processor runs the kernels {', '.join(self.kernels())}: got {kernels!r}")
        widest = max(self.config.dim, self.config.ffn_dim, self.config.source_dim, self.config.heads * self.config.head_dim)
        if widest > MOST_INPUTS:
            raise ConfigError(f"the native engine multiplies rows of at most {MOST_INPUTS} numbers: this decoder has {widest}")
        tensors = [tensor.detach().to("cpu", torch.float32).contiguous() for tensor in _in_order(decoder)]
        pointers = np.array([tensor.data_ptr() for tensor in tensors], np.uintp)
        sizes = np.array([tensor.numel() for tensor in tensors], np.int64)
        model = self._library.zendaya_model_new(
            ctypes.byref(_Shape.of(self.config)), pointers.ctypes.data, sizes.ctypes.data, len(tensors), precision == "int8",
            self.threads, kernels.encode() if kernels else None,
        )  # fmt: skip
        self._model = _found(model)
        self._spare: list[int] = []
        self._logits: list[tuple[npt.NDArray[np.float32], weakref.ref[npt.NDArray[np.float32]]]] = []
        weakref.finalize(self, _free, self._library, self._model, self._spare)

    @staticmethod
    def kernels() -> list[str]:
        """The kernels that this processor can run, best first."""
        names, place = [], 0
        while (name := _loaded().zendaya_kernels(place)) is not None:
            names.append(name.decode())
            place += 1
        return names

    def start(self, batch: int = 1) -> NativeCache:
        """A fresh cache: nothing read, nothing written."""
        return NativeCache(self, [self._stream() for _ in range(batch)])

    def _stream(self) -> int:
        try:
            return self._spare.pop()
        except IndexError:
            return _found(self._library.zendaya_stream_new(self._model))

    def _streams_of(self, *caches: NativeCache) -> list[int]:
        """The streams of caches that this engine started; another's memory has another shape."""
        for cache in caches:
            if getattr(cache, "_engine", None) is not self:
                raise SourceError("a cache belongs to the engine that started it: got one of another")
        return [stream for cache in caches for stream in cache._streams]

    def _give_back(self, streams: list[int]) -> None:
        for stream in streams:
            if len(self._spare) < SPARE:
                self._library.zendaya_stream_keep(stream, 0)
                self._library.zendaya_stream_forget_source(stream)
                self._spare.append(stream)
            else:
                self._library.zendaya_stream_free(stream)

    def read(self, cache: NativeCache, source_BTE: Tensor) -> None:
        """Take source tokens that have arrived: project each once, into the cache; any chunking gives the same bits."""
        if source_BTE.ndim != 3 or source_BTE.shape[0] != cache.batch:
            raise SourceError(
                f"source tokens must have shape ({cache.batch}, any, {self.config.source_dim}): got {tuple(source_BTE.shape)}"
            )
        self._read(self._streams_of(cache), list(source_BTE))

    def read_many(self, caches: Sequence[NativeCache], tokens: Sequence[Tensor]) -> None:
        """Take source tokens (T, E) of many streams at once, as many of each as have arrived."""
        self._read(self._one_each(caches), tokens)

    def _read(self, streams: Sequence[int], tokens: Sequence[Tensor]) -> None:
        for stream, source_TE in zip(streams, tokens, strict=True):
            if source_TE.ndim != 2 or source_TE.shape[1] != self.config.source_dim:
                raise SourceError(f"source tokens must have shape (any, {self.config.source_dim}): got {tuple(source_TE.shape)}")
            total = int(self._library.zendaya_stream_source(stream)) + source_TE.shape[0]
            if total > self.config.max_source:
                raise SourceError(f"a window holds at most {self.config.max_source} source tokens: got {total}")
        waiting = [(stream, source_TE) for stream, source_TE in zip(streams, tokens, strict=True) if source_TE.shape[0]]
        while waiting:
            pieces, left, room = [], [], READ
            for stream, rest in waiting:
                if rest.shape[0] <= room:
                    pieces.append((stream, rest))
                else:
                    pieces += [(stream, rest[:room])] if room else []
                    left.append((stream, rest[room:]))
                room -= min(room, rest.shape[0])
            handles, counts = _pointers([stream for stream, _ in pieces]), _numbers([len(piece) for _, piece in pieces])
            source = torch.cat([piece for _, piece in pieces]).detach().to("cpu", torch.float32).contiguous()
            _check(self._library.zendaya_read(self._model, len(pieces), _address(handles), _address(counts), source.data_ptr()))
            waiting = left

    def prefill(self, cache: NativeCache, ids_BN: Tensor, horizon: int, *, gaze: Gaze | None = None) -> Tensor:
        """Write rows that are given, not decided, all reading `[:horizon]`; the logits of the last. A `gaze` takes its cross-attention."""
        return self._write(self._streams_of(cache), ids_BN.tolist(), [int(horizon)] * cache.batch, gaze)

    def step(self, cache: NativeCache, ids_B: Tensor, horizons: int | Sequence[int], *, gaze: Gaze | None = None) -> Tensor:
        """One decode step: the row that holds the last token, reading `[:Ω]` of each stream's source; logits (B, V)."""
        per_stream = [int(h) for h in horizons] if isinstance(horizons, Sequence) else [int(horizons)] * cache.batch
        return self._write(self._streams_of(cache), ids_B[:, None].tolist(), per_stream, gaze)

    def rows(self, caches: Sequence[NativeCache], ids: Sequence[Sequence[int]], horizons: Sequence[int]) -> Tensor:
        """Rows of many streams at once, as many of each as it has, each stream reading its own horizon: logits (S, V) of their last."""
        return self._write(self._one_each(caches), ids, horizons, None)

    def _one_each(self, caches: Sequence[NativeCache]) -> list[int]:
        streams = self._streams_of(*caches)
        if len(streams) != len(caches):
            raise SourceError(f"streams are computed together by caches of one stream each: got {len(streams)} in {len(caches)} caches")
        return streams

    def _write(self, streams: Sequence[int], ids: Sequence[Sequence[int]], horizons: Sequence[int], gaze: Gaze | None) -> Tensor:
        if not len(streams) == len(ids) == len(horizons) or not streams:
            raise SourceError(f"rows and a horizon for each of {len(streams)} streams: got {len(ids)} and {len(horizons)}")
        looked = None
        if gaze is not None:
            assert len(streams) == 1, "a gaze follows one stream"
            looked = np.zeros((self.config.layers, self.config.heads, max(0, horizons[0])), np.float32)
        logits_SV = self._room(len(streams))
        handles = _pointers(streams)
        try:
            counts, flat, reads = _numbers([len(rows) for rows in ids]), _numbers([i for rows in ids for i in rows]), _numbers(horizons)
        except OverflowError:
            self._refuse(streams, ids, horizons)
        result = self._library.zendaya_rows(
            self._model, len(streams), _address(handles), _address(counts), _address(flat), _address(reads), _address(logits_SV),
            None if looked is None else _address(looked),
        )  # fmt: skip
        if result == BAD_CALL:  # the library checks a call whole before anything of it is done
            self._refuse(streams, ids, horizons)
        _check(result)
        if gaze is not None and looked is not None:
            gaze.weights_F = [torch.from_numpy(looked[layer, head]) for layer, head in sorted(gaze.heads, key=lambda place: place[0])]
        return torch.from_numpy(logits_SV)

    def _room(self, rows: int) -> npt.NDArray[np.float32]:
        """Room for logits (S, V): that of an earlier call once nobody holds what it gave, as fresh pages cost more than what fills them."""
        kept, given = self._logits.pop() if self._logits else (None, None)
        if kept is None or len(kept) < rows or (given is not None and given() is not None):
            kept = np.empty((rows, self.config.vocab_size), np.float32)
        logits_SV = kept[:rows]
        self._logits.append((kept, weakref.ref(logits_SV)))
        return logits_SV

    def _refuse(self, streams: Sequence[int], ids: Sequence[Sequence[int]], horizons: Sequence[int]) -> NoReturn:
        """Say what is wrong with rows that the library would not write."""
        if len(set(streams)) < len(streams):
            raise SourceError("a stream can be written once in a call: the same one was given twice")
        for stream, rows, horizon in zip(streams, ids, horizons, strict=True):
            arrived, written = self._library.zendaya_stream_source(stream), self._library.zendaya_stream_rows(stream)
            if not 0 <= horizon <= arrived:
                raise SourceError(f"a step may read at most the {arrived} source tokens that have arrived: got horizons {list(horizons)}")
            if not rows or min(rows) < 0 or max(rows) >= self.config.vocab_size:
                raise SourceError(f"rows hold one or more ids below {self.config.vocab_size}: got {list(rows)[:8]}")
            if written + len(rows) > self.config.max_rows:
                raise SourceError(f"the text is longer than the decoder's {self.config.max_rows} rows: got {written + len(rows)}")
        raise SourceError(f"a call takes at most {MOST_ROWS} rows: got {sum(map(len, ids))}")


def _in_order(decoder: Decoder) -> list[Tensor]:
    """The decoder's tensors in the order in which the library takes them."""
    tensors = dict(decoder.state_dict())

    def dense(name: str, *, bias: bool = True) -> list[str]:
        return [f"{name}.weight", f"{name}.bias"] if bias else [f"{name}.weight"]

    def attention(name: str, around: str) -> list[str]:
        parts = [*dense(f"{name}.query"), *dense(f"{name}.key", bias=False), *dense(f"{name}.value"), *dense(f"{name}.out")]
        return [*parts, *dense(f"{around}.norm")]

    def feed_forward(name: str) -> list[str]:
        return [*dense(f"{name}.feed_forward.up"), *dense(f"{name}.feed_forward.down"), *dense(f"{name}.around_feed_forward.norm")]

    names = ["tokens.weight", "positions.weight", "source_tokens.weight", *dense("source_projection"), "source_positions.weight"]
    for i in range(decoder.config.source_layers):
        layer = f"source_layers.{i}"
        names += [*attention(f"{layer}.attention", f"{layer}.around_attention"), *feed_forward(layer)]
    for i in range(decoder.config.layers):
        layer = f"layers.{i}"
        names += attention(f"{layer}.self_attention", f"{layer}.around_self")
        names += [*attention(f"{layer}.cross_attention", f"{layer}.around_cross"), *feed_forward(layer)]
    ordered = [tensors.pop(name) for name in [*names, *dense("norm")] if name in tensors]
    assert not tensors, f"the decoder has tensors that the native engine does not know: {', '.join(tensors)}"
    return ordered


def _usable_threads() -> int:
    """Processors this process may run on."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _numbers(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def _pointers(values: Sequence[int]) -> npt.NDArray[np.uintp]:
    return np.array(values, np.uintp)


def _address(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


def _found(pointer: int | None) -> int:
    if not pointer:
        raise MemoryError("the native engine found no memory, or no thread, to begin with")
    return pointer


def _check(result: int) -> None:
    if result == NO_MEMORY:
        raise MemoryError("the native engine found no memory for this call; nothing was written")
    assert result == 0, f"the native engine refused a call that had been checked: {result}"


def _free(library: ctypes.CDLL, model: int, spare: list[int]) -> None:
    for stream in spare:
        library.zendaya_stream_free(stream)
    spare.clear()
    library.zendaya_model_free(model)
