"""Speech through real clients: ours, OpenAI's, Home Assistant's, SimulEval; each gets the session's text."""

import asyncio
import base64
import concurrent.futures
import contextlib
import difflib
import functools
import importlib.resources
import importlib.util
import io
import json
import random
import re
import socket
import sys
import threading
import time
import wave
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import srt
import webvtt
from servers import Wire, serving, texts, wait_for
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from wyoming.asr import Transcribe, Transcript, TranscriptChunk
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong

from zendaya import Client, DecodeOptions, Pipeline, PowerLaw
from zendaya.evaluation.metrics.quality import word_error_rate
from zendaya.runtime.engine import engine_for
from zendaya.runtime.frontier import choose_setting
from zendaya.runtime.loading import load_live
from zendaya.serve.intake import Resampler, Served
from zendaya.serve.transports import simuleval as remote
from zendaya.sources.live import at_once
from zendaya.sources.media import read_audio

RECORDING = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
MODEL = "tiny.en-dial"
SAID = ["ever", "tried", "ever", "failed", "no", "matter", "try", "again", "fail", "again", "fail", "better"]


@pytest.fixture(scope="module")
def speech():
    return Served(MODEL, *load_live(MODEL))


@pytest.fixture(scope="module")
def running(speech):
    with serving(speech, max_sessions=4, wyoming_port=0) as one:
        yield one


@pytest.fixture(scope="module")
def floats():
    return np.concatenate([chunk.samples for chunk in read_audio(RECORDING)])


@pytest.fixture(scope="module")
def pcm(floats):
    return (floats * 32767).astype("<i2")


@pytest.fixture(scope="module")
def default(speech):
    """The schedule of a live stream whose client gives no dial."""
    return choose_setting(None, config=speech.model.config).schedule


@pytest.fixture(scope="module")
def alone(speech):
    """What a pipeline without a server writes of samples, as the command does."""
    engine, known = engine_for(speech.model), {}

    def write(samples, schedule=0.5):
        samples = samples.astype(np.float32) / np.float32(32768) if samples.dtype.kind == "i" else samples
        schedule = PowerLaw(schedule) if isinstance(schedule, float) else schedule
        key = (samples.tobytes(), schedule)
        if key not in known:
            pipeline = Pipeline.open(speech.model, speech.encoder, DecodeOptions(schedule=schedule), engine=engine)
            known[key] = "".join(event.text for event in pipeline.run(at_once([samples])))
        return known[key]

    return write


@pytest.fixture
def held(monkeypatch):
    """Pause both threads of a server's model."""

    @contextlib.contextmanager
    def hold(running):
        go_on, hub = threading.Event(), running.server.hub
        rounds, blocks = hub._batcher.round, running.server.served.encoder.blocks
        monkeypatch.setattr(hub._batcher, "round", lambda: go_on.wait(60) and rounds())
        monkeypatch.setattr(running.server.served.encoder, "blocks", lambda *source: go_on.wait(60) and blocks(*source))
        try:
            yield
        finally:
            go_on.set()

    return hold


def words(text):
    return re.findall(r"[a-z]+", text.lower())


def test_the_recording_is_transcribed(alone, default, pcm):
    def errors(text):
        return word_error_rate([" ".join(words(text))], [" ".join(SAID)]).value

    assert errors(alone(pcm, 0.0)) < 20
    assert errors(alone(pcm, default)) < 40


@pytest.mark.parametrize("seed", [0, 1])
def test_audio_in_any_chunks_gives_the_same_text(running, alone, pcm, seed):
    generator, first = random.Random(seed), 0
    with Client(f"ws://{running.host}", gamma=0.5) as client:
        captions = []
        while first < pcm.size:
            size = generator.choice([1, 160, 1600, 16000, 50000])
            client.send(pcm[first : first + size] if seed else pcm[first : first + size].tobytes())
            captions += client.captions()
            first += size
        captions += client.finish()
    assert "".join(caption.text for caption in captions) == alone(pcm)
    assert all(caption.read_s <= pcm.size / 16000 + 0.02 for caption in captions)


def test_speech_after_silence_is_as_without_a_server(running, alone, pcm):
    stream = np.concatenate([np.zeros(5 * 16_000, "<i2"), pcm, np.zeros(4 * 16_000, "<i2"), pcm])
    with Client(f"ws://{running.host}", gamma=0.5) as client:
        for first in range(0, stream.size, 9999):
            client.send(stream[first : first + 9999])
        captions = list(client.finish())
    assert "".join(caption.text for caption in captions) == alone(stream)
    assert difflib.SequenceMatcher(None, words(alone(stream)), 2 * words(alone(pcm)), autojunk=False).ratio() > 0.9
    assert min(caption.read_s for caption in captions) > 5


def test_streams_with_different_gammas(running, alone, pcm):
    gammas = [0.1, 0.5, 1.0, 2.0]
    clients = [Client(f"ws://{running.host}", gamma=gamma) for gamma in gammas]
    for first in range(0, pcm.size, 16000):
        for client in clients:
            client.send(pcm[first : first + 16000])
    for client, gamma in zip(clients, gammas, strict=True):
        assert "".join(caption.text for caption in client.finish()) == alone(pcm, gamma)
        client.close()


def test_another_rate_is_resampled(running, alone, floats):
    resampler = Resampler(24_000)
    source = np.interp(np.arange(floats.size * 3 // 2) / 1.5, np.arange(floats.size), floats)
    quick = np.clip(np.rint(source * 32768), -32768, 32767).astype("<i2")
    expected = alone(np.concatenate([resampler.read(quick.astype(np.float32) / np.float32(32768)), resampler.finish()]))
    with Client(f"ws://{running.host}", gamma=0.5, rate=24_000) as client:
        for first in range(0, quick.size, 7777):
            client.send(quick[first : first + 7777])
        assert "".join(caption.text for caption in client.finish()) == expected
    assert words(expected)[0] == SAID[0]


@pytest.mark.parametrize("rate", [8000, 24_000, 44_100, 48_000])
def test_a_resampler_is_causal_in_any_chunks(rate):
    sound = np.random.default_rng(0).standard_normal(rate // 2).astype(np.float32)

    def resampled(sizes, source=sound):
        resampler, parts, first, n = Resampler(rate), [], 0, 0
        while first < source.size:
            parts.append(resampler.read(source[first : first + sizes[n % len(sizes)]]))
            first, n = first + sizes[n % len(sizes)], n + 1
        return np.concatenate([*parts, resampler.finish()])

    whole = resampled([sound.size])
    assert abs(whole.size - 8000) <= 1
    for sizes in ([1, 7, 480, 2401], [13], [960]):
        np.testing.assert_array_equal(resampled(sizes), whole)
    half = sound.copy()
    half[rate // 4 :] = np.float32(7.0)
    early = round(16000 * (0.25 - 0.002))
    np.testing.assert_array_equal(resampled([480], half)[:early], whole[:early])


# OpenAI's clients.


@pytest.fixture
def sdk(running):
    with openai.OpenAI(api_key="not needed here", base_url=f"http://{running.host}/v1", max_retries=0) as client:
        yield client


def base64_of(samples):
    return base64.b64encode(samples.tobytes()).decode()


@pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")  # the SDK's own use of websockets
def test_openais_sdk_transcribes_in_real_time(running, sdk, alone, pcm):
    deltas, done, committed = {}, {}, []
    with sdk.realtime.connect(model=MODEL, extra_query={"intent": "transcription"}) as connection:
        created = connection.recv()
        assert (created.type, created.session.type) == ("session.created", "transcription")
        form = {"type": "audio/pcm", "rate": 16000}
        settings = {"format": form, "transcription": {"model": MODEL, "delay": "medium"}, "turn_detection": None}
        connection.session.update(session={"type": "transcription", "audio": {"input": settings}})
        updated = connection.recv()
        assert (updated.type, updated.session.audio.input.transcription.delay) == ("session.updated", "medium")
        for part in (pcm, pcm[: pcm.size // 2]):  # two items
            for first in range(0, part.size, 8000):
                connection.input_audio_buffer.append(audio=base64_of(part[first : first + 8000]))
            connection.input_audio_buffer.commit()
        while len(done) < 2:
            event = connection.recv()
            if event.type == "input_audio_buffer.committed":
                committed.append((event.previous_item_id, event.item_id))
            elif event.type == "conversation.item.input_audio_transcription.delta":
                deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
            elif event.type == "conversation.item.input_audio_transcription.completed":
                assert event.transcript == deltas[event.item_id]
                done[event.item_id] = event
        assert committed[1][0] == committed[0][1]  # whichever finishes first
        first, second = (done[item] for _, item in committed)
        assert (first.transcript, second.transcript) == (alone(pcm).strip(), alone(pcm[: pcm.size // 2]).strip())
        assert first.usage.seconds == pytest.approx(pcm.size / 16000)
    wait_for(lambda: not running.server.seats and not len(running.server.hub))


class Realtime:
    """A bare client of /v1/realtime."""

    def __init__(self, running, query="?intent=transcription", **options):
        self.socket = connect(f"ws://{running.host}/v1/realtime{query}", compression=None, **options).__enter__()
        self.events = []

    def tell(self, sort, **what):
        self.socket.send(json.dumps({"type": sort, **what}))

    def until(self, *kinds):
        while True:
            event = json.loads(self.socket.recv(timeout=60))
            self.events.append(event)
            if event["type"] in kinds:
                return event


def configured(rate, **transcription):
    return {"type": "transcription", "audio": {"input": {"format": {"type": "audio/pcm", "rate": rate}, "transcription": transcription}}}


def test_delay_settings_and_gamma_mid_stream(running, default, pcm):
    one = Realtime(running)
    assert one.until("session.created")["session"]["audio"]["input"]["transcription"]["gamma"] == default.gamma_or_none
    for delay, gamma in (("minimal", 1.0), ("low", 0.7), ("medium", 0.5), ("high", 0.3), ("xhigh", 0.1)):
        one.tell("session.update", session=configured(16000, delay=delay))
        assert one.until("session.updated")["session"]["audio"]["input"]["transcription"]["gamma"] == gamma
    one.tell("input_audio_buffer.append", audio=base64_of(pcm[:80000]))
    one.tell("session.update", session={"gamma": 0.42})
    updated = one.until("session.updated")["session"]["audio"]["input"]["transcription"]
    assert (updated["gamma"], updated["delay"]) == (0.42, None)
    one.tell("input_audio_buffer.append", audio=base64_of(pcm[80000:]))
    one.tell("input_audio_buffer.commit")
    one.until("conversation.item.input_audio_transcription.completed")
    marked = Wire(running, {"type": "open", "gamma": 0.1})  # the same over /v1/stream, which reports the turn
    marked.source(pcm[:80000].tobytes())
    marked.say("turn", gamma=0.42)
    marked.source(pcm[80000:].tobytes())
    assert one.events[-1]["transcript"] == "".join(text[0] for text in texts(marked.end())).strip()
    one.socket.close()


def test_cleared_audio_is_not_written(running, alone, default, pcm):
    one = Realtime(running, "")
    one.tell(
        "transcription_session.update",
        session={"input_audio_format": "pcm16", "input_audio_transcription": {"model": MODEL}, "turn_detection": None},
    )
    assert one.until("transcription_session.updated")["session"]["audio"]["input"]["format"]["rate"] == 24000
    one.tell("session.update", session=configured(16000))
    one.tell("input_audio_buffer.append", audio=base64_of(pcm[::-1].copy()))
    one.tell("input_audio_buffer.clear")
    one.until("input_audio_buffer.cleared")
    one.tell("input_audio_buffer.append", audio=base64_of(pcm))
    one.tell("input_audio_buffer.commit")
    committed = one.until("input_audio_buffer.committed")
    completed = one.until("conversation.item.input_audio_transcription.completed")
    assert completed["item_id"] == committed["item_id"]
    assert completed["transcript"] == alone(pcm, default).strip()
    one.socket.close()
    wait_for(lambda: not running.server.seats and not len(running.server.hub))


def test_the_rate_cannot_change_within_an_item(running, default, pcm):
    one = Realtime(running)
    one.tell("session.update", session=configured(16000))
    one.tell("input_audio_buffer.append", audio=base64_of(pcm[:1600]))
    one.tell("session.update", session=configured(24000, delay="high"))
    assert one.until("error")["error"]["param"] == INPUT + "format.rate"
    one.tell("session.update", session=configured(16000))
    one.until("session.updated")
    one.tell("input_audio_buffer.clear")
    one.tell("session.update", session=configured(24000))
    updated = one.until("session.updated")
    assert updated["session"]["audio"]["input"]["format"]["rate"] == 24000
    assert updated["session"]["audio"]["input"]["transcription"]["gamma"] == default.gamma_or_none  # a malformed update changes nothing
    one.socket.close()


@pytest.mark.parametrize("then", ["append", "commit", "clear"])
def test_audio_after_a_failed_item_begins_another(hearing, monkeypatch, then):
    with serving(hearing, voice="off") as running:
        one, kind = Realtime(running), "conversation.item.input_audio_transcription"
        one.tell("session.update", session=configured(16000))
        with monkeypatch.context() as patch:
            patch.setattr(hearing.encoder, "blocks", lambda *source: 1 / 0)
            one.tell("input_audio_buffer.append", audio=base64_of(np.zeros(1600, "<i2")))
            failed = one.until(f"{kind}.failed")
        assert (failed["error"]["type"], failed["error"]["code"]) == ("server_error", "transcription_failed")
        if then == "clear":
            one.tell("input_audio_buffer.clear")
            one.until("input_audio_buffer.cleared")
        elif then == "commit":
            one.tell("input_audio_buffer.commit")
            assert one.until("error")["error"]["code"] == "input_audio_buffer_commit_empty"
        one.tell("input_audio_buffer.append", audio=base64_of(np.zeros(64000, "<i2")))
        one.tell("input_audio_buffer.commit")
        assert one.until(f"{kind}.completed")["item_id"] != failed["item_id"]
        one.socket.close()
        wait_for(lambda: not running.server.seats and not len(running.server.hub))


INPUT = "session.audio.input."


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{", "event"),
        ("7", "event"),
        (r'{"type": "session.update", "event_id": "\ud800"}', "event"),
        (b"\0\0", "event"),
        ({"type": "response.create"}, "type"),
        ({"type": None}, "type"),
        ({"type": "input_audio_buffer.append"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "*"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAA"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": 7}, "audio"),
        ({"type": "input_audio_buffer.commit"}, "audio"),
        ({"type": "session.update", "session": 1}, "session"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "session.type"),
        ({"type": "session.update", "session": {"gamma": -1}}, "session.gamma"),
        ({"type": "session.update", "session": {"gamma": "high"}}, "session.gamma"),
        ({"type": "session.update", "session": configured(8000)}, INPUT + "format.rate"),
        ({"type": "session.update", "session": configured([])}, INPUT + "format.rate"),
        ({"type": "session.update", "session": configured(24000, delay="none")}, INPUT + "transcription.delay"),
        ({"type": "session.update", "session": configured(24000, gamma=11)}, INPUT + "transcription.gamma"),
        ({"type": "session.update", "session": configured(24000, model="whisper-9")}, INPUT + "transcription.model"),
        ({"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}}, INPUT + "turn_detection"),
        ({"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}}, INPUT + "format.type"),
        ({"type": "transcription_session.update", "session": {"input_audio_format": "g711_ulaw"}}, "session.input_audio_format"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_echo_the_event_and_name_the_field(running, message, param):
    one = Realtime(running)
    one.until("session.created")
    if isinstance(message, dict):
        one.tell(**{"sort": message["type"], **{name: value for name, value in message.items() if name != "type"}, "event_id": "mine"})
    else:
        one.socket.send(message)
    error = one.until("error")["error"]
    assert (error["param"], error["event_id"]) == (param, "mine" if isinstance(message, dict) else None)
    assert error["message"].startswith(f"{param}: ")
    one.tell("session.update", session={"gamma": 0.3})  # the session goes on
    one.until("session.updated")
    one.socket.close()


@pytest.mark.parametrize(("query", "status"), [("?intent=conversation", 400), ("?model=gpt-9", 404)])
def test_a_wrong_model_is_refused_before_the_socket(running, query, status):
    with pytest.raises(InvalidStatus) as refused:
        Realtime(running, query)
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["error"]["param"] == query[1:].split("=")[0]


def test_openais_sdk_transcribes_a_file_in_every_format(running, sdk, alone, floats):
    text = alone(floats, 0.0).strip()  # nobody waits for the words of a file

    def ask(**options):
        with RECORDING.open("rb") as file:
            return sdk.audio.transcriptions.create(file=file, model=MODEL, **options)

    assert ask().text == text
    assert ask(response_format="text") == text + "\n"
    cues = list(srt.parse(ask(response_format="srt")))
    assert words(" ".join(cue.content for cue in cues)) == words(text)
    captions = webvtt.from_buffer(io.StringIO(ask(response_format="vtt")))
    assert words(" ".join(caption.text for caption in captions)) == words(text)
    verbose = ask(response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert (verbose.text, verbose.duration) == (text, pytest.approx(floats.size / 16000))
    assert "".join(segment.text for segment in verbose.segments) == text
    assert [word.word for word in verbose.words] == text.split()
    assert all(one.end <= other.start + 1e-6 for one, other in zip(verbose.words, verbose.words[1:], strict=False))
    pieces = list(ask(stream=True))
    assert "".join(event.delta for event in pieces if event.type == "transcript.text.delta") == text
    assert (pieces[-1].type, pieces[-1].text) == ("transcript.text.done", text)
    assert len(pieces) > 5
    assert ask(extra_body={"gamma": 1.0}).text == alone(floats, 1.0).strip()
    assert ask(extra_body={"delay": "minimal"}).text == alone(floats, 1.0).strip()
    assert [model.id for model in sdk.models.list()] == [MODEL]
    wait_for(lambda: not running.server.seats and not len(running.server.hub))


def file_of(samples, rate=16000):
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return data.getvalue()


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        ({}, {"model": MODEL}, "content-type"),
        ({"file": ("../../x.wav", b"not sound")}, {}, "file"),
        ({"file": ("x.wav", b"")}, {}, "file"),
        ({"file": ("x.m3u8", b"#EXTM3U\nfile:///etc/passwd")}, {}, "file"),
        ({"other": ("x.wav", b"RIFF")}, {}, "file"),
        ({"file": ("x.wav", b"RIFF")}, {"model": "whisper-1"}, "model"),
        ({"file": ("x.wav", b"RIFF")}, {"gamma": "nan"}, "gamma"),
        ({"file": ("x.wav", b"RIFF")}, {"gamma": "x"}, "gamma"),
        ({"file": ("x.wav", b"RIFF")}, {"response_format": "pdf"}, "response_format"),
        ({"file": ("x.wav", b"RIFF")}, {"delay": "long"}, "delay"),
        ({"file": ("x.wav", b"RIFF")}, {"stream": "perhaps"}, "stream"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_upload_is_named(running, files, data, param):
    answer = httpx.post(f"http://{running.host}/v1/audio/transcriptions", files=files or None, data=data, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"].startswith(f"{param}: ")


def test_bodies_that_are_no_forms_are_refused(running, pcm):
    url = f"http://{running.host}/v1/audio/transcriptions"
    answer = httpx.post(url, content=b"garbage", headers={"content-type": "multipart/form-data; boundary=x"}, timeout=60)
    assert answer.status_code == 400
    cut = file_of(pcm)[:40000]
    answer = httpx.post(url, files={"file": ("x.wav", cut)}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_file")
    answer = httpx.post(url, files={"file": ("x.wav", cut)}, data={"stream": "true"}, timeout=60)  # the error is an event
    assert json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"] == "bad_file"
    part = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    body = part % (b"file", b'; filename="x.wav"', file_of(pcm)) + part % (b"language", b"", b"+2AA-") + b"--x--\r\n"
    answer = httpx.post(url, content=body, headers={"content-type": "multipart/form-data; boundary=x; charset=utf-7"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "language")
    assert httpx.get(url).status_code == 405


def test_too_large_a_recording_is_refused(speech):
    with serving(speech, max_upload=100_000) as running:
        answer = httpx.post(f"http://{running.host}/v1/audio/transcriptions", files={"file": ("x.wav", bytes(300_000))}, timeout=60)
        assert answer.status_code == 413
        assert not running.server.seats


def test_too_slow_an_upload_is_refused(speech):
    with serving(speech, upload_s=0.3) as running, socket.create_connection(("127.0.0.1", running.port), timeout=60) as raw:
        head = "POST /v1/audio/transcriptions HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 9999\r\n"
        raw.sendall(f"{head}Host: {running.host}\r\n\r\n--x\r\n".encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 408")
        assert not running.server.seats


def test_a_disconnect_before_the_answer_stops_the_work(running, pcm):
    async def leave():
        async with httpx.AsyncClient(timeout=60) as client:
            long = file_of(np.tile(pcm, 30))
            task = asyncio.create_task(client.post(f"http://{running.host}/v1/audio/transcriptions", files={"file": ("x.wav", long)}))
            while not len(running.server.hub):
                await asyncio.sleep(0.01)
            task.cancel()

    asyncio.run(leave())
    wait_for(lambda: not running.server.seats and not len(running.server.hub))


def test_a_disconnect_while_streaming_stops_the_work(hearing, held, pcm):
    with serving(hearing, voice="off") as running, held(running):  # nothing is written, so nothing is sent
        data = {"file": ("x.wav", file_of(pcm))}
        with httpx.stream(
            "POST", f"http://{running.host}/v1/audio/transcriptions", files=data, data={"stream": "true"}, timeout=60
        ) as answer:
            assert answer.status_code == 200
            assert len(running.server.seats) == 1
        wait_for(lambda: not running.server.seats and not len(running.server.hub), 10)


# Home Assistant's.


async def until(client, kind):
    """The text chunks before an event, and the event."""
    chunks = []
    while (event := await asyncio.wait_for(client.read_event(), 60)) is not None:
        if TranscriptChunk.is_type(event.type):
            chunks.append(TranscriptChunk.from_event(event).text)
        if kind.is_type(event.type):
            return chunks, kind.from_event(event)
    raise AssertionError("the connection was closed")


def test_wyomings_client_transcribes_twice_on_one_connection(running, alone, default, pcm):
    async def talk():
        async with AsyncTcpClient("127.0.0.1", running.wyoming_port) as client:
            await client.write_event(Describe().event())
            _, info = await until(client, Info)
            assert [(program.models[0].name, program.supports_transcript_streaming) for program in info.asr] == [(MODEL, True)]
            await client.write_event(Ping(text="here").event())
            assert (await until(client, Pong))[1].text == "here"
            for part in (pcm, pcm[: pcm.size // 2]):
                await client.write_event(Transcribe(language="en").event())
                await client.write_event(AudioStart(rate=16000, width=2, channels=1).event())
                for first in range(0, part.size, 1024):
                    audio = part[first : first + 1024].tobytes()
                    await client.write_event(AudioChunk(rate=16000, width=2, channels=1, audio=audio).event())
                await client.write_event(AudioStop().event())
                chunks, transcript = await until(client, Transcript)
                assert transcript.text == "".join(chunks) == alone(part, default).strip()

    asyncio.run(talk())
    wait_for(lambda: not running.server.seats and not len(running.server.hub))


@pytest.mark.parametrize(
    ("event", "code", "goes_on"),
    [
        (AudioStart(rate=16000, width=4, channels=1).event(), "bad_field", True),
        (AudioStart(rate=16000, width=2, channels=2).event(), "bad_field", True),
        (AudioStart(rate=1, width=2, channels=1).event(), "bad_field", True),
        (AudioChunk(rate=16000, width=2, channels=1, audio=b"odd").event(), "bad_samples", True),
        (AudioStop().event(), "out_of_order", True),
        (Event("transcribe", {"gamma": -1}), "bad_field", True),
        (b"not json\n", "bad_json", False),
        (rb'{"type": "ping", "data": {"text": "\ud800"}}' + b"\n", "bad_json", False),
        (b'{"type": "ping", "data": {"text": "\xed\xa0\x80"}}\n', "bad_json", False),
        (b'{"type": 7}\n', "bad_field", False),
        (b'{"type": "audio-chunk", "payload_length": 99999999}\n', "bad_field", False),
        (b'{"type": "audio-chunk", "data_length": 2}\n[]', "bad_json", False),
        (b"x" * 200_000, "bad_line", False),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wyoming_errors_are_events(running, event, code, goes_on):
    async def talk():
        async with AsyncTcpClient("127.0.0.1", running.wyoming_port) as client:
            if isinstance(event, bytes):
                client._writer.write(event)
            else:
                await client.write_event(event)
            assert (await until(client, Error))[1].code == code
            if goes_on:
                await client.write_event(Describe().event())
                await until(client, Info)

    asyncio.run(talk())
    wait_for(lambda: not running.server.seats and not len(running.server.hub))


def test_wyoming_closes_at_shutdown_after_the_transcript(hearing):
    async def talk(running):
        async with AsyncTcpClient("127.0.0.1", running.wyoming_port) as client:
            audio = bytes(128_000)
            await client.write_event(AudioStart(rate=16000, width=2, channels=1).event())
            await client.write_event(AudioChunk(rate=16000, width=2, channels=1, audio=audio).event())
            wait_for(lambda: len(running.server.hub))
            running.call(running.listener.begin_drain, 0.0)
            await until(client, Transcript)  # the client need not close
            while await asyncio.wait_for(client.read_event(), 10) is not None:
                pass

    with serving(hearing, voice="off", wyoming_port=0) as running:
        asyncio.run(talk(running))
        wait_for(lambda: not running.server.seats, 10)


# SimulEval's.


def segment(samples, *, finished, **changes):
    return {
        "index": 0, "content": samples.tolist(), "finished": finished, "is_empty": False, "data_type": "speech", "tgt_lang": None,
        "config": {}, "sample_rate": 16000, **changes,
    }  # fmt: skip


def test_simulevals_remote_messages(running, speech, default, floats):
    from zendaya.evaluation.simuleval import WordWriter

    writer = WordWriter(speech.encoder, speech.model, default, engine=engine_for(speech.model))
    with httpx.Client(base_url=f"http://{running.host}", timeout=60) as client:
        for _ in range(2):
            assert client.post("/reset").status_code == 200
            writer.start()
            for first in range(0, floats.size, 8000):
                part, finished = floats[first : first + 8000], first + 8000 >= floats.size
                assert client.put("/input", content=json.dumps(segment(part, finished=finished))).status_code == 200
                expected = " ".join(filter(None, [writer.read(part), writer.finish() if finished else ""]))
                answer = client.get("/output").json()
                assert (answer["content"] or "", answer["finished"], answer["is_empty"]) == (
                    expected,
                    finished,
                    not expected and not finished,
                )
                assert answer["data_type"] == (None if answer["is_empty"] else "text")
        wait_for(lambda: not running.server.seats)
        assert client.get("/output").json()["is_empty"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("x", "segment"),
        (r'{"data_type": "speech", "sample_rate": "\ud800"}', "segment"),
        ('{"data_type": "text"}', "data_type"),
        ('{"data_type": "speech", "sample_rate": 8000}', "sample_rate"),
        ('{"data_type": "speech", "sample_rate": 16000, "content": "no"}', "content"),
        ('{"data_type": "speech", "sample_rate": 16000, "content": [NaN]}', "segment"),
        ('{"data_type": "speech", "sample_rate": 16000, "content": [1e30]}', "content"),
        ('{"data_type": "speech", "sample_rate": 16000, "content": [], "finished": 1}', "finished"),
    ],
)
def test_a_bad_segment_is_named(running, body, param):
    answer = httpx.put(f"http://{running.host}/input", content=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    httpx.post(f"http://{running.host}/reset", timeout=60)
    wait_for(lambda: not running.server.seats)


def test_an_evaluation_expires_without_requests(hearing, held, floats):
    with serving(hearing, voice="off", orphan_s=0.3) as running, httpx.Client(base_url=f"http://{running.host}", timeout=60) as client:
        with concurrent.futures.ThreadPoolExecutor() as threads, held(running):
            client.put("/input", content=json.dumps(segment(floats[:64000], finished=False)))
            asked = threads.submit(client.get, "/output")
            time.sleep(0.6)
        assert (asked.result(20).status_code, asked.result().json()["finished"]) == (200, False)
        wait_for(lambda: not running.server.seats)  # no request came
        assert client.post("/reset").status_code == 200


@pytest.mark.parametrize(("asked", "status"), [("/output", 503), ("/input", 400)])
def test_a_dropped_evaluation_answers_pending_requests(hearing, held, floats, monkeypatch, asked, status):
    with serving(hearing, voice="off", max_unread=1000) as running, httpx.Client(base_url=f"http://{running.host}", timeout=60) as client:
        with concurrent.futures.ThreadPoolExecutor() as threads, held(running):
            body = json.dumps(segment(floats[:64000], finished=False))
            client.put("/input", content=body)
            wait_for(lambda: not running.server.hub._to_encode)
            running.server.draining = True
            answer = threads.submit(client.get, "/output") if asked == "/output" else threads.submit(client.put, "/input", content=body)
            time.sleep(0.3)
            assert not answer.done()
            running.call(running.transports["simuleval"].end)
            assert answer.result(20).status_code == status
        wait_for(lambda: not running.server.seats and not len(running.server.hub))


def test_a_segment_is_parsed_outside_the_event_loop(running, floats, monkeypatch):
    read, threads = remote._samples, []
    monkeypatch.setattr(remote, "_samples", lambda segment: threads.append(threading.current_thread().name) or read(segment))
    for path in ("/reset", "/input", "/reset"):
        body = json.dumps(segment(floats[:1600], finished=False)) if path == "/input" else ""
        httpx.request("PUT" if path == "/input" else "POST", f"http://{running.host}{path}", content=body, timeout=60)
    assert len(threads) == 1
    assert "server" not in threads


def test_simuleval_itself_scores_the_server(running, simuleval, tmp_path, speech, floats):
    (tmp_path / "source.txt").write_text(f"{RECORDING}\n")
    (tmp_path / "target.txt").write_text(" ".join(SAID) + "\n")
    options = {
        "remote-address": "127.0.0.1", "remote-port": str(running.port), "source-segment-size": "500", "source": "source.txt",
        "target": "target.txt", "source-type": "speech", "target-type": "text", "output": "out",
    }  # fmt: skip
    # SimulEval's remote evaluator needs a name that its evaluator has lost; all else is unchanged.
    code = (
        "from simuleval.evaluator import SentenceLevelEvaluator as one; one.instance_iterator = property(lambda self: self.iterator); "
        "from simuleval.cli import main; main()"
    )
    arguments = (word for name in options for word in (f"--{name}", options[name]))
    done = simuleval("-c", code, "--remote-eval", *arguments, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (tmp_path / "out" / "instances.log").read_text().splitlines()
    assert words(json.loads(line)["prediction"])[0] == SAID[0]


# Load and nonsense, in small.


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parents[2] / "benchmarks" / "serve.py"
    specification = importlib.util.spec_from_file_location("benchmark_serve_speech", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["benchmark_serve_speech"] = module
    specification.loader.exec_module(module)
    return module


def test_32_live_streams_lose_nothing_and_one_more_is_refused(bench, pcm, capsys):
    """A minute of speech in real time, on a server of its own; lags depend on the machine and are only printed."""
    heard, gammas = [np.resize(np.roll(pcm, -n * 7919), 60 * 16_000) for n in range(8)], [0.1, 0.3, 0.5, 1.0]
    expected = functools.cache(bench.alone(heard, gammas))
    with bench.child("--max-sessions", "32") as port:
        found = bench.load(port, heard * 4, gammas, lambda n: expected(n % 8))
    assert (found["failed"], found["lost"], found["doubled"], found["different"]) == ([], 0, 0, 0)
    assert (found["streams"], found["seconds"], found["answered_otherwise"]) == (32, 60.0, 0)
    assert found["refused"] > 20
    assert found["tokens"] > 2000
    with capsys.disabled():
        print(f"\n32 streams of 60 s: {found['tokens']} tokens, 0 lost, 0 doubled, p95 compute lag {found['compute_lag_s_50_95_99'][1]} s")


def test_idle_clients_are_disconnected(speech):
    with serving(speech, idle_s=0.3, wyoming_port=0) as running:
        with connect(f"ws://{running.host}/v1/realtime?intent=transcription") as line:
            assert json.loads(line.recv(timeout=60))["type"] == "session.created"
            assert json.loads(line.recv(timeout=60))["error"]["code"] == "idle"
            with pytest.raises(ConnectionClosed) as closed:
                line.recv(timeout=60)
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4408, "idle")
        with socket.create_connection(("127.0.0.1", running.wyoming_port), timeout=60) as raw:
            raw.sendall(b'{"type": "audio-start", "data": {"rate": 16000, "width": 2, "channels": 1}}\n')
            said = b""
            while piece := raw.recv(4096):
                said += piece
            assert b'"idle"' in said
        with socket.create_connection(("127.0.0.1", running.wyoming_port), timeout=10) as raw:
            raw.sendall(b'{"type": "audio-chunk", "payload_length": 100}\nhalf of it')
            assert b'"idle"' in raw.recv(4096)
        wait_for(lambda: not running.server.seats)


def test_a_faulty_link_changes_no_transcript(bench, running, alone, pcm):
    faults = bench.Faults(seed=4, cuts=4, bytes=(20_000, 120_000))
    messages = [pcm[first : first + 1600] for first in range(0, pcm.size, 1600)]
    found = bench.cuts(running.port, [messages], faults, gamma=0.7)
    assert (found["different"], found["cuts"] >= 4) == (0, True)


def test_malformed_realtime_events_are_answered(bench, running, caplog):
    found = bench.fuzz(running.port, 300, route="realtime", seed=5)
    assert found.wrong == []
    assert found.errors > 100
    assert not any(bench.left(running.listener, 60.0).values())
    assert "a bug" not in caplog.text
