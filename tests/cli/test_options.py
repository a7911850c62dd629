"""Commands made from option records."""

from dataclasses import dataclass
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from zendaya.cli.options import command
from zendaya.errors import ConfigError
from zendaya.records import listed, option


@dataclass(frozen=True, kw_only=True)
class Engine:
    engine: Literal["torch", "native"] = option("torch", "What computes.")


@dataclass(frozen=True, kw_only=True)
class Options:
    encoder: str = option(help_line="The encoder.")
    num_steps: int = option(3, "How many steps.", min=1)
    streams: tuple[int, ...] = option((8, 32), "Numbers of streams.", parse=listed(int))
    origins: tuple[str, ...] = option((), "May be repeated.", name="--origin")
    fast: bool | None = option(None, "Speed.", name="--realtime/--fast")
    force: bool = option(False, "Replace files.")
    inner: Engine = Engine()
    hidden: int = 7

    def __post_init__(self):
        if self.num_steps > 9:
            raise ConfigError("too many steps")


def run(*words):
    seen = []
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @command
    def go(path: str, options: Options, shout: bool = False) -> None:
        """Go."""
        seen.append((path, options, shout))

    result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result, seen


def test_a_record_is_made_of_the_options():
    words = ("p", "--encoder", "e", "--num-steps", "5", "--streams", "1,2", "--origin", "a", "--origin", "b", "--realtime", "--force")
    _, ((path, options, shout),) = run(*words, "--engine", "native", "--shout")
    expected = Options(encoder="e", num_steps=5, streams=(1, 2), origins=("a", "b"), fast=True, force=True, inner=Engine(engine="native"))
    assert (path, options, shout) == ("p", expected, True)


def test_what_is_not_given_keeps_its_default():
    _, ((_, options, _),) = run("p", "--encoder", "e")
    assert options == Options(encoder="e")


@pytest.mark.parametrize("words", [("p",), ("p", "--encoder", "e", "--engine", "abacus"), ("p", "--encoder", "e", "--num-steps", "0")])
def test_the_types_are_checked(words):
    result, seen = run(*words)
    assert (result.exit_code, seen) == (2, [])


def test_a_record_refuses_before_the_command_runs():
    with pytest.raises(ConfigError, match="too many steps"):
        run("p", "--encoder", "e", "--num-steps", "10")
    with pytest.raises(ConfigError, match="commas between them"):
        run("p", "--encoder", "e", "--streams", "1;2")


def test_the_help_shows_each_option_with_its_default():
    text = run("--help")[0].stdout
    for words in ("--num-steps", "How many steps.", "[default: (8,32)]", "--realtime", "--fast", "--engine", "torch|native"):
        assert words in text
    assert "hidden" not in text
