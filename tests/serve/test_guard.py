"""The guard on every route and socket: only with the key, and only from allowed pages."""

import concurrent.futures
import importlib.resources
import socket
import time

import httpx
import pytest
from servers import Wire, serving
from starlette.routing import Route, WebSocketRoute
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from zendaya.cli import main
from zendaya.errors import ConfigError
from zendaya.serve.auth import Guard
from zendaya.serve.config import ServeConfig, read_key

KEY = "a-key-of-32-letters_0123456789ab"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def running(tiny):
    with serving(tiny, key=KEY, origins=("https://captions.example.org",), wrong_key_s=0.0) as one:
        yield one


@pytest.fixture(scope="module")
def open_one(tiny):
    with serving(tiny) as one:
        yield one


def places(running):
    """Every route with every method, and every WebSocket."""
    found = []
    for route in running.app.routes:
        assert isinstance(route, Route | WebSocketRoute), f"{route}: unknown kind of route"
        path = route.path.replace("{name}", "index.html")
        if isinstance(route, WebSocketRoute):
            found.append(("WEBSOCKET", path))
        else:
            found += [(method, path) for method in sorted(route.methods)]
    return [*found, ("GET", "/no/such/path"), ("WEBSOCKET", "/no/such/socket")]


def ask(running, method, path, headers, client=httpx):
    """Status and headers of the answer."""
    if method != "WEBSOCKET":
        answer = client.request(method, f"http://{running.host}{path}", headers=headers, timeout=60)
        return answer.status_code, answer.headers
    try:
        with connect(f"ws://{running.host}{path}", additional_headers=headers, compression=None):
            return 101, {}
    except InvalidStatus as refused:
        return refused.response.status_code, refused.response.headers


@pytest.fixture(scope="module")
def http():
    with httpx.Client() as client:  # one for all: a new one reads certificates
        yield client


def test_every_route_checks_key_and_origin(running, http):
    walked = places(running)
    assert {"/v1/stream", "/v1/realtime", "/v1/audio/transcriptions", "/metrics", "/livez", "/", "/input"} < {path for _, path in walked}
    for method, path in walked:
        where = f"{method} {path}"
        for headers in (
            {}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY},
            {"Authorization": "Basic ???"}, {"Cookie": f"zendaya-{running.port}={KEY}"},
            {"Sec-WebSocket-Protocol": "openai-insecure-api-key.wrong"},
        ):  # fmt: skip
            status, answered = ask(running, method, path, headers, http)
            assert status == 401, (where, headers)
            assert answered["WWW-Authenticate"].startswith("Basic")
            assert "default-src 'none'" in answered["Content-Security-Policy"]
        for origin in (
            "https://evil.example",
            "null",
            f"http://localhost:{running.port + 1}",
            f"https://127.0.0.1.evil:{running.port}",
            "http://[",
        ):
            assert ask(running, method, path, {**BEARER, "Origin": origin}, http)[0] == 403, (where, origin)
        for origin in (f"http://127.0.0.1:{running.port}", f"http://localhost:{running.port}", "https://captions.example.org"):
            status, answered = ask(running, method, path, {**BEARER, "Origin": origin}, http)
            refused = (401, 500) if "no/such" in path else (401, 403, 500)
            assert status not in refused, (where, origin, status)
        assert ask(running, method, path, BEARER, http)[0] not in (401, 500)
    assert running.server.gauges.rejections.labels("unauthorized")._value.get() > 0


def test_wrong_keys_wait_in_line_and_right_ones_do_not(tiny, caplog):
    with serving(tiny, key=KEY, wrong_key_s=0.05) as slow, concurrent.futures.ThreadPoolExecutor(48) as threads:

        def guess(n):
            headers = {"Authorization": f"Bearer wrong-{n}"}
            status, _ = ask(slow, "WEBSOCKET" if n % 2 else "GET", "/v1/stream" if n % 2 else "/livez", headers)
            return status, time.monotonic()

        begun = time.monotonic()
        guesses = [threads.submit(guess, n) for n in range(48)]
        assert ask(slow, "GET", "/livez", BEARER)[0] == 200
        assert ask(slow, "GET", "/livez", {})[0] == 401
        answers = [guess.result() for guess in guesses]
        assert {status for status, _ in answers} <= {401, 429}
        assert max(at for status, at in answers if status == 401) - begun >= 0.05 * 5
        for path in ("/v1/stream", "/livez"):  # a client that does not wait for the answer
            with socket.create_connection(("127.0.0.1", slow.port)) as raw:
                upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
                raw.sendall(
                    f"GET {path} HTTP/1.1\r\nHost: {slow.host}\r\n{upgrade if path != '/livez' else ''}Sec-WebSocket-Version: 13\r\n"
                    "Authorization: Bearer no\r\n\r\n".encode()
                )
        time.sleep(0.3)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        assert ask(slow, "GET", "/livez", BEARER)[0] == 200


def test_too_many_wrong_keys_at_once_get_429(tiny, monkeypatch):
    monkeypatch.setattr("zendaya.serve.auth.MOST_WRONG", 0)
    with serving(tiny, key=KEY) as running:
        for method, path in (("GET", "/livez"), ("WEBSOCKET", "/v1/stream")):
            status, headers = ask(running, method, path, {"Authorization": "Bearer wrong"})
            assert (status, headers["Retry-After"]) == (429, "5")
            assert ask(running, method, path, BEARER)[0] in (101, 200)


def test_a_browser_sends_the_key_once_and_then_a_cookie(running):
    with httpx.Client(base_url=f"http://{running.host}", timeout=60) as browser:
        assert browser.get("/").status_code == 401
        answer = browser.get("/", auth=("anybody", KEY))
        assert answer.status_code == 200
        cookie = answer.headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} < set(cookie.split("; "))
        assert KEY not in cookie
        assert browser.get("/livez").text == "ok"
        value = cookie.split(";")[0]
        assert value.startswith(f"zendaya-{running.port}=")  # browsers share cookies between ports
        for cookies in (value, f'a={{"b":1}}; {value}; c', f"zendaya=x; zendaya-1=y;{value}"):
            assert ask(running, "WEBSOCKET", "/v1/stream", {"Cookie": cookies})[0] == 101, cookies
        assert ask(running, "WEBSOCKET", "/v1/stream", {"Cookie": value, "Origin": "https://evil.example"})[0] == 403
        assert "Set-Cookie" not in browser.get("/livez", headers=BEARER).headers


def test_with_a_key_any_name_of_this_machine_is_an_origin(running, open_one):
    def status(one, host, origin, **headers):
        with socket.create_connection(("127.0.0.1", one.port), timeout=60) as raw:
            given = {
                "Host": host, "Origin": origin, "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", **headers,
            }  # fmt: skip
            raw.sendall("\r\n".join(["GET /v1/stream HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]).encode())
            return int(raw.recv(4096).split()[1])

    assert status(running, "192.168.1.7:8765", "http://192.168.1.7:8765", **BEARER) == 101
    assert status(running, "192.168.1.7:8765", "http://192.168.1.7:8765") == 401
    for origin in ("http://192.168.1.7", "https://192.168.1.7:8765", "http://192.168.1.8:8765", "null"):
        assert status(running, "192.168.1.7:8765", origin, **BEARER) == 403, origin
    forwarded = {"X-Forwarded-Proto": "https", **BEARER}  # anybody can send this header
    assert status(running, "192.168.1.7:8765", "https://192.168.1.7:8765", **forwarded) == 403
    assert status(open_one, "evil.example:8765", "http://evil.example:8765") == 403  # DNS rebinding


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [("cross-site", "no-cors", 403), ("cross-site", "navigate", 200), ("same-origin", "no-cors", 200), ("none", "navigate", 200)],
)
def test_a_cross_site_request_without_origin_is_refused(open_one, site, mode, status):
    assert ask(open_one, "GET", "/output", {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode})[0] == status


def test_an_allowed_origin_may_be_another_site(running):
    headers = {**BEARER, "Origin": "https://captions.example.org", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    assert ask(running, "GET", "/livez", headers)[0] == 200


def test_wrong_keys_are_counted_per_peer_address(running, monkeypatch):
    addresses, slow_down = [], Guard._slow_down

    async def counted(self, scope):
        addresses.append(scope["client"][0])
        return await slow_down(self, scope)

    monkeypatch.setattr(Guard, "_slow_down", counted)
    for n in range(3):
        assert ask(running, "GET", "/livez", {"Authorization": "Bearer wrong", "X-Forwarded-For": f"10.0.0.{n}"})[0] == 401
    assert addresses == ["127.0.0.1"] * 3


def test_a_browser_may_send_the_key_as_a_subprotocol(running):
    wire = Wire(running, {"type": "open"}, subprotocols=["zendaya", f"openai-insecure-api-key.{KEY}"])
    assert wire.opened["type"] == "opened"
    assert wire.socket.subprotocol == "zendaya"
    wire.end()
    with connect(f"ws://{running.host}/v1/stream", subprotocols=["other", f"openai-insecure-api-key.{KEY}"], compression=None) as one:
        assert one.subprotocol is None


def test_without_a_key_only_local_host_names_are_answered(open_one):
    def status(host):
        return httpx.get(f"http://{open_one.host}/livez", headers={"Host": host}, timeout=60).status_code

    assert [status(f"{name}:{open_one.port}") for name in ("127.0.0.1", "localhost", "[::1]")] == [200, 200, 200]
    assert [status(name) for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[")] == [403] * 5
    assert ask(open_one, "WEBSOCKET", "/v1/stream", {"Origin": "https://evil.example"})[0] == 403


@pytest.mark.parametrize(
    "path", ["/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/page//etc/passwd", "/page/%00", "/page/"]
)
def test_a_page_path_never_reaches_the_disk(open_one, path):
    request = httpx.Request("GET", f"http://{open_one.host}/")
    request.url = request.url.copy_with(raw_path=path.encode())
    with httpx.Client(timeout=60) as client:
        assert client.send(request).status_code == 404


def test_no_compression_and_no_server_header(open_one):
    with connect(f"ws://{open_one.host}/v1/stream") as socket:  # the client offers compression
        assert "Sec-WebSocket-Extensions" not in socket.response.headers
        assert "Server" not in socket.response.headers


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--host", "0.0.0.0"], "give --api-key-file"),
        (["--host", "example.org"], "give --api-key-file"),
        (["--host", "::"], "give --api-key-file"),
        (["--api-key-file", "missing"], "cannot be read"),
        (["--api-key-file", "short"], "at least 16 letters"),
        (["--api-key-file", "empty"], "one line"),
        (["--api-key-file", "two"], "one line"),
        (["--port", "70000"], "0 … 65535"),
        (["--port", "1", "--host", "127.0.0.99", "--origin", "nonsense"], "--origin: expected"),
        (["--max-sessions", "0"], "at least 1"),
        (["--gamma", "-1"], "0 … 10"),
        (["--drain", "-1"], "0 … 3600"),
        (["--api-key-file", "good", "--wyoming-port", "0"], "Wyoming has no keys"),
        (["--port", "0", "--model", "nobody"], "no adapter of that name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line(options, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in (("short", "abc\n"), ("empty", "\n"), ("two", f"{KEY}\n{KEY}\n"), ("good", KEY)):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("sys.argv", ["zendaya", "serve", *options])
    with pytest.raises(SystemExit) as stopped:
        main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert reason in error
    assert error.count("\n") == 1
    assert KEY not in error


def test_a_taken_port_is_one_line(open_one, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["zendaya", "serve", "--port", str(open_one.port)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "cannot listen on" in capsys.readouterr().err


def test_a_key_is_read_from_its_file(tmp_path):
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert read_key(tmp_path / "key") == KEY
    assert ServeConfig(host="0.0.0.0", key=KEY).key == KEY
    with pytest.raises(ConfigError, match="letters, digits"):
        ServeConfig(key="with a space in the middle")


def test_the_page_is_served_from_the_package(open_one, http):
    page = importlib.resources.files("zendaya.serve.page")
    assert http.get(f"http://{open_one.host}/").text == (page / "index.html").read_text(encoding="utf-8")
    answer = http.get(f"http://{open_one.host}/page/dial.js")
    assert answer.text == (page / "dial.js").read_text(encoding="utf-8")
    assert answer.headers["content-type"].split(";")[0] == "text/javascript"
    assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
    for name in ("other.js", "__init__.py", "..%2f..%2fapp.py"):
        assert http.get(f"http://{open_one.host}/page/{name}").json()["error"]["code"] == "http_404"


def test_only_navigation_gets_a_basic_auth_challenge(running, http):
    for mode, scheme in ((None, "Basic"), ("navigate", "Basic"), ("cors", "Bearer"), ("websocket", "Bearer")):
        answer = http.get(f"http://{running.host}/readyz", headers={} if mode is None else {"Sec-Fetch-Mode": mode})
        assert (answer.status_code, answer.headers["WWW-Authenticate"].split()[0]) == (401, scheme)
