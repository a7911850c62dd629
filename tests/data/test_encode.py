"""The job: clips in order whoever encodes them, killed and resumed to the same bytes; live and stored features are the same numbers."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import av
import h5py
import numpy as np
import pytest
import soundfile
import torch

from zendaya.data.corpora import registry as corpora
from zendaya.data.features.clips import media_path, open_clip_encoder
from zendaya.data.features.encode import encode_clips, encode_corpus
from zendaya.data.features.options import EncodeOptions
from zendaya.data.features.store import FeatureStore, Signature, StoreWriter
from zendaya.encoders.base import Tokens, stream
from zendaya.encoders.c3d import open_c3d
from zendaya.encoders.features import PCA
from zendaya.encoders.registry import EncoderSpec
from zendaya.encoders.whisper import load_whisper
from zendaya.errors import ConfigError, CorpusError, SourceError, StoreError
from zendaya.nn.tokenizer import Tokenizer
from zendaya.records import Clip
from zendaya.sources.media import read_audio, read_video

DATA = Path(os.environ.get("ZENDAYA_DATA") or Path(__file__).parents[2] / "../shared/data")


def contents(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def published(name):
    if not (DATA / name).exists():
        pytest.skip(f"the real published files are not here: {name} (set ZENDAYA_DATA to where they are)")
    return DATA / name


def manifest(folder, clips):
    path = folder / "my.jsonl"
    path.write_text("".join(json.dumps({"text": "words", **clip}) + "\n" for clip in clips))
    return path


def voice(seconds, seed=0):
    time_s = np.arange(int(seconds * 16_000)) / 16_000
    sound = sum(np.sin(2 * np.pi * k * (120 + 30 * seed + 9 * np.sin(3 * time_s)) * time_s) / k for k in range(1, 8))
    return (0.05 * sound * (0.6 + 0.4 * np.sin(9 * time_s))).astype(np.float32)


def film(path, seconds, fps=25):
    with av.open(str(path), "w") as out:
        pictures = out.add_stream("mpeg4", rate=fps)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        for index in range(int(seconds * fps)):
            shade = np.arange(64 * 48 * 3).reshape(48, 64, 3) + 7 * index
            out.mux(pictures.encode(av.VideoFrame.from_ndarray((shade % 256).astype(np.uint8), format="rgb24")))
        out.mux(pictures.encode(None))


@pytest.fixture
def rows(tmp_path):
    """A corpus of 30 clips in ten streams with precomputed features, two of which are missing and one of which is damaged."""
    generator = np.random.default_rng(0)
    with h5py.File(tmp_path / "all.h5", "w") as file:
        for number in range(10):
            values = generator.standard_normal((30, 6)).astype(np.float32)
            if number == 5:
                values[20] = np.nan
            if number != 3:
                file[f"v{number}/c3d"] = values
    clips = [
        {"id": f"{n}", "media": f"v{n // 3}", "start_s": 3.0 * (n % 3), "end_s": 3.0 * (n % 3) + 3, "split": "test" if n >= 24 else "train"}
        for n in range(30)
    ]
    return manifest(tmp_path, clips)


def encode_rows(rows, out, *, encoder="features:all.h5,rate=3", **options):
    return encode_corpus("manifest", rows, out, encoder=encoder, options=EncodeOptions(**{"dtype": "fp32"} | options))


# What is encoded.


def test_rows_that_arrive_during_a_clip_are_its_own(rows, tmp_path):
    summary = encode_rows(rows, tmp_path / "s")
    assert (summary.num_clips, summary.num_encoded, summary.num_failed) == (30, 24, 6)
    assert summary.problems == {"unreadable": 6}
    opened = FeatureStore.open(tmp_path / "s", corpus="manifest", encoder="features dim=6 rate=3 window=0.333333s")
    with h5py.File(tmp_path / "all.h5") as file:
        whole = np.concatenate([opened.get(str(n)).values_TE.numpy() for n in (3, 4, 5)])
        assert np.array_equal(whole[:27], file["v1/c3d"][:27])  # consecutive clips share no row and lose none
    assert np.allclose(opened.get("4").arrival_s, np.arange(1, 10) / 3)
    reasons = {entry.id: entry.reason for entry in opened.problems}
    assert set(reasons) == {"9", "10", "11", "15", "16", "17"}
    assert "no '/v3' in it" in reasons["9"]
    assert "all.h5, 'v5': row 20 holds a feature that is not finite" in reasons["15"]
    assert str(tmp_path) not in (tmp_path / "s" / "problems.jsonl").read_text()


def test_split_and_limit_choose_clips_and_a_later_run_goes_on(rows, tmp_path):
    assert encode_rows(rows, tmp_path / "s", limit=4).num_encoded == 4
    summary = encode_rows(rows, tmp_path / "s")
    assert (summary.num_resumed, summary.num_clips) == (4, 30)
    encode_rows(rows, tmp_path / "whole")
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")
    assert encode_rows(rows, tmp_path / "test", split="test").num_clips == 6
    assert encode_rows(rows, tmp_path / "test", split="test").num_resumed == 6
    with pytest.raises(StoreError, match=r"expected split '': got 'test'"):
        encode_rows(rows, tmp_path / "s", split="test")
    with pytest.raises(StoreError, match="holds 30 clips already, more than the 3 to encode"):
        encode_rows(rows, tmp_path / "s", limit=3)
    with pytest.raises(CorpusError, match=r"no clip in split 'dev'; its splits are test, train"):
        encode_rows(rows, tmp_path / "s", split="dev")


def test_a_store_of_other_settings_is_not_added_to(rows, tmp_path):
    encode_rows(rows, tmp_path / "s", limit=2)
    for options, message in (
        ({"encoder": "features:all.h5,rate=5"}, "expected encoder"),
        ({"dtype": "int8"}, "expected dtype"),
    ):
        with pytest.raises(StoreError, match=f"holds other features: {message}"):
            encode_rows(rows, tmp_path / "s", **options)
    with h5py.File(tmp_path / "all.h5", "a") as file:
        file["v0/c3d"][0] = 7
    with pytest.raises(StoreError, match="holds other features: expected encoder_digest"):
        encode_rows(rows, tmp_path / "s")


def test_retry_takes_up_what_was_put_right(rows, tmp_path):
    (tmp_path / "files").mkdir()
    with h5py.File(tmp_path / "all.h5") as file:
        for number in (0, 1, 2, 4):
            np.save(tmp_path / "files" / f"v{number}.npy", file[f"v{number}/c3d"])
    assert encode_rows(rows, tmp_path / "s", encoder="features:files", limit=15).num_failed == 3
    np.save(tmp_path / "files" / "v3.npy", np.ones((30, 6), np.float32))
    assert encode_rows(rows, tmp_path / "s", encoder="features:files", limit=15).num_failed == 3
    summary = encode_rows(rows, tmp_path / "s", encoder="features:files", limit=15, retry=True)
    assert (summary.num_failed, summary.num_resumed) == (0, 9)
    assert torch.equal(FeatureStore.open(tmp_path / "s").get("10").values_TE, torch.ones(9, 6))


def test_retry_under_an_open_store_ends_as_an_undisturbed_run(tmp_path):
    path = manifest(tmp_path, [{"id": name, "media": f"{name}.npy", "end_s": 3.0} for name in "abcd"])
    for name, value in (("a", 97.0), ("c", 99.0), ("d", 100.0)):
        np.save(tmp_path / f"{name}.npy", np.full((9, 4), value, np.float32))
    encode_rows(path, tmp_path / "s", encoder="features")
    opened, unused = FeatureStore.open(tmp_path / "s"), FeatureStore.open(tmp_path / "s")
    assert float(opened.get("c").values_TE[0, 0]) == 99.0
    np.save(tmp_path / "b.npy", np.full((9, 4), 98.0, np.float32))
    encode_rows(path, tmp_path / "s", encoder="features", retry=True)
    for reader in (opened, unused):
        assert [float(reader.get(name).values_TE.mean()) for name in "acd"] == [97.0, 99.0, 100.0]
    encode_rows(path, tmp_path / "whole", encoder="features")
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def test_a_run_that_has_nothing_to_do_finds_damage(rows, tmp_path):
    assert not encode_rows(rows, tmp_path / "s", limit=5).verified
    assert encode_rows(rows, tmp_path / "s", verify=True).verified
    assert encode_rows(rows, tmp_path / "s").verified
    shard = tmp_path / "s" / "tokens-00000.bin"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(StoreError, match=r"tokens-00000\.bin: checksum does not match at clip '\d+'") as raised:
        encode_rows(rows, tmp_path / "s")
    assert "\n" not in str(raised.value)


def test_damage_of_existing_data_is_found_on_request(rows, tmp_path):
    encode_rows(rows, tmp_path / "s", limit=5)
    shard = tmp_path / "s" / "tokens-00000.bin"
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(StoreError, match=r"tokens-00000\.bin: checksum does not match at clip '0'"):
        encode_rows(rows, tmp_path / "s", verify=True)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError()])
def test_a_clip_without_memory_fails_alone(tmp_path, monkeypatch, error):
    soundfile.write(tmp_path / "talk.wav", voice(6), 16_000)
    path = manifest(tmp_path, [{"id": f"{n}", "media": "talk.wav", "start_s": n, "end_s": n + 1.0} for n in range(6)])
    encode_corpus("manifest", path, tmp_path / "whole", encoder="whisper,block_s=0.5")
    whole, count = FeatureStore.open(tmp_path / "whole"), 0

    def reading(*arguments, **options):
        nonlocal count
        for chunk in read_audio(*arguments, **options):
            count += 1
            if count == 3:  # in the midst of the recording, which must not seem to end here
                raise error
            yield chunk

    monkeypatch.setattr("zendaya.data.features.clips.read_audio", reading)
    summary = encode_corpus("manifest", path, tmp_path / "s", encoder="whisper,block_s=0.5")
    assert (summary.num_failed, summary.problems) == (1, {"memory": 1})
    opened = FeatureStore.open(tmp_path / "s")
    assert [entry.reason for entry in opened.problems] == ["talk.wav: not enough memory for this clip"]
    for entry in opened:
        assert torch.equal(opened.get(entry.id).values_TE, whole.get(entry.id).values_TE)
    encode_corpus("manifest", path, tmp_path / "s", encoder="whisper,block_s=0.5", options=EncodeOptions(retry=True))
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def test_errors_other_than_memory_still_end_the_run(rows, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("zendaya.data.features.clips.FeatureClips.encode", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        encode_rows(rows, tmp_path / "s")


def test_a_failed_clip_names_its_media_and_not_the_folder(tmp_path):
    clips = [
        {"id": "good", "media": "good.npy", "end_s": 3.0},
        {"id": "huge", "media": "huge.npy", "end_s": 3.0},
        {"id": "back", "media": str(tmp_path / "good.npy"), "start_s": 3.0, "end_s": 2.0},
        {"id": "gone", "media": "gone.npy", "end_s": 3.0},
    ]
    np.save(tmp_path / "good.npy", np.ones((9, 4), np.float32))
    np.save(tmp_path / "huge.npy", np.full((9, 4), 1e6, np.float32))
    encode_rows(manifest(tmp_path, clips), tmp_path / "s", encoder="features", dtype="fp16")
    reasons = {entry.id: entry.reason for entry in FeatureStore.open(tmp_path / "s").problems}
    assert reasons["huge"].startswith("huge.npy: token 0 holds a feature")
    assert reasons["back"] == "good.npy: clip back: nothing to read from 3.0 to 2.0 s"
    assert reasons["gone"].count("gone.npy") == 1
    assert str(tmp_path) not in (tmp_path / "s" / "problems.jsonl").read_text()


def test_nothing_encoded_is_an_error_and_leaves_the_report(rows, tmp_path):
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(SourceError, match=r"none of the 30 clips could be encoded; the first: v0: cannot be read: No such file"):
        encode_corpus("manifest", rows, tmp_path / "s", encoder="whisper", options=EncodeOptions(media=tmp_path / "nowhere"))
    assert sorted(file.name for file in (tmp_path / "s").iterdir()) == [".lock", "problems.jsonl"]
    assert len((tmp_path / "s" / "problems.jsonl").read_text().splitlines()) == 30
    assert encode_rows(rows, tmp_path / "s").num_encoded == 24  # the right media folder, the same store


def test_published_c3d_and_a_pca(tmp_path):
    generator = np.random.default_rng(0)
    values = generator.standard_normal((60, 500)).astype(np.float32)
    with h5py.File(tmp_path / "c3d.hdf5", "w") as file:
        file["v_a/c3d_features"] = values
    PCA.fit([values], dim=5).save(tmp_path / "pca.safetensors")
    (tmp_path / "train.json").write_text(
        json.dumps({"v_a": {"duration": 15.9, "timestamps": [[0, 8.0], [8.0, 20.0]], "sentences": ["a", "b"]}})
    )
    encode_corpus("activitynet", tmp_path, tmp_path / "s", encoder="c3d:c3d.hdf5", options=EncodeOptions(dtype="fp32"))
    encode_corpus(
        "activitynet",
        tmp_path,
        tmp_path / "p",
        encoder=f"c3d:c3d.hdf5,pca={tmp_path / 'pca.safetensors'}",
        options=EncodeOptions(dtype="fp32"),
    )
    opened = FeatureStore.open(tmp_path / "s")
    first, second = opened.get("v_a/1"), opened.get("v_a/2")
    assert np.array_equal(torch.cat([first.values_TE, second.values_TE]).numpy(), values[: len(first) + len(second)])
    assert first.arrival_s[0] == 16 / 30
    assert len(first) == 29  # row k arrives at k·8/30 + 16/30 s
    live = open_c3d(pca=str(tmp_path / "pca.safetensors"))
    parts = list(stream(live, np.array_split(values, [7, 8, 31])))
    assert torch.equal(FeatureStore.open(tmp_path / "p").get("v_a/1").values_TE, Tokens.join(parts, 5).values_TE[:29])
    assert FeatureStore.open(tmp_path / "p").signature.encoder_digest != opened.signature.encoder_digest


def test_text_goes_in_as_ids(tmp_path):
    lines = [{"id": "1", "source": "a small test", "text": "ein Test"}, {"id": "2", "source": "", "text": "leer"}]
    tokenizer = Tokenizer.train(["a small test of a small thing"] * 9, vocab_size=280)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    summary = encode_corpus("manifest", manifest(tmp_path, lines), tmp_path / "s", encoder=f"text:{tmp_path / 'tokenizer.json'}")
    assert summary.signature["dtype"] == "fp32"
    assert summary.problems == {"empty": 1}
    got = FeatureStore.open(tmp_path / "s").get("1").values_TE[:, 0].long().tolist()
    assert tokenizer.decode(got) == "a small test"
    with pytest.raises(ConfigError, match="its clips are text: encoder whisper reads audio"):
        encode_corpus("manifest", tmp_path / "my.jsonl", tmp_path / "t", encoder="whisper")
    with pytest.raises(ConfigError, match="only fp32 holds exactly"):
        encode_corpus(
            "manifest",
            tmp_path / "my.jsonl",
            tmp_path / "t",
            encoder=f"text:{tmp_path / 'tokenizer.json'}",
            options=EncodeOptions(dtype="int8"),
        )


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ("nothing", "no encoder is called 'nothing'; expected one of c3d"),
        ("whisper:tiny.en,pol=15", "encoder whisper: no setting 'pol'; expected one of mode"),
        ("whisper,pool=a", "pool must be a whole number: got 'a'"),
        ("whisper,block_s=9", "block_s must be"),
        ("features:none.npz", "no such feature file or folder"),
        ("features:all.h5,key=name", "key must be one of media, stem, stream, id"),
        ("text", "say which tokenizer|no text"),
    ],
)
def test_an_encoder_that_cannot_be_is_one_line(rows, tmp_path, encoder, message):
    with pytest.raises((ConfigError, SourceError), match=message) as raised:
        encode_rows(rows, tmp_path / "s", encoder=encoder)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("workers", "address"), [("0", None), ("-1", None), ("two", None), ("ray:0", None), ("ray:", None), ("2", "auto")])
def test_workers_that_cannot_be_are_refused(rows, tmp_path, workers, address):
    with pytest.raises(ConfigError, match=r"workers must be|goes with workers ray"):
        encode_rows(rows, tmp_path / "s", workers=workers, ray=address)


def test_media_outside_the_folder_are_not_read(tmp_path):
    (tmp_path / "media").mkdir()
    soundfile.write(tmp_path / "secret.wav", voice(1), 16_000)
    for name in ("../secret.wav", str(tmp_path / "secret.wav"), "a/../../secret.wav"):
        with pytest.raises(SourceError, match="does not lie in the media folder"):
            media_path(tmp_path / "media", name)
    assert media_path(tmp_path / "media", str(tmp_path / "media" / "x.wav")) == tmp_path / "media" / "x.wav"


# Live and stored are the same numbers.


@pytest.fixture
def talk(tmp_path):
    soundfile.write(tmp_path / "talk.wav", voice(7.3), 16_000)
    soundfile.write(tmp_path / "other.wav", voice(1.2, 1), 16_000)
    (tmp_path / "broken.wav").write_bytes((tmp_path / "talk.wav").read_bytes()[:60_000])
    (tmp_path / "noise.wav").write_bytes(b"RIFF" + bytes(100))
    clips = [
        {"id": "a", "media": "talk.wav", "end_s": 3.5},
        {"id": "b", "media": "talk.wav", "start_s": 3.5, "end_s": 7.3},
        {"id": "c", "media": "talk.wav", "start_s": 1.0, "end_s": 2.0},
        {"id": "long", "media": "talk.wav", "start_s": 6.0, "end_s": 9.0},
        {"id": "d", "media": "other.wav", "end_s": 1.2},
        {"id": "cut", "media": "broken.wav", "end_s": 7.3},
        {"id": "early", "media": "broken.wav", "end_s": 1.0},
        {"id": "noise", "media": "noise.wav", "end_s": 1.0},
        {"id": "gone", "media": "gone.wav", "end_s": 1.0},
        {"id": "back", "media": "talk.wav", "start_s": 3.0, "end_s": 2.0},
        {"id": "past", "media": "talk.wav", "start_s": 8.0, "end_s": 9.0},
    ]
    return manifest(tmp_path, clips)


def test_stored_sound_is_what_a_live_session_hears(talk, tmp_path):
    summary = encode_corpus("manifest", talk, tmp_path / "s", encoder="whisper,block_s=0.5,pool=5", options=EncodeOptions(dtype="fp32"))
    assert summary.problems == {"empty": 1, "short": 1, "unreadable": 4}
    opened = FeatureStore.open(tmp_path / "s")
    samples = np.concatenate([chunk.samples for chunk in read_audio(tmp_path / "talk.wav")])
    encoder = load_whisper(block_s=0.5, pool=5)
    generator = np.random.default_rng(0)
    for name, start_s, end_s in (("a", 0, 3.5), ("b", 3.5, 7.3), ("c", 1.0, 2.0), ("long", 6.0, 7.3)):
        heard = samples[int(start_s * 16_000) : int(end_s * 16_000)]
        chunks = np.split(heard, np.sort(generator.integers(0, heard.size, 9)))
        live, stored = Tokens.join(stream(encoder, chunks), encoder.traits.dim), opened.get(name)
        assert torch.equal(stored.values_TE, live.values_TE), name  # to the bit
        assert np.array_equal(stored.arrival_s, live.arrival_s)
    reasons = {entry.id: (entry.kind, entry.reason) for entry in opened.problems}
    assert reasons["long"] == ("short", "talk.wav: ends 1.70 s before the clip does")
    assert reasons["cut"][1].startswith("broken.wav: cut short: its header says 7.30 s")
    assert "noise.wav: unknown format" in reasons["noise"][1]
    assert reasons["gone"] == ("unreadable", "gone.wav: cannot be read: No such file or directory")
    assert reasons["back"][0] == "empty"
    assert "clip past: empty" in reasons["past"][1]
    assert "early" in opened


def test_tokens_of_a_clip_do_not_depend_on_earlier_clips(talk, tmp_path, monkeypatch):
    monkeypatch.setattr("zendaya.data.features.clips.KEPT_CHUNKS", 1)
    clips = list(corpora.read("manifest", talk).clips)
    make = partial(open_clip_encoder, EncoderSpec.parse("whisper,block_s=0.5"), tmp_path)
    signature = Signature.of(make().traits, encoder_digest="", corpus="manifest", data_digest="")
    encode_clips(clips, make, tmp_path / "s", signature)
    encode_clips(clips[::-1], make, tmp_path / "r", signature)
    forward, backward = FeatureStore.open(tmp_path / "s"), FeatureStore.open(tmp_path / "r")
    assert {entry.id: (entry.sha256, entry.reason.replace(str(tmp_path), "")) for entry in forward.entries} == {
        entry.id: (entry.sha256, entry.reason.replace(str(tmp_path), "")) for entry in backward.entries
    }


def test_stored_pictures_are_what_a_live_session_sees(tmp_path):
    film(tmp_path / "film.mp4", 4)
    (tmp_path / "broken.mp4").write_bytes((tmp_path / "film.mp4").read_bytes()[:2000])
    clips = [
        {"id": "a", "media": "film.mp4", "end_s": 1.5},
        {"id": "b", "media": "film", "stream": "film.mp4", "media_start_s": 0, "start_s": 1.5, "end_s": 4.0},
        {"id": "c", "media": "broken.mp4", "end_s": 4.0},
    ]
    summary = encode_corpus(
        "manifest", manifest(tmp_path, clips), tmp_path / "s", encoder="efficientnet", options=EncodeOptions(dtype="fp32")
    )
    assert summary.problems == {"unreadable": 1}
    opened = FeatureStore.open(tmp_path / "s")
    from zendaya.encoders.efficientnet import EfficientNetLite0

    frames = list(read_video(tmp_path / "film.mp4"))
    encoder = EfficientNetLite0()
    live = Tokens.join(stream(encoder, [frames[:1], frames[1:6], frames[6:]]), encoder.traits.dim)
    first, second = opened.get("a"), opened.get("b")
    assert torch.equal(torch.cat([first.values_TE, second.values_TE]), live.values_TE)
    assert np.allclose(np.concatenate([first.arrival_s, second.arrival_s + 1.5]), live.arrival_s)
    assert (len(first), len(second)) == (5, 7)


def test_a_clip_model_from_a_folder(tmp_path):
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16, projection_dim=8
    )
    CLIPVisionModelWithProjection(config).save_pretrained(tmp_path / "clip")
    film(tmp_path / "film.mp4", 2)
    path = manifest(tmp_path, [{"id": "a", "media": "film.mp4", "end_s": 2.0}])
    summary = encode_corpus("manifest", path, tmp_path / "s", encoder=f"openai-clip:{tmp_path / 'clip'},fps=5")
    assert (summary.num_tokens, summary.signature["dim"], summary.signature["tokens_per_s"]) == (10, 8, 5.0)
    other = CLIPVisionModelWithProjection(config)
    other.save_pretrained(tmp_path / "clip")
    with pytest.raises(StoreError, match="expected encoder_digest"):  # the same name, other weights
        encode_corpus("manifest", path, tmp_path / "s", encoder=f"openai-clip:{tmp_path / 'clip'},fps=5")


# Many workers.


def test_two_processes_write_what_one_does(rows, tmp_path):
    encode_rows(rows, tmp_path / "one", dtype="fp16")
    summary = encode_rows(rows, tmp_path / "two", dtype="fp16", workers=2)
    assert summary.num_encoded == 24
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_a_local_ray_cluster_writes_what_one_process_does(rows, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'zendaya[distributed]'")
    encode_rows(rows, tmp_path / "one", dtype="fp16")
    # In a process of its own: a cluster outlives its test by threads and warnings.
    code = (
        "import sys, ray; from zendaya.data.features.encode import EncodeOptions, encode_corpus; "
        "s = encode_corpus('manifest', *sys.argv[1:3], encoder='features:all.h5,rate=3', "
        "options=EncodeOptions(dtype='fp16', workers='ray:2')); print(s.num_encoded, ray.is_initialized())"
    )
    result = subprocess.run([sys.executable, "-c", code, rows, tmp_path / "two"], capture_output=True, text=True, check=False)
    assert result.stdout == "24 False\n", result.stderr
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


FAKE = """
import os, sys, time
import numpy as np, torch
from zendaya.data.features import store
from zendaya.encoders.base import Tokens, Traits
from zendaya.data.features.clips import Encoded
from zendaya.data.features.store import Signature
from zendaya.data.features.encode import EncodeOptions, encode_clips
from zendaya.errors import ConfigError, SourceError, ZendayaError
from zendaya.records import Clip

store.COMMIT_S = 0.02
CLIPS = [Clip(corpus="c", id=str(n), split="train", stream="s", references=("r",), end_s=1.0, media=str(n)) for n in range(40)]


class Slow:
    traits = Traits(name="slow", modality="features", dim=5, tokens_per_s=1.0, look_back_s=0.0, look_ahead_s=0.0, live=True)

    def __init__(self, mode=""):
        self.mode = mode

    def digest(self):
        return ""

    def encode(self, clip):
        number = int(clip.id)
        time.sleep(0.005 + 0.01 * (number % 3))
        if number == 7 and self.mode == "ours":
            raise ConfigError("clip 7 will not do")
        if number == 7 and self.mode == "bug":
            assert False, "a bug"
        if number == 7 and self.mode == "die":
            os.kill(os.getpid(), 9)
        if number % 11 == 3:
            raise SourceError(f"{number}.wav: damaged")
        made = np.random.default_rng(number).standard_normal((1 + number % 7, 5)).astype(np.float32)
        return Encoded(Tokens(torch.from_numpy(made), np.arange(1.0, 2 + number % 7)))


def run(out, make=Slow, **options):
    signature = Signature.of(Slow.traits, encoder_digest="", corpus="c", data_digest="d", dtype="fp32")
    return encode_clips(CLIPS, make, out, signature, EncodeOptions(shard_bytes=1000, **options))
"""

# Each line of its input is a run in a child of its own, so that a kill costs no start of Python and torch.
RUNNER = """
import os, resource, sys, fake
from zendaya.errors import ZendayaError
for line in sys.stdin:
    out, limit = line.split()
    child = os.fork()
    if child == 0:
        if int(limit):
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
        code = 1
        try:
            fake.run(out)
            code = 0
        except KeyboardInterrupt:
            code = 130
        except ZendayaError as error:
            print(error, file=sys.stderr, flush=True)
            code = 2
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The module of a slow fake encoder, importable here and in workers."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "fake.py").write_text(FAKE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    monkeypatch.setattr("zendaya.data.features.store.COMMIT_S", 1.0)  # put back afterwards what the module sets
    import fake as module

    yield module
    sys.modules.pop("fake", None)


class Runner:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(self, out, limit=0):
        self.process.stdin.write(f"{out} {limit}\n")
        return int(self.process.stdout.readline())

    def status(self):
        return int(self.process.stdout.readline())

    def close(self):
        return self.process.communicate(timeout=30)[1]


def killed_until_done(runner, out, kill, generator):
    """How often a job was killed before it came to its end."""
    kills, done = 0, [0]
    while True:
        child = runner.start(out)
        time.sleep(generator.uniform(0.0, 0.25))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, kill)
        if (status := runner.status()) == 0:
            break
        assert status == (-kill if kill == signal.SIGKILL else 130)
        kills += 1
        done.append((out / "index.jsonl").read_bytes().count(b"\n") if (out / "index.jsonl").exists() else 0)
        assert kills < 60
    assert done == sorted(done)  # what was done once is never done again
    return kills


def test_killed_at_any_moment_it_resumes_to_the_same_bytes(fake, tmp_path):
    fake.run(tmp_path / "whole")
    expected, runner, generator = contents(tmp_path / "whole"), Runner(), random.Random(0)
    try:
        for trial, (kill, wanted) in enumerate(((signal.SIGKILL, 9), (signal.SIGINT, 3))):
            kills = 0
            for again in range(30):  # where the machine stalls, a job may come to its end before it is killed
                out = tmp_path / f"s{trial}-{again}"
                kills += killed_until_done(runner, out, kill, generator)
                assert contents(out) == expected
                FeatureStore.open(out).verify()
                if kills >= wanted:
                    break
            assert kills >= wanted
    finally:
        said = runner.close()
    assert said == ""


def test_a_full_disk_is_one_line_and_keeps_finished_clips(fake, tmp_path):
    fake.run(tmp_path / "whole")
    runner = Runner()
    for limit in (700, 900, 2000):  # the kernel's own limit on the size of a file stands in for a disk
        assert runner.start(tmp_path / "s", limit)
        assert runner.status() == 2
    with StoreWriter(
        tmp_path / "s", Signature.of(fake.Slow.traits, encoder_digest="", corpus="c", data_digest="d", dtype="fp32")
    ) as writer:
        kept = len(writer.entries)
    assert kept > 5
    assert runner.start(tmp_path / "s")
    assert runner.status() == 0
    lines = runner.close().splitlines()
    assert len(lines) == 3
    assert all("cannot be written: File too large; make room" in line for line in lines)
    assert f"the {kept} clips that are done are kept" in lines[-1]
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def test_failed_workers_end_the_job_and_keep_finished_clips(fake, tmp_path):
    fake.run(tmp_path / "whole")
    for mode, error, message in (
        ("ours", Exception, "clip 7 will not do"),
        ("bug", RuntimeError, r"a worker failed:\n(.|\n)*a bug"),
        ("die", Exception, r"a worker process ended unexpectedly \(exit code -9\), perhaps out of memory"),
    ):
        with pytest.raises(error, match=message):
            fake.run(tmp_path / mode, partial(fake.Slow, mode), workers=2)
    fake.run(tmp_path / "die", workers=3)
    assert contents(tmp_path / "die") == contents(tmp_path / "whole")


def test_workers_do_not_outlive_a_job_that_was_killed(fake, tmp_path):
    code = "import fake, sys\nif __name__ == '__main__': fake.run(sys.argv[1], workers=2)"
    (tmp_path / "job.py").write_text(code)
    process = subprocess.Popen([sys.executable, tmp_path / "job.py", tmp_path / "s"])
    index = tmp_path / "s" / "index.jsonl"
    deadline = time.monotonic() + 60
    while not (index.exists() and index.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = [int(child) for child in children.read_text().split()] if children.exists() else []
    process.kill()
    process.wait()
    if not children.parents[3].exists():
        pytest.skip("no /proc here to see the workers in")
    assert len(workers) >= 2
    while any(_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(worker) for worker in workers)
    fake.run(tmp_path / "whole")
    fake.run(tmp_path / "s")
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def _alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_jobs_on_one_store_and_ids_that_are_there_twice(fake, tmp_path):
    signature = Signature.of(fake.Slow.traits, encoder_digest="", corpus="c", data_digest="d", dtype="fp32")
    with StoreWriter(tmp_path / "s", signature), pytest.raises(StoreError, match="another process is writing to it"):
        fake.run(tmp_path / "s")
    clip = Clip(corpus="c", id="1", split="train", stream="s", references=("r",), end_s=1.0, media="1")
    with pytest.raises(CorpusError, match="clip '1' occurs twice in split 'train'"):
        encode_clips([clip, clip], fake.Slow, tmp_path / "t", signature)


# The real thing.


def test_msvd_features_as_published(tmp_path):
    folder = published("msvd")
    options = {"encoder": "features:msvd_vgg16_pca512_3fps.npz,rate=3"}
    summary = encode_corpus("msvd", folder, tmp_path / "s", **options)
    assert (summary.num_encoded, summary.num_failed, summary.num_tokens) == (1970, 0, 56_118)
    opened = FeatureStore.open(tmp_path / "s", corpus="msvd")
    assert opened.signature.data_digest == corpora.digest("msvd", folder)
    with np.load(folder / "msvd_vgg16_pca512_3fps.npz") as file:
        levels, scale, offset = file["q"], file["scale"], file["offset"]
    clips = corpora.read("msvd", folder).clips
    for clip in clips[::97]:
        rows = levels[offset[clip.feature_row] : offset[clip.feature_row + 1]] * scale.astype(np.float32)
        assert np.array_equal(opened.get(clip.id).values_TE.numpy(), rows.astype(np.float16).astype(np.float32))
    encode_corpus("msvd", folder, tmp_path / "i", options=EncodeOptions(dtype="int8", limit=50), **options)
    small = FeatureStore.open(tmp_path / "i")
    error = [float((small.get(entry.id).values_TE - opened.get(entry.id).values_TE).norm()) for entry in small]
    norm = [float(opened.get(entry.id).values_TE.norm()) for entry in small]
    assert sum(error) / sum(norm) < 0.01
    assert summary.num_bytes > 1.7 * 56_118 * 512


def test_librispeech_through_whisper(tmp_path):
    folder = published("librispeech")
    summary = encode_corpus("librispeech", folder, tmp_path / "s", encoder="whisper,pool=15", options=EncodeOptions(limit=5))
    assert (summary.num_encoded, summary.problems) == (5, {})
    opened = FeatureStore.open(tmp_path / "s")
    clips = corpora.read("librispeech", folder).clips[:5]
    for clip in clips:
        tokens = opened.get(clip.id)
        assert abs(len(tokens) - clip.duration_s / 0.3) <= 1
        assert abs(tokens.arrival_s[-1] - clip.duration_s) < 0.01
    joined = encode_corpus("librispeech-long30", folder, tmp_path / "j", encoder="whisper,pool=15", options=EncodeOptions(limit=1))
    assert abs(joined.num_tokens - 23.16 / 0.3) <= 1


def test_msvd_videos_through_efficientnet(tmp_path):
    folder = published("msvd")
    films = {file.stem for file in (folder / "sample_videos").iterdir()}
    with (folder / "msvd.jsonl").open() as lines:
        chosen = [line for line in lines if json.loads(line)["video"] in films][:3]
    assert len(chosen) == 3
    (tmp_path / "msvd.jsonl").write_text("".join(chosen))
    summary = encode_corpus("msvd", tmp_path, tmp_path / "s", encoder="efficientnet", options=EncodeOptions(media=folder / "sample_videos"))
    assert summary.num_encoded == 3
    opened = FeatureStore.open(tmp_path / "s")
    for line in map(json.loads, chosen):
        assert abs(len(opened.get(line["id"])) - 3 * line["dur"]) <= 3
