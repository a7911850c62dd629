"""The engine: what runs a decoder's rows, by PyTorch or by the native back end, with the same results.

PyTorch's is the decoder itself, on any device. The native one is C for CPUs, built when the package is installed; it keeps the weights in
float32 or int8 and computes the rows of many streams at once. Both take the calls of `Decoder`: start, read, prefill, step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

from zendaya.decoder import DecoderConfig, Gaze
from zendaya.engine.backend import NativeEngine, Precision, missing
from zendaya.errors import ConfigError
from zendaya.model import Model

Backend = Literal["auto", "torch", "native"]

__all__ = ["Backend", "Engine", "EngineCache", "NativeEngine", "Precision", "describe", "engine_for", "engine_name", "is_native", "missing"]


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

    def forget_text(self) -> None: ...


class Engine(Protocol):
    """What runs rows; a cache is the one that this engine started. See `Decoder` for each call."""

    config: DecoderConfig

    def start(self, batch: int = 1) -> Any: ...

    def read(self, cache: Any, source_BTE: Tensor) -> None: ...

    def prefill(self, cache: Any, ids_BN: Tensor, horizon: int, *, gaze: Gaze | None = None) -> Tensor: ...

    def step(self, cache: Any, ids_B: Tensor, horizons: int | Sequence[int], *, gaze: Gaze | None = None) -> Tensor: ...


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
    return model.decoder


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
