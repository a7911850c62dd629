"""The feature store: the tokens of a corpus and their arrival times, in a folder that is mapped into memory.

- `store.json`: format and signature; once the store is finished, the size and sha256 of every other file too.
- `index.jsonl`: a line a clip, in the order of the corpus: where its tokens lie, or why there are none. Each line ends with a sum
  over all lines up to it, so that a torn or changed line is seen.
- `tokens-00000.bin` …: the tokens and arrival times. They are appended to; no byte that a reader may have mapped is ever changed or cut
  off. Where committed clips are to go, a new file takes the name, and the old one lives on for those who have it open.
- `problems.jsonl`: the clips that could not be encoded, and those whose source was odd.

Tokens reach the disk before the lines that name them. So whenever a writer is stopped, by whatever, the lines that are whole are
true; what lies past them is left behind on resuming, and the clips they do not name are encoded again, to the same bytes.

Shape suffixes: T tokens, E features of a token, G groups of features that share a scale.
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
from zendaya.files import flush_folder, write_atomically
from zendaya.nn.decoder import LARGEST_FEATURE
from zendaya.records import read_record

FORMAT = 1
HEADER, INDEX, PROBLEMS, LOCK = "store.json", "index.jsonl", "problems.jsonl", ".lock"
COMMIT_S, COMMIT_BYTES = 1.0, 1 << 26
"""At most this much encoding is done again after a kill."""
ALIGN = 64
"""Records begin on a cache line."""
GROUP = 32
"""Features that share a scale in int8. One scale for a whole clip would be future information to its first token (method.md §4); one for a
token would leave nothing of the small features beside a large one."""

_BELOW_LIMIT = float(np.nextafter(np.float32(LARGEST_FEATURE), np.float32(0)))
_NUMPY = {"fp16": "<f2", "int8": "|i1", "fp32": "<f4"}
_LARGEST = {"fp16": 65504.0, "int8": _BELOW_LIMIT, "fp32": _BELOW_LIMIT}


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Identity of the tokens in a store: equal signatures mean equal numbers for the same clip."""

    version: str
    encoder: str
    """`Traits.name`: the encoder and every setting its numbers depend on."""
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
    """The only split that was encoded; empty: all splits."""
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

    @staticmethod
    def from_dict(data: Any, where: str) -> Signature:
        """Read the signature in a header."""
        if isinstance(data, dict):
            data = {name: math.inf if value is None else value for name, value in data.items()}
        try:
            return read_record(Signature, data, f"{where}: signature")
        except ConfigError as error:
            raise StoreError(f"{error}; another program wrote it, or it is damaged") from None

    def difference(self, other: Signature) -> str | None:
        """The first field in which another signature differs, in words."""
        for name, mine in self.to_dict().items():
            if (theirs := other.to_dict()[name]) != mine:
                return f"{name} {mine!r}: got {theirs!r}"
        return None


# A clip on disk: its values, then in int8 their scales, then its arrival times, each aligned.


def _layout(num_tokens: int, dim: int, dtype: Dtype) -> tuple[int, int, int]:
    """Where scales and arrival times of a record begin, and where it ends."""
    scales = _aligned(num_tokens * dim * np.dtype(_NUMPY[dtype]).itemsize)
    arrivals = scales + (_aligned(4 * num_tokens * math.ceil(dim / GROUP)) if dtype == "int8" else 0)
    return scales, arrivals, _aligned(arrivals + 8 * num_tokens)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def pack(tokens: Tokens, dtype: Dtype) -> bytes:
    """The record of a clip; numbers that the dtype cannot hold are an error, never infinity."""
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
    scales_at, arrivals_at, size = _layout(num_tokens, dim, dtype)
    record = bytearray(size)
    if dtype == "int8":
        groups_TGW = np.pad(values_TE, ((0, 0), (0, -dim % GROUP))).reshape(num_tokens, -1, GROUP)
        scales_TG = (np.abs(groups_TGW).max(2) / np.float32(127)).astype("<f4")
        divisors_TG = np.where(scales_TG > 0, scales_TG, np.float32(1))
        levels_TGW = np.rint(groups_TGW / divisors_TG[..., None]).clip(-127, 127).astype(np.int8)
        values = np.ascontiguousarray(levels_TGW.reshape(num_tokens, -1)[:, :dim]).tobytes()
        record[scales_at : scales_at + scales_TG.nbytes] = scales_TG.tobytes()
    else:
        values = values_TE.astype(_NUMPY[dtype]).tobytes()
    record[: len(values)] = values
    record[arrivals_at : arrivals_at + arrivals.nbytes] = arrivals.tobytes()
    return bytes(record)


@dataclass(frozen=True)
class View:
    """The tokens of a clip as they lie in the file: read-only, nothing copied."""

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
    """One line of the index: a clip, and where its tokens lie or why there are none."""

    id: str
    split: str
    num_tokens: int = 0
    """0 for a clip that could not be encoded."""
    shard: int = 0
    offset: int = 0
    sha256: str = ""
    """Of its record."""
    kind: str = ""
    """What was wrong with the clip; one that was encoded all the same has tokens too."""
    reason: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What names a clip: ids are unique within a split."""
        return self.split, self.id

    @staticmethod
    def parse(line: bytes) -> Entry | None:
        """The entry of a line, if it is one."""
        try:
            record = json.loads(line)
            del record["sum"]
            entry = Entry(**record)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        numbers = (entry.num_tokens, entry.shard, entry.offset)
        texts = (entry.id, entry.split, entry.sha256, entry.kind, entry.reason)
        whole = all(type(n) is int and 0 <= n < 1 << 48 for n in numbers) and all(isinstance(text, str) for text in texts)
        return entry if whole and entry.offset % ALIGN == 0 else None

    def line(self, total: str) -> tuple[bytes, str]:
        """The line of this entry after lines whose sum is `total`, and the new sum."""
        defaults = {field.name: field.default for field in fields(self)}
        record = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        body = json.dumps(record)[:-1]
        new = hashlib.sha256(f"{total}{body}".encode()).hexdigest()[:16]
        return f'{body}, "sum": "{new}"}}\n'.encode(), new


def _read_index(data: bytes) -> tuple[list[Entry], int, str]:
    """The entries of the lines that are whole and follow from one another, the bytes they take, and their sum."""
    entries, end, total = list[Entry](), 0, ""
    while (stop := data.find(b"\n", end) + 1) > 0:
        entry = Entry.parse(data[end:stop])
        if entry is None:
            break
        line, new = entry.line(total)
        if line != data[end:stop]:
            break
        entries.append(entry)
        end, total = stop, new
    return entries, end, total


def _shard_name(number: int) -> str:
    return f"tokens-{number:05}.bin"


def _shard_ends(entries: list[Entry], signature: Signature, where: str) -> list[int]:
    """The bytes of each shard, from the entries; they must lie back to back."""
    ends = list[int]()
    for entry in entries:
        if entry.num_tokens == 0:
            continue
        if entry.shard == len(ends):
            ends.append(0)
        if entry.shard != len(ends) - 1 or entry.offset != ends[-1]:
            raise StoreError(f"{where}: the place of clip {entry.id!r} does not follow from the one before: it is damaged; encode again")
        ends[-1] += _layout(entry.num_tokens, signature.dim, signature.dtype)[2]
    return ends


def _header(signature: Signature, shard_bytes: int, sealed: dict[str, Any] | None) -> bytes:
    record: dict[str, Any] = {"zendaya_store": FORMAT, "finished": sealed is not None, "shard_bytes": shard_bytes}
    record |= {"signature": signature.to_dict(), **(sealed or {})}
    record["sha256"] = _canonical_digest(record)
    return json.dumps(record, indent=2).encode() + b"\n"


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
    if not isinstance(record, dict) or record.get("zendaya_store") != FORMAT:
        got = record.get("zendaya_store", "another file") if isinstance(record, dict) else "another file"
        raise StoreError(
            f"{path}: expected a feature store of format {FORMAT}: got {got!r}; encode again, or use the version that wrote it"
        )
    if _canonical_digest({name: value for name, value in record.items() if name != "sha256"}) != record.get("sha256"):
        raise StoreError(f"{path}: checksum does not match: it was damaged or changed after it was written; encode again")
    return record, Signature.from_dict(record.get("signature"), str(path))


def _sealed_files(header: dict[str, Any], folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of every file of a finished store: its index, its problems and its shards, and no other."""
    files = header.get("files")
    shards = [_shard_name(number) for number in range(len(files) - 2)] if isinstance(files, dict) else []
    if not isinstance(files, dict) or list(files) != [INDEX, PROBLEMS, *shards]:
        raise StoreError(f"{folder / HEADER}: its list of files is not that of a feature store: another program wrote it")
    try:
        return {name: (int(known["bytes"]), str(known["sha256"])) for name, known in files.items()}
    except (TypeError, KeyError, ValueError):
        raise StoreError(f"{folder / HEADER}: its list of files lacks sizes and checksums: another program wrote it") from None


def file_digest(path: Path) -> str:
    """sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class FeatureStore:
    """The tokens of a corpus, read from a store that is finished; safe to share between processes."""

    def __init__(
        self, path: Path, signature: Signature, entries: list[Entry], files: dict[str, tuple[int, str]], maps: list[mmap.mmap]
    ) -> None:
        self.path, self.signature = path, signature
        self.entries = tuple(entries)
        """A line a clip of the corpus, in its order, those without tokens too."""
        self._files = files
        self._num_encoded = sum(entry.num_tokens > 0 for entry in entries)
        self._maps = maps
        self._places = {entry.key: entry for entry in entries}
        self._splits: dict[str, list[str]] = {}
        for entry in entries:
            self._splits.setdefault(entry.id, []).append(entry.split)

    @classmethod
    def open(cls, path: str | Path, *, encoder: Traits | str | None = None, corpus: str | None = None) -> FeatureStore:
        """The store in a folder, its header, index and file sizes checked; of the encoder and the corpus named, or refused."""
        folder = Path(path)
        header, signature = _read_header(folder)
        wanted = encoder.name if isinstance(encoder, Traits) else encoder
        for name, expected, got in (("encoder", wanted, signature.encoder), ("corpus", corpus, signature.corpus)):
            if expected is not None and expected != got:
                raise StoreError(
                    f"{folder}: a store of another {name}: expected {expected!r}, got {got!r}; give the right one, or encode again"
                )
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
        # All at once, and the header again after them: a writer that starts over gives the names of shards to other files.
        maps = [_map(folder / _shard_name(number), size) for number, size in enumerate(ends)]
        if _read_header(folder)[0] != header:
            raise StoreError(f"{folder}: a zendaya encode began to write to it while it was opened; open it again when that is done")
        return cls(folder, signature, entries, files, maps)

    def __reduce__(self) -> tuple[Callable[[Path], FeatureStore], tuple[Path]]:
        return FeatureStore.open, (self.path,)  # a map of memory is its process's own

    def __len__(self) -> int:
        """Clips with tokens."""
        return self._num_encoded

    def __iter__(self) -> Iterator[Entry]:
        """The clips with tokens, in the order of the corpus."""
        return (entry for entry in self.entries if entry.num_tokens)

    def __contains__(self, clip_id: object) -> bool:
        return any(self._places[split, str(clip_id)].num_tokens for split in self._splits.get(str(clip_id), ()))

    @property
    def problems(self) -> tuple[Entry, ...]:
        """The clips that could not be encoded, and those whose source was odd."""
        return tuple(entry for entry in self.entries if entry.kind)

    def find(self, clip_id: str, split: str | None = None) -> Entry:
        """Where a clip lies; the split may be left out where only one has a clip of that id."""
        splits = self._splits.get(clip_id, [])
        if split is None and len(splits) > 1:
            raise StoreError(f"{self.path}: clip {clip_id!r} is in {', '.join(splits)}: say which split")
        entry = self._places.get((split if split is not None else splits[0] if splits else "", clip_id))
        if entry is None:
            of = f" of split {split!r}" if split is not None else ""
            raise StoreError(
                f"{self.path}: no clip {clip_id!r}{of} among its {len(self.entries)}: it was encoded with another split or limit"
            )
        if entry.num_tokens == 0:
            raise StoreError(f"{self.path}: clip {clip_id!r} could not be encoded: {entry.reason}")
        return entry

    def get(self, clip_id: str, split: str | None = None) -> Tokens:
        """The tokens of a clip in float32, with their arrival times."""
        return self.view(clip_id, split).tokens()

    def view(self, clip_id: str, split: str | None = None) -> View:
        """The tokens of a clip as they lie in the file: found at once, nothing copied."""
        entry = self.find(clip_id, split)
        return _view(self._maps[entry.shard], entry.offset, entry.num_tokens, self.signature.dim, self.signature.dtype)

    def verify(self) -> None:
        """Read everything and compare it with its checksums; the first damage is an error that names the clip it hit."""
        for entry in self:
            size = _layout(entry.num_tokens, self.signature.dim, self.signature.dtype)[2]
            record = memoryview(self._maps[entry.shard])[entry.offset : entry.offset + size]
            if hashlib.sha256(record).hexdigest() != entry.sha256:
                where = self.path / _shard_name(entry.shard)
                raise StoreError(f"{where}: checksum does not match at clip {entry.id!r}: it was damaged or changed; copy or encode again")
        shards = {_shard_name(number): shard for number, shard in enumerate(self._maps)}
        for name, (_, sha256) in self._files.items():
            try:  # the shards as they are mapped: others may have their names by now
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
    """How far a store is written. It is replaced as a whole, so that an interrupt finds the old one or the new one."""

    num_entries: int = 0
    num_shards: int = 0
    shard_end: int = 0
    """Bytes of the last shard."""
    index_end: int = 0
    total: str = ""
    """The sum of the lines so far."""
    lines: bytes = b""
    """Those that the index does not have yet."""


class StoreWriter:
    """The one writer of a store, begun or resumed: clips are added in the order of the corpus, committed, and at last sealed."""

    def __init__(
        self, path: str | Path, signature: Signature, *, shard_bytes: int = SHARD_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path, self.signature, self.shard_bytes, self._clock = Path(path), signature, shard_bytes, clock
        self.finished = False
        self._added: list[Entry] = []
        self._files: dict[str, int] = {}
        self._kept = self._place = _Place()
        self._tail_is_ours = False
        """Whether all that lies past the last commit was written by this writer, so that nobody has mapped it."""
        self._since = clock()
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

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def entries(self) -> list[Entry]:
        """The clips added so far, in order."""
        return self._added[: self._place.num_entries]

    @property
    def num_entries(self) -> int:
        """How many."""
        return self._place.num_entries

    def add(self, clip_id: str, split: str, num_tokens: int, record: bytes, *, kind: str = "", reason: str = "") -> None:
        """The tokens of the next clip, as `pack` made them; `kind` and `reason` say what was odd about its source."""
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
        """The next clip could not be encoded, and why."""
        with self._writing():
            self._unseal()
            self._note(Entry(id=clip_id, split=split, kind=kind, reason=reason), self._place.num_shards, self._place.shard_end)

    def _note(self, entry: Entry, num_shards: int, shard_end: int) -> None:
        place = self._place
        line, total = entry.line(place.total)
        self._added[place.num_entries :] = [entry]
        self._place = _Place(place.num_entries + 1, num_shards, shard_end, place.index_end, total, place.lines + line)
        waiting = shard_end - self._kept.shard_end if num_shards == self._kept.num_shards else COMMIT_BYTES
        if waiting >= COMMIT_BYTES or self._clock() - self._since >= COMMIT_S:
            self._commit()

    def commit(self) -> None:
        """Bring everything added to the disk: the tokens first, then the lines that name them."""
        with self._writing():
            self._commit()

    def _commit(self) -> None:
        place = self._place
        if place.lines:
            for number in range(max(0, self._kept.num_shards - 1), place.num_shards):
                os.fsync(self._open(_shard_name(number)))
            flush_folder(self.path)  # the names of new shards
            _write(self._open(INDEX), place.lines, place.index_end)
            os.fsync(self._open(INDEX))
            self._kept = self._place = replace(place, index_end=place.index_end + len(place.lines), lines=b"")
        self._since = self._clock()

    def cut(self, num_entries: int) -> None:
        """Forget all clips but the first `num_entries`, so that the others are encoded again; who has the store open keeps them."""
        with self._writing():
            self._commit()
            if num_entries >= self._place.num_entries:
                return
            self._unseal()
            kept = self._added[:num_entries]
            lines, total = list[bytes](), ""
            for entry in kept:
                line, total = entry.line(total)
                lines.append(line)
            self._restore(kept, sum(map(len, lines)), total)

    def finish(self) -> None:
        """Seal the store: everything on disk, its checksums in the header."""
        if self.finished:
            return
        with self._writing():
            self._commit()
            self._trim()
            self._write_problems()
            sizes_and_sums = {name: self._sums(name) for name in [INDEX, PROBLEMS, *map(_shard_name, range(self._place.num_shards))]}
            sealed = {
                "clips": sum(entry.num_tokens > 0 for entry in self.entries),
                "without_tokens": sum(entry.num_tokens == 0 for entry in self.entries),
                "tokens": sum(entry.num_tokens for entry in self.entries),
                "files": sizes_and_sums,
            }
            _replace(self.path, HEADER, _header(self.signature, self.shard_bytes, sealed))
            self.finished = True

    def stop(self) -> None:
        """Leave the store unfinished, with all that was added, to be resumed."""
        if not self.finished:
            with self._writing():
                self._commit()
                self._write_problems()

    def discard(self) -> None:
        """Leave no store, only the report of what was wrong with its clips."""
        with self._writing():
            self._write_problems()
            self.close_files()
            # The header last: a store without an index is an empty one, an index without a header is nobody's.
            for name in [*(path.name for path in self.path.glob("tokens-*.bin")), INDEX, HEADER]:
                (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files and the lock; what was not committed is not kept."""
        self.close_files()
        self._close(LOCK)

    def close_files(self) -> None:
        """Let go of the files, not of the lock."""
        for name in [name for name in self._files if name != LOCK]:
            self._close(name)

    # What a store on disk is turned into on opening.

    def _begin(self) -> None:
        foreign = sorted({path.name for path in self.path.iterdir()} - {LOCK, PROBLEMS, _new(HEADER), _new(PROBLEMS)})
        if foreign:
            raise StoreError(f"{self.path}: not empty, and no feature store: it holds {foreign[0]!r}; give a new or empty folder")
        _replace(self.path, HEADER, _header(self.signature, self.shard_bytes, None))
        self._tail_is_ours = True

    def _resume(self) -> None:
        header, signature = _read_header(self.path)
        if (difference := signature.difference(self.signature)) is not None:
            raise StoreError(f"{self.path}: holds other features: expected {difference}; encode to another folder, or delete this one")
        self.shard_bytes = int(header["shard_bytes"])
        self.finished = header["finished"] is True
        data = (self.path / INDEX).read_bytes() if (self.path / INDEX).exists() else b""
        entries, end, total = _read_index(data)
        if self.finished:
            FeatureStore.open(self.path)  # or a line that says what is damaged
        ends = _shard_ends(entries, signature, str(self.path / INDEX))
        for number, size in enumerate(ends):
            if (got := _size(self.path / _shard_name(number)) or 0) < size:
                raise StoreError(f"{self.path / _shard_name(number)}: expected {size} bytes: got {got}; it is damaged: delete the store")
        self._restore(entries, end, total)

    def _restore(self, entries: list[Entry], index_end: int, total: str) -> None:
        """Go on after these entries: what lies past them on disk was never committed, or is not wanted any more."""
        self._tail_is_ours = False
        ends = _shard_ends(entries, self.signature, str(self.path / INDEX))
        self._added = list(entries)
        self._place = self._kept = _Place(len(entries), len(ends), ends[-1] if ends else 0, index_end, total)
        if not self.finished:
            self._trim()
        self._tail_is_ours = True

    def _unseal(self) -> None:
        if self.finished:
            _replace(self.path, HEADER, _header(self.signature, self.shard_bytes, None))
            self.finished = False

    def _trim(self) -> None:
        """Be rid of what lies past the last commit: the index first, so that no line ever names what is not there."""
        if (self.path / INDEX).exists() or self._kept.num_entries == 0:
            os.ftruncate(self._open(INDEX), self._kept.index_end)  # readers have it read, not mapped
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
                # What a stopped writer left may have been sealed before it was to go: a copy takes the name, the file stays as it is.
                self._copy(name, self._kept.shard_end)
            os.ftruncate(self._open(name), self._kept.shard_end)  # readers map what an index names, which this never did
            os.fsync(self._open(name))

    def _copy(self, name: str, size: int) -> None:
        """Give the name of a shard to a new file of its first bytes; the old one is left to those who have it open."""
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

    def _sums(self, name: str) -> dict[str, Any]:
        return {"bytes": (self.path / name).stat().st_size, "sha256": file_digest(self.path / name)}

    def _write_problems(self) -> None:
        lines = []
        for entry in self.entries:
            if entry.kind:
                record = {"id": entry.id, "split": entry.split, "kind": entry.kind, "reason": entry.reason, "encoded": entry.num_tokens > 0}
                lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        _replace(self.path, PROBLEMS, "".join(lines).encode(errors="backslashreplace"))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """An error of the system becomes one line; room that half-written clips took is given back."""
        try:
            yield
        except OSError as error:
            kept = self._kept.num_entries
            if not self.finished and self._tail_is_ours:
                self._place = self._kept
                with contextlib.suppress(OSError):
                    self._trim()
            reason = error.strerror or str(error)
            room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            advice = "make room" if room else "see to it"
            then = f"{advice} and run the same command again: the {kept} clips that are done are kept" if kept else advice
            raise StoreError(f"{self.path}: cannot be written: {reason}; {then}") from None


def _new(name: str) -> str:
    return f".{name}.new"


def _replace(folder: Path, name: str, data: bytes) -> None:
    write_atomically(folder / name, data, owned=folder / _new(name))  # the lock makes the name ours


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
