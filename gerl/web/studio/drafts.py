"""Drafts of runs: keys, prompts and functions typed on the page.

A draft consists of the arguments of a command line and the files that they name. It is checked by composing these
arguments and by the checks of a run before it starts; the page has no rules of its own.
"""

import dataclasses
import re
import shutil
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from gerl.algorithms.planning import planned_steps
from gerl.commandline.command import with_notes
from gerl.commandline.composition import (
    Composed,
    asked_for,
    compose_run,
    is_of_run,
    read,
    replaced_scorers,
    typed_texts,
    with_folder,
)
from gerl.config import ScorerConfig, keys
from gerl.config.bounded_text import load_yaml
from gerl.config.changes import settings_of
from gerl.config.reading import flow
from gerl.config.user_files import only_typed
from gerl.errors import ConfigError, GerlError
from gerl.protocol import Prompt
from gerl.run.card import redact
from gerl.run.session import VOTES
from gerl.run.settings import difference, shown_setting
from gerl.trainer.launch import read_inputs
from gerl.utils.files import reason, write_file
from reward_models.votes.command import EXAMPLE, prepare

NAME = re.compile(r"[^\W_][\w.-]{0,79}")
PROMPTS, HELD_OUT = "prompts.txt", "held_out.txt"
FILES = {PROMPTS: "data.train", HELD_OUT: "validation.data"}  # texts of a draft -> the key that names the file
FIRST = ("experiment", "algorithm")  # keys of files come first, as people write them
COMPOSING = threading.RLock()  # Hydra composes one at a time
DEFAULTS = {name: shown_setting(value) for name, value in dataclasses.asdict(ScorerConfig()).items()}
VOTE_KWARGS = "reward.scorers.vote.kwargs"  # known when the run starts
FIRST_PROMPTS = 6  # that the page offers to sample
LONGEST = 3  # prompts that are shown of a kind


@dataclass
class Draft:
    """A run before it is started: values by key as typed, scorers, and the contents of its files by name."""

    name: str  # of the run's folder
    keys: dict[str, str] = field(default_factory=dict)
    scorers: dict[str, dict[str, Any]] = field(default_factory=dict)  # empty: those of the experiment
    texts: dict[str, str] = field(default_factory=dict)  # file -> content
    votes: bool = False  # people are the reward
    revision: int | None = None  # increases with each change; None: of a request that does not know it

    @property
    def command(self) -> str:
        """Name of the command that trains it."""
        return "vote" if self.votes else "train"

    def arguments(self, root: Path) -> list[str]:
        """Return the arguments of the command; `root`: the folder of the runs."""
        given = {key: value for key, value in self.keys.items() if value.strip()}
        for file, key in FILES.items():
            if self.texts.get(file, "").strip():
                given.setdefault(key, flow(str(self.folder(root) / file)))
        scorers = {name: self._scorer(name, root) for name in self.scorers}
        for key in [*given]:  # keys of these scorers belong to their entries
            name, _, inner = key.removeprefix("reward.scorers.").partition(".")
            if key.startswith("reward.scorers.") and name in scorers and inner.isidentifier():
                scorers[name][inner] = read(f"{key}={given.pop(key)}").value()
        if self.votes:  # beside the scorer of the votes
            given |= {f"+reward.scorers.{name}": flow(scorer) for name, scorer in scorers.items()}
        elif scorers:
            given["reward.scorers"] = flow(scorers)
        first = [f"{key}={given.pop(key)}" for key in FIRST if key in given]
        return [*first, *(f"{key}={value}" for key, value in given.items()), f"out={flow(str(root / self.name))}"]

    def _scorer(self, name: str, root: Path) -> dict[str, Any]:
        own = {key: value for key, value in self.scorers[name].items() if value not in ("", None)}
        if isinstance(kwargs := own.get("kwargs"), str):
            own["kwargs"] = _mapping(kwargs, f"reward.scorers.{name}.kwargs")
        return {"path": str(self.folder(root) / f"{name}.py"), **own} if f"{name}.py" in self.texts else own

    def folder(self, root: Path) -> Path:
        """Return the folder of its files."""
        return root / "studio" / "drafts" / self.name

    def write(self, root: Path) -> None:
        """Write the files of the draft, and remove others; raises `GerlError`."""
        folder = self.folder(root)
        for file, text in self.texts.items():
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / file, text if text.endswith("\n") else f"{text}\n", private=True)
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_file() and path.name not in self.texts:
                path.unlink()

    def remove(self, root: Path) -> None:
        """Remove the files of the draft."""
        shutil.rmtree(self.folder(root), ignore_errors=True)


def _mapping(text: str, key: str) -> dict[str, Any]:
    """Read `KEY: VALUE` lines; raises `ConfigError`."""
    why = ""
    try:
        found = load_yaml(text)
    except yaml.YAMLError as error:
        found, why = None, f" ({reason(error)})"
    if not isinstance(found, dict):
        raise ConfigError(f"{key}: write KEY: VALUE, one per line{why}")
    return found


def read_draft(given: Mapping[str, Any]) -> Draft:
    """Convert JSON sent by the page; raises `GerlError` for names that are no file names, or other types."""
    name, texts = given.get("name"), given.get("texts") or {}
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise GerlError("the name of a run has letters, digits and _ . - only, and begins with a letter or a digit")
    parts = (given.get("keys") or {}, given.get("scorers") or {}, texts)
    if not all(isinstance(part, dict) for part in parts) or not all(isinstance(s, dict) for s in parts[1].values()):
        raise GerlError("keys, scorers and texts of a draft are objects")
    if wrong := [file for file in texts if not NAME.fullmatch(str(file))]:
        raise GerlError(f"{wrong[0]!r:.80} is no name of a file")
    if wrong := [name for name in parts[1] if not re.fullmatch(r"\w+", name)]:
        raise GerlError(f"the name of a scorer has letters, digits and _ only, not {wrong[0]!r:.80}")
    keys_ = {str(key): str(value) for key, value in parts[0].items()}
    texts = {str(file): str(text) for file, text in texts.items()}
    known = given.get("revision")
    revision = known if type(known) is int else None
    return Draft(name, keys_, dict(parts[1]), texts, given.get("votes") is True, revision)


@dataclass(frozen=True)
class Problem:
    """Reason why a draft cannot be trained, and the key that it names."""

    sentence: str
    key: str = ""


@dataclass(frozen=True)
class Check:
    """Composed configuration of a draft, or the problem with it."""

    arguments: list[str]
    problem: Problem | None
    yaml: str = ""
    changes: list[tuple[str, str, str]] = field(default_factory=list)  # key, value, that of the experiment
    values: dict[str, Any] = field(default_factory=dict)  # of all keys
    facts: dict[str, Any] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)  # of distinct texts


def check(draft: Draft, root: Path, trust: bool = False) -> Check:
    """Compose a draft, and read its prompts, as a run does before it loads anything.

    Code that only the run names of which it is a copy does not run unless `trust`: keys that are typed name what may.
    """
    try:
        arguments = draft.arguments(root)
        copied = is_of_run(draft.keys.get("experiment", "")) and not trust
        typed = typed_texts(arguments) if copied else None
    except GerlError as error:
        return Check([], problem_of(error))
    with only_typed(typed):
        return _check(draft, arguments)


def _check(draft: Draft, arguments: list[str]) -> Check:
    with COMPOSING:
        try:
            if draft.votes:
                prepare(with_folder(arguments))
            given = [EXAMPLE, *arguments] if draft.votes else arguments
            asked = asked_for(given)
            composed = compose_run(given, asked)
            composed = dataclasses.replace(composed, replaced=replaced_scorers(given, asked))
            recipe = compose_run([a for a in arguments if a.startswith("experiment=")])
        except GerlError as error:
            return Check(arguments, problem_of(error))
    before = settings_of(recipe.config)
    try:
        inputs = read_inputs(composed)
    except GerlError as error:
        return _checked(arguments, composed, before, problem_of(error))
    composed = dataclasses.replace(composed, config=inputs.config)  # with the scorers that stay watched
    prompts, held_out = inputs.prompts, inputs.held_out
    found = _checked(arguments, composed, before)
    facts = found.facts | {
        "secrets": [read(a).key_or_group for a in arguments if "${oc.env:" not in a and redact(a) != a],
        "steps": planned_steps(composed.config, prompts),
        "prompts": about(prompts),
        "held_out": about(held_out),
        "first": [prompt.text for prompt in (held_out or prompts)[:FIRST_PROMPTS]],
    }
    distinct = {prompt.text: prompt for prompt in [*held_out, *prompts]}
    return dataclasses.replace(found, facts=facts, prompts=list(distinct.values()))


def _checked(
    arguments: list[str], composed: Composed, before: Mapping[str, Any], problem: Problem | None = None
) -> Check:
    values = settings_of(composed.config)
    return Check(arguments, problem, composed.yaml(), changes_to(before, values), values, _facts(composed))


def changes_to(recipe: Mapping[str, Any], values: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (key, value, value of the recipe) of all that differ, without the defaults of additional scorers."""
    found = dict[str, tuple[str, str, str]]()
    for key, value, before in difference(values, recipe):
        _, _, scorer = key.partition("reward.scorers.")
        name, _, inner = scorer.partition(".")
        if scorer and name not in values["reward"]["scorers"]:
            found[name] = f"reward.scorers.{name}", "removed", ""
        elif key != VOTE_KWARGS and not (
            scorer and name not in recipe["reward"]["scorers"] and value == DEFAULTS.get(inner)
        ):
            found[key] = key, value, before
    return list(found.values())


def _facts(composed: Composed) -> dict[str, Any]:
    """Return what the page shows of a run besides its keys and prompts."""
    config = composed.config
    return {
        "experiment": composed.experiment,
        "algorithm": config.algorithm.name,
        "model": config.model.path,
        "steps": config.trainer.steps,
        "images": config.rollout.prompts_per_step * config.rollout.n,
        "scorers": {name: scorer.weight for name, scorer in config.reward.scorers.items()},
    }


def about(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the number of prompts, the repeated ones, and the longest ones."""
    counts = Counter(prompt.text for prompt in prompts)
    twice = [text for text, count in counts.items() if count > 1]
    longest = sorted(counts, key=len, reverse=True)[:LONGEST]
    return {"count": len(prompts), "twice": twice[:LONGEST], "repeated": len(twice), "longest": longest}


def problem_of(error: GerlError) -> Problem:
    """Return the message that the command line would print."""
    return Problem(with_notes(str(error), error), key_in(str(error)))


def key_in(sentence: str) -> str:
    """Return the key that an error names at its start, "" if none."""
    match = re.match(r"[+~]*([a-z]\w*(?:\.\w+)*)(?==|: )", sentence)
    return match[1] if match else ""


# --- Keys


def described(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the help and the choices of each key."""
    known: dict[str, Any] = dict(keys())
    found = {}
    for name in names:
        f = known[name]
        choices = ["true", "false"] if f.type is bool else _choices(f.type)
        found[name] = {"help": f.metadata["help"], "choices": choices}
    return found


def _choices(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(part) for part in get_args(kind)]
    return []


def from_run(run: Path, name: str) -> Draft:
    """Return a draft with the settings of a run; raises `GerlError` if it has none."""
    config = run / "config.yaml"
    if not config.is_file():
        raise GerlError(f"{run} has no config.yaml to copy")
    return read_draft({"name": name, "keys": {"experiment": str(config)}, "votes": (run / VOTES).is_dir()})
