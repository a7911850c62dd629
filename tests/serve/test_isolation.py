"""One stream runs out of memory, wherever that happens: it ends alone, with a message, and the others write the same text."""

import pytest
from servers import Wire, alone, rows, serving, texts, wait_for

from zendaya.encoders.features import Precomputed
from zendaya.runtime.engine import engine_for, missing
from zendaya.runtime.session import Session
from zendaya.serve.intake import FeatureIntake

BAD_GAMMA = 9.5
"""The γ of the stream that fails."""
BAD_VALUE = 77.0
"""The first value of its source."""


def fail_in_read(monkeypatch):
    def read(self, state, raw, original=Precomputed.read):
        if len(raw) and raw[0, 0] == BAD_VALUE:
            raise MemoryError
        return original(self, state, raw)

    monkeypatch.setattr(Precomputed, "read", read)


def fail_in_open(monkeypatch):
    def make(self, model, options, *arguments, original=Session.__init__, **more):
        if options.schedule.gamma_or_none == BAD_GAMMA:
            raise MemoryError
        original(self, model, options, *arguments, **more)

    monkeypatch.setattr(Session, "__init__", make)


def fail_in_decode(monkeypatch):
    def failing():
        raise MemoryError
        yield

    def work(self, original=Session.work):
        return failing() if self.schedule.gamma_or_none == BAD_GAMMA else original(self)

    monkeypatch.setattr(Session, "work", work)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("fail_in", [fail_in_read, fail_in_open, fail_in_decode])
def test_out_of_memory_ends_one_stream_alone(tiny, monkeypatch, fail_in, backend):
    if backend == "native" and missing() is not None:
        pytest.skip(missing())
    expected = [alone(tiny, 0.5, rows(n)) for n in range(3)]
    with serving(tiny, engine=engine_for(tiny.model, backend)) as running:
        fail_in(monkeypatch)
        wires = [Wire(running, {"type": "open", "gamma": 0.5}) for _ in range(3)]
        for n, wire in enumerate(wires):
            wire.source(rows(n)[:30].tobytes())
        bad = Wire(running, {"type": "open", "gamma": BAD_GAMMA})
        if fail_in is fail_in_open:
            assert (bad.opened["type"], bad.opened["code"]) == ("error", "internal")
        else:
            bad_rows = rows(9)
            bad_rows[0, 0] = BAD_VALUE
            bad.source(bad_rows.tobytes())
            failed = bad.until("failed")
            assert failed["code"] == "internal"
            assert failed["message"]
            bad.tell({"type": "ack", "received": failed["seq"]})
        for n, wire in enumerate(wires):
            wire.source(rows(n)[30:].tobytes())
        assert [texts(wire.end()) for wire in wires] == expected
        wait_for(lambda: not running.server.seats and not len(running.server.hub))
        assert running.server.hub.alive


def test_out_of_memory_in_the_intake_ends_one_stream(tiny, monkeypatch):
    def check(self, payload, original=FeatureIntake.check):
        if len(payload) == 64:
            raise MemoryError
        return original(self, payload)

    monkeypatch.setattr(FeatureIntake, "check", check)
    with serving(tiny) as running:
        good, bad = (Wire(running, {"type": "open", "gamma": 0.5}) for _ in range(2))
        good.source(rows(1)[:30].tobytes())
        bad.source(rows(2)[:1].tobytes())
        failed = bad.until("failed")
        assert (failed["code"], failed["message"]) == ("internal", "internal server error")
        bad.tell({"type": "ack", "received": failed["seq"]})
        good.source(rows(1)[30:].tobytes())
        assert texts(good.end()) == alone(tiny, 0.5, rows(1))
        wait_for(lambda: not running.server.seats)
