"""Facts of the base model for a model card, as far as they are at hand: its class, its licence, its name."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import yaml
from huggingface_hub import ModelCard, model_info
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import httpx

from gerl.errors import ModelError
from gerl.export.base import Base
from gerl.model.paths import SHIPPED, resolve
from gerl.run.card import redact
from gerl.utils.files import reason

logger = logging.getLogger("gerl")
PATIENCE = 10.0  # seconds for the hub's answer
PATH = re.compile(r"(?<![\w./@~-])(?:~|\.{1,2})?/(?!/)(?:[^\s/'\"\],}]+/)*([^\s/'\"\],}]+)")


@dataclass(frozen=True)
class BaseModel:
    """The base as a card shows it. hub_id: None for a folder. pipeline: its class; licence: as on its card."""

    shown: str
    hub_id: str | None
    pipeline: str | None
    licence: str | None
    licence_fields: dict[str, str]  # for the header of a card
    merged: str | None


def base_model(base: Base) -> BaseModel:
    """Look the base up in its folder, or on the hub; what cannot be found out is None, which the log says."""
    hub_id = base.path if is_hub_id(base.path) else None
    fields = _licence(base.path, hub_id)
    shipped = base.path in SHIPPED
    shown = f"`{base.path}`, which ships with gerl" if shipped else f"`{public(base.path)}`"
    if hub_id is not None:
        shown = f"[{hub_id}](https://huggingface.co/{hub_id})"
    licence = fields.get("license_name") if fields.get("license") == "other" else fields.get("license")
    merged = None if base.merged is None else public(base.merged)
    return BaseModel(shown, hub_id, _pipeline(base.path), licence or fields.get("license"), fields, merged)


def is_hub_id(path: str) -> bool:
    """Whether `model.path` names a model of the hub."""
    try:
        return resolve(path) == path and not Path(path).exists()
    except ModelError:  # a folder that is no longer there
        return False


def public(value: str) -> str:
    """A text without secrets, and with the names of files in place of their paths on this machine."""
    return PATH.sub(r"\1", redact(value))


def _pipeline(path: str) -> str | None:
    try:
        return str(diffusers.DiffusionPipeline.load_config(resolve(path)).get("_class_name"))
    except (ModelError, OSError, ValueError, httpx.TransportError) as error:
        logger.warning("the base model %s is not available: the card says less about it (%s)", path, reason(error))
        return None


def _licence(path: str, hub_id: str | None) -> dict[str, str]:
    """`license`, `license_name` and `license_link` of the card of the base; empty where they are not known."""
    if path in SHIPPED:
        return {"license": "apache-2.0"}  # that of gerl
    data: Any = None
    try:
        if hub_id is not None:
            data = model_info(hub_id, timeout=PATIENCE).card_data
        elif (readme := Path(resolve(path)) / "README.md").is_file():
            data = ModelCard.load(readme, ignore_metadata_errors=True).data
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx.TransportError, ModelError) as error:
        logger.warning("the licence of %s is unknown: its card cannot be read (%s)", path, reason(error))
    except (OSError, ValueError, yaml.YAMLError) as error:
        logger.warning("the licence of %s is unknown: its README.md cannot be read (%s)", path, reason(error))
    found = {} if data is None else data.to_dict()
    names = ("license", "license_name", "license_link")
    return {name: str(found[name]) for name in names if isinstance(found.get(name), str)}
