"""Engines: they run a decoder's rows, by PyTorch on any device or by C on CPUs, with the same results.

The native engine is built when the package is installed. It keeps the weights in float32 or int8 and computes the rows of many
streams in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, get_args

from torch import Tensor

from zendaya.errors import ConfigError
from zendaya.nn.config import DecoderConfig
from zendaya.nn.decoder import AttentionTap, Taps
from zendaya.nn.model import Model
from zendaya.runtime.engine.native_engine import NativeEngine, missing
from zendaya.runtime.engine.torch_engine import TorchEngine
from zendaya.runtime.options import Backend, Precision

__all__ = [
    "Backend", "Engine", "EngineCache", "NativeEngine", "Precision", "TorchEngine", "describe", "engine_for", "engine_name", "is_native",
    "missing",
]  # fmt: skip


class EngineCache(Protocol):
    """The state of a decode in an engine; `num_rows` may be set back to a smaller number, which forgets the rows after."""

    batch: int

    @property
    def num_source(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @num_rows.setter
    def num_rows(self, rows: int) -> None: ...

    def clone(self) -> EngineCache: ...

    def forget_source(self) -> None: ...

    def keep_source(self, count: int) -> None:
        """Withdraw the source tokens after the first `count`, or after fewer: the next token to read is that at `num_source`."""

    def forget_text(self) -> None: ...


class Engine(Protocol):
    """Runs rows; a cache is one that this engine started. See `Decoder` for start, read, prefill and step."""

    config: DecoderConfig

    def start(self, batch: int = 1) -> Any: ...

    def read(self, cache: Any, source_BTE: Tensor) -> None: ...

    def prefill(self, cache: Any, ids_BN: Tensor, horizon: int, *, tap: AttentionTap | None = None) -> Tensor: ...

    def step(self, cache: Any, ids_B: Tensor, horizons: int | Sequence[int], *, tap: AttentionTap | None = None) -> Tensor: ...

    def read_many(self, caches: Sequence[Any], tokens: Sequence[Tensor]) -> None:
        """Each stream reads the source tokens (T, E) that have arrived for it."""

    def rows(self, caches: Sequence[Any], ids: Sequence[Sequence[int]], horizons: Sequence[int], taps: Taps = ()) -> Tensor:
        """Rows of many streams, each reading its own horizon: the logits (S, V) of the last row of each; a tap gets its attention."""


def engine_for(model: Model, backend: Backend = "auto", *, precision: Precision = "float32", threads: int | None = None) -> Engine:
    """An engine for a model as it is now; "auto" is the native one where it was built and the model is on the CPU, else PyTorch.

    >>> from zendaya import PowerLaw
    >>> model = Model.from_preset("tiny")
    >>> session = model.open(PowerLaw(0.5), engine=engine_for(model))
    """
    if is_native(model, backend):
        return NativeEngine(model.decoder, precision=precision, threads=threads)
    if precision != "float32":
        raise ConfigError(f"PyTorch's engine computes in the model's own type, not {precision}: {missing() or 'ask for the native one'}")
    if threads is not None:
        raise ConfigError("PyTorch's threads are those of the process: set them with torch.set_num_threads")
    return TorchEngine(model.decoder)


def is_native(model: Model, backend: Backend = "auto") -> bool:
    """Whether `engine_for` takes the native back end."""
    if backend not in get_args(Backend):
        raise ConfigError(f"an engine is one of {', '.join(get_args(Backend))}: got {backend!r}")
    on_cpu = model.decoder.tokens.weight.device.type == "cpu"
    return backend == "native" or (backend == "auto" and missing() is None and on_cpu)


def engine_name(model: Model, backend: Backend = "auto", precision: Precision = "float32") -> str:
    """What `engine_for` takes, as results name it."""
    return f"native {precision}" if is_native(model, backend) else "torch"


def describe() -> str:
    """Which back end `engine_for` takes on a CPU, and why, in one line."""
    reason = missing()
    if reason is not None:
        return f"torch: {reason}"
    return f"native, with the {NativeEngine.kernels()[0]} kernels (this processor runs {', '.join(NativeEngine.kernels())})"
