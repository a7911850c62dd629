"""Word errors of adapted Whisper on LibriSpeech: whole utterances at γ = 0 beside the unadapted model, and live under the dial.

python benchmarks/adapted_wer.py FOLDER [--adapter tiny.en-dial] [--processes 2] [--part baseline|tokens|blocks|whole|live] [--every 1]
                                 [--gammas 0.5,1] [--cuts fixed,0.5] [--precision auto] [--engine torch] [--texts F] [--beside F]

FOLDER holds manifest.jsonl, the recordings and align_valid_test.jsonl (word times, for the lag; without it no lag is printed).
`baseline`: unadapted Whisper, `full` features, whole utterances, with silence up to 30 s; `tokens`: without it.
`blocks`: unadapted Whisper on block features, whole utterances. `whole`: adapted, block features, whole utterances, γ = 0.
`live`: chapters of utterances back to back as endless streams, in windows, N̂ from the length head, for each γ and each of --cuts:
windows all of W (fixed), or ending at pauses once they hold a share of W (a number).
Words are compared after Whisper's English normalisation (without its spelling map). Nothing is drawn at random: there is no seed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zendaya.data.corpora.registry import read
from zendaya.encoders.base import encode
from zendaya.encoders.whisper import WhisperBlocks
from zendaya.evaluation.metrics.latency import average_lagging, length_adaptive_average_lagging
from zendaya.evaluation.metrics.significance import paired_bootstrap, statistics
from zendaya.nn.whisper import encode_offline, load_encoder, load_weights, whisper_decoder
from zendaya.records import Clip, Event
from zendaya.runtime.engine import engine_for
from zendaya.runtime.loading import load_adapted
from zendaya.runtime.pauses import PauseWindows
from zendaya.runtime.pipeline import Pipeline, SourceEncoder
from zendaya.runtime.replay import replay
from zendaya.runtime.session import Session
from zendaya.schedule import PowerLaw
from zendaya.sources.live import at_once
from zendaya.sources.media import SAMPLE_RATE, read_audio

GAMMAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5)
SPAN = 30 * SAMPLE_RATE


@dataclass
class Heard:
    """What was written for one recording: its words, and when each was finished; and the lag of each of its windows."""

    name: str
    text: str
    words: list[tuple[str, float]] = field(default_factory=list)
    window_lags_s: list[float] = field(default_factory=list)
    first_s: float = 0.0
    num_windows: int = 0


def samples_of(folder: Path, clips: Iterable[Clip]) -> np.ndarray:
    """The recordings of clips, back to back."""
    return np.concatenate([chunk.samples for clip in clips for chunk in read_audio(folder / clip.media)])


def listen(session: Session, tokens: Any, length_s: float, per_s: float, arrival_s: Any = None) -> Heard:
    """What a session writes as the tokens arrive: when they are due, or at the times given."""
    times_s = tokens.arrival_s if arrival_s is None else arrival_s
    return gather(replay(session, tokens.values_TE, times_s, end_s=max(length_s, float(times_s[-1]))), per_s)


def listen_for_pauses(session: Session, encoder: WhisperBlocks, samples_S: np.ndarray, share: float) -> Heard:
    """What a session writes whose windows end at pauses, from that share of W on."""
    per_s = encoder.traits.tokens_per_s
    chunks = (samples_S[first : first + SAMPLE_RATE] for first in range(0, samples_S.size, SAMPLE_RATE))
    source = SourceEncoder(encoder, PauseWindows(session.window_tokens, per_s, share=share))
    return gather(Pipeline(session, source).run(at_once(chunks)), per_s)


def gather(events: Iterable[Event], per_s: float) -> Heard:
    """The words of events, and their lags."""
    heard, pending, horizons, now_s = Heard("", ""), "", list[int](), 0.0
    for event in events:
        now_s = event.arrival_s
        if not heard.text.strip():
            heard.first_s = now_s
        if pending and event.text[:1] in (" ", "") and event.text:
            heard.words.append((pending, now_s))
            pending = ""
        pending += event.text
        heard.text += event.text
        horizons.append(event.effective_horizon)
        if event.last:
            heard.num_windows += 1
            if len(horizons) > 1:
                delays = [h / per_s for h in horizons[:-1]]
                heard.window_lags_s.append(average_lagging(delays, source=horizons[-1] / per_s, target=len(delays)))
            horizons.clear()
    if pending:
        heard.words.append((pending, now_s))
    return heard


_worker: dict[str, Any] = {}


def begin(options: argparse.Namespace) -> None:
    """Load what a process needs, once."""
    torch.set_num_threads(1)
    _worker.update(options=options, folder=Path(options.folder))
    if options.part in ("baseline", "tokens", "blocks"):
        weights = load_weights("tiny.en")
        _worker.update(encoder=load_encoder(weights), model=whisper_decoder(weights))
        if options.part == "blocks":
            _worker["encoder"] = WhisperBlocks(_worker["encoder"], "tiny.en", block_s=options.block_s)
    else:
        adapted = load_adapted(options.adapter, precision=options.precision)
        native = options.engine != "torch"
        engine = engine_for(
            adapted.model, "native" if native else "torch", precision="int8" if options.engine == "int8" else "float32",
            threads=1 if native else None,
        )  # fmt: skip
        _worker.update(encoder=adapted.encoder, model=adapted.model, engine=engine)


def decode_one(clips: list[Clip]) -> dict[str, Heard]:
    """One recording under every setting asked for."""
    options, model = _worker["options"], _worker["model"]
    samples_S = samples_of(_worker["folder"], clips)
    length_s = samples_S.size / SAMPLE_RATE
    name = clips[0].id if options.part != "live" else clips[0].stream
    found = {}
    if options.part in ("baseline", "tokens"):
        text = ""
        for first in range(0, samples_S.size, SPAN):
            piece_S = samples_S[first : first + SPAN]
            tokens_TE = encode_offline(_worker["encoder"], piece_S)
            session = model.open(PowerLaw(0.0))
            kept_TE = tokens_TE if options.part == "baseline" else tokens_TE[: -(-piece_S.size // 320)]
            text += "".join(event.text for event in [*session.push(kept_TE), *session.finish()])
        return {"unadapted, full features": Heard(name, text)}
    tokens = encode(_worker["encoder"], [samples_S])
    per_s = _worker["encoder"].traits.tokens_per_s
    if options.part in ("whole", "blocks"):
        found["gamma=0.0, whole utterances"] = listen(
            model.open(PowerLaw(0.0), window_tokens=1500, engine=_worker.get("engine")), tokens, length_s, per_s
        )
    else:
        for cut in options.cuts:
            for gamma in options.gammas:
                session = model.open(PowerLaw(gamma), window_tokens=options.window, engine=_worker["engine"])
                if cut == "fixed":
                    found[f"gamma={gamma}"] = listen(session, tokens, length_s, per_s)
                else:
                    setting = f"gamma={gamma}, windows end at pauses from {cut} W"
                    found[setting] = listen_for_pauses(session, _worker["encoder"], samples_S, float(cut))
    for heard in found.values():
        heard.name = name
    return found


def normaliser() -> Callable[[str], str]:
    """Whisper's English normalisation."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    return EnglishTextNormalizer({})


@dataclass(frozen=True)
class Said:
    """A word of the reference: when its end was heard, and which utterance of the stream it is of."""

    word: str
    end_s: float
    clip: int


def lags_s(heard: Heard, said: list[Said], clips: list[Clip]) -> tuple[list[float], list[float]]:
    """Of each word rightly written, the seconds from its end to its writing; of each utterance, LAAL from the words written for it.

    A written word belongs to the utterance of the word it was aligned with, as in StreamLAAL (Papi et al. 2024).
    """
    import jiwer

    normal = normaliser()
    ours = [(part, at_s) for word, at_s in heard.words for part in normal(word).split()]
    theirs = [dataclasses.replace(each, word=part) for each in said for part in normal(each.word).split()]
    if not ours or not theirs:
        return [], []
    result = jiwer.process_words([" ".join(each.word for each in theirs)], [" ".join(word for word, _ in ours)])
    behind, delays = list[float](), dict[int, list[float]]()
    starts = list(itertools.accumulate((clip.duration_s for clip in clips), initial=0.0))
    for chunk in result.alignments[0]:
        if chunk.type in ("equal", "substitute"):
            for i in range(chunk.ref_end_idx - chunk.ref_start_idx):
                at_s, word = ours[chunk.hyp_start_idx + i][1], theirs[chunk.ref_start_idx + i]
                delays.setdefault(word.clip, []).append(max(0.0, at_s - starts[word.clip]))
                if chunk.type == "equal":
                    behind.append(at_s - word.end_s)
    count = collections.Counter(each.clip for each in theirs)
    laal = [
        length_adaptive_average_lagging(each, source=clips[clip].duration_s, target=count[clip]) for clip, each in sorted(delays.items())
    ]
    return behind, laal


def main() -> None:
    """Decode, score, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--adapter", default="tiny.en-dial")
    parser.add_argument("--precision", default="auto", help="of the adapted encoder's products: auto, float32 or bfloat16")
    parser.add_argument("--engine", choices=["torch", "native", "int8"], default="torch", help="what decodes the adapted model")
    parser.add_argument("--split", default="test")
    parser.add_argument("--part", choices=["baseline", "tokens", "blocks", "whole", "live"], default="whole")
    parser.add_argument("--block-s", type=float, default=1.0, help="for --part blocks")
    parser.add_argument("--gammas", type=lambda text: [float(part) for part in text.split(",")], default=list(GAMMAS))
    parser.add_argument("--window", type=int, default=500)
    parser.add_argument("--cuts", type=lambda text: text.split(","), default=["fixed"], help="fixed, or the least share of W")
    parser.add_argument("--every", type=int, default=1, help="take every n-th recording")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--texts", type=Path, help="write the texts there as JSON lines")
    parser.add_argument(
        "--beside", type=Path, help="texts that another run wrote: the difference to them, by paired bootstrap over recordings"
    )
    options = parser.parse_args()
    reading = read("librispeech", options.folder)
    clips = [clip for clip in reading.usable if clip.split == options.split]
    jobs = [[clip] for clip in clips]
    if options.part == "live":
        jobs = [list(group) for _, group in itertools.groupby(clips, key=lambda clip: clip.stream)]
    jobs = sorted(jobs[:: options.every], key=lambda job: -sum(clip.duration_s for clip in job))
    begun = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes, begin, (options,)) as pool:
        results = pool.map(decode_one, jobs, chunksize=1)
    spent_s = time.perf_counter() - begun
    report(options, reading.digest, jobs, results, spent_s)


def report(options: argparse.Namespace, digest: str, jobs: list[list[Clip]], results: list[dict[str, Heard]], spent_s: float) -> None:
    """Print the scores, and what they are of."""
    import jiwer

    normal = normaliser()
    hours = sum(clip.duration_s for job in jobs for clip in job) / 3600
    print(f"LibriSpeech {options.split}, data sha256:{digest[:16]}, {len(jobs)} recordings, {hours:.2f} h; part {options.part}")
    if options.part in ("whole", "live"):
        adapted, window = load_adapted(options.adapter, precision=options.precision), options.window if options.part == "live" else 1500
        print(f"adapter sha256:{adapted.digest[:16]}, {adapted.encoder.traits.name}; window {window}; engine {options.engine}")
    references = [normal(" ".join(clip.references[0] for clip in job)) for job in jobs]
    times = _said(Path(options.folder), jobs) if options.part == "live" else None
    for setting in results[0]:
        heard = [result[setting] for result in results]
        score = jiwer.process_words(references, [normal(each.text) for each in heard])
        line = f"{setting}: WER {100 * score.wer:.2f} % (S {score.substitutions} D {score.deletions} I {score.insertions})"
        if options.part == "live":
            line += f"; window AL {np.mean([lag for each in heard for lag in each.window_lags_s]):.2f} s"
            line += f"; {sum(each.num_windows for each in heard)} windows"
            line += f"; first token {np.median([each.first_s for each in heard]):.1f} s"
            if times is not None:
                found = [lags_s(each, said, job) for each, said, job in zip(heard, times, jobs, strict=True)]
                line += f"; LAAL {np.mean([laal for _, each in found for laal in each]):.2f} s"
                lags = [lag for each, _ in found for lag in each]
                line += f"; word lag mean {np.mean(lags):.2f} s, median {np.median(lags):.2f}, 90 % {np.percentile(lags, 90):.2f}"
        print(line, flush=True)
        if options.beside:
            records = [json.loads(line) for line in options.beside.read_text(encoding="utf-8").splitlines()]
            others = {record["name"]: record["text"] for record in records if record["setting"] == setting}
            texts, said = ([each.text for each in heard], [others[each.name] for each in heard]), [[text] for text in references]
            gap = paired_bootstrap(*(statistics("wer", each, said) for each in texts))
            print(f"  beside {options.beside.name}: {gap.value:+.2f} points [{gap.low:+.2f}, {gap.high:+.2f}], p = {gap.p:.3f}")
    print(f"{spent_s:.0f} s in {options.processes} processes")
    if options.texts:
        records = [{"setting": s, "name": h.name, "text": h.text} for result in results for s, h in result.items()]
        options.texts.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")


def _said(folder: Path, jobs: list[list[Clip]]) -> list[list[Said]] | None:
    """The words of each stream and when they end, where their times are known."""
    path = folder / "align_valid_test.jsonl"
    if not path.is_file():
        return None
    known = {record["id"]: record["words"] for record in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    said = []
    for job in jobs:
        words, start_s = list[Said](), 0.0
        for index, clip in enumerate(job):
            timed = known.get(clip.id) or [[word, None, clip.duration_s] for word in clip.references[0].lower().split()]
            words += [Said(word, start_s + end_s, index) for word, _, end_s in timed]
            start_s += clip.duration_s
        said.append(words)
    return said


if __name__ == "__main__":
    main()
