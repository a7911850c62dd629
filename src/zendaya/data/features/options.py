"""Options of encoding, and of the store it writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from zendaya.errors import ConfigError
from zendaya.records import option

Dtype = Literal["fp16", "int8", "fp32"]
SHARD_BYTES = 1 << 30
"""A shard that has reached this size gets no further clip."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How a corpus is encoded: which clips, in which precision, by how many workers."""

    media: Path | None = option(None, "Folder of the recordings, videos or features (default: that of PATH).")
    split: str | None = option(None, "Encode this split only.")
    dtype: Dtype | None = option(None, "Precision of stored features (default: fp16; fp32 for text).")
    limit: int | None = option(None, "Encode the first N clips only; a later run without it continues.", min=1)
    workers: str = option("1", "Number of processes, ray, or ray:N for N workers of a Ray cluster.")
    ray: str | None = option(None, "With --workers ray: address of the cluster (default: one started here).", metavar="ADDRESS")
    retry: bool = option(False, "Encode again from the first clip that failed.", name="--retry")
    verify: bool = option(False, "Compare the whole store with its checksums after the run.", name="--verify")
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1 clip: got {self.limit}")
        if self.dtype is not None and self.dtype not in get_args(Dtype):
            raise ConfigError(f"dtype must be one of {', '.join(get_args(Dtype))}: got {self.dtype!r}")
