"""docs/serving.md names every option, and its Python runs as printed; docs/protocol.md has every message, field and code of the wire."""

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from zendaya import Model
from zendaya.cli.serve import serve
from zendaya.runtime.loading import load_live
from zendaya.serve import connection, fields
from zendaya.serve.auth import COOKIE, SUBPROTOCOL_KEY
from zendaya.serve.intake import Served
from zendaya.serve.transports import websocket as native

DOCS = Path(__file__).parents[2] / "docs"
SERVING, PROTOCOL = ((DOCS / name).read_text(encoding="utf-8") for name in ("serving.md", "protocol.md"))


def test_every_option_is_named():
    for name, parameter in inspect.signature(serve).parameters.items():
        named = get_args(parameter.annotation)[1].default
        assert (named if isinstance(named, str) else f"--{name.replace('_', '-')}") in SERVING, name


def test_the_example_runs(capsys):
    from servers import serving

    (code,) = re.findall(r"```python\n(.*?)```", SERVING, re.DOTALL)
    with serving(Served("tiny.en-dial", *load_live("tiny.en-dial"))) as running:
        exec(compile(code.replace("127.0.0.1:8765", running.host), "docs/serving.md", "exec"), {})
    assert "0 resumes" in capsys.readouterr().out


def test_delay_settings_are_documented():
    for word, gamma in fields.DELAYS.items():
        assert f"{word} {gamma:g}" in SERVING


def test_the_protocol_page_has_every_message():
    from servers import Wire, serving

    assert COOKIE == "zendaya"
    assert SUBPROTOCOL_KEY in PROTOCOL
    for name in native.OPEN:
        assert f"`{name}`" in PROTOCOL or f'"{name}"' in PROTOCOL, name
    for name in ("BAD_HELLO", "WRONG_TOKEN", "UNKNOWN", "NO_HELLO", "TAKEN_OVER", "GONE", "OVERRUN"):
        assert str(getattr(connection, name)) in PROTOCOL
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
def test_linked_pages_exist(page):
    for name in re.findall(r"\]\((\w+\.md)", page):
        assert (DOCS / name).is_file()
