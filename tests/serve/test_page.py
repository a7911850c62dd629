"""The page in Chromium, with the shipped model and a recording as microphone: captions, dial, lost connections, exports."""

import contextlib
import dataclasses
import importlib.resources
import itertools
import json
import re
import shutil
import socket
import struct
import threading
import time
import wave
from pathlib import Path

import av
import numpy as np
import pytest
import srt
import webvtt
from servers import serving, wait_for

from zendaya.records import Event
from zendaya.runtime.frontier import read_frontier
from zendaya.runtime.subtitles import SubtitleFile, Subtitles
from zendaya.serve.client import Client
from zendaya.serve.intake import load_served
from zendaya.serve.page import find_sample, read_page
from zendaya.sources.media import read_audio

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RECORDING = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
LIMIT_MS = 120_000
KEY = "a-key-of-sufficient-length"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: chromium, chromium-browser or google-chrome")


class Proxy:
    """A proxy between page and server whose cable can be pulled."""

    def __init__(self):
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.port, self.whole, self.cuts = 0, True, 0
        self.late = False
        """Holds back WebSockets, and nothing else."""
        self.held = ""
        """The file that is held back."""
        self.holds = False
        self._open = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self.whole = False
        self.cuts += 1
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)

    def mend(self):
        self.whole = True

    def close(self):
        self.cut()
        self._listening.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if not self.whole:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self.port))
                self._open |= {near, far}
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one, other):
        with contextlib.suppress(OSError):
            while (data := one.recv(65536)) and not (self.late and data.startswith(b"GET /v1/stream")):
                while self.held and data.startswith(f"GET {self.held} ".encode()):
                    self.holds = True
                    time.sleep(0.01)
                other.sendall(data)
        for each in (one, other):
            self._open.discard(each)
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        one.close()


@pytest.fixture(scope="module")
def served():
    """The shipped model; the tests of seconds give it a frontier."""
    return dataclasses.replace(load_served("tiny.en-dial"), frontier=None)


@pytest.fixture(scope="module")
def proxy():
    proxy = Proxy()
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def server(served, proxy):
    with serving(served, origins=(proxy.url,)) as running:
        proxy.port = running.port
        yield running


@pytest.fixture(scope="module")
def browser():
    flags = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream", f"--use-file-for-fake-audio-capture={RECORDING}"]
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*flags, "--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page with its requests and errors."""

    def __init__(self, browser, url, **options):
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self.url, self.asked, self.problems, self.sent = url, [], [], {}
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda said: self.problems.append(said.text) if "Content Security Policy" in said.text else None)
        self.page.on("websocket", self._follow)
        self.words = self.page.locator("#captions-a .word")

    def _follow(self, socket):
        def keep(payload):
            if isinstance(payload, bytes):
                self.sent.setdefault(socket.url, {})[struct.unpack_from("<Q", payload)[0]] = payload[8:]

        socket.on("framesent", keep)

    def go(self):
        self.page.goto(self.url)
        self.page.locator("#model").get_by_text(re.compile(".")).wait_for()
        return self

    def press(self, name):
        self.page.get_by_role("button", name=name, exact=True).click()

    def finished(self):
        self.page.get_by_role("button", name="Microphone").wait_for()
        playwright_api.expect(self.page.locator("#status")).to_have_text("Finished", timeout=LIMIT_MS)

    def save(self, form, lane="a"):
        with self.page.expect_download() as download:
            self.page.locator(f"[data-lane={lane}] [data-form={form}]").click()
        return Path(download.value.path()).read_text(encoding="utf-8")

    def saved(self, lane="a"):
        return json.loads(self.save("json", lane))

    def leave(self):
        self.context.close()
        assert not self.problems, self.problems
        stray = [each for each in self.asked if not each.startswith((self.url, self.url.replace("http", "ws"), "blob:", "data:"))]
        assert not stray, f"asked for outside its server: {stray}"


@pytest.fixture
def visit(browser, server):
    visits = []

    def go(url=f"http://{server.host}", **options):
        visits.append(Visit(browser, url, **options))
        return visits[-1]

    yield go
    for each in visits:
        each.leave()


# With the model.


@needs_chromium
def test_turning_the_dial_mid_stream_changes_the_lag(visit):
    here = visit().go()
    knob = here.page.get_by_role("slider", name="Dial γ")
    # A dial turned just before the start sets the first schedule, and is no turn.
    turn = "knob.value = knob.max; knob.dispatchEvent(new Event('input', {bubbles: true}))"
    button = here.page.get_by_role("button", name="Microphone").element_handle()
    knob.evaluate(f"(knob, button) => {{ {turn}; button.click() }}", button)
    here.words.nth(3).wait_for()
    assert here.page.get_by_role("button", name="Stop").is_visible(), "the words came only after the source had ended"
    first = here.words.all_inner_texts()
    knob.press("Home")
    # After the turn every step reads the whole window, so the next word comes at its end.
    playwright_api.expect(here.page.locator(".limit")).to_have_text("1/(1+γ) is 100 %")
    here.words.nth(len(first) + 2).wait_for()
    here.press("Stop")
    here.finished()
    whole = here.saved()
    assert [turn["schedule"] for turn in whole["turns"]] == ["gamma=0.0"]
    before = [word for word in whole["words"] if word["schedule"] == "gamma=1.5"]
    after = [word for word in whole["words"] if word["schedule"] == "gamma=0.0" and word["window_index"] == 0]
    assert len(before) >= 3
    assert len(after) >= 2
    assert max(word["horizon"] for word in before) < whole["window_tokens"] == min(word["horizon"] for word in after)
    lags = [np.mean([word["policy_lag_s"] for word in words]) for words in (before, after)]
    assert lags[1] > lags[0] + 0.5, f"lag before and after the turn: {lags}"
    assert " ".join(here.words.all_inner_texts()) == " ".join(whole["text"].split())
    playwright_api.expect(here.page.locator("[data-lane=a] .dropped")).to_have_text("0")


@pytest.fixture(scope="module")
def cut(browser, server, proxy):
    """A microphone over a connection that came late and failed twice."""
    here = Visit(browser, proxy.url).go()

    buffered = playwright_api.expect(here.page.locator("#buffered"))
    proxy.late = True
    here.press("Microphone")
    buffered.to_have_text(re.compile(r"^([1-9]|\d\d+)\.\d s buffered"), timeout=LIMIT_MS)
    proxy.late = False
    here.words.nth(1).wait_for()
    proxy.cut()
    playwright_api.expect(here.page.locator("#status")).to_have_text("Connection lost, reconnecting", timeout=LIMIT_MS)
    buffered.to_have_text(re.compile(r"^([1-9]|\d\d+)\.\d s buffered"), timeout=LIMIT_MS)
    proxy.mend()
    count = here.words.count()
    here.words.nth(count + 2).wait_for()
    proxy.cut()
    proxy.mend()
    playwright_api.expect(here.page.locator("#status")).to_have_text("Connected", timeout=LIMIT_MS)
    here.press("Stop")
    here.finished()
    yield here
    here.leave()


@needs_chromium
def test_a_cut_connection_has_the_same_transcript(cut, server, proxy):
    assert proxy.cuts >= 2
    (messages,) = cut.sent.values()
    assert sorted(messages) == list(range(1, len(messages) + 1))
    with Client(f"ws://127.0.0.1:{server.port}", gamma=0.5) as client:
        for number in sorted(messages):
            client.send(messages[number])
        text = "".join(caption.text for caption in client.finish())
    assert cut.saved()["text"].split() == text.split()
    assert len(text.split()) >= 5
    assert cut.save("txt").split() == text.split()


@needs_chromium
def test_a_cut_connection_drops_nothing(cut):
    playwright_api.expect(cut.page.locator("[data-lane=a] .dropped")).to_have_text("0")
    (messages,) = cut.sent.values()
    heard_s = sum(map(len, messages.values())) / 32000
    assert cut.saved()["words"][-1]["read_s"] <= heard_s + 0.02  # the last source token of 20 ms may be incomplete


@needs_chromium
def test_exports_are_valid_and_monotone(cut, tmp_path):
    whole = cut.saved()
    emissions = [word["emission_s"] for word in whole["words"]]
    assert emissions == sorted(emissions)
    reads = [word["read_s"] for word in whole["words"]]
    assert reads == sorted(reads)
    assert all(word["read_s"] <= word["arrival_s"] <= word["emission_s"] for word in whole["words"])
    cues = list(srt.parse(cut.save("srt"), ignore_errors=False))
    assert [cue.index for cue in cues] == list(range(1, len(cues) + 1))
    assert all(cue.start < cue.end for cue in cues)
    assert all(one.end <= other.start for one, other in itertools.pairwise(cues))
    assert " ".join(cue.content for cue in cues).split() == whole["text"].split()
    vtt = webvtt.from_string(cut.save("vtt"))
    assert [(cue.start_in_seconds, cue.text.split()) for cue in vtt] == [
        (int(cue.start.total_seconds()), cue.content.split()) for cue in cues
    ]


@needs_chromium
def test_a_word_shows_what_it_was_allowed_to_read(cut):
    words, detail = cut.saved()["words"], cut.page.locator("#detail")

    def tells(word):
        told = detail.inner_text()
        assert told.startswith(f"“{word['text']}”")
        assert f"up to {word['read_s']:.2f} s of the source: horizon {word['horizon']} of 1400" in told
        assert f"arrived at {word['arrival_s']:.2f} s" in told
        assert f"written at {word['emission_s']:.2f} s, {word['policy_lag_s'] + word['compute_lag_s']:.1f} s after" in told

    cut.words.nth(2).hover()
    tells(words[2])
    cut.page.locator("h1").hover()
    assert detail.inner_text().startswith("Point at a word")
    cut.page.locator("#captions-a").press("Home")
    tells(words[0])
    cut.page.keyboard.press("ArrowRight")
    tells(words[1])
    assert cut.words.nth(1).get_attribute("aria-describedby") == "detail"
    cut.page.keyboard.press("Tab")
    assert detail.inner_text().startswith("Point at a word")
    assert cut.page.evaluate("document.activeElement.id") == "dial-a"
    cut.page.keyboard.press("Shift+Tab")
    tells(words[-1])
    cut.page.keyboard.press("Shift+Tab")
    assert cut.page.evaluate("document.activeElement.id") == "compare", "no way out of the captions"


@needs_chromium
def test_a_word_on_the_time_axis_is_marked_in_the_captions(cut):
    cut.page.locator("h1").hover()
    cut.page.locator("#time").scroll_into_view_if_needed()
    box = cut.page.locator("#time").bounding_box()
    shown, names = cut.page.locator("#captions-a .word.shown"), set()
    assert shown.count() == 0
    rows = range(int(0.6 * box["height"]), int(box["height"]) - 20, 16)  # words written at once stand in rows below each other
    for right, down in itertools.product(range(20, int(box["width"]), 12), rows):
        cut.page.mouse.move(box["x"] + right, box["y"] + down)
        if shown.count():
            names.add(shown.get_attribute("data-index"))
            assert cut.page.locator("#detail").inner_text().startswith(f"“{shown.inner_text()}”")
    assert len(names) >= 5
    assert f"{len(cut.saved()['words'])} words written" in cut.page.locator("#time").get_attribute("aria-label")


@needs_chromium
def test_two_streams_of_one_source_side_by_side(visit):
    here = visit().go()
    here.page.get_by_label("Side by side").check()
    here.page.get_by_label("Policy of the second stream").select_option("wait-k")
    here.page.get_by_label("Sound").uncheck()
    here.press("Sample")
    here.page.locator("#captions-b .word").nth(1).wait_for()
    here.words.nth(1).wait_for()
    here.finished()
    one, two = here.saved("a"), here.saved("b")
    assert {word["schedule"] for word in one["words"]} == {"gamma=0.5"}
    assert {word["schedule"] for word in two["words"]} == {"wait-k=150,stride=16.0"}
    first, second = here.sent.values()
    assert first == second
    with wave.open(str(RECORDING)) as recording:
        assert b"".join(first[number] for number in sorted(first)) == recording.readframes(recording.getnframes())
    for whole in (one, two):
        assert "ever" in whole["text"].lower()
        assert "better" in whole["text"].lower()
    playwright_api.expect(here.page.locator("[data-lane=b] .dropped")).to_have_text("0")


@needs_chromium
def test_a_video_is_played_and_captioned(visit, tmp_path):
    samples = np.concatenate([chunk.samples for chunk in read_audio(RECORDING)])[: 3 * 16000]
    with av.open(str(tmp_path / "talk.webm"), "w") as container:
        picture, sound = container.add_stream("libvpx", rate=10), container.add_stream("libopus", rate=48000)
        picture.width, picture.height, picture.pix_fmt = 64, 48, "yuv420p"
        for _ in range(30):
            container.mux(picture.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
        container.mux(picture.encode())
        resampler = av.AudioResampler(format="flt", layout="mono", rate=48000)
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate = 16000
        for each in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(sound.encode(each))
        container.mux(sound.encode())
    here = visit().go()
    here.page.get_by_role("slider", name="Dial γ").press("End")
    here.page.get_by_label("A recording or video").set_input_files(tmp_path / "talk.webm")
    here.page.locator("#video").wait_for()
    here.words.nth(0).wait_for()
    here.finished()
    (messages,) = here.sent.values()
    heard_S = np.frombuffer(b"".join(messages[number] for number in sorted(messages)), "<i2") / 32768
    assert 2.7 < heard_S.size / 16000 < 4.5
    # The audio sent is that of the video, wherever the player began.
    held_S = np.concatenate([chunk.samples for chunk in read_audio(tmp_path / "talk.webm")])[8000:24000]
    spectra = [np.fft.rfft(each, 2**17) for each in (heard_S, held_S)]
    assert np.fft.irfft(spectra[0] * np.conj(spectra[1])).max() / np.linalg.norm(held_S) ** 2 == pytest.approx(1, abs=0.1)
    assert "ever" in here.words.nth(0).inner_text().lower()


@needs_chromium
def test_a_server_with_a_key(browser, served):
    """The browser asks for the key and keeps a cookie; without it, the page asks."""
    with serving(served, key=KEY) as running:
        url = f"http://{running.host}"
        stranger = Visit(browser, url, http_credentials={"username": "me", "password": "x" * 20})
        assert stranger.page.goto(url).status == 401
        stranger.leave()
        here = Visit(browser, url, http_credentials={"username": "me", "password": KEY}).go()
        here.press("Microphone")
        playwright_api.expect(here.page.locator("#status")).to_have_text("Connected", timeout=LIMIT_MS)
        here.press("Stop")
        here.finished()
        cookies = here.context.cookies()
        here.leave()
        here = Visit(browser, url)  # it has the cookie but not the key
        here.context.add_cookies(cookies)
        here.go()
        here.context.clear_cookies()
        here.press("Microphone")
        for key, said in (("another-key-of-that-length", "Wrong key"), (KEY, "Connected")):
            here.page.get_by_label("This server needs a key").fill(key)
            here.page.get_by_role("button", name="Send").click()
            playwright_api.expect(here.page.locator("#status")).to_have_text(said, timeout=LIMIT_MS)
        assert not here.page.locator("#key-form").is_visible()
        here.press("Stop")
        here.finished()
        assert not any(KEY in each for each in here.asked)
        here.leave()


@needs_chromium
def test_too_long_a_source_goes_on_in_another_session(browser, served):
    with serving(served, max_source_s=4) as running:
        here = Visit(browser, f"http://{running.host}").go()
        here.page.get_by_label("Sound").uncheck()
        here.press("Sample")
        here.finished()
        playwright_api.expect(here.page.locator("[data-lane=a] .dropped")).to_have_text("0")
        sessions = [[messages[number] for number in sorted(messages)] for messages in here.sent.values()]
        here.leave()
    assert len(sessions) == 3
    taken = [one[: one.index(other[0])] for one, other in itertools.pairwise(sessions)]
    assert [sum(map(len, each)) / 32000 for each in taken] == pytest.approx([4, 4], abs=0.1)
    with wave.open(str(RECORDING)) as recording:
        assert b"".join(itertools.chain(*taken, sessions[-1])) == recording.readframes(recording.getnframes())


@needs_chromium
def test_a_refused_connection_is_not_retried_twice(visit, proxy):
    here, asked, made = visit(proxy.url).go(), [], []
    here.page.on("websocket", lambda socket: made.append(socket))
    here.press("Sample")
    playwright_api.expect(here.page.locator("#status")).to_have_text("Connected", timeout=LIMIT_MS)
    here.page.route("**/readyz", lambda route: asked.append(route))
    proxy.late = True
    proxy.cut()
    proxy.mend()
    wait_for(lambda: here.page.wait_for_timeout(50) or asked, LIMIT_MS / 1000)
    proxy.late = False
    here.page.evaluate("dispatchEvent(new Event('online'))")
    playwright_api.expect(here.page.locator("#status")).to_have_text("Connected", timeout=LIMIT_MS)
    count = len(made)
    for each in asked:
        each.continue_()
    here.page.wait_for_timeout(1000)  # longer than the page waits before reconnecting
    assert len(made) == count
    here.press("Stop")
    here.finished()


@needs_chromium
def test_a_microphone_stopped_early_is_no_failure(visit, proxy):
    here = visit(proxy.url).go()
    proxy.held = "/page/capture.js"
    here.press("Microphone")
    wait_for(lambda: here.page.wait_for_timeout(50) or proxy.holds, LIMIT_MS / 1000)
    playwright_api.expect(here.page.locator("#status")).to_have_text("Connected", timeout=LIMIT_MS)
    here.press("Stop")
    here.page.wait_for_timeout(500)
    proxy.held = ""
    here.finished()


# With a stand-in for the server's socket.

OPENED = {
    "type": "opened", "session": "s", "token": "t", "model": "stub", "source": "audio", "schedule": "gamma=0.5", "window_tokens": 500,
    "tokens_per_s": 50.0, "dim": 384, "received": 0, "max_message": 2**20, "max_unread": 2**22,
}  # fmt: skip


def text_event(number, text, spoken_s, *, last=False):
    return {
        "type": "text", "seq": number, "text": text, "token": 1, "window_index": 0, "step": number, "horizon": 50, "effective_horizon": 50,
        "predicted_steps": 30, "skipped_steps": 0, "window_start": 0, "last": last, "gamma": None, "arrival_s": spoken_s + 1,
        "emission_s": spoken_s + 1.1, "spoken_s": spoken_s, "read_s": spoken_s + 0.5, "policy_lag_s": 1.0, "compute_lag_s": 0.1,
        "exposure": 0.1,
    }  # fmt: skip


class Stub:
    """A stand-in server that sends what a test says, and records what it receives per connection."""

    def __init__(self, here):
        self.here, self.told, self.sockets, self.number, self.opens = here, [], [], 0, True
        here.page.route_web_socket(re.compile("/v1/stream"), self._connect)

    def _connect(self, socket):
        told = []
        self.told.append(told)
        self.sockets.append(socket)

        def hear(message):
            said = message if isinstance(message, bytes) else json.loads(message)
            if not isinstance(said, bytes) and said["type"] == "ping":
                socket.send(json.dumps({"type": "pong", "id": said["id"]}))
                return
            told.append(said)
            if len(told) == 1 and self.opens:
                socket.send(json.dumps(OPENED))

        socket.on_message(hear)

    def sources(self, connection, least):
        """The numbers of a connection's source messages, once there are that many."""
        self.wait(lambda: len(self.told) > connection and sum(isinstance(each, bytes) for each in self.told[connection]) >= least)
        return [struct.unpack_from("<Q", each)[0] for each in self.told[connection] if isinstance(each, bytes)]

    def numbers(self, connection):
        """The numbers of all numbered messages of a connection."""
        found = (struct.unpack_from("<Q", each)[0] if isinstance(each, bytes) else each.get("seq") for each in self.told[connection])
        return [each for each in found if each is not None]

    def stop(self):
        """Stop the source; wait for its end."""
        self.here.press("Stop")
        self.wait(lambda: not isinstance(self.told[-1][-1], bytes) and self.told[-1][-1]["type"] == "end")

    def wait(self, condition):
        wait_for(lambda: self.here.page.wait_for_timeout(50) or condition(), LIMIT_MS / 1000)  # the stand-in runs while the page waits

    def say(self, message):
        self.sockets[-1].send(json.dumps(message))

    def write(self, *texts):
        for text in texts:
            self.number += 1
            self.say(text_event(self.number, text, 0.3 * self.number))

    def finish(self, reason="end"):
        self.number += 1
        self.say({"type": "finished", "seq": self.number, "reason": reason, "source_s": 1.0})


@pytest.fixture
def stub(visit):
    """The page on a stand-in server, the sample playing."""

    def start():
        here = visit()
        stub = Stub(here)
        here.go()
        here.press("Sample")
        playwright_api.expect(here.page.locator("#status")).to_have_text("Connected", timeout=LIMIT_MS)
        return here, stub

    return start


@needs_chromium
def test_markup_from_the_model_is_text(stub):
    here, server = stub()
    hurt = '<img src=x onerror="window.hurt=1">'
    server.write(" Hello", f" {hurt}", " <script>window.hurt=2</script>", " &amp;", " end", hurt)
    here.words.nth(4).get_by_text("onerror").wait_for()
    assert here.page.locator("#captions-a").inner_text() == f"Hello {hurt} <script>window.hurt=2</script> &amp; end{hurt}"
    here.words.nth(1).hover()
    assert hurt in here.page.locator("#detail").inner_text()
    here.page.get_by_text("The last words as a table").click()
    assert here.page.locator("#rows td").nth(6).inner_text() == hurt
    assert here.page.locator("#lanes img, #lanes script, #detail img, #rows img, #spoken img").count() == 0
    assert here.page.evaluate("window.hurt") is None
    assert "&lt;img src=x" in here.save("vtt")
    server.finish()


@needs_chromium
def test_captions_do_not_scroll_a_reader_away(stub):
    here, server = stub()
    captions, latest = here.page.locator("#captions-a"), here.page.get_by_role("button", name="Go to the latest")
    server.write(*(f" word{number}" for number in range(150)))
    here.words.nth(149).wait_for()

    def below():
        return captions.evaluate("each => each.scrollHeight - each.scrollTop - each.clientHeight")

    assert below() < 2
    captions.evaluate("each => { each.scrollTop = 40; }")
    latest.wait_for()
    server.write(" more")
    here.words.nth(150).wait_for()
    assert captions.evaluate("each => each.scrollTop") == 40
    latest.click()
    assert below() < 2
    assert not latest.is_visible()
    server.write(" and", " more")
    here.words.nth(152).wait_for()
    assert below() < 2
    server.finish()


@needs_chromium
def test_repeated_events_are_written_once(stub):
    here, server = stub()
    here.page.evaluate("""() => {
        window.taken = 0;  // what is written is never taken back
        const count = (each) => { window.taken += each.removedNodes.length + (each.type === 'characterData'); };
        const what = { childList: true, subtree: true, characterData: true };
        new MutationObserver((all) => all.forEach(count)).observe(document.getElementById('captions-a'), what);
    }""")
    server.write(" one", " two")
    here.words.nth(1).wait_for()
    server.say(text_event(2, " two", 0.6))
    server.say(text_event(1, " one", 0.3))
    server.write(" three")
    here.words.nth(2).wait_for()
    assert here.words.all_inner_texts() == ["one", "two", "three"]
    assert here.page.evaluate("window.taken") == 0
    server.wait(lambda: {"type": "ack", "received": 3} in server.told[0])
    server.opens = False
    server.sockets[-1].close(code=1011)
    server.wait(lambda: len(server.told) == 2 and server.told[1])
    here.page.wait_for_timeout(500)  # recorded meanwhile; it waits until the server has answered
    assert [told["type"] for told in server.told[1]] == ["resume"]
    server.say(OPENED)
    # Nothing was acknowledged, so everything is sent again.
    assert server.sources(1, 3)[:3] == [1, 2, 3]
    opened, resumed = server.told[0][0], server.told[1][0]
    assert resumed == {"type": "resume", "session": opened["session"], "token": opened["token"], "received": 3}
    server.finish()


@needs_chromium
def test_a_lost_session_is_reported_and_replaced(stub):
    here, server = stub()
    server.sources(0, 10)
    server.say({"type": "ack", "received": 10})
    server.say(text_event(1, " one", 0.3, last=True))
    here.words.nth(0).wait_for()
    server.sockets[-1].close(code=4404, reason="unknown_session")
    assert server.sources(1, 3)[:3] == [1, 2, 3]
    assert [told[0]["type"] for told in server.told] == ["open", "open"]
    assert server.told[0][0]["session"] != server.told[1][0]["session"]
    # The text of all 0.8 s that it had was written: nothing is lost.
    playwright_api.expect(here.page.locator("[data-lane=a] .dropped")).to_have_text("0")
    server.number = 0
    server.write(" two")
    here.words.nth(1).wait_for()
    assert here.words.all_inner_texts() == ["one", "two"]
    words = here.saved()["words"]
    assert words[1]["spoken_s"] == pytest.approx(words[0]["spoken_s"] + 10 * 0.08)
    # Next it has 2 s and has written the first 0.3 s of speech, though that word had read more: the rest is lost.
    server.sources(1, 25)
    server.say({"type": "ack", "received": 25})
    server.sockets[-1].close(code=4404, reason="unknown_session")
    playwright_api.expect(here.page.locator("[data-lane=a] .dropped")).to_have_text("1.7", timeout=LIMIT_MS)
    server.number = 0
    server.finish()


@needs_chromium
def test_a_session_lost_after_the_stop_is_finished(stub):
    here, server = stub()
    server.sources(0, 10)
    server.stop()
    server.say({"type": "ack", "received": len(server.numbers(0))})
    server.write(" one")
    here.words.nth(0).wait_for()
    server.opens = False
    server.sockets[-1].close(code=1011)
    server.wait(lambda: len(server.told) == 2 and server.told[1])
    assert [told["type"] for told in server.told[1]] == ["resume"]
    lost_s = sum(len(each) - 8 for each in server.told[0] if isinstance(each, bytes)) / 32000 - 0.3
    server.sockets[-1].close(code=4404, reason="unknown_session")
    said = f"Finished. The server has lost the session: {lost_s:.1f} s are lost"
    playwright_api.expect(here.page.locator("#status")).to_have_text(said, timeout=LIMIT_MS)
    playwright_api.expect(here.page.locator("[data-lane=a] .dropped")).to_have_text(f"{lost_s:.1f}")
    assert here.page.get_by_role("button", name="Microphone").is_visible()
    here.page.wait_for_timeout(500)
    assert len(server.told) == 2, "another session was begun, with nothing to say"


@needs_chromium
def test_a_stop_during_shutdown_is_the_end(stub):
    here, server = stub()
    server.sources(0, 10)
    server.stop()
    server.say({"type": "ack", "received": len(server.numbers(0)) - 1})
    server.finish("draining")
    here.finished()
    playwright_api.expect(here.page.locator("[data-lane=a] .dropped")).to_have_text("0")
    here.page.wait_for_timeout(500)
    assert len(server.told) == 1, "another session was begun, with nothing to say"


@needs_chromium
def test_unread_source_goes_to_the_next_session(stub):
    here, server = stub()
    server.sources(0, 6)
    server.say({"type": "ack", "received": 4})
    server.stop()
    server.finish("draining")
    server.wait(lambda: len(server.told) == 2 and len(server.numbers(1)) == len(server.numbers(0)) - 4)
    first, second = ([each[8:] for each in told if isinstance(each, bytes)] for told in server.told)
    assert second == first[4:]
    assert server.numbers(1) == list(range(1, len(second) + 2))
    server.number = 0
    server.finish()
    here.finished()
    playwright_api.expect(here.page.locator("[data-lane=a] .dropped")).to_have_text("0")


@needs_chromium
def test_subtitles_equal_those_of_the_library(stub, tmp_path):
    here, server = stub()
    texts = [" Well", ",", " this", " is", " a", " sentence", " that", " goes", " on", " and", " on", ".", " Then", " a--", "> b"]
    texts += [" <b>", " & so", " forth", "…", " " + "x" * 50, " é", "🙂", ' "Yes', '!"', " he", " said", "."] * 3
    server.write(*texts)
    here.words.nth(35).wait_for()
    for form in ("srt", "vtt"):
        subtitles = Subtitles(SubtitleFile(tmp_path / f"ours.{form}", form))
        for number, text in enumerate(texts, 1):
            event = Event(0, number, 1, text, 50, 50, 30, False)
            subtitles.add(event, text_event(number, text, 0.3 * number)["spoken_s"])
        subtitles.close()
        assert here.save(form) == (tmp_path / f"ours.{form}").read_text(encoding="utf-8")
    server.finish()


# Without a source.


@needs_chromium
def test_a_refused_page_says_so(visit, server):
    strange = Proxy()
    strange.port = server.port
    here = visit(strange.url)
    here.page.goto(here.url)
    said = f"The server refuses this page: start it with --origin {strange.url}"
    playwright_api.expect(here.page.locator("#status")).to_have_text(said, timeout=LIMIT_MS)
    strange.close()


@needs_chromium
def test_a_proxy_without_websockets_is_reported(visit):
    here = visit().go()
    here.page.evaluate("() => { const Real = WebSocket; window.WebSocket = function (url) { return new Real(`${url.origin}/none`); }; }")
    here.press("Sample")
    playwright_api.expect(here.page.locator("#status")).to_have_text(re.compile("^The server refuses WebSockets"), timeout=LIMIT_MS)


@needs_chromium
def test_seconds_are_the_dial_where_they_were_measured(browser, served, frontier_of):
    """One control from faster to more accurate, with what it means; γ stays in the details, and each is sent as it is turned."""
    points = ("gamma=1,head=10;block_s=1", 0.9, 11.0), ("gamma=0.7", 1.8, 9.0), ("gamma=0.3", 3.5, 7.0)
    with serving(dataclasses.replace(served, frontier=frontier_of(*points))) as running:
        here = Visit(browser, f"http://{running.host}").go()
        knob = here.page.get_by_role("slider", name="Faster ↔ More accurate")
        playwright_api.expect(knob).to_have_value("0")
        promise = "About 1.0 s behind; 90 % of words within 1.5 s, 12.0 % wrong; measured on LibriSpeech test-clean."
        playwright_api.expect(here.page.locator(".seconds-promise")).to_have_text(promise)
        gamma = here.page.get_by_role("slider", name="Dial γ")
        assert not gamma.is_visible()
        here.press("Microphone")
        here.words.nth(2).wait_for()
        (session,) = running.sessions.values()
        assert session.choice.setting.encoder == {"block_s": 1}
        knob.press("ArrowRight")
        here.page.get_by_text("About 1.9 s behind").wait_for()
        wait_for(lambda: str(session.stream.work.pipeline.session.schedule) == "gamma=0.7")
        here.page.get_by_text("Details").click()
        gamma.press("End")
        here.page.get_by_text("The dial γ is chosen in the details.").wait_for()
        wait_for(lambda: str(session.stream.work.pipeline.session.schedule) == "gamma=1.5")
        here.press("Stop")
        here.finished()
        here.leave()


@needs_chromium
def test_the_shipped_model_has_seconds(browser, served):
    with serving(dataclasses.replace(served, frontier=read_frontier("tiny.en-dial"))) as running:
        here = Visit(browser, f"http://{running.host}").go()
        assert here.page.get_by_role("slider", name="Faster ↔ More accurate").is_visible()
        promise = re.compile(r"About \d\.\d\ss\sbehind.*measured on LibriSpeech test-clean")
        playwright_api.expect(here.page.locator(".seconds-promise")).to_have_text(promise)
        here.press("Sample")
        here.finished()
        assert len(here.words.all_inner_texts()) >= 8
        here.leave()


@needs_chromium
def test_without_a_frontier_the_dial_is_gamma(visit):
    here = visit().go()
    assert here.page.get_by_role("slider", name="Dial γ").is_visible()
    assert not here.page.get_by_role("slider", name="Faster ↔ More accurate").is_visible()
    assert not here.page.get_by_text("Details").is_visible()


@needs_chromium
@pytest.mark.parametrize(
    ("error", "said"),
    [("NotAllowedError", "microphone is blocked"), ("NotFoundError", "No microphone found"), ("Error", "^Broken$")],
)
def test_a_missing_microphone_is_reported(visit, error, said):
    here = visit().go()
    here.page.evaluate(
        "name => { navigator.mediaDevices.getUserMedia = async () => { throw Object.assign(new Error('Broken'), { name }); }; }",
        error,
    )
    here.press("Microphone")
    playwright_api.expect(here.page.locator("#status")).to_have_text(re.compile(said), timeout=LIMIT_MS)
    playwright_api.expect(here.page.get_by_role("button", name="Microphone")).to_be_focused(timeout=LIMIT_MS)
    here.press("Sample")
    here.page.get_by_role("button", name="Stop").click()
    here.finished()


@needs_chromium
def test_an_unplayable_file_is_reported(visit, tmp_path):
    (tmp_path / "notes.wav").write_text("no sound at all")
    here = visit().go()
    here.page.get_by_label("A recording or video").set_input_files(tmp_path / "notes.wav")
    playwright_api.expect(here.page.locator("#status")).to_have_text(
        re.compile("^notes.wav: this browser cannot play it"), timeout=LIMIT_MS
    )


@needs_chromium
def test_every_control_has_a_name_and_one_tab_order(visit):
    here = visit().go()
    here.page.get_by_label("Side by side").check()
    tree = here.context.new_cdp_session(here.page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {
        "button",
        "slider",
        "checkbox",
        "combobox",
        "textbox",
        "image",
        "link",
        "region",
        "log",
        "DisclosureTriangle",
        "Canvas",
    }
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert len(found) > 20
    assert not [node for node in found if not node[1].strip()]
    names = [name for role, name in found if role in ("button", "slider", "checkbox", "combobox")]
    assert len(set(names)) == len(names), f"two controls have one name: {names}"
    stops = []
    here.page.locator("#mic").focus()
    for _ in range(6):
        stops.append(here.page.evaluate("document.activeElement.id || document.activeElement.className"))
        here.page.keyboard.press("Tab")
    assert stops == ["mic", "open", "sample", "sound", "compare", "captions-a"]


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_colour_schemes(visit, scheme):
    here = visit(color_scheme=scheme).go()

    def contrasts():
        pairs = here.page.evaluate("""() => [['#model', 'body'], ['.promise', 'body'], ['.dial-value', 'body'], ['h1', 'body'],
            ['.captions', '.page'], ['.hint', '.page'], ['#mic', '#mic'], ['#sample', '#sample']].map(([text, ground]) => [
                getComputedStyle(document.querySelector(text)).color, getComputedStyle(document.querySelector(ground)).backgroundColor])""")
        return [contrast(*pair) for pair in pairs]

    ground = here.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) > 0.5) == (scheme == "light")
    assert min(contrasts()) >= 4.5
    here.page.locator("#theme").click()
    assert (luminance(here.page.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.5) == (scheme == "dark")
    assert min(contrasts()) >= 4.5
    assert here.page.locator("#theme").get_attribute("aria-pressed") == ("true" if scheme == "light" else "false")
    here.page.reload()
    assert (luminance(here.page.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.5) == (scheme == "dark")


def luminance(colour):
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@needs_chromium
def test_resampling_does_not_depend_on_chunks(visit):
    here = visit().go()
    found = here.page.evaluate("""async () => {
        const { Resampler } = await import('/page/resample.js');
        const tone = (hz, rate, length) => Float32Array.from({ length }, (_, n) => Math.sin(2 * Math.PI * hz * n / rate));
        const read = (rate, samples, sizes) => {
            const resampler = new Resampler(rate, 16000), out = [];
            for (let at = 0, k = 0; at < samples.length; at += sizes[k % sizes.length], k += 1)
                out.push(...resampler.read(samples.subarray(at, at + sizes[k % sizes.length])));
            return [...out, ...resampler.finish()];
        };
        const facts = [];
        for (const rate of [44100, 48000, 8000, 16000]) {
            const low = tone(1000, rate, rate / 10), high = tone(11000, rate, rate / 10);
            facts.push({ rate, whole: read(rate, low, [rate]), parts: read(rate, low, [1, 7, 128, 1024]), high: read(rate, high, [rate]) });
        }
        return facts;
    }""")
    for fact in found:
        assert fact["whole"] == fact["parts"]
        assert len(fact["whole"]) == 1600
        wanted = np.sin(2 * np.pi * 1000 * np.arange(1600) / 16000)
        middle = slice(200, -200)
        assert np.abs(np.array(fact["whole"]) - wanted)[middle].max() < 5e-3, fact["rate"]
        if fact["rate"] > 22000:
            assert np.abs(fact["high"])[middle].max() < 1e-3


# Without a browser.


def test_the_page_is_its_files_and_the_sample():
    page = read_page()
    assert {name.rpartition(".")[2] for name in page} == {"html", "css", "js", "wav"}
    assert page["sample.wav"][0] == find_sample().read_bytes()


@pytest.mark.parametrize("name", [name for name in read_page() if name.endswith((".js", ".html"))])
def test_no_measured_figure_is_written_into_the_page(name):
    """Lag and word errors come from the frontier of the model that is served."""
    text = read_page()[name][0].decode()
    assert not re.search(r"\b(wer|lag_s|lagS|lag_p90_s)\W{1,4}\d", text)
