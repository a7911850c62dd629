"""The cells of a grid: features to encode, runs to train, checkpoints to decode, each with a digest of its inputs as its key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from zendaya.data.corpora import registry as corpora
from zendaya.errors import ConfigError, CorpusError
from zendaya.research.sweep.grids import Arm, Decode, Grid
from zendaya.training.train import TrainConfig

RUNS, DECODES, FEATURES = "runs", "decodes", "features"
Kind = Literal["encode", "train", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job of a sweep, a function of its config and data alone; it is sent to workers."""

    key: str  # digest of the config and the data
    kind: Kind
    label: str
    grid: str
    needs: tuple[str, ...]  # keys of the cells it depends on
    config: TrainConfig
    data: Path
    data_digest: str
    out: Path  # the folder of the sweep
    store: Path
    limit: int | None = None
    run: str = ""  # key of the training run of a decode
    decode: Decode | None = None  # options of a decode; of its schedules, this cell has `schedule`
    schedule: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)  # inputs of the digest `key`


def cells_of(grid: Grid, *, data: str | Path, out: str | Path, features: str | Path | None = None) -> list[Cell]:
    """Every cell of a grid once, dependencies first; the decodes of a run follow it directly, so that results come early."""
    folder = Path(out).expanduser().absolute()
    stores = Path(features).expanduser().absolute() if features is not None else folder / FEATURES
    digests: dict[tuple[str, Path], str] = {}
    cells: dict[str, Cell] = {}
    for arm in grid.arms:
        path = corpus_folder(arm.recipe, Path(data).expanduser().absolute())
        known = (arm.recipe.corpus, path)
        if known not in digests:
            digests[known] = corpora.digest(*known)
        for cell in _cells(grid.name, arm, path, digests[known], folder, stores):
            cells.setdefault(cell.key, cell)
    return list(cells.values())


def corpus_folder(config: TrainConfig, data: Path) -> Path:
    """Folder of a recipe's corpus: its own folder under `data`, or `data` itself if that does not exist."""
    if not data.exists():
        where = config.folder or "a file"
        raise CorpusError(f"{data}: no such folder; expected the corpora of the grid, here {config.corpus} ({where}); give --data")
    inside = data / config.folder
    return inside if config.folder and inside.is_dir() else data


def _cells(grid: str, arm: Arm, data: Path, data_digest: str, out: Path, stores: Path) -> list[Cell]:
    cells = []
    for config in arm.configs():
        about: dict[str, Any] = {"corpus": config.corpus, "encoder": config.encoder, "data": data_digest}
        if config.encoder == "text":  # the recipe also trains the tokenizer of the source
            about |= {"vocab_size": config.vocab_size, "split": config.splits[0]}
        encode = _key("encode", about)
        store = stores / f"{config.corpus}-{encode[:12]}"
        same: dict[str, Any] = {
            "grid": grid, "config": config, "data": data, "data_digest": data_digest, "out": out, "store": store, "limit": arm.limit
        }  # fmt: skip
        name = f"{config.name} {config.schedule} seed {config.loop.seed}"
        facts = {"recipe": config.to_dict(), "data": data_digest, "limit": arm.limit}
        run = _key("train", facts)
        cells += [
            Cell(key=encode, kind="encode", label=f"features of {config.corpus}", needs=(), facts=about, **same),
            Cell(key=run, kind="train", label=name, needs=(encode,), facts=facts, **same),
        ]
        for decode in arm.decodes:
            for schedule in decode.schedules:
                how = {**asdict(decode), "scale": decode.scale_of_mode, "schedules": schedule}
                facts = {"run": run, "decode": how}
                label = f"{name} at {schedule}, {decode.mode}"
                made = Cell(key=_key("evaluate", facts), kind="evaluate", label=label, needs=(run,), facts=facts, **same)
                cells.append(replace(made, run=run, decode=decode, schedule=schedule))
    return cells


def _key(kind: Kind, facts: Mapping[str, Any]) -> str:
    try:
        text = json.dumps({"kind": kind, **facts}, sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"the config of a {kind} cell cannot be written as JSON: {error}") from None
    return hashlib.sha256(text.encode()).hexdigest()[:24]
