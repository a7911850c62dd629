"""Sound made harder for training: the same for a seed, of the right size, and what each kind promises."""

import numpy as np
import pytest

from zendaya.sources.media import SAMPLE_RATE
from zendaya.training.augment import at_speed, harder, in_room, noise, on_line


def tone(hertz, seconds=1.0):
    return (0.1 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE)).astype(np.float32)


def pitch(samples):
    return np.abs(np.fft.rfft(samples)).argmax() * SAMPLE_RATE / samples.size


def test_speed_changes_length_and_pitch():
    faster = at_speed(tone(400), 1.25)
    assert faster.size == round(SAMPLE_RATE / 1.25)
    assert pitch(faster) == pytest.approx(500, abs=2)


@pytest.mark.parametrize("seed", range(12))
def test_noise_has_power_one_and_is_the_same_for_a_seed(seed):
    one, other = noise(np.random.default_rng(seed), 8000), noise(np.random.default_rng(seed), 8000)
    assert np.array_equal(one, other)
    assert one.dtype == np.float32
    assert float(np.mean(one**2)) == pytest.approx(1.0, rel=1e-3)


def test_a_room_adds_an_echo_and_keeps_the_beginning():
    click = np.zeros(SAMPLE_RATE, np.float32)
    click[100] = 1.0
    heard = in_room(np.random.default_rng(0), click)
    assert heard.shape == click.shape
    assert np.abs(heard[:100]).max() < 1e-5
    assert heard[100] == pytest.approx(1.0, abs=1e-4)
    assert np.abs(heard[500:2000]).max() > 1e-3


def test_a_line_is_narrow():
    heard = on_line(np.random.default_rng(0), tone(7000) + tone(1000))
    assert pitch(heard) == pytest.approx(1000, abs=2)
    spectrum = np.abs(np.fft.rfft(heard))
    assert spectrum[7000] < 1e-3 * spectrum[1000]


def test_harder_sound_keeps_its_size_and_scale():
    results = [harder(np.random.default_rng(seed), tone(300)) for seed in range(30)]
    assert all(found.size == SAMPLE_RATE and np.abs(found).max() <= 1 for found in results)
    assert any(not np.array_equal(found, tone(300)) for found in results)
