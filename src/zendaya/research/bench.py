"""Speed of decoding (one stream, many, by the dial, live), of training and of encoding, beside memory bandwidth and other libraries.

Contenders take turns within one run, so that a busy machine slows all of them. A result is the median of its rounds, with the spread
from the first to the third quartile. The time per token is the difference of a long and a short decode, divided by the steps between.
Work done once per decode (encoder, prompt, set-up) drops out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from zendaya.encoders.base import Encoder
from zendaya.encoders.whisper import load_whisper
from zendaya.errors import ConfigError
from zendaya.nn.decoder import Decoder
from zendaya.nn.model import Model
from zendaya.nn.presets import preset
from zendaya.records import listed, option
from zendaya.runtime.batcher import Batcher
from zendaya.runtime.engine import Engine, NativeEngine, Precision, TorchEngine, describe
from zendaya.runtime.engine.native_engine import NativeCache
from zendaya.schedule import PowerLaw
from zendaya.sources.media import SAMPLE_RATE

DecodeSteps = Callable[[int], object]
"""Decodes a number of steps of every stream of a batch, greedily, from the start."""
Say = Callable[[str], None]
PRECISIONS: tuple[Precision, ...] = ("int8", "float32")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how often."""

    preset: str = option("libriheavy", "The model's shape.")
    source: int = option(100, "F, source tokens.")
    steps: int = option(165, "N, decode steps.")
    streams: tuple[int, ...] = option((8, 32, 64), "Numbers of streams decoded together, as 8,32,64.", parse=listed(int))
    live: tuple[int, ...] = option((500,), "Numbers of live streams, as 500; empty for none.", parse=listed(int))
    live_s: float = option(20.0, "Seconds of each live run.")
    gammas: tuple[float, ...] = (0.0, 0.3, 1.0)
    sources: tuple[int, ...] = option((100, 500, 1500), "Source lengths of the table by gamma; empty for none.", parse=listed(int))
    training_tokens: int = option(8192, "Source tokens and text rows of a training batch; 0 leaves training out.")
    encoder_s: float = option(60.0, "Seconds of sound for the encoder; 0 leaves it out.")
    rounds: int = option(5, "Rounds of each measurement.", min=1)
    threads: int = option(2, "Threads of every contender.", min=1)
    seed: int = 0

    def __post_init__(self) -> None:
        limits = preset(self.preset)
        if not 1 <= self.source <= limits.window_tokens or not 8 <= self.steps <= limits.max_steps:
            expected = f"1 … {limits.window_tokens} source tokens and 8 … {limits.max_steps} steps"
            raise ConfigError(f"{self.preset} has windows of {expected}: got {self.source} and {self.steps}")
        if self.training_tokens < 0 or not 0 <= self.encoder_s < math.inf:
            raise ConfigError(f"training_tokens and encoder_s must be at least 0: got {self.training_tokens} and {self.encoder_s}")
        if min(self.rounds, self.threads, *self.streams, *self.live) < 1:
            got = (self.rounds, self.threads, self.streams, self.live)
            raise ConfigError(f"rounds, threads, streams and live must be at least 1: got {', '.join(map(str, got))}")
        if min(self.sources, default=1) < 1:
            raise ConfigError(f"sources must be at least 1: got {self.sources}")
        if not 0 < self.live_s < math.inf:
            raise ConfigError(f"live_s must be a number of seconds above 0: got {self.live_s}")
        for gamma in self.gammas:
            PowerLaw(gamma)  # checks it


class Figures(list[float]):
    """Measured values of one contender, one per round."""

    @property
    def median(self) -> float:
        return median(self)

    @property
    def spread(self) -> list[float]:
        """First and third quartile."""
        return list(np.percentile(self, [25, 75]).tolist())


Peers = Callable[[Plan, int], dict[str, DecodeSteps]]  # other libraries' decoders of the same shape, for a batch


@contextlib.contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """A number of PyTorch threads, for the duration; also a decorator."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_turns(
    contenders: dict[str, DecodeSteps], long: int, rounds: int, *, also: Callable[[], float], short: int = 5
) -> tuple[dict[str, Figures], Figures]:
    """Seconds per step of each contender, and the values of `also`; all take turns round by round, and the first round warms up."""
    figures, more = {name: Figures() for name in contenders}, Figures()
    for number in range(rounds + 1):
        for name, decode in contenders.items():
            brief, whole = _seconds(partial(decode, short)), _seconds(partial(decode, long))
            seconds = (whole - brief) / (long - short)
            if number:  # where noise exceeds the difference, the whole decode's time per step is an upper bound
                figures[name].append(seconds if seconds > 0 else whole / long)
        if number:
            more.append(also())
    return figures, more


def greedy(engine: Engine, source_BTE: torch.Tensor) -> DecodeSteps:
    """A greedy decode of equal streams in lock-step; every step reads the whole source."""
    batch, horizon = source_BTE.shape[:2]

    def decode(steps: int) -> object:
        with torch.inference_mode():
            cache = engine.start(batch)
            engine.read(cache, source_BTE)
            ids_B = torch.ones(batch, dtype=torch.long)
            for _ in range(steps):
                ids_B = engine.step(cache, ids_B, horizon).argmax(-1)
        return ids_B

    return decode


def ours(plan: Plan, decoder: Decoder, batch: int) -> dict[str, DecodeSteps]:
    """Engines of this library on equal streams."""
    source_BTE = torch.randn(batch, plan.source, decoder.config.source_dim, generator=torch.Generator().manual_seed(plan.seed))
    engines = {f"zendaya {p}": NativeEngine(decoder, precision=p, threads=plan.threads) for p in PRECISIONS}
    found = {name: torch_threads(1)(greedy(engine, source_BTE)) for name, engine in engines.items()}  # they have their own threads
    if batch == 1:
        found["zendaya torch"] = torch_threads(plan.threads)(greedy(TorchEngine(decoder), source_BTE))
    return found


@torch_threads(1)
def ragged(plan: Plan, engine: NativeEngine, count: int, rounds: int = 60) -> float:
    """Tokens per second of `count` streams, each at its own step, horizon, length and γ; a stream that ends is replaced."""
    rng = np.random.default_rng(plan.seed)
    waiting = torch.randn(2 * count, plan.source, engine.config.source_dim, generator=torch.Generator().manual_seed(plan.seed))

    def fresh() -> tuple[NativeCache, deque[int], torch.Tensor]:
        steps = int(rng.integers(plan.steps * 6 // 10, plan.steps + 1))
        horizons = PowerLaw(float(rng.choice([0.3, 0.6, 1.0]))).horizons(plan.source, steps).tolist()
        return engine.start(), deque(horizons), waiting[int(rng.integers(2 * count))]

    streams = [fresh() for _ in range(count)]
    ids = [1] * count
    for cache, horizons, source_TE in streams:  # each already somewhere in its text
        written = int(rng.integers(0, len(horizons) // 2 + 1))
        for _ in range(written):
            horizons.popleft()
        if written:
            engine.read(cache, source_TE[None, : horizons[0]])
            engine.prefill(cache, torch.ones(1, written, dtype=torch.long), min(1, horizons[0]))
    started = time.perf_counter()
    for _ in range(rounds):
        for place, (_, horizons, _) in enumerate(streams):
            if not horizons:
                streams[place], ids[place] = fresh(), 1
        now = [horizons.popleft() for _, horizons, _ in streams]
        caches = [cache for cache, _, _ in streams]
        engine.read_many(caches, [source_TE[cache.num_source : h] for (cache, _, source_TE), h in zip(streams, now, strict=True)])
        ids = engine.rows(caches, [[i] for i in ids], now).argmax(-1).tolist()
    return count * rounds / (time.perf_counter() - started)


def by_gamma(plan: Plan, source: int) -> dict[float, tuple[Figures, Figures]]:
    """Milliseconds per token of the int8 engine for each γ, in all and of cross-attention.

    Cross-attention is the difference to a decode that reads nothing, within a round; all γ take turns.
    """
    shape = preset(plan.preset).decoder
    shape = dataclasses.replace(shape, max_source=max(source, shape.max_source))
    engine = NativeEngine(_random(shape, plan.seed), precision="int8", threads=plan.threads)
    source_BTE = torch.randn(1, source, shape.source_dim)
    figures = {gamma: (Figures(), Figures()) for gamma in plan.gammas}
    curves = {gamma: PowerLaw(gamma).horizons(source, plan.steps).tolist() for gamma in plan.gammas}
    for number in range(plan.rounds + 1):
        blind = _decode_ms(engine, source_BTE, [0] * plan.steps)
        for gamma, horizons in curves.items():
            whole = _decode_ms(engine, source_BTE, horizons)
            if number:
                figures[gamma][0].append(whole)
                figures[gamma][1].append(whole - blind)
    return figures


def _decode_ms(engine: NativeEngine, source_BTE: torch.Tensor, horizons: list[int]) -> float:
    """Milliseconds per step of a decode by these horizons; the whole source has been read before."""
    cache, one = engine.start(), torch.ones(1, dtype=torch.long)
    engine.read(cache, source_BTE)
    started = time.perf_counter()
    for horizon in horizons:
        engine.step(cache, one, horizon)
    return (time.perf_counter() - started) / len(horizons) * 1e3


@torch_threads(1)  # PyTorch's threads would spin after each call, on the engine's processors
def live(plan: Plan, engine: NativeEngine, model: Model, count: int) -> dict[str, float]:
    """Sessions fed in real time at 3 source tokens per second, each with its own phase, at γ = 1.

    Lag is the time from the arrival that licensed a token to its emission; `busy` and `engine` are shares of the time spent computing
    and in the engine.
    """
    rng = np.random.default_rng(plan.seed)
    window, rate = model.config.window_tokens, 3.0
    tokens_TE = torch.randn(4 * window, model.config.decoder.source_dim, generator=torch.Generator().manual_seed(plan.seed))
    batcher = Batcher(engine)
    sessions = [batcher.add(model.open(PowerLaw(1), steps=model.config.max_steps, engine=engine)) for _ in range(count)]
    at = window + rng.integers(0, window, count)
    for place, session in enumerate(sessions):  # each already in its second window, so that there is always history
        session.push(tokens_TE[: at[place]], 0.0)
    for _ in batcher.run():
        pass
    gc.freeze()  # as a server does after start: long-lived objects are no longer scanned for garbage
    began = time.perf_counter()
    due = rng.uniform(0, 1 / rate, count)
    lags, busy_s, engine_s, rows, written = list[float](), 0.0, 0.0, 0, 0
    while (now := time.perf_counter() - began) < plan.live_s:
        for place in np.nonzero(due <= now)[0].tolist():
            sessions[place].push(tokens_TE[at[place] % len(tokens_TE)][None], float(due[place]))
            at[place] += 1
            due[place] += 1 / rate
        started = time.perf_counter()
        result = batcher.round()
        ended = time.perf_counter()
        if result.rows:
            busy_s, engine_s, rows = busy_s + ended - started, engine_s + result.engine_s, rows + result.rows
            lags += [ended - began - each.event.arrival_s for each in result.outcomes if each.event is not None]
            written += len(result.outcomes)
        else:
            time.sleep(max(0.0, min(float(due.min()) - (ended - began), 0.01)))
    lag_50, lag_95 = (np.percentile(lags or [0.0], [50, 95]) * 1e3).tolist()
    return {
        "streams": count, "tokens_per_s": written / plan.live_s, "lag_ms_50": lag_50, "lag_ms_95": lag_95, "busy": busy_s / plan.live_s,
        "engine": engine_s / plan.live_s, "rows_per_token": rows / max(1, written),
    }  # fmt: skip


def training(plan: Plan) -> Figures:
    """Text tokens per second of training, forward pass to optimiser step; one batch of full windows per round."""
    config = preset(plan.preset)
    model, generator = Model.from_preset(plan.preset, seed=plan.seed).train(), torch.Generator().manual_seed(plan.seed)
    shape, steps = config.decoder, plan.steps
    count = max(1, plan.training_tokens // (plan.source + steps))
    sources = [torch.randn(plan.source, shape.source_dim, generator=generator) for _ in range(count)]
    texts = [torch.randint(4, shape.vocab_size, (steps - 1,), generator=generator).tolist() for _ in range(count)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimiser.zero_grad()
        loss = model.loss(model.batch(sources, texts, PowerLaw(0.3))) / (count * steps)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    step()
    return Figures([count * steps / _seconds(step) for _ in range(plan.rounds)])


def encoding(plan: Plan) -> Figures:
    """Speed of Whisper tiny.en on a stream, in multiples of real time: blocks of 1 s, chunks of 0.1 s."""
    encoder: Encoder[Any, Any] = load_whisper("tiny.en", mode="block", block_s=1.0)
    noise = np.random.default_rng(plan.seed).standard_normal(round(plan.encoder_s * SAMPLE_RATE)).astype(np.float32) * 0.05

    def encode() -> None:
        state = encoder.start()
        for first in range(0, len(noise), SAMPLE_RATE // 10):
            encoder.read(state, noise[first : first + SAMPLE_RATE // 10])
        encoder.finish(state)

    return Figures([plan.encoder_s / _seconds(encode) for _ in range(plan.rounds)])


def read_bandwidth(threads: int) -> float:
    """Memory bandwidth in bytes per second: the best of eight sums over 256 MB."""
    data = torch.ones(1 << 26)
    with torch_threads(threads):
        best = min(_seconds(data.sum) for _ in range(8))
    return data.numel() * 4 / best


def bytes_per_token(decoder: Decoder, precision: Precision, *, source: int, rows: float) -> float:
    """Bytes of weights, keys and values that one step of one stream reads."""
    config = decoder.config
    inner = config.heads * config.head_dim
    weights = config.layers * (6 * inner * config.dim + 2 * config.dim * config.ffn_dim) + config.vocab_size * config.dim
    memory = 2 * config.layers * inner * (source + rows)
    return weights + memory * (1 + 4 / config.head_dim) if precision == "int8" else 4 * (weights + memory)  # keys and values have scales


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _random(config: Any, seed: int) -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(config).eval()


def run(plan: Plan, *, peers: Peers | None = None, say: Say = print) -> dict[str, Any]:
    """Measure everything, and print each figure when it is known; the result can be written as JSON."""
    decoder = _random(preset(plan.preset).decoder, plan.seed)
    say(f"engine: {describe()}; {plan.threads} threads; {plan.preset}, F = {plan.source}, N = {plan.steps}")
    bandwidth = read_bandwidth(plan.threads)
    say(f"memory reads {bandwidth / 1e9:.1f} GB/s")
    result: dict[str, Any] = {"plan": dataclasses.asdict(plan), "engine": describe(), "bandwidth_gb_s": bandwidth / 1e9}
    for batch in (1, *plan.streams):
        contenders = {**ours(plan, decoder, batch), **(peers(plan, batch) if peers else {})}
        engine = NativeEngine(decoder, precision="int8", threads=plan.threads)
        figures, rates = in_turns(contenders, plan.steps, plan.rounds, also=partial(ragged, plan, engine, batch))
        result[f"equal {batch}"] = _equal_table(batch, figures, say)
        if batch == 1:
            result |= _roofline(plan, decoder, figures, bandwidth, say)
        else:
            result[f"ragged {batch}"] = _ragged_row(batch, figures, rates, say)
    if plan.sources:
        result["gamma"] = _gamma_table(plan, say)
    if plan.live:
        result |= _live_rows(plan, say)
    for measure, amount, unit in ((training, plan.training_tokens, "text tokens/s"), (encoding, plan.encoder_s, "times real time")):
        if amount:
            figure = torch_threads(plan.threads)(measure)(plan)
            low, high = figure.spread
            result[measure.__name__] = {"median": figure.median, "spread": figure.spread, "unit": unit}
            say(f"\n{measure.__name__}: {figure.median:.0f} {unit} ({low:.0f}–{high:.0f})")
    return result


def _equal_table(batch: int, figures: dict[str, Figures], say: Say) -> dict[str, Any]:
    say(f"\n{batch} equal stream{'s' if batch > 1 else ''}, every step reads the whole source:")
    best = figures["zendaya int8"].median
    table = {}
    for name, figure in figures.items():
        low, high = figure.spread
        rate = batch / figure.median
        table[name] = {"ms_a_step": figure.median * 1e3, "spread_ms": [low * 1e3, high * 1e3], "tokens_per_s": rate}
        measured = f"{figure.median * 1e3:8.2f} ms per step ({low * 1e3:.2f}–{high * 1e3:.2f}), {rate:7.0f} tokens/s"
        say(f"  {name:24} {measured}, {figure.median / best:.2f}× the time of int8")
    return table


def _roofline(plan: Plan, decoder: Decoder, figures: dict[str, Figures], bandwidth: float, say: Say) -> dict[str, Any]:
    rows = {}
    for precision in PRECISIONS:
        touched = bytes_per_token(decoder, precision, source=plan.source, rows=plan.steps / 2)
        share = touched / figures[f"zendaya {precision}"].median / bandwidth
        rows[f"roofline {precision}"] = {"mb_a_token": touched / 1e6, "share": share}
        say(f"  {precision}: {touched / 1e6:.1f} MB per token, {100 * share:.0f} % of the memory's bandwidth")
    return rows


def _ragged_row(batch: int, figures: dict[str, Figures], rates: Figures, say: Say) -> dict[str, Any]:
    low, high = rates.spread
    row: dict[str, Any] = {"tokens_per_s": rates.median, "spread": rates.spread}
    line = f"  {'zendaya int8, ragged':24} {rates.median:38.0f} tokens/s ({low:.0f}–{high:.0f})"
    rivals = {name: batch / figure.median for name, figure in figures.items() if "int8" in name and not name.startswith("zendaya")}
    if rivals:
        rival = max(rivals, key=lambda name: rivals[name])
        row |= {"rival": rival, "ratio": rates.median / rivals[rival]}
        line += f", {rates.median / rivals[rival]:.2f}× the tokens of {rival} on equal streams"
    say(line)
    return row


def _gamma_table(plan: Plan, say: Say) -> dict[str, Any]:
    say("\none stream by the dial, int8: ms per token (spread), of which cross-attention (spread)")
    table: dict[str, Any] = {}
    for source in plan.sources:
        row = by_gamma(plan, source)
        line = table[str(source)] = dict[str, Any]()
        for gamma, (whole, cross) in row.items():
            line[str(gamma)] = {"ms": whole.median, "spread_ms": whole.spread, "cross_ms": cross.median, "cross_spread_ms": cross.spread}
            spreads = ["–".join(f"{value:.2f}" for value in figure.spread) for figure in (whole, cross)]
            say(f"  F = {source:5}, γ = {gamma:<4g} {whole.median:.2f} ({spreads[0]}), {cross.median:.2f} ({spreads[1]})")
        if {0.0, 1.0} <= row.keys() and row[0.0][1].median > 0:
            line["ratio"] = ratio = row[1.0][1].median / row[0.0][1].median
            say(f"  F = {source:5}: cross-attention at γ = 1 takes {ratio:.2f} of the time at γ = 0")
    return table


def _live_rows(plan: Plan, say: Say) -> dict[str, Any]:
    framing, rows = preset(plan.preset).framing, {}
    endless = dataclasses.replace(framing, suppress=(*framing.suppress, framing.end))  # no text ends early: the most work possible
    model = Model.from_preset(plan.preset, seed=plan.seed, framing=endless)
    engine = NativeEngine(model.decoder, precision="int8", threads=plan.threads)
    for count in plan.live:
        rows[f"live {count}"] = found = live(plan, engine, model, count)
        say(
            f"\n{count} live streams, 3 source tokens per second each: {found['tokens_per_s']:.0f} tokens/s, "
            f"lag {found['lag_ms_50']:.0f} ms (median), {found['lag_ms_95']:.0f} ms (95 %), computing {100 * found['busy']:.0f} % of the "
            f"time, in the engine {100 * found['engine']:.0f} %, {found['rows_per_token']:.2f} rows per token"
        )
    return rows
