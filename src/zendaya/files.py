"""Files written whole or not at all, and their checksums."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

STALE_S = 3600.0
"""A temporary file this old was left by a process that was killed, not by one still writing."""


def write_atomically(path: Path, data: bytes, *, before_rename: Callable[[], None] = lambda: None, owned: Path | None = None) -> None:
    """Write beside, flush to disk, rename over, flush the folder: the old file or the new one, never half of either.

    `owned` names the temporary file where a lock makes that name the caller's; elsewhere each writer has a name of its own.
    """
    if owned is None:
        _sweep(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.chmod(name, 0o666 & ~_umask())
        temporary = Path(name)
    else:
        handle, temporary = os.open(owned, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), owned
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        before_rename()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sweep(path: Path) -> None:
    for stale in path.parent.glob(f".{path.name}.*"):
        if time.time() - stale.stat().st_mtime > STALE_S:
            stale.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
