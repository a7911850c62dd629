"""The words of `zendaya corpora`: the list of corpora, and the check of one."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zendaya.data.check import TOKEN_RATE, VOCAB_SIZE, Check, SplitCheck, check
from zendaya.data.corpora.registry import get, names
from zendaya.data.published import KINDS
from zendaya.records import Problem

corpora = typer.Typer(help="The corpora that can be read, and what is in them.", invoke_without_command=True)

NUM_EXAMPLES = 3


@corpora.callback()
def list_corpora(context: typer.Context) -> None:
    """List the corpora: what each needs, and where its users get it."""
    if context.invoked_subcommand is not None:
        return
    for corpus in map(get, names()):
        typer.echo(f"{corpus.name}: {corpus.task}")
        typer.echo(f"    needs    {corpus.needs}")
        typer.echo(f"    from     {corpus.where}")
        typer.echo(f"    licence  {corpus.licence}")
    typer.echo("\nCheck what you have: zendaya corpora check NAME PATH")


@corpora.command("check")
def check_corpus(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(names())}.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder (or file) with the published files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, every problem included.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print every problem, not the first few of each kind.")] = False,
    rate: Annotated[float, typer.Option(help="Source tokens a second, where their number is not published.")] = TOKEN_RATE,
    first_tokens: Annotated[int | None, typer.Option(help="First-token budget B; a tenth of the mean F if not given.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Size of the BPE that counts the decode steps N.")] = VOCAB_SIZE,
) -> None:
    """Count what a corpus holds, measure F, N and ρ, suggest γ, and report every problem."""
    result = check(name, path, rate=rate, first_tokens=first_tokens, vocab_size=vocab_size)
    typer.echo(json.dumps(asdict(result), indent=2) if as_json else _text(result, every))


def _text(result: Check, every: bool) -> str:
    lines = [f"{result.corpus}  {result.path}", f"digest  sha256:{result.digest}", ""]
    splits = {**result.splits, "total": result.total} if len(result.splits) > 1 else result.splits
    lines += _table(["split", "clips", "usable", "streams", "references", "hours", "pairs", "overlapping"], splits)
    lines += ["", f"F   source tokens: {result.source_tokens_from}", f"N   decode steps: {result.steps_from}"]
    for name, split in splits.items():
        if split.geometry is not None:
            lines.append(f"{name}: F {split.geometry.source_tokens}, N {split.geometry.steps}, ρ = F/N {split.geometry.rho}")
    lines += ["", f"regime  {result.regime}"]
    if result.gamma is not None:
        tokens = "1 source token" if result.first_tokens == 1 else f"{result.first_tokens} source tokens"
        lines.append(f"γ       {result.gamma:.3f} for a lean first token, written after about {tokens}")
    return "\n".join([*lines, "", *_problems(result, every)])


def _table(header: list[str], splits: dict[str, SplitCheck]) -> list[str]:
    rows = [header]
    for name, split in splits.items():
        counts = (split.num_clips, split.num_usable, split.num_streams, split.num_references)
        rows.append([name, *map(str, counts), f"{split.hours:.2f}", str(split.num_pairs), str(split.num_overlapping)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in rows
    ]


def _problems(result: Check, every: bool) -> list[str]:
    if not result.problems:
        return ["no problems found"]
    kinds: dict[str, list[Problem]] = defaultdict(list)
    for problem in result.problems:
        kinds[problem.kind].append(problem)
    lines = [f"{len(result.problems)} problems"]
    for kind, number in result.problem_counts.items():
        lines.append(f"{kind} × {number}: {KINDS[kind]}")
        shown = kinds[kind] if every else kinds[kind][:NUM_EXAMPLES]
        lines += [f"    {problem.where}: {problem.detail}" for problem in shown]
        if len(shown) < number:
            lines.append(f"    … and {number - len(shown)} more (--all)")
    return lines
