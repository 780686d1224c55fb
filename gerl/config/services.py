"""The key `rollout.service`: another engine that samples the images of a rollout."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from gerl.config.schema import shown
from gerl.errors import ConfigError

Format = Literal["gerl", "openai", "comfyui"]
LoraTransfer = Literal["push", "path"]
KEY = "rollout.service"
ENVIRONMENT = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Service:
    """A service that samples images.

    `lora`: the LoRA is pushed to it, or its path in `folder`, which both can read, is announced. `timeout`: seconds per
    request; `retries`: of a request that failed. `token_env`: environment variable with a bearer token. `workflow`:
    graph of ComfyUI in its API format. `body`: further fields of a request. `announce`: path to which a server of
    `openai` is told a LoRA, if it is not named in each request.
    """

    url: str
    format: Format = "gerl"
    lora: LoraTransfer = "push"
    folder: str | None = None
    timeout: float = 600.0
    retries: int = 3
    token_env: str | None = None
    workflow: str | None = None
    announce: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)


def service_of(values: Mapping[str, Any]) -> Service | None:
    """Parse the value of `rollout.service`; None: the workers sample. Raises `ConfigError` for a wrong entry."""
    if not values:
        return None
    names = [f.name for f in fields(Service)]
    for name in values:
        if name not in names:
            raise ConfigError(f"{KEY}.{name}: there is no such key; there are {', '.join(names)}")
    url = values.get("url")
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{KEY}.url={shown(url)}: expected an address such as http://127.0.0.1:8000")
    if parts.username or parts.password or parts.query:
        raise ConfigError(f"{KEY}.url: leave out what is secret, and name an environment variable in token_env")
    for name, kind in (("format", Format), ("lora", LoraTransfer)):
        if values.get(name, get_args(kind)[0]) not in get_args(kind):
            raise ConfigError(f"{KEY}.{name}={shown(values[name])}: it must be {' or '.join(get_args(kind))}")
    timeout, retries = values.get("timeout", 600.0), values.get("retries", 3)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
        raise ConfigError(f"{KEY}.timeout={shown(timeout)}: it must be a number of seconds above 0")
    if type(retries) is not int or retries < 0:
        raise ConfigError(f"{KEY}.retries={shown(retries)}: it must be at least 0")
    for name in ("token_env", "workflow", "announce", "folder"):
        if (value := values.get(name)) is not None and not (isinstance(value, str) and value.strip()):
            raise ConfigError(f"{KEY}.{name}={shown(value)}: it must be a text")
    if (token := values.get("token_env")) is not None and not ENVIRONMENT.fullmatch(token):
        raise ConfigError(f"{KEY}.token_env={shown(token)}: it must be the name of an environment variable")
    if not isinstance(values.get("body", {}), Mapping):
        raise ConfigError(f"{KEY}.body={shown(values['body'])}: it must be a dictionary")
    service = Service(**values)
    if (service.format == "comfyui") != (service.workflow is not None):
        raise ConfigError(f"{KEY}.workflow: format=comfyui needs the graph as a file, and no other format has one")
    if service.format != "gerl" and service.lora == "push":
        raise ConfigError(f"{KEY}.lora=push: format={service.format} reads the LoRA from a path; use lora=path")
    if (service.lora == "path") != (service.folder is not None):
        raise ConfigError(
            f"{KEY}.folder: lora=path needs a folder for LoRAs that the service reads, such as ComfyUI's models/loras, "
            "and lora=push has none"
        )
    if service.announce is not None and service.format != "openai":
        raise ConfigError(f"{KEY}.announce: it is for format=openai; remove it")
    return service
