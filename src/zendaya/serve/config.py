"""The configuration of a server: addresses, access, limits and timeouts; and the sockets it listens on."""

from __future__ import annotations

import ipaddress
import socket
import string
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from zendaya.errors import ConfigError
from zendaya.records import option
from zendaya.runtime.options import Voice
from zendaya.schedule import MAX_GAMMA

KEY_CHARACTERS = frozenset(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~")
"""Characters of an HTTP token (RFC 9110), so that a browser can send the key as a WebSocket subprotocol."""
MIN_KEY = 16


def read_key(path: str | Path) -> str:
    """The key in a file of one line."""
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not plain ASCII'}; expected one key") from None
    if not text or len(text.splitlines()) != 1:
        raise ConfigError(f"{path}: expected one line with the key: got {len(text.splitlines())}")
    return text


def is_loopback(host: str) -> bool:
    """Whether a host can only be reached from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where a server listens, which clients it accepts, and its limits."""

    host: str = option("127.0.0.1", "Address to listen on; other machines can reach it only with a key.")
    port: int = option(8765, "Port to listen on; 0 takes a free one.")
    wyoming_port: int | None = option(None, "Also speak Wyoming (Home Assistant), on this port.")
    key: str | None = option(None, "File with the key that clients must send.", name="--api-key-file", parse=read_key, metavar="FILE")
    origins: tuple[str, ...] = option(
        (), "Let web pages of this origin connect, as https://a.org; may be repeated.", name="--origin", metavar="ORIGIN"
    )  # fmt: skip
    max_sessions: int = option(32, "Sessions at the same time; further clients are told to retry.")
    lag_s: float | None = option(
        None, "The dial in seconds for clients that choose none; 1.0, or the closest, where the model was measured.", name="--lag"
    )
    gamma: float | None = option(None, "γ instead: 0 … 10; models are trained up to 1.5.")
    voice: Voice = option("auto", "Decode speech alone, found by voice activity (gate; auto for sound), or everything (off).")
    drain_s: float = option(30.0, "Seconds that streams may go on after SIGTERM.", name="--drain")
    max_message: int = 2**20  # bytes per message
    max_unread: int = 4 * 2**20  # bytes of source that may wait per session: 131 s of audio
    max_events: int = 16_384  # events kept per session for a client that may reconnect; a window writes a few dozen
    max_source_s: float = 6 * 3600.0  # seconds of source per session; then the source is ended and its text written
    max_upload: int = 64 * 2**20  # bytes per uploaded recording
    upload_s: float = 120.0  # seconds for an upload
    orphan_s: float = 60.0  # seconds that a session is kept for a client that lost its connection
    hello_s: float = 10.0  # seconds for a client's first message
    idle_s: float = 600.0  # seconds without a message from a connected client, after which its source is ended
    slow_s: float = 20.0  # seconds in which a client must read what is sent to it; then it is disconnected
    ping_s: float = 20.0  # seconds between pings, and for their answers
    wrong_key_s: float = 0.25  # delay of the answer to a wrong key; answers to one address come one after the other

    def __post_init__(self) -> None:
        if self.lag_s is not None and self.gamma is not None:
            raise ConfigError("give --lag or --gamma, not both")
        for name, value, unit, most in (
            ("port", self.port, "a number", 65535), ("wyoming-port", self.wyoming_port, "a number", 65535),
            ("gamma", self.gamma, "a number", MAX_GAMMA), ("drain", self.drain_s, "seconds", 3600),
        ):  # fmt: skip
            if value is not None and not 0 <= value <= most:
                raise ConfigError(f"--{name}: expected {unit} in 0 … {most:g}: got {value}")
        if self.max_sessions < 1:
            raise ConfigError(f"--max-sessions: expected at least 1: got {self.max_sessions}")
        if self.key is None and not is_loopback(self.host):
            raise ConfigError(f"other machines can reach {self.host}: give --api-key-file, or listen on 127.0.0.1")
        if self.key is not None and (len(self.key) < MIN_KEY or not KEY_CHARACTERS.issuperset(self.key)):
            problem = f"the key: expected at least {MIN_KEY} letters, digits and !#$%&'*+-.^_`|~: got {len(self.key)} characters"
            raise ConfigError(f"{problem}; `openssl rand -hex 32` makes one")
        for origin in self.origins:
            parts = urlsplit(origin)
            if parts.scheme not in ("http", "https") or not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}":
                raise ConfigError(f"--origin: expected a scheme and a host, as https://captions.example.org: got {origin!r}")


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket to listen on; ConfigError if the port cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, asyncio sends each message at once; otherwise it would wait for the acknowledgement of the one before.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another {option}") from None
    return listening


def in_url(host: str) -> str:
    """A host in URL form: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
