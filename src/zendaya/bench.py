"""How fast it is: decoding one stream, many, by the dial, live, beside the memory's speed and, if wanted, its peers; training; encoding.

Contenders take turns within one run, so that a busy machine slows all of them; a result is the median of its rounds, with the spread
from the first to the third quartile. A token's time is that of a long decode less that of a short one, over the steps between: what
happens once a decode (an encoder, a prompt, the set-up of a call) is nobody's advantage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from zendaya.decoder import Decoder
from zendaya.encoders import Encoder
from zendaya.encoders.media import SAMPLE_RATE
from zendaya.encoders.whisper_stream import load_whisper
from zendaya.engine import Engine, NativeEngine, Precision, describe
from zendaya.engine.backend import NativeCache
from zendaya.errors import ConfigError
from zendaya.model import Model, preset
from zendaya.schedule import PowerLaw
from zendaya.scheduler import Scheduler

Decode = Callable[[int], object]
"""Decode so many steps of every stream of a batch from nothing, greedily."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured: the shape and how often."""

    preset: str = "libriheavy"
    source: int = 100
    steps: int = 165
    rounds: int = 5
    threads: int = 2
    streams: tuple[int, ...] = (8, 32, 64)
    live: tuple[int, ...] = (500,)
    live_s: float = 20.0
    gammas: tuple[float, ...] = (0.0, 0.3, 1.0)
    sources: tuple[int, ...] = (100, 500, 1500)
    training_tokens: int = 8192
    """Source tokens and text rows of a training batch; 0: training is not measured."""
    encoder_s: float = 60.0
    """Seconds of sound to encode; 0: the encoder is not measured."""
    seed: int = 0

    def __post_init__(self) -> None:
        limits = preset(self.preset)
        if not 1 <= self.source <= limits.window or not 8 <= self.steps <= limits.max_steps:
            raise ConfigError(
                f"{self.preset} has windows of 1 … {limits.window} source tokens and 8 … {limits.max_steps} steps: "
                f"got {self.source} and {self.steps}"
            )
        if self.training_tokens < 0 or not (math.isfinite(self.encoder_s) and self.encoder_s >= 0):
            raise ConfigError(f"training_tokens and encoder_s are at least 0: got {self.training_tokens} and {self.encoder_s}")
        if min(self.rounds, self.threads, *self.streams, *self.live) < 1:
            raise ConfigError(f"rounds, threads and streams are at least 1: got {self.rounds}, {self.threads}, {self.streams}, {self.live}")
        if min(self.sources, default=1) < 1:
            raise ConfigError(f"sources are lengths of at least 1: got {self.sources}")
        if not (math.isfinite(self.live_s) and self.live_s > 0):
            raise ConfigError(f"live_s is a number of seconds above 0: got {self.live_s}")
        for gamma in self.gammas:
            PowerLaw(gamma)  # says what is wrong with it


@dataclass
class Figures:
    """Measured values of one contender, a round each, in the unit the table says."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        first, _, third = quantiles(self.values, n=4, method="inclusive")
        return first, third


def in_turns(
    contenders: dict[str, Decode], *, long: int, short: int, rounds: int, also: Callable[[], object] = lambda: None
) -> dict[str, Figures]:
    """Seconds a step of each contender, who take turns round by round, `also` the last; one decode of each before does not count."""
    figures = {name: Figures() for name in contenders}
    for number in range(rounds + 1):
        for name, decode in contenders.items():
            started = time.perf_counter()
            decode(short)
            between = time.perf_counter()
            decode(long)
            whole = time.perf_counter() - between
            seconds = (whole - (between - started)) / (long - short)
            if number:  # where noise is more than the difference, what the whole took a step is at least not too little
                figures[name].values.append(seconds if seconds > 0 else whole / long)
        if number:
            also()
    return figures


def greedy(engine: Engine, source_BTE: torch.Tensor) -> Decode:
    """A lock-step greedy decode of equal streams, all of whose source every step reads."""
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


def ours(plan: Plan, decoder: Decoder, batch: int) -> dict[str, Decode]:
    """This library's engines on equal streams."""
    source_BTE = torch.randn(batch, plan.source, decoder.config.source_dim, generator=torch.Generator().manual_seed(plan.seed))
    precisions: tuple[Precision, ...] = ("int8", "float32")
    engines: dict[str, Engine] = {f"zendaya {p}": NativeEngine(decoder, precision=p, threads=plan.threads) for p in precisions}
    found = {name: on_threads(1, greedy(engine, source_BTE)) for name, engine in engines.items()}  # their threads are the engine's own
    if batch == 1:
        found["zendaya torch"] = on_threads(plan.threads, greedy(decoder, source_BTE))
    return found


def on_threads(number: int, decode: Decode) -> Decode:
    """A contender with so many threads of PyTorch, which it leaves as they were."""

    def decode_so(steps: int) -> object:
        with torch_threads(number):
            return decode(steps)

    return decode_so


def ragged(plan: Plan, engine: NativeEngine, count: int, rounds: int, figures: Figures) -> None:
    """Tokens a second of `count` streams, each at its own step, horizon, length and γ; who comes to its end makes room for a new one."""
    with torch_threads(1):
        figures.values.append(_ragged(plan, engine, count, rounds))


def _ragged(plan: Plan, engine: NativeEngine, count: int, rounds: int) -> float:
    rng = np.random.default_rng(plan.seed)
    waiting = torch.randn(2 * count, plan.source, engine.config.source_dim, generator=torch.Generator().manual_seed(plan.seed))

    def fresh() -> tuple[NativeCache, deque[int], torch.Tensor]:
        steps = int(rng.integers(plan.steps * 6 // 10, plan.steps + 1))
        horizons = PowerLaw(float(rng.choice([0.3, 0.6, 1.0]))).horizons(plan.source, steps).tolist()
        return engine.start(), deque(horizons), waiting[int(rng.integers(2 * count))]

    streams = [fresh() for _ in range(count)]
    ids = [1] * count
    for cache, horizons, source_TE in streams:  # each somewhere in its text already
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


def by_gamma(plan: Plan, precision: Precision) -> dict[int, dict[float, tuple[Figures, Figures]]]:
    """For each source length and γ: milliseconds a token, and those of its cross-attention, which a decode that reads nothing lacks.

    All γ of a length, and the decode that reads nothing, take turns round by round; cross-attention's is the difference within a round.
    """
    table: dict[int, dict[float, tuple[Figures, Figures]]] = {}
    for source in plan.sources:
        shape = dataclasses.replace(preset(plan.preset).decoder, max_source=max(source, preset(plan.preset).decoder.max_source))
        engine = NativeEngine(_random(shape, plan.seed), precision=precision, threads=plan.threads)
        source_BTE = torch.randn(1, source, shape.source_dim)
        table[source] = {gamma: (Figures(), Figures()) for gamma in plan.gammas}
        curves = {gamma: PowerLaw(gamma).horizons(source, plan.steps).tolist() for gamma in plan.gammas}
        for number in range(plan.rounds + 1):
            blind = _decode_ms(engine, source_BTE, [0] * plan.steps)
            for gamma, horizons in curves.items():
                whole = _decode_ms(engine, source_BTE, horizons)
                if number:
                    for figure, value in zip(table[source][gamma], (whole, whole - blind), strict=True):
                        figure.values.append(value)
    return table


def _decode_ms(engine: NativeEngine, source_BTE: torch.Tensor, horizons: list[int]) -> float:
    """Milliseconds a step of a decode by these horizons, all of whose source has been read before."""
    cache, one = engine.start(), torch.ones(1, dtype=torch.long)
    engine.read(cache, source_BTE)
    started = time.perf_counter()
    for horizon in horizons:
        engine.step(cache, one, horizon)
    return (time.perf_counter() - started) / len(horizons) * 1e3


@dataclass(frozen=True)
class LiveResult:
    """Streams at the audio geometry: how late their text was, what share of the time was spent computing and what share of it in the
    engine, and how many rows a token took."""

    streams: int
    tokens_per_s: float
    lag_ms_50: float
    lag_ms_95: float
    busy: float
    engine: float
    rows_per_token: float


def live(plan: Plan, engine: NativeEngine, model: Model, count: int) -> LiveResult:
    """Sessions fed in real time: a whole window of source tokens in as many seconds as at 3 a second, each its own phase (γ = 1).

    Lag is from the arrival that licensed a token to when it was written.
    """
    rng = np.random.default_rng(plan.seed)
    window, rate = model.config.window, 3.0
    tokens_TE = torch.randn(4 * window, model.config.decoder.source_dim, generator=torch.Generator().manual_seed(plan.seed))
    scheduler = Scheduler(engine)
    sessions = [scheduler.add(model.open(PowerLaw(1), steps=model.config.max_steps, engine=engine)) for _ in range(count)]
    at = window + rng.integers(0, window, count)
    for place, session in enumerate(sessions):  # each somewhere in its second window already: from now on there is always history
        session.push(tokens_TE[: at[place]], 0.0)
    for _ in scheduler.run():
        pass
    gc.freeze()  # as a server does once it is up: what is there to stay is not searched for garbage again and again
    began = time.perf_counter()
    due = rng.uniform(0, 1 / rate, count)
    lags, busy_s, engine_s, rows, written = list[float](), 0.0, 0.0, 0, 0
    while (now := time.perf_counter() - began) < plan.live_s:
        for place in np.nonzero(due <= now)[0].tolist():
            sessions[place].push(tokens_TE[at[place] % len(tokens_TE)][None], float(due[place]))
            at[place] += 1
            due[place] += 1 / rate
        started = time.perf_counter()
        result = scheduler.round()
        ended = time.perf_counter()
        if result.rows:
            busy_s, engine_s, rows = busy_s + ended - started, engine_s + result.engine_s, rows + result.rows
            lags += [ended - began - each.event.arrival_s for each in result.written if each.event is not None]
            written += len(result.written)
        else:
            time.sleep(max(0.0, min(float(due.min()) - (ended - began), 0.01)))
    lag_50, lag_95 = np.percentile(lags or [0.0], [50, 95]) * 1e3
    shares = busy_s / plan.live_s, engine_s / plan.live_s
    return LiveResult(count, written / plan.live_s, float(lag_50), float(lag_95), *shares, rows / max(1, written))


def live_model(plan: Plan) -> Model:
    """A model of the shape that never ends its text early: the most work its geometry can ask for."""
    config = preset(plan.preset)
    framing = dataclasses.replace(config.framing, suppress=(*config.framing.suppress, config.framing.end))
    return Model.from_preset(plan.preset, seed=plan.seed, framing=framing)


def training(plan: Plan) -> Figures:
    """Text tokens a second that training takes, forward to optimiser step: a batch of full windows a round."""
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

    with torch_threads(plan.threads):
        step()
        return Figures([count * steps / _seconds(step) for _ in range(plan.rounds)])


def encoding(plan: Plan) -> Figures:
    """How many times faster than it sounds Whisper tiny.en encodes a stream in blocks of a second, pushed a tenth at a time."""
    encoder: Encoder[Any, Any] = load_whisper("tiny.en", mode="block", block_s=1.0)
    noise = np.random.default_rng(plan.seed).standard_normal(round(plan.encoder_s * SAMPLE_RATE)).astype(np.float32) * 0.05

    def encode() -> None:
        state = encoder.start()
        for first in range(0, len(noise), SAMPLE_RATE // 10):
            encoder.read(state, noise[first : first + SAMPLE_RATE // 10])
        encoder.finish(state)

    with torch_threads(plan.threads):
        return Figures([plan.encoder_s / _seconds(encode) for _ in range(plan.rounds)])


@contextlib.contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """So many threads of PyTorch meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_bandwidth(threads: int) -> float:
    """Bytes a second that the memory gives: the best of some sums over a quarter of a gigabyte."""
    data = torch.ones(1 << 26)
    with torch_threads(threads):
        best = min(_seconds(data.sum) for _ in range(8))
    return data.numel() * 4 / best


def bytes_per_token(decoder: Decoder, precision: Precision, *, source: int, rows: float) -> float:
    """Weights, keys and values that a step of one stream touches: every matrix once, and what its attention reads."""
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


def run(plan: Plan, *, peers: Callable[[Plan, int], dict[str, Decode]] | None = None, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Everything, said as it is measured; what it gives can be written as JSON."""
    decoder = _random(preset(plan.preset).decoder, plan.seed)
    result: dict[str, Any] = {"plan": dataclasses.asdict(plan), "engine": describe()}
    say(f"engine: {describe()}; {plan.threads} threads; {plan.preset}, F = {plan.source}, N = {plan.steps}")
    bandwidth = read_bandwidth(plan.threads)
    result["bandwidth_gb_s"] = bandwidth / 1e9
    say(f"memory reads {bandwidth / 1e9:.1f} GB/s")
    for batch in (1, *plan.streams):
        contenders = {**ours(plan, decoder, batch), **(peers(plan, batch) if peers else {})}
        engine, rates = NativeEngine(decoder, precision="int8", threads=plan.threads), Figures()
        also = partial(ragged, plan, engine, batch, 60, rates)
        figures = in_turns(contenders, long=plan.steps, short=5, rounds=plan.rounds, also=also)
        say(f"\n{batch} equal stream{'s' if batch > 1 else ''}, every step reads the whole source:")
        best = figures["zendaya int8"].median
        table = {}
        for name, figure in figures.items():
            low, high = figure.spread
            rate = batch / figure.median
            table[name] = {"ms_a_step": figure.median * 1e3, "spread_ms": [low * 1e3, high * 1e3], "tokens_per_s": rate}
            measured = f"{figure.median * 1e3:8.2f} ms a step ({low * 1e3:.2f}–{high * 1e3:.2f}), {rate:7.0f} tokens/s"
            say(f"  {name:24} {measured}, {figure.median / best:.2f}× the time of int8")
        result[f"equal {batch}"] = table
        if batch == 1:
            for precision in ("int8", "float32"):
                touched = bytes_per_token(decoder, precision, source=plan.source, rows=plan.steps / 2)
                share = touched / figures[f"zendaya {precision}"].median / bandwidth
                result[f"roofline {precision}"] = {"mb_a_token": touched / 1e6, "share": share}
                say(f"  {precision}: {touched / 1e6:.1f} MB a token, {100 * share:.0f} % of what the memory reads")
        else:
            result[f"ragged {batch}"] = {"tokens_per_s": rates.median, "spread": list(rates.spread)}
            low, high = rates.spread
            line = f"  {'zendaya int8, ragged':24} {rates.median:38.0f} tokens/s ({low:.0f}–{high:.0f})"
            rivals = {name: batch / figure.median for name, figure in figures.items() if "int8" in name and not name.startswith("zendaya")}
            if rivals:
                rival = max(rivals, key=lambda name: rivals[name])
                result[f"ragged {batch}"] |= {"rival": rival, "ratio": rates.median / rivals[rival]}
                line += f", {rates.median / rivals[rival]:.2f}× the tokens of {rival} on equal streams"
            say(line)
    if plan.sources:
        say("\none stream by the dial, int8: ms a token (spread), of which cross-attention (spread)")
        result["gamma"] = {}
        for source, row in by_gamma(plan, "int8").items():
            result["gamma"][str(source)] = {
                str(gamma): {
                    "ms": whole.median,
                    "spread_ms": list(whole.spread),
                    "cross_ms": cross.median,
                    "cross_spread_ms": list(cross.spread),
                }
                for gamma, (whole, cross) in row.items()
            }
            for gamma, (whole, cross) in row.items():
                spreads = ["–".join(f"{value:.2f}" for value in figure.spread) for figure in (whole, cross)]
                say(f"  F = {source:5}, γ = {gamma:<4g} {whole.median:.2f} ({spreads[0]}), {cross.median:.2f} ({spreads[1]})")
            if {0.0, 1.0} <= row.keys() and row[0.0][1].median > 0:
                ratio = row[1.0][1].median / row[0.0][1].median
                result["gamma"][str(source)]["ratio"] = ratio
                say(f"  F = {source:5}: cross-attention at γ = 1 takes {ratio:.2f} of the time at γ = 0")
    if plan.live:
        model = live_model(plan)
        engine = NativeEngine(model.decoder, precision="int8", threads=plan.threads)
        for count in plan.live:
            with torch_threads(1):  # PyTorch's would spin after each of its calls, on the engine's processors
                outcome = live(plan, engine, model, count)
            result[f"live {count}"] = dataclasses.asdict(outcome)
            say(
                f"\n{count} live streams, 3 source tokens a second each: {outcome.tokens_per_s:.0f} tokens/s, "
                f"lag {outcome.lag_ms_50:.0f} ms (median), "
                f"{outcome.lag_ms_95:.0f} ms (95 %), computing {100 * outcome.busy:.0f} % of the time, "
                f"in the engine {100 * outcome.engine:.0f} %, {outcome.rows_per_token:.2f} rows a token"
            )
    more = ((training, plan.training_tokens, "text tokens/s"), (encoding, plan.encoder_s, "times as fast as it sounds"))
    for measure, amount, unit in more:
        if amount:
            figure = measure(plan)
            low, high = figure.spread
            result[measure.__name__] = {"median": figure.median, "spread": [low, high], "unit": unit}
            say(f"\n{measure.__name__}: {figure.median:.0f} {unit} ({low:.0f}–{high:.0f})")
    return result


def chosen(text: str, kind: Callable[[str], Any]) -> Sequence[Any]:
    """Numbers given as 8,32,64; none for an empty text."""
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"expected numbers with commas between them, as 8,32,64: got {text!r}") from None
