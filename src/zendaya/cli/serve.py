"""`zendaya serve`: live captions for clients on the network."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from zendaya.cli.options import check_model, command
from zendaya.cli.output import say
from zendaya.errors import ConfigError, MissingExtraError
from zendaya.serve.config import ServeConfig, bind

if TYPE_CHECKING:
    from zendaya.serve.intake import Served


class Serve(TyperCommand):
    """The command: `--ray` without an address is `--ray local`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's, with the address filled in."""
        words = list[str]()
        for word, after in itertools.zip_longest(args, args[1:], fillvalue="-"):
            words += [word, "local"] if word == "--ray" and after.startswith("-") else [word]
        return super().parse_args(ctx, words)


COMMAND_CLASS = Serve


@command
def serve(
    config: ServeConfig,
    model: Annotated[str, typer.Option(help="The shipped model, an adapter's folder, or a checkpoint.")] = "tiny.en-dial",
    encoder: Annotated[str | None, typer.Option(help="For a checkpoint: its encoder, if its training run does not name it.")] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster for replicas: host:port, auto, or local.")] = None,
    replicas: Annotated[str | None, typer.Option(metavar="N|MIN:MAX", help="With --ray: 2 by default; MIN:MAX follows the load.")] = None,
) -> None:
    """Serve live captions: /v1/stream, OpenAI's realtime and file transcription, SimulEval's remote agent, and Wyoming.

    SIGTERM lets streams finish within --drain, Ctrl-C writes out what has arrived; logs are JSON on standard error.
    """
    check_model(model)
    try:
        from zendaya.serve.app import run
        from zendaya.serve.monitoring import log_to
        from zendaya.serve.transports.base import open_transports
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "starlette", "serve", "a server") from None
    if ray is not None:
        _serve_on_ray(config, model, encoder, ray, replicas)
        return
    if replicas is not None:
        raise ConfigError("--replicas is for a server on a Ray cluster: give --ray too")
    with contextlib.ExitStack() as stack:
        # Ports are bound before the model is loaded: a taken one is told at once.
        http = stack.enter_context(bind(config.host, config.port))
        transports = open_transports(config)
        from zendaya.serve.intake import load_served

        served = load_served(model, encoder)
        _check_dial(config, model, served)
        log_to()
        asyncio.run(run(config, served, http, transports, say=typer.echo))


def _check_dial(config: ServeConfig, model: str, served: Served) -> None:
    """Refuse a lag out of reach, and warn of a γ beyond training."""
    from zendaya.runtime.frontier import choose_setting
    from zendaya.runtime.loading import gamma_warning
    from zendaya.schedule import PowerLaw

    choose_setting(served.frontier, lag_s=config.lag_s)
    if config.gamma is not None and (warning := gamma_warning(PowerLaw(config.gamma), model)) is not None:
        say(warning)


def _serve_on_ray(config: ServeConfig, model: str, encoder: str | None, address: str, replicas: str | None) -> None:
    from zendaya.serve.gateway.cluster import Replicas, deployed, import_ray, name_of, run_front
    from zendaya.serve.intake import load_served
    from zendaya.serve.monitoring import log_to

    if config.wyoming_port is not None:
        raise ConfigError("--wyoming-port is for a server without --ray: start another one for Wyoming")
    number = Replicas() if replicas is None else Replicas.parse(replicas)
    import_ray(address)
    with bind(config.host, config.port) as http:
        served = load_served(model, encoder)  # a wrong model is told here, not in the log of a replica
        _check_dial(config, model, served)
        log_to()
        name = name_of(http.getsockname()[1])
        with deployed(config, model, encoder, name=name, address=address, replicas=number) as (pool, key):
            asyncio.run(run_front(config, pool, key, http, served.name, say=typer.echo))
