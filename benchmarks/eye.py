"""Lag at the eye: from the end of a spoken word to the moment it is painted, in the page and in the terminal.

python benchmarks/eye.py FOLDER [--policy gamma=0.5] [--model NAME_OR_FOLDER] [--split valid] [--seconds 90] [--only page|terminal] [--json]

FOLDER holds a corpus with word times (align_*.jsonl). Utterances of one chapter, back to back between two clicks, are the sound of a
fake microphone in Chromium, whose page talks to `zendaya serve`; and of a pipe in real time to `zendaya stream` under a
pseudo-terminal. Beside each is the word lag without computing, of the same samples replayed. Use an idle machine.
Needs playwright, a Chromium on the path and the extras `serve` and `eval`. docs/evaluation.md says what is printed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import wave
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import zendaya
from zendaya.data.corpora.registry import read
from zendaya.errors import ConfigError, ZendayaError
from zendaya.evaluation.live import LivePlayer, LiveSetting, utterance, word_times
from zendaya.evaluation.metrics.speech import Pair, Utterance, WrittenWord, align
from zendaya.sources.media import SAMPLE_RATE, Samples, read_audio

CLICK_S = 3.0
"""Quiet before the first click, in which Chromium sets up its microphone."""
QUIET_S = 2.0
"""Quiet after the first click, and on both sides of the second."""
LOUD = 0.2
TARGET_S = 0.4
LIMIT_MS = 120_000
CHUNK = SAMPLE_RATE // 50
COLUMNS = 10_000
"""Of the pseudo-terminal: no line is wrapped."""
STATUS = re.compile(rb"\r?\n\r\x1b\[K([^\n]*?)\x1b\[A\r(?:\x1b\[\d+C)?")
"""A status line as `zendaya stream` draws it below the captions; the terminal puts a return before each newline."""
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Recording:
    """The sound, what is said in it, and where its two clicks are."""

    samples_S: Samples
    utterances: tuple[Utterance, ...]
    clicks_s: tuple[float, float]

    @property
    def duration_s(self) -> float:
        return self.samples_S.size / SAMPLE_RATE

    @property
    def pcm(self) -> bytes:
        """Signed 16-bit samples."""
        return (self.samples_S * 32767).astype("<i2").tobytes()

    def save(self, path: Path) -> None:
        """As a WAV file."""
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SAMPLE_RATE)
            file.writeframes(self.pcm)


def click() -> Samples:
    """10 ms of a tone of 1 kHz, full at once: no speech, and found to the sample."""
    return (0.8 * np.cos(2 * np.pi * 1000 * np.arange(SAMPLE_RATE // 100) / SAMPLE_RATE)).astype(np.float32)


def quiet(seconds: float) -> Samples:
    """Digital silence."""
    return np.zeros(round(seconds * SAMPLE_RATE), np.float32)


def record(folder: Path, corpus: str, split: str, seconds: float) -> tuple[Recording, str]:
    """The longest chapter of a split, up to so many seconds of whole utterances with word times; and the digest of the data."""
    reading, times = read(corpus, folder), word_times(folder)
    chapters = defaultdict[str, list[Any]](list)
    for clip in reading.usable:
        if clip.split == split and clip.id in times:
            chapters[clip.stream].append(clip)
    if not chapters:
        raise ConfigError(f"{folder}: no utterance of the split {split!r} has word times (align_*.jsonl)")
    name = max(sorted(chapters), key=lambda name: sum(clip.duration_s for clip in chapters[name]))
    parts, said = [quiet(CLICK_S), click(), quiet(QUIET_S)], list[Utterance]()
    size = first = sum(part.size for part in parts)
    for clip in chapters[name]:
        samples_S = np.concatenate([chunk.samples for chunk in read_audio(folder / clip.media)])
        if said and size + samples_S.size - first > seconds * SAMPLE_RATE:
            break
        said.append(utterance(clip, size / SAMPLE_RATE, times))
        parts.append(samples_S)
        size += samples_S.size
    parts += [quiet(QUIET_S), click(), quiet(QUIET_S)]
    return Recording(np.concatenate(parts), tuple(said), (CLICK_S, size / SAMPLE_RATE + QUIET_S)), reading.digest


# The page.


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """A server on a free port; its address."""
    command = [sys.executable, "-m", "zendaya", "serve", "--port", "0", "--model", model]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise ConfigError(f"the server did not start: try `zendaya serve --model {model}` by itself")
        yield found.group()
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def watch_page(recording: Recording, model: str, policy: str) -> dict[str, Any]:
    """Play the recording to the page as a microphone: clicks, samples sent and words painted, on the browser's clock."""
    from playwright.sync_api import expect, sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise ConfigError("no Chromium on the path: expected chromium, chromium-browser or google-chrome; --only terminal does without")
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    with contextlib.ExitStack() as stack:
        url, playwright = stack.enter_context(served(model)), stack.enter_context(sync_playwright())
        sound = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "microphone.wav"
        recording.save(sound)
        flags = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream", "--no-sandbox"]
        capture = f"--use-file-for-fake-audio-capture={sound}%noloop"
        browser = playwright.chromium.launch(executable_path=chromium, args=[*flags, capture])
        stack.callback(browser.close)
        page = browser.new_context(viewport={"width": 1280, "height": 900}, bypass_csp=True).new_page()
        page.set_default_timeout(LIMIT_MS)
        page.add_init_script(script)
        page.goto(url)
        page.locator("#model").get_by_text(re.compile(".")).wait_for()
        page.evaluate("policy => { window.zendayaEye.policy = policy }", policy)
        page.get_by_role("button", name="Microphone").click()
        page.wait_for_timeout(1000 * (recording.duration_s + 1))
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#status")).to_have_text("Finished", timeout=LIMIT_MS)
        found: dict[str, Any] = page.evaluate("() => window.zendayaEye.take()")
        return found


def onsets_s(samples_S: Samples) -> tuple[float, float]:
    """The first and the last sound after a second of quiet: the two clicks."""
    loud = np.flatnonzero(np.abs(samples_S) > LOUD)
    found = loud[np.diff(loud, prepend=-SAMPLE_RATE) >= SAMPLE_RATE] / SAMPLE_RATE
    if found.size < 2:
        raise ConfigError(f"expected the clicks before and after the speech in the sound that was sent: found {found.size}")
    return float(found[0]), float(found[-1])


def painted_words(painted: Sequence[tuple[int, str, float]], to_s: float) -> list[WrittenWord]:
    """The words of the page, each painted when its last letter was; `to_s` is what to add to the browser's seconds."""
    final = {index: text for index, text, _ in painted}
    found = dict[int, WrittenWord]()
    for index, text, at_ms in painted:
        if index not in found and letters(text) == letters(final[index]):
            at_s = at_ms / 1000 + to_s
            found[index] = WrittenWord(final[index].strip(), at_s, at_s, at_s)
    return [found[index] for index in sorted(found)]


def letters(text: str) -> str:
    """A word without marks."""
    return "".join(letter for letter in text if letter.isalnum())


def measure_page(recording: Recording, player: LivePlayer, policy: str) -> tuple[list[WrittenWord], list[WrittenWord], float]:
    """Words as painted and as replayed, on the clock of the recording, and how far the two clocks drifted apart."""
    found = watch_page(recording, player.name, policy)
    sent_S = decoded(base64.b64decode(found["samples"]))
    sent_s, clicks_s = onsets_s(sent_S), [at_ms / 1000 for at_ms in found["clicks"]]
    if len(clicks_s) < 2:
        raise ConfigError(f"expected the browser to hear two clicks: got {len(clicks_s)}; is the machine too busy?")
    spans_s = recording.clicks_s[1] - recording.clicks_s[0], clicks_s[-1] - clicks_s[0], sent_s[1] - sent_s[0]
    seen = painted_words([tuple(each) for each in found["painted"]], recording.clicks_s[0] - clicks_s[0])
    return seen, replayed(player, policy, sent_S, recording.clicks_s[0] - sent_s[0]), max(spans_s) - min(spans_s)


def decoded(pcm: bytes) -> Samples:
    """Signed 16-bit samples as floats, as the server and the command read them."""
    return np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)


def replayed(player: LivePlayer, policy: str, samples_S: Samples, to_s: float) -> list[WrittenWord]:
    """The words of the same samples where computing takes no time."""
    chunks = (samples_S[first : first + CHUNK] for first in range(0, samples_S.size, CHUNK))
    words = player.play(LiveSetting.parse(policy), chunks).words
    return [WrittenWord(word.text, word.written_s + to_s, word.written_s + to_s, word.spoken_s + to_s) for word in words]


# The terminal.


class Screen:
    """What a pseudo-terminal shows, byte by byte with the time."""

    def __init__(self) -> None:
        self.outer, self.inner = pty.openpty()
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        self.shown, self.times_s = b"", list[float]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other side has been closed
            while data := os.read(self.outer, 65536):
                self.times_s += [time.monotonic()] * len(data)
                self.shown += data

    def close(self) -> None:
        """Read to the end, once the program has ended."""
        os.close(self.inner)
        self._thread.join(10)
        os.close(self.outer)


def feed(pipe: Any, pcm: bytes) -> float:
    """Write sound to a pipe as a microphone gives it, each 20 ms at their end; gives the moment at which it began."""
    began_s, size = time.monotonic(), 2 * CHUNK
    for number, first in enumerate(range(0, len(pcm), size), 1):
        time.sleep(max(0.0, began_s + number * CHUNK / SAMPLE_RATE - time.monotonic()))
        pipe.write(pcm[first : first + size])
    pipe.close()
    return began_s


def shown_words(shown: bytes, times_s: Sequence[float], to_s: float) -> list[WrittenWord]:
    """The words of the captions without status lines, each shown when its last letter was."""
    hidden = np.zeros(len(shown), np.bool_)
    for pattern in (STATUS, CONTROL):
        for found in pattern.finditer(shown):
            hidden[found.start() : found.end()] = True
    kept = np.flatnonzero(~hidden)
    words = list[WrittenWord]()
    for found in re.finditer(rb"\S+", bytes(shown[place] for place in kept)):
        text = found.group().decode(errors="replace")
        last = max((place for place in range(len(found.group())) if chr(found.group()[place]).isalnum()), default=0)
        at_s = times_s[kept[found.start() + last]] + to_s
        words.append(WrittenWord(text, at_s, at_s, at_s))
    return words


def measure_terminal(recording: Recording, player: LivePlayer, policy: str) -> tuple[list[WrittenWord], list[WrittenWord], float]:
    """Words as shown and as replayed, on the clock of the recording; there is one clock."""
    screen = Screen()
    command = [sys.executable, "-m", "zendaya", "stream", "-", "--raw", "--policy", policy, "--model", player.name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=screen.inner, stderr=screen.inner, bufsize=0)
    try:
        limit_s = time.monotonic() + LIMIT_MS / 1000
        while b"listening" not in screen.shown:
            if process.poll() is not None or time.monotonic() > limit_s:
                raise ConfigError(f"zendaya stream did not start: {screen.shown.decode(errors='replace').strip()[-200:]}")
            time.sleep(0.01)
        ready = len(screen.shown)
        began_s = feed(process.stdin, recording.pcm)
        process.wait(LIMIT_MS / 1000)
    finally:
        process.kill()
        process.wait()
        screen.close()
    status = STATUS.search(screen.shown)  # before the first are the program's messages
    first = ready if status is None else status.start()
    seen = shown_words(screen.shown[first:], screen.times_s[first:], -began_s)
    return seen, replayed(player, policy, decoded(recording.pcm), 0.0), 0.0


# Figures.


def lags(recording: Recording, written: Sequence[WrittenWord]) -> dict[tuple[int, float], float]:
    """Seconds from the end of each rightly written word to its writing, by utterance and start."""

    def right(pair: Pair) -> bool:
        return pair.right and pair.said is not None and pair.written is not None

    pairs = filter(right, align(recording.utterances, written))
    return {(said.utterance, said.start_s): word.written_s - said.end_s for said, word, _ in pairs if said and word}


def figures(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and 95 %."""
    array = np.array(values)
    return {"mean_s": round(float(array.mean()), 3)} | {f"p{q}_s": round(float(np.percentile(array, q)), 3) for q in (50, 95)}


def compare(recording: Recording, seen: Sequence[WrittenWord], without: Sequence[WrittenWord], drift_s: float) -> dict[str, Any]:
    """The lag at the eye beside the lag without computing."""
    eye, bare = lags(recording, seen), lags(recording, without)
    if not eye or not bare:
        raise ConfigError(f"no word was rightly written: {len(seen)} were seen, {len(without)} in the replay")
    both = sorted(eye.keys() & bare.keys())
    spoken = sum(len(each.words) for each in recording.utterances)
    found: dict[str, Any] = {"num_spoken": spoken, "num_right": len(eye), "num_right_replayed": len(bare), "drift_s": round(drift_s, 3)}
    texts = [" ".join(word.text for word in words) for words in (seen, without)]
    found |= {
        "seen": texts[0],
        "replayed": texts[1],
        "same_text": texts[0] == texts[1],
        "eye": figures(list(eye.values())),
        "without_computing": figures(list(bare.values())),
    }
    added_s = round(found["eye"]["p95_s"] - found["without_computing"]["p95_s"], 3)
    each = figures([eye[word] - bare[word] for word in both])
    return {**found, "word_by_word": each, "p95_difference_s": added_s, "target_s": TARGET_S, "met": added_s <= TARGET_S}


def show(name: str, found: dict[str, Any]) -> Iterator[str]:
    """The figures of the page or the terminal."""

    def line(values: dict[str, float]) -> str:
        return f"mean {values['mean_s']:.2f} s, median {values['p50_s']:.2f} s, 95 % {values['p95_s']:.2f} s"

    text = "the same text as replayed" if found["same_text"] else "not the text of the replay"
    yield f"{name}: {found['num_right']} of {found['num_spoken']} words right, {text}; clocks drift by {found['drift_s']:.3f} s"
    yield f"  lag at the eye:        {line(found['eye'])}"
    yield f"  without computing:     {line(found['without_computing'])}"
    yield f"  added, word by word:   {line(found['word_by_word'])}"
    verdict = "met" if found["met"] else "missed"
    yield f"  difference of the 95 %: {found['p95_difference_s']:+.2f} s, target {found['target_s']} s: {verdict}"


def main(words: Sequence[str] | None = None) -> None:
    """Play, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", default="librispeech")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--policy", default="gamma=0.5", help="a schedule or policy in its printed form")
    parser.add_argument("--model", default="tiny.en-dial")
    parser.add_argument("--seconds", type=float, default=90.0, help="of speech")
    parser.add_argument("--only", choices=["page", "terminal"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    recording, digest = record(options.folder, options.corpus, options.split, options.seconds)
    player = LivePlayer(options.model)
    player.open(LiveSetting.parse(options.policy))  # what the model cannot do is said before anything is played
    signature = {
        "version": zendaya.__version__, "model": player.name, "model_digest": player.digest[:16], "data_digest": digest[:16],
        "corpus": options.corpus, "split": options.split, "policy": options.policy, "first": recording.utterances[0].id,
        "seconds": round(recording.duration_s, 1), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    wanted = {"page": measure_page, "terminal": measure_terminal}
    found = {
        name: compare(recording, *measured(recording, player, options.policy))
        for name, measured in wanted.items()
        if options.only in (None, name)
    }
    if options.json:
        print(json.dumps({"signature": signature, **found}, indent=1))
        return
    print("|".join(f"{name}:{value}" for name, value in signature.items()))
    for name, one in found.items():
        print(*show(name, one), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except ZendayaError as error:
        sys.exit(f"error: {error}")
