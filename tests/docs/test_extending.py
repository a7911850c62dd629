"""The file of each page of docs/extending/, installed by its entry-point lines, works as a user would use it."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from zendaya import Model, PowerLaw, plugins
from zendaya.audit.raw import audit_encoder, audit_to_text
from zendaya.data.corpora import registry
from zendaya.encoders.base import encode
from zendaya.encoders.features import Precomputed
from zendaya.encoders.registry import EncoderSpec
from zendaya.errors import ConfigError, SourceError
from zendaya.runtime.policies import parse_policy

PAGES = sorted((Path(__file__).parents[2] / "docs" / "extending").glob("*.md"))
MAX_LINES = 90
"""About a printed page."""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write the file of a page and register its entry point, as pip does from its pyproject.toml."""

    def installed(page):
        (text,) = [path.read_text(encoding="utf-8") for path in PAGES if path.stem == page]
        ((group, name, module, attribute),) = re.findall(r'\n\[project\.entry-points\."(.+?)"\]\n(\S+) = "(\w+):(\w+)"\n```', text)
        (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        point = EntryPoint(name, f"{module}:{attribute}", group)
        monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if point.group == group else [])
        plugins._found.cache_clear()

    yield installed
    plugins._found.cache_clear()


def test_each_page_is_short_and_tested():
    assert [path.stem for path in PAGES] == ["add-a-corpus", "add-a-policy", "add-a-transport", "add-an-encoder"]
    for path in PAGES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, path.name


def test_the_encoder_streams_and_leaks_nothing(install):
    install("add-an-encoder")
    encoder = EncoderSpec.parse("loudness,rate=20").open()
    sound = np.random.default_rng(0).standard_normal(16_000 * 3).astype(np.float32)
    whole, chunks = encode(encoder, [sound]), encode(encoder, np.array_split(sound, 17))
    assert len(whole) == 60
    assert np.array_equal(whole.values_TE, chunks.values_TE)
    assert np.array_equal(whole.arrival_s, (np.arange(60) + 1) / 20)
    assert audit_encoder(encoder, sound).clean
    with pytest.raises(SourceError, match="after 0 s"):
        encode(encoder, [np.full(1600, np.nan, np.float32)])


def test_the_policy_writes_and_leaks_nothing(install):
    install("add-a-policy")
    policy = parse_policy("hold-n=2,chunk=4")
    assert str(policy) == "hold-n=2,chunk=4"
    model = Model.from_preset("tiny", seed=0)
    rows = np.random.default_rng(0).standard_normal((48, 16)).astype(np.float32)
    session = model.open(policy, window_tokens=24)
    events = [*session.push(rows), *session.finish()]
    assert {event.window_index for event in events} == {0, 1}
    assert audit_to_text(Precomputed(16, 3.0), rows, lambda: model.open(policy, window_tokens=24)).clean
    with pytest.raises(ConfigError, match="at least 1"):
        parse_policy("hold-n=0")


def test_the_corpus_reports_a_bad_line(install, tmp_path):
    install("add-a-corpus")
    (tmp_path / "talks.tsv").write_text("train\ta.wav\t2.5\thello there\ntrain\tb.wav\ttwo\tno\n", encoding="utf-8")
    reading = registry.read("talks", tmp_path)
    assert [(clip.id, clip.duration_s, clip.references) for clip in reading.usable] == [("a.wav", 2.5, ("hello there",))]
    assert [(problem.kind, problem.where) for problem in reading.problems] == [("malformed", "talks.tsv:2")]


def test_the_transport_answers_and_refuses(install):
    httpx, servers = pytest.importorskip("httpx"), pytest.importorskip("servers")
    from zendaya.serve.intake import Served

    install("add-a-transport")
    model = Model.from_preset("tiny", seed=0)
    rows = np.random.default_rng(0).standard_normal((48, 16)).astype(np.float32)
    with servers.serving(Served("tiny", model)) as running:
        answer = httpx.post(f"http://{running.host}/v1/captions", content=rows.tobytes(), timeout=60)
        refused = httpx.post(f"http://{running.host}/v1/captions", content=b"odd", timeout=60)
    session = model.open(PowerLaw(0.5))  # the dial of a server that was given none
    assert answer.json()["text"] == "".join(event.text for event in [*session.push(rows), *session.finish()])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "features")
