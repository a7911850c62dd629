"""The engine: the native back end gives what PyTorch gives, alone and in company, and nothing beyond a horizon reaches it."""

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zendaya import Full, Model, PowerLaw, WaitK, ZendayaError
from zendaya.audit import audit
from zendaya.decoder import Decoder, DecoderConfig, Gaze
from zendaya.engine import NativeEngine, backend, describe, engine_for, missing
from zendaya.policies.agreement import LocalAgreement
from zendaya.policies.attention import AlignAtt

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
KERNELS = [] if missing() else NativeEngine.kernels()
EXAMPLES = 12 if "ZENDAYA_SANITIZED" in os.environ else 60
NATIVE = Path(backend.__file__).parent / "native"


def decoder(seed=0, **changes):
    """A decoder of odd sizes, whose every weight matters."""
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
    """Logits (N, V) of a decode of given ids, one row a horizon, all of the source read in pieces before."""
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
    assert torch.equal(got, run(native, source_TE, horizons))  # any chunking of the arrivals: the same bits


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
    for other in others:  # one integer off by one would move a logit by more than rounding does, unless rounding moved it first
        assert float((other - best).norm() / best.norm()) < 2e-3


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_stream_never_depends_on_its_neighbours_or_the_threads(kernels, precision):
    made = decoder(dim=40, heads=2, head_dim=16, ffn_dim=70)
    alone, both = (NativeEngine(made, precision=precision, kernels=kernels, threads=threads) for threads in (1, 2))
    plans = []
    for n in range(64):  # each with its own source, texts, horizons and number of rows a call
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
def test_an_unreadable_token_spoils_the_rows_that_read_it_and_no_other(bad, source_layers, precision):
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
def test_a_stream_that_was_used_before_is_as_good_as_new(precision):
    made = decoder(source_layers=1)
    engine = NativeEngine(made, precision=precision)
    source_TE, horizons = tokens(made.config, 21), [0, 3, 18, 21]
    expected = run(engine, source_TE, horizons)
    spoiled = run(engine, torch.full((40, 7), torch.nan), [40] * 30)  # its memory, full of NaN, is the next one's
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


def test_rows_are_taken_back_and_copies_go_their_own_way():
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


def test_logits_stay_as_they_were_given():
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


def test_memory_follows_what_was_read():
    made = decoder(max_source=1500)
    engine = NativeEngine(made)
    few, many = engine.start(), engine.start()
    engine.read(few, torch.randn(1, 30, 7))
    engine.read(many, torch.randn(1, 1500, 7))
    assert 0 < few.num_bytes < many.num_bytes / 40


def test_a_gaze_is_the_gaze_of_torch():
    made = decoder(layers=3)
    source_TE, heads = tokens(made.config, 20), ((2, 1), (0, 2), (0, 0))
    looks = []
    for each in (made, NativeEngine(made, threads=2)):
        gaze, cache = Gaze(heads), each.start()
        with torch.inference_mode():
            each.read(cache, source_TE[None])
            each.prefill(cache, torch.tensor([[1, 2, 3]]), 17, gaze=gaze)
        looks.append(torch.stack(gaze.weights_F))
    torch.testing.assert_close(*looks, atol=1e-6, rtol=0)
    assert looks[0].shape == (3, 17)


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.data())
def test_fuzzed_calls_never_crash_and_a_refused_one_changes_nothing(data):
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


def test_int8_decides_as_float32_where_that_is_sure():
    """On the ids that float32 decides: every logit within a bound, and the same choice wherever the best leads by twice the bound."""
    sure, bound = 0, 0.15  # of the spread of a row's logits
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
                sure += 1
                assert int(got_V.argmax()) == int(expected_V.argmax())
            ids = expected_V.argmax()[None]
    assert sure > 60


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
    """Reads one token too many where it can."""

    def _write(self, streams, ids, horizons, gaze):
        most = [self._library.zendaya_stream_source(stream) for stream in streams]
        return super()._write(streams, ids, [min(h + 1, top) for h, top in zip(horizons, most, strict=True)], gaze)


def test_the_audit_finds_an_engine_that_leaks():
    made = model()
    assert not audit(made, PowerLaw(0.5), cuts=2, engine=Leaky(made.decoder)).passed


# Which back end.


def test_without_the_library_torch_is_used_and_says_why(monkeypatch):
    made = model()
    assert describe().startswith(f"native, with the {KERNELS[0]} kernels")
    assert isinstance(engine_for(made), NativeEngine)
    backend._library.cache_clear()
    monkeypatch.setattr(backend, "_path", lambda: None)
    try:
        assert engine_for(made) is made.decoder
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
        assert engine_for(made) is made.decoder
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
def test_what_cannot_be_is_refused(options, words):
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


SANITIZED = """
import sys
import pytest
from zendaya.engine import backend
backend._path = lambda: sys.argv[1]
cases = "shape_gives or neighbours or fuzzed or token or used_before or taken_back or gaze or memory or (audit_passes and 1-int8)"
imported = "ignore::pytest.PytestAssertRewriteWarning"  # by the line above
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", imported, "-k", cases, sys.argv[2]]))
"""


@pytest.mark.skipif("ZENDAYA_SANITIZED" in os.environ, reason="inside itself")
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
