"""What the tests of the server share."""

import pytest
import torch

from zendaya import Model
from zendaya.encoders.whisper_stream import WhisperBlocks
from zendaya.serve.served import Served


@pytest.fixture(scope="session")
def tiny():
    return Served("tiny", Model.from_preset("tiny", seed=3))


@pytest.fixture(scope="session")
def hearing():
    """A model that hears, if it understands nothing: small and random."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(3)
    encoder = WhisperEncoder(WhisperConfig(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32))
    return Served("hearing", Model.from_preset("tiny", seed=3), WhisperBlocks(encoder, "random", pool=15))
