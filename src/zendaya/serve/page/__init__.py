"""The page at `/`: its files, and the sample."""

from __future__ import annotations

import importlib.resources
import importlib.util
from pathlib import Path

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".wav": "audio/wav"}
"""Media types of the page's files; no other file is served."""
SAMPLE = "sample.wav"


def read_page() -> dict[str, tuple[bytes, str]]:
    """The page's files and media types by name, read once: requests are looked up here, never on the disk."""
    folder = importlib.resources.files(__name__)
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    sample = find_sample()
    if sample is not None:
        files[SAMPLE] = sample.read_bytes()
    return {name: (data, TYPES[Path(name).suffix]) for name, data in files.items() if Path(name).suffix in TYPES}


def find_sample() -> Path | None:
    """The demo's recording, ten seconds of speech; None if it is not installed."""
    spec = importlib.util.find_spec("moonshine_voice")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        path = Path(folder) / "assets" / "beckett.wav"
        if path.is_file():
            return path
    return None
