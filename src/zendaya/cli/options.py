"""Commands made from option records, and the options that several commands share.

A command is a function of arguments and of frozen records, as `encode(corpus: Corpus, path: Path, options: EncodeOptions)`.
Each field made by `records.option(default, help)` is one option: `batch_tokens` is `--batch-tokens`, with the field's type and default.
A sequence may be repeated, a `Literal` lists its choices, `str | Path` is a path, and a nested record stands for its own options.
Fields without `option` keep their defaults. Details of `option` beside the help:

- `name`: another name, as `--json`, `--realtime/--fast`, or several, as `--metrics --metric`
- `parse`: a function that reads the typed text; `each`: one that reads each text of a repeated option
- `min`, `max`, `metavar`, `envvar`: typer's

A record's module imports neither typer nor torch, so that a mistake is reported at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from zendaya.errors import ConfigError
from zendaya.records import option

Corpus = Annotated[str, typer.Argument(metavar="CORPUS", help="A corpus: `zendaya corpora` lists them.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a training run reads and writes."""

    data: Path | None = option(None, "Folder of the corpus; under $ZENDAYA_DATA if not given.")
    store: Path | None = option(None, "Folder of the corpus's features, made if missing; features/ of the run if not given.")
    out: Path | None = option(None, "Folder of the new run; named after what it is made from if not given.")
    resume: bool = option(False, "Go on where the run in --out was stopped or killed.")
    limit: int | None = option(None, "Use the first N examples only.", min=1)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer reads it: each record among its parameters is replaced by that record's options."""
    hints = get_type_hints(function, include_extras=True)
    records = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = list[inspect.Parameter]()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in records:
            parameters += [_parameter(field, hint) for field, hint in _options(records[parameter.name])]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))

    @wraps(function)
    def run(**given: Any) -> None:
        made = {name: _make(record, given) for name, record in records.items()}
        function(**made, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(record: Any) -> Iterator[tuple[Field[Any], Any]]:
    """The fields of a record that are options, and of the records it holds, with their types."""
    hints = get_type_hints(record)
    for field in fields(record):
        if "help" in field.metadata:
            yield field, hints[field.name]
        elif is_dataclass(hints[field.name]):
            yield from _options(hints[field.name])


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    """A field as typer reads it."""
    details = dict(field.metadata)
    name = details.pop("name", f"--{field.name.replace('_', '-')}")
    kind, default = _typer_type(hint), field.default
    parse, each = details.pop("parse", None), details.pop("each", None)
    if parse or each:
        kind = list[str] if each else str
    if default is MISSING:
        default = inspect.Parameter.empty
    elif get_origin(kind) is list or parse:  # None here is the record's default
        if default:
            details["show_default"] = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        kind, default = kind | None, None
    annotation: Any = Annotated[kind, typer.Option(*name.split(), **details)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _typer_type(hint: Any) -> Any:
    """A field's type as typer knows it: `str | Path` is a path, a sequence a list."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        kind = Path if Path in kinds else kinds[0]
        return _typer_type(kind) | None if NoneType in get_args(hint) else _typer_type(kind)
    if get_origin(hint) in (tuple, Sequence):
        return list[get_args(hint)[0]]  # type: ignore[misc]
    return hint


def _make(record: Any, given: dict[str, Any]) -> Any:
    """The record of the options that were given, which are taken out of them."""
    hints, made = get_type_hints(record), dict[str, Any]()
    for field in fields(record):
        hint, value = hints[field.name], given.pop(field.name, None) if "help" in field.metadata else None
        if "help" not in field.metadata and is_dataclass(hint) and any(_options(hint)):
            made[field.name] = _make(hint, given)
        elif value is not None:
            parse, each = field.metadata.get("parse"), field.metadata.get("each")
            try:
                value = parse(value) if parse else tuple(map(each, value)) if each else value
            except ConfigError as error:
                raise type(error)(f"--{field.name.replace('_', '-')}: {error}") from None
            made[field.name] = tuple(value) if isinstance(value, list) else value
    return record(**made)


def check_exists(path: str | Path | None, what: str) -> None:
    """Refuse a path that does not exist, before anything heavy is imported."""
    if path is not None and not Path(path).expanduser().exists():
        raise ConfigError(f"{path}: no such file or folder; expected {what}")


def check_model(name: str | None) -> None:
    """Refuse a model that can only be a path and does not exist; other names are hub ids or shipped models."""
    if name is not None and name.startswith(("/", ".", "~")):
        check_exists(name, "a checkpoint folder or a hub id (user/name)")
