"""docs/serving.md names every option, and its Python runs as printed; docs/protocol.md has every message, field and code of the wire."""

import inspect
import re
from pathlib import Path

import pytest

from zendaya import Model
from zendaya.cli.serve import serve
from zendaya.pretrained import load_live
from zendaya.serve import native, realtime
from zendaya.serve.guard import COOKIE, SUBPROTOCOL_KEY
from zendaya.serve.served import Served

DOCS = Path(__file__).parents[2] / "docs"
SERVING, PROTOCOL = ((DOCS / name).read_text(encoding="utf-8") for name in ("serving.md", "protocol.md"))


def test_every_option_is_named():
    for name in inspect.signature(serve).parameters:
        assert f"--{name.replace('_', '-')}" in SERVING, name


def test_the_example_runs(capsys):
    from servers import serving

    (code,) = re.findall(r"```python\n(.*?)```", SERVING, re.DOTALL)
    with serving(Served("tiny.en-dial", *load_live("tiny.en-dial"))) as running:
        exec(compile(code.replace("127.0.0.1:8765", running.host), "docs/serving.md", "exec"), {})
    assert "0 resumes" in capsys.readouterr().out


def test_the_dial_in_words_is_the_one_that_is_used():
    for word, gamma in realtime.DELAYS.items():
        assert f"{word} {gamma:g}" in SERVING


def test_the_page_of_the_protocol_has_all_of_it():
    from servers import Wire, serving

    assert COOKIE == "zendaya"
    assert SUBPROTOCOL_KEY in PROTOCOL
    for name in native.OPEN:
        assert f"`{name}`" in PROTOCOL or f'"{name}"' in PROTOCOL, name
    for name in ("BAD_HELLO", "WRONG_TOKEN", "UNKNOWN", "NO_HELLO", "TAKEN_OVER", "GONE", "OVERRUN"):
        assert str(getattr(native, name)) in PROTOCOL
    with serving(Served("tiny", Model.from_preset("tiny"))) as running:
        wire = Wire(running, {"type": "open"})
        wire.source(bytes(64 * 24))
        wire.source(b"odd")
        wire.say("turn", gamma=1)
        wire.say("flush")
        wire.tell({"type": "ping", "id": "x"})
        wire.tell({"type": "ping", "id": 7})
        events = [wire.opened, *wire.end(), *wire.others]
    kinds = {event["type"] for event in events}
    assert kinds == {"opened", "text", "turned", "flushed", "refused", "finished", "ack", "pong", "error"}
    for event in events:
        for name in (event["type"], *event):
            assert f"`{name}`" in PROTOCOL or f'"{name}"' in PROTOCOL, (event["type"], name)


@pytest.mark.parametrize("page", [SERVING, PROTOCOL], ids=["serving", "protocol"])
def test_the_pages_it_leads_to_are_there(page):
    for name in re.findall(r"\]\((\w+\.md)", page):
        assert (DOCS / name).is_file()
