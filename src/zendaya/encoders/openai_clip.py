"""OpenAI's CLIP: the projected image embedding per frame, of any CLIP that transformers can load (ViT-B/32 in the paper)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from zendaya.encoders._frames import FPS, FrameEncoder, square, to_tensor
from zendaya.encoders.base import EncoderFactory, weights_digest
from zendaya.errors import CheckpointError, MissingExtraError
from zendaya.nn.whisper import published_name, without_bars

# Of every CLIP that OpenAI published; a preprocessor_config.json may hold others.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


class OpenAIClip(FrameEncoder):
    """CLIP's image tower and projection, unnormalised, from a hub id or a folder."""

    def __init__(self, name: str = "openai/clip-vit-base-patch32", *, fps: float = FPS, **hub: Any) -> None:
        try:
            import transformers
            from transformers.utils import cached_file
        except ModuleNotFoundError:
            raise MissingExtraError("transformers", "video", "CLIP") from None
        try:
            with without_bars():  # safetensors only: a pickle could run code
                self.model = transformers.CLIPVisionModelWithProjection.from_pretrained(name, use_safetensors=True, **hub)
            # The settings it was published with; none, if there is no such file.
            path = cached_file(name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False, **hub)
            settings = json.loads(Path(path).read_bytes()) if path is not None else {}
            if not isinstance(settings, dict):
                raise ValueError("preprocessor_config.json is not a JSON object")
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(f"{name}: not a CLIP folder or hub id that can be loaded: {first}") from None
        self.model.eval().requires_grad_(False)
        size = self.model.config.image_size
        self.shortest, self.crop = _side(settings.get("size"), "shortest_edge", size), _side(settings.get("crop_size"), "height", size)
        if self.crop != size:
            sizes = f"its preprocessor crops to {self.crop} pixels, its model expects {size}"
            raise CheckpointError(f"{name}: {sizes}; get both files from one place")
        self.mean, self.std = settings.get("image_mean", MEAN), settings.get("image_std", STD)
        super().__init__(f"clip {published_name(name)} fps={fps:g}", self.model.config.projection_dim, fps)

    def embed(self, pixels_HW3: npt.NDArray[np.uint8]) -> Tensor:
        image = to_tensor(square(pixels_HW3, shortest=self.shortest, crop=self.crop), self.mean, self.std)
        return self.model(pixel_values=image).image_embeds[0]

    def digest(self) -> str:
        return weights_digest(self.model)


def _side(value: Any, key: str, default: int) -> int:
    """A side in pixels: a number in older files, an object in newer ones."""
    return int(value.get(key, default)) if isinstance(value, dict) else int(value or default)


ENCODER = EncoderFactory(modality="video", open=OpenAIClip, which="a hub id or folder", settings={"fps": float})
