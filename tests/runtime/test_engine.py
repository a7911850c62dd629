"""The native engine: it gives the results of PyTorch, for one stream or many, and nothing beyond a horizon reaches it."""

import ctypes
import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zendaya import Full, Model, PowerLaw, WaitK, ZendayaError
from zendaya.audit import audit
from zendaya.nn.config import DecoderConfig
from zendaya.nn.decoder import AttentionTap, Decoder
from zendaya.runtime.engine import NativeEngine, TorchEngine, describe, engine_for, missing
from zendaya.runtime.engine import native_engine as backend
from zendaya.runtime.policies.alignatt import AlignAtt
from zendaya.runtime.policies.local_agreement import LocalAgreement

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
KERNELS = [] if missing() else NativeEngine.kernels()
EXAMPLES = 12 if "ZENDAYA_SANITIZED" in os.environ else int(os.environ.get("ZENDAYA_EXAMPLES", "60"))
NATIVE = Path(backend.__file__).parent / "native"


def decoder(seed=0, **changes):
    """A decoder of odd sizes, in which each weight has an effect."""
    shape = {
        "vocab_size": 61, "source_dim": 7, "max_source": 40, "max_rows": 50, "dim": 24, "layers": 2, "heads": 3, "head_dim": 5,
        "ffn_dim": 29, "dropout": 0.0,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Decoder(DecoderConfig(**{**shape, **changes})).eval()
        for parameter in made.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return made


def tokens(config, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if config.source_vocab:
        return torch.randint(config.source_vocab, (count, 1), generator=generator).float()
    return torch.randn(count, config.source_dim, generator=generator)


def run(engine, source_TE, horizons, *, ids=None, pieces=(), prompt=(1, 2)):
    """Logits (N, V) of a decode of given ids, one row per horizon, after the whole source was read in pieces."""
    cache = engine.start()
    edges = [0, *itertools.accumulate(pieces), len(source_TE)]
    with torch.inference_mode():
        for first, last in itertools.pairwise(min(edge, len(source_TE)) for edge in edges):
            engine.read(cache, source_TE[None, first:last])
        rows = [engine.prefill(cache, torch.tensor([prompt]), horizons[0])]
        rows += [engine.step(cache, torch.tensor([3 + i if ids is None else ids[i]]), h) for i, h in enumerate(horizons[1:])]
    return torch.cat(rows)


configs = st.fixed_dictionaries(
    {
        "vocab_size": st.integers(40, 90), "dim": st.integers(1, 70), "layers": st.integers(1, 3), "heads": st.integers(1, 4),
        "head_dim": st.sampled_from([1, 5, 16, 17, 32, 64, 70]), "ffn_dim": st.integers(1, 90), "norm": st.sampled_from(["pre", "post"]),
        "activation": st.sampled_from(["gelu", "relu"]), "source_layers": st.integers(0, 2), "max_source": st.just(40),
        "max_rows": st.just(50),
    }
)  # fmt: skip


@st.composite
def shapes(draw):
    config, kind = draw(configs), draw(st.sampled_from(["features", "ids", "as they are"]))
    if kind == "ids":
        return {**config, "source_vocab": draw(st.integers(1, 30)), "source_dim": 1}
    if kind == "as they are":
        return {**config, "embed_source": False, "source_dim": config["dim"]}
    return {**config, "source_dim": draw(st.integers(1, 40))}


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    shapes(), st.lists(st.integers(0, 40), min_size=1, max_size=20), st.lists(st.integers(1, 17), max_size=9),
    st.sampled_from(KERNELS or [""]), st.integers(1, 3),
)  # fmt: skip
def test_every_shape_gives_the_logits_of_torch(shape, horizons, pieces, kernels, threads):
    made = decoder(**shape)
    source_TE, horizons = tokens(made.config, 40), sorted(horizons)
    native = NativeEngine(made, threads=threads, kernels=kernels)
    expected, got = run(made, source_TE, horizons), run(native, source_TE, horizons, pieces=pieces)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(got, run(native, source_TE, horizons))  # any chunking gives the same bits


@pytest.mark.parametrize("name", ["tiny", "small", "libriheavy", "whisper-tiny.en"])
def test_every_preset_gives_the_logits_of_torch(name):
    made = Model.from_preset(name).decoder
    count = min(70, made.config.max_source)
    source_TE, horizons = tokens(made.config, count), [0, 1, 15, 16, 17, count - 6, count]
    expected = run(made, source_TE, horizons)
    torch.testing.assert_close(run(NativeEngine(made), source_TE, horizons), expected, atol=1e-4, rtol=0)
    rough = run(NativeEngine(made, precision="int8"), source_TE, horizons)
    assert float((rough - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_int8_multiplies_the_same_integers_on_every_processor(norm):
    made = decoder(norm=norm, source_layers=1, dim=64, ffn_dim=130)
    source_TE, horizons = tokens(made.config, 40), [0, 3, 16, 33, 40]
    expected = run(made, source_TE, horizons)
    best, *others = [run(NativeEngine(made, precision="int8", kernels=kernels), source_TE, horizons) for kernels in KERNELS]
    assert 0 < float((best - expected).norm() / expected.norm()) < 0.05
    for other in others:  # one wrong integer would move a logit by more than rounding does
        assert float((other - best).norm() / best.norm()) < 2e-3


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_stream_does_not_depend_on_neighbours_or_threads(kernels, precision):
    made = decoder(dim=40, heads=2, head_dim=16, ffn_dim=70)
    alone, both = (NativeEngine(made, precision=precision, kernels=kernels, threads=threads) for threads in (1, 2))
    plans = []
    for n in range(64):  # each with its own source, texts, horizons and number of rows per call
        generator = torch.Generator().manual_seed(n)
        horizons = torch.randint(0, 41, (4,), generator=generator).sort()[0].tolist()
        texts = [torch.randint(61, (int(torch.randint(1, 9, (1,), generator=generator)),), generator=generator).tolist() for _ in range(4)]
        plans.append((tokens(made.config, 40, seed=n), horizons, texts))
    expected = []
    for source_TE, horizons, texts in plans:
        cache = alone.start()
        alone.read(cache, source_TE[None])
        expected.append([alone.prefill(cache, torch.tensor([text]), h)[0] for text, h in zip(texts, horizons, strict=True)])
    for count in (1, 2, 3, 7, 12, 13, 25, 64):
        caches = [both.start() for _ in range(count)]
        both.read_many(caches, [plan[0] for plan in plans[:count]])
        for turn in range(4):
            order = torch.randperm(count, generator=torch.Generator().manual_seed(turn)).tolist()
            logits_SV = both.rows([caches[n] for n in order], [plans[n][2][turn] for n in order], [plans[n][1][turn] for n in order])
            for n, logits_V in zip(order, logits_SV, strict=True):
                assert torch.equal(logits_V, expected[n][turn])


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("source_layers", [0, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e38, 1e12])
def test_an_unreadable_token_spoils_only_rows_that_read_it(bad, source_layers, precision):
    made = decoder(source_layers=source_layers)
    engine = NativeEngine(made, precision=precision)
    source_TE, horizons = tokens(made.config, 20), list(range(21))
    spoiled_TE = source_TE.clone()
    spoiled_TE[10, 3] = bad
    clean, spoiled = run(engine, source_TE, horizons), run(engine, spoiled_TE, horizons, pieces=[4, 9])
    assert torch.equal(clean[:11], spoiled[:11])
    assert torch.isfinite(clean).all()
    assert torch.isnan(spoiled[11:]).all()


@pytest.mark.parametrize("bad", [-1.0, 9.0, 2.5, float("nan"), 1e30])
def test_an_unknown_id_is_unreadable(bad):
    made = decoder(source_vocab=9, source_dim=1)
    source_TE = tokens(made.config, 6)
    source_TE[3] = bad
    rows = run(NativeEngine(made), source_TE, [0, 2, 3, 4])
    assert torch.isfinite(rows[:3]).all()
    assert torch.isnan(rows[3]).all()


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_reused_stream_gives_the_same_bits(precision):
    made = decoder(source_layers=1)
    engine = NativeEngine(made, precision=precision)
    source_TE, horizons = tokens(made.config, 21), [0, 3, 18, 21]
    expected = run(engine, source_TE, horizons)
    spoiled = run(engine, torch.full((40, 7), torch.nan), [40] * 30)  # the next stream reuses this memory, full of NaN
    assert torch.isnan(spoiled).all()
    assert torch.equal(run(engine, source_TE, horizons), expected)
    cache = engine.start()
    assert (cache.num_rows, cache.num_source) == (0, 0)
    engine.read(cache, torch.full((1, 33, 7), torch.nan))
    engine.prefill(cache, torch.tensor([[5] * 30]), 33)
    cache.forget_source()
    cache.forget_text()
    engine.read(cache, source_TE[None])
    assert torch.equal(engine.prefill(cache, torch.tensor([[1, 2]]), 0)[0], expected[0])


def test_rows_are_truncated_and_clones_are_independent():
    made = decoder()
    engine = NativeEngine(made)
    source_TE = tokens(made.config, 20)
    results = []
    for each in (made, engine):
        with torch.inference_mode():
            cache = each.start()
            each.read(cache, source_TE[None])
            each.prefill(cache, torch.tensor([[1, 2, 3]]), 4)
            copy = cache.clone()
            each.prefill(cache, torch.tensor([[9, 9]]), 20)
            cache.num_rows = 3
            cache.forget_source()
            each.read(cache, source_TE[None, :5])
            mine, other = each.step(cache, torch.tensor([4]), 5), each.step(copy, torch.tensor([4]), 7)
            results.append((torch.cat([mine, other]), cache.num_rows, cache.num_source, copy.num_rows, copy.num_source))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
    assert results[0][1:] == results[1][1:] == (4, 5, 4, 20)


@pytest.mark.parametrize("source_layers", [0, 2])
@pytest.mark.parametrize("precision", ["torch", "float32", "int8"])
def test_withdrawn_source_leaves_the_bits_of_a_fresh_read(precision, source_layers):
    made = decoder(source_layers=source_layers)
    engine = TorchEngine(made) if precision == "torch" else NativeEngine(made, precision=precision)
    source_TE, other_TE = tokens(made.config, 40), tokens(made.config, 40, seed=1)
    with torch.inference_mode():
        for kept, unreadable in itertools.product((0, 5, 16, 21, 38), (False, True)):
            cache = engine.start()
            wrong_TE = other_TE.clone()
            wrong_TE[35:] = torch.nan if unreadable else wrong_TE[35:]
            engine.read(cache, torch.cat([source_TE[:kept], wrong_TE[kept:39]])[None])
            before = engine.prefill(cache, torch.tensor([[1, 2]]), min(kept, 5))
            cache.keep_source(kept)
            assert cache.num_source <= kept
            assert cache.num_rows == 2
            cache.keep_source(40)
            engine.read(cache, source_TE[None, cache.num_source :])
            after = engine.step(cache, torch.tensor([3]), 40)
            fresh = engine.start()
            engine.read(fresh, source_TE[None])
            assert torch.equal(engine.prefill(fresh, torch.tensor([[1, 2]]), min(kept, 5)), before)
            assert torch.equal(engine.step(fresh, torch.tensor([3]), 40), after)


def test_later_calls_do_not_change_logits_in_use():
    engine = NativeEngine(decoder(), threads=1)
    caches = [engine.start() for _ in range(3)]
    held, copies = [], []
    for turn in range(6):
        some = caches[: 1 + turn % 3]
        logits_SV = engine.rows(some, [[turn]] * len(some), [0] * len(some))
        held.append(logits_SV if turn % 2 else logits_SV[0])
        copies.append(held[-1].clone())
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    held.clear()
    first = engine.rows(caches, [[1]] * 3, [0] * 3).data_ptr()
    assert engine.rows(caches, [[1]] * 3, [0] * 3).data_ptr() == first


def test_memory_grows_with_the_source():
    made = decoder(max_source=1500)
    engine = NativeEngine(made)
    few, many = engine.start(), engine.start()
    engine.read(few, torch.randn(1, 30, 7))
    engine.read(many, torch.randn(1, 1500, 7))
    assert 0 < few.num_bytes < many.num_bytes / 40


def test_a_tap_gets_the_attention_of_torch():
    made = decoder(layers=3)
    source_TE, heads = tokens(made.config, 20), ((2, 1), (0, 2), (0, 0))
    weights = []
    for each in (made, NativeEngine(made, threads=2)):
        tap, cache = AttentionTap(heads), each.start()
        with torch.inference_mode():
            each.read(cache, source_TE[None])
            each.prefill(cache, torch.tensor([[1, 2, 3]]), 17, tap=tap)
        weights.append(torch.stack(tap.weights_F))
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)
    assert weights[0].shape == (3, 17)


def test_taps_of_many_streams_are_those_of_one():
    engine = NativeEngine(decoder(layers=3), threads=2)
    sources, heads = [tokens(engine.config, count) for count in (20, 9, 31)], ((2, 1), (0, 0))
    ids, horizons = [[1, 2, 3], [4], [5, 6]], [17, 9, 30]

    def read():
        caches = [engine.start() for _ in sources]
        engine.read_many(caches, sources)
        return caches

    alone = [AttentionTap(heads) for _ in sources]
    logits = [engine.rows([c], [i], [h], [t]) for c, i, h, t in zip(read(), ids, horizons, alone, strict=True)]
    logits = torch.cat([each.clone() for each in logits])
    together = [AttentionTap(heads), None, AttentionTap(heads)]
    assert torch.equal(engine.rows(read(), ids, horizons, together).clone(), logits)
    assert torch.equal(engine.rows(read(), ids, horizons), logits)  # taps change no bit
    for mine, other in zip(together, alone, strict=True):
        assert mine is None or torch.equal(mine.mean(), other.mean())


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_rows_that_are_not_needed_get_no_logits(precision):
    engine = NativeEngine(decoder(layers=3), threads=2, precision=precision)
    sources, ids, horizons = [tokens(engine.config, count) for count in (20, 9, 31)], [[1, 2, 3], [4], [5, 6]], [17, 9, 30]

    def rows(needless, sources=sources):
        caches = [engine.start() for _ in sources]
        engine.read_many(caches, sources)
        taps = [AttentionTap(((0, 0),), unless=lambda tap, no=n in needless: no and tap.mean().shape[0] > 0) for n in range(3)]
        return engine.rows(caches, ids, horizons, taps).clone(), [cache.num_rows for cache in caches]

    whole, counts = rows(())
    with torch.inference_mode():
        caches = [engine.start() for _ in sources]
        engine.read_many(caches, sources)
        assert torch.equal(engine.rows(caches, ids, horizons), whole)
    for needless in [(1,), (0, 2), (0, 1, 2)]:
        some, written = rows(needless)
        assert written == counts
        assert torch.equal(some, torch.where(torch.tensor([n in needless for n in range(3)])[:, None], 0.0, whole))
    broken = [sources[0].clone(), *sources[1:]]
    broken[0][3] = torch.nan
    assert [bool(row.isnan().any()) for row in rows((0, 1), broken)[0]] == [True, False, False]


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.data())
def test_fuzzed_calls_never_crash_and_refusals_change_nothing(data):
    engine = ENGINES.setdefault("fuzz", NativeEngine(decoder(), threads=2))
    numbers = st.integers(-3, 60)
    caches = [engine.start() for _ in range(3)]
    for cache, count in zip(caches, data.draw(st.lists(st.integers(0, 40), min_size=3, max_size=3)), strict=True):
        engine.read(cache, torch.randn(1, count, 7))
    for _ in range(data.draw(st.integers(1, 6))):
        chosen = data.draw(st.lists(st.sampled_from(caches), min_size=0, max_size=4))
        ids = data.draw(st.lists(st.lists(st.integers(-2, 63), max_size=30), min_size=len(chosen), max_size=len(chosen)))
        horizons = data.draw(st.lists(numbers, min_size=len(chosen), max_size=len(chosen)))
        before = [(cache.num_rows, cache.num_source) for cache in caches]
        fits = all(
            rows and min(rows) >= 0 and max(rows) < 61 and 0 <= h <= cache.num_source and cache.num_rows + len(rows) <= 50
            for cache, rows, h in zip(chosen, ids, horizons, strict=True)
        )
        if fits and chosen and len(set(map(id, chosen))) == len(chosen):
            logits = engine.rows(chosen, ids, horizons)
            assert logits.shape == (len(chosen), 61)
            assert torch.isfinite(logits).all()
        else:
            with pytest.raises(ZendayaError):
                engine.rows(chosen, ids, horizons)
            assert [(cache.num_rows, cache.num_source) for cache in caches] == before
        shape = data.draw(st.sampled_from([(1, 3, 7), (1, 41, 7), (2, 3, 7), (1, 3, 6), (3, 7), (1, 0, 7)]))
        cache = caches[0]
        if shape[0] == 1 and shape[-1] == 7 and cache.num_source + shape[1] <= 40:
            engine.read(cache, torch.randn(shape))
        else:
            with pytest.raises(ZendayaError):
                engine.read(cache, torch.randn(shape))


ENGINES: dict[str, NativeEngine] = {}


# Session, policies, audit.


def model(**changes):
    return Model.from_preset("tiny", seed=3, **changes)


def texts(made, schedule, engine, count=60, **options):
    session = made.open(schedule, engine=engine, **options)
    source_TE = torch.randn(count, 16, generator=torch.Generator().manual_seed(5))
    events = [event for first in range(0, count, 7) for event in session.push(source_TE[first : first + 7])]
    return [*events, *session.finish()]


@pytest.mark.parametrize(
    "schedule", [PowerLaw(0), PowerLaw(0.3), PowerLaw(1.7, "floor"), WaitK(3, 1.5), Full(), LocalAgreement(4), AlignAtt(4)], ids=str
)
def test_a_session_writes_the_same_on_either_engine(schedule):
    made = model()
    expected = texts(made, schedule, None)
    assert len(expected) > 10
    assert texts(made, schedule, engine_for(made, "native")) == expected
    assert texts(made, schedule, engine_for(made, "torch")) == expected


def test_int8_chooses_as_float32_where_the_lead_is_clear():
    """On the ids that float32 chooses: each logit is within a bound, and the best id is equal where it leads by twice the bound."""
    clear, bound = 0, 0.15  # the bound is relative to the spread of a row's logits
    for seed in range(6):
        made = Model.from_preset("small", seed=seed).decoder
        source_TE, horizons = tokens(made.config, 40, seed=seed), PowerLaw(0.5).horizons(40, 30).tolist()
        exact, rough = NativeEngine(made, threads=1), NativeEngine(made, precision="int8", threads=1)
        caches = [engine.start() for engine in (exact, rough)]
        for engine, cache in zip((exact, rough), caches, strict=True):
            engine.read(cache, source_TE[None])
        ids = torch.tensor([1])
        for horizon in horizons:
            expected_V, got_V = (engine.step(cache, ids, horizon)[0] for engine, cache in zip((exact, rough), caches, strict=True))
            spread = float(expected_V.std())
            best, second = expected_V.topk(2).values.tolist()
            assert float((got_V - expected_V).abs().max()) < bound * spread
            if best - second > 2 * bound * spread:
                clear += 1
                assert int(got_V.argmax()) == int(expected_V.argmax())
            ids = expected_V.argmax()[None]
    assert clear > 60


@pytest.mark.parametrize("schedule", [PowerLaw(0), PowerLaw(0.3), WaitK(3, 1.5), Full()], ids=str)
def test_an_int8_session_keeps_its_schedule(schedule):
    made = model()
    exact, rough = (texts(made, schedule, engine_for(made, "native", precision=precision)) for precision in ("float32", "int8"))
    together = min(len(exact), len(rough))
    assert together > 10
    assert [event.horizon for event in rough[:together]] == [event.horizon for event in exact[:together]]


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_bfloat16_model_is_read(precision):
    made = decoder()
    halved = decoder().to(torch.bfloat16)
    source_TE = tokens(made.config, 12).to(torch.bfloat16)
    with torch.inference_mode():
        rows = run(NativeEngine(halved, precision=precision), source_TE, [0, 5, 12])
        made.load_state_dict({name: tensor.float() for name, tensor in halved.state_dict().items()})
        assert torch.equal(rows, run(NativeEngine(made, precision=precision), source_TE.float(), [0, 5, 12]))


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("source_layers", [0, 1])
def test_the_leakage_audit_passes_on_the_native_engine(precision, source_layers):
    made = model(decoder=dataclasses.replace(Model.from_preset("tiny").config.decoder, source_layers=source_layers))
    for schedule in (PowerLaw(0.5), PowerLaw(1.5, "floor")):
        report = audit(made, schedule, cuts=2, engine=engine_for(made, "native", precision=precision))
        assert report.passed, report.first
        assert {"incremental", "incremental, batch", "live"} <= report.steps_tested.keys()


class Leaky(NativeEngine):
    """An engine that reads one token beyond the horizon."""

    def _write(self, streams, ids, horizons, taps):
        most = [self._library.zd_stream_num_source(stream) for stream in streams]
        return super()._write(streams, ids, [min(h + 1, top) for h, top in zip(horizons, most, strict=True)], taps)


def test_the_audit_finds_an_engine_that_leaks():
    made = model()
    assert not audit(made, PowerLaw(0.5), cuts=2, engine=Leaky(made.decoder)).passed


# Choice of engine, and refused calls.


def test_torch_is_used_without_the_library_and_says_why(monkeypatch):
    made = model()
    assert describe().startswith(f"native, with the {KERNELS[0]} kernels")
    assert isinstance(engine_for(made), NativeEngine)
    backend._library.cache_clear()
    monkeypatch.setattr(backend, "_path", lambda: None)
    try:
        assert isinstance(engine_for(made), TorchEngine)
        assert "C compiler" in describe()
        with pytest.raises(ZendayaError, match="C compiler"):
            engine_for(made, "native")
        with pytest.raises(ZendayaError, match="C compiler"):
            engine_for(made, precision="int8")
    finally:
        backend._library.cache_clear()


def test_a_library_of_another_version_counts_as_missing(monkeypatch):
    made = model()
    backend._library.cache_clear()
    monkeypatch.setattr(backend, "ABI", backend.ABI + 1)
    try:
        assert "install the package again" in (missing() or "")
        assert isinstance(engine_for(made), TorchEngine)
    finally:
        backend._library.cache_clear()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "int4"}, "precision"),
        ({"threads": 0}, "threads"),
        ({"backend": "gpu"}, "auto, torch, native"),
        ({"backend": "torch", "precision": "int8"}, "int8"),
        ({"backend": "torch", "threads": 2}, "threads"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(ZendayaError, match=words):
        engine_for(model(), **options)


def test_an_engine_for_another_shape_is_refused():
    made = model()
    with pytest.raises(ZendayaError, match="another shape"):
        made.open(Full(), engine=NativeEngine(decoder()))
    with pytest.raises(ZendayaError, match="kernels"):
        NativeEngine(made.decoder, kernels="abacus")


def test_a_cache_of_another_engine_is_refused():
    made = decoder()
    mine, other = NativeEngine(made, threads=1), NativeEngine(decoder(dim=60, heads=4), threads=1)
    for cache in (other.start(), made.start()):
        with pytest.raises(ZendayaError, match="another"):
            mine.read(cache, torch.randn(1, 3, 7))
        with pytest.raises(ZendayaError, match="another"):
            mine.prefill(cache, torch.tensor([[1]]), 0)
        with pytest.raises(ZendayaError, match="another"):
            mine.rows([mine.start(), cache], [[1], [1]], [0, 0])
    with pytest.raises(ZendayaError, match="one stream each"):
        mine.rows([mine.start(2)], [[1]], [0])


def test_a_tap_of_two_streams_is_refused():
    engine = NativeEngine(decoder(), threads=1)
    with pytest.raises(ZendayaError, match="or no tap"):
        engine.prefill(engine.start(2), torch.tensor([[1], [1]]), 0, tap=AttentionTap(((0, 0),)))


@pytest.mark.parametrize("name", ["added", "norm.bias"])
def test_weights_that_differ_from_the_list_are_named(name):
    made = decoder(norm="pre")
    made.register_buffer("added", torch.zeros(3))
    if name == "norm.bias":
        del made.added
        made.norm.bias = torch.nn.Parameter(torch.zeros(25))
    with pytest.raises(ZendayaError, match=f"{name}: expected .*: got .*'torch' engine"):
        NativeEngine(made)


def test_the_library_checks_names_order_and_size_of_weights(monkeypatch):
    made, right = decoder(), backend._weights
    wrong = [
        lambda weights: [weights[1], weights[0], *weights[2:]],
        lambda weights: weights[:-1],
        lambda weights: [*weights, weights[-1]],
        lambda weights: [(weights[0][0], weights[0][1][1:]), *weights[1:]],
    ]
    for change in wrong:
        monkeypatch.setattr(backend, "_weights", lambda *arguments, change=change: change(right(*arguments)))
        with pytest.raises(ZendayaError, match="weight list"):
            NativeEngine(made)


def test_a_bad_call_returns_an_error_code():
    engine, other = NativeEngine(decoder(), threads=2), NativeEngine(decoder(), threads=1)
    library, cache, logits = engine._library, engine.start(), np.zeros(61, np.float32)
    stream, foreign, none = cache._streams[0], other.start()._streams[0], None
    out = logits.ctypes.data

    def rows(streams=(stream,), counts=(1,), ids=(1,), horizons=(0,), logits=out, weights=None, model=engine._model, last=None):
        handles = np.array([handle or 0 for handle in streams], np.uintp)
        counts, ids, horizons = (np.array(values, np.int32) for values in (counts, ids, horizons))
        pointers = (array.ctypes.data for array in (handles, counts, ids, horizons))
        return library.zd_rows(model, len(streams), *pointers, logits, weights, last)

    assert rows(logits=None) == rows(streams=(none,)) == rows(model=None) == rows(streams=()) == backend.BAD_ARGUMENT
    assert rows(streams=(foreign,)) == rows((stream, stream), (1, 1), (1, 1), (0, 0)) == backend.BAD_STREAM
    codes = {rows(counts=(0,)), rows(counts=(-1,)), rows(counts=(51,)), rows(horizons=(1,)), rows(horizons=(-1,)), rows(ids=(61,))}
    assert codes == {-7, -8, -9}
    assert library.zd_logits(engine._model, 1, None, out) == library.zd_logits(engine._model, 0, out, out) == backend.BAD_ARGUMENT
    assert library.zd_read(engine._model, 1, None, None, None) == library.zd_stream_truncate(none, 0) == backend.BAD_ARGUMENT
    assert library.zd_stream_clear_source(none) == library.zd_stream_num_rows(none) == backend.BAD_ARGUMENT
    assert library.zd_stream_truncate(stream, 1) == library.zd_stream_truncate(stream, -1) == -7
    assert (cache.num_rows, rows()) == (0, 0)
    for code in codes:
        with pytest.raises(ZendayaError, match=f"error {code}"):
            backend._check(library, code)
    with pytest.raises(MemoryError):
        backend._check(library, backend.NO_MEMORY)
    with pytest.raises(RuntimeError, match="internal"):
        backend._check(library, backend.INTERNAL)


@pytest.mark.parametrize("field", ["vocab_size", "source_dim", "max_rows", "dim", "layers", "heads", "ffn_dim", "source_vocab"])
def test_a_shape_out_of_range_is_refused(field):
    made, library, model = decoder(), backend._loaded(), ctypes.c_void_p()
    for value in (-1, 2**30):
        shape = backend._Shape.of(made.config)
        setattr(shape, field, value)
        tensors = (backend._Tensor * 1)()
        assert library.zd_model_new(shape, tensors, 1, 0, 1, None, model) == -3
    assert library.zd_model_new(backend._Shape.of(made.config), tensors, 1, 0, 257, None, model) == backend.BAD_ARGUMENT
    assert library.zd_model_new(backend._Shape.of(made.config), tensors, 1, 0, 1, b"abacus", model) == -5
    assert not model


def test_threads_share_one_engine():
    """Calls take turns: each thread's stream gets the bits that it gets alone."""
    made = decoder()
    engine, plans = NativeEngine(made, threads=2), [(tokens(made.config, 40, seed=n), sorted((n, 7, 20, 40 - n))) for n in range(4)]
    expected = [run(engine, *plan) for plan in plans]

    def work(n):
        return all(torch.equal(run(engine, *plans[n], pieces=[3 + n, 11]), expected[n]) for _ in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


POOL_TEST = """
#include "pool.h"
static void work(void *ran, zd_worker w) {
    for (int phase = 0; phase < 5; phase++) {
        ZD_TASKS(&w, i, 3) ((int *)ran)[3 * phase + i]++;
        zd_pool_barrier(&w);
    }
}
int main(void) {
    int ran[15] = {0}, wrong = 0;
    zd_pool *few = zd_pool_new(2, 3), *enough = zd_pool_new(2, 5);
    wrong |= zd_pool_run(few, work, ran) != -1;
    for (int i = 0; i < 15; i++) wrong |= ran[i] != (i < 9);
    wrong |= zd_pool_run(enough, work, ran) != 0;
    for (int i = 0; i < 15; i++) wrong |= ran[i] != 1 + (i < 9);
    zd_pool_free(few), zd_pool_free(enough);
    return wrong;
}
"""


def test_a_job_with_too_many_phases_is_an_error(tmp_path):
    """With NDEBUG too: phases beyond the pool's are reported and not run."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "pool_test.c"
    program.write_text(POOL_TEST, encoding="utf-8")
    flags = ["-std=c11", "-O2", "-DNDEBUG", "-pthread", f"-I{NATIVE}"]
    subprocess.run([compiler, *flags, str(program), str(NATIVE / "pool.c"), "-o", tmp_path / "pool_test"], check=True)
    assert subprocess.run([tmp_path / "pool_test"], check=False, timeout=60).returncode == 0


def test_the_library_exports_only_prefixed_names():
    names = subprocess.run(["nm", "-D", "--defined-only", str(backend._path())], capture_output=True, text=True, check=False).stdout
    exported = {line.split()[-1] for line in names.splitlines()}
    if not exported:
        pytest.skip("no nm to list the symbols")
    assert {name for name in exported if not name.startswith("zd_")} <= {"PyInit__native", "_init", "_fini"}


SANITIZED = """
import sys
import pytest
from zendaya.runtime.engine import native_engine as backend
backend._path = lambda: sys.argv[1]
cases = "shape_gives or neighbours or fuzzed or token or reused or truncated or tap or bad_call or memory or (audit_passes and 1-int8)"
imported = "ignore::pytest.PytestAssertRewriteWarning"  # by the line above
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", imported, "-k", cases, sys.argv[2]]))
"""


@pytest.mark.skipif("ZENDAYA_SANITIZED" in os.environ, reason="runs inside itself")
def test_the_engine_is_clean_under_sanitizers(tmp_path):
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    library = tmp_path / "sanitized.so"
    flags = ["-std=c11", "-O1", "-g", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-fsanitize=address,undefined"]
    sources = [str(path) for path in NATIVE.glob("*.c") if path.name != "module.c"]
    empty = tmp_path / "empty.c"
    empty.write_text("int nothing;\n", encoding="utf-8")
    if compiler is None or subprocess.run([compiler, *flags, str(empty), "-o", tmp_path / "empty.so"]).returncode:
        pytest.skip("the C compiler here has no address and undefined-behaviour sanitizers")
    subprocess.run([compiler, *flags, "-fno-sanitize-recover=all", *sources, "-o", library, "-lm"], check=True)
    runtimes = [subprocess.check_output([compiler, f"-print-file-name=lib{name}.so"], text=True).strip() for name in ("asan", "ubsan")]
    environment = {
        **os.environ, "LD_PRELOAD": ":".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0", "ZENDAYA_SANITIZED": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", SANITIZED, str(library), __file__]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout
