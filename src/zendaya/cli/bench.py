"""`zendaya bench`: how fast it is on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from zendaya.cli.options import Force, command
from zendaya.errors import ConfigError
from zendaya.files import write_atomically
from zendaya.research.bench import Plan, run
from zendaya.research.peers import peers_of


@command
def bench(
    plan: Plan,
    peers: Annotated[bool, typer.Option("--peers", help="Also Hugging Face generate, CTranslate2 and ONNX Runtime.")] = False,
    file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to FILE.")] = None,
    force: Force = False,
) -> None:
    """Measure the speed of decoding, training and encoding.

    Decoding: one stream, many, by the dial, and live; beside the speed of memory and, with --peers, other engines.
    `benchmarks/train.py` measures training beside other libraries.
    """
    if file is not None:  # before minutes are measured that could not be kept
        if not file.parent.is_dir() or not os.access(file.parent, os.W_OK) or file.is_dir():
            raise ConfigError(f"{file}: cannot be written; give --json a file in an existing folder")
        if file.exists() and not force:
            raise ConfigError(f"{file}: exists already; give --force to replace it, or another name")
    result = run(plan, peers=peers_of if peers else None)
    if file is not None:
        write_atomically(file, (json.dumps(result, indent=2) + "\n").encode())
