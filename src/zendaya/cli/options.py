"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Engine = Annotated[str, typer.Option(help="What computes: native, torch, or auto, which is native where it was built.")]
Precision = Annotated[str, typer.Option(help="Of the native engine: float32 or int8.")]
