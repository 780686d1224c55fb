"""Drafts of runs: keys, prompts and functions typed on the page.

A draft consists of the arguments of a command line and the files that they name. It is checked by composing these
arguments and by the checks of a run before it starts; the page has no rules of its own.
"""

import contextlib
import dataclasses
import re
import shutil
import threading
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from gerl.algorithms.planning import planned_steps
from gerl.commandline.command import with_notes
from gerl.commandline.composition import (
    Composed,
    asked_for,
    compose_run,
    experiments,
    is_of_run,
    read,
    replaced_scorers,
    typed_texts,
    with_folder,
)
from gerl.config import keys
from gerl.config.blocks import HELD_OUT as HELD_OUT_SHARE
from gerl.config.bounded_text import load_yaml
from gerl.config.changes import settings_of
from gerl.config.reading import flow
from gerl.config.user_files import only_typed
from gerl.data.sources import count_trained, source_names
from gerl.errors import ConfigError, GerlError
from gerl.protocol import Prompt
from gerl.run.card import redact
from gerl.run.session import VOTES
from gerl.run.settings import difference
from gerl.trainer.launch import read_inputs
from gerl.utils.files import reason, write_file
from reward_models.votes.command import EXAMPLE, prepare

NAME = re.compile(r"[^\W_][\w.-]{0,79}")  # of a file
MOST_LETTERS, MOST_BYTES = 80, 200  # of a folder
NAMELESS = "give the run a name with a letter or a digit"
PROMPTS, HELD_OUT = "prompts.txt", "held_out.txt"
FILES = {PROMPTS: "data.train", HELD_OUT: "validation.data"}  # texts of a draft -> the key that names the file
OWN = "plain"  # the experiment that is no recipe
REQUIRED = {  # key -> what to fill in for it
    "model.path": "name your model: a folder, or owner/name on the Hugging Face Hub",
    PROMPTS: "write prompts, one per line, or name a file",
    "reward.scorers": "choose a reward: pickscore (what people like), ocr (text in quotes), or a function of yours",
}
READ = {PROMPTS: "prompts", "data.train": "prompts", HELD_OUT: "held_out", "validation.data": "held_out"}  # -> fact
REWARDLESS = "there is no reward: "  # how `check_named` begins
STAND_IN = "jpeg_compressibility"  # a scorer of any prompt
MOST_PROBLEMS = 12
FIRST = ("experiment", "algorithm")  # keys of files come first, as people write them
COMPOSING = threading.RLock()  # Hydra composes one at a time
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
    card: str = ""  # whose keys were filled in, of cards.yaml
    revision: int | None = None  # increases with each change; None: of a request that does not know it

    @property
    def command(self) -> str:
        """Name of the command that trains it."""
        return "vote" if self.votes else "train"

    def arguments(self, root: Path) -> list[str]:
        """Return the arguments of the command; `root`: the folder of the runs."""
        set_keys = {key: value for key, value in self.keys.items() if value.strip()}
        for file, key in FILES.items():
            if self.texts.get(file, "").strip():
                set_keys.setdefault(key, flow(str(self.folder(root) / file)))
        scorers = {name: self._scorer(name, root) for name in self.scorers}
        for key in [*set_keys]:  # keys of these scorers belong to their entries
            name, _, inner = key.removeprefix("reward.scorers.").partition(".")
            if key.startswith("reward.scorers.") and name in scorers and inner.isidentifier():
                scorers[name][inner] = read(f"{key}={set_keys.pop(key)}").value()
        if self.votes:  # beside the scorer of the votes
            set_keys |= {f"+reward.scorers.{name}": flow(scorer) for name, scorer in scorers.items()}
        elif scorers:
            set_keys["reward.scorers"] = flow(scorers)
        first = [f"{key}={set_keys.pop(key)}" for key in FIRST if key in set_keys]
        return [*first, *(f"{key}={value}" for key, value in set_keys.items()), f"out={flow(str(root / self.name))}"]

    def _scorer(self, name: str, root: Path) -> dict[str, Any]:
        entry = {key: value for key, value in self.scorers[name].items() if value not in ("", None)}
        if isinstance(kwargs := entry.get("kwargs"), str):
            entry["kwargs"] = _mapping(kwargs, f"reward.scorers.{name}.kwargs")
        return {"path": str(self.folder(root) / f"{name}.py"), **entry} if f"{name}.py" in self.texts else entry

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
        values = load_yaml(text)
    except yaml.YAMLError as error:
        values, why = None, f" ({reason(error)})"
    if not isinstance(values, dict):
        raise ConfigError(f"{key}: write KEY: VALUE, one per line{why}")
    return values


def read_draft(values: Mapping[str, Any]) -> Draft:
    """Convert JSON sent by the page; raises `GerlError` for files that are no file names, or other types."""
    name, texts = values.get("name"), values.get("texts") or {}
    if not isinstance(name, str) or not (folder := folder_of(name)):
        raise GerlError(NAMELESS)
    parts = (values.get("keys") or {}, values.get("scorers") or {}, texts)
    if not all(isinstance(part, dict) for part in parts) or not all(isinstance(s, dict) for s in parts[1].values()):
        raise GerlError("keys, scorers and texts of a draft are objects")
    if wrong := [file for file in texts if not NAME.fullmatch(str(file))]:
        raise GerlError(f"{wrong[0]!r:.80} is no name of a file")
    if wrong := [name for name in parts[1] if not re.fullmatch(r"\w+", name)]:
        raise GerlError(f"the name of a scorer has letters, digits and _ only, not {wrong[0]!r:.80}")
    keys_ = {str(key): str(value) for key, value in parts[0].items()}
    texts = {str(file): str(text) for file, text in texts.items()}
    number = values.get("revision")
    revision = number if type(number) is int else None
    card = values.get("card")
    card = card if isinstance(card, str) else ""
    return Draft(folder, keys_, dict(parts[1]), texts, values.get("votes") is True, card, revision)


def folder_of(name: str) -> str:
    """Return the name of a run's folder for what a user typed: letters of any alphabet, digits, spaces and _ . -"""
    folder = re.sub(r"[^\w.-]+", " ", unicodedata.normalize("NFC", name)).lstrip(" ._-")[:MOST_LETTERS]
    while len(folder.encode("utf-8", "replace")) > MOST_BYTES:
        folder = folder[:-1]
    return folder.rstrip(" .-")


@dataclass(frozen=True)
class Problem:
    """Reason why a draft cannot be trained, and the key or the text of the draft that it is about."""

    sentence: str
    key: str = ""
    missing: bool = False  # it has to be filled in


@dataclass(frozen=True)
class Check:
    """Composed configuration of a draft, and the problems with it; with problems, of what is left without them."""

    arguments: list[str]
    problems: list[Problem] = field(default_factory=list)
    yaml: str = ""
    changes: list[tuple[str, str, str]] = field(default_factory=list)  # of what was typed: key, value, the recipe's
    values: dict[str, Any] = field(default_factory=dict)  # of all keys
    facts: dict[str, Any] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)  # of distinct texts


def check(draft: Draft, root: Path, trust: bool = False, files: Path | None = None) -> Check:
    """Compose a draft, and read its prompts, as a run does before it loads anything.

    `root`: the folder of the runs. `files`: the folder below which those of the draft are, if it is another.

    What has a problem is left out, and the rest is checked again, until nothing is wrong. Code that only the run names
    of which it is a copy does not run unless `trust`: keys that are typed name what may.
    """
    problems = [Problem(sentence, key, True) for key, sentence in missing(draft).items()]
    left, result, files = with_stand_ins(draft), Check([]), files or root
    while len(problems) < MOST_PROBLEMS:
        try:
            arguments = left.arguments(files)
            copied = is_of_run(left.keys.get("experiment", "")) and not trust
            with only_typed(typed_texts(arguments) if copied else None):
                composed, recipe = _compose(left, arguments)
                result = Check(arguments, values=settings_of(composed.config), facts=_facts(composed))
                result = _read(composed, recipe, result, draft)
            break
        except GerlError as error:
            problem = problem_of(error, left, files)
            if problem in problems:
                break
            problems.append(problem)
            if not leave_out(left, problem.key):
                break
    with contextlib.suppress(GerlError):
        result = dataclasses.replace(result, arguments=draft.arguments(root))
    if not problems:
        return result
    facts = dict(result.facts)
    for problem in problems:
        facts.pop(READ.get(problem.key, ""), None)
    return dataclasses.replace(result, problems=problems, changes=[], facts=facts)


def missing(draft: Draft) -> dict[str, str]:
    """Return a sentence for each field that has to be filled in if a run starts from no recipe, by key."""
    if draft.keys.get("experiment") != OWN:
        return {}
    there = {
        "model.path": draft.keys.get("model.path"),
        PROMPTS: draft.keys.get("data.train", "").strip() or draft.texts.get(PROMPTS),
        "reward.scorers": draft.scorers or draft.votes,
    }
    return {key: sentence for key, sentence in REQUIRED.items() if not there[key]}


def with_stand_ins(draft: Draft) -> Draft:
    """Return a copy of a draft, with values for what is missing, so that the rest can be checked."""
    without = missing(draft)
    copied = dataclasses.replace(draft, keys=dict(draft.keys), scorers=dict(draft.scorers), texts=dict(draft.texts))
    if "model.path" in without:
        copied.keys["model.path"] = "signs"
    if PROMPTS in without:
        copied.keys["data.train"] = "signs_train"
    if "reward.scorers" in without:
        copied.scorers[STAND_IN] = {}
    return copied


def leave_out(draft: Draft, key: str) -> bool:
    """Remove what has a problem from a draft; returns whether there was something to remove."""
    name = key.removeprefix("reward.scorers.").partition(".")[0]
    if key == "reward.scorers":
        draft.keys.pop(key, None)
        draft.scorers[STAND_IN] = {}
        return True
    if key in draft.texts or key in draft.keys:
        return (draft.texts.pop(key, None) or draft.keys.pop(key, None)) is not None
    if key.startswith("reward.scorers.") and name in draft.scorers:
        draft.texts.pop(f"{name}.py", None)
        del draft.scorers[name]
        if not draft.scorers and draft.keys.get("experiment") == OWN:
            draft.scorers[STAND_IN] = {}
        return True
    typed = [each for each in draft.keys if each.startswith(f"{key}.")] if key else []
    for each in typed:
        del draft.keys[each]
    return bool(typed)


def _compose(draft: Draft, arguments: list[str]) -> tuple[Composed, Composed]:
    """Compose a draft, and the experiment from which it starts."""
    with COMPOSING:
        if draft.votes:
            prepare(with_folder(arguments))
        overrides = [EXAMPLE, *arguments] if draft.votes else arguments
        asked = asked_for(overrides)
        composed = compose_run(overrides, asked)
        started = [a for a in arguments if a.startswith("experiment=")]
        recipe = _shipped(*started) if draft.keys.get("experiment") in experiments() else compose_run(started)
        return dataclasses.replace(composed, replaced=replaced_scorers(overrides, asked)), recipe


@cache
def _shipped(experiment: str) -> Composed:
    """Compose an experiment that ships with gerl, whose file does not change."""
    return compose_run([experiment])


def _facts(composed: Composed) -> dict[str, Any]:
    """Return what the page shows of a run besides its keys and prompts."""
    config = composed.config
    return {
        "preset": composed.preset or config.algorithm.name,
        "model": config.model.path,
        "steps": config.trainer.steps,
        "images": config.rollout.prompts_per_step * config.rollout.n,
        "scorers": {name: scorer.weight for name, scorer in config.reward.scorers.items()},
    }


def _read(composed: Composed, recipe: Composed, checked: Check, draft: Draft) -> Check:
    """Return `checked` with what a run reads before it starts; raises `GerlError`."""
    inputs = read_inputs(composed)
    composed = dataclasses.replace(composed, config=inputs.config)  # with the scorers that stay watched
    prompts, held_out, values = inputs.prompts, inputs.held_out, settings_of(inputs.config)
    facts = _facts(composed) | {
        "secrets": [read(a).key_or_group for a in checked.arguments if "${oc.env:" not in a and redact(a) != a],
        "steps": planned_steps(inputs.config, prompts),
        "prompts": about(prompts),
        "held_out": about(held_out),
        "trained": count_trained(prompts, held_out),
        "split": inputs.split.removeprefix(", "),
        "first": [prompt.text for prompt in (held_out or prompts)[:FIRST_PROMPTS]],
    }
    distinct = {prompt.text: prompt for prompt in [*held_out, *prompts]}
    changes = changes_to(settings_of(recipe.config), values, draft, recipe.preset)
    return Check(checked.arguments, [], composed.yaml(), changes, values, facts, list(distinct.values()))


def changes_to(
    recipe: Mapping[str, Any], values: Mapping[str, Any], draft: Draft, preset: str
) -> list[tuple[str, str, str]]:
    """Return (key, value, value of the recipe) of what a draft changes: not what follows from it."""
    typed = [key for key in draft.keys if key not in FIRST]
    pasted = {key: file for file, key in FILES.items() if draft.texts.get(file, "").strip() and key not in typed}
    rows = [("algorithm", chosen, preset) for chosen in [draft.keys.get("algorithm")] if chosen not in (None, preset)]
    for key, value, before in difference(values, recipe):
        if key in pasted or any(key == each or key.startswith(f"{each}.") for each in typed):
            rows.append((key, "typed here" if key in pasted else value, before))
    before, now = recipe["reward"]["scorers"], values["reward"]["scorers"]
    if draft.scorers:
        for name in {**now, **before}:
            old, new = (str(scorers[name]["weight"]) if name in scorers else "" for scorers in (before, now))
            if name in before and name not in draft.scorers:
                new = "removed" if name not in now else "measured, not rewarded" if float(old) else old
            if old != new:
                rows.append((f"reward.scorers.{name}", new, old))
    return rows


def about(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the number of prompts, the repeated ones, and the longest ones."""
    counts = Counter(prompt.text for prompt in prompts)
    twice = [text for text, count in counts.items() if count > 1]
    longest = sorted(counts, key=len, reverse=True)[:LONGEST]
    return {"count": len(prompts), "twice": twice[:LONGEST], "repeated": len(twice), "longest": longest}


def problem_of(error: GerlError, draft: Draft, root: Path) -> Problem:
    """Return the message that the command line would print; of a pasted text as its user sees it, lines from 1."""
    sentence = with_notes(str(error), error)
    key = key_in(sentence)
    if sentence.startswith(REWARDLESS):
        key = "reward.scorers"
    if sentence.startswith(auto := f"validation.data={source_names(HELD_OUT_SHARE)}: "):  # of the prompts to learn from
        key, sentence = "data.train", sentence.removeprefix(auto)
    for file, of in FILES.items():
        if key == of and file in draft.texts and of not in draft.keys:
            path = re.escape(str(draft.folder(root) / file))
            sentence = re.sub(rf"({re.escape(of)}=)?'?{path}'?:? *", "", sentence)
            return Problem(with_lines(sentence, draft.texts[file]), file)
        if key == of and of not in draft.keys:
            return Problem(f"the recipe's prompts, {sentence}", file)
    name, _, inner = key.removeprefix("reward.scorers.").partition(".")
    if key.startswith("reward.scorers.") and name in draft.scorers and key not in draft.keys:
        path = re.escape(str(draft.folder(root) / f"{name}.py"))
        sentence = re.sub(rf"^reward\.scorers\.{name}\.path='?{path}'?: *", "", sentence).replace(f"{path}, ", "")
        key = f"reward.scorers.{name}.kwargs" if inner.startswith("kwargs") else f"reward.scorers.{name}"
    return Problem(sentence, key)


def with_lines(sentence: str, text: str) -> str:
    """Return a sentence that names a prompt of `text` by its number with its line, from 1, instead.

    Numbers are those of the prompts that are trained on or held out, so that the line is found by its words.
    """
    match = re.search(r"\bprompt \d+(?=(:? )(.*))", sentence, re.S)
    for number, line in enumerate(text.splitlines(), 1):
        if match and line.strip() and match[2].startswith(f"{line.strip()!r:.80}"):
            return f"{sentence[: match.start()]}line {number}{sentence[match.end() :]}"
    return sentence


def key_in(sentence: str) -> str:
    """Return the key that an error names at its start, "" if none."""
    match = re.match(r"[+~]*([a-z]\w*(?:\.\w+)*)(?==|: | is )", sentence)
    return match[1] if match else ""


# --- Keys


def described(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the help and the choices of each key."""
    fields_by_key: dict[str, Any] = dict(keys())
    described_keys = {}
    for name in names:
        f = fields_by_key[name]
        choices = ["true", "false"] if f.type is bool else _choices(f.type)
        described_keys[name] = {"help": f.metadata["help"], "choices": choices}
    return described_keys


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
