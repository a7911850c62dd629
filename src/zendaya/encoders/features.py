"""Precomputed features (C3D and any other) from HDF5, npy, npz and safetensors, with an optional PCA.

A file is data from elsewhere: nothing in it is run, nothing outside it is read, and what it declares is checked before it is held.

Shape suffixes: T rows in time, D features of a row, E features kept by the PCA.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from zendaya.atomic import write_atomically
from zendaya.encoders import Tokens, Traits, readable_prefix
from zendaya.errors import CheckpointError, ConfigError, MissingExtraError, SourceError

Rows = npt.NDArray[np.float32]

MAX_BYTES = 2**30
"""Largest array held: 1 GiB, counted as it will be held. An hour of 4,096 features at 3 a second is 177 MB."""
_FLOAT = 4
"""Bytes of a value once it is a feature, however few it takes in its file."""
_NPY_HEAD = 2**14
"""Bytes within which the header of an npy must end; NumPy would first read the 4 GiB that one may claim."""
_PIECE = 2**20
"""Bytes read in one go."""
LARGEST_FEATURE = 1e30
"""As in the decoder: beyond it, products overflow float32."""
BLOCK = 16
"""Rows are projected in products of this many, each row at the same place of its own, so that chunks do not change the numbers."""
MAX_DEPTH = 16
"""Groups of HDF5 gone down into in search of the one dataset."""
_FILTERS = {1, 2, 3, 4, 5, 6, 32000}
"""HDF5's own filters and h5py's lzf; any other would make the library look for a plug-in on the machine."""


def read_features(path: str | Path, name: str | None = None, *, dim: int | None = None) -> Rows:
    """Rows (T, D) of one array of a file; `name` says which, and may be left out where there is only one.

    In HDF5 the name is a path, as in `v_abc/c3d_features`; for a group with a single dataset the group's name will do.
    """
    try:
        return _checked_rows(_read(Path(path), name, _FLOAT), f"{path}" if name is None else f"{path}, {name!r}", dim)
    except MemoryError:
        raise _no_memory(path) from None


def _checked_rows(array: npt.NDArray[Any], where: str, dim: int | None) -> Rows:
    if array.ndim != 2 or (dim is not None and array.shape[1] != dim):
        raise SourceError(f"{where}: expected features of shape (any, {dim or 'any'}): got {array.shape}; check the name and the encoder")
    if array.size == 0:
        raise SourceError(f"{where}: empty: it has shape {array.shape}; expected at least one row")
    good = readable_prefix(array, LARGEST_FEATURE)
    if good < array.shape[0]:
        raise SourceError(
            f"{where}: row {good} holds a feature that is not finite or beyond ±{LARGEST_FEATURE:g}: "
            f"make the features again, or leave this clip out"
        )
    return array.astype(np.float32, copy=False)


def read_array(path: str | Path, name: str | None = None) -> npt.NDArray[Any]:
    """One array of a file as it is stored, of any shape; its numbers are not looked at."""
    try:
        return _read(Path(path), name, 1)
    except MemoryError:
        raise _no_memory(path) from None


def _no_memory(path: str | Path) -> SourceError:
    return SourceError(f"{path}: does not fit into the memory that is free: store one array a clip, or free memory")


def _read(path: Path, name: str | None, width: int) -> npt.NDArray[Any]:
    """One array, of which each value will be held in at least `width` bytes."""
    reader = {".npy": _read_npy, ".npz": _read_npz, ".safetensors": _read_safetensors}.get(path.suffix.lower())
    if path.suffix.lower() in (".h5", ".hdf5", ".hdf"):
        reader = _read_hdf5
    if reader is None:
        raise SourceError(f"{path}: not a feature file that is read here: expected .hdf5, .h5, .npy, .npz or .safetensors")
    if not path.is_file():
        raise SourceError(f"{path}: no such file")
    return reader(path, name, width)


def _read_npy(path: Path, name: str | None, width: int) -> npt.NDArray[Any]:
    if name is not None:
        raise SourceError(f"{path}: an npy file holds one array without a name: got the name {name!r}")
    try:
        with path.open("rb") as file:
            return _npy_array(file, path.stat().st_size, str(path), width)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from None


def _npy_array(file: IO[bytes], num_bytes: int, where: str, width: int) -> npt.NDArray[Any]:
    """An array whose header is believed only if the bytes that follow bear it out."""
    try:
        head = io.BytesIO(file.read(_NPY_HEAD))
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(head)
        offset = head.tell()
    except Exception as error:  # NumPy parses the header as Python: what damage raises there is no closed list
        raise SourceError(f"{where}: damaged or not an npy array: {_first_line(error)}") from None
    _check_array(shape, dtype, where, width)
    size = math.prod(shape) * dtype.itemsize
    if size != num_bytes - offset:
        raise SourceError(f"{where}: damaged or cut short: shape {shape} of {dtype} needs {size} bytes and {num_bytes - offset} follow")
    data, filled = np.empty(size, np.uint8), 0
    try:
        piece = head.read(size)
        while piece:
            data[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
            filled += len(piece)
            piece = file.read(min(_PIECE, size - filled))
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SourceError(f"{where}: damaged: {_first_line(error)}") from None
    if filled != size:
        raise SourceError(f"{where}: cut short: expected {size} bytes, got {filled}")
    return data.view(dtype).reshape(shape, order="F" if fortran else "C")


def _read_npz(path: Path, name: str | None, width: int) -> npt.NDArray[Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            info = members[_choose(list(members), name, str(path))]
            where = f"{path}, {info.filename!r}"
            if info.file_size > MAX_BYTES + _NPY_HEAD:
                raise SourceError(f"{where}: unpacks to {info.file_size} bytes: expected at most {MAX_BYTES}; it is damaged or a zip bomb")
            with archive.open(info) as file:
                return _npy_array(file, info.file_size, where, width)
    except SourceError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError) as error:  # RuntimeError: an encrypted member
        raise SourceError(f"{path}: not a whole npz file: {_first_line(error)}") from None


def _read_safetensors(path: Path, name: str | None, width: int) -> npt.NDArray[Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            chosen = _choose(list(file.keys()), name, str(path))
            part = file.get_slice(chosen)
            shape = tuple(part.get_shape())
            if not part.get_dtype().startswith(("F", "BF", "I", "U")):
                raise SourceError(f"{path}, {chosen!r}: holds {part.get_dtype()}: expected an array of numbers")
            _check_array(shape, np.dtype(np.float32), f"{path}, {chosen!r}", width)
            array = np.empty(shape, np.float32)  # a copy: the tensor is a view of the file, which may change
            torch.from_numpy(array).copy_(file.get_tensor(chosen))
            return array
    except SourceError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: a type that torch cannot turn
        raise SourceError(f"{path}: not a whole safetensors file: {_first_line(error)}") from None


def _read_hdf5(path: Path, name: str | None, width: int) -> npt.NDArray[Any]:
    try:
        import h5py
    except ModuleNotFoundError:
        raise MissingExtraError("h5py", "features", "reading HDF5 features") from None
    try:
        with h5py.File(path, "r", locking=False) as file:
            node: Any = file
            place = ""
            for part in [part for part in name.split("/") if part] if name else []:
                node, place = _follow(node, place, part, path), f"{place}/{part}"
            while isinstance(node, h5py.Group):
                if place.count("/") >= MAX_DEPTH:  # a group may hold itself
                    raise SourceError(f"{path}, {place!r}: more than {MAX_DEPTH} groups inside groups: name the dataset itself")
                part = _choose(list(node), None, f"{path}, {place!r}" if place else str(path))
                node, place = _follow(node, place, part, path), f"{place}/{part}"
            where = f"{path}, {place!r}"
            if not isinstance(node, h5py.Dataset):
                raise SourceError(f"{where}: expected a dataset: got a {type(node).__name__}")
            _check_dataset(node, where, width)
            return np.asarray(node[()])
    except SourceError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:  # ValueError: a name or a type that cannot be
        raise SourceError(f"{path}: damaged, cut short or not HDF5: {_first_line(error)}") from None


def _follow(node: Any, place: str, part: str, path: Path) -> Any:
    """The child of a group, if it lies in the group itself: a link could lead to another file."""
    import h5py

    if not isinstance(node, h5py.Group) or part not in _names(node):
        raise SourceError(
            f"{path}: no {place + '/' + part!r} in it; expected {_some(_names(node)) if isinstance(node, h5py.Group) else 'a group'}"
        )
    link = node.get(part, getlink=True)
    if not isinstance(link, h5py.HardLink):
        target = getattr(link, "filename", "") or getattr(link, "path", "")
        raise SourceError(
            f"{path}: {place + '/' + part!r} is a {type(link).__name__} to {target!r}; links are not followed: store the data itself"
        )
    return node[part]


def _check_dataset(dataset: Any, where: str, width: int) -> None:
    if dataset.is_virtual or dataset.external:
        raise SourceError(f"{where}: its data lies in other files, which are not read: store the data itself")
    if dataset.shape is None:
        raise SourceError(f"{where}: empty: a dataset without a shape")
    _check_array(dataset.shape, dataset.dtype, where, width)
    properties = dataset.id.get_create_plist()
    filters = {properties.get_filter(index)[0] for index in range(properties.get_nfilters())}
    if filters - _FILTERS:
        raise SourceError(
            f"{where}: packed by filter {min(filters - _FILTERS)}, which is not HDF5's own: expected gzip, lzf or none; pack it anew"
        )
    if math.prod(dataset.shape) and dataset.id.get_storage_size() == 0:
        raise SourceError(f"{where}: declares shape {dataset.shape} and stores nothing: the file was not written to the end")
    if dataset.chunks is None:
        return
    if math.prod(dataset.chunks) * dataset.dtype.itemsize > MAX_BYTES:  # a chunk is unpacked whole, whatever is read of it
        raise SourceError(f"{where}: stored in chunks of {dataset.chunks}: expected at most {MAX_BYTES} bytes each; store it anew")
    needed = math.prod(-(-side // chunk) for side, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    if (written := dataset.id.get_num_chunks()) < needed:  # HDF5 reads a chunk that was never written as zeros
        raise SourceError(
            f"{where}: half written: shape {dataset.shape} needs {needed} chunks and {written} are stored; "
            f"make the features again, or leave this clip out"
        )


def _check_array(shape: tuple[int, ...], dtype: np.dtype[Any], where: str, width: int) -> None:
    """What a header declares, before a byte of it is read or held."""
    if dtype.hasobject or dtype.kind not in "fiu":
        kind = "Python objects, which can run code when read" if dtype.hasobject else str(dtype)
        raise SourceError(f"{where}: holds {kind}: expected an array of numbers")
    if any(side < 0 for side in shape):
        raise SourceError(f"{where}: declares shape {shape}: expected sides of at least 0; it is damaged")
    size = math.prod(shape) * max(dtype.itemsize, width)
    if size > MAX_BYTES:
        raise SourceError(
            f"{where}: declares shape {shape} of {dtype}, which would take {size} bytes: expected at most {MAX_BYTES}; "
            f"store one array a clip, or fewer rows, or make the file again if it is damaged"
        )


def _names(node: Any) -> list[str]:
    return list(node)


def _choose(names: list[str], name: str | None, where: str) -> str:
    if name is None and len(names) == 1:
        return names[0]
    if name is None or name not in names:
        asked = "say which array to read" if name is None else f"no array {name!r} in it"
        raise SourceError(f"{where}: {asked}; expected one of {_some(names)}")
    return name


def _some(names: list[str]) -> str:
    return (
        ", ".join(map(repr, sorted(names)[:5])) + (f" … ({len(names)} in all)" if len(names) > 5 else "")
        if names
        else "nothing: it is empty"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@dataclass(frozen=True)
class PCA:
    """Principal components: (x − mean) · components.

    >>> rows = np.array([[0.0, 0, 1], [2, 0, 1], [4, 0, 1], [6, 0.001, 1]], np.float32)
    >>> pca = PCA.fit([rows], dim=1)
    >>> round(pca.explained, 4), pca.components_DE.shape
    (1.0, torch.Size([3, 1]))
    """

    mean_D: Tensor
    components_DE: Tensor
    explained: float
    """Share of the variance that is kept, of the rows it was fitted on."""

    @staticmethod
    def fit(parts: Iterable[npt.NDArray[Any]], dim: int) -> PCA:
        """The first `dim` components of all rows, from one pass in float64; each component's largest entry is positive."""
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
        """One safetensors file."""
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
            raise CheckpointError(f"{path}: not a whole safetensors file: {_first_line(error)}") from None
        if mean_D.ndim != 1 or components_DE.ndim != 2 or mean_D.shape[0] != components_DE.shape[0]:
            raise CheckpointError(f"{path}: mean {tuple(mean_D.shape)} and components {tuple(components_DE.shape)} do not belong together")
        return PCA(mean_D, components_DE, float(metadata["explained"]))

    def apply(self, rows_TD: Tensor, start: int = 0) -> Tensor:
        """Projected rows, the first of which is row `start` of its stream."""
        lead = start % BLOCK
        padded_TD = torch.nn.functional.pad(rows_TD - self.mean_D, (0, 0, lead, -(lead + rows_TD.shape[0]) % BLOCK))
        projected = [block_TD @ self.components_DE for block_TD in torch.split(padded_TD, BLOCK)]
        return torch.cat(projected)[lead : lead + rows_TD.shape[0]] if projected else rows_TD.new_zeros(0, self.components_DE.shape[1])


@dataclass
class RowsState:
    """A stream of rows: how many were read, and what was wrong with the next."""

    num_rows: int = 0
    problem: str | None = None


class Precomputed:
    """Rows that another program made, as tokens: row k was made from raw input of [k/rate, k/rate + window_s) and arrives at its end.

    That no row reads further is the word of whoever made the features: it cannot be seen in the numbers.
    """

    def __init__(
        self, dim: int, tokens_per_s: float, *, window_s: float | None = None, pca: PCA | None = None, name: str = "features"
    ) -> None:
        window_s = 1 / tokens_per_s if window_s is None and tokens_per_s > 0 else window_s or 0.0
        if dim < 1 or not 0 < tokens_per_s < math.inf or not 0 < window_s < math.inf:
            raise ConfigError(f"{name}: dim, tokens_per_s and window_s must be above 0: got {dim}, {tokens_per_s} and {window_s}")
        if pca is not None and pca.mean_D.shape[0] != dim:
            raise ConfigError(f"{name}: the PCA was fitted on {pca.mean_D.shape[0]} features: got features of {dim}")
        self.input_dim, self.window_s, self.pca = dim, window_s, pca
        kept = dim if pca is None else pca.components_DE.shape[1]
        self.traits = Traits(
            name=f"{name} dim={dim} rate={tokens_per_s:g} window={window_s:g}s" + (f" pca={kept}" if pca else ""), dim=kept,
            tokens_per_s=tokens_per_s, look_back_s=0.0, look_ahead_s=max(0.0, window_s - 1 / tokens_per_s), live=True,
        )  # fmt: skip

    @classmethod
    def c3d(cls, *, fps: float = 30.0, pca: PCA | None = None) -> Precomputed:
        """ActivityNet's published C3D: 500 features of 16 frames, every 8 frames."""
        return cls(500, fps / 8, window_s=16 / fps, pca=pca, name="c3d")

    def start(self) -> RowsState:
        return RowsState()

    def arrivals(self, first: int, count: int) -> npt.NDArray[np.float64]:
        """When rows first … first+count−1 arrive, in seconds."""
        return np.arange(first, first + count) / self.traits.tokens_per_s + self.window_s

    def read(self, state: RowsState, raw: npt.NDArray[np.floating[Any]]) -> Tokens:
        self.finish(state)
        if raw.ndim != 2 or raw.shape[1] != self.input_dim:
            raise SourceError(f"{self.traits.name}: expected rows of shape (any, {self.input_dim}): got {raw.shape}; check the encoder")
        good = readable_prefix(raw, LARGEST_FEATURE)
        if good < raw.shape[0]:
            state.problem = (
                f"{self.traits.name}: row {state.num_rows + good} holds a feature that is not finite or beyond ±{LARGEST_FEATURE:g}"
            )
            if good == 0:
                return self.finish(state)
        values_TD = torch.from_numpy(np.array(raw[:good], np.float32))
        first, state.num_rows = state.num_rows, state.num_rows + good
        return Tokens(values_TD if self.pca is None else self.pca.apply(values_TD, first), self.arrivals(first, good))

    def finish(self, state: RowsState) -> Tokens:
        if state.problem is not None:
            raise SourceError(state.problem)
        return Tokens.none(self.traits.dim)
