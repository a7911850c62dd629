"""Whisper over a stream: the numbers, their independence of chunks, their arrival, and what may never be read."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zendaya.encoders.base import Tokens, encode, stream
from zendaya.encoders.whisper import WhisperBlocks, WhisperFull, load_whisper
from zendaya.errors import CheckpointError, ConfigError, SourceError
from zendaya.nn.whisper import encode_offline
from zendaya.sources.media import read_audio

RATE = 16_000


def cut(samples, size):
    return [samples[first : first + size] for first in range(0, len(samples), size)]


def same(a, b):
    return torch.equal(a.values_TE, b.values_TE) and np.array_equal(a.arrival_s, b.arrival_s)


def masked_reference(blocks, samples):
    """One span at once, by transformers' own layers with a block-causal mask over the mel frames of the whole recording."""
    from transformers import WhisperFeatureExtractor

    encoder, span, block = blocks.encoder, blocks.span, blocks.block
    filters = torch.from_numpy(WhisperFeatureExtractor().mel_filters.T.copy()).float()
    stft = torch.stft(torch.from_numpy(samples), 400, 160, window=torch.hann_window(400), return_complex=True)
    log = (filters @ stft.abs() ** 2).clamp(min=1e-10).log10()
    mel = (log.clamp(min=blocks.floor) + 4) / 4
    with torch.inference_mode():
        x = torch.nn.functional.gelu(encoder.conv2(torch.nn.functional.gelu(encoder.conv1(mel[None]))))[0].T[:span]
        x = (x + encoder.embed_positions.weight)[None]
        number = torch.arange(span) // block
        mask = torch.where(number[:, None] >= number, 0.0, -torch.inf)[None, None]
        for layer in encoder.layers:
            x = layer(x, mask)
            x = x[0] if isinstance(x, tuple) else x
        return encoder.layer_norm(x)[0]


@pytest.mark.parametrize("block_s", [0.24, 0.5, 1.0, 2.0])
def test_a_span_is_whisper_with_a_block_causal_mask(random_whisper, voice, block_s):
    blocks = WhisperBlocks(random_whisper, "random", block_s=block_s)
    expected = masked_reference(blocks, voice)
    got = encode(blocks, [voice]).values_TE[:100]
    assert float((got - expected).abs().max()) < 1e-4
    assert float(expected.std()) > 0.1


@given(
    sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=12),
    block=st.sampled_from([0.24, 0.5, 1.0, 1.3]),
    pool=st.sampled_from([1, 15, 7]),
)
def test_chunks_do_not_change_a_bit(random_whisper, voice, sizes, block, pool):
    blocks = WhisperBlocks(random_whisper, "random", block_s=block, pool=pool)
    places = np.cumsum([0, *sizes])
    chunks = [*(voice[a:b] for a, b in itertools.pairwise(places)), voice[places[-1] :]]
    assert same(encode(blocks, chunks), encode(blocks, [voice]))


@pytest.mark.parametrize("block_s", [0.24, 1.0])
@pytest.mark.parametrize("seconds", [0.3, 1.0, 1.0125, 2.6, 4.1])
def test_a_prefix_gives_the_beginning_of_the_whole(random_whisper, voice, block_s, seconds):
    blocks = WhisperBlocks(random_whisper, "random", block_s=block_s)
    whole, count = encode(blocks, [voice]), round(seconds * RATE)
    prefix = encode(blocks, cut(voice[:count], 1600))
    early = int((whole.arrival_s <= count / RATE).sum())
    assert torch.equal(prefix.values_TE[:early], whole.values_TE[:early])
    assert len(prefix) == math.ceil(count / 320)
    assert early >= (seconds - block_s - 0.0125) * 50 - 1


def test_a_token_arrives_with_the_last_sample_it_read(random_whisper, voice):
    blocks = WhisperBlocks(random_whisper, "random", block_s=0.5)
    tokens = encode(blocks, [voice])
    # Blocks of 25 tokens: the first is there 200 samples after its end, the last at the end of the recording.
    assert tokens.arrival_s[0] == tokens.arrival_s[24] == (8000 + 200) / RATE
    assert tokens.arrival_s[25] == (16_000 + 200) / RATE
    assert tokens.arrival_s[-1] == len(voice) / RATE
    assert (np.diff(tokens.arrival_s) >= 0).all()
    own_end = np.arange(1, len(tokens) + 1) / blocks.traits.tokens_per_s
    assert (tokens.arrival_s - own_end).max() <= blocks.traits.look_ahead_s + 1e-9


def test_the_last_sample_of_a_block_is_read_and_the_next_is_not(random_whisper, voice):
    blocks = WhisperBlocks(random_whisper, "random", block_s=0.5)
    whole = encode(blocks, [voice]).values_TE[:25]
    # The Hann window is small at its edge: a click shows that the last sample but one is read.
    for sample, differs in ((8000 + 198, True), (8000 + 200, False)):
        changed = voice.copy()
        changed[sample] += 100.0
        assert torch.equal(encode(blocks, [changed]).values_TE[:25], whole) is not differs


def test_nothing_comes_before_a_block_is_there(random_whisper, voice):
    blocks = WhisperBlocks(random_whisper, "random", block_s=0.5)
    state = blocks.start()
    assert len(blocks.read(state, voice[:8199])) == 0
    assert len(blocks.read(state, voice[8199:8200])) == 25


def test_spans_are_independent(random_whisper, voice):
    blocks = WhisperBlocks(random_whisper, "random", block_s=0.5, pool=7)
    per_span = math.ceil(100 / 7)
    whole, second = encode(blocks, [voice]), encode(blocks, [voice[2 * RATE :]])
    assert torch.equal(whole.values_TE[per_span:], second.values_TE)
    assert np.allclose(whole.arrival_s[per_span:], second.arrival_s + 2)
    noise = voice.copy()
    noise[: 2 * RATE] = 0.05
    assert torch.equal(encode(blocks, [noise]).values_TE[per_span:], second.values_TE)


def test_pooling_is_the_mean(random_whisper, voice):
    single = encode(WhisperBlocks(random_whisper, "random", block_s=1.0), [voice])
    pooled = encode(WhisperBlocks(random_whisper, "random", block_s=1.0, pool=25), [voice])
    torch.testing.assert_close(pooled.values_TE, single.values_TE.view(-1, 25, 32).mean(1))
    assert np.array_equal(pooled.arrival_s, single.arrival_s[24::25])


def test_a_group_closed_by_the_end_arrives_at_the_end(random_whisper, voice):
    blocks = WhisperBlocks(random_whisper, "random", block_s=0.5, pool=15)
    tokens = encode(blocks, [voice[:8300]])  # 25 tokens by 8200 samples, a 26th from the last 300
    assert len(tokens) == 2
    assert tokens.arrival_s.tolist() == [8200 / RATE, 8300 / RATE]


def test_memory_is_constant(random_whisper, voice):
    blocks = WhisperBlocks(random_whisper, "random", block_s=0.5, pool=15)
    state, held = blocks.start(), []
    for _ in range(6):
        for chunk in cut(voice, 4000):
            blocks.read(state, chunk)
        held.append(state.heard.kept_S.nbytes + sum(k.nbytes + v.nbytes for k, v in state.cache) + 128 * len(state.unpooled))
    assert max(held) < 2 * 2 * 2 * 100 * 16 * 4 + 4 * (2 * 8000 + 720 + 4000) + 128 * 15 + 1
    assert state.heard.total == 30 * RATE


def test_loudness_of_the_future_does_not_matter(random_whisper, voice):
    blocks = WhisperBlocks(random_whisper, "random", block_s=0.5)
    loud = voice.copy()
    loud[3 * RATE :] *= 100
    whole, other = encode(blocks, [voice]), encode(blocks, [loud])
    assert torch.equal(whole.values_TE[:125], other.values_TE[:125])
    assert not torch.equal(whole.values_TE[150:], other.values_TE[150:])


def test_a_bad_sample_is_an_error_after_all_that_came_before_it(random_whisper, voice):
    blocks = WhisperBlocks(random_whisper, "random", block_s=0.5)
    bad = voice.copy()
    bad[40_000] = np.nan
    state = blocks.start()
    assert torch.equal(blocks.read(state, bad).values_TE, encode(blocks, [voice]).values_TE[:100])
    with pytest.raises(SourceError, match=r"sample 40000 \(2\.500 s\) is nan"):
        blocks.read(state, voice)
    with pytest.raises(SourceError, match="sample 40000"):
        blocks.finish(state)
    with pytest.raises(SourceError, match=r"sample 0 .* is inf"):
        blocks.read(blocks.start(), np.full(10, np.inf, np.float32))


def test_wrong_audio_is_refused(random_whisper):
    blocks = WhisperBlocks(random_whisper, "random")
    with pytest.raises(SourceError, match=r"one channel .* got float32 of shape \(2, 100\)"):
        blocks.read(blocks.start(), np.zeros((2, 100), np.float32))
    with pytest.raises(SourceError, match="got int16"):
        blocks.read(blocks.start(), np.zeros(100, np.int16))
    with pytest.raises(SourceError, match=r"clip\.wav: empty"):
        encode(blocks, [], where="clip.wav")


@pytest.mark.parametrize(
    "settings", [{"block_s": 0.2}, {"block_s": 2.02}, {"block_s": 0.25}, {"pool": 0}, {"pool": 101}, {"ceiling": math.inf}]
)
def test_impossible_settings_are_refused(random_whisper, settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        WhisperBlocks(random_whisper, "random", **settings)
    with pytest.raises(ConfigError, match="mode"):
        load_whisper("tiny.en", mode="causal")


def test_any_size_loads_from_a_folder(tmp_path, voice, random_whisper):
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, WhisperForConditionalGeneration

    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(random_whisper.config)
    model.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())).save_pretrained(tmp_path)
    blocks = load_whisper(str(tmp_path), block_s=0.5, pool=5)
    tokens = encode(blocks, [voice])
    direct = encode(WhisperBlocks(model.model.encoder.eval(), "direct", block_s=0.5, pool=5), [voice])
    assert torch.equal(tokens.values_TE, direct.values_TE)
    assert (blocks.traits.dim, blocks.traits.tokens_per_s) == (32, 10)
    with pytest.raises(CheckpointError, match="no-such-folder"):
        load_whisper(str(tmp_path / "no-such-folder"), local_files_only=True)


def test_full_mode_is_whisper_and_offline_only(tiny_en, voice):
    full = WhisperFull(tiny_en.encoder, "tiny.en")
    tokens = encode(full, cut(voice, 5000))
    assert torch.equal(tokens.values_TE, encode_offline(tiny_en.encoder, voice)[:250])
    assert set(tokens.arrival_s) == {5.0}
    assert not full.traits.live
    assert full.traits.look_ahead_s == math.inf
    with pytest.raises(ConfigError, match="offline only"):
        stream(full, [voice])
    pooled = encode(WhisperFull(tiny_en.encoder, "tiny.en", pool=100), [voice])
    assert len(pooled) == 3
    torch.testing.assert_close(pooled.values_TE[2], tokens.values_TE[200:].mean(0))
    with pytest.raises(SourceError, match="is nan"):
        encode(full, [np.full(10, np.nan, np.float32)])


def test_real_speech(data, tiny_en):
    line = next(line for line in (data / "librispeech/long30.jsonl").read_text().splitlines())
    manifest = [json.loads(row) for row in (data / "librispeech/manifest.jsonl").read_text().splitlines()]
    parts = [manifest[index] for index in json.loads(line)["idx"]]
    samples = np.concatenate([chunk.samples for part in parts for chunk in read_audio(data / "librispeech" / part["audio"])])
    samples = np.concatenate([samples, samples])[: 34 * RATE]  # past the end of a span
    tokens = encode(tiny_en, [samples])
    assert tokens.values_TE.shape == (1700, 384)
    assert same(encode(tiny_en, cut(samples, 1237)), tokens)
    prefix = encode(tiny_en, [samples[: 7 * RATE + 200]])
    assert float((prefix.values_TE[:350] - tokens.values_TE[:350]).abs().max()) <= 1e-4
    # Reading no further than its block changes Whisper's tokens, but they stay Whisper's: far nearer than those of another moment.
    full = encode(WhisperFull(tiny_en.encoder, "tiny.en"), [samples[: 30 * RATE]]).values_TE
    near = torch.nn.functional.cosine_similarity(full, tokens.values_TE[:1500]).mean()
    far = torch.nn.functional.cosine_similarity(full.roll(100, 0), tokens.values_TE[:1500]).mean()
    print(f"cosine with full mode: {near:.3f}, with another moment: {far:.3f}")
    assert near > 0.85
    assert near > far + 0.2


@pytest.mark.parametrize("size", [1000, 5000, 10**6])
def test_a_span_that_begins_within_a_block_is_a_fresh_recording(random_whisper, voice, size):
    blocks = WhisperBlocks(random_whisper, "random", block_s=0.5)
    at, state, parts = 30 * 320, blocks.start(), []  # in the second block of 25 tokens
    for chunk in cut(voice, size):
        for tokens in blocks.blocks(state, chunk):
            parts.append(tokens)
            if len(parts) == 2:
                blocks.begin_span(state, at_s=at / RATE)
    parts.append(blocks.finish(state))
    fresh = encode(blocks, [voice[at:]])
    again = Tokens.join(parts[2:], blocks.traits.dim)
    assert torch.equal(again.values_TE, fresh.values_TE)
    assert again.arrival_s == pytest.approx(fresh.arrival_s + at / RATE)
    with pytest.raises(SourceError, match="last block"):
        blocks.begin_span(state, at_s=0)
