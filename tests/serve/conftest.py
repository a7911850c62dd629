"""Models that the tests of the server share."""

import pytest
import torch

from zendaya import Model
from zendaya.encoders.whisper import WhisperBlocks
from zendaya.serve.intake import Served


@pytest.fixture(scope="session")
def tiny():
    return Served("tiny", Model.from_preset("tiny", seed=3))


@pytest.fixture(scope="session")
def hearing():
    """A small random model that takes audio; its tests send noise, and so turn the voice gate off."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(3)
    encoder = WhisperEncoder(WhisperConfig(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32))
    return Served("hearing", Model.from_preset("tiny", seed=3), WhisperBlocks(encoder, "random", pool=15))
