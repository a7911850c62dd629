"""The table of results: one SQLite file with a row per run, decoding schedule and metric, and a record per cell."""

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
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from zendaya.errors import MissingExtraError, ZendayaError
from zendaya.files import write_atomically

RESULTS = "results.sqlite"
APPLICATION = 0x5A454E44  # SQLite's application id of these files: ZEND
VERSION = 1
WAIT_S = 60.0  # longest wait for another writer

Status = Literal["done", "failed"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number: a checkpoint, a decoding schedule and a metric."""

    cell: str  # digest of the decode: config, run and data
    run: str  # digest of the training run: config and data
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
    n: int  # number of clips
    lag: float  # AL of the decode, in source tokens
    signature: str  # JSON: signatures of metric, evaluation and training
    data_digest: str
    checkpoint_digest: str
    traces_digest: str
    traces: str  # path of the traces, relative to the folder of the table
    seconds: float  # duration of the decode
    created: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """The outcome of a cell."""

    cell: str
    kind: str
    label: str
    status: Status
    error: str
    recipe: str
    steps: int | None  # optimiser steps of a training run
    tokens: int | None  # source tokens and text rows of a training run
    seconds: float
    config: str
    created: str


_SQL = {"int": "INTEGER NOT NULL", "float": "REAL NOT NULL", "str": "TEXT NOT NULL", "int | None": "INTEGER", "Status": "TEXT NOT NULL"}


def _create(name: str, record: type, key: str) -> str:
    columns = ", ".join(f'"{field.name}" {_SQL[str(field.type)]}' for field in fields(record))
    return f"CREATE TABLE {name} ({columns}, PRIMARY KEY ({key}))"


def now() -> str:
    """The current time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _set_up(database: sqlite3.Connection) -> None:
    database.execute(_create("results", Row, "cell, metric"))
    database.execute(_create("cells", Record, "cell"))
    database.execute(f"PRAGMA application_id = {APPLICATION}")
    database.execute(f"PRAGMA user_version = {VERSION}")


class Table:
    """The results of a folder; several processes may read and write at a time, and each write is atomic."""

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
                with database:
                    database.execute("BEGIN IMMEDIATE")
                    if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:  # no other process was first
                        _set_up(database)
                application, version = APPLICATION, VERSION
            if not tables and not application:
                raise ZendayaError(f"{self.path}: an empty file: expected the results of zendaya sweep; remove it, and run the sweep")
            if application != APPLICATION:
                raise ZendayaError(f"{self.path}: a database of another program: expected results of zendaya sweep; give another folder")
            if version != VERSION:
                raise ZendayaError(f"{self.path}: results of version {version}: expected version {VERSION}; use the zendaya that wrote it")

    def _make(self) -> None:
        """Create an empty table atomically: other processes see no table, or a whole one."""
        made = self.folder / f".{RESULTS}.{uuid.uuid4().hex}"
        try:
            with contextlib.closing(sqlite3.connect(made, isolation_level=None)) as database:
                _set_up(database)
            with contextlib.suppress(OSError):  # another process was first, or there are no hard links here: created in place
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
        """Replace the record and the results of a cell in one transaction."""
        with self._open() as database, database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("DELETE FROM results WHERE cell = ?", (record.cell,))
            inserts: list[tuple[str, Record | Row]] = [("cells", record), *(("results", row) for row in rows)]
            for name, each in inserts:
                values = asdict(each)
                columns, marks = ", ".join(f'"{column}"' for column in values), ", ".join("?" * len(values))
                database.execute(f"INSERT OR REPLACE INTO {name} ({columns}) VALUES ({marks})", tuple(values.values()))

    def records(self) -> dict[str, Record]:
        """The record of each cell, by its digest."""
        return {record.cell: record for record in self._read("cells", Record, "created, cell")}

    def rows(self) -> list[Row]:
        """Every result, in an order that does not depend on the order of writing."""
        return self._read("results", Row, "recipe, mode, train_schedule, seed, decode_schedule, cell, metric")

    def _read(self, name: str, kind: type, order: str) -> list[Any]:
        with self._open() as database:
            database.row_factory = sqlite3.Row
            return [kind(**row) for row in database.execute(f"SELECT * FROM {name} ORDER BY {order}")]

    def export(self, path: str | Path, *, force: bool = False) -> int:
        """Write the results to a .csv or .parquet file, and give the number of rows."""
        file = check_export(path, force=force)
        rows = self.rows()
        try:
            write_atomically(file, _csv(rows) if file.suffix == ".csv" else _parquet(rows))
        except OSError as error:
            raise ZendayaError(f"{file}: cannot be written: {error.strerror or error}") from None
        return len(rows)


def check_export(path: str | Path, *, force: bool = False) -> Path:
    """The file to export to; a file that cannot be written is an error before a sweep has run for hours."""
    file = Path(path).expanduser()
    if file.suffix not in (".csv", ".parquet"):
        raise ZendayaError(f"{file}: results are exported as .csv or .parquet: got {file.suffix or 'no suffix'!r}")
    if file.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("pyarrow", None, "a Parquet file")
    if not file.parent.is_dir():
        raise ZendayaError(f"{file}: cannot be written: no such folder: {file.parent}")
    if file.exists() and not force:
        raise ZendayaError(f"{file}: exists already; give --force to replace it, or another name")
    return file


def _csv(rows: list[Row]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)])
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    return text.getvalue().encode()


def _parquet(rows: list[Row]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    data = io.BytesIO()
    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string()}
    schema = pyarrow.schema([(field.name, kinds[str(field.type)]) for field in fields(Row)])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([asdict(row) for row in rows], schema=schema), data)
    return data.getvalue()


def to_json(record: Mapping[str, Any]) -> str:
    """JSON for the table: one line, with sorted keys."""
    return json.dumps(record, sort_keys=True, ensure_ascii=False)
