"""Commands that serve pages or scores: their socket, and which requests come from the pages of other sites."""

import ipaddress
import os
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from gerl.errors import ConfigError


def listen(host: str, port: int, remedy: str = "use another port, or stop the program that uses it") -> socket.socket:
    """A socket at `host:port`; raises `ConfigError`, with the `remedy`, if there cannot be one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror  # those of name resolution are negative
        raise ConfigError(f"cannot listen on host={host} port={port} ({why}): {remedy}") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine itself can be reached under `host`, a name or an IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def host_name(host: str) -> str:
    """The name or address in a `Host` header, without the port; empty if it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_foreign(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a page of another site sends this request, and it does more than read.

    headers: by lower-case name. Browsers say where a page is from in `Origin` and `Sec-Fetch-Site`.
    """
    if method in ("GET", "HEAD"):
        return False
    origin = headers.get("origin")
    elsewhere = origin is not None and urlsplit(origin).netloc != headers.get("host")
    return elsewhere or headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
