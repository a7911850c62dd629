"""Whisper adapted to the dial: an encoder in blocks of any size and a decoder on horizons, trained together by low-rank adapters.

An example is a stretch of speech of at most one span: consecutive utterances of one speaker, begun and ended anywhere. It is heard in
blocks, whose size is drawn, and the last tokens before each block are encoded again with it (`Versions`). Each text row reads the source
up to a horizon that is drawn too: by a schedule, or around the moment its word has been heard. A word that was not heard by then is
not to be guessed: until it is heard, the end of the text stands for "not yet".

The unadapted Whisper teaches besides the labels: its features of the whole clean recording, and its choice of each token.

Shape suffixes: C mel bins, L mel frames, T source tokens, M versions of tokens, N text rows, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from zendaya.nn.whisper import has_bfloat16, load_encoder, load_weights, whisper_decoder
from zendaya.records import Clip
from zendaya.schedule import PowerLaw
from zendaya.sources.media import SAMPLE_RATE, Samples, read_audio
from zendaya.training.augment import at_speed, harder, noise
from zendaya.training.labels import Label, Sound, floats, make_labels, read_labels
from zendaya.training.loop import LoopConfig, Report, TrainResult, run
from zendaya.training.state import begin
from zendaya.training.whisper_batch import Versions, encode_batch, encode_versions, log_mel, mel_filters, num_tokens

TOKENS_PER_S = SAMPLE_RATE / TOKEN
SPAN_S = 30.0
LATE_S = 0.1
"""Whisper's attention looks at a word this much after it is said: the median against a forced alignment of LibriSpeech's valid split."""
WORD_S, LETTER_S = 0.12, 0.07
"""A word lasts at most about this long, and this much a letter; what follows it until the next is a pause."""
HEARD = 0.7
"""The share of a word that must have been heard for it to be written."""
SILENCE_S = 2.0
"""Silence after a recording as the unadapted Whisper reads it."""
BLOCKS = ((16, 0.25), (25, 0.3), (50, 0.3), (100, 0.15))
"""Source tokens per block, 0.32 to 2 s, and how often each is drawn."""


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """What is adapted, and to what."""

    base: str = "tiny.en"
    block_s: float = 0.5
    """The block of the adapter where a user names none; training draws it."""
    revise_s: float = 1.0
    """How much is encoded again with each block, twice the block at most; training draws it from a half of that up."""
    overlap_s: float = 5.0
    """How much of a window the next one reads again."""
    ceiling: float = CEILING
    rank: int = 64
    keep: float = 1.0
    """How much of what was learned is kept in what is saved: see `interpolated`."""
    window_tokens: int = 1400
    """W the length head counts for, and the live default: 28 s."""
    max_steps: int = 200
    seed: int = 0
    half_precision: bool = True
    """bfloat16 products where the processor has them, three times as fast."""

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"adapt config: keep must lie above 0 and up to 1: got {self.keep!r}")
        if not 1 <= self.window_tokens <= 1500:
            raise ConfigError(f"adapt config: window_tokens must lie in 1 … 1500: got {self.window_tokens}")


LOOP = LoopConfig(epochs=1, batch_tokens=3400, accumulate=2, learning_rate=1e-3, warmup_steps=12, weight_decay=0.0, log_every=5)
"""How the adapters are optimised: small steps of about two minutes of speech."""


@dataclass(frozen=True, kw_only=True)
class AdaptRecipe:
    """A whole adaptation but its data."""

    name: str = "adapt-tiny.en"
    folder: str = "librispeech_clean"
    """Where the corpus lies under the folder of all data."""
    more: tuple[str, ...] = ("speechocean762",)
    """Corpora that are trained on too, if they lie beside it under these names."""
    adapt: AdaptConfig = dataclasses.field(default_factory=AdaptConfig)
    loop: LoopConfig = LOOP

    @property
    def schedule(self) -> str:
        """Every example draws its own."""
        return "dial"


def train_adapter(
    recipe: AdaptRecipe, *, data: str | Path, out: str | Path, store: str | Path | None = None, resume: bool = False,
    report: Report = lambda _: None, limit: int | None = None,
) -> TrainResult:  # fmt: skip
    """Adapt Whisper on LibriSpeech in `data`: `out` holds best/ and last/ (for `load_adapted`), `store` the readable labels."""
    folder = Path(out)
    config = dataclasses.replace(recipe.adapt, seed=recipe.loop.seed)
    recipe = dataclasses.replace(recipe, adapt=config)
    here = Path(data).expanduser()
    corpora = {"librispeech": here, **{name: path for name in recipe.more if (path := here.parent / name).is_dir()}}
    data_digest = " ".join(read(name, path).digest for name, path in corpora.items())
    signature = {
        "version": zendaya.__version__, "recipe": dataclasses.asdict(recipe), "schedule": recipe.schedule, "data_digest": data_digest,
        "limit": limit,
    }  # fmt: skip
    begin(folder, signature, resume)
    labels = Path(store) if store is not None else folder
    labels.mkdir(parents=True, exist_ok=True)
    task = adapt(corpora, labels=labels, config=config, max_utterances=limit, report=report)
    return run(task, recipe.loop, folder, resume=resume, report=report)


@dataclass(frozen=True)
class SpokenWord:
    """A word to write, the second it begins, and the second at which enough of it has been heard."""

    ids: tuple[int, ...]
    begin_s: float
    heard_s: float

    def moved(self, by_s: float, speed: float = 1.0) -> SpokenWord:
        """The word in sound that was moved, and then played faster."""
        return SpokenWord(self.ids, (self.begin_s + by_s) / speed, (self.heard_s + by_s) / speed)


@dataclass(frozen=True)
class SpeechExample:
    """Utterances one after another: what was said, and when."""

    utterances: tuple[tuple[Sound, tuple[SpokenWord, ...]], ...]
    worded: bool = True
    """Whether it is known what was said; if not, only the features of the sound are learned."""

    @property
    def num_source(self) -> int:
        return min(round(SPAN_S * TOKENS_PER_S), num_tokens(sum(samples_S.size for samples_S, _ in self.utterances)))

    @property
    def num_ids(self) -> int:
        return sum(len(word.ids) for _, words in self.utterances for word in words)


@dataclass
class SpeechSpan:
    """A span of sound as it is heard, the text to write, and what each row of it may read."""

    mel_1CL: Tensor
    clean_1CL: Tensor
    """Of the clean sound, as unadapted Whisper reads it."""
    versions: Versions
    num_source: int
    ids: list[int]
    unheard_N: Tensor
    """Whether the word of each row has not been heard up to its horizon; the last row is the end."""
    horizons_N: Tensor
    buffer: int
    """Source tokens the length head reads."""
    length: int
    """What it should say: the steps of a window of the config's width at this pace."""
    worded: bool
    """Whether the text is known; if not, only features are learned."""


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
            overlap_tokens=round(config.overlap_s * TOKENS_PER_S),
            max_steps=config.max_steps,
            length="inf",
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
        self.half_precision = config.half_precision and has_bfloat16()
        self._teacher = [load_encoder(weights).requires_grad_(False), base.decoder.requires_grad_(False)]  # a list: no part of the module
        self.kept = AdapterConfig(
            base=config.base, base_digest=weights_digest(weights), rank=config.rank, block_s=config.block_s, revise_s=config.revise_s,
            ceiling=config.ceiling, model=model_config,
        )  # fmt: skip

    def forward(self, batch: Sequence[SpeechSpan]) -> dict[str, Tensor]:
        with parametrize.cached(), torch.autocast("cpu", torch.bfloat16, enabled=self.half_precision):
            found = [self._losses(span) for span in batch]
        return {name: torch.stack([each[name] for each in found]).sum() for name in found[0]}

    def _losses(self, span: SpeechSpan) -> dict[str, Tensor]:
        """The losses of one span: padding spans to the longest would be most of the work."""
        values_MD = encode_versions(self.encoder, span.mel_1CL, span.versions).float()
        with torch.no_grad():
            clean_TD = encode_batch(self._teacher[0], span.clean_1CL, block=None)[0, : span.num_source].float()
        heard_M = span.versions.token_M < span.num_source
        apart_MD = (values_MD[heard_M] - clean_TD[span.versions.token_M[heard_M]]) ** 2
        feature = span.num_source * apart_MD.mean() / clean_TD.var()
        if not span.worded:
            # Processes that share a step expect a gradient of every parameter.
            nothing = 0.0 * torch.stack([part.sum() for part in self.model.parameters() if part.requires_grad]).sum()
            return {"nll": nothing, "imitation": nothing, "feature": feature, "length": nothing}
        x_ND, teacher_ND = self._rows(span, values_MD, clean_TD)
        logits_NV = self.model.decoder.project(x_ND).float()
        end = self.model.config.framing.end
        targets_N = torch.tensor([*span.ids, end]).masked_fill(span.unheard_N, end)
        nll = functional.cross_entropy(logits_NV, targets_N, reduction="sum")
        heard_N = ~span.unheard_N
        with torch.no_grad():
            wanted_NV = self._teacher[1].project(teacher_ND[heard_N]).float().softmax(-1)
        imitation = functional.kl_div(logits_NV[heard_N].log_softmax(-1), wanted_NV, reduction="sum")
        final_TD = values_MD[span.versions.final_M].detach()  # the length head learns from the features and does not bend them
        logits_1C = self.model.length_logits(final_TD[None], torch.tensor([span.buffer])).float()
        near_1C = _near(torch.tensor([span.length]), logits_1C.shape[1])
        return {"nll": nll, "imitation": imitation, "feature": feature, "length": -(near_1C * logits_1C.log_softmax(-1)).sum()}

    def _rows(self, span: SpeechSpan, values_MD: Tensor, clean_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden states of the rows that write, of the model on its horizons and of unadapted Whisper on everything."""
        prompt = self.model.config.framing.prompt
        ids_1N = torch.tensor([[*prompt, *span.ids]])
        horizons_N = torch.cat([span.horizons_N[:1].expand(len(prompt) - 1), span.horizons_N])
        visible_NM = span.versions.visible(horizons_N)
        used_M = visible_NM.any(0)
        x_1ND, _ = self.model.decoder.rows(ids_1N, values_MD[None, used_M], horizons_N[None], visible_BNF=visible_NM[None, :, used_M])
        with torch.no_grad():
            teacher_1ND, _ = self._teacher[1].rows(ids_1N, clean_TD[None], torch.full_like(horizons_N, span.num_source)[None])
        return x_1ND[0, len(prompt) - 1 :], teacher_1ND[0, len(prompt) - 1 :]


def _near(length_B: Tensor, classes: int) -> Tensor:
    """Shares of the classes near a length, a tenth of it wide: a text one token longer is no other text."""
    away_BC = (torch.arange(1, classes + 1) - length_B[:, None]) / (0.1 * length_B[:, None] + 0.5)
    return (-0.5 * away_BC**2).softmax(-1)


class AdaptTask:
    """The task of the training loop: examples drawn into batches, the losses, what is saved."""

    weights: Mapping[str, float] = {"nll": 0.7, "imitation": 0.5, "feature": 0.5, "length": 0.05}

    def __init__(self, config: AdaptConfig, examples: Mapping[str, Sequence[SpeechExample]]) -> None:
        self.config, self.examples = config, {split: list(chosen) for split, chosen in examples.items()}
        self._adapting = Adapting(config)
        self.module: nn.Module = self._adapting
        self._filters_CF = mel_filters(self._adapting.encoder.config.num_mel_bins)

    def sizes(self, split: str) -> list[tuple[int, int]]:
        return [(example.num_source, example.num_ids) for example in self.examples[split]]

    def counts(self, split: str, indices: list[int]) -> dict[str, int]:
        chosen = [self.examples[split][index] for index in indices]
        rows = max(1, sum(example.num_ids + 1 for example in chosen if example.worded))
        worded = max(1, sum(example.worded for example in chosen))
        return {"nll": rows, "imitation": rows, "feature": sum(example.num_source for example in chosen), "length": worded}

    def collate(self, split: str, indices: list[int], rng: np.random.Generator) -> list[SpeechSpan]:
        """A batch of examples; those of the valid split are cut and scheduled the same each time."""
        found = []
        for index in indices:
            own = rng if split == "train" else np.random.default_rng([self.config.seed, index])
            found.append(_Draw(self.config, own, self._filters_CF, varied=split == "train").span(self.examples[split][index]))
        return found

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
    """One example made a span at random: its sound, its blocks, its horizons."""

    config: AdaptConfig
    rng: np.random.Generator
    filters_CF: Tensor
    varied: bool
    """Whether the sound is made harder too."""

    def span(self, example: SpeechExample) -> SpeechSpan:
        clean_S, words = self._stretch(example)
        heard_S = harder(self.rng, clean_S) if self.varied else clean_S
        num_source = num_tokens(clean_S.size)
        versions = self._versions(num_source)
        limit = self.config.max_steps - 1
        said = [(token, word) for word in words for token in word.ids][:limit]
        heard = np.array([min(word.heard_s * TOKENS_PER_S, num_source) for _, word in said])
        horizons = self._horizons(heard, num_source, versions)
        pace = (len(said) + 1) / num_source
        length = max(1, min(self.config.max_steps, round(pace * self.config.window_tokens)))
        longest = round(SPAN_S * SAMPLE_RATE)
        silent_S = np.concatenate([clean_S, np.zeros(min(longest - clean_S.size, round(SILENCE_S * SAMPLE_RATE)), np.float32)])
        heard_S = np.concatenate([heard_S, np.zeros(max(0, versions.ends[-1] * TOKEN - heard_S.size), np.float32)])
        return SpeechSpan(
            mel_1CL=log_mel([heard_S], self.filters_CF, block=1, floor=self.config.ceiling - 8.0),
            clean_1CL=log_mel([silent_S], self.filters_CF, block=1, floor=None),
            versions=versions,
            num_source=num_source,
            ids=[token for token, _ in said],
            unheard_N=torch.from_numpy(np.append(heard > horizons[:-1], False)),
            horizons_N=torch.from_numpy(horizons),
            buffer=min(num_source, PowerLaw(float(self.rng.uniform(0.3, 1.5))).buffer(self.config.window_tokens, self.config.max_steps)),
            length=length,
            worded=example.worded,
        )

    # The sound.

    def _stretch(self, example: SpeechExample) -> tuple[Samples, list[SpokenWord]]:
        """Sound and words of a part of an example: from its beginning or between two words, to its end or to anywhere."""
        samples_S, words = self._joined(example)
        size_s = samples_S.size / SAMPLE_RATE
        start_s, end_s = 0.0, size_s
        if words and self._chance(0.5):
            start_s = max(0.0, words[int(self.rng.integers(0, (len(words) + 2) // 3))].begin_s - self.rng.uniform(0.02, 0.15))
        if self._chance(0.3):
            end_s = self.rng.uniform(min(start_s + 3.0, size_s), size_s)
        samples_S = samples_S[int(start_s * SAMPLE_RATE) : max(int(start_s * SAMPLE_RATE) + TOKEN, int(end_s * SAMPLE_RATE))]
        words = [word.moved(-start_s) for word in words if word.begin_s >= start_s and word.heard_s <= end_s]
        if self.varied and self._chance(0.3):
            speed = float(self.rng.uniform(0.87, 1.15))
            samples_S, words = at_speed(samples_S, speed), [word.moved(0.0, speed) for word in words]
        before_S, after_S = self._pause(0.3, 0.6), self._pause(0.4, 2.2)
        longest = round(SPAN_S * SAMPLE_RATE)
        samples_S = np.concatenate([before_S, samples_S, after_S])[:longest]
        moved = [word.moved(before_S.size / SAMPLE_RATE) for word in words]
        return samples_S, [word for word in moved if word.heard_s * SAMPLE_RATE <= samples_S.size]

    def _joined(self, example: SpeechExample) -> tuple[Samples, list[SpokenWord]]:
        """Samples and words of the utterances back to back, with a pause between two of them now and then."""
        parts, words, num_samples = list[Samples](), list[SpokenWord](), 0
        for index, (utterance_S, said) in enumerate(example.utterances):
            if index:
                parts.append(self._pause(0.15, 3.0))
                num_samples += parts[-1].size
            words += [word.moved(num_samples / SAMPLE_RATE) for word in said]
            parts.append(floats(utterance_S))
            num_samples += utterance_S.size
        return np.concatenate(parts), words

    def _pause(self, share: float, longest_s: float) -> Samples:
        """A pause now and then: faint noise, or nothing at all."""
        if not self.varied or not self._chance(share):
            return np.zeros(0, np.float32)
        count = int(self.rng.uniform(0.05, longest_s) * SAMPLE_RATE)
        if self._chance(0.2):
            return np.zeros(count, np.float32)
        return np.float32(10 ** self.rng.uniform(-5, -2.5)) * noise(self.rng, count)

    # What is heard when.

    def _versions(self, num_source: int) -> Versions:
        """Blocks of a drawn size; the first may be longer, as where a window begins in speech that was heard before."""
        sizes, shares = zip(*BLOCKS, strict=True)
        block = int(self.rng.choice(sizes, p=shares))
        most = min(round(self.config.revise_s * TOKENS_PER_S), 2 * block)
        revise = most if self._chance(0.7) else int(self.rng.integers(most // 2, most + 1))
        if block >= 100 and self._chance(0.5):
            revise = 0
        first = int(self.rng.integers(block, 400)) if self._chance(0.5) else block
        ends = [first, *range(first + block, num_source + block, block)]
        while len(ends) > 1 and ends[-2] >= num_source:
            ends.pop()
        return Versions(tuple(min(end, round(SPAN_S * TOKENS_PER_S)) for end in ends), revise)

    def _horizons(self, heard: np.ndarray[Any, np.dtype[np.float64]], num_source: int, versions: Versions) -> np.ndarray[Any, Any]:
        """Source tokens that each row may read, the row of the end last; they never fall."""
        kind = self.rng.random()
        count = heard.size + 1
        if kind < 0.15:
            wanted = np.full(count, float(num_source))
        elif kind < 0.4:
            width = self.config.window_tokens if self._chance(0.6) else int(self.rng.integers(400, 1501))
            steps = max(1, round(count / num_source * width * math.exp(self.rng.uniform(-0.2, 0.2))))
            head = 0 if self._chance(0.5) else int(self.rng.integers(5, 101))
            law = PowerLaw(int(self.rng.integers(2, 31)) / 20, head=head)
            wanted = law.horizons(width, steps, num_steps=count).astype(np.float64)
        else:
            wanted = self._around(heard, num_source, versions)
        wanted = np.maximum.accumulate(np.clip(np.ceil(wanted), 1, num_source))
        wanted[-1] = num_source if self._chance(0.7) else wanted[-1]
        return wanted.astype(np.int64)

    def _around(self, heard: np.ndarray[Any, np.dtype[np.float64]], num_source: int, versions: Versions) -> np.ndarray[Any, Any]:
        """The ends of blocks some time after each word was heard; now and then before it."""
        delay = 10 ** self.rng.uniform(-0.5, 2.1)  # 0.006 to 2.5 s
        late = heard + delay * self.rng.uniform(0.7, 1.3, heard.size)
        early = heard - self.rng.uniform(0, 40, heard.size)
        words = np.where(self.rng.random(heard.size) < 0.25, early, late)
        ends = np.array([*versions.ends])
        place = np.searchsorted(ends, np.append(words, num_source))
        return ends[np.minimum(place, ends.size - 1)].astype(np.float64)

    def _chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)


def adapt(
    corpora: Mapping[str, Path], *, labels: Path, config: AdaptConfig | None = None, max_utterances: int | None = None,
    report: Report = lambda _: None,
) -> AdaptTask:  # fmt: skip
    """The task of adapting Whisper on corpora of speech, by name and folder; readable transcripts are kept in `labels`, made if missing."""
    config = config or AdaptConfig()
    found: dict[str, list[SpeechExample]] = {"train": [], "valid": []}
    for name, folder in corpora.items():
        for split, some in _examples_of(name, folder, labels, config, max_utterances, report).items():
            found[split] += some
    if not found["train"] or not found["valid"]:
        raise CorpusError(f"{labels}: no utterance of the train or of the valid split has a label: delete it, and labels are made again")
    return AdaptTask(config, found)


def _examples_of(
    name: str, folder: Path, labels: Path, config: AdaptConfig, max_utterances: int | None, report: Report
) -> dict[str, list[SpeechExample]]:
    corpus = read(name, folder)
    clips = [clip for split in ("train", "valid") for clip in [each for each in corpus.usable if each.split == split][:max_utterances]]
    sound = {clip.id: _sound(folder, clip) for clip in clips}
    if not any(clip.split == "valid" for clip in clips):  # a corpus without a valid split: its sound alone is learned from
        wordless = [tuple((sound[clip.id], ()) for clip in together) for together in _runs(clips)]
        return {"train": [SpeechExample(each, worded=False) for each in wordless], "valid": []}
    # Labels of fewer utterances are no others'.
    of = hashlib.sha256(f"{config.base} {corpus.digest} {max_utterances}".encode()).hexdigest()[:12]
    path = labels / f"labels-{of}.jsonl"
    if not path.is_file():
        said = [(clip.id, sound[clip.id], clip.references[0]) for clip in clips]
        rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        make_labels(path, said, base=config.base, rank=rank, ranks=ranks, report=report)
    return examples(clips, sound, read_labels(path), config.base)


def examples(clips: Sequence[Clip], sound: Mapping[str, Sound], labels: Mapping[str, Label], base: str) -> dict[str, list[SpeechExample]]:
    """Utterances of a speaker that follow one another, joined to at most a span."""
    tokenizer = whisper_decoder(load_weights(base)).tokenizer
    assert tokenizer is not None
    said = {
        clip.id: tuple(_spoken(tokenizer.encode(" " + word), word, a, b) for word, a, b in labels[clip.id].words)
        for clip in clips
        if clip.id in labels
    }
    found: dict[str, list[SpeechExample]] = {"train": [], "valid": []}
    for together in _runs([clip for clip in clips if clip.id in said]):
        found[together[0].split].append(SpeechExample(tuple((sound[clip.id], said[clip.id]) for clip in together)))
    return found


def _runs(clips: Sequence[Clip]) -> Iterator[list[Clip]]:
    """Neighbouring clips of a stream and split, joined up to the length of a span less room for pauses."""
    together, together_s = list[Clip](), 0.0
    for clip in clips:
        follows = together and (clip.stream, clip.split) == (together[-1].stream, together[-1].split)
        if together and (not follows or together_s + clip.duration_s > SPAN_S - 2.0):
            yield together
            together, together_s = [], 0.0
        together, together_s = [*together, clip], together_s + clip.duration_s
    if together:
        yield together


def _spoken(ids: Sequence[int], word: str, begin_s: float, end_s: float) -> SpokenWord:
    """A word and when enough of it has been heard to write it."""
    begin_s = max(0.0, begin_s - LATE_S)
    return SpokenWord(tuple(ids), begin_s, begin_s + HEARD * min(end_s - LATE_S - begin_s, WORD_S + LETTER_S * len(word)))


def _sound(folder: Path, clip: Clip) -> Sound:
    samples_S = np.concatenate([chunk.samples for chunk in read_audio(folder / clip.media)])
    return np.clip(np.round(samples_S * 32768), -32768, 32767).astype(np.int16)
