"""The feature store: the tokens of a corpus and their arrival times, in a folder that is mapped into memory.

- `store.json`: format and signature; in a finished store also the size and sha256 of every other file.
- `index.jsonl`: one line per clip, in corpus order: the place of its tokens, or why it has none. Each line ends with a checksum over
  all lines up to it, so that a damaged line is found.
- `tokens-00000.bin` …: tokens and arrival times, append-only. No byte that a reader may have mapped is changed or truncated: to drop
  committed clips, a new file takes the name, and readers keep the old one.
- `problems.jsonl`: clips that could not be encoded, or whose source had a problem.

Tokens reach the disk before the index lines that name them. So after a crash all complete lines are valid; bytes past them are dropped
on resuming, and the missing clips are encoded again, to the same bytes.

Shape suffixes: T tokens, E features per token, G groups of features that share a scale.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

import zendaya
from zendaya.data.features.options import SHARD_BYTES, Dtype
from zendaya.encoders.base import FloatArray, Tokens, Traits
from zendaya.errors import ConfigError, SourceError, StoreError
from zendaya.files import file_digest, flush_folder, write_atomically
from zendaya.nn.decoder import LARGEST_FEATURE
from zendaya.records import read_record

FORMAT = 1
HEADER, INDEX, PROBLEMS, LOCK = "store.json", "index.jsonl", "problems.jsonl", ".lock"
COMMIT_S, COMMIT_BYTES = 1.0, 1 << 26
"""Most work between two commits, which a crash may lose."""
ALIGN = 64
"""Records begin on a cache line."""
GROUP = 32
"""Features that share a scale in int8. A scale per clip would tell its first token the future (method.md §4); a scale per token would
round small features beside a large one to 0."""

_BELOW_LIMIT = float(np.nextafter(np.float32(LARGEST_FEATURE), np.float32(0)))
_Sealed = dict[str, tuple[int, str]]
_NUMPY = {"fp16": "<f2", "int8": "|i1", "fp32": "<f4"}
_LARGEST = {"fp16": 65504.0, "int8": _BELOW_LIMIT, "fp32": _BELOW_LIMIT}


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Identity of the tokens in a store: with equal signatures, equal clips have equal tokens."""

    version: str
    encoder: str
    """`Traits.name`: the encoder and every setting that changes its tokens."""
    encoder_digest: str
    """sha256 of the weights, or of the feature file; empty if there is neither."""
    dim: int
    tokens_per_s: float
    look_back_s: float
    look_ahead_s: float
    live: bool
    ids: bool
    corpus: str
    data_digest: str
    """sha256 of the published files, as `zendaya corpora check` prints it."""
    split: str
    """The one split encoded; empty for all splits."""
    dtype: Dtype

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise ConfigError(f"dtype must be one of {', '.join(get_args(Dtype))}: got {self.dtype!r}")
        if not 1 <= self.dim < 1 << 31:
            raise ConfigError(f"{self.encoder}: dim must be at least 1 feature per token: got {self.dim}")
        if self.ids and self.dtype != "fp32":
            raise ConfigError(f"{self.encoder}: its tokens are ids, which only fp32 holds exactly: got dtype {self.dtype}")

    @staticmethod
    def of(traits: Traits, *, encoder_digest: str, corpus: str, data_digest: str, split: str = "", dtype: Dtype = "fp16") -> Signature:
        """The signature of an encoder's tokens of a corpus."""
        return Signature(
            version=zendaya.__version__, encoder=traits.name, encoder_digest=encoder_digest, dim=traits.dim,
            tokens_per_s=traits.tokens_per_s, look_back_s=traits.look_back_s, look_ahead_s=traits.look_ahead_s, live=traits.live,
            ids=traits.ids, corpus=corpus, data_digest=data_digest, split=split, dtype=dtype,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        # JSON has no infinity: an unlimited receptive field is null.
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


# The record of a clip: its values, the scales of int8, and its arrival times, each aligned.


def _layout(num_tokens: int, dim: int, dtype: Dtype) -> tuple[int, int, int]:
    """Offsets of the scales, of the arrival times, and of the end of a record."""
    scales = _aligned(num_tokens * dim * np.dtype(_NUMPY[dtype]).itemsize)
    arrivals = scales + (_aligned(4 * num_tokens * math.ceil(dim / GROUP)) if dtype == "int8" else 0)
    return scales, arrivals, _aligned(arrivals + 8 * num_tokens)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def pack(tokens: Tokens, dtype: Dtype) -> bytes:
    """The record of a clip; a value that the dtype cannot hold is an error."""
    values_TE = np.ascontiguousarray(tokens.values_TE.detach().cpu().numpy(), np.float32)
    arrivals = np.ascontiguousarray(tokens.arrival_s, "<f8")
    num_tokens, dim = values_TE.shape
    assert np.isfinite(arrivals).all(), arrivals
    assert (np.diff(arrivals) >= 0).all(), arrivals
    good = np.abs(values_TE).max(1, initial=0.0) <= _LARGEST[dtype]  # False for NaN too
    if not good.all():
        token = int(np.flatnonzero(~good)[0])
        advice = "" if dtype != "fp16" or not np.isfinite(values_TE).all() else "; use --dtype fp32"
        raise SourceError(f"token {token} holds a feature that is not finite or beyond ±{_LARGEST[dtype]:g}, the limit of {dtype}{advice}")
    if dtype == "int8":
        groups_TGW = np.pad(values_TE, ((0, 0), (0, -dim % GROUP))).reshape(num_tokens, -1, GROUP)
        scales_TG = (np.abs(groups_TGW).max(2) / np.float32(127)).astype("<f4")
        divisors_TG = np.where(scales_TG > 0, scales_TG, np.float32(1))
        levels_TGW = np.rint(groups_TGW / divisors_TG[..., None]).clip(-127, 127).astype(np.int8)
        parts = [levels_TGW.reshape(num_tokens, -1)[:, :dim], scales_TG]
    else:
        parts = [values_TE.astype(_NUMPY[dtype])]
    return b"".join(part.tobytes().ljust(_aligned(part.nbytes), b"\0") for part in (*parts, arrivals))


@dataclass(frozen=True)
class View:
    """The tokens of a clip in the mapped file, not copied; read-only."""

    values_TE: npt.NDArray[Any]
    scales_TG: npt.NDArray[np.float32] | None
    arrival_s: FloatArray

    def tokens(self) -> Tokens:
        """The tokens in float32, copied."""
        values_TE = self.values_TE.astype(np.float32)
        if self.scales_TG is not None:
            values_TE *= np.repeat(self.scales_TG, GROUP, axis=1)[:, : values_TE.shape[1]]
        return Tokens(torch.from_numpy(values_TE), self.arrival_s.copy())


def _view(buffer: Any, offset: int, num_tokens: int, dim: int, dtype: Dtype) -> View:
    scales_at, arrivals_at, _ = _layout(num_tokens, dim, dtype)
    values = np.frombuffer(buffer, _NUMPY[dtype], num_tokens * dim, offset).reshape(num_tokens, dim)
    groups = math.ceil(dim / GROUP)
    scales = np.frombuffer(buffer, "<f4", num_tokens * groups, offset + scales_at).reshape(num_tokens, groups) if dtype == "int8" else None
    return View(values, scales, np.frombuffer(buffer, "<f8", num_tokens, offset + arrivals_at))


# Header and index.


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the index: a clip, and the place of its tokens or the reason why it has none."""

    id: str
    split: str
    num_tokens: int = 0
    """0 for a clip that could not be encoded."""
    shard: int = 0
    offset: int = 0
    sha256: str = ""
    """Of its record."""
    kind: str = ""
    """Kind of problem with the clip, which may still have tokens."""
    reason: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Split and id: ids are unique within a split."""
        return self.split, self.id

    def line(self, total: str) -> tuple[bytes, str]:
        """The line of this entry after lines with the checksum `total`, and the new checksum."""
        defaults = {field.name: field.default for field in fields(self)}
        record = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        body = json.dumps(record)[:-1]
        new = hashlib.sha256(f"{total}{body}".encode()).hexdigest()[:16]
        return f'{body}, "sum": "{new}"}}\n'.encode(), new


def _read_index(data: bytes) -> tuple[list[Entry], int, str]:
    """The entries up to the first damaged line, their size in bytes, and their checksum."""
    entries, end, total = list[Entry](), 0, ""
    for written in data.splitlines(keepends=True):
        try:
            record = json.loads(written)
            del record["sum"]
            entry = Entry(**record)
        except (ValueError, TypeError, KeyError, RecursionError):
            break
        line, new = entry.line(total)
        places = {"num_tokens": entry.num_tokens, "shard": entry.shard, "offset": entry.offset}
        typed = all(type(value) is (int if name in places else str) for name, value in record.items())
        if line != written or not typed or entry.offset % ALIGN or not all(0 <= number < 1 << 48 for number in places.values()):
            break
        entries.append(entry)
        end, total = end + len(line), new
    return entries, end, total


def _shard_name(number: int) -> str:
    return f"tokens-{number:05}.bin"


def _shard_ends(entries: list[Entry], signature: Signature, where: str) -> list[int]:
    """The size of each shard in bytes by its entries, which must lie back to back."""
    ends = list[int]()
    for entry in entries:
        if entry.num_tokens == 0:
            continue
        if entry.shard == len(ends):
            ends.append(0)
        if entry.shard != len(ends) - 1 or entry.offset != ends[-1]:
            raise StoreError(f"{where}: the tokens of clip {entry.id!r} do not follow those before: it is damaged; encode again")
        ends[-1] += _layout(entry.num_tokens, signature.dim, signature.dtype)[2]
    return ends


def _canonical_digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_header(folder: Path) -> tuple[dict[str, Any], Signature]:
    path = folder / HEADER
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        what = "no such folder" if not folder.exists() else "a file" if not folder.is_dir() else f"no {HEADER} in it"
        raise StoreError(f"{folder}: not a feature store: {what}; expected a folder that zendaya encode wrote") from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise StoreError(f"{path}: not JSON: it is damaged; encode again") from None
    got = record.get("zendaya_store", "another file") if isinstance(record, dict) else "another file"
    if got != FORMAT:
        advice = "encode again, or use the version that wrote it"
        raise StoreError(f"{path}: expected a feature store of format {FORMAT}: got {got!r}; {advice}")
    if _canonical_digest({name: value for name, value in record.items() if name != "sha256"}) != record.get("sha256"):
        raise StoreError(f"{path}: checksum does not match: it was damaged or changed after it was written; encode again")
    data = record.get("signature")
    if isinstance(data, dict):
        data = {name: math.inf if value is None else value for name, value in data.items()}
    try:
        return record, read_record(Signature, data, f"{path}: signature")
    except ConfigError as error:
        raise StoreError(f"{error}; another program wrote it, or it is damaged") from None


def _sealed_files(header: dict[str, Any], folder: Path) -> _Sealed:
    """Size and sha256 of the files of a finished store: index, problems and shards."""
    files = header.get("files")
    shards = [_shard_name(number) for number in range(len(files) - 2)] if isinstance(files, dict) else []
    if not isinstance(files, dict) or list(files) != [INDEX, PROBLEMS, *shards]:
        raise StoreError(f"{folder / HEADER}: its list of files is not that of a feature store: another program wrote it")
    try:
        return {name: (int(known["bytes"]), str(known["sha256"])) for name, known in files.items()}
    except (TypeError, KeyError, ValueError):
        raise StoreError(f"{folder / HEADER}: its list of files lacks sizes and checksums: another program wrote it") from None


class FeatureStore:
    """The tokens of a corpus in a finished store; safe to share between processes."""

    def __init__(self, path: Path, signature: Signature, entries: list[Entry], files: _Sealed, maps: list[mmap.mmap]) -> None:
        self.path, self.signature, self._files, self._maps = path, signature, files, maps
        self.entries = tuple(entries)
        """All clips of the corpus in its order, with and without tokens."""
        self._clips: dict[str, dict[str, Entry]] = {}
        for entry in entries:
            self._clips.setdefault(entry.id, {})[entry.split] = entry

    @classmethod
    def open(cls, path: str | Path, *, encoder: Traits | str | None = None, corpus: str | None = None) -> FeatureStore:
        """Open the store in a folder and check its header, index and file sizes; another encoder or corpus is an error."""
        folder = Path(path)
        header, signature = _read_header(folder)
        wanted = encoder.name if isinstance(encoder, Traits) else encoder
        for name, expected, got in (("encoder", wanted, signature.encoder), ("corpus", corpus, signature.corpus)):
            if expected is not None and expected != got:
                other = f"a store of another {name}: expected {expected!r}, got {got!r}"
                raise StoreError(f"{folder}: {other}; give the right one, or encode again")
        if header.get("finished") is not True:
            raise StoreError(f"{folder}: not finished: its encoding was stopped, or still runs; run the same zendaya encode again")
        files = _sealed_files(header, folder)
        for name, (size, _) in files.items():
            if (held := _size(folder / name)) != size:
                found = "no such file" if held is None else f"{held} bytes"
                raise StoreError(f"{folder / name}: expected {size} bytes: got {found}; it is damaged or cut short: copy or encode again")
        data = (folder / INDEX).read_bytes()
        entries, end, _ = _read_index(data)
        if hashlib.sha256(data).hexdigest() != files[INDEX][1] or end != len(data):
            raise StoreError(f"{folder / INDEX}: checksum does not match: it was damaged or changed; copy or encode again")
        ends = _shard_ends(entries, signature, str(folder / INDEX))
        if ends != [files[_shard_name(number)][0] for number in range(len(files) - 2)]:
            raise StoreError(f"{folder}: its index and its token files do not belong together; copy or encode again")
        # The header is read again after all maps, because a writer that starts over gives the names of shards to other files.
        maps = [_map(folder / _shard_name(number), size) for number, size in enumerate(ends)]
        if _read_header(folder)[0] != header:
            raise StoreError(f"{folder}: a zendaya encode began to write to it while it was opened; open it again when that is done")
        return cls(folder, signature, entries, files, maps)

    def __reduce__(self) -> tuple[Callable[[Path], FeatureStore], tuple[Path]]:
        return FeatureStore.open, (self.path,)  # a memory map belongs to one process

    def __len__(self) -> int:
        """Clips with tokens."""
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Entry]:
        """The clips with tokens, in the order of the corpus."""
        return (entry for entry in self.entries if entry.num_tokens)

    def __contains__(self, clip_id: object) -> bool:
        return any(entry.num_tokens for entry in self._clips.get(str(clip_id), {}).values())

    @property
    def problems(self) -> tuple[Entry, ...]:
        """The clips that could not be encoded, or whose source had a problem."""
        return tuple(entry for entry in self.entries if entry.kind)

    def find(self, clip_id: str, split: str | None = None) -> Entry:
        """The entry of a clip; `split` may be omitted if the id is in one split only."""
        splits = self._clips.get(clip_id, {})
        if split is None and len(splits) > 1:
            raise StoreError(f"{self.path}: clip {clip_id!r} is in {', '.join(splits)}: say which split")
        entry = splits.get(next(iter(splits), "") if split is None else split)
        if entry is None:
            of, number = f" of split {split!r}" if split is not None else "", len(self.entries)
            raise StoreError(f"{self.path}: no clip {clip_id!r}{of} among its {number}: it was encoded with another split or limit")
        if entry.num_tokens == 0:
            raise StoreError(f"{self.path}: clip {clip_id!r} could not be encoded: {entry.reason}")
        return entry

    def get(self, clip_id: str, split: str | None = None) -> Tokens:
        """The tokens of a clip in float32, with their arrival times."""
        return self.view(clip_id, split).tokens()

    def view(self, clip_id: str, split: str | None = None) -> View:
        """The tokens of a clip in the mapped file, not copied."""
        entry = self.find(clip_id, split)
        return _view(self._maps[entry.shard], entry.offset, entry.num_tokens, self.signature.dim, self.signature.dtype)

    def verify(self) -> None:
        """Compare all files with their checksums; the error names the first damaged clip."""
        for entry in self:
            size = _layout(entry.num_tokens, self.signature.dim, self.signature.dtype)[2]
            record = memoryview(self._maps[entry.shard])[entry.offset : entry.offset + size]
            if hashlib.sha256(record).hexdigest() != entry.sha256:
                where = self.path / _shard_name(entry.shard)
                raise StoreError(f"{where}: checksum does not match at clip {entry.id!r}: it was damaged or changed; copy or encode again")
        shards = {_shard_name(number): shard for number, shard in enumerate(self._maps)}
        for name, (_, sha256) in self._files.items():
            try:  # shards as mapped: other files may have their names by now
                found = hashlib.sha256(shards[name]).hexdigest() if name in shards else file_digest(self.path / name)
            except OSError as error:
                raise StoreError(f"{self.path / name}: cannot be read: {error.strerror or error}") from None
            if found != sha256:
                raise StoreError(f"{self.path / name}: checksum does not match: it was damaged or changed; copy or encode again")


def _map(path: Path, size: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < size:  # a page past the end would kill the process
                raise StoreError(f"{path}: cut short while the store was opened; copy or encode again")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


# Writing.


@dataclass(frozen=True)
class _Place:
    """How much of a store is written. It is replaced as a whole, so that an interrupt leaves a consistent one."""

    num_entries: int = 0
    num_shards: int = 0
    shard_end: int = 0
    """Bytes of the last shard."""
    index_end: int = 0
    total: str = ""
    """The checksum of the lines so far."""
    lines: bytes = b""
    """Lines that are not in the index yet."""


class StoreWriter(contextlib.AbstractContextManager["StoreWriter"]):
    """The only writer of a store, new or resumed: clips are added in corpus order, committed, and at last sealed."""

    def __init__(self, path: str | Path, signature: Signature, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.path, self.signature, self.shard_bytes, self.finished = Path(path), signature, shard_bytes, False
        self._added: list[Entry] = []
        self._files: dict[str, int] = {}
        self._kept = self._place = _Place()
        self._tail_is_ours = False
        """Whether this writer wrote all bytes past the last commit, so that no reader has mapped them."""
        self._since = time.monotonic()
        with self._writing():
            if self.path.exists() and not self.path.is_dir():
                raise StoreError(f"{self.path}: a file: expected a folder to write the store to")
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            with self._writing():
                self._lock()
                if (self.path / HEADER).exists():
                    self._resume()
                else:
                    self._begin()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def entries(self) -> list[Entry]:
        """The clips added so far, in order."""
        return self._added[: self._place.num_entries]

    @property
    def num_entries(self) -> int:
        """Number of clips added so far."""
        return self._place.num_entries

    def add(self, clip_id: str, split: str, num_tokens: int, record: bytes, *, kind: str = "", reason: str = "") -> None:
        """Add the next clip, with tokens from `pack`; `kind` and `reason` describe a problem with its source."""
        assert len(record) == _layout(num_tokens, self.signature.dim, self.signature.dtype)[2], (num_tokens, len(record))
        place = self._place
        fresh = place.num_shards == 0 or place.shard_end >= self.shard_bytes
        shard, offset = (place.num_shards, 0) if fresh else (place.num_shards - 1, place.shard_end)
        entry = Entry(
            id=clip_id, split=split, num_tokens=num_tokens, shard=shard, offset=offset, sha256=hashlib.sha256(record).hexdigest(),
            kind=kind, reason=reason,
        )  # fmt: skip
        with self._writing():
            self._unseal()
            _write(self._open(_shard_name(shard)), record, offset)
            self._note(entry, num_shards=shard + 1, shard_end=offset + len(record))

    def fail(self, clip_id: str, split: str, kind: str, reason: str) -> None:
        """Add the next clip as one that could not be encoded."""
        with self._writing():
            self._unseal()
            self._note(Entry(id=clip_id, split=split, kind=kind, reason=reason), self._place.num_shards, self._place.shard_end)

    def _note(self, entry: Entry, num_shards: int, shard_end: int) -> None:
        place = self._place
        line, total = entry.line(place.total)
        self._added[place.num_entries :] = [entry]
        self._place = _Place(place.num_entries + 1, num_shards, shard_end, place.index_end, total, place.lines + line)
        waiting = shard_end - self._kept.shard_end if num_shards == self._kept.num_shards else COMMIT_BYTES
        if waiting >= COMMIT_BYTES or time.monotonic() - self._since >= COMMIT_S:
            self._commit()

    def _commit(self) -> None:
        """Bring everything added to the disk: the tokens first, then the lines that name them."""
        place = self._place
        if place.lines:
            for number in range(max(0, self._kept.num_shards - 1), place.num_shards):
                os.fsync(self._open(_shard_name(number)))
            flush_folder(self.path)  # the names of new shards
            _write(self._open(INDEX), place.lines, place.index_end)
            os.fsync(self._open(INDEX))
            self._kept = self._place = replace(place, index_end=place.index_end + len(place.lines), lines=b"")
        self._since = time.monotonic()

    def cut(self, num_entries: int) -> None:
        """Drop all clips after the first `num_entries`, to encode them again; readers that have the store open keep them."""
        with self._writing():
            self._commit()
            if num_entries >= self._place.num_entries:
                return
            self._unseal()
            index_end, total = 0, ""
            for entry in self._added[:num_entries]:
                line, total = entry.line(total)
                index_end += len(line)
            self._restore(self._added[:num_entries], index_end, total)

    def finish(self) -> None:
        """Seal the store: write all that is left, and the checksums into the header."""
        if self.finished:
            return
        with self._writing():
            self._commit()
            self._trim()
            self._write_problems()
            files = [self.path / name for name in (INDEX, PROBLEMS, *map(_shard_name, range(self._place.num_shards)))]
            self._write_header(
                clips=sum(entry.num_tokens > 0 for entry in self.entries),
                without_tokens=sum(entry.num_tokens == 0 for entry in self.entries),
                tokens=sum(entry.num_tokens for entry in self.entries),
                files={file.name: {"bytes": file.stat().st_size, "sha256": file_digest(file)} for file in files},
            )

    def stop(self) -> None:
        """Leave the store unfinished, with all clips added, to be resumed."""
        if not self.finished:
            with self._writing():
                self._commit()
                self._write_problems()

    def discard(self) -> None:
        """Remove the store, except for the report of problems."""
        with self._writing():
            self._write_problems()
            # The header last: without an index the store is empty, without a header the folder is no store.
            for name in [*(path.name for path in self.path.glob("tokens-*.bin")), INDEX, HEADER]:
                (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files, then the lock; clips that were not committed are lost."""
        for name in reversed(list(self._files)):
            self._close(name)

    # The store on disk when it is opened.

    def _begin(self) -> None:
        foreign = sorted({path.name for path in self.path.iterdir()} - {LOCK, PROBLEMS, _new(HEADER), _new(PROBLEMS)})
        if foreign:
            raise StoreError(f"{self.path}: not empty, and no feature store: it holds {foreign[0]!r}; give a new or empty folder")
        self._write_header()
        self._tail_is_ours = True

    def _resume(self) -> None:
        header, signature = _read_header(self.path)
        for (name, stored), ours in zip(signature.to_dict().items(), self.signature.to_dict().values(), strict=True):
            if stored != ours:
                other = f"expected {name} {stored!r}: got {ours!r}"
                raise StoreError(f"{self.path}: holds other features: {other}; encode to another folder, or delete this one")
        self.shard_bytes = int(header["shard_bytes"])
        self.finished = header["finished"] is True
        data = (self.path / INDEX).read_bytes() if (self.path / INDEX).exists() else b""
        entries, end, total = _read_index(data)
        if self.finished:
            FeatureStore.open(self.path)  # raises the error that names the damage
        ends = _shard_ends(entries, signature, str(self.path / INDEX))
        for number, size in enumerate(ends):
            if (got := _size(self.path / _shard_name(number)) or 0) < size:
                raise StoreError(f"{self.path / _shard_name(number)}: expected {size} bytes: got {got}; it is damaged: delete the store")
        self._restore(entries, end, total)

    def _restore(self, entries: list[Entry], index_end: int, total: str) -> None:
        """Continue after these entries; bytes past them on disk were not committed, or are to be dropped."""
        self._tail_is_ours = False
        ends = _shard_ends(entries, self.signature, str(self.path / INDEX))
        self._added = list(entries)
        self._place = self._kept = _Place(len(entries), len(ends), ends[-1] if ends else 0, index_end, total)
        if not self.finished:
            self._trim()
        self._tail_is_ours = True

    def _unseal(self) -> None:
        if self.finished:
            self._write_header()

    def _write_header(self, **sealed: Any) -> None:
        """Write the header, of a finished store if it gets counts and checksums."""
        record: dict[str, Any] = {"zendaya_store": FORMAT, "finished": bool(sealed), "shard_bytes": self.shard_bytes}
        record |= {"signature": self.signature.to_dict(), **sealed}
        record["sha256"] = _canonical_digest(record)
        _replace(self.path, HEADER, json.dumps(record, indent=2).encode() + b"\n")
        self.finished = bool(sealed)

    def _trim(self) -> None:
        """Remove all bytes past the last commit: from the index first, so that no line names missing tokens."""
        if (self.path / INDEX).exists() or self._kept.num_entries == 0:
            os.ftruncate(self._open(INDEX), self._kept.index_end)  # readers do not map it
            os.fsync(self._open(INDEX))
        for path in self.path.glob("tokens-*.bin"):
            if path.name >= _shard_name(self._kept.num_shards):
                self._close(path.name)
                path.unlink()  # a map of it stays valid
        for path in self.path.glob(_new("tokens-*.bin")):
            path.unlink()
        if self._kept.num_shards:
            name = _shard_name(self._kept.num_shards - 1)
            if not self._tail_is_ours and os.fstat(self._open(name)).st_size > self._kept.shard_end:
                # A reader may have mapped bytes that a stopped writer left: a copy takes the name, the old file is unchanged.
                self._copy(name, self._kept.shard_end)
            os.ftruncate(self._open(name), self._kept.shard_end)  # readers map only tokens that an index names
            os.fsync(self._open(name))

    def _copy(self, name: str, size: int) -> None:
        """Replace a shard by a new file of its first bytes; readers that have the old file open keep it."""
        new = self.path / _new(name)
        try:
            done = 0
            while part := os.pread(self._open(name), min(1 << 20, size - done), done):
                _write(self._open(new.name), part, done)
                done += len(part)
            os.fsync(self._open(new.name))
            os.replace(new, self.path / name)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            self._close(new.name)
        self._close(name)
        flush_folder(self.path)

    # Files.

    def _lock(self) -> None:
        try:
            import fcntl
        except ModuleNotFoundError:
            raise StoreError(f"{self.path}: stores are written on Linux and macOS only; they are read anywhere") from None
        try:
            fcntl.flock(self._open(LOCK), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{self.path}: another process is writing to it: wait for it, or give another folder") from None

    def _open(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self.path / name, os.O_RDWR | os.O_CREAT, 0o666)
        return self._files[name]

    def _close(self, name: str) -> None:
        if name in self._files:
            os.close(self._files.pop(name))

    def _write_problems(self) -> None:
        lines = []
        for entry in self.entries:
            if entry.kind:
                record = {"id": entry.id, "split": entry.split, "kind": entry.kind, "reason": entry.reason, "encoded": entry.num_tokens > 0}
                lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        _replace(self.path, PROBLEMS, "".join(lines).encode(errors="backslashreplace"))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn a system error into a StoreError, and free the space of clips that are not committed."""
        try:
            yield
        except OSError as error:
            kept = self._kept.num_entries
            if not self.finished and self._tail_is_ours:
                self._place = self._kept
                with contextlib.suppress(OSError):
                    self._trim()
            advice = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "repair this"
            then = f"{advice} and run the same command again: the {kept} clips that are done are kept" if kept else advice
            raise StoreError(f"{self.path}: cannot be written: {error.strerror or error}; {then}") from None


def _new(name: str) -> str:
    return f".{name}.new"


def _replace(folder: Path, name: str, data: bytes) -> None:
    write_atomically(folder / name, data, owned=folder / _new(name))  # the lock makes the name ours


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
