"""Shared by encoders of single frames: one token per frame, which reads its own frame and nothing else.

Shape suffixes: H height, W width, E features of a token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zendaya.encoders.base import Encoder, Tokens, Traits
from zendaya.errors import ConfigError, MissingExtraError, SourceError
from zendaya.sources.media import Frame

if TYPE_CHECKING:
    from PIL import Image

FPS = 3.0
"""The paper's frame rate, in tokens per second."""


@dataclass
class FramesState:
    """A stream of frames: the number read, the end of the last one, and the error in the next one."""

    num_frames: int = 0
    end_s: float = field(default=-np.inf)
    problem: str | None = None


class FrameEncoder(Encoder[Sequence[Frame], FramesState]):
    """One token per frame, which arrives when its frame ends."""

    def __init__(self, name: str, dim: int, fps: float) -> None:
        if not 0 < fps < float("inf"):
            raise ConfigError(f"{name}: fps must be above 0 frames per second: got {fps!r}")
        self.traits = Traits(name=name, modality="video", dim=dim, tokens_per_s=fps, look_back_s=0.0, look_ahead_s=0.0, live=True)

    @abstractmethod
    def embed(self, pixels_HW3: npt.NDArray[np.uint8]) -> Tensor:
        """The token (E,) of one frame."""

    def start(self) -> FramesState:
        return FramesState()

    def read(self, state: FramesState, raw: Sequence[Frame]) -> Tokens:
        self.finish(state)
        values, arrivals = [], []
        for frame in raw:
            state.problem = _problem(frame, state)
            if state.problem is not None:
                break
            # Always a batch of one: the numbers of a frame must not depend on the other frames of its chunk.
            with torch.inference_mode():
                values.append(self.embed(frame.pixels).float())
            arrivals.append(frame.end_s)
            state.num_frames, state.end_s = state.num_frames + 1, frame.end_s
        if not values:
            return self.finish(state)
        return Tokens(torch.stack(values), np.array(arrivals))

    def finish(self, state: FramesState) -> Tokens:
        if state.problem is not None:
            raise SourceError(state.problem)
        return Tokens.none(self.traits.dim)


def _problem(frame: Frame, state: FramesState) -> str | None:
    pixels = frame.pixels
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        return (
            f"video: frame {state.num_frames}: expected RGB bytes of shape (height, width, 3), at least one pixel: "
            f"got {pixels.dtype} of shape {pixels.shape}"
        )
    if not frame.end_s >= state.end_s:
        return f"video: frame {state.num_frames} ends at {frame.end_s} s, before the last one ({state.end_s} s): put frames in time order"
    return None


def square(pixels_HW3: npt.NDArray[np.uint8], *, shortest: int, crop: int) -> Image.Image:
    """The centre square of an image, after its shorter side was resized to `shortest` (bicubic)."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise MissingExtraError("pillow", "video", "resizing frames") from None
    image = Image.fromarray(pixels_HW3)
    width, height = image.size
    # Rounded down and cropped at the centre, as transformers and torchvision do.
    new_width, new_height = (shortest, shortest * height // width) if width <= height else (shortest * width // height, shortest)
    left, top = (new_width - crop) // 2, (new_height - crop) // 2
    # A long thin image would grow to shortest × 1,000s first: then only the part that is kept is resized.
    scale_x, scale_y = width / new_width, height / new_height
    box = (left * scale_x, top * scale_y, (left + crop) * scale_x, (top + crop) * scale_y)
    if new_width * new_height <= 16 * shortest * shortest:
        return image.resize((new_width, new_height), Image.Resampling.BICUBIC).crop((left, top, left + crop, top + crop))
    return image.resize((crop, crop), Image.Resampling.BICUBIC, box=box)


def to_tensor(image: Image.Image, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """An image as (1, 3, H, W): bytes scaled to 0 … 1, minus the mean, divided by the deviation of each channel."""
    pixels_HW3 = torch.from_numpy(np.asarray(image, np.float32) / 255.0)
    return ((pixels_HW3 - torch.tensor(mean)) / torch.tensor(std)).permute(2, 0, 1)[None].contiguous()
