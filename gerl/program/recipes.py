"""The experiments that ship with gerl: `gerl recipes [NAME]`."""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.commandline.composition import experiments
from gerl.commandline.recipes import Recipe, recipe, text_of

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


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    return run_command(argv, lambda: PARSER.help(program), run)


def run(arguments: Sequence[str]) -> None:
    """Write the table, or the file of one experiment, to stdout."""
    name = PARSER.parse(arguments)[0].name
    sys.stdout.write(table([recipe(each) for each in experiments()]) if name is None else text_of(name))


def table(recipes: Sequence[Recipe]) -> str:
    """Format a row for each recipe, with its sentence below."""
    cells = [COLUMNS, *(recipe[: len(COLUMNS)] for recipe in recipes)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines = [rows[0]]
    for row, each in zip(rows[1:], recipes, strict=True):
        lines += ["", row, textwrap.fill(each.sentence, WIDTH, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(lines) + "\n"
