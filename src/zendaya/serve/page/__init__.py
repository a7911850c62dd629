"""The page at `/`: its files, the sample, and the measured curve of the shipped model."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
from pathlib import Path

from zendaya.serve.intake import Served

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json", ".wav": "audio/wav"}
"""Media types of the page's files; no other file is served."""
SAMPLE, MEASURED = "sample.wav", "measured.json"


def read_page(served: Served) -> dict[str, tuple[bytes, str]]:
    """The page's files and media types by name, read once: requests are looked up here, never on the disk."""
    folder = importlib.resources.files(__name__)
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    digest = json.loads(files[MEASURED])["adapter"][:8]  # the encoder's name carries it
    if served.encoder is None or f"@{digest}" not in served.encoder.traits.name:
        del files[MEASURED]  # measured for another model
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
