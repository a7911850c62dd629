"""ActivityNet's published C3D features (Tran et al. 2015): 500 features of 16 frames, every 8 frames."""

from __future__ import annotations

from zendaya.encoders.base import EncoderFactory
from zendaya.encoders.features import PCA, Precomputed


def open_c3d(*, fps: float = 30.0, pca: str | None = None) -> Precomputed:
    """C3D rows of a video of `fps` frames per second, projected by the PCA saved at `pca`."""
    return Precomputed(500, fps / 8, window_s=16 / fps, pca=None if pca is None else PCA.load(pca), name="c3d")


ENCODER = EncoderFactory(modality="features", open=open_c3d, which="a feature file or folder", settings={"fps": float, "pca": str})
