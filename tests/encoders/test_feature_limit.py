"""One limit for feature values, from the feature file to the decoder."""

import numpy as np
import pytest
import torch

from zendaya.data.features.files import read_features
from zendaya.data.features.store import pack
from zendaya.encoders.base import Tokens
from zendaya.encoders.features import Precomputed
from zendaya.errors import SourceError
from zendaya.nn.decoder import LARGEST_FEATURE
from zendaya.serve.fields import FieldError
from zendaya.serve.intake import FeatureIntake


@pytest.mark.parametrize("value", [LARGEST_FEATURE, 1e20, -1e20, np.nan])
def test_a_value_beyond_the_limit_is_refused_everywhere(tmp_path, value):
    rows = np.ones((2, 3), np.float32)
    rows[1, 2] = value
    np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(SourceError, match="row 1 holds a feature"):
        read_features(tmp_path / "rows.npy")
    encoder = Precomputed(3, 1.0)
    state = encoder.start()
    assert len(encoder.read(state, rows)) == 1
    with pytest.raises(SourceError, match="row 1 holds a feature"):
        encoder.finish(state)
    for dtype in ("fp16", "int8", "fp32"):
        with pytest.raises(SourceError, match="token 1 holds a feature"):
            pack(Tokens(torch.from_numpy(rows), np.zeros(2)), dtype)
    with pytest.raises(FieldError, match="row 1 of the message"):  # before the message is acknowledged
        FeatureIntake(3, 1.0).check(rows.tobytes())


def test_a_value_below_the_limit_is_accepted_everywhere(tmp_path):
    rows = np.full((2, 3), np.nextafter(np.float32(LARGEST_FEATURE), np.float32(0)))
    np.save(tmp_path / "rows.npy", rows)
    assert np.array_equal(read_features(tmp_path / "rows.npy"), rows)
    encoder = Precomputed(3, 1.0)
    assert len(encoder.read(encoder.start(), rows)) == 2
    assert pack(Tokens(torch.from_numpy(rows), np.zeros(2)), "fp32")
    assert FeatureIntake(3, 1.0).check(rows.tobytes()) == 2.0
