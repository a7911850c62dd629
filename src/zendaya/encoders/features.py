"""Precomputed feature rows as source tokens, with an optional PCA.

Shape suffixes: T rows in time, D features per row, E features kept by the PCA.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from zendaya.encoders.base import Encoder, EncoderFactory, FloatArray, Tokens, Traits, readable_prefix
from zendaya.errors import CheckpointError, ConfigError, SourceError
from zendaya.files import write_atomically
from zendaya.nn.decoder import LARGEST_FEATURE

BLOCK = 16
"""Rows per matrix product of the PCA, each row at a fixed place of its block, so that chunks do not change the numbers."""


@dataclass(frozen=True)
class PCA:
    """Principal component analysis: (x − mean) · components.

    >>> rows = np.array([[0.0, 0, 1], [2, 0, 1], [4, 0, 1], [6, 0.001, 1]], np.float32)
    >>> pca = PCA.fit([rows], dim=1)
    >>> round(pca.explained, 4), pca.components_DE.shape
    (1.0, torch.Size([3, 1]))
    """

    mean_D: Tensor
    components_DE: Tensor
    explained: float
    """Share of the variance kept, of the rows it was fitted on."""

    @staticmethod
    def fit(parts: Iterable[npt.NDArray[Any]], dim: int) -> PCA:
        """The first `dim` components of all rows, in one pass in float64; the largest entry of each component is positive."""
        count, total_D, products_DD = 0, np.zeros(0), np.zeros((0, 0))
        for rows_TD in parts:
            rows_TD = np.asarray(rows_TD, np.float64)
            if count == 0:
                total_D, products_DD = np.zeros(rows_TD.shape[1]), np.zeros((rows_TD.shape[1],) * 2)
            count, total_D, products_DD = count + rows_TD.shape[0], total_D + rows_TD.sum(0), products_DD + rows_TD.T @ rows_TD
        if not 1 <= dim <= min(total_D.size, count):
            raise ConfigError(f"PCA: dim must lie in 1 … {min(total_D.size, count)} for {count} rows of {total_D.size} features: got {dim}")
        mean_D = total_D / count
        variances, vectors = np.linalg.eigh(products_DD / count - np.outer(mean_D, mean_D))
        kept_DE = vectors[:, ::-1][:, :dim]
        kept_DE = kept_DE * np.sign(kept_DE[np.abs(kept_DE).argmax(0), np.arange(dim)])
        whole = float(variances.clip(0).sum())
        explained = float(variances[::-1][:dim].clip(0).sum()) / whole if whole > 0 else 1.0
        return PCA(torch.from_numpy(mean_D).float(), torch.from_numpy(np.ascontiguousarray(kept_DE)).float(), explained)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        tensors = {"mean": self.mean_D, "components": self.components_DE}
        write_atomically(Path(path), safetensors.torch.save(tensors, {"zendaya_pca": "1", "explained": repr(self.explained)}))

    @staticmethod
    def load(path: str | Path) -> PCA:
        """The PCA that `save` wrote."""
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("zendaya_pca") != "1":
                    raise CheckpointError(f"{path}: expected a PCA saved by this library: got another file")
                mean_D, components_DE = file.get_tensor("mean"), file.get_tensor("components")
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file: {str(error).strip().splitlines()[0]}") from None
        if mean_D.ndim != 1 or components_DE.ndim != 2 or mean_D.shape[0] != components_DE.shape[0]:
            raise CheckpointError(f"{path}: mean {tuple(mean_D.shape)} and components {tuple(components_DE.shape)} do not belong together")
        return PCA(mean_D, components_DE, float(metadata["explained"]))

    def apply(self, rows_TD: Tensor, start: int = 0) -> Tensor:
        """Project rows; the first is row `start` of its stream."""
        lead = start % BLOCK
        padded_TD = torch.nn.functional.pad(rows_TD - self.mean_D, (0, 0, lead, -(lead + rows_TD.shape[0]) % BLOCK))
        projected = [block_TD @ self.components_DE for block_TD in torch.split(padded_TD, BLOCK)]
        return torch.cat(projected)[lead : lead + rows_TD.shape[0]] if projected else rows_TD.new_zeros(0, self.components_DE.shape[1])

    def digest(self) -> str:
        """sha256 of the mean, then sha256 of the components."""
        return "".join(hashlib.sha256(part.contiguous().numpy().tobytes()).hexdigest() for part in (self.mean_D, self.components_DE))


@dataclass
class RowsState:
    """A stream of rows: the number read, and the error in the next row."""

    num_rows: int = 0
    problem: str | None = None


class Precomputed(Encoder[npt.NDArray[np.floating[Any]], RowsState]):
    """Feature rows of another program: row k arrives at k/rate + window_s, and must read nothing later, which cannot be tested here."""

    def __init__(
        self, dim: int, tokens_per_s: float, *, window_s: float | None = None, pca: PCA | None = None, name: str = "features"
    ) -> None:
        window_s = 1 / tokens_per_s if window_s is None and tokens_per_s > 0 else window_s or 0.0
        if dim < 1 or not 0 < tokens_per_s < math.inf or not 0 < window_s < math.inf:
            raise ConfigError(f"{name}: dim, tokens_per_s and window_s must be above 0: got {dim}, {tokens_per_s} and {window_s}")
        if pca is not None and pca.mean_D.shape[0] != dim:
            raise ConfigError(f"{name}: the PCA was fitted on {pca.mean_D.shape[0]} features per row: got {dim}")
        self.input_dim, self.window_s, self.pca = dim, window_s, pca
        kept = dim if pca is None else pca.components_DE.shape[1]
        self.traits = Traits(
            name=f"{name} dim={dim} rate={tokens_per_s:g} window={window_s:g}s" + (f" pca={kept}" if pca else ""),
            modality="features", dim=kept, tokens_per_s=tokens_per_s, look_back_s=0.0,
            look_ahead_s=max(0.0, window_s - 1 / tokens_per_s), live=True,
        )  # fmt: skip

    def start(self) -> RowsState:
        return RowsState()

    def digest(self) -> str:
        return "" if self.pca is None else self.pca.digest()

    def row_arrivals(self, first: int, count: int) -> FloatArray:
        return np.arange(first, first + count) / self.traits.tokens_per_s + self.window_s

    def read(self, state: RowsState, raw: npt.NDArray[np.floating[Any]]) -> Tokens:
        self.finish(state)
        if raw.ndim != 2 or raw.shape[1] != self.input_dim:
            raise SourceError(f"{self.traits.name}: expected rows of shape (any, {self.input_dim}): got {raw.shape}; check the encoder")
        good = readable_prefix(raw, LARGEST_FEATURE)
        if good < raw.shape[0]:
            row = f"{self.traits.name}: row {state.num_rows + good}"
            state.problem = f"{row} holds a feature that is not finite or not below {LARGEST_FEATURE:g}"
            if good == 0:
                return self.finish(state)
        values_TD = torch.from_numpy(np.array(raw[:good], np.float32))
        first, state.num_rows = state.num_rows, state.num_rows + good
        return Tokens(values_TD if self.pca is None else self.pca.apply(values_TD, first), self.row_arrivals(first, good))

    def finish(self, state: RowsState) -> Tokens:
        if state.problem is not None:
            raise SourceError(state.problem)
        return Tokens.none(self.traits.dim)


def open_features(*, dim: int, rate: float = 3.0, window_s: float | None = None, pca: str | None = None) -> Precomputed:
    """Feature rows at `rate` rows per second, projected by the PCA saved at `pca`."""
    return Precomputed(dim, rate, window_s=window_s, pca=None if pca is None else PCA.load(pca))


ENCODER = EncoderFactory(
    modality="features", open=open_features, which="a feature file or folder",
    settings={"rate": float, "window_s": float, "dim": int, "pca": str},
)  # fmt: skip
