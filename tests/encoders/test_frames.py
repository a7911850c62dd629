"""Picture encoders: one token a frame, alone, on time."""

import dataclasses
import sys

import numpy as np
import pytest
import torch

from zendaya.encoders._frames import square
from zendaya.encoders.base import encode, stream
from zendaya.encoders.efficientnet import EfficientNetLite0
from zendaya.encoders.openai_clip import OpenAIClip
from zendaya.errors import CheckpointError, ConfigError, MissingExtraError, SourceError
from zendaya.sources.media import Frame, read_video


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small CLIP of random weights, saved as the hub has them."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 24}
    path = tmp_path_factory.mktemp("clip")
    config = CLIPConfig(
        vision_config={**tower, "image_size": 32, "patch_size": 8}, text_config={**tower, "vocab_size": 50}, projection_dim=24
    )
    CLIPModel(config).save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"size": 32, "crop_size": {"height": 32, "width": 32}, "image_mean": [0.5, 0.5, 0.5]}')
    return path


@pytest.fixture(scope="module")
def frames():
    generator = np.random.default_rng(0)
    return [Frame(generator.integers(0, 256, (48, 64, 3), np.uint8), i / 3, i / 3 + 0.04) for i in range(7)]


@pytest.fixture(scope="module")
def lite():
    return EfficientNetLite0()


def test_clip_is_that_of_transformers(folder, frames):
    from transformers import CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    clip = OpenAIClip(str(folder))
    tokens = encode(clip, [frames])
    processor = CLIPImageProcessorPil.from_pretrained(folder)
    pixels = processor([frame.pixels for frame in frames], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        expected = CLIPModel.from_pretrained(folder).eval().get_image_features(pixel_values=pixels)
    expected = expected if isinstance(expected, torch.Tensor) else expected.pooler_output
    assert tokens.values_TE.shape == (7, 24)
    torch.testing.assert_close(tokens.values_TE, expected, atol=1e-4, rtol=1e-4)
    assert (clip.traits.dim, clip.traits.tokens_per_s, clip.traits.live) == (24, 3.0, True)


def test_a_token_is_its_frame_whatever_the_chunks(folder, frames, lite):
    for encoder in (OpenAIClip(str(folder)), lite):
        whole = encode(encoder, [frames])
        single = list(stream(encoder, [[frame] for frame in frames]))
        assert torch.equal(torch.cat([part.values_TE for part in single]), whole.values_TE)
        assert whole.arrival_s.tolist() == [frame.end_s for frame in frames]
        assert torch.equal(encode(encoder, [frames[3:4]]).values_TE[0], whole.values_TE[3])


def test_a_clip_that_cannot_be_had(folder, tmp_path):
    with pytest.raises(CheckpointError, match="no-such"):
        OpenAIClip(str(tmp_path / "no-such"), local_files_only=True)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "preprocessor_config.json").write_text('{"crop_size": 224}')
    with pytest.raises(CheckpointError, match="crops to 224 pixels, its model expects 32"):
        OpenAIClip(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        OpenAIClip(str(tmp_path))
    (tmp_path / "preprocessor_config.json").unlink()
    assert OpenAIClip(str(tmp_path)).mean[0] == pytest.approx(0.4815, abs=1e-4)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not a CLIP folder"):
        OpenAIClip(str(tmp_path), local_files_only=True)


def test_efficientnet_needs_its_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(MissingExtraError, match=r"zendaya\[video\]"):
        EfficientNetLite0()


def test_bad_frames(lite, frames):
    empty = dataclasses.replace(frames[2], pixels=frames[2].pixels[:0])
    state = lite.start()
    assert len(lite.read(state, [*frames[:2], empty, frames[3]])) == 2
    for spent in (lambda: lite.read(state, frames[4:]), lambda: lite.finish(state)):
        with pytest.raises(SourceError, match=r"frame 2: expected RGB bytes .* got uint8 of shape \(0, 64, 3\)"):
            spent()
    grey = dataclasses.replace(frames[0], pixels=frames[0].pixels[..., 0])
    with pytest.raises(SourceError, match=r"frame 0: .* shape \(48, 64\)"):
        lite.read(lite.start(), [grey])
    with pytest.raises(SourceError, match="frame 1 ends at"):
        encode(lite, [[frames[1], frames[0]]])
    with pytest.raises(SourceError, match="empty"):
        encode(lite, [[]])
    with pytest.raises(ConfigError, match="fps"):
        EfficientNetLite0(fps=0)


def test_pictures_of_any_shape_become_squares():
    for height, width in ((48, 64), (64, 48), (10, 10), (1, 5000), (3000, 2)):
        assert square(np.zeros((height, width, 3), np.uint8), shortest=40, crop=32).size == (32, 32)
    ramp = np.broadcast_to(np.arange(200, dtype=np.uint8)[None, :, None], (2, 200, 3)).copy()
    middle = np.asarray(square(ramp, shortest=32, crop=32))[:, :, 0]
    assert abs(float(middle.mean()) - 99.5) < 2


def test_real_videos(data, lite):
    """Frames of one clip are nearer to each other than to those of other clips."""
    means, spread = [], []
    for path in sorted((data / "msvd/sample_videos").glob("*.avi"))[:4]:
        tokens = encode(lite, ([frame] for frame in read_video(path, fps=1)), where=str(path))
        assert tokens.values_TE.shape[1] == 1280
        means.append(tokens.values_TE.mean(0))
        spread.append(float(torch.cdist(tokens.values_TE, means[-1][None]).mean()))
    between = torch.pdist(torch.stack(means))
    print(f"within clips {np.mean(spread):.2f}, between clips {between.mean():.2f}")
    assert float(between.min()) > 0
    assert float(between.mean()) > np.mean(spread)
