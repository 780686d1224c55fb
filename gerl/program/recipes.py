"""The experiments that ship with gerl: `gerl recipes [NAME]`."""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.commandline.composition import compose_run, config_folder, experiments
from gerl.commandline.form import either, near_names
from gerl.errors import ConfigError

WIDTH = 110  # characters of a line
COLUMNS = ("name", "model", "algorithm", "reward")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The keys of the command line."""

    name: str | None = key("an experiment; prints its file, to be saved and edited")


PARSER = Parser(
    "recipes",
    "gerl recipes",
    "[NAME]",
    "List the experiments that ship with gerl: model, algorithm preset, reward, and purpose.",
    Request,
    bare="name",
    notes="gerl train experiment=NAME trains one. gerl recipes NAME > mine.yaml creates a copy to edit, which gerl "
    "train experiment=mine.yaml then trains.",
)


class Recipe(NamedTuple):
    """A row of the table of recipes: a shipped experiment and the first sentence of its file."""

    name: str
    model: str
    algorithm: str
    reward: str
    sentence: str


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    return run_command(argv, lambda: PARSER.help(program), run)


def run(arguments: Sequence[str]) -> None:
    """Write the table, or the file of one experiment, to stdout."""
    name = PARSER.parse(arguments)[0].name
    sys.stdout.write(table([recipe(each) for each in experiments()]) if name is None else text_of(name))


def text_of(name: str) -> str:
    """Read the file of a shipped experiment; raises `ConfigError` for an unknown name."""
    if name not in experiments():
        near = near_names(name, experiments())
        hint = f"did you mean {either(near)}?" if near else f"choose one of {', '.join(experiments())}"
        raise ConfigError(f"name={name}: gerl has no such experiment; {hint}")
    return (config_folder() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")


def recipe(name: str) -> Recipe:
    """Compose a shipped experiment into a row; its sentence is the first one of the file's comment."""
    composed = compose_run([f"experiment={name}"])
    reward = ", ".join(composed.config.reward.scorers)
    comment = takewhile(lambda line: line.startswith("# "), text_of(name).splitlines()[1:])  # below @package
    sentence = " ".join(line.removeprefix("# ") for line in comment).partition(". ")[0].removesuffix(".")
    return Recipe(name, composed.config.model.path, composed.preset, reward, f"{sentence}.")


def table(recipes: Sequence[Recipe]) -> str:
    """Format a row for each recipe, with its sentence below."""
    cells = [COLUMNS, *(recipe[: len(COLUMNS)] for recipe in recipes)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines = [rows[0]]
    for row, each in zip(rows[1:], recipes, strict=True):
        lines += ["", row, textwrap.fill(each.sentence, WIDTH, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(lines) + "\n"
