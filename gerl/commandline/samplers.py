"""The scheduler of `model.path`, read from its files before any library of models is imported."""

import functools
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gerl import objects
from gerl.config import Config, ModelConfig
from gerl.config.bounded_text import MALFORMED, read_json
from gerl.config.roles import role_config
from gerl.config.samplers import AUTO, CHOICES, Scheduler, check_sampler, choose, is_open
from gerl.config.user_files import is_trusted
from gerl.errors import ModelError

INDEX, FILE = "model_index.json", "scheduler_config.json"
ASSETS = Path(__file__).resolve().parents[1] / "assets"
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
RENEWED = 30.0  # seconds after which the Hub is asked again for a file that it did not give


def settle_sampler(values: dict[str, Any]) -> str:
    """Replace `auto` in the block `sampling` of `values` by what the scheduler allows; return a sentence about it.

    The sentence is "" if there is no `auto`. A scheduler that cannot be read counts as one of flow matching: if it is
    not, the model is refused as soon as it is there. A role of an episode with its own model has its own scheduler.
    """
    sampling, model = (values.setdefault(block, {}) for block in ("sampling", "model"))
    episode = values.get("episode")
    if not isinstance(sampling, dict) or not isinstance(model, dict):
        return ""  # which is an error
    sampling.setdefault("kernel", AUTO)
    choices = {key: sampling.get(key) for key in CHOICES}
    chosen, sentence = _chosen(choices, model)
    sampling.update(chosen)
    roles = episode.get("roles") if isinstance(episode, dict) else None
    for keys in roles.values() if isinstance(roles, dict) else ():
        if isinstance(keys, dict) and keys.get("kind") != "text":
            _settle_role(keys, choices, model)
    return sentence


def _settle_role(keys: dict[str, Any], choices: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Set what `auto` becomes for a role; `choices`, `model`: the run's own, which hold where `keys` has none."""
    blocks = {block: keys.get(block) for block in ("model", "sampling")}
    parts = ((block, part) for block, part in blocks.items() if isinstance(part, dict))
    of_role = {f"{block}.{key}": value for block, part in parts for key, value in part.items()}
    of_role |= {key: value for key, value in keys.items() if key not in blocks}
    usual = choices if "model.path" in of_role else {}
    sampling = {key: of_role.get(f"sampling.{key}", usual.get(key)) for key in CHOICES}
    its_model = {key: of_role.get(f"model.{key}", model.get(key)) for key in ("path", "parts")}
    keys |= {f"sampling.{key}": value for key, value in _chosen(sampling, its_model)[0].items()}


def _chosen(sampling: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Return the values of keys that are `auto`, and the sentence about them."""
    if not is_open(sampling):
        return {}, ""
    scheduler, why = None, "it has no scheduler"
    try:
        scheduler = read_scheduler(
            str(model.get("path", ModelConfig.path)), model.get("parts"), fetched=is_trusted(str(model.get("path")))
        )
    except ModelError as error:
        why = f"its scheduler cannot be read: {error}"
    chosen = choose(sampling, scheduler or Scheduler("", None, {}))
    if scheduler is not None:
        why = scheduler.name if scheduler.kind is not None else f"{scheduler.name} is not known"
    basis = why if scheduler is not None and scheduler.kind is not None else f"as for flow matching, since {why}"
    return chosen, f"sampling.{', '.join(f'{key}={value}' for key, value in chosen.items())} ({AUTO}: {basis})"


def check_scheduler(config: Config) -> None:
    """Raise `ConfigError` if the scheduler of the model, or of a role's, is at hand and does not fit."""
    roles = [role_config(config, name) for name in config.episode.roles if not config.episode.is_text(name)]
    for each in [config, *roles]:
        if (scheduler := read_scheduler(each.model.path, each.model.parts)) is not None:
            check_sampler(each, scheduler)


def read_scheduler(path: str, parts: object = None, fetched: bool = False) -> Scheduler | None:
    """Read the scheduler of a pipeline in memory, in a folder, on gerl's record or in the Hub's cache; None: not there.

    `parts`: as `model.parts`. `fetched`: from the Hub too, which raises `ModelError` if it does not give the file.
    """
    if (pipe := objects.pipeline(path)) is not None:
        part = getattr(pipe, "scheduler", None)
        values = {**getattr(part, "config", {}), "_class_name": type(part).__name__}
        return None if part is None else Scheduler.read(values, type(pipe).__name__)
    source = parts.get("scheduler", path) if isinstance(parts, Mapping) else path
    recorded = None if _folder(path) else _recorded().get(path)
    if recorded is not None and source == path:
        return recorded
    index = {} if recorded is not None else _read(path, (INDEX,), fetched)
    if index is None or not isinstance(source, str):
        return None
    names = (f"scheduler/{FILE}",) if source == path else (f"scheduler/{FILE}", FILE)
    settings = _read(source, names, fetched)
    if settings is None:
        return None
    entry = index.get("scheduler")
    if source == path and isinstance(entry, list) and len(entry) == 2 and entry[1]:
        settings = {**settings, "_class_name": entry[1]}
    return Scheduler.read(settings, str(index.get("_class_name", "")) if recorded is None else recorded.pipeline)


def _read(path: str, names: tuple[str, ...], fetched: bool) -> dict[str, Any] | None:
    """Return the first of the files `names` of a folder or a repository of the Hub; None if there is none."""
    folder = _folder(path)
    if folder is None:
        if not HUB_ID.fullmatch(path):
            return None
        answers = [_in_hub(path, name, fetched, int(time.monotonic() // RENEWED)) for name in names]
        if error := next((answer for answer in answers if isinstance(answer, ModelError)), None):
            raise error
        files = [answer for answer in answers if isinstance(answer, Path)]
    else:
        files = [folder / name for name in names]
    file = next((file for file in files if file.is_file()), None)
    try:
        content = None if file is None else read_json(file)
    except (OSError, *MALFORMED):  # reported when the model is loaded
        return None
    return content if isinstance(content, dict) else None


def _folder(path: str) -> Path | None:
    folder = ASSETS / path if path == "signs" else Path(path).expanduser()
    return folder if folder.is_dir() else None


@functools.lru_cache(maxsize=64)
def _in_hub(path: str, name: str, fetched: bool, now: int) -> Path | ModelError | None:
    """Return a file of a repository in the Hub's cache, `fetched` into it if missing; None if there is none.

    An error is returned, so that it is kept like any answer until `now` is another number.
    """
    del now
    from huggingface_hub import hf_hub_download, try_to_load_from_cache  # not at the top: folders do not need them
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cached = try_to_load_from_cache(path, name)
    if isinstance(cached, str) or not fetched:
        return Path(cached) if isinstance(cached, str) else None
    from gerl.utils.hub_errors import PATIENCE, missing, request_error

    unreached = request_error(path)
    try:
        if unreached is not None:
            raise unreached
        return Path(hf_hub_download(path, name, etag_timeout=PATIENCE))
    except EntryNotFoundError as error:
        if not isinstance(error, LocalEntryNotFoundError):
            return None
        cause: Exception = error
    except Exception as error:  # noqa: BLE001 - errors of the network, the disk and the Hub have no common base class
        cause = error
    return ModelError(missing(path, cause, unreached, "model.path"))


@functools.cache
def _recorded() -> Mapping[str, Scheduler]:
    """Return the schedulers of the models whose architectures are recorded, by Hub id."""
    text = (ASSETS / "architectures.yaml").read_text(encoding="utf-8")
    record = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    schedulers: dict[str, Scheduler] = {}
    for path, model in record["models"].items():
        part = model["components"].get("scheduler")
        part = record["parts"][part] if isinstance(part, str) else part
        settings = {**part["config"], "_class_name": part["class"].rpartition(".")[2]}
        schedulers |= dict.fromkeys((path, model.get("also", path)), Scheduler.read(settings, model["pipeline"]))
    return schedulers
