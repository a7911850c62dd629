"""The words of `zendaya serve`: live captions for others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from zendaya.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from zendaya.serve.config import ServeConfig


class Serve(TyperCommand):
    """The command, to which `--ray` alone is `--ray local`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As every command's."""
        words = list[str]()
        for word, after in itertools.zip_longest(args, args[1:], fillvalue="-"):
            words += [word, "local"] if word == "--ray" and after.startswith("-") else [word]
        return super().parse_args(ctx, words)


def serve(
    model: Annotated[str, typer.Option(help="The shipped model, an adapter's folder, or a checkpoint.")] = "tiny.en-dial",
    encoder: Annotated[str | None, typer.Option(help="For a checkpoint: its encoder, if its run does not say it.")] = None,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine only with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8765,
    wyoming_port: Annotated[int | None, typer.Option(help="Also speak Wyoming (Home Assistant), on this port.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the key that clients must show.")] = None,
    max_sessions: Annotated[int, typer.Option(help="Sessions at once; who comes after is told to come back.")] = 32,
    origin: Annotated[list[str] | None, typer.Option(help="Let pages of this origin connect, as https://a.org; may be repeated.")] = None,
    gamma: Annotated[float, typer.Option(help="The dial of clients that do not say.")] = 0.5,
    drain: Annotated[float, typer.Option(help="Seconds that streams may go on after SIGTERM.")] = 30.0,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Replicas on a Ray cluster: host:port, auto, or local (or nothing) for one of this machine."),
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(metavar="N|MIN:MAX", help="With --ray: how many, 2 if not given; MIN:MAX follows the sessions.")
    ] = None,
) -> None:
    """Serve live captions: /v1/stream, OpenAI's realtime and file transcription, SimulEval's remote agent, and Wyoming.

    SIGTERM lets streams end within --drain, Ctrl-C writes out what has come; logs are JSON, on standard error.
    """
    try:
        from zendaya.serve.config import ServeConfig, read_key
        from zendaya.serve.logs import log_to
        from zendaya.serve.run import bind, run
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "starlette", "serve", "a server") from None
    if not 0 <= gamma <= 10:
        raise ConfigError(f"--gamma is a number in 0 … 10: got {gamma}")
    if not 0 <= drain <= 3600:
        raise ConfigError(f"--drain is a number of seconds in 0 … 3600: got {drain}")
    config = ServeConfig(
        host=host, port=port, wyoming_port=wyoming_port, key=None if api_key_file is None else read_key(api_key_file),
        origins=tuple(origin or ()), max_sessions=max_sessions, gamma=gamma, drain_s=drain,
    )  # fmt: skip
    if ray is not None:
        _serve_on_ray(config, model, encoder, ray, replicas)
        return
    if replicas is not None:
        raise ConfigError("--replicas is for a server on a Ray cluster: give --ray too")
    with contextlib.ExitStack() as stack:
        # What cannot be listened on is said before a model is loaded.
        http = stack.enter_context(bind(host, port))
        wyoming = None if wyoming_port is None else stack.enter_context(bind(host, wyoming_port))
        from zendaya.serve.served import load_served

        served = load_served(model, encoder)
        log_to()
        asyncio.run(run(config, served, http, wyoming, say=typer.echo))


def _serve_on_ray(config: ServeConfig, model: str, encoder: str | None, address: str, replicas: str | None) -> None:
    from zendaya.serve.cluster import Replicas, deployed, import_ray, name_of, run_front
    from zendaya.serve.logs import log_to
    from zendaya.serve.run import bind
    from zendaya.serve.served import load_served

    if config.wyoming_port is not None:
        raise ConfigError("--wyoming-port is for a server without --ray: start another one for Wyoming")
    number = Replicas() if replicas is None else Replicas.parse(replicas)
    import_ray(address)
    with bind(config.host, config.port) as http:
        about = load_served(model, encoder).name  # what cannot be served is said here, and not in the log of a replica
        log_to()
        name = name_of(http.getsockname()[1])
        with deployed(config, model, encoder, name=name, address=address, replicas=number) as (pool, key):
            asyncio.run(run_front(config, pool, key, http, about, say=typer.echo))
