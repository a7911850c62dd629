"""A server mounts every transport there is, an outside one among them."""

import httpx
import pytest
from servers import alone, rows, serving
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from zendaya.plugins import available
from zendaya.serve.transports.base import Transport, open_transports


class PostTransport(Transport):
    """Feature rows in, text out: a transport as another package would add it."""

    def routes(self, server):
        async def captions(request):
            async with server.stream("features", gamma=0.5) as feed:
                await feed.send(await request.body())
                feed.stream.end()
                text = "".join([event.text async for event in feed.events()])
            return PlainTextResponse(text)

        return [Route("/captions", captions, methods=["POST"])]


@pytest.fixture
def running(tiny, monkeypatch):
    monkeypatch.setattr("zendaya.serve.app.open_transports", lambda config: {**open_transports(config), "post": PostTransport(config)})
    with serving(tiny, max_sessions=1) as one:
        yield one


def test_built_in_transports_are_found_by_file_name():
    assert available("transports")[:5] == ("openai-files", "openai-realtime", "simuleval", "websocket", "wyoming")


def test_an_outside_transport_streams(running, tiny):
    answer = httpx.post(f"http://{running.host}/captions", content=rows(1).tobytes(), timeout=60)
    assert answer.text == "".join(text for text, *_ in alone(tiny, 0.5, rows(1)))
    assert not running.server.seats
    assert not len(running.server.hub)


def test_an_outside_transport_refuses_like_the_others(running):
    def post(payload):
        return httpx.post(f"http://{running.host}/captions", content=payload, timeout=60)

    answer = post(b"odd")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "features")
    seat = running.server.take_seat()
    answer = post(rows(1).tobytes())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "full")
    assert answer.headers["retry-after"] == "5"
    seat.free()
