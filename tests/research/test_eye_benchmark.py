"""benchmarks/eye.py: the recording, what was seen when, and the figures made of it."""

import importlib.util
import io
import json
import sys
import types
import wave
from pathlib import Path

import numpy as np
import pytest

from zendaya.cli.terminal import Screen
from zendaya.errors import ConfigError
from zendaya.evaluation.metrics.speech import Utterance, WrittenWord

RATE = 16_000


@pytest.fixture
def eye(monkeypatch):
    path = Path(__file__).parents[2] / "benchmarks" / "eye.py"
    specification = importlib.util.spec_from_file_location("benchmark_eye", path)
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "benchmark_eye", module)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path):
    """Two chapters of one and three utterances of 2 s of noise; the second has word times but for its last utterance."""
    lines, times = [], []
    for name in ("1-1-0000", "1-2-0000", "1-2-0001", "1-2-0002"):
        lines.append({"id": name, "split": "valid", "dur": 2.0, "text": "ONE TWO", "audio": f"{name}.wav"})
        times.append({"id": name, "words": [["one", 0.2, 0.6], ["two", 0.6, 1.5]]})
        with wave.open(str(tmp_path / f"{name}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(np.random.default_rng(0).integers(-9000, 9000, 2 * RATE).astype("<i2").tobytes())
    (tmp_path / "manifest.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (tmp_path / "align_valid_test.jsonl").write_text("\n".join(map(json.dumps, times[:-1])), encoding="utf-8")
    return tmp_path


def test_the_recording_is_speech_between_two_clicks(eye, folder, tmp_path):
    recording, _ = eye.record(folder, "librispeech", "valid", 90.0)
    assert [(each.id, round(each.start_s, 2)) for each in recording.utterances] == [("1-2-0000", 5.01), ("1-2-0001", 7.01)]
    assert eye.onsets_s(recording.samples_S) == pytest.approx(recording.clicks_s, abs=1e-4)
    recording.save(tmp_path / "out.wav")
    with wave.open(str(tmp_path / "out.wav")) as file:
        assert file.getnframes() == recording.samples_S.size
        assert file.readframes(file.getnframes()) == recording.pcm
    short, _ = eye.record(folder, "librispeech", "valid", 3.0)
    assert len(short.utterances) == 1
    with pytest.raises(ConfigError, match="no utterance of the split 'test' has word times"):
        eye.record(folder, "librispeech", "test", 90.0)


def test_sound_without_its_clicks_is_refused(eye):
    with pytest.raises(ConfigError, match=r"expected the clicks before and after the speech in the sound that was sent: found 0"):
        eye.onsets_s(np.zeros(RATE, np.float32))


def test_a_word_is_painted_when_its_last_letter_is(eye):
    painted = [(0, "Hel", 1000.0), (0, "Hello", 1500.0), (1, "world", 1600.0), (0, "Hello,", 1700.0), (1, "world.", 1800.0)]
    assert [(word.text, word.written_s) for word in eye.painted_words(painted, -0.5)] == [("Hello,", 1.0), ("world.", pytest.approx(1.1))]


class Timed(io.StringIO):
    """A terminal that keeps what is written with the number of the write as its time."""

    def __init__(self):
        super().__init__()
        self.now, self.shown, self.times = 0.0, b"", []

    def isatty(self):
        return True

    def write(self, text):
        data = text.replace("\n", "\r\n").encode()  # as a terminal device does
        self.shown, self.times = self.shown + data, [*self.times, *[self.now] * len(data)]
        return len(text)


def test_words_of_a_terminal_come_without_its_status_lines(eye, monkeypatch):
    monkeypatch.setattr("zendaya.cli.terminal._width", lambda stream: eye.COLUMNS)
    monkeypatch.setattr("zendaya.cli.terminal.REDRAW_S", 0.0)
    terminal = Timed()
    screen = Screen(terminal, terminal)
    screen.show(lambda: "γ 0.5 │ listening")
    for piece in (" The", " quick", "est", " fox", ".", " It", " is", " gone"):
        terminal.now += 1
        screen.write(piece)
        screen.show(lambda: f"γ 0.5 │ lag {terminal.now} s")
        if piece == ".":
            screen.end_line()
    screen.close()
    found = eye.shown_words(terminal.shown, terminal.times, 10.0)
    expected = [("The", 11.0), ("quickest", 13.0), ("fox.", 14.0), ("It", 16.0), ("is", 17.0), ("gone", 18.0)]
    assert [(word.text, word.written_s) for word in found] == expected


def test_sound_is_fed_in_real_time(eye):
    written = []
    pipe = types.SimpleNamespace(write=lambda data: written.append((eye.time.monotonic(), len(data))), close=lambda: written.append(None))
    began_s = eye.feed(pipe, bytes(2 * RATE // 5))
    assert written.pop() is None
    assert sum(size for _, size in written) == 2 * RATE // 5
    for number, (at_s, _) in enumerate(written, 1):
        assert at_s >= began_s + number * 0.02


def test_lag_at_the_eye_beside_the_lag_without_computing(eye):
    said = Utterance("a", "a", 0.0, 4.0, (("once", 0.0, 1.0), ("upon", 1.0, 2.0), ("time", 2.0, 3.0)))
    recording = eye.Recording(np.zeros(4 * RATE, np.float32), (said,), (0.0, 4.0))

    def words(lag_s, texts=("Once", "upon", "time.")):
        return [WrittenWord(text, n + 1 + lag_s, n + 1 + lag_s, n + 1.0) for n, text in enumerate(texts)]

    found = eye.compare(recording, words(1.5), words(1.0), 0.01)
    assert (found["eye"]["p95_s"], found["without_computing"]["mean_s"], found["p95_difference_s"]) == (1.5, 1.0, 0.5)
    assert (found["same_text"], found["met"], found["num_right"]) == (True, False, 3)
    assert "difference of the 95 %: +0.50 s, target 0.4 s: missed" in "\n".join(eye.show("page", found))
    other = eye.compare(recording, words(1.2, ("Once", "open", "time.")), words(1.0), 0.0)
    assert (other["num_right"], other["same_text"], other["met"], other["word_by_word"]["p95_s"]) == (2, False, True, 0.2)
    with pytest.raises(ConfigError, match="no word was rightly written: 0 were seen, 3 in the replay"):
        eye.compare(recording, [], words(1.0), 0.0)
