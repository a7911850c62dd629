"""The command line. A user's mistake is one line on stderr and exit code 2; a leak found is exit code 1."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import zendaya
from zendaya.cli.output import INTERRUPTED, say
from zendaya.errors import ZendayaError

COMMANDS = {
    "demo": ("demo", "Turn the dial on a real recording, watch each word's horizon, and audit the decoder that wrote it."),
    "stream": ("stream", "Caption a source while it is heard: text as it is decided, one line per window, on standard output."),
    "serve": ("serve", "Serve live captions over WebSocket, HTTP and Wyoming, with a web page."),
    "dial": ("dial", "Show what a setting of the dial reads: horizon curve, exposure, buffer and lag, beside wait-k."),
    "corpora": ("corpora", "List the corpora that can be read, or check one."),
    "encode": ("encode", "Encode a corpus into a feature store; a stopped run goes on with the same command."),
    "recipes": ("train", "List the recipes: what each trains, and on what."),
    "train": ("train", "Train a model by a recipe; a stopped run goes on with --resume."),
    "learn-gamma": ("learn", "Train a head that chooses γ for each window, for a budget of lag."),
    "evaluate": ("evaluate", "Decode a split of a corpus as its source arrives; score quality, lag, exposure and stability."),
    "score": ("evaluate", "Score traces again, without a model."),
    "compare": ("evaluate", "Compare two decodes of the same clips, with confidence intervals."),
    "sweep": ("sweep", "Train and decode a whole grid into one table; a stopped run goes on with the same command."),
    "report": ("sweep", "Turn a sweep's results into tables, figures and one page with interactive plots."),
    "frontier": ("frontier", "Measure a model's frontier: which setting each lag in seconds means; a stopped run goes on."),
    "audit": ("audit", "Test that no output depends on input that has not arrived; exit code 1 where one does."),
    "audit-raw": ("audit", "Test from raw input to text: replace all input after a moment, and compare what came before."),
    "bench": ("bench", "Measure the speed of decoding, training and encoding."),
    "presets": ("dial", "List the model shapes that have a name, with their size."),
}
"""Each command, its module in this package, and its line in the list of commands. A module is imported when its command is called."""


class _Commands(TyperGroup):
    """The commands by name: listed and completed from the table, imported when called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command itself in the place of its name."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else _load(name), rest


def _load(name: str) -> Any:
    module = import_module(f"zendaya.cli.{COMMANDS[name][0]}")
    found = getattr(module, name.replace("-", "_"))
    if not isinstance(found, typer.Typer):
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        one.command(name, cls=getattr(module, "COMMAND_CLASS", None))(found)
        found = one
    return typer.main.get_command(found)


app = typer.Typer(name="zendaya", help=zendaya.__doc__, cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False)
for _name, (_, _line) in COMMANDS.items():
    app.command(_name, help=_line, short_help=_line)(lambda: None)


@app.callback(invoke_without_command=True)
def _top(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(zendaya.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Run the command; every expected failure ends in one line, without a traceback."""
    status = 2
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except ZendayaError as error:
        say(str(error))
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        status = INTERRUPTED
    except OSError as error:
        # Output that could not be written is given up: Python would try, and complain, again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone
            status = 0
        else:
            say(f"{error.filename or 'output'}: {error.strerror or error}")
    except MemoryError:
        say("not enough memory for this: ask for less at a time")
    except Exception as error:
        # A usage error of click's, which typer carries inside itself or beside it, depending on its version.
        if not hasattr(error, "format_message"):
            raise
        say(error.format_message())
    sys.exit(status)
