"""Whisper adapted to the dial: encoder in blocks and decoder on horizons, trained together from sound by low-rank adapters.

An example is an utterance, or consecutive utterances joined to at most 30 s. It is heard as one span or, cut anywhere, as two, and
written in windows; each window draws its own schedule and follows the text of the window before, as it will live. A word belongs to
the window in which most of it was heard.

Shape suffixes: B recordings, C mel bins, L mel frames, T source tokens, N text rows, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils import parametrize

import zendaya
from zendaya.data.corpora.registry import read
from zendaya.encoders.whisper import CEILING, TOKEN
from zendaya.errors import ConfigError, CorpusError
from zendaya.nn.adapter import ADAPTER, Adapter, AdapterConfig, attach, interpolated, trained_tensors, weights_digest
from zendaya.nn.model import Model
from zendaya.nn.whisper import load_encoder, load_weights, whisper_decoder
from zendaya.records import Clip
from zendaya.schedule import PowerLaw, Schedule, WaitK
from zendaya.sources.media import SAMPLE_RATE, Samples, read_audio
from zendaya.training.labels import Label, Sound, floats, make_labels, read_labels
from zendaya.training.loop import LoopConfig, Report, TrainResult, run
from zendaya.training.state import begin
from zendaya.training.whisper_batch import encode_batch, log_mel, mel_filters, num_tokens

TOKENS_PER_S = SAMPLE_RATE / TOKEN
LATE_S = 0.1
"""Whisper's attention looks at a word this much after it is said: the median against a forced alignment of LibriSpeech's valid split."""
WORD_S, LETTER_S = 0.12, 0.07
"""A word lasts at most about this long, and this much a letter; what follows it until the next is a pause."""
HEARD = 0.7
"""The share of a word that must have been heard in a window for it to be written there."""
SHORTEST = 5
"""Source tokens of a last window that is worth a window."""


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """What is adapted, and to what."""

    base: str = "tiny.en"
    block_s: float = 2.0
    ceiling: float = CEILING
    rank: int = 32
    keep: float = 0.75
    """How much of what was learned is kept in what is saved: see `interpolated`."""
    window_tokens: int = 500
    """W the length head counts for, and the live default: 10 s."""
    max_steps: int = 200
    seed: int = 0
    windows: tuple[int, int] = (250, 1500)
    """Shortest and longest window drawn."""
    half_precision: bool = True
    """bfloat16 products, three times as fast where the processor has them."""

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"adapt config: keep must lie above 0 and up to 1: got {self.keep!r}")
        if not 1 <= self.windows[0] <= self.windows[1] <= 1500:
            raise ConfigError(f"adapt config: windows must lie in 1 … 1500 and not fall: got {self.windows}")


LOOP = LoopConfig(epochs=1, batch_tokens=3400, accumulate=2, learning_rate=1e-3, warmup_steps=20, weight_decay=0.0)
"""How the adapters are optimised: small steps of about two minutes of speech."""


@dataclass(frozen=True, kw_only=True)
class AdaptRecipe:
    """A whole adaptation but its data."""

    name: str = "adapt-tiny.en"
    folder: str = "librispeech"
    """Where the corpus lies under the folder of all data."""
    adapt: AdaptConfig = dataclasses.field(default_factory=AdaptConfig)
    loop: LoopConfig = LOOP

    @property
    def schedule(self) -> str:
        """Every window draws its own."""
        return "dial"


def train_adapter(
    recipe: AdaptRecipe, *, data: str | Path, out: str | Path, store: str | Path | None = None, resume: bool = False,
    report: Report = lambda _: None, limit: int | None = None,
) -> TrainResult:  # fmt: skip
    """Adapt Whisper on LibriSpeech in `data`: `out` holds best/ and last/ (for `load_adapted`), `store` the readable labels."""
    folder = Path(out)
    config = dataclasses.replace(recipe.adapt, seed=recipe.loop.seed)
    recipe = dataclasses.replace(recipe, adapt=config)
    data_digest = read("librispeech", data).digest
    signature = {
        "version": zendaya.__version__, "recipe": dataclasses.asdict(recipe), "schedule": recipe.schedule, "data_digest": data_digest,
        "limit": limit,
    }  # fmt: skip
    begin(folder, signature, resume)
    of = hashlib.sha256(f"{config.base} {data_digest} {limit}".encode()).hexdigest()[:12]  # those of fewer utterances are no others'
    labels = (Path(store) if store is not None else folder) / f"labels-{of}.jsonl"
    labels.parent.mkdir(parents=True, exist_ok=True)
    task = adapt(data, labels=labels, config=config, max_utterances=limit, report=report)
    return run(task, recipe.loop, folder, resume=resume, report=report)


@dataclass(frozen=True)
class SpokenWord:
    """A word to write, and the second at which enough of it has been heard."""

    ids: tuple[int, ...]
    heard_s: float


@dataclass(frozen=True)
class SpeechExample:
    """Utterances one after another: what was said, and when."""

    utterances: tuple[tuple[Sound, tuple[SpokenWord, ...]], ...]
    joined: bool
    """Whether it stands for a stream, which is cut; else for an utterance, which may be decoded whole."""

    @property
    def num_source(self) -> int:
        return num_tokens(sum(samples_S.size for samples_S, _ in self.utterances))

    @property
    def num_ids(self) -> int:
        return sum(len(word.ids) for _, words in self.utterances for word in words)


@dataclass
class SpeechWindow:
    """A window of a span: which source tokens, the text to write, and under which schedule."""

    span: int
    first: int
    stop: int
    ids: list[int]
    heard: list[float]
    """Source tokens of the window after which enough of each id's word has been heard."""
    schedule: Schedule
    scale: int
    steps: int
    buffer: int
    """Source tokens the length head reads."""
    length: int
    """What it should say: the steps of a window of the config's width at this pace."""
    weight: float
    """Its share in the example's length loss."""
    previous: SpeechWindow | None = None


@dataclass
class SpeechBatch:
    """Spans of sound and the windows in them."""

    mels: list[Tensor]
    """Log-mel frames (1, C, L) of each span, none padded to another."""
    windows: list[SpeechWindow]


class Adapting(nn.Module):
    """Encoder and model with adapters; a batch in, the sums of its losses out."""

    def __init__(self, config: AdaptConfig) -> None:
        super().__init__()
        weights = load_weights(config.base)
        base = whisper_decoder(weights)
        # A window of silence is a window without text: its first step may be its end.
        framing = base.config.framing
        framing = dataclasses.replace(framing, suppress_first=tuple(i for i in framing.suppress_first if i != framing.end))
        model_config = dataclasses.replace(
            base.config,
            window_tokens=config.window_tokens,
            max_steps=config.max_steps,
            length="inf",
            history=True,
            end_means_wait=True,
            pace=True,
            framing=framing,
        )
        generator = torch.Generator().manual_seed(config.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.model = Model(model_config, base.tokenizer)
        self.model.decoder.load_state_dict(base.decoder.state_dict())
        self.encoder = load_encoder(weights)
        attach(self.encoder, config.rank, generator)
        attach(self.model.decoder, config.rank, generator)
        self.base = {**trained_tensors(self.encoder, "encoder."), **trained_tensors(self.model.decoder, "decoder.")}
        self.block = round(config.block_s * TOKENS_PER_S)
        self.half_precision = config.half_precision
        self.kept = AdapterConfig(
            base=config.base, base_digest=weights_digest(weights), rank=config.rank, block_s=config.block_s, ceiling=config.ceiling,
            model=model_config,
        )  # fmt: skip

    def forward(self, batch: SpeechBatch) -> dict[str, Tensor]:
        with parametrize.cached(), torch.autocast("cpu", torch.bfloat16, enabled=self.half_precision):
            spans = [encode_batch(self.encoder, mel_1CL, block=self.block)[0].float() for mel_1CL in batch.mels]
            return self._losses(spans, batch.windows)

    def _losses(self, spans: Sequence[Tensor], windows: Sequence[SpeechWindow]) -> dict[str, Tensor]:
        """Window by window, since padding them to the longest would be most of the work; their words are scored together."""
        model, first = self.model, len(self.model.config.framing.prompt) - 1
        rows, targets, length = list[Tensor](), list[Tensor](), list[Tensor]()

        def source(window: SpeechWindow) -> Tensor:
            return spans[window.span][window.first : window.stop]

        for window in windows:
            alone = model.batch(
                [source(window)], [window.ids], window.schedule, scale=window.scale, steps=[window.steps],
                histories=[None if window.previous is None else (source(window.previous), window.previous.ids)],
            )  # fmt: skip
            x_1ND, _ = model.decoder.rows(alone.ids_BN, alone.source_BFE, alone.horizons_BN, history=alone.history)
            rows.append(x_1ND[0, first:])
            # A word that lies beyond its step's horizon is not to be guessed: until it is heard, the end stands for a pause.
            unheard_N = torch.tensor([*window.heard, 0.0]) > alone.horizons_BN[0, first:]
            targets.append(alone.targets_BN[0].masked_fill(unheard_N, model.config.framing.end))
            # The length head learns from the features and does not bend them.
            assert alone.history is not None
            history = dataclasses.replace(alone.history, source_BGE=alone.history.source_BGE.detach())
            logits_1C = model.length_logits(alone.source_BFE.detach(), torch.tensor([window.buffer]), history).float()
            near_1C = _near(torch.tensor([window.length]), logits_1C.shape[1])
            length.append(-window.weight * (near_1C * logits_1C.log_softmax(-1)).sum())
        logits_NV = model.decoder.project(torch.cat(rows)).float()
        return {"nll": functional.cross_entropy(logits_NV, torch.cat(targets), reduction="sum"), "length": torch.stack(length).sum()}


def _near(length_B: Tensor, classes: int) -> Tensor:
    """Shares of the classes near a length, a tenth of it wide: a text one token longer is no other text."""
    away_BC = (torch.arange(1, classes + 1) - length_B[:, None]) / (0.1 * length_B[:, None] + 0.5)
    return (-0.5 * away_BC**2).softmax(-1)


class AdaptTask:
    """The task of the training loop: examples of LibriSpeech drawn into batches, the losses, what is saved."""

    weights: Mapping[str, float] = {"nll": 1.0, "length": 0.1}

    def __init__(self, config: AdaptConfig, examples: Mapping[str, Sequence[SpeechExample]]) -> None:
        self.config, self.examples = config, {split: list(chosen) for split, chosen in examples.items()}
        self._adapting = Adapting(config)
        self.module: nn.Module = self._adapting
        self._filters_CF = mel_filters(self._adapting.encoder.config.num_mel_bins)

    def sizes(self, split: str) -> list[tuple[int, int]]:
        return [(example.num_source, example.num_ids) for example in self.examples[split]]

    def counts(self, split: str, indices: list[int]) -> dict[str, int]:
        return {"nll": sum(self.examples[split][index].num_ids + 1 for index in indices), "length": len(indices)}

    def collate(self, split: str, indices: list[int], rng: np.random.Generator) -> SpeechBatch:
        """A batch of examples; those of the valid split are cut and scheduled the same each time."""
        spans, windows = list[Samples](), list[SpeechWindow]()
        for index in indices:
            draw = _Draw(
                self.config, rng if split == "train" else np.random.default_rng([self.config.seed, index]), varied=split == "train"
            )
            heard, written = draw.example(self.examples[split][index], len(spans))
            spans += heard
            windows += written
        block, floor = self._adapting.block, self.config.ceiling - 8.0
        return SpeechBatch([log_mel([samples_S], self._filters_CF, block=block, floor=floor) for samples_S in spans], windows)

    def adapter(self) -> Adapter:
        """What has been learned so far."""
        module, length = self._adapting, self._adapting.model.length
        assert length is not None
        tensors = {
            **trained_tensors(module.encoder, "encoder."),
            **trained_tensors(module.model.decoder, "decoder."),
            **trained_tensors(length, "length."),
        }
        return Adapter(module.kept, interpolated(tensors, module.base, self.config.keep))

    def save(self, folder: Path) -> None:
        self.adapter().save(folder / ADAPTER)


@dataclass
class _Draw:
    """One example cut into spans and windows at random."""

    config: AdaptConfig
    rng: np.random.Generator
    varied: bool
    """Whether loudness and pauses are drawn too."""

    def example(self, example: SpeechExample, first_span: int) -> tuple[list[Samples], list[SpeechWindow]]:
        samples_S, words = self._joined(example)
        cuts = [0, samples_S.size]
        longest = 1500 * TOKEN
        if samples_S.size > longest:
            samples_S, cuts = samples_S[: 2 * longest], [0, longest, min(samples_S.size, 2 * longest)]
        elif example.joined and samples_S.size > 4 * SAMPLE_RATE and self._chance(0.5):
            # The span of a live stream begins anywhere, every 30 s.
            cuts = [0, int(self.rng.integers(SAMPLE_RATE, samples_S.size - 2 * SAMPLE_RATE)) // TOKEN * TOKEN, samples_S.size]
        whole = not example.joined and len(cuts) == 2 and self._chance(0.5)
        width = self._width()
        pace = (sum(len(word.ids) for word in words) + 1) / num_tokens(samples_S.size)
        windows = list[SpeechWindow]()
        for span, (start, stop) in enumerate(itertools.pairwise(cuts)):
            count = num_tokens(stop - start)
            edges = [0, count] if whole else [*range(0, count, width), count]
            if len(edges) > 2 and edges[-1] - edges[-2] < SHORTEST:
                del edges[-1]
            for first, last in itertools.pairwise(edges):
                begin_s = (start / TOKEN + first) / TOKENS_PER_S if windows else -math.inf
                end_s = (start / TOKEN + last) / TOKENS_PER_S if last < count or stop < samples_S.size else math.inf
                inside = [(token, word.heard_s) for word in words if begin_s <= word.heard_s < end_s for token in word.ids]
                ids = [token for token, _ in inside[: self.config.max_steps - 1]]
                # At the window's end nothing is waited for.
                heard = [min(s * TOKENS_PER_S - start / TOKEN - first, last - first) for _, s in inside[: len(ids)]]
                windows.append(self._window(first_span + span, first, last, (ids, heard), last - first if whole else width, pace))
        for before, window in itertools.pairwise(windows):
            window.previous = before if self._chance(0.8) else None
        for window in windows:
            window.weight = 1 / len(windows)
        return [samples_S[start:stop] for start, stop in itertools.pairwise(cuts)], windows

    def _joined(self, example: SpeechExample) -> tuple[Samples, list[SpokenWord]]:
        """Samples and words of the utterances back to back, with a pause between two of them now and then."""
        parts, words, num_samples = list[Samples](), list[SpokenWord](), 0
        pause_at = int(self.rng.integers(0, 6 * len(example.utterances))) if example.joined and self.varied else -1
        for index, (utterance_S, said) in enumerate(example.utterances):
            if index == pause_at:
                count = int(self.rng.uniform(1, 12) * SAMPLE_RATE)
                parts.append((self.rng.standard_normal(count) * 10 ** self.rng.uniform(-5, -2.7)).astype(np.float32))
                num_samples += count
            words += [SpokenWord(word.ids, word.heard_s + num_samples / SAMPLE_RATE) for word in said]
            parts.append(floats(utterance_S))
            num_samples += utterance_S.size
        samples_S = np.concatenate(parts)
        if self.varied and self._chance(0.5):
            samples_S = samples_S * np.float32(10 ** self.rng.uniform(-0.6, 0.2))
        return samples_S, words

    def _window(self, span: int, first: int, stop: int, text: tuple[list[int], list[float]], width: int, pace: float) -> SpeechWindow:
        ids, heard = text
        count = len(ids) + 1
        # A window that the stream's end cuts short was to be a whole one: its pace is the stream's.
        whole = count if stop - first == width else max(count, round(pace * width))
        steps = max(1, min(self.config.max_steps, round(whole * math.exp(self.rng.uniform(-0.15, 0.15)))))
        length = max(1, min(self.config.max_steps, round(whole * self.config.window_tokens / width)))
        buffer = min(PowerLaw(self._gamma()).buffer(width, self.config.max_steps), stop - first)
        return SpeechWindow(span, first, stop, ids, heard, self._schedule(width, steps), width, steps, buffer, length, 1.0)

    def _chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def _width(self) -> int:
        if self._chance(0.5):
            return int(self.rng.choice([500, 750]))
        return int(self.rng.integers(self.config.windows[0], self.config.windows[1] + 1))

    def _gamma(self) -> float:
        """γ above 0: mostly where captions are useful."""
        low, high = (1, 14) if self._chance(0.85) else (15, 30)
        return int(self.rng.integers(low, high + 1)) / 20

    def _schedule(self, width: int, steps: int) -> Schedule:
        chance = self.rng.random()
        if chance < 0.25:
            return PowerLaw(0.0)
        if chance < 0.3:
            return WaitK(int(self.rng.integers(25, 301)), round(width / steps, 2))
        return PowerLaw(self._gamma())


def adapt(
    data: str | Path, *, labels: Path | None = None, config: AdaptConfig | None = None, max_utterances: int | None = None,
    report: Report = lambda _: None,
) -> AdaptTask:  # fmt: skip
    """The task of adapting Whisper on LibriSpeech in a folder; `labels` is where readable transcripts are kept, made if they are not."""
    config, folder = config or AdaptConfig(), Path(data).expanduser()
    usable = read("librispeech", folder).usable
    clips = [clip for split in ("train", "valid") for clip in [each for each in usable if each.split == split][:max_utterances]]
    sound = {clip.id: _sound(folder, clip) for clip in clips}
    path = labels or folder / "labels.jsonl"
    if not path.is_file():
        said = [(clip.id, sound[clip.id], clip.references[0]) for clip in clips]
        rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        make_labels(path, said, base=config.base, rank=rank, ranks=ranks, report=report)
    found = examples(clips, sound, read_labels(path), config.base)
    if not found["train"] or not found["valid"]:
        raise CorpusError(f"{path}: no utterance of the train or of the valid split has a label: delete it, and it is made again")
    return AdaptTask(config, found)


def examples(clips: Sequence[Clip], sound: Mapping[str, Sound], labels: Mapping[str, Label], base: str) -> dict[str, list[SpeechExample]]:
    """Every utterance alone, and joined with those that follow it in its chapter to at most 30 s."""
    tokenizer = whisper_decoder(load_weights(base)).tokenizer
    assert tokenizer is not None
    said = {
        clip.id: tuple(SpokenWord(tuple(tokenizer.encode(" " + word)), _heard_s(word, a, b)) for word, a, b in labels[clip.id].words)
        for clip in clips
        if clip.id in labels
    }
    found: dict[str, list[SpeechExample]] = {"train": [], "valid": []}
    run, run_s = list[Clip](), 0.0
    for clip in [*clips, None]:
        follows = clip is not None and run and clip.stream == run[-1].stream and clip.start_s == run[-1].end_s and clip.id in said
        if run and (not follows or clip is None or run_s + clip.duration_s > 30):
            if len(run) > 1:
                found[run[0].split].append(SpeechExample(tuple((sound[c.id], said[c.id]) for c in run), joined=True))
            run, run_s = [], 0.0
        if clip is not None and clip.id in said:
            found[clip.split].append(SpeechExample(((sound[clip.id], said[clip.id]),), joined=False))
            run, run_s = [*run, clip], run_s + clip.duration_s
    return found


def _heard_s(word: str, begin_s: float, end_s: float) -> float:
    """When enough of a word has been heard to write it."""
    begin_s = max(0.0, begin_s - LATE_S)
    return begin_s + HEARD * min(end_s - LATE_S - begin_s, WORD_S + LETTER_S * len(word))


def _sound(folder: Path, clip: Clip) -> Sound:
    samples_S = np.concatenate([chunk.samples for chunk in read_audio(folder / clip.media)])
    return np.clip(np.round(samples_S * 32768), -32768, 32767).astype(np.int16)
