"""The server under faults and malformed input: small runs of benchmarks/serve.py."""

import importlib.util
import io
import json
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from servers import serving, wait_for


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parents[2] / "benchmarks" / "serve.py"
    specification = importlib.util.spec_from_file_location("benchmark_serve", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["benchmark_serve"] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def running(tiny):
    with serving(tiny, orphan_s=1.0) as one:
        yield one


def test_a_faulty_link_changes_no_text(bench, running):
    faults = bench.Faults(seed=1, cuts=8, bytes=(300, 9000))
    short = [messages[:24] for messages in bench.sources(3, 1)]
    found = bench.cuts(running.port, short, faults, source="features", gamma=0.7)
    assert found["different"] == 0
    assert found["cuts"] >= 8
    assert found["resumes"] > 0 < found["deaf"]


def test_aborted_clients_leave_nothing_behind(bench, running):
    bench.aborts(running.port, 60, seed=2)
    assert not any(bench.left(running.listener, 60.0).values())
    assert running.server.hub.alive


def test_malformed_messages_are_answered(bench, running, caplog):
    found = bench.fuzz(running.port, 600, route="stream", seed=3)
    assert found.wrong == []
    assert found.errors > 200
    assert not any(bench.left(running.listener, 60.0).values())
    assert "a bug" not in caplog.text


def test_the_benchmark_itself(bench, capsys):
    bench.main(["aborts", "--cycles", "10", "--json"])
    assert json.loads(capsys.readouterr().out)["left"]["seats"] == 0


def recording(samples=4000):
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.random.default_rng(1).integers(-9000, 9000, samples, np.int16).tobytes())
    return data.getvalue()


WAVE = recording()
schemathesis.openapi.format(
    "binary", st.one_of(st.just(WAVE), st.integers(0, len(WAVE)).map(lambda at: WAVE[:at]), st.just(recording(0)), st.binary())
)
TEXT = {"type": "string"}


def of(*values):
    """One of these values; schemathesis adds others that break the schema."""
    return {"enum": list(values)}


FORM = {
    "file": {"type": "string", "format": "binary"},
    "model": of("hearing", "hearing.", ""),
    "gamma": {"anyOf": [of("0.5", "0", "nan", "1e400", "-1", "10.5"), TEXT]},
    "response_format": of("json", "text", "srt", "vtt", "verbose_json", "xml"),
    "stream": of("true", "false", "perhaps"),
    "delay": of("low", "xhigh", "none"),
    "timestamp_granularities[]": of("word", "segment", "letter"),
}
SEGMENT = {
    "content": {
        "anyOf": [
            {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "maxItems": 50},
            {"type": "array", "items": {"anyOf": [{"type": "number"}, TEXT]}},
            {"type": "object"},
        ]
    },
    "finished": of(True, False, None, 1),
    "is_empty": of(True, False, None, 1),
    "data_type": of("speech", "text", None),
    "sample_rate": of(16_000, 8000, "x"),
}


def route(method, body=None, parameters=()):
    operation = {"responses": {"default": {"description": "any"}}, "parameters": list(parameters)}
    if body is not None:
        operation["requestBody"] = {"content": body}
    return {method: operation}


NAME = {"name": "name", "in": "path", "required": True, "schema": TEXT}
SCHEMA = {
    "openapi": "3.0.3",
    "info": {"title": "zendaya", "version": "1"},
    "paths": {
        "/livez": route("get"),
        "/readyz": route("get"),
        "/metrics": route("get"),
        "/v1/models": route("get"),
        "/page/{name}": route("get", parameters=[NAME]),
        "/reset": route("post"),
        "/output": route("get"),
        "/input": route("put", {"application/json": {"schema": {"type": "object", "properties": SEGMENT, "required": list(SEGMENT)}}}),
        "/v1/audio/transcriptions": route(
            "post", {"multipart/form-data": {"schema": {"type": "object", "properties": FORM, "required": ["file"]}}}
        ),
    },
}
schema = schemathesis.openapi.from_dict(SCHEMA)


@pytest.fixture(scope="module")
def listening(hearing):
    with serving(hearing, voice="off", orphan_s=1.0) as one:
        yield one


@schema.parametrize()
@settings(max_examples=200, phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None, derandomize=True)
def test_no_request_gets_a_server_error(case, listening):
    answer = case.call(base_url=f"http://{listening.host}")
    case.validate_response(answer, checks=[not_a_server_error])
    assert answer.status_code < 500
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert error["code"]
        if answer.status_code == 400:
            assert error["message"].startswith(f"{error['param']}: ")


def test_after_the_fuzzing_nothing_is_held(listening):
    wait_for(lambda: not listening.server.seats and not len(listening.server.hub))
    assert listening.server.hub.alive
