"""`zendaya corpora`: the list of corpora, and the check of one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zendaya.cli.output import print_table
from zendaya.data.check import TOKEN_RATE, VOCAB_SIZE, Check, check
from zendaya.data.corpora.registry import get, names
from zendaya.data.published import KINDS

corpora = typer.Typer(
    help="The corpora that can be read, and what is in them.", invoke_without_command=True, add_completion=False, rich_markup_mode=None
)

NUM_EXAMPLES = 3


@corpora.callback()
def list_corpora(context: typer.Context) -> None:
    """List the corpora: what each needs, and where its users get it."""
    if context.invoked_subcommand is not None:
        return
    for corpus in map(get, names()):
        print(f"{corpus.name}: {corpus.task}\n    needs    {corpus.needs}\n    from     {corpus.where}\n    licence  {corpus.licence}")
    print("\nCheck what you have: zendaya corpora check NAME PATH")


@corpora.command("check")
def check_corpus(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(names())}.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder (or file) with the published files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, every problem included.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print every problem, not the first few of each kind.")] = False,
    rate: Annotated[float, typer.Option(help="Source tokens per second, where their number is not published.")] = TOKEN_RATE,
    first_tokens: Annotated[int | None, typer.Option(help="First-token budget B; a tenth of the mean F if not given.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Size of the BPE that counts the decode steps N.")] = VOCAB_SIZE,
) -> None:
    """Count what a corpus holds, measure F, N and ρ, suggest γ, and report every problem."""
    result = check(name, path, rate=rate, first_tokens=first_tokens, vocab_size=vocab_size)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
    else:
        _print_check(result, every)


def _print_check(result: Check, every: bool) -> None:
    print(f"{result.corpus}  {result.path}\ndigest  sha256:{result.digest}\n")
    splits = {**result.splits, "total": result.total} if len(result.splits) > 1 else result.splits
    rows = [["split", "clips", "usable", "streams", "references", "hours", "pairs", "overlapping"]]
    for name, split in splits.items():
        counts = (split.num_clips, split.num_usable, split.num_streams, split.num_references)
        rows.append([name, *map(str, counts), f"{split.hours:.2f}", str(split.num_pairs), str(split.num_overlapping)])
    print_table(rows)
    print(f"\nF   source tokens: {result.source_tokens_from}\nN   decode steps: {result.steps_from}")
    for name, split in splits.items():
        if split.geometry is not None:
            print(f"{name}: F {split.geometry.source_tokens}, N {split.geometry.steps}, ρ = F/N {split.geometry.rho}")
    print(f"\nregime  {result.regime}")
    if result.gamma is not None:
        tokens = "1 source token" if result.first_tokens == 1 else f"{result.first_tokens} source tokens"
        print(f"γ       {result.gamma:.3f} for a lean first token, written after about {tokens}")
    print(f"\n{len(result.problems)} problems" if result.problems else "\nno problems found")
    for kind, number in result.problem_counts.items():
        print(f"{kind} × {number}: {KINDS[kind]}")
        of_kind = [problem for problem in result.problems if problem.kind == kind]
        for problem in of_kind if every else of_kind[:NUM_EXAMPLES]:
            print(f"    {problem.where}: {problem.detail}")
        if not every and number > NUM_EXAMPLES:
            print(f"    … and {number - NUM_EXAMPLES} more (--all)")
