"""SimulEval: agents that its command runs, and our decodes as its `instances.log`.

SimulEval is not a dependency: `pip install simuleval==1.1.4`, best in an environment of its own, because its pytest plugin no longer
loads. Then

    simuleval --agent-class zendaya.evaluation.simuleval.SpeechAgent --policy 0.5 --source wavs.txt --target texts.txt \
        --source-segment-size 500
    simuleval --agent-class zendaya.evaluation.simuleval.TextAgent --model FOLDER --source-tokenizer FILE --policy wait-k=3 \
        --source en --target de

A delay is the source that SimulEval had sent, in words of text or milliseconds of speech, when a word was returned. A word is returned
when it is complete: when the next one begins, or when its window ends.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np

from zendaya.encoders.base import Encoder
from zendaya.encoders.registry import EncoderSpec
from zendaya.errors import ConfigError, MissingExtraError, SourceError, ZendayaError
from zendaya.evaluation.metrics.latency import SCORERS
from zendaya.files import write_atomically
from zendaya.nn.model import Model
from zendaya.nn.tokenizer import Tokenizer
from zendaya.records import Event, Trace
from zendaya.runtime.engine import Engine
from zendaya.runtime.loading import as_trained, load_adapted, load_model
from zendaya.runtime.options import DecodeOptions, Voice
from zendaya.runtime.pipeline import Pipeline
from zendaya.runtime.policies import Policy, parse_policy
from zendaya.schedule import Schedule
from zendaya.sources.media import SAMPLE_RATE

LOG, TYPES = "instances.log", "config.yaml"


class Words:
    """Complete words from pieces of text: a word is complete when white space follows it or its window ends."""

    def __init__(self) -> None:
        self._begun = ""

    def add(self, piece: str, *, last: bool) -> list[str]:
        """The words that the next piece completes; `last` ends a window."""
        text = self._begun + piece
        words = text.split()
        self._begun = words.pop() if words and not last and not text[-1].isspace() else ""
        return words


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A line of SimulEval's `instances.log`: one source with its output."""

    index: int
    prediction: str
    delays: tuple[float, ...]
    """Source read when each word was written: milliseconds of speech, words of a text."""
    elapsed: tuple[float, ...]
    """Computation-aware delays for speech; zeros for text, which has no clock."""
    prediction_length: int
    """Words written."""
    reference: str
    source: str | list[str]
    """The text, or a description of the recording."""
    source_length: float
    """In the unit of the delays."""

    @property
    def reference_length(self) -> int:
        """Words of the reference as SimulEval counts them: spaces plus one."""
        return len(self.reference.split(" "))


def from_trace(trace: Trace, tokenizer: Tokenizer, *, index: int = 0, source: str = "", clock: Sequence[float] | None = None) -> Instance:
    """A clip's decode as SimulEval would have logged it.

    `clock` gives the source read with each source token, in SimulEval's unit. Default: the milliseconds of the trace, or the number of
    source tokens if its source has no clock. For a text, use `word_clock`.
    """
    timed = clock is None and trace.arrivals_s is not None
    if clock is None:
        clock = [1000.0 * s for s in trace.arrivals_s] if trace.arrivals_s is not None else range(1, trace.num_source_tokens + 1)
    if len(clock) != trace.num_source_tokens:
        raise SourceError(f"clip {trace.clip!r} has {trace.num_source_tokens} source tokens: got a clock of {len(clock)}")
    steps = []
    for step, (token, window) in enumerate(zip(trace.tokens, trace.windows, strict=True)):
        last = step + 1 == len(trace.tokens) or trace.windows[step + 1] != window
        if step == 0 or trace.windows[step - 1] != window:
            add = tokenizer.stream()
        delay = clock[trace.arrived[step] - 1]
        elapsed = 0.0 if not timed else delay if trace.emissions_s is None else 1000.0 * trace.emissions_s[step]
        steps.append((add(token), last, delay, elapsed))
    return _instance(steps, index=index, reference=trace.references[0], source=source, source_length=clock[-1])


def from_events(
    events: Iterable[Event], *, reference: str, source_length_s: float, start_s: float = 0.0, index: int = 0, source: str = ""
) -> Instance:
    """A session's events as SimulEval would have logged them for a recording that began at `start_s`."""
    steps = [
        (event.text, event.last, 1000.0 * (event.arrival_s - start_s), 1000.0 * (event.emission_s - start_s))
        for event in events
        if not event.schedule
    ]
    return _instance(steps, index=index, reference=reference, source=source, source_length=1000.0 * source_length_s)


def word_clock(encoder: Encoder[str, Any], text: str) -> list[float]:
    """Words of a text read with each of its source tokens."""
    state, clock = encoder.start(), list[float]()
    for count, word in enumerate(text.split(), start=1):
        clock += [float(count)] * len(encoder.read(state, word + " "))
    return clock


def _instance(
    steps: Iterable[tuple[str, bool, float, float]], *, index: int, reference: str, source: str, source_length: float
) -> Instance:
    """An instance from each step's text, end of window, delay and elapsed time."""
    words, written, delays, elapsed = Words(), list[str](), list[float](), list[float]()
    for piece, last, delay, lapse in steps:
        whole = words.add(piece, last=last)
        written += whole
        delays += [delay] * len(whole)
        elapsed += [lapse] * len(whole)
    return Instance(
        index=index, prediction=" ".join(written), delays=tuple(delays), elapsed=tuple(elapsed), prediction_length=len(written),
        reference=reference, source=source, source_length=source_length,
    )  # fmt: skip


def write_instances(folder: Path, instances: Iterable[Instance], *, source_type: str = "speech") -> Path:
    """Write a folder that `simuleval --score-only --output FOLDER` can score; returns the path of its log."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / TYPES, f"source_type: {source_type}\ntarget_type: text\n".encode())
    write_atomically(folder / LOG, b"".join(json.dumps(asdict(one)).encode() + b"\n" for one in instances))
    return folder / LOG


def read_instances(path: Path) -> list[Instance]:
    """The instances of a log, or of the one in a folder, SimulEval's or ours."""
    path = path / LOG if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ZendayaError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; expected an {LOG}") from None
    return [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _read_line(line: str, where: str) -> Instance:
    try:
        record = json.loads(line)
        known = {field.name: record[field.name] for field in fields(Instance)}
        known |= {name: tuple(map(float, known[name])) for name in ("delays", "elapsed")}
        instance = Instance(**known)
        if not len(instance.delays) == len(instance.elapsed) == instance.prediction_length:
            raise ValueError("delays, elapsed and prediction_length differ")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ZendayaError(f"{where}: not a line of an {LOG} with text written word by word: {error}") from None
    return instance


def latency(instances: Iterable[Instance]) -> dict[str, float]:
    """AL, LAAL, AP and DAL, equal to those of `simuleval --score-only`; instances without words are left out, as there."""
    written = [one for one in instances if one.delays]
    if not written:
        raise ZendayaError("nothing to score: no instance has a word")
    return {
        name: float(np.mean([scorer(one.delays, source=one.source_length, target=one.reference_length) for one in written]))
        for name, scorer in SCORERS.items()
    }


class WordWriter:
    """Raw input to whole words as it arrives: an encoder, and a new session per source."""

    def __init__(
        self, encoder: Encoder[Any, Any], model: Model, policy: Schedule | Policy, *, by_word: bool = True, engine: Engine | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        traits, config = encoder.traits, model.config.decoder
        gives = f"{traits.dim} {'ids' if traits.ids else 'features'}"
        reads = f"{config.source_dim} {'ids' if config.source_vocab else 'features'}"
        if gives != reads:
            raise ConfigError(f"{traits.name} gives {gives} per token, the model reads {reads}: they do not fit")
        self.encoder, self.model, self.policy, self.by_word, self.options = encoder, model, policy, by_word, options
        self.engine = engine
        self.start()

    def start(self) -> None:
        """Begin a new source."""
        options = DecodeOptions(schedule=self.policy, engine="torch", **self.options)
        self._pipeline, self._words = Pipeline.open(self.model, self.encoder, options, engine=self.engine), Words()

    def read(self, raw: Any) -> str:
        """Read the next raw input; return the words it completes."""
        return self._text(self._pipeline.read(raw))

    def finish(self) -> str:
        """End the source; return the rest of the words."""
        return self._text(self._pipeline.end())

    def join(self, parts: Iterable[str]) -> str:
        """Join texts: words with spaces between, characters without."""
        return (" " if self.by_word else "").join(filter(None, parts))

    def _text(self, events: Iterable[Event]) -> str:
        if not self.by_word:
            return "".join(event.text for event in events)
        return " ".join(word for event in events for word in self._words.add(event.text, last=event.last))


def _add_args(parser: ArgumentParser) -> None:
    parser.add_argument("--policy", default="0.5", help="A schedule or policy: 0.5, wait-k=3, local-agreement=10, alignatt=4,chunk=2.")
    parser.add_argument("--window", type=int, help="W in source tokens; the model's if not given.")
    parser.add_argument("--steps", type=int, help="Fix the predicted length, instead of the model's length head.")
    parser.add_argument("--max-steps", type=int, help="Most steps per window.")


def _add_speech_args(parser: ArgumentParser) -> None:
    _add_args(parser)
    parser.add_argument("--model", default="tiny.en-dial", help="A shipped adapter's name, an adapter's folder, a checkpoint's or hub id.")
    parser.add_argument("--voice", choices=get_args(Voice), default="auto", help="Decode speech alone (gate), or all sound (off).")
    parser.add_argument("--encoder", help="For a checkpoint: its encoder, as zendaya encode names it: whisper:tiny.en,block_s=1.")


def _add_text_args(parser: ArgumentParser) -> None:
    _add_args(parser)
    parser.add_argument("--model", required=True, help="A checkpoint folder or hub id.")
    parser.add_argument("--source-tokenizer", required=True, help="The tokenizer.json that its source was encoded with.")


def speech_writer(args: Namespace) -> WordWriter:
    """The writer for the options of `SpeechAgent`."""
    if args.encoder is None:
        adapted = load_adapted(args.model)
        return _writer(args, adapted.encoder, adapted.model)
    return _writer(args, _open(args.encoder), load_model(args.model))


def text_writer(args: Namespace) -> WordWriter:
    """The writer for the options of `TextAgent`."""
    return _writer(args, _open(f"text:{args.source_tokenizer}"), load_model(args.model))


def _open(spec: str) -> Encoder[Any, Any]:
    encoder = EncoderSpec.parse(spec).open()
    if not encoder.traits.live:
        raise ConfigError(f"encoder {spec}: expected one that gives tokens while its source arrives")
    return encoder


def _writer(args: Namespace, encoder: Encoder[Any, Any], model: Model) -> WordWriter:
    options = {"window_tokens": args.window, "steps": args.steps, "max_steps": args.max_steps, "voice": getattr(args, "voice", "auto")}
    by_word = getattr(args, "eval_latency_unit", "word") == "word"
    return WordWriter(encoder, model, as_trained(parse_policy(args.policy), args.model), by_word=by_word, **options)


def __getattr__(name: str) -> Any:
    """The agents are made on first use, because their base class is SimulEval's."""
    if name not in ("SpeechAgent", "TextAgent"):
        raise AttributeError(f"module 'zendaya.evaluation.simuleval' has no attribute {name!r}")
    return _agents()[name]


class _StreamingAgent:
    """Base of both agents: it reads each segment and writes the words that it completes."""

    make: Callable[[Namespace], WordWriter]
    raw: Callable[[Any], Any]

    def __init__(self, args: Namespace) -> None:
        self.writer, self.text = type(self).make(args), ""
        super().__init__(args)  # type: ignore[call-arg]

    @classmethod
    def from_args(cls, args: Namespace) -> Any:
        """The agent; wrong options end the program with one line."""
        try:
            return cls(args)
        except ZendayaError as error:
            raise SystemExit(f"zendaya: {error}") from None

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.writer.start()
        self.text = ""

    def push(self, source_segment: Any, states: Any = None, upstream_states: Any = None) -> None:
        super().push(source_segment, states, upstream_states)  # type: ignore[misc]
        parts = [] if source_segment.is_empty else [self.writer.read(self.raw(source_segment))]
        parts += [self.writer.finish()] if source_segment.finished else []
        self.text, self.finished = self.writer.join(parts), source_segment.finished

    def policy(self) -> Any:
        from simuleval.agents import ReadAction, WriteAction

        return WriteAction(self.text, finished=self.finished) if self.text or self.finished else ReadAction()

    def to(self, device: str, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("fp16"):
            raise SystemExit("zendaya: weights are read as they were saved: leave --fp16 out")
        self.writer.model.to(device)


@cache
def _agents() -> dict[str, type]:
    try:
        from simuleval.agents import SpeechToTextAgent, TextToTextAgent
    except ImportError as error:
        raise MissingExtraError("simuleval==1.1.4", None, f"a SimulEval agent ({error})") from None

    class SpeechAgent(_StreamingAgent, SpeechToTextAgent):  # type: ignore[misc]
        """Speech to text."""

        make = staticmethod(speech_writer)
        add_args = staticmethod(_add_speech_args)

        def raw(self, segment: Any) -> Any:
            if segment.sample_rate != SAMPLE_RATE:
                raise SourceError(f"speech must have {SAMPLE_RATE} samples per second: got {segment.sample_rate}; convert it first")
            return np.asarray(segment.content, np.float32)

    class TextAgent(_StreamingAgent, TextToTextAgent):  # type: ignore[misc]
        """Text to text, a word at a time."""

        make = staticmethod(text_writer)
        add_args = staticmethod(_add_text_args)

        def raw(self, segment: Any) -> Any:
            return segment.content + " "

    return {"SpeechAgent": SpeechAgent, "TextAgent": TextAgent}
