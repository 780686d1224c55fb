"""The block `data`, and the sources of prompts that `data.train` and `validation.data` name."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator

from gerl.config.choices import Overlong, TrainedImages
from gerl.config.schema import Block, key, main_key, shown
from gerl.errors import ConfigError

HUB = "hf:"  # how the sources begin that the package `datasets` reads
HUB_FORM = "hf:owner/name[split], or hf:owner/name/config[split]"
ENTRY = ("path", "weight", "prompt_key", "columns", "stream", "data_source")
Given = Annotated[str | list[Any], PlainValidator(lambda value: value)]  # checked by `sources`


@dataclass(frozen=True)
class Source:
    """A file, list or data set with prompts. None: as the block `data` has it, no weight, no data_source of its own."""

    path: str
    weight: float | None = None
    prompt_key: str | None = None
    columns: Mapping[str, str] | None = None
    stream: int | None = None
    data_source: str | None = None

    @property
    def on_hub(self) -> bool:
        """Whether the package `datasets` reads it."""
        return self.path.startswith(HUB)


def sources(given: object, name: str, weighted: bool = True) -> list[Source]:
    """The sources that the value of the key `name` stands for; without `weighted` none may have a weight.

    Raises `ConfigError` for anything but a text, or a list of texts and of mappings with `path`.
    """
    entries = [given] if isinstance(given, str) else given
    if not isinstance(entries, list | tuple) or not entries:
        raise ConfigError(
            f"{name}={shown(given)}: expected a string, or a list such as [a.txt, {{path: "
            f"b.txt{', weight: 2' * weighted}}}]"
        )
    found = [_source(entry, name, weighted) for entry in entries]
    paths = [source.path for source in found]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError(f"{name} has {twice} twice: name each source once, with a weight")
    return found


def _source(entry: object, name: str, weighted: bool) -> Source:
    values = {"path": entry} if isinstance(entry, str) else entry
    known = ENTRY if weighted else tuple(k for k in ENTRY if k != "weight")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}={shown(entry)}: an entry must be a string or a mapping, such as {{path: a.txt}}")
    for k in values:
        if k not in known:
            why = ": held-out prompts have no weights, each is sampled once" if k == "weight" else ""
            raise ConfigError(f"{name} has an entry with {k}{why}; allowed are {', '.join(known)}")
    for k in ("path", "prompt_key", "data_source"):
        value = values.get(k)
        if (k == "path" or value is not None) and not (isinstance(value, str) and value.strip()):
            raise ConfigError(f"{name} has an entry with {k}={shown(value)}: it must be a non-empty string")
    weight, stream, where = values.get("weight"), values.get("stream"), f"{name} has an entry with"
    if weight is not None and not (_is_number(weight) and math.isfinite(weight) and 0 < weight < 1e9):
        raise ConfigError(f"{where} weight={shown(weight)}: it must be a number above 0")
    if stream is not None and (not isinstance(stream, int) or isinstance(stream, bool) or stream < 1):
        raise ConfigError(f"{where} stream={shown(stream)}: it must be an integer of at least 1")
    if values.get("columns") is not None:
        check_columns(values["columns"], f"{where} columns", values.get("prompt_key"))
    given: dict[str, Any] = dict(values)
    source = Source(**given)
    if source.on_hub:
        hub_parts(source.path, name)
    return source


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_columns(columns: object, name: str, prompt_key: object = None) -> None:
    """Raise `ConfigError` if `columns` is no mapping of gerl's names to those of a table."""
    if not isinstance(columns, Mapping) or not all(
        isinstance(part, str) and part.strip() for pair in columns.items() for part in pair
    ):
        raise ConfigError(
            f"{name}={shown(columns)}: expected gerl's name and the table's, such as {{text: caption_text}}"
        )
    if "prompt" in columns and prompt_key in (None, "prompt"):
        raise ConfigError(
            f"{name} has prompt: the prompt column is set by data.prompt_key={columns['prompt']}, remove it"
        )


@dataclass(frozen=True)
class HubParts:
    """The parts of `hf:PATH[split]`: a data set of the hub, its configuration and revision, or a local folder."""

    path: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    local: bool = False


def hub_parts(source: str, name: str) -> HubParts:
    """The parts of `hf:owner/name[/config][@revision][[split]]`, or of `hf:./folder[[split]]`; raises `ConfigError`.

    What begins with a dot, a slash or ~ is a local folder. `name` is the key for messages.
    """
    match = re.fullmatch(r"hf:([^\[\]\s]+)(?:\[((?:[^\[\]]|\[[^\[\]]*\])+)\])?", source)
    if match is None:
        raise ConfigError(f"{name}={source:.200}: write {HUB_FORM}")
    place, split = match[1], match[2]
    if place.startswith((".", "/", "~")):
        return HubParts(place, None, split, None, local=True)
    place, _, revision = place.partition("@")
    parts = place.split("/")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"[\w.-]+", part) for part in parts):
        raise ConfigError(
            f"{name}={source:.200}: a data set of the Hub is owner/name, so write {HUB_FORM}; a local folder "
            "begins with ./ or /"
        )
    return HubParts("/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split, revision or None)


@dataclass(frozen=True)
class DataConfig(Block):
    train: Given = main_key(
        "signs_train",
        "training prompts: .txt, .jsonl, .csv or .parquet file, the name of a built-in list, or "
        "'hf:owner/name[split]'; several: '[a.txt, {path: b.txt, weight: 2}]', docs/data.md",
    )
    train_on: TrainedImages = key(
        "drawn",
        "what to train on: images that are sampled for the prompts and scored; or files: existing images named in "
        "the rows of data.train, whose ranks or labels replace rewards, docs/preferences.md",
    )
    regularise: Given | None = key(
        None,
        "existing images to imitate alongside reinforcement learning, with the weight algorithm.data_coef (DDRL): "
        "a file as for data.train_on=files; null: none",
    )
    regularise_images: int | None = key(None, "number of them per trainer step; null: as many as it has prompts", low=1)
    shuffle: bool = key(True, "shuffle the prompts every epoch")
    prompt_key: str = key(
        "prompt", "column of the prompt in .jsonl, .csv and .parquet rows and in data sets; other columns are metadata"
    )
    columns: dict[str, str] = key(
        {}, "gerl's name -> the table's, such as {text: caption_text}, or {image: photo} for images of a data set"
    )
    stream: int | None = key(
        None, "read only this many first rows of a data set of the Hub, without downloading all of it; null: all", low=1
    )
    overlong: Overlong = key(
        "truncate",
        "prompts too long for every tokenizer of the pipeline: truncate, skip, or raise an error; the log reports "
        "their number",
    )
    cache: str | None = key(
        None, "folder for prompt embeddings: a run that finds all its prompts there never loads the text encoders"
    )
    cache_gb: float = key(2.0, "memory per worker for prompt embeddings, in GB", low=0)

    def check(self) -> None:
        sources(self.train, "data.train")
        check_columns(self.columns, "data.columns", self.prompt_key)
