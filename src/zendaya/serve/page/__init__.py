"""The page that a server shows at `/`: its files, the sample it plays, and what was measured of the model it is shown for."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
from pathlib import Path

from zendaya.serve.served import Served

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json", ".wav": "audio/wav"}
"""What is shown, and as what."""
SAMPLE, MEASURED = "sample.wav", "measured.json"


def read_page(served: Served) -> dict[str, tuple[bytes, str]]:
    """The files of the page and their types, by name, read once: what a client asks for is looked up here, never on the disk."""
    folder = importlib.resources.files(__name__)
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    if not _is_of(json.loads(files[MEASURED])["adapter"], served):
        del files[MEASURED]  # another model's figures would only mislead
    sample = find_sample()
    if sample is not None:
        files[SAMPLE] = sample.read_bytes()
    return {name: (data, TYPES[Path(name).suffix]) for name, data in files.items() if Path(name).suffix in TYPES}


def find_sample() -> Path | None:
    """The recording that the demo plays, ten seconds of speech, or None where it is not installed."""
    spec = importlib.util.find_spec("moonshine_voice")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        path = Path(folder) / "assets" / "beckett.wav"
        if path.is_file():
            return path
    return None


def _is_of(digest: str, served: Served) -> bool:
    """Whether an adapter is the one served: its encoder's name carries the beginning of the digest."""
    return served.encoder is not None and f"@{digest[:8]}" in served.encoder.traits.name
