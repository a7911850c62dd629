"""The table of results: one SQLite file, a row for each run, decoding schedule and metric, and a record of every cell."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import os
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from zendaya.errors import MissingExtraError, ZendayaError
from zendaya.files import write_atomically

RESULTS = "results.sqlite"
APPLICATION = 0x5A454E44
"""SQLite's mark of whose file it is: ZEND."""
VERSION = 1
WAIT_S = 60.0
"""How long a writer waits for another."""

Status = Literal["done", "failed"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number: a checkpoint decoded one way, by one metric."""

    cell: str
    """Digest of the decode: its config, its run and its data."""
    run: str
    """Digest of the training run: its whole config and its data."""
    grid: str
    recipe: str
    corpus: str
    split: str
    form: str
    mode: str
    scale: str
    train_schedule: str
    decode_schedule: str
    seed: int
    metric: str
    value: float
    n: int
    """Clips it is over."""
    lag: float
    """AL of the decode, in source tokens."""
    signature: str
    """JSON: the metric's, the evaluation's and the training's."""
    data_digest: str
    checkpoint_digest: str
    traces_digest: str
    traces: str
    """Where the traces lie, from the folder of the table."""
    seconds: float
    """The decode took."""
    created: str
    """UTC."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What became of a cell."""

    cell: str
    kind: str
    label: str
    status: Status
    error: str
    recipe: str
    steps: int | None
    """Optimiser steps of a training run."""
    tokens: int | None
    """Source tokens and text rows a training run has read."""
    seconds: float
    config: str
    """JSON."""
    created: str


_SQL = {"int": "INTEGER NOT NULL", "float": "REAL NOT NULL", "str": "TEXT NOT NULL", "int | None": "INTEGER", "Status": "TEXT NOT NULL"}


def _create(name: str, record: type, key: str) -> str:
    columns = ", ".join(f'"{field.name}" {_SQL[str(field.type)]}' for field in fields(record))
    return f"CREATE TABLE {name} ({columns}, PRIMARY KEY ({key}))"


def now() -> str:
    """The moment, in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _set_up(database: sqlite3.Connection) -> None:
    database.execute(_create("results", Row, "cell, metric"))
    database.execute(_create("cells", Record, "cell"))
    database.execute(f"PRAGMA application_id = {APPLICATION}")
    database.execute(f"PRAGMA user_version = {VERSION}")


class Table:
    """The results of a folder; several processes may read and write it at a time, each write whole or not at all."""

    def __init__(self, folder: str | Path, *, create: bool = False) -> None:
        self.folder = Path(folder).expanduser()
        self.path = self.folder / RESULTS
        if not create and not self.path.is_file():
            raise ZendayaError(f"{self.path}: no such file; expected the folder of a sweep (zendaya sweep GRID --out FOLDER)")
        if create:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ZendayaError(f"{self.folder}: not a folder for results ({error.strerror or error}); give another --out") from None
            if not self.path.exists():
                self._make()
        with self._open() as database:
            application, version, tables = (
                database.execute(query).fetchone()[0]
                for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
            )
            if create and tables == 0 and version == 0 and application in (0, APPLICATION):
                database.execute("BEGIN IMMEDIATE")
                if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:  # no other process was first
                    _set_up(database)
                database.execute("COMMIT")
                application, version = APPLICATION, VERSION
            if not tables and not application:
                raise ZendayaError(f"{self.path}: an empty file: expected the results of zendaya sweep; remove it, and run the sweep")
            if application != APPLICATION:
                raise ZendayaError(
                    f"{self.path}: a database of another program: expected the results of zendaya sweep; give another folder"
                )
            if version != VERSION:
                raise ZendayaError(
                    f"{self.path}: results of version {version}: this zendaya reads version {VERSION}; use the one that wrote it"
                )

    def _make(self) -> None:
        """An empty table, there as a whole at once: whoever looks while it is made sees none."""
        made = self.folder / f".{RESULTS}.{uuid.uuid4().hex}"
        try:
            with contextlib.closing(sqlite3.connect(made, isolation_level=None)) as database:
                _set_up(database)
            with contextlib.suppress(OSError):  # another writer was first, or there are no links here: it is then made in place
                os.link(made, self.path)
        except (sqlite3.DatabaseError, OSError) as error:
            raise ZendayaError(f"{self.path}: not a table of results, damaged, or not writable ({error}); give another folder") from None
        finally:
            made.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        database = None
        try:
            database = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
            yield database
        except sqlite3.DatabaseError as error:
            raise ZendayaError(f"{self.path}: not a table of results, damaged, or not writable ({error}); give another folder") from None
        finally:
            if database is not None:
                database.close()

    def write(self, record: Record, rows: Iterable[Row] = ()) -> None:
        """Note what became of a cell, with its results: all of it or nothing; what was known of the cell before is replaced."""
        with self._open() as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                database.execute("DELETE FROM results WHERE cell = ?", (record.cell,))
                _insert(database, "cells", record)
                for row in rows:
                    _insert(database, "results", row)
                database.execute("COMMIT")
            except BaseException:
                database.execute("ROLLBACK")
                raise

    def records(self) -> dict[str, Record]:
        """What became of each cell, by its digest."""
        return {record.cell: record for record in self._read("cells", Record, "created, cell")}

    def rows(self) -> list[Row]:
        """Every result, in an order that does not depend on who was done first."""
        return self._read("results", Row, "recipe, mode, train_schedule, seed, decode_schedule, cell, metric")

    def _read(self, name: str, kind: type, order: str) -> list[Any]:
        with self._open() as database:
            columns = ", ".join(f'"{field.name}"' for field in fields(kind))
            found = database.execute(f"SELECT {columns} FROM {name} ORDER BY {order}").fetchall()
        names = [field.name for field in fields(kind)]
        return [kind(**dict(zip(names, values, strict=True))) for values in found]

    def export(self, path: str | Path, *, force: bool = False) -> int:
        """Write the results to a .csv or .parquet file; the number of rows."""
        file = check_export(path, force=force)
        rows = self.rows()
        names = [field.name for field in fields(Row)]
        try:
            write_atomically(file, _csv(names, rows) if file.suffix == ".csv" else _parquet(names, rows))
        except OSError as error:
            raise ZendayaError(f"{file}: cannot be written: {error.strerror or error}") from None
        return len(rows)


def check_export(path: str | Path, *, force: bool = False) -> Path:
    """Where results can be exported to; what stands in the way is said before a sweep has run for hours."""
    file = Path(path).expanduser()
    if file.suffix not in (".csv", ".parquet"):
        raise ZendayaError(f"{file}: results are exported as .csv or .parquet: got {file.suffix or 'no suffix'!r}")
    if file.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("pyarrow", None, "a Parquet file")
    if not file.parent.is_dir():
        raise ZendayaError(f"{file}: cannot be written: there is no folder {file.parent}")
    if file.exists() and not force:
        raise ZendayaError(f"{file}: is there already; give --force to replace it, or another name")
    return file


def _insert(database: sqlite3.Connection, name: str, record: object) -> None:
    values = {field.name: getattr(record, field.name) for field in fields(record)}  # type: ignore[arg-type]
    columns = ", ".join(f'"{column}"' for column in values)
    database.execute(f"INSERT OR REPLACE INTO {name} ({columns}) VALUES ({', '.join('?' * len(values))})", tuple(values.values()))


def _csv(names: list[str], rows: list[Row]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return text.getvalue().encode()


def _parquet(names: list[str], rows: list[Row]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    data = io.BytesIO()
    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string()}
    schema = pyarrow.schema([(field.name, kinds[str(field.type)]) for field in fields(Row)])
    columns = {name: [getattr(row, name) for row in rows] for name in names}
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=schema), data)
    return data.getvalue()


def to_json(record: Mapping[str, Any]) -> str:
    """JSON as it is kept in the table: in one line, its keys in order."""
    return json.dumps(record, sort_keys=True, ensure_ascii=False)
