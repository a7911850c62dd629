"""Precomputed feature rows, and the PCA."""

import numpy as np
import pytest
import safetensors.numpy
import torch

from zendaya.encoders.base import encode, readable_prefix
from zendaya.encoders.c3d import open_c3d
from zendaya.encoders.features import PCA, Precomputed
from zendaya.errors import CheckpointError, ConfigError, SourceError

ROWS = np.random.default_rng(0).standard_normal((40, 12)).astype(np.float32)


@pytest.mark.parametrize("shape", [(10,), (10, 3), (10, 25), (2, 3, 5), (0, 4), (3, 0)])
def test_the_readable_prefix_does_not_depend_on_the_blocks(monkeypatch, shape):
    monkeypatch.setattr("zendaya.encoders.base.BLOCK_VALUES", 8)
    values = np.ones(shape, np.float16)
    assert readable_prefix(values, 1e30) == shape[0]
    for place in np.ndindex(shape):
        bad = values.copy()
        bad[place] = np.nan
        bad[-1] = np.inf
        assert readable_prefix(bad, 1e30) == place[0]


def test_pca_is_that_of_the_covariance(tmp_path):
    mixed = ROWS @ np.diag(np.linspace(3, 0.1, 12)).astype(np.float32) + 5
    pca = PCA.fit([mixed[:10], mixed[10:]], dim=4)
    centred = mixed.astype(np.float64) - mixed.mean(0)
    _, sizes, vectors = np.linalg.svd(centred, full_matrices=False)
    expected = centred @ vectors[:4].T
    got = pca.apply(torch.from_numpy(mixed)).numpy()
    assert np.allclose(np.abs(got), np.abs(expected), atol=1e-4)
    assert pca.explained == pytest.approx((sizes[:4] ** 2).sum() / (sizes**2).sum(), abs=1e-6)
    pca.save(tmp_path / "pca.safetensors")
    loaded = PCA.load(tmp_path / "pca.safetensors")
    assert torch.equal(loaded.apply(torch.from_numpy(mixed)), pca.apply(torch.from_numpy(mixed)))
    assert loaded.explained == pca.explained
    with pytest.raises(ConfigError, match=r"dim must lie in 1 … 12"):
        PCA.fit([mixed], dim=13)
    with pytest.raises(ConfigError, match=r"dim must lie in 1 … 0"):
        PCA.fit([], dim=1)


def test_a_pca_that_is_not_one(tmp_path):
    safetensors.numpy.save_file({"mean": ROWS[0]}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="got another file"):
        PCA.load(tmp_path / "other.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"words")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        PCA.load(tmp_path / "cut.safetensors")
    PCA(torch.zeros(5), torch.zeros(4, 2), 1.0).save(tmp_path / "odd.safetensors")
    with pytest.raises(CheckpointError, match="do not belong together"):
        PCA.load(tmp_path / "odd.safetensors")
    PCA(torch.zeros(4), torch.zeros(4, 2), 1.0).save(tmp_path / "fits.safetensors")
    with pytest.raises(ConfigError, match="fitted on 4 features per row: got 12"):
        Precomputed(12, 3.0, pca=PCA.load(tmp_path / "fits.safetensors"))


@pytest.mark.parametrize("size", [1, 5, 16, 17, 40])
def test_chunks_of_rows_do_not_change_a_bit(size):
    encoder = Precomputed(12, 3.0, pca=PCA.fit([ROWS], dim=7))
    whole = encode(encoder, [ROWS])
    got = encode(encoder, [ROWS[first : first + size] for first in range(0, 40, size)])
    assert torch.equal(got.values_TE, whole.values_TE)
    assert np.array_equal(got.arrival_s, whole.arrival_s)
    assert whole.values_TE.shape == (40, 7)


def test_rows_arrive_at_the_end_of_their_window():
    c3d = open_c3d(fps=30)
    tokens = encode(c3d, [np.zeros((3, 500), np.float32)])
    assert tokens.arrival_s == pytest.approx([16 / 30, 24 / 30, 32 / 30])
    assert c3d.traits.look_ahead_s == pytest.approx(8 / 30)
    assert encode(Precomputed(12, 4.0), [ROWS[:2]]).arrival_s.tolist() == [0.25, 0.5]
    with pytest.raises(ConfigError, match="above 0"):
        Precomputed(12, 0.0)


def test_bad_rows_are_an_error_after_all_that_came_before():
    encoder, bad = Precomputed(12, 3.0), ROWS.copy()
    bad[5] = np.nan
    state = encoder.start()
    assert torch.equal(encoder.read(state, bad).values_TE, torch.from_numpy(ROWS[:5]))
    with pytest.raises(SourceError, match="row 5"):
        encoder.finish(state)
    with pytest.raises(SourceError, match=r"shape \(any, 12\): got \(3, 11\)"):
        encoder.read(encoder.start(), ROWS[:3, :11])
