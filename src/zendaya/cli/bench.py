"""The words of `zendaya bench`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer


def bench(
    preset: Annotated[str, typer.Option(help="The shape.")] = "libriheavy",
    source: Annotated[int, typer.Option(help="F, source tokens.")] = 100,
    steps: Annotated[int, typer.Option(help="N, decode steps.")] = 165,
    streams: Annotated[str, typer.Option(help="Numbers of streams decoded together, as 8,32,64.")] = "8,32,64",
    live: Annotated[str, typer.Option(help="Numbers of live streams, as 500; empty for none.")] = "500",
    live_s: Annotated[float, typer.Option(help="Seconds of each live run.")] = 20.0,
    sources: Annotated[str, typer.Option(help="Source lengths of the table by gamma; empty for none.")] = "100,500,1500",
    training_tokens: Annotated[int, typer.Option(help="Tokens of a training batch; 0 to leave training out.")] = 8192,
    encoder_s: Annotated[float, typer.Option(help="Seconds of sound for the encoder; 0 to leave it out.")] = 60.0,
    rounds: Annotated[int, typer.Option(help="Rounds of each measurement.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="Threads of every contender.", min=1)] = 2,
    peers: Annotated[bool, typer.Option("--peers", help="Also Hugging Face generate, CTranslate2 and ONNX Runtime.")] = False,
    file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to FILE.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --json.")] = False,
) -> None:
    """Measure decoding (one stream, many, by the dial, live; beside the memory's speed and, with --peers, others), training, encoding.

    `benchmarks/train.py` puts training beside others.
    """
    from zendaya.atomic import write_atomically
    from zendaya.bench import Plan, chosen, run
    from zendaya.errors import ConfigError
    from zendaya.peers import peers_of

    if file is not None:  # said before minutes are measured that could not be kept
        if not file.parent.is_dir() or not os.access(file.parent, os.W_OK) or file.is_dir():
            raise ConfigError(f"{file}: cannot be written; give --json a file in a folder that is there")
        if file.exists() and not force:
            raise ConfigError(f"{file}: is there already; give --force to replace it, or another name")
    plan = Plan(
        preset=preset, source=source, steps=steps, rounds=rounds, threads=threads, streams=tuple(chosen(streams, int)),
        live=tuple(chosen(live, int)), live_s=live_s, sources=tuple(chosen(sources, int)), training_tokens=training_tokens,
        encoder_s=encoder_s,
    )  # fmt: skip
    result = run(plan, peers=peers_of if peers else None)
    if file is not None:
        write_atomically(file, (json.dumps(result, indent=2) + "\n").encode())
