"""Sockets of commands that serve pages or scores, and requests from other sites."""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from importlib import import_module

from gerl.errors import ConfigError, GerlError


def require(extra: str, *modules: str) -> None:
    """Raise `GerlError` naming the pip extra if a package that a command serves with cannot be imported."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise GerlError(
                f"gerl {extra} needs the package {module}, which cannot be imported ({error}): run pip install "
                f"'gerl[{extra}]'"
            ) from None


def listen(host: str, port: int, remedy: str = "use another port, or stop the program that uses it") -> socket.socket:
    """Open a socket at `host:port`; raises `ConfigError` with the `remedy` if that fails."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror  # those of name resolution are negative
        raise ConfigError(f"cannot listen on host={host} port={port} ({why}): {remedy}") from None


def read_token(name: str) -> str:
    """Return the token in the environment variable `name`. Raises `ConfigError`, without showing it, if it is wrong."""
    token = os.environ.get(name, "").strip()
    if not token:
        raise ConfigError(f"token_env={name}: this environment variable is not set; export it")
    if not re.fullmatch(r"[0-9A-Za-z_.~+/=-]+", token):
        raise ConfigError(f"token_env={name}: use ASCII letters, digits and _ - . ~ in the token")
    return token


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an IP address, is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def host_name(host: str) -> str:
    """Return the name or address in a `Host` header without the port; empty if missing or malformed."""
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d*)?", host, re.ASCII | re.IGNORECASE)
    return (match[1] or match[2]).lower() if match else ""


def is_foreign(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a page of another site sends this request and it is no mere read; `headers`: by lower-case name."""
    if method in ("GET", "HEAD"):
        return False
    origin = headers.get("origin")
    elsewhere = origin is not None and origin.partition("://")[2] != headers.get("host")
    return elsewhere or headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
