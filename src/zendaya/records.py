"""The frozen records that cross borders between rooms, and the one function that reads records from JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from zendaya.errors import ConfigError, ZendayaError

AnyRecord = TypeVar("AnyRecord")


@dataclass(frozen=True)
class Progress:
    """How far a long job is: encoding, training, evaluating or sweeping."""

    done: int
    total: int
    stage: str = ""
    """The part of the job that `done` and `total` count: encoding, training, decoding at a schedule."""
    detail: str = ""
    """Its state in words: the epoch and loss, the clips that failed."""


def listed(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A reader of values with commas between them, as 8,32,64, each kept once; for the `parse` of an option."""

    def read(text: str) -> tuple[Any, ...]:
        try:
            return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",") if part.strip()))
        except ValueError:
            raise ConfigError(f"expected values with commas between them, as 8,32,64: got {text!r}") from None

    return read


def option(default: Any = dataclasses.MISSING, help_line: str = "", **details: Any) -> Any:
    """A field of an options record that is also a command-line option; `cli.options` says which details there are."""
    return dataclasses.field(default=default, metadata={"help": help_line, **details})


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One annotated segment of a corpus: where its source lies and the texts people wrote for it, as published."""

    corpus: str
    id: str
    """Unique within its split."""
    split: str
    stream: str
    """The continuous recording or video it belongs to; consecutive clips of one stream make streaming pairs."""
    references: tuple[str, ...]
    start_s: float = 0.0
    """As published, on the clock of the stream."""
    end_s: float = 0.0
    """As published, even at or before the start or past the end of the stream; `duration_s` is what there is to read."""
    media: str = ""
    """Path or feature key of the source as published, relative; empty where the source is text."""
    media_start_s: float = 0.0
    """Stream time at which the media begins: 0 for a whole stream, `start_s` for a file cut out of one."""
    stream_s: float | None = None
    """Length of the whole stream where it is published."""
    source: str = ""
    """The source of a translation."""
    group: str = ""
    """What splits must not share: the book, the speaker."""
    num_source_tokens: int | None = None
    """F where features are published; else it follows from the encoder's token rate."""
    feature_row: int | None = None
    """Place in the published feature file, from 0."""
    parts: tuple[Clip, ...] = ()
    """The clips this one was joined from: its source is theirs, back to back."""

    @property
    def duration_s(self) -> float:
        """Seconds of source there are: from the start or 0 to the end or the end of the stream, never negative."""
        end_s = self.end_s if self.stream_s is None else min(self.end_s, self.stream_s)
        return max(0.0, end_s - max(0.0, self.start_s))

    @property
    def usable(self) -> bool:
        """Whether there is a source to read and a text to learn or score."""
        return bool(self.references) and (bool(self.source) or self.duration_s > 0) and self.num_source_tokens != 0


@dataclass(frozen=True)
class Problem:
    """One oddity of a published file."""

    kind: str
    where: str
    """file:line, or file:key where the file has no lines."""
    detail: str


@dataclass(frozen=True)
class Event:
    """One target token, written and never taken back; or, where `schedule` is set, the mark of a turned dial, which writes nothing."""

    window_index: int
    step: int
    """From 1 within the window; after the words that it took over, where it overlaps the one before."""
    token: int
    text: str
    horizon: int
    """Ω: how many source tokens of the window the schedule licensed."""
    effective_horizon: int
    """Ω^eff = min(Ω, A): how many of them had arrived, and so were read."""
    predicted_steps: int
    """N̂ of the window."""
    last: bool
    """Whether the window's text ends here; that of a window that slides goes on in the next one."""
    gamma: float | None = None
    """γ of the window where the model chose it, before its first step; None where the schedule was given."""
    skipped_steps: int = 0
    """Steps of the schedule that passed in the window before this one was written: its horizon is that of step + skipped_steps."""
    window_start: int = 0
    """Source tokens of the stream before the window."""
    arrival_s: float = 0.0
    """When the step could be written: what licensed it had arrived, or the patience for it was over."""
    emission_s: float = 0.0
    """When it was, by the session's clock; what lies between is computing. Without a clock the same."""
    schedule: str = ""
    """Above nothing: the schedule from this step on. Such an event has no token (-1) and no text."""
    read_s: float = 0.0
    """The end of the last source token that the step read, in seconds of the source; 0 where its rate is not known."""
    spoken_s: float = 0.0
    """About when it was spoken, no later than `read_s`: W/N̂ source tokens per step; where windows overlap, what it attended to most."""

    @property
    def policy_lag_s(self) -> float:
        """From the speaking to the arrival that licensed the writing: what schedule and encoder blocks cost."""
        return max(0.0, self.arrival_s - self.spoken_s)

    @property
    def compute_lag_s(self) -> float:
        """From that arrival to the writing: what the machine cost."""
        return max(0.0, self.emission_s - self.arrival_s)


Scale = Literal["segment", "window"]
"""What the schedule's source length is: each segment's own F, as the paper has it, or W, which is strictly causal (method.md §4)."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One clip as it was decoded: what was written, and what of the source each step had. Scores need nothing else."""

    clip: str
    split: str
    schedule: str
    """The schedule or policy."""
    scale: Scale
    window_tokens: int
    """Source tokens of a window, the length the schedule was scaled to; F itself in scale `segment`, where the decoder holds it."""
    num_source_tokens: int
    """F."""
    text: str
    references: tuple[str, ...]
    reference_steps: tuple[int, ...]
    """Length of each reference in decode steps, its end included; empty where the model has no tokenizer."""
    predicted_steps: tuple[int, ...]
    """N̂ of each window."""
    tokens: tuple[int, ...]
    """What each step wrote, the ends of the windows included."""
    windows: tuple[int, ...]
    """The window of each step, from 0."""
    horizons: tuple[int, ...]
    """Ω of each step, counted within its window."""
    effective_horizons: tuple[int, ...]
    """Ω^eff of each step."""
    arrived: tuple[int, ...]
    """Source tokens of the clip that had arrived when each step was written: those it reads, or more where the length head waited."""
    arrivals_s: tuple[float, ...] | None = None
    """When each source token arrived, from the beginning of the clip; None where the source has no clock."""
    emissions_s: tuple[float, ...] | None = None
    """When each step was written, on the same clock: with the computing where that was timed, else at the arrival that licensed it."""
    decoder_rows: int | None = None
    """Text rows run through the decoder; None where it was not counted."""
    revised: int | None = None
    """Tokens decoded but not written that the next decode did not repeat; None where it was not counted."""

    @property
    def delays(self) -> tuple[int, ...]:
        """Source tokens up to the last that each step reads: the delays of the decode-step clock, g(i) = Ω_i."""
        return tuple(k * self.window_tokens + read for k, read in zip(self.windows, self.effective_horizons, strict=True))

    @property
    def delays_s(self) -> tuple[float, ...] | None:
        """The moment each step could be written, on the clock of the source: computing takes no time."""
        return None if self.arrivals_s is None else tuple(self.arrivals_s[count - 1] for count in self.arrived)

    @property
    def computing_s(self) -> tuple[float, ...] | None:
        """The moment each step was written where computing was timed; None where it was not."""
        return None if self.emissions_s == self.delays_s else self.emissions_s

    def tokens_of_window(self, window: int) -> int:
        """Source tokens that a window holds: the last may hold fewer than W."""
        return min(self.window_tokens, self.num_source_tokens - window * self.window_tokens)


def read_record(kind: type[AnyRecord], data: object, where: str, *, parsers: Mapping[Any, Callable[[Any], Any]] | None = None) -> AnyRecord:
    """The dataclass that a dict, or JSON text, describes; `where` names the file in errors.

    Unknown, missing and ill-typed fields are a ConfigError; errors of ours from `__post_init__` pass unchanged. `parsers` read fields from
    text by their annotated type, a Protocol or class that is no dataclass; annotations must be importable at run time.
    """
    import msgspec

    def parse(type_: Any, value: Any) -> Any:
        return (parsers or {})[type_](value) if isinstance(value, str) else value

    try:
        plain = msgspec.json.decode(data) if isinstance(data, str | bytes) else data
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: expected JSON: {error}") from None
    try:
        record = msgspec.convert(plain, kind, dec_hook=parse)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ZendayaError):
            raise error.__cause__ from None
        raise ConfigError(f"{where}: {_explain(str(error), kind, plain)}") from None
    for path, name, names in _unknown_fields(record, plain, ""):
        raise ConfigError(f"{where}: unknown field {path}{name}: expected {', '.join(names)}")
    return record


def check_record(record: Any, what: str, **bounds: tuple[float, float]) -> None:
    """For `__post_init__`: refuse a field of another type than it is annotated with, or outside its bounds (low, high)."""
    import msgspec

    for name, hint in get_type_hints(type(record)).items():
        value = getattr(record, name)
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{what}: {_explain(str(error), hint, value, name)}") from None
        low, high = bounds.get(name, (None, None))
        if low is not None and not low <= value <= high:
            raise ConfigError(f"{what}: {name}: expected a number from {low:,} to {high:,}: got {value!r}")


def _explain(message: str, kind: Any, data: Any, root: str = "") -> str:
    """A message of msgspec, as: field: expected so: got so. `root` is the field that holds the data."""
    text, _, path = message.replace("`", "").partition(" - at $")
    try:
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            data = data[name or int(index)]
        got = repr(data) if len(repr(data)) <= 60 else f"{repr(data)[:60]}…"
    except (KeyError, IndexError, TypeError):  # inside a dict, whose keys the path leaves out
        got = ""
    if text.startswith("Invalid enum value") and (allowed := _allowed(kind, path)):
        text = f"Expected {' or '.join(map(repr, allowed))}"
    elif text.startswith("Object missing required field "):
        text, got = text.replace("Object missing required field", "expected a field") + ", which is missing", ""
    text, _, type_name = text.partition(", got ")
    field = (root + path).removeprefix(".")
    return (f"{field}: " if field else "") + text[0].lower() + text[1:] + (f": got {got or type_name}" if got or type_name else "")


def _allowed(kind: Any, path: str) -> list[Any]:
    """The values that the Literal at a path allows."""
    kinds = list(_parts(kind))
    for name in re.findall(r"\.(\w+)", path):
        hints = [get_type_hints(one) for one in kinds if dataclasses.is_dataclass(one)]
        kinds = [part for hint in hints if name in hint for part in _parts(hint[name])]
    return [value for one in kinds if get_origin(one) is Literal for value in get_args(one)]


def _parts(annotation: Any) -> Iterator[Any]:
    """The types an annotation is made of, Literals whole."""
    if get_origin(annotation) is Literal or not get_args(annotation):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _parts(part)


def _unknown_fields(record: Any, data: Any, path: str) -> Iterator[tuple[str, str, list[str]]]:
    """Fields of the data that the record has not, which msgspec passes over: where, their name, and the names there are."""
    if dataclasses.is_dataclass(record) and isinstance(data, Mapping):
        names = [field.name for field in dataclasses.fields(record)]
        yield from ((path, str(name), names) for name in data if name not in names)
        for name in data.keys() & names:
            yield from _unknown_fields(getattr(record, name), data[name], f"{path}{name}.")
    elif isinstance(record, Mapping) and isinstance(data, Mapping):
        for key in record.keys() & data.keys():
            yield from _unknown_fields(record[key], data[key], f"{path}{key}.")
    elif isinstance(record, tuple | list) and isinstance(data, tuple | list):
        for index, (one, plain) in enumerate(zip(record, data, strict=False)):
            yield from _unknown_fields(one, plain, f"{path}{index}.")
