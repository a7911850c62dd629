"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

STALE_S = 3600.0
"""A temporary file this old was left by a process that was killed, not by one still writing."""


def write_atomically(path: Path, data: bytes, before_rename: Callable[[], None] = lambda: None) -> None:
    """Write beside, flush to disk, rename over, flush the folder: the old file or the new one, never half of either."""
    for stale in path.parent.glob(f".{path.name}.*"):
        if time.time() - stale.stat().st_mtime > STALE_S:
            stale.unlink(missing_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        before_rename()
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
