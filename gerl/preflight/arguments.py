"""Look at a run before starting it: `python -m gerl.preflight [experiment=NAME] [key=value ...] [out=FILE.json]`.

It reads the keys first; torch and diffusers are imported after that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.commandline.composition import compose_run
from gerl.config import Config
from gerl.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """The keys of the command line, beside those of a run."""

    out: Path | None = key("the report for machines, a .json file, besides that on the terminal")


PARSER = Parser(
    "the preflight",
    "python -m gerl.preflight [experiment=NAME|FILE.yaml] [key=value ...] [out=FILE.json]",
    "Load the model of a run, draw and train on one prompt, and say whether, and how fast, it can train.",
    Options,
    rest=True,
    notes="The other keys are those of training: python -m gerl.trainer.main_flowgrpo --help all lists them. Neither "
    "rewards nor a prompt file are needed.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 if the configuration can train, otherwise see `run_command`."""
    return run_command(argv, PARSER.help, preflight)


def preflight(arguments: list[str]) -> None:
    """Check the keys, then examine."""
    config, out = parse(arguments)
    from gerl.preflight.command import run

    run(config, out)


def parse(arguments: Sequence[str]) -> tuple[Config, Path | None]:
    """The configuration and the file for the report; raises `ConfigError` for what cannot be."""
    options, overrides = PARSER.parse(arguments)
    config, out = compose_run(overrides).config, options.out
    if out is not None and (out.suffix != ".json" or out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"out={out}: give the path of a .json file in a folder that is there")
    return config, out
