"""Feature files made by other programs: one array of an HDF5, npy, npz or safetensors file.

Such a file is not trusted: nothing in it is run, no other file is read, and declared sizes are checked before memory is taken.

Shape suffixes: T rows in time, D features per row.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from zendaya.encoders.base import readable_prefix
from zendaya.errors import MissingExtraError, SourceError
from zendaya.nn.decoder import LARGEST_FEATURE

Rows = npt.NDArray[np.float32]

MAX_BYTES = 2**30
"""Largest array in memory: 1 GiB. An hour of 4,096 features at 3 rows per second is 177 MB."""
_FLOAT = 4
"""Bytes of a feature in memory, whatever its type in the file."""
_NPY_HEAD = 2**14
"""Bytes within which the header of an npy must end; NumPy would read up to 4 GiB if the header claims so."""
_PIECE = 2**20
"""Bytes per read."""
MAX_DEPTH = 16
"""Deepest nesting of HDF5 groups searched for the one dataset."""
_FILTERS = {1, 2, 3, 4, 5, 6, 32000}
"""HDF5's own filters and h5py's lzf; for any other, the library would load a plug-in from the machine."""


def read_features(path: str | Path, name: str | None = None, *, dim: int | None = None) -> Rows:
    """Rows (T, D) of one array of a file; `name` may be omitted if there is only one.

    In HDF5 the name is a path, as in `v_abc/c3d_features`; a group with a single dataset stands for it.
    """
    try:
        return _checked_rows(read_array(path, name, _FLOAT), f"{path}" if name is None else f"{path}, {name!r}", dim)
    except MemoryError:
        raise _no_memory(path) from None


def _checked_rows(array: npt.NDArray[Any], where: str, dim: int | None) -> Rows:
    if array.ndim != 2 or (dim is not None and array.shape[1] != dim):
        raise SourceError(f"{where}: expected features of shape (any, {dim or 'any'}): got {array.shape}; check the name and the encoder")
    if array.size == 0:
        raise SourceError(f"{where}: empty: it has shape {array.shape}; expected at least one row")
    good = readable_prefix(array, LARGEST_FEATURE)
    if good < array.shape[0]:
        limits = f"row {good} holds a feature that is not finite or not below {LARGEST_FEATURE:g}"
        raise SourceError(f"{where}: {limits}: make the features again, or leave this clip out")
    return array.astype(np.float32, copy=False)


def read_array(path: str | Path, name: str | None = None, width: int = 1) -> npt.NDArray[Any]:
    """One array of a file as it is stored, of any shape; each value may take `width` bytes in memory. Its values are not checked."""
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise SourceError(f"{path}: unknown format of features: expected .hdf5, .h5, .npy, .npz or .safetensors")
    if not path.is_file():
        raise SourceError(f"{path}: no such file")
    try:
        return reader(path, name, width)
    except SourceError:
        raise
    except MemoryError:
        raise _no_memory(path) from None
    # RuntimeError: an encrypted npz or a type that torch cannot convert; ValueError, TypeError: a name or a type that cannot exist.
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, SafetensorError) as error:
        raise SourceError(f"{path}: damaged, cut short or not {path.suffix.lower()}: {_first_line(error)}") from None


def _no_memory(path: str | Path) -> SourceError:
    return SourceError(f"{path}: does not fit into the memory that is free: store one array per clip, or free memory")


def _read_npy(path: Path, name: str | None, width: int) -> npt.NDArray[Any]:
    if name is not None:
        raise SourceError(f"{path}: an npy file holds one array without a name: got the name {name!r}")
    with path.open("rb") as file:
        return _npy_array(file, path.stat().st_size, str(path), width)


def _npy_array(file: IO[bytes], num_bytes: int, where: str, width: int) -> npt.NDArray[Any]:
    """An npy array, after a check that its header matches the number of bytes."""
    try:
        head = io.BytesIO(file.read(_NPY_HEAD))
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(head)
        offset = head.tell()
    except Exception as error:  # NumPy parses the header as Python: damage may raise anything
        raise SourceError(f"{where}: damaged or not an npy array: {_first_line(error)}") from None
    _check_array(shape, dtype, where, width)
    size = math.prod(shape) * dtype.itemsize
    if size != num_bytes - offset:
        raise SourceError(f"{where}: damaged or cut short: shape {shape} of {dtype} needs {size} bytes and {num_bytes - offset} follow")
    data, filled, piece = np.empty(size, np.uint8), 0, head.read(size)
    while piece:
        data[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
        filled += len(piece)
        piece = file.read(min(_PIECE, size - filled))
    if filled != size:
        raise SourceError(f"{where}: cut short: expected {size} bytes, got {filled}")
    return data.view(dtype).reshape(shape, order="F" if fortran else "C")


def _read_npz(path: Path, name: str | None, width: int) -> npt.NDArray[Any]:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        info = members[_choose(list(members), name, str(path))]
        where = f"{path}, {info.filename!r}"
        if info.file_size > MAX_BYTES + _NPY_HEAD:
            raise SourceError(f"{where}: unpacks to {info.file_size} bytes: expected at most {MAX_BYTES}; it is damaged or a zip bomb")
        with archive.open(info) as file:
            return _npy_array(file, info.file_size, where, width)


def _read_safetensors(path: Path, name: str | None, width: int) -> npt.NDArray[Any]:
    with safe_open(path, framework="pt") as file:
        chosen = _choose(list(file.keys()), name, str(path))
        part = file.get_slice(chosen)
        shape = tuple(part.get_shape())
        if not part.get_dtype().startswith(("F", "BF", "I", "U")):
            raise SourceError(f"{path}, {chosen!r}: holds {part.get_dtype()}: expected an array of numbers")
        _check_array(shape, np.dtype(np.float32), f"{path}, {chosen!r}", width)
        array = np.empty(shape, np.float32)  # a copy: the tensor is a view of the file, which may change
        torch.from_numpy(array).copy_(file.get_tensor(chosen))
        return array


def _read_hdf5(path: Path, name: str | None, width: int) -> npt.NDArray[Any]:
    try:
        import h5py
    except ModuleNotFoundError:
        raise MissingExtraError("h5py", "features", "reading HDF5 features") from None
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


_READERS = {".npy": _read_npy, ".npz": _read_npz, ".safetensors": _read_safetensors}
_READERS |= dict.fromkeys((".h5", ".hdf5", ".hdf"), _read_hdf5)


def _follow(node: Any, place: str, part: str, path: Path) -> Any:
    """The child of a group; links are refused, because they could lead to another file."""
    import h5py

    inside, where = isinstance(node, h5py.Group), f"{place}/{part}"
    if not inside or part not in list(node):
        raise SourceError(f"{path}: no {where!r} in it; expected {_some(list(node)) if inside else 'a group'}")
    link = node.get(part, getlink=True)
    if not isinstance(link, h5py.HardLink):
        target = getattr(link, "filename", "") or getattr(link, "path", "")
        raise SourceError(f"{path}: {where!r} is a {type(link).__name__} to {target!r}; links are not followed: store the data itself")
    return node[part]


def _check_dataset(dataset: Any, where: str, width: int) -> None:
    if dataset.is_virtual or dataset.external:
        raise SourceError(f"{where}: its data is in other files, which are not read: store the data itself")
    if dataset.shape is None:
        raise SourceError(f"{where}: empty: a dataset without a shape")
    _check_array(dataset.shape, dataset.dtype, where, width)
    properties = dataset.id.get_create_plist()
    filters = {properties.get_filter(index)[0] for index in range(properties.get_nfilters())}
    if filters - _FILTERS:
        number = min(filters - _FILTERS)
        raise SourceError(f"{where}: packed by filter {number}, which is not HDF5's own: expected gzip, lzf or none; pack it again")
    if math.prod(dataset.shape) and dataset.id.get_storage_size() == 0:
        raise SourceError(f"{where}: declares shape {dataset.shape} and stores nothing: the file was not written to the end")
    if dataset.chunks is None:
        return
    if math.prod(dataset.chunks) * dataset.dtype.itemsize > MAX_BYTES:  # a chunk is unpacked whole
        raise SourceError(f"{where}: stored in chunks of {dataset.chunks}: expected at most {MAX_BYTES} bytes each; store it again")
    needed = math.prod(-(-side // chunk) for side, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    if (written := dataset.id.get_num_chunks()) < needed:  # HDF5 reads a chunk that was never written as zeros
        stored = f"half written: shape {dataset.shape} needs {needed} chunks and {written} are stored"
        raise SourceError(f"{where}: {stored}; make the features again, or leave this clip out")


def _check_array(shape: tuple[int, ...], dtype: np.dtype[Any], where: str, width: int) -> None:
    """Refuse the shape or type that a header declares, before any memory is taken."""
    if dtype.hasobject or dtype.kind not in "fiu":
        kind = "Python objects, which can run code when read" if dtype.hasobject else str(dtype)
        raise SourceError(f"{where}: holds {kind}: expected an array of numbers")
    if any(side < 0 for side in shape):
        raise SourceError(f"{where}: declares shape {shape}: expected sides of at least 0; it is damaged")
    size = math.prod(shape) * max(dtype.itemsize, width)
    if size > MAX_BYTES:
        declared = f"declares shape {shape} of {dtype}, which would take {size} bytes: expected at most {MAX_BYTES}"
        raise SourceError(f"{where}: {declared}; store one array per clip, or fewer rows, or make the file again if it is damaged")


def _choose(names: list[str], name: str | None, where: str) -> str:
    if name is None and len(names) == 1:
        return names[0]
    if name is None or name not in names:
        asked = "say which array to read" if name is None else f"no array {name!r} in it"
        raise SourceError(f"{where}: {asked}; expected one of {_some(names)}")
    return name


def _some(names: list[str]) -> str:
    more = f" … ({len(names)} in all)" if len(names) > 5 else ""
    return ", ".join(map(repr, sorted(names)[:5])) + more if names else "nothing: it is empty"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
