import os
from pathlib import Path

import numpy as np
import pytest
import torch

from zendaya.encoders.whisper_stream import load_whisper

DATA = Path(os.environ.get("ZENDAYA_DATA") or Path(__file__).parents[3] / "../shared/data")


@pytest.fixture(scope="session")
def data():
    if not DATA.is_dir():
        pytest.skip(f"the real published files are not here: {DATA} (set ZENDAYA_DATA to where they are)")
    return DATA


@pytest.fixture(scope="session")
def tiny_en():
    """The real tiny.en, loaded once: block mode with 1 s blocks, and the transformers encoder inside."""
    return load_whisper("tiny.en")


@pytest.fixture(scope="session")
def random_whisper():
    """A Whisper encoder of random weights whose span is 2 s, so that spans end quickly."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, max_source_positions=100, num_mel_bins=80,
        decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=64, vocab_size=100, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        decoder_start_token_id=1,
    )  # fmt: skip
    encoder = WhisperEncoder(config).eval()
    for parameter in encoder.parameters():  # transformers' initial weights are so small that attention hardly matters
        torch.nn.init.normal_(parameter, std=0.2)
    return encoder


@pytest.fixture(scope="session")
def voice():
    """Five seconds of something like a voice: harmonics that glide and pulse."""
    time = np.arange(5 * 16_000) / 16_000
    generator = np.random.default_rng(0)
    phase = 2 * np.pi * np.cumsum(120 + 40 * np.sin(3 * time)) / 16_000
    sound = sum(np.sin(k * phase) / k for k in range(1, 12)) * (0.6 + 0.4 * np.sin(9 * time))
    return (0.1 * sound + 0.01 * generator.standard_normal(time.size)).astype(np.float32)
