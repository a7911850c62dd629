"""Clips cut out of recordings and videos."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from zendaya.data.features.clips import AudioClips, _Film, media_path
from zendaya.encoders.base import Encoder, Tokens, Traits
from zendaya.errors import SourceError
from zendaya.nn.whisper import published_name
from zendaya.records import Clip


class Seconds(Encoder):
    """One token per recording: its number of samples."""

    traits = Traits(name="seconds", modality="audio", dim=1, tokens_per_s=1.0, look_back_s=0, look_ahead_s=0, live=True)

    def start(self):
        return []

    def read(self, state, raw):
        state.append(raw.size)
        return Tokens.none(1)

    def finish(self, state):
        return Tokens(torch.tensor([[float(sum(state))]]), np.array([sum(state) / 16_000]))


def clip(media, end_s, start_s=0.0):
    return Clip(corpus="c", id="a", split="train", stream=media, references=("x",), start_s=start_s, end_s=end_s, media=media)


@pytest.fixture
def sounds(tmp_path):
    soundfile.write(tmp_path / "ok.wav", np.zeros(int(3.6 * 16_000)), 16_000)
    data = bytearray((tmp_path / "ok.wav").read_bytes())
    data[4:8], data[40:44] = ((6 * 32_000) + 36).to_bytes(4, "little"), (6 * 32_000).to_bytes(4, "little")
    (tmp_path / "cut.wav").write_bytes(data)  # its header says 6 s, it holds 3.6
    return AudioClips(Seconds(), tmp_path)


def test_an_end_far_past_the_recording_is_no_work(sounds):
    encoded = sounds.encode(clip("ok.wav", 1e10))
    assert float(encoded.tokens.values_TE) == 3.6 * 16_000
    assert encoded.kind == "short"


def test_a_cut_recording_is_noticed_inside_its_last_second(sounds):
    assert float(sounds.encode(clip("cut.wav", 3.5)).tokens.values_TE) == 3.5 * 16_000
    with pytest.raises(SourceError, match="cut short"):
        sounds.encode(clip("cut.wav", 4.0))


def test_a_film_gives_what_arrives_in_a_clip_whatever_the_order():
    parts = (Tokens(torch.full((1, 1), float(i)), np.array([float(i)])) for i in range(1, 20))
    film = _Film("film", parts, 1)
    for start_s, end_s in ((3.0, 6.0), (10.0, 12.0), (1.0, 2.0)):
        got = film.between(start_s, end_s).values_TE[:, 0].tolist()
        assert set(np.arange(start_s, end_s + 1)) <= set(got)
    assert len(film.between(9.0, 10.0)) < 8  # not all that was ever made


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside.wav").touch()
    (tmp_path / "inside" / "in.wav").touch()
    monkeypatch.chdir(tmp_path / "inside")
    for folder in (tmp_path / "inside", Path(), Path("../inside")):
        for name in ("../outside.wav", "x/../../outside.wav", "/etc/passwd", ""):
            with pytest.raises(SourceError, match="does not lie in the media folder"):
                media_path(folder, name)
        assert media_path(folder, "x/../in.wav").is_file()


def test_a_folder_is_called_by_its_own_name(tmp_path):
    (tmp_path / "my-clip").mkdir()
    assert published_name(str(tmp_path / "my-clip")) == "my-clip"
    assert published_name("openai/whisper-base") == "openai/whisper-base"
