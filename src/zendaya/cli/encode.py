"""`zendaya encode`: a corpus through an encoder into a feature store."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from zendaya import plugins
from zendaya.cli.options import Corpus, Json, check_exists, command
from zendaya.cli.output import INTERRUPTED, ProgressBar, say
from zendaya.data.corpora.registry import get
from zendaya.data.features.options import EncodeOptions

ENCODERS = ", ".join(plugins.available("encoders"))


@command
def encode(
    corpus: Corpus,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder or file of the corpus as published.")],
    encoder: Annotated[str, typer.Option(help=f"NAME[:WHICH][,SETTING=VALUE…], as whisper:tiny.en,block_s=1,pool=15. Names: {ENCODERS}.")],
    out: Annotated[Path, typer.Option(help="Folder of the store; a stopped one goes on.")],
    options: EncodeOptions,
    as_json: Json = False,
) -> None:
    """Encode a corpus into a feature store; a stopped run goes on with the same command."""
    get(corpus)
    check_exists(path, f"the corpus {corpus}")
    from zendaya.data.features.encode import encode_corpus
    from zendaya.data.features.store import PROBLEMS

    with ProgressBar() as bar:
        try:
            summary = encode_corpus(corpus, path, out, encoder=encoder, options=options, report=bar.show)
        except KeyboardInterrupt:
            last = bar.last
            kept = f"{last.done} of {last.total} clips are in {out}" if last is not None and last.total else "nothing was encoded yet"
            say(f"stopped: {kept}; run the same command again to go on")
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(dataclasses.asdict(summary)))
        return
    before = f", {summary.num_resumed} of them before this run" if summary.num_resumed else ""
    size = f"{summary.num_tokens} tokens, {summary.num_bytes / 1e6:.1f} MB, {summary.seconds:.1f} s"
    print(f"{summary.store}: {summary.num_encoded} of {summary.num_clips} clips{before}: {size}")
    print(f"encoder  {summary.signature['encoder']}, {summary.signature['dim']} features in {summary.signature['dtype']}")
    if summary.verified:
        print("verified  all of the store matches its checksums")
    for kind, number in summary.problems.items():
        print(f"{kind} × {number}: see {Path(summary.store) / PROBLEMS}")
    if summary.corpus_problems:
        check = f"zendaya corpora check {summary.signature['corpus']} {path}"
        print(f"the published files have {summary.corpus_problems} problems: see {check}")
