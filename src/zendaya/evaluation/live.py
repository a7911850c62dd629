"""Live speech, measured: a model and its encoder play whole streams under settings, through the one `Pipeline`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zendaya.encoders.base import weights_digest
from zendaya.evaluation.evaluate import ComputationClock
from zendaya.evaluation.metrics.speech import Utterance, WrittenWord, written_words
from zendaya.nn.adapter import LOOP_TOKENS
from zendaya.nn.model import Model
from zendaya.nn.whisper import SAMPLE_RATE, encode_offline, load_encoder, load_weights, whisper_decoder
from zendaya.records import Clip, Event
from zendaya.runtime.engine import Engine, engine_for, is_native
from zendaya.runtime.loading import as_trained, load_live
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.pipeline import Pipeline, SourceEncoder
from zendaya.runtime.setting import LiveSetting
from zendaya.schedule import PowerLaw
from zendaya.sources.media import Samples

SPAN = 30 * SAMPLE_RATE
"""Samples that offline Whisper reads at once."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a stream of sound became, and what it cost."""

    words: tuple[WrittenWord, ...]
    edges_s: tuple[float, ...]
    sound_s: float
    cpu_s: float
    """Process time of encoder and decoder."""
    decoder_rows: int
    num_tokens: int
    """Tokens written, the ends of windows included."""


def state_drops(event: Event | None, source: SourceEncoder) -> set[float]:
    """The edges that a moment of a stream shows: seconds of the source at which decoder or encoder state was dropped.

    Those known are where windows begin, where the encoder's context begins, and the moment at which it slid; add other kinds here.
    """
    found = {source.context_start_s, source.slid_s or 0.0}
    if event is not None:
        found.add(event.window_start / source.encoder.traits.tokens_per_s)
    return found - {0.0}


class LivePlayer:
    """A model and its encoder, loaded once, that play sound under any setting on one thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.encoder = load_live(name)
        self._engines = dict[tuple[str, str], Engine]()

    @property
    def digest(self) -> str:
        """sha256 of all weights and of the shapes that the text depends on."""
        parts = weights_digest(self.model), self.encoder.digest(), self.model.config, dataclasses.replace(self.encoder.traits, name="")
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def open(self, setting: LiveSetting, clock: Callable[[], float] | None = None) -> Pipeline:
        """A pipeline under a setting."""
        encoder = setting.encoder_from(self.encoder)
        options = dataclasses.replace(setting.options(), schedule=as_trained(setting.schedule, self.name))
        key = options.engine, options.precision
        if key not in self._engines:
            self._engines[key] = _engine(self.model, options)
        return Pipeline.open(self.model, encoder, options, clock=clock, engine=self._engines[key])

    def play(self, setting: LiveSetting, sound: Iterable[Samples]) -> Played:
        """Play chunks of sound, each at the moment it ends; the computation-aware clock runs on process time."""
        clock = ComputationClock(time.process_time)
        pipeline, events, edges_s = self.open(setting, clock), list[Event](), set[float]()
        assert pipeline.source is not None
        source: SourceEncoder = pipeline.source
        cpu_s = sound_s = 0.0

        def draw(found: Iterator[Event]) -> None:
            nonlocal cpu_s
            clock.begin(sound_s)
            begun = time.process_time()
            for event in found:
                events.append(event)
                edges_s.update(state_drops(event, source))
            cpu_s += time.process_time() - begun
            clock.end()
            edges_s.update(state_drops(None, source))

        for chunk in sound:
            sound_s += chunk.size / SAMPLE_RATE
            draw(pipeline.read(chunk))
        draw(pipeline.end())
        return Played(
            words=tuple(written_words(events)), edges_s=tuple(sorted(at_s for at_s in edges_s if at_s < sound_s)), sound_s=sound_s,
            cpu_s=cpu_s, decoder_rows=pipeline.session.cost.rows, num_tokens=len(events),
        )  # fmt: skip


def whole_pieces(samples_S: Samples) -> Iterator[Samples]:
    """A recording as offline Whisper reads it: whole, or in pieces that end at the quietest tenth of a second of their last 5 s."""
    frame, first = SAMPLE_RATE // 10, 0
    while samples_S.size - first > SPAN:
        late_NF = samples_S[first + SPAN - 50 * frame : first + SPAN].reshape(50, frame)
        last = first + SPAN - 50 * frame + int((late_NF**2).sum(1).argmin()) * frame + frame // 2
        yield samples_S[first:last]
        first = last
    yield samples_S[first:]


class OfflinePlayer:
    """Unadapted Whisper as published, on whole recordings with silence up to 30 s; guarded against loops as adapted models are."""

    def __init__(self, name: str = "tiny.en") -> None:
        weights = load_weights(name)
        self.encoder, self.model = load_encoder(weights), whisper_decoder(weights)
        self.model.config = dataclasses.replace(self.model.config, loop_tokens=LOOP_TOKENS)
        self._engine = _engine(self.model, DecodeOptions(schedule=PowerLaw(0.0)))

    def play(self, sound: Iterable[Samples]) -> Played:
        """The words of a recording, all written at its end."""
        samples_S, begun = np.concatenate(list(sound)), time.process_time()
        sound_s, events, rows = samples_S.size / SAMPLE_RATE, list[Event](), 0
        for number, piece_S in enumerate(whole_pieces(samples_S)):
            pipeline = Pipeline(self.model.open(PowerLaw(0.0), engine=self._engine))
            written = [*pipeline.push(encode_offline(self.encoder, piece_S), sound_s), *pipeline.finish(sound_s)]
            events += [dataclasses.replace(event, window_index=number) for event in written]
            rows += pipeline.session.cost.rows
        return Played(
            words=tuple(written_words(events)), edges_s=(), sound_s=sound_s, cpu_s=time.process_time() - begun, decoder_rows=rows,
            num_tokens=len(events),
        )  # fmt: skip


def _engine(model: Model, options: DecodeOptions) -> Engine:
    """The engine that options ask for, on one thread."""
    native = is_native(model, options.engine)
    return engine_for(model, options.engine, precision=options.precision, threads=1 if native else None)


# What was said.


def word_times(folder: Path) -> dict[str, list[tuple[str, float, float]]]:
    """Words with start and end by utterance, from the align_*.jsonl files of a corpus; empty where it has none."""
    lines = (line for path in sorted(folder.glob("align_*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines())
    return {record["id"]: [tuple(word) for word in record["words"]] for record in map(json.loads, lines)}


def utterance(clip: Clip, start_s: float, times: dict[str, list[tuple[str, float, float]]]) -> Utterance:
    """A clip as it is said from that moment of a stream on; without word times they are spread evenly."""
    spoken, duration_s = clip.references[0].lower().split(), clip.duration_s
    even = [(word, duration_s * n / len(spoken), duration_s * (n + 1) / len(spoken)) for n, word in enumerate(spoken)]
    words = times.get(clip.id)
    return Utterance(clip.id, clip.stream, start_s, duration_s, tuple(words or even), timed=words is not None)
