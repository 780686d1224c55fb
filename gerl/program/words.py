"""The words that fit where a command line of `gerl` is completed; nothing large is imported for them."""

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gerl.commandline.arguments import Parser
from gerl.commandline.command import run_command
from gerl.commandline.composition import CHOICES, FOLDER, MULTIRUN, SHOW, algorithm_of, files_in, shipped
from gerl.config import ScorerConfig, keys
from gerl.config.algorithms import BY_NAME
from gerl.program.commands import COMMANDS
from gerl.rewards.scorers import SCORERS

Word = tuple[str, str]  # it, and what it is for
TRAINING = {
    "hydra.run.dir=": "output folder of the run",
    "hydra.sweep.dir=": "output folder of the runs of a sweep",
    "-m": "train once for each combination of values",
    "--cfg": "job: print the configuration",
}
FOLDER_WORD = (FOLDER[-1], "a folder with your own experiments")
NAMED = "reward.scorers."  # keys of scorers have their name behind it


def main(argv: Sequence[str] | None = None) -> int:
    """Write the words that fit at the end of the words of `argv`, a line each, a tab before what they are for."""

    def work(words: Sequence[str]) -> None:
        sys.stdout.writelines(f"{word}\t{text}\n" for word, text in fitting(words))

    return run_command(["", *(sys.argv[1:] if argv is None else argv)], str, lambda given: work(given[1:]))


def fitting(words: Sequence[str]) -> list[Word]:
    """All that the last of the words behind `gerl` can become; none where it is the name of a file."""
    *before, current = words or [""]
    if not before:
        found = [(name, command.sentence) for name, command in COMMANDS.items()]
    elif before[0] not in COMMANDS:
        found = []
    elif "=" in current:
        key, _, _ = current.partition("=")
        found = [(f"{key}={value}", "") for value in values(before[0], key, before)]
    else:
        found = [*after(before, current)]
    return [(word, _brief(text)) for word, text in found if word.startswith(current)]


def after(before: Sequence[str], current: str) -> Iterator[Word]:
    """The keys and options behind a command and its arguments, blocks as a whole until one of them is begun."""
    command = before[0]
    if before[-1] in SHOW:
        yield "job", "the configuration of the run"
        return
    if before[-1] in FOLDER:  # files are the shell's
        return
    parser = _parser(command)
    if parser is not None and parser.bare:
        yield from ((value, "") for value in values(command, parser.bare))
    if parser is not None:
        for option in fields(parser.options):  # type: ignore[arg-type]
            yield f"{option.name}=", option.metadata["help"]
    elif not set(before) & set(MULTIRUN) or current:
        yield from TRAINING.items()
    if parser is None or parser.composes:
        yield FOLDER_WORD
    known = _passed(parser, before)
    if parser is None or parser.composes:
        yield from ((f"{choice}=", f"NAME of gerl's {choice}s, or a file" if choice == "experiment" else "a preset")
                    for choice in CHOICES if parser is None or parser.rest or choice in parser.passed)  # fmt: skip
    depth = current.count(".") + 1
    seen = set()
    for name, text in known:
        parts = name.split(".")
        word, text = (f"{name}=", text) if len(parts) <= depth else (".".join(parts[:depth]) + ".", "")
        if word not in seen and (depth > 1 or len(parts) > 1 or word.endswith("=")):
            seen.add(word)
            yield word, text
    yield "--help", "the keys"


def _passed(parser: Parser[Any] | None, before: Sequence[str]) -> list[Word]:
    """The keys of the configuration that a command takes; with `algorithm=NAME` those that this one reads."""
    presets = [word.partition("=")[2] for word in before if word.startswith("algorithm=")]
    algorithm = BY_NAME.get(algorithm_of(presets[-1])) if presets else None
    found = [(name, str(f.metadata["help"])) for name, f in keys(algorithm)]
    scorers = [(name, text) for name, text in found if name.startswith(f"{NAMED}NAME.")]
    found = [(name, text) for name, text in found if not name.startswith(NAMED)]
    found += [(name.replace("NAME", scorer), text) for scorer in SCORERS for name, text in scorers]
    if parser is None or parser.rest:
        return found
    return [pair for pair in found if pair[0] in parser.passed or pair[0].split(".")[0] in parser.blocks]


def values(command: str, key: str, before: Sequence[str] = ()) -> list[str]:
    """The values of a key that is a choice, also those in the folder that `before` names; none for others."""
    parser = _parser(command)
    own = {option.name: option for option in fields(parser.options)} if parser is not None else {}  # type: ignore[arg-type]
    if parser is not None and key in own:
        if (command, key) == ("recipes", "name"):
            return shipped("experiment")
        return _choices(get_type_hints(parser.options)[key])
    if key in CHOICES:
        beside = [path.name for path in Path().glob("[!.]*.y*ml")] if key == "experiment" else []
        folder = next((b for a, b in pairwise(before) if a in FOLDER), None)
        there = files_in(key, Path(folder).expanduser()) if folder is not None else []
        return [*shipped(key), *there, *sorted(beside)]
    if key.startswith(NAMED):
        kinds: dict[str, Field[Any]] = {f.name: f for f in fields(ScorerConfig)}
        found = kinds.get(key.rpartition(".")[2])
    else:
        found = dict(keys()).get(key)
    return _choices(found.type) if found is not None else []


def _choices(hint: Any) -> list[str]:
    """The values of a Literal or a bool, also where None is one more."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if type(None) in get_args(hint) else [hint]
    found = []
    for kind in kinds:
        found += list(map(str, get_args(kind))) if get_origin(kind) is Literal else []
        found += ["true", "false"] if kind is bool else []
    return found


def _parser(command: str) -> Parser[Any] | None:
    """The keys of a command; None for training, which has those of the configuration alone."""
    found = getattr(import_module(COMMANDS[command].module), "PARSER", None)
    return found if isinstance(found, Parser) else None


def _brief(text: str) -> str:
    """The first sentence of an explanation, on one line."""
    return textwrap.shorten(text.split(";")[0], 80, placeholder=" ...")
