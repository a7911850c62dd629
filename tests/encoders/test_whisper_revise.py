"""Whisper with provisional tokens and spans that slide: its numbers, their independence of chunks, where a span begins."""

import itertools

import numpy as np
import pytest
import torch

from zendaya.encoders.base import Tokens, encode
from zendaya.encoders.whisper import TOKEN, WhisperBlocks
from zendaya.errors import ConfigError

RATE = 16_000


@pytest.fixture(scope="module")
def sound(voice):
    """18 s of a voice with a pause of 0.3 s in each 5 s."""
    sound = np.concatenate([voice, voice[::-1], voice, voice[::-1]])[: 18 * RATE].copy()
    for start in range(3 * RATE, sound.size, 5 * RATE):
        sound[start : start + 3 * RATE // 10] *= 0.01
    return sound


def blocks_of(encoder, chunks):
    """Everything that an encoder gives for a recording, block by block."""
    state = encoder.start()
    found = [part for chunk in chunks for part in encoder.blocks(state, chunk)]
    return [*found, *encoder.last_blocks(state)]


def same(ours, theirs):
    def marks(parts):
        return [(part.revised, part.restart, part.arrival_s.tolist()) for part in parts]

    return marks(ours) == marks(theirs) and all(torch.equal(a.values_TE, b.values_TE) for a, b in zip(ours, theirs, strict=True))


def test_without_provisional_tokens_no_bit_changes(random_whisper, voice):
    plain = blocks_of(WhisperBlocks(random_whisper, "random", block_s=0.5), [voice])
    assert same(plain, blocks_of(WhisperBlocks(random_whisper, "random", block_s=0.5, revise_s=0.0, overlap_s=0.0), [voice]))
    assert not any(part.revised or part.restart is not None for part in plain)


def test_tokens_revised_to_the_last_are_those_of_one_block(random_whisper, voice):
    """Where every token is computed again with each block, the last versions are those of one bidirectional pass."""
    whole = encode(WhisperBlocks(random_whisper, "random", block_s=2.0), [voice[: 2 * RATE]])
    revised = encode(WhisperBlocks(random_whisper, "random", block_s=0.5, revise_s=2.0), [voice[: 2 * RATE]])
    assert float((whole.values_TE - revised.values_TE).abs().max()) < 1e-4
    plain = encode(WhisperBlocks(random_whisper, "random", block_s=0.5), [voice[: 2 * RATE]])
    assert float((plain.values_TE - revised.values_TE).abs().max()) > 1e-2
    assert set(revised.arrival_s) == {2.0}


def test_a_block_revises_the_tokens_before_it(random_whisper, voice):
    encoder = WhisperBlocks(random_whisper, "random", block_s=0.5, revise_s=0.3)
    assert encoder.traits.revise_tokens == 15
    assert "revise=0.3s" in encoder.traits.name
    assert encoder.with_settings(block_s=0.24).settings["revise_s"] == 0.3
    found = blocks_of(encoder, [voice])
    assert [part.revised for part in found] == [0, 15, 15, 15, 0, 15, 15, 15, 0, 15]  # spans of 2 s begin anew
    assert sum(len(part) - part.revised for part in found) == 250
    joined = encode(encoder, [voice])
    assert len(joined) == 250
    assert torch.equal(joined.values_TE[10:25], found[1].values_TE[:15])
    assert not torch.equal(found[0].values_TE[10:], found[1].values_TE[:15])


@pytest.mark.parametrize("settings", [{"revise_s": 0.6}, {"overlap_s": 1.6}, {"revise_s": 1.0, "overlap_s": 2.0}], ids=str)
def test_chunks_do_not_change_a_bit(long_whisper, sound, settings):
    encoder = WhisperBlocks(long_whisper, "random", block_s=0.5, **settings)
    expected = blocks_of(encoder, [sound])
    for size in (1237, 40_000):
        assert same(blocks_of(encoder, [sound[at : at + size] for at in range(0, sound.size, size)]), expected)
    if "overlap_s" in settings:
        assert sum(part.restart is not None for part in expected) >= 3


def test_a_span_begins_at_the_quietest_moment(long_whisper, sound):
    encoder = WhisperBlocks(long_whisper, "random", block_s=0.5, overlap_s=1.6)
    given, starts = 0, [0]
    for part in blocks_of(encoder, [sound]):
        if part.restart is not None:
            assert part.restart == given - part.revised
            assert 50 <= part.revised <= 150
            assert given + encoder.block - starts[-1] > encoder.span
            low, high = given - 150, given - 50
            around = {at: sound[(at - 5) * TOKEN : (at + 5) * TOKEN].astype(np.float64) for at in range(low, high + 1)}
            energies = {at: float((near**2).sum()) for at, near in around.items()}
            assert part.restart == min(energies, key=energies.get)
            starts.append(part.restart)
        given += len(part) - part.revised
    assert given == 900
    middles = [begin + 0.15 * RATE for begin in range(3 * RATE, 18 * RATE, 5 * RATE)]
    pauses = [at for at in starts if any(abs(at * TOKEN - middle) < 0.1 * RATE for middle in middles)]
    assert pauses, starts


def test_a_span_that_slides_is_a_fresh_recording(long_whisper, sound):
    encoder = WhisperBlocks(long_whisper, "random", block_s=0.5, overlap_s=1.6)
    part = next(part for part in blocks_of(encoder, [sound]) if part.restart is not None)
    state = encoder.start()
    state.again = part.revised  # one block of all these tokens, from the first
    fresh = next(encoder.blocks(state, sound[part.restart * TOKEN :]))
    assert torch.equal(fresh.values_TE, part.values_TE)


def test_parts_are_joined_with_their_revisions():
    def tokens(*values, revised=0):
        return Tokens(torch.tensor(values)[:, None], np.zeros(len(values)), revised)

    joined = Tokens.join([tokens(1.0, 2.0), tokens(3.0), tokens(20.0, 30.0, 4.0, revised=2)], 1)
    assert joined.values_TE[:, 0].tolist() == [1, 20, 30, 4]
    assert joined.revised == 0
    later = Tokens.join([tokens(0.5, 1.0, revised=1), tokens(5.0, 6.0, 7.0, revised=3)], 1)
    assert later.values_TE[:, 0].tolist() == [5, 6, 7]
    assert later.revised == 2  # one of its own, and one more that the second part replaces


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"revise_s": 0.5, "pool": 5}, "pool=1"),
        ({"revise_s": 0.51}, "revise_s must be a multiple of 0.02 s in 0 … 4"),
        ({"revise_s": -1.0}, "revise_s"),
        ({"revise_s": 4.2}, "revise_s"),
        ({"overlap_s": 0.5}, "overlap_s"),
        ({"overlap_s": 3.5}, "overlap_s"),
        ({"span_s": 31.0}, "span_s"),
        ({"span_s": 2.5, "overlap_s": 1.0}, "two blocks and 2 s"),
    ],
)
def test_bad_settings_are_refused(long_whisper, settings, words):
    with pytest.raises(ConfigError, match=words):
        WhisperBlocks(long_whisper, "random", block_s=0.5, **settings)


def test_memory_stays_bounded(long_whisper, sound):
    encoder = WhisperBlocks(long_whisper, "random", block_s=0.5, revise_s=1.0, overlap_s=2.0)
    state, kept = encoder.start(), []
    for chunk in itertools.chain.from_iterable(np.split(sound, 36) for _ in range(2)):
        list(encoder.blocks(state, chunk))
        kept.append(state.heard.kept_S.size)
    assert max(kept) < 5 * RATE
