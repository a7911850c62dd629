import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zendaya import Custom, Full, Model, PowerLaw, WaitK, ZendayaError
from zendaya.nn.config import DecoderConfig
from zendaya.nn.decoder import AttentionTap, Decoder
from zendaya.nn.fused import dropout_noise
from zendaya.nn.presets import preset, presets

SCHEDULES = [PowerLaw(0), PowerLaw(0.3), PowerLaw(1), PowerLaw(1.7, "floor"), WaitK(3, 1.5), Full(), Custom([0, 0, 2, 7])]


def small_model(*, seed=0, **decoder):
    config = preset("tiny")
    return Model.from_preset("tiny", seed=seed, decoder=dataclasses.replace(config.decoder, **decoder))


def incremental(model, source_TE, text, horizons, pieces):
    """Logits of every step, the source read in the given pieces and only as far as the step asks."""
    cache, rows, left = model.decoder.start(), [], list(pieces)
    for i, horizon in enumerate(int(h) for h in horizons):
        while cache.num_source < horizon:
            count = min(left.pop(0) if left else 1, source_TE.shape[0] - cache.num_source)
            model.decoder.read(cache, source_TE[None, cache.num_source : cache.num_source + count])
        if i == 0:
            rows.append(model.decoder.prefill(cache, torch.tensor([model.config.framing.prompt]), horizon))
        else:
            rows.append(model.decoder.step(cache, torch.tensor([text[i - 1]]), horizon))
    return torch.cat(rows)


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 24),
    st.integers(1, 30),
    st.lists(st.integers(1, 9), max_size=24),
    st.sampled_from([("pre", 0), ("post", 0), ("pre", 2), ("post", 1)]),
    st.integers(0, 2**31),
)
def test_masked_and_sliced_paths_agree(schedule, num_source, num_steps, pieces, shape, seed):
    model = small_model(norm=shape[0], source_layers=shape[1])
    generator = torch.Generator().manual_seed(seed)
    source_TE = torch.randn(num_source, 16, generator=generator)
    text = torch.randint(4, 512, (num_steps - 1,), generator=generator).tolist()
    horizons = schedule.horizons(num_source, num_steps)
    with torch.inference_mode():
        masked = model(model.batch([source_TE], [text], schedule))[0]
        sliced = incremental(model, source_TE, text, horizons, pieces)
        at_once = incremental(model, source_TE, text, horizons, [num_source])
    assert torch.equal(masked.argmax(-1), sliced.argmax(-1))
    torch.testing.assert_close(masked, sliced, atol=1e-5, rtol=0)
    assert torch.equal(sliced, at_once)  # any chunking of the arrivals: the same bits


@pytest.mark.parametrize("name", list(presets()))
def test_masked_and_sliced_paths_agree_at_every_preset(name):
    model = Model.from_preset(name)
    generator = torch.Generator().manual_seed(1)
    num_source, num_steps = min(model.config.window_tokens, 70), min(model.config.max_steps, 24)
    source_TE = torch.randn(num_source, model.config.decoder.source_dim, generator=generator)
    text = torch.randint(4, 500, (num_steps - 1,), generator=generator).tolist()
    with torch.inference_mode():
        for schedule in (PowerLaw(0.4), WaitK(5, 2)):
            masked = model(model.batch([source_TE], [text], schedule))[0]
            sliced = incremental(model, source_TE, text, schedule.horizons(num_source, num_steps), [7, 1, 30])
            torch.testing.assert_close(masked, sliced, atol=1e-5, rtol=0)
            assert torch.equal(masked.argmax(-1), sliced.argmax(-1))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_greedy_text_is_the_same_masked_and_live(schedule):
    model = small_model(seed=3)
    source_TE = torch.randn(24, 16, generator=torch.Generator().manual_seed(5))
    session = model.open(schedule, steps=12)
    live = [event.token for event in [*session.push(source_TE), *session.finish()]]
    written: list[int] = []
    with torch.inference_mode():
        while len(written) < len(live):  # the masked path, decoding greedily by running everything again
            horizons = torch.from_numpy(schedule.horizons(24, 12, num_steps=len(written) + 1))[None]
            ids = torch.tensor([[*model.config.framing.prompt, *written]])
            logits = model.decoder(ids, source_TE[None], horizons)[0, -1]
            logits[list(model.config.framing.suppress)] = -torch.inf
            written.append(int(logits.argmax()))
    assert written == live


def test_a_horizon_of_zero_gives_zero_cross_attention():
    model = small_model()
    for layer in model.decoder.layers:  # a bias that would show if the block did anything at all
        layer.cross_attention.out.bias.data.fill_(7.0)
        layer.cross_attention.value.bias.data.fill_(3.0)
    silent = small_model()
    for layer in silent.decoder.layers:
        layer.cross_attention.out.weight.data.zero_()
        layer.cross_attention.out.bias.data.zero_()
    source_BFE, ids = torch.randn(1, 9, 16), torch.randint(4, 500, (1, 6))
    with torch.inference_mode():
        blind = model.decoder(ids, source_BFE, torch.zeros(1, 6, dtype=torch.long))
        torch.testing.assert_close(blind, silent.decoder(ids, source_BFE, torch.full((1, 6), 9)), atol=1e-5, rtol=0)
        cache = model.decoder.start()
        torch.testing.assert_close(model.decoder.prefill(cache, ids, 0)[0], blind[0, -1], atol=1e-5, rtol=0)
    assert torch.isfinite(blind).all()


def test_gradients_are_finite_where_a_row_reads_nothing():
    model = small_model(source_layers=1).train()
    batch = model.batch([torch.randn(9, 16), torch.randn(4, 16)], [[5, 6, 7], [8]], Custom([0, 0, 3]))
    torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.targets_BN.flatten()).backward()
    gradients = [p.grad for p in model.decoder.parameters() if p.grad is not None]
    assert gradients
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("source_layers", [0, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e38])
def test_an_unreadable_token_makes_only_its_readers_nan(bad, source_layers):
    model = small_model(source_layers=source_layers)
    source_TE, text = torch.randn(20, 16), [9] * 19
    schedule = PowerLaw(1)
    spoiled_TE = source_TE.clone()
    spoiled_TE[10, 3] = bad
    with torch.inference_mode():
        clean = model(model.batch([source_TE], [text], schedule))[0]
        masked = model(model.batch([spoiled_TE], [text], schedule))[0]
        sliced = incremental(model, spoiled_TE, text, schedule.horizons(20, 20), [20])
    assert torch.equal(masked[:10], clean[:10])
    for logits in (masked, sliced):
        assert torch.isfinite(logits[:10]).all()
        assert torch.isnan(logits[10:]).all()


@pytest.mark.parametrize("shape", [("pre", 0), ("post", 0), ("pre", 2), ("post", 2)])
def test_huge_future_values_change_nothing(shape):
    model = small_model(norm=shape[0], source_layers=shape[1])
    source_TE, text, schedule = torch.randn(20, 16), [9] * 19, PowerLaw(1)
    with torch.inference_mode():
        clean = model(model.batch([source_TE], [text], schedule))[0]
        for power in range(3, 39):
            huge_TE = source_TE.clone()
            huge_TE[10:] = torch.randn(10, 16).sign() * 10.0**power
            assert torch.equal(model(model.batch([huge_TE], [text], schedule))[0, :10], clean[:10]), power
            huge_TE[10:15] = source_TE[10:15]
            assert torch.equal(model(model.batch([huge_TE], [text], schedule))[0, :15], clean[:15]), power


def test_histories_agree_on_both_paths():
    model = small_model(seed=2)
    previous_TE, source_TE = torch.randn(24, 16), torch.randn(15, 16)
    past, text = [7, 8, 9, 10], [11, 12, 13]
    schedule = PowerLaw(0.7)
    shorter = (torch.randn(5, 16), [3])
    with torch.inference_mode():
        masked = model(model.batch([source_TE], [text], schedule, histories=[(previous_TE, past)]))[0]
        batch = model.batch(
            [source_TE, source_TE, torch.randn(20, 16)], [text, text, [5]], schedule, histories=[(previous_TE, past), None, shorter]
        )
        padded = model(batch)
        alone = model(model.batch([source_TE], [text], schedule))[0]
        decoder, cache = model.decoder, model.decoder.start()
        decoder.read(cache, previous_TE[None])
        decoder.prefill(cache, torch.tensor([[model.config.framing.previous, *past]]), 24)
        cache.forget_source()
        horizons = schedule.horizons(15, 4)
        decoder.read(cache, source_TE[None])
        rows = [decoder.prefill(cache, torch.tensor([model.config.framing.prompt]), int(horizons[0]))]
        rows += [decoder.step(cache, torch.tensor([token]), int(h)) for token, h in zip(text, horizons[1:], strict=True)]
    torch.testing.assert_close(masked, torch.cat(rows), atol=1e-5, rtol=0)
    torch.testing.assert_close(padded[0], masked, atol=1e-5, rtol=0)  # the same beside shorter histories
    torch.testing.assert_close(padded[1], alone, atol=1e-5, rtol=0)  # and without any, among others that have one
    assert (masked - alone).abs().max() > 1e-3


def test_a_lock_step_batch_equals_its_streams_alone():
    model = small_model()
    source_BTE, ids = torch.randn(3, 20, 16), torch.randint(4, 500, (3, 5))
    horizons = [[1, 5, 9], [2, 2, 20], [0, 10, 11], [4, 10, 20], [20, 20, 20]]
    with torch.inference_mode():
        cache = model.decoder.start(batch=3)
        model.decoder.read(cache, source_BTE)
        together = torch.stack([model.decoder.step(cache, ids[:, i], h) for i, h in enumerate(horizons)], 1)
        for b in range(3):
            cache = model.decoder.start()
            model.decoder.read(cache, source_BTE[b : b + 1])
            alone = torch.cat([model.decoder.step(cache, ids[b : b + 1, i], h[b]) for i, h in enumerate(horizons)])
            torch.testing.assert_close(together[b], alone, atol=1e-5, rtol=0)


def test_reading_less_touches_less():
    model = small_model()
    cache = model.decoder.start()
    with torch.inference_mode():
        model.decoder.read(cache, torch.randn(1, 20, 16))
        for keys, values in cache.cross:  # anything read beyond the slice would turn the logits to NaN
            keys[:, :, 6:] = torch.nan
            values[:, :, 6:] = torch.nan
        assert torch.isfinite(model.decoder.step(cache, torch.tensor([5]), 6)).all()
        assert torch.isnan(model.decoder.step(cache, torch.tensor([5]), 7)).any()


def test_a_clone_is_independent():
    model = small_model(source_layers=1)
    with torch.inference_mode():
        cache = model.decoder.start()
        model.decoder.read(cache, torch.randn(1, 5, 16))
        model.decoder.step(cache, torch.tensor([5]), 5)
        copy = cache.clone()
        model.decoder.read(copy, torch.randn(1, 5, 16))
        first = model.decoder.step(copy, torch.tensor([6]), 5)
        assert (copy.num_source, cache.num_source) == (10, 5)
        assert torch.equal(first, model.decoder.step(cache, torch.tensor([6]), 5))


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda d, c: d.read(c, torch.zeros(1, 3, 15)), "shape"),
        (lambda d, c: d.read(c, torch.zeros(2, 3, 16)), "shape"),
        (lambda d, c: d.read(c, torch.zeros(1, 25, 16)), "at most 24"),
        (lambda d, c: d(torch.ones(1, 2, dtype=torch.long), torch.zeros(1, 25, 16), torch.ones(1, 2, dtype=torch.long)), "at most 24"),
        (lambda d, c: d.step(c, torch.tensor([1]), 1), "have arrived"),
        (lambda d, c: d.step(c, torch.tensor([1]), -1), "have arrived"),
        (lambda d, c: d.prefill(c, torch.ones(1, 66, dtype=torch.long), 0), "longer than"),
    ],
)
def test_misuse_is_one_clear_line(do, says):
    decoder = small_model().decoder
    with pytest.raises(ZendayaError, match=says):
        do(decoder, decoder.start())


@pytest.mark.parametrize("name", ["charades-sta", "activitynet", "libriheavy"])
@pytest.mark.parametrize("length", ["fix", "inf"])
def test_paper_presets_have_the_papers_size(name, length):
    model = Model.from_preset(name, length=length)
    assert 28.5e6 <= model.num_parameters <= 29.5e6
    decoder = model.config.decoder
    assert (decoder.layers, decoder.dim, decoder.heads, decoder.head_dim, decoder.ffn_dim) == (4, 768, 8, 64, 1536)


@pytest.mark.parametrize(
    "changes",
    [
        {"dim": 0}, {"layers": -1}, {"heads": 1.5}, {"dropout": 1.0}, {"activation": "swish"}, {"norm": "none"},
        {"embed_source": False}, {"source_layers": -1}, {"vocab_size": True},
    ],
)  # fmt: skip
def test_an_impossible_config_is_refused(changes):
    fields = {"vocab_size": 300, "source_dim": 16, "max_source": 20, "max_rows": 20, "dim": 32, **changes}
    with pytest.raises(ZendayaError, match="decoder config"):
        DecoderConfig(**fields)


def test_dropout_is_only_for_training():
    model = small_model(dropout=0.5)
    batch = model.batch([torch.randn(9, 16)], [[5, 6]], Full())
    with torch.no_grad():
        assert torch.equal(model(batch), model(batch))
        model.train()
        assert not torch.equal(model(batch), model(batch))


def test_the_output_projection_is_the_embedding():
    model = small_model()
    assert isinstance(model.decoder, Decoder)
    assert [tuple(p.shape) for p in model.decoder.parameters()].count((512, 64)) == 1


def example_batch(model, *, histories=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dim = model.config.decoder.source_dim
    sources = [torch.randn(length, dim, generator=generator) for length in (20, 7, 13)]
    before = [(torch.randn(9, dim, generator=generator), [4, 5]), None, (torch.randn(3, dim, generator=generator), [9])]
    return model.batch(sources, [[5, 6, 7, 8], [4] * 12, [100]], PowerLaw(0.4), histories=before if histories else None)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("histories", [False, True])
@pytest.mark.parametrize("shape", [("pre", 0), ("post", 1)])
def test_the_loss_is_the_cross_entropy_of_the_logits(shape, histories, smoothing, monkeypatch):
    monkeypatch.setattr("zendaya.nn.fused.LOSS_ROWS", 8)  # several blocks, the last of them not full
    model = small_model(norm=shape[0], source_layers=shape[1], dropout=0.0).train()
    batch = example_batch(model, histories=histories)
    losses = [
        torch.nn.functional.cross_entropy(
            model(batch).flatten(0, 1), batch.targets_BN.flatten(), reduction="sum", label_smoothing=smoothing
        ),
        model.loss(batch, label_smoothing=smoothing),
    ]  # fmt: skip
    torch.testing.assert_close(losses[1], losses[0])
    with torch.no_grad():
        torch.testing.assert_close(model.loss(batch, label_smoothing=smoothing), losses[0].detach())
    expected, got = (gradients_of(model, 0.5 * loss) for loss in losses)
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_the_loss_of_a_prompt_of_several_ids():
    model = Model.from_preset("whisper-tiny.en")
    batch = model.batch([torch.randn(30, 384), torch.randn(12, 384)], [[5, 6, 7], [8]], PowerLaw(0.4))
    with torch.inference_mode():
        expected = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.targets_BN.flatten(), reduction="sum")
        torch.testing.assert_close(model.loss(batch), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e38])
def test_the_loss_is_nan_where_an_unreadable_token_is_read(bad):
    model = small_model(dropout=0.0).train()
    batch = example_batch(model)
    clean = model.loss(batch)
    batch.source_BFE[1, 10, 3] = bad  # padding of the second clip
    assert torch.equal(model.loss(batch), clean)
    batch.source_BFE[0, 15, 3] = bad
    loss = model.loss(batch)
    assert torch.isnan(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients_of(model, loss).values())


def test_training_and_inference_products_agree():
    model = small_model(dropout=0.0, source_layers=1).train()
    batch = example_batch(model)
    with torch.no_grad():
        expected = model(batch)
    torch.testing.assert_close(model(batch).detach(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.999999])
def test_dropout_keeps_the_stated_share(dropout):
    torch.manual_seed(0)
    noise = dropout_noise(torch.empty(1001, 999), dropout)
    kept = (noise > 0).float().mean()
    assert abs(float(kept) - (1 - dropout)) < 2e-3
    values = noise.unique()
    assert values.shape == (2,)
    torch.testing.assert_close(1 / values[1], torch.tensor(1 - dropout), atol=2**-16, rtol=0)
    torch.manual_seed(0)
    assert torch.equal(dropout_noise(torch.empty(1001, 999), dropout), noise)
    if dropout < 0.9:  # neighbours, which share a draw, are independent
        pairs = torch.corrcoef((noise.flatten()[:999_996].view(-1, 4) > 0).float().T)
        assert float((pairs - torch.eye(4)).abs().max()) < 0.01


def test_a_tap_reads_attention_and_changes_no_bit():
    model = small_model(norm="pre")
    decoder, source_FE = model.decoder, torch.randn(20, 16, generator=torch.Generator().manual_seed(3))
    plain, watched = decoder.start(), decoder.start()
    for cache in (plain, watched):
        decoder.read(cache, source_FE[None])
    tap = AttentionTap(((1, 0), (0, 1), (1, 1)))
    summed = []
    decoder.layers[1].cross_attention.out.register_forward_pre_hook(lambda _, args: summed.append(args[0]))
    for ids, horizon in ((torch.tensor([[1, 7, 8]]), 13), (torch.tensor([[9]]), 17)):
        with torch.inference_mode():
            expected = decoder.prefill(plain, ids, horizon)
            got = decoder.prefill(watched, ids, horizon, tap=tap)
        assert torch.equal(got, expected)
        weights_HF = torch.stack(tap.weights_F)
        assert weights_HF.shape == (3, horizon)
        assert torch.allclose(weights_HF.sum(-1), torch.ones(3))
        assert torch.allclose(tap.mean(), weights_HF.mean(0))
        # The output of a head is its values summed by its weights: heads 0 and 1 of layer 1 side by side.
        values_AFK = watched.cross[1][1][0, :, :horizon]
        ours = torch.cat([weights_HF[1] @ values_AFK[0], weights_HF[2] @ values_AFK[1]])
        assert torch.allclose(ours, summed[-1][0, -1], atol=1e-5)
