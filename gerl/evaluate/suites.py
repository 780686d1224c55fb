"""Published benchmarks: a suite pins prompts, protocol and scorers, and deviations from it are reported.

A suite is a yaml file in `gerl/assets/suites`, or a file of the user. Does not import torch.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gerl.commandline.composition import spelled
from gerl.commandline.form import either, near_names, read_yaml
from gerl.config import Config
from gerl.config.changes import Settings, changes, flat_settings, scorers_of, settings_of, shown
from gerl.errors import ConfigError, DataError
from gerl.protocol import Prompt
from gerl.utils.files import reason
from gerl.utils.pages import render

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "suites"
# blocks that affect results, and their keys that affect none, or only the last bits
BLOCKS = ("sampling", "validation", "reward", "model", "data")
FREE = re.compile(
    r"validation\.(every|images|micro_batch_size)|model\.(offload|shard|compile|gradient_checkpointing|channels_last)"
    r"|reward\.(retries|on_error|max_failed|trial|gpu_shares)"
    r"|reward\.scorers\.\w+\.(replicas|gpus|timeout|env|success|during)"
    r"|data\.(train|shuffle)"
)
FREE_KWARGS = "device batch_size threads concurrency retries backoff timeout api_key token_file token_env".split()
FREE_KWARGS += ["repository"]  # its content is verified by digest
EXACT = {"sampling.cache": "none", "model.quantize": "none", "model.quantize_encoders": "none"}  # pinned by every suite
ALWAYS = (
    "validation.data",
    "validation.max_prompts",
    "data.prompt_key",
    "data.template",
    "reward.",
    *EXACT,
)  # pinned by every suite


class Entry:
    """Part of a suite's file; unknown keys are refused."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class PromptFile(Entry):
    """Prompt file of a suite: `file` in `source`, or next to the suite, verified by its SHA-256.

    git_blob: git's blob hash, instead of the SHA-256. key: the column of the prompts. distinct: remove repeated
    prompts. gather: merge all rows with the same value in this column into one prompt, with the rows as `questions`.
    count: number of prompts after that.
    """

    source: str
    file: str
    count: Annotated[int, Field(ge=1)]
    licence: str
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    git_blob: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = None
    key: str = "prompt"
    distinct: bool = False
    gather: str | None = None

    def __post_init__(self) -> None:
        if (self.sha256 is None) == (self.git_blob is None):
            raise ValueError("the prompts need a digest, either sha256 or git_blob")

    @property
    def digest(self) -> str:
        """Expected digest of the file, as text."""
        return f"the SHA-256 {self.sha256}" if self.sha256 is not None else f"the git blob {self.git_blob}"

    def digest_of(self, content: bytes) -> str:
        """Return the digest of `content`, of the same kind."""
        if self.sha256 is not None:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

    def arrange(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the prompts to sample, given all rows. Raises `DataError` if a row lacks the column `gather`."""
        if self.distinct:
            return list({prompt.text: prompt for prompt in reversed(prompts)}.values())[::-1]
        if self.gather is None:
            return prompts
        groups: dict[object, list[Prompt]] = {}
        for prompt in prompts:
            if self.gather not in prompt.metadata:
                raise DataError(f"prompt {prompt.id}: {prompt.text!r:.80} has no {self.gather!r}: use the suite's file")
            groups.setdefault(prompt.metadata[self.gather], []).append(prompt)
        return [
            replace(rows[0], metadata={self.gather: name, "questions": [row.metadata for row in rows]})
            for name, rows in groups.items()
        ]


@dataclass(frozen=True)
class Column(Entry):
    """A published metric: a scorer's column times `factor`, averaged over prompts, or over tasks and their prompts."""

    name: str
    over: Literal["prompts", "tasks"] = "prompts"
    factor: float = 1.0
    here: str = ""  # name as measured by gerl, if it differs from the published one

    @property
    def measured(self) -> str:
        """Name of the metric as measured by gerl."""
        return self.here or self.name


@dataclass(frozen=True)
class Tasks(Entry):
    """Column of the prompt file with the task of a prompt, and the tasks in published order."""

    column: str
    names: Annotated[tuple[str, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Protocol(Entry):
    """Sampling protocol: `images` per prompt with configuration `keys`, for models that match name patterns."""

    source: str
    models: tuple[str, ...]
    images: Annotated[int, Field(ge=1)]
    keys: dict[str, Any]


@dataclass(frozen=True)
class Published(Entry):
    """A published row: numbers by column, and by task for the column that has tasks."""

    model: str
    source: str
    values: dict[str, float]
    trained: str = ""
    tasks: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite(Entry):
    """A published benchmark.

    needs: scorer -> the kwarg without which it is skipped. images: per prompt, if no protocol matches the model.
    differs: differences of gerl's measurement. deviates: deviations from the published protocol for every model.
    unpublished: reason why there are no published rows. missing: reason why the suite cannot be run.
    """

    title: str
    source: str
    prompts: PromptFile | None = None
    scorers: dict[str, dict[str, Any]] = field(default_factory=dict)
    needs: dict[str, str] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    tasks: Tasks | None = None
    protocols: dict[str, Protocol] = field(default_factory=dict)
    images: Annotated[int, Field(ge=1)] = 1
    differs: tuple[str, ...] = ()
    deviates: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()
    unpublished: str = ""
    missing: str = ""

    def __post_init__(self) -> None:
        if self.missing:
            return
        if self.prompts is None or not self.columns:
            raise ValueError("a suite must have prompts, scorers and columns, or say in missing why it cannot be run")
        if lost := [c for c in self.columns if c.split("/")[0] not in self.scorers]:
            raise ValueError(f"the column {lost[0]} belongs to no scorer of the suite")
        if self.tasks is None and any(column.over == "tasks" for column in self.columns.values()):
            raise ValueError("a column is over tasks, but there are no tasks")
        names = set() if self.tasks is None else set(self.tasks.names)
        if odd := [n for row in self.published for n in {*row.values, *row.tasks} if n not in {*self.columns, *names}]:
            raise ValueError(f"a published row has {odd[0]}, which is neither a column nor a task")

    @property
    def measured(self) -> set[str]:
        """Scorers whose columns are reported."""
        return {column.split("/")[0] for column in self.columns}


@dataclass(frozen=True)
class PinnedSuite:
    """A suite pinned for a model.

    protocol: its name, None if none is published for the model. chosen: whether the user selected a protocol that is
    not published for the model. prompts: the file. overrides: the pinned keys as arguments. absent: skipped scorers,
    with the key that they need.
    """

    name: str
    suite: Suite
    protocol: str | None
    chosen: bool
    prompts: Path
    overrides: tuple[str, ...]
    absent: tuple[str, ...]

    @property
    def images(self) -> int:
        """Number of images per prompt."""
        return self.suite.images if self.protocol is None else self.suite.protocols[self.protocol].images

    @property
    def keys(self) -> dict[str, Any]:
        """Keys pinned by the protocol and by every suite."""
        return EXACT | ({} if self.protocol is None else self.suite.protocols[self.protocol].keys)


def names() -> list[str]:
    """Return the names of the suites that ship with gerl."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def load(name: str) -> Suite:
    """Load the suite `name`, or a yaml file. Raises `ConfigError` if it is missing or incomplete."""
    path = Path(name).expanduser() if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        near = near_names(name, names())
        hint = f"did you mean {either(near)}?" if near else f"choose one of {', '.join(names())}, or give a .yaml file"
        raise ConfigError(f"suite={name}: there is no such suite; {hint}")
    content = OmegaConf.to_container(read_yaml(path, f"suite={name}"))
    try:
        return TypeAdapter(Suite).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"suite={name}: {where + ': ' if where else ''}{first['msg']}; docs/evaluate.md describes the format "
            "of a suite"
        ) from None


def pin(name: str, model: str, prompts: str | None, protocol: str | None, settings: Sequence[str]) -> PinnedSuite:
    """Pin the suite `name` for `model`; `prompts`: the user's copy of its prompts, `settings`: other keys of the user.

    Raises `ConfigError` if there is no such suite or protocol, or no usable scorer; `DataError` if its prompts are
    missing, or their digest differs.
    """
    suite = load(name)
    if suite.missing:
        raise ConfigError(f"suite={name} cannot be run: {suite.missing}")
    if protocol is not None and protocol not in suite.protocols:
        raise ConfigError(
            f"suite_protocol={protocol}: suite={name} has no such protocol, only {', '.join(suite.protocols) or 'none'}"
        )
    fits = [key for key, entry in suite.protocols.items() if any(fnmatch(model.lower(), m) for m in entry.models)]
    chosen = protocol if protocol is not None else next(iter(fits), None)
    keys = {} if chosen is None else suite.protocols[chosen].keys
    overrides_given = "\n".join(settings)
    absent = {s: kwarg for s, kwarg in suite.needs.items() if f"reward.scorers.{s}." not in overrides_given}
    scorers = {scorer: entry for scorer, entry in suite.scorers.items() if scorer not in absent}
    if suite.measured <= set(absent):
        wanted = " and ".join(f"reward.scorers.{s}.kwargs.{kwarg}" for s, kwarg in absent.items())
        raise ConfigError(f"suite={name}: it has no usable scorer; give {wanted}, see docs/rewards.md")
    file = _prompt_file(name, suite, prompts)
    assert suite.prompts is not None  # a suite without prompts is refused above
    pinned: dict[str, Any] = {"validation.data": str(file), "validation.max_prompts": None}
    pinned |= {"data.prompt_key": suite.prompts.key, "data.template": None}
    pinned |= {"sampling.cache": "none", **keys, "reward.scorers": scorers}
    left_out = tuple(
        f"{suite.columns[s].measured if s in suite.columns else s}: give reward.scorers.{s}.kwargs.{kwarg}"
        for s, kwarg in absent.items()
    )
    overrides = tuple(f"{key}={spelled(value)}" for key, value in pinned.items())
    return PinnedSuite(name, suite, chosen, protocol is not None and protocol not in fits, file, overrides, left_out)


def _prompt_file(name: str, suite: Suite, file: str | None) -> Path:
    wanted = suite.prompts
    assert wanted is not None  # `pin` refuses suites without
    where = f"{wanted.file} of {wanted.source}"
    beside = Path(name).expanduser().parent / wanted.file
    if file is None and not (name.endswith((".yaml", ".yml")) and beside.is_file()):
        raise DataError(
            f"suite={name}: its prompts do not ship with gerl; download {where} and give suite_prompts=FILE "
            f"(licence: {wanted.licence})"
        )
    path = beside if file is None else Path(file).expanduser()
    try:
        digest = wanted.digest_of(path.read_bytes())
    except OSError as error:
        raise DataError(f"suite_prompts={path}: it cannot be read ({reason(error)}); download {where}") from None
    if digest not in (wanted.sha256, wanted.git_blob):
        raise DataError(
            f"suite_prompts={path}: expected {wanted.digest} of {where}, got {digest}; download that file, or give "
            "prompts=FILE without suite for an evaluation with your own prompts"
        )
    if path.suffix != Path(wanted.file).suffix:
        raise DataError(f"suite_prompts={path}: keep the suffix {Path(wanted.file).suffix} of {wanted.file}")
    return path.absolute()


def deviations(pinned: PinnedSuite, plain: Config, config: Config, images: int) -> list[str]:
    """Describe the deviations of `config` from the suite, whose configuration is `plain`."""
    before, after = _prescribed(pinned.suite, plain), _prescribed(pinned.suite, config)
    sentences = {text: text for text in pinned.suite.deviates}
    if pinned.protocol is None and pinned.suite.protocols:
        sentences["protocol"] = (
            f"no protocol is published for {config.model.path}: size, steps and guidance are your own"
        )
    elif pinned.chosen:
        sentences["protocol"] = f"the protocol {pinned.protocol}, which is not published for {config.model.path}"
    for change in changes(before, after):
        free = pinned.protocol is None and not change.key.startswith(ALWAYS)
        if change.key.split(".")[0] in BLOCKS and not FREE.fullmatch(change.key) and not free:
            scorer = re.fullmatch(r"reward\.scorers\.(\w+)", change.key)
            what = "left out" if change.new is None else "added with a weight"
            key = f"{change.key}={shown(change.new)} (pinned: {shown(change.old)})"
            sentences[change.key] = key if scorer is None else f"scorer {scorer[1]} {what}"
    values = flat_settings(after)
    for key, value in pinned.keys.items():
        if values[key] != value:
            sentences[key] = f"{key}={shown(values[key])} (pinned: {shown(value)})"
    if images != pinned.images:
        sentences["images"] = f"images={images} (pinned: {pinned.images})"
    return list(sentences.values())


def _prescribed(suite: Suite, config: Config) -> Settings:
    """Return the settings that affect results: without watched scorers, and without kwargs such as a server address."""
    settings = settings_of(config)
    measured = suite.measured
    scorers = {}
    for name, entry in scorers_of(settings).items():
        if name not in measured and entry["weight"] == 0:
            continue
        free = {*FREE_KWARGS, suite.needs.get(name)}
        scorers[name] = {**entry, "kwargs": {k: v for k, v in entry["kwargs"].items() if k not in free}}
    settings["reward"]["scorers"] = scorers
    return settings


def listing() -> str:
    """Return the text of `suite=?`, which describes all suites."""
    return render("suites.txt.j2", suites={name: load(name) for name in names()}).rstrip()
