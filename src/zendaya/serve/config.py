"""What a server allows and how long it waits."""

from __future__ import annotations

import ipaddress
import string
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from zendaya.errors import ConfigError

KEY_CHARACTERS = frozenset(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~")
"""What may stand in a key: the characters of an HTTP token, so that a browser can send it as a subprotocol."""
MIN_KEY = 16


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where a server listens, whom it lets in, and what each may ask of it."""

    host: str = "127.0.0.1"
    port: int = 8765
    """0 takes a free one."""
    wyoming_port: int | None = None
    """None: no Wyoming."""
    key: str | None = None
    origins: tuple[str, ...] = ()
    """Origins of web pages that may connect beside the server's own."""
    max_sessions: int = 32
    gamma: float = 0.5
    """The dial of who does not say."""
    max_message: int = 2**20
    """Bytes of a message."""
    max_unread: int = 4 * 2**20
    """Bytes of source that a session may have waiting: 131 s of sound."""
    max_events: int = 16_384
    """Events that are kept for a client that may come back: a window writes a few dozen."""
    max_source_s: float = 6 * 3600.0
    """Seconds of source of a session; then it is ended, and written out."""
    max_upload: int = 64 * 2**20
    """Bytes of a recording that is sent whole."""
    upload_s: float = 120.0
    """What sending it may take."""
    orphan_s: float = 60.0
    """A session whose client is gone waits so long for it."""
    hello_s: float = 10.0
    """A client says what it wants within this time."""
    idle_s: float = 600.0
    """A client that is there and sends nothing for so long holds its seat no longer: its source ends."""
    slow_s: float = 20.0
    """A client that takes nothing for so long is cut off."""
    ping_s: float = 20.0
    """Between pings, and what an answer may take."""
    wrong_key_s: float = 0.25
    """The answer to a wrong key comes so much later, and those to one address one after the other."""
    drain_s: float = 30.0
    """After SIGTERM streams may go on so long; then their source ends, and all is written out."""

    def __post_init__(self) -> None:
        for name in ("port", "wyoming_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"{name.replace('_', '-')} must lie in 0 … 65535: got {port}")
        if self.max_sessions < 1:
            raise ConfigError(f"max-sessions must be at least 1: got {self.max_sessions}")
        if self.key is None and not is_loopback(self.host):
            raise ConfigError(f"{self.host} can be reached from other machines: give --api-key-file, or stay on 127.0.0.1")
        if self.wyoming_port is not None and (self.key is not None or not is_loopback(self.host)):
            raise ConfigError("Wyoming knows no keys: give --wyoming-port to a server on 127.0.0.1 that has none, and tunnel to it")
        if self.key is not None and (len(self.key) < MIN_KEY or not KEY_CHARACTERS.issuperset(self.key)):
            raise ConfigError(
                f"a key has at least {MIN_KEY} characters, letters, digits and !#$%&'*+-.^_`|~: got one of {len(self.key)}; "
                f"`openssl rand -hex 32` makes one"
            )
        for origin in self.origins:
            parts = urlsplit(origin)
            if parts.scheme not in ("http", "https") or not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}":
                raise ConfigError(f"an origin is a scheme and a host, as https://captions.example.org: got {origin!r}")


def is_loopback(host: str) -> bool:
    """Whether a host can only be reached from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_key(path: Path) -> str:
    """The key that a file holds, on its first and only line."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not plain ASCII'}; expected one key") from None
    if not text or len(text.splitlines()) != 1:
        raise ConfigError(f"{path}: expected one line with the key: got {len(text.splitlines())}")
    return text
