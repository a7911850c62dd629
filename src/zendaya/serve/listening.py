"""The sockets a server listens on."""

from __future__ import annotations

import socket

from zendaya.errors import ConfigError


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket to listen on; ConfigError if the port cannot be had."""
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
    """A host as URLs have it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
