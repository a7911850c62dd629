"""`zendaya stream` as a user runs it: files, videos, pipes, a terminal with keys, Ctrl-C, kill; text, subtitles, events and exit codes."""

import contextlib
import copy
import dataclasses
import difflib
import fcntl
import importlib.resources
import itertools
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import types
import urllib.request
from pathlib import Path

import av
import numpy as np
import pytest
import srt
import webvtt

from zendaya.cli import main
from zendaya.cli.stream import stream
from zendaya.cli.terminal import LagKeys, caption
from zendaya.errors import ConfigError, SourceError
from zendaya.nn.adapter import ADAPTER
from zendaya.nn.checkpoint import stated_digest
from zendaya.runtime.frontier import FRONTIER, choose_setting, read_frontier
from zendaya.runtime.loading import gamma_warning, load_live, weights_path
from zendaya.runtime.pauses import PauseWindows
from zendaya.runtime.pipeline import Pipeline, SourceEncoder
from zendaya.runtime.setting import LiveSetting
from zendaya.schedule import PowerLaw
from zendaya.sources.live import Microphone, at_once
from zendaya.sources.media import read_audio

ZENDAYA = Path(sys.executable).parent / "zendaya"
RECORDING = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
MODEL = "tiny.en-dial"
SAID = ["ever", "tried", "ever", "failed", "no", "matter", "try", "again", "fail", "again", "fail", "better"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}


@pytest.fixture(scope="module")
def samples():
    return np.concatenate([chunk.samples for chunk in read_audio(RECORDING)])


@pytest.fixture(scope="module")
def loaded():
    return load_live(MODEL)


@pytest.fixture
def say(monkeypatch, capsys, loaded):
    """The command in this process, its model loaded once: what it printed."""
    monkeypatch.setattr("zendaya.runtime.loading.load_live", lambda name, encoder=None: loaded)

    def run(source=None, **options):
        stream(source=None if source is None else str(source), **{"model": MODEL, **options})
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def text(loaded):
    """What the recording says, by a process of its own that is piped: fast, plain."""
    result = subprocess.run(
        [ZENDAYA, "stream", RECORDING, "--model", MODEL], capture_output=True, text=True, timeout=600, check=True, env=ENVIRONMENT
    )
    assert result.stderr == ""
    return result.stdout


@pytest.fixture(scope="module")
def live_text(loaded):
    """What a source that is heard live becomes at the default setting."""
    setting = choose_setting(read_frontier(MODEL), config=loaded[0].config).setting
    return "".join(event.text for event in played(loaded, str(setting)))


def words(text):
    return re.findall(r"[a-z]+", text.lower())


def likeness(text, said):
    """1 where the words are the same, 0 where none is."""
    return difflib.SequenceMatcher(None, text if isinstance(text, list) else words(text), said, autojunk=False).ratio()


def read_vtt(path):
    return words(" ".join(" ".join(cue.lines) for cue in webvtt.read(str(path))))


def test_a_recording_is_captioned_a_line_a_stretch(say, text, samples, tmp_path):
    assert likeness(text, SAID) > 0.85
    assert len(text.splitlines()) == 1  # no pause of 2 s
    path = tmp_path / "twice.raw"
    path.write_bytes((np.concatenate([samples, np.zeros(4 * 16_000), samples]) * 32767).astype("<i2").tobytes())
    lines = say(path, raw=True, realtime=False).splitlines()
    assert len(lines) == 2
    assert min(likeness(line, SAID) for line in lines) > 0.85
    with pytest.raises(ConfigError, match="the windows of this model overlap: give cut=fixed"):
        say(RECORDING, cut="pauses", realtime=False)


def test_a_live_source_is_captioned_at_the_default(live_text):
    assert likeness(live_text, SAID) > 0.7


def test_subtitles_hold_the_text_at_the_time_it_was_spoken(say, text, tmp_path):
    printed = say(RECORDING, vtt=tmp_path / "a.vtt", srt=tmp_path / "a.srt", realtime=False)
    assert printed == text
    cues = list(webvtt.read(str(tmp_path / "a.vtt")))
    assert read_vtt(tmp_path / "a.vtt") == words(text)
    assert [cue.content for cue in srt.parse((tmp_path / "a.srt").read_text())] == [cue.text for cue in cues]
    better = next(cue for cue in cues if "better" in cue.text)
    assert 6 <= better.start_in_seconds <= 9 <= better.end_in_seconds  # said from 8.1 to 8.9 s
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.srt", "a.vtt"]


def test_events_are_json_objects_that_make_up_the_text(say, text):
    events = [json.loads(line) for line in say(RECORDING, as_json=True, realtime=False).splitlines()]
    assert words("".join(event["text"] + " " * event["last"] for event in events)) == words(text)
    assert {"window_index", "step", "token", "horizon", "effective_horizon", "arrival_s", "emission_s", "window_start"} <= events[0].keys()
    assert all(event["effective_horizon"] <= event["horizon"] for event in events)


def test_gamma_windows_and_cuts_are_what_was_asked_for(say):
    events = [json.loads(line) for line in say(RECORDING, as_json=True, realtime=False, gamma=0.0, window_s=4.0, cut="fixed").splitlines()]
    starts = sorted({event["window_start"] for event in events})
    assert len(starts) > 2
    assert all(0 < later - start < 200 for start, later in itertools.pairwise(starts))  # each overlaps the one before
    assert {event["horizon"] for event in events if event["window_start"] == 0} == {200}
    assert max(event["horizon"] for event in events) == 200
    assert say(RECORDING, realtime=False, policy="full") == say(RECORDING, realtime=False, gamma=0.0)
    assert say(RECORDING, realtime=False, policy="gamma=1,head=50") == say(RECORDING, realtime=False, gamma=1.0, head=50)


# The dial in seconds.

LAGS = (("gamma=1.5;block_s=0.5", 0.8, 14.0), ("gamma=1,head=10;block_s=1", 1.4, 11.0), ("gamma=0.5;window_s=8", 2.6, 8.0))


@pytest.fixture
def measured(tmp_path, frontier_of):
    """The shipped adapter in a folder of its own, with a frontier written by hand."""
    shutil.copy(weights_path(MODEL), tmp_path / ADAPTER)
    frontier_of(*LAGS, model_digest=stated_digest(tmp_path / ADAPTER)).write(tmp_path / FRONTIER)
    return str(tmp_path)


def played(loaded, text):
    """What the recording becomes under a setting."""
    setting = LiveSetting.parse(text)
    pipeline = Pipeline.open(loaded[0], setting.encoder_from(loaded[1]), setting.options())
    return list(pipeline.run(at_once(chunk.samples for chunk in read_audio(RECORDING))))


@pytest.mark.parametrize(("options", "place"), [({"lag_s": 1.0}, 0), ({"lag_s": 2.0}, 1), ({"lag_s": 9.0}, 2), ({}, 2)])
def test_a_lag_runs_its_setting(say, loaded, measured, options, place):
    """Schedule, window and encoder block are those of the setting; without a dial a file read at once has the most accurate."""
    events = [json.loads(line) for line in say(RECORDING, model=measured, realtime=False, as_json=True, **options).splitlines()]
    expected = played(loaded, LAGS[place][0])
    assert [(event["text"], event["horizon"], event["arrival_s"]) for event in events] == [
        (event.text, event.horizon, event.arrival_s) for event in expected
    ]


def test_an_option_given_beside_a_lag_counts(say, measured):
    events = [
        json.loads(line) for line in say(RECORDING, model=measured, realtime=False, as_json=True, lag_s=9.0, window_s=4.0).splitlines()
    ]
    assert len({event["window_start"] for event in events}) > 2
    assert max(event["horizon"] for event in events) <= 200


def test_gamma_stays_as_it_is_beside_a_frontier(say, measured):
    text = say(RECORDING, realtime=False, gamma=1.0)
    assert say(RECORDING, model=measured, realtime=False, gamma=1.0) == text
    (Path(measured) / FRONTIER).write_text("{}")
    assert say(RECORDING, model=measured, realtime=False, gamma=1.0) == text  # it is not read


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lag_s": 0.5}, "--lag: this model reaches 0.8 … 2.6 s: got 0.5; ask for --lag 0.8"),
        ({"lag_s": 1.0, "gamma": 0.5}, "--lag chooses a measured setting of the model: it goes with neither --gamma"),
        ({"lag_s": 1.0, "policy": "full"}, "--lag chooses a measured setting"),
        ({"lag_s": 1.0, "encoder": "whisper"}, "--lag chooses a measured setting"),
    ],
)
def test_a_lag_that_cannot_be_is_refused(monkeypatch, measured, options, problem):
    monkeypatch.setattr("zendaya.runtime.loading.load_live", lambda *_: pytest.fail("the model was loaded first"))
    with pytest.raises(ConfigError) as caught:
        stream(source=str(RECORDING), **{"model": measured, **options})
    assert str(caught.value).startswith(problem)


def test_a_lag_needs_a_frontier(monkeypatch, measured):
    monkeypatch.setattr("zendaya.runtime.loading.load_live", lambda *_: pytest.fail("the model was loaded first"))
    (Path(measured) / FRONTIER).unlink()
    with pytest.raises(ConfigError, match=r"^--lag: this model has no measured frontier: give gamma, or measure one"):
        stream(source=str(RECORDING), model=measured, lag_s=1.0)


def test_keys_turn_through_the_frontier(loaded, measured, monkeypatch):
    """`[` fewer seconds, `]` more, up to the ends; the schedule turns, the encoder's block stays."""
    frontier, pressed = read_frontier(measured), iter(["", "", "]]]", "[", "q"])
    monkeypatch.setattr("zendaya.cli.terminal.keys", lambda stdin: contextlib.nullcontext(lambda: next(pressed, "")))
    setting, shown, turns = frontier.points[0].live, [], []
    pipeline = Pipeline.open(loaded[0], setting.encoder_from(loaded[1]), setting.options())
    screen = types.SimpleNamespace(
        show=lambda line: shown.append(line().split(" │ ")[0]), write=lambda text: None, end_line=lambda: None, close=lambda: None
    )
    chunks = at_once(chunk.samples for chunk in read_audio(RECORDING))
    terminal = types.SimpleNamespace(isatty=lambda: True)
    caption(
        chunks,
        pipeline,
        screen,
        stdin=terminal,
        each=lambda event: turns.append(event.schedule),
        lags=LagKeys(frontier, frontier.points[0]),
    )
    assert [schedule for schedule in turns if schedule] == ["gamma=1,head=10", "gamma=0.5", "gamma=1,head=10"]
    assert list(dict.fromkeys(shown)) == ["[ about 0.9 s ]", "[ about 2.7 s ]", "[ about 1.5 s ]"]


def test_gamma_beyond_training_is_warned_of(say, capsys, tmp_path):
    assert say(RECORDING, realtime=False, gamma=1.5)
    stream(source=str(RECORDING), model=MODEL, realtime=False, gamma=2.0)
    assert capsys.readouterr().err == f"zendaya: γ = 2 is beyond what {MODEL} was trained for, 1.5 at most: expect worse text\n"
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {}, "schedule": "dial=2,offline=0.1"}))
    assert gamma_warning(PowerLaw(2.0), tmp_path) is None
    assert "2 at most" in gamma_warning(PowerLaw(2.5), tmp_path)


@pytest.mark.parametrize("at_s", [3.1, 5.5, 7.3])
def test_with_cuts_at_pauses_no_text_depends_on_later_sound(loaded, samples, at_s):
    model, encoder = copy.copy(loaded[0]), loaded[1].with_settings(revise_s=0.0)
    model.config = dataclasses.replace(model.config, overlap_tokens=0)  # windows that end for good, as pauses cut them
    changed, at = samples.copy(), round(at_s * 16_000)
    changed[at:] = np.random.default_rng(1).normal(0, 0.1, samples.size - at)

    def events(sound, chunk):
        session = model.open(PowerLaw(0.7), window_tokens=500)
        pauses = PauseWindows(session.window_tokens, encoder.traits.tokens_per_s, share=0.2)
        chunks = [sound[first : first + chunk] for first in range(0, sound.size, chunk)]
        return list(Pipeline(session, SourceEncoder(encoder, pauses)).run(at_once(chunks)))

    whole = events(samples, 1600)
    assert events(samples, samples.size) == whole
    assert len({event.window_index for event in whole}) >= 3
    known = [event for event in whole if event.arrival_s <= at_s]
    assert known
    assert [event for event in events(changed, 1600) if event.arrival_s <= at_s] == known


def test_a_video_is_heard(say, text, samples, tmp_path):
    path = tmp_path / "talk.mp4"
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=5)
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        audio = container.add_stream("aac", rate=16_000, layout="mono")
        for number in range(int(5 * samples.size / 16_000)):
            picture = np.full((64, 64, 3), 5 * number % 255, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        for first in range(0, samples.size, 1024):
            frame = av.AudioFrame.from_ndarray(samples[None, first : first + 1024], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16_000, first
            container.mux(audio.encode(frame))
        container.mux(video.encode(None))
        container.mux(audio.encode(None))
    assert likeness(say(path, realtime=False), words(text)) > 0.9  # aac loses some of the sound


def test_a_model_that_sees_captions_the_pictures(tmp_path, capsys, monkeypatch):
    from zendaya import Model, Tokenizer

    path = tmp_path / "film.mp4"
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=6)
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        for number in range(30):
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.full((64, 64, 3), 8 * number, np.uint8), format="rgb24")))
        container.mux(video.encode(None))
    from dataclasses import replace

    from zendaya.nn.presets import preset

    config = preset("tiny")
    tokenizer = Tokenizer.train(["a man walks", "a dog runs"], vocab_size=280)
    model = Model.from_preset("tiny", decoder=replace(config.decoder, source_dim=1280), tokenizer=tokenizer, window_tokens=6)
    model.save_pretrained(tmp_path / "run" / "best")
    (tmp_path / "run" / "recipe.json").write_text(json.dumps({"recipe": {"encoder": "efficientnet:,fps=3"}}))
    stream(source=str(path), model=str(tmp_path / "run" / "best"), realtime=False, as_json=True)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {event["window_start"] for event in events} == {0, 6, 12}
    with pytest.raises(ConfigError, match="needs sound"):
        stream(source=str(path), model=str(tmp_path / "run" / "best"), realtime=False, cut="pauses")


@pytest.mark.parametrize("kind", ["wav", "mp3", "raw"])
def test_a_pipe_is_heard_as_it_comes(kind, live_text, samples, tmp_path):
    if kind == "raw":
        data, options = (samples * 32767).astype("<i2").tobytes(), ["--raw"]
    elif kind == "wav":
        data, options = RECORDING.read_bytes(), []
    else:
        with av.open(str(tmp_path / "a.mp3"), "w") as container:
            audio = container.add_stream("mp3", rate=16_000, layout="mono")
            for first in range(0, samples.size, 1152):
                frame = av.AudioFrame.from_ndarray(samples[None, first : first + 1152], format="fltp", layout="mono")
                frame.sample_rate, frame.pts = 16_000, first
                container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
        data, options = (tmp_path / "a.mp3").read_bytes(), []
    command = [ZENDAYA, "stream", "-", "--model", MODEL, *options]
    result = subprocess.run(command, input=data, capture_output=True, timeout=600, check=True, env=ENVIRONMENT)
    assert result.stderr == b""
    heard, said = words(result.stdout.decode()), words(live_text)
    if kind == "wav":
        assert heard == said
    else:  # some of the sound is lost, and a word may go with it
        assert likeness(heard, said) > 0.8


def test_a_microphone_is_heard_in_a_thread(say, live_text, monkeypatch):
    """No machine that tests has a microphone: what one would give comes from the recording."""
    asked = []

    def hear(device=None, *, chunk_s=0.1):
        asked.append(device)
        yield from read_audio(RECORDING, chunk_s=chunk_s)

    monkeypatch.setattr("zendaya.sources.live.microphones", lambda: [Microphone(3, "headset", 1, True)])
    monkeypatch.setattr("zendaya.sources.live.read_microphone", hear)
    assert words(say(mic=True, device="3")) == words(live_text)
    assert asked == [3]
    stream(list_devices=True)


BAD = [
    ["/no/such.wav"],
    ["--mic", "--fast"],
    [],
    ["-", "--mic"],
    ["FILE", "--gamma", "-1"],
    ["FILE", "--gamma", "11"],
    ["FILE", "--policy", "gamma=20"],
    ["FILE", "--gamma", "1", "--policy", "full"],
    ["FILE", "--head", "-1"],
    ["FILE", "--head", "2", "--policy", "full"],
    ["FILE", "--policy", "tulips"],
    ["FILE", "--cut", "words"],
    ["FILE", "--patience", "-1"],
    ["FILE", "--window", "99"],
    ["FILE", "--window", "nan"],
    ["FILE", "--device", "3"],
    ["FILE", "--model", "no-such-model"],
    ["FILE", "--model", "no/such/folder"],
    ["FILE", "--vtt", "/no/such/folder/a.vtt"],
    ["FILE", "--vtt", "FILE"],
    ["FILE", "--vtt", "OUT", "--srt", "OUT"],
    ["TEXT", "--vtt", "OUT"],
    ["EMPTY", "--vtt", "OUT"],
    ["CUT"],
    ["SILENT", "--vtt", "OUT", "--fast"],
    ["FILE", "--model", "DIR"],
    ["FILE", "--encoder", "features:x"],
]


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input_is_one_line_exit_code_two_and_no_file(arguments, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.wav").write_text("this is no sound\n")
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "cut.wav").write_bytes(RECORDING.read_bytes()[:30])
    (tmp_path / "silent.wav").write_bytes(RECORDING.read_bytes()[:40] + bytes(4))
    names = {
        "SILENT": tmp_path / "silent.wav",
        "DIR": tmp_path,
        "FILE": RECORDING,
        "TEXT": tmp_path / "text.wav",
        "EMPTY": tmp_path / "empty.wav",
        "CUT": tmp_path / "cut.wav",
    }
    names["OUT"] = tmp_path / "out.vtt"
    monkeypatch.setattr(sys, "argv", ["zendaya", "stream", *(str(names.get(word, word)) for word in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("zendaya: ")
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out.vtt").exists()
    assert RECORDING.read_bytes()[:4] == b"RIFF"


def test_a_recording_that_breaks_off_keeps_the_cues_before_it(say, samples, tmp_path):
    whole = RECORDING.read_bytes()
    (tmp_path / "cut.wav").write_bytes(whole[: len(whole) * 4 // 5])
    with pytest.raises(SourceError, match="cut short"):
        say(tmp_path / "cut.wav", realtime=False, gamma=1.0, vtt=tmp_path / "a.vtt")
    found = read_vtt(tmp_path / "a.vtt")
    assert len(found) > 3
    assert likeness(found, SAID[: len(found)]) > 0.6


class Child:
    """The command on a pseudo-terminal of its own, in the foreground of it."""

    def __init__(self, *arguments):
        self.terminal, self.inside = pty.openpty()
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = subprocess.Popen(
            [ZENDAYA, *arguments], stdin=self.inside, stdout=self.inside, stderr=self.inside, env=ENVIRONMENT, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.shown = ""

    @property
    def modes(self):
        return termios.tcgetattr(self.inside)[3]

    def until(self, text, timeout_s=300):
        end_s = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < end_s, self.shown
            self._read()

    def press(self, text):
        os.write(self.terminal, text.encode())

    def turn(self, key, timeout_s=300):
        """Press a key, and wait until the status line shows another dial."""
        before, end_s = self.dial, time.monotonic() + timeout_s
        self.press(key)
        while self.dial == before:
            assert time.monotonic() < end_s, self.shown
            self._read()

    @property
    def dial(self):
        return re.findall(r"\[ (?:γ|about) [^\]]+ \]", self.shown)[-1]

    def end(self, timeout_s=120):
        """The exit code; by then the terminal is as it was."""
        end_s = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < end_s, self.shown
            self._read()
        self._read()
        assert self.modes & termios.ICANON
        assert self.modes & termios.ECHO
        os.close(self.inside)
        os.close(self.terminal)
        return self.process.returncode

    def _read(self):
        if select.select([self.terminal], [], [], 0.1)[0]:
            self.shown += os.read(self.terminal, 65536).decode(errors="replace")


def test_a_terminal_shows_live_captions_and_keys_turn_the_dial(tmp_path):
    child = Child("stream", RECORDING, "--model", MODEL, "--vtt", tmp_path / "a.vtt", "--gamma", "1")
    child.until("[ γ 1.0 ] │ listening")
    assert not child.modes & termios.ICANON
    begun = time.monotonic()
    child.until("Ever")
    assert time.monotonic() - begun > 0.4  # the recording plays at its own speed: the first block ends at 0.5 s
    child.until("│ lag ")
    assert re.search(r"lag \d+\.\d s: policy \d+\.\d, compute \d+\.\d\d │ exposure \d+% │ window 1: \d+\.\d/28 s", child.shown)
    child.press("]\x1b[A")
    child.until("[ γ 1.5 ]")
    child.press("[[")
    child.until("[ γ 0.7 ]")
    child.press("q")
    assert child.end() == 0
    assert read_vtt(tmp_path / "a.vtt")[0] == "ever"


def test_the_demo_plays_and_its_keys_turn_the_dial():
    child = Child("demo")
    child.until(" ] │ lag ")
    child.turn("[")
    child.press("q")
    child.until("no leak")
    assert child.end(300) == 0


def test_the_demo_on_a_page_serves_until_ctrl_c():
    child = Child("demo", "--page")
    child.until("The page: http://127.0.0.1:")
    address = re.search(r"http://[\d.:]+", child.shown).group()
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert b"<title>zendaya" in answer.read()
    assert "better" in child.shown
    child.press("\x03")
    assert child.end() == 0
    assert "Traceback" not in child.shown


def test_ctrl_c_keeps_what_was_decided(tmp_path):
    child = Child("stream", RECORDING, "--model", MODEL, "--vtt", tmp_path / "a.vtt", "--srt", tmp_path / "a.srt", "--gamma", "1")
    child.until("Ever")
    child.press("\x03")
    assert child.end() == 130
    assert "zendaya: stopped: what was decided of the first " in child.shown
    assert "Traceback" not in child.shown
    assert "ever" in read_vtt(tmp_path / "a.vtt")
    assert list(srt.parse((tmp_path / "a.srt").read_text()))


def test_killed_in_the_middle_the_subtitles_are_whole_cues(samples, tmp_path):
    """A pipe that never ends: the file is looked at while it grows, and after a kill."""
    command = [ZENDAYA, "stream", "-", "--raw", "--model", MODEL, "--vtt", tmp_path / "a.vtt"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    process.stdin.write((samples * 32767).astype("<i2").tobytes() * 2)
    process.stdin.flush()
    end_s = time.monotonic() + 300
    while not (tmp_path / "a.vtt").exists() or len(webvtt.read(str(tmp_path / "a.vtt"))) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    process.kill()
    process.wait()
    process.stdin.close()
    found = read_vtt(tmp_path / "a.vtt")
    assert likeness(found, SAID[: len(found)]) > 0.6
    assert (tmp_path / "a.vtt").read_text().endswith("\n\n")


def test_ctrl_c_in_a_pipe_ends_it_too(samples):
    process = subprocess.Popen(
        [ZENDAYA, "stream", "-", "--raw", "--model", MODEL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    process.stdin.write((samples * 32767).astype("<i2").tobytes())
    process.stdin.flush()
    assert process.stdout.read(4) == b"Ever"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.decode().startswith("zendaya: stopped: ")
    assert err.count(b"\n") == 1
    assert out.endswith(b"\n")
