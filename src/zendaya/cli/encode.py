"""The words of `zendaya encode`: a corpus through an encoder into a feature store."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from zendaya.corpora import CORPORA

if TYPE_CHECKING:
    from zendaya.encode import Progress, Summary

ENCODERS = ("whisper", "efficientnet", "clip", "features", "c3d", "text")
"""The names of `encoders.clips.SETTINGS`, which would cost the help of every command an import of torch."""
INTERRUPTED = 130
"""Exit code of a program that was stopped by Ctrl-C, as shells have it."""


def encode(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help=f"One of: {', '.join(CORPORA)}.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder (or file) with the published files.")],
    encoder: Annotated[
        str, typer.Option(help=f"NAME[:WHICH][,SETTING=VALUE…], as whisper:tiny.en,block_s=1,pool=15. Names: {', '.join(ENCODERS)}.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the store; one that was stopped is resumed.")],
    media: Annotated[Path | None, typer.Option(help="The folder of recordings, videos or features; that of PATH if not given.")] = None,
    split: Annotated[str | None, typer.Option(help="Encode this split only.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp16, int8 or fp32; fp16 if not given (fp32 for text).")] = None,
    limit: Annotated[int | None, typer.Option(help="Encode the first N clips only; a later run without it goes on.", min=1)] = None,
    workers: Annotated[str, typer.Option(help="A number of processes, ray, or ray:N for N workers of a Ray cluster.")] = "1",
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="With --workers ray: the cluster; a local one if not given.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Encode again from the first clip that could not be encoded.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the whole store with its checksums after the run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Encode a corpus into a feature store. Stopped at any moment, the same command goes on where it was."""
    from zendaya.encode import Progress, encode_corpus

    console = Console(stderr=True)
    last = Progress(0, 0, 0, 0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    # A bar where someone is watching; in a log it would be one empty line, and in front of an error a second one.
    bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("encoding", total=None)

    def show(progress: Progress) -> None:
        nonlocal last
        if last.total == 0:  # what was there before takes no time, and would spoil the estimate
            bar.start()
            bar.reset(task, total=progress.total, completed=progress.resumed)
        last = progress
        words = f"encoding, {progress.failed} failed" if progress.failed else "encoding"
        bar.update(task, completed=progress.done, description=words)

    try:
        summary = encode_corpus(
            corpus, path, out, encoder=encoder, media=media, split=split, dtype=dtype, limit=limit,  # type: ignore[arg-type]
            workers=workers, ray_address=ray, retry=retry, verify=verify, report=show,
        )  # fmt: skip
    except KeyboardInterrupt:
        bar.stop()
        kept = f"{last.done} of {last.total} clips are in {out}" if last.total else "nothing was encoded yet"
        typer.echo(f"zendaya: stopped: {kept}; run the same command again to go on", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        bar.stop()
    typer.echo(json.dumps(dataclasses.asdict(summary)) if as_json else _text(summary, path))


def _text(summary: Summary, path: Path) -> str:
    from zendaya.encoders.store import PROBLEMS

    before = f", {summary.num_resumed} of them before this run" if summary.num_resumed else ""
    lines = [
        f"{summary.store}: {summary.num_encoded} of {summary.num_clips} clips{before}: "
        f"{summary.num_tokens} tokens, {summary.num_bytes / 1e6:.1f} MB, {summary.seconds:.1f} s",
        f"encoder  {summary.signature['encoder']}, {summary.signature['dim']} features in {summary.signature['dtype']}",
    ]
    if summary.verified:
        lines.append("verified  all of the store matches its checksums")
    for kind, number in summary.problems.items():
        lines.append(f"{kind} × {number}: see {Path(summary.store) / PROBLEMS}")
    if summary.corpus_problems:
        lines.append(
            f"the published files have {summary.corpus_problems} problems: see zendaya corpora check {summary.signature['corpus']} {path}"
        )
    return "\n".join(lines)
