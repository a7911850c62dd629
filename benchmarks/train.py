"""Training throughput beside `nn.TransformerDecoder` and Hugging Face's T5: target tokens a second, forward to optimiser step.

python benchmarks/train.py [--batch-tokens 8192] [--rounds 5] [--threads 1] [--data DIR] [--json FILE] [--quick]

1. Fixed lengths, at the paper's shape and a small one: every contender trains on the same full batches under the same horizons.
2. The real lengths of MSVD and LibriSpeech (values are random, they do not change the speed): batches of like length against
   random ones with every sequence padded to the longest of the corpus, as a plain script does.
Contenders take turns, batch by batch, so that a busy machine slows all of them; a batch counts with the median of its rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad
from torch.profiler import ProfilerActivity, profile

import zendaya
from zendaya import Model, PowerLaw
from zendaya.data.corpora import registry as corpora
from zendaya.nn.config import DecoderConfig, ModelConfig
from zendaya.nn.presets import preset
from zendaya.nn.tokenizer import Tokenizer
from zendaya.training.buckets import plan

SCHEDULE = PowerLaw(0.3)
TOKENS_PER_S = 12.5
"""Source tokens a second of speech: four of Whisper's frames each."""
WANTED = {"nn.TransformerDecoder": 1.35, "T5": 1.0, "nn.TransformerDecoder, padded": 2.0}
"""How many times as fast as each the library means to be."""

TextExample = tuple[Tensor, list[int]]


class Ours(nn.Module):
    """The library's own training path, or, with all logits made, the one before `Model.loss`."""

    def __init__(self, config: ModelConfig, *, all_logits: bool = False) -> None:
        super().__init__()
        self.model, self.all_logits = Model(config), all_logits

    def forward(self, examples: Sequence[TextExample]) -> Tensor:
        """Mean cross-entropy of the examples."""
        batch = self.model.batch([source for source, _ in examples], [ids for _, ids in examples], SCHEDULE)
        if self.all_logits:
            return cross_entropy(self.model(batch).flatten(0, 1), batch.targets_BN.flatten())
        return self.model.loss(batch) / num_tokens(examples)


class Plain(nn.Module):
    """What a script would write: `nn.TransformerDecoder` between a tied embedding and a source projection, horizons as a memory mask."""

    def __init__(self, config: DecoderConfig, longest: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.heads, self.longest = config.heads, longest
        self.tokens, self.positions = nn.Embedding(config.vocab_size, config.dim), nn.Embedding(config.max_rows, config.dim)
        self.source, self.source_positions = nn.Linear(config.source_dim, config.dim), nn.Embedding(config.max_source, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        before = config.norm == "pre"
        layer = nn.TransformerDecoderLayer(
            config.dim, config.heads, config.ffn_dim, config.dropout, config.activation, batch_first=True, norm_first=before
        )
        self.decoder = nn.TransformerDecoder(layer, config.layers, nn.LayerNorm(config.dim) if before else None)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, examples: Sequence[TextExample]) -> Tensor:
        """Mean cross-entropy of the examples."""
        ids_BN, targets_BN, source_BFE, horizons_BN = padded(examples, self.longest)
        row, place = torch.arange(ids_BN.shape[1]), torch.arange(source_BFE.shape[1])
        rows_BND = self.decoder(
            self.dropout(self.tokens(ids_BN) + self.positions(row)),
            self.source(source_BFE) + self.source_positions(place),
            tgt_mask=row > row[:, None],
            memory_mask=(place >= horizons_BN[..., None]).repeat_interleave(self.heads, 0),
            tgt_is_causal=True,
        )
        return cross_entropy(linear(rows_BND, self.tokens.weight).flatten(0, 1), targets_BN.flatten())


class T5(nn.Module):
    """The decoder stack of Hugging Face's T5 with random weights, tied, on a source projection; horizons as its encoder mask."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5Stack

        self.scale = config.dim**-0.5
        self.source = nn.Linear(config.source_dim, config.dim)
        self.stack = T5Stack(
            T5Config(
                vocab_size=config.vocab_size, d_model=config.dim, d_kv=config.head_dim, d_ff=config.ffn_dim, num_layers=config.layers,
                num_heads=config.heads, dropout_rate=config.dropout, is_decoder=True, use_cache=False,
            )
        )  # fmt: skip

    def forward(self, examples: Sequence[TextExample]) -> Tensor:
        """Mean cross-entropy of the examples."""
        ids_BN, targets_BN, source_BFE, horizons_BN = padded(examples, None)
        licence_B1NF = (torch.arange(source_BFE.shape[1]) < horizons_BN[..., None])[:, None]
        rows_BND = self.stack(input_ids=ids_BN, encoder_hidden_states=self.source(source_BFE), encoder_attention_mask=licence_B1NF)[0]
        return cross_entropy(linear(rows_BND * self.scale, self.stack.embed_tokens.weight).flatten(0, 1), targets_BN.flatten())


def padded(examples: Sequence[TextExample], longest: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, targets, sources and horizons of examples, padded to the longest of them or to `longest` (source, text)."""
    num_source, num_rows = longest or (max(len(source) for source, _ in examples), max(len(ids) + 1 for _, ids in examples))
    ids_BN = torch.stack([pad(torch.tensor([1, *ids]), (0, num_rows - len(ids) - 1)) for _, ids in examples])
    targets_BN = torch.stack([pad(torch.tensor([*ids, 2]), (0, num_rows - len(ids) - 1), value=-100) for _, ids in examples])
    source_BFE = torch.stack([pad(source, (0, 0, 0, num_source - len(source))) for source, _ in examples])
    lengths = ([len(source) for source, _ in examples], [len(ids) + 1 for _, ids in examples])
    return ids_BN, targets_BN, source_BFE, torch.from_numpy(SCHEDULE.horizons(*lengths, num_steps=num_rows))


def num_tokens(examples: Sequence[TextExample]) -> int:
    """Target tokens, the ends counted."""
    return sum(len(ids) + 1 for _, ids in examples)


class Contender:
    """A model, its optimiser, the batches it trains on, and how long each took."""

    def __init__(self, name: str, model: nn.Module, batches: Sequence[Sequence[TextExample]]) -> None:
        self.name, self.model, self.batches = name, model.train(), batches
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.seconds: list[list[float]] = [[] for _ in batches]
        self.cpu_seconds: list[list[float]] = [[] for _ in batches]
        self.peak_mib = 0.0

    def step(self, place: int) -> None:
        self.optimiser.zero_grad()
        self.model(self.batches[place]).backward()
        self.optimiser.step()

    def timed_step(self, place: int) -> None:
        begun, begun_cpu = time.perf_counter(), time.process_time()
        self.step(place)
        self.seconds[place].append(time.perf_counter() - begun)
        self.cpu_seconds[place].append(time.process_time() - begun_cpu)

    def warm_up(self) -> None:
        """A step untimed, and one whose peak of allocated memory is taken, on the batch with the most to it."""
        place = max(range(len(self.batches)), key=lambda i: num_tokens(self.batches[i]))
        self.step(place)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            self.step(place)
        kineto = record.profiler.kineto_results if record.profiler else None
        changes = [event for event in kineto.events() if event.name() == "[memory]"] if kineto else []
        held = np.cumsum([event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())] or [0])
        self.peak_mib = float(held.max()) / 2**20

    def rate(self, seconds: list[list[float]]) -> float:
        """Target tokens a second, each batch at the median of its rounds."""
        return sum(map(num_tokens, self.batches)) / sum(map(median, seconds))

    def result(self) -> dict[str, float]:
        best = max(num_tokens(batch) / min(times) for batch, times in zip(self.batches, self.seconds, strict=True))
        return {
            "tokens_per_s": self.rate(self.seconds),
            "tokens_per_cpu_s": self.rate(self.cpu_seconds),
            "peak_tokens_per_s": best,
            "peak_mib": self.peak_mib,
            "num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }


def compare(title: str, contenders: Sequence[Contender], rounds: int, *, judged: bool) -> dict[str, Any]:
    """Let the contenders take turns, print how they did, and give their results and the ratios of the first to the others."""
    print(f"\n{title}")
    for contender in contenders:
        contender.warm_up()
    for _ in range(rounds):
        for place in range(max(len(contender.batches) for contender in contenders)):
            for contender in contenders:
                if place < len(contender.batches):
                    contender.timed_step(place)
    results = {contender.name: contender.result() for contender in contenders}
    ours = results[contenders[0].name]
    ratios = {name: ours["tokens_per_s"] / result["tokens_per_s"] for name, result in results.items() if result is not ours}
    cpu_ratios = {name: ours["tokens_per_cpu_s"] / result["tokens_per_cpu_s"] for name, result in results.items() if result is not ours}
    for name, result in results.items():
        line = f"  {name:<30}{result['tokens_per_s']:8.0f} tokens/s (peak {result['peak_tokens_per_s']:.0f})"
        line += f", a step holds {result['peak_mib']:.0f} MiB"
        if name in ratios:
            line += f"; ours {ratios[name]:.2f}× ({cpu_ratios[name]:.2f}× by CPU time)"
            if judged and name in WANTED:
                line += f", wanted {WANTED[name]:g}×: {'met' if ratios[name] >= WANTED[name] else 'MISSED'}"
        print(line, flush=True)
    return {"results": results, "ratios": ratios, "cpu_ratios": cpu_ratios}


def fixed(name: str, batch_tokens: int, rounds: int, seed: int) -> dict[str, Any]:
    """Part 1: full windows and the longest texts of a preset."""
    config = preset(name)
    shape, generator = config.decoder, torch.Generator().manual_seed(seed)
    num_clips = max(1, batch_tokens // (config.window_tokens + config.max_steps))
    batch = [
        (
            torch.randn(config.window_tokens, shape.source_dim, generator=generator),
            torch.randint(4, shape.vocab_size, (config.max_steps - 1,), generator=generator).tolist(),
        )
        for _ in range(num_clips)
    ]
    contenders = [
        Contender("ours", Ours(config), [batch]),
        Contender("ours, all logits", Ours(config, all_logits=True), [batch]),
        Contender("nn.TransformerDecoder", Plain(shape), [batch]),
    ]
    try:
        contenders.append(Contender("T5", T5(shape), [batch]))
    except ImportError as error:
        print(f"T5 is left out: {error}")
    title = f"{name}: d={shape.dim}, {shape.layers} layers, F={config.window_tokens}, N={config.max_steps}, {num_clips} clips a batch"
    return compare(title, contenders, rounds, judged=name != "tiny")


def msvd(clip: zendaya.records.Clip) -> list[tuple[int, str]]:
    """(source tokens, text) of every caption of a clip."""
    return [(clip.num_source_tokens or 1, text) for text in clip.references]


def librispeech(clip: zendaya.records.Clip) -> list[tuple[int, str]]:
    """(source tokens, text) of an utterance."""
    return [(math.ceil(clip.duration_s * TOKENS_PER_S), text) for text in clip.references]


REAL: dict[str, tuple[Callable[[zendaya.records.Clip], list[tuple[int, str]]], int]] = {
    "msvd": (msvd, 3000),
    "librispeech": (librispeech, 1000),
}
"""What becomes an example, and the size of the vocabulary, a corpus."""


def real(name: str, folder: Path, batch_tokens: int, rounds: int, num_batches: int, seed: int, limit: int | None) -> dict[str, Any]:
    """Part 2: the lengths of a corpus, in buckets and not."""
    reading = corpora.read(name, folder)
    examples_of, vocab_size = REAL[name]
    pairs = [pair for clip in reading.usable if clip.split == "train" for pair in examples_of(clip)][:limit]
    tokenizer = Tokenizer.train((text for _, text in pairs), vocab_size)
    texts = [tokenizer.encode(text) for _, text in pairs]
    sizes = [(num_source, len(ids) + 1) for (num_source, _), ids in zip(pairs, texts, strict=True)]
    longest = (max(size[0] for size in sizes), max(size[1] for size in sizes))
    config = preset("small" if limit is None else "tiny")
    shape = dataclasses.replace(config.decoder, vocab_size=vocab_size, max_source=longest[0], max_rows=longest[1] + 1)
    config = dataclasses.replace(config, decoder=shape, window_tokens=longest[0], max_steps=longest[1], history=False)
    rng, batch_tokens = np.random.default_rng(seed), max(batch_tokens, sum(longest))
    alike = plan(sizes, batch_tokens, rng)
    by_chance = np.array_split(rng.permutation(len(sizes)), math.ceil(len(sizes) / (batch_tokens // sum(longest))))

    def drawn(batches: Sequence[Sequence[int]]) -> list[list[TextExample]]:
        return [[(torch.randn(sizes[i][0], shape.source_dim), texts[i]) for i in batch] for batch in batches[:num_batches]]

    def filled(batches: Sequence[Sequence[int]]) -> float:
        rows = sum(sum(sizes[i]) for batch in batches for i in batch)
        return rows / sum(len(batch) * (max(sizes[i][0] for i in batch) + max(sizes[i][1] for i in batch)) for batch in batches)

    title = (
        f"{name}: {len(sizes)} examples, F median {median(s[0] for s in sizes):g}, longest {longest[0]}, N median "
        f"{median(s[1] for s in sizes):g}, longest {longest[1]}; {filled(alike):.0%} of a bucketed batch is filled, "
        f"{sum(map(sum, sizes)) / len(sizes) / sum(longest):.0%} of one padded to the longest; data sha256:{reading.digest[:16]}"
    )
    contenders = [
        Contender("ours, in buckets", Ours(config), drawn(alike)),
        Contender("nn.TransformerDecoder, padded", Plain(shape, longest), drawn([batch.tolist() for batch in by_chance])),
    ]
    return {
        "digest": reading.digest,
        "longest": longest,
        "filled": filled(alike),
        **compare(title, contenders, rounds, judged=limit is None),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run both parts, print them, and give everything that was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--batch-tokens", type=int, default=8192, help="padded source tokens and text rows of a batch: the trainer's default"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-batches", type=int, default=6, help="batches of part 2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["libriheavy", "small", *REAL], help="one comparison alone")
    shared = Path(__file__).resolve().parents[1] / "../shared/data"
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("ZENDAYA_DATA") or shared), help="folder of msvd/ and librispeech/"
    )
    parser.add_argument("--json", type=Path, help="write what was measured there")
    parser.add_argument("--quick", action="store_true", help="a smoke run: a tiny model, one round, ratios that mean nothing")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.batch_tokens, arguments.rounds, arguments.num_batches = 200, 1, 2
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    measured: dict[str, Any] = {
        "version": zendaya.__version__, "torch": torch.__version__, "threads": arguments.threads, "cores": os.cpu_count(),
        "load": os.getloadavg()[0], "seed": arguments.seed, "schedule": str(SCHEDULE), "batch_tokens": arguments.batch_tokens,
        "rounds": arguments.rounds, "quick": arguments.quick, "fixed": {}, "real": {},
    }  # fmt: skip
    print(
        f"zendaya {zendaya.__version__}, torch {torch.__version__}, {arguments.threads} of {os.cpu_count()} cores "
        f"(load {measured['load']:.1f}), seed {arguments.seed}, {SCHEDULE}, batches of {arguments.batch_tokens} tokens, "
        f"{arguments.rounds} rounds"
    )
    for name in ["tiny"] if arguments.quick else ["libriheavy", "small"]:
        if arguments.only in (None, name):
            measured["fixed"][name] = fixed(name, arguments.batch_tokens, arguments.rounds, arguments.seed)
    for name in REAL:
        if arguments.only not in (None, name):
            continue
        if not (arguments.data / name).is_dir():
            print(f"\n{name} is skipped: {arguments.data / name} is not here (--data or ZENDAYA_DATA say where it is)")
            continue
        measured["real"][name] = real(
            name, arguments.data / name, arguments.batch_tokens, arguments.rounds, arguments.num_batches, arguments.seed,
            limit=300 if arguments.quick else None,
        )  # fmt: skip
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return measured


if __name__ == "__main__":
    main()
