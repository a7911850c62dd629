"""Sound and pictures from files, pipes and a microphone; broken, hostile and absent ones."""

import contextlib
import io
import os
import sys
import threading
import types

import av
import numpy as np
import pytest
import soundfile

from zendaya.errors import ConfigError, MissingExtraError, SourceError
from zendaya.sources import container as containers
from zendaya.sources import media
from zendaya.sources.container import OpenMedia
from zendaya.sources.live import microphones, read_microphone
from zendaya.sources.media import probe, read_audio, read_raw, read_video, sample

RATE = 16_000


def tone(seconds, rate=RATE):
    return np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate).astype(np.float32) * 0.25


def picture(index, width=96, height=64):
    """A grey picture that says its number."""
    return np.full((height, width, 3), (10 * index) % 250, np.uint8)


def make(path, container, *, audio=None, video=None, seconds=3, rate=RATE, fps=25, samples=None, options=None, jump=0, bit_rate=None):
    """Write a file with a tone, grey pictures of rising number, or both."""
    with av.open(str(path), "w", format=container, options=options or {}) as out:
        sound = out.add_stream(audio, rate=rate, layout="mono") if audio else None
        if bit_rate is not None:
            sound.bit_rate = bit_rate
        pictures = out.add_stream(video, rate=fps) if video else None
        if pictures is not None:
            pictures.width, pictures.height, pictures.pix_fmt = 96, 64, "yuv420p"
            for index in range(int(seconds * fps)):
                frame = av.VideoFrame.from_ndarray(picture(index), format="rgb24")
                frame.pts = index + (jump if index >= 10 else 0)
                out.mux(pictures.encode(frame))
            out.mux(pictures.encode(None))
        if sound is not None:
            samples = tone(seconds, rate) if samples is None else samples
            frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
            frame.rate, frame.pts = rate, 0
            codec = sound.codec_context
            resampler = av.AudioResampler(format=codec.format, layout="mono", rate=rate, frame_size=codec.frame_size or 1024)
            for part in [*resampler.resample(frame), *resampler.resample(None)]:
                out.mux(sound.encode(part))
            out.mux(sound.encode(None))
    return path


class Pipe(io.RawIOBase):
    """Bytes that come in small pieces and cannot be wound back."""

    def __init__(self, data, piece=1000):
        self._file, self._piece = io.BytesIO(data), piece

    def readable(self):
        return True

    def read(self, size=-1):
        return self._file.read(self._piece if size < 0 else min(size, self._piece))


SOUND = {
    "wav": ("wav", "pcm_s16le", RATE),
    "flac": ("flac", "flac", RATE),
    "mp3": ("mp3", "libmp3lame", RATE),
    "opus": ("ogg", "libopus", 48_000),
    "m4a": ("mp4", "aac", RATE),
    "webm": ("webm", "libopus", 48_000),
    "mkv": ("matroska", "aac", RATE),
    "avi": ("avi", "libmp3lame", RATE),
}
PICTURES = {"mp4": ("mp4", "libx264"), "webm": ("webm", "libvpx"), "mkv": ("matroska", "libx264"), "avi": ("avi", "mpeg4")}


def all_samples(source, **settings):
    return np.concatenate([chunk.samples for chunk in read_audio(source, **settings)])


@pytest.mark.parametrize("name", SOUND)
def test_sound_of_every_format_is_16_khz_mono(tmp_path, name):
    container, codec, rate = SOUND[name]
    path = make(tmp_path / f"tone.{name}", container, audio=codec, rate=rate)
    chunks = list(read_audio(path, chunk_s=0.25))
    assert [chunk.samples.size for chunk in chunks[:-1]] == [4000] * (len(chunks) - 1)
    assert [chunk.start_s for chunk in chunks] == [0.25 * i for i in range(len(chunks))]
    samples = np.concatenate([chunk.samples for chunk in chunks])
    assert samples.dtype == np.float32
    assert chunks[-1].end_s == samples.size / RATE == pytest.approx(3, abs=0.12)
    spectrum = np.abs(np.fft.rfft(samples[RATE : 2 * RATE]))
    assert int(spectrum.argmax()) == 440
    assert np.sqrt(np.mean(samples[RATE : 2 * RATE] ** 2)) == pytest.approx(0.25 / np.sqrt(2), rel=0.1)


@pytest.mark.parametrize("name", ["wav", "flac", "opus", "webm", "mkv"])
def test_a_pipe_gives_what_the_file_gives(tmp_path, name):
    container, codec, rate = SOUND[name]
    path = make(tmp_path / f"tone.{name}", container, audio=codec, rate=rate)
    assert np.array_equal(all_samples(Pipe(path.read_bytes())), all_samples(path))


def test_lossless_sound_is_what_was_written(tmp_path):
    samples = np.round(tone(1) * 32768) / 32768
    soundfile.write(tmp_path / "tone.wav", samples, RATE, "PCM_16")
    assert np.array_equal(all_samples(tmp_path / "tone.wav", chunk_s=0.0333), samples.astype(np.float32))


def test_stereo_is_mixed_and_other_rates_are_resampled(tmp_path):
    left, right = tone(1, 44_100), np.zeros(44_100, np.float32)
    soundfile.write(tmp_path / "stereo.wav", np.stack([left, right], 1), 44_100, "FLOAT")
    samples = all_samples(tmp_path / "stereo.wav")
    assert abs(samples.size - RATE) <= 1
    assert np.abs(samples[1000:-1000] - 0.5 * tone(1)[1000 : samples.size - 1000]).max() < 0.01


def test_the_resampler_reads_no_further_than_it_says(tmp_path):
    generator = np.random.default_rng(0)
    for rate in (8000, 22_050, 44_100, 48_000):
        sound = generator.uniform(-0.5, 0.5, rate).astype(np.float32)
        other = sound.copy()
        other[rate // 2 :] *= -0.3
        outs = []
        for name, values in (("a.wav", sound), ("b.wav", other)):
            soundfile.write(tmp_path / name, values, rate, "FLOAT")
            outs.append(all_samples(tmp_path / name))
        same = round((0.5 - media.RESAMPLER_AHEAD_S) * RATE)
        assert np.array_equal(outs[0][:same], outs[1][:same]), rate
        assert not np.array_equal(outs[0][: RATE // 2 + 40], outs[1][: RATE // 2 + 40]), rate


def test_standard_input(tmp_path, monkeypatch):
    path = make(tmp_path / "tone.wav", "wav", audio="pcm_s16le")
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=Pipe(path.read_bytes())))
    assert np.array_equal(all_samples("-"), all_samples(path))


def test_a_named_pipe(tmp_path):
    path = make(tmp_path / "tone.wav", "wav", audio="pcm_s16le")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(path.read_bytes()))
    writer.start()
    got = all_samples(tmp_path / "pipe")
    writer.join()
    assert np.array_equal(got, all_samples(path))


def test_a_live_pipe_is_not_waited_for(tmp_path):
    """Sound comes out while most of it is still to be written."""
    data = make(tmp_path / "tone.wav", "wav", audio="pcm_s16le", seconds=5).read_bytes()
    heard, in_time = threading.Event(), []
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "wb") as file:
            file.write(data[:32_000])  # one second
            file.flush()
            in_time.append(heard.wait(20))
            file.write(data[32_000:])

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(reading, "rb") as file:
        chunks = read_audio(file)
        first = next(chunks)
        heard.set()
        rest = list(chunks)
    writer.join()
    assert in_time == [True]
    assert first.samples.size + sum(chunk.samples.size for chunk in rest) == 5 * RATE


class Counted(Pipe):
    """A pipe that knows how much of it was read."""

    given = 0

    def read(self, size=-1):
        data = super().read(size)
        self.given += len(data)
        return data


@pytest.mark.parametrize("name", ["opus", "wav"])
def test_a_slow_pipe_gives_sound_from_its_first_bytes(tmp_path, name):
    """At 2 kB/s, 4096 bytes are two seconds."""
    container, codec, rate = SOUND[name]
    settings = {"options": {"page_duration": "20000"}, "bit_rate": 16_000} if name == "opus" else {}
    path = make(tmp_path / f"tone.{name}", container, audio=codec, rate=rate, seconds=8, **settings)
    pipe = Counted(path.read_bytes(), piece=100)
    next(read_audio(pipe, chunk_s=0.02))
    assert pipe.given < 2500
    for piece in (1, 7, 100):
        assert np.array_equal(all_samples(Pipe(path.read_bytes(), piece)), all_samples(path))


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_every_format(tmp_path, name):
    container, codec = PICTURES[name]
    path = make(tmp_path / f"grey.{name}", container, video=codec, fps=25)
    frames = list(read_video(path, fps=5))
    assert len(frames) in (15, 16)  # avi counts the codec's delay of one frame
    assert [frame.time_s for frame in frames] == [i / 5 for i in range(len(frames))]
    assert all(frame.time_s <= frame.end_s <= frame.time_s + 2 / 25 + 1e-6 for frame in frames)
    assert {frame.pixels.shape for frame in frames} == {(64, 96, 3)}
    wanted = [picture(5 * i)[0, 0, 0] for i in range(15)]
    got = [float(frame.pixels.mean()) for frame in frames[:15]]
    assert np.abs(np.array(got) - wanted).max() < 14, (got, wanted)  # one frame off at most, and the codec's loss


@pytest.mark.parametrize("name", ["webm", "mkv"])
def test_pictures_from_a_pipe(tmp_path, name):
    container, codec = PICTURES[name]
    path = make(tmp_path / f"grey.{name}", container, video=codec)
    ours, theirs = list(read_video(Pipe(path.read_bytes()))), list(read_video(path))
    assert [frame.end_s for frame in ours] == [frame.end_s for frame in theirs]
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(ours, theirs, strict=True))


def test_a_slow_video_holds_its_pictures():
    shown = [(0.0, 1.0, "a"), (1.0, 1.1, "b"), (3.0, 3.1, "c")]
    got = list(sample(shown, fps=2))
    assert [thing for _, _, thing in got] == ["a", "a", "b", "b", "b", "b", "c"]
    assert [known for _, known, _ in got] == [1.0, 1.0, 1.1, 3.1, 3.1, 3.1, 3.1]


def test_sampling_does_not_depend_on_later_frames():
    generator = np.random.default_rng(0)
    begins = np.cumsum(generator.uniform(0.01, 0.6, 40))
    begins -= begins[0]
    shown = [(float(b), float(b) + 0.05, i) for i, b in enumerate(begins)]
    whole = list(sample(shown, fps=3))
    for cut_s in generator.uniform(0, begins[-1], 30):
        kept = [item for item in shown if item[1] <= cut_s]
        inserted = [(cut_s + 0.01 * i, cut_s + 0.01 * i + 0.05, -1) for i in range(1, 5)]
        for rest in ([], inserted, [(begin + 9, end + 9, -2) for begin, end, _ in inserted]):
            got = list(sample([*kept, *rest], fps=3))
            early = [item for item in whole if item[1] <= cut_s]
            assert got[: len(early)] == early


def test_a_filmed_phone_is_turned_upright(tmp_path, monkeypatch):
    path = make(tmp_path / "grey.mp4", "mp4", video="libx264", seconds=1)

    class Turned:
        def __init__(self, frame):
            self._frame, self.rotation = frame, 90

        def __getattr__(self, name):
            return getattr(self._frame, name)

    plain = OpenMedia.frames
    monkeypatch.setattr(OpenMedia, "frames", lambda *arguments: map(Turned, plain(*arguments)))
    assert next(read_video(path)).pixels.shape == (96, 64, 3)


def error_of(read, source, **settings):
    with pytest.raises(SourceError) as caught:
        list(read(source, **settings))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_cut_wav_says_so(tmp_path, share):
    path = make(tmp_path / "tone.wav", "wav", audio="pcm_s16le")
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert error_of(read_audio, path).startswith(f"{path}: cut short: its header says 3.00 s")
    assert "cut short" in error_of(read_audio, Pipe(path.read_bytes()))
    assert all_samples(path, allow_truncated=True).size == pytest.approx(3 * share * RATE, abs=50)


def test_a_wav_written_to_a_pipe_has_no_length_and_is_read(tmp_path):
    data = bytearray(make(tmp_path / "tone.wav", "wav", audio="pcm_s16le").read_bytes())
    place = data.index(b"data") + 4
    data[place : place + 4] = data[4:8] = b"\xff\xff\xff\xff"
    assert all_samples(Pipe(bytes(data))).size == 3 * RATE


@pytest.mark.parametrize(
    ("name", "container", "codecs", "options"),
    [
        ("late.mp4", "mp4", ("aac", "libx264"), {}),
        ("early.mp4", "mp4", ("aac", "libx264"), {"movflags": "faststart"}),
        ("cut.webm", "webm", ("libopus", "libvpx"), {}),
        ("cut.mkv", "matroska", ("aac", "libx264"), {}),
        ("cut.avi", "avi", ("libmp3lame", "mpeg4"), {}),
        ("cut.flac", "flac", ("flac", None), {}),
    ],
)
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_cut_files_say_so(tmp_path, name, container, codecs, options, share):
    audio, video = codecs
    path = make(tmp_path / name, container, audio=audio, video=video, rate=48_000 if audio == "libopus" else RATE, options=options)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    for read in (read_audio, read_video) if video else (read_audio,):
        message = error_of(read, path)
        assert message.startswith(str(path))
        assert "cut" in message, message


def test_an_mp4_with_its_index_last_is_refused_in_a_pipe(tmp_path):
    late = make(tmp_path / "late.mp4", "mp4", audio="aac", video="libx264")
    for read in (read_audio, read_video):
        assert "index (moov) comes after its media cannot be read from a pipe" in error_of(read, Pipe(late.read_bytes()))
        assert list(read(late))
    early = make(tmp_path / "early.mp4", "mp4", audio="aac", video="libx264", options={"movflags": "faststart"})
    assert len(list(read_video(Pipe(early.read_bytes())))) == 9


@pytest.mark.parametrize("order", ["early", "late"])
def test_an_mp4_in_a_pipe_with_much_left_free(tmp_path, order):
    """A free box larger than what is first looked at hides neither the index nor the media behind it."""
    data = make(tmp_path / "a.mp4", "mp4", video="libx264", options={"movflags": "empty_moov+frag_keyframe+default_base_moof"}).read_bytes()
    if order == "late":
        data = make(tmp_path / "a.mp4", "mp4", audio="aac", video="libx264").read_bytes()
    size = int.from_bytes(data[:4], "big")
    data = data[:size] + (50_000).to_bytes(4, "big") + b"free" + bytes(49_992) + data[size:]
    reading, writing = os.pipe()

    def write():
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as file:
            file.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(reading, "rb") as file:
        if order == "early":
            assert len(list(read_video(file))) == 9
        else:
            message = error_of(read_video, file)
            assert message.startswith("the pipe: an mp4 whose index (moov) comes after its media cannot be read from a pipe")
    writer.join()


def test_an_mp4_in_a_pipe_that_would_have_to_be_held(tmp_path):
    data = make(tmp_path / "a.mp4", "mp4", video="libx264", options={"movflags": "faststart"}).read_bytes()
    size = int.from_bytes(data[:4], "big")
    pipe = Counted(data[:size] + (2**31).to_bytes(4, "big") + b"free" + bytes(100_000))
    assert error_of(read_video, pipe).startswith(f"the pipe: an mp4 with more than {containers.MAX_PADDING} bytes before its index")
    assert pipe.given < 10_000


@pytest.mark.parametrize(
    ("name", "container", "codecs"), [("a.webm", "webm", ("libopus", "libvpx")), ("a.mkv", "matroska", ("aac", "libx264"))]
)
@pytest.mark.parametrize(("sound_s", "pictures_s"), [(5.5, 6), (6, 5), (1, 6)])
def test_tracks_of_unequal_lengths_are_whole(tmp_path, name, container, codecs, sound_s, pictures_s):
    rate = 48_000 if codecs[0] == "libopus" else RATE
    path = make(tmp_path / name, container, audio=codecs[0], video=codecs[1], rate=rate, seconds=pictures_s, samples=tone(sound_s, rate))
    assert all_samples(path).size == pytest.approx(sound_s * RATE, abs=0.1 * RATE)
    assert len(list(read_video(path))) == 3 * pictures_s
    data = path.read_bytes()
    path.write_bytes(data[: int(0.5 * len(data))])
    for read in (read_audio, read_video):
        assert "cut short" in error_of(read, path)


PLAYLISTS = {
    "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{secret}\n#EXT-X-ENDLIST\n",
    "bom.m3u8": "\ufeff#EXTM3U\n{secret}\n",
    "list.ffconcat": "ffconcat version 1.0\nfile '{secret}'\n",
    "session.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n",
    "manifest.mpd": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>{secret}</BaseURL></MPD>',
    "list.pls": "[playlist]\nFile1={secret}\n",
}


@pytest.mark.parametrize("name", PLAYLISTS)
@pytest.mark.parametrize("suffix", ["", ".wav"])
def test_playlists_are_refused_whatever_they_are_called(tmp_path, name, suffix):
    secret = make(tmp_path / "secret.wav", "wav", audio="pcm_s16le")
    path = tmp_path / (name + suffix)
    path.write_text(PLAYLISTS[name].format(secret=secret), encoding="utf-8")
    message = error_of(read_audio, path)
    assert message.startswith(str(path))
    assert "only the given file is read" in message


@pytest.mark.parametrize(("kind", "name"), [("hls", "a.m3u8"), ("concat", "list.ffconcat")])
def test_even_a_demuxer_that_opens_files_may_not(tmp_path, monkeypatch, kind, name):
    """The first bytes are one wall; behind it FFmpeg itself is told to open nothing."""
    secret = make(tmp_path / "secret.wav", "wav", audio="pcm_s16le")
    path = tmp_path / name
    path.write_text(PLAYLISTS[name].format(secret=secret))
    monkeypatch.setattr(containers, "_format", lambda head, name: kind)
    with pytest.raises(SourceError):
        list(read_audio(path))


def test_pictures_and_other_files_are_refused(tmp_path):
    (tmp_path / "img%d.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert "a single picture" in error_of(read_video, tmp_path / "img%d.png")
    (tmp_path / "notes.txt").write_text("some words")
    assert "unknown format" in error_of(read_audio, tmp_path / "notes.txt")
    (tmp_path / "nothing.wav").write_bytes(b"")
    assert "empty" in error_of(read_audio, tmp_path / "nothing.wav")
    assert "empty" in error_of(read_audio, io.BytesIO())
    for name in ("no-such.wav", "https://example.org/a.wav", "concat:a.wav|b.wav", "a\0.wav"):
        assert "cannot be read" in error_of(read_audio, name)
    assert "a folder or a device" in error_of(read_audio, tmp_path)
    assert "a folder or a device" in error_of(read_audio, "/dev/null")


def test_a_recording_of_no_samples(tmp_path):
    soundfile.write(tmp_path / "none.wav", np.zeros(0, np.float32), RATE)
    assert error_of(read_audio, tmp_path / "none.wav").startswith(str(tmp_path / "none.wav"))


def test_the_wrong_kind_of_stream(tmp_path):
    sound = make(tmp_path / "tone.mkv", "matroska", audio="flac")
    silent = make(tmp_path / "silent.mkv", "matroska", video="libx264", seconds=1)
    assert "no pictures in it" in error_of(read_video, sound)
    assert "got 1 audio" in error_of(read_video, sound)
    assert "no sound in it" in error_of(read_audio, silent)


def test_pictures_too_large(tmp_path, monkeypatch):
    path = make(tmp_path / "grey.mp4", "mp4", video="libx264", seconds=1)
    monkeypatch.setattr(media, "MAX_PIXELS", 1000)
    assert "pictures of 96 × 64" in error_of(read_video, path)


def test_noise_for_a_file_is_an_error_of_ours(tmp_path):
    """Bytes after a good beginning that make no sense: some error of ours or some samples, never another exception."""
    generator = np.random.default_rng(0)
    path, errors = tmp_path / "noise", []
    sounds = [(read_audio, container, {"audio": codec, "rate": rate}) for container, codec, rate in SOUND.values()]
    for read, container, settings in [*sounds, *((read_video, container, {"video": codec}) for container, codec in PICTURES.values())]:
        data = make(tmp_path / "whole", container, **settings, seconds=1).read_bytes()
        for _ in range(10):
            broken = bytearray(data)
            for place in generator.integers(12, len(data), max(3, len(data) // 100)):
                broken[place] = generator.integers(256)
            path.write_bytes(broken)
            try:
                list(read(path))
            except SourceError as error:
                errors.append(str(error))
    assert len(errors) > 10
    assert all(str(path) in error for error in errors)


@pytest.mark.parametrize(("place", "value", "size"), [(24, 2**31 - 1, 4), (24, 1, 4), (22, 60_000, 2), (22, 49, 2)])
def test_sound_that_cannot_be(tmp_path, place, value, size):
    path = tmp_path / "tone.wav"
    soundfile.write(path, tone(1), RATE, "PCM_16")
    data = bytearray(path.read_bytes())
    data[place : place + size] = value.to_bytes(size, "little")
    path.write_bytes(data)
    assert error_of(read_audio, path).startswith(str(path))


def test_a_clock_that_jumps(tmp_path):
    path = make(tmp_path / "jump.mkv", "matroska", video="libx264", seconds=1, jump=25 * 3600)
    assert "the clock of its pictures jumps" in error_of(read_video, path)
    path = make(tmp_path / "pause.mkv", "matroska", video="libx264", seconds=1, jump=25 * 10)
    assert len(list(read_video(path, allow_truncated=True))) == pytest.approx(33, abs=1)


def test_settings(tmp_path):
    path = make(tmp_path / "tone.wav", "wav", audio="pcm_s16le")
    with pytest.raises(ConfigError, match="chunk_s"):
        list(read_audio(path, chunk_s=0))
    with pytest.raises(ConfigError, match="fps"):
        list(read_video(path, fps=0))


class PortAudioError(Exception):
    pass


def fake_sounddevice(devices, chunks=()):
    class InputStream:
        def __init__(self, **settings):
            if settings["device"] == 2:
                raise PortAudioError("Invalid sample rate")
            self.chunks = iter(chunks)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def read(self, size):
            value, lost = next(self.chunks)
            return np.full((size, 1), value, np.float32), lost

    return types.SimpleNamespace(
        query_devices=lambda: devices, default=types.SimpleNamespace(device=(1, 0)), InputStream=InputStream, PortAudioError=PortAudioError
    )


DEVICES = [
    {"name": "speakers", "max_input_channels": 0},
    {"name": "built-in mic", "max_input_channels": 2},
    {"name": "old headset", "max_input_channels": 1},
]


def test_a_microphone(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", fake_sounddevice(DEVICES, [(0.1, False), (0.2, True)]))
    assert [(one.index, one.name, one.default) for one in microphones()] == [(1, "built-in mic", True), (2, "old headset", False)]
    reader = read_microphone("built-in", chunk_s=0.05)
    first, second = next(reader), next(reader)
    reader.close()
    assert (first.samples.shape, first.start_s, first.lost) == ((800,), 0.0, False)
    assert (second.start_s, second.lost, float(second.samples[0])) == (0.05, True, pytest.approx(0.2))
    assert "no input device 'other'" in error_of(read_microphone, "other")
    assert "Invalid sample rate" in error_of(read_microphone, 2)


def test_no_microphone(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", fake_sounddevice(DEVICES[:1]))
    assert microphones() == []
    assert "no input device" in error_of(read_microphone, None)
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(MissingExtraError, match="sounddevice"):
        microphones()


def test_no_sound_library(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SourceError, match="PortAudio library not found: install PortAudio"):
        microphones()


def test_real_files(data):
    videos = sorted((data / "msvd/sample_videos").glob("*.avi"))
    assert len(videos) == 12
    for path in videos:
        start_s, end_s = map(int, path.stem.rsplit("_", 2)[1:])
        frames = list(read_video(path, fps=3))
        assert len(frames) == pytest.approx(3 * (end_s - start_s), abs=2)
        assert len({frame.pixels.tobytes() for frame in frames}) > len(frames) // 2
    recording = sorted((data / "librispeech/opus").rglob("*.opus"))[0]
    samples = all_samples(recording)
    theirs, rate = soundfile.read(recording, dtype="float32")
    assert rate == RATE
    assert abs(theirs.size - samples.size) <= RATE // 50


class Dribble(io.RawIOBase):
    """A pipe that gives a few bytes at a time, and samples in halves."""

    def __init__(self, data):
        self.data = data

    def readable(self):
        return True

    def read(self, size=-1):
        piece, self.data = self.data[:777], self.data[777:]
        return piece


def test_raw_samples_come_in_chunks_from_any_pipe():
    samples = (tone(1.23) * 32768).astype("<i2")
    chunks = list(read_raw(Dribble(samples.tobytes() + b"x"), chunk_s=0.1))  # cut inside its last sample
    assert [chunk.samples.size for chunk in chunks] == [1600] * 12 + [480]
    assert chunks[3].start_s == pytest.approx(0.3)
    np.testing.assert_array_equal(np.concatenate([chunk.samples for chunk in chunks]), samples.astype(np.float32) / 32768)
    with pytest.raises(SourceError, match="empty"):
        list(read_raw(io.BytesIO(b"")))


def test_a_recording_is_probed_without_reading_it(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(1), RATE)
    probe(tmp_path / "a.wav")
    (tmp_path / "b.wav").write_text("no sound at all")
    with pytest.raises(SourceError, match="unknown format"):
        probe(tmp_path / "b.wav")
    probe(tmp_path / "b.wav", raw=True)
    with pytest.raises(SourceError, match="cannot be read"):
        probe(tmp_path / "c.wav", raw=True)
